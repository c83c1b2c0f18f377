"""The contract of a router in this process, and a router that fulfils it."""
