"""Pauses, sleeps and resets of a served engine: the effects of its routes on its ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from pytest_kvmock.servers.serve.request_checks import BadRequest

if TYPE_CHECKING:
    from pytest_kvmock.servers.serve.engine_loop import EngineLoop

VLLM_MODES: Final = ("abort", "wait", "keep")
"""What happens to requests when vLLM is paused (`/pause`, `/sleep`)."""

SGLANG_MODES: Final = ("abort", "retract", "in_place")
"""What happens to requests when SGLang is paused (`/pause_generation`)."""


_TURN_S: Final = 0.01
"""Seconds between two checks of a waiting flush."""


class ServedPauses:
    """The pauses of one worker.

    Args:
        loops: its ranks.
        reset_cache: empties the caches of all ranks at once, if no request is open.

    Attributes:
        paused: the mode of the pause; None if it is not paused.
        sleeps: the sleep level, from 0; None if it is awake.
    """

    def __init__(self, loops: Sequence[EngineLoop], reset_cache: Callable[[], bool]) -> None:
        self.paused: str | None = None
        self.sleeps: int | None = None
        self._loops = loops
        self._reset_cache = reset_cache
        self._flush_waits = False

    def refusal(self) -> BadRequest:
        """Return the error of requests during a pause."""
        what = "asleep" if self.sleeps is not None else "paused"
        return BadRequest(f"The engine is {what}. Please try again later.", None, "Service Unavailable", 503)

    def pause(self, mode: str, *, clears: bool) -> None:
        """Take no new requests until `resume`, as vLLM does.

        Args:
            mode: "abort" ends all requests; "wait" lets them finish; "keep" freezes them.
            clears: whether the cache is emptied: with "keep" at once, and requests are computed again; with "wait" when
                all requests have ended.
        """
        self.paused = mode
        for loop in self._loops:
            if mode == "abort":
                loop.end_requests(lambda _: True)
            loop.frozen = mode == "keep"
            loop.clears_when_idle = clears and not loop.reset(running=mode == "keep")

    def pause_in_place(self, mode: str) -> None:
        """Run no pass until `resume`, as SGLang does; new requests wait.

        Args:
            mode: "abort" ends all requests; "retract" frees their blocks, so that they are computed again; "in_place"
                leaves them unchanged.
        """
        for loop in self._loops:
            if mode == "abort":
                loop.end_requests(lambda _: True)
            elif mode == "retract":
                loop.preempt_all()
            loop.frozen = True

    def sleep(self, level: int, mode: str) -> None:
        """Pause until `resume`; from level 1 on the cache is emptied."""
        self.pause(mode, clears=level > 0)
        self.sleeps = level

    def resume(self) -> None:
        """End a pause or a sleep."""
        self.paused = self.sleeps = None
        for loop in self._loops:
            loop.frozen = loop.clears_when_idle = False
            loop.allow()

    def reset(self, *, running: bool, external: bool) -> bool:
        """Empty all caches as vLLM's `/reset_prefix_cache` does; return whether all are empty."""
        # A list, so that every rank is reset even if another fails.
        emptied = [loop.reset(running=running, external=external) for loop in self._loops]
        return all(emptied)

    def flush(self) -> bool:
        """Empty all caches at once, as SGLang's `/flush_cache` does; only if nothing runs, or all was retracted."""
        if self._reset_cache():
            return True
        flushed = [loop.flush_retracted() for loop in self._loops]
        return all(flushed)

    async def flush_within(self, timeout_s: float) -> str | None:
        """Empty all caches as SGLang's `/flush_cache` does, as soon as the engine is idle, within a time limit.

        Source: `managers/scheduler_components/flush_wrapper.py`, which answers a second flush during the first at once.

        Returns:
            None if they are empty; else the reason, or "" without one.
        """
        if self._flush_waits:
            return "Another flush_cache is already in progress."
        if timeout_s <= 0:
            return None if self.flush() else ""
        self._flush_waits = True
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while not self._reset_cache():  # noqa: ASYNC110 - copies to a host end without an event
                        await asyncio.sleep(_TURN_S)
                    return None
        finally:
            self._flush_waits = False
        return "Timed out waiting for idle state."

    def abort(self, names: Callable[[str], bool]) -> None:
        """End the requests whose ids `names` accepts."""
        for loop in self._loops:
            loop.end_requests(names)
