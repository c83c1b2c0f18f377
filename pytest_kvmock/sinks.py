"""Event sinks.

A manager publishes every event to its sink, and what the sink raises does not stop it: that is logged, and the event id
stays consumed (Dynamo, `KvEventPublishers`).
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Protocol

from pytest_kvmock.checks import has_parameter
from pytest_kvmock.events import BlockTokens, KvCacheEvent, RouterEvent, StorageTier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_kvmock.prompt_keys import EventExtra


class Sink(Protocol):
    """The protocol of sinks.

    Where a prompt carried more than tokens, a `publish` that has a parameter `extra` is given what travels beside the event
    (`prompt_keys.EventExtra`); one that has none gets the event all the same. Where a harness gives a sink the events of one
    worker (`add_sink(sink, worker_id=0)`), and the sink has a method `worker_restarted(dp_rank)`, that is called when a rank
    of the worker restarts.
    """

    def publish(
        self, event: KvCacheEvent, storage_tier: StorageTier = ..., token_ids: BlockTokens | None = ..., /
    ) -> None:
        """Publish one event.

        Args:
            event: what happened.
            storage_tier: where.
            token_ids: for a Stored, the token ids of each block, if the manager was given them.
        """


def publish_with_extra(
    sink: Sink, event: KvCacheEvent, storage_tier: StorageTier, token_ids: BlockTokens | None, extra: EventExtra
) -> None:
    """Publish an event with what travels beside it, or without it to a sink that does not take it."""
    publish: Any = sink.publish
    if has_parameter(publish, "extra"):
        publish(event, storage_tier, token_ids, extra=extra)
    else:
        publish(event, storage_tier, token_ids)


_DEVICE: Final = StorageTier.DEVICE
_ON_DEVICE: Final = (_DEVICE, None, None)  # what stands beside most events, made once: an object a Removed is dear


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
        """The same events with tier, token ids and what else travels with them, as a router would receive them."""
        return [RouterEvent(self.worker_id, e, *beside) for e, beside in zip(self.events, self._beside, strict=True)]

    def take(self) -> list[KvCacheEvent]:
        """Return what was captured, and forget it."""
        events, self.events, self._beside = self.events, [], []
        return events


class FanOutSink:
    """A sink that publishes to several others, in the order given; the first that raises keeps the event from those after it.

    Dynamo has two, the event sink before the raw sink that carries token ids, and this same rule.
    """

    def __init__(self, *sinks: Sink) -> None:
        self.sinks = sinks

    def publish(
        self,
        event: KvCacheEvent,
        storage_tier: StorageTier = StorageTier.DEVICE,
        token_ids: BlockTokens | None = None,
        extra: EventExtra | None = None,
    ) -> None:
        """Publish to each sink in turn."""
        for sink in self.sinks:
            if extra is None:
                sink.publish(event, storage_tier, token_ids)
            else:
                publish_with_extra(sink, event, storage_tier, token_ids, extra)


class JsonlRecorder:
    """A sink that writes each event as one line of Dynamo's JSON (a `RouterEvent`), without token ids.

    Args:
        target: where to write.
        worker_id: the worker that the lines name.
    """

    def __init__(self, target: IO[str], worker_id: int = 0) -> None:
        self._target = target
        self.worker_id = worker_id

    @classmethod
    @contextmanager
    def to_file(cls, path: str | Path, worker_id: int = 0) -> Iterator[JsonlRecorder]:
        """Record to a file of this name, as a context manager; a file that is there is replaced."""
        with Path(path).open("w", encoding="utf-8") as target:
            yield cls(target, worker_id)

    def publish(
        self,
        event: KvCacheEvent,
        storage_tier: StorageTier = StorageTier.DEVICE,
        token_ids: BlockTokens | None = None,  # noqa: ARG002 - Dynamo's JSON has no place for them
    ) -> None:
        """Write one line."""
        self._target.write(RouterEvent(self.worker_id, event, storage_tier).to_json() + "\n")
