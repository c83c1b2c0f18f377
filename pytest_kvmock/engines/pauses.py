"""Resets, pauses and sleeps of a worker: when its cache is emptied, and when its events show it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from pytest_kvmock.values.checks import check_integer, unknown_text
from pytest_kvmock.values.programs.operations import Clear

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.driver import Driver, Powers
    from pytest_kvmock.engines.base.event_recorder import EventRecorder
    from pytest_kvmock.engines.base.host_time import HostTime

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
"""The treatment of requests when a worker is paused."""

_PAUSES: Final = ("abort", "wait", "keep")


class Pausing:
    """The part of `KvWorker` for resets and pauses, and for events that are published with a step.

    Attributes:
        is_sleeping: whether it was put to sleep, and not woken up since (`sleep`).
    """

    is_sleeping = False
    _cleared_waits = False
    _paused: PauseMode | None = None
    _resets_when_idle = False
    worker_id: int
    dp_rank: int
    requests: list[Any]
    _engine: Any
    _driver: Driver
    _powers: Powers
    _host_time: HostTime | None
    _recorder: EventRecorder

    def _record(self, operation: Any, *fields: object) -> None:
        raise NotImplementedError

    @property
    def clears_with_a_step(self) -> bool:
        """Whether the Cleared of `reset` is published only with the next step, as in vLLM."""
        return self._powers.clears_with_a_step

    def reset(self, *, running: bool = False, external: bool = False) -> bool:
        """Drop all cached blocks, like vLLM's `/reset_prefix_cache`: the Cleared is published only with the next step.

        So until the next request, the stream shows a full cache. Other engines publish the Cleared at once, as `clear`
        does.

        Args:
            running: preempt the running requests; each gets its blocks again by `Request.resume`. With Mooncake's
                store this ends the engine, as in the original: `EngineDied`.
            external: also empty the tiers below the device, without an event (`reset_external`); Mooncake's store is
                emptied for all its engines.

        Returns:
            False, with nothing changed, while requests run.

        Raises:
            ValueError: `external` is given, but nothing is below the device.
        """
        if external and self._host_time is None:
            raise ValueError(f"reset: external=True empties what is below the device, and {self!r} has nothing there")
        if running and self._engine is None:
            for request in reversed(self.requests):
                if request.status == "running":
                    request.preempt()
            if self._host_time is not None:
                self._host_time.was_reset()
        if any(request.status == "running" for request in self.requests):
            return False
        self._record(Clear, self.worker_id, self.dp_rank)
        waits = self.clears_with_a_step and not self._recorder.holds
        if waits:
            self._cleared_waits = True
            self._recorder.holds = True
        cleared = self._driver.clear()
        if cleared and self._host_time is not None:
            self._host_time.forget()
        if external and self._host_time is not None:
            self._host_time.empty_below()
        if waits and not cleared:
            self.step_begins()
        return cleared

    def step_begins(self, *, held: bool = False) -> None:
        """Begin a step of the engine; a waiting Cleared of a reset is published with it.

        Args:
            held: keep the Cleared held with all events of the step, until `release_events` is called at its end.
        """
        if self._cleared_waits:
            self._cleared_waits = False
            if not held:
                self._recorder.release()

    @property
    def cleared_waits(self) -> bool:
        """Whether the Cleared of a `reset` still waits for a step; until then no answer of an index is wrong."""
        return self._cleared_waits

    @property
    def has_published(self) -> bool:
        """Whether one of its managers ever published an event, also before a restart."""
        return self._recorder.published

    def hold_events(self) -> None:
        """Hold events published from now on, until `release_events`."""
        self._recorder.holds = True

    def release_events(self) -> None:
        """Publish the held events, in order, and hold none from now on."""
        self._recorder.release()

    def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Accept no new requests until `resume`, like vLLM's `/pause`.

        Args:
            mode: "abort" ends all requests; "wait" lets them end; "keep" freezes them: with a cleared cache they lose
                their blocks, and get them again by `Request.resume` later.
            clear_cache: reset the cache once no request runs; if False, cached blocks are reused later.

        Raises:
            ValueError: the mode is unknown, or an engine in time uses the worker.
        """
        if mode not in _PAUSES:
            raise ValueError(unknown_text("mode of a pause", mode, _PAUSES))
        if self._engine is not None:
            raise ValueError(f"pause: {self!r} is used by {self._engine!r}; only a worker without time is paused")
        if mode == "abort":
            for request in list(self.requests):
                request.finish()
        self._paused = mode
        self._resets_when_idle = clear_cache and not self.reset(running=mode == "keep")

    def resume(self) -> None:
        """Accept requests again after `pause`."""
        self._paused, self._resets_when_idle = None, False

    @property
    def paused(self) -> PauseMode | None:
        """The mode of its pause; None if it is not paused."""
        return self._paused

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause until `wake_up`, like vLLM's `/sleep`; from level 1 on the cache is reset.

        Events show this only with the next step; see `reset`.

        Raises:
            ValueError: the level is not an integer of at least 0; or see `pause`.
        """
        check_integer("level", level, 0)
        self.pause(mode, clear_cache=level > 0)
        self.is_sleeping = True

    def wake_up(self) -> None:
        """Accept requests again after `sleep`."""
        self.is_sleeping = False
        self.resume()

    def crash(self) -> None:
        """Let the engine die; see `KvWorker`."""
        raise NotImplementedError

    def _check_takes(self, what: str) -> None:
        raise NotImplementedError

    def _forget_pauses(self) -> None:
        """Start like a process that was neither reset nor paused."""
        self._cleared_waits = False
        self.wake_up()

    def _admission_begins(self, state: Any) -> None:
        """Begin a step that looks up a request: publish a waiting Cleared, and the hits if the request asks for them.

        Raises:
            RequestError: the worker is paused.
            FullReportError: the report ends the engine, and all its requests are lost.
        """
        self._check_takes("a request")
        self.step_begins()
        if self._powers.reports is None:
            return
        from pytest_kvmock.engines.vllm.vllm_manager import FullReportError  # only vLLM's drivers report

        try:
            self._powers.reports.report(state)
        except FullReportError:
            self.crash()
            raise

    def _decode_begins(self) -> None:
        """Begin a step that computes tokens of a running request.

        Raises:
            RequestError: the worker is paused, and its requests are frozen.
        """
        if self._paused == "keep":
            self._check_takes("decode")
        self.step_begins()

    def _request_ended(self) -> None:
        if self._resets_when_idle and not self.requests:
            self._resets_when_idle = not self.reset()
