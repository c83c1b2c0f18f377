"""The contract of routers over P/D pairs: public bugs fail by name, and their right twin passes."""

import pytest
from contract_runs import failure_of, names_of_tests
from depth import DEEP, each_parameter, takes_long
from pair_bugs import BUGS, WAYS, Busy, Pairs

from pytest_kvmock.fleets import DECODE_ALONE, LeastLoaded
from pytest_kvmock.testing import RightRouter, RouterContract
from pytest_kvmock.testing.router.router_pairs import PairScenes

FIRST = {name.partition("-")[0]: name for name, *_ in reversed(BUGS)}  # one way per row
CASES = [pytest.param(*rest, id=name) for name, *rest in BUGS if DEEP or name in FIRST.values()]
OF_PAIRS = [name for name in vars(PairScenes) if name.startswith("test_") and name != "test_pairs_are_judged"]
SCENES = [*dict.fromkeys([*(test for _, _, test, _ in BUGS), *OF_PAIRS])]


@each_parameter
@pytest.mark.parametrize(("contract", "test", "says"), CASES)
def test_a_public_bug_fails_by_name(contract, test, says):
    assert says in failure_of(contract, test)


@takes_long
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize(("contract", "test", "says"), CASES)
def test_a_public_bug_fails_by_name_in_other_traffic(contract, test, says, seed):
    assert says in failure_of(type(contract.__name__, (contract,), {"seed": seed}), test)


def right(way, test="", **about):
    if test == "test_a_busy_prefill_worker_is_passed_over":
        about |= {"router": Busy, "busy_from": 600}
    return type("Right", (Pairs,), {"hand_over": way, **about})


def failures_of(contract, tests):
    """Return the tests that fail, with their messages."""
    found = {}
    for name in tests:
        try:
            said = failure_of(contract, name)
        except pytest.skip.Exception:
            continue
        if said is not None:
            found[name] = said
    return found


@each_parameter
@pytest.mark.parametrize("test", SCENES)
def test_the_right_twin_of_the_public_bugs_passes(test):
    ways = WAYS if DEEP else WAYS[:1]
    assert [failure_of(right(way, test), test) for way in ways] == [None] * len(ways)


@takes_long
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("test", SCENES)
def test_the_right_twin_of_the_public_bugs_passes_in_other_traffic(test, seed):
    assert [failure_of(right(way, test, seed=seed), test) for way in WAYS] == [None] * 3


@takes_long
@pytest.mark.parametrize("order", ["prefill_first", "decode_first"])
@pytest.mark.parametrize("way", WAYS)
def test_a_right_router_of_pairs_passes_the_whole_contract(way, order):
    contract = right(way, order=order)
    assert failures_of(contract, names_of_tests(contract)) == {}


class AloneWithoutPrefill(Pairs.router):
    def pick(self, request, candidates):
        if request.phase == "prefill" and not candidates:
            return DECODE_ALONE
        return super().pick(request, candidates)


class FallsBack(Pairs):
    router, falls_back = AloneWithoutPrefill, True


class Holds(Pairs):
    router, holds_prefill = Pairs.router, True


class OneEach(Pairs):
    def make_router(self, workers):
        return {role: RightRouter(those, copies=True) for role, those in workers.items()}


class SaysNothing(Pairs):
    def make_router(self):
        return {"prefill": LeastLoaded(), "decode": LeastLoaded()}


@each_parameter
@pytest.mark.parametrize(
    ("contract", "test"),
    [
        (FallsBack, "test_no_prefill_worker_is_not_passed_over_in_silence"),
        (Holds, "test_the_load_of_prefill_ends_with_its_leg"),
        (OneEach, "test_a_change_of_one_role_keeps_the_loads_of_the_other"),
        (SaysNothing, "test_legs_meet"),
    ],
)
def test_a_router_of_pairs_is_judged_by_its_declarations(contract, test):
    assert failure_of(contract, test) is None


@takes_long
@pytest.mark.parametrize("contract", [FallsBack, Holds, OneEach, SaysNothing])
def test_a_router_of_pairs_is_judged_by_its_declarations_in_every_scene(contract):
    assert failures_of(contract, SCENES) == {}


def test_pairs_that_are_not_judged_are_reported_once():
    class Plain(RouterContract):
        def make_router(self, workers):
            return RightRouter(workers)

    assert [name for name in SCENES if hasattr(PairScenes, name) and getattr(Plain, name) is not None] == []
    with pytest.raises(pytest.skip.Exception, match=r"Plain\.hand_over is None: P/D pairs were not checked"):
        failure_of(Plain, "test_pairs_are_judged")


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        ({"hand_over": "nixl"}, "unknown hand_over 'nixl'"),
        ({"threshold": -1}, "threshold must be an integer of at least 0 (tokens), or None, got -1"),
        ({"falls_back": "yes"}, "falls_back must be True or False, got 'yes'"),
        ({"timeout_s": 0}, "timeout_s must be seconds above 0, got 0"),
    ],
)
def test_a_wrong_declaration_of_pairs_is_refused(declared, why):
    assert why in failure_of(type("Wrong", (Pairs,), declared), "test_legs_meet")
