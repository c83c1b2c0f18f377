"""Tests of what a router index must tell apart: hashes and tokens that are nearly the same, and prompts with different
keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import pytest

from pytest_kvmock.engines.backends import BackendSpec, EngineProfile
from pytest_kvmock.harness.router_harness import RouterHarness
from pytest_kvmock.testing.index.index_driver import IndexDriver, prompt_of
from pytest_kvmock.testing.index.index_subject import OverIndex
from pytest_kvmock.values.events import RouterEvent
from pytest_kvmock.values.programs.near_hashes import TRUNCATIONS

_IMAGES: Final = ("1c" * 32, "2d" * 32)
"""Identifiers of multimodal items in vLLM's form, 64 hexadecimal digits."""


_Tokens: TypeAlias = tuple[int, ...]


def _near_tokens(block_size: int) -> list[tuple[_Tokens, _Tokens]]:
    """Return pairs of different blocks, as tokens, that an index confuses if it keeps only a part of each."""
    tokens = tuple(range(1, block_size + 1))
    pairs = [(tokens, tokens[::-1])]  # the order
    if block_size >= 4:
        pairs += [(tokens, (1, 1, 4, 4, *tokens[4:]))]  # the sum, the first and the last
        pairs += [((1, 1, 4, 4, *tokens[4:]), (1, 4, 4, 4, *tokens[4:]))]  # the set
    if block_size >= 2:
        pairs += [((1, 23, *tokens[2:]), (12, 3, *tokens[2:]))]  # the digits in a row
    for place in sorted({0, block_size // 2, block_size - 1}):  # the low 16 bits, or all tokens but one
        high = tokens[place] + 2**16
        pairs.append((tokens, (*tokens[:place], high, *tokens[place + 1 :])))
    return [pair for pair in pairs if pair[0] != pair[1]]


class DistinctBlocks(OverIndex):
    """The part of `IndexContract` about blocks that are nearly the same."""

    def test_local_hashes_are_compared_whole(self) -> None:
        """Blocks whose local hashes agree in 32, 53 or 63 bits are two blocks."""
        for kept in TRUNCATIONS:
            index = self._start()
            index.near("local", kept)
            index.store("pa", 0)
            index.expect("pa", {0: 2})
            index.expect("q", {})
            index.expect("qa", {})
            index.store("q", 1)
            index.expect("pa", {0: 2})
            index.expect("qa", {1: 1})

    def test_block_hashes_are_compared_whole(self) -> None:
        """Blocks whose block hashes agree in 32, 53 or 63 bits are two blocks, and two parents."""
        for kept in TRUNCATIONS:
            index = self._start()
            index.near("block", kept)
            index.store("p")
            index.store("q")
            index.store("a", after="p")
            index.store("b", after="q")
            for letters, blocks in (("pa", 2), ("qb", 2), ("pb", 1), ("qa", 1)):
                index.expect(letters, {0: blocks})
            index.remove("qb", "q")
            index.expect("pa", {0: 2})
            index.expect("qb", {})

    def test_blocks_of_nearly_the_same_tokens_are_told_apart(self) -> None:
        """Blocks are different even if only the order, counts, split of digits or high bits of their tokens differ."""
        self._specs()  # checks that they allow blocks of this size
        for first, second in _near_tokens(self.block_size):
            index = self._start()
            index.near_tokens(first, second)
            index.store("pa", 0)
            index.expect("pa", {0: 2})
            index.expect("qa", {})
            index.store("q", 1)
            index.expect("pa", {0: 2})
            index.expect("qa", {1: 1})

    def test_adapters_are_told_apart(self) -> None:
        """Blocks of the same tokens under two LoRA adapters, or under none, are different blocks."""
        self._expect_apart({"lora_name": "adapter-a"}, {"lora_name": "adapter-b"})
        self._expect_apart({"lora_name": "adapter-a"}, {"lora_name": "Adapter-A"})

    def test_salts_are_told_apart(self) -> None:
        """Blocks of the same tokens under two cache salts, or under none, are different blocks."""
        self._expect_apart({"cache_salt": "tenant-1"}, {"cache_salt": "tenant-2"})
        self._expect_apart({"cache_salt": "tenant-1"}, {"cache_salt": "Tenant-1"})

    def test_adapters_with_salts_are_told_apart(self) -> None:
        """An adapter and a salt are two names: they may be neither joined nor swapped."""
        for joint in ("", "-", ":", "/", "|"):
            self._expect_apart(
                {"lora_name": f"a{joint}b", "cache_salt": "c"}, {"lora_name": "a", "cache_salt": f"b{joint}c"}
            )
        self._expect_apart({"lora_name": "a", "cache_salt": "b"}, {"lora_name": "b", "cache_salt": "a"})

    def test_several_multimodal_items_are_told_apart(self) -> None:
        """Two images in one block both count, and an image that spans two blocks counts in both."""
        self._specs()
        one, other, third = *_IMAGES, "3e" * 32
        size = self.block_size
        if size >= 2:
            both = {"multimodal": [(one, 0, 1), (other, 1, 1)]}
            for images in ((one, third), (third, other)):  # not a different order, as Dynamo's local hashes sort them
                self._expect_apart(both, {"multimodal": [(image, place, 1) for place, image in enumerate(images)]})
        for index in self._start_keyed({"multimodal": [(one, size - 1, 2)]}):
            over_two, in_one = ({"multimodal": [(one, size - 1, length)]} for length in (2, 1))
            index.store("abc", 0, keys=over_two)
            index.expect("abc", {0: 3}, keys=over_two)
            index.expect("abc", {0: 1}, keys=in_one)
            index.expect("abc", {})

    def test_multimodal_items_are_told_apart(self) -> None:
        """Blocks of the same tokens with two different images, or with none, are different blocks; the blocks before
        the image are shared.
        """
        first, second = ({"multimodal": [(image, 0, 2)]} for image in _IMAGES)
        self._expect_apart(first, second)
        first, second = ({"multimodal": [(image, self.block_size, 1)]} for image in _IMAGES)
        for index in self._start_keyed(first):
            index.store("abc", 0, keys=first)
            index.expect("abc", {0: 3}, keys=first)
            index.expect("abc", {0: 1}, keys=second)
            index.expect("abc", {0: 1})

    def _expect_apart(self, first: dict[str, Any], second: dict[str, Any]) -> None:
        """Check that prompts with the first keys, with the second, and with none share no block."""
        __tracebackhide__ = True
        for index in self._start_keyed(first):
            index.store("abc", 0, keys=first)
            index.expect("abc", {})
            index.expect("abc", {}, keys=second)
            index.store("ab", 1, keys=second)
            index.store("a", 2)
            index.store("d", 0, after="abc", keys=first)
            index.expect("abcd", {0: 4}, keys=first)
            index.expect("abcd", {1: 2}, keys=second)
            index.expect("abcd", {2: 1})
            index.remove("abcd", "abc", keys=first)
            index.expect("abcd", {0: 2}, keys=first)
            index.expect("abcd", {1: 2}, keys=second)

    def _start_keyed(self, keys: dict[str, Any]) -> Iterator[IndexDriver]:
        """Start an index once for each form in which the engines of `backends` publish a prompt's keys.

        The test is skipped if look-ups take no `extra`, or no engine names blocks by these keys.
        """
        index = self._start()
        if not index.index.plain.takes_extra:
            pytest.skip(
                f"{index.index.plain.name}(tokens) of {index.index.name} takes no `extra`: prompts with an adapter, a "
                "salt or multimodal items were not checked"
            )
        specs = self._specs()
        forms = dict.fromkeys(form for spec in specs if (form := self._form(spec, keys)) is not None)
        if not forms:
            names = ", ".join(spec.name for spec in specs)
            pytest.skip(
                f"no engine of backends ({names}) names blocks by {', '.join(keys)}: prompts with it were not checked"
            )
        for form in forms if index.index.plain.takes_tokens else list(forms)[:1]:
            index = self._start()
            index.carries = form
            yield index

    def _form(self, spec: BackendSpec, keys: dict[str, Any]) -> frozenset[str] | None:
        """Return the names under which an engine publishes these keys; None if it refuses a prompt that carries
        them.
        """
        published: list[RouterEvent] = []
        with RouterHarness(EngineProfile(self.block_size, 512), spec) as harness:
            harness.add_sink(published.append)
            try:
                prompt = harness.worker(0).accept(prompt_of("ab", self.block_size, **keys))
            except ValueError:
                return None
            harness.worker(0).serve(prompt)
        return frozenset(name for event in published for name in event.extra or ())
