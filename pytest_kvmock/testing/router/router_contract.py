"""The promises of every router, as tests that a router's test class inherits: it serves all requests and believes
nothing wrong.

One subject: the scenes, and the checks of each.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn

import pytest

from pytest_kvmock.engines.backends import BackendSpec
from pytest_kvmock.engines.schedulers.args import MockEngineArgs
from pytest_kvmock.engines.tiers import Tiers
from pytest_kvmock.engines.worker import KvWorker
from pytest_kvmock.fleets.clock.arrivals import FleetRequest
from pytest_kvmock.fleets.clock.mock_engine import MockEngine
from pytest_kvmock.fleets.fleet import Fleet
from pytest_kvmock.fleets.report.regret import check_selector
from pytest_kvmock.fleets.report.report import Report
from pytest_kvmock.fleets.report.rows import BELIEFS, Pick
from pytest_kvmock.fleets.router_calls import RouterCalls, RouterError, RouterStalled
from pytest_kvmock.fleets.routing.routing import Worker
from pytest_kvmock.fleets.traces.mooncake import TraceRequest
from pytest_kvmock.fleets.traces.synthetic import synthetic_trace
from pytest_kvmock.oracle.hygiene.rules import LOAD_DRIFT, OVERLAP_DRIFT, WORKER_DRIFT
from pytest_kvmock.testing.router.router_aborts import RouterAborts
from pytest_kvmock.testing.router.router_absence import RouterAbsence
from pytest_kvmock.testing.router.router_affinity import Affinity
from pytest_kvmock.testing.router.router_fairness import Fairness
from pytest_kvmock.testing.router.router_load import EverydayLoad
from pytest_kvmock.testing.router.router_pairs import DECODE, PairScenes
from pytest_kvmock.testing.router.router_stores import StoreScenes
from pytest_kvmock.testing.router.router_stream import StreamedLoads
from pytest_kvmock.testing.subject import SaysUnjudged, call_with, check_backends, refuse, refuse_to_wait
from pytest_kvmock.values.checks import check_integer
from pytest_kvmock.values.tokens import Prompt

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.values.sinks import Sink

_WORKERS: Final = 3
_AT_MS: Final = 150.0
"""Time of the incident, in the middle of the trace."""

_LATER_MS: Final = 1500.0
"""A time long after the end of the trace."""

_UNJUDGED: Final = (
    (("loads",), "what it counts of its open requests"),
    (("overlap", "believed"), "what it takes each rank of a worker to hold"),
    (("workers",), "whom it takes to be there"),
)
"""Beliefs of a router: the methods that may report each, and what it is."""

_LENGTHS: Final = attrgetter("input_length", "output_length", "hash_ids")
"""The fields of a request without its time."""


def _unjudged_text(router: object, *, has_stores: bool) -> str:
    """Return what no scene can judge of a router, and which method or attribute would allow it; "" if all can be
    judged.
    """
    parts = [
        f"{what} (no {' or '.join(map(_call_text, methods))})"
        for methods, what in _UNJUDGED
        if not any(callable(getattr(router, name, None)) for name in methods)
    ]
    if not has_stores:  # makes no line by itself, as few routers have stores
        parts += ["what it makes of stores that workers share (no stores)"] if parts else []
    elif not callable(getattr(router, "overlap_by_owner", None)):
        parts.append("what it promises of stores (no overlap_by_owner(request))")
    return f"{type(router).__name__} was not judged by {', '.join(parts)}" if parts else ""


def _call_text(method: str) -> str:
    return f"{method}({', '.join(BELIEFS[method])})"


class RouterContract(
    RouterAborts, RouterAbsence, EverydayLoad, Affinity, Fairness, StreamedLoads, PairScenes, StoreScenes, SaysUnjudged
):
    """Tests that hold for every router of a `Fleet`.

    A subclass defines `make_router`::

        class TestMyRouter(RouterContract):
            def make_router(self, workers):  # or make_router(self)
                return MyRouter(workers)

    Most tests play a trace of forty requests on three workers, or of two hundred on four. Prompts have tokens. In some
    tests clients go away. All requests must end: a worker that is gone may not be picked, and no request may wait for
    ever while a worker could take it. What the router reports by `loads()`, `overlap(request)`, `believed(request)` or
    `workers()` is compared before each pick. For a router without these methods, a line in the summary of the run lists
    what no scene could judge; tests of only these methods are skipped.

    Attributes:
        block_size: tokens per block.
        backend: the backend of the engines, by name or as a `BackendSpec`; None: the default one.
        selector: computes what a request costs on a worker, as for `Report.regret`. Every pick must then be among the
            cheapest. None: the cost of picks is not checked.
        packs: the policy fills one worker before it uses another, on purpose; sharing among workers is not checked.
        first_of_equals: the policy takes the first of equal workers, on purpose, as `LeastLoaded` does. Sharing is not
            checked in an idle fleet, nor among workers that tie or look the same by stale loads.
        follows_prefix: the policy goes where the prefix is at any load, on purpose, as `MostCached`, a hash ring, and
            the rules of AIBrix, Ray and SGLang do. Sharing is not checked for prompts with the same prefix.
        cools_down_s: seconds in which the policy sends nothing to a worker that restarted or whose clients left, on
            purpose; the worker must be used after them.
        survives: ("restart",) for a router that notices an unannounced restart; the router's class may declare it, too.
            From the first event whose id went back, its `overlap(request)` must have dropped the old blocks. Without it
            both answers are right.
        uses_overlap: whether the router uses the blocks that workers hold; the tests then judge where held prompts go.
            None: True if it has `overlap(request)`.
        switches_by_load: the router uses only load when loads are uneven, on purpose, like SGLang's rule; held prompts
            are judged in an idle fleet only.
        forgets_cordoned: the router drops the blocks of a worker that is no candidate for a while, on purpose: a worker
            that is not ready may have lost its cache.
        names_return: whether a worker may come back under the name of one that crashed, as in a StatefulSet.
        keeps_siblings: whether the router counts the prompts that it sent as held until events arrive, so that prompts
            with the same prefix that arrive together go to one worker. A router that uses only events spreads them.
        repeats: whether one trace makes the same picks each time. False for a router that draws by a new seed.
        reads_load_stream: whether the router uses `Candidate.reading`, like one that subscribes to load streams; it
            must use fresh readings only.
        tiers: the host below each engine, as `kvmock(tiers=...)` takes it; a prompt must go to the host that has it.
            None: no host.
        stores: the stores that workers share, as `kvmock(stores=...)` takes them; `make_router` passes them to the
            router, too. The router may ignore them; `overlap_by_owner(request)`, if it has it, is judged. None: no
            stores.
        hand_over: how the P/D pairs of the router hand over: "vllm", "vllm-mooncake" or "sglang". Pairs have additional
            scenes, and the other scenes run with prefill workers. `make_router` gets the workers by role, and may
            return one router for each role. None: pairs are not judged.
        order: the leg that the router picks first, as in `Fleet`: "prefill_first" or "decode_first".
        falls_back: the router returns `DECODE_ALONE` if there is no prefill worker, on purpose, like llm-d's and
            Dynamo's.
        holds_prefill: the router counts a request on its prefill worker until the request ends, on purpose, like
            sglang-router.
        threshold: uncached tokens on the decode worker from which there must be a prefill leg; None: not judged.
        busy_from: tokens to compute from which a prefill worker may not be picked while another has less; None: not
            judged.
        timeout_s: seconds within which each request must have a token or an error, and an error must follow a failed
            leg.
        seed: seed of the traffic for pairs.
    """

    block_size: ClassVar[int] = 16
    backend: ClassVar[str | BackendSpec | None] = None
    selector: ClassVar[Any] = None
    packs: ClassVar[bool] = False
    first_of_equals: ClassVar[bool] = False
    follows_prefix: ClassVar[bool] = False
    cools_down_s: ClassVar[float] = 0.0
    survives: ClassVar[Sequence[str]] = ()
    uses_overlap: ClassVar[bool | None] = None
    switches_by_load: ClassVar[bool] = False
    forgets_cordoned: ClassVar[bool] = False
    names_return: ClassVar[bool] = False
    keeps_siblings: ClassVar[bool] = False
    repeats: ClassVar[bool] = True
    reads_load_stream: ClassVar[bool] = False
    tiers: ClassVar[Mapping[str, Any] | None] = None

    @classmethod
    def wrong_declaration(cls) -> str:
        """Return the first invalid or contradictory declaration of the class; "" if there is none."""
        for name in (
            *("packs", "first_of_equals", "follows_prefix", "switches_by_load", "forgets_cordoned", "names_return"),
            *("keeps_siblings", "repeats", "reads_load_stream"),
        ):
            if not isinstance(flag := getattr(cls, name), bool):
                return f"{name} must be True or False, got {flag!r:.80}"
        cools = cls.cools_down_s
        if isinstance(cools, bool) or not isinstance(cools, int | float) or not cools >= 0:
            return f"cools_down_s must be seconds of at least 0, got {cools!r:.80}"
        if wrong := cls._wrong_pairs() or cls._wrong_stores():
            return wrong
        if cls.uses_overlap not in (None, True, False):
            return f"uses_overlap must be True, False or None, got {cls.uses_overlap!r:.80}"
        for name in ("switches_by_load", "forgets_cordoned", "keeps_siblings"):
            if cls.uses_overlap is False and getattr(cls, name):
                return f"{name} = True is for a router that goes by what workers hold, and uses_overlap is False"
        if cls.tiers is not None:
            try:
                Tiers.of(cls.tiers)
            except (TypeError, ValueError) as error:
                return str(error)
        return ""

    def make_router(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002 - for those who define it
        """Make a new router. A subclass defines this, without arguments or with the workers at the start."""
        __tracebackhide__ = True
        refuse(self, "define make_router(self) or make_router(self, workers), which makes a new router")

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Wait for an async router. Define this for such a router, with a loop: `return asyncio.run(awaitable)`."""
        __tracebackhide__ = True
        refuse_to_wait(self, "router", awaitable)

    # ------------------------------------------------------------------------------------------- it serves all

    def test_it_serves_every_request(self) -> None:
        """Every request ends, and the router's beliefs are right."""
        self._judge("three workers that share prefixes", self._played())

    def test_one_worker_is_enough(self) -> None:
        """A single worker gets all requests."""
        self._judge("a single worker", self._played(workers=1))

    def test_it_serves_requests_of_one_token(self) -> None:
        """A prompt of one token has no full block; an output of one token makes no call of `first_token`."""
        self._judge("requests of one token", self._played(rows=self._of_one_token()))

    def test_it_follows_evictions(self) -> None:
        """Caches are so small that blocks are evicted constantly."""
        self._judge("caches that hold a few prompts", self._played(num_blocks=40))

    def test_workers_that_know_nothing_share_a_burst(self) -> None:
        """Many requests arrive at one moment, with prompts that no worker holds. Each worker gets some: equal scores
        make no hot spot.
        """
        report = self._played(rows=self._burst(0.0))
        where = "a burst of prompts of which no worker holds a block"
        self._judge(where, report)
        self._each_is_picked(where, report, range(_WORKERS))

    def test_an_idle_fleet_is_shared(self) -> None:
        """Requests arrive one by one and find all workers idle: the router does not always pick the same worker."""
        where = "requests that come one by one, of prompts of which no worker holds a block"
        report = self._played(rows=self._burst(0.0, apart_ms=500.0))
        self._judge(where, report)
        if self.first_of_equals:
            name = type(self).__name__
            pytest.skip(f"{name}.first_of_equals is True: {where}: whether each worker gets some was not checked")
        self._each_is_picked(where, report, range(_WORKERS))

    # ---------------------------------------------------------------------------------------- what happens to it

    def test_it_follows_a_restart(self) -> None:
        """A worker whose restart is announced is empty, and its requests come again."""
        self._judge(f"a restart of worker 1 at {_AT_MS:g} ms", self._played(lambda fleet: fleet.at(_AT_MS).restart(1)))

    def test_it_uses_a_worker_that_is_back(self) -> None:
        """A worker whose restart is announced gets some of a burst of prompts of which no worker holds a block."""
        where = f"worker 1 restarts at {_AT_MS:g} ms, and a burst of new prompts comes after it"
        later_ms = _LATER_MS + 1000.0 * self.cools_down_s
        rows = [*self._rows(), *self._burst(later_ms)]
        report = self._played(lambda fleet: fleet.at(_AT_MS).restart(1), rows=rows)
        self._judge(where, report)
        self._each_is_picked(where, report, [1], lambda pick: pick.ms >= later_ms)

    def test_it_lives_through_a_silent_restart(self) -> None:
        """The router continues after unannounced restarts. It need not notice them, though event ids begin again."""
        rows = self._rows()
        # At the second restart the worker is idle, and the same prompts come again: each asks for blocks that it held
        # before.
        again = [TraceRequest(_LATER_MS + 8 * at, *each) for at, each in enumerate(map(_LENGTHS, rows))]

        def happens(fleet: Fleet) -> None:
            for ms in (_AT_MS, _LATER_MS):
                fleet.at(ms).restart(1, announced=False)

        report = self._played(happens, rows=[*rows, *again])
        self._judge(f"unannounced restarts of worker 1 at {_AT_MS:g} and {_LATER_MS:g} ms", report)

    def test_it_uses_a_worker_that_joins(self) -> None:
        """A worker that joins gets some of a burst of prompts of which no worker holds a block."""
        where = f"worker {_WORKERS} joins at {_AT_MS:g} ms, and a burst of new prompts comes after it"
        rows = [*self._rows(), *self._burst(_LATER_MS)]
        report = self._played(lambda fleet: fleet.at(_AT_MS).join(engine=self._engine()), rows=rows)
        self._judge(where, report)
        self._each_is_picked(where, report, [_WORKERS])

    def test_it_lets_a_worker_leave(self) -> None:
        """A worker that leaves gets nothing more."""
        self._judge(f"worker 1 leaves at {_AT_MS:g} ms", self._played(lambda fleet: fleet.at(_AT_MS).leave(1)))

    def test_it_survives_a_crash(self) -> None:
        """A worker is lost, and its requests are sent again."""
        self._judge(f"a crash of worker 1 at {_AT_MS:g} ms", self._played(lambda fleet: fleet.at(_AT_MS).crash(1)))

    def test_sessions_go_on_when_their_worker_dies(self) -> None:
        """Worker 1 is lost while its sessions are between two turns; the others share them."""
        where = f"a crash of worker 1 at {_LATER_MS:g} ms, between two turns of its sessions"
        report = self._played(lambda fleet: fleet.at(_LATER_MS).crash(1), rows=self._sessions())
        self._judge(where, report)
        sessions = {
            number: turn.session_name for number, turn in zip(report.run.numbers, report.run.asked, strict=True)
        }
        left = {sessions[pick.number] for pick in report.picks if pick.ms < _LATER_MS and pick.worker == 1}
        if len(left) < 10:  # a router that draws at random may send this few to one worker
            pytest.skip(
                f"{len(left)} sessions began on worker 1: {where}: whether the others share them was not checked"
            )
        self._each_is_picked(
            f"{where}, of their second turns",
            report,
            [0, 2],
            lambda pick: pick.ms >= _LATER_MS and sessions[pick.number] in left,
        )

    def test_it_survives_a_crash_that_is_noticed_late(self) -> None:
        """For 60 ms the router can still pick the lost worker; requests sent there come back."""
        report = self._played(lambda fleet: fleet.at(_AT_MS).crash(1, notice_ms=60))
        self._judge(f"a crash of worker 1 at {_AT_MS:g} ms, noticed 60 ms later", report)

    def test_it_keeps_ranks_apart(self) -> None:
        """Workers have two ranks each. A rank is picked as (worker, rank) and holds its own blocks."""
        self._judge("two workers of two ranks", self._played(workers=4, ranks=2))

    def test_it_keeps_adapters_apart(self) -> None:
        """The same tokens with another LoRA adapter are another prompt."""
        if not self._has_adapters:
            pytest.skip(f"backend {self.backend!r} names no blocks by lora_name: adapters were not checked")
        self._judge("prompts that differ in their LoRA adapter alone", self._played(rows=self._adapters()))

    def test_late_events_do_not_stop_it(self) -> None:
        """Events come 40 ms late; the router's beliefs are right by the events that arrived."""
        self._judge("events that are 40 ms late", self._played(event_delay_ms=40))

    def test_stale_polls_do_not_stop_it(self) -> None:
        """Candidates show loads that were read from the engines up to 500 ms ago."""
        self._judge("loads that are polled each 500 ms", self._played(loads="engine", loads_every_ms=500))

    # ------------------------------------------------------------------------------------------ what it offers

    def test_its_loads_are_right(self) -> None:
        """`loads()` counts the requests that were sent and have not finished."""
        self._judge_one("loads", LOAD_DRIFT, "what it counts of its open requests")

    def test_its_overlaps_are_right(self) -> None:
        """`overlap(request)` agrees with the events."""
        self._judge_one("overlap", OVERLAP_DRIFT, "what it takes each worker to hold")

    def test_it_believes_no_more_than_it_sent(self) -> None:
        """`believed(request)` is at most what was sent to a worker with this adapter since its last announced start."""
        self._judge_one("believed", OVERLAP_DRIFT, "what it takes to be where it sent it")

    def test_its_workers_are_right(self) -> None:
        """`workers()` returns the present workers."""
        self._judge_one("workers", WORKER_DRIFT, "whom it takes to be there")

    def test_its_picks_are_among_the_cheapest(self) -> None:
        """No pick costs more than the cheapest candidate, by `selector` on true loads and true caches."""
        if self.selector is None:
            pytest.skip(f"{type(self).__name__}.selector is None: whether a cheaper worker was there was not checked")
        self._check_selector()
        for where, happens, options in (
            ("three workers that share prefixes", None, {}),
            (f"a restart of worker 1 at {_AT_MS:g} ms", lambda fleet: fleet.at(_AT_MS).restart(1), {}),
            (f"a join at {_AT_MS:g} ms", lambda fleet: fleet.at(_AT_MS).join(engine=self._engine()), {}),
            ("two workers of two ranks", None, {"workers": 4, "ranks": 2}),
            ("prompts that differ in their LoRA adapter alone", None, {"rows": self._adapters()}),
        )[: None if self._has_adapters else -1]:
            report = self._played(happens, record=True, **options)
            regret = report.regret(self.selector)
            if regret.picks:
                self._fail(f"{where}: {regret}")

    # ------------------------------------------------------------------------------------------------ the means

    def _check_selector(self) -> None:
        __tracebackhide__ = True
        problem = None
        try:
            check_selector(self.selector)
        except TypeError as error:
            problem = str(error)
        if problem is not None:
            refuse(self, problem)

    def _engine(self, num_blocks: int = 400, ranks: int = 1, **further: Any) -> MockEngine:
        __tracebackhide__ = True
        if self.hand_over is not None:
            return self._pair_engine("prefill", num_blocks, dp_size=ranks, **further)
        kind = dict(further)
        if self.backend is not None:
            spec = self._spec(self.backend)
            kind["engine_type"] = spec.scheduler
            if spec.traits.publishes_groups:  # its caches share the blocks: enough for each
                num_blocks *= sum(max(1, self.block_size // group.block_size) for group in spec.traits.groups)
        args = MockEngineArgs(num_gpu_blocks=num_blocks, block_size=self.block_size, dp_size=ranks, **kind)
        if self.tiers is None:
            return MockEngine(args, backend=self.backend)
        return self._engine_with_a_host(args, self._spec(self.backend or args.default_backend), Tiers.of(self.tiers))

    def _engine_over(self, num_blocks: int, tiers: Tiers | None, spec: BackendSpec) -> MockEngine:
        __tracebackhide__ = True
        args = MockEngineArgs(num_gpu_blocks=num_blocks, block_size=self.block_size, engine_type=spec.scheduler)
        if tiers is None:
            return MockEngine(args, backend=spec)
        return self._engine_with_a_host(args, spec, tiers)

    def _engine_with_a_host(self, args: MockEngineArgs, spec: BackendSpec, tiers: Tiers) -> MockEngine:
        __tracebackhide__ = True
        problem = ""

        def make(sink: Sink | None) -> KvManager:
            return spec.make(
                num_blocks=args.num_gpu_blocks, block_size=args.block_size, dp_rank=0, sink=sink, tiers=tiers
            )

        try:
            spec.check_options({"tiers": tiers})
            engine = MockEngine(args, backend=spec, worker=KvWorker(make, driver=spec.driver))
        except (TypeError, ValueError) as error:
            problem = str(error)
        else:
            return engine
        return refuse(self, f"tiers is {str(tiers)!s:.80}: {problem}")

    def _spec(self, backend: str | BackendSpec) -> BackendSpec:
        __tracebackhide__ = True
        return check_backends(self, [backend], self.block_size)[0]

    @property
    def _has_adapters(self) -> bool:
        return self.backend is None or "lora_name" in self._spec(self.backend).prompt_keys

    def _rows(self) -> list[TraceRequest]:
        size = self.block_size
        rows = synthetic_trace(
            40,
            seed=1,
            block_size=size,
            groups=5,
            prefix_blocks=(2, 8),
            turns=(1, 3),
            input_tokens=(size, 8 * size),
            output_tokens=(2, 24),
            interval_ms=8,
            delay_ms=(5, 50),
        )
        return list(rows)

    def _burst(self, ms: float, apart_ms: float = 0.0, first: int = 2**30) -> list[TraceRequest]:
        """Return many requests with new prompts, at one moment or one by one; their block ids count from `first`."""
        ids = [first + 2 * at for at in range(12 * _WORKERS)]
        size = 2 * self.block_size
        return [TraceRequest(ms + at * apart_ms, size, 4, (each, each + 1)) for at, each in enumerate(ids)]

    def _of_one_token(self) -> list[FleetRequest]:
        """Return requests for one token each: prompts of one token, and prompts of some blocks that begin with it or
        others.
        """
        prompts = [range(at, at + (1 if at % 2 else 3 * self.block_size)) for at in range(8)]
        return [FleetRequest(prompts[at % len(prompts)], 1, 8.0 * at) for at in range(40)]

    def _sessions(self) -> list[FleetRequest]:
        """Return conversations of two turns. The first turns come at once, the second turns one by one, long
        afterwards.

        At one moment a correct policy that uses the blocks in use would send all of them to the least busy worker.
        """
        size, count = self.block_size, 20 * _WORKERS
        prompts = [range(first, first + 2 * size) for first in range(0, 2 * size * count, 2 * size)]
        first = [FleetRequest(each, 4, 0.0, f"session {at}") for at, each in enumerate(prompts)]
        more = range(2**20, 2**20 + size)
        second = [
            FleetRequest((*each, *more), 4, None, f"session {at}", 2 * _LATER_MS + 10.0 * at)
            for at, each in enumerate(prompts)
        ]
        return [*first, *second]

    def _adapters(self) -> list[FleetRequest]:
        prompts = [range(first, first + 6 * self.block_size) for first in (0, 1000)]
        names = ("a", "b", None)
        return [FleetRequest(Prompt(prompts[at % 2], lora_name=names[at // 2 % 3]), 4, 40.0 * at) for at in range(24)]

    def _played(
        self,
        happens: Callable[[Fleet], object] | None = None,
        *,
        workers: int = _WORKERS,
        ranks: int = 1,
        num_blocks: int = 400,
        rows: Sequence[TraceRequest | FleetRequest] | None = None,
        args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Report:
        """Play a trace on a fleet behind a new router."""
        __tracebackhide__ = True
        check_integer(f"{type(self).__name__}: block_size", self.block_size, 1)
        if wrong := self.wrong_declaration():
            refuse(self, wrong)
        named: list[Worker] = list(range(workers)) if ranks == 1 else [divmod(at, ranks) for at in range(workers)]
        engines = {worker: self._engine(num_blocks, ranks, **(args or {})) for worker in named}
        trace = self._rows() if rows is None else rows
        if self.hand_over is None:
            return self._run_fleet(engines, happens, trace, **options)[0]
        return self._of_prefill(self._run_fleet(self._with_decode(engines), happens, trace, **options)[0])

    def _run_fleet(
        self,
        engines: Mapping[Worker, MockEngine],
        happens: Callable[[Fleet], object] | None,
        rows: Sequence[TraceRequest | FleetRequest],
        **options: Any,
    ) -> tuple[Report, Fleet]:
        """Play a trace on engines behind a new router."""
        __tracebackhide__ = True
        if wrong := self.wrong_declaration():
            refuse(self, wrong)
        router = call_with(self, self.make_router, "make_router", self._named(engines))
        problem = None
        try:
            if self.hand_over is not None:
                options["order"] = self.order
                router = self._as_one(router)
            calls = RouterCalls(
                router,
                survives=self.survives,
                forgets_cordoned=self.forgets_cordoned,
                holds_prefill=self.holds_prefill,
            )
            fleet = Fleet(engines, calls, **options)
        except TypeError as error:
            problem = str(error)
        if problem is not None:
            refuse(self, f"make_router gave {router!r:.80}: {problem}")
        self._note_unjudged(_unjudged_text(router, has_stores=self.stores is not None))
        if happens is not None:
            happens(fleet)
        self._is_async = bool(calls.asynchronous)
        return self._run_trace(fleet, rows), fleet

    _is_async = False

    def _run_trace(self, fleet: Fleet, rows: Sequence[TraceRequest | FleetRequest]) -> Report:
        """Play a trace, possibly a further one, on a fleet of `_run_fleet`."""
        __tracebackhide__ = True
        trace = [replace(row, with_tokens=True) if isinstance(row, TraceRequest) else row for row in rows]
        try:
            report: Report = self.run(fleet.arun(trace)) if self._is_async else fleet.run(trace)
        except (RouterError, RouterStalled) as error:
            problem = str(error)
        else:
            return report
        return self._fail(problem)

    def _named(self, engines: Mapping[Worker, MockEngine]) -> Any:
        """Return the workers as `make_router` gets them: a list, or for P/D pairs a list for each role."""
        if self.hand_over is None:
            return list(engines)
        kinds = ("prefill", "decode")
        return {kind: [each for each, engine in engines.items() if engine.args.worker_type == kind] for kind in kinds}

    def _judge(self, where: str, report: Report) -> None:
        __tracebackhide__ = True
        left = report.arrived - len(report.completed) - report.aborted
        if self.hand_over is not None:
            left -= self._excused(report)
        if left:
            self._fail(f"{where}: {left} of {report.arrived} requests were not served")
        for belief in report.beliefs or ():
            self._fail(f"{where}: {belief}")
        self._skip_if_alone(where, report)

    def _judge_one(self, method: str, rule: str, what: str) -> None:
        __tracebackhide__ = True
        report = self._played()
        self._needs(what, method)
        for belief in report.beliefs or ():
            if belief.rule == rule and not belief.follows:
                self._fail(f"three workers that share prefixes: {belief}")

    def _subject(self) -> Any:
        named: Any = list(range(_WORKERS))
        if self.hand_over is not None:
            named = {"prefill": named, "decode": [DECODE, DECODE + 1]}
        made = call_with(self, self.make_router, "make_router", named)
        return made["prefill"] if isinstance(made, Mapping) else made

    def _needs(self, what: str, *methods: str) -> None:
        """Skip the rest of a test, and report what was not checked, if the router has none of these methods."""
        __tracebackhide__ = True
        subject = self._subject()
        if not any(callable(getattr(subject, name, None)) for name in methods):
            asked = " or ".join(map(_call_text, methods))
            pytest.skip(f"{type(subject).__name__} has no {asked}: {what} was not checked")

    def _each_is_picked(
        self,
        where: str,
        report: Report,
        workers: Sequence[Worker],
        of: Callable[[Pick], bool] = lambda _: True,
        *,
        hint: str = "",
    ) -> None:
        """Fail unless each of these workers was picked among the picks that `of` selects; `hint` names a possible
        cause.
        """
        __tracebackhide__ = True
        if self.packs:
            pytest.skip(f"{type(self).__name__}.packs is True: {where}: whether each worker gets some was not checked")
        picked = [pick.worker for pick in report.picks if of(pick)]
        unused = [worker for worker in workers if worker not in picked]
        if unused:
            counts = ", ".join(f"worker {worker!r}: {picked.count(worker)}" for worker in report.workers)
            self._fail(
                f"{where}: worker {unused[0]!r} got none of {len(picked)} requests ({counts}); expected some{hint}"
            )

    def _fail(self, text: str) -> NoReturn:
        __tracebackhide__ = True
        pytest.fail(f"{type(self).__name__}: {text}", pytrace=False)
