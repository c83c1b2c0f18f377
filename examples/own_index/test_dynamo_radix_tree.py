"""The index of Dynamo's router itself, plugged in: events go to it as the JSON that it reads.

It needs `pip install 'pytest-kvmock[interop]'`, on Linux; without it this module is skipped.
"""

import pytest

dynamo = pytest.importorskip("dynamo._core", reason="ai-dynamo-runtime is not installed: extra `interop`, Linux only")


class DynamoIndex:
    """`dynamo._core.RadixTree`, behind the two methods that an index has."""

    def __init__(self):
        self.tree = dynamo.RadixTree()

    def apply(self, event):
        self.tree.apply_event(event.worker_id, event.event.to_json().encode())

    def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes)

    def remove_worker(self, worker_id):
        self.tree.remove_worker(worker_id)


@pytest.fixture
def kv_index():
    return DynamoIndex()


@pytest.mark.kvmock(workers=2, num_blocks=8)
def test_it_knows_who_has_what(kv_router, kv_prompt):
    prompt = kv_prompt(blocks=4)
    kv_router.worker(0).serve(prompt)
    kv_router.worker(1).serve(prompt.tokens[:40])
    assert {0: 4, 1: 2} == kv_router.overlap(prompt)

    kv_router.worker(0).serve(kv_prompt(blocks=6))  # evicts the last two
    kv_router.worker(1).restart(announced=True)
    assert {0: 2} == kv_router.overlap(prompt)
