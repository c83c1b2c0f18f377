"""The same tokens with another LoRA adapter are other blocks; the router hashes only tokens, and finds no block."""

import pytest
from sound_index import HashIndex

from pytest_kvmock import Prompt, block_hashes
from pytest_kvmock.fleets import FleetRequest


class MostCached:
    def __init__(self):
        self.index = HashIndex()

    def overlap(self, request):
        local_hashes = block_hashes(request.tokens, request.block_size)  # without request.lora_name
        return {worker: blocks for (worker, _), blocks in self.index.find_matches(local_hashes).items()}

    def pick(self, request, candidates):
        held = self.overlap(request)
        return max(candidates, key=lambda each: (held.get(each.worker, 0), -each.active_requests)).worker

    def apply(self, event):
        self.index.apply(event)


@pytest.fixture
def kv_router():
    return MostCached()


@pytest.mark.kvmock(workers=2)
def test_an_adapter_is_part_of_a_prompt(kv_fleet):
    kv_fleet.run([FleetRequest(Prompt(range(64), lora_name="sql"), 4, 400.0 * at) for at in range(3)])
