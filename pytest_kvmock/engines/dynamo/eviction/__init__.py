"""Eviction policies, one a module, and what they have in common."""
