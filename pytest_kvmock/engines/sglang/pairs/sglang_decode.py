"""The decode side of SGLang's pairs (`disaggregation/decode.py` of SGLang 0.5.23).

One subject: D's queues, and what a pass does to each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_kvmock.engines.sglang.hybrid_cache import HybridCacheManager
from pytest_kvmock.engines.sglang.pairs.sglang_legs import DecodeLeg, LegAnswer
from pytest_kvmock.engines.sglang.pairs.sglang_options import SglangPairOptions

# Theory of operation
#
# A leg waits for pages ("queue"), for P's data ("moving"), and for a place among the running legs ("arrived"). Legs
# whose handshake is done get pages strictly in order: the first that does not fit blocks all after it. The received
# prompt is cached and published when its request joins the running ones, not before.
#
# P's token is the first of the output. D computes its KV, and generates from the second token on.


class SglangDecode:
    """The queues of a decode engine.

    Without a radix cache it matches and caches nothing. Then its manager should have no sink, as not even a Cleared is
    published.

    Args:
        manager: the engine's cache.
        places: requests that may run at once (`--max-running-requests`).
        options: options of the pair.

    Attributes:
        queue: legs that wait for pages.
        moving: legs that wait for P's data.
        arrived: legs that wait for a place.
        running: legs that generate.
        retracted: legs that were running and lost their pages. They come back before any other leg gets pages.
        places: as given.
        kept: aborted legs that keep their pages because P may still write into them, with the time at which the pages
            are freed.
    """

    __slots__ = (
        "_answers",
        "_manager",
        "_options",
        "arrived",
        "kept",
        "moving",
        "places",
        "queue",
        "retracted",
        "running",
    )

    def __init__(
        self,
        manager: HybridCacheManager,
        *,
        places: int,
        options: SglangPairOptions,
    ) -> None:
        self._manager = manager
        self.places = places
        self._options = options
        self._answers: list[LegAnswer] = []
        self.queue: list[DecodeLeg] = []
        self.moving: list[DecodeLeg] = []
        self.arrived: list[DecodeLeg] = []
        self.running: list[DecodeLeg] = []
        self.retracted: list[DecodeLeg] = []
        self.kept: dict[DecodeLeg, float] = {}

    # ---------------------------------------------------------------------------- from outside

    def ask(self, leg: DecodeLeg) -> bool:
        """Take a leg; if its prompt is longer than the pool, answer it and return False.

        A prompt of exactly the pool's size is taken, never fits, and blocks the queue forever.
        """
        most = self._manager.num_blocks * self._manager.block_size
        if leg.prompt_tokens > most:
            self._answers.append(LegAnswer.too_long(leg, most))
            return False
        self.queue.append(leg)
        return True

    def abort(self, prefix: str, now_s: float) -> None:
        """Abort all legs whose name begins with `prefix`; a running leg gets one more step."""
        for leg in (*self.queue, *self.moving):
            if leg.name.startswith(prefix):
                if leg.may_be_written:
                    self.kept[leg] = now_s + self._options.release_timeout
                leg.polled = "failed"
        gone = [leg for leg in (*self.arrived, *self.retracted) if leg.name.startswith(prefix)]
        self.arrived = [leg for leg in self.arrived if leg not in gone]
        self.retracted = [leg for leg in self.retracted if leg not in gone]
        for leg in gone:
            self._manager.release(leg.request)
            self._answers.append(LegAnswer.called_off(leg))
        for leg in self.running:
            leg.is_called_off = leg.is_called_off or leg.name.startswith(prefix)

    def expire(self, now_s: float) -> list[DecodeLeg]:
        """Fail the legs whose data is late, and free kept pages whose time is over.

        Returns:
            The legs whose data is late.
        """
        most, late = self._options.waiting_timeout, []
        for leg in self.moving:
            if leg.polled == "ready" and now_s >= leg.asked_s + most:
                leg.fail()
                late.append(leg)
        for leg, until_s in [*self.kept.items()]:
            if now_s >= until_s or not leg.may_be_written:
                del self.kept[leg]
                if leg not in self.moving:  # if it is in `moving`, `poll` frees it
                    self._manager.release(leg.request)
        return late

    @property
    def expires_s(self) -> float | None:
        """Time at which the next leg fails unless P's data arrives, or the next kept pages are freed; None if none."""
        most = self._options.waiting_timeout
        waits = [leg.asked_s + most for leg in self.moving if leg.polled == "ready"]
        return min((*waits, *self.kept.values()), default=None)

    @property
    def legs(self) -> list[DecodeLeg]:
        """All open legs."""
        return [*self.queue, *self.moving, *self.arrived, *self.running, *self.retracted]

    def forget(self, leg: DecodeLeg) -> None:
        """Forget a leg as the engine closes; the caller frees its pages."""
        for queue in (self.queue, self.moving, self.arrived, self.running, self.retracted):
            if leg in queue:
                queue.remove(leg)
        self.kept.pop(leg, None)

    def take_answers(self) -> list[LegAnswer]:
        """Return the answers since the last call, in order."""
        answers, self._answers = self._answers, []
        return answers

    # ---------------------------------------------------------------------------- pages are given

    def reserve(self) -> list[DecodeLeg]:
        """Give pages to ready legs, in order, as far as there is room.

        Returns:
            The legs that got pages; P is asked for the pages that were not cached.
        """
        failed = [leg for leg in self.queue if leg.polled == "failed"]
        for leg in failed:
            self._answers.append(LegAnswer.failed(leg, "Decode handshake"))
        self.queue = [leg for leg in self.queue if leg not in failed]
        self._resume()
        taken: list[DecodeLeg] = []
        for leg in [] if self.retracted else self.queue:
            if leg.polled == "handshake":
                continue
            if not self._reserve(leg, len(taken)):
                break
            taken.append(leg)
        self.queue = [leg for leg in self.queue if leg not in taken]
        self.moving += taken
        return taken

    def _resume(self) -> None:
        """Give pages to retracted legs; their KV is copied back, so nothing is matched."""
        while self.retracted and self._allocate(self.retracted[0], 0, matches=False):
            self.arrived.append(self.retracted.pop(0))

    def _reserve(self, leg: DecodeLeg, taken: int) -> bool:
        caches = self._options.disaggregation_decode_enable_radix_cache
        if not self._allocate(leg, taken, matches=caches):
            return False
        leg.may_be_written = True
        return True

    def _allocate(self, leg: DecodeLeg, taken: int, *, matches: bool) -> bool:
        """Give a leg its pages; if there is no room, unlock its match and return False."""
        manager, request = self._manager, leg.request
        manager.find(request, upto=None if matches else 0, whole=True)
        manager.admit(request)
        if not self._has_room(leg, taken):
            manager.withdraw(request)
            return False
        leg.hit_tokens = request.computed
        leg.asked_pages = manager.pages_of(len(request)) - request.allocated
        manager.preallocate(request)
        return True

    def _has_room(self, leg: DecodeLeg, taken: int) -> bool:
        manager, running = self._manager, self.running
        reserved = self._options.num_reserved_decode_tokens
        lengths = sum(len(each.request) for each in running)
        rest = manager.pages_of(len(leg.request)) - leg.request.allocated
        need = max(
            rest * manager.block_size + reserved,
            leg.prompt_tokens - leg.request.computed + leg.max_new_tokens - lengths,
        )
        kept = reserved * (len(running) + len(self.moving) + len(self.arrived) + taken)
        if running:
            longest = max(each.max_new_tokens + each.prompt_tokens for each in running)
            kept = max(kept, longest - lengths)
        return need <= manager.available_size() + manager.evictable_size() - kept

    # ---------------------------------------------------------------------- pages are received

    def poll(self) -> list[DecodeLeg]:
        """Check the transfers: arrived legs wait for a place, failed legs are answered. Return the arrived legs."""
        got: list[DecodeLeg] = []
        stay: list[DecodeLeg] = []
        for leg in self.moving:
            is_wrong = leg.polled == "arrived" and leg.got_room != leg.room
            if leg.polled == "failed" or is_wrong:
                self._answers.append(LegAnswer.failed(leg, "Decode transfer"))
                if leg not in self.kept:
                    self._manager.release(leg.request)
            else:
                (got if leg.polled == "arrived" else stay).append(leg)
        self.moving = stay
        self.arrived += got
        return got

    def join(self) -> list[DecodeLeg]:
        """Move arrived legs to the running ones, as far as there are places, and cache their prompts.

        Returns:
            The legs that joined. A leg of a single token has it from P, and is finished at once.
        """
        joined = self.arrived[: self.places - len(self.running)]
        self.arrived = self.arrived[len(joined) :]
        for leg in joined:
            request = leg.request
            is_back = len(request) > leg.prompt_tokens
            request.computed = len(request) - is_back
            if self._options.disaggregation_decode_enable_radix_cache:
                self._manager.checkpoint(request)
            if not is_back:
                assert leg.token is not None
                request.append(leg.token)
            self.running.append(leg)
        for leg in joined:
            if leg.max_new_tokens <= 1:
                self.finish(leg)
        return joined

    # ---------------------------------------------------------------------------- generation

    def decode(self, legs: Sequence[DecodeLeg], tokens: Sequence[int]) -> bool:
        """Compute the last token of running legs, and append the generated ones.

        Returns:
            False if there is no room for their pages; then no token is appended.
        """
        if not self._manager.begin_step([leg.request for leg in legs]):
            return False
        for leg, token in zip(legs, tokens, strict=True):
            self._manager.end_step(leg.request, token)
        return True

    def retract(self, leg: DecodeLeg) -> None:
        """Take the pages of a running leg; its KV is kept elsewhere until it comes back."""
        self.running.remove(leg)
        self._manager.retract(leg.request)
        self.retracted.append(leg)

    def finish(self, leg: DecodeLeg) -> None:
        """End a running leg, and cache its computed tokens."""
        self.running.remove(leg)
        if self._options.disaggregation_decode_enable_radix_cache:
            self._manager.finish(leg.request)
        else:
            self._manager.release(leg.request)
        answer = LegAnswer.called_off(leg) if leg.is_called_off else LegAnswer(leg.name, "length")
        self._answers.append(answer)
