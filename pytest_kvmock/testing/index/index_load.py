"""Promises of a router index under load: many events, many look-ups, several threads, and more blocks than it keeps.

PYTEST_DONT_REWRITE: each message is complete; pytest would add the condition below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

import pytest

from pytest_kvmock.testing.index.index_driver import IndexDriver
from pytest_kvmock.testing.index.index_subject import OverIndex
from pytest_kvmock.testing.subject import refuse

_PAIRS: Final = 10_000
"""Pairs of store and remove during which `size()`, and the objects reachable from the index, must stay bounded."""

_EVENTS, _EVENTS_ASYNC = 20_000, 100_000
"""Events without a flush; the second number is for an index whose own loop drains its queue."""

_BUDGET_WORKERS, _BUDGET_CHAIN = 4, 8
"""Workers that share one budget, and blocks of each of their chains."""

_REPEATS: Final = 100
"""How often a chain is stored."""

_ROUNDS, _SETTLED, _A_ROUND = 60, 40, 200
"""How often a worker is cleared or removed, the round after which `size()` must not grow, and the blocks of a round: a
table of 8,000 late names is full by then."""

_THREAD_ROUNDS, _THREAD_ROOTS = 12, 8
"""How often workers publish concurrently, and how many chains each time."""

_WRITERS, _CLEARED, _REMOVED, _GONE = (1, 2, 3, 4), 4, (5, 6), (7, 8, 9)
"""Workers that publish concurrently, the one of these that is cleared, the two publishing workers that are removed
meanwhile, and the silent workers that are removed.
"""

_LOOK_UPS: Final = 1000
"""Look-ups of different prompts during which `size()` must stay bounded."""


class UnderLoad(OverIndex):
    """The part of `IndexContract` about many events and look-ups."""

    def test_many_events_may_come_before_a_flush(self) -> None:
        """20,000 events without a flush are all applied, or `dropped()` reports a loss.

        A Removed comes first, a Stored last, and pairs in between; with `async_bound` there are 100,000 events.
        """
        index = self._start()
        index.store("abcd")
        index.expect("abcd", {0: 4})
        letters = [chr(20_000 + number) for number in range((_EVENTS_ASYNC if self.async_bound else _EVENTS) // 2 + 49)]
        stores = [("store", letter) for letter in letters]
        removes = [("remove", letter) for letter in letters[:-100]]
        pairs = [step for pair in zip(stores[100:], removes, strict=True) for step in pair]
        index.publish([("remove", "abcd"), *stores[:100], *pairs, ("store", "xyz")])
        if index.dropped():
            return
        index.expect("abcd", {0: 3})
        index.expect("xyz", {0: 3})
        for letter in letters[-100:]:
            index.expect(letter, {0: 1})
        for letter in letters[: -100 : len(letters) // 100]:
            index.expect(letter, {})

    def test_it_does_not_grow_with_events(self) -> None:
        """While 10,000 blocks are stored and removed, `size()`, if the index has it, and the number of its objects stay
        bounded.
        """
        index = self._start()
        sizes, kept = [], []
        for first in range(0, _PAIRS, _PAIRS // 10):
            letters = [chr(1000 + number) for number in range(first, first + _PAIRS // 10)]
            index.publish([(kind, letter) for letter in letters for kind in ("store", "remove")])
            sizes.append(index.size() or 0)
            kept.append(index.kept())
        grown, most = sizes[-1] - sizes[7], _PAIRS // 10
        assert grown <= most, (
            f"size() is {sizes[7]:,} after {8 * _PAIRS // 10:,} blocks that were stored and removed, and {sizes[-1]:,} "
            f"after {_PAIRS:,}; expected to grow by {most:,} at most"
        )
        # The least growth counts: an index that cleans up from time to time shrinks in between, and a table of late
        # names is full before the end.
        least = min(after - before for before, after in pairwise(kept))
        assert least < _PAIRS // 20, (
            f"the index holds {kept[0]:,} objects after {_PAIRS // 10:,} blocks that were stored and removed, and "
            f"{kept[-1]:,} after {_PAIRS:,}, of which each {_PAIRS // 10:,} left {least:,} or more; expected that what "
            "is removed leaves none: a list or a map of all that came, which size() does not count?"
        )

    def test_it_does_not_grow_with_events_that_repeat(self) -> None:
        """`size()`, if the index has it, does not grow when a chain is stored a hundred times more; counted copies are
        removed as often as they are stored.
        """
        self._start()
        for copies in sorted({spec.traits.copies for spec in self._specs()}):
            spec = next(spec for spec in self._specs() if spec.traits.copies is copies)
            self.traits = spec.traits_at(self.block_size)
            index = self._start()
            if index.size() is None:
                pytest.skip(
                    f"{index.index.name} has no size(): what a chain leaves that is stored often was not checked"
                )
            sizes = []
            for times in (1, _REPEATS):
                for _ in range(times):
                    index.store("abcd")
                for _ in range(times if copies else 0):
                    index.remove("abcd", "abc", "ab", "a")
                sizes.append(index.size() or 0)
            what = "stored and as often removed, copies counted" if copies else "stored, and not removed"
            assert sizes[1] <= sizes[0], (
                f"size() is {sizes[0]:,} after a chain of 4 blocks was {what}, once, and {sizes[1]:,} after {_REPEATS} "
                "times more; expected no growth"
            )
            index.expect("abcd", {} if copies else {0: 4})

    def test_it_does_not_grow_with_workers_that_go(self) -> None:
        """`size()`, if the index has it, stays bounded while workers are cleared or removed."""
        index = self._start()
        if index.size() is None:
            pytest.skip(f"{index.index.name} has no size(): what workers leave that go was not checked")
        for what in ("a Cleared", "remove_worker(0)")[: 1 + (index.index.remove_worker is not None)]:
            sizes = []
            for first in range(0, _ROUNDS * _A_ROUND, _A_ROUND):
                index.store("".join(chr(1000 + number) for number in range(first, first + _A_ROUND)))
                index.clear() if what == "a Cleared" else index.remove_worker(0)
                if first // _A_ROUND in (_SETTLED - 1, _ROUNDS - 1):
                    sizes.append(index.size() or 0)
            assert sizes[1] - sizes[0] <= _A_ROUND, (
                f"size() is {sizes[0]:,} after {_SETTLED} times {_A_ROUND} blocks were stored and {what} came, and "
                f"{sizes[1]:,} after {_ROUNDS} times; expected to grow by {_A_ROUND} at most"
            )

    def test_it_does_not_grow_with_look_ups(self) -> None:
        """`size()`, if the index has it, stays bounded during look-ups of 1,000 prompts, found or not."""
        index = self._start()
        if index.size() is None:
            pytest.skip(
                f"{index.index.name} has no size(): whether it grows over {_LOOK_UPS:,} look-ups was not checked"
            )
        index.store("ab")
        sizes = []
        for first in range(0, _LOOK_UPS, _LOOK_UPS // 5):
            for number in range(first, first + _LOOK_UPS // 5):
                index.ask(f"{'ab' * (number % 2)}{chr(1000 + number)}")
            sizes.append(index.size() or 0)
        assert sizes[-1] - sizes[0] <= _LOOK_UPS // 5, (
            f"size() is {sizes[0]:,} after {_LOOK_UPS // 5:,} look-ups, and {sizes[-1]:,} after five times that; "
            f"expected to grow by {_LOOK_UPS // 5:,} at most"
        )

    def test_look_ups_may_come_from_threads(self) -> None:
        """With `threads`: look-ups are right while another thread applies events, also for workers that the events do
        not concern.
        """
        index = self._start()
        if not self.threads:
            pytest.skip(
                f"{type(self).__name__}.threads is not set: look-ups while another thread applies events were not "
                "checked"
            )
        if index.index.is_async:
            refuse(self, "threads = True is for an index that is not async; an async one is asked in its loop")
        index.store("abcd", 1)
        index.expect("abcd", {1: 4})
        letters = "".join(chr(1000 + number) for number in range(20))

        events = (
            lambda: index.store("abcd", 0),
            lambda: index.store(letters, 2),
            lambda: index.remove("abcd", "abc", worker=0),
            lambda: index.remove(letters, worker=2),
            lambda: index.clear(0),
            lambda: index.remove_worker(2),
        )
        index.ask_meanwhile("abcd", events * 50, {1: range(4, 5), 0: range(5)})
        index.expect("abcd", {1: 4})
        index.store("abc", 0)
        index.expect("abcd", {0: 3, 1: 4})

    def test_events_may_come_from_threads(self) -> None:
        """With `threads`: one thread per worker applies events, one removes workers, others look up.

        Afterwards the answers are right for some order of these calls. Events applied before the last removal of their
        worker have no effect.
        """
        index = self._start()
        if not self.threads:
            pytest.skip(
                f"{type(self).__name__}.threads is not set: events of several workers that are applied at once were "
                "not checked"
            )
        if index.index.is_async:
            refuse(self, "threads = True is for an index that is not async; an async one is asked in its loop")
        removed = () if index.index.remove_worker is None else (*_REMOVED, *_GONE)
        for number in range(_THREAD_ROUNDS):
            index, roots = self._start(), [chr(1000 + _THREAD_ROOTS * number + each) for each in range(_THREAD_ROOTS)]
            index.store("abcd", 0)
            for worker in _GONE:
                index.store("abcd", worker)
            index.expect("abcd", dict.fromkeys((0, *_GONE), 4))  # applies events that wait for a flush
            # All workers store the same chains, so that their threads change the same part of an index, whatever its
            # structure.
            steps: list[tuple[str, ...]] = [("store", "abcd"), ("remove", "abcd")]
            for root in roots:
                steps += [("store", f"{root}a"), ("store", "bc", f"{root}a"), ("remove", f"{root}abc")]
            streams = {worker: index.events_of(steps, worker) for worker in _WRITERS}
            streams[_CLEARED] += index.events_of([("clear",), ("store", "abc")], _CLEARED)
            chains = [f"{chr(ord(root) + more)}xy" for root in roots for more in (0, 20_000, 40_000)]
            for worker in _REMOVED:  # only roots: then the worker has all blocks stored after its last removal
                streams[worker] = index.events_of([("store", chain) for chain in chains], worker)
            gone: dict[int, int] = {}
            at_once = partial(index.apply_at_once, streams, removed, gone)
            index.ask_meanwhile("abcd", [at_once], {0: range(4, 5), **dict.fromkeys((*_WRITERS, *_GONE), range(5))})
            index.expect("abcd", {0: 4, **dict.fromkeys(_WRITERS, 3), **({} if removed else dict.fromkeys(_GONE, 4))})
            kept = {worker: index.expect_the_last_of(chains, worker, gone.get(worker, 0)) for worker in _REMOVED}
            self._expect_names(index, roots, chains, kept)

    def _expect_names(
        self, index: IndexDriver, roots: Sequence[str], chains: Sequence[str], kept: Mapping[int, Sequence[str]]
    ) -> None:
        """Check that the index still finds each block by its name: blocks removed now are gone, and the rest is
        found.
        """
        __tracebackhide__ = True
        held = [worker for worker in _WRITERS if worker != _CLEARED]
        for root in roots:
            removed = {worker: 1 for worker, chains in kept.items() if f"{root}xy" in chains}
            index.expect(f"{root}abc", {**dict.fromkeys(held, 3), **removed})
            for worker in held:
                index.remove(f"{root}ab", worker=worker)
            index.expect(f"{root}abc", {**dict.fromkeys(held, 2), **removed})
        for worker, whole in kept.items():
            for chain in whole:
                index.remove(chain, worker=worker)
        for chain in chains:
            removed = {worker: 2 for worker, whole in kept.items() if chain in whole}
            index.expect(chain, {**removed, **(dict.fromkeys(held, 1) if chain[0] in roots else {})})

    def test_a_bound_holds_for_all_workers_together(self) -> None:
        """With `bounded_at_most`: `size()`, or else the blocks that look-ups find, stays within one budget for all
        workers.
        """
        index = self._start()
        most = self.bounded_at_most
        if most is None:
            pytest.skip(f"{type(self).__name__}.bounded_at_most is not set: how much it keeps at most was not checked")
        count = 2 * -(-most // (_BUDGET_WORKERS * _BUDGET_CHAIN)) + 1  # chains per worker: twice its share of the bound
        chains: list[str] = []
        for worker in range(_BUDGET_WORKERS):
            firsts = (chr(1000 + worker * count + number) for number in range(count))
            own = [f"{first}{'abcdefgh'[: _BUDGET_CHAIN - 1]}" for first in firsts]
            index.publish((("store", letters) for letters in own), worker)
            chains += own
        size, stored = index.size(), len(chains) * _BUDGET_CHAIN
        assert size is None or size <= most, (
            f"size() is {size:,} after {_BUDGET_WORKERS} workers stored {stored:,} blocks together; bounded_at_most "
            f"is {most:,}"
        )
        if size is None:
            found = sum(sum(index.ask(letters).values()) for letters in chains)
            assert found <= most, (
                f"look-ups find {found:,} of {stored:,} blocks that {_BUDGET_WORKERS} workers stored together; "
                f"bounded_at_most is {most:,}"
            )

    def test_a_bounded_index_forgets_and_never_invents(self) -> None:
        """With `bounded`: beyond this number of blocks, look-ups may find fewer blocks than the worker holds, but never
        more.
        """
        index = self._start()
        if self.bounded is None:
            pytest.skip(
                f"{type(self).__name__}.bounded is not set: an index that forgets what is stored beyond a bound was "
                "not checked"
            )
        length = max(2, min(10, self.bounded // 2))
        chains = [
            f"{chr(1000 + number)}{'abcdefghi'[: length - 1]}" for number in range(2 * self.bounded // length + 20)
        ]
        kept = [length - 2 * (number % 3 > 0) for number in range(len(chains))]
        for number, letters in enumerate(chains):
            index.store(letters, number % 2)
        for number, letters in enumerate(chains):
            if kept[number] < length:
                index.remove(letters, letters[:-1], worker=number % 2)
        for number, letters in enumerate(chains):
            index.expect(letters, {number % 2: kept[number]} if kept[number] else {})
            index.expect(letters[1:], {})
        index.store("z", 0, after=chains[0])
        index.expect("z", {})
        index.clear(0)
        for number, letters in enumerate(chains):
            index.expect(letters, {1: kept[number]} if number % 2 and kept[number] else {})
        index.store("yz", 0)
        index.expect("yz", {0: 2})
