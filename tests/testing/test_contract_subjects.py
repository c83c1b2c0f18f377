"""A contract over an invalid subject fails in one clear line, and with no other error."""

import asyncio
from dataclasses import replace
from textwrap import dedent

import pytest
from contract_runs import failure_of, names_of_tests
from depth import worth_its_time

from pytest_kvmock import (
    BACKENDS,
    BackendSpec,
    EngineProfile,
    EventRulesBroken,
    RadixIndex,
    Removed,
    RouterHarness,
    block_hashes,
    testing,
)
from pytest_kvmock.engines.backends import registered
from pytest_kvmock.engines.dynamo.eviction.lru import LruPolicy
from pytest_kvmock.testing import EvictionContract, IndexContract, ManagerContract, WorkerContract


def subject(contract, **body):
    return type("TestMine", (contract,), body)


class NoFind:
    def apply(self, event):
        pass


class LooksLikeAPolicy:
    insert = remove = evict = order = clear = lambda self, *args: []

    def __repr__(self):
        return "looks like one"


class Full(RadixIndex):
    def dump_events(self):
        return ["something"]


CASES = [
    (
        subject(EvictionContract),
        "define make_policy(self) or make_policy(self, capacity), which makes a new eviction policy",
    ),
    (
        subject(EvictionContract, make_policy=lambda self: {}),
        "make_policy gave {} (dict), which is not an EvictionPolicy: it has no insert, remove, evict, order",
    ),
    (
        subject(EvictionContract, make_policy=lambda self: LooksLikeAPolicy()),
        "make_policy gave looks like one (LooksLikeAPolicy), which does not derive from EvictionPolicy",
    ),
    (
        subject(EvictionContract, make_policy=lambda self: LruPolicy),
        "make_policy gave the class LruPolicy; it must be an object, LruPolicy()",
    ),
    (
        subject(EvictionContract, make_policy=lambda self, capacity, levels: None),
        "make_policy takes 2 arguments; it takes none or one besides self",
    ),
    (subject(EvictionContract, make_policy=3), "make_policy must be a method, got 3"),
    (subject(IndexContract, make_index=3), "make_index must be a method, got 3"),
    (
        subject(ManagerContract, make_manager=lambda self: None),
        "make_manager is called with num_blocks, block_size and sink; besides self it takes ()",
    ),
    (
        subject(ManagerContract, make_manager=3),
        "make_manager must be a method, got 3",
    ),
    (
        subject(ManagerContract, backend="lru", block_size="x"),
        "block_size must be an integer of at least 1, got 'x'",
    ),
    (
        subject(WorkerContract, backend="lru", block_size=3),
        (
            "backend 'lru' refuses 8 blocks of 3 tokens: block_size must be a power of two from 2 to 1024 (tokens a "
            "block), got 3"
        ),
    ),
    (
        subject(ManagerContract),
        'set backend = "name" (or a BackendSpec), or define make_manager(self, num_blocks, block_size, sink)',
    ),
    (
        subject(ManagerContract, backend="lruu"),
        f"unknown backend 'lruu'; did you mean 'lru'? known: {', '.join(BACKENDS)}",
    ),
    (subject(WorkerContract, backend=7), "backend must be the name of a backend or a BackendSpec, got 7"),
    (
        subject(ManagerContract, make_manager=lambda self, num_blocks, block_size, sink: []),
        (
            "make_manager gave [] (list), which is not a KvManager: it has no backend, num_blocks, block_size, "
            "dp_rank, sink, process and 13 more"
        ),
    ),
    (
        subject(WorkerContract, backend=BackendSpec("nothing", "nobody", lambda **sizes: None)),
        (
            "backend 'nothing' gave None (NoneType), which is not a KvManager: it has no backend, num_blocks, "
            "block_size, dp_rank, sink, process and 14 more"
        ),
    ),
    (subject(IndexContract), "define make_index(self) or make_index(self, block_size), which makes a new index"),
    (
        subject(IndexContract, make_index=lambda self: RadixIndex(), backends="lru"),
        "backends must be a tuple or list of backends, got 'lru'",
    ),
    (
        subject(IndexContract, make_index=lambda self: RadixIndex(), backends=("lru", "lruu")),
        f"backends has 'lruu': unknown backend 'lruu'; did you mean 'lru'? known: {', '.join(BACKENDS)}",
    ),
    (
        subject(IndexContract, make_index=lambda self: RadixIndex(), block_size=3),
        (
            "block_size = 3 is not for backend 'lineage': block_size must be a power of two from 2 to 1024 (tokens a "
            "block), got 3; blocks of 4 are for all backends of the contract"
        ),
    ),
    (
        subject(IndexContract, make_index=lambda self: RadixIndex(), block_size="x"),
        "block_size must be an integer of at least 1, got 'x'",
    ),
    (
        subject(IndexContract, make_index=lambda self: RadixIndex(), clears="e2"),
        "clears must be 'rank' or 'worker', got 'e2'",
    ),
    (
        subject(IndexContract, make_index=lambda self: RadixIndex(), survives=("lose",)),
        "survives must be a tuple or list of 'double' and 'restart', got ('lose',)",
    ),
    (
        subject(IndexContract, make_index=lambda self: RadixIndex(), survives="double"),
        "survives must be a tuple or list of 'double' and 'restart', got 'double'",
    ),
    (
        subject(IndexContract, make_index=lambda self: RadixIndex(), threads=4),
        "threads must be True or False, got 4",
    ),
    (
        subject(IndexContract, make_index=lambda self: RadixIndex(), bounded=20_000),
        "bounded must be an integer from 1 to 10000 (blocks), or None, got 20000",
    ),
    (
        subject(IndexContract, make_index=lambda self: RadixIndex(), bounded_at_most=10),
        "bounded_at_most is for an index that forgets: set bounded, too, the blocks that it keeps at least",
    ),
    (
        subject(IndexContract, make_index=lambda self: RadixIndex(), bounded=10, bounded_at_most=9),
        "bounded_at_most must be an integer from bounded, 10, to 100000 (blocks), or None, got 9",
    ),
    (
        subject(ManagerContract, backend="lru", forgiving="e0"),
        "forgiving must be True or False, got 'e0'",
    ),
    (
        subject(IndexContract, make_index=lambda self: {}),
        "make_index gave {}: the index under test (dict) has no apply(event), which takes a RouterEvent",
    ),
    (
        subject(IndexContract, make_index=lambda self, block_size: RadixIndex),
        (
            "make_index gave <class 'pytest_kvmock.oracle.index.index.RadixIndex'>: the index under test is a class, "
            "RadixIndex; it must be an object, RadixIndex()"
        ),
    ),
]


@pytest.mark.parametrize(
    ("contract", "line"), CASES, ids=[f"{number} {line[:40]}" for number, (_, line) in enumerate(CASES)]
)
def test_every_test_fails_in_one_line_for_an_invalid_subject(contract, line):
    expected = f"Failed: TestMine: {line}"
    with registered({}):
        assert {failure_of(contract, name) for name in names_of_tests(contract)} == {expected}


@pytest.mark.parametrize(
    ("index", "line"),
    [
        (
            NoFind,
            (
                "the index under test (NoFind) has none of find_matches(local_hashes), match_tokens(tokens), "
                "find_tiered(local_hashes) and match_tiered(tokens, extra)"
            ),
        ),
        (
            Full,
            (
                "the index under test (Full) is not empty at the start: dump_events() has 1 event; each test needs an "
                "index of its own"
            ),
        ),
    ],
    ids=["neither question", "not empty"],
)
def test_an_index_that_lacks_a_method_is_named(index, line):
    failure = failure_of(subject(IndexContract, make_index=lambda self: index()), "test_a_question_changes_nothing")
    assert failure.endswith(f": {line}")
    assert "\n" not in failure


def test_an_invalid_answer_of_size_is_shown():
    class Sized(RadixIndex):
        def size(self):
            return "large"

    contract = subject(IndexContract, make_index=lambda self: Sized())
    assert failure_of(contract, "test_it_does_not_grow_with_events") == (
        "AssertionError: size() answered 'large'; expected a number of entries"
    )


def test_an_index_that_grows_is_reported_with_its_growth():
    class Sized(RadixIndex):
        events = 0

        def apply(self, event):
            self.events += 1
            super().apply(event)

        def size(self):
            return self.events

    contract = subject(IndexContract, make_index=lambda self: Sized())
    assert failure_of(contract, "test_it_does_not_grow_with_events").partition("\n")[0] == (
        "AssertionError: size() is 16,000 after 8,000 blocks that were stored and removed, and 20,000 after 10,000; "
        "expected to grow by 1,000 at most"
    )


def failed_in_live_traffic(contract):
    with pytest.raises(EventRulesBroken) as raised:
        contract().test_it_follows_live_traffic()
    return raised.value.__notes__


def test_a_failure_in_live_traffic_names_backend_seed_and_program():
    contract = subject(IndexContract, make_index=lambda self: RadixIndex(), backends=("lru", "vllm"))
    told = failed_in_live_traffic(contract)[1]
    assert told.startswith(
        "in traffic over vllm, seed 0; play(RouterHarness(EngineProfile(block_size=4, num_blocks=8, workers=2, "
        "dp_size=2), 'vllm', index, sync='every'), program) shows it, where\nprogram = Program(\n    Prefill("
    )
    program = eval(told.partition("program = ")[2], {name: getattr(testing, name) for name in testing.__all__})
    kv = RouterHarness(
        EngineProfile(block_size=4, num_blocks=8, workers=2, dp_size=2), "vllm", RadixIndex(), sync="every"
    )
    with pytest.raises(EventRulesBroken) as raised:
        testing.play(kv, program)
    assert raised.value.__notes__ == [f"at step {len(program) - 1} of the program: {program.steps[-1]!r}"]


def test_a_fault_in_live_traffic_is_reported_with_its_smallest_reproduction():
    class Needs(RadixIndex):
        def __init__(self, something):
            super().__init__()

    contract = subject(IndexContract, make_index=lambda self: Needs("something"), backends=("vllm",))
    told = failed_in_live_traffic(contract)[0]
    assert told.startswith(
        "the smallest reproduction, cut from 156 events to 3, to be put below TestMine:\nimport pytest\n"
    )
    assert "Removed((1,))" in told


class IgnoresRemoved(RadixIndex):
    def apply(self, event):
        if not isinstance(event.event.data, Removed):
            super().apply(event)


@pytest.mark.parametrize("backend", ["lru", "vllm"])
@pytest.mark.parametrize(
    "make_index", [lambda self: IgnoresRemoved(), lambda self, size: IgnoresRemoved()], ids=["plain", "by size"]
)
def test_a_reproduction_of_a_contract_runs_in_its_module_without_an_index_fixture(pytester, backend, make_index):
    takes = "self" if make_index.__code__.co_argcount == 1 else "self, block_size"
    asserts = "        assert 4 == block_size\n" * (takes != "self")
    asserts += f"        assert {backend == 'vllm'} == self.traits.copies\n"
    contract = subject(IndexContract, make_index=make_index, backends=(backend,))
    text = failed_in_live_traffic(contract)[0].partition("\n")[2]
    module = f"""
        from pytest_kvmock import RadixIndex, Removed
        from pytest_kvmock.testing import IndexContract


        class IgnoresRemoved(RadixIndex):
            def apply(self, event):
                if not isinstance(event.event.data, Removed):
                    super().apply(event)


        class TestMine(IndexContract):
            def make_index({takes}):
        """
    module = dedent(module).rstrip() + f"\n{asserts}        return IgnoresRemoved()\n\n\n"
    pytester.makepyfile(module + text)
    result = pytester.runpytest_inprocess("-k", "test_reproduction", "-p", "no:cacheprovider", "-p", "no:asyncio")
    result.assert_outcomes(failed=1, deselected=len(names_of_tests(contract)))
    result.stdout.fnmatch_lines(["*index_drift*"])


def test_a_fault_in_live_traffic_that_cannot_be_reproduced_is_reported_with_the_reason():
    class Forgets(RadixIndex):
        made = 0

        def __init__(self):
            super().__init__()
            type(self).made += 1
            if self.made > 2:
                raise OSError("no second one")

    contract = subject(IndexContract, make_index=lambda self: Forgets(), backends=("vllm",))
    told = failed_in_live_traffic(contract)[0]
    assert told.startswith(
        "no smaller reproduction: could not rebuild your index for the replay (OSError: no second one)"
    )


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("test_a_removed_worker_has_nothing", "Plain has no remove_worker(worker_id): what it leaves was not checked"),
        (
            "test_offloaded_blocks_need_no_parent",
            (
                "Plain has neither find_tiered(local_hashes) nor match_tiered(tokens, extra): tiers below the device "
                "were not checked; unjudged: whether it overlooks the host, has there what the device removes, keeps "
                "what the host removes, or drops what stands below a removed block"
            ),
        ),
        (
            "test_salts_are_told_apart",
            (
                "match_tokens(tokens) of Plain takes no `extra`: prompts with an adapter, a salt or multimodal items "
                "were not checked"
            ),
        ),
        (
            "test_a_redelivered_event_changes_nothing",
            "TestMine.survives does not name 'double': an event that is delivered twice was not checked",
        ),
        (
            "test_it_does_not_grow_with_look_ups",
            "Plain has no size(): whether it grows over 1,000 look-ups was not checked",
        ),
        (
            "test_look_ups_may_come_from_threads",
            "TestMine.threads is not set: look-ups while another thread applies events were not checked",
        ),
        (
            "test_a_bounded_index_forgets_and_never_invents",
            "TestMine.bounded is not set: an index that forgets what is stored beyond a bound was not checked",
        ),
        (
            "test_a_bound_holds_for_all_workers_together",
            "TestMine.bounded_at_most is not set: how much it keeps at most was not checked",
        ),
        (
            "test_it_does_not_grow_with_events_that_repeat",
            "Plain has no size(): what a chain leaves that is stored often was not checked",
        ),
        (
            "test_a_removed_rank_leaves_the_others",
            (
                "Plain has no remove_worker_dp_rank(worker_id, dp_rank): a rank that leaves or restarts by itself was "
                "not checked"
            ),
        ),
        (
            "test_a_look_up_costs_no_more_than_its_share",
            "TestMine.size_blocks is below 20,000: how a look-up grows with the blocks that there are was not checked",
        ),
        (
            "test_an_unannounced_restart_is_noticed",
            "TestMine.survives does not name 'restart': a worker that restarts unannounced was not checked",
        ),
    ],
)
def test_a_test_of_a_missing_method_is_skipped_with_what_was_not_checked(name, why):
    class Plain:
        def apply(self, event):
            pass

        def match_tokens(self, tokens):
            return {}

    with pytest.raises(pytest.skip.Exception) as skipped:
        getattr(subject(IndexContract, make_index=lambda self: Plain(), size_blocks=2_000)(), name)()
    assert why == skipped.value.msg


class Async(RadixIndex):
    async def apply(self, event):
        super().apply(event)


def test_an_async_index_without_a_run_method_is_refused():
    contract = subject(IndexContract, make_index=lambda self: Async())
    assert failure_of(contract, "test_a_stored_prompt_is_found_whole") == (
        "Failed: TestMine: the index is async, and a contract has no loop: define run(self, awaitable), which runs it "
        "in yours"
    )


@pytest.mark.parametrize("given", [999, "many", None])
def test_an_invalid_size_blocks_is_refused(given):
    contract = subject(IndexContract, make_index=lambda self: RadixIndex(), size_blocks=given)
    for name in ("test_it_holds_what_a_fleet_has", "test_a_look_up_costs_no_more_than_its_share"):
        assert failure_of(contract, name) == (
            f"Failed: TestMine: size_blocks must be an integer of at least 1000 (blocks), got {given!r}"
        )


@pytest.mark.parametrize("name", ["threads", "reads_groups", "reads_drafts"])
@pytest.mark.parametrize("given", ["yes", 1, None])
def test_declarations_of_an_index_must_be_true_or_false(name, given):
    contract = subject(IndexContract, make_index=lambda self: RadixIndex(), **{name: given})
    assert failure_of(contract, "test_a_new_index_is_empty") == (
        f"Failed: TestMine: {name} must be True or False, got {given!r}"
    )


def test_an_undeclared_bound_is_reported_with_the_number_of_blocks_found():
    class Stops(RadixIndex):
        stored = 0

        def apply(self, event):
            self.stored += 1
            if self.stored <= 500:
                super().apply(event)

    contract = subject(IndexContract, make_index=lambda self: Stops())
    assert failure_of(contract, "test_it_holds_what_a_fleet_has") == (
        "AssertionError: with 100,000 blocks (size_blocks) over 64 workers of 8 ranks, a look-up of 21 blocks finds 0 "
        "of worker 62 rank 4; expected 2: block 1 of it is the first that is lacking, of which nothing was removed. An "
        "index that forgets on purpose declares how much it keeps at least: bounded"
    )


def test_an_index_that_finds_too_much_gets_no_advice_on_bounds():
    class OneRank(RadixIndex):
        def apply(self, event):
            super().apply(replace(event, event=replace(event.event, dp_rank=0)))

    contract = subject(IndexContract, make_index=lambda self: OneRank(), size_blocks=1000)
    assert failure_of(contract, "test_it_holds_what_a_fleet_has") == (
        "AssertionError: with 1,000 blocks (size_blocks) over 64 workers of 8 ranks, a look-up of 3 blocks finds 3 of "
        "worker 0; expected 2"
    )


def test_an_async_index_is_not_queried_from_threads():
    contract = subject(
        IndexContract, make_index=lambda self: Async(), threads=True, run=lambda self, call: asyncio.run(call)
    )
    assert failure_of(contract, "test_look_ups_may_come_from_threads") == (
        "Failed: TestMine: threads = True is for an index that is not async; an async one is asked in its loop"
    )


def test_tests_of_prompts_that_no_engine_of_the_backends_accepts_are_skipped():
    contract = subject(IndexContract, make_index=lambda self: RadixIndex(), backends=("hash_cache",))
    with pytest.raises(pytest.skip.Exception) as skipped:
        contract().test_salts_are_told_apart()
    assert skipped.value.msg == (
        "no engine of backends (hash_cache) names blocks by cache_salt: prompts with it were not checked"
    )


def test_tests_of_copies_that_no_engine_of_the_backends_publishes_are_skipped():
    contract = subject(IndexContract, make_index=lambda self: RadixIndex(), backends=("lru",))
    with pytest.raises(pytest.skip.Exception) as skipped:
        contract().test_a_block_is_held_until_its_last_copy_is_removed()
    assert skipped.value.msg == (
        "backends names no engine that publishes copies of a block (vLLM): copies were not checked"
    )


@pytest.mark.parametrize("backend", ["vllm_mtp", "vllm_gpt_oss"])
def test_copies_are_checked_over_an_engine_that_loses_none_of_a_repeated_prompt(backend):
    contract = subject(IndexContract, make_index=lambda self: RadixIndex(), backends=(backend,))
    assert failure_of(contract, "test_a_block_is_held_until_its_last_copy_is_removed") == (
        "AssertionError: looked up abc: expected {0: 3}, the index answered {}\nthe index was given, in this order:\n"
        "  worker 0 stored abc\n  worker 0 stored abc\n  worker 0 removed the last block of abc, ab, a"
    )


def test_an_unreadable_answer_is_shown_with_the_events_that_the_index_received():
    class Answers(RadixIndex):
        def find_matches(self, local_hashes):
            return 4

    contract = subject(IndexContract, make_index=lambda self: Answers())
    assert failure_of(contract, "test_a_stored_prompt_is_found_whole") == (
        "AssertionError: find_matches() of Answers returned 4; expected a mapping of worker_id or (worker_id, "
        "dp_rank) to a number of blocks, "
        "or an object with such a mapping in .scores\nthe index was given, in this order:\n  worker 0 stored abcd"
    )


class WantsEveryId(RadixIndex):
    """Requires consecutive event ids for each rank, like a router with a cursor."""

    def __init__(self):
        super().__init__()
        self.due = {}

    def apply(self, event):
        key = event.worker_id, event.event.dp_rank
        assert self.due.get(key, 0) == event.event.event_id, key
        self.due[key] = event.event.event_id + 1
        super().apply(event)

    def remove_worker_dp_rank(self, worker_id, dp_rank):  # RadixIndex.remove_worker calls it for each rank
        super().remove_worker_dp_rank(worker_id, dp_rank)
        self.due.pop((worker_id, dp_rank), None)


class OfEveryId(IndexContract):
    def make_index(self):
        return WantsEveryId()


OF_GAPS = ("live_traffic", "last_copy_is_removed", "after_a_gap_a_tier_has_no_more_than_came")
APPLIED = [name for name in names_of_tests(OfEveryId) if not name.endswith(OF_GAPS)]


@pytest.mark.parametrize("name", APPLIED)
def test_the_events_of_a_contract_have_ids_without_a_gap(name):
    assert None is failure_of(OfEveryId, name)


def test_keys_of_a_prompt_are_shortened_to_the_readable_part():
    class TakesNoKeys:
        def __init__(self):
            self.tree = RadixIndex()

        def apply(self, event):
            self.tree.apply(event)

        def match_tokens(self, tokens, extra=None):
            return self.tree.find_matches(block_hashes(tokens, 4)).scores

    contract = subject(IndexContract, make_index=lambda self: TakesNoKeys())
    failure = failure_of(contract, "test_multimodal_items_are_told_apart")
    item = "[('1c1c1c1c1c...1c1c1c1c1c', 0, 2)]"
    assert f"looked up abcd with multimodal={item}: expected {{0: 4}}" in failure
    assert f"worker 0 stored abc with multimodal={item}\n" in failure


def test_a_long_chain_is_shown_as_its_number_of_blocks():
    """Its letters would be unreadable."""

    class Short(RadixIndex):
        def find_matches(self, local_hashes, early_exit=False):
            return super().find_matches(local_hashes[:1000], early_exit)

    contract = subject(IndexContract, make_index=lambda self: Short())
    failure = failure_of(contract, "test_a_chain_may_be_long")
    text = "looked up 1,500 blocks: expected {0: 1500}, the index answered {(0, 0): 1000}\n"
    assert failure.startswith(f"AssertionError: {text}")
    assert "worker 0 stored 1,500 blocks\n" in f"{failure}\n"
    assert failure.isascii()


@pytest.mark.parametrize(
    ("backends", "least"), [(None, 4), (("lru", "vllm_gemma4"), 4), (("vllm", "vllm_deepseek_v4"), 64)]
)
def test_the_block_size_of_an_index_contract_is_the_smallest_that_all_backends_allow(backends, least):
    contract = subject(IndexContract, make_index=lambda self: RadixIndex(), backends=backends)
    assert least == contract.block_size == contract().block_size
    contract().test_a_stored_prompt_is_found_whole()


def test_backends_without_a_common_block_size_are_refused():
    def make(**sizes):
        if sizes["block_size"] != 3:
            raise ValueError(f"block_size must be 3, got {sizes['block_size']}")
        return BACKENDS["vllm"].make(**sizes)

    contract = subject(IndexContract, make_index=lambda self: RadixIndex(), backends=(BackendSpec("three", "x", make),))
    with pytest.raises(pytest.fail.Exception, match="backends has 'three': block_size must be 3, got 4"):
        contract().test_a_new_index_is_empty()


NOT_JUDGED = (
    "kvmock: test_mine.py::TestMine: not judged: copies of a block (vllm in backends), cache groups (a hybrid model in "
    "backends, or reads_groups = True), partial blocks (trtllm in backends), tiers below the device "
    "(find_tiered(local_hashes) or match_tiered(tokens, extra)), whether it grows (size()), workers that go "
    "(remove_worker(worker_id)), a rank that goes (remove_worker_dp_rank(worker_id, dp_rank)), calls from threads "
    "(threads = True), an event twice, an unannounced restart (survives), an index that forgets (bounded, "
    "bounded_at_most)"
)


SHORT = "kvmock: test_mine.py::TestMine: not judged: copies of a block, cache groups, partial blocks, and 8 more (-v)"


@worth_its_time
@pytest.mark.parametrize(
    ("options", "expected"), [([], SHORT), (["-n2"], SHORT), (["-v"], NOT_JUDGED)], ids=["plain", "xdist", "verbose"]
)
def test_tests_that_an_index_skipped_are_summed_up_in_one_line(pytester, options, expected):
    pytester.makepyfile(
        test_mine="""
        from pytest_kvmock import RadixIndex
        from pytest_kvmock.testing import IndexContract

        class Mine:
            def __init__(self):
                self.tree = RadixIndex()

            def apply(self, event):
                self.tree.apply(event)

            def find_matches(self, local_hashes):
                return self.tree.find_matches(local_hashes)

        class TestMine(IndexContract):
            def make_index(self):
                return Mine()
        """
    )
    result = pytester.runpytest_subprocess(*options, "-k", "stored_prompt or size or threads")
    said = [line for line in result.outlines if line.startswith("kvmock: ")]
    assert (said if "-v" not in options else [line for line in said if "not judged" in line]) == [expected]
