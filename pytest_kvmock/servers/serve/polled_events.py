"""KV events that wait until somebody asks for them, as TensorRT-LLM's do: `POST /kv_cache_events` answers and
forgets them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from pytest_kvmock.values.dialect import Dialect
from pytest_kvmock.wire.codec.batcher import Batcher
from pytest_kvmock.wire.codec.trtllm_json import event_row

if TYPE_CHECKING:
    from pytest_kvmock.values.events import RouterEvent


class NoFaults:
    """The faults of a wire that there is none of.

    Attributes:
        unused: none that was asked for is left.
    """

    unused: tuple[str, ...] = ()


class PolledEvents(Batcher):
    """Holds what the engines of one worker publish until it is taken; in the place of a `KvPublisher`.

    Args:
        dialect: TensorRT-LLM's.
        ranks: how many data-parallel ranks.
        most: the most events of a rank that are held; older ones are dropped silently. None: all are held.

    Attributes:
        endpoints: none, as nothing is sent.
        replay_endpoints: none.
        replays: none are asked for.
        topic: there is none.
        faults: there are none.
        loads: there are none.
    """

    loads: None = None

    def __init__(self, dialect: Dialect, *, ranks: int, most: int | None) -> None:
        super().__init__(dialect, ranks=ranks, timestamp=None, digests=None, widens=False)
        self._rows: list[deque[dict[str, Any]]] = [deque(maxlen=most) for _ in range(ranks)]
        self._batches = [0] * ranks
        self.endpoints: list[str] = []
        self.replay_endpoints: list[str] = []
        self.replays: list[Any] = []
        self.topic = ""
        self.faults = NoFaults()

    def _publish_batch(self, dp_rank: int, events: list[RouterEvent]) -> None:
        for event in events:
            row = event_row(event)
            if self.ranks > 1:
                row["attention_dp_rank"] = dp_rank
            self._rows[dp_rank].append(row)
        self._batches[dp_rank] += 1

    def _write(self, dp_rank: int, payload: bytes) -> None:
        """Write nothing: events wait as they are."""

    def take(self) -> list[dict[str, Any]]:
        """Return the events that wait, rank by rank, and forget them."""
        with self._lock:
            rows = [row for of_rank in self._rows for row in of_rank]
            for of_rank in self._rows:
                of_rank.clear()
            return rows

    def batches(self, dp_rank: int) -> int:
        """How many batches a rank has published."""
        return self._batches[dp_rank]

    async def await_subscribed(self, subscribers: int, timeout: float) -> None:  # noqa: ASYNC109 - as of a KvPublisher
        """Return: polled events have no subscribers."""

    def close(self) -> None:
        """Take no event any more."""
        self._closed = True
