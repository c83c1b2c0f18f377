"""The contracts of a block manager and of an eviction policy."""
