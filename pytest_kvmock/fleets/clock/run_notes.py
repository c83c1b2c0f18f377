"""The notes of a run for its report: picks, the presence of workers, incidents. One note a pick and a request, nothing
a pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pytest_kvmock.fleets.report.rows import Happened, Pick, WorkerRow

if TYPE_CHECKING:
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine
    from pytest_kvmock.fleets.routing.routing import Phase, RouterRequest, Worker


# Fields of a row that an engine counts over all its runs.
_COUNTED = ("passes", "prompt_tokens_computed", "blocks_evicted", "preemptions")


class _Term:
    """A worker from when it came until it went, with what its engine had counted before."""

    __slots__ = ("_offered", "_since", "before", "engine", "open", "phase", "since_ms", "until_ms")

    def __init__(self, engine: MockEngine, since_ms: float, picks: Mapping[Phase | None, int]) -> None:
        kind = engine.args.worker_type
        self.phase: Phase | None = kind if kind in picks else None  # type: ignore[assignment]  # it is a key of these
        self.engine = engine
        self.before = engine.inside.row
        self.since_ms = since_ms
        self.until_ms: float | None = None
        self._offered = 0  # of picks that it was a candidate of, until it was none
        # How many picks there were when it became one; None: it is none.
        self._since: int | None = picks[self.phase]
        self.open = 0

    def is_candidate(self, picks: Mapping[Phase | None, int], *, still: bool) -> None:
        """Note whether it is a candidate from now on, after `picks`."""
        self._offered = self.offered(picks)
        self._since = picks[self.phase] if still else None

    def offered(self, picks: Mapping[Phase | None, int]) -> int:
        """Return of how many of `picks` it was a candidate."""
        return self._offered + (0 if self._since is None else picks[self.phase] - self._since)


class RunNotes:
    """Notes of one run.

    Args:
        engines: the engines at its start, by worker.
        start_ms: when it starts.
        phases: what a router is asked for: one of P/D pairs is asked for each role.

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
        """Note a choice; the request is open from the next one on."""
        self.picks.append(pick)
        self._counts[pick.phase] += 1
        term = self._terms[pick.worker]
        self._open[request, pick.phase] = term, term.offered(self._counts)

    def ended(self, request: RouterRequest) -> None:
        """Note that a request is open no more."""
        self._end((request, request.phase))

    def _end(self, leg: tuple[RouterRequest, Phase | None]) -> None:
        noted = self._open.pop(leg, None)
        if noted is not None:
            term, since = noted
            # Of one that ends on a worker which left, only the picks count that this was a candidate of.
            term.open += term.offered(self._counts) - since

    def is_candidate(self, worker: Worker, *, still: bool) -> None:
        """Note whether the router is offered a worker from now on: not as that leaves, its crash is noticed, or it
        is cordoned.
        """
        self._terms[worker].is_candidate(self._counts, still=still)

    def happens(self, now_ms: float, kind: str, worker: int, ranks: Any, lost: int = 0) -> None:
        """Note an incident: who comes, and who goes.

        Args:
            now_ms: when.
            kind: what.
            worker: the id of the worker.
            ranks: what the router calls its ranks, or the worker itself; of a join a mapping of these to their engines.
            lost: how many requests it lost.
        """
        self.happened.append(Happened(now_ms, kind, worker, lost))
        for each in ranks:
            if kind == "join":
                self._terms[each] = _Term(ranks[each], now_ms, self._counts)
            elif kind in ("crash", "leave"):
                self._terms[each].until_ms = now_ms

    def close(self, now_ms: float) -> list[WorkerRow]:
        """End the notes; what each worker did, in order of arrival."""
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
