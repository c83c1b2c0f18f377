"""Plays a scenario on a harness, step by step, and stops at the first expectation that is not met.

One subject: what each step does, and what each expectation checks.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from pytest_kvmock.contrib.scenarios.fields import IN_FILES, OF_A_SINK, PROMPT_KEYS
from pytest_kvmock.engines.base.driver import SlotsLost, WouldWait
from pytest_kvmock.engines.worker import OutOfBlocks, RequestError
from pytest_kvmock.fleets.clock.engine_state import EngineStalled
from pytest_kvmock.harness.user_sink import FIRST_SINK_WORKER
from pytest_kvmock.oracle.hygiene.log import Expectation
from pytest_kvmock.oracle.hygiene.report import problem_text
from pytest_kvmock.values.checks import did_you_mean
from pytest_kvmock.values.events import (
    Cleared,
    EventData,
    KvCacheEvent,
    Located,
    Removed,
    RouterEvent,
    SparseStored,
    StorageTier,
    Stored,
    Updated,
)
from pytest_kvmock.values.plh import lineage_hash
from pytest_kvmock.values.programs.forms import OnRequest, OnWorker, Operation, WithPrompt
from pytest_kvmock.values.programs.interpreter import Interpreter
from pytest_kvmock.values.programs.operations import Abort, Clear, RemoveWorker
from pytest_kvmock.values.tokens import Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from pytest_kvmock.contrib.scenarios.values import Numbers, Scenario, Step, WorkerName
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.engines.worker import KvWorker
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine
    from pytest_kvmock.harness import RouterHarness
    from pytest_kvmock.values.moves import Block
    from pytest_kvmock.values.strict_yaml import Place

REFUSALS: Final = (OutOfBlocks, RequestError, EngineStalled, WouldWait, SlotsLost, ValueError, TypeError)
"""Errors of a step that cannot be done as written (a `MoveError` is a ValueError)."""


FIRST: Final = (0, 0)
"""The default worker of a step."""


class ScenarioFailure(AssertionError):  # noqa: N818 - the name says what failed
    """An expectation of a scenario is not met. The first line of the message begins with file and line.

    Attributes:
        place: the expectation, or the step that was refused.
    """

    def __init__(self, place: Place, message: str) -> None:
        super().__init__(f"{place.file}:{place.line}: {message}")
        self.place = place


def play(harness: RouterHarness, scenario: Scenario, *, allow: Collection[str] = (), errors_fail: bool = True) -> None:
    """Play a scenario on your own harness, optionally with your own index.

    Args:
        harness: the harness. It must be new, and have the fields of `Scenario.profile`.
        scenario: the scenario to play.
        allow: rules that may be broken without consequence, in addition to those of the scenario.
        errors_fail: whether an unexpected event error fails at its step; if not, it is left to the harness's own check.

    Raises:
        ValueError: the harness has another profile than the scenario, or no index where it needs one.
        ScenarioFailure: an expectation is not met, a step was refused, or an unexpected event error came.
    """
    __tracebackhide__ = True
    for field, wanted in scenario.profile.items():
        have = getattr(harness.profile, field)
        if have != wanted and field != "seed":
            raise ValueError(f"{scenario.place}: the scenario needs {field}={wanted!r}, the harness has {have!r}")
    if scenario.needs_index and harness.index is harness.inside.reference:
        raise ValueError(f"{scenario.place}: the scenario needs an index under test, and the harness has none")
    have = {name: store.to_dict() for name, store in harness.inside.reference.stores.items()}
    if scenario.stores and scenario.stores != have:
        raise ValueError(f"{scenario.place}: the scenario wants stores={scenario.stores!r}, the harness has {have!r}")
    player = _Player(harness, frozenset((*scenario.allow, *allow)), scenario.engine, errors_fail=errors_fail)
    for step in scenario.steps:
        player.play(step)


class _After(NamedTuple):
    """The values that expectations can check after a step."""

    manager_of: Callable[[], KvManager]  # called only to check blocks: a worker may exist only as a name in events
    engine_of: Callable[[], MockEngine]  # as above
    answer: Any
    events: list[RouterEvent]


class _Player:
    """The state while a scenario is played: requests and partial blocks by name, and the events checked so far."""

    def __init__(
        self, harness: RouterHarness, allow: frozenset[str], engine: Mapping[str, Any], *, errors_fail: bool
    ) -> None:
        self._harness = harness
        self._allow = allow
        self._errors_fail = errors_fail
        self._interpreter = Interpreter(harness)
        self._workers: dict[str, WorkerName] = {}  # by request
        self._partials: dict[str, UUID] = {}
        self._engine_fields = engine
        self._engines: set[WorkerName] = set()  # the sinks made with these arguments
        self._sinks = 0
        self._unnamed = 0
        self._seen = 0  # events of the log
        self._judged = 0  # problems of the log

    def play(self, step: Step) -> None:
        __tracebackhide__ = True
        answer = self._do(step) if step.action else None
        self._harness.flush()
        events = [entry.event for entry in self._harness.events]
        new, self._seen = events[self._seen :], len(events)
        worker = self._worker_of(step.given) if step.worker is None else step.worker
        after = _After(lambda: self._worker(worker).manager, lambda: self._engine(worker), answer, new)
        for name, (place, wanted) in step.expected.items():
            if name in ("refused", "problems"):
                continue
            right, have = getattr(self, f"_look_{name}")(wanted, after)
            if right != have:
                raise ScenarioFailure(place, f"expect {name} {right}: got {have}")
        self._judge(step)

    def _do(self, step: Step) -> Any:
        __tracebackhide__ = True
        refused = step.expected.get("refused")
        try:
            kind = IN_FILES.get(step.action)
            if kind is not None:
                answer = self._operate(kind, step.given)
            else:
                answer = getattr(self, f"_do_{step.action}")(**step.given)
        except REFUSALS as error:
            refusal = f"{type(error).__name__}: {error}"
            if refused is None and isinstance(error, WouldWait):  # the expected refusal
                return None
            if refused is None:
                raise ScenarioFailure(step.place, f"{step.action} was refused: {refusal}") from None
            if refused.value not in refusal:
                raise ScenarioFailure(refused.place, f"expect refused {refused.value!r}: got {refusal!r}") from None
            return None
        if refused is not None:
            raise ScenarioFailure(refused.place, f"expect refused {refused.value!r}: it was not")
        return answer

    def _judge(self, step: Step) -> None:
        """Compare the new problems with those that the step expects; unexpected warnings are allowed."""
        __tracebackhide__ = True
        events = self._harness.events
        fresh, self._judged = events.problems[self._judged :], len(events.problems)
        new = [p for p in fresh if p.cause is None and p.expected_by is None and p.rule not in self._allow]
        expected = step.expected.get("problems")
        if expected is None:
            errors = [problem for problem in new if problem.is_error]
            if self._errors_fail and (errors := events.unwaived(errors)):
                errors[0].expected_by = Expectation(events, errors[0].rule, 1)  # reported here, and only once
                raise ScenarioFailure(step.place, f"{errors[0].rule}\n\n{problem_text(errors[0])}")
            return
        have = [problem.rule for problem in new]
        if sorted(have) != sorted(expected.value):
            message = f"expect problems {expected.value}: got {have}"
            surplus = [problem_text(problem) for problem in new if problem.rule not in expected.value]
            raise ScenarioFailure(expected.place, "\n\n".join([message, *surplus[:1]]))
        for problem in new:
            problem.expected_by = Expectation(events, problem.rule, 1)

    # ------------------------------------------------------------------------------------------------- actions

    def _worker_of(self, given: Mapping[str, Any]) -> WorkerName:
        """Return the worker of a step."""
        name = given.get("request")
        if name in self._workers:
            return self._workers[name]
        worker: WorkerName = given.get("worker", given.get("id", FIRST))
        return worker if isinstance(worker, tuple) else FIRST

    def _worker(self, worker: WorkerName, backend: str | None = None) -> KvWorker:
        """Return the worker with an id; in a file, ids from 2**16 on are sinks."""
        if worker[0] >= FIRST_SINK_WORKER:
            raise ValueError(f"a worker id is an integer from 0 to {FIRST_SINK_WORKER - 1} here, got {worker[0]}")
        return self._harness.worker(worker[0], dp_rank=worker[1], backend=backend)

    def _engine(self, worker: WorkerName, **fields: Any) -> MockEngine:
        """Return the engine of a worker, made with the scenario's fields and these."""
        self._worker(worker)
        if worker in self._engines and not fields:
            return self._harness.engine(worker[0], dp_rank=worker[1])
        engine = self._harness.engine(worker[0], dp_rank=worker[1], **{**self._engine_fields, **fields})
        self._engines.add(worker)
        return engine

    def _operate(self, kind: type[Operation], given: Mapping[str, Any]) -> Any:
        """Do the operation of a step."""
        name, worker = given.get("request"), given.get("worker", FIRST)
        if issubclass(kind, OnWorker):
            if name is not None:
                self._check_free(name)
            (self._engine if kind.whose == "engine" else self._worker)(worker)
        elif kind is RemoveWorker:
            self._check_known(worker[0] if isinstance(worker, tuple) else worker)
        begins = issubclass(kind, OnRequest) and issubclass(kind, WithPrompt)
        if begins and name is None:
            given = {**given, "request": self._unnamed}
            self._unnamed += 1
        step = kind.from_yaml(given, self._harness.profile.block_size)
        if isinstance(step, OnRequest) and not begins:
            self._check_whose(step)
        answer = self._interpreter.do(step)
        if begins and name is not None:
            self._workers[name] = worker
        elif kind is Clear and not answer:
            raise RequestError(f"worker {worker[0]} is not cleared while requests are open or blocks in use")
        elif kind is RemoveWorker:
            self._engines = {of for of in self._engines if worker not in (of, of[0])}
        return answer

    def _check_whose(self, step: OnRequest) -> None:
        """Check that an operation fits its kind of request, a worker's or an engine's."""
        request = self._request(str(step.name))
        of_engine = step.name in self._interpreter.submitted
        if of_engine != isinstance(step, Abort):
            whose = "an engine's, which finishes it or aborts it" if of_engine else "not an engine's: finish it"
            raise RequestError(f"{step.kind} on a request that is {whose}; it is {request.status}")

    def _check_known(self, worker: int) -> None:
        """Check that a worker or a sink has this id."""
        known = {made.worker_id for made in self._harness.workers.values()}
        known |= {entry.event.worker_id for entry in self._harness.events}
        if worker not in known:
            raise ValueError(f"there is no worker {worker}; there are: {', '.join(map(str, sorted(known))) or 'none'}")

    def _request(self, name: str) -> Any:
        """Return a request of a worker or of an engine."""
        known = {**self._interpreter.requests, **self._interpreter.submitted}
        if name not in known:
            names = [str(each) for each in known if isinstance(each, str)]
            all_names = f"known: {', '.join(names) or 'none'}"
            raise ValueError(f"no request is named {name!r}{did_you_mean(name, names, all_names)}")
        return known[name]

    def _check_free(self, name: str) -> None:
        """Check that no open request has this name."""
        requests, submitted = self._interpreter.requests, self._interpreter.submitted
        is_open = name in requests and requests[name].status in ("running", "preempted")
        if is_open or (name in submitted and submitted[name].is_open):
            raise ValueError(f"a request named {name!r} is open already")
        requests.pop(name, None)
        submitted.pop(name, None)

    def _block(self, block: int | str) -> Block:
        if isinstance(block, int):
            return block
        return self._partials.setdefault(block, UUID(int=len(self._partials) + 1))

    def _do_use(self, blocks: list[int | str], worker: WorkerName = FIRST, plhs: Any = None, **given: Any) -> int:
        if plhs is not None:
            given["plhs"] = [lineage_hash(*parts) for parts in plhs]
        return self._worker(worker).manager.use(map(self._block, blocks), **given)

    def _do_deref(self, blocks: list[int | str], worker: WorkerName = FIRST) -> None:
        self._worker(worker).manager.deref(map(self._block, blocks))

    def _do_promote(self, partial: str, block: int, worker: WorkerName = FIRST, plh: Any = None, **given: Any) -> None:
        if plh is not None:
            given["plh"] = lineage_hash(*plh)
        uuid = self._block(partial)
        assert isinstance(uuid, UUID)
        self._worker(worker).manager.promote(uuid, block, **given)

    def _do_engine(self, fields: Mapping[str, Any], worker: WorkerName = FIRST) -> None:
        self._engine(worker, **fields)

    def _do_worker(self, id: WorkerName, backend: str | None = None) -> None:  # noqa: A002 - the key in the file
        self._worker(id, backend)

    def _do_event(
        self,
        worker: WorkerName = FIRST,
        tier: StorageTier = StorageTier.DEVICE,
        token_ids: Any = None,
        extra: Any = None,
        **given: Any,
    ) -> None:
        data: EventData = Cleared()
        if "span" in given:
            data = SparseStored(given.get("parent"), tuple(given["stored"]), given["span"], given["block_size"])
        elif "stored" in given:
            blocks = tuple(given["stored"])
            data = Stored(given.get("parent"), blocks, tuple(given.get("local_hashes", (b % 2**64 for b in blocks))))
        elif "removed" in given:
            data = Removed(tuple(given["removed"]))
        elif "located" in given:
            data = Located(tuple(given["located"]))
        elif "updated" in given:
            data = Updated(given["updated"], given.get("levels"), given.get("priorities"))
        self._make_sinks(worker, given)
        event_id = given["id"] if "id" in given else self._harness.by_hand.next_id(*worker)
        tokens = None if token_ids is None else [_expanded(ids) for ids in token_ids]
        event = KvCacheEvent(event_id, data, worker[1])
        self._harness.by_hand.keys.add(worker)
        self._harness.publisher.publish(
            RouterEvent(worker[0], event, tier, tokens, extra, chained=given.get("chained", False))
        )

    def _do_lost_batches(
        self, first: int, count: int, worker: WorkerName = FIRST, observed: str = "", **given: Any
    ) -> None:
        self._make_sinks(worker, given)
        self._harness.inside.lost_batches(*worker, range(first, first + count), observed)

    def _make_sinks(self, worker: WorkerName, given: Mapping[str, Any]) -> None:
        """Make the sink of a step, if this is its first step."""
        while worker[0] - FIRST_SINK_WORKER >= self._sinks:
            self._harness.make_sink(**{key: given[key] for key in OF_A_SINK if key in given})
            self._sinks += 1

    def _do_fault(self, fault: str, arguments: Mapping[str, Any] | tuple[Any, ...]) -> None:
        inject = getattr(self._harness.faults, fault)
        if isinstance(arguments, tuple):
            inject(*arguments)
        else:
            inject(**arguments)

    # ------------------------------------------------------------------------------- expectations: (right, have)

    @staticmethod
    def _look_allocated(wanted: int, after: _After) -> tuple[Any, Any]:
        return wanted, after.answer

    _look_cached_tokens = _look_allocated

    @staticmethod
    def _look_events(wanted: list[dict[str, Any]], after: _After) -> tuple[Any, Any]:
        padded = [*wanted, *({} for _ in after.events)]
        have = [_as_expected(event, like) for event, like in zip(after.events, padded, strict=False)]
        if have != wanted:  # the message names tiers below the device, expected or not
            for fields, event in zip(have, after.events, strict=True):
                if event.storage_tier is not StorageTier.DEVICE:
                    fields.setdefault("tier", event.storage_tier.value)
        return [_plain(like) for like in wanted], have

    def _look_active(self, wanted: Any, after: _After) -> tuple[Any, Any]:
        if isinstance(wanted, int):
            return wanted, after.manager_of().num_active_blocks
        active = after.manager_of().active_blocks
        have = dict(zip(self._as_written(active), active.values(), strict=True))
        return (wanted, have) if isinstance(wanted, dict) else (_sorted(wanted), _sorted(have))

    def _look_inactive(self, wanted: Any, after: _After) -> tuple[Any, Any]:
        if isinstance(wanted, int):
            return wanted, after.manager_of().num_inactive_blocks
        return _sorted(wanted), _sorted(self._as_written(after.manager_of().inactive_blocks()))

    def _look_eviction_order(self, wanted: list[int], after: _After) -> tuple[Any, Any]:
        return wanted, self._as_written(after.manager_of().inactive_blocks())

    def _as_written(self, blocks: Iterable[Block]) -> list[Any]:
        """Return blocks as the file writes them: partial blocks by their names."""
        names: dict[Block, str] = {uuid: name for name, uuid in self._partials.items()}
        return [names.get(block, block) for block in blocks]

    def _look_overlap(self, wanted: dict[str, Any], after: _After) -> tuple[Any, Any]:  # noqa: ARG002 - like the others
        prompt = {key: value for key, value in wanted.items() if key not in ("workers", "tier")}
        tier = wanted.get("tier", StorageTier.DEVICE)
        return wanted["workers"], self._harness.overlap(_prompt(prompt), tier)

    def _look_requests(self, wanted: Mapping[str, Mapping[str, Any]], after: _After) -> tuple[Any, Any]:  # noqa: ARG002 - as above
        return wanted, {name: self._as_it_is(name, like) for name, like in wanted.items()}

    def _as_it_is(self, name: str, like: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a request in the fields of `like`; None for a field that a worker's request does not
        have.
        """
        try:
            request = self._request(name)
        except ValueError as error:
            return {"error": str(error)}
        return {field: getattr(request, field, None) for field in like}

    def _look_metrics(self, wanted: Mapping[str, Any], after: _After) -> tuple[Any, Any]:
        engine = after.engine_of()
        metrics = engine.metrics
        return wanted, {name: engine.now_ms if name == "now_ms" else getattr(metrics, name) for name in wanted}


def _expanded(numbers: Numbers) -> list[int]:
    return [*chain.from_iterable(numbers)]


def _prompt(given: Mapping[str, Any]) -> Prompt:
    """Return the prompt that a step has."""
    keys = {name: given[name] for name in PROMPT_KEYS if name in given}
    if "tokens" in given:
        return Prompt(_expanded(given["tokens"]), **keys)
    return Prompt(hashes=_expanded(given["hashes"]), num_tokens=given.get("num_tokens"), **keys)


def _sorted(blocks: Any) -> list[Any]:
    return sorted(blocks, key=lambda block: (isinstance(block, str), block))


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an event as the file writes them, with the tier's name."""
    return {key: value.value if isinstance(value, StorageTier) else value for key, value in fields.items()}


def _as_expected(event: RouterEvent, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event as the file would write it, with the fields of `like`."""
    data = event.event.data
    if isinstance(data, Cleared):
        fields: dict[str, Any] = {"cleared": True}
    else:
        kind = data.kind
        fields = {kind: len(data.block_hashes) if isinstance(like.get(kind), int) else list(data.block_hashes)}
        if isinstance(data, Stored) and ("parent" in like or not like):
            fields["parent"] = data.parent_hash
    if "tier" in like:
        fields["tier"] = event.storage_tier.value
    if "worker" in like:
        fields["worker"] = event.worker_id, event.event.dp_rank
    return fields
