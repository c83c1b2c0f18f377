"""vLLM 0.33.0's MooncakeConnector, which writes: two legs, in any order, share an id from the router.

One subject: the two halves of the connector, in the scheduler and in the worker, by the rules of
`mooncake/mooncake_connector.py`.

Theory of operation. Both legs carry a transfer id. A prefill engine announces a transfer when it admits its leg, and
offers the blocks in the step after the leg ends. A decode engine asks for a transfer when it admits its leg, perhaps
long before. The first of these makes the entry (`PairOffer`). A transfer begins once it is asked for and offered. There
are no heartbeats: each side gives up after its time-out. An id that is used twice is not refused: the second leg takes
over the entry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final

from pytest_kvmock.engines.vllm.pairs.legs import Ended, EngineDied, PairTransfer, WorkerReport

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.pair_options import PairOptions
    from pytest_kvmock.engines.vllm.pairs.legs import Finish, Leg, Tables

_FILE: Final = "mooncake_connector.py"
FIELDS: Final = ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")
"""Fields that a decode leg needs."""


class PairOffer:
    """A transfer at a prefill engine, announced, asked for or offered.

    Attributes:
        transfer_id: id of the transfer.
        name: the leg whose blocks it offers; empty while it is only asked for.
        blocks: the offered blocks, by group.
        is_ready: whether the blocks are offered.
        expires_s: time at which the engine gives it up, in seconds.
        sending: number of its transfers in flight.
    """

    __slots__ = ("blocks", "expires_s", "is_ready", "name", "sending", "sent", "transfer_id")

    def __init__(self, transfer_id: str, name: str = "") -> None:
        self.transfer_id, self.name = transfer_id, name
        self.blocks: Sequence[Sequence[int]] = ()
        self.is_ready = False
        self.expires_s = math.inf
        self.sending = self.sent = 0


@dataclass(slots=True)
class MooncakePlan:
    """The worker's tasks of one step.

    Attributes:
        pulls: transfers to ask other engines for; an empty one only notifies them.
        offers: by leg, the transfer and its blocks; without blocks it is only announced.
        dropped: transfers that will not be offered; in the original an unordered set.
        lost: the exception that ended the worker's bookkeeping of this step, so that later entries are lost; None if
            there was none.
    """

    pulls: list[PairTransfer] = field(default_factory=list)
    offers: dict[str, tuple[str, Sequence[Sequence[int]]]] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    lost: str | None = None


class MooncakeConnector:
    """The connector of one engine.

    Args:
        options: options of the pair.
        engine_id: the name of the engine.
        windows: for each group, the maximum number of last blocks that are handed over; 0: all.
        role: "kv_producer", "kv_consumer" or "kv_both".

    Attributes:
        engine_id: as given.
        needs: fields without which a decode leg waits forever.
        needs_delivery: whether a preempted request drops the token in flight.
        offers: the entries, by transfer id.
        ran_out: legs whose blocks were not fetched within the time-out.
    """

    needs: ClassVar[Sequence[str]] = FIELDS

    def __init__(self, options: PairOptions, engine_id: str, windows: Sequence[int], *, role: str = "kv_both") -> None:
        self.options, self.engine_id = options, engine_id
        self.needs_delivery = role != "kv_consumer"
        self.offers: dict[str, PairOffer] = {}
        self.ran_out: list[str] = []
        self._windows = windows
        self._sends, self._receives = role != "kv_consumer", role != "kv_producer"
        self._to_pull: dict[str, tuple[Leg, Sequence[Sequence[int]], bool]] = {}
        self._to_offer: dict[str, tuple[str, Sequence[Sequence[int]]]] = {}
        self._dropped: dict[str, None] = {}
        self._sent: list[str] = []
        self._ended: list[tuple[PairTransfer, bool]] = []

    # ------------------------------------------------------------------------------------------- the scheduler's half

    def arrived(self, leg: Leg) -> None:
        """Do nothing: a leg is noted at its admission."""

    def _has_role(self, may: bool, leg: Leg, where: str, what: str) -> None:
        if not may:
            raise EngineDied(
                "AssertionError", (_FILE, where), f"request {leg.name!r} is a {what} at an engine of the other kind"
            )

    def external(self, leg: Leg, local: int) -> int:
        """Return the number of tokens of a leg that come from the other engine, after the `local` ones.

        Raises:
            EngineDied: a decode leg is at a prefill engine.
        """
        if not leg.asks("do_remote_prefill"):
            return 0
        self._has_role(self._receives, leg, "get_num_new_matched_tokens", "decode leg")
        return max(leg.prompt_tokens - local, 0)

    def allocated(self, leg: Leg, external: int, nameless: Tables) -> None:
        """Note that a leg has blocks: this step asks for its transfer, or announces the one that it will offer.

        Raises:
            EngineDied: a prefill leg is at a decode engine.
        """
        params = leg.params
        if not params:
            return
        if params.get("do_remote_prefill"):
            # If a field is missing, vLLM only warns ("will not utilize KVTransfer"), and the leg waits forever.
            if all(name in params for name in FIELDS):
                self._to_pull[leg.name] = (leg, self._clipped(nameless) if external > 0 else (), external > 0)
            params["do_remote_prefill"] = False  # one transfer per request
        elif params.get("do_remote_decode"):
            self._has_role(self._sends, leg, "update_state_after_alloc", "prefill leg")
            if params.get("transfer_id"):  # without an id vLLM only warns, and keeps nothing
                self._to_offer[leg.name] = params["transfer_id"], ()

    def ended(
        self,
        leg: Leg,
        finish: Finish,
        tables: Tables,
        computed: int,  # noqa: ARG002 - as above
        now_s: float,  # noqa: ARG002 - as above
    ) -> Ended:
        """Note the end of a leg; see `NixlConnector.ended`. An answer has no parameters.

        Raises:
            EngineDied: the leg belongs to an engine of the other kind.
        """
        params = leg.params
        if not params or not params.get("transfer_id"):
            return False, None
        if params.get("do_remote_prefill"):  # it was never admitted: notify the other engine, which frees its blocks
            self._has_role(self._receives, leg, "request_finished", "decode leg")
            self._to_pull[leg.name] = (leg, (), False)
            params["do_remote_prefill"] = False
            return False, None
        if not params.get("do_remote_decode"):
            return False, None
        self._has_role(self._sends, leg, "request_finished", "prefill leg")
        if finish != "length":  # the decode engine is not notified, and waits for its time-out
            self._dropped[params["transfer_id"]] = None
            return False, None
        self._to_offer[leg.name] = params["transfer_id"], self._clipped(tables)
        return True, None

    def _clipped(self, tables: Sequence[Sequence[int]]) -> list[list[int]]:
        return [list(blocks[-most:] if most else blocks) for blocks, most in zip(tables, self._windows, strict=True)]

    def plan(self, now_s: float) -> MooncakePlan:  # noqa: ARG002 - of every connector
        """Return the worker's tasks since the last step.

        Raises:
            EngineDied: a leg that was never admitted must notify an engine that its parameters do not name.
        """
        plan = MooncakePlan([], self._to_offer, list(self._dropped))
        pulls, self._to_pull, self._to_offer, self._dropped = self._to_pull, {}, {}, {}
        for name, (leg, local, is_awaited) in pulls.items():
            params = leg.params
            assert params is not None
            missing = [each for each in FIELDS if each not in params]
            if missing:
                raise EngineDied(
                    "KeyError",
                    (_FILE, "add_new_req"),
                    f"request {name!r} was called off before its admission, and its parameters have no {missing[0]}",
                )
            plan.pulls.append(
                PairTransfer(name, params["remote_engine_id"], params["transfer_id"], local, (), is_awaited)
            )
        return plan

    @property
    def has_news(self) -> bool:
        """Whether its next step will change anything, apart from what becomes due with time."""
        return bool(self._to_pull or self._to_offer or self._dropped or self._sent or self._ended)

    def reported(self, report: WorkerReport) -> None:
        """Do nothing: the scheduler's half does not use the worker's report."""

    # ---------------------------------------------------------------------------------------------- the worker's half

    def begin(self, plan: MooncakePlan, now_s: float) -> list[PairTransfer]:
        """Take the worker's tasks of a step; return the transfers to ask other engines for."""
        try:
            for name, (transfer_id, blocks) in plan.offers.items():
                if blocks:
                    offer = self.offers[transfer_id]
                    offer.name, offer.blocks, offer.is_ready = name, blocks, True
                    offer.expires_s = now_s + self.options.abort_request_timeout
                elif transfer_id not in self.offers:
                    self.offers[transfer_id] = PairOffer(transfer_id, name)
            for transfer_id in plan.dropped:
                if self.offers.pop(transfer_id).is_ready:
                    raise AssertionError  # noqa: TRY301 - as the original
        except (KeyError, AssertionError) as error:  # in the original a future whose result is never read
            plan.lost = type(error).__name__
        return plan.pulls

    def to_renew(self, plan: MooncakePlan) -> dict[str, list[str]]:  # noqa: ARG002 - of every connector
        """Return nothing: Mooncake has no heartbeats."""
        return {}

    def asked(self, transfer_id: str) -> PairOffer:
        """Note that another engine asks for a transfer; return its entry."""
        return self.offers.setdefault(transfer_id, PairOffer(transfer_id))

    def begin_sending(self, offer: PairOffer, asked: PairTransfer) -> bool | None:
        """Begin to send an offer.

        Returns:
            True if it is sent, False if there are more blocks to fill than are offered, None if the offer was given up
            before; then neither side is notified.
        """
        if offer.transfer_id not in self.offers:
            return None
        if not asked.is_empty and (
            len(offer.blocks) != len(asked.local)
            or any(len(here) < len(there) for here, there in zip(offer.blocks, asked.local, strict=True))
        ):
            return False
        offer.sending += 1
        return True

    def sent(self, offer: PairOffer, *, ok: bool) -> None:
        """Note the end of a transfer of an offer. The blocks are freed after the first one that succeeds."""
        offer.sending -= 1
        if not ok:
            return
        offer.sent += 1
        if offer.sent == 1 and self.offers.pop(offer.transfer_id, None) is not None:
            self._sent.append(offer.name)

    def transfer_ended(self, transfer: PairTransfer, *, ok: bool) -> None:
        """Note that a transfer to this engine ended or failed; the next step reports the waiting leg."""
        self._ended.append((transfer, ok))

    def collect(self, now_s: float, report: WorkerReport) -> None:
        """End a step of the worker: report received, sent and expired transfers."""
        report.sent += self._sent
        self._sent.clear()
        for offer in [*self.offers.values()]:
            if offer.name and offer.expires_s < now_s and not offer.sending:
                del self.offers[offer.transfer_id]
                self.ran_out.append(offer.name)
                report.sent.append(offer.name)
        ended, self._ended = self._ended, []
        for transfer, ok in ended:
            if not transfer.is_awaited:
                continue
            report.received.append(transfer.name)
            if ok:
                continue
            if len(self._windows) > 1:  # with several groups, a block does not identify its request
                report.failed.append(transfer.name)
            else:
                report.invalid.update(block for blocks in transfer.local for block in blocks)
