"""The host time that a scheduler needs for an engine of a P/D pair, with the requests that wait for a load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pytest_kvmock.engines.vllm.pairs.legs import Leg
    from pytest_kvmock.engines.vllm.pairs.port import PairPort


class PairParking:
    """The requests of a scheduler that wait for KV from another engine; see `host_time.Waits`.

    Args:
        port: port of the engine.
        running: returns the running requests.
    """

    parks_preempted = True
    deadline = None
    """It has no deadline of its own: the shared clock wakes its engine."""

    def __init__(self, port: PairPort, running: Callable[[], Sequence[Any]]) -> None:
        self._port, self._running = port, running
        self._parked: dict[Leg, Any] = {}
        self._ahead: dict[Any, Leg] = {}  # received or taken up; they wait again, before all others

    @property
    def requests(self) -> Sequence[Any]:
        """The waiting requests, in order of admission."""
        return tuple(self._parked.values())

    @property
    def is_quiet(self) -> bool:
        """Whether no received request waits for a pass, so that the engine may skip passes."""
        return not any(leg.status == "received" for leg in self._parked)

    def first(self) -> Any:
        """Return the request to admit before all requests without blocks, preempted ones included; None if there is
        none.
        """
        while self._ahead:
            request, leg = next(iter(self._ahead.items()))
            if leg.finish is None:
                return request
            del self._ahead[request]  # it was aborted
        return None

    def request_of(self, leg: Leg) -> Any:
        """Forget the request of a leg whose load failed, and return it; None if there is none."""
        return self._parked.pop(leg, None)

    def park(
        self,
        request: Any,
        cached_tokens: int,
        now_ms: float,  # noqa: ARG002 - the port has it
    ) -> Literal["parked", "blocked", "none"]:
        """Give a request blocks for the part of its prompt that another engine has.

        Return "blocked" if there is no room in addition to the blocks that other requests still need, "none" if it
        loads nothing.
        """
        port = self._port
        leg = port.leg(request.state)
        if leg is None:
            return "none"
        if not request.computed_tokens and port.side.look_up(leg, cached_tokens):
            prefills = [each.state for each in self._running() if each.computed_tokens < each.prompt_tokens]
            if not port.side.load(leg, prefills):
                return "blocked"
            self._parked[leg] = request
            return "parked"
        port.side.started(leg)
        return "none"

    def take_back(self) -> list[Any]:
        """Take out the requests whose loads were reported. Their blocks have no names yet."""
        if self.is_quiet:
            return []
        out = []
        for leg in [leg for leg in self._parked if leg.status == "received"]:
            request = self._parked.pop(leg)
            request.computed_tokens = min(request.state.num_computed_tokens, len(request.state) - 1)
            self._ahead[request] = leg
            out.append(request)
        return out

    def land(self, request: Any) -> None:
        """Name the received blocks of a request, which the scheduler has reached."""
        leg = self._ahead.get(request)
        if leg is not None and leg.status == "received":
            self._port.side.take_up(leg)
            request.computed_tokens = request.state.num_computed_tokens

    def landed_tokens(self, request: Any) -> int:
        """Return the number of tokens that a request, which is admitted now, did not compute."""
        leg = self._ahead.pop(request, None)
        if leg is None:
            return 0
        self._port.side.holding.remove(leg)
        return leg.cached_tokens

    def give_up(self, request: Any) -> None:
        """Forget a waiting request; its blocks are freed once the read into them has ended."""
        leg = self._port.leg(request.state)
        assert leg is not None  # it was parked
        self._parked.pop(leg, None)
        self._ahead.pop(request, None)
        self._port.driver.free(request.state, done=True)


class PairTime:
    """The part of a `HostTime` that a scheduler uses, for an engine of a pair.

    Args:
        port: port of the engine.
        running: returns the running requests.

    Attributes:
        parking: the requests that wait for a load.
        now: the time in ms.
    """

    sees_each_step = False
    may_do_more = False
    """Arrived loads are reported with the step of the port, after a pass."""

    def __init__(self, port: PairPort, running: Callable[[], Sequence[Any]]) -> None:
        self._port = port
        self.parking = PairParking(port, running)
        self.now = 0.0

    def start_pass(self, now: float) -> None:
        """Begin a pass."""
        self.now = now
        if not self._port.has_clock:
            self._port.now_s = max(self._port.now_s, now / 1000)

    def end_pass(self) -> float:
        """End the scheduling of a pass, which waits for nothing; its step ends with the pass (`PairPort.step`)."""
        return 0.0
