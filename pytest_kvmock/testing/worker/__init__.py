"""The contract of the workers of a backend."""
