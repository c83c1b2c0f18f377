"""What a router index promises of TensorRT-LLM's streams: partial blocks, leaves that go without a word, windows, updates."""

from __future__ import annotations

import pytest

from pytest_kvmock.testing.index_driver import Group, IndexDriver
from pytest_kvmock.testing.index_subject import OverIndex


class PartialStreams(OverIndex):
    """The part of `IndexContract` that is about engines of which blocks may be partial."""

    def _start_partial(self) -> IndexDriver:
        """Start with a new index; the test is skipped where no engine of `backends` publishes partial blocks."""
        index = self._start()
        if not any(spec.traits.partial_blocks for spec in self._specs()):
            pytest.skip("backends names no engine that publishes partial blocks (TensorRT-LLM): they were not checked")
        return index

    def _start_updated(self) -> IndexDriver:
        """Start with an index that takes Updated events; skip the test where it does not."""
        index = self._start_partial()
        if not index.index.takes_updates:
            pytest.skip(
                "the index has no takes_updates = True, so it is given no Updated: "
                "that it holds such blocks, and tells levels apart, was not checked"
            )
        return index

    def _attention_group_decides(self, attention: Group, window: Group) -> None:
        """Store the same names in both groups: those of the window go first, then the last one of attention."""
        index = self._start_partial()
        index.store("abc", group=attention)
        index.store("abc", group=window)
        index.remove("abc", "ab", "a", group=window)
        index.expect("abc", {0: 3})
        index.store("xy", group=window)
        index.expect("xy", {})
        index.remove("abc", group=attention)
        index.expect("abc", {0: 2})

    def test_a_partial_block_is_never_promised(self) -> None:
        """It has fewer tokens and a name of its own: no prompt has it as a whole block, and the whole one is another."""
        index = self._start_partial()
        index.store("ab")
        index.store_tail("c", after="ab", group=None)
        index.expect("abc", {0: 2})
        index.store("c", after="ab")
        index.expect("abc", {0: 3})
        index.remove_tail("c", after="ab", group=None)
        index.expect("abc", {0: 3})

    def test_what_left_without_a_word_is_stored_once_more_and_removed_once(self) -> None:
        """A leaf that a partial match took comes back by a second Stored; one Removed takes it, whatever was counted."""
        index = self._start_partial()
        index.store("abc")
        index.store("c", after="ab")
        index.expect("abc", {0: 3})
        index.remove("abc")
        index.expect("abc", {0: 2})
        index.store("c", after="ab")
        index.expect("abc", {0: 3})

    def test_a_shorter_window_is_another_group(self) -> None:
        """Each window stores the same names, and removes them by itself; the longest one, numbered last, counts."""
        self._attention_group_decides((1, "full_attention", None), (0, "sliding_window", 8))

    def test_names_from_2_to_the_63_on_are_one_block_in_every_event(self) -> None:
        """Hashes are unsigned: an index that reads some as signed loses what it stored."""
        index = self._start_partial()
        index.name_roots(p=2**63 + 5, q=2**64 - 1)
        for letters in ("pab", "qab"):
            index.store(letters[0])
            index.store(letters[1:], after=letters[0])
            index.expect(letters, {0: 3})
        index.remove("pab", "pa", "p")
        index.expect("pab", {})
        index.expect("qab", {0: 3})

    def test_a_block_that_is_updated_is_held(self) -> None:
        """An Updated moves a block between tiers or changes its priority; it takes nothing, and links nothing anew."""
        index = self._start_updated()
        index.store("abc")
        index.update("ab", levels=(0, 1))
        index.update("abc", priorities=(35, 80))
        index.expect_tiers("abc", {"device": {0: 2}, "host_pinned": {0: 1}})
        index.update("ab", levels=(1, 0))
        index.expect_tiers("abc", {"device": {0: 3}})
        index.update("abc", levels=(0, 1))
        index.remove("abc")
        index.expect_tiers("abc", {"device": {0: 2}})

    def test_a_longer_block_takes_the_place_of_its_shorter_sibling(self) -> None:
        """A Removed of the partial block, then the Stored of the whole one, as of V2: what is before both is held."""
        index = self._start_partial()
        index.store("ab")
        index.store_tail("c", after="ab", group=None)
        index.remove_tail("c", after="ab", group=None)
        index.expect("abc", {0: 2})
        index.store("cd", after="ab")
        index.expect("abcd", {0: 4})

    def test_layer_groups_have_any_order(self) -> None:
        """The attention group of V2 may be the first; what the other one removes first is held in it."""
        self._attention_group_decides((0, "full_attention", None), (1, "sliding_window", 8))

    def test_a_block_falls_level_by_level_and_comes_back_from_any(self) -> None:
        """What is below the device is the host's, on whichever level; from the last one it is lost with a Removed."""
        index = self._start_updated()
        index.store("abc")
        for levels in ((0, 1), (1, 2)):
            index.update("abc", levels=levels)
            index.expect_tiers("abc", {"device": {0: 2}, "host_pinned": {0: 1}})
        index.update("abc", levels=(2, 0))
        index.expect_tiers("abc", {"device": {0: 3}})
        for levels in ((0, 1), (1, 2)):
            index.update("abc", levels=levels)
        index.remove("abc")
        index.expect_tiers("abc", {"device": {0: 2}})
