"""The prefill side of SGLang's pairs (`disaggregation/prefill.py` of SGLang 0.5.23).

One subject: P's queues, and what one turn of its event loop does to them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pytest_kvmock.engines.sglang.hybrid_cache import HybridCacheManager
from pytest_kvmock.engines.sglang.pairs.sglang_legs import LegAnswer, PrefillLeg, SentPages
from pytest_kvmock.engines.sglang.pairs.sglang_options import SglangPairOptions

# Theory of operation
#
# A prompt waits until D has pages for it ("boot"), then for a batch ("waiting"). It is computed in pieces; between two
# pieces it is in "chunked". Then it is sent ("inflight"). A turn of the event loop:
#
#   begin    Ready legs wait for a batch. The computed chunk is cached and published.
#   launch   A batch, which the caller chose, is launched. The cached parts of its prompts are sent.
#   end      The computed tokens of this batch (with overlap: of the previous batch) are cached, published
#            and sent. Legs that have arrived are answered; their pages stay cached.
#
# With early computing, a prompt is computed before D has pages. A computed prompt that D has not asked for is parked:
# it is in "inflight", and its handshake is open. When others need its place, it gives it up, and is computed again
# later from the cache.


class PrefillPiece(NamedTuple):
    """The part of one prompt that a batch computes.

    Attributes:
        leg: the leg.
        start: position of its first token.
        upto: position after its last token.
    """

    leg: PrefillLeg
    start: int
    upto: int

    @property
    def is_last(self) -> bool:
        """Whether it ends the prompt."""
        return self.upto == self.leg.prompt_tokens


class SglangPrefill:
    """The queues of a prefill engine.

    Args:
        manager: the engine's cache.
        rows: requests that may have pages at the same time (`--max-running-requests`).
        options: options of the pair.

    Attributes:
        boot: legs that wait for D's pages.
        waiting: legs that wait for a batch.
        chunked: the leg whose prompt is computed in part; None if there is none.
        inflight: legs that are being sent or are parked.
        free_rows: number of further requests that may have pages.
    """

    __slots__ = (
        "_answers",
        "_free_slots",
        "_launched",
        "_manager",
        "_options",
        "_overlap",
        "_sent",
        "boot",
        "chunked",
        "free_rows",
        "inflight",
        "waiting",
    )

    def __init__(
        self,
        manager: HybridCacheManager,
        *,
        rows: int,
        options: SglangPairOptions,
    ) -> None:
        self._manager = manager
        self._options = options
        self._overlap = not options.disable_overlap_schedule
        self._free_slots = options.metadata_slots
        self._launched: deque[Sequence[PrefillPiece]] = deque()
        self._answers: list[LegAnswer] = []
        self._sent: list[SentPages] = []
        self.free_rows = rows
        self.boot: list[PrefillLeg] = []
        self.waiting: list[PrefillLeg] = []
        self.inflight: list[PrefillLeg] = []
        self.chunked: PrefillLeg | None = None

    @property
    def overlaps(self) -> bool:
        """Whether a batch is processed in the turn after its launch."""
        return self._overlap

    @property
    def computes_first(self) -> bool:
        """Whether D gives pages only after P has computed."""
        return self._options.gives_late

    # ---------------------------------------------------------------------------- from outside

    def ask(self, leg: PrefillLeg) -> bool:
        """Take a leg; if its prompt is longer than the pool, answer it and return False."""
        most = self._manager.num_blocks * self._manager.block_size
        if leg.prompt_tokens > most:
            self._answers.append(LegAnswer.too_long(leg, most))
            return False
        self.boot.append(leg)
        return True

    def abort(self, prefix: str) -> None:
        """Abort all legs whose name begins with `prefix`.

        Legs that wait for a batch end at once, the last one first; others end in a later turn.
        """
        gone = [leg for leg in self.waiting if leg.name.startswith(prefix)]
        self.waiting = [leg for leg in self.waiting if leg not in gone]
        for leg in reversed(gone):
            self._end(leg, LegAnswer.called_off(leg), cached=False)
        for leg in (*self.boot, *self.inflight):
            if leg.name.startswith(prefix):
                leg.fail()
        for leg in self._computing():
            if leg.name.startswith(prefix):
                leg.is_called_off = True

    def expire(self, now_s: float) -> None:
        """Fail the legs whose D did not come within the timeout."""
        for leg in (*self.boot, *self.waiting, *self.inflight):
            if leg.polled == "handshake" and now_s >= leg.asked_s + self._options.bootstrap_timeout:
                leg.fail()

    @property
    def expires_s(self) -> float | None:
        """Time at which the next leg fails unless its D comes; None if there is none."""
        open_legs = (*self.boot, *self.waiting, *self.inflight)
        waits = [leg.asked_s for leg in open_legs if leg.polled == "handshake"]
        return min(waits) + self._options.bootstrap_timeout if waits else None

    @property
    def legs(self) -> list[PrefillLeg]:
        """All open legs."""
        return [*self.boot, *self.waiting, *self._computing(), *self.inflight]

    def forget(self, leg: PrefillLeg) -> None:
        """Forget a leg as the engine closes; the caller frees its pages."""
        for queue in (self.boot, self.waiting, self.inflight):
            if leg in queue:
                queue.remove(leg)
        self.chunked = None if self.chunked is leg else self.chunked
        self._launched = deque([each for each in batch if each.leg is not leg] for batch in self._launched)
        self._return_row(leg)
        self._return_slot(leg)

    def take_answers(self) -> list[LegAnswer]:
        """Return the answers since the last call, in order."""
        answers, self._answers = self._answers, []
        return answers

    def take_sent(self) -> list[SentPages]:
        """Return the pages sent since the last call, in order."""
        sent, self._sent = self._sent, []
        return sent

    def _computing(self) -> Iterator[PrefillLeg]:
        """Yield the legs that are between chunks, or in a batch that is not processed yet."""
        if self.chunked is not None:
            yield self.chunked
        for batch in self._launched:
            for piece in batch:
                if piece.leg is not self.chunked and piece.leg.has_row:
                    yield piece.leg

    # ---------------------------------------------------------------------------- a turn begins

    def begin_turn(self) -> None:
        """Move ready legs to "waiting", cache the computed chunk, and answer failed legs."""
        self._pop_boot()
        self._end_chunked()
        self._cache_chunk()
        self._settle_waiting()

    def _pop_boot(self) -> None:
        stay: list[PrefillLeg] = []
        for leg in self.boot:
            if leg.polled == "failed":
                self._fail_handshake(leg)
            elif leg.polled == "ready":
                (self.waiting if self._settle(leg) else stay).append(leg)
            elif leg.attempts < self._options.attempts and self._takes_slot(leg):
                leg.attempts += 1
                self.waiting.append(leg)
            else:
                stay.append(leg)
        self.boot = stay

    def _end_chunked(self) -> None:
        leg = self.chunked
        if leg is not None and leg.is_called_off:
            self.chunked = None
            self._end(leg, LegAnswer.called_off(leg), cached=False)

    def _cache_chunk(self) -> None:
        leg = self.chunked
        if leg is None:
            return
        self._manager.checkpoint(leg.request)
        if not leg.is_pending:
            if not self._overlap:
                self._send(leg, leg.request.computed)
        elif leg.polled == "failed":
            self.chunked = None
            self._fail_handshake(leg)
        elif leg.polled == "ready":
            self._settle(leg)
        elif not self._options.gives_late and self._has_ready():
            self.chunked = None
            if self._overlap:  # a piece of it is being computed
                leg.gives_way = True
            else:
                self._give_way(leg)

    def _has_ready(self) -> bool:
        """Return whether D has pages for a prompt that waits for a batch."""
        return any(not leg.is_pending or leg.polled == "ready" for leg in self.waiting)

    def _settle_waiting(self) -> None:
        failed = [leg for leg in self.waiting if leg.polled == "failed"]
        for leg in failed:
            self._fail_handshake(leg)
        self.waiting = [leg for leg in self.waiting if leg not in failed]
        for leg in self.waiting:
            if leg.is_pending and leg.polled == "ready":
                self._settle(leg)

    def _takes_slot(self, leg: PrefillLeg) -> bool:
        if not leg.has_slot and self._free_slots:
            leg.has_slot = True
            self._free_slots -= 1
        return leg.has_slot

    def _settle(self, leg: PrefillLeg) -> bool:
        """Note the end of a handshake; return False if no slot is free (`finalize_bootstrap`)."""
        if not self._takes_slot(leg):
            return False
        leg.is_pending = False
        leg.sent = leg.prefix
        return True

    # ---------------------------------------------------------------------------- a batch

    def candidates(self) -> list[PrefillLeg]:
        """Return the legs from which a batch may take pieces, in order: the chunked one is first."""
        first = [] if self.chunked is None else [self.chunked]
        return [*first, *self.waiting]

    def launch(self, batch: Sequence[PrefillPiece]) -> None:
        """Launch a batch of admitted prompts, and send their cached parts.

        Args:
            batch: pieces in the order of `candidates`; only the last piece may end before its prompt does.
        """
        for leg, start, _ in batch:
            if leg is not self.chunked:
                self.waiting.remove(leg)
            if not leg.has_row:
                leg.has_row, leg.hit_tokens = True, start
                self.free_rows -= 1
        if batch:
            self._manager.prefill([(piece.leg.request, piece.upto) for piece in batch])
            self.chunked = None if batch[-1].is_last else batch[-1].leg
            for leg, start, _ in batch:
                if not leg.is_pending:
                    self._send(leg, start)
        self._launched.append(batch)

    def _send(self, leg: PrefillLeg, upto: int, *, is_last: bool = False) -> None:
        """Send the unsent tokens before `upto`; the last part is sent even if it is empty."""
        tokens = max(upto - leg.sent, 0)
        if is_last or tokens:
            self._sent.append(SentPages(leg, self._manager.pages_of(tokens), tokens, is_last))
            leg.sent = upto

    # ---------------------------------------------------------------------------- a turn ends

    def end_turn(self) -> None:
        """Process the due batch, send its pages, and answer legs that have arrived or failed."""
        if not self._overlap or len(self._launched) > 1:
            for piece in self._launched.popleft():
                self._process(piece)
        self._poll_inflight()

    def _process(self, piece: PrefillPiece) -> None:
        leg = piece.leg
        if not piece.is_last:
            if leg.gives_way:
                leg.gives_way = False
                self._give_way(leg)
            elif self._overlap and leg.has_row and not leg.is_pending:  # if not, its client left
                self._send(leg, piece.upto)
            return
        if leg.is_called_off:
            self._end(leg, LegAnswer.failed(leg, "Prefill transfer"), cached=False)
            return
        leg.is_computed = True
        self._manager.checkpoint(leg.request)
        self.inflight.append(leg)
        if not leg.is_pending:
            self._send(leg, leg.prompt_tokens, is_last=True)

    def _poll_inflight(self) -> None:
        """Answer, in order, the legs that have arrived or failed; send parked ones, or let them give up their place.

        Answers to transfers come after those to handshakes, at the end of the pass.
        """
        stay: list[PrefillLeg] = []
        answers, self._answers = self._answers, []
        for leg in self.inflight:
            if leg.is_pending and leg.polled == "failed":
                answers.append(self._failed_handshake(leg))
                self._end(leg, None, cached=False)
            elif leg.is_pending and leg.polled == "ready":
                self._settle(leg)
                self._send(leg, leg.prompt_tokens, is_last=True)
                stay.append(leg)
            elif leg.is_pending and not self._options.gives_late and self._lacks_row():
                self._give_way(leg)
            elif leg.polled == "arrived":
                self._end(leg, LegAnswer(leg.name, "length"), cached=True)
            elif leg.polled == "failed":
                self._end(leg, LegAnswer.failed(leg, "Prefill transfer"), cached=True)
            else:
                stay.append(leg)
        self.inflight = stay
        self._answers = [*answers, *self._answers]

    def _lacks_row(self) -> bool:
        """Return whether no row is free and others wait for a batch or a slot."""
        return not self.free_rows and bool(self.waiting or (self.boot and not self._free_slots))

    def _give_way(self, leg: PrefillLeg) -> None:
        """Free the place of a prompt that was computed early. The prompt is cached, and tried again later."""
        self._manager.finish(leg.request)
        self._return_row(leg)
        leg.sent, leg.is_computed = 0, False
        if leg.attempts < self._options.attempts:
            leg.attempts += 1
            self.waiting.insert(0, leg)
        else:
            self._return_slot(leg)
            self.boot.append(leg)

    # ---------------------------------------------------------------------------- a leg ends

    def _failed_handshake(self, leg: PrefillLeg) -> LegAnswer:
        return LegAnswer.failed(leg, "Prefill bootstrap")

    def _fail_handshake(self, leg: PrefillLeg) -> None:
        self._end(leg, self._failed_handshake(leg), cached=False)

    def _end(self, leg: PrefillLeg, answer: LegAnswer | None, *, cached: bool) -> None:
        """End a leg: free its pages, after a last insert if `cached`, and answer it."""
        if cached:
            self._manager.finish(leg.request)
        else:
            self._manager.release(leg.request)
        self._return_row(leg)
        self._return_slot(leg)
        if answer is not None:
            self._answers.append(answer)

    def _return_row(self, leg: PrefillLeg) -> None:
        if leg.has_row:
            leg.has_row = False
            self.free_rows += 1

    def _return_slot(self, leg: PrefillLeg) -> None:
        if leg.has_slot:
            leg.has_slot = False
            self._free_slots += 1
