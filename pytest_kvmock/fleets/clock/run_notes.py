"""The notes of a run for its report: picks, the presence of workers, incidents. There is one note for each pick and
request, none for passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pytest_kvmock.fleets.report.rows import Happened, Pick, WorkerRow

if TYPE_CHECKING:
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine
    from pytest_kvmock.fleets.routing.routing import Phase, RouterRequest, Worker


# Fields of a row that an engine counts over all runs.
_COUNTED = ("passes", "prompt_tokens_computed", "blocks_evicted", "preemptions")


class _Term:
    """The time of one worker in the run, and its engine's counts before."""

    __slots__ = ("_offered", "_since", "before", "engine", "open", "phase", "since_ms", "until_ms")

    def __init__(self, engine: MockEngine, since_ms: float, picks: Mapping[Phase | None, int]) -> None:
        kind = engine.args.worker_type
        self.phase: Phase | None = kind if kind in picks else None  # type: ignore[assignment]  # it is a key of these
        self.engine = engine
        self.before = engine.inside.row
        self.since_ms = since_ms
        self.until_ms: float | None = None
        self._offered = 0  # picks of its earlier times as a candidate
        # Number of picks when it became a candidate; None: it is not a candidate.
        self._since: int | None = picks[self.phase]
        self.open = 0

    def is_candidate(self, picks: Mapping[Phase | None, int], *, still: bool) -> None:
        """Note whether the worker is a candidate from now on, after `picks`."""
        self._offered = self.offered(picks)
        self._since = picks[self.phase] if still else None

    def offered(self, picks: Mapping[Phase | None, int]) -> int:
        """Return the number of picks, out of `picks`, at which the worker was a candidate."""
        return self._offered + (0 if self._since is None else picks[self.phase] - self._since)


class RunNotes:
    """Notes of one run.

    Args:
        engines: the engines at its start, by worker.
        start_ms: when it starts.
        phases: the legs that a router picks for: (None,), or the roles of P/D pairs.

    Attributes:
        picks: the choices of the router, in order.
        happened: the incidents.
    """

    def __init__(
        self, engines: Mapping[Worker, MockEngine], start_ms: float, phases: Iterable[Phase | None] = (None,)
    ) -> None:
        self.picks: list[Pick] = []
        self._counts: dict[Phase | None, int] = dict.fromkeys(phases, 0)
        self.happened: list[Happened] = []
        self._terms = {worker: _Term(engine, start_ms, self._counts) for worker, engine in engines.items()}
        self._open: dict[tuple[RouterRequest, Phase | None], tuple[_Term, int]] = {}

    def picked(self, request: RouterRequest, pick: Pick) -> None:
        """Note a pick; the request counts as open from the next pick on."""
        self.picks.append(pick)
        self._counts[pick.phase] += 1
        term = self._terms[pick.worker]
        self._open[request, pick.phase] = term, term.offered(self._counts)

    def ended(self, request: RouterRequest) -> None:
        """Note that a request has ended."""
        self._end((request, request.phase))

    def _end(self, leg: tuple[RouterRequest, Phase | None]) -> None:
        noted = self._open.pop(leg, None)
        if noted is not None:
            term, since = noted
            # If the worker has left, only the picks at which it was a candidate count.
            term.open += term.offered(self._counts) - since

    def is_candidate(self, worker: Worker, *, still: bool) -> None:
        """Note whether a worker is a candidate from now on; it is not if it leaves, is cordoned, or its crash is
        noticed.
        """
        self._terms[worker].is_candidate(self._counts, still=still)

    def happens(self, now_ms: float, kind: str, worker: int, ranks: Any, lost: int = 0) -> None:
        """Note an incident, and which workers come or go.

        Args:
            now_ms: the time.
            kind: the kind of the incident.
            worker: the id of the worker.
            ranks: the router's names of its ranks, or of the worker itself; for a join, a mapping of these to their
                engines.
            lost: number of requests that it lost.
        """
        self.happened.append(Happened(now_ms, kind, worker, lost))
        for each in ranks:
            if kind == "join":
                self._terms[each] = _Term(ranks[each], now_ms, self._counts)
            elif kind in ("crash", "leave"):
                self._terms[each].until_ms = now_ms

    def close(self, now_ms: float) -> list[WorkerRow]:
        """End the notes; return the row of each worker, in order of arrival."""
        for leg in list(self._open):
            self._end(leg)
        found = []
        for position, (worker, term) in enumerate(self._terms.items()):
            row, before = term.engine.inside.row, term.before
            did: dict[str, Any] = {name: getattr(row, name) - getattr(before, name) for name in _COUNTED}
            found.append(
                row._replace(
                    worker=worker,
                    position=position,
                    since_ms=term.since_ms,
                    until_ms=now_ms if term.until_ms is None else term.until_ms,
                    open_requests=term.open,
                    picks=term.offered(self._counts),
                    role=term.phase,
                    **did,
                )
            )
        return found
