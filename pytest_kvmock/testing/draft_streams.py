"""What a router index promises of engines with a draft model, whose blocks are named by the next tokens, too."""

from __future__ import annotations

import pytest

from pytest_kvmock.testing.index_driver import IndexDriver
from pytest_kvmock.testing.index_subject import OverIndex


class DraftStreams(OverIndex):
    """The part of `IndexContract` that is about names that look ahead (vLLM) and pairs (SGLang).

    An index by local hashes is asked once for each number of tokens that names look at, by windows of so many tokens
    more; one that
    hashes tokens itself is asked once.
    """

    def _start_drafts(self) -> IndexDriver:
        """Start with a new index; the test is skipped where no name of an engine of `backends` looks ahead."""
        index = self._start()
        if not self.reads_drafts and not any(spec.traits.looks_ahead for spec in self._specs()):
            pytest.skip(
                "backends names no engine whose names of blocks look ahead (vLLM and SGLang with a draft model), and "
                "reads_drafts is not set: they were not checked"
            )
        return index

    def test_a_block_that_looks_ahead_is_found_with_its_next_tokens(self) -> None:
        """A block is found if the next tokens are the same too; the last one of a prompt has none after it."""
        for ahead in (1, 2):
            index = self._start_drafts()
            index.look_ahead(0, ahead)
            index.store("abc", then="d")
            index.expect("abcd", {0: 3})
            index.expect("abc", {0: 2})
            index.expect("abx", {0: 1})
            index.store("d", after="abc", then="e")
            index.expect("abcde", {0: 4})

    def test_a_twin_is_another_block(self) -> None:
        """Blocks of the same tokens with other next ones stand side by side, and each is removed by itself."""
        index = self._start_drafts()
        index.look_ahead(0, 1)
        index.store("ab", then="c")
        index.store("b", after="a", then="x")
        index.expect("abc", {0: 2})
        index.expect("abx", {0: 2})
        index.expect("abz", {0: 1})
        index.remove("ab", then="c")
        index.expect("abc", {0: 1})
        index.expect("abx", {0: 2})
        index.remove("ab", then="x")
        index.expect("abx", {0: 1})

    def test_a_page_of_pairs_is_found_with_its_next_token(self) -> None:
        """SGLang's `token_ids` are pairs of neighbours: the last one has the first token of the next page."""
        index = self._start_drafts()
        index.look_ahead(0, 1, pairs=True)
        index.store("abc", then="d")
        index.expect("abcd", {0: 3})
        index.expect("abx", {0: 1})
        index.remove("abc", then="d")
        index.expect("abcd", {0: 2})

    def test_workers_look_ahead_each_in_its_own_way(self) -> None:
        """One prompt is looked up on workers without a draft model, and with others: none hides another."""
        index = self._start_drafts()
        for worker, (ahead, pairs) in enumerate(((0, False), (1, False), (1, True), (2, False))):
            index.look_ahead(worker, ahead, pairs=pairs)
            index.store("abc", worker, then="d")
        index.expect("abcd", dict.fromkeys(range(4), 3))
        index.expect("abx", {0: 2, 1: 1, 2: 1, 3: 1})
        for worker in range(1, 4):
            index.remove("ab", worker=worker, then="c")
        index.expect("abcd", {0: 3, 1: 1, 2: 1, 3: 1})
