"""Which worker gets a request: what a router is asked, the loads that it is shown, and routers to compare with."""
