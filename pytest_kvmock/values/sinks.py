"""Event sinks.

A manager publishes every event to its sink. An exception of the sink does not stop it: the exception is logged, the
event id stays consumed (Dynamo, `KvEventPublishers`), and the first exception is raised from the manager's call when
the move is over.

An event is one value, a `RouterEvent`, and `publish(event)` takes it. A manager has no worker id and publishes the
parts; the worker's `EventRecorder` makes the value. Sinks of other shapes are also accepted: `event_sink` adapts them
to take the value, `adapted` to take the parts.
"""

from __future__ import annotations

from functools import partial
from inspect import Parameter, isasyncgenfunction, iscoroutinefunction, isgeneratorfunction, signature
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias
from weakref import WeakKeyDictionary

from pytest_kvmock.values.checks import has_parameter
from pytest_kvmock.values.events import BlockTokens, KvCacheEvent, RouterEvent, StorageTier

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_kvmock.values.prompt_keys import EventExtra


class EventSink(Protocol):
    """The protocol of sinks.

    `RouterEvent` has the values that `KvCacheEventSink` of dynamo-mocker 1.2.1 gets, under the same names (`event_id`,
    `data`, `dp_rank`). If a harness gives a sink the events of one worker (`add_sink(sink, worker_id=0)`), it calls the
    sink's method `worker_restarted(dp_rank)`, if there is one, when a rank of the worker restarts.
    """

    def publish(self, event: RouterEvent, /) -> object:
        """Publish one event."""


class Sink(Protocol):
    """The receiver of a block manager's events, as parts and without a worker.

    If a prompt has keys, a `publish` with a parameter `extra` gets the extra fields of the event
    (`prompt_keys.EventExtra`); a `publish` without it gets only the event.
    """

    def publish(
        self, event: KvCacheEvent, storage_tier: StorageTier = ..., token_ids: BlockTokens | None = ..., /
    ) -> None:
        """Publish one event.

        Args:
            event: the event.
            storage_tier: the tier of its blocks.
            token_ids: for a Stored, the token ids of each block, if the manager has them.
        """


class TokenSink(Protocol):
    """A sink that takes the event and its token ids, like `KvCacheEventSink` of earlier releases of dynamo-mocker."""

    def publish(self, event: KvCacheEvent, token_ids: BlockTokens | None, /) -> object:
        """Publish one event."""


GivenSink: TypeAlias = "EventSink | Sink | TokenSink | Callable[..., object]"
"""A sink as a user gives it: an object of one of three shapes, or a function with the arguments of their `publish`."""


def event_sink(given: GivenSink, what: str = "sink") -> EventSink:
    """Return the sink itself if it takes events as values, else an adapter to it.

    The positional parameters of `publish` now show the shape; the method is looked up at each event. After the first, a
    parameter with a default counts only by its name: `storage_tier`, `tier`, `token_ids`, `extra`.

    Args:
        given: an object with a method `publish`, or a function.
        what: its name in messages.

    Raises:
        TypeError: it is neither, takes other arguments, or would have to be awaited or iterated.
    """
    takes, is_function = _shape_of(given, what)
    if takes == 1 and not is_function:
        return given  # type: ignore[return-value]  # as was checked
    return AdaptedSink(given, takes, is_function=is_function)


def adapted(given: GivenSink, what: str = "sink") -> Sink:
    """Return the sink itself if it takes a manager's parts, else an adapter to it; see `event_sink`."""
    takes, is_function = _shape_of(given, what)
    if takes == 3 and not is_function:
        return given  # type: ignore[return-value]  # as was checked
    return AdaptedSink(given, takes, is_function=is_function)


def _shape_of(given: GivenSink, what: str) -> tuple[int, bool]:
    """Return the number of positional arguments of a sink, and whether it is called directly instead of its
    `publish`.
    """
    publish = getattr(given, "publish", None)
    if isinstance(given, type):
        raise TypeError(f"{what} is the class {given.__name__}; it must be an object, {given.__name__}()")
    if not callable(publish) and not callable(given):
        raise TypeError(f"{what} must have a method {_SHAPES}, or be such a function; got {given!r:.80}")
    is_function = not callable(publish)
    call: Callable[..., object] = given if is_function else publish  # type: ignore[assignment]  # one of them is callable
    method = call.__func__ if isinstance(call, MethodType) and isinstance(call.__func__, FunctionType) else None
    if method is not None and method in _TAKEN:
        return _TAKEN[method], is_function
    name = f"{what} {given!r:.80}" if is_function else f"{what}: {type(given).__name__}.publish"
    _check_runs(call, name)
    takes = _count_arguments(call, name, unknown=1 if is_function else 3)
    if method is not None:
        _TAKEN[method] = takes
    return takes, is_function


def _check_runs(call: Callable[..., object], name: str) -> None:
    """Raise a TypeError for a function whose call does nothing: every event would be lost silently."""
    while isinstance(call, partial):
        call = call.func
    for each in (call, type(call).__call__):  # for an object, its class decides what a call does
        if iscoroutinefunction(each):
            raise TypeError(f"{name} is a coroutine function, and a manager does not await; give it a plain function")
        if isgeneratorfunction(each) or isasyncgenfunction(each):
            raise TypeError(f"{name} is a generator function, and a manager does not iterate; give it a plain function")


_SHAPES: Final = "publish(event), publish(event, token_ids) or publish(event, storage_tier, token_ids)"


_KNOWN: Final = ("event", "storage_tier", "tier", "token_ids", "extra")
"""Names by which parameters with a default get published values."""


def _count_arguments(call: Callable[..., object], name: str, unknown: int) -> int:
    """Return the number of positional arguments of a sink: 1, 2 or 3; `unknown` without a signature."""
    try:
        wanted = signature(call)
    except (TypeError, ValueError):
        return unknown
    names: list[str] = []
    for each in wanted.parameters.values():
        if each.kind is Parameter.VAR_POSITIONAL:
            names += ["event", "any", "any"]
        elif each.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
            if names and each.default is not Parameter.empty and each.name not in _KNOWN:
                break  # an option of the method, such as `block` of `Queue.put`
            names.append(each.name)
        if names[-1:] == ["extra"]:  # given by its name
            names.pop()
            break
    takes = min(len(names), 3)
    try:
        wanted.bind(*range(takes))
    except TypeError:
        takes = 0
    if not takes or (takes == 2 and names[1] in ("storage_tier", "tier")):
        raise TypeError(f"{name} takes {wanted}; a sink is called as {_SHAPES}")
    return takes


_TAKEN: Final[WeakKeyDictionary[FunctionType, int]] = WeakKeyDictionary()
"""Cache of the argument counts of methods, because each worker and manager would inspect them again."""


class AdaptedSink:
    """An adapter that takes an event as a value or in parts, for a sink of another shape or a function; see
    `event_sink`.

    Args:
        given: the sink that the user gave.
        takes: number of positional arguments of its call.
        is_function: whether it is called directly instead of its `publish`.
    """

    __slots__ = ("_is_function", "_takes", "given")

    def __init__(self, given: Any, takes: int, *, is_function: bool) -> None:
        self.given = given
        self._takes = takes
        self._is_function = is_function

    def publish(
        self,
        event: RouterEvent | KvCacheEvent,
        storage_tier: StorageTier = StorageTier.DEVICE,
        token_ids: BlockTokens | None = None,
        extra: EventExtra | None = None,
    ) -> None:
        """Publish in the shape that the sink takes; an event from a manager gets worker 0."""
        call = self.given if self._is_function else self.given.publish
        if not isinstance(event, RouterEvent):
            event = RouterEvent(0, event, storage_tier, token_ids, extra)
        bare, token_ids, extra = event.event, event.token_ids, event.extra
        arguments = ((event,), (bare, token_ids), (bare, event.storage_tier, token_ids))[self._takes - 1]
        call_with_extra(call, *arguments, extra=extra)


def given_sink(sink: EventSink | Sink | None) -> Any:
    """Return the sink that the user gave."""
    return sink.given if isinstance(sink, AdaptedSink) else sink


def sink_text(sink: EventSink) -> str:
    """Return the name of the sink's called method, for messages: "Listener.publish"."""
    given = given_sink(sink)
    if callable(getattr(given, "publish", None)):
        return f"{type(given).__name__}.publish"
    return str(getattr(given, "__qualname__", type(given).__name__))


def call_with_extra(call: Callable[..., object], *arguments: object, extra: EventExtra | None) -> None:
    """Call a sink, with the event's extra fields if there are any and the sink takes them."""
    if extra is not None and has_parameter(call, "extra"):
        call(*arguments, extra=extra)
    else:
        call(*arguments)


_DEVICE: Final = StorageTier.DEVICE
_ON_DEVICE: Final = (_DEVICE, None, None)  # shared by most events, because an object for each Removed is expensive


class CapturingSink:
    """A sink that keeps every event, in order.

    Args:
        worker_id: the worker that `router_events` names.
    """

    def __init__(self, worker_id: int = 0) -> None:
        self.worker_id = worker_id
        self.events: list[KvCacheEvent] = []
        self._beside: list[tuple[StorageTier, BlockTokens | None, EventExtra | None]] = []

    def publish(
        self,
        event: KvCacheEvent,
        storage_tier: StorageTier = StorageTier.DEVICE,
        token_ids: BlockTokens | None = None,
        extra: EventExtra | None = None,
    ) -> None:
        """Keep the event."""
        self.events.append(event)
        bare = token_ids is None and storage_tier is _DEVICE and extra is None
        self._beside.append(_ON_DEVICE if bare else (storage_tier, token_ids, extra))

    @property
    def router_events(self) -> list[RouterEvent]:
        """The captured events with tier, token ids and extra fields, as a router would receive them."""
        return [RouterEvent(self.worker_id, e, *others) for e, others in zip(self.events, self._beside, strict=True)]

    def take(self) -> list[KvCacheEvent]:
        """Return the captured events and drop them."""
        events, self.events, self._beside = self.events, [], []
        return events
