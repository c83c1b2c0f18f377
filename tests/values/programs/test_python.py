"""A program written as Python has the same effect as the program."""

import pytest
from depth import examples
from hypothesis import given, settings

from pytest_kvmock import EngineProfile, Prompt, RouterHarness, Stored
from pytest_kvmock.testing import traffic
from pytest_kvmock.values.programs.interpreter import Interpreter, calls
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
from pytest_kvmock.values.programs.python import literal, number_parts

ROOMY = EngineProfile(block_size=2, num_blocks=1000, workers=2)


@settings(max_examples=examples(60))
@given(traffic(workers=2, most_in_a_burst=5))
def test_generated_calls_publish_the_events_of_the_program(program):
    played, called = RouterHarness(ROOMY, "lru"), RouterHarness(ROOMY, "lru")
    interpreter = Interpreter(played)
    for step in program:
        interpreter.do(step)
    exec("\n".join(calls(program, 2)), {"kv": called, "Prompt": Prompt, "Stored": Stored})
    assert [entry.event for entry in played.events] == [entry.event for entry in called.events]


def test_each_operation_is_written_as_a_call():
    program = [
        Prefill("a", (1, (5, 6)), 1, worker=1, rank=1),
        Decode("a", 3, of=None),
        Decode("a"),
        Decode("a", 1, of=None),
        Preempt("a"),
        Resume("a"),
        Finish("a"),
        Prefill(7, (11, 12), None, hashed=True),
        Serve((1,), output_tokens=4),
        Clear(),
        Burst(3, worker=1),
        Restart(1),
        Restart(announced=True),
        RemoveWorker(1),
        RemoveWorker(0, rank=0),
        DropNext(),
        DropNext(2, of="stored"),
        Prefill("b", (1,), wait=False),
        Finish("b"),
        Tick(2.5, 1, 1),
    ]
    assert [*calls(program, 2)] == [
        "a = kv.worker(1, dp_rank=1).prefill([1, 1, 5, 6, 0])",
        "a.decode(3)",
        "a.decode([0])",
        "a.decode()",
        "a.preempt()",
        "a.resume()",
        "a.finish()",
        "kv.worker(0).prefill(Prompt(hashes=[11, 12]))",
        "kv.worker(0).serve([1, 1], 4)",
        "kv.worker(0).clear()",
        "with kv.burst():",
        "    for number in range(3):",
        "        kv.worker(1).serve([number] * 2)",
        "kv.worker(1).restart()",
        "kv.worker(0).restart(announced=True)",
        "kv.remove_worker(1)",
        "kv.remove_worker((0, 0))",
        "kv.drop_next()",
        'kv.drop_next(2, kind="stored")',
        "with suppress(WouldWait):",
        "    b = kv.worker(0).prefill([1, 1], wait=False)",
        "b.finish()",
        "kv.worker(1, dp_rank=1).tick(2.5)",
    ]


def test_a_request_without_given_tokens_is_written_as_one_serve_call():
    served = [Prefill(1, (1,)), Decode(1, 2, of=None), Finish(1), Prefill(2, (1,)), Finish(2)]
    assert [*calls(served, 2)] == ["kv.worker(0).serve([1, 1], 2)", "kv.worker(0).serve([1, 1])"]
    chosen = [Prefill(1, (1,)), Decode(1, (3, 4)), Finish(1)]
    assert [*calls(chosen, 2)] == [
        "request1 = kv.worker(0).prefill([1, 1])",
        "request1.decode([3, 4])",
        "request1.finish()",
    ]


def test_with_after_each_every_operation_is_written_on_its_own_line():
    served = [Prefill(1, (1,)), Finish(1)]
    assert [*calls(served, 2, after_each="await kv.aflush()")] == [
        "request1 = kv.worker(0).prefill([1, 1])",
        "await kv.aflush()",
        "request1.finish()",
        "await kv.aflush()",
    ]


def test_a_string_literal_is_written_without_escapes():
    assert literal("grün") == '"grün"'


@pytest.mark.parametrize(
    ("numbers", "parts"),
    [
        ([1, 3, 5, 7, 9, 11, 13], ["1", "3", "5", "7", "9", "11", "13"]),
        (range(6), ["*range(6)"]),
        (range(1, 6), ["1", "2", "3", "4", "5"]),
        (range(1, 7), ["*range(1, 7)"]),
        ([9, 8, 7, 6, 5, 4], ["*range(9, 3, -1)"]),
        ([7, *range(20, 26), 3], ["7", "*range(20, 26)", "3"]),
        ([5, 4, 3, 2, 1, 0], ["5", "4", "3", "2", "1", "0"]),
    ],
)
def test_runs_of_at_least_six_numbers_are_written_as_ranges(numbers, parts):
    assert parts == number_parts(numbers, str)
