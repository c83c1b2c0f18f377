"""The interpreter executes operations on workers, returns their results and raises their errors."""

import pytest

from pytest_kvmock import EngineProfile, OutOfBlocks, Prompt, RadixIndex, RouterHarness
from pytest_kvmock.engines import RequestError, WouldWait
from pytest_kvmock.harness.recording import RecordedOperation
from pytest_kvmock.values.programs.interpreter import Interpreter
from pytest_kvmock.values.programs.operations import (
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
    Serve,
    Tick,
)

SMALL = EngineProfile(block_size=2, num_blocks=6, workers=2)


@pytest.fixture
def kv():
    return RouterHarness(SMALL, "lru", RadixIndex())


def test_the_interpreter_returns_the_result_of_each_operation(kv):
    do = Interpreter(kv).do
    assert [
        do(Prefill("a", (1, 2))),
        do(Decode("a", 3, of=7)),
        do(Preempt("a")),
        do(Resume("a")),
        do(Clear()),
        do(Finish("a")),
        do(Clear()),
    ] == [0, None, None, 4, False, None, True]
    assert [do(Serve((1, 2), worker=1)), do(Serve((1, 2), 1, worker=1, output_tokens=2))] == [0, 4]
    assert [do(Restart(announced=True)), do(RemoveWorker(1)), do(DropNext(1, of="stored")), do(Burst(2))] == [None] * 4


def test_decode_generates_the_given_tokens(kv):
    interpreter = Interpreter(kv)
    interpreter.do(Prefill("a", (1,)))
    interpreter.do(Decode("a", 2, of=7))
    interpreter.do(Decode("a", (8, 9, 3)))
    interpreter.do(Finish("a"))
    assert kv.overlap([1, 1, 7, 7, 8, 9]) == {0: 3}


def test_an_operation_describes_its_prompt_by_numbers_tokens_or_hashes():
    assert Prefill("a", (1, (5, 6)), 3).prompt(2).tokens == (1, 1, 5, 6, 0, 0, 0)
    assert Serve(tail=(5, 6, 7)).prompt(2).tokens == (5, 6, 7)
    by_hash = Prefill("a", (11, 12), 1, hashed=True).prompt(2)
    assert (by_hash.tokens, by_hash.block_hashes(2), by_hash.num_tokens) == (None, [11, 12], 5)
    assert Prefill("a", (11, 12), None, hashed=True).prompt(2).num_tokens is None


def test_the_interpreter_can_be_given_the_prompts_of_operations(kv):
    kept = Prompt([1, 1])
    interpreter = Interpreter(kv, lambda step, size: kept)
    interpreter.do(Prefill("a", (7, 8, 9)))
    assert kept is kv.worker(0).requests[0].prompt


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        ([Prefill("a", (1,) * 9)], OutOfBlocks),
        ([Serve((1,) * 9)], OutOfBlocks),
        ([Finish("a")], KeyError),
        ([Prefill("a", (1,)), Resume("a")], RequestError),
        ([Burst(1, worker=-1)], ValueError),
        ([Prefill("full", (1, 2, 3, 4, 5, 6)), Burst(2)], OutOfBlocks),
        (["run"], TypeError),
    ],
)
def test_the_interpreter_raises_the_error_of_a_worker(kv, steps, error):
    interpreter = Interpreter(kv)
    *before, last = steps
    for step in before:
        interpreter.do(step)
    with pytest.raises(error):
        interpreter.do(last)


def test_replaying_the_recorded_operations_publishes_the_same_events(kv):
    steps = [
        Prefill(1, (), (1, 1, 2, 2)),
        Decode(1, (5,), of=None),
        Preempt(1),
        Resume(1),
        Finish(1),
        Prefill(2, (11, 12), 1, 1, 0, hashed=True),
        Clear(0, 0),
        Restart(1, 0, announced=True),
        DropNext(2, of="removed"),
        RemoveWorker(1),
        RemoveWorker(0, 0),
    ]
    interpreter = Interpreter(kv)
    for step in steps:
        interpreter.do(step)
    recorded = [*kv.recording.recorded()]
    assert steps == [step for step, _ in recorded]
    assert isinstance(recorded[0], RecordedOperation)
    again = RouterHarness(SMALL, "lru", RadixIndex())
    interpreter = Interpreter(again)
    for step, _ in recorded:
        interpreter.do(step)
    assert [entry.event for entry in kv.events] == [entry.event for entry in again.events]


def test_only_tick_and_waiting_operations_advance_time():
    profile = EngineProfile(block_size=2, num_blocks=2, tiers={"host": 4, "gbps": 1.0, "bytes_per_token": 500_000})
    kv = RouterHarness(profile)
    steps = [Prefill(1, (1, 2)), Finish(1), Tick(5.5), Prefill(2, (3, 4), wait=False)]
    interpreter = Interpreter(kv)
    for step in steps[:3]:
        interpreter.do(step)
    with pytest.raises(WouldWait):
        interpreter.do(steps[3])
    assert (kv.worker(0).now, [*interpreter.requests]) == (5.5, [1])
    with pytest.raises(ValueError, match="time does not go backwards"):
        interpreter.do(Tick(1))
    recorded = [step for step, _ in kv.recording.recorded()]
    assert [type(step) for step in (*steps, Tick(1))] == [type(step) for step in recorded]
    assert [Tick(5.5), False, Tick(1)] == [recorded[2], recorded[3].wait, recorded[4]]
