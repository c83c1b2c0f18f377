"""Promises of a router index for workers that are cleared, removed or restarted, and for events that name blocks no
worker stored.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from pytest_kvmock.testing.index.index_driver import IndexDriver, prompt_of
from pytest_kvmock.testing.index.index_subject import SURVIVED, OverIndex


class WorkersThatGo(OverIndex):
    """The part of `IndexContract` about workers that leave, and events that were lost."""

    def test_a_cleared_worker_has_nothing(self) -> None:
        """A Cleared empties its worker; other workers keep their blocks."""
        index = self._start()
        index.store("abcd", 0)
        index.store("xy", 0)
        index.store("abc", 1)
        index.clear(0)
        index.expect("abcd", {1: 3})
        index.expect("xy", {})

    def test_a_cleared_worker_can_store_again(self) -> None:
        """After a Cleared a worker stores blocks like a new one; what stood behind a hole does not come back."""
        index = self._start()
        index.store("abcd")
        index.clear()
        index.store("ab")
        index.expect("abcd", {0: 2})
        index.store("cd", after="ab")
        index.expect("abcd", {0: 4})
        index.remove("a")
        index.clear()
        index.store("a")
        index.expect("abcd", {0: 1})

    def test_clearing_a_worker_that_has_nothing_is_no_error(self) -> None:
        """Engines publish a Cleared at every request to clear, even of an empty cache."""
        index = self._start()
        index.clear(0)
        index.store("ab", 1)
        index.clear(0)
        index.expect("ab", {1: 2})

    def test_a_cleared_rank_leaves_the_other_ranks(self) -> None:
        """A Cleared empties its own rank; with `clears = "worker"`, all ranks of its worker."""
        index = self._start()
        ranks = (0, 1) if self.tells_ranks_apart else (1,)
        for rank in ranks:
            index.store("abcd"[: 4 - rank], rank=rank)
        index.store("ab", 1)
        index.clear(rank=ranks[0])
        left = {(0, 1): 3} if ranks == (0, 1) and self.clears == "rank" else {}
        index.expect("abcd", {(1, 0): 2, **left})

    def test_a_removed_worker_loses_all_its_ranks(self) -> None:
        """`remove_worker` removes every rank, not only rank 0."""
        index = self._start()
        if index.index.remove_worker is None:
            pytest.skip(f"{index.index.name} has no remove_worker(worker_id): what it leaves was not checked")
        for rank in (0, 1, 2) if self.tells_ranks_apart else (2,):
            index.store("abcd", rank=rank)
        index.store("ab", 1)
        index.remove_worker(0)
        index.expect("abcd", {1: 2})

    def test_a_removed_worker_has_nothing(self) -> None:
        """`remove_worker`, if the index has it, empties only this worker, which may come back."""
        index = self._start()
        if index.index.remove_worker is None:
            pytest.skip(f"{index.index.name} has no remove_worker(worker_id): what it leaves was not checked")
        index.store("abcd", 1)
        index.store("abc", 2)
        index.store("ab", 10)
        index.store("a", 21)
        others = {2: 3, 10: 2, 21: 1}
        index.expect("abcd", {1: 4, **others})  # an answer that the index must not cache
        index.remove_worker(1)
        index.expect("abcd", others)
        index.store("abcd", 1)  # the same event that it published before
        index.expect("abcd", {1: 4, **others})
        index.remove_worker(1)
        index.store("ab", 1)
        index.expect("abcd", {1: 2, **others})

    def test_a_removed_rank_leaves_the_others(self) -> None:
        """`remove_worker_dp_rank`, if the index has it, empties only this rank, which may come back."""
        index = self._start()
        if index.index.remove_rank is None:
            pytest.skip(
                f"{index.index.name} has no remove_worker_dp_rank(worker_id, dp_rank): a rank that leaves or restarts "
                "by itself was not checked"
            )
        if not self.tells_ranks_apart:
            pytest.skip("tells_ranks_apart is False: a rank that leaves or restarts by itself was not checked")
        for rank, letters in enumerate(("abc", "abcd", "ab")):
            index.store(letters, 1, rank=rank)
        index.store("abcd", 0)
        index.store("ab", 11)
        others: dict[tuple[int, int], int] = {(1, 0): 3, (1, 2): 2, (0, 0): 4, (11, 0): 2}
        index.expect("abcd", {(1, 1): 4, **others})
        index.remove_rank(1, 1)
        index.expect("abcd", others)
        index.store("ab", 1, rank=1)
        index.expect("abcd", {(1, 1): 2, **others})
        index.remove_rank(1, 0)
        del others[1, 0]
        index.expect("abcd", {(1, 1): 2, **others})

    # ------------------------------------------------------------------------------------------------ survived

    def test_a_redelivered_event_changes_nothing(self) -> None:
        """With "double" in `survives`: an event that is delivered twice counts once."""
        index = self._start_surviving("double")
        index.store("abcd")
        index.redeliver()
        index.expect("abcd", {0: 4})
        index.remove("abcd")
        index.expect("abcd", {0: 3})
        index.redeliver()
        index.expect("abcd", {0: 3})
        index.store("d", after="abc")
        index.expect("abcd", {0: 4})
        index.clear()
        index.redeliver()
        index.expect("abcd", {})
        for spec in self._specs():
            with self._harness(spec, num_blocks=8) as harness:
                harness.faults.survive("double")
                with harness.faults.double(None):
                    for letters in ("abc", "abc", "abd", "efgh", "abc"):
                        harness.worker(0).serve(prompt_of(letters, self.block_size))
                        self._check(harness)
            # An index that counts each event twice is right again once each Removed came twice; here only some events
            # come twice.
            with self._harness(spec, num_blocks=3) as harness:
                harness.faults.survive("double")
                for number, letters in enumerate(("abc", "d", "efg", "abc", "hij")):
                    with nullcontext() if number % 2 else harness.faults.double(1):
                        harness.worker(0).serve(prompt_of(letters, self.block_size))
                    self._check(harness)

    def test_an_unannounced_restart_is_noticed(self) -> None:
        """With "restart" in `survives`: a worker's blocks are gone when its event ids begin again, as after a crash."""
        index = self._start_surviving("restart")
        index.store("abcd", 0)
        index.store("abc", 1)
        index.remove("abcd", worker=0)
        index.restart(0)
        index.store("xy", 0)
        index.expect("abcd", {1: 3})
        index.expect("xy", {0: 2})
        index.store("ab", 0)
        index.expect("abcd", {0: 2, 1: 3})
        index = self._start()
        index.store("abcd", 0)
        index.store("abc", 1)
        index.restart(0)  # after one event: the next has the id of the last
        index.store("xy", 0)
        index.expect("abcd", {1: 3})
        index.expect("xy", {0: 2})

    def _start_surviving(self, fault: str) -> IndexDriver:
        """Start a new index; skip the test unless `survives` names the fault."""
        index = self._start()
        if fault not in self.survives:
            pytest.skip(f"{type(self).__name__}.survives does not name {fault!r}: {SURVIVED[fault]} was not checked")
        return index

    # --------------------------------------------------------------------------------------- no worker stored it

    def test_a_child_of_an_unknown_parent_is_not_found(self) -> None:
        """A Stored below a block that its worker does not hold creates no root; the index may refuse it."""
        index = self._start()
        index.store("ab", 1)
        index.store("cd", 0, after="ab", may_be_refused=True)
        index.store("z", 0, after="xy", may_be_refused=True)
        for letters in ("cd", "d", "z", "xyz"):
            index.expect(letters, {})
        index.expect("abcd", {1: 2})

    def test_a_removed_takes_its_blocks_beside_one_that_nobody_stored(self) -> None:
        """A Removed that also names an unknown block, at any place, removes the others; the index may raise."""
        for chains in (("q", "abcd", "abc"), ("abcd", "abc", "q"), ("abcd", "q", "abc")):
            index = self._start()
            index.store("abcd", 0)
            index.store("abcd", 1)
            index.store("q", 1)
            index.remove(*chains, worker=0, may_be_refused=True)
            index.expect("abcd", {0: 2, 1: 4})
            index.expect("q", {1: 1})
