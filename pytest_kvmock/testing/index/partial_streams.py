"""Promises of a router index for TensorRT-LLM's streams: partial blocks, leaves that leave without an event, windows,
updates.
"""

from __future__ import annotations

from typing import Final

import pytest

from pytest_kvmock.testing.drafts import random_traffic
from pytest_kvmock.testing.index.index_driver import Group, IndexDriver
from pytest_kvmock.testing.index.index_subject import OverIndex

_WINDOW: Final = 8
"""Blocks of a short window; prompts are longer."""

_SEEDS: Final = (7, 8)
"""Seeds of traffic in which a short window holds blocks that the longest one has lost."""


class PartialStreams(OverIndex):
    """The part of `IndexContract` about engines whose blocks may be partial."""

    def _start_partial(self) -> IndexDriver:
        """Start a new index; skip the test if no engine of `backends` publishes partial blocks."""
        index = self._start()
        if not any(spec.traits.partial_blocks for spec in self._specs()):
            pytest.skip("backends names no engine that publishes partial blocks (TensorRT-LLM): they were not checked")
        index.says_window = True
        return index

    def _needs_layer_groups(self) -> None:
        """Skip the test if no engine of `backends` has several layer groups, unless `reads_groups` is set."""
        self._start_partial()
        partial = [spec for spec in self._specs() if spec.traits.partial_blocks]
        # In V1 an option can set several windows; in V2 the backend sets the layer groups.
        able = any(spec.traits.publishes_groups or "windows" in spec.options for spec in partial)
        if not self.reads_groups and not able:
            pytest.skip(
                "backends names no engine with several layer groups, and reads_groups is not set: they were not checked"
            )

    def _start_updated(self) -> IndexDriver:
        """Start a new index; skip the test if it takes no Updated events."""
        index = self._start_partial()
        if not index.index.takes_updates:
            pytest.skip(
                "the index has no takes_updates = True, so it is given no Updated: "
                "that it holds such blocks, and tells levels apart, was not checked"
            )
        return index

    def _attention_group_decides(self, attention: Group, window: Group) -> None:
        """Store the same names in both groups; remove those of the window first, then the last one of the attention
        group.
        """
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
        """A partial block has fewer tokens and its own name: no prompt has it as a whole block, and the whole block is
        another one.
        """
        index = self._start_partial()
        index.store("ab")
        index.store_tail("c", after="ab", group=None)
        index.expect("abc", {0: 2})
        index.store("c", after="ab")
        index.expect("abc", {0: 3})
        index.remove_tail("c", after="ab", group=None)
        index.expect("abc", {0: 3})

    def test_what_left_without_a_word_is_stored_once_more_and_removed_once(self) -> None:
        """A leaf that a partial match took comes back with a second Stored; one Removed then removes it, even from an
        index that counts copies.
        """
        index = self._start_partial()
        index.store("abc")
        index.store("c", after="ab")
        index.expect("abc", {0: 3})
        index.remove("abc")
        index.expect("abc", {0: 2})
        index.store("c", after="ab")
        index.expect("abc", {0: 3})

    def test_a_shorter_window_is_another_group(self) -> None:
        """Each window stores and removes the same names separately; the longest window, numbered last, counts."""
        self._needs_layer_groups()
        self._attention_group_decides((1, "full_attention", None), (0, "sliding_window", 8))

    def test_it_follows_traffic_of_two_windows(self) -> None:
        """The index agrees with the reference index for TensorRT-LLM with two windows: the longest window counts."""
        self._start_partial()
        specs = [spec for spec in self._specs() if spec.name == "trtllm"]
        if not specs:
            pytest.skip("backends does not name trtllm: traffic of two windows was not checked")
        windows = (_WINDOW * self.block_size, 16 * _WINDOW * self.block_size)
        for spec in specs:
            of_two = spec.variant("trtllm_two_windows", windows=windows)
            for seed in _SEEDS:
                program = random_traffic(seed, 60, workers=2, most_blocks=12, numbers=2, most_in_a_burst=10)
                self._follow(of_two, self._profile(of_two, 2 * _WINDOW, 2, 1), program, seed)

    def test_names_from_2_to_the_63_on_are_one_block_in_every_event(self) -> None:
        """Hashes are unsigned: an index that reads some as signed loses stored blocks."""
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
        """An Updated moves a block between tiers or changes its priority; it removes no block and links none."""
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

    def test_priorities_say_nothing_of_what_is_held(self) -> None:
        """A block may be stored with any priority from 0 to 100; a low priority does not remove it."""
        index = self._start_partial()
        for letters, after, priority in (("a", "", 80), ("b", "a", 0), ("c", "ab", 100)):
            index.stored_at = (0, priority)
            index.store(letters, after=after)
        index.expect("abc", {0: 3})
        index.remove("abc")
        index.expect("abc", {0: 2})

    def test_what_is_stored_is_on_the_level_that_it_says(self) -> None:
        """A block may be stored on any level below the device, and move to the device by an Updated."""
        index = self._start_updated()
        index.store("ab")
        for level in (1, 2):
            index.stored_at = (level, 35)
            index.store("c", after="ab")
            index.expect_tiers("abc", {"device": {0: 2}, "host_pinned": {0: 1}})
            index.update("abc", levels=(level, 0))
            index.expect_tiers("abc", {"device": {0: 3}})
            index.remove("abc")
            index.expect_tiers("abc", {"device": {0: 2}})

    def test_a_longer_block_takes_the_place_of_its_shorter_sibling(self) -> None:
        """A Removed of the partial block, then a Stored of the whole one, as in V2: the blocks before them stay
        held.
        """
        index = self._start_partial()
        index.store("ab")
        index.store_tail("c", after="ab", group=None)
        index.remove_tail("c", after="ab", group=None)
        index.expect("abc", {0: 2})
        index.store("cd", after="ab")
        index.expect("abcd", {0: 4})

    def test_layer_groups_have_any_order(self) -> None:
        """The attention group of V2 may be the first group; it holds the blocks that the other group removes first."""
        self._needs_layer_groups()
        self._attention_group_decides((0, "full_attention", None), (1, "sliding_window", 8))

    def test_a_block_falls_level_by_level_and_comes_back_from_any(self) -> None:
        """Any level below the device counts as the host; a block leaves the last level with a Removed."""
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
