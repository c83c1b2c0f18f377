"""The choice of a worker for a request: a router's inputs, the loads that it sees, and routers to compare with."""
