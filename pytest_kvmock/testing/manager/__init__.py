"""The contracts of block managers and eviction policies."""
