"""Promises of a bounded router index: which blocks it keeps, by its declared policy."""

from __future__ import annotations

from typing import Final

import pytest

from pytest_kvmock.testing.index.index_driver import IndexDriver
from pytest_kvmock.testing.index.index_subject import KEEPS, OverIndex

_RUNS, _RUNS_OF_MANY = (10, 2), (3, 1)
"""The number of runs, and how many of them may lose a block that should be kept: an index may evict by sampling."""

_FEW, _LEAST = 1000, 4
"""The largest bound that gets many runs, and the smallest that is tested at all."""

_LOOK_UPS: Final = 100
"""How often the chain that must stay is looked up while the index is given as many blocks as it keeps."""

_FOUND: Final = 0.8
"""The least share of the newest half of its blocks that a bounded index must find."""


class Bounds(OverIndex):
    """The part of `IndexContract` about which blocks a bounded index keeps."""

    def test_a_bounded_index_keeps_what_is_looked_up(self) -> None:
        """With `keeps = "recently_used"`: a chain that is looked up repeatedly survives twice as many other blocks as
        the index keeps.
        """
        bounded = self._start_keeping("recently_used")
        if bounded < _LEAST:
            pytest.skip(
                f"bounded is {bounded}: whether what is looked up is kept was not checked below {_LEAST} blocks"
            )
        runs, most_lost = _RUNS if bounded <= _FEW else _RUNS_OF_MANY
        every, lost = max(1, bounded // _LOOK_UPS), 0
        for run in range(runs):
            index, others = self._start(), self._others(bounded, run)
            for letter in others[: run * bounded // 4 // runs]:  # not always the first one
                index.store(letter, 1)
            index.store("pq")
            for number, letter in enumerate(others):
                index.store(letter, number % 3)
                if number % every == 0:
                    index.ask("pq")
            lost += sum(index.ask("pq").values()) < len("pq")
            if lost > most_lost or run + 1 - lost >= runs - most_lost:
                break
        assert lost <= most_lost, (
            f"a chain that was looked up after each {f'{every} ' if every > 1 else ''}of {2 * self._most(bounded):,} "
            f"other blocks was gone in {lost} of {run + 1} runs; keeps is 'recently_used' and bounded {bounded:,}: "
            f"expected in {most_lost} of {runs} at most"
        )

    def test_a_bounded_index_keeps_what_came_last(self) -> None:
        """With `keeps`: of twice as many blocks as the index keeps, it still finds the newest (80 % of the last half of
        its bound).
        """
        bounded = self._start_keeping(*KEEPS)
        index, others = self._start(), self._others(bounded, 0)
        for number, letter in enumerate(others):
            index.store(letter, number % 3)
        newest = others[-max(1, bounded // 2) :]
        found = sum(sum(index.ask(letter).values()) for letter in newest)
        assert found >= _FOUND * len(newest), (
            f"of {len(others):,} blocks, stored one by one, {found:,} of the last {len(newest):,} are found; keeps is "
            f"{self.keeps!r} and bounded {bounded:,}: expected {_FOUND:.0%} of these at least"
        )

    def _most(self, bounded: int) -> int:
        """Return the most blocks that the index keeps."""
        return self.bounded_at_most or bounded

    def _others(self, bounded: int, seed: int) -> str:
        """Return root blocks, twice as many as the index keeps; each seed gives different ones."""
        count = 2 * self._most(bounded)
        first = 20_000 + seed * count % 10_000
        return "".join(chr(first + number) for number in range(count))

    def _start_keeping(self, *policies: str) -> int:
        """Return the bound; skip the test if the index declares none of these policies."""
        index: IndexDriver = self._start()
        if self.bounded is None or self.keeps not in policies:
            wanted = " or ".join(f"keeps = {each!r}" for each in policies)
            pytest.skip(
                f"{type(self).__name__} does not declare bounded and {wanted}: which blocks "
                f"{index.index.name} keeps was not checked"
            )
        return self.bounded
