"""Dynamo's standalone indexer subscribes to our publishers, in every dialect, with lost and late batches and restarts.

A table records what it decodes and what it recovers. Apart from that, its answers must equal those of an index of sets
that gets the raw stream: the indexer does not count copies.
"""

import pytest
from client_table import TABLE, does
from clients import PATIENCE, Indexer, SetIndex
from peer import dynamo_core, release

dynamo_core("1.3", "1.6")
RELEASE = release()
WORKERS = (0, 1)

UNREAD = "Failed to decode KvEventBatch"


def asked(publisher):
    """Return the rank and the first batch of each requested replay."""
    return sorted((replay.dp_rank, replay.start) for replay in publisher.replays)


def those_that(*what):
    """Run over the dialects with which the installed release does one of these things."""
    dialects = [dialect for dialect in TABLE if does(dialect, RELEASE) in what]
    if not dialects:
        return pytest.mark.skip(f"ai-dynamo-runtime {RELEASE} {' or '.join(what)} with no dialect")
    return pytest.mark.kv_dialects(*dialects)


pytestmark = pytest.mark.kvmock(workers=2, dp_size=2, num_blocks=12)


@pytest.fixture(scope="module")
def indexer(tmp_path_factory):
    indexer = Indexer(tmp_path_factory.mktemp("indexer") / "log")
    yield indexer
    indexer.close()


@pytest.fixture
def model(indexer, kv_profile):
    model = indexer.model(kv_profile.block_size)
    yield model
    model.close()


@pytest.fixture
def fleet(kv_harness, kv_prompt, make_kv_publisher):
    return Fleet(kv_harness, kv_prompt, make_kv_publisher)


class Fleet:
    """Two workers of two ranks, each with its publisher.

    Attributes:
        index: an index of sets that gets all published events.
        arrived: another index, which does not get lost events.
        prompts: the served prompts.
    """

    def __init__(self, harness, make_prompt, make_publisher):
        self.harness, self.make_prompt = harness, make_prompt
        self.publishers = [make_publisher(worker) for worker in WORKERS]
        cleared = "worker" if RELEASE == "1.3" else "rank"
        self.index, self.arrived = SetIndex(harness, cleared), SetIndex(harness, cleared)
        self.prompts = []

    def register(self, model):
        for worker, publisher in zip(WORKERS, self.publishers, strict=True):
            model.register(worker, publisher)

    def serve(self, rounds):
        """Serve wholly or partly new prompts on each rank of each worker, a batch each, with evictions and copies."""
        for number in range(rounds):
            for worker, publisher in zip(WORKERS, self.publishers, strict=True):
                for rank in range(publisher.ranks):
                    before = self.prompts[-5] if number % 2 and len(self.prompts) > 4 else None
                    prompt = self.make_prompt(blocks=1 + number % 3, after=before)
                    self.prompts.append(prompt)
                    with publisher.step():
                        self.harness.worker(worker, dp_rank=rank).serve(prompt)

    def lose(self, rounds):
        """Serve, and lose the batches on the wire."""
        for publisher in self.publishers:
            for rank in range(publisher.ranks):
                publisher.faults.lose(rounds, dp_rank=rank)
        self.arrived.misses = True
        self.serve(rounds)
        self.arrived.misses = False

    def restart(self):
        for worker, publisher in zip(WORKERS, self.publishers, strict=True):
            publisher.restart()
            self.index.forget(worker)
            for rank in range(publisher.ranks):
                self.harness.worker(worker, dp_rank=rank).restart(announced=True)

    def settle(self, model, index):
        """Wait until a client's answers equal those of an index, for all prompts."""
        expected = [index.answer(prompt) for prompt in self.prompts]
        self.publishers[0].settle(lambda: [model.answer(prompt) for prompt in self.prompts], expected, PATIENCE)
        return expected


@those_that("decodes", "recovers")
def test_the_indexer_answers_like_an_index_of_sets(fleet, model):
    fleet.register(model)
    fleet.serve(6)
    expected = fleet.settle(model, fleet.index)
    assert {(worker, rank) for worker in WORKERS for rank in (0, 1)} == {key for answer in expected for key in answer}
    assert fleet.harness.events.removed != []


@those_that("recovers")
def test_the_indexer_recovers_lost_events(fleet, model):
    fleet.register(model)
    fleet.serve(2)
    fleet.lose(2)
    fleet.serve(1)
    fleet.settle(model, fleet.index)
    assert [*map(asked, fleet.publishers)] == [[(0, 2), (1, 2)]] * 2


@those_that("decodes")
def test_lost_events_stay_lost_if_replays_have_a_topic_that_the_indexer_does_not_expect(fleet, model):
    fleet.register(model)
    fleet.serve(2)
    fleet.lose(2)
    fleet.serve(2)
    assert fleet.settle(model, fleet.arrived) != [fleet.index.answer(prompt) for prompt in fleet.prompts]
    assert {*asked(fleet.publishers[0]), *asked(fleet.publishers[1])} == {(0, 2), (1, 2)}  # it did request them


@those_that("-")
def test_the_indexer_cannot_read_hashes_as_bytes_and_requests_the_batches_again(fleet, model):
    failures = model.indexer.log_text().count(UNREAD)
    fleet.register(model)
    fleet.serve(2)
    for publisher in fleet.publishers:
        publisher.settle(lambda each=publisher: asked(each), [(0, 0), (1, 0)], PATIENCE)
    fleet.publishers[0].settle(lambda: model.indexer.log_text().count(UNREAD) >= failures + 4, timeout=PATIENCE)
    assert [model.answer(prompt) for prompt in fleet.prompts] == [{}] * 8


@those_that("recovers")
def test_an_indexer_that_registers_late_recovers_at_the_first_live_batch(fleet, model):
    fleet.serve(3)
    fleet.register(model)
    assert [*map(asked, fleet.publishers)] == [[], []]
    fleet.serve(1)
    fleet.settle(model, fleet.index)
    assert [*map(asked, fleet.publishers)] == [[(0, 0), (1, 0)]] * 2


@those_that("decodes", "recovers")
def test_after_a_restart_the_indexer_drops_batches_up_to_the_old_number_and_keeps_old_blocks(fleet, model):
    fleet.register(model)
    fleet.serve(3)
    fleet.settle(model, fleet.index)
    old, batches = len(fleet.prompts), fleet.publishers[0].batches()
    fleet.arrived.misses = True
    fleet.restart()
    while fleet.publishers[0].batches() < batches:
        fleet.serve(1)
    fleet.arrived.misses = False
    fleet.serve(1)
    expected = fleet.settle(model, fleet.arrived)
    assert [{}] * old == [fleet.index.answer(prompt) for prompt in fleet.prompts[:old]]  # the engines hold none of them
    assert any(expected[:old])
    assert not any(expected[old:-4])
    assert [len(answer) for answer in expected[-4:]] == [1] * 4
    assert [*map(asked, fleet.publishers)] == [[], []]


@those_that("recovers")
@pytest.mark.kvmock(dp_size=1)  # with several ranks, 1.3.1 applies one rank's Cleared in a replay to all ranks
def test_unregistering_and_registering_again_recovers_the_indexer_after_a_restart(fleet, model):
    fleet.register(model)
    fleet.serve(3)
    fleet.settle(model, fleet.index)
    fleet.restart()
    fleet.serve(2)
    for worker in WORKERS:
        model.unregister(worker)
    fleet.register(model)
    fleet.serve(1)
    fleet.settle(model, fleet.index)


@pytest.mark.kv_dialects("vllm-0.24")
@pytest.mark.kvmock(workers=1, dp_size=1, num_blocks=6)
def test_the_indexer_does_not_count_copies(kv_harness, kv_publisher, kv_prompt, model):
    model.register(0, kv_publisher)
    worker, index, prompt = kv_harness.worker(0), SetIndex(kv_harness), kv_prompt(blocks=2)
    first, second = worker.prefill(prompt), worker.prefill(prompt)  # the last block is computed twice
    kv_publisher.settle(lambda: model.answer(prompt), {(0, 0): 2}, PATIENCE)
    first.finish()
    worker.serve(kv_prompt(blocks=4))  # it replaces one of the copies
    assert len(kv_harness.events.removed_blocks) == 1
    kv_publisher.settle(lambda: model.answer(prompt), index.answer(prompt), PATIENCE)
    assert index.answer(prompt) == {(0, 0): 1}
    assert kv_harness.overlap(prompt) == {0: 2}  # the engine has it, and an index that counts finds it
    second.finish()


@pytest.mark.kv_dialects("vllm-0.14", "vllm-0.33")
def test_blocks_of_a_lora_adapter_are_found_only_by_its_name(kv_worker, kv_publisher, kv_prompt, model):
    model.register(0, kv_publisher)
    adapted, plain = kv_prompt(blocks=2, lora_name="french"), kv_prompt(blocks=3)
    kv_worker.serve(adapted)
    kv_worker.serve(plain)
    kv_publisher.settle(lambda: model.answer(plain), {(0, 0): 3}, PATIENCE)
    assert model.answer(adapted, lora_name="french") == {(0, 0): 2}
    assert model.answer(adapted) == {}
    assert model.answer(adapted, lora_name="german") == {}


@pytest.mark.kv_dialects("vllm-0.33")
@pytest.mark.kv_backends("vllm_gpt_oss", "vllm_kimi_k3")
@pytest.mark.kvmock(workers=1, dp_size=1, num_blocks=400)
def test_the_indexer_finds_the_attention_groups_blocks_of_a_hybrid_model(kv_worker, kv_publisher, kv_prompt, model):
    model.register(0, kv_publisher)
    document = kv_prompt(blocks=9)
    for tail in (1, 5):
        with kv_publisher.step():
            kv_worker.serve(kv_prompt(blocks=2, after=document, tail=tail), 20)
    kv_publisher.settle(lambda: model.answer(document), {(0, 0): 9}, PATIENCE)
