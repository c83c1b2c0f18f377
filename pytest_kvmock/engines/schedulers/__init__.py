"""Schedulers and the arguments of engines, and models of how long a pass takes."""
