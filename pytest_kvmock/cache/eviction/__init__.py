"""Eviction policies: which of the inactive blocks goes next."""
