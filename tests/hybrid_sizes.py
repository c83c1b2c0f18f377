"""Sizes of test worlds that are for any backend: a hybrid model has several caches, which share the blocks."""

from pytest_kvmock.backends import backend_spec

CACHES = 8
"""As many as the most of a built-in model, and one more."""


def caches(backend):
    """How many Stored of one prompt the backend publishes at most: one for each of its caches, or one for all."""
    return CACHES if backend_spec(backend).traits.publishes_groups else 1


def sized(profile, backend):
    """The profile, with blocks that the backend has, and enough of them for all its caches."""
    spec = backend_spec(backend)
    if spec.group is None:
        return profile
    size = spec.default_block_size  # where it is large, another group has blocks as much smaller
    return profile.replace(
        num_blocks=profile.num_blocks * CACHES * (size // 16), block_size=max(profile.block_size, size)
    )
