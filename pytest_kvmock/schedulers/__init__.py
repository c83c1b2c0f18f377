"""Schedulers and the arguments of engines, models of how long a pass takes, and the virtual time of hosts."""
