"""Schedulers, the arguments of engines, and models of the duration of a pass."""
