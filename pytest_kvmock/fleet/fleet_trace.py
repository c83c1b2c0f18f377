"""What a fleet is given to serve, and what it says about it afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_kvmock.fleet.report import ReplayReport

if TYPE_CHECKING:
    from pytest_kvmock.engine.scheduler import ScheduledRequest
    from pytest_kvmock.router.routing import Worker
    from pytest_kvmock.tokens import Prompt, TokenIds


@dataclass(frozen=True, slots=True)
class FleetRequest:
    """One request for a fleet, where a trace's hash ids do not say enough: with tokens, an adapter, or a salt.

    Attributes:
        prompt: a `Prompt`, or token ids.
        output_tokens: tokens to generate.
        timestamp: arrival in milliseconds; None: with the first, or as soon as others are done.
        session_id: the conversation that it is a turn of; None: of none.
        delay: milliseconds between the end of the session's turn before and this one; None: the timestamps say.
        priority: larger is served first, where engines have priorities.
    """

    prompt: Prompt | TokenIds
    output_tokens: int
    timestamp: float | None = None
    session_id: str | None = None
    delay: float | None = None
    priority: int = 0

    @property
    def output_length(self) -> int:
        """Tokens to generate, by the name that a `TraceRequest` has for them."""
        return self.output_tokens


class Pick(NamedTuple):
    """One choice of the router.

    Attributes:
        ms: when, in virtual milliseconds.
        number: the request, by the order of arrival, from 0.
        worker: who was picked.
        overlap: blocks of the prompt that the worker held then, by the events delivered.
        best_overlap: the most that any candidate held.
        waited_ms: how long the request had waited in the router.
        attempt: 1, or one more for each time that it was sent anew.
    """

    ms: float
    number: int
    worker: Worker
    overlap: int
    best_overlap: int
    waited_ms: float = 0.0
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class FleetReport(ReplayReport):
    """What a fleet served, and where the router sent it. Its figures are those of the replay of the engines' release.

    Attributes:
        replay: the report of the engines' release, where its figures come from.
        picks: the choices of the router, in order.
    """

    replay: ReplayReport | None = None
    picks: Sequence[Pick] = ()

    @classmethod
    def of(cls, replay: ReplayReport, picks: Sequence[Pick]) -> FleetReport:
        """Return the report of a replay, with the picks."""
        return cls(replay.requests, replay.passes, replay.served_by, replay.handoffs, replay, picks)

    @property
    def _figures(self) -> ReplayReport:
        assert self.replay is not None
        return self.replay

    @property
    def completed(self) -> list[ScheduledRequest]:
        """The requests that finished."""
        return self._figures.completed

    @property
    def duration_ms(self) -> float:
        """From the first arrival to the last token of requests that completed; 0 where none did."""
        return self._figures.duration_ms

    def to_json(self) -> dict[str, Any]:
        """Return all figures, by the keys of Dynamo's replay; times in milliseconds."""
        return self._figures.to_json()

    def per_request(self) -> list[dict[str, Any]]:
        """Return a row a request, by the keys of Dynamo's report of its release."""
        return self._figures.per_request()
