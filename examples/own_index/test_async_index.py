"""Your own async index: events are queued until the test passes them to the index, in the test's loop.

`await kv_harness.aflush()` passes the queued events to the index, and compares it with the reference index. Events
without a flush fail the test. Any plugin that runs async tests works; here it is anyio's.
"""

import asyncio

import pytest

from pytest_kvmock import RadixIndex
from pytest_kvmock.testing import IndexContract


class QueuedIndex:
    """Queues events, and applies them at a flush."""

    def __init__(self):
        self.queue, self.tree = asyncio.Queue(), RadixIndex()

    async def apply(self, event):
        await self.queue.put(event)

    async def flush(self):
        while not self.queue.empty():
            self.tree.apply(await self.queue.get())

    async def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes)


@pytest.fixture
def kv_index():
    return QueuedIndex()


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.mark.anyio
async def test_it_is_asked_after_a_flush(kv_harness, kv_prompt):
    prompt = kv_prompt(blocks=4)
    kv_harness.worker(0).serve(prompt)
    assert await kv_harness.aoverlap(prompt) == {}

    await kv_harness.aflush()
    assert await kv_harness.aoverlap(prompt) == {0: 4}


class TestQueuedIndex(IndexContract):
    def make_index(self):
        return QueuedIndex()

    def run(self, awaitable):
        return asyncio.run(awaitable)
