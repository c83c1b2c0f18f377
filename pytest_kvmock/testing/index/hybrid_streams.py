"""Promises of a router index for the cache groups of a hybrid model, as vLLM publishes them."""

from __future__ import annotations

import pytest

from pytest_kvmock.testing.index.index_driver import IndexDriver
from pytest_kvmock.testing.index.index_subject import OverIndex

FULL, WINDOW = (1, "full_attention", None), (0, "sliding_window", 8)
"""Cache groups: number, vLLM's name of the kind, and tokens of the window."""

_SPARSE = (
    ("sliding_window", 8),
    ("chunked_local_attention", None),
    ("mamba", None),
    ("sliding_window_mla", 8),
)
"""Kinds of groups other than attention groups, each with its window."""

_NUMBERS = ((1, 0), (0, 1), (3, 1))
"""Numbers of the attention group and the window group, on workers that serve several models."""


class HybridStreams(OverIndex):
    """The part of `IndexContract` about cache groups.

    An index answers with the blocks that the attention group holds. An exact index answers with fewer where a window
    lacks the blocks that a prompt needs to resume: there, the tests expect a range.
    """

    def _start_hybrid(self) -> IndexDriver:
        """Start a new index; skip the test if no engine of `backends` publishes cache groups."""
        index = self._start()
        if not self.reads_groups and not any(spec.traits.publishes_groups for spec in self._specs()):
            pytest.skip(
                "backends names no engine that publishes cache groups (vLLM's hybrid models), and reads_groups is not "
                "set: they were not checked"
            )
        return index

    def test_a_sparse_group_that_lacks_blocks_hides_none(self) -> None:
        """A window keeps only the last blocks of a prompt; all blocks of the attention group are found."""
        index = self._start_hybrid()
        index.store_kept("abcde", "de", WINDOW)
        index.store("abcde", group=FULL)
        index.expect("abcde", {0: 5})
        index.store_kept("fg", "", WINDOW, after="abcde")
        index.store("fg", after="abcde", group=FULL)
        index.expect("abcdefg", {0: 7}, least={0: 5})

    def test_what_a_sparse_group_alone_has_is_not_found(self) -> None:
        """Blocks of a window are not blocks of the attention group, whether the window kept a whole span or a part."""
        index = self._start_hybrid()
        index.store("ab", group=WINDOW)
        index.store("ab", group=FULL)
        index.store("cd", after="ab", group=WINDOW)
        index.store_kept("efg", "fg", WINDOW, after="abcd")
        index.expect("abcdefg", {0: 2})
        index.remove("ab", group=FULL)
        index.expect("abcd", {0: 1}, least={})

    def test_what_a_sparse_group_removes_stays_with_the_attention_group(self) -> None:
        """Each group has its own copies, under the same hashes."""
        index = self._start_hybrid()
        index.store("abcde", group=WINDOW)
        index.store("abcde", group=FULL)
        index.remove("a", "ab", group=WINDOW)
        index.expect("abcde", {0: 5})
        index.remove("abcde", group=FULL)
        index.expect("abcde", {0: 4})
        index.remove("abc", "abcd", "abcde", group=WINDOW)
        index.expect("abcd", {0: 4}, least={})

    def test_the_attention_group_may_have_any_number(self) -> None:
        """The kind identifies the attention group: a window may have number 0 or a later one. Groups publish in the
        order of their numbers.
        """
        for full, window in ((0, 1), (2, 0), (1, 3)):
            index = self._start_hybrid()
            of_full, of_window = (full, FULL[1], None), (window, *WINDOW[1:])
            for letters, kept, after in (("abcd", "cd", ""), ("efg", "fg", "abcd")):
                if full < window:
                    index.store(letters, after=after, group=of_full)
                index.store_kept(letters, kept, of_window, after=after)
                if full > window:
                    index.store(letters, after=after, group=of_full)
                index.expect(after + letters, {0: len(after + letters)})
            index.remove("abcdefg", group=of_window)
            index.expect("abcdefg", {0: 7}, least={0: 4})
            index.remove("abcdefg", group=of_full)
            index.expect("abcdefg", {0: 6}, least={0: 4})

    def test_parents_are_those_of_the_same_group(self) -> None:
        """A span may begin after a block that its group does not have: the index neither refuses the span nor adds that
        block.
        """
        index = self._start_hybrid()
        index.store("ab", group=FULL)
        index.store_kept("ab", "b", WINDOW)
        index.store("cd", after="ab", group=WINDOW)
        index.store("c", after="ab", group=FULL)
        index.expect("abcd", {0: 3})
        index.remove("ab", group=WINDOW)
        index.store("ef", after="abcd", group=WINDOW)
        index.expect("abcdef", {0: 3}, least={})
        index.store("xy", after="ab", group=WINDOW)
        index.store("xy", after="ab", group=FULL)
        index.expect("abxy", {0: 4})

    def test_groups_of_any_kind_beside_the_attention_group_count_for_nothing(self) -> None:
        """The blocks of any other group do not count; both kinds of attention group do."""
        for full in ("full_attention", "mla_attention"):
            for number, (kind, window) in enumerate(_SPARSE):
                index, of_full, of_other = self._start_hybrid(), (2, full, None), (number % 2, kind, window)
                least: dict[int, int] | None = {} if index.index.answers_reusable else None
                index.store("ab", group=of_full)
                index.store("abc", group=of_other)
                index.expect("abc", {0: 2}, least=least)
                index.remove("ab", "abc", group=of_other)
                index.expect("abc", {0: 2}, least=least)
                index.remove("ab", group=of_full)
                index.expect("abc", {0: 1}, least=least)

    def test_workers_number_their_groups_each_in_its_own_way(self) -> None:
        """The same number may mean another kind on another worker, which may serve another model, or a plain model
        without groups.
        """
        index = self._start_hybrid()
        for worker, (full, window) in enumerate(_NUMBERS):
            index.store("abcd", worker, group=(full, FULL[1], None))
            index.store("abcd", worker, group=(window, *WINDOW[1:]))
        plain = len(_NUMBERS)
        index.store("abcd", plain)
        everyone = range(plain + 1)
        is_exact = index.index.answers_reusable  # missing window blocks may lower its answer, for these workers only
        index.expect("abcd", dict.fromkeys(everyone, 4))
        for worker, (_, window) in enumerate(_NUMBERS):
            index.remove("abcd", "abc", worker=worker, group=(window, *WINDOW[1:]))
        index.expect("abcd", dict.fromkeys(everyone, 4), least={plain: 4} if is_exact else None)
        for worker, (full, _) in enumerate(_NUMBERS):
            index.remove("abcd", worker=worker, group=(full, FULL[1], None))
        index.remove("abcd", "abc", worker=plain)
        index.expect("abcd", {**dict.fromkeys(everyone, 3), plain: 2}, least={plain: 2} if is_exact else None)

    def test_a_prompts_tail_is_no_block(self) -> None:
        """A partial block has its own name and fewer tokens; later events continue from whole blocks."""
        index = self._start_hybrid()
        index.store("ab", group=WINDOW)
        index.store("ab", group=FULL)
        index.store_tail("c", after="ab", group=FULL)
        index.expect("abc", {0: 2})
        index.store("cd", after="ab", group=FULL)
        index.store("cd", after="ab", group=WINDOW)
        index.remove_tail("c", after="ab", group=FULL)
        index.expect("abcd", {0: 4})
