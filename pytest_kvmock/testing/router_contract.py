"""What every router promises, as tests that the tests of a router inherit: it serves all, and believes nothing wrong.

One subject: the scenes, and what each is judged by.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Final, NoReturn

import pytest

from pytest_kvmock.backends import BackendSpec
from pytest_kvmock.checks import check_integer
from pytest_kvmock.clock import MockEngine
from pytest_kvmock.fleet import Fleet, FleetRequest, RouterError, RouterStalled
from pytest_kvmock.fleet.router_calls import RouterCalls
from pytest_kvmock.hygiene.rules import LOAD_DRIFT, OVERLAP_DRIFT, WORKER_DRIFT
from pytest_kvmock.report.regret import check_selector
from pytest_kvmock.report.report import Report
from pytest_kvmock.report.rows import BELIEFS, Pick
from pytest_kvmock.router.routing import Worker
from pytest_kvmock.schedulers.args import MockEngineArgs
from pytest_kvmock.testing.router_aborts import RouterAborts
from pytest_kvmock.testing.router_absence import RouterAbsence
from pytest_kvmock.testing.router_load import EverydayLoad
from pytest_kvmock.testing.subject import SaysUnjudged, call_with, check_backends, refuse, refuse_to_wait
from pytest_kvmock.tokens import Prompt
from pytest_kvmock.traces import TraceRequest, synthetic_trace

_WORKERS: Final = 3
_AT_MS: Final = 150.0
"""When what happens happens: in the midst of the trace."""

_LATER_MS: Final = 1500.0
"""When the trace is long over."""

_UNJUDGED: Final = (
    (("loads",), "what it counts of its open requests"),
    (("overlap", "believed"), "what it takes each worker to hold, after evictions and restarts, by rank and adapter"),
    (("workers",), "whom it takes to be there"),
)
"""What a router believes: the methods of which one says it, and what it is."""

_LENGTHS: Final = attrgetter("input_length", "output_length", "hash_ids")
"""Of a request what it asks for, whenever it comes."""


def _unjudged_text(router: object) -> str:
    """Return what no scene can judge of a router, and by which method it could; "" where it says all that it believes."""
    parts = [
        f"{what} (no {' or '.join(map(_call_text, methods))})"
        for methods, what in _UNJUDGED
        if not any(callable(getattr(router, name, None)) for name in methods)
    ]
    return f"{type(router).__name__} was not judged by {', '.join(parts)}" if parts else ""


def _call_text(method: str) -> str:
    return f"{method}({', '.join(BELIEFS[method])})"


class RouterContract(RouterAborts, RouterAbsence, EverydayLoad, SaysUnjudged):
    """Tests that hold for every router of a `Fleet`.

    A subclass defines `make_router`::

        class TestMyRouter(RouterContract):
            def make_router(self, workers):  # or make_router(self)
                return MyRouter(workers)

    Each test plays a trace of forty requests on three workers, some of whose clients go away in some, or of two hundred on four. All
    requests must end, so nobody may be picked who is gone, and none may
    wait for ever while a worker could take it. What the router believes is compared before each pick where it has `loads()`,
    `overlap(request)`, `believed(request)` or `workers()`. Of one that has not, a line in the summary of the run says what no scene could judge; a
    test of that alone is skipped.

    Attributes:
        block_size: tokens a block.
        backend: of the engines, by name or as a `BackendSpec`; None: the default one.
        selector: says what a request costs on a worker, as for `Report.regret`: every pick must be among the cheapest by it.
            None: which picks are good is not checked.
        packs: the policy fills one worker before it uses another, on purpose: that workers share is not checked.
        first_of_equals: of workers that are alike the policy takes the first, on purpose, as `LeastLoaded` does: that an idle fleet is
            shared is not checked, nor that workers are which tie, or which stale loads show alike.
        follows_prefix: the policy goes where the prefix is, however loaded, on purpose, as `MostCached`, a hash ring, and the rules of
            AIBrix, Ray and SGLang do: that workers share prompts which begin alike is not checked.
        survives: ("restart",) for a router that notices a restart which nobody announced, as its class may declare itself: from the
            first event whose id went back, its `overlap(request)` must have dropped what was held. Else both answers are right.
    """

    block_size: ClassVar[int] = 16
    backend: ClassVar[str | BackendSpec | None] = None
    selector: ClassVar[Any] = None
    packs: ClassVar[bool] = False
    first_of_equals: ClassVar[bool] = False
    follows_prefix: ClassVar[bool] = False
    survives: ClassVar[Sequence[str]] = ()

    def make_router(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002 - for those who define it
        """Make a new router; to be defined by a subclass, with the workers that are there from the start as argument or with none."""
        __tracebackhide__ = True
        refuse(self, "define make_router(self) or make_router(self, workers), which makes a new router")

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Wait for an async router; to be defined for one, with a loop: `return asyncio.run(awaitable)`."""
        __tracebackhide__ = True
        refuse_to_wait(self, "router", awaitable)

    # ------------------------------------------------------------------------------------------- it serves all

    def test_it_serves_every_request(self) -> None:
        """Every request ends, and what the router believes is right."""
        self._judge("three workers that share prefixes", self._played())

    def test_one_worker_is_enough(self) -> None:
        """A single worker gets all."""
        self._judge("a single worker", self._played(workers=1))

    def test_it_serves_requests_of_one_token(self) -> None:
        """A prompt of one token has no full block, and where one token is asked for there is no `first_token`."""
        self._judge("requests of one token", self._played(rows=self._of_one_token()))

    def test_it_follows_evictions(self) -> None:
        """Caches are so small that blocks are evicted all the time."""
        self._judge("caches that hold a few prompts", self._played(num_blocks=40))

    def test_workers_that_know_nothing_share_a_burst(self) -> None:
        """Of many requests of one moment whose prompts nobody holds each worker gets some: equal scores are no hot spot."""
        report = self._played(rows=self._burst(0.0))
        where = "a burst of prompts of which nobody holds a block"
        self._judge(where, report)
        self._each_is_picked(where, report, range(_WORKERS))

    def test_an_idle_fleet_is_shared(self) -> None:
        """Requests come one by one, and find all workers idle: of equal ones it is not always the same."""
        where = "requests that come one by one, of prompts of which nobody holds a block"
        report = self._played(rows=self._burst(0.0, apart_ms=500.0))
        self._judge(where, report)
        if self.first_of_equals:
            name = type(self).__name__
            pytest.skip(f"{name}.first_of_equals is True: {where}: whether each worker gets some was not checked")
        self._each_is_picked(where, report, range(_WORKERS))

    # ---------------------------------------------------------------------------------------- what happens to it

    def test_it_follows_a_restart(self) -> None:
        """A worker that restarts, announced, is empty, and its requests come again."""
        self._judge(f"a restart of worker 1 at {_AT_MS:g} ms", self._played(lambda fleet: fleet.at(_AT_MS).restart(1)))

    def test_it_uses_a_worker_that_is_back(self) -> None:
        """A worker that restarts, announced, gets some of a burst of prompts of which nobody holds a block."""
        where = f"worker 1 restarts at {_AT_MS:g} ms, and a burst of new prompts comes after it"
        rows = [*self._rows(), *self._burst(_LATER_MS)]
        report = self._played(lambda fleet: fleet.at(_AT_MS).restart(1), rows=rows)
        self._judge(where, report)
        self._each_is_picked(where, report, [1], lambda pick: pick.ms >= _LATER_MS)

    def test_it_lives_through_a_silent_restart(self) -> None:
        """What nobody told it it need not know, but by event ids that begin anew it may; and it goes on."""
        rows = self._rows()
        # The second time it has ended what it had, and the same prompts come once more: each asks for what it held before.
        again = [TraceRequest(_LATER_MS + 8 * at, *each) for at, each in enumerate(map(_LENGTHS, rows))]

        def happens(fleet: Fleet) -> None:
            for ms in (_AT_MS, _LATER_MS):
                fleet.at(ms).restart(1, announced=False)

        report = self._played(happens, rows=[*rows, *again])
        self._judge(f"unannounced restarts of worker 1 at {_AT_MS:g} and {_LATER_MS:g} ms", report)

    def test_it_uses_a_worker_that_joins(self) -> None:
        """A worker that joins is known, and gets some of a burst of prompts of which nobody holds a block."""
        where = f"worker {_WORKERS} joins at {_AT_MS:g} ms, and a burst of new prompts comes after it"
        rows = [*self._rows(), *self._burst(_LATER_MS)]
        report = self._played(lambda fleet: fleet.at(_AT_MS).join(engine=self._engine()), rows=rows)
        self._judge(where, report)
        self._each_is_picked(where, report, [_WORKERS])

    def test_it_lets_a_worker_leave(self) -> None:
        """A worker that leaves gets nothing more."""
        self._judge(f"worker 1 leaves at {_AT_MS:g} ms", self._played(lambda fleet: fleet.at(_AT_MS).leave(1)))

    def test_it_survives_a_crash(self) -> None:
        """A worker is lost, and its requests come again."""
        self._judge(f"a crash of worker 1 at {_AT_MS:g} ms", self._played(lambda fleet: fleet.at(_AT_MS).crash(1)))

    def test_sessions_go_on_when_their_worker_dies(self) -> None:
        """Worker 1 is lost while its sessions are between two turns; the others share them."""
        where = f"a crash of worker 1 at {_LATER_MS:g} ms, between two turns of its sessions"
        report = self._played(lambda fleet: fleet.at(_LATER_MS).crash(1), rows=self._sessions())
        self._judge(where, report)
        sessions = {number: turn.session_name for number, turn in zip(report.numbers, report.asked, strict=True)}
        left = {sessions[pick.number] for pick in report.picks if pick.ms < _LATER_MS and pick.worker == 1}
        if len(left) < 10:  # who draws may send so few to one worker
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
        """For 60 ms what is sent to the lost worker comes back."""
        report = self._played(lambda fleet: fleet.at(_AT_MS).crash(1, notice_ms=60))
        self._judge(f"a crash of worker 1 at {_AT_MS:g} ms, noticed 60 ms later", report)

    def test_it_keeps_ranks_apart(self) -> None:
        """Workers have two ranks each, which are picked by (worker, rank) and hold blocks of their own."""
        self._judge("two workers of two ranks", self._played(workers=4, ranks=2))

    def test_it_keeps_adapters_apart(self) -> None:
        """The same tokens with another LoRA adapter are another prompt."""
        if not self._has_adapters:
            pytest.skip(f"backend {self.backend!r} names no blocks by lora_name: adapters were not checked")
        self._judge("prompts that differ in their LoRA adapter alone", self._played(rows=self._adapters()))

    def test_late_events_do_not_stop_it(self) -> None:
        """Events come 40 ms late; it is right by those that came."""
        self._judge("events that are 40 ms late", self._played(event_delay_ms=40))

    def test_stale_polls_do_not_stop_it(self) -> None:
        """Candidates show loads of the engines that were read up to 500 ms ago."""
        self._judge("loads that are polled each 500 ms", self._played(loads="engine", loads_every_ms=500))

    # ------------------------------------------------------------------------------------------ what it offers

    def test_its_loads_are_right(self) -> None:
        """`loads()` is what was sent, less what is done."""
        self._judge_one("loads", LOAD_DRIFT, "what it counts of its open requests")

    def test_its_overlaps_are_right(self) -> None:
        """`overlap(request)` is what the events say."""
        self._judge_one("overlap", OVERLAP_DRIFT, "what it takes each worker to hold")

    def test_it_believes_no_more_than_it_sent(self) -> None:
        """`believed(request)` is at most what was sent to a worker since its last announced start, under that adapter."""
        self._judge_one("believed", OVERLAP_DRIFT, "what it takes to be where it sent it")

    def test_its_workers_are_right(self) -> None:
        """`workers()` are those that are there."""
        self._judge_one("workers", WORKER_DRIFT, "whom it takes to be there")

    def test_its_picks_are_among_the_cheapest(self) -> None:
        """By `selector`, on true loads and true caches, no pick cost more than it had to."""
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

    def _engine(self, num_blocks: int = 400, ranks: int = 1) -> MockEngine:
        __tracebackhide__ = True
        kind: dict[str, Any] = {}
        if self.backend is not None:
            spec = self._spec(self.backend)
            kind = {"engine_type": spec.scheduler}
            if spec.traits.publishes_groups:  # its caches share the blocks, so that there are as many for each
                num_blocks *= sum(max(1, self.block_size // group.block_size) for group in spec.traits.groups)
        args = MockEngineArgs(num_gpu_blocks=num_blocks, block_size=self.block_size, dp_size=ranks, **kind)
        return MockEngine(args, backend=self.backend)

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

    def _burst(self, ms: float, apart_ms: float = 0.0, first: int = 2**40) -> list[TraceRequest]:
        """Many requests whose prompts nobody holds, of one moment, or one after the other; their blocks are named from `first` on."""
        ids = [first + 2 * at for at in range(12 * _WORKERS)]
        size = 2 * self.block_size
        return [TraceRequest(ms + at * apart_ms, size, 4, (each, each + 1)) for at, each in enumerate(ids)]

    def _of_one_token(self) -> list[FleetRequest]:
        """Prompts of one token, and prompts of some blocks that share them, for one token each."""
        prompts = [range(at, at + (1 if at % 2 else 3 * self.block_size)) for at in range(8)]
        return [FleetRequest(prompts[at % len(prompts)], 1, 8.0 * at) for at in range(40)]

    def _sessions(self) -> list[FleetRequest]:
        """Conversations of two turns: the first ones at once, the second ones when those are long over, one by one.

        Of one moment they would all go to who is least busy then, by a right policy that goes by what the engines have in use.
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
        **options: Any,
    ) -> Report:
        """Play a trace on a fleet behind a new router."""
        __tracebackhide__ = True
        check_integer(f"{type(self).__name__}: block_size", self.block_size, 1)
        named: list[Worker] = list(range(workers)) if ranks == 1 else [divmod(at, ranks) for at in range(workers)]
        engines = [self._engine(num_blocks, ranks) for _ in range(workers)]
        router = call_with(self, self.make_router, "make_router", named)
        problem = None
        try:
            calls = RouterCalls(router, survives=self.survives)
            fleet = Fleet(engines, calls, **options)
        except TypeError as error:
            problem = str(error)
        if problem is not None:
            refuse(self, f"make_router gave {router!r:.80}: {problem}")
        self._note_unjudged(_unjudged_text(router))
        if happens is not None:
            happens(fleet)
        trace = self._rows() if rows is None else rows
        try:
            report: Report = self.run(fleet.arun(trace)) if calls.asynchronous else fleet.run(trace)
        except (RouterError, RouterStalled) as error:
            problem = str(error)
        if problem is not None:
            self._fail(problem)
        return report

    def _judge(self, where: str, report: Report) -> None:
        __tracebackhide__ = True
        left = report.arrived - len(report.completed) - report.aborted
        if left:
            self._fail(f"{where}: {left} of {report.arrived} requests were not served")
        for belief in report.beliefs or ():
            self._fail(f"{where}: {belief}")

    def _judge_one(self, method: str, rule: str, what: str) -> None:
        __tracebackhide__ = True
        report = self._played()
        self._needs(what, method)
        for belief in report.beliefs or ():
            if belief.rule == rule and not belief.follows:
                self._fail(f"three workers that share prefixes: {belief}")

    def _subject(self) -> Any:
        return call_with(self, self.make_router, "make_router", list(range(_WORKERS)))

    def _needs(self, what: str, *methods: str) -> None:
        """Skip the rest of a test, and say what was not checked, where the router has none of these methods."""
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
        """Fail unless each of these workers was picked, of the picks that are asked for; `hint` says what may be the cause."""
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
