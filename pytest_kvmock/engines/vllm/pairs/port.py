"""An engine's port to others: its side of the pair, its connector, and the transfers that it waits for.

One subject: one step of an engine of a pair, by hand or in time.

Theory of operation. The effects of a step happen at its end: ended legs are answered, transfers begin, heartbeats are
sent, and the worker's report is taken. Engines reach each other by the ports in hand-overs (`HandOver.source`). The
port does not decide when bytes arrive: a test, or the stage of a clock, calls `ended`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from pytest_kvmock.engines.base.hand_over import HandOver, Lease
from pytest_kvmock.engines.vllm.pairs.legs import EngineDied, Leg, WorkerReport
from pytest_kvmock.engines.vllm.pairs.mooncake_connector import MooncakeConnector
from pytest_kvmock.engines.vllm.pairs.nixl_connector import NixlConnector
from pytest_kvmock.engines.vllm.pairs.vllm_side import VllmSide

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.pair_options import PairRole
    from pytest_kvmock.engines.vllm.pairs.legs import Finish, PairTransfer
    from pytest_kvmock.engines.vllm.pairs.mooncake_connector import PairOffer

BOOTSTRAP_ADDR = "http://10.0.0.1:8998"
"""Address of the bootstrap server of a prefill engine with Mooncake."""


class Loading:
    """One transfer that an engine waits for.

    Attributes:
        transfer: the transfer.
        peer: port of the sending engine; None if it is not known.
        offer: with Mooncake, the entry at the sending engine.
        asked_s: time at which it was asked for.
        has_begun: whether bytes are on their way.
        is_stale: whether the blocks were no longer kept when they were read.
    """

    __slots__ = ("asked_s", "has_begun", "is_stale", "offer", "peer", "transfer")

    def __init__(self, transfer: PairTransfer, peer: PairPort | None, asked_s: float) -> None:
        self.transfer, self.peer, self.asked_s = transfer, peer, asked_s
        self.offer: PairOffer | None = None
        self.has_begun = self.is_stale = False


Begun: TypeAlias = "Callable[[PairPort, Loading], None]"


class PairPort:
    """The port of one engine.

    Args:
        driver: the driver of its block manager.
        role: role of the engine, and its way to hand over.
        engine_id: its name in hand-overs.

    Attributes:
        driver: as given.
        role: as given.
        engine_id: as given.
        side: its legs.
        connector: its connector.
        now_s: its time, in seconds.
        peers: ports of other engines, by name; they come with hand-overs.
        loads: the transfers that it waits for, by leg.
        answers: the hand-overs of ended legs, by leg.
        stale_reads: legs that read blocks which were no longer kept.
        unmet: transfers that timed out here because the sending engine never had their prefill leg; with its name.
        freed_early: legs whose blocks were free when a transfer into them ended.
        on_begin: called when a transfer to it begins; None: not called.
        death: the error that ended the engine; None while it is alive.
        told: notifications that blocks were read or are not needed: engine and leg.
        bootstrap_addr: with Mooncake, address of its bootstrap server.
        has_clock: whether its time is that of its owner, not of its passes.
        is_lost: whether its engine was emptied, so that nothing can be read there.
        is_named: whether its name was changed.
        ranks: the ports of all ranks of its worker, in order.
    """

    has_clock = False
    bootstrap_addr = BOOTSTRAP_ADDR
    is_lost = is_named = False

    def __init__(self, driver: Any, role: PairRole, engine_id: str) -> None:
        self.driver, self.role, self.engine_id = driver, role, engine_id
        geometry = getattr(driver.manager, "geometry", None)
        groups = () if geometry is None else geometry.groups
        windows = [0 if each.window is None else -(-each.window // each.block_size) + 1 for each in groups] or [0]
        is_producer = role.worker_type != "decode"
        self.connector: NixlConnector | MooncakeConnector
        if role.reads:
            self.connector = NixlConnector(role.options, engine_id, windows, is_producer=is_producer)
        else:
            kinds = {"prefill": "kv_producer", "decode": "kv_consumer"}
            self.connector = MooncakeConnector(role.options, engine_id, windows, role=kinds[role.worker_type])
        recomputes = role.options.kv_load_failure_policy == "recompute"
        self.side = VllmSide(driver, self.connector, recomputes=recomputes)
        self.now_s = 0.0
        self.peers: dict[str, PairPort] = {}
        self.loads: dict[str, Loading] = {}
        self.answers: dict[str, HandOver] = {}
        self.stale_reads: list[str] = []
        self.told: list[tuple[str, str]] = []
        self.unmet: list[tuple[str, str]] = []
        self.freed_early: list[str] = []
        self._came: set[str] = set()  # with Mooncake, transfers of its prefill legs
        self.on_begin: Begun | None = None
        self.death: EngineDied | None = None
        self.ranks: Sequence[PairPort] = (self,)
        self._asked_of_me: list[tuple[PairPort, Loading]] = []
        self._of: dict[Any, Leg] = {}  # by the driver's request
        self._ending: list[tuple[Leg, Finish]] = []
        self._numbers = count()
        driver.pair = self

    def rename(self, engine_id: str, address: tuple[str, int] | None = None) -> None:
        """Change the engine's name, and the address of its side channel, before its first leg."""
        self.engine_id = self.connector.engine_id = engine_id
        self.is_named = True
        if address is not None and isinstance(self.connector, NixlConnector):
            self.connector.address = {"remote_host": address[0], "remote_port": address[1]}

    @staticmethod
    def join_ranks(ports: Sequence[PairPort]) -> None:
        """Let ports be the ranks of one worker, in their order.

        Each rank is a separate engine; the port of its side channel is the first engine's port plus its rank. Other
        engines find all ranks through any of them, as with Mooncake's bootstrap server, which names them all.
        """
        if tuple(ports) == ports[0].ranks:
            return
        name, first = ports[0].engine_id.removesuffix("_dp0"), getattr(ports[0].connector, "address", None)
        for rank, port in enumerate(ports):
            port.ranks = tuple(ports)
            own = first and (first["remote_host"], first["remote_port"] + rank)
            port.rename(f"{name}_dp{rank}", own)

    def leg(self, state: Any) -> Leg | None:
        """Return the leg of a driver's request; None for an ordinary request."""
        return self._of.get(state)

    def open(self, state: Any, hand_over: Mapping[str, Any], prompt_tokens: int, name: str = "") -> Leg:
        """Open a leg for a driver's request; an empty `name` is replaced."""
        source = cast("PairPort | None", hand_over.source) if isinstance(hand_over, HandOver) else None
        for each in () if source is None else source.ranks:
            if not each.is_lost and self.peers.setdefault(each.engine_id, each) is not each:
                raise ValueError(
                    f"two engines that hand over to {self.engine_id!r} are named {each.engine_id!r}; "
                    "give their workers other ids"
                )
        leg = Leg(name or f"{self.engine_id}-{next(self._numbers)}", state, hand_over, prompt_tokens)
        self._of[state] = leg
        if leg.asks("do_remote_decode") and "transfer_id" in hand_over:
            self._came.add(hand_over["transfer_id"])
        self.side.arrive(leg)
        return leg

    def forget(self, leg: Leg) -> None:
        """Forget a leg that was not admitted; no engine is notified."""
        del self._of[leg.state], self.side.legs[leg.name]

    def new_hand_over(self) -> HandOver:
        """Return the parameters that a router makes for both legs of one hand-over (Mooncake).

        They are the parameters of the decode leg, which has all fields.
        """
        return HandOver(
            {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": self.engine_id,
                "remote_bootstrap_addr": self.bootstrap_addr,
                "transfer_id": f"xfer-{self.engine_id}-{next(self._numbers)}",
            },
            self.role.hand_over,
            self,
        )

    def hand_over_of(self, fields: Mapping[str, Any]) -> HandOver:
        """Return parameters as a hand-over of this engine."""
        return HandOver(fields, self.role.hand_over, self)

    def prefill_leg(self, hand_over: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the parameters of a prefill leg as proxies send them; with Mooncake they have the decode leg's
        transfer id.
        """
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        if not self.role.reads:
            params["transfer_id"] = (hand_over or self.new_hand_over())["transfer_id"]
        return params

    # ----------------------------------------------------------------------------------------------- ends of requests

    def freed(self, state: Any, *, done: bool) -> bool:
        """Free the blocks of a driver's request if it is a leg.

        Returns whether it is a leg. Its connector decides when the blocks are freed.
        """
        leg = self._of.get(state)
        if leg is None:
            return False
        if not done:
            self.side.preempt(leg)
            return True
        finish: Finish = (
            "length" if state.num_computed_tokens >= len(state) - 1 and leg.status == "running" else "abort"
        )
        del self._of[state]
        if finish == "length" and (leg.asks("do_remote_decode") or self.role.options.bidirectional_kv_xfer):
            self._ending.append((leg, finish))  # its lease begins at the end of the step
        else:
            self.side.end(leg, finish, self.now_s)
        return True

    def end_error(self, leg: Leg) -> None:
        """End a leg whose load failed."""
        self._of.pop(leg.state, None)
        self.side.end(leg, "error", self.now_s)

    # ----------------------------------------------------------------------------------------------------------- steps

    def step(self, now_s: float) -> list[Leg]:
        """End a step of the engine.

        Returns:
            The legs that ended with an error because their load failed.
        """
        self.now_s = max(self.now_s, now_s)
        self._exchange()
        if self._ending:
            ending, self._ending = self._ending, []
            for leg, finish in ending:
                params = self.side.end(leg, finish, self.now_s, at_first_token=len(leg.state) <= leg.prompt_tokens + 1)
                if params is not None:
                    self.answers[leg.name] = HandOver(params, self.role.hand_over, self)
            self._exchange()  # an engine that keeps blocks makes another step, even without work
        connector: Any = self.connector
        self._give_up_late()
        report = WorkerReport()
        connector.collect(self.now_s, report)
        errors = self.side.failures(report)
        for leg in errors:
            self.end_error(leg)
        self.side.take_report(report)
        self.side.over.clear()
        return errors

    def _exchange(self) -> None:
        """Give the worker its tasks, and pass on transfers and heartbeats to other engines."""
        connector: Any = self.connector
        plan = connector.plan(self.now_s)
        for transfer in connector.begin(plan, self.now_s):
            self._begin(transfer)
        for engine, names in connector.to_renew(plan).items():
            if engine in self.peers:
                self.peers[engine].renew(names)
        self._send_what_is_ready()

    def renew(self, names: list[str]) -> None:
        """Take a heartbeat of another engine."""
        assert isinstance(self.connector, NixlConnector)  # only Nixl has heartbeats
        self.connector.renewed(names)

    def _begin(self, transfer: PairTransfer) -> None:
        peer = self.peers.get(transfer.engine)
        loading = Loading(transfer, peer, self.now_s)
        if not transfer.is_empty:
            self.loads[transfer.name] = loading
        if isinstance(self.connector, MooncakeConnector):
            if peer is None:  # the bootstrap server does not know it
                self.ended(loading, ok=False)
                return
            assert isinstance(peer.connector, MooncakeConnector)
            loading.offer = peer.connector.asked(transfer.remote_name)
            peer._asked_of_me.append((self, loading))  # noqa: SLF001 - one family
            peer._send_what_is_ready()  # noqa: SLF001 - as above
        elif transfer.is_empty:
            if peer is not None:
                peer._notified(transfer.remote_name, self)  # noqa: SLF001 - as above
        elif peer is None:  # no connection
            self.ended(loading, ok=False)
        else:
            self._check_length(transfer, peer)
            self._has_begun(loading)

    def _check_length(self, transfer: PairTransfer, peer: PairPort) -> None:
        """Raise EngineDied for a read of more blocks than the other engine's list has, or if that is no list for each
        group; block sizes may differ.
        """
        where = "base_worker.py", "_apply_prefix_caching"
        given: Any = transfer.remote  # from the parameters, as they came
        if not isinstance(given, list | tuple) or not all(isinstance(each, list | tuple) for each in given):
            self.loads.pop(transfer.name)
            why = f"expected a list of block ids for each group in remote_block_ids, got {given!r:.80}"
            raise EngineDied("TypeError", where, f"request {transfer.name!r}: {why}")
        here, there = self.driver.manager.block_size, peer.driver.manager.block_size
        for own, others in zip(transfer.local, transfer.remote, strict=False):
            if (len(own) - 1) * here >= len(others) * there:
                self.loads.pop(transfer.name)
                raise EngineDied(
                    "AssertionError",
                    where,
                    f"request {transfer.name!r} has more blocks to fill than remote_block_ids names",
                )

    def _has_begun(self, loading: Loading) -> None:
        loading.has_begun = True
        if loading.transfer.is_empty:
            self.ended(loading, ok=True)
        elif self.on_begin is not None:
            self.on_begin(self, loading)

    def _send_what_is_ready(self) -> None:
        """Begin the transfers that are asked for and offered (Mooncake)."""
        if not self._asked_of_me:
            return
        waiting, self._asked_of_me = self._asked_of_me, []
        connector = self.connector
        assert isinstance(connector, MooncakeConnector)
        for asker, loading in waiting:
            offer = loading.offer
            assert offer is not None
            if not offer.is_ready:
                self._asked_of_me.append((asker, loading))
                continue
            begins = connector.begin_sending(offer, loading.transfer)
            if begins is False:
                asker.ended(loading, ok=False)
            elif begins:
                asker._has_begun(loading)  # noqa: SLF001 - as above

    def _give_up_late(self) -> None:
        """Fail the transfers that were not offered in time (Mooncake)."""
        if self.role.reads:
            return
        for loading in [*self.loads.values()]:
            if not loading.has_begun and self.now_s >= loading.asked_s + self.role.options.abort_request_timeout:
                if loading.peer is not None:
                    loading.peer._asked_of_me.remove((self, loading))  # noqa: SLF001 - as above
                    leg, offer = self.side.legs.get(loading.transfer.name), loading.offer
                    never_came = offer is not None and offer.transfer_id not in loading.peer._came  # noqa: SLF001 - as above
                    if never_came and leg is not None and leg.status == "loading":
                        self.unmet.append((loading.transfer.remote_name, loading.peer.engine_id))
                self.ended(loading, ok=False)

    def _notified(self, name: str, by: PairPort) -> None:
        self.told.append((by.engine_id, name))
        assert isinstance(self.connector, NixlConnector)  # only Nixl reads
        self.connector.notified(name)

    def ended(self, loading: Loading, *, ok: bool) -> None:
        """Note the end of a transfer to this engine; the next step reports it."""
        transfer, peer, offer = loading.transfer, loading.peer, loading.offer
        if self.loads.pop(transfer.name, None) is not None and not self._holds(transfer):
            self.freed_early.append(transfer.name)
        if offer is not None and loading.has_begun:
            assert peer is not None
            assert isinstance(peer.connector, MooncakeConnector)
            peer.connector.sent(offer, ok=ok)
        elif ok and peer is not None and offer is None:
            kept = peer.side.legs.get(transfer.remote_name)
            loading.is_stale = kept is None or kept.status != "kept"
            if loading.is_stale:
                self.stale_reads.append(transfer.name)
            peer._notified(transfer.remote_name, self)  # noqa: SLF001 - as above
        self.connector.transfer_ended(transfer, ok=ok)

    def _holds(self, transfer: PairTransfer) -> bool:
        """Return whether a leg still has the blocks that a transfer fills."""
        leg = self.side.legs.get(transfer.name)
        held = {block for group in (() if leg is None else self.driver.tables(leg.state)) for block in group}
        return held.issuperset(block for group in transfer.local for block in group)

    # ------------------------------------------------------------------------------------------------ engines are lost

    def lost(self) -> None:
        """Mark the engine as gone: its loads end, and the sending engines are notified that they failed."""
        self.is_lost = True
        for loading in [*self.loads.values()]:
            peer = loading.peer
            if peer is None or loading.offer is None:
                continue
            if loading.has_begun:
                assert isinstance(peer.connector, MooncakeConnector)
                peer.connector.sent(loading.offer, ok=False)
            elif (self, loading) in peer._asked_of_me:  # noqa: SLF001 - as above
                peer._asked_of_me.remove((self, loading))  # noqa: SLF001 - as above
        self.loads.clear()

    def forget_peer(self, port: PairPort) -> None:
        """Forget an engine that is gone: there is no connection to it any more."""
        for loading in self.loads.values():
            if loading.peer is port and not loading.has_begun:  # it has asked, and will never get an offer
                loading.peer = None
        for name in [name for name, peer in self.peers.items() if peer is port]:
            del self.peers[name]

    # --------------------------------------------------------------------------------------------------------- queries

    def lacking(self, leg: Leg) -> list[str]:
        """Return the missing parameters that make a decode leg wait forever; empty if it does not."""
        if leg.status != "loading" or leg.name in self.loads:
            return []
        return [name for name in self.connector.needs if (leg.params or {}).get(name) is None]

    @property
    def overwritten(self) -> list[str]:
        """Legs whose blocks are free, or were, while a transfer fills them (sglang 24527)."""
        return [*self.freed_early, *(name for name, each in self.loads.items() if not self._holds(each.transfer))]

    @property
    def leased(self) -> tuple[Lease, ...]:
        """Its leases for legs that do not run, in order of arrival."""
        out = []
        for leg in self.side.legs.values():
            if leg.status in ("kept", "loading", "received", "taken up"):
                blocks = sum(1 for group in self.driver.tables(leg.state) for block in group if block)
                until = self.lease_until_s(leg.name)
                out.append(Lease(leg.name, leg.status, blocks, None if until is None else until * 1000))
        return tuple(out)

    def lease_until_s(self, name: str) -> float | None:
        """Return the time at which the lease of a leg ends; None if it has none."""
        connector = self.connector
        if isinstance(connector, NixlConnector):
            return connector.leases.get(name)
        return next((each.expires_s for each in connector.offers.values() if each.name == name and each.is_ready), None)

    @property
    def has_news(self) -> bool:
        """Whether its next step will change anything, apart from what becomes due with time."""
        return bool(self._ending) or self.connector.has_news

    @property
    def next_s(self) -> float | None:
        """Time at which its next lease or wait ends, or its next heartbeat is due; None if there is none."""
        connector = self.connector
        if isinstance(connector, NixlConnector):
            moments = [*connector.leases.values()]
            if connector.next_beat_s is not None:
                moments.append(connector.next_beat_s)
        else:
            # Blocks are freed only after more than this time.
            moments = [each.expires_s + 1e-3 for each in connector.offers.values() if each.is_ready]
            wait = self.role.options.abort_request_timeout
            moments += [each.asked_s + wait for each in self.loads.values() if not each.has_begun]
        return min(moments, default=None)
