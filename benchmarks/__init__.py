"""The figures that the project promises, measured beside their peers: `python -m benchmarks`."""
