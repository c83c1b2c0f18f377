"""How an index must treat facts that no event carries: the pages of a block, and an adapter that was loaded again.

In an engine with context parallelism a page is smaller than a block, and an index that uses the page misses every
look-up.

vLLM names blocks by adapter and path, but events carry only the name: after an adapter is loaded from another path, its
old blocks are no longer served.
"""

from __future__ import annotations

from inspect import isawaitable
from typing import Any, ClassVar, Final

import pytest

from pytest_kvmock.harness.under_test import IndexUnderTest
from pytest_kvmock.testing.index.index_driver import IndexDriver
from pytest_kvmock.testing.index.index_subject import OverIndex
from pytest_kvmock.testing.subject import call_with, refuse
from pytest_kvmock.values.checks import is_integer

_KEYS: Final = {"lora_name": "tenant-a"}
_OTHERS: Final = {"lora_name": "tenant-b"}
_RENAMED: Final = 2**61 + 5
"""The name of a first block that is hashed with another path."""


class ContextParallel(OverIndex):
    """The part of `IndexContract` about engines whose blocks have several pages.

    Attributes:
        dcp: pages per block (`--decode-context-parallel-size` of vLLM, `--dcp-size` of SGLang).
    """

    dcp: ClassVar[int] = 1

    def test_a_block_of_several_pages_is_found(self) -> None:
        """`make_index` is given the page; events have blocks of `dcp` pages. The index notices this, or raises on the
        event.
        """
        self._start()
        if not is_integer(self.dcp, 1) or self.block_size % self.dcp:
            refuse(self, f"dcp must divide block_size, {self.block_size} tokens, into pages; got {self.dcp!r:.80}")
        if self.dcp == 1:
            pytest.skip("dcp is 1: an index that is given the page, and events of larger blocks, was not checked")
        made = call_with(self, self.make_index, "make_index", self.block_size // self.dcp)
        index = IndexDriver(IndexUnderTest(made, bounded=self.bounded), self.block_size, self.run)
        index.names_of = self._names_of()
        try:
            index.store("ab")
        except Exception:  # noqa: BLE001 - any exception counts as a refusal
            return
        half = self.block_size // 2
        index.expect("ab", {0: 2})
        index.expect("a", {0: 1}, tail=half)  # counted in pages the tail is another block, counted in blocks it is none
        index.expect("x", {}, tail=half)


class ReloadedAdapters(OverIndex):
    """The part of `IndexContract` about adapters that are loaded while engines run.

    The test runs if the index has `adapter_loaded(name, path)`. An index that looks blocks up by the engine's own
    hashes cannot be wrong, and other indexes have no way to find out.
    """

    def test_an_adapter_of_another_path_promises_nothing_of_before(self) -> None:
        """After `adapter_loaded` from another path, old blocks of the adapter are not found, and new ones are."""
        index = self._start()
        loaded = getattr(index.index.index, "adapter_loaded", None)
        if not callable(loaded):
            pytest.skip(
                f"{type(index.index.index).__name__} has no adapter_loaded(name, path): what it makes of an adapter "
                "that is loaded from another path was not checked"
            )
        self._load(loaded, "/adapters/one")
        for keys in (_KEYS, _OTHERS):
            index.store("abc", keys=keys)
        index.expect("abc", {0: 3}, keys=_KEYS)
        self._load(loaded, "/adapters/two")
        index.expect("abc", {}, keys=_KEYS)
        index.expect("abc", {0: 3}, keys=_OTHERS)
        if index.names_of is None:
            self._judge_new_blocks(index)

    def _judge_new_blocks(self, index: IndexDriver) -> None:
        """Check that blocks of the new weights are found, and stay when the old blocks are evicted."""
        __tracebackhide__ = True
        index.name_roots(a=_RENAMED)
        index.store("abc", keys=_KEYS)
        index.expect("abc", {0: 3}, keys=_KEYS)
        index.name_roots()
        for chain in ("abc", "ab", "a"):
            index.remove(chain, keys=_KEYS, may_be_refused=True)
        index.expect("abc", {0: 3}, keys=_KEYS)

    def _load(self, loaded: Any, path: str) -> None:
        answer = loaded(_KEYS["lora_name"], path)
        if isawaitable(answer):
            self.run(answer)
