"""The contract of a router that is a process of its own."""
