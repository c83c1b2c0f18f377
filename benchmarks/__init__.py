"""The figures that the project promises, measured against their peers: `python -m benchmarks`."""
