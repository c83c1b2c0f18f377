"""Backends that are not prefix-closed: the reference index can be wrong there, and errors of an engine are reported."""

from collections import Counter

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvmock import (
    EngineProfile,
    EventRulesBroken,
    OutOfBlocks,
    RadixIndex,
    Removed,
    RouterHarness,
    Stored,
    sequence_hashes,
)
from pytest_kvmock.fleets import MOONCAKE_BLOCK_SIZE, read_mooncake

LOCALS = (11, 12, 13)
CHAIN = tuple(sequence_hashes(LOCALS))
FAULTS = {"wrong_hash", "evicted_and_restored"}


class Scripted:
    """Returns a given number of blocks for prompts that begin with the chain, otherwise the reference's answer."""

    def __init__(self):
        self.tree, self.blocks, self.by_rank = RadixIndex(), None, True

    def apply(self, event):
        self.tree.apply(event)
        self.worker_id = event.worker_id

    def find_matches(self, hashes):
        scores = self.tree.find_matches(hashes).scores
        if tuple(hashes[:3]) == LOCALS and self.blocks is not None:
            scores = {(self.worker_id, 0): self.blocks}
        return scores if self.by_rank else {worker: blocks for (worker, _), blocks in scores.items()}


def a_hole_that_is_filled(sink):
    """Remove the middle of a chain and store it again; the reference has lost the blocks after it."""
    sink(Stored(None, CHAIN, LOCALS))
    sink(Removed(CHAIN[1:2]))
    sink(Stored(CHAIN[0], CHAIN[1:2], LOCALS[1:2]))


def a_link_to_a_descendant(sink):
    """Do the same, but store the middle under the block after it: a Use's anchor follows a hit (Dynamo 1.2.1)."""
    sink(Stored(None, CHAIN, LOCALS))
    sink(Removed(CHAIN[1:2]))
    sink(Stored(CHAIN[2], CHAIN[1:2], LOCALS[1:2]))


@pytest.mark.parametrize("by_rank", [True, False], ids=["by rank", "by worker"])
@pytest.mark.parametrize(
    ("story", "least"), [(a_hole_that_is_filled, 2), (a_link_to_a_descendant, 1)], ids=["hole", "link"]
)
def test_an_answer_between_the_reference_and_the_held_blocks_is_right(make_kv, story, least, by_rank):
    index = Scripted()
    kv = make_kv(None, index)
    sink = kv.make_sink(prefix_closed=False)
    story(sink)
    assert least == kv.inside.reference.find_matches(LOCALS).scores[sink.worker_id, 0]
    kv.assert_in_sync()

    index.by_rank = by_rank
    for index.blocks in range(least, 4):
        kv.assert_in_sync()
    for index.blocks in (least - 1, 4):
        with pytest.raises(
            EventRulesBroken, match=f"{least} to 3 blocks: between what the reference index returned and"
        ):
            kv.assert_in_sync()


def test_over_a_prefix_closed_backend_only_the_answer_of_the_reference_is_right(make_kv):
    index = Scripted()
    kv = make_kv(None, index)
    sink = kv.make_sink()
    sink(Stored(None, CHAIN, LOCALS))
    sink(Removed(CHAIN[2:]))
    index.blocks = 3
    (problem,) = kv.judge().errors
    assert (problem.rule, problem.expected) == ("index_drift", "2 blocks, as the reference index returned")


def test_a_chain_that_starts_inside_another_has_no_leading_blocks(make_kv, rules_of):
    class BeginsAnywhere(Scripted):
        def find_matches(self, hashes):
            return {self.worker_id: 2} if tuple(hashes) == LOCALS[1:] else super().find_matches(hashes)

    kv = make_kv(None, BeginsAnywhere())
    kv.make_sink(prefix_closed=False)(Stored(None, CHAIN, LOCALS))
    assert rules_of(kv.judge().errors) == ["index_drift"]


def test_an_index_that_raises_where_the_reference_raises_is_not_at_fault(make_kv, rules_of):
    kv = make_kv(None, RadixIndex())
    sink = kv.make_sink(prefix_closed=False)
    sink(Stored(None, CHAIN[:2], LOCALS[:2]))
    sink(Stored(99, (1, *CHAIN[:2]), (1, *LOCALS[:2])))  # refused by both, and applied by the ledger
    sink(Removed(CHAIN[:2]))  # the ledger takes them for removed, the indexes hold them
    sink(Stored(1, (2,), (2,)))  # the ledger holds 1, the indexes do not
    assert rules_of(kv.judge().errors) == ["parent_block_not_found"]
    assert [p for p in kv.events.problems if p.rule == "index_failure" and p.position == 3] == []


def test_drift_of_a_restored_block_is_listed_under_its_warning(make_kv):
    class KeepsWhatWasStoredAgain(RadixIndex):
        def apply(self, event):
            if not isinstance(event.event.data, Removed):
                super().apply(event)

    kv = make_kv(None, KeepsWhatWasStoredAgain())
    sink = kv.make_sink(prefix_closed=False, restores=True)
    sink.compare(lambda: CHAIN)
    sink(Stored(None, CHAIN[:1], LOCALS[:1]))
    sink(Stored(None, CHAIN, LOCALS))
    sink(Removed(CHAIN[:1]))
    verdict = kv.judge()
    assert verdict.errors == []
    (warning,) = verdict.warnings
    assert (
        warning.rule,
        [problem.rule for problem in warning.folded],
    ) == ("evicted_and_restored", ["index_drift", "engine_drift"])


# ------------------------------------------------------------------------------------------------------ traffic

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["prefill", "prefill", "serve", "decode", "finish", "finish", "preempt", "clear"]),
        st.integers(0, 7),
        st.lists(st.integers(0, 1), max_size=10),
    ),
    max_size=40,
)


class Fleet:
    """A worker with open requests, driven by actions."""

    def __init__(self, kv, block_size):
        self.worker, self.size = kv.worker(0), block_size
        self.prompts = [[0] * block_size]

    def act(self, kind, number, tokens):
        open_ = self.worker.requests
        request = open_[number % len(open_)] if open_ else None
        try:
            if kind in ("prefill", "serve"):
                known = self.prompts[number % len(self.prompts)]
                prompt = [*known[: number * self.size], *tokens] or known
                self.prompts.append(prompt)
                getattr(self.worker, kind)(prompt)
            elif kind == "clear":
                self.worker.clear()
            elif request is not None and kind == "decode" and request.status == "running":
                request.decode(tokens)
            elif request is not None and kind == "preempt":
                request.preempt() if request.status == "running" else request.resume()
            elif request is not None and kind == "finish":
                request.finish()
        except OutOfBlocks:
            pass


@settings(max_examples=examples(60))
@given(ACTIONS, st.integers(2, 9), st.booleans())
def test_random_traffic_over_multi_lru_has_no_errors_and_only_its_known_warnings(actions, num_blocks, plugged):
    profile = EngineProfile(block_size=2, num_blocks=num_blocks)
    kv = RouterHarness(profile, "multi_lru", RadixIndex() if plugged else None)
    fleet = Fleet(kv, 2)
    for action in actions:
        fleet.act(*action)
    for request in list(fleet.worker.requests):
        request.finish()
    verdict = kv.judge()
    assert verdict.errors == []
    assert FAULTS.issuperset(problem.rule for problem in verdict.warnings)


@pytest.mark.parametrize("backend", ["lineage", "lru", "multi_lru"])
def test_prompts_with_shared_prefixes_cause_no_error_over_any_backend(make_kv, backend):
    found = Counter()
    for seed in range(25):
        kv = make_kv(backend, RadixIndex(), seed=seed, num_blocks=20, workers=2)
        shared = [kv.prompt(blocks) for blocks in (2, 3, 4)]
        for turn in range(60):
            prompt = kv.prompt(turn % 4, after=shared[turn * seed % 3], tail=turn % 3)
            with kv.worker(turn % 2).prefill(prompt) as request:
                request.decode(turn % 5)
            shared[turn % 3] = prompt if len(prompt.tokens) < 36 else kv.prompt(2)
        verdict = kv.judge()
        assert verdict.errors == []
        found.update(problem.rule for problem in verdict.warnings)
    assert set(found) <= (FAULTS if backend == "multi_lru" else set())


def test_the_smallest_use_evicts_a_block_and_stores_it_again(make_kv):
    """The example of docs/fidelity.md: `b` is warm because it is reused while no request holds it, and its parent `a`
    is not.
    """
    kv = make_kv("multi_lru", RadixIndex(), num_blocks=3)
    worker, a, c, d = kv.worker(0), kv.prompt(1), kv.prompt(1), kv.prompt(1)
    a_b = kv.prompt(1, after=a)
    with worker.prefill(a):
        worker.serve(a_b)
        worker.serve(a_b)
    worker.serve(c)
    worker.serve(c)
    with worker.prefill(d):
        assert kv.events.counts.warnings == {}
        worker.serve(a_b)
        kv.flush()
    stored, removed = kv.events.stored[-1].data, kv.events.removed[-1].data
    blocks = tuple(sequence_hashes(a_b.block_hashes(4)))
    assert (blocks, blocks[1]) == (stored.block_hashes, removed.block_hashes[0])
    (warning,) = kv.events.problems[0], *kv.events.warnings[1:]
    assert ("evicted_and_restored", (blocks[1],)) == (warning.rule, warning.blocks)
    assert [problem.rule for problem in warning.folded] == ["engine_drift"]

    worker.serve(kv.prompt(1, after=a_b))  # below b, which the router has removed

    assert [problem.rule for problem in warning.folded] == ["engine_drift", "parent_block_not_found"]
    assert kv.judge().errors == []


def test_a_use_that_evicts_its_own_blocks_and_stores_them_again_is_found_in_a_trace(traces_dir):
    """The prompt of one request evicts 24 of its own blocks: they are held, but the router has removed them.

    Its blocks are cached except those near the root, and the cached ones are in a colder queue than later blocks. The
    missing blocks evict them, so each of them is missing when its turn comes, and is stored again.
    """
    trace = traces_dir / "mooncake_conversation_trace.jsonl"
    kv = RouterHarness(EngineProfile(block_size=MOONCAKE_BLOCK_SIZE, num_blocks=32_000), "multi_lru")
    worker = kv.worker(0)
    for request in read_mooncake(trace, limit=2_409):
        worker.serve(request.prompt(whole_blocks=True))
    stored, removed = (entry for entry in list(kv.events)[-2:])
    taken = {problem.blocks[0] for problem in removed.problems}

    assert kv.events.counts.warnings == {"wrong_hash": 12, "evicted_and_restored": 24}
    assert len(taken) == 24
    assert taken <= set(stored.event.event.data.block_hashes) & set(removed.event.event.data.block_hashes)
    assert taken <= set(worker.manager.resident())
    assert kv.judge().errors == []
    assert Counter(problem.rule for problem in kv.events.problems) == {
        "wrong_hash": 12,
        "evicted_and_restored": 24,
        "engine_drift": 24,
    }


def test_blocks_behind_a_hole_do_not_count_as_leading_blocks(make_kv):
    index = Scripted()
    kv = make_kv(None, index)
    sink = kv.make_sink(prefix_closed=False)
    sink(Stored(None, CHAIN, LOCALS))
    sink(Removed(CHAIN[1:2]))
    index.blocks = 1
    kv.assert_in_sync()
    index.blocks = 2  # the number of held blocks
    with pytest.raises(EventRulesBroken, match="index_drift"):
        kv.assert_in_sync()
