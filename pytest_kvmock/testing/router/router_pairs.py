"""Scenes of the contract of routers for P/D pairs: two picks per request, and two legs that must meet.

One subject: the scenes, and the checks of each.

PYTEST_DONT_REWRITE: each message is complete; pytest would add the condition below it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pytest

from pytest_kvmock.engines.base.pair_options import IN_ROOMS, PAIRED
from pytest_kvmock.engines.schedulers.args import MockEngineArgs
from pytest_kvmock.fleets.clock.arrivals import FleetRequest
from pytest_kvmock.fleets.clock.mock_engine import MockEngine
from pytest_kvmock.fleets.clock.pair_handoff import PairLink
from pytest_kvmock.fleets.fleet import Fleet
from pytest_kvmock.fleets.pairs.role_router import RoleRouter, check_roles
from pytest_kvmock.fleets.report.report import Report
from pytest_kvmock.fleets.routing.routing import PHASES, id_of
from pytest_kvmock.testing.router.router_part import RouterPart
from pytest_kvmock.testing.subject import refuse
from pytest_kvmock.values.checks import is_integer, unknown_text

if TYPE_CHECKING:
    from pytest_kvmock.fleets.pairs.role_figures import RoleFigures
    from pytest_kvmock.fleets.routing.routing import Worker

# Theory of operation
#
# Each scene plays one trace on two or more engines per role. All have the same checks (`_judge_pairs`): every request
# ends in time, with no wrong belief; no decode engine recomputes a prompt that a prefill engine had; every leg finds
# the other one; only kept blocks are read; nothing is held at the end; and no lease expires while its client stays.

DECODE: Final = 1000
"""The id of the first decode worker. Ids of prefill workers count from 0, as in any fleet of a contract."""

_WAYS: Final = (*PAIRED, IN_ROOMS)
_AT_MS: Final = 150.0
_LATER_MS: Final = 2000.0
_ENDED: Final = ("failed", "refused", "rejected", "lost")
_ALONE: Final = "test_pairs_are_judged"


class PairScenes(RouterPart):
    """The scenes of `RouterContract` with P/D pairs."""

    hand_over: ClassVar[str | None] = None
    order: ClassVar[str] = "prefill_first"
    falls_back: ClassVar[bool] = False
    holds_prefill: ClassVar[bool] = False
    threshold: ClassVar[int | None] = None
    busy_from: ClassVar[int | None] = None
    timeout_s: ClassVar[float] = 30.0
    seed: ClassVar[int] = 1

    def __init_subclass__(cls, **options: Any) -> None:
        """Collect the scenes of pairs if `hand_over` is set; if not, only the one that reports that pairs were not
        checked.
        """
        super().__init_subclass__(**options)
        for name in _SCENES:
            if name == _ALONE or cls.hand_over is not None:
                if cls.__dict__.get(name, name) is None:
                    delattr(cls, name)
                if getattr(cls, name) is None:  # a base class has removed it
                    setattr(cls, name, getattr(PairScenes, name))
            elif name not in cls.__dict__:
                setattr(cls, name, None)

    @classmethod
    def _wrong_pairs(cls) -> str:
        """Return what is wrong with the declarations about pairs; "" if nothing is."""
        if cls.hand_over is not None and cls.hand_over not in _WAYS:
            return unknown_text("hand_over", cls.hand_over, _WAYS)
        for name in ("falls_back", "holds_prefill"):
            if not isinstance(flag := getattr(cls, name), bool):
                return f"{name} must be True or False, got {flag!r:.80}"
        for name in ("threshold", "busy_from"):
            if not (getattr(cls, name) is None or is_integer(getattr(cls, name), 0)):
                return f"{name} must be an integer of at least 0 (tokens), or None, got {getattr(cls, name)!r:.80}"
        if not isinstance(cls.timeout_s, int | float) or isinstance(cls.timeout_s, bool) or cls.timeout_s <= 0:
            return f"timeout_s must be seconds above 0, got {cls.timeout_s!r:.80}"
        return ""

    # ------------------------------------------------------------------------------------------------- the scenes

    def test_pairs_are_judged(self) -> None:
        """P/D pairs are judged if `hand_over` declares how they hand over."""
        if self.hand_over is None:
            pytest.skip(f"{type(self).__name__}.hand_over is None: P/D pairs were not checked")
        if self.threshold is None:
            pytest.skip(
                f"{type(self).__name__}.threshold is None: whether there is a prefill leg where one is due was not "
                "judged"
            )

    def test_prompts_are_computed_by_prefill_workers(self) -> None:
        """New prompts, also those shorter than a block, have a prefill leg, and no decode engine computes them."""
        size = self.block_size
        lengths = (size // 2, 3 * size, 8 * size + 3, size, 6 * size - 1)
        rows = [
            FleetRequest(range(2**20 * at, 2**20 * at + lengths[at % len(lengths)]), 8, 25.0 * at) for at in range(30)
        ]
        self._play_pairs("new prompts, some shorter than a block", rows=rows)

    def test_no_prefill_worker_is_not_passed_over_in_silence(self) -> None:
        """All prefill workers leave: requests then wait, are refused, or are decoded alone if `falls_back` declares
        it.
        """

        def happens(fleet: Fleet) -> None:
            for worker in range(2):
                fleet.at(_AT_MS).leave(worker)
            fleet.at(3 * _AT_MS).join(engine=self._pair_engine("prefill"))

        where = f"all prefill workers leave at {_AT_MS:g} ms, and one joins at {3 * _AT_MS:g} ms"
        self._play_without_prefill(where, happens)

    def test_a_prefill_worker_that_comes_up_later_is_used(self) -> None:
        """A deployment starts with decode workers, and prefill workers start later."""

        def happens(fleet: Fleet) -> None:
            for worker in range(2):
                fleet.at(0).cordon(worker)
                fleet.at(_AT_MS + 50 * worker).uncordon(worker)

        where = f"prefill workers come up from {_AT_MS:g} ms on, and decode workers are there"
        report = self._play_without_prefill(where, happens)
        if not report.roles or not report.roles["prefill"].requests:
            self._fail(f"{where}: no request was sent to a prefill worker")

    def test_a_change_of_one_role_keeps_the_loads_of_the_other(self) -> None:
        """Workers of each role join and leave while requests are open in both roles."""

        def happens(fleet: Fleet) -> None:
            for at, kind in enumerate(("prefill", "decode")):
                fleet.at(_AT_MS + 30 * at).join(engine=self._pair_engine(kind))
                fleet.at(2 * _AT_MS + 30 * at).leave(at * DECODE)

        self._play_pairs("workers of each role join and leave", happens, output=60)

    def test_the_load_of_prefill_ends_with_its_leg(self) -> None:
        """Outputs and transfers are long: prefill workers are idle long before the requests end."""
        where = "two bursts with long outputs and slow transfers, the second one as all prefill workers are idle"
        rows = [*self._of_pairs(12, 0.0, output=200), *self._of_pairs(12, _LATER_MS, output=200, first=2**24)]
        report = self._play_pairs(where, rows=rows, link=PairLink(lambda _: 300.0))
        picked = [pick.worker for pick in report.picks if pick.phase == "prefill" and pick.ms >= _LATER_MS]
        if not (self.packs or self.first_of_equals) and len(picked) > 1 and len({*picked}) < 2:
            self._fail(f"{where}: of the second burst all {len(picked)} prefill legs went to worker {picked[:1]}")

    def test_clients_that_leave_in_any_phase_leave_nothing(self) -> None:
        """Clients leave while their requests wait, are prefilled, transferred, and decoded."""
        after = (0.0, 5.0, 40.0, 90.0, 200.0)
        rows = [
            replace(row, abort_after_ms=after[at % len(after)]) if at % 4 else row
            for at, row in enumerate(self._of_pairs(40, output=40, apart_ms=6.0))
        ]
        link = PairLink(lambda _: 60.0)
        where = "clients that leave in each phase"
        report = self._play_pairs(where, rows=[*rows, *self._of_pairs(8, _LATER_MS, first=2**24)], link=link)
        if not report.aborted:
            self._fail(f"{where}: none was called off")

    def test_restarts_in_each_role_leave_nothing(self) -> None:
        """A prefill worker and a decode worker restart while requests are open: each request ends, possibly with an
        error.
        """

        def happens(fleet: Fleet) -> None:
            fleet.at(_AT_MS).restart(0)
            fleet.at(2 * _AT_MS).restart(DECODE)

        where = f"a prefill worker restarts at {_AT_MS:g} ms, and a decode worker at {2 * _AT_MS:g} ms"
        self._play_pairs(where, happens, output=40, link=PairLink(lambda _: 30.0), may_fail=True)

    def test_slow_workers_and_bad_links_leave_nothing(self) -> None:
        """One worker of each role is five times as slow, transfers are slow, late or fail, and clients leave."""
        rows = [
            replace(row, abort_after_ms=40.0 * (at % 7)) if at % 3 == 0 else row
            for at, row in enumerate(self._of_pairs(40, output=30, apart_ms=10.0))
        ]
        faults = {3: "fails", 8: "late", 13: "handshake", 19: "late"}
        link = PairLink(lambda tokens: 20.0 + tokens / 10, faults)
        where = "a slow worker of each role, transfers that are slow or fail, and clients that leave"
        self._play_pairs(where, rows=rows, link=link, slow=0.2, may_fail=True)

    def test_prefill_picks_count_no_block_of_decode_workers(self) -> None:
        """In further turns decode workers hold the generated blocks, and prefill workers do not."""
        size = self.block_size
        heads = [range(2**20 * at, 2**20 * at + 4 * size) for at in range(8)]
        first = [FleetRequest(head, 3 * size, 20.0 * at, f"session {at}") for at, head in enumerate(heads)]
        second = [FleetRequest((*head, 7, *range(2 * size)), 4, _LATER_MS + 20.0 * at) for at, head in enumerate(heads)]
        self._play_pairs("conversations of which decode workers hold more than prefill workers", rows=[*first, *second])

    def test_each_role_is_asked_by_its_own_hashes(self) -> None:
        """The roles name blocks differently: their block sizes differ, or, with SGLang, only one role has a draft
        model.
        """
        rows = [*self._of_pairs(16, apart_ms=30.0), *self._of_pairs(16, _LATER_MS, apart_ms=30.0)]
        if self.hand_over == IN_ROOMS:
            where = "prefill engines have a draft model (EAGLE), decode engines have none"
            report = self._play_pairs(where, rows=rows, eagle=True)
        else:
            where = "prefill engines have blocks of half the size of decode engines"
            report = self._play_pairs(where, rows=rows, decode_size=2 * self.block_size)
        again = [row for row in report.run.served if row.request.arrival_ms >= _LATER_MS]
        found = sum(row.request.first_reused_tokens for row in again)
        if self.uses_overlap and not found:
            self._fail(f"{where}: {len(again)} prompts that came again found nothing at their prefill workers")

    def test_legs_meet(self) -> None:
        """In ordinary traffic each leg finds the other one."""
        self._play_pairs("two prefill and two decode workers", link=PairLink(lambda tokens: tokens / 20))

    def test_legs_meet_at_ranks(self) -> None:
        """Workers have two ranks: a decode leg finds its prompt at the rank that was picked for prefill."""
        rows = [*self._of_pairs(16, apart_ms=20.0), *self._of_pairs(16, _LATER_MS, apart_ms=20.0)]
        self._play_pairs("two prefill and two decode workers of two ranks each", rows=rows, ranks=2)

    def test_decode_workers_share_what_they_have_room_for(self) -> None:
        """Decode workers, with room for two requests at a time, share a burst."""
        size = self.block_size
        rows = self._of_pairs(12, output=int(16 * size), blocks=8, first=2**25)
        where = "a burst of 12 requests, of which each decode worker holds two at a time"
        report = self._play_pairs(where, rows=rows, decode_blocks=52, prefill_blocks=2000, in_time=False)
        picked = [pick.worker for pick in report.picks if pick.phase == "decode"]
        if self.packs or len(picked) < len(rows):
            return
        fewest = min(picked.count(worker) for worker in (DECODE, DECODE + 1))
        if fewest < len(rows) // 4:
            self._fail(
                f"{where}: one decode worker got {fewest} of them, expected {len(rows) // 4} at least: "
                "legs that wait for it count too"
            )

    def test_blocks_that_it_was_never_told_of_do_not_end_it(self) -> None:
        """The router's index starts late: events continue from blocks that it never received; blocks of later events
        count.
        """
        size = self.block_size
        heads = [range(2**20 * at, 2**20 * at + 4 * size) for at in range(6)]
        before = [FleetRequest(head, 4, 10.0 * at) for at, head in enumerate(heads)]
        after = [FleetRequest((*head, *range(3 * size)), 4, 20.0 * at) for at, head in enumerate(heads)]
        new = self._of_pairs(12, 1000.0, apart_ms=20.0, first=2**24)
        again = self._of_pairs(12, 2000.0, apart_ms=20.0, first=2**24)
        self._play_pairs("an index that starts late", rows=[*after, *new, *again], warm=before)

    def test_a_failed_leg_ends_its_request(self) -> None:
        """A prefill leg is refused, or a transfer fails: the client gets an error, and the other leg is called off."""
        rows = self._of_pairs(12, apart_ms=60.0, output=20)
        faults = {1: "fails", 4: "handshake", 7: "fails"}
        where = "some transfers fail, and some prompts are refused by prefill engines"
        if PAIRED.get(str(self.hand_over)) is False:
            size = self.block_size
            rows.append(FleetRequest(range(2**26, 2**26 + 60 * size), 4, 100.0))
            self._play_pairs(where, rows=rows, link=PairLink(faults=faults), prefill_blocks=50, may_fail=True)
        else:
            self._play_pairs(where, rows=rows, link=PairLink(faults=faults), may_fail=True)

    def test_nothing_is_read_after_its_lease(self) -> None:
        """Decode workers are busy for longer than a lease, and no expired block is read."""
        rows = self._of_pairs(12, output=150, apart_ms=5.0)
        self._play_pairs("decode workers that are busy for longer than a lease", rows=rows, lease_s=1, in_time=False)

    def test_a_busy_prefill_worker_is_passed_over(self) -> None:
        """With `busy_from`: a prefill worker with this number of tokens to compute is not picked while another has
        fewer.
        """
        if self.busy_from is None:
            pytest.skip(
                f"{type(self).__name__}.busy_from is None: whether a busy prefill worker is picked was not checked"
            )
        size = self.block_size
        blocks = max(2, self.busy_from // size + 1)
        shared = range(4 * size)
        rows = [
            FleetRequest((*shared, *range(2**20 * at, 2**20 * at + blocks * size)), 4, 3.0 * at) for at in range(1, 25)
        ]
        where = f"prompts that share a beginning come while prefill workers have {self.busy_from} tokens to compute"
        report = self._play_pairs(where, rows=rows, prefill_blocks=4000, record=True, in_time=False)
        assert report.run.recorder is not None
        for at in range(len(report.picks)):
            if report.picks[at].phase != "prefill":
                continue
            record = report.run.recorder.pick(at)
            left = {each.worker: each.prefill_tokens for each in record.candidates}
            least = min(left.values())
            if left[record.chosen] >= self.busy_from > least:
                self._fail(
                    f"{where}: request {record.request.number} went to worker {record.chosen!r}, which had "
                    f"{left[record.chosen]} tokens to compute, and another had {least}"
                )

    # ------------------------------------------------------------------------------------------------- the means

    def _play_without_prefill(self, where: str, happens: Callable[[Fleet], object]) -> Report:
        """Play a scene in which for a while there is no prefill worker."""
        __tracebackhide__ = True
        report = self._play_pairs(where, happens, may_fail=True, may_be_alone=True)
        assert report.roles is not None
        alone = report.roles["decode"].alone
        if alone and not self.falls_back:
            self._fail(
                f"{where}: {len(alone)} requests were decoded alone, the first of them request {alone[0][0]}, and the "
                "client is not told; expected REFUSE, or None until a prefill worker is there. A router that does so "
                "on purpose declares falls_back = True"
            )
        return report

    def _pair_engine(self, kind: str, blocks: int = 400, size: int | None = None, **further: Any) -> MockEngine:
        """Return an engine of a role."""
        in_rooms = self.hand_over == IN_ROOMS
        eagle, lease_s = further.pop("eagle", False), further.pop("lease_s", None)
        pair: dict[str, Any] | None = None
        if in_rooms:
            pair = {"num_reserved_decode_tokens": 32} if kind == "decode" else None
        elif lease_s is not None and PAIRED.get(str(self.hand_over)):
            pair = {"kv_lease_duration": lease_s}
        given: dict[str, Any] = {
            "engine_type": "sglang" if in_rooms else "vllm",
            **({} if in_rooms else {"semantics": "1.6.1"}),
            **further,
        }
        args = MockEngineArgs(
            worker_type=kind,  # type: ignore[arg-type]  # one of the two
            hand_over=str(self.hand_over),
            num_gpu_blocks=blocks,
            block_size=size or self.block_size,
            pair=pair,
            **given,
        )
        backend = ("sglang_eagle" if eagle else "sglang") if in_rooms else "vllm"
        return MockEngine(args, backend=self.backend if self.backend is not None and not eagle else backend)

    def _with_decode(self, engines: Mapping[Worker, MockEngine], blocks: int = 800) -> dict[Worker, MockEngine]:
        """Return prefill engines with two decode engines; these have ranks in their names if the prefill engines do."""
        has_ranks = any(isinstance(worker, tuple) for worker in engines)
        names: list[Worker] = [(DECODE + at, 0) if has_ranks else DECODE + at for at in range(2)]
        return {**engines, **{worker: self._pair_engine("decode", blocks) for worker in names}}

    def _of_prefill(self, report: Report) -> Report:
        """Return the part of a report about prefill workers: the other scenes judge these."""
        run = replace(
            report.run,
            picks=tuple(pick for pick in report.picks if pick.phase == "prefill"),
            services=tuple(each for each in report.run.services if each.role == "prefill"),
        )
        return Report(run)

    def _skip_if_alone(self, where: str, report: Report) -> None:
        """Skip the rest of a scene of prefill workers if requests below a threshold had no prefill leg."""
        __tracebackhide__ = True
        alone = len(report.roles["decode"].alone) if report.roles else 0
        if alone and self.threshold is not None and self.threshold > 1:
            pytest.skip(
                f"{type(self).__name__}.threshold is {self.threshold}: {where}: {alone} requests were decoded alone, "
                "so which prefill worker gets what was not checked"
            )

    @staticmethod
    def _as_one(router: Any) -> Any:
        """Return a router as one object; a mapping has one router for each role."""
        if not isinstance(router, Mapping):
            return router
        return RoleRouter(check_roles("make_router: routers", router), lambda worker: PHASES[worker >= DECODE])

    def _excused(self, report: Report) -> int:
        """Return the number of requests that failed because a worker was lost while they were open, or were refused
        because no prefill worker was there.
        """
        refused = len(report.roles["prefill"].refused) if report.roles and report.run.incidents else 0
        lost = [each for each in report.run.incidents if each.kind in ("crash", "restart")]
        ended = [row.request for row in report.run.served if row.request.status == "failed"]
        return refused + sum(
            any(each.arrival_ms <= loss.ms <= (each.ended_ms or loss.ms) for loss in lost) for each in ended
        )

    def _of_pairs(
        self,
        count: int,
        ms: float = 0.0,
        *,
        output: int = 8,
        apart_ms: float = 0.0,
        blocks: int = 4,
        first: int = 0,
    ) -> list[FleetRequest]:
        """Return requests with different prompts, some of which share a prefix."""
        rng, size = Random(self.seed), self.block_size  # noqa: S311 - mock data
        rows = []
        for at in range(count):
            own = first + 2**20 + at * 2**10
            head = range(first, first + size * (at % 3))
            length = blocks * size + rng.randrange(size)
            rows.append(FleetRequest((*head, *range(own, own + length)), output, ms + at * apart_ms))
        return rows

    def _play_pairs(
        self,
        where: str,
        happens: Callable[[Fleet], object] | None = None,
        *,
        rows: Sequence[FleetRequest] | None = None,
        output: int = 24,
        link: PairLink | None = None,
        prefill_blocks: int = 400,
        decode_blocks: int = 800,
        decode_size: int | None = None,
        eagle: bool = False,
        lease_s: float | None = None,
        ranks: int = 1,
        slow: float = 1.0,
        warm: Sequence[FleetRequest] = (),
        may_fail: bool = False,
        may_be_alone: bool = False,
        in_time: bool = True,
        record: bool = False,
    ) -> Report:
        """Play a trace on two engines per role, and check the result."""
        __tracebackhide__ = True
        if wrong := self._wrong_pairs():
            refuse(self, wrong)
        make = partial(self._pair_engine, lease_s=lease_s, dp_size=ranks)
        engines: dict[Worker, MockEngine] = {}
        for at in range(2):
            for rank in range(ranks):
                names: Any = [(each, rank) if ranks > 1 else each for each in (at, DECODE + at)]
                speed = slow if at else 1.0
                engines[names[0]] = make("prefill", prefill_blocks, eagle=eagle, speedup_ratio=speed)
                engines[names[1]] = make("decode", decode_blocks, decode_size, speedup_ratio=speed)
        if warm:
            Fleet(engines, order=self.order, link=link).run(warm)  # type: ignore[arg-type]  # checked by Fleet
        rows = self._of_pairs(40, output=output, apart_ms=8.0) if rows is None else rows
        report, fleet = self._run_fleet(engines, happens, rows, link=link, record=record)
        self._judge_pairs(where, report, fleet, may_fail=may_fail, may_be_alone=may_be_alone, in_time=in_time)
        return report

    def _judge_pairs(
        self, where: str, report: Report, fleet: Fleet, *, may_fail: bool, may_be_alone: bool, in_time: bool
    ) -> None:
        __tracebackhide__ = True
        roles: Any = report.roles
        for belief in report.beliefs or ():
            self._fail(f"{where}: {belief}")
        self._judge_legs(where, fleet, roles, may_be_alone=may_be_alone)
        late_ms = 1000.0 * self.timeout_s
        for phase in ("prefill", "decode"):
            for number, ms in roles[phase].failed:
                if ms > late_ms:
                    self._fail(
                        f"{where}: the {phase} leg of request {number} failed, and its client got the error "
                        f"{ms / 1000:g} s later; expected it within timeout_s={self.timeout_s:g}, and the other leg "
                        "called off"
                    )
        for row in report.run.served:
            request = row.request
            since, end = request.arrival_ms, request.token_ms[0] if request.token_ms else request.ended_ms
            if request.status == "aborted" or end is None:
                continue
            if in_time and end - since > late_ms:
                self._fail(
                    f"{where}: request {row.number} was answered after {(end - since) / 1000:g} s; expected a token, "
                    f"or an error, within timeout_s={self.timeout_s:g}"
                )
            if request.status in _ENDED and not may_fail:
                self._fail(f"{where}: request {row.number} ended as {request.status}")
        again = {pick.number for pick in report.picks if pick.attempt > 1}  # a leg failed, or was lost with its worker
        for number, phase in roles["prefill"].ran_out:
            if number not in again and phase in ("finished", "prefill", "decode", "waiting"):
                self._fail(
                    f"{where}: the lease of request {number} ended by time, though its client stayed ({phase}): "
                    "its decode leg did not carry the answer to its prefill leg"
                )
        left = report.arrived - len(report.completed) - report.aborted
        if left and not may_fail:
            self._fail(f"{where}: {left} of {report.arrived} requests were not served")
        for worker, engine in fleet.engines.items():
            blocks, leases = engine.worker.manager.num_active_blocks, engine.worker.leased
            if leases or blocks:
                held = f"{leases[0].request}, {leases[0].phase}" if leases else f"{blocks} blocks"
                self._fail(f"{where}: worker {worker!r} holds something at the end: {held}")

    def _judge_legs(self, where: str, fleet: Fleet, roles: Mapping[str, RoleFigures], *, may_be_alone: bool) -> None:
        """Check that there are prefill legs where they are due, and that each leg found the other one."""
        __tracebackhide__ = True
        decode = roles["decode"]
        if self.threshold is not None and not may_be_alone and (due := decode.alone_from(max(1, self.threshold))):
            tokens = dict(decode.alone)[due[0]]
            self._fail(
                f"{where}: request {due[0]} was decoded alone, though its decode worker had {tokens} tokens to "
                f"compute; expected a prefill leg from threshold={self.threshold} on ({len(due)} requests so)"
            )
        if decode.recomputed:
            self._fail(
                f"{where}: the decode worker computed the prompt of request {decode.recomputed[0]} again, which a "
                "prefill worker had: its leg carried no parameters"
            )
        for worker, engine in fleet.engines.items():
            port = engine.worker.pair
            if stale := getattr(port, "stale_reads", ()):
                self._fail(f"{where}: {len(stale)} legs at worker {worker!r} read what was kept for none of them")
            for transfer, asked in getattr(port, "unmet", ()):
                self._fail(
                    f"{where}: a decode leg at worker {worker!r} waits for {transfer} of {asked}, which has no prefill "
                    "leg of it"
                )
            seen = port.rooms.seen if self.hand_over == IN_ROOMS else ()
            came = {(rank, room) for rank, room, phase in seen if phase == "prefill"}
            for rank, room, phase in seen:
                if phase == "decode" and (rank, room) not in came:
                    self._fail(
                        f"{where}: a decode leg waits for room {room} at rank {rank} of worker {id_of(worker)!r}, "
                        "which does not have that room"
                    )


_SCENES: Final = tuple(name for name in vars(PairScenes) if name.startswith("test_"))
