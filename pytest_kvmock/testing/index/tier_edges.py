"""Promises of a router index for each tier, the same as for the device: edge cases of Removed, repeats, restarts, and
lost events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from pytest_kvmock.testing.index.index_driver import IndexDriver
from pytest_kvmock.testing.index.index_subject import SURVIVED
from pytest_kvmock.testing.index.tiers_below import TiersBelow
from pytest_kvmock.values.events import StorageTier

_BELOW = (StorageTier.HOST_PINNED, StorageTier.DISK, StorageTier.EXTERNAL)


class TierEdges(TiersBelow):
    """The part of `IndexContract` that repeats, for each tier below the device, the checks that `WorkersThatGo` and
    others make there.

    `tiers` limits these to the host, and external storage if a host has it.
    """

    def _start_each(self) -> Iterator[tuple[IndexDriver, StorageTier]]:
        """Start a new index for each tier; skip the test if the index does not tell tiers apart."""
        has_storage = self.tiers is None or any(host.storage for _, host in self._hosts())
        for tier in _BELOW if self.tiers is None else (_BELOW[0], *_BELOW[2:])[: 1 + has_storage]:
            yield self._start_tiered(), tier

    def _expect_below(
        self, index: IndexDriver, tier: StorageTier, letters: str, blocks: Mapping[int, int], *, or_fewer: bool = False
    ) -> None:
        __tracebackhide__ = True
        index.expect_tiers(letters, {tier.value: blocks}, or_fewer=or_fewer)

    def test_a_removed_of_a_tier_takes_its_blocks_beside_one_that_nobody_stored(self) -> None:
        """With `find_tiered`: an unknown block in a Removed, at any place, does not hide the others.

        The index may raise.
        """
        for at in range(3):
            for index, tier in self._start_each():
                chains = ["abcd", "abc"]
                chains.insert(at, "q")
                index.store("abcd", 0, tier=tier)
                index.store("abcd", 1, tier=tier)
                index.store("q", 1, tier=tier)
                index.remove(*chains, worker=0, tier=tier, may_be_refused=True)
                self._expect_below(index, tier, "abcd", {0: 2, 1: 4})
                self._expect_below(index, tier, "q", {1: 1})
                index.store("cd", 0, after="ab", tier=tier)
                self._expect_below(index, tier, "abcd", {0: 4, 1: 4})

    def test_a_removed_of_a_tier_leaves_siblings_workers_and_what_is_stored_again(self) -> None:
        """With `find_tiered`: a Removed takes only the blocks that it names, of its worker, until they are stored
        again.
        """
        for index, tier in self._start_each():
            for worker in (0, 1):
                index.store("abcd", worker, tier=tier)
            index.store("xy", 0, after="ab", tier=tier)
            for _ in range(3):
                index.remove("abcd", "abc", worker=0, tier=tier)
                self._expect_below(index, tier, "abcd", {0: 2, 1: 4})
                self._expect_below(index, tier, "abxy", {0: 4, 1: 2})
                index.store("cd", 0, after="ab", tier=tier)
                self._expect_below(index, tier, "abcd", {0: 4, 1: 4})
            index.remove("a", worker=1, tier=tier)
            self._expect_below(index, tier, "abcd", {0: 4})
            index.store("a", 1, tier=tier)
            self._expect_below(index, tier, "abcd", {0: 4, 1: 4})

    def test_a_block_stored_twice_in_a_tier_is_removed_as_often_as_copies_count(self) -> None:
        """With `find_tiered`: a second Stored changes no answer.

        One Removed takes the block; two if copies count.
        """
        for index, tier in self._start_each():
            for _ in range(2):
                index.store("abc", tier=tier)
                self._expect_below(index, tier, "abc", {0: 3})
            index.remove("abc", tier=tier)
            if self.traits.copies:
                self._expect_below(index, tier, "abc", {0: 3})
                index.remove("abc", tier=tier)
            self._expect_below(index, tier, "abc", {0: 2})

    def test_a_load_leaves_what_is_below(self) -> None:
        """With `find_tiered`: a tier keeps blocks that are loaded to the device again, through any number of loads and
        evictions.
        """
        for index, tier in self._start_each():
            index.store("abcd", tier=tier)
            for _ in range(3):
                index.store("abc")
                index.expect_tiers("abcd", {"device": {0: 3}, tier.value: {0: 1}})
                index.remove("abc", "ab")
                index.expect_tiers("abcd", {"device": {0: 1}, tier.value: {0: 3}})
                index.remove("a")
                self._expect_below(index, tier, "abcd", {0: 4})
            index.store("abc")
            index.remove("abcd", "abc", tier=tier)
            index.remove("abc")
            index.expect_tiers("abcd", {"device": {0: 2}})

    def test_a_cleared_of_a_tier_is_as_the_engine_says(self) -> None:
        """With `find_tiered`: a Cleared empties all tiers of its worker, or none below the device
        (`Traits.clears_below`).

        Afterwards the blocks can be stored again.
        """
        for index, tier in self._start_each():
            index.clear(0)
            for worker in (0, 1):
                index.store("abc", worker, tier=tier)
            index.clear(0)
            left = {1: 3} if self.traits.clears_below else {0: 3, 1: 3}
            self._expect_below(index, tier, "abc", left)
            if self.traits.clears_below:
                index.store("ab", 0, tier=tier)
                self._expect_below(index, tier, "abc", {0: 2, 1: 3})

    def test_a_worker_that_is_removed_begins_again_in_each_tier(self) -> None:
        """With `find_tiered`: after `remove_worker` a tier has only what this worker stored since; other workers keep
        their blocks.
        """
        index = self._start_tiered()
        if index.index.remove_worker is None:
            pytest.skip(f"{index.index.name} has no remove_worker(worker_id): what it leaves in tiers was not checked")
        for index, tier in self._start_each():
            for worker in (0, 1):
                index.store("abc", worker, tier=tier)
            index.remove_worker(0)
            self._expect_below(index, tier, "abc", {1: 3})
            index.store("ab", 0, tier=tier)
            self._expect_below(index, tier, "abc", {0: 2, 1: 3})
            index.remove("ab", worker=0, tier=tier)
            self._expect_below(index, tier, "abc", {0: 1, 1: 3})

    def test_after_a_gap_a_tier_has_no_more_than_came(self) -> None:
        """With `find_tiered`: after lost events, fewer blocks are right, too.

        A Removed names blocks that arrived, and blocks that were lost.
        """
        for index, tier in self._start_each():
            index.store("a", tier=tier)
            index.lose()
            index.store("c", after="ab", tier=tier, may_be_refused=True)
            self._expect_below(index, tier, "abc", {0: 1}, or_fewer=True)
            index.lose(events=3)
            index.remove("ab", "a", tier=tier, may_be_refused=True)
            self._expect_below(index, tier, "abc", {})
            index.store("xyz", tier=tier)
            self._expect_below(index, tier, "xyz", {0: 3})

    def test_a_redelivered_event_changes_nothing_in_a_tier(self) -> None:
        """With "double" in `survives`: an event of a tier that is delivered twice counts once."""
        self._needs_surviving("double")
        for index, tier in self._start_each():
            index.store("abc", tier=tier)
            index.redeliver()
            index.remove("abc", tier=tier)
            self._expect_below(index, tier, "abc", {0: 2})
            index.redeliver()
            self._expect_below(index, tier, "abc", {0: 2})
            index.store("c", after="ab", tier=tier)
            self._expect_below(index, tier, "abc", {0: 3})

    def test_an_unannounced_restart_empties_each_tier(self) -> None:
        """With "restart" in `survives`: a worker's blocks in a tier are gone when its event ids begin again."""
        self._needs_surviving("restart")
        for index, tier in self._start_each():
            for worker in (0, 1):
                index.store("abcd", worker, tier=tier)
            index.store("e", 0, after="abcd", tier=tier)
            index.restart(0)
            index.store("xy", 0, tier=tier)
            self._expect_below(index, tier, "abcd", {1: 4})
            self._expect_below(index, tier, "xy", {0: 2})

    def _needs_surviving(self, fault: str) -> None:
        self._start_tiered()
        if fault not in self.survives:
            pytest.skip(
                f"{type(self).__name__}.survives does not name {fault!r}: {SURVIVED[fault]} was not checked in tiers"
            )

    # ------------------------------------------------------------------------ a host that is a copy, as in vLLM

    def test_a_removed_of_a_host_that_is_a_copy_may_name_what_was_not_located(self) -> None:
        """An unknown block in a Removed of the host, at any place, does not hide the others. The device is
        unchanged.
        """
        for at in range(3):
            index, chains = self._start_native(), ["abc", "ab"]
            chains.insert(at, "q")
            index.store("abc")
            index.locate("a", "ab", "abc")
            index.remove("abc", "ab", "a")
            index.expect_tiers("abc", {"host_pinned": {0: 3}})
            index.remove(*chains, tier=StorageTier.HOST_PINNED, may_be_refused=True)
            index.expect_tiers("abc", {"host_pinned": {0: 1}})

    def test_a_host_that_is_a_copy_is_loaded_again_and_again(self) -> None:
        """A load leaves the copy: when the device evicts again, the host still has its blocks."""
        index = self._start_native()
        index.store("abc")
        index.locate("a", "ab", "abc")
        for _ in range(3):
            index.remove("abc", "ab")
            index.expect_tiers("abc", {"device": {0: 1}, "host_pinned": {0: 2}})
            index.store("bc", after="a")
            index.expect_tiers("abc", {"device": {0: 3}})
        index.clear()
        index.expect_tiers("abc", {"host_pinned": {0: 3}})
        if index.index.remove_worker is not None:
            index.remove_worker(0)
            index.expect_tiers("abc", {})
