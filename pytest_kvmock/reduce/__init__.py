"""Cutting a failure down: the fewest events, or requests, that break the same rule, as a value and as a test to paste.

kv = RouterHarness(...)          # or the fixture kv_router
...                              # traffic that goes wrong
print(reproduce(kv).as_test())
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.checks import unknown_text
from pytest_kvmock.events import Cleared, Removed, RouterEvent, Stored
from pytest_kvmock.harness.recording import MOST, Forgotten, Operation
from pytest_kvmock.hygiene.rules import check_rule
from pytest_kvmock.reduce.events import EventCutter
from pytest_kvmock.reduce.program import Breach as Breach
from pytest_kvmock.reduce.program import Level as Level
from pytest_kvmock.reduce.program import NotReduced as NotReduced
from pytest_kvmock.reduce.program import Reproduction as Reproduction
from pytest_kvmock.reduce.program import SinkKind
from pytest_kvmock.reduce.replay import ASKED_ALWAYS, Replayer, index_maker
from pytest_kvmock.reduce.requests import RequestCutter
from pytest_kvmock.reduce.search import Budget
from pytest_kvmock.tokens import Prompt

if TYPE_CHECKING:
    from pytest_kvmock.harness import RouterHarness
    from pytest_kvmock.harness.recording import Arrival
    from pytest_kvmock.hygiene.problem import Problem

WORK: Final = 500_000
"""How many steps a search replays at most, unless it is told otherwise."""

MOST_STEPS: Final = 200
"""A program of more steps is none that anybody reads."""

_OF_AN_INDEX: Final = ("index_drift", "index_failure")
_OF_NO_STREAM: Final = ("not_flushed", "sink_failure")
_NEEDS_AN_ENGINE: Final = ("engine_drift",)


def reproduce(
    kv: RouterHarness,
    problem: Problem | None = None,
    *,
    level: Level | None = None,
    allow: Collection[str] = (),
    work: int = WORK,
    expired: Callable[[], bool] | None = None,
) -> Reproduction:
    """Cut what a harness has seen down to the fewest events or requests that break the same rule.

    The harness stays as it is; all replays have worlds of their own. An index under test is made anew for each: by its
    `new()`, where it has one, else by its class, called with nothing or with what of the profile its parameters are
    named after.

    Args:
        kv: the harness.
        problem: what to reproduce; None for the first error that stands by itself and was not expected.
        level: "events" or "requests"; None for what suits the problem, and the other where that does not show it.
        allow: rules that a replay may break besides.
        work: how many steps, over all replays, to spend at most, for each level.
        expired: asked before each step; True ends the search with what it has by then.

    Raises:
        NotReduced: nothing smaller breaks the rule again; the message is one line that says why.
        ValueError: an unknown level or rule.
    """
    if level not in (None, "events", "requests"):
        raise ValueError(unknown_text("level", level, ("events", "requests")))
    ignored = {*map(check_rule, allow), *(e.rule for e in kv.events.problems if e.expected_by is not None)}
    if problem is None:
        problem = next((p for p in kv.events.errors if not p.covered() and p.rule not in ignored), None)
        if problem is None:
            raise NotReduced("there is no problem to reproduce")
    whole, make_index = _whole(kv, problem)
    levels = _levels(kv, problem) if level is None else (level,)
    found: list[Reproduction] = []
    reasons = []
    # Events first, whichever is wanted: they cost little, and are at hand where requests do not show it in time.
    for chosen in sorted(levels):
        replayer = Replayer(make_index, ignored, Budget(work, expired), kv.backends)
        try:
            cut = _finished(_cut(kv, problem, whole.replace(level=chosen), replayer), replayer, ignored)
        except NotReduced as reason:
            reasons.append(str(reason))
            if make_index is not None and "again" in reasons[-1]:
                kind = type(kv.index).__name__
                reasons[-1] += f" with a new {kind}() (its method new() would say how to make one that is like yours)"
        else:
            if chosen == levels[0]:
                return cut
            found.append(cut)
    if found:
        return found[0]
    raise NotReduced("; ".join(dict.fromkeys(reasons)))


def _whole(kv: RouterHarness, problem: Problem) -> tuple[Reproduction, Callable[[], Any] | None]:
    """The failing test as a program without steps, and how an index like its own is made."""
    if problem.rule in _OF_NO_STREAM:
        raise NotReduced(f"{problem.rule} is not about what a stream says")
    make_index = None
    if problem.rule in _OF_AN_INDEX:
        if kv.is_async:
            raise NotReduced("the index under test is async; only a test can await it")
        if kv.asks_recovery:
            raise NotReduced("the router asks workers for what it missed, which is not replayed")
        if problem.fault is not None and problem.fault.survived:
            raise NotReduced("the router must survive faults, which are not replayed")
        make_index = index_maker(kv.index, kv.profile)
    made = [
        ((worker.worker_id, worker.dp_rank), None if worker.backend == kv.backend else worker.backend)
        for worker in kv.workers.values()
        if worker.worker_id >= kv.profile.workers
        or worker.dp_rank >= kv.profile.dp_size
        or worker.backend != kv.backend
    ]
    return (
        Reproduction(
            Breach.of(problem),
            "events",
            kv.backend or "lineage",
            kv.profile,
            workers=tuple(made),
            with_index=make_index is not None,
        ),
        make_index,
    )


def _levels(kv: RouterHarness, problem: Problem) -> tuple[Level, ...]:
    """The levels at which to try it, the one that says most first.

    An index hears events, so events are what shows its fault, unless it is asked by tokens, which few events show well.
    What an engine does wrong, requests show; what is said by hand, or lost on the way, events.
    """
    operations = kv.recording.operations
    if not operations:
        return ("events",)
    if problem.rule in _NEEDS_AN_ENGINE:
        return ("requests",)
    if problem.rule in _OF_AN_INDEX:
        return ("requests", "events") if hasattr(kv.index, "match_tokens") else ("events", "requests")
    if problem.event is None:
        return ("requests", "events")
    lost = any(kind == "drop_next" for kind, *_ in operations)
    return ("events", "requests") if lost or any(map(_by_hand, kv.recording.arrivals)) else ("requests", "events")


def _by_hand(arrival: Arrival) -> bool:
    """Whether it was not said for a request."""
    return not isinstance(arrival, Forgotten) and not arrival[1] and not isinstance(arrival[0].event.data, Cleared)


def _cut(kv: RouterHarness, problem: Problem, whole: Reproduction, replayer: Replayer) -> Reproduction:
    recording = kv.recording
    if whole.level == "requests":
        operations = [*_operations(recording.operations)]
        if len(recording.operations) >= MOST:
            raise NotReduced(f"the test did more than {MOST:,} operations")
        if not any(step.kind == "prefill" for step in operations):
            raise NotReduced("no worker served a request: moves on a bare manager cannot be replayed")
        requests = sum(step.kind == "prefill" for step in operations)
        whole = whole.replace(cut_from=requests, breach=whole.breach.replace(block=None, right=None))
        return RequestCutter(whole, operations, _around(kv, problem), replayer).cut()
    if problem.rule in _NEEDS_AN_ENGINE:
        raise NotReduced("what an engine holds cannot be replayed from its events")
    arrivals = _upto(recording.arrivals, problem.position)
    whole = whole.replace(cut_from=kv.events.total)
    kinds = {
        worker_id: SinkKind(False, about.residency, about.prefix_closed)
        for (worker_id, rank), about in kv.streams.items()
        if not rank
    }
    return EventCutter(whole, arrivals, replayer, kinds).cut()


def _operations(recorded: Iterable[tuple[Any, ...]]) -> Iterator[Operation]:
    """Operations with what they were given; without those that were given nonsense."""
    for fields in recorded:
        step = Operation(*fields)
        if step.kind == "decode" and not isinstance(step.argument, int):
            with suppress(TypeError, ValueError):
                yield step._replace(argument=Prompt.of(step.argument).tokens or ())
        else:
            yield step


def _upto(arrivals: list[Arrival], position: int) -> list[Arrival]:
    """What arrived up to an event, by its number in the log."""
    count = -1
    for i, arrival in enumerate(arrivals):
        if not isinstance(arrival, Forgotten):
            count += 1
            if count == position:
                return arrivals[: i + 1]
    if len(arrivals) >= MOST:
        raise NotReduced(f"it shows after more than {MOST:,} events")
    return arrivals


def _around(kv: RouterHarness, problem: Problem) -> list[int]:
    """Numbers of events around which it may have gone wrong: where it shows, and the last that names its block."""
    places = [] if problem.event is None else [problem.position]
    position = -1
    named = None
    for arrival in kv.recording.arrivals:
        if isinstance(arrival, Forgotten):
            continue
        position += 1
        event: RouterEvent = arrival[0]
        data = event.event.data
        if (
            isinstance(data, (Stored, Removed))
            and problem.block in data.block_hashes
            and event.worker_id == problem.worker_id
        ):
            named = position
    return places if named is None or named in places else [*places, named]


def _finished(found: Reproduction, replayer: Replayer, ignored: Collection[str]) -> Reproduction:
    """The program with what it says of itself."""
    replays = replayer.budget.replays
    replayer.budget = Budget(WORK)  # once or twice more, at whatever cost: it is short
    if len(found.steps) > MOST_STEPS or not (len(found.steps) <= ASKED_ALWAYS or replayer.breaks(found, sync="auto")):
        raise NotReduced(f"cut to {found.size:,} of {found.cut_from:,} {found.level} before the limit was reached")
    besides = {p.rule for p in replayer.verdict(found).errors} & set(ignored) - {found.rule}
    return found.replace(allow=tuple(sorted(besides)), replays=replays)
