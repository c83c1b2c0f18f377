"""The answers required of a router index for engines with a draft model, whose block names also cover the next
tokens.
"""

from __future__ import annotations

import pytest

from pytest_kvmock.testing.index.index_driver import IndexDriver
from pytest_kvmock.testing.index.index_subject import OverIndex


class DraftStreams(OverIndex):
    """The part of `IndexContract` about names that look ahead (vLLM) and pairs (SGLang).

    An index that is queried by local hashes is queried once for each look-ahead n, with windows of n more tokens. An
    index that hashes tokens itself is queried once.
    """

    def _start_drafts(self) -> IndexDriver:
        """Start a new index; skip the test if no engine of `backends` has block names that look ahead."""
        index = self._start()
        if not self.reads_drafts and not any(spec.traits.looks_ahead for spec in self._specs()):
            pytest.skip(
                "backends names no engine whose names of blocks look ahead (vLLM and SGLang with a draft model), and "
                "reads_drafts is not set: they were not checked"
            )
        return index

    def test_a_block_that_looks_ahead_is_found_with_its_next_tokens(self) -> None:
        """A block is found only if its next tokens match too; the last block of a prompt has no next tokens."""
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
        """Blocks with the same tokens but different next tokens coexist, and each is removed by itself."""
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
        """SGLang's `token_ids` are pairs of neighbours: the last pair of a page has the first token of the next one."""
        index = self._start_drafts()
        index.look_ahead(0, 1, pairs=True)
        index.store("abc", then="d")
        index.expect("abcd", {0: 3})
        index.expect("abx", {0: 1})
        index.remove("abc", then="d")
        index.expect("abcd", {0: 2})

    def test_workers_look_ahead_each_in_its_own_way(self) -> None:
        """A look-up finds a prompt on workers with and without draft models; no worker hides another."""
        index = self._start_drafts()
        for worker, (ahead, pairs) in enumerate(((0, False), (1, False), (1, True), (2, False))):
            index.look_ahead(worker, ahead, pairs=pairs)
            index.store("abc", worker, then="d")
        index.expect("abcd", dict.fromkeys(range(4), 3))
        index.expect("abx", {0: 2, 1: 1, 2: 1, 3: 1})
        for worker in range(1, 4):
            index.remove("ab", worker=worker, then="c")
        index.expect("abcd", {0: 3, 1: 1, 2: 1, 3: 1})

    def test_a_worker_comes_back_with_other_names(self) -> None:
        """A worker is removed, or restarts unannounced if `survives` has "restart"; it returns with another draft
        model, or without one.
        """
        for goes in ("remove_worker", *(("restart",) if "restart" in self.survives else ())):
            for first, second in (
                ((1, False), (0, False)),
                ((0, False), (1, False)),
                ((1, True), (0, False)),
                ((1, False), (2, False)),
            ):
                index = self._start_drafts()
                if goes == "remove_worker" and index.index.remove_worker is None:
                    pytest.skip(
                        f"{index.index.name} has no remove_worker(worker_id): a worker that returns "
                        "with other names was not checked"
                    )
                index.look_ahead(1, 1)
                index.store("abc", 1, then="d")
                index.look_ahead(0, first[0], pairs=first[1])
                index.store("abc", 0, then="d")
                index.expect("abcd", {0: 3, 1: 3})
                getattr(index, goes)(0)
                index.look_ahead(0, second[0], pairs=second[1])
                index.store("ab", 0, then="x")
                index.expect("abxy", {0: 2, 1: 1})
                index.expect("abcd", {0: 1 if second[0] else 2, 1: 3})
