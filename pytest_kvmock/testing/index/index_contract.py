"""The promises of every router index, as tests that an index's test class inherits.

One subject, one class: a test for each promise.
"""

from __future__ import annotations

from typing import Final

import pytest

from pytest_kvmock.testing.drafts import random_traffic
from pytest_kvmock.testing.index.crossed_keys import CrossedKeys
from pytest_kvmock.testing.index.full_reports import FullReports
from pytest_kvmock.testing.index.hybrid_streams import HybridStreams
from pytest_kvmock.testing.index.index_bounds import Bounds
from pytest_kvmock.testing.index.index_driver import IndexDriver, prompt_of
from pytest_kvmock.testing.index.index_load import UnderLoad
from pytest_kvmock.testing.index.index_size import AtSize
from pytest_kvmock.testing.index.partial_streams import PartialStreams
from pytest_kvmock.testing.index.store_owners import SharedStores
from pytest_kvmock.testing.index.tier_edges import TierEdges
from pytest_kvmock.testing.index.untold_by_events import ContextParallel, ReloadedAdapters
from pytest_kvmock.testing.index.workers_that_go import WorkersThatGo
from pytest_kvmock.testing.subject import refuse
from pytest_kvmock.values.events import StorageTier

_MOST_IN_A_BURST: Final = 100

_HYBRID_MOST: Final = 12
"""Blocks of the longest prompt for an engine of a hybrid model: more than its window holds."""


class IndexContract(
    CrossedKeys,
    HybridStreams,
    PartialStreams,
    TierEdges,
    SharedStores,
    WorkersThatGo,
    Bounds,
    UnderLoad,
    AtSize,
    FullReports,
    ContextParallel,
    ReloadedAdapters,
):
    """Tests that hold for every index, queried by local hashes or by tokens (see `kv_index` for its methods).

    A subclass defines `make_index`::

        class TestMyIndex(IndexContract):
            def make_index(self):
                return MyIndex()

    For engines that publish copies (vLLM), an index that counts them reads this from `traits`::

        class TestMyIndex(IndexContract):
            backends = tuple(BACKENDS)

            def make_index(self):
                return MyIndex(count_copies=self.traits.copies)

    An async index runs in your loop: define `run`. If the index has a method `size()`, this number of entries must stay
    bounded over any number of events. If it has `find_tiered` or `match_tiered`, it tells tiers apart: the tests query
    each tier, with each kind of host that engines of `backends` can have. For vLLM's host, `traits` has the size of a
    chunk, which no event carries, and what a Cleared empties::

        return MyIndex(count_copies=self.traits.copies, chunk=self.traits.chunk, clears_below=self.traits.clears_below)

    If it has `takes_updates = True` and tells tiers apart, it also receives TensorRT-LLM's Updated, and must tell
    levels apart. If it has `match_tokens(tokens, extra)`, it is queried for prompts with adapters, salts and multimodal
    items. A test of a feature that the index lacks is skipped; the skip names what was not checked.

    Attributes:
        block_size: tokens per block; by default the smallest size, 4 or more, that all of `backends` allow.
        tells_ranks_apart: whether the index keeps the data-parallel ranks of a worker apart. If it does not, each
            worker of the contract has one rank.
        backends: the backends whose traffic the index must follow, as names or `BackendSpec`s; None: those of the
            default matrix.
        clears: what a Cleared empties, as in `RouterHarness`: "rank", or "worker" for all ranks of the worker.
        survives: the faults that the index must survive: "double" (an event is delivered twice), "restart" (a worker
            restarts unannounced). The tests of other faults are skipped, and the skip says so.
        threads: whether several threads may call the index: look-ups, events of different workers, `remove_worker`. If
            not, these tests are skipped.
        bounded: the least number of blocks, over all workers, that a bounded index keeps, from 1 to 10,000; it may
            forget others. It must not find a block that is not held, nor raise on an event that names a forgotten
            block. None: it forgets no block.
        bounded_at_most: the most blocks that a bounded index keeps, over all workers, from `bounded` to 100,000.
            Measured by its `size()`, or without one by what look-ups find. None: not checked.
        keeps: which blocks a bounded index keeps: "recently_used" (stored or looked up last) or "recently_stored";
            None: not checked.
        async_bound: whether a task of the index drains its queue, so that 100,000 events may arrive before it runs; if
            not, 20,000 arrive before a `flush`. The index keeps all events, or its `dropped()` returns how many it
            dropped.
        reads_groups: whether the index tells cache groups apart even though `backends` names no engine that publishes
            them.
        reads_drafts: whether the index reads names that look ahead and pairs, as engines with a draft model publish
            them, even though `backends` names no such engine.
        one_tier: whether the index counts a block in any tier, on purpose, and does not tell tiers apart.
        names: the backend whose block names the index computes from tokens: "vllm", or a variant with its
            hash_algorithm and hash_seed. Blocks of the contract then have such names, and `backends` defaults to this
                backend. None: the index reads names from events only.
        full_reports: whether requests of its engines carry `kv_cache_report_mode="full"`: an answer may then lie
            anywhere from a set's to a count's, as no rule is exact.
        dcp: pages per block of its engines: `make_index(block_size)` is given the page once, and events have blocks of
            `block_size`. 1: not judged.
        size_blocks: number of blocks in the tests at production size, at least 1,000; below 20,000, look-ups are not
            timed.
        tiers: the hosts below the engines of `backends`, including hybrid and draft models, each as `kvmock(tiers=...)`
            takes it. None: below the other engines one of Dynamo's hosts, and vLLM's in both forms of its events, in
            chunks of one block and of two.
        stores: stores that workers share, as `kvmock(stores=...)` takes them; `make_index` passes them to the index.
            None: no stores.
        traits: traits of the engine that the next index is made for.
    """

    # ------------------------------------------------------------------------------------------------ stored

    def test_a_new_index_is_empty(self) -> None:
        """A new index returns no worker for any look-up."""
        index = self._start()
        index.expect("abc", {})
        index.expect("", {})

    def test_a_stored_prompt_is_found_whole(self) -> None:
        """A look-up of a stored prompt finds all its blocks."""
        index = self._start()
        index.store("abcd")
        index.expect("abcd", {0: 4})

    def test_a_shorter_prompt_is_found_up_to_its_end(self) -> None:
        """A look-up finds no more blocks than its prompt has."""
        index = self._start()
        index.store("abcd")
        index.expect("ab", {0: 2})
        index.expect("", {})

    def test_a_longer_prompt_is_found_as_far_as_it_is_held(self) -> None:
        """A look-up stops where the held blocks end, and counts only whole blocks."""
        index = self._start()
        index.store("ab")
        index.expect("abxy", {0: 2})
        index.expect("ab", {0: 2}, tail=self.block_size - 1)

    def test_another_prompt_is_not_found(self) -> None:
        """A prompt that differs in its first block is not found."""
        index = self._start()
        index.store("abcd")
        index.expect("xyz", {})
        index.expect("xbcd", {})

    def test_a_prompt_that_parts_is_found_up_to_there(self) -> None:
        """Blocks after the first one that differs do not count."""
        index = self._start()
        index.store("abcd")
        index.expect("abxd", {0: 2})
        index.expect("axcd", {0: 1})

    def test_blocks_are_found_in_their_place_alone(self) -> None:
        """The same tokens elsewhere in a prompt are another block."""
        index = self._start()
        index.store("abca")
        index.expect("b", {})
        index.expect("bca", {})
        index.expect("aa", {0: 1})
        index.expect("abcabca", {0: 4})

    def test_blocks_that_come_later_belong_below_their_parent(self) -> None:
        """A chain grows event by event, as in decoding."""
        index = self._start()
        index.store("ab")
        for position, letter in enumerate("cdef", 2):
            index.store(letter, after="abcdef"[:position])
            index.expect("abcdef", {0: position + 1})

    def test_chains_that_share_a_prefix_are_both_found(self) -> None:
        """A block may have many children."""
        index = self._start()
        index.store("abcd")
        index.store("xy", after="ab")
        index.store("z", after="ab")
        for letters, blocks in (("abcd", 4), ("abxy", 4), ("abz", 3), ("abcy", 3)):
            index.expect(letters, {0: blocks})

    def test_a_block_stored_twice_changes_nothing(self) -> None:
        """A second Stored of the same block changes no answer."""
        index = self._start()
        index.store("abc")
        index.store("abc")
        index.store("c", after="ab")
        index.expect("abc", {0: 3})
        index.expect("abcabc", {0: 3})

    def test_a_long_prompt_is_found_whole(self) -> None:
        """A prompt of 500 blocks is found, whether stored at once or in pieces."""
        index = self._start()
        letters = "".join(map(chr, range(1000, 1500)))
        index.store(letters)
        for position in range(0, 500, 25):
            index.store(letters[position : position + 25], 1, after=letters[:position])
        index.expect(letters, {0: 500, 1: 500})

    # -------------------------------------------------------------------------------------- several workers

    def test_workers_are_kept_apart(self) -> None:
        """Each worker has the blocks that its own events stored."""
        index = self._start()
        index.store("abcd", 0)
        index.store("ab", 1)
        index.store("xy", 2)
        index.expect("abcd", {0: 4, 1: 2})
        index.expect("xyz", {2: 2})

    def test_a_worker_may_have_any_number(self) -> None:
        """Worker ids need not be small, nor come in order."""
        index = self._start()
        for worker in (65536, 3, 2**40):
            index.store("ab", worker)
        index.expect("ab", {65536: 2, 3: 2, 2**40: 2})

    def test_a_prompt_is_found_on_all_workers_beside_one_that_has_more(self) -> None:
        """The longest match does not hide the others, nor does a worker in the middle."""
        index = self._start()
        for worker, letters in enumerate(("a", "abcdef", "abc", "abxdef")):
            index.store(letters, worker)
        index.expect("abcdef", {0: 1, 1: 6, 2: 3, 3: 2})

    def test_ranks_of_a_worker_are_kept_apart(self) -> None:
        """An index that answers by worker, not by rank, returns the highest value of its ranks."""
        index = self._start()
        index.store("abcd", 0, rank=1)
        if not self.tells_ranks_apart:
            index.expect("abcd", {(0, 1): 4}, any_rank=True)
            return
        index.store("ab", 0, rank=0)
        index.expect("abcd", {(0, 1): 4, (0, 0): 2})
        index.remove("abcd", "abc", "ab", "a", worker=0, rank=1)
        index.expect("abcd", {(0, 0): 2})

    def test_ranks_may_each_have_blocks_of_their_own(self) -> None:
        """Each of two or three ranks has its own chains, below blocks that all ranks have."""
        if not self.tells_ranks_apart:
            self._start()
            pytest.skip("tells_ranks_apart is False: ranks that each have blocks of their own were not checked")
        for ranks in (2, 3):
            index = self._start()
            own = ["cde"[rank] * (rank + 1) for rank in range(ranks)]
            for rank, letters in enumerate(own):
                index.store("ab", rank=rank)
                index.store(letters, rank=rank, after="ab")
                index.store(f"{'xyz'[rank]}q", rank=rank)
            for rank, letters in enumerate(own):
                index.expect(f"ab{letters}", {(0, each): 2 + len(letters) * (each == rank) for each in range(ranks)})
                index.expect(f"{'xyz'[rank]}q", {(0, rank): 2})
            last = ranks - 1
            index.store("w", rank=last, after="abc", may_be_refused=True)  # below a block of rank 0
            index.expect("abcw", {(0, each): 3 if each == 0 else 2 for each in range(ranks)})
            index.remove("abc", rank=0)
            index.remove(f"ab{own[last]}", rank=last)
            index.expect("abc", {(0, each): 2 for each in range(ranks)})
            index.expect(f"ab{own[last]}", {(0, each): 2 + last * (each == last) for each in range(ranks)})

    # ----------------------------------------------------------------------------------------------- removed

    def test_a_removed_block_is_not_found(self) -> None:
        """The blocks before a removed one are still found."""
        index = self._start()
        index.store("abcd")
        index.remove("abcd")
        index.expect("abcd", {0: 3})

    def test_all_blocks_of_a_removed_event_are_removed(self) -> None:
        """A Removed removes every block that it names, not only the first."""
        index = self._start()
        index.store("abcd")
        index.remove("abcd", "abc", "ab")
        index.expect("abcd", {0: 1})
        index.remove("a")
        index.expect("abcd", {})

    def test_a_removed_block_hides_what_stands_behind_it(self) -> None:
        """A match ends at the first missing block."""
        index = self._start()
        index.store("abcd")
        index.remove("ab")
        index.expect("abcd", {0: 1})

    def test_a_removed_block_stays_with_other_workers(self) -> None:
        """Only the worker that removed a block loses it, at the end or in the middle of a chain."""
        index = self._start()
        for worker in (0, 1, 2):
            index.store("abcd", worker)
        index.remove("abcd", worker=0)
        index.remove("abc", worker=1)
        index.expect("abcd", {0: 3, 1: 2, 2: 4})

    def test_a_removed_block_leaves_its_siblings(self) -> None:
        """Another chain with the same head stays whole."""
        index = self._start()
        index.store("abc")
        index.store("xy", after="ab")
        index.remove("abxy", "abx")
        index.expect("abxy", {0: 2})
        index.expect("abc", {0: 3})

    def test_a_removed_block_can_be_stored_again(self) -> None:
        """A block that is stored again is found, with the blocks after it."""
        index = self._start()
        for _ in range(3):
            index.store("abcd")
            index.expect("abcd", {0: 4})
            index.remove("abcd", "abc", "ab", "a")
            index.expect("abcd", {})
        index.store("ab")
        index.expect("abcd", {0: 2})

    def test_what_another_tier_removes_stays_on_the_device(self) -> None:
        """A block may be in several tiers; an index answers for the device."""
        for tier in (StorageTier.HOST_PINNED, StorageTier.DISK, StorageTier.EXTERNAL):
            index = self._start()
            index.store("abcd")
            index.store("abcd", tier=tier)
            index.remove("abcd", "abc", tier=tier)
            index.expect("abcd", {0: 4})

    def test_a_chain_may_be_long(self) -> None:
        """One event stores 1,500 blocks, another continues from their end, and the whole chain is found."""
        index = self._start()
        letters = "".join(chr(1000 + number) for number in range(1500))
        index.store(letters)
        index.expect(letters, {0: 1500})
        index.store("x", after=letters)
        index.expect(f"{letters}x", {0: 1501})
        index.remove(f"{letters}x", letters)
        index.expect(f"{letters}x", {0: 1499})

    def test_what_another_tier_alone_has_is_not_found(self) -> None:
        """A block of another tier does not count: it must be loaded first."""
        index = self._start()
        index.store("ab")
        index.store("cd", after="ab", tier=StorageTier.HOST_PINNED)
        index.store("xy", tier=StorageTier.DISK)
        if self.one_tier:
            self._counts_all_tiers(index)
            return
        index.expect("abcd", {0: 2})
        index.expect("xy", {})

    def _counts_all_tiers(self, index: IndexDriver) -> None:
        """Expect the blocks of any tier: a block is gone once it has left its last tier."""
        host = StorageTier.HOST_PINNED
        index.expect("abcd", {0: 4})
        index.expect("xy", {0: 2})
        index.store("b", after="a", tier=host)
        index.remove("ab")
        index.expect("abcd", {0: 4})
        index.remove("abcd", tier=host)
        index.expect("abcd", {0: 3})
        index.remove("ab", tier=host)
        index.expect("abcd", {0: 1})
        index.remove("xy", tier=StorageTier.DISK)
        index.expect("xy", {0: 1})

    def test_a_block_is_held_until_its_last_copy_is_removed(self) -> None:
        """A block with copies is found until each copy is removed, if an engine of `backends` publishes copies."""
        self._start()
        copying = [spec for spec in self._specs() if spec.traits.copies]
        if not copying:
            pytest.skip("backends names no engine that publishes copies of a block (vLLM): copies were not checked")
        for spec in copying:
            with self._harness(spec, num_blocks=3) as harness:
                for letter in "aabcde":
                    harness.worker(0).serve(prompt_of(letter, self.block_size))
                    self._check(harness)
            # By hand: a repeated prompt makes no copy with a draft model, and with a hybrid model all copies may go at
            # once.
            index = self._start()
            index.store("abc")
            index.store("abc")
            index.remove("abc", "ab", "a")
            index.expect("abc", {0: 3})
            index.remove("abc", "ab", "a")
            index.expect("abc", {})
            index.store("abc")
            index.clear()
            index.store("abc")
            index.remove("abc", "ab", "a")
            index.expect("abc", {})

    # -------------------------------------------------------------------------------------------- all the while

    def test_a_question_changes_nothing(self) -> None:
        """No look-up changes the answer of another."""
        index = self._start()
        index.store("abcd", 0)
        index.store("abx", 1)
        for _ in range(3):
            index.expect("zzz", {})
            index.expect("abcd", {0: 4, 1: 2})
            index.expect("abx", {0: 2, 1: 3})

    def test_two_indexes_share_nothing(self) -> None:
        """Two indexes have no block in common."""
        first, second = self._start(), self._start()
        if first.index.index is second.index.index:
            refuse(self, "make_index gave the same object twice; each test needs an index of its own")
        first.store("abc")
        second.expect("abc", {})

    def test_it_follows_live_traffic(self) -> None:
        """The index agrees with the reference index, for two engines of each of `backends` under random traffic."""
        self._start()
        for spec in self._specs():
            # A counting filter counts by rank; an index that clears whole workers and counts copies itself may not.
            several = self.tells_ranks_apart and not (self.clears == "worker" and spec.residency == "counted")
            ranks = 2 if several else 1
            # Sliding windows and kept states need longer prompts.
            num_blocks, most = (16, _HYBRID_MOST) if spec.traits.promises_more else (8, 5)
            for seed in range(3):
                program = random_traffic(
                    seed, 60, workers=2, ranks=ranks, most_blocks=most, most_in_a_burst=_MOST_IN_A_BURST
                )
                self._follow(spec, self._profile(spec, num_blocks, 2, ranks), program, seed)
