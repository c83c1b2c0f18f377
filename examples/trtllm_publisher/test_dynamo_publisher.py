"""A router behind Dynamo's publisher agrees with the reference index, but overestimates blocks that moved to the
host.
"""

import pytest
from dynamo_publisher import DynamoPublisher

from pytest_kvmock import BACKENDS, EngineProfile, RadixIndex, RouterHarness, StorageTier

WITH_HOST = BACKENDS["trtllm"].variant("trtllm_with_host", secondary_blocks=16)
TWO_WINDOWS = BACKENDS["trtllm"].variant("trtllm_two_windows", windows=[32, 256])


def served(backend, index):
    """Yield a harness whose worker has served prompts with a common prefix, more than its device holds."""
    kv = RouterHarness(
        EngineProfile(block_size=4, num_blocks=16, workers=1), backend=backend, index=index, sync="every"
    )
    with kv:
        for turn in range(12):
            kv.worker(0).serve([*range(10), *range(turn * 100, turn * 100 + 7 + turn)])
        yield kv


@pytest.mark.parametrize("backend", [BACKENDS["trtllm"], WITH_HOST, TWO_WINDOWS], ids=lambda spec: spec.name)
def test_what_it_lets_through_answers_every_prompt_as_the_events_do(backend):
    for kv in served(backend, DynamoPublisher(RadixIndex(), 4)):
        assert kv.events


def test_a_block_on_the_host_counts_as_one_of_the_device():
    for kv in served(WITH_HOST, None):
        prompt = [*range(10), *range(700, 714)]
        by_tier = {tier: blocks.get(0, 0) for tier, blocks in kv.overlap(prompt, None).items()}
        assert by_tier[StorageTier.HOST_PINNED]
        assert sum(by_tier.values()) == kv.overlap(prompt)[0]
