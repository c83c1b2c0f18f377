"""Reduction of a failure to the fewest events, or requests, that break the same rule, as a value and as a test.

kv = RouterHarness(...)          # or the fixture kv_harness
...                              # traffic that fails
print(reproduce(kv).as_test())
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.harness.recording import MOST, RecordedOperation
from pytest_kvmock.harness.reduce.breach import Breach as Breach
from pytest_kvmock.harness.reduce.events import EventCutter
from pytest_kvmock.harness.reduce.program import Level, NotReduced, Reproduction, SinkKind
from pytest_kvmock.harness.reduce.replay import ASKED_ALWAYS, MakeIndex, Replayer, in_a_thread
from pytest_kvmock.harness.reduce.requests import RequestCutter
from pytest_kvmock.harness.reduce.search import Budget
from pytest_kvmock.oracle.hygiene.entries import BatchesLost, NoEvent, WorkerRemoved
from pytest_kvmock.oracle.hygiene.problem import ROUTER_RULES
from pytest_kvmock.oracle.hygiene.rules import (
    ENGINE_DRIFT,
    INDEX_DRIFT,
    INDEX_FAILURE,
    NOT_FLUSHED,
    OVER_CAPACITY,
    OVERWRITTEN_BLOCKS,
    SINK_FAILURE,
    WRONG_HASH,
    check_rule,
)
from pytest_kvmock.values.checks import unknown_text
from pytest_kvmock.values.events import (
    Cleared,
    KvCacheEvent,
    Located,
    Removed,
    RouterEvent,
    SparseStored,
    StorageTier,
    Stored,
    Updated,
)
from pytest_kvmock.values.long_runs import long_run
from pytest_kvmock.values.programs.operations import Decode, DropNext, Prefill, Submit
from pytest_kvmock.values.tokens import Prompt

if TYPE_CHECKING:
    from pytest_kvmock.harness import RouterHarness
    from pytest_kvmock.oracle.hygiene.entries import Arrival
    from pytest_kvmock.oracle.hygiene.problem import Problem
    from pytest_kvmock.oracle.hygiene.stream_spec import StreamSpec
    from pytest_kvmock.values.events import StreamKey

__all__ = ["reproduce"]

WORK: Final = 500_000
"""Default maximum number of steps that a search replays."""

MOST_LINES: Final = 200
"""Maximum number of lines of a test that a reader can still use."""

_OF_AN_INDEX: Final = (INDEX_DRIFT, INDEX_FAILURE)
_OF_NO_STREAM: Final = (NOT_FLUSHED, OVERWRITTEN_BLOCKS, SINK_FAILURE)
_NEEDS_AN_ENGINE: Final = (ENGINE_DRIFT,)


def reproduce(
    kv: RouterHarness,
    problem: Problem | None = None,
    *,
    level: Level | None = None,
    allow: Collection[str] = (),
    work: int = WORK,
    expired: Callable[[], bool] | None = None,
    make_index: Callable[[], Any] | None = None,
) -> Reproduction:
    """Reduce the recording of a harness to the fewest events or requests that break the same rule.

    The harness does not change; each replay uses a new harness and a new index. The index is made by `new()` of the
    index under test, or else by its class, called without arguments or with the fields of the profile that its
    parameters are named after. An async index is awaited in event loops (asyncio) of a separate thread; if a call never
    returns, the search ends soon after `expired` returns True.

    Args:
        kv: the harness.
        problem: the problem to reproduce; None: the first error that stands by itself and was not expected.
        level: "events" or "requests"; None: the level that suits the problem, or the other if that does not show it.
        allow: other rules that a replay may break.
        work: maximum number of steps over all replays, for each level and way of comparing.
        expired: called before each step; True ends the search with its result so far.
        make_index: makes an index like the one under test; None: as described above.

    Raises:
        NotReduced: nothing smaller breaks the rule again; the message is one line with the reason.
        ValueError: an unknown level or rule.
    """
    if level not in (None, "events", "requests"):
        raise ValueError(unknown_text("level", level, ("events", "requests")))
    ignored = {*map(check_rule, allow), *(e.rule for e in kv.events.problems if e.expected_by is not None)}
    if problem is None:
        problem = next((p for p in kv.events.errors if not p.covered() and p.rule not in ignored), None)
        if problem is None:
            raise NotReduced("there is no problem to reproduce")
    if problem.rule in ROUTER_RULES:
        raise NotReduced(f"{problem.rule} is about a router, and a reproduction has none")
    if kv.recording.is_cut:
        raise NotReduced("what happened before was dropped (forget_history, or the log of a server)")
    whole, remade = _whole(kv, problem, make_index)
    levels = _levels(kv, problem) if level is None else (level,)

    def search(is_over: Callable[[], bool] | None) -> Reproduction:
        def replayer(level: Level) -> Replayer:
            # In a replay events made by hand fill a worker, because no engine evicts blocks.
            besides = {*ignored, OVER_CAPACITY} if level == "events" else ignored
            return Replayer(remade, besides, Budget(work, is_over), kv.recording.backends)

        if remade is not None:
            remade.probe(Budget(work, is_over))
        try:
            return _search(kv, problem, whole, levels, replayer)
        except NotReduced as reason:
            if remade is None or "limit" in str(reason):
                raise
            raise NotReduced(f"{reason}{remade.why_not()}") from None

    with long_run(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "tiers: a step offered")  # the search tries small hosts
        return search(expired) if whole.aflush is None else in_a_thread(search, expired)


def _search(
    kv: RouterHarness,
    problem: Problem,
    whole: Reproduction,
    levels: tuple[Level, ...],
    replayer: Callable[[Level], Replayer],
) -> Reproduction:
    """Try the levels, of which the first is preferred, and the ways to compare an index."""
    found: list[Reproduction] = []
    reasons: dict[str, None] = {}
    # Events first, whichever level is preferred: they are cheap, and the fallback if requests do not show it in time.
    for chosen in sorted(levels):
        for way in _ways(whole.replace(level=chosen), bursts=kv.recording.bursts):
            fresh = replayer(chosen)
            try:
                cut = _finished(_cut(kv, problem, way, fresh), fresh)
            except NotReduced as reason:
                reasons[str(reason)] = None
            else:
                if chosen == levels[0]:
                    return cut
                found.append(cut)
                break
    if found:
        return found[0]
    raise NotReduced("; ".join(reasons))


def _ways(whole: Reproduction, *, bursts: bool) -> Iterator[Reproduction]:
    """Yield the ways to compare an index: first as the test did, then others that may also show the problem."""
    yield whole
    if whole.aflush == "end":  # unknown how often the test flushed
        yield whole.replace(aflush="every")
    elif whole.with_index and whole.sync == "burst":  # a replay is one burst, the test may have had many
        yield whole.replace(sync="auto")
    elif whole.with_index and whole.sync == "auto":  # a long test does not flush the index after each event
        yield whole.replace(sync="burst" if bursts else "end")


def _whole(
    kv: RouterHarness, problem: Problem, make: Callable[[], Any] | None
) -> tuple[Reproduction, MakeIndex | None]:
    """Return the failing test as a program without steps, and the maker of indexes like the one under test."""
    if problem.rule in _OF_NO_STREAM:
        raise NotReduced(f"{problem.rule} is not about the events of a stream")
    make_index = None
    if problem.rule in _OF_AN_INDEX:
        if kv.publisher.recovery is not None:
            raise NotReduced("the router asks workers for what it missed, which is not replayed")
        if kv.inside.has_index_by_role:
            raise NotReduced("each role has an index of its own, and a reproduction has no roles")
        if problem.fault is not None and problem.fault.survived:
            raise NotReduced("the router must survive faults, which are not replayed")
        make_index = MakeIndex(kv.index, kv.profile, is_async=kv.inside.is_async, make=make)
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
            sync="auto" if make_index is None or kv.recording.sync == "every" else kv.recording.sync,
            clears="rank" if make_index is None else kv.recording.clears,
            aflush="end" if make_index is not None and kv.inside.is_async else None,
            stores={name: store.to_dict() for name, store in kv.inside.reference.stores.items()},
        ),
        make_index,
    )


def _levels(kv: RouterHarness, problem: Problem) -> tuple[Level, ...]:
    """Return the levels to try, the most suitable first.

    Events are the input of an index, so they show its bugs, unless it is queried by tokens, which only make a short
    test with requests. Requests show an engine's bugs; events show problems of events that were lost or made by hand.
    """
    operations = kv.recording.operations
    if not operations:
        return ("events",)
    if problem.rule in _NEEDS_AN_ENGINE:
        return ("requests",)
    if problem.rule in _OF_AN_INDEX:
        return ("requests", "events") if hasattr(kv.index, "match_tokens") else ("events", "requests")
    if problem.event is None:
        lost = any(isinstance(arrival, BatchesLost) for arrival in kv.recording.arrivals)
        return ("events", "requests") if lost else ("requests", "events")
    lost = any(operation is DropNext for operation, *_ in operations)
    return ("events", "requests") if lost or any(map(_by_hand, kv.recording.arrivals)) else ("requests", "events")


def _by_hand(arrival: Arrival) -> bool:
    """Whether an arrival was not published for a request."""
    if isinstance(arrival, BatchesLost):
        return True
    return not isinstance(arrival, WorkerRemoved) and not arrival.chained and not isinstance(arrival.data, Cleared)


def _cut(kv: RouterHarness, problem: Problem, whole: Reproduction, replayer: Replayer) -> Reproduction:
    recording = kv.recording
    if whole.level == "requests":
        operations = [*_operations(recording.recorded())]
        if len(recording.operations) >= MOST:
            raise NotReduced(f"the test did more than {MOST:,} operations")
        requests = sum(isinstance(step, Prefill | Submit) for step, _ in operations)
        if not requests:
            raise NotReduced("no worker served a request: moves on a bare manager cannot be replayed")
        whole = whole.replace(cut_from=requests, breach=whole.breach.replace(block=None, expected=None))
        whole = whole.replace(**_engines(kv))
        return RequestCutter(whole, operations, _around(kv, problem), replayer).cut()
    if problem.rule in _NEEDS_AN_ENGINE:
        raise NotReduced("what an engine holds cannot be replayed from its events")
    if _is_watched(kv):
        raise NotReduced("events that are not published cannot be replayed")
    if any(not stream.spec.clears_below for stream in kv.inside.streams.values()):
        raise NotReduced("events do not say how large the chunks of a host are, nor that a Cleared leaves it")
    arrivals = _upto(recording.arrivals, problem.position)
    # If an index queues events, later events before its flush may be the cause.
    is_late = whole.sync != "auto" or whole.aflush is not None
    later = recording.arrivals[len(arrivals) :] if is_late else []
    whole = whole.replace(cut_from=kv.events.total)
    # Hashes must follow the engine's chain only if the problem is a wrong hash; otherwise blocks get other names. A
    # capacity is only set if the problem is about it; otherwise it would only make the test longer.
    chained = {a.worker_id for a in arrivals if not isinstance(a, NoEvent) and a.chained and problem.rule == WRONG_HASH}
    with_capacity = problem.rule == OVER_CAPACITY
    tier = problem.storage_tier
    kinds = {
        worker_id: _sink_kind(about.spec, tier if with_capacity else None, chained=worker_id in chained)
        for (worker_id, rank), about in kv.inside.streams.items()
        if not rank
    }
    if with_capacity:  # only the held blocks matter, not the removed ones or the number of events
        with suppress(NotReduced):
            held = _held(arrivals, whole.breach.worker, tier)
            return EventCutter(whole, held, replayer, kinds, sinks=kv.recording.sinks).cut()
    return EventCutter(whole, arrivals, replayer, kinds, sinks=kv.recording.sinks, later=later).cut()


def _sink_kind(spec: StreamSpec, tier: StorageTier | None, *, chained: bool) -> SinkKind:
    """Return the sink that replaces an engine, with its capacity in one tier, or without one."""
    most = None if tier is None else spec.capacity(tier)
    on_device = tier is StorageTier.DEVICE
    below = None if tier is None or most is None or on_device else {tier.value: most}
    named = (spec.hash, spec.seed) if chained else (None, None)
    return SinkKind(chained, most if on_device else None, below, spec.residency, spec.prefix_closed, *named)


def _engines(kv: RouterHarness) -> dict[str, Any]:
    """Return the fields of a reproduction that describe the engines of its workers."""
    if not kv.recording.engines:
        return {}
    from pytest_kvmock.harness.engines import engine_fields  # imported on first use

    made = {key: engine_fields(args, kv.profile, spec) for key, (args, spec) in kv.recording.engines.items()}
    first, *others = made.values()
    if all(fields == first for fields in others):
        return {"engine": first, "judge_unpublished": _is_watched(kv)}
    own = tuple((key, fields) for key, fields in made.items() if fields)
    return {"engines": own, "judge_unpublished": _is_watched(kv)}


def _is_watched(kv: RouterHarness) -> bool:
    """Whether unpublished events were judged."""
    return any(worker.is_watched for worker in kv.workers.values())


def _operations(recorded: Iterable[RecordedOperation]) -> Iterator[RecordedOperation]:
    """Yield the operations with their tokens as values; skip those with invalid tokens."""
    for step, at in recorded:
        if isinstance(step, Decode) and not isinstance(step.tokens, int):
            with suppress(TypeError, ValueError):
                yield RecordedOperation(replace(step, tokens=Prompt.of(step.tokens).tokens or ()), at)
        else:
            yield RecordedOperation(step, at)


def _upto(arrivals: list[Arrival], position: int) -> list[Arrival]:
    """Return the arrivals up to an event, given by its number in the log."""
    count = -1
    for i, arrival in enumerate(arrivals):
        if not isinstance(arrival, NoEvent):
            count += 1
            if count > position:  # batches lost after the event are recorded before the next event
                return arrivals[:i]
    if len(arrivals) >= MOST:
        raise NotReduced(f"it shows after more than {MOST:,} events")
    return arrivals


def _held(arrivals: list[Arrival], key: StreamKey, tier: StorageTier) -> list[Arrival]:
    """Return Stored of the blocks that a worker and rank holds in a tier after these arrivals, one for each copy."""
    held: dict[int, list[int]] = {}  # the local hash of each copy
    worker_id, rank = key
    for arrival in arrivals:
        if isinstance(arrival, WorkerRemoved):
            if arrival.worker_id == worker_id and arrival.dp_rank in (None, rank):
                held.clear()
            continue
        if isinstance(arrival, BatchesLost):
            continue
        event, data = arrival, arrival.data
        if event.key != key:
            continue
        if isinstance(data, Cleared):
            held.clear()
        elif isinstance(data, SparseStored | Located | Updated):
            continue
        elif event.storage_tier is tier and isinstance(data, Stored):
            for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
                held.setdefault(block, []).append(local)
        elif event.storage_tier is tier:
            for block in data.block_hashes:
                copies = held.get(block, [])
                del copies[-1:]
                if not copies:
                    held.pop(block, None)
    out: list[Arrival] = []
    while held:
        data = Stored(None, tuple(held), tuple(copies[0] for copies in held.values()))
        out.append(RouterEvent(worker_id, KvCacheEvent(len(out), data, rank), tier))
        held = {block: copies[1:] for block, copies in held.items() if copies[1:]}
    return out


def _around(kv: RouterHarness, problem: Problem) -> list[int]:
    """Return the numbers of events near the cause: the one that shows the problem, the last that names its block."""
    places = [] if problem.event is None else [problem.position]
    position = -1
    named = None
    for arrival in kv.recording.arrivals:
        if isinstance(arrival, NoEvent):
            continue
        position += 1
        data = arrival.data
        if (
            isinstance(data, (Stored, Removed))
            and problem.block in data.block_hashes
            and arrival.worker_id == problem.worker_id
        ):
            named = position
    return places if named is None or named in places else [*places, named]


def _finished(found: Reproduction, replayer: Replayer) -> Reproduction:
    """Return the program with its number of replays, and the other rules that it breaks."""
    if found.unwritable is not None:
        raise NotReduced(f"it depends on an engine's {found.unwritable}, which is a Python object and no literal")
    replays = replayer.budget.replays
    replayer.budget = Budget(WORK)  # the last replays have a full budget; the program is short
    if found.as_test().count("\n") > MOST_LINES or not (
        len(found.steps) <= ASKED_ALWAYS or replayer.breaks(found, as_test=True)
    ):
        raise NotReduced(f"cut to {found.size:,} of {found.cut_from:,} {found.level} before the limit was reached")
    plain = found.replace(sync="auto")
    if found.sync != "auto" and replayer.breaks(plain, as_test=True):
        found = plain
    besides = {p.rule for p in replayer.verdict(found).errors} & replayer.ignored - {found.rule}
    return found.replace(allow=tuple(sorted(besides)), replays=replays)
