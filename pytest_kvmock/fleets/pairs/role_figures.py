"""Figures of each role's legs in a run of P/D pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_kvmock.fleets.routing.routing import PHASES

if TYPE_CHECKING:
    from pytest_kvmock.fleets.report.rows import WorkerRow
    from pytest_kvmock.fleets.routing.routing import Phase, Worker


class RanOut(NamedTuple):
    """A lease that ran out.

    Attributes:
        number: the request, by the order of arrival.
        phase: the request's state at that time: "waiting" in the router, "prefill" or "decode", or how it had ended.
    """

    number: int
    phase: str

    def __str__(self) -> str:
        return f"request {self.number}, {self.phase}"


@dataclass(frozen=True, slots=True)
class RoleFigures:
    """Figures of one role's legs. Tokens are prompt tokens.

    Attributes:
        workers: the workers of the role.
        requests: legs that were sent to them.
        computed: tokens that they computed, including those computed again.
        hits: tokens that legs found cached on their own engine.
        kept: for "prefill", legs whose blocks were kept for a decode engine.
        transferred: for "decode", tokens loaded from prefill engines.
        transferred_held: transferred tokens that the decode engine held at the pick, by the events delivered.
        ran_out: for "prefill", the leases that ran out.
        link_ms: for "decode", the sum of the times of all transfers, in virtual milliseconds; they may overlap.
        ends: number of legs by how they ended: "finished", "failed", "rejected", "lost"; a leg whose client left counts
            under its state at that time: "waiting", "running", "loading", "received" ...
        refused: requests that the router refused at the pick for this role, by the order of arrival.
        alone: for "decode", the number of each request without a prefill leg, and the tokens that its engine lacked at
            the pick.
        threshold: for "decode", the number of lacking tokens from which a prefill leg is needed (`Fleet`); None: not
            declared.
        recomputed: for "decode", requests whose decode leg had no parameters, so its engine computed the prompt again
            after a prefill engine.
        failed: the number of each request whose first failure was in this role, and how long its client then waited for
            the error, in virtual milliseconds.
    """

    workers: tuple[Worker, ...] = ()
    requests: int = 0
    computed: int = 0
    hits: int = 0
    kept: int = 0
    transferred: int = 0
    transferred_held: int = 0
    ran_out: tuple[RanOut, ...] = ()
    link_ms: float = 0.0
    ends: Mapping[str, int] = field(default_factory=dict)
    refused: tuple[int, ...] = ()
    alone: tuple[tuple[int, int], ...] = ()
    recomputed: tuple[int, ...] = ()
    failed: tuple[tuple[int, float], ...] = ()
    threshold: int | None = None

    def alone_from(self, threshold: int | None = None) -> list[int]:
        """Return the requests that were decoded alone although their engine lacked at least `threshold` tokens.

        Args:
            threshold: number of tokens; None: as declared.

        Raises:
            ValueError: no threshold is given or declared.
        """
        least = self.threshold if threshold is None else threshold
        if least is None:
            raise ValueError("alone_from: give a number of tokens, or declare one: Fleet(..., threshold=64)")
        return [number for number, tokens in self.alone if tokens >= least]

    def to_json(self) -> dict[str, Any]:
        """Return the figures by attribute name."""
        return {name: getattr(self, name) for name in self.__slots__} | {
            "workers": list(self.workers),
            "ends": dict(self.ends),
            **{name: [list(each) for each in getattr(self, name)] for name in ("ran_out", "alone", "failed")},
            **{name: list(getattr(self, name)) for name in ("refused", "recomputed")},
        }

    def __str__(self) -> str:
        parts = [f"{self.requests} legs", f"{self.computed} tokens computed", f"{self.hits} hits"]
        parts += [f"{self.kept} kept"] if self.kept else []
        if self.transferred:
            parts.append(f"{self.transferred} tokens transferred in {self.link_ms:.4g} ms")
        parts += [f"{self.transferred_held} of these were held"] if self.transferred_held else []
        if self.alone:
            late = (
                "" if self.threshold is None else f" ({len(self.alone_from())} from the threshold {self.threshold} on)"
            )
            parts.append(f"{len(self.alone)} decoded alone{late}")
        parts += [f"{len(self.recomputed)} computed again"] if self.recomputed else []
        parts += [f"{len(self.refused)} refused"] if self.refused else []
        if self.ran_out:
            parts.append(f"{len(self.ran_out)} leases ran out, the first of {self.ran_out[0]}")
        ended = ", ".join(f"{count} {how}" for how, count in self.ends.items() if how != "finished")
        return ", ".join(parts) + (f"; ended otherwise: {ended}" if ended else "")


class RoleNotes:
    """Counts of one run, updated for each leg.

    Attributes:
        counts: figures, by role and name.
        ends: how legs ended, by role.
        refused: as of `RoleFigures`, by role.
        failed: as of `RoleFigures`, by role.
        alone: as of `RoleFigures`.
        recomputed: as of `RoleFigures`.
        ran_out: as of `RoleFigures`.
    """

    def __init__(self) -> None:
        self.counts: dict[Phase, Counter[str]] = {phase: Counter() for phase in PHASES}
        self.ends: dict[Phase, Counter[str]] = {phase: Counter() for phase in PHASES}
        self.refused: dict[Phase, list[int]] = {phase: [] for phase in PHASES}
        self.failed: dict[Phase, list[tuple[int, float]]] = {phase: [] for phase in PHASES}
        self.alone: list[tuple[int, int]] = []
        self.recomputed: list[int] = []
        self.ran_out: list[RanOut] = []

    def figures(
        self, services: Sequence[WorkerRow], link_ms: float, threshold: int | None = None
    ) -> dict[Phase, RoleFigures]:
        """Return the figures of each role.

        Args:
            services: the row of each worker.
            link_ms: the sum of transfer times.
            threshold: as of `RoleFigures`.
        """
        found = {}
        for phase in PHASES:
            rows = [each for each in services if each.role == phase]
            counts, is_decode = self.counts[phase], phase == "decode"
            found[phase] = RoleFigures(
                workers=tuple(each.worker for each in rows),
                computed=sum(each.prompt_tokens_computed for each in rows),
                ends=dict(self.ends[phase]),
                refused=tuple(self.refused[phase]),
                link_ms=link_ms if is_decode else 0.0,
                alone=tuple(self.alone) if is_decode else (),
                recomputed=tuple(self.recomputed) if is_decode else (),
                failed=tuple(self.failed[phase]),
                threshold=threshold if is_decode else None,
                ran_out=() if is_decode else tuple(self.ran_out),
                **counts,
            )
        return found
