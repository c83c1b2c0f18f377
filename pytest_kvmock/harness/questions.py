"""What a test asks of a harness: who holds a prompt, what was wrong with the events, whether all agree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeAlias

from pytest_kvmock.hygiene.log import STATUSES, EventLog, KvEventsError
from pytest_kvmock.hygiene.report import problems_text
from pytest_kvmock.tokens import Prompt, TokenIds

if TYPE_CHECKING:
    from pytest_kvmock.backends import EngineProfile
    from pytest_kvmock.harness.judge import Judge, Residents
    from pytest_kvmock.harness.under_test import Scores, WorkerScores
    from pytest_kvmock.hygiene.problem import Problem

WorkerKey: TypeAlias = int | tuple[int, int]
"""A worker id; (worker_id, dp_rank) where the worker has more ranks than one."""


class Questions(ABC):
    """Gives them to a `RouterHarness`."""

    events: EventLog
    profile: EngineProfile
    _judge: Judge
    _lock: RLock

    @property
    @abstractmethod
    def index(self) -> Any:
        """The index that answers: the one under test, or the reference."""

    @abstractmethod
    def flush(self) -> None:
        """Compare what can be compared by now."""

    @abstractmethod
    def _residents(self) -> Residents:
        """Who can tell what is resident."""

    @abstractmethod
    def _key(self, worker_id: int, dp_rank: int) -> WorkerKey:
        """What a worker, or a rank of it, is called."""

    # -------------------------------------------------------------------------------------------- questions

    def overlap(self, prompt: Prompt | TokenIds) -> dict[WorkerKey, int]:
        """How many leading blocks of a prompt each worker holds, as the index says; who holds none is absent.

        Raises:
            TypeError: the index is async: `await kv_router.aoverlap(prompt)`.
            ValueError: the index takes tokens, and the prompt has none.
        """
        __tracebackhide__ = True
        self._need_sync("overlap", "aoverlap")
        with self._lock:  # after a burst it is a comparison too
            return self._named(self._judge.ask(Prompt.of(prompt), self.profile.block_size))

    async def aoverlap(self, prompt: Prompt | TokenIds) -> dict[WorkerKey, int]:
        """As `overlap`, for an async index, as far as it was flushed."""
        __tracebackhide__ = True
        self._need_async("aoverlap")
        return self._named(await self._judge.aask(Prompt.of(prompt), self.profile.block_size))

    def overlap_for_hashes(self, local_hashes: Iterable[int]) -> dict[WorkerKey, int]:
        """As `overlap`, for a prompt known by its local hashes."""
        return self.overlap(Prompt(hashes=local_hashes))

    def _named(self, scores: Scores | WorkerScores) -> dict[WorkerKey, int]:
        out: dict[WorkerKey, int] = {}
        for key, blocks in scores.items():
            out[self._key(*key) if isinstance(key, tuple) else key] = blocks
        return out

    def _need_sync(self, what: str, instead: str) -> None:
        __tracebackhide__ = True
        if self._judge.is_async:
            raise TypeError(
                f"{what} cannot ask an async index ({type(self.index).__name__}): "
                f"use `await kv_router.{instead}(...)`, after `await kv_router.aflush()`"
            )

    def _need_async(self, what: str) -> None:
        __tracebackhide__ = True
        if not self._judge.is_async:
            raise TypeError(f"{what} is for an async index under test; this one is asked without await")

    # ---------------------------------------------------------------------------------------------- judging

    def ok_count(self, kind: str) -> int:
        """How many events of a kind ("stored", "removed", "cleared") were sound."""
        return self.status_count(kind, "ok")

    def status_count(self, kind: str, status: str) -> int:
        """How many events of a kind had a status: "ok", or one of the errors that an index counts.

        Raises:
            ValueError: an unknown kind or status.
        """
        return self.events.status_count(kind, status)

    def invalid_counts(self) -> dict[tuple[str, str], int]:
        """The six counters of upstream's harness: (kind, error) for Stored and Removed."""
        return {
            (kind, status): self.status_count(kind, status) for kind in ("stored", "removed") for status in STATUSES
        }

    def warning_counts(self) -> dict[str, int]:
        """How often each warning came, consequences of another fault counted."""
        return dict(Counter(problem.rule for problem in self.events.problems if not problem.is_error))

    def assert_no_event_errors(self) -> None:
        """Flush, and raise if there was any error that the test did not expect.

        Raises:
            KvEventsError: with the report.
        """
        __tracebackhide__ = True
        self.events.check()

    def assert_no_event_warnings(self) -> None:
        """Flush, and raise if there was any warning.

        Raises:
            KvEventsError: with the report.
        """
        __tracebackhide__ = True
        self.flush()
        warnings = self.events.unexcused(self.events.warnings)
        if warnings:
            raise KvEventsError(problems_text(warnings))

    def assert_in_sync(self) -> None:
        """Flush, and raise if stream and engines, or index and reference, differ now, for whatever reason.

        Raises:
            KvEventsError: with the report.
            TypeError: the index is async: `await kv_router.aassert_in_sync()`.
        """
        __tracebackhide__ = True
        self._need_sync("assert_in_sync", "aassert_in_sync")
        with self._lock:
            self._raise_if_any(self._judge.compare())

    async def aassert_in_sync(self) -> None:
        """As `assert_in_sync`, for an async index, which is flushed first."""
        __tracebackhide__ = True
        self._need_async("aassert_in_sync")
        self._raise_if_any(await self._judge.acompare())

    def _raise_if_any(self, found: list[Problem]) -> None:
        __tracebackhide__ = True
        self.flush()
        found = found + self._judge.differences(self._residents())
        if found:
            raise KvEventsError(problems_text(found))
