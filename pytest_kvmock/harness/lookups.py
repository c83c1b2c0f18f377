"""Lookups of a test: how much of a prompt each worker holds according to the index, tier by tier, and how much each
would reuse.
"""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from pytest_kvmock.harness.judge import Judge
from pytest_kvmock.harness.under_test import Calls, arun, run
from pytest_kvmock.harness.workers import WorkerKey, Workers
from pytest_kvmock.values.checks import unknown_text
from pytest_kvmock.values.events import StorageTier
from pytest_kvmock.values.tokens import Prompt, TokenIds

if TYPE_CHECKING:
    from pytest_kvmock.harness.under_test import Scores, WorkerScores
    from pytest_kvmock.values.prompt_keys import EventExtra

_T = TypeVar("_T")

Overlap: TypeAlias = dict[WorkerKey, int]
"""Blocks by worker; workers without any are absent."""


class Lookups:
    """Looks up prompts in the index of a harness. Each query is written once: `run` calls the index, `arun` awaits it.

    Args:
        judge: has the indexes.
        workers: names the workers of an answer.
        block_size: tokens per block.
        lock: held during a lookup, which after a burst of events is also a comparison.
    """

    __slots__ = ("_block_size", "_judge", "_lock", "_workers")

    def __init__(self, judge: Judge, workers: Workers, block_size: int, lock: RLock) -> None:
        self._judge = judge
        self._workers = workers
        self._block_size = block_size
        self._lock = lock

    def of_tier(self, prompt: Prompt | TokenIds, tier: StorageTier | str) -> Calls[Overlap]:
        """Return the overlap of one tier; see `RouterHarness.overlap`."""
        __tracebackhide__ = True
        tier = StorageTier.of(tier)
        tiers = yield from self._look_up(prompt, by_tier=tier is not StorageTier.DEVICE)
        return tiers.get(tier, {})

    def of_owner(self, prompt: Prompt | TokenIds, owner: str) -> Calls[Overlap]:
        """Return the overlap of one store, for the workers that can load from it."""
        __tracebackhide__ = True
        stores = self._judge.reference.stores
        if owner not in stores:
            raise ValueError(unknown_text("store", owner, stores) if stores else f"no stores; got owner={owner!r}")
        tiers = yield from self._look_up(prompt, by_tier=True)
        workers = stores[owner].workers
        found = tiers.get(stores[owner].tier, {})
        return {key: blocks for key, blocks in found.items() if (key[0] if isinstance(key, tuple) else key) in workers}

    def by_tier(self, prompt: Prompt | TokenIds) -> Calls[dict[StorageTier, Overlap]]:
        """Return the overlap of each tier."""
        return self._look_up(prompt, by_tier=True)

    def _look_up(self, prompt: Prompt | TokenIds, *, by_tier: bool) -> Calls[dict[StorageTier, Overlap]]:
        __tracebackhide__ = True
        asked = Prompt.of(prompt)
        tiers = yield from self._judge.look_up(asked, self._block_size, extra=self._extra(asked), by_tier=by_tier)
        return {tier: self._by_worker(scores) for tier, scores in tiers.items()}

    def _extra(self, prompt: Prompt) -> EventExtra | None:
        """Return what a prompt carries in addition to its tokens, in the form that the workers publish."""
        if prompt.keys is None:
            return None
        count = prompt.length(self._block_size) // self._block_size
        extra = prompt.keys.carried(0, count, self._block_size)
        workers = self._workers.by_key.values()
        if workers and not any(worker.traits.extra_keys for worker in workers):
            extra.pop("extra_keys", None)
        return extra

    def run(self, what: str, lookup: Calls[_T]) -> _T:
        """Look up in a sync index.

        Args:
            what: the name of the harness's method; its async version has the prefix "a".
            lookup: the calls.

        Raises:
            TypeError: the index is async.
        """
        __tracebackhide__ = True
        self.need_sync(what, f"a{what}")
        with self._lock:
            return run(lookup)

    async def arun(self, what: str, lookup: Calls[_T]) -> _T:
        """Look up in an async index; see `run`.

        Raises:
            TypeError: the index is not async.
        """
        __tracebackhide__ = True
        self.need_async(what)
        return await arun(lookup)

    def reusable(self, prompt: Prompt | TokenIds, tier: StorageTier | str = StorageTier.DEVICE) -> dict[WorkerKey, int]:
        """Return the number of tokens that each worker would reuse; see `RouterHarness.reusable`."""
        with self._lock:
            if tier == "storage":
                found = {key: worker.storage.reusable(prompt) for key, worker in self._workers.by_key.items()}
                return {key: tokens for key, tokens in found.items() if tokens}
            found = {key: worker.cached_tokens(prompt, tier) for key, worker in self._workers.by_key.items()}
        return {key: tokens for key, tokens in found.items() if tokens}

    def _by_worker(self, scores: Scores | WorkerScores) -> Overlap:
        out: Overlap = {}
        for key, blocks in scores.items():
            out[self._workers.key(*key) if isinstance(key, tuple) else key] = blocks
        return out

    def need_sync(self, what: str, instead: str) -> None:
        """Reject a sync call if the index is async.

        Raises:
            TypeError: the index is async; the message names the method to await instead.
        """
        __tracebackhide__ = True
        if self._judge.is_async:
            name = "" if self._judge.under_test is None else self._judge.under_test.name
            raise TypeError(
                f"{what} cannot query an async index ({name}): "
                f"use `await kv_harness.{instead}(...)`, after `await kv_harness.aflush()`"
            )

    def need_async(self, what: str) -> None:
        """Reject an async call if the index is not async.

        Raises:
            TypeError: the index is not async.
        """
        __tracebackhide__ = True
        if not self._judge.is_async:
            raise TypeError(f"{what} is for an async index under test; this one is not async")
