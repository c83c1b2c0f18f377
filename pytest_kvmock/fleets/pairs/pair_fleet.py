"""The engines of a fleet of P/D pairs and their roles, with router and index as one object each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any

from pytest_kvmock.engines.base.pair_options import IN_ROOMS, PAIRED
from pytest_kvmock.fleets.clock.pair_handoff import PairLink
from pytest_kvmock.fleets.clock.replay_checks import check_sizes
from pytest_kvmock.fleets.pairs.pair_run import ORDERS, Order, PairRun
from pytest_kvmock.fleets.pairs.role_router import RoleIndexes, RoleRouter, check_roles
from pytest_kvmock.fleets.routing.routing import PHASES, id_of, stream_of
from pytest_kvmock.fleets.routing.selection import DynamoRouter
from pytest_kvmock.values.checks import check_integer, unknown_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_kvmock.fleets.clock.arrivals import Turn
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine
    from pytest_kvmock.fleets.fleet_run import FleetRun
    from pytest_kvmock.fleets.incidents import Incident
    from pytest_kvmock.fleets.pairs.role_figures import RoleFigures
    from pytest_kvmock.fleets.report.rows import WorkerRow
    from pytest_kvmock.fleets.routing.routing import Phase, Worker


class PairFleet:
    """The engines of a fleet of P/D pairs.

    Args:
        named: the engines, by the names of their workers.
        order: the leg that the router picks for first; None: "prefill_first".
        link: the link between the engines; None: taken from the arguments of the prefill engines.
        threshold: as of `RoleFigures`.

    Raises:
        TypeError: `link` is not a `PairLink`.
        ValueError: the engines cannot serve together, `order` is unknown, or the threshold is not a number of tokens.

    Attributes:
        ranks: number of ranks of each worker; 1 if the roles differ.
    """

    def __init__(
        self,
        named: Sequence[tuple[Worker, MockEngine]],
        order: Order | None,
        link: PairLink | None,
        threshold: int | None = None,
    ) -> None:
        self.check(named)
        if order is not None and order not in ORDERS:
            raise ValueError(f"Fleet: {unknown_text('order', order, ORDERS)}")
        if link is not None and not isinstance(link, PairLink):
            raise TypeError(f"Fleet: link must be a PairLink, or None, got {link!r:.80}")
        if threshold is not None:
            check_integer("Fleet: threshold", threshold, 0, " (tokens), or None")
        self._threshold = threshold
        self._order: Order = order or "prefill_first"
        self._link = link or PairLink()
        self._release = named[0][1].args.release
        self._roles: dict[int, Phase] = {}
        for worker, engine in named:
            self.joins(id_of(worker), _role_of(engine))
        # The first engine of each role: the model for workers that join without an engine.
        self._likes = {_role_of(engine): engine for _, engine in reversed(named)}
        sizes = {engine.args.dp_size for _, engine in named}
        self.ranks = sizes.pop() if len(sizes) == 1 else 1

    def joins(self, worker_id: int, role: Phase) -> None:
        """Note the role of a worker."""
        self._roles[worker_id] = role

    @staticmethod
    def role_of(incident: Incident) -> Phase:
        """Return the role of a worker that joins.

        Raises:
            ValueError: the role is missing, unknown, or differs from the engine's.
        """
        engine, role = incident.engine, incident.role
        if engine is None and role is None:
            raise ValueError(
                "Fleet.at: join of a fleet of P/D pairs needs role='prefill' or 'decode', or engine=, whose "
                "worker_type is its role"
            )
        if role is None:
            return _role_of(engine)
        if role not in PHASES:
            raise ValueError(f"Fleet.at: join: {unknown_text('role', role, PHASES)}")
        if engine is not None and engine.args.worker_type != role:
            raise ValueError(
                f"Fleet.at: join: role={role!r} and an engine of worker_type={engine.args.worker_type!r}; leave one out"
            )
        return role

    def next_id(self, role: Phase, known: Collection[int]) -> int:
        """Return the next id for a role that no worker has or had."""
        own = [worker for worker, each in self._roles.items() if each == role]
        return next(each for each in count(1 + max(own, default=-1)) if each not in known)

    @staticmethod
    def check(named: Sequence[tuple[Worker, MockEngine]]) -> None:
        """Check that engines can serve together.

        Raises:
            ValueError: they cannot serve together.
        """
        if len({id(engine) for _, engine in named}) < len(named):
            raise ValueError("Fleet: an engine is given twice; each takes part once")
        found = {phase: [each for _, each in named if each.args.worker_type == phase] for phase in PHASES}
        ways = (*PAIRED, IN_ROOMS)
        for worker, engine in named:
            if engine.args.worker_type not in PHASES:
                raise ValueError(
                    f"Fleet: engine {worker!r} must have worker_type='prefill' or 'decode', as others have, got "
                    f"{engine.args.worker_type!r}"
                )
            if engine.args.hand_over not in ways:
                raise ValueError(
                    f"Fleet: engine {worker!r} must have hand_over {' or '.join(map(repr, ways))}, got "
                    f"{engine.args.hand_over!r}, which `replay` takes"
                )
        for phase, engines in found.items():
            if not engines:
                raise ValueError(f"Fleet: P/D pairs need engines of both roles; there is none of worker_type={phase!r}")
            for name in ("block_size", "engine_type", "dp_size"):
                _check_one(f"all engines of {phase!r}", name, engines)
        everyone = [engine for _, engine in named]
        _check_one("all engines of P/D pairs", "hand_over", everyone)
        _check_ranks(named)
        if everyone[0].args.hand_over == IN_ROOMS:
            _check_one("all engines of pairs with rooms", "block_size", everyone)

    def as_one(self, router: Any, index: Any) -> tuple[Any, Any]:
        """Return router and index as one object each; without a router, Dynamo's for each role."""
        if router is None:
            release = self._release.dynamo
            router = {each: DynamoRouter(release, rng=Random(each)) for each in PHASES}  # noqa: S311 - mock data
        if isinstance(router, Mapping):
            router = RoleRouter(check_roles("router", router), self._roles.__getitem__)
        if isinstance(index, Mapping):
            index = RoleIndexes(check_roles("index", index), self._roles.__getitem__)
        return router, index

    @staticmethod
    def check_turns(turns: Iterable[Turn], engines: Sequence[MockEngine]) -> None:
        """Check that each request fits engines of both roles.

        Raises:
            RequestTooLarge: a request can never fit.
            ValueError: block sizes differ, and a prompt has no tokens.
        """
        turns = list(turns)
        prefill, decode = ([each for each in engines if each.args.worker_type == phase] for phase in PHASES)
        check_sizes(turns, decode, prefill, who="Fleet")
        sizes = {each.args.block_size for each in engines}
        if len(sizes) > 1 and not all(turn.prompt.has_tokens for turn in turns):
            raise ValueError(
                f"Fleet: roles have blocks of {' and '.join(map(str, sorted(sizes)))} tokens, so prompts need tokens: "
                "read the trace with_tokens=True"
            )

    def make_run(self, *args: Any, **options: Any) -> PairRun:
        """Make a run."""
        return PairRun(*args, order=self._order, link=self._link, likes=self._likes, **options)

    def roles_of(self, run: FleetRun, services: Sequence[WorkerRow]) -> dict[Phase, RoleFigures]:
        """Return the figures of each role."""
        assert isinstance(run, PairRun)
        return run.roles.figures(services, run.link_ms, self._threshold)


def _role_of(engine: MockEngine | None) -> Phase:
    return "prefill" if engine is not None and engine.args.worker_type == "prefill" else "decode"


def _check_ranks(named: Sequence[tuple[Worker, MockEngine]]) -> None:
    """Check that each worker has all its ranks, in one role, and that names have ranks if a worker has more than
    one.
    """
    has_ranks = any(engine.args.dp_size > 1 for _, engine in named)
    found: dict[int, list[tuple[Worker, MockEngine]]] = {}
    for worker, engine in named:
        if isinstance(worker, tuple) != has_ranks:
            right = "(id, rank), as one role has dp_size above 1" if has_ranks else "their ids, as dp_size is 1"
            raise ValueError(f"Fleet: engines of these P/D pairs are named by {right}; got {worker!r}")
        found.setdefault(id_of(worker), []).append((worker, engine))
    for worker_id, ranks in found.items():
        kinds, size = {engine.args.worker_type for _, engine in ranks}, ranks[0][1].args.dp_size
        here = [stream_of(worker)[1] for worker, _ in ranks]
        if len(kinds) > 1 or here != [*range(size)]:
            got = (f"{rank} ({engine.args.worker_type})" for rank, (_, engine) in zip(here, ranks, strict=True))
            raise ValueError(
                f"Fleet: worker {worker_id!r} must have the ranks 0 to {size - 1} in order (dp_size={size}), of one "
                f"role; got {', '.join(got)}"
            )


def _check_one(who: str, name: str, engines: Sequence[MockEngine]) -> None:
    found = list(dict.fromkeys(getattr(engine.args, name) for engine in engines))
    if len(found) > 1:
        raise ValueError(f"Fleet: {who} must have one {name}, got {', '.join(map(repr, found))}")
