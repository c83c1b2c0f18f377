"""Lookups of a test: how much of a prompt each worker holds, by the index, on the device and in the tiers below."""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING, TypeAlias

from pytest_kvmock.events import StorageTier
from pytest_kvmock.harness.judge import Judge
from pytest_kvmock.harness.workers import WorkerKey, Workers
from pytest_kvmock.tokens import Prompt, TokenIds

if TYPE_CHECKING:
    from pytest_kvmock.harness.under_test import Scores, WorkerScores

Overlap: TypeAlias = dict[WorkerKey, int]
"""Blocks by worker; workers without any are absent."""


class Lookups:
    """Asks the index of a harness for prompts.

    Args:
        judge: has the indexes.
        workers: name the workers of an answer.
        block_size: tokens a block.
        lock: held while the index is asked: after a burst of events a lookup is a comparison too.
    """

    __slots__ = ("_block_size", "_judge", "_lock", "_workers")

    def __init__(self, judge: Judge, workers: Workers, block_size: int, lock: RLock) -> None:
        self._judge = judge
        self._workers = workers
        self._block_size = block_size
        self._lock = lock

    def overlap(self, prompt: Prompt | TokenIds, tier: StorageTier | str) -> Overlap:
        """See `RouterHarness.overlap`."""
        __tracebackhide__ = True
        self.need_sync("overlap", "aoverlap")
        if StorageTier.of(tier) is not StorageTier.DEVICE:
            return self._by_tier(prompt).get(StorageTier.of(tier), {})
        with self._lock:
            return self._by_worker(self._judge.ask(Prompt.of(prompt), self._block_size))

    async def aoverlap(self, prompt: Prompt | TokenIds, tier: StorageTier | str) -> Overlap:
        """See `RouterHarness.aoverlap`."""
        __tracebackhide__ = True
        self.need_async("aoverlap")
        if StorageTier.of(tier) is not StorageTier.DEVICE:
            return (await self.aoverlap_by_tier(prompt)).get(StorageTier.of(tier), {})
        return self._by_worker(await self._judge.aask(Prompt.of(prompt), self._block_size))

    def overlap_by_tier(self, prompt: Prompt | TokenIds) -> dict[StorageTier, Overlap]:
        """See `RouterHarness.overlap_by_tier`."""
        __tracebackhide__ = True
        self.need_sync("overlap_by_tier", "aoverlap_by_tier")
        return self._by_tier(prompt)

    async def aoverlap_by_tier(self, prompt: Prompt | TokenIds) -> dict[StorageTier, Overlap]:
        """See `RouterHarness.aoverlap_by_tier`."""
        __tracebackhide__ = True
        self.need_async("aoverlap_by_tier")
        tiers = await self._judge.aask_tiered(Prompt.of(prompt), self._block_size)
        return {tier: self._by_worker(scores) for tier, scores in tiers.items()}

    def _by_tier(self, prompt: Prompt | TokenIds) -> dict[StorageTier, Overlap]:
        __tracebackhide__ = True
        with self._lock:
            tiers = self._judge.ask_tiered(Prompt.of(prompt), self._block_size)
        return {tier: self._by_worker(scores) for tier, scores in tiers.items()}

    def _by_worker(self, scores: Scores | WorkerScores) -> Overlap:
        out: Overlap = {}
        for key, blocks in scores.items():
            out[self._workers.key(*key) if isinstance(key, tuple) else key] = blocks
        return out

    def need_sync(self, what: str, instead: str) -> None:
        """Refuse a call that asks an async index.

        Raises:
            TypeError: the index is async; the message names the method to await in its place.
        """
        __tracebackhide__ = True
        if self._judge.is_async:
            name = "" if self._judge.under_test is None else self._judge.under_test.name
            raise TypeError(
                f"{what} cannot ask an async index ({name}): "
                f"use `await kv_harness.{instead}(...)`, after `await kv_harness.aflush()`"
            )

    def need_async(self, what: str) -> None:
        """Refuse a call that awaits an index which is not async.

        Raises:
            TypeError: it is not.
        """
        __tracebackhide__ = True
        if not self._judge.is_async:
            raise TypeError(f"{what} is for an async index under test; this one is asked without await")
