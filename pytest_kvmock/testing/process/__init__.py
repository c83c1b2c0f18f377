"""The contract of a router that runs as a separate process."""
