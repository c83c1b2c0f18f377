"""Drivers: what a block manager of each kind needs so that a worker, or a scheduler, can drive it."""
