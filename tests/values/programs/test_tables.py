"""Every operation has all forms; a test's id names the form and the operation."""

import dataclasses
from types import MappingProxyType

import pytest
from scenario_files import load_scenarios, play, scenario_text

from pytest_kvmock import EngineProfile, Prompt, RouterHarness, Stored
from pytest_kvmock.harness.reduce import Breach
from pytest_kvmock.harness.reduce.program import Reproduction
from pytest_kvmock.testing.drafts import Player
from pytest_kvmock.values.programs import operations
from pytest_kvmock.values.programs.forms import OnRequest, OnWorker
from pytest_kvmock.values.programs.interpreter import Interpreter, calls
from pytest_kvmock.values.programs.operations import (
    Abort,
    Burst,
    Clear,
    Decode,
    DropNext,
    Finish,
    Preempt,
    Prefill,
    RemoveWorker,
    Restart,
    Resume,
    Run,
    RunPasses,
    Serve,
    ServeNear,
    Submit,
    Tick,
)

TIERED = EngineProfile(
    block_size=2, num_blocks=64, workers=2, tiers={"host": 8, "gbps": 1.0, "bytes_per_token": 500_000}
)
PREFILL = Prefill(1, (), (1, 1, 2, 2))
SUBMIT = Submit(1, (), (1, 1, 2, 2), output_tokens=4)

BREACH = Breach("wrong_hash", is_error=True, worker=(0, 0), block=None, story="")

PROGRAMS = {
    Prefill: [PREFILL],
    Serve: [Serve((1, 2), output_tokens=3)],
    Decode: [PREFILL, Decode(1, (5, 6, 7), of=None)],
    Finish: [PREFILL, Finish(1)],
    Preempt: [PREFILL, Preempt(1)],
    Resume: [PREFILL, Preempt(1), Resume(1)],
    Submit: [SUBMIT],
    Abort: [SUBMIT, RunPasses(1), Abort(1)],
    RunPasses: [SUBMIT, RunPasses(3)],
    Run: [SUBMIT, Run()],
    Tick: [Tick(2.5)],
    Clear: [PREFILL, Finish(1), Clear()],
    Burst: [Burst(2)],
    ServeNear: [ServeNear()],
    Restart: [PREFILL, Restart(announced=True)],
    RemoveWorker: [PREFILL, RemoveWorker(0, rank=0)],
    DropNext: [DropNext(1, of="stored"), PREFILL],
}
"""For each operation, a program that ends with it, or with a step that shows its effect."""

MADE_OF_OTHERS = {Serve, Burst, ServeNear}
"""Operations that are never recorded: the workers record their parts instead."""

NO_SCENARIO = {Burst, ServeNear}
"""Operations in no scenario file, because no failure is reduced to them, for the same reason."""

AMOUNTS = ("tokens", "output_tokens", "count")
NOT_LESS = {DropNext}
"""Operations whose amount is not reduced: lost events are removed one by one, at the level of events."""


def named(chosen):
    return [pytest.param(each, id=each.__name__) for each in sorted(chosen, key=lambda each: each.__name__)]


@pytest.fixture
def kv():
    return RouterHarness(TIERED)


@pytest.fixture
def interpreted():
    def interpret(program, make=Interpreter):
        kv = RouterHarness(TIERED)
        interpreter = make(kv)
        for step in program:
            interpreter.do(step)
        return kv

    return interpret


def state(kv):
    """Return what an operation can change: events, the recording, requests and the time of workers."""
    recorded = [step for step, _ in kv.recording.recorded() if not isinstance(step, DropNext)]
    workers = {key: (worker.now, [request.status for request in worker.requests]) for key, worker in kv.workers.items()}
    return [entry.event for entry in kv.events], recorded, workers, [*kv.inside.streams]


def test_every_operation_has_a_test_program():
    assert {*operations.OPERATIONS} == {*PROGRAMS}


@pytest.mark.parametrize("operation", named(PROGRAMS))
def test_the_interpreter_records_each_operation_that_it_executes(operation, interpreted):
    recorded = [step for step, _ in interpreted(PROGRAMS[operation]).recording.recorded()]
    assert recorded
    if operation not in MADE_OF_OTHERS:
        assert PROGRAMS[operation] == recorded


@pytest.mark.parametrize("operation", named(PROGRAMS))
def test_generated_python_has_the_same_effect_as_the_interpreter(operation, interpreted, kv):
    exec("\n".join(calls(PROGRAMS[operation], 2)), {"kv": kv, "Prompt": Prompt, "Stored": Stored})
    assert state(interpreted(PROGRAMS[operation])) == state(kv)


@pytest.mark.parametrize("operation", named(PROGRAMS.keys() - NO_SCENARIO))
def test_a_written_scenario_file_has_the_same_effect_as_the_interpreter(operation, interpreted, kv, tmp_path):
    steps = tuple(PROGRAMS[operation])
    path = tmp_path / "written.kv.yaml"
    path.write_text(scenario_text(Reproduction(BREACH, "requests", "lineage", TIERED, steps), "written"))
    (scenario,) = load_scenarios(path)
    play(kv, scenario, errors_fail=False)
    assert state(interpreted(steps)) == state(kv)


@pytest.mark.parametrize("operation", named(PROGRAMS))
def test_the_contract_player_has_the_same_effect_as_the_interpreter(operation, interpreted):
    program = PROGRAMS[operation]
    assert state(interpreted(program)) == state(interpreted(program, Player))


@pytest.mark.parametrize(
    "operation", named({each for each in PROGRAMS if issubclass(each, OnRequest)} - {Prefill, Submit})
)
def test_the_contract_player_skips_an_operation_without_a_request(operation, kv):
    assert Player(kv).do(operation("none")) is None


@pytest.mark.parametrize("operation", named(PROGRAMS.keys() - MADE_OF_OTHERS - NOT_LESS))
def test_only_an_operation_with_an_amount_has_simpler_forms(operation):
    step = next(step for step in PROGRAMS[operation] if isinstance(step, operation))
    amounts = {field.name for field in dataclasses.fields(step)} & {*AMOUNTS}
    assert bool(amounts) == bool([*step.simpler()])


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Reboot(OnWorker):
    """An operation of one call, defined only by its attributes."""

    kind = "restart"
    by_name = ("announced",)
    takes = MappingProxyType({"worker": "worker", "announced": "flag"})
    needs = ("worker",)

    worker: int = 0
    rank: int = 0
    announced: bool = False


def test_an_operation_of_one_call_derives_all_its_forms_from_its_attributes(kv):
    step = Reboot(1, 2, announced=True)
    assert repr(step) == "Reboot(worker=1, rank=2, announced=True)"
    assert [*step.python(2, named=False)] == ["kv.worker(1, dp_rank=2).restart(announced=True)"]
    assert step.yaml(2) == {"restart": {"worker": [1, 2], "announced": True}}
    assert Reboot().yaml(2) == {"restart": {"worker": 0}}
    assert step == Reboot.from_yaml({"worker": (1, 2), "announced": True}, 2)
    Interpreter(kv).do(step)
    assert [Restart(1, 2, announced=True)] == [step for step, _ in kv.recording.recorded()]
