"""Files below vLLM's host, on workers and engines of a harness."""

import pytest

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.engines import Tiers

TIERS = {"host": 8, "files": True}
PROMPTS = [list(range(first, first + 27)) for first in (0, 100, 200)]


def harness_of(num_blocks=8, allow=(), **tiers):
    profile = EngineProfile(block_size=4, num_blocks=num_blocks, tiers=Tiers.of({**TIERS, **tiers}))
    return RouterHarness(profile, "vllm", allow=allow, name="files")


def served(worker, prompts):
    """Serve prompts one after the other, with time to write what they store."""
    for prompt in prompts:
        worker.serve(prompt)
        worker.tick(worker.now + 20)


def test_written_blocks_are_read_to_the_host_and_then_to_the_device():
    with harness_of() as kv:
        worker = kv.worker(0)
        served(worker, PROMPTS)
        assert kv.overlap(PROMPTS[0], tier=None) == {"disk": {0: 6}}
        assert worker.storage.reusable(PROMPTS[0]) == 24
        before = kv.events.total
        assert worker.serve(PROMPTS[0]).cached_tokens == 24
        tiers = [str(entry.event.storage_tier) for entry in list(kv.events)[before:]]
        assert tiers.index("host_pinned") < tiers.index("device")


def test_a_deleted_file_causes_a_miss_and_no_event():
    with harness_of() as kv:
        worker = kv.worker(0)
        served(worker, PROMPTS)
        before = kv.events.total
        worker.storage.lose(PROMPTS[0], from_block=2)
        assert kv.events.total == before
        assert kv.overlap(PROMPTS[0], tier="disk") == {0: 6}  # stale: no event reports the deletion
        assert worker.storage.reusable(PROMPTS[0]) == 8
        assert worker.serve(PROMPTS[0]).cached_tokens == 8


def test_a_cold_prompt_waits_one_pass_for_the_file_lookup():
    passes = []
    for files in (False, True):
        profile = EngineProfile(block_size=4, num_blocks=8, tiers=Tiers.of({"host": 8, "files": files}))
        with RouterHarness(profile, "vllm", name="cold") as kv:
            engine = kv.engine(0)
            engine.submit(PROMPTS[0], 1)
            engine.run()
            passes.append(engine.passes)
    assert passes == [1, 2]


def test_a_folder_that_publishes_no_events_still_serves_its_files():
    with harness_of(file_events=False) as kv:
        worker = kv.worker(0)
        served(worker, PROMPTS)
        assert kv.overlap(PROMPTS[0], tier=None) == {}
        assert worker.serve(PROMPTS[0]).cached_tokens == 24


@pytest.mark.parametrize("self_describing", [False, True])
def test_only_events_of_files_have_a_locality(self_describing):
    with harness_of(file_locality="REMOTE", self_describing=self_describing) as kv:
        served(kv.worker(0), PROMPTS[:1])
        found = {(str(each.event.storage_tier), (each.event.extra or {}).get("locality")) for each in kv.events}
        assert found == {("device", None), ("host_pinned", None), ("disk", "REMOTE")}


def test_an_emptied_host_reads_its_chunks_from_the_folder():
    with harness_of(num_blocks=16, host=16, allow=["engine_drift"]) as kv:  # no event reports an emptied host
        worker = kv.worker(0)
        served(worker, PROMPTS[:1])
        worker.manager.clear()
        worker.cancel_transfers()
        assert worker.cached_tokens(PROMPTS[0], tier="host") == 0
        assert worker.serve(PROMPTS[0]).cached_tokens == 24


def test_a_worker_without_storage_or_files_has_no_storage_attribute():
    kv = RouterHarness(EngineProfile(tiers=Tiers.of({"host": 8})), "vllm")
    with pytest.raises(ValueError, match="'storage': True} over sglang, or with 'files': True over vllm"):
        kv.worker(0).storage  # noqa: B018 - what is asked for raises
