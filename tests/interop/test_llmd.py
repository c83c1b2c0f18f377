"""llm-d's client of KV events subscribes to our publishers, in every dialect, if it is built (`llmd_client.py`).

A table records what it decodes. Apart from that, its answers must equal those of an index of sets that gets the raw
stream: the client does not count copies, requests no replay, and merges the ranks of a pod.
"""

import pytest
from clients import SetIndex
from llmd_client import PATIENCE, LlmdClient, llmd_program, topic, version
from llmd_table import DECODERS, TABLE, decodes, finds_lora

from pytest_kvmock import KvCacheEvent, Prompt, Removed, RouterEvent, StorageTier, Stored, block_hashes
from pytest_kvmock.wire import Batch, encode

PROGRAM = llmd_program()
RELEASE = version(PROGRAM)
ENGINES = tuple(engine for release, engine in DECODERS if release == RELEASE)
WORKERS = (0, 1)
FAILED = {"0.5": "Failed to unmarshal event", "0.9": "Failed to parse message"}.get(RELEASE)

if FAILED is None:
    pytest.skip(f"needs llm-d's client of 0.5 or 0.9, this is {RELEASE}", allow_module_level=True)

READABLE = [dialect for dialect in TABLE if decodes(dialect, RELEASE, "vllm")]
WITH_INTEGERS = [dialect for dialect in READABLE if not dialect.endswith("bytes")]
OF_TIERS = [dialect for dialect in WITH_INTEGERS if dialect != "vllm-0.9"]

pytestmark = pytest.mark.kvmock(workers=2, num_blocks=12)


@pytest.fixture
def engine():
    return "vllm"


@pytest.fixture
def client(kv_profile, engine):
    with LlmdClient(PROGRAM, kv_profile.block_size, engine) as client:
        yield client


@pytest.fixture
def fleet(kv_harness, kv_prompt, make_kv_publisher):
    return Fleet(kv_harness, kv_prompt, [make_kv_publisher(worker, topic=topic(worker)) for worker in WORKERS])


class Fleet:
    """Workers, each a pod with its publisher, and an index of sets that gets all their published events."""

    def __init__(self, harness, make_prompt, publishers):
        self.harness, self.make_prompt, self.publishers = harness, make_prompt, publishers
        self.index, self.prompts = SetIndex(harness), []

    def subscribe(self, client):
        for worker, publisher in zip(WORKERS, self.publishers, strict=True):
            client.subscribe(f"pod {worker}", publisher)

    def serve(self, rounds):
        """Serve entirely or partly new prompts on each worker, in a batch each, with evictions and copies."""
        for number in range(rounds):
            for worker, publisher in zip(WORKERS, self.publishers, strict=True):
                before = self.prompts[-3] if number % 2 and len(self.prompts) > 2 else None
                self.prompts.append(self.make_prompt(blocks=1 + number % 3, after=before))
                with publisher.step():
                    self.harness.worker(worker).serve(self.prompts[-1])

    def expected(self):
        return [{worker: blocks for (worker, _), blocks in self.index.answer(each).items()} for each in self.prompts]

    def settle(self, client):
        expected = self.expected()
        self.publishers[0].settle(lambda: [client.answer(prompt) for prompt in self.prompts], expected, PATIENCE)
        return expected


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.kv_dialects(*TABLE)
def test_the_client_answers_like_an_index_of_sets_or_reads_nothing(fleet, client, kv_dialect, engine):
    fleet.subscribe(client)
    fleet.serve(9)
    assert fleet.harness.events.removed
    if decodes(kv_dialect, RELEASE, engine):
        expected = fleet.settle(client)
        assert {worker for answer in expected for worker in answer} == set(WORKERS)
    else:
        batches = sum(publisher.batches() for publisher in fleet.publishers)
        fleet.publishers[0].settle(lambda: client.log_text().count(FAILED) >= batches, timeout=PATIENCE)
        assert [{}] * len(fleet.prompts) == [client.answer(prompt) for prompt in fleet.prompts]


@pytest.mark.kv_dialects(*READABLE)
def test_since_0_9_the_client_applies_a_cleared(fleet, client):
    fleet.subscribe(client)
    fleet.serve(2)
    before = fleet.settle(client)
    assert fleet.harness.worker(0).clear()
    marker = fleet.make_prompt(blocks=1)  # a pod's batches are applied in order
    fleet.harness.worker(0).serve(marker)
    fleet.publishers[0].settle(lambda: client.answer(marker), {0: 1}, PATIENCE)
    answers = [client.answer(prompt) for prompt in fleet.prompts]
    assert before != fleet.expected()
    assert (before if RELEASE == "0.5" else fleet.expected()) == answers


@pytest.mark.kv_dialects(*READABLE)
def test_lost_events_stay_lost_and_old_blocks_stay_after_a_restart(fleet, client, kv_prompt, kv_dialect):
    publisher, worker = fleet.publishers[0], fleet.harness.worker(0)
    early, first, lost, last, new = (kv_prompt(blocks=2) for _ in range(5))
    worker.serve(early)
    fleet.subscribe(client)
    worker.serve(first)
    publisher.faults.lose()
    worker.serve(lost)
    worker.serve(kv_prompt(blocks=1, after=lost))  # its parent did not arrive
    worker.serve(last)
    publisher.settle(lambda: client.answer(last), {0: 2}, PATIENCE)
    assert [client.answer(prompt) for prompt in (early, first, lost)] == [{}, {0: 2}, {}]
    publisher.restart()
    worker.restart(announced=True)
    worker.serve(new)
    publisher.settle(lambda: client.answer(new), {0: 2}, PATIENCE)
    cleared = kv_dialect.startswith("sglang")  # SGLang publishes at its start that its cache is empty
    assert ({} if cleared else {0: 2}) == client.answer(first)
    assert publisher.replays == []


@pytest.mark.kv_dialects(*READABLE)
def test_blocks_of_an_adapter_are_found_by_its_name_if_no_extra_key_has_it(fleet, client, kv_prompt, kv_dialect):
    fleet.subscribe(client)
    worker, publisher = fleet.harness.worker(0), fleet.publishers[0]
    adapted, marker = kv_prompt(blocks=2, lora_name="french"), kv_prompt(blocks=1)
    worker.serve(adapted)
    worker.serve(marker)
    publisher.settle(lambda: client.answer(marker), {0: 1}, PATIENCE)
    assert ({0: 2} if finds_lora(kv_dialect, RELEASE) else {}) == client.answer(adapted, model="french")


@pytest.mark.skipif(RELEASE == "0.5", reason="0.5 reads no dialect that has extra keys")
@pytest.mark.kv_dialects("vllm-0.19", "vllm-0.33")
def test_an_adapter_name_among_the_extra_keys_hides_its_blocks(fleet, client, kv_prompt, kv_profile):
    size, publisher = kv_profile.block_size, fleet.publishers[0]
    prompt, hidden = kv_prompt(blocks=1), kv_prompt(blocks=1)
    fleet.subscribe(client)
    for block, each, key in ((2**40, hidden, ("french",)), (2**41, prompt, None)):
        stored = Stored(None, (block,), tuple(each.block_hashes(size)))
        extra = {"lora_name": "french", "extra_keys": [key]}
        publisher.publish(stored, token_ids=(tuple(each.tokens),), extra=extra)
    publisher.settle(lambda: client.answer(prompt, model="french"), {0: 1}, PATIENCE)
    assert client.answer(hidden, model="french") == {}


@pytest.mark.kv_dialects(*OF_TIERS)
def test_each_tier_of_a_block_is_removed_separately(fleet, client, kv_prompt, kv_profile):
    size, publisher, prompt = kv_profile.block_size, fleet.publishers[0], kv_prompt(blocks=2)
    tokens = tuple(prompt.tokens[start : start + size] for start in range(0, 2 * size, size))
    stored = Stored(None, (2**40, 2**40 + 1), tuple(prompt.block_hashes(size)))
    fleet.subscribe(client)
    publisher.publish(stored, StorageTier.HOST_PINNED, tokens)
    publisher.publish(stored, StorageTier.DEVICE, tokens)
    publisher.publish(Removed((2**40 + 1,)))
    publisher.settle(lambda: [client.answer(prompt, tiers={"gpu"}), client.answer(prompt)], [{0: 1}, {0: 2}], PATIENCE)
    publisher.publish(Removed((2**40 + 1,)), StorageTier.HOST_PINNED)
    publisher.settle(lambda: client.answer(prompt), {0: 1}, PATIENCE)


@pytest.mark.kv_dialects(*WITH_INTEGERS)
def test_small_ids_are_refused_unless_a_publisher_widens_them(fleet, client, kv_prompt, kv_dialect, kv_profile):
    size, publisher = kv_profile.block_size, fleet.publishers[0]
    raw, child, widened = kv_prompt(blocks=3), kv_prompt(blocks=1), kv_prompt(blocks=4)

    def stored(parent, blocks, tokens):
        pieces = tuple(tuple(tokens[start : start + size]) for start in range(0, len(tokens), size))
        return Stored(parent, blocks, tuple(block_hashes(tokens, size))), pieces

    def publish_as_they_are(data, tokens):
        event = RouterEvent(0, KvCacheEvent(0, data), StorageTier.DEVICE, tokens)
        publisher.publish_payload(encode(Batch([event], 0.0, 0), kv_dialect))

    fleet.subscribe(client)
    publish_as_they_are(*stored(None, (0, 1, 5), raw.tokens))
    publish_as_they_are(*stored(300, (2**40,), child.tokens))
    for parent, blocks, tokens in (
        (None, (0, 1, 5), widened.tokens[: 3 * size]),
        (5, (300,), widened.tokens[3 * size :]),
    ):
        data, pieces = stored(parent, blocks, tokens)
        publisher.publish(data, token_ids=pieces)
    publisher.settle(lambda: client.answer(widened), {0: 4}, PATIENCE)
    assert [client.answer(raw), client.answer(child)] == [{}, {}]
    for form in ("int8", "uint16"):
        assert f"unsupported hash type: {form}" in client.log_text()


@pytest.mark.skipif(RELEASE == "0.5", reason="0.5 ignores a Cleared")
@pytest.mark.kv_dialects("vllm-0.14")
@pytest.mark.kvmock(workers=2, dp_size=2, num_blocks=12)
def test_the_client_keeps_one_cache_for_all_ranks_of_a_pod(fleet, client, kv_prompt):
    fleet.subscribe(client)
    publisher, prompt, marker = fleet.publishers[0], kv_prompt(blocks=2), kv_prompt(blocks=1)
    first, second = fleet.harness.worker(0, dp_rank=0), fleet.harness.worker(0, dp_rank=1)
    first.serve(prompt)
    publisher.settle(lambda: client.answer(prompt), {0: 2}, PATIENCE)
    second.serve(prompt)
    assert second.clear()
    second.serve(marker)
    publisher.settle(lambda: client.answer(marker), {0: 1}, PATIENCE)
    assert fleet.harness.overlap(prompt) == {(0, 0): 2}  # rank 0 has it
    assert client.answer(prompt) == {}


# ------------------------------------------------------------------------------------------------- hybrid models

HYBRID = [dialect for dialect in WITH_INTEGERS if dialect == "vllm-0.33"]
of_hybrid_models = pytest.mark.skipif(not HYBRID, reason=f"{RELEASE} does not read vllm-0.33")


@of_hybrid_models
@pytest.mark.kv_dialects(*HYBRID)
@pytest.mark.kv_backends("vllm_gpt_oss", "vllm_qwen3_next")
@pytest.mark.kvmock(workers=2, num_blocks=400)
def test_a_stored_without_hashes_ends_the_clients_process(fleet, client, kv_prompt):
    fleet.subscribe(client)
    worker, prompt = fleet.harness.worker(0), kv_prompt(blocks=20, tail=1)
    worker.serve(prompt)
    fleet.publishers[0].settle(lambda: client.answer(prompt), {0: 20}, PATIENCE)
    worker.serve(prompt, 20)  # windows and states keep nothing of a block that output fills
    fleet.publishers[0].settle(lambda: client.has_ended, timeout=PATIENCE)
    fleet.publishers[0].settle(lambda: "index out of range [0] with length 0" in client.log_text(), timeout=PATIENCE)


@of_hybrid_models
@pytest.mark.kv_dialects(*HYBRID)
@pytest.mark.kv_backends("vllm_qwen3_next")
@pytest.mark.kvmock(workers=2, num_blocks=400)
def test_the_client_finds_blocks_that_the_attention_group_has_removed(fleet, client, kv_prompt):
    fleet.subscribe(client)
    worker, prompt, marker = fleet.harness.worker(0), kv_prompt(blocks=20, tail=1), kv_prompt(blocks=1, tail=1)
    worker.serve(prompt)
    while fleet.harness.overlap(prompt) == {0: 20}:
        worker.serve(kv_prompt(blocks=5, tail=1))
    worker.serve(marker)
    fleet.publishers[0].settle(lambda: client.answer(marker), {0: 1}, PATIENCE)
    assert fleet.harness.overlap(prompt)[0] < client.answer(prompt)[0]


# ------------------------------------------------------------------------------------- vLLM's native offload

FIRST, SECOND = [*range(100, 118)], [*range(200, 236)]


def offloading(num_blocks=12, **form):
    """Run a test over a worker with a host tier, to which blocks travel one millisecond each."""
    tiers = {"host": 16, "gbps": 1.0, "bytes_per_token": 250_000, **form}
    marks = [
        pytest.mark.kv_dialects("vllm-0.33"),
        pytest.mark.kvmock(num_blocks=num_blocks, block_size=4, tiers=tiers),
        pytest.mark.skipif(RELEASE == "0.5", reason="0.5 does not read the dialect"),
    ]

    def marked(test):
        for mark in marks:
            test = mark(test)
        return test

    return marked


class Offloading:
    """Worker 0 of a fleet, which copies to its host, and a client of its events."""

    def __init__(self, fleet, client):
        self.harness, self.publisher, self.client = fleet.harness, fleet.publishers[0], client
        fleet.subscribe(client)

    def serve(self, prompt, ms=20.0):
        worker = self.harness.worker(0)
        with self.publisher.step():
            worker.serve(prompt)
        with self.publisher.step():
            worker.tick(worker.now + ms)

    def settles(self, prompt, device, host, either):
        """Wait until the client finds these leading blocks of a prompt on the device, on the host, and on either."""

        def answer():
            asked = ({"gpu"}, {"cpu"}, None)
            return tuple(self.client.answer(Prompt(prompt), tiers=tiers).get(0, 0) for tiers in asked)

        self.publisher.settle(answer, (device, host, either), PATIENCE)

    def truth(self, prompt):
        found = self.harness.overlap(prompt, tier=None)
        return tuple(found.get(tier, {}).get(0, 0) for tier in ("device", "host_pinned"))


@pytest.fixture
def offload(fleet, client):
    return Offloading(fleet, client)


@offloading()
def test_a_location_adds_a_tier_to_a_known_block(offload):
    offload.serve(FIRST)
    offload.settles(FIRST, 4, 4, 4)
    offload.serve(SECOND)
    assert offload.truth(FIRST) == (3, 1)
    offload.settles(FIRST, 3, 4, 4)


@offloading(num_blocks=5)
def test_a_location_after_the_removed_of_the_device_is_lost(offload):
    offload.serve(FIRST, ms=0.0)
    offload.serve(SECOND[:16])  # it takes blocks that are being copied: Removed and location are in one batch
    offload.settles(SECOND[:16], 4, 4, 4)
    device, host = offload.truth(FIRST)
    assert device + host == 4
    offload.settles(FIRST, device, device, device)


@offloading(self_describing=True)
def test_self_describing_events_are_read_like_other_stored_events(offload):
    offload.serve(FIRST)
    offload.serve(SECOND)
    assert offload.truth(FIRST) == (3, 1)
    offload.settles(FIRST, 3, 4, 4)
    assert offload.harness.worker(0).clear()
    offload.serve(SECOND)
    assert offload.truth(FIRST) == (0, 4)  # a Cleared is only of the device, but the client applies it to all tiers
    offload.settles(FIRST, 0, 0, 0)


@offloading(chunk=2)
def test_the_client_finds_no_location_of_a_chunk_because_only_its_last_block_is_named(offload):
    offload.serve(FIRST)
    offload.serve([*range(300, 345)])
    assert offload.truth(FIRST) == (0, 4)
    offload.settles(FIRST, 0, 0, 0)


@offloading(chunk=2, self_describing=True)
def test_the_client_counts_part_of_a_chunk(offload):
    offload.serve(FIRST)
    offload.serve(SECOND)
    assert offload.truth(FIRST) == (3, 0)  # one block of a chunk of two is not loaded
    offload.settles(FIRST, 3, 4, 4)
