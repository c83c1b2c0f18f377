"""Test worlds that are for any backend: a hybrid model has several caches, which share the blocks."""

from depth import few

from pytest_kvmock import BACKENDS, create_manager
from pytest_kvmock.engines import backend_spec

HYBRID = [name for name, spec in BACKENDS.items() if spec.group == "hybrid"]

PLAIN = [name for name in BACKENDS if name not in HYBRID]

EACH = [*PLAIN, *few(HYBRID, 7)]
"""Every backend; of those of hybrid models in a quick run every other one."""

CACHES = 8
"""As many as the most of a built-in model, and one more."""


def caches(backend):
    """How many Stored of one prompt the backend publishes at most: one for each of its caches, or one for all."""
    return CACHES if backend_spec(backend).traits.publishes_groups else 1


def block_size_of(backend, asked):
    """So many tokens a block; or if the backend has no such blocks, as many as it has at least."""
    try:
        create_manager(backend, num_blocks=1, block_size=asked)
    except ValueError:
        return backend_spec(backend).default_block_size
    return asked


def sized(profile, backend):
    """The profile, with blocks that the backend has, and enough of them for all its caches."""
    if backend_spec(backend).group is None:
        return profile
    size = block_size_of(backend, profile.block_size)
    return profile.replace(num_blocks=profile.num_blocks * blocks_a_block(backend, size), block_size=size)


def blocks_a_block(backend, block_size):
    """How many blocks of all caches there are at most for one of so many tokens in the attention group."""
    geometry = getattr(create_manager(backend, num_blocks=1, block_size=block_size), "geometry", None)
    groups = getattr(geometry, "groups", ())  # SGLang's have parts
    return max(CACHES, sum(block_size // group.block_size for group in groups))
