"""What a router index promises under load: many events, many look-ups, several threads, and more blocks than it keeps.

PYTEST_DONT_REWRITE: each message says all; below it pytest would put the condition.
"""

from __future__ import annotations

from typing import Final

import pytest

from pytest_kvmock.testing.index_subject import OverIndex
from pytest_kvmock.testing.subject import refuse

_PAIRS: Final = 10_000
"""Pairs of store and remove over which `size()` must stay bounded."""

_LOOK_UPS: Final = 1000
"""Look-ups of different prompts over which `size()` must stay bounded."""


class UnderLoad(OverIndex):
    """The part of `IndexContract` that is about how much it is given."""

    def test_ten_thousand_events_may_come_before_a_flush(self) -> None:
        """Ten thousand events without a flush are all applied: a Removed first, a Stored last, pairs between."""
        index = self._start()
        index.store("abcd")
        index.expect("abcd", {0: 4})
        letters = [chr(1000 + number) for number in range(5049)]
        stores = [("store", letter) for letter in letters]
        removes = [("remove", letter) for letter in letters[:-100]]
        pairs = [step for pair in zip(stores[100:], removes, strict=True) for step in pair]
        index.publish([("remove", "abcd"), *stores[:100], *pairs, ("store", "xyz")])
        index.expect("abcd", {0: 3})
        index.expect("xyz", {0: 3})
        for letter in letters[-100:]:
            index.expect(letter, {0: 1})
        for letter in letters[:-100:50]:
            index.expect(letter, {})

    def test_it_does_not_grow_with_events(self) -> None:
        """`size()`, where the index has it, stays bounded over 10,000 blocks that are stored and removed."""
        index = self._start()
        if index.size() is None:
            pytest.skip(
                f"{index.index.name} has no size(): whether it grows over {_PAIRS:,} blocks that are stored and removed was "
                "not checked"
            )
        sizes = []
        for first in range(0, _PAIRS, _PAIRS // 10):
            letters = [chr(1000 + number) for number in range(first, first + _PAIRS // 10)]
            index.publish([(kind, letter) for letter in letters for kind in ("store", "remove")])
            sizes.append(index.size() or 0)
        grown, most = sizes[-1] - sizes[4], _PAIRS // 4
        assert grown <= most, (
            f"size() is {sizes[4]:,} after {_PAIRS // 2:,} blocks that were stored and removed, and {sizes[-1]:,} after "
            f"{_PAIRS:,}; expected to grow by {most:,} at most"
        )

    def test_it_does_not_grow_with_workers_that_go(self) -> None:
        """`size()`, where the index has it, stays bounded over workers that are cleared, or removed."""
        index = self._start()
        if index.size() is None:
            pytest.skip(f"{index.index.name} has no size(): what workers leave that go was not checked")
        for what in ("a Cleared", "remove_worker(0)")[: 1 + (index.index.remove_worker is not None)]:
            sizes = []
            for first in range(0, 1000, 200):
                index.store("".join(chr(1000 + number) for number in range(first, first + 200)))
                index.clear() if what == "a Cleared" else index.remove_worker(0)
                sizes.append(index.size() or 0)
            assert sizes[-1] - sizes[0] <= 200, (
                f"size() is {sizes[0]:,} after 200 blocks were stored and {what} came, and {sizes[-1]:,} after five times "
                "that; expected to grow by 200 at most"
            )

    def test_it_does_not_grow_with_look_ups(self) -> None:
        """`size()`, where the index has it, stays bounded over look-ups of 1,000 prompts, found or not."""
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
            f"size() is {sizes[0]:,} after {_LOOK_UPS // 5:,} look-ups, and {sizes[-1]:,} after five times that; expected to "
            f"grow by {_LOOK_UPS // 5:,} at most"
        )

    def test_look_ups_may_come_from_threads(self) -> None:
        """With `threads`: a look-up is right while another thread applies events, for workers that these are not about too."""
        index = self._start()
        if not self.threads:
            pytest.skip(
                f"{type(self).__name__}.threads is not set: look-ups while another thread applies events were not checked"
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

    def test_a_bounded_index_forgets_and_never_invents(self) -> None:
        """With `bounded`: beyond so many blocks look-ups may find fewer, and never more, than the worker holds."""
        index = self._start()
        if self.bounded is None:
            pytest.skip(
                f"{type(self).__name__}.bounded is not set: an index that forgets what is stored beyond a bound was not checked"
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
