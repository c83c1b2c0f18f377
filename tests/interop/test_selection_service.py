"""Dynamo's SelectionService, a router within the process, subscribes to our publishers: its overlaps, and the workers
that it selects.
"""

import pytest
import pytest_asyncio
from client_table import TABLE, does
from clients import PATIENCE, SetIndex
from peer import dynamo_core, release

from pytest_kvmock import Prompt, Removed, Stored
from pytest_kvmock.values.prompt_keys import group_of

core = dynamo_core("1.3", "1.6")
RELEASE = release()
MODEL = "model"

pytestmark = [pytest.mark.asyncio, pytest.mark.kvmock(workers=2, num_blocks=16)]


def those_that(*what):
    """Run a test over the dialects with these entries in the table; the indexer and this service read the same."""
    return pytest.mark.kv_dialects(*(name for name in TABLE if does(name, RELEASE) in what))


class Service:
    """A SelectionService that knows the workers of a harness."""

    def __init__(self):
        self._service = core.SelectionService(indexer_threads=1)
        self._known = []

    async def add(self, worker, publisher, block_size):
        record = {
            "worker_id": worker,
            "model_name": MODEL,
            "block_size": block_size,
            "endpoint": f"http://127.0.0.1:{worker + 1}",  # required, but never called
            "kv_events_endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "max_num_batched_tokens": 8192,  # 1.3 schedules no worker without it
        }
        assert (await self._service.upsert_worker(record))["lifecycle"] == "schedulable"
        self._known.append(worker)
        await publisher.await_subscribed(timeout=PATIENCE)

    async def answer(self, prompt):
        """Return the leading blocks of a prompt that each worker and rank holds on the device."""
        found = await self._service.overlap_scores({"model_name": MODEL, "token_ids": list(prompt.tokens)})
        return {
            (row["worker_id"], row["dp_rank"]): row["device_blocks"] for row in found["workers"] if row["device_blocks"]
        }

    async def answer_below(self, prompt):
        """Return the leading blocks of a prompt on worker 0's device, and the blocks by which its host extends them."""
        found = await self._service.overlap_scores({"model_name": MODEL, "token_ids": list(prompt.tokens)})
        rows = [row for row in found["workers"] if not row["worker_id"]]
        return tuple(sum(row[name] for row in rows) for name in ("device_blocks", "host_pinned_extension_blocks"))

    async def select(self, prompt):
        return (await self._service.select({"model_name": MODEL, "token_ids": list(prompt.tokens)}))["worker_id"]

    async def __aenter__(self):
        return self

    async def __aexit__(self, *raised):
        for worker in self._known:
            await self._service.delete_worker(worker)
        self._service.shutdown()


@pytest.fixture
def publishers(make_kv_publisher):
    return [make_kv_publisher(worker) for worker in (0, 1)]


@those_that("decodes", "recovers")
async def test_the_service_answers_like_an_index_of_sets_and_selects_the_worker_with_the_prefix(
    publishers, kv_harness, kv_prompt
):
    index, prompts = SetIndex(kv_harness), [kv_prompt(blocks=1 + number % 4) for number in range(18)]
    async with Service() as service:
        for worker, publisher in enumerate(publishers):
            await service.add(worker, publisher, kv_harness.profile.block_size)
        for number, prompt in enumerate(prompts):
            with publishers[number % 2].step():
                kv_harness.worker(number % 2).serve(prompt)

        async def answers():
            return [await service.answer(prompt) for prompt in prompts]

        expected = [index.answer(prompt) for prompt in prompts]
        await publishers[0].asettle(answers, expected, PATIENCE)
        assert [await service.select(prompt) for prompt in prompts[-2:]] == [0, 1]
    assert expected[-2:] == [{(0, 0): 1}, {(1, 0): 2}]
    assert kv_harness.events.removed != []


@those_that("decodes", "recovers")
async def test_the_service_requests_lost_events(publishers, kv_harness, kv_prompt):
    prompts = [kv_prompt(blocks=2) for _ in range(3)]
    async with Service() as service:
        await service.add(0, publishers[0], kv_harness.profile.block_size)
        for prompt in prompts:
            if prompt is prompts[1]:
                publishers[0].faults.lose()
            with publishers[0].step():
                kv_harness.worker(0).serve(prompt)

        async def answers():
            return [await service.answer(prompt) for prompt in prompts]

        recovers = does(publishers[0].dialect.name, RELEASE) == "recovers"
        expected = [{(0, 0): 2}, {(0, 0): 2} if recovers else {}, {(0, 0): 2}]
        await publishers[0].asettle(answers, expected, PATIENCE)
    assert [replay.start for replay in publishers[0].replays] == [1]


@those_that("-")
async def test_the_service_cannot_read_hashes_as_bytes_and_requests_the_batches_again(
    publishers, kv_harness, kv_prompt
):
    prompts = [kv_prompt(blocks=2) for _ in range(3)]
    async with Service() as service:
        await service.add(0, publishers[0], kv_harness.profile.block_size)
        for prompt in prompts:
            with publishers[0].step():
                kv_harness.worker(0).serve(prompt)

        async def asked():
            return [replay.start for replay in publishers[0].replays]

        await publishers[0].asettle(asked, [0, 0], PATIENCE)
        assert [await service.answer(prompt) for prompt in prompts] == [{}] * 3


# ------------------------------------------------------------------------------------------------- hybrid models


@pytest.mark.kv_dialects("vllm-0.33")
@pytest.mark.kv_backends("vllm_gpt_oss", "vllm_qwen3_next", "vllm_kimi_k3", "vllm_deepseek_v4")
@pytest.mark.kvmock(workers=2, num_blocks=2000)
async def test_the_service_finds_the_attention_groups_blocks_of_a_hybrid_model(publishers, kv_harness, kv_prompt):
    document = kv_prompt(blocks=9)
    prompts = [kv_prompt(blocks=1 + number % 3, after=document, tail=1) for number in range(6)]
    async with Service() as service:
        for worker, publisher in enumerate(publishers):
            await service.add(worker, publisher, kv_harness.profile.block_size)
        for number, prompt in enumerate(prompts):
            with publishers[number % 2].step():
                kv_harness.worker(number % 2).serve(prompt, 20)  # windows and states name no block that output fills

        async def answers():
            return [
                {worker: blocks for (worker, _), blocks in (await service.answer(each)).items()} for each in prompts
            ]

        await publishers[0].asettle(answers, [kv_harness.overlap(prompt) for prompt in prompts], PATIENCE)
    assert all(kv_harness.reusable(document).get(worker) != 9 * kv_harness.profile.block_size for worker in (0, 1))


def of_attention(kv_harness, kind):
    """Return the events of this kind from the attention group."""
    group = kv_harness.inside.streams[0, 0].group_idx
    events = [each.event for each in kv_harness.events]
    return [each.event.data for each in events if isinstance(each.event.data, kind) and group_of(each.extra) == group]


@pytest.mark.kv_dialects("vllm-0.33")
@pytest.mark.kv_backends("vllm_gpt_oss", "vllm_qwen3_next")
@pytest.mark.kvmock(workers=1, num_blocks=110)
async def test_the_service_counts_no_copies_but_hybrid_models_make_them_when_they_recompute(
    make_kv_publisher, kv_harness, kv_prompt
):
    publisher, worker, size = make_kv_publisher(0), kv_harness.worker(0), kv_harness.profile.block_size
    document = kv_prompt(blocks=16)
    async with Service() as service:
        await service.add(0, publisher, size)
        for _ in range(2):  # the second request computes the document again, and stores a copy
            with publisher.step():
                worker.serve(kv_prompt(blocks=1, after=document, tail=1))
        asked = kv_prompt(blocks=1, after=document, tail=1)
        assert {0: 16 * size} == kv_harness.reusable(asked)
        last = of_attention(kv_harness, Stored)[0].block_hashes[15]
        while not any(last in data.block_hashes for data in of_attention(kv_harness, Removed)):
            with publisher.step():
                worker.serve(kv_prompt(blocks=2, tail=1))

        async def answer():
            return (await service.answer(asked)).get((0, 0), 0) < 16

        await publisher.asettle(answer, timeout=PATIENCE)
        assert kv_harness.overlap(asked) == {0: 16}
        assert {0: 16 * size} == kv_harness.reusable(asked)  # the engine would reuse it, but the service does not know


# ------------------------------------------------------------------------------------- vLLM's native offload

FIRST, SECOND, LONGER = [*range(100, 118)], [*range(200, 236)], [*range(300, 345)]


def offloading(**form):
    """Run a test over workers with a host tier, to which blocks travel one millisecond each; only with the newest
    dialect and service.
    """
    tiers = {"host": 16, "gbps": 1.0, "bytes_per_token": 250_000, **form}
    marks = [
        pytest.mark.kv_dialects("vllm-0.33"),
        pytest.mark.kvmock(num_blocks=12, block_size=4, tiers=tiers),
        pytest.mark.skipif(RELEASE != "1.6", reason="hosts are tried with ai-dynamo-runtime 1.6"),
    ]

    def marked(test):
        for mark in marks:
            test = mark(test)
        return test

    return marked


class Offloading:
    """Worker 0 of a harness, which copies to its host, and the service that gets its events."""

    def __init__(self, service, harness, publisher):
        self.service, self.harness, self.publisher = service, harness, publisher

    def serve(self, prompt):
        worker = self.harness.worker(0)
        with self.publisher.step():
            worker.serve(prompt)
        with self.publisher.step():
            worker.tick(worker.now + 20.0)

    async def settles(self, prompts, expected):
        """Wait until the service answers with these blocks on the device, and blocks by which the host extends them."""

        async def answers():
            return [await self.service.answer_below(prompt) for prompt in map(Prompt, prompts)]

        await self.publisher.asettle(answers, expected, PATIENCE)

    def truth(self, prompt):
        found = self.harness.overlap(prompt, tier=None)
        return tuple(found.get(tier, {}).get(0, 0) for tier in ("device", "host_pinned"))


@pytest_asyncio.fixture
async def offload(publishers, kv_harness):
    async with Service() as service:
        await service.add(0, publishers[0], kv_harness.profile.block_size)
        yield Offloading(service, kv_harness, publishers[0])


@offloading()
async def test_the_service_ignores_locations_and_finds_nothing_below_the_device(offload):
    offload.serve(FIRST)
    await offload.settles([FIRST], [(4, 0)])
    offload.serve(SECOND)
    assert offload.truth(FIRST) == (3, 1)
    await offload.settles([FIRST, SECOND], [(3, 0), (9, 0)])
    offload.serve(FIRST)  # a loaded block is a Stored of the device like any other
    await offload.settles([FIRST], [(4, 0)])


@offloading(self_describing=True)
async def test_the_service_reads_self_describing_events_like_an_index_of_sets_in_each_tier(offload, kv_harness):
    index, prompts = SetIndex(kv_harness), [FIRST, SECOND, LONGER, FIRST[:8] + SECOND]
    for number in (0, 1, 3, 0, 2, 1, 3, 3, 0):
        offload.serve(prompts[number])
        expected = [index.answer_below(Prompt(prompt)) for prompt in prompts]
        await offload.settles(prompts, expected)
    assert any(below for _, below in expected)


@offloading(self_describing=True, chunk=2)
async def test_the_service_counts_part_of_a_chunk(offload):
    offload.serve(FIRST)
    offload.serve(SECOND)
    assert offload.truth(FIRST) == (3, 0)  # one block of a chunk of two is not loaded
    await offload.settles([FIRST], [(3, 1)])


@offloading(self_describing=True)
async def test_a_cleared_empties_the_host_too_in_the_service(offload, kv_harness):
    offload.serve(FIRST)
    await offload.settles([FIRST], [(4, 0)])
    assert kv_harness.worker(0).clear()
    offload.serve(SECOND)
    await offload.settles([SECOND], [(9, 0)])
    assert offload.truth(FIRST) == (0, 4)
    await offload.settles([FIRST], [(0, 0)])
