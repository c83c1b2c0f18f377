"""Promises of a router index at production size: all blocks of a fleet are found, and the cost of a look-up stays in
proportion to its blocks.

PYTEST_DONT_REWRITE: each message is complete; pytest would add the condition below it.
"""

from __future__ import annotations

from time import process_time
from typing import ClassVar, Final

import pytest

from pytest_kvmock.harness.under_test import Scores, agree, first_difference
from pytest_kvmock.oracle.hygiene.text import worker_text
from pytest_kvmock.testing.index.index_driver import IndexDriver
from pytest_kvmock.testing.index.index_subject import OverIndex
from pytest_kvmock.testing.subject import refuse
from pytest_kvmock.values.checks import is_integer

_WORKERS: Final = 64
"""Workers of the fleet."""

_RANKS: Final = 8
"""Data-parallel ranks of each worker."""

_LEAST_TIMED: Final = 20_000
"""The fewest blocks with which look-ups are timed: with fewer, the times are too short to compare."""

_MOST_TIMES: Final = 20
"""The most that the time of a look-up may grow, as a factor, when the blocks grow tenfold."""

_BEST_OF: Final = 3

_HOPELESS: Final = 3
"""A look-up that exceeds the limit by this factor is not timed again."""

_SHARED: Final = "xx"
"""The blocks with which every prompt begins."""


class AtSize(OverIndex):
    """The part of `IndexContract` about large indexes: what they hold, and what a look-up costs."""

    size_blocks: ClassVar[int] = 100_000

    def test_it_holds_what_a_fleet_has(self) -> None:
        """Look-ups find all of `size_blocks` blocks in ten chains on one worker, and a tenth as many over 64 workers
        with 8 ranks.
        """
        index, ranks = self._start_of_size(), _RANKS if self.tells_ranks_apart else 1
        length = self.size_blocks // 10
        each = max(1, length // (_WORKERS * ranks))
        self._fill(index, ranks, length, each)
        for number in range(1, 10):
            index.store(_chain(length, number)[len(_SHARED) :], after=_SHARED)
        for worker, rank in ((0, ranks - 1), (31, 0), (_WORKERS - 1, ranks - 1)):
            self._expect(index, ranks, _of_rank(worker, rank, each), worker, rank=rank)
        chain = _chain(length)
        self._expect(index, ranks, chain, 0, rank=0)
        self._expect(index, ranks, _chain(length, 9), 0, rank=0)
        index.remove(chain[: len(_SHARED) + 1])  # the rest of the chain is below it
        self._expect(index, ranks, chain, 0, rank=0, at_most=len(_SHARED))
        index.clear(_WORKERS - 1)
        if index.index.remove_worker is not None:
            index.remove_worker(0)
            index.expect(chain[len(_SHARED) :], {})

    def test_a_look_up_costs_no_more_than_its_share(self) -> None:
        """A look-up takes at most 20 times the CPU time when the chain, stored block by block, and the index have ten
        times the blocks.
        """
        self._start_of_size()
        if self.size_blocks < _LEAST_TIMED:
            pytest.skip(
                f"{type(self).__name__}.size_blocks is below {_LEAST_TIMED:,}: how a look-up grows with the blocks "
                "that there are was not checked"
            )
        few, many = self.size_blocks // 100, self.size_blocks // 10
        least = float("inf")
        for _ in range(_BEST_OF):
            least = min(least, self._seconds(many) / self._seconds(few))
            if least <= _MOST_TIMES or least > _HOPELESS * _MOST_TIMES:
                break
        assert least <= _MOST_TIMES, (
            f"a look-up of a chain of {many:,} blocks, stored one by one, among {2 * many:,}, takes {least:.0f} times "
            f"as long as one of {few:,}, among {2 * few:,}; expected at most {_MOST_TIMES} times for ten times the "
            "blocks: does it walk from the root, or hash what stands before, once more for each block?"
        )

    def _start_of_size(self) -> IndexDriver:
        __tracebackhide__ = True
        index = self._start()
        if not is_integer(self.size_blocks, 1000):
            refuse(self, f"size_blocks must be an integer of at least 1000 (blocks), got {self.size_blocks!r:.80}")
        return index

    def _fill(self, index: IndexDriver, ranks: int, length: int, each: int, *, one_by_one: bool = False) -> None:
        """Store a chain of `length` blocks on worker 0, and a separate chain of `each` blocks on each rank of each
        worker.
        """
        __tracebackhide__ = True
        for worker in range(_WORKERS):
            for rank in range(ranks):
                index.store(_of_rank(worker, rank, each), worker, rank=rank)
        own = _chain(length)[len(_SHARED) :]
        if one_by_one:
            index.store_each(own, after=_SHARED)
        else:
            index.store(own, after=_SHARED)

    def _expect(
        self, index: IndexDriver, ranks: int, letters: str, worker: int, *, rank: int, at_most: int | None = None
    ) -> None:
        """Check that a look-up finds all blocks, or the first `at_most`, on the rank that holds them, and the shared
        blocks everywhere.
        """
        __tracebackhide__ = True
        due: Scores = {(each, of): len(_SHARED) for each in range(_WORKERS) for of in range(ranks)}
        due[worker, rank] = len(letters) if at_most is None else at_most
        answer = index.ask(letters)
        if agree(answer, due):
            return
        wrong = first_difference(answer, {} if index.index.may_forget else due, due)
        if wrong is not None:
            whose, of, found, right = wrong
            due_here = right.stop - 1
            hint = ""
            if found == due_here - 1:
                hint = ": the last block of it is lacking, of which nothing was removed"
            elif found < due_here:
                hint = f": block {found + 1:,} of it is the first that is lacking, of which nothing was removed"
                if not index.index.may_forget:
                    hint += ". An index that forgets on purpose declares how much it keeps at least: bounded"
            raise AssertionError(
                f"with {self.size_blocks:,} blocks (size_blocks) over {_WORKERS} workers of {ranks} ranks, a look-up "
                f"of {len(letters):,} blocks finds {found:,} of {worker_text(whose, of)}; expected {due_here:,}{hint}"
            )

    def _seconds(self, blocks: int) -> float:
        """Return the CPU seconds of a look-up of a chain of `blocks` blocks in an index of twice as many: the least of
        three.
        """
        __tracebackhide__ = True
        index = self._start()
        self._fill(index, 1, blocks, max(1, blocks // _WORKERS), one_by_one=True)
        chain, took = _chain(blocks), []
        for _ in range(_BEST_OF):
            began = process_time()
            index.ask(chain)
            took.append(process_time() - began)
        return max(min(took), 1e-6)


def _chain(length: int, number: int = 0) -> str:
    """Return chain `number` of worker 0, of `length` blocks. All chains share their first blocks."""
    first = chr(20_000 + number) if number else ""
    return _SHARED + first + "".join(chr(1000 + at % 5000) for at in range(length - len(first)))


def _of_rank(worker: int, rank: int, length: int) -> str:
    """Return the chain of a rank."""
    return _SHARED + chr(10_000 + worker * _RANKS + rank) + "".join(chr(1000 + number) for number in range(length - 1))
