"""The common part of vLLM's and SGLang's P/D handoffs: engines with ports, over a link.

Theory of operation. Both legs of a request are requests of their engines' schedulers. The ports handle everything
between two engines; a link gives the times and faults of transfers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, TypeVar, cast

from pytest_kvmock.fleets.clock.handoff import Handoff, Handoffs
from pytest_kvmock.values.checks import check_integer, check_number, is_integer

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.hand_over import HandOver
    from pytest_kvmock.engines.base.scheduled_request import ScheduledStatus
    from pytest_kvmock.engines.schedulers.scheduler import ForwardPass
    from pytest_kvmock.fleets.clock.arrivals import Arrivals
    from pytest_kvmock.fleets.clock.engine_request import EngineRequest
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine
    from pytest_kvmock.fleets.clock.passes import Passes


PortT = TypeVar("PortT")

FAULTS: Final = ("fails", "late", "handshake", "never", "stale", "used again")
"""The faults of a transfer.

In this order: it fails when its bytes would have arrived; it is late; no connection is made; its bytes never arrive;
its decode leg is sent when the lease is over; its parameters also go to a second decode leg.
"""


@dataclass(frozen=True, slots=True)
class PairLink:
    """A link between prefill and decode engines.

    Attributes:
        ms: returns the milliseconds for n tokens; None: by `kv_bytes_per_token` and `kv_transfer_bandwidth` of the
            prefill engine, or 0.
        faults: the fault of a transfer, one of `FAULTS`, by the request's place among those that are handed over, from
            0.
        late_ms: the additional time of a late transfer.

    Raises:
        ValueError: a fault is unknown, a place is not an integer of at least 0, or a time is not a number of at least
            0.
    """

    ms: Callable[[int], float] | None = None
    faults: Mapping[int, str] = field(default_factory=dict)
    late_ms: float = 1000.0

    def __post_init__(self) -> None:
        if self.ms is not None and not callable(self.ms):
            raise ValueError(
                f"link: ms must be a function of tokens that returns milliseconds, or None, got {self.ms!r:.80}"
            )
        check_number("link: late_ms", self.late_ms, unit=" (milliseconds)")
        for place, fault in self.faults.items():
            if not is_integer(place, 0):
                check_integer("link: faults: a place", place, 0)
            if fault not in FAULTS:
                raise ValueError(f"link: a fault must be {', '.join(map(repr, FAULTS))}, got {fault!r:.80}")

    def duration_ms(self, tokens: int, usual_ms: float) -> float:
        """Return the time of a transfer of `tokens` tokens, in milliseconds.

        Raises:
            ValueError: the function does not return a finite number of at least 0.
        """
        if self.ms is None:
            return usual_ms
        found = self.ms(tokens)
        if not isinstance(found, int | float) or not math.isfinite(found) or found < 0:
            raise ValueError(f"link: ms must return a finite number of at least 0 (milliseconds), got {found!r:.80}")
        return float(found)


class PairHandoffs(Handoffs, Generic[PortT]):
    """Handoffs of engines with ports, over a link.

    Args:
        sources: the prefill engines.
        expect: as of `Handoffs`.
        arrivals: as of `Handoffs`.
        passes: as of `Handoffs`.
        destinations: the decode engines.
        finished: called with a decode engine's request that ended with an error or was refused at once.
        link: the link between all of them.

    Attributes:
        at_once: whether both legs of a request are sent at once (Mooncake).
        on_answer: called with the answer of a prefill leg (None: an answer without parameters); if it is not set, the
            decode leg is sent at once.
    """

    keeps_blocks = True

    def __init__(
        self,
        sources: Sequence[MockEngine],
        expect: Callable[[Handoff], EngineRequest],
        arrivals: Arrivals,
        passes: Passes,
        destinations: Sequence[MockEngine],
        *,
        finished: Callable[[EngineRequest], None],
        link: PairLink,
    ) -> None:
        super().__init__(sources, expect, arrivals, passes)
        self._finished, self._link = finished, link
        self.on_answer: Callable[[Handoff, HandOver | None], None] | None = None
        self._engine_of: dict[PortT, MockEngine] = {each.worker.pair: each for each in (*sources, *destinations)}
        self._prepare()

    def _prepare(self) -> None:
        """Prepare the ports for this clock."""
        raise NotImplementedError

    @staticmethod
    def join_ranks(engines: Sequence[MockEngine]) -> None:
        """Join engines as the ranks of one worker, in this order."""
        if len(engines) > 1:
            ports = [each.worker.pair for each in engines]
            ports[0].join_ranks(ports)

    def _ended(self, engine: MockEngine, request: EngineRequest, status: ScheduledStatus, now_ms: float) -> None:
        """End a request of an engine early."""
        request.status, request.ended_ms = status, now_ms
        engine.worker.requests.remove(request)

    def _held(self, done: ForwardPass, now_ms: float) -> Iterator[tuple[Handoff, EngineRequest]]:
        """Yield the handoffs whose prompts a source has computed, with the source's requests."""
        for ended in done.finished:
            request = cast("EngineRequest", ended)  # it got no other requests
            handoff = self._of.pop(request)
            handoff.held_ms = now_ms
            yield handoff, request
