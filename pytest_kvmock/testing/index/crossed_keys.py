"""Blocks that a router index must tell apart when prompts carry several keys at once.

Adapters, salts and images in every combination, and block names that look ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final, TypeAlias

import pytest

from pytest_kvmock.testing.index.distinct_blocks import DistinctBlocks
from pytest_kvmock.testing.index.draft_streams import DraftStreams
from pytest_kvmock.testing.index.index_driver import IndexDriver

_Keys: TypeAlias = Mapping[str, Any]

_CROSSED: Final[Mapping[str, tuple[Any, Any]]] = {
    "lora_name": ("tenant-a", "tenant-b"),
    "cache_salt": ("salt-a", "salt-b"),  # different from the adapters' names: vLLM would hash equal ones alike
    "multimodal": ([("1c" * 32, 0, 1)], [("2d" * 32, 0, 1)]),
}


def _each_with_each(names: Sequence[str]) -> list[_Keys]:
    """Return every combination of these keys: for each key no value, or one of its two."""
    values = ((None, *_CROSSED[name]) for name in names)
    return [
        {name: value for name, value in zip(names, chosen, strict=True) if value is not None}
        for chosen in product(*values)
    ]


class CrossedKeys(DistinctBlocks, DraftStreams):
    """The part of `IndexContract` about tenants with several keys."""

    def test_keys_are_told_apart_each_with_each(self) -> None:
        """Prompts of the same tokens share no block unless adapter, salt and images are all the same.

        On one worker and on several.
        """
        for index, crossed in self._start_crossed():
            self._expect_none_shared(index, crossed)

    def test_keys_are_told_apart_where_names_look_ahead(self) -> None:
        """The same with a draft model: events carry the keys, and names look ahead."""
        self._start_drafts()
        for pairs in (False, True):
            for index, crossed in self._start_crossed():
                for worker in range(len(crossed) + 1):
                    index.look_ahead(worker, 1, pairs=pairs)
                self._expect_none_shared(index, crossed)

    def _start_crossed(self) -> Iterator[tuple[IndexDriver, list[_Keys]]]:
        """Start an index for each form in which engines of `backends` publish keys; yield it with all combinations of
        the keys that the block names depend on.

        The test is skipped if look-ups take no `extra`, or no engine names blocks by two kinds of keys.
        """
        index = self._start()
        if not index.index.plain.takes_extra:
            pytest.skip(
                f"{index.index.plain.name}(tokens) of {index.index.name} takes no `extra`: prompts with "
                "several keys were not checked"
            )
        forms: dict[tuple[tuple[str, ...], frozenset[str]], None] = {}
        for spec in self._specs():
            names = tuple(name for name in _CROSSED if name in spec.prompt_keys)
            form = self._form(spec, {name: _CROSSED[name][0] for name in names}) if len(names) > 1 else None
            if form is not None:
                forms[names, form] = None
        if not forms:
            pytest.skip(
                "no engine of backends names blocks by two kinds of keys: prompts with several were not checked"
            )
        for names, form in forms if index.index.plain.takes_tokens else [max(forms, key=lambda each: len(each[0]))]:
            index = self._start()
            index.carries = form
            yield index, _each_with_each(names)

    def _expect_none_shared(self, index: IndexDriver, crossed: Sequence[_Keys]) -> None:
        """Store each combination on a worker of its own, and all but the last on worker 0; look up all of them."""
        __tracebackhide__ = True
        for number, keys in enumerate(crossed, 1):
            index.store("ab", number, keys=keys, then="c")
            if number < len(crossed):
                index.store("ab", 0, keys=keys, then="c")
        for number, keys in enumerate(crossed, 1):
            index.expect("abc", {number: 2, **({0: 2} if number < len(crossed) else {})}, keys=keys)
        index.remove("ab", worker=0, keys=crossed[-2], then="c")
        for number, keys in ((len(crossed) - 2, crossed[-3]), (len(crossed) - 1, crossed[-2])):
            index.expect("abc", {number: 2, 0: 2 if keys is crossed[-3] else 1}, keys=keys)
