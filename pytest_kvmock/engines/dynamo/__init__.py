"""Dynamo's block managers: the newer one on kvbm-logical with its eviction policies, and the hash cache before it."""
