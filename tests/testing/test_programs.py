"""Programs of requests: drawn, shrunk, printed and played."""

import subprocess
import sys
from collections import deque
from random import Random

import pytest
from depth import examples, takes_long
from hypothesis import Phase, find, given, seed, settings
from mutants_indexes import IgnoresRemoved, Queued

from pytest_kvmock import EngineProfile, EventRulesBroken, RadixIndex, Removed, RouterHarness, Stored, block_hashes
from pytest_kvmock.testing import (
    Burst,
    Clear,
    Decode,
    Finish,
    Preempt,
    Prefill,
    Program,
    RemoveWorker,
    Restart,
    Resume,
    Serve,
    ServeNear,
    Tick,
    play,
    traffic,
)
from pytest_kvmock.testing.drafts import Player, random_traffic
from pytest_kvmock.values.prompt_keys import hash_options

SMALL = EngineProfile(block_size=2, num_blocks=6, workers=2)


@settings(max_examples=examples(100))
@given(traffic(workers=2))
def test_any_traffic_plays_without_an_error(program):
    with RouterHarness(SMALL, "lineage") as kv:
        play(kv, program)


TIERED = EngineProfile(
    block_size=2, num_blocks=6, workers=2, tiers={"host": 9, "gbps": 1.0, "bytes_per_token": 500_000}
)


@pytest.mark.parametrize("backend", ["lineage", "lru", "multi_lru", "sglang"])
def test_any_traffic_of_workers_with_tiers_plays_without_an_error(backend):
    refused = []

    @settings(max_examples=examples(50), database=None)
    @given(traffic(workers=2, most_in_a_burst=5, tiers=True))
    def run(program):
        with RouterHarness(TIERED, backend) as kv:
            play(kv, program)
            refused.append(kv.worker(0).now)

    run()
    assert max(refused) > 0


@settings(max_examples=examples(20))
@given(traffic(workers=2, most_in_a_burst=5, tiers=True))
def test_ticks_are_skipped_for_a_worker_without_tiers(program):
    with RouterHarness(SMALL, "vllm") as kv:
        play(kv, program)


def test_steps_that_a_worker_with_tiers_refuses_are_skipped():
    with RouterHarness(EngineProfile(block_size=2, num_blocks=2, tiers={"host": 4, "gbps": 1.0}), "lru") as kv:
        play(
            kv,
            Program(
                Prefill("a", (0, 1)), Finish("a"), Prefill("b", (2, 2), wait=False), Decode("b"), Tick(5), Tick(4.5)
            ),
        )
        assert (kv.worker(0).requests, kv.worker(0).now) == ([], 5.0)


@settings(max_examples=examples(200))
@given(traffic(workers=2, most_blocks=3, numbers=2, most_tokens=4))
def test_evaluating_the_repr_of_a_program_gives_an_equal_program(program):
    assert program == eval(repr(program))
    assert hash(program) == hash(eval(repr(program)))


@settings(max_examples=examples(200))
@given(traffic(workers=3, ranks=2, most_steps=10, most_blocks=2, numbers=2, most_tokens=3, most_in_a_burst=7))
def test_traffic_keeps_its_limits_and_names_existing_requests(program):
    assert len(program) <= 10
    running, preempted = set(), set()
    for step in program:
        if isinstance(step, Prefill):
            assert step.name not in running | preempted
            assert len(step.blocks) <= 2
            assert set(step.blocks) <= {0, 1}
            assert step.tail <= 3
            assert step.worker < 3
            assert step.rank < 2
            assert step.blocks or step.tail
            running.add(step.name)
        elif isinstance(step, Decode):
            assert step.name in running
            assert 1 <= step.tokens <= 3
            assert step.of < 2
        elif isinstance(step, Finish):
            assert step.name in running | preempted
            running.discard(step.name)
            preempted.discard(step.name)
        elif isinstance(step, Preempt):
            running.remove(step.name)
            preempted.add(step.name)
        elif isinstance(step, Resume):
            preempted.remove(step.name)
            running.add(step.name)
        else:
            assert step.worker < 3
            assert step.rank < 2
            assert isinstance(step, (Clear, ServeNear)) or 1 <= step.count <= 7
    assert sum(isinstance(step, Burst) for step in program) <= 2


@pytest.mark.parametrize("kind", [Prefill, Decode, Finish, Preempt, Resume, Clear, Burst, ServeNear])
def test_every_kind_of_step_is_drawn(kind):
    quick = settings(database=None, phases=(Phase.generate,), max_examples=1000)
    assert find(traffic(), lambda program: any(isinstance(step, kind) for step in program), settings=quick)


@takes_long
def test_traffic_shrinks_to_the_shortest_program():
    found = find(
        traffic(workers=2),
        lambda program: any(isinstance(step, Resume) for step in program),
        settings=settings(database=None, max_examples=1000),
        random=Random(0),
    )
    assert Program(Prefill("r0", tail=1), Preempt("r0"), Resume("r0")) == found


def test_a_program_is_printed_one_step_per_line_without_default_values():
    program = Program(Prefill("r0", (0, 1), tail=1), Decode("r0", 3, of=2), Finish("r0"), Clear(worker=1), Clear())
    assert repr(program) == (
        "Program(\n    Prefill('r0', blocks=(0, 1), tail=1),\n    Decode('r0', tokens=3, of=2),\n    "
        "Finish('r0'),\n    Clear(worker=1),\n    Clear(),\n)"
    )
    assert repr(Program()) == "Program()"


def test_a_failing_hypothesis_example_shows_the_program():
    @settings(database=None, derandomize=True, phases=(Phase.generate, Phase.shrink), max_examples=1000)
    @given(traffic())
    def has_no_preempt(program):
        assert not any(isinstance(step, Preempt) for step in program)

    with pytest.raises(AssertionError) as raised:
        has_no_preempt()
    text = "\n".join(raised.value.__notes__)
    assert "program=Program(\n        Prefill('r0', tail=1),\n        Preempt('r0'),\n    ),\n" in text


def test_prompts_share_their_common_leading_blocks():
    with RouterHarness(SMALL, "lru") as kv:
        play(kv, [Prefill("a", (0, 1)), Prefill("b", (0, 2), tail=1)])
        assert Prefill("a", (0, 1)).prompt(2).tokens == (0, 0, 1, 1)
        assert Prefill("b", (0, 2), tail=1).prompt(2).tokens == (0, 0, 2, 2, 0)
        assert kv.worker(0).manager.num_active_blocks == 4


def test_steps_that_do_not_fit_are_skipped_with_those_that_depend_on_them():
    with RouterHarness(SMALL, "lru") as kv:
        play(
            kv,
            [
                Prefill("a", (0, 1, 2, 0)),
                Prefill("b", (1, 1, 1)),  # does not fit
                Decode("b", 2),
                Preempt("b"),
                Finish("b"),
                Resume("a"),  # it is running
                Decode("a", 99),  # does not fit
                Preempt("a"),
                Prefill("b", (2, 2, 2)),
                Resume("a"),  # does not fit
            ],
        )
        assert [(len(r), r.status) for r in kv.worker(0).requests] == [(8, "preempted"), (6, "running")]


def test_a_failure_names_the_step_at_which_it_was_found():
    program = Program(Prefill("a", (0, 1, 2, 0)), Finish("a"), Clear(1), Prefill("b", (1, 1, 1)), Finish("b"))
    kv = RouterHarness(SMALL, "lru", IgnoresRemoved.Subject())
    with pytest.raises(EventRulesBroken) as raised:
        play(kv, program)
    assert raised.value.__notes__ == ["at step 3 of the program: Prefill('b', blocks=(1, 1, 1))"]


def test_a_program_may_have_any_kind_of_operation():
    program = Program(
        Serve((0, 1), output_tokens=2),
        Prefill("a", (0, 1)),
        Restart(announced=True),
        Decode("a"),  # skipped: the request is lost
        RemoveWorker(1),
        Clear(),
    )
    assert program == eval(repr(program))
    with RouterHarness(SMALL, "lru") as kv:
        play(kv, program)
        assert kv.worker(0).requests == []


def test_a_value_that_is_not_a_step_is_refused():
    with (
        RouterHarness(SMALL, "lru") as kv,
        pytest.raises(
            TypeError,
            match=r"^a program has Prefill, Serve, Decode, Finish, Preempt, Resume, Submit, Abort, RunPasses, Run, "
            r"Tick, "
            r"Clear, Burst, ServeNear, Restart, RemoveWorker and DropNext, got 'run'\n",
        ),
    ):
        play(kv, ["run"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "traffic: workers must be an integer of at least 1, got 0"),
        ({"most_steps": True}, "traffic: most_steps must be an integer of at least 1, got True"),
        ({"most_blocks": -1}, "traffic: most_blocks must be an integer of at least 0, got -1"),
        ({"numbers": 1.5}, "traffic: numbers must be an integer of at least 1, got 1.5"),
        ({"most_tokens": 0}, "traffic: most_tokens must be an integer of at least 1, got 0"),
        ({"ranks": 0}, "traffic: ranks must be an integer of at least 1, got 0"),
        ({"tiers": {"host": 4}}, "traffic: tiers must be True or False, got {'host': 4}"),
        ({"near_hashes": 1}, "traffic: near_hashes must be True or False, got 1"),
        ({"most_in_a_burst": -1}, "traffic: most_in_a_burst must be an integer of at least 0, got -1"),
    ],
)
def test_limits_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        traffic(**arguments)


def test_ticks_and_non_waiting_prefills_are_drawn_only_with_tiers():
    quick = settings(database=None, phases=(Phase.generate,), max_examples=1000)
    assert find(traffic(tiers=True), lambda program: any(isinstance(step, Tick) for step in program), settings=quick)
    assert find(traffic(tiers=True), lambda program: any(not getattr(s, "wait", True) for s in program), settings=quick)

    @settings(max_examples=examples(100), database=None)
    @given(traffic())
    def run(program):
        assert not any(isinstance(step, Tick) or not getattr(step, "wait", True) for step in program)

    run()


@settings(max_examples=examples(50))
@given(traffic(workers=2, ranks=2, tiers=True))
def test_ticks_of_a_worker_increase(program):
    last = {}
    for step in program:
        if isinstance(step, Tick):
            assert last.get((step.worker, step.rank), 0.0) <= step.now_ms
            last[step.worker, step.rank] = step.now_ms


def test_traffic_may_be_limited_to_one_rank_without_bursts():
    @settings(max_examples=examples(100), database=None)
    @given(traffic(most_in_a_burst=0))
    def run(program):
        assert not any(isinstance(step, Burst) or getattr(step, "rank", 0) for step in program)

    run()


def test_ranks_are_drawn_if_there_are_several():
    found = find(
        traffic(ranks=2),
        lambda program: {0, 1} <= {step.rank for step in program if isinstance(step, Prefill)},
        settings=settings(database=None, phases=(Phase.generate,), max_examples=200),
    )
    with RouterHarness(EngineProfile(block_size=2, num_blocks=6, dp_size=2), "lru") as kv:
        play(kv, found)


def test_a_burst_serves_prompts_of_a_block_and_flushes_the_index_once():
    index = Queued(deque())
    flushes = []
    index.flush = lambda: flushes.append(len(index.queue)) or Queued.flush(index)
    with RouterHarness(SMALL, "lru", index) as kv:
        Player(kv).do(Burst(40, worker=1))
        assert (flushes, kv.worker(1).manager.num_inactive_blocks) == ([74], 6)
        assert kv.overlap([39, 39]) == {1: 1}


def first_find(backend, index, seed_of_hypothesis, most=50):
    """Return how many examples of `traffic` find an index wrong, with the sizes of docs/how-to/contracts.md, or None
    if none of `most` does.
    """
    sizes = EngineProfile(block_size=4, num_blocks=8, workers=2)
    drawn = []

    @seed(seed_of_hypothesis)
    @settings(max_examples=most, database=None, phases=(Phase.generate,))
    @given(traffic(workers=2))
    def run(program):
        drawn.append(program)
        with RouterHarness(sizes, backend, index()) as kv:
            play(kv, program)

    try:
        run()
    except EventRulesBroken:
        return len(drawn)
    return None


@pytest.mark.parametrize("backend", ["vllm", "vllm_0_19"])
@pytest.mark.parametrize("seed_of_hypothesis", range(5))
def test_traffic_finds_an_index_that_counts_no_copies(backend, seed_of_hypothesis):
    assert first_find(backend, RadixIndex, seed_of_hypothesis) is not None


@pytest.mark.parametrize("seed_of_hypothesis", range(3))
def test_traffic_finds_a_queue_that_overflows(seed_of_hypothesis):
    assert first_find("lineage", lambda: Queued(deque(maxlen=64)), seed_of_hypothesis, 100) is not None


@takes_long
def test_a_burst_that_shows_a_fault_shrinks_to_few_steps():
    def overflows(program):
        try:
            with RouterHarness(SMALL, "lru", Queued(deque(maxlen=8))) as kv:
                play(kv, program)
        except EventRulesBroken:
            return True
        return False

    quick = settings(database=None, max_examples=100)
    found = find(traffic(most_steps=8, most_in_a_burst=20), overflows, settings=quick, random=Random(0))
    assert len(found) <= 3
    assert sum(step.count for step in found if isinstance(step, Burst)) <= 15


def test_random_traffic_with_the_same_seed_is_equal():
    assert random_traffic(3) == random_traffic(3) != random_traffic(4)


def run_without_hypothesis(code):
    blocked = "import sys; sys.modules['hypothesis'] = None\n"
    return subprocess.run([sys.executable, "-c", blocked + code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["traffic", "KvStateMachine"])
def test_without_hypothesis_the_import_error_names_the_extra(name):
    result = run_without_hypothesis(f"from pytest_kvmock.testing import {name}")
    assert (
        result.stderr.strip().splitlines()[-1] == f"ImportError: pytest_kvmock.testing.{name} needs Hypothesis: "
        "pip install '/path/to/pytest-kvmock[hypothesis]', with the path of your checkout"
    )


def test_without_hypothesis_the_contracts_work():
    result = run_without_hypothesis(
        "from pytest_kvmock.testing import EvictionContract, IndexContract, ManagerContract, WorkerContract, play\n"
    )
    assert (result.returncode, result.stderr) == (0, "")


ALL_KEYS = ("lora_name", "cache_salt", "multimodal")


class WithoutKey:
    """An index that looks up prompts by tokens and keys, except one key."""

    def __init__(self, ignored=None):
        self.ignored, self.held = ignored, {}

    def path(self, tokens, extra):
        options = hash_options(extra)
        known = {"lora_name": "lora_name", "cache_salt": "cache_namespace", "multimodal": "mm_hashes"}
        options.pop(known.get(self.ignored), None)
        return block_hashes(tokens, 4, **options)

    def apply(self, event):
        data, key = event.event.data, (event.worker_id, event.event.dp_rank)
        blocks = self.held.setdefault(key, {})
        if isinstance(data, Stored):
            flat = [token for block in event.token_ids for token in block]
            before = blocks.get(data.parent_hash, ((), None))[0]
            local = self.path(flat, event.extra)
            for at, block in enumerate(data.block_hashes):
                blocks[block] = ((*before, *local[: at + 1]), block)
        elif isinstance(data, Removed):
            for block in data.block_hashes:
                blocks.pop(block, None)
        else:
            blocks.clear()

    def match_tokens(self, tokens, extra):
        asked, found = self.path(tokens, extra), {}
        for key, blocks in self.held.items():
            paths = {path for path, _ in blocks.values()}
            found[key] = next((n for n in range(len(asked)) if tuple(asked[: n + 1]) not in paths), len(asked))
        return found


def play_keyed(ignored, keys):
    @settings(max_examples=100, derandomize=True, database=None, phases=[Phase.generate], deadline=None)
    @given(traffic(workers=2, keys=keys, near_hashes=False))
    def drive(program):
        with RouterHarness(EngineProfile(block_size=4, num_blocks=8, workers=2), "lru", WithoutKey(ignored)) as kv:
            play(kv, program)

    drive()


@takes_long
def test_traffic_with_keys_does_not_fail_a_right_index():
    play_keyed(None, ALL_KEYS)


@pytest.mark.parametrize("keys", [None, ALL_KEYS], ids=["alone", "beside others"])
@pytest.mark.parametrize("ignored", ALL_KEYS)
def test_traffic_with_keys_finds_an_index_that_ignores_one_key(ignored, keys):
    with pytest.raises(EventRulesBroken, match="index_drift"):
        play_keyed(ignored, keys or (ignored,))


@pytest.mark.parametrize("keys", ["lora_name", ("lora",), None, [["lora_name"]]])
def test_traffic_refuses_unknown_keys(keys):
    with pytest.raises(
        ValueError, match=r"^traffic: keys must be a tuple or list of 'lora_name', 'cache_salt', 'multimodal', got"
    ):
        traffic(keys=keys)
