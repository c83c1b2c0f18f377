"""Eviction policies, one a module."""
