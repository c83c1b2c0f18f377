"""Router processes in front of P/D pairs that read events: the contract's tests of workers run over prefill engines,
and a wrong router fails the tests of ranks and of joining engines by name.
"""

import sys
from itertools import count
from random import Random
from threading import Thread

import pytest
from contract_runs import names_of_tests
from depth import each_parameter, few, seeds, takes_long
from pair_contracts import DIALECTS, by_events, contract_of
from pair_router import BUGS
from process_runs import OfPlainRouter, ask, outcome_of

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.engines.backends import speaker_of
from pytest_kvmock.servers import KvServer
from pytest_kvmock.testing.process import process_judge, process_pairs
from pytest_kvmock.testing.process.process_world import ProcessWorld
from pytest_kvmock.wire import find_dialect
from pytest_kvmock.wire.sockets.waiting import Deadline

RANKS, JOINS = "test_legs_meet_at_one_rank", "test_engines_that_join_change_no_load"
SCENES = [name for name in names_of_tests(by_events("right", "vllm")) if name in vars(process_pairs.ProcessPairs)]
OTHERS = [name for name in names_of_tests(by_events("right", "vllm")) if name not in SCENES]

WRONG = {
    "drops_loads_as_another_role_changes": (JOINS, "expected more than half: the load of prefill engines was dropped"),
    "drops_loads_in_rooms": (JOINS, "expected more than half: the load of prefill engines was dropped"),
    "forgets_what_is_decoded": (JOINS, "expected more than half: the load of decode engines was dropped"),
    "never_uses_who_joined": (JOINS, "decode engine 5 joined, and of 16 completions it got none"),
    "takes_the_port_of_the_first_rank": (RANKS, "its decode leg came with remote_port 5600; expected 5601, as its"),
    "takes_the_first_engine_id": (
        RANKS,
        "but its prefill leg ran on 'prefill-0_dp1': the decode leg waits for its timeout",
    ),
    "keeps_the_rank_for_itself": (RANKS, "and its decode leg waits at rank "),
    "says_another_rank": (RANKS, "and its decode leg waits at rank "),
}


@pytest.fixture
def seeded(monkeypatch):
    """Return a function that changes the seeds of servers."""
    return lambda seed: monkeypatch.setattr(process_judge, "_seeds", count(1000 * seed + 1))


def right(found):
    return "" if found.startswith("skipped: ") else found


def test_each_bug_of_the_router_by_events_has_a_test():
    assert {bug for bug, way in BUGS.items() if way} == set(WRONG)


@each_parameter
@pytest.mark.parametrize("seed", few(range(5)))
@pytest.mark.parametrize("bug", few(WRONG, 3))
def test_a_wrong_router_of_pairs_that_reads_events_fails_by_name(bug, seed, seeded):
    seeded(seed)
    scene, why = WRONG[bug]
    outcome = outcome_of(by_events(bug, BUGS[bug]), scene, DIALECTS[BUGS[bug]])
    assert outcome.startswith("failed: ")
    assert why in outcome
    assert "\n" not in outcome


OVER_PREFILL = (
    "test_it_hears_every_worker",
    "test_what_is_evicted_is_forgotten",
    "test_a_stream_passes_token_by_token",
)


@each_parameter
@pytest.mark.parametrize("way", DIALECTS)
@pytest.mark.parametrize("name", few(OVER_PREFILL))
def test_tests_of_workers_run_over_prefill_engines(name, way):
    assert outcome_of(by_events("right", way, timeout_s=10.0), name, DIALECTS[way]) == ""


@takes_long
@pytest.mark.parametrize("way", DIALECTS)
@pytest.mark.parametrize("name", OTHERS)
def test_a_right_router_of_pairs_passes_all_tests_of_workers(name, way):
    assert right(outcome_of(by_events("right", way, timeout_s=10.0), name, DIALECTS[way])) == ""


def test_a_wrong_router_over_pairs_fails_like_one_over_workers():
    """Errors in reading events of prefill engines are found as for any engine."""
    deaf = by_events("right", "vllm", blocks=lambda self, prompt: {0: 0})
    assert "worker 0 rank 0: the router knows 0" in outcome_of(deaf, "test_it_hears_every_worker")


def test_blocks_of_decode_engines_may_be_reported_or_not():
    def all_of_them(self, prompt, **keys):
        blocks = OfPlainRouter.blocks(self, prompt, **keys)
        return {**blocks, (2, 0): 8}

    contract = by_events("right", "vllm", blocks=all_of_them, timeout_s=10.0)
    assert outcome_of(contract, "test_it_hears_every_worker") == ""


def test_without_a_threshold_a_prompt_without_a_prefill_leg_is_not_judged():
    contract = contract_of("sends_all_to_decode", "vllm", threshold=None)
    found = outcome_of(contract, "test_an_idle_fleet_is_shared")
    assert found.startswith("skipped: Of_sends_all_to_decode: a prompt had no prefill leg: ")
    assert found.endswith("threshold = 0, by which each has one, would let it")


def test_a_test_that_pairs_do_not_support_is_skipped_with_the_reason():
    found = outcome_of(by_events("right", "vllm"), "test_what_leaves_the_host_does_not_leave_the_device")
    assert found.startswith("skipped: Of_right: hand_over is set: a role with tiers was not recorded")


def test_a_class_of_pairs_is_collected_over_engines_with_roles(pytester):
    pytester.makepyfile(
        test_pairs=f"""
        import sys
        sys.path[:0] = {sys.path!r}
        from pair_contracts import by_events

        class TestPairs(by_events("right", "sglang", timeout_s=10.0)):
            pass
        """
    )
    result = pytester.runpytest("-p", "no:asyncio", "-k", "it_hears_every_worker or goes_away or new_address")
    result.assert_outcomes(passed=1)


# ------------------------------------------------------------------------------------- right ones, whatever happens


class SlowServer(KvServer):
    """Engines with slow passes and slow transfers."""

    def __init__(self, *args, **options):
        super().__init__(*args, time_scale=0.3, **options)
        self.pairs.delay_transfers(0.02)


@takes_long
@pytest.mark.parametrize("seed", seeds(5))
@pytest.mark.parametrize("way", DIALECTS)
@pytest.mark.parametrize("name", SCENES)
def test_a_right_router_passes_with_slow_engines(name, way, seed, seeded, monkeypatch):
    seeded(seed)
    if seed % 2:
        monkeypatch.setattr(process_pairs, "KvServer", SlowServer)
    assert right(outcome_of(by_events("right", way, timeout_s=10.0), name, DIALECTS[way])) == ""


QUICKLY = {
    "vllm": {"kv_lease_duration": 1.0},
    "vllm-mooncake": {"abort_request_timeout": 1.0},
    "sglang": {"bootstrap_timeout": 1.0, "waiting_timeout": 1.0},
}


@pytest.mark.parametrize("seed", few(range(5)))
@pytest.mark.parametrize("way", DIALECTS)
def test_traffic_with_restarts_and_disconnecting_clients_leaves_nothing_open(way, seed):
    contract, random = by_events("right", way, timeout_s=10.0)(), Random(seed)
    dialect = find_dialect(DIALECTS[way])
    roles = {kind: {**role, **QUICKLY[way]} for kind, role in contract.roles(2, 2).items()}
    profile = EngineProfile(block_size=16, num_blocks=512)
    with (
        RouterHarness(profile, speaker_of(dialect), roles=roles) as kv,
        KvServer(kv, dialect, seed=seed, time_scale=0.1) as server,
    ):
        server.pairs.delay_transfers(0.005)
        world = ProcessWorld(contract, server)
        try:
            world.start()
            replies = [[] for _ in range(5)]
            clients = [
                Thread(target=client, args=(world, Random(f"{seed}:{number}"), each))
                for number, each in enumerate(replies)
            ]
            for each in clients:
                each.start()
            for _ in range(6):
                world.pause()
                server.restart(random.choice(server.workers))
            for each in clients:
                each.join(60)
            assert [len(each) for each in replies] == [8] * 5
            assert {status for each in replies for status in each} <= {None, 200, 500, 502, 503}
            world.judge_nothing_open()
            deadline = Deadline(4.0)
            while server.pairs.leased and deadline.left:
                world.pause()
            assert server.pairs.leased == {}
            assert ask(contract.url, "GET", "/open") == 0
            assert server.inside.broken == []
        finally:
            world.close()


def client(world, random, ended):
    """Send eight prompts one after the other; disconnect from some before their answer, whose status is then None."""
    for _ in range(8):
        stream = random.random() < 0.5
        text = "".join(random.choice("abcdefgh") for _ in range(random.choice((8, 40, 100))))
        pending = world.begin(text, max_tokens=random.choice((1, 4, 8)), stream=stream)
        if random.random() < 0.3:
            world.pause()
            pending.close()
            ended.append(None)
            continue
        reply = pending.finish()
        ended.append("timed out" if "timed out" in reply.error else reply.status)
