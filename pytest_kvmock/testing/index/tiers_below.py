"""Promises of a router index for the tiers below the device, for each kind of host: Dynamo's, vLLM's and SGLang's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import pytest

from pytest_kvmock.engines.backends import BackendSpec, EngineProfile
from pytest_kvmock.engines.base.driver import Traits
from pytest_kvmock.engines.tiers import Tiers
from pytest_kvmock.testing.drafts import random_traffic
from pytest_kvmock.testing.index.index_driver import IndexDriver
from pytest_kvmock.testing.index.index_subject import OverIndex
from pytest_kvmock.testing.subject import refuse
from pytest_kvmock.values.events import StorageTier

_HOST: Final = StorageTier.HOST_PINNED
_DISK: Final = StorageTier.DISK

_NATIVE: Final = tuple(
    {"host": 8, "chunk": chunk, "self_describing": described} for described in (False, True) for chunk in (1, 2)
)
"""Hosts of vLLM's kind, in both forms of events."""

_HICACHE: Final[tuple[Mapping[str, Any], ...]] = (
    {"host": 6, "write_policy": "write_through"},
    {"host": 16, "write_policy": "write_through_selective"},
    {"host": 6, "write_policy": "write_back"},
)
"""Hosts of SGLang's kind, with each policy; some are smaller than the device."""

_BLOCKS: Final = 8
_BLOCKS_OF_GROUPS: Final = 24
"""Blocks of the device: of an engine with one cache, and the least for one with several caches or a draft model."""


_UNJUDGED: Final = (
    "unjudged: whether it overlooks the host, has there what the device removes, keeps what the host removes, or "
    "drops what stands below a removed block"
)
"""What look-ups of the device alone cannot show."""


class TiersBelow(OverIndex):
    """The part of `IndexContract` about tiers below the device."""

    tiers: ClassVar[Sequence[Mapping[str, Any] | Tiers] | None] = None

    def _hosts(self) -> list[tuple[BackendSpec, Tiers]]:
        """Return pairs of an engine of `backends` and a host that it can have."""
        __tracebackhide__ = True
        given = self.tiers
        able = [spec for spec in self._specs() if "tiers" in spec.options and (spec.group is None or given is not None)]
        if given is not None and not isinstance(given, tuple | list):
            refuse(self, f"tiers must be a tuple or list of hosts such as {{'host': 64}}, or None, got {given!r:.80}")
        found: list[tuple[BackendSpec, Tiers]] = []
        for tiers in (*_NATIVE, *_HICACHE, {"host": 16}) if given is None else given:
            wrong, fits = "none of backends takes tiers", False
            for spec in able:
                try:
                    host = Tiers.of(tiers)
                    spec.make(
                        num_blocks=self._blocks_of(spec), block_size=self.block_size, dp_rank=0, sink=None, tiers=host
                    )
                    is_native = spec.traits_at(self.block_size, host).chunk is not None
                except ValueError as error:
                    wrong = str(error)
                    continue
                fits = True
                if given is not None or is_native == ("chunk" in tiers):
                    found.append((spec, host))
            if given is not None and not fits:
                refuse(self, f"tiers has {tiers!r:.80}: {wrong}")
        return found

    def _blocks_of(self, spec: BackendSpec) -> int:
        """Return the blocks of a device that traffic fills: each cache group takes as many as a single cache."""
        groups = len(spec.traits_at(self.block_size).groups or ())
        return _BLOCKS if spec.group is None else max(_BLOCKS * groups, _BLOCKS_OF_GROUPS)

    def _start_tiered(self, traits: Traits | None = None) -> IndexDriver:
        """Start an index for an engine with these traits; skip the test if the index does not tell tiers apart.

        Without traits the host is Dynamo's, or has chunks of one block.
        """
        __tracebackhide__ = True
        if traits is None:
            known = [spec.traits_at(self.block_size, host) for spec, host in self._hosts()]
            if self.tiers is not None and not self.tiers:
                pytest.skip("tiers names no host: tiers below the device were not checked")
            kinds = [each for each in known if each.chunk in (None, 1)]
            if known and not kinds:
                pytest.skip("tiers has chunks of several blocks alone: tiers of single blocks were not checked")
            traits = next((each for each in kinds if each.chunk is None), kinds[0] if kinds else Traits())
        self.traits = traits
        index = self._start()
        if index.index.tiered is None:
            pytest.skip(
                f"{index.index.name} has neither find_tiered(local_hashes) nor match_tiered(tokens, extra): tiers "
                f"below the device were not checked; {_UNJUDGED}"
            )
        return index

    def _start_native(self, chunk: int = 1) -> IndexDriver:
        """Start an index for an engine that copies to its host in chunks of this size; skip the test if `backends`
        names none.
        """
        __tracebackhide__ = True
        found = (spec.traits_at(self.block_size, host) for spec, host in self._hosts())
        traits = next((each for each in found if each.chunk == chunk), None)
        if traits is None:
            pytest.skip(
                f"backends and tiers name no vLLM with chunks of {chunk} on its host: native offload was not checked"
            )
        return self._start_tiered(traits)

    # ------------------------------------------------------------------------------------ tiers of either kind

    def test_a_tier_goes_on_where_the_faster_ones_end(self) -> None:
        """With `find_tiered`: a tier counts the blocks by which it extends the match of the faster tiers."""
        index = self._start_tiered()
        index.store("ab", 0)
        index.store("cd", 0, after="ab", tier=_HOST)
        index.store("ef", 0, after="abcd", tier=_DISK)
        index.store("ab", 1)
        index.store("cd", 1, after="ab", tier=_DISK)
        index.expect_tiers("abcdef", {"device": {0: 2, 1: 2}, "host_pinned": {0: 2}, "disk": {0: 2, 1: 2}})
        index.expect_tiers("abc", {"device": {0: 2, 1: 2}, "host_pinned": {0: 1}, "disk": {1: 1}})
        index.expect_tiers("xyz", {})

    def test_a_tier_goes_on_from_the_root_where_the_faster_ones_have_nothing(self) -> None:
        """With `find_tiered`: a worker whose device has no block of a prompt may have it in a tier below."""
        index = self._start_tiered()
        index.store("abcd", 0, tier=_HOST)
        index.store("ab", 1, tier=StorageTier.EXTERNAL)
        index.expect_tiers("abcd", {"host_pinned": {0: 4}, "external": {1: 2}})

    def test_offloaded_blocks_need_no_parent(self) -> None:
        """With `find_tiered`: offloaded blocks arrive in the order of eviction, or in any order: a child may come
        before its parent.
        """
        index = self._start_tiered()
        index.store("ab")
        index.store("d", after="abc", tier=_HOST)
        index.expect_tiers("abcd", {"device": {0: 2}})
        index.store("c", after="ab", tier=_HOST)
        index.expect_tiers("abcd", {"device": {0: 2}, "host_pinned": {0: 2}})

    def test_a_block_of_two_tiers_counts_in_the_faster(self) -> None:
        """With `find_tiered`: blocks on the device, and blocks before the end of its match, do not count again in a
        tier below.
        """
        index = self._start_tiered()
        index.store("abc")
        index.store("abcd", tier=_HOST)
        index.expect_tiers("abcd", {"device": {0: 3}, "host_pinned": {0: 1}})
        index.remove("abc")
        index.expect_tiers("abcd", {"device": {0: 2}, "host_pinned": {0: 2}})

    def test_a_hole_ends_the_match_of_a_tier(self) -> None:
        """With `find_tiered`: a block behind one that no tier has is not found."""
        index = self._start_tiered()
        index.store("ab")
        index.store("cde", after="ab", tier=_HOST)
        index.remove("abcd", tier=_HOST)
        index.expect_tiers("abcde", {"device": {0: 2}, "host_pinned": {0: 1}})
        index.remove("ab")
        index.expect_tiers("abcde", {"device": {0: 1}})

    def test_a_removed_takes_blocks_from_its_own_tier(self) -> None:
        """With `find_tiered`: a Removed of one tier leaves the same block in the others."""
        index = self._start_tiered()
        index.store("abc", tier=_HOST)
        index.store("abc", tier=_DISK)
        index.remove("abc", "ab", tier=_HOST)
        index.expect_tiers("abc", {"host_pinned": {0: 1}, "disk": {0: 2}})
        index.store("bc", after="a", tier=_HOST)
        index.expect_tiers("abc", {"host_pinned": {0: 3}})

    def test_a_host_keeps_what_stands_below_a_copy_that_it_gives_up(self) -> None:
        """With `find_tiered`: a host may drop a block that the device has, and keep its children (SGLang's
        `write_back`).
        """
        index = self._start_tiered()
        index.store("ab")
        index.store("abcd", tier=_HOST)
        index.remove("a", "ab", tier=_HOST)
        index.expect_tiers("abcd", {"device": {0: 2}, "host_pinned": {0: 2}})

    def test_a_cleared_or_removed_worker_has_nothing_in_any_tier(self) -> None:
        """With `find_tiered`: a Cleared and `remove_worker` empty all tiers of the worker; a Cleared of vLLM empties
        only the device.
        """
        index = self._start_tiered()
        for worker in (0, 1, 2):
            index.store("ab", worker)
            index.store("cd", worker, after="ab", tier=_HOST)
            index.store("abcd", worker, tier=_DISK)
        left = {0, 1, 2}
        if self.traits.clears_below:
            index.clear(0)
            left.remove(0)
        if index.index.remove_worker is not None:
            index.remove_worker(1)
            left.remove(1)
        both = dict.fromkeys(left, 2)
        index.expect_tiers("abcd", {"device": both, "host_pinned": both})

    def test_it_follows_traffic_over_a_host(self) -> None:
        """With `find_tiered`: the index agrees with the reference index, tier by tier, for engines with each kind of
        host.
        """
        hosts = self._hosts()
        self._start_tiered(hosts[0][0].traits_at(self.block_size, hosts[0][1]) if hosts else Traits())
        if not hosts:
            pytest.skip("backends and tiers name no engine with a host: traffic over one was not checked")
        for spec, host in hosts:
            # The copy of a block takes a millisecond, so that some are under way while other requests are served.
            tiers = Tiers.of({"gbps": 1.0, "bytes_per_token": 1_000_000 // self.block_size, **host.to_dict()})
            for seed in range(2):
                program = random_traffic(seed, 40, workers=2, most_ms=12)
                self._follow(spec, EngineProfile(self.block_size, self._blocks_of(spec), 2, tiers=tiers), program, seed)

    # --------------------------------------------------------------- a host that is a copy, as in vLLM

    def test_what_the_device_lets_go_of_is_where_it_was_located(self) -> None:
        """A location names where a known hash is; a Removed of the device leaves it there."""
        index = self._start_native()
        index.store("abcd")
        index.locate("abcd", "ab")
        index.locate("a", "abc")
        index.expect_tiers("abcd", {"device": {0: 4}})
        index.remove("abcd", "abc")
        index.expect("abcd", {0: 2})
        index.expect_tiers("abcd", {"device": {0: 2}, "host_pinned": {0: 2}})
        index.remove("ab", "a")
        index.expect_tiers("abcd", {"host_pinned": {0: 4}})

    def test_what_is_located_is_not_on_the_device(self) -> None:
        """A location stores nothing on the device, and is not a second copy of a block there."""
        index = self._start_native()
        index.store("ab")
        index.locate("ab", "a")
        index.remove("ab")
        index.expect("ab", {0: 1})
        index.store("b", after="a")
        index.store("c", after="ab")
        index.expect("abc", {0: 3})
        index.expect_tiers("abc", {"device": {0: 3}})

    def test_a_host_removes_its_own_copies(self) -> None:
        """A Removed of the host removes the block from the host only."""
        index = self._start_native()
        index.store("abcd")
        index.locate("a", "ab", "abc", "abcd")
        index.remove("abcd", "abc", tier=_HOST)
        index.expect_tiers("abcd", {"device": {0: 4}})
        index.remove("abcd", "abc", "ab")
        index.expect_tiers("abcd", {"device": {0: 1}, "host_pinned": {0: 1}})

    def test_a_location_may_come_after_the_device_has_let_go(self) -> None:
        """The name of a block outlives its last Removed: its location often follows in the same batch."""
        index = self._start_native()
        index.store("abcd")
        index.remove("abcd", "abc")
        index.locate("abcd", "abc")
        index.expect_tiers("abcd", {"device": {0: 2}, "host_pinned": {0: 2}})
        index.store("xy")
        index.remove("xy", "x")
        index.locate("x", "xy")
        index.expect_tiers("xy", {"host_pinned": {0: 2}})

    def test_a_location_may_come_before_what_it_is_of(self) -> None:
        """A location is not a block, but the place of one that may become known later."""
        index = self._start_native()
        index.locate("ab", "abc")
        index.expect_tiers("abc", {})
        index.store("abc")
        index.remove("abc", "ab")
        index.expect_tiers("abc", {"device": {0: 1}, "host_pinned": {0: 2}})

    def test_chunks_come_in_any_order(self) -> None:
        """The chunks of one transfer come in the order of a set: children may come before their parents."""
        index = self._start_native(2)
        index.store("ef", after="abcd", tier=_HOST)
        index.store("cd", after="ab", tier=_HOST)
        index.expect_tiers("abcdef", {})
        index.store("ab", tier=_HOST)
        index.expect_tiers("abcdef", {"host_pinned": {0: 6}})

    def test_copies_of_a_host_are_counted(self) -> None:
        """Two chunks that begin with the same block both name it, when they are stored and when they are removed."""
        index = self._start_native(2)
        index.store("ab", tier=_HOST)
        index.store("ax", tier=_HOST)
        index.remove("a", "ab", tier=_HOST)
        index.expect_tiers("ax", {"host_pinned": {0: 2}})
        index.expect_tiers("ab", {})
        index.remove("a", "ax", tier=_HOST)
        index.expect_tiers("ax", {})

    def test_a_block_that_is_loaded_again_is_a_copy(self) -> None:
        """The last block of a prompt of whole blocks is loaded even if the device has it: it is held until both copies
        are removed.
        """
        index = self._start_native()
        index.store("ab")
        index.locate("a", "ab")
        index.store("b", after="a")
        index.remove("ab")
        index.expect("ab", {0: 2})
        index.remove("ab")
        index.expect_tiers("ab", {"device": {0: 1}, "host_pinned": {0: 1}})

    def test_a_host_is_read_from_where_the_device_ends_and_there_is_no_way_back(self) -> None:
        """A match takes the device first, then the host up to the first missing block: blocks behind it are not
        loaded.
        """
        index = self._start_native()
        index.store("abcde")
        index.locate("a", "ab", "abc", "abcd", "abcde")
        index.remove("abc", tier=_HOST)
        index.remove("ab", "abcd", "abcde")  # the device keeps a, and abc behind the hole
        index.expect_tiers("abcde", {"device": {0: 1}, "host_pinned": {0: 1}})
        index.remove("ab", tier=_HOST)
        index.expect_tiers("abcde", {"device": {0: 1}})

    def test_part_of_a_chunk_is_worth_nothing(self) -> None:
        """A chunk is loaded whole, or, if the device ends inside it and another chunk follows, from there."""
        index = self._start_native(2)
        index.store("abcdef")
        index.locate("ab", "abcd", "abcdef")  # each is the last block of its chunk
        index.remove("abcdef")
        index.expect_tiers("abcdef", {"device": {0: 5}})
        index.remove("abcde")
        index.expect_tiers("abcdef", {"device": {0: 4}, "host_pinned": {0: 2}})
        index.remove("abcd")
        index.expect_tiers("abcdef", {"device": {0: 3}, "host_pinned": {0: 3}})
        index.expect_tiers("abcde", {"device": {0: 3}})
        index.remove("abcdef", tier=_HOST)
        index.expect_tiers("abcdef", {"device": {0: 3}})

    def test_a_cleared_leaves_a_host_that_is_a_copy(self) -> None:
        """A Cleared has no tier; vLLM's empties only the device (`Traits.clears_below`)."""
        index = self._start_native()
        index.store("abc")
        index.locate("ab", "a")
        index.clear()
        index.expect("abc", {})
        index.expect_tiers("abc", {"host_pinned": {0: 2}})
        index.store("a")
        index.expect_tiers("abc", {"device": {0: 1}, "host_pinned": {0: 1}})
