"""KV events that wait until they are polled, as TensorRT-LLM's do: `POST /kv_cache_events` returns and drops them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from pytest_kvmock.values.dialect import Dialect
from pytest_kvmock.wire.codec.batcher import Batcher
from pytest_kvmock.wire.codec.trtllm_json import event_row

if TYPE_CHECKING:
    from pytest_kvmock.values.events import RouterEvent


class NoFaults:
    """The faults of polled events, which have no wire.

    Attributes:
        unused: empty, as no fault can be requested.
    """

    unused: tuple[str, ...] = ()


class PolledEvents(Batcher):
    """Keeps the events of one worker's engines until they are taken. It replaces a `KvPublisher`.

    Args:
        dialect: TensorRT-LLM's dialect.
        ranks: number of data-parallel ranks.
        most: maximum number of kept events of a rank; older ones are dropped silently. None: all are kept.

    Attributes:
        endpoints: empty, as nothing is sent.
        replay_endpoints: empty.
        replays: empty.
        topic: empty.
        faults: has no faults.
        loads: None, as there is no load stream.
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
        """Do nothing: events wait unencoded."""

    def take(self) -> list[dict[str, Any]]:
        """Return the waiting events, rank by rank, and drop them."""
        with self._lock:
            rows = [row for of_rank in self._rows for row in of_rank]
            for of_rank in self._rows:
                of_rank.clear()
            return rows

    def batches(self, dp_rank: int) -> int:
        """Return the number of batches that a rank has published."""
        return self._batches[dp_rank]

    async def await_subscribed(self, subscribers: int, timeout: float) -> None:  # noqa: ASYNC109 - as of a KvPublisher
        """Return at once, as polled events have no subscribers."""

    def close(self) -> None:
        """Accept no more events."""
        self._closed = True
