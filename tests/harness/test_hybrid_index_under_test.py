"""An index under test over hybrid backends: between what engines would reuse and what their attention groups hold."""

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
    """A sound index: it follows the attention group, and counts copies."""

    def __init__(self):
        self.tree = RadixIndex(count_copies=True)

    def apply(self, event):
        self.tree.apply(event)

    def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes).scores

    def remove_worker(self, worker_id):
        self.tree.remove_worker(worker_id)


class OfTheEngines:
    """What engines would reuse, from themselves; `change` makes it wrong."""

    def __init__(self, change, answers):
        self.change, self.answers, self.dense, self.kv = change, answers, Dense(), None

    def apply(self, event):
        self.dense.apply(event)

    def match_tokens(self, tokens):
        size, found = self.kv.profile.block_size, {}
        dense = self.dense.find_matches(block_hashes(tokens, size))
        for worker in self.kv.workers.values():
            held = dense.get((worker.worker_id, worker.dp_rank), 0)  # an event may be ahead of others of one step
            reused = min(worker.cached_tokens((*tokens, 0)) // size, held)
            found[worker.worker_id, worker.dp_rank] = self.change(reused, held)
        return found


def over_engines(backend, change=lambda reused, held: reused, answers="reusable", **options):
    index = OfTheEngines(change, answers)
    kv = index.kv = harness_of(backend, index, **options)
    return kv


def read_by(kind, backend, **options):
    """A harness whose index reads the events of a model of vLLM, and asks nobody."""
    index = UnderTest(kind, None)
    kv = harness_of(backend, index, **options)
    index.about = about_manager(kv.worker(0).manager)
    return kv


@pytest.mark.parametrize("backend", HYBRID)
@settings(max_examples=examples(6))
@given(data=st.data())
def test_right_indexes_raise_no_alarm(backend, data):
    program = data.draw(traffic(most_blocks=12, most_steps=20, most_in_a_burst=20, near_hashes=False))
    exact = read_by(hybrid_readers.Exact, backend) if backend.startswith("vllm") else over_engines(backend)
    for kv in (harness_of(backend, Dense(), sync="every"), exact, over_engines(backend, answers="held")):
        with kv:
            play(kv, program)


def drifts(kv, blocks=32):
    """What is found where prompts share a prefix: the second is promised what it cannot reuse."""
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
def test_outside_of_that_is_index_drift(backend, change, answers):
    assert drifts(over_engines(backend, change, answers, num_blocks=300))


def test_a_clue_names_its_block_where_that_is_not_the_last_of_the_prefix():
    kv = over_engines("vllm_gpt_oss", lambda reused, held: min(reused, 5), "held", num_blocks=300)
    problem = drifts(kv)[0]
    assert "returned 5 for worker 0 on a 32-block prefix (ends in " in problem.observed
    sixth = kv.events.stored[1].data.block_hashes[5]  # the first event is the window's
    lacks = (
        f"; of block {block_text(sixth)}, the first that the answer lacks: group 0 (sliding_window) does not have it"
    )
    assert lacks in problem.observed


@pytest.mark.parametrize("backend", ["vllm_gpt_oss", "vllm_qwen3_next", "sglang_gpt_oss", "sglang_qwen3_next"])
def test_who_declares_to_answer_what_is_reused_may_not_answer_what_is_held(backend):
    assert not drifts(over_engines(backend, lambda reused, held: held, "held", num_blocks=300))
    assert drifts(over_engines(backend, lambda reused, held: held, "reusable", num_blocks=300))


def test_what_it_answers_must_be_one_of_the_two():
    index = Dense()
    index.answers = "all"
    with pytest.raises(ValueError, match=r"answers must be 'held' or 'reusable', got 'all'"):
        harness_of("vllm_gpt_oss", index)


@pytest.mark.parametrize("backend", ["lineage", "vllm", "sglang"])
def test_on_plain_engines_an_answer_below_what_is_held_is_drift(backend):
    class Less(Dense):
        def find_matches(self, local_hashes):
            return {key: blocks - 1 for key, blocks in super().find_matches(local_hashes).items()}

    assert drifts(harness_of(backend, Less()), blocks=4)


def test_a_cleared_prompts_tail_is_no_chain_to_look_up(caplog):
    kimi = backend_spec("vllm_kimi_k3").variant("kimi", match_unit=2)  # a hash for each half of a block
    with over_engines(kimi) as kv:
        kv.worker(0).serve(kv.prompt(1, tail=3))
        assert kv.worker(0).clear()
    assert caplog.records == []  # nothing failed within the harness


FULL, WINDOW = CacheGroup("full_attention", 4), CacheGroup("sliding_window", 4, window=5)
FULL_FIRST = backend_spec("vllm").variant("vllm_full_first", groups=(FULL, WINDOW))

NAIVE = {  # over which model traffic finds it
    hybrid_readers.OneMap: "vllm_gpt_oss",
    hybrid_readers.AnyGroup: "vllm_gpt_oss",
    hybrid_readers.MinimumOverGroups: "vllm_gpt_oss",
    hybrid_readers.DividesTheSpanByItsHashes: FULL_FIRST,  # elsewhere the attention group mostly corrects it at once
    hybrid_readers.LooksUpParentsAcrossGroups: "vllm_kimi_k3",
    hybrid_readers.TakesGroupZero: "vllm_qwen3_next",
    hybrid_readers.RemovesOfAnyGroup: "vllm_gpt_oss",
    hybrid_readers.TakesTailsForBlocks: "vllm_deepseek_v4",  # prompts' tails have names there
}


@pytest.mark.parametrize("kind", hybrid_readers.NAIVE)
def test_traffic_finds_naive_indexes_within_200_examples(kind):
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
def test_traffic_finds_what_any_group_removes_at_the_sizes_of_the_documentation(model, num_blocks):
    @settings(max_examples=200, derandomize=True, database=None, phases=[Phase.generate])
    @given(traffic(workers=2))
    def drive(program):
        with read_by(hybrid_readers.RemovesOfAnyGroup, model, num_blocks=num_blocks, workers=2) as kv:
            play(kv, program)

    with pytest.raises(EventRulesBroken, match="index_drift"):
        drive()


@pytest.mark.parametrize("backend", ["vllm_gpt_oss", "vllm_gemma4", "sglang_gpt_oss"])
def test_a_wrong_parent_in_the_attention_group_is_an_error_as_of_any_engine(backend):
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


def test_the_log_shows_of_each_removed_which_group_it_is_of():
    """The engines leave group 0 out, which is the window here; a plain engine has no groups, and none is shown."""
    of_groups = {" (cache group 0)", " (cache group 1)"}
    for backend, num_blocks, expected in (("vllm_gpt_oss", 24, of_groups), ("vllm", 8, {""})):
        with harness_of(backend, num_blocks=num_blocks) as kv:
            for _ in range(4):
                kv.worker(0).serve(kv.prompt(6))
            shown = [repr(entry) for entry in kv.events if entry.kind == "removed"]
        assert {text.partition("worker 0")[2].partition("  Removed")[0] for text in shown} == expected
