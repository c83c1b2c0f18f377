"""Tests of an index with stores that workers share.

A worker's stream announces the blocks that it has put into a store, and each worker of the store can load them. No
stream names deleted blocks. An index may therefore promise fewer blocks of a store, or none, but the same to all of its
workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

import pytest

from pytest_kvmock.engines.backends import EngineProfile
from pytest_kvmock.engines.tiers import Tiers
from pytest_kvmock.harness.router_harness import RouterHarness
from pytest_kvmock.testing.drafts import Player, random_traffic
from pytest_kvmock.testing.index.index_driver import IndexDriver
from pytest_kvmock.testing.index.tiers_below import TiersBelow
from pytest_kvmock.testing.subject import refuse
from pytest_kvmock.values.shared_stores import StoreSpec, read_stores

_NOT_ASKED: Final = "stores is None: streams of workers that share a store were not checked"
_MOST_WORKERS: Final = 8
_TRAFFIC: Final = ((0, 1), (1, 1), (2, 2))
"""Seeds of random traffic, and blocks of a chunk; a store holds a chunk whole or not at all."""

_BLOCKS: Final = 8


class SharedStores(TiersBelow):
    """The part of `IndexContract` about stores that workers share.

    Attributes:
        stores: the stores, as `kvmock(stores=...)` takes them; `make_index` passes them to the index, too.
    """

    stores: ClassVar[Mapping[str, Any] | None] = None

    def _start_stores(self) -> Iterator[tuple[IndexDriver, StoreSpec]]:
        """Start a new index for each store; skip the test if no store is declared."""
        __tracebackhide__ = True
        if self.stores is None:
            self._start()
            pytest.skip(_NOT_ASKED)
        wrong, stores = "", {}
        try:
            stores = read_stores(self.stores)
        except ValueError as error:
            wrong = str(error)
        if wrong:
            refuse(self, wrong)
        for store in stores.values():
            yield self._start_tiered(), store

    def _expect_store(
        self,
        index: IndexDriver,
        store: StoreSpec,
        letters: str,
        end: int,
        own: Mapping[int, int],
        *,
        gone: int = -1,
        least: int = 0,
    ) -> int:
        """Look up a prompt: all workers of the store can load it up to `end`, or all up to the same smaller block.
        Return this end.

        Args:
            index: the index that is queried.
            store: the store.
            letters: the blocks of the prompt.
            end: number of leading blocks that the store completes, from where each worker's device ends.
            own: leading blocks on the devices, by worker.
            gone: a worker of the store that has left.
            least: the end that was promised before an action that took nothing from the store.
        """
        __tracebackhide__ = True
        first: AssertionError | None = None
        for less in range(end, least - 1, -1):
            below = {each: less - own.get(each, 0) for each in store.workers if each != gone}
            expected = {"device": own, store.tier.value: {each: more for each, more in below.items() if more > 0}}
            try:
                index.expect_tiers(letters, expected)
            except AssertionError as error:
                first = first or error
            else:
                return less
        assert first is not None
        rule = "each alike, as before" if least else "each alike, or less"
        first.add_note(f"{store.name!r} is shared by workers {', '.join(map(str, store.workers))}: {rule}")
        raise first

    def test_a_store_is_credited_alike_to_its_workers_and_to_no_other(self) -> None:
        """With `stores`: whichever worker announced a block, all workers of the store can load it, from where their
        devices end.
        """
        for index, store in self._start_stores():
            writer, *_ = store.workers
            index.store("abcd", writer, tier=store.tier)
            self._expect_store(index, store, "abcd", 4, {})
            stranger, last = max(store.workers) + 1, store.workers[-1]
            index.store("ab", stranger)
            index.store("abc", last)
            self._expect_store(index, store, "abcd", 4, {stranger: 2, last: 3})
            index.store("e", last, after="abcd", tier=store.tier)
            self._expect_store(index, store, "abcde", 5, {stranger: 2, last: 3})

    def test_what_is_announced_twice_is_in_a_store_once(self) -> None:
        """With `stores`: however many workers announced a block, one Removed takes it from all of them."""
        for index, store in self._start_stores():
            for worker in (*store.workers, *store.workers):
                index.store("abc", worker, tier=store.tier)
            self._expect_store(index, store, "abc", 3, {})
            index.remove("abc", worker=store.workers[-1], tier=store.tier)
            self._expect_store(index, store, "abc", 2, {})
            index.store("c", store.workers[-1], after="ab", tier=store.tier)
            self._expect_store(index, store, "abc", 3, {})

    def test_a_cleared_takes_nothing_from_a_store(self) -> None:
        """With `stores`: a Cleared of a worker empties only its own tiers."""
        for index, store in self._start_stores():
            writer, last = store.workers[0], store.workers[-1]
            index.store("ab", writer)
            index.store("abcd", writer, tier=store.tier)
            kept = self._expect_store(index, store, "abcd", 4, {writer: 2})
            index.clear(writer)
            self._expect_store(index, store, "abcd", 4, {}, least=kept)
            index.store("abc", last)
            self._expect_store(index, store, "abcd", 4, {last: 3}, least=kept)

    def test_a_worker_that_leaves_takes_nothing_from_a_store(self) -> None:
        """With `stores`: a removed worker can load nothing; the others can load the same as before."""
        for index, store in self._start_stores():
            if index.index.remove_worker is None:
                pytest.skip(f"{index.index.name} has no remove_worker: a worker of a store that leaves was not checked")
            writer = store.workers[0]
            index.store("ab", writer)
            index.store("abcd", writer, tier=store.tier)
            kept = self._expect_store(index, store, "abcd", 4, {writer: 2})
            index.remove_worker(writer)
            self._expect_store(index, store, "abcd", 4, {}, gone=writer, least=kept)
            index.store("a", writer)
            self._expect_store(index, store, "abcd", 4, {writer: 1}, least=kept)

    def test_what_leaves_a_store_stays_with_its_workers(self) -> None:
        """With `stores`: a block that one stream removes from a store is gone for all of its workers, but stays on
        their devices; a block that leaves a device stays in the store.
        """
        for index, store in self._start_stores():
            writer, last = store.workers[0], store.workers[-1]
            index.store("ab", writer)
            index.store("abcd", writer, tier=store.tier)
            kept = self._expect_store(index, store, "abcd", 4, {writer: 2})
            for block in ("ab", "a"):
                index.remove(block, worker=writer)
            self._expect_store(index, store, "abcd", 4, {}, least=kept)
            index.store("abc", last)
            for block in ("abcd", "abc", "ab", "a"):
                index.remove(block, worker=writer, tier=store.tier)
            self._expect_store(index, store, "abcd", 0, {last: 3})

    def test_a_hole_ends_what_a_store_promises(self) -> None:
        """With `stores`: blocks behind one that neither the worker nor the store has are not loaded."""
        for index, store in self._start_stores():
            writer, last = store.workers[0], store.workers[-1]
            index.store("ab", writer, tier=store.tier)
            index.store("de", last, after="abc", tier=store.tier)
            self._expect_store(index, store, "abcde", 2, {})
            index.store("c", writer, after="ab", tier=store.tier)
            self._expect_store(index, store, "abcde", 5, {})

    def test_it_follows_workers_that_share_a_folder(self) -> None:
        """With `stores`: under traffic over shared files, the index agrees with the reference index, or promises less,
        and the same to all workers.
        """
        shared = [store for _, store in self._start_stores() if store.kind == "files"]
        specs = [spec for spec in self._specs() if "tiers" in spec.options and spec.traits_at(self.block_size).copies]
        workers = 1 + max((each for store in shared for each in store.workers), default=0)
        if not shared or not specs or workers > _MOST_WORKERS:
            pytest.skip(
                f"no store of kind 'files' with worker ids below {_MOST_WORKERS}, or no vllm in backends: traffic over "
                "shared files was not checked"
            )
        for spec in specs:
            for seed, chunk in _TRAFFIC:
                for described in (False, True):
                    tiers = Tiers.of({"host": _BLOCKS, "files": True, "chunk": chunk, "self_describing": described})
                    profile = EngineProfile(self.block_size, _BLOCKS, workers, tiers=tiers)
                    self.traits = profile.traits(spec)
                    stores = {store.name: store for store in shared}
                    harness = RouterHarness(
                        profile, spec, self._under_test(), sync="every", clears=self.clears, stores=stores
                    )
                    with harness:
                        player = Player(harness)
                        for step in random_traffic(seed, 60, workers=workers, most_ms=40):
                            player.do(step)
                            self._check(harness)
