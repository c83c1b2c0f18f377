"""Sizes of tests over any backend: a hybrid model has several caches, which share the blocks."""

from depth import few

from pytest_kvmock import BACKENDS, create_manager
from pytest_kvmock.engines import backend_spec

HYBRID = [name for name, spec in BACKENDS.items() if spec.group == "hybrid"]

PLAIN = [name for name in BACKENDS if name not in HYBRID]

EACH = [*PLAIN, *few(HYBRID, 7)]
"""Every backend; in a quick run only some of those of hybrid models."""

CACHES = 8
"""One more than the most caches of a built-in model."""


def caches(backend):
    """Return how many Stored of one prompt the backend publishes at most: one for each of its caches, or one in all."""
    return CACHES if backend_spec(backend).traits.publishes_groups else 1


def block_size_of(backend, asked):
    """Return this block size, or the backend's default if it does not support the size."""
    try:
        create_manager(backend, num_blocks=1, block_size=asked)
    except ValueError:
        return backend_spec(backend).default_block_size
    return asked


def sized(profile, backend):
    """Return the profile with a block size that the backend has, and with enough blocks for all its caches."""
    if backend_spec(backend).group is None:
        return profile
    size = block_size_of(backend, profile.block_size)
    return profile.replace(num_blocks=profile.num_blocks * blocks_a_block(backend, size), block_size=size)


def blocks_a_block(backend, block_size):
    """Return how many blocks all caches need, at most, for one block of this size in the attention group."""
    geometry = getattr(create_manager(backend, num_blocks=1, block_size=block_size), "geometry", None)
    groups = getattr(geometry, "groups", ())  # SGLang's have parts
    return max(CACHES, sum(block_size // group.block_size for group in groups))
