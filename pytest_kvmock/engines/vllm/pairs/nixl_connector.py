"""vLLM 0.33.0's NixlConnector, which reads: blocks that a prefill engine keeps, leases, and reads by decode engines.

One subject: the two halves of the connector, in the scheduler and in the worker, by the rules of
`nixl/pull_scheduler.py`, `base_scheduler.py` and `base_worker.py`.

Theory of operation. A prefill leg that ends with "length" or "stop" keeps its blocks; the parameters of its answer name
them. A decode leg with these parameters reads the part of its prompt that is not cached, into blocks without names. Its
engine notifies the other one when the read is done, or at once if it needs nothing; while the leg is open it sends
heartbeats. Blocks that are neither read nor renewed are freed when their lease ends. The scheduler's half collects
tasks between two steps, and the worker's half gets them with each step (`plan`). Reads, leases and heartbeats therefore
begin within a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final

from pytest_kvmock.engines.vllm.pairs.legs import Ended, EngineDied, PairTransfer, WorkerReport

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.pair_options import PairOptions
    from pytest_kvmock.engines.vllm.pairs.legs import Finish, Leg, Tables

FIELDS: Final = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
"""Fields that a decode leg needs in addition to `remote_block_ids`."""

EXPIRY_MARGIN_S: Final = 5
"""No read begins within this time before a decode engine frees the blocks."""


@dataclass(slots=True)
class NixlPlan:
    """The worker's tasks of one step.

    Attributes:
        reads: reads to begin; an empty one only notifies the other engine.
        heartbeats: by engine, its requests whose leases are renewed.
        leases: legs whose blocks are kept from now on, with the end of the lease in seconds.
        in_batch: legs whose blocks may be kept later.
        dropped: legs whose blocks will not be kept.
    """

    reads: list[PairTransfer] = field(default_factory=list)
    heartbeats: dict[str, list[str]] = field(default_factory=dict)
    leases: dict[str, float] = field(default_factory=dict)
    in_batch: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


class NixlConnector:
    """The connector of one engine.

    Args:
        options: options of the pair.
        engine_id: the name of the engine.
        windows: for each group, the maximum number of last blocks that are handed over; 0: all.
        is_producer: whether it may keep blocks for other engines.
        host: host of its side channel.
        port: port of its side channel.

    Attributes:
        engine_id: as given.
        needs: fields without which a decode leg waits forever.
        needs_delivery: whether a preempted request drops the token in flight, as freed blocks may not be handed over.
        leases: by leg, the time until which its blocks are kept, in seconds.
        address: the fields of hand-overs that name its side channel.
        ran_out: legs whose lease expired.
    """

    needs: ClassVar[Sequence[str]] = FIELDS

    def __init__(
        self,
        options: PairOptions,
        engine_id: str,
        windows: Sequence[int],
        *,
        is_producer: bool = True,
        host: str = "10.0.0.1",
        port: int = 5600,
    ) -> None:
        self.options, self.engine_id = options, engine_id
        self.needs_delivery = is_producer
        self.leases: dict[str, float] = {}
        self.ran_out: list[str] = []
        self._windows = windows
        self.address = {"remote_host": host, "remote_port": port}
        self._plan = NixlPlan()
        self._to_read: dict[str, tuple[Leg, Sequence[Sequence[int]], bool]] = {}
        self._beating: dict[str, dict[str, None]] = {}  # by engine, its requests
        self._beats_of: dict[str, tuple[str, str]] = {}  # by leg, the engine and its request
        self._last_beat_s = 0.0
        # The worker's half.
        self._known: dict[str, None] = {}  # legs that may be notified
        self._met: set[str] = set()
        self._told: list[str] = []
        self._renewed: list[str] = []
        self._ended: list[tuple[PairTransfer, bool]] = []

    # ------------------------------------------------------------------------------------------- the scheduler's half

    def arrived(self, leg: Leg) -> None:
        """Note the arrival of a leg: from now on the lease of the blocks that it will read is renewed."""
        params = leg.params
        if params is None or not params.get("do_remote_prefill"):
            return
        if any(params.get(name) is None for name in (*FIELDS, "tp_size")):
            return
        engine, request = params["remote_engine_id"], params["remote_request_id"]
        self._beating.setdefault(engine, {})[request] = None
        self._beats_of[leg.name] = engine, request

    def external(self, leg: Leg, local: int) -> int:
        """Return the number of tokens of a leg that come from the other engine, after the `local` ones."""
        params = leg.params
        if params is None:
            return 0
        if params.get("do_remote_prefill"):
            return max(leg.prompt_tokens - local, 0)
        if params.get("do_remote_decode") and params.get("remote_block_ids") and all(name in params for name in FIELDS):
            count = min(params.get("remote_num_tokens") or 0, leg.prompt_tokens) - local
            threshold = self.options.kv_recompute_threshold
            return 0 if count <= 0 or 0 < count < threshold else count
        return 0

    def allocated(self, leg: Leg, external: int, nameless: Tables) -> None:
        """Note that a leg has blocks: this step reads the tokens that it needs from another engine.

        Raises:
            EngineDied: the leg must load, and its parameters name no blocks.
        """
        params = leg.params
        if not params:
            return
        two_turns = self.options.bidirectional_kv_xfer
        if params.get("do_remote_decode") or (params.get("do_remote_prefill") and two_turns):
            self._plan.in_batch.append(leg.name)
        is_second_turn = params.get("do_remote_decode") and two_turns and not params.get("_remote_blocks_processed")
        if not (params.get("do_remote_prefill") or is_second_turn):
            return
        if params.get("remote_block_ids"):
            # If a field is missing, vLLM only warns ("will not utilize KVTransfer"), and the leg waits forever.
            if all(name in params for name in FIELDS):
                self._to_read[leg.name] = (leg, self._clipped(nameless) if external > 0 else (), external > 0)
        elif external:
            raise EngineDied(
                "AssertionError",
                ("pull_scheduler.py", "update_state_after_alloc"),
                f"request {leg.name!r} has do_remote_prefill and no remote_block_ids",
            )
        params["do_remote_prefill"] = False  # one transfer per request
        params["_remote_blocks_processed"] = True

    def ended(self, leg: Leg, finish: Finish, tables: Tables, computed: int, now_s: float) -> Ended:
        """Note the end of a leg.

        Args:
            leg: the leg.
            finish: how it ended.
            tables: its blocks of computed tokens.
            computed: the number of these tokens.
            now_s: the time, in seconds.

        Returns:
            Whether its blocks are kept, and the parameters of its answer, or None.
        """
        params = leg.params
        if not params:
            return False, None
        is_prefill = bool(params.get("do_remote_decode"))
        self._stop_beating(leg.name)
        if params.get("do_remote_prefill"):  # it was never admitted: notify the other engine, which frees its blocks
            self._to_read[leg.name] = (leg, (), False)
            params["do_remote_prefill"] = False
            return False, None
        if not is_prefill and not self.options.bidirectional_kv_xfer:
            return False, None
        if finish not in ("length", "stop"):
            self._plan.dropped.append(leg.name)
            return False, None
        expires = now_s + (self.options.kv_lease_duration if is_prefill else self.options.decoder_kv_blocks_ttl)
        self._plan.leases[leg.name] = expires
        return True, {
            "do_remote_prefill": is_prefill,
            "do_remote_decode": not is_prefill,
            "remote_block_ids": self._clipped(tables),
            "remote_engine_id": self.engine_id,
            "remote_request_id": leg.name,
            **self.address,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": computed,
            "remote_blocks_expiry_time": None if is_prefill else expires,
            "remote_registration_generation": 0,
            "transfer_mode": "pull",
        }

    def _clipped(self, tables: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the blocks to hand over, by group; for a window group, only the last ones."""
        return [list(blocks[-most:] if most else blocks) for blocks, most in zip(tables, self._windows, strict=True)]

    def _stop_beating(self, name: str) -> None:
        known = self._beats_of.pop(name, None)
        if known is not None and known[0] in self._beating:
            requests = self._beating[known[0]]
            requests.pop(known[1], None)
            if not requests:
                del self._beating[known[0]]

    def plan(self, now_s: float) -> NixlPlan:
        """Return the worker's tasks since the last step.

        Raises:
            EngineDied: a leg that was never admitted must notify an engine that its parameters do not name.
        """
        plan, self._plan = self._plan, NixlPlan()
        reads, self._to_read = self._to_read, {}
        for name, (leg, local, is_awaited) in reads.items():
            params = leg.params
            assert params is not None
            missing = [each for each in ("remote_block_ids", *FIELDS) if each not in params]
            if missing:
                raise EngineDied(
                    "KeyError",
                    ("metadata.py", "add_new_req_to_recv"),
                    f"request {name!r} was called off before its admission, and its parameters have no {missing[0]}",
                )
            plan.reads.append(
                PairTransfer(
                    name,
                    params["remote_engine_id"],
                    params["remote_request_id"],
                    local,
                    params["remote_block_ids"],
                    is_awaited,
                    params.get("remote_blocks_expiry_time"),
                )
            )
        if self._beating and now_s >= self._last_beat_s + self.options.kv_lease_duration // 6:
            self._last_beat_s = now_s
            plan.heartbeats = {engine: list(requests) for engine, requests in self._beating.items()}
        return plan

    @property
    def has_news(self) -> bool:
        """Whether its next step will change anything, apart from what becomes due with time."""
        plan = self._plan
        new = self._to_read or plan.leases or plan.in_batch or plan.dropped
        return bool(new or self._told or self._renewed or self._ended)

    @property
    def next_beat_s(self) -> float | None:
        """Time at which the next heartbeat is due, in seconds; None if there is nothing to renew."""
        return self._last_beat_s + max(self.options.kv_lease_duration // 6, 1e-3) if self._beating else None

    def reported(self, report: WorkerReport) -> None:
        """Take the worker's report: blocks that were read need no more heartbeats."""
        for name in report.received:
            self._stop_beating(name)

    # ---------------------------------------------------------------------------------------------- the worker's half

    def begin(self, plan: NixlPlan, now_s: float) -> list[PairTransfer]:
        """Take the worker's tasks of a step.

        Returns the reads that begin. A read whose blocks expire too soon fails at once.
        """
        self._known.update(dict.fromkeys(plan.in_batch))
        for name in plan.dropped:
            self._known.pop(name, None)
        self.leases.update({name: until for name, until in plan.leases.items() if name in self._known})
        begun = []
        for read in plan.reads:
            if read.expires_s is not None and not read.is_empty and read.expires_s - now_s <= EXPIRY_MARGIN_S:
                self._ended.append((read, False))
                continue
            self._met.add(read.engine)
            begun.append(read)
        return begun

    def to_renew(self, plan: NixlPlan) -> dict[str, list[str]]:
        """Return the heartbeats that a step sends, by engine.

        The first one to an unknown engine only begins a handshake.
        """
        met = {engine: names for engine, names in plan.heartbeats.items() if engine in self._met}
        self._met.update(plan.heartbeats)
        return met

    def notified(self, name: str) -> None:
        """Note that another engine has read the blocks of a leg, or needs none of them."""
        self._told.append(name)

    def renewed(self, names: Iterable[str]) -> None:
        """Note a heartbeat of another engine."""
        self._renewed += names

    def transfer_ended(self, transfer: PairTransfer, *, ok: bool) -> None:
        """Note the end of a read; the next step reports the waiting leg."""
        self._ended.append((transfer, ok))

    def collect(self, now_s: float, report: WorkerReport) -> None:
        """End a step of the worker: report finished reads, blocks that others have read, and expired leases."""
        for name in self._renewed:
            if name in self.leases:
                self.leases[name] = max(self.leases[name], now_s + self.options.kv_lease_duration * 2 // 3)
        self._renewed.clear()
        told, self._told = self._told, []
        for name in told:
            if name in self._known:  # if not, vLLM logs it and ignores it
                del self._known[name]
                self.leases.pop(name, None)
                report.sent.append(name)
        for name in [name for name, until in self.leases.items() if now_s >= until]:
            del self.leases[name]
            self._known.pop(name, None)
            self.ran_out.append(name)
            report.sent.append(name)
        ended, self._ended = self._ended, []
        for transfer, ok in ended:
            if not transfer.is_awaited:
                continue
            report.received.append(transfer.name)
            if not ok:
                report.failed.append(transfer.name)
                if len(self._windows) == 1:  # with several groups, a block does not identify its request
                    report.invalid.update(block for blocks in transfer.local for block in blocks)
