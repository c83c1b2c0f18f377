"""Indexes under test over hybrid backends may return from the reusable blocks up to the held ones."""

from dataclasses import replace

import hybrid_readers
import pytest
from depth import examples
from hybrid_readers import UnderTest, about_manager
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_reusable import HYBRID, harness_of

from pytest_kvmock import EventRulesBroken, RadixIndex, Stored, block_hashes
from pytest_kvmock.engines import CacheGroup, backend_spec
from pytest_kvmock.testing import play, traffic
from pytest_kvmock.values.events import block_text
from pytest_kvmock.values.prompt_keys import is_attention_group


class Dense:
    """A right index: follows the attention group and counts copies."""

    def __init__(self):
        self.tree = RadixIndex(count_copies=True)

    def apply(self, event):
        self.tree.apply(event)

    def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes).scores

    def remove_worker(self, worker_id):
        self.tree.remove_worker(worker_id)


class OfTheEngines:
    """Asks the engines what they would reuse; `change` makes it wrong."""

    def __init__(self, change, answers):
        self.change, self.answers, self.dense, self.kv = change, answers, Dense(), None

    def apply(self, event):
        self.dense.apply(event)

    def match_tokens(self, tokens):
        size, found = self.kv.profile.block_size, {}
        dense = self.dense.find_matches(block_hashes(tokens, size))
        for worker in self.kv.workers.values():
            held = dense.get((worker.worker_id, worker.dp_rank), 0)  # some events of a step may not have come yet
            reused = min(worker.cached_tokens((*tokens, 0)) // size, held)
            found[worker.worker_id, worker.dp_rank] = self.change(reused, held)
        return found


def over_engines(backend, change=lambda reused, held: reused, answers="reusable", **options):
    index = OfTheEngines(change, answers)
    kv = index.kv = harness_of(backend, index, **options)
    return kv


def read_by(kind, backend, **options):
    """Return a harness whose index reads the events of a vLLM model and asks no engine."""
    index = UnderTest(kind, None)
    kv = harness_of(backend, index, **options)
    index.about = about_manager(kv.worker(0).manager)
    return kv


@pytest.mark.parametrize("backend", HYBRID)
@settings(max_examples=examples(6))
@given(data=st.data())
def test_right_indexes_do_not_drift(backend, data):
    program = data.draw(traffic(most_blocks=12, most_steps=20, most_in_a_burst=20, near_hashes=False))
    exact = read_by(hybrid_readers.Exact, backend) if backend.startswith("vllm") else over_engines(backend)
    for kv in (harness_of(backend, Dense(), sync="every"), exact, over_engines(backend, answers="held")):
        with kv:
            play(kv, program)


def drifts(kv, blocks=32):
    """Return the drifts over prompts with a shared prefix; the second is promised more than it can reuse."""
    shared = kv.prompt(blocks)
    for _ in range(3):
        kv.worker(0).serve(kv.prompt(8, after=shared, tail=1))
    return [problem for problem in kv.judge().errors if problem.rule == "index_drift"]


WORSE = {
    "less than is reused": lambda reused, held: max(reused - 1, 0),
    "more than is held": lambda reused, held: held + 1 if held else 0,
}


@pytest.mark.parametrize("backend", ["vllm_gpt_oss", "vllm_qwen3_next", "sglang_gpt_oss", "sglang_qwen3_next"])
@pytest.mark.parametrize("change", WORSE.values(), ids=WORSE)
@pytest.mark.parametrize("answers", ["held", "reusable"])
def test_an_answer_outside_of_reusable_to_held_is_drift(backend, change, answers):
    assert drifts(over_engines(backend, change, answers, num_blocks=300))


def test_a_drift_names_the_first_missing_block_if_it_is_not_the_last_of_the_prefix():
    kv = over_engines("vllm_gpt_oss", lambda reused, held: min(reused, 5), "held", num_blocks=300)
    problem = drifts(kv)[0]
    assert "returned 5 for worker 0 on a 32-block prefix (ends in " in problem.observed
    sixth = kv.events.stored[1].data.block_hashes[5]  # the first event is the window's
    lacks = (
        f"; of block {block_text(sixth)}, the first that the answer lacks: group 0 (sliding_window) does not have it"
    )
    assert lacks in problem.observed


@pytest.mark.parametrize("backend", ["vllm_gpt_oss", "vllm_qwen3_next", "sglang_gpt_oss", "sglang_qwen3_next"])
def test_an_index_that_declares_reusable_answers_may_not_return_what_is_held(backend):
    assert not drifts(over_engines(backend, lambda reused, held: held, "held", num_blocks=300))
    assert drifts(over_engines(backend, lambda reused, held: held, "reusable", num_blocks=300))


def test_answers_must_be_held_or_reusable():
    index = Dense()
    index.answers = "all"
    with pytest.raises(ValueError, match=r"answers must be 'held' or 'reusable', got 'all'"):
        harness_of("vllm_gpt_oss", index)


@pytest.mark.parametrize("backend", ["lineage", "vllm", "sglang"])
def test_an_answer_below_what_is_held_is_drift_on_plain_engines(backend):
    class Less(Dense):
        def find_matches(self, local_hashes):
            return {key: blocks - 1 for key, blocks in super().find_matches(local_hashes).items()}

    assert drifts(harness_of(backend, Less()), blocks=4)


def test_a_cleared_prompt_tail_is_not_looked_up_as_a_chain(caplog):
    kimi = backend_spec("vllm_kimi_k3").variant("kimi", match_unit=2)  # a hash for each half of a block
    with over_engines(kimi) as kv:
        kv.worker(0).serve(kv.prompt(1, tail=3))
        assert kv.worker(0).clear()
    assert caplog.records == []  # nothing failed within the harness


FULL, WINDOW = CacheGroup("full_attention", 4), CacheGroup("sliding_window", 4, window=5)
FULL_FIRST = backend_spec("vllm").variant("vllm_full_first", groups=(FULL, WINDOW))

NAIVE = {  # the model whose traffic finds each index
    hybrid_readers.OneMap: "vllm_gpt_oss",
    hybrid_readers.AnyGroup: "vllm_gpt_oss",
    hybrid_readers.MinimumOverGroups: "vllm_gpt_oss",
    hybrid_readers.DividesTheSpanByItsHashes: FULL_FIRST,  # in others the attention group mostly corrects it at once
    hybrid_readers.LooksUpParentsAcrossGroups: "vllm_kimi_k3",
    hybrid_readers.TakesGroupZero: "vllm_qwen3_next",
    hybrid_readers.RemovesOfAnyGroup: "vllm_gpt_oss",
    hybrid_readers.TakesTailsForBlocks: "vllm_deepseek_v4",  # it names the tails of prompts
}


@pytest.mark.parametrize("kind", hybrid_readers.NAIVE)
def test_traffic_finds_each_naive_index_within_200_examples(kind):
    model = NAIVE[kind]

    @settings(max_examples=200, derandomize=True, database=None, phases=[Phase.generate])
    @given(traffic(near_hashes=False))
    def drive(program):
        with read_by(kind, model, num_blocks=640 if model == "vllm_deepseek_v4" else 16) as kv:
            play(kv, program)

    with pytest.raises(EventRulesBroken, match="index_drift"):
        drive()


@pytest.mark.parametrize(
    ("model", "num_blocks"),
    [("vllm_gpt_oss", 16), ("vllm_qwen3_next", 32), ("vllm_gemma3", 64), ("vllm_gemma4", 64)],
)
def test_traffic_finds_an_index_that_removes_for_any_group_at_the_documented_sizes(model, num_blocks):
    @settings(max_examples=200, derandomize=True, database=None, phases=[Phase.generate])
    @given(traffic(workers=2))
    def drive(program):
        with read_by(hybrid_readers.RemovesOfAnyGroup, model, num_blocks=num_blocks, workers=2) as kv:
            play(kv, program)

    with pytest.raises(EventRulesBroken, match="index_drift"):
        drive()


@pytest.mark.parametrize("backend", ["vllm_gpt_oss", "vllm_gemma4", "sglang_gpt_oss"])
def test_a_wrong_parent_in_the_attention_group_is_wrong_hash(backend):
    with harness_of(backend, num_blocks=200) as kv:
        kv.worker(0).serve(kv.prompt(2))
        root, publish = kv.events.stored_blocks[0], kv.publisher.publish

        def hang(event):
            data = event.event.data
            if type(data) is Stored and is_attention_group(event.extra) and data.parent_hash is None:
                event = replace(event, event=replace(event.event, data=replace(data, parent_hash=root)))
            publish(event)

        kv.publisher.publish = hang
        kv.worker(0).serve(kv.prompt(2))
        errors = [problem.rule for problem in kv.judge().errors]
        assert errors == ["wrong_hash"]


def test_the_log_shows_the_cache_group_of_each_removed():
    """The engines omit group 0, which is the window here; a plain engine has no groups and shows none."""
    of_groups = {" (cache group 0)", " (cache group 1)"}
    for backend, num_blocks, expected in (("vllm_gpt_oss", 24, of_groups), ("vllm", 8, {""})):
        with harness_of(backend, num_blocks=num_blocks) as kv:
            for _ in range(4):
                kv.worker(0).serve(kv.prompt(6))
            shown = [repr(entry) for entry in kv.events if entry.kind == "removed"]
        assert {text.partition("worker 0")[2].partition("  Removed")[0] for text in shown} == expected
