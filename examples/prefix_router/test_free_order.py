"""The evictions of a backend when blocks are freed root first.

Schedulers free a request's blocks tail first, and then `lineage` and `lru` publish the same events. A manager that is
driven by hand may free them in any order. `lineage` evicts only leaves, so that a prefix stays cached; `lru` evicts the
block that was freed first, here the head, and the rest is useless for a router. So does `multi_lru` among blocks that
were seen equally seldom.
"""

import pytest
from prefix_router import HashIndex

from pytest_kvmock import Prompt

pytestmark = pytest.mark.kvmock(num_blocks=4)

PROMPT = [1, 2, 3, 4]
"""Blocks of a prompt. In moves made by hand, any number can be a block's name and local hash."""


@pytest.fixture
def kv_index():
    return HashIndex()


def test_a_backend_decides_what_goes_first(kv_manager, kv_events, kv_backend):
    kv_manager.use(PROMPT)
    kv_manager.deref(1, 2, 3, 4)  # root first

    kv_manager.use([5, 6])

    removed = {"lineage": [4, 3], "lru": [1, 2], "multi_lru": [1, 2]}
    assert removed[kv_backend] == kv_events.removed_blocks


def test_it_decides_whether_the_router_can_use_the_rest(kv_harness, kv_backend):
    manager = kv_harness.worker(0).manager
    manager.use(PROMPT)
    manager.deref(1, 2, 3, 4)

    manager.use([5, 6])

    overlap = {"lineage": {0: 2}, "lru": {}, "multi_lru": {}}
    assert overlap[kv_backend] == kv_harness.overlap(Prompt(hashes=PROMPT))


@pytest.mark.kv_backends("lineage")  # for the test; its workers have their own backends
@pytest.mark.parametrize(
    ("freed", "same"), [((4, 3, 2, 1), True), ((1, 2, 3, 4), False)], ids=["tail first", "root first"]
)
def test_two_backends_say_the_same_only_if_the_tail_is_freed_first(make_kv_manager, kv_events, freed, same):
    streams = []
    for backend in ("lineage", "lru"):
        manager = make_kv_manager(backend)
        manager.use(PROMPT)
        manager.deref(freed)
        manager.use([5, 6])
        streams.append([event.data for event in kv_events.stored + kv_events.removed])
        kv_events.clear()

    assert same == (streams[0] == streams[1])
