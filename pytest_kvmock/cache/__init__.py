"""Block managers and their eviction policies."""
