"""Shared parts of engines: protocols of managers, drivers and tiers, hashed tokens, groups, links, host time."""
