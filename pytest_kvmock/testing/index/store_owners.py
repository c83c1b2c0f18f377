"""Tests of an index with stores that workers share.

A worker's stream announces the blocks that it has put into a store, and each worker of the store can load them. No
stream names deleted blocks. An index may therefore promise fewer blocks of a store, or none, but the same to all of its
workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import pytest

from pytest_kvmock.engines.backends import BackendSpec, EngineProfile
from pytest_kvmock.engines.tiers import Tiers
from pytest_kvmock.harness.router_harness import RouterHarness
from pytest_kvmock.testing.drafts import Player, random_traffic
from pytest_kvmock.testing.index.index_driver import IndexDriver
from pytest_kvmock.testing.index.tiers_below import TiersBelow
from pytest_kvmock.testing.subject import refuse
from pytest_kvmock.values.events import Located, Stored
from pytest_kvmock.values.shared_stores import StoreSpec, read_stores
from pytest_kvmock.values.tokens import Prompt

_NOT_ASKED: Final = "stores is None: streams of workers that share a store were not checked"
_NONE: Final = "stores is empty: streams of workers that share a store were not checked"
_FAR: Final = 10_000
"""The distance from a worker of a store to its name in tests that are not about stores."""

_MOST_WORKERS: Final = 8
_TRAFFIC: Final = ((0, 1), (1, 1), (2, 2))
"""Seeds of random traffic, and blocks of a chunk; a store holds a chunk whole or not at all."""

_BLOCKS: Final = 8
_CHUNKS: Final = 3
_MOST_TICKS: Final = 20


class SharedStores(TiersBelow):
    """The part of `IndexContract` about stores that workers share.

    Attributes:
        stores: the stores, as `kvmock(stores=...)` takes them; `make_index` passes `self.stores` to the index, too. In
            tests that are not about stores it names workers that those tests do not use: what their workers have in a
            lower tier is their own.
    """

    stores: ClassVar[Mapping[str, Any] | None] = None
    _is_about_stores = False

    def _made(self) -> Any:
        __tracebackhide__ = True
        if not self._is_about_stores:
            # For this test alone: `stores` of the class stays as declared.
            vars(self)["stores"] = _of_others(type(self).stores)
        return super()._made()

    def store_names(self, store: str, tokens: Sequence[int]) -> Sequence[int] | None:  # noqa: ARG002 - for overriders
        """Return the names by which your index looks for a prompt in a store; None (default): it computes none.

        Args:
            store: name of the store.
            tokens: tokens of the prompt, without adapter and salt; its last chunk is not whole.

        Returns:
            The 64-bit names of its blocks or chunks in order, as events of the store have them.
        """
        return None

    def _stores(self) -> list[StoreSpec]:
        """Return the declared stores; skip the test if there is none."""
        __tracebackhide__ = True
        if not self.stores:
            self._start()
            pytest.skip(_NOT_ASKED if self.stores is None else _NONE)
        self._is_about_stores = True
        wrong, stores = "", {}
        try:
            stores = read_stores(self.stores)
        except ValueError as error:
            wrong = str(error)
        if wrong:
            refuse(self, wrong)
        return [*stores.values()]

    def _start_stores(self) -> Iterator[tuple[IndexDriver, StoreSpec]]:
        """Start a new index for each store that any worker may add to; skip the test if no such store is declared.

        LMCache's server is left out: a stream of it withdraws only its own announcements, of chunks.
        """
        __tracebackhide__ = True
        found = [each for each in self._stores() if each.kind != "lmcache"]
        if not found:
            pytest.skip("stores has only stores of kind 'lmcache': events of blocks in a store were not checked")
        for store in found:
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

    def test_names_that_it_computes_are_in_the_stream_of_a_store(self) -> None:
        """With `stores` and `store_names`: an engine announces a prompt in each store by the names that the index
        computes for it. An index of other names would find nothing, like one that leaves stores out.
        """
        judged = [store for store in self._stores() if store.kind not in ("objects", "hicache")]
        specs = [spec for spec in self._specs() if "tiers" in spec.options and spec.traits_at(self.block_size).copies]
        asked = 0
        for store in judged if specs else ():
            chunk = store["chunk"] if store.kind == "lmcache" else self.block_size
            tokens = range(1_000, 1_000 + _CHUNKS * chunk + 1)
            computed = self.store_names(store.name, tokens)
            if computed is not None:
                asked += 1
                self._expect_store_names(store, [*computed], self._announced(specs[0], store, tokens))
        if not asked:
            pytest.skip(
                "store_names answers None, or no store has an engine of backends that announces blocks: names of a "
                "store were not checked"
            )

    def _announced(self, spec: BackendSpec, store: StoreSpec, tokens: Sequence[int]) -> list[int]:
        """Return the names under which an engine announces a prompt that it has put into a store."""
        blocks = 2 + len(tokens) // self.block_size
        tiers = Tiers.of({"host": blocks, "files": True}) if store.kind == "files" else None
        profile = EngineProfile(self.block_size, 2 * blocks, 1 + max(store.workers), tiers=tiers)
        with RouterHarness(profile, spec, clears=self.clears, stores={store.name: store}) as harness:
            worker = harness.worker(store.workers[0])
            worker.serve(Prompt(tokens))
            for time in range(1, _MOST_TICKS + 1):
                worker.tick(1_000.0 * time)
        found = [each.event for each in harness.events if each.event.storage_tier is store.tier]
        return [
            name
            for each in found
            if isinstance(each.event.data, Stored | Located)
            for name in each.event.data.block_hashes
        ]

    def _expect_store_names(self, store: StoreSpec, computed: list[int], announced: list[int]) -> None:
        """Fail the test unless the computed names of whole chunks are among those announced, and there is one."""
        __tracebackhide__ = True
        whole = computed[: len(announced)]
        found = sum(name in announced for name in whole)
        if whole and found == len(whole):
            return
        what = f"only {found} of {len(whole)} computed names are" if found else "no computed name is"
        size = f"chunks of {store['chunk']}" if store.kind == "lmcache" else f"blocks of {self.block_size}"
        raise AssertionError(
            f"store_names({store.name!r}): {what} in the stream; computed {_in_hex(computed)}; an engine announced "
            f"{_in_hex(announced)}, for {size} tokens"
        )


def _of_others(stores: Any) -> Any:
    """Return stores with other workers; what cannot be read as stores is returned unchanged."""
    try:
        specs = read_stores({} if stores is None else stores)
    except ValueError:
        return stores
    others = {name: [_FAR + worker for worker in spec.workers] for name, spec in specs.items()}
    return {name: {**spec.to_dict(), "workers": others[name]} for name, spec in specs.items()} or stores


def _in_hex(names: Sequence[int]) -> str:
    return f"[{', '.join(f'{name:#x}' for name in names[:_CHUNKS])}{', ...' if len(names) > _CHUNKS else ''}]"
