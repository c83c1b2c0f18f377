"""Promises of every router for stores that workers share: a block of a store belongs to no single worker.

A worker's stream announces the blocks that it has put into a store, and each worker of the store can load them. No
stream announces deletions. A router may therefore ignore stores, or promise less of one, but the same to all of its
workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn

import pytest

from pytest_kvmock.engines.shared import SHARED
from pytest_kvmock.engines.tiers import Tiers
from pytest_kvmock.fleets.clock.arrivals import FleetRequest
from pytest_kvmock.testing.subject import refuse
from pytest_kvmock.values.shared_stores import StoreSpec, read_stores

if TYPE_CHECKING:
    from pytest_kvmock.engines.backends import BackendSpec
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine
    from pytest_kvmock.fleets.fleet import Fleet
    from pytest_kvmock.fleets.report.report import Report
    from pytest_kvmock.fleets.routing.routing import Worker
    from pytest_kvmock.fleets.traces.mooncake import TraceRequest

_BLOCKS: Final = 8
"""The fewest blocks of a prompt, which has whole chunks of a store. A device holds one prompt, and a host two."""

_FILLERS: Final = 3
"""Number of prompts that push all earlier blocks out of the device and host of an engine."""

_PROMPTS: Final = 16
"""Number of prompts. By chance a correct router sends all of them to one of two workers in 1 case of 32,768."""

_FEW: Final = 4

JUDGED_KINDS: Final = ("files", "mooncake", "lmcache")
"""Kinds of stores below vLLM."""

MAY_BE_SILENT: Final = ("files",)
"""Kinds of stores to which a worker may write without an event."""

_APART_MS: Final = 2000.0
_MOST_WORKERS: Final = 8


class StoreScenes:
    """The part of `RouterContract` about stores that workers share.

    Attributes:
        stores: the stores, as `kvmock(stores=...)` takes them; `make_router` passes them to the router, too.
    """

    stores: ClassVar[Mapping[str, Any] | None] = None
    block_size: ClassVar[int]
    backend: ClassVar[str | BackendSpec | None]
    packs: ClassVar[bool]
    first_of_equals: ClassVar[bool]
    hand_over: ClassVar[str | None]

    if TYPE_CHECKING:  # members of the contract

        def _engine_over(self, num_blocks: int, tiers: Tiers | None, spec: BackendSpec) -> MockEngine: ...

        def _run_fleet(
            self,
            engines: Mapping[Worker, MockEngine],
            happens: Callable[[Fleet], object] | None,
            rows: Sequence[TraceRequest | FleetRequest],
            **options: Any,
        ) -> tuple[Report, Fleet]: ...

        def _run_trace(self, fleet: Fleet, rows: Sequence[TraceRequest | FleetRequest]) -> Report: ...

        def _judge(self, where: str, report: Report) -> None: ...

        def _needs(self, what: str, *methods: str) -> None: ...

        def _spec(self, backend: str | BackendSpec) -> BackendSpec: ...

        def _note_unjudged(self, text: str, about: str = "") -> None: ...

        def _fail(self, text: str) -> NoReturn: ...

    @classmethod
    def _wrong_stores(cls) -> str:
        """Return what is wrong with `stores`; "" if nothing is."""
        if cls.stores is None:
            return ""
        try:
            stores = read_stores(cls.stores)
        except ValueError as error:
            return str(error)
        most = max((each for spec in stores.values() for each in spec.workers), default=0)
        return "" if most < _MOST_WORKERS - 1 else f"stores: worker ids must be below {_MOST_WORKERS - 1}, got {most}"

    def test_a_block_of_a_store_is_no_worker_s_own(self) -> None:
        """With `stores`: prompts that are only in a store do not all go to the worker that announced them. They count
        on no device, and the store is no worker.
        """
        for spec, described in ((spec, described) for spec in self._shared_by_several() for described in (True, False)):
            writer = spec.workers[0] if described else spec.workers[-1]
            prompts = self._prompts(_PROMPTS, spec)
            where = f"worker {writer} has written {_PROMPTS} prompts to the store {spec.name!r}, and no device has them"
            engines = self._engines(spec, described=described)

            def serve(fleet: Fleet, writer: int = writer, prompts: Sequence[range] = prompts) -> None:
                self._serve(fleet, writer, prompts)

            cut = self.block_size if units_of(spec, self.block_size) > 1 else 0  # ends inside a chunk
            asked = self._asked([each[: len(each) - cut] for each in prompts])
            report, _ = self._run_fleet(engines, serve, asked, stores=self.stores)
            self._judge(where, report)
            picked = [pick.worker for pick in report.picks]
            if self.packs or (self.first_of_equals and writer == min(engines)):
                continue  # such picks are declared
            if picked.count(writer) == len(picked):
                self._fail(
                    f"{where}: all of them went to worker {writer}; expected some at the others: "
                    f"{_ids(spec.workers)} can load them alike"
                )

    def test_a_store_outlives_what_happens_to_its_workers(self) -> None:
        """With `stores`: a worker that has written prompts is cleared, restarts, leaves or crashes. Promises of these
        prompts to the other workers stay.
        """
        for spec in self._shared_by_several():
            for what in ("was cleared", "restarts", "leaves", "crashes"):
                self._needs("what it promises of a store", "overlap_by_owner")
                writer, prompts = spec.workers[0], self._prompts(2 * _FEW, spec)
                engines = self._engines(spec)

                def serve(fleet: Fleet, writer: int = writer, prompts: Sequence[range] = prompts) -> None:
                    self._serve(fleet, writer, prompts)

                before, fleet = self._run_fleet(engines, serve, self._asked(prompts[:_FEW]), stores=self.stores)
                where = f"worker {writer} has written prompts to the store {spec.name!r}"
                self._judge(where, before)
                if what == "was cleared":
                    fleet.engines[writer].worker.clear()
                else:
                    moment = fleet.at(0)
                    {"restarts": moment.restart, "leaves": moment.leave, "crashes": moment.crash}[what](writer)
                after = self._run_trace(fleet, self._asked(prompts[_FEW:]))
                self._judge(f"{where}, and {what}", after)
                others = [worker for worker in spec.workers if worker != writer]
                promised = [self._least(each, spec, others) for each in (before, after)]
                if promised[1] < promised[0]:
                    self._fail(
                        f"{where}, and {what}: it promises {_ids(others)} {promised[1]} blocks of one; "
                        f"expected {promised[0]}, as for others before: a store keeps what it has"
                    )

    def test_a_hole_ends_a_promise_of_a_store(self) -> None:
        """With `stores`: a worker has announced only the second half of a prompt, as it has loaded the first half."""
        for spec in self._shared_by_several(MAY_BE_SILENT):
            self._needs("what it promises of a store", "overlap_by_owner")
            silent, writer, prompts = spec.workers[0], spec.workers[-1], self._prompts(_FEW, spec)
            engines = self._engines(spec, silent=(silent,))

            def serve(
                fleet: Fleet, silent: int = silent, writer: int = writer, prompts: Sequence[range] = prompts
            ) -> None:
                self._serve(fleet, silent, [each[: len(each) // 2] for each in prompts])
                for each in prompts:
                    self._serve(fleet, writer, [each])

            report, _ = self._run_fleet(engines, serve, self._asked(prompts), stores=self.stores)
            where = f"worker {writer} has announced the second halves of prompts in the store {spec.name!r}"
            self._judge(f"{where}, and no worker the first ones", report)

    def test_a_promise_that_was_broken_is_lowered(self) -> None:
        """With `stores`: the blocks of a store are deleted, twice. A repeated promise is reported at the end of the
        run, and is no failure: no stream announces the deletion.
        """
        for spec in self._shared_by_several(MAY_BE_SILENT):
            self._needs("what it promises of a store", "overlap_by_owner")
            writer, prompts = spec.workers[0], self._prompts(_FEW, spec)
            others = [worker for worker in spec.workers if worker != writer]
            engines = self._engines(spec, silent=others)  # otherwise they announce recomputed blocks

            def delete(fleet: Fleet, writer: int = writer, prompts: Sequence[range] = prompts) -> None:
                for each in prompts:
                    fleet.engines[writer].worker.storage.lose(each)

            def serve(fleet: Fleet, writer: int = writer, prompts: Sequence[range] = prompts) -> None:
                self._serve(fleet, writer, prompts)
                delete(fleet, writer, prompts)
                fleet.at(0).cordon(writer)

            where = f"prompts in the store {spec.name!r} were deleted"
            first, fleet = self._run_fleet(engines, serve, self._asked(prompts), stores=self.stores)
            self._judge(where, first)
            for worker in fleet.engines:
                self._serve(fleet, worker, [])
            delete(fleet)
            again = self._run_trace(fleet, self._asked(prompts, 1))
            self._judge(f"{where} twice", again)
            paid = [{*self._broken(each, spec)} for each in (first, again)]
            if twice := paid[0] & paid[1]:
                self._note_unjudged(
                    f"{len(twice)} of {_FEW} promises of deleted blocks were paid for twice (request.reused_tokens in "
                    "finished(request) shows a miss)",
                    about=f"the store {spec.name!r}",
                )

    # ------------------------------------------------------------------------------------------------ the means

    def _shared_by_several(self, kinds: Sequence[str] = JUDGED_KINDS) -> list[StoreSpec]:
        """Return the stores of these kinds that several workers share; skip the test if there is none."""
        __tracebackhide__ = True
        name = type(self).__name__
        if self.stores is None:
            pytest.skip(f"{name}.stores is None: stores that workers share were not checked")
        wrong = self._wrong_stores()
        try:
            for each in read_stores(self.stores).values() if not wrong else ():
                units_of(each, self.block_size)
        except ValueError as error:
            wrong = str(error)
        if wrong:
            refuse(self, wrong)
        found = [each for each in read_stores(self.stores).values() if each.kind in kinds and len(each.workers) > 1]
        if not found or self.hand_over is not None:
            why = "hand_over is set" if found else f"stores has none of {', '.join(kinds)} with two workers"
            pytest.skip(f"{name}: {why}: stores that workers share were not checked")
        return found

    def _engines(
        self, spec: StoreSpec, *, described: bool = True, silent: Sequence[int] = ()
    ) -> dict[Worker, MockEngine]:
        """Make at least three engines, one of which is in no store; `silent` ones do not announce what they write."""
        __tracebackhide__ = True
        all_of = [each for store in read_stores(self.stores).values() for each in store.workers]
        backend = self._spec(self.backend or "vllm")
        engines: dict[Worker, MockEngine] = {}
        blocks = blocks_of(spec, self.block_size, _BLOCKS)
        for worker in range(max(3, max(all_of) + 2)):
            below = SHARED[spec.kind].tiers
            tiers = None if below is None else {"host": 2 * blocks, **below, "self_describing": described}
            if tiers is not None and worker in silent:
                tiers["file_events"] = False
            engines[worker] = self._engine_over(blocks + 2, None if tiers is None else Tiers.of(tiers), backend)
        return engines

    def _prompts(self, count: int, spec: StoreSpec) -> list[range]:
        size = blocks_of(spec, self.block_size, _BLOCKS) * self.block_size
        return [range(at * size, (at + 1) * size) for at in range(count)]

    def _serve(self, fleet: Fleet, worker: Worker, prompts: Sequence[range]) -> None:
        """Let an engine serve prompts, then others until neither its device nor its host holds the first ones."""
        engine = fleet.engines[worker]
        size = (engine.args.num_gpu_blocks - 2) * self.block_size
        at = 2**29 + 2**20 * engine.passes
        for prompt in (*prompts, *(range(at + each * size, at + (each + 1) * size) for each in range(_FILLERS))):
            engine.submit((*prompt, 2**30), 1)
            engine.run()

    @staticmethod
    def _asked(prompts: Sequence[range], attempt: int = 0) -> list[FleetRequest]:
        """Return requests for these prompts, each with one more token, one by one."""
        first = 2**31 + 2**20 * attempt
        return [FleetRequest((*each, first + at), 1, _APART_MS * at) for at, each in enumerate(prompts)]

    @staticmethod
    def _least(report: Report, spec: StoreSpec, workers: Sequence[Worker]) -> int:
        """Return the fewest blocks of a store that were promised to any of these workers for any request."""
        said = (each.blocks.get(spec.name, {}) for each in report.run.promises)
        return min((promised.get(worker, 0) for promised in said for worker in workers), default=0)

    @staticmethod
    def _broken(report: Report, spec: StoreSpec) -> list[int]:
        """Return the requests of a run whose worker reused fewer blocks than the store's promise."""
        reused = dict(zip(report.run.numbers, report.run.requests, strict=True))
        promised = {each.number: each.blocks.get(spec.name, {}) for each in report.run.promises}
        size = report.run.facts.block_size
        return [
            pick.number
            for pick in report.picks
            if reused[pick.number].first_reused_tokens // size < promised.get(pick.number, {}).get(pick.worker, 0)
        ]


def units_of(spec: StoreSpec, block_size: int) -> int:
    """Return the number of device blocks in a chunk of a store.

    Raises:
        ValueError: it is not a whole number.
    """
    chunk: int = spec["chunk"] if spec.kind == "lmcache" else block_size
    if chunk % block_size:
        raise ValueError(
            f"stores[{spec.name!r}]: chunk must be a multiple of block_size, {block_size} tokens, got {chunk}"
        )
    return chunk // block_size


def blocks_of(spec: StoreSpec, block_size: int, least: int) -> int:
    """Return the number of blocks of the shortest prompt with whole chunks and at least `least` blocks."""
    units = units_of(spec, block_size)
    return -(-least // units) * units


def _ids(workers: Sequence[Worker]) -> str:
    return f"worker{'s' * (len(workers) != 1)} {', '.join(map(str, workers))}"
