"""Drives SGLang's HiCache as its scheduler does: match, lock, load back, room, compute, checkpoint, copy to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Final

from pytest_kvmock.cache.sglang.hicache_cache import HiCacheManager
from pytest_kvmock.cache.sglang.hybrid_request import HybridRequest
from pytest_kvmock.checks import check_integer
from pytest_kvmock.drivers.driver import SlotsLost, checked_manager
from pytest_kvmock.drivers.hybrid_radix_driver import HybridRadixDriver
from pytest_kvmock.drivers.tree_driver import TreeDriver
from pytest_kvmock.tokens import Prompt, TokenIds

if TYPE_CHECKING:
    from pytest_kvmock.cache.manager import KvManager
    from pytest_kvmock.cache.sglang.hicache_storage import HostStorage


_ALL: Final = 1_000_000_000
"""More than the thread of the storage that writes ever has to do."""


class WorkerStorage:
    """The storage behind the host of a worker, as tests fill it and lose it. No event says what it has.

    Args:
        manager: the worker's.
    """

    def __init__(self, manager: HiCacheManager) -> None:
        self._manager = manager
        assert manager.storage is not None  # it is made for one
        self._storage = manager.storage

    @property
    def blocks(self) -> set[int]:
        """Names of the blocks that it has, of whichever worker."""
        return {*self._storage.store.pages}

    def _request(self, prompt: Prompt | TokenIds) -> HybridRequest:
        return self._manager.request(Prompt.of(prompt), Random(0))  # noqa: S311 - nothing is drawn

    def fill(self, prompt: Prompt | TokenIds) -> None:
        """Store the whole blocks of a prompt, as another worker would."""
        self._storage.store.add(self._request(prompt).tokens.names)

    def lose(self, prompt: Prompt | TokenIds, from_block: int = 0) -> None:
        """Lose the blocks of a prompt from one on."""
        check_integer("lose: from_block", from_block, 0)
        self._storage.store.lose(self._request(prompt).tokens.names[from_block:])

    def reusable(self, prompt: Prompt | TokenIds) -> int:
        """Tokens that a request with this prompt would fetch, beyond what device and host have. Changes nothing."""
        return self._manager.in_storage(self._request(prompt)) * self._manager.block_size


class HiCacheDriver(HybridRadixDriver):
    """Serves requests from a `HiCacheManager`.

    A request loads what the host has of it when it is admitted, and computes in the same batch. What it computed is
    published after its prefill, or each chunk, and when it finishes; copies to the host begin then, by the write policy,
    and the time of the worker ends them.

    Args:
        manager: the cache.
        prefix_caching: whether requests reuse and leave anything; without it, each has pages of its own.
        rng: source of the names of partial blocks, and of local hashes where tokens are unknown.

    Raises:
        ValueError: the manager is no such cache.
    """

    manager: HiCacheManager
    admit = TreeDriver.admit
    """A chunk may end within a page."""

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        super().__init__(checked_manager(manager, HiCacheManager, "HiCacheDriver"), prefix_caching, rng)
        self.traits = replace(self.traits, promises_more=True)

    def lookup(self, request: HybridRequest) -> int:
        """Tokens of the request that are on the device, without its last one; of an admitted one, all that it reuses."""
        if not self._prefix_caching:
            return 0
        pages = request.found if request in self.manager.requests else self.manager.on_device(request)
        return pages * self.manager.block_size

    def need_runs(self, request: HybridRequest, upto: int, runs: Sequence[Sequence[int]] = ()) -> int:
        """Return the `need` of steps that generate so many tokens each: accepted drafts and one more."""
        draft, count = self.manager.speculative, sum(map(len, runs))
        if runs and draft is not None:  # the last step needs room ahead of what is committed before it
            count += draft.ahead(self.manager.block_size) - len(runs[-1])
        return self.manager.missing(request, upto + count)

    def start(self, request: HybridRequest, upto: int) -> bool:
        """Match the first tokens of a request, lock, and load what the host has; False where there is no room for it."""
        manager = self.manager
        manager.find(request, upto if self._prefix_caching else 0)
        manager.admit(request)
        match = request.match
        assert match is not None
        if manager.lacking(request, upto):
            manager.withdraw(request)
            return False
        if match.depth > match.usable and not manager.load(request) and manager.lacking(request, upto):
            manager.withdraw(request)
            return False
        if manager.storage is not None:
            request.from_storage = min(manager.storage.take_loaded(request)[0], request.from_host)
            manager.storage.leave(request)
        return True

    @property
    def storage(self) -> HostStorage | None:
        """Where prefixes are fetched from; None: there is none, or nothing is reused."""
        return self.manager.storage if self._prefix_caching else None

    def free(self, request: HybridRequest, *, done: bool) -> None:
        """Free what it has, and what is fetched for it; of a request that is done, after a last checkpoint."""
        if self.manager.storage is not None and not request.leaves_prefetch:
            self.manager.storage.leave(request)
        super().free(request, done=done)

    def _start(self, request: HybridRequest, upto: int) -> bool:
        return self.start(request, upto)

    def _compute(self, request: HybridRequest, upto: int) -> None:
        manager = self.manager
        needed = (manager.pages_of(upto) - request.allocated) * manager.block_size
        while manager.storage is not None and manager.available_size() < needed:
            before = manager.available_size()
            manager.make_room(needed)
            self._release_held()
            if manager.available_size() == before:
                manager.make_room(needed)
                if manager.available_size() < needed:
                    raise SlotsLost(
                        "blocks of the device count as evictable, and what is below them is held on the host"
                    )
                break
        manager.prefill([(request, upto)])

    def clear(self) -> bool:
        """Drop all that is cached, on device and host; the storage keeps what it has."""
        self.write_storage()
        return self.manager.clear()

    def _release_held(self) -> None:
        """Let the storage hold nothing.

        What it writes or fetches holds what is above it on the device, which ends a server (`write_back`).
        """
        self.write_storage()
        if self.manager.storage is not None:
            self.manager.storage.give_up()

    def write_storage(self) -> None:
        """Write what was copied to the host to the storage behind it, if there is one; it takes no time."""
        storage = self.manager.storage
        if storage is not None:
            storage.run(0, 0, 0, _ALL)
            storage.see()

    # ------------------------------------------------------------------------------------------- a scheduler's

    def make_room(self, requests: Sequence[HybridRequest]) -> bool:
        """Evict until there is a page for each that needs one, or room for their drafts."""
        if super().make_room(requests):
            return True
        self._release_held()
        return super().make_room(requests)
