"""Driver of SGLang's HiCache, in the steps of its scheduler: match, lock, load back, make room, compute, checkpoint,
copy to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Final

from pytest_kvmock.engines.base.driver import PromptPlan, SlotsLost, checked_manager
from pytest_kvmock.engines.base.tree_driver import TreeDriver
from pytest_kvmock.engines.sglang.host.hicache_cache import HiCacheManager
from pytest_kvmock.engines.sglang.hybrid_radix_driver import HybridRadixDriver
from pytest_kvmock.engines.sglang.hybrid_request import HybridRequest
from pytest_kvmock.values.checks import check_integer
from pytest_kvmock.values.tokens import Prompt, TokenIds

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.engines.sglang.host.hicache_storage import HostStorage


_ALL: Final = 1_000_000_000
"""More items than the storage's write thread ever has."""


class WorkerStorage:
    """The storage below a worker's host, which tests fill and empty. No event names its contents.

    Args:
        manager: the worker's manager.
    """

    def __init__(self, manager: HiCacheManager) -> None:
        self._manager = manager
        assert manager.storage is not None  # a WorkerStorage is only made for a manager with one
        self._storage = manager.storage

    @property
    def blocks(self) -> set[int]:
        """Names of its blocks, whichever worker stored them."""
        return {*self._storage.store.pages}

    def _request(self, prompt: Prompt | TokenIds) -> HybridRequest:
        return self._manager.request(Prompt.of(prompt), Random(0))  # noqa: S311 - nothing is drawn

    def fill(self, prompt: Prompt | TokenIds) -> None:
        """Store the whole blocks of a prompt, with its last window and state, as another worker would."""
        tokens = self._request(prompt).tokens
        names, keys = tokens.names, tokens.keys
        extra = None if keys is None else {"lora_name": keys.lora_name, "cache_salt": keys.cache_salt}
        self._storage.store.know(names, tokens.block_tokens(0, len(names)), extra, None)
        self._storage.store.add(names, *self._storage.parts_of(names))

    def lose(self, prompt: Prompt | TokenIds, from_block: int = 0) -> None:
        """Lose the blocks of a prompt from `from_block` on, with their windows and states."""
        check_integer("lose: from_block", from_block, 0)
        names = self._request(prompt).tokens.names[from_block:]
        self._storage.store.lose(names, names, names)

    def reusable(self, prompt: Prompt | TokenIds) -> int:
        """Count the tokens that a request with this prompt would fetch in addition to those on device and host. Changes
        nothing.
        """
        return self._manager.in_storage(self._request(prompt)) * self._manager.block_size


class HiCacheDriver(HybridRadixDriver):
    """Serves requests from a `HiCacheManager`.

    An admitted request loads its match from the host and computes in the same batch. Computed pages are published after
    the prefill, or each chunk, and when the request finishes. Copies to the host begin then, by the write policy; the
    worker's time ends them.

    Args:
        manager: the cache.
        prefix_caching: whether requests reuse and leave anything; without it, requests share no pages.
        rng: source of the names of partial blocks, and of local hashes where tokens are unknown.

    Raises:
        ValueError: the manager is not a `HiCacheManager`.
    """

    manager: HiCacheManager

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        super().__init__(checked_manager(manager, HiCacheManager, "HiCacheDriver"), prefix_caching, rng)
        self.traits = replace(self.traits, promises_more=True, stores_again=self._has_parts)

    @property
    def _has_parts(self) -> bool:
        return self.manager.window is not None or self.manager.states is not None

    def admit(self, request: HybridRequest, upto: int, plan: PromptPlan | None = None) -> None:
        """Compute the first `upto` tokens, and checkpoint. Without windows and states, a chunk may end within a
        page.
        """
        if self._has_parts:
            super().admit(request, upto, plan)
        else:
            TreeDriver.admit(self, request, upto, plan)

    def lookup(self, request: HybridRequest) -> int:
        """Return the tokens of the request that are on the device, without its last one; for an admitted request, all
        tokens that it reuses.
        """
        if not self._prefix_caching:
            return 0
        pages = request.found if request in self.manager.requests else self.manager.on_device(request)
        return pages * self.manager.block_size

    def need_runs(self, request: HybridRequest, upto: int, runs: Sequence[Sequence[int]] = ()) -> int:
        """Return the `need` of steps that each generate one of `runs`: accepted drafts and one more token."""
        manager = self.manager
        draft, count = manager.speculative, sum(map(len, runs))
        if runs and draft is not None:  # the last step needs room beyond the tokens committed before it
            count += draft.ahead(manager.block_size) - len(runs[-1])
        pages = manager.missing(request, upto + count)
        if not self._has_parts:
            return pages
        if request not in manager.requests:  # the lookup stays, as in SGLang
            manager.find(request, len(request) if self._prefix_caching else 0)
        lacking = manager.lacks_parts(request, pages)
        return manager.unheld_blocks + lacking if lacking else pages

    def start(self, request: HybridRequest, upto: int) -> bool:
        """Match the first tokens of a request, lock them, and load those on the host; return False if room is short."""
        manager = self.manager
        if not manager.may_start():
            return False
        manager.find(request, upto if self._prefix_caching else 0)
        manager.admit(request)
        match = request.match
        assert match is not None
        if manager.lacks_for_load(request, upto, in_chunks=True):
            manager.withdraw(request)
            return False
        if match.to_load and not manager.load(request) and manager.lacking(request, upto, in_chunks=True):
            manager.withdraw(request)
            return False
        if manager.storage is not None:
            request.from_storage = min(manager.storage.take_loaded(request)[0], request.from_host)
            manager.storage.leave(request)
        return True

    @property
    def storage(self) -> HostStorage | None:
        """The storage from which prefixes are fetched; None if there is none, or nothing is reused."""
        return self.manager.storage if self._prefix_caching else None

    def free(self, request: HybridRequest, *, done: bool) -> None:
        """Free the pages of a request and its prefetch; if it is done, checkpoint it first."""
        if self.manager.storage is not None and not request.leaves_prefetch:
            self.manager.storage.leave(request)
        super().free(request, done=done)

    def _start(self, request: HybridRequest, upto: int) -> bool:
        return self.start(request, upto)

    def _compute(self, request: HybridRequest, upto: int) -> None:
        manager = self.manager
        needed = (manager.pages_of(upto) - request.allocated) * manager.block_size
        if self._has_parts:
            if manager.storage is not None and manager.available_size() < needed:
                self._release_held()
            super()._compute(request, upto)
            return
        while manager.storage is not None and manager.available_size() < needed:
            before = manager.available_size()
            manager.make_room(needed)
            self._release_held()
            if manager.available_size() == before:
                manager.make_room(needed)
                if manager.available_size() < needed:
                    raise SlotsLost("device blocks count as evictable although nodes below them are held on the host")
                break
        manager.prefill([(request, upto)])

    def clear(self) -> bool:
        """Drop everything on device and host; the storage keeps its contents."""
        self.write_storage()
        return self.manager.clear()

    def _release_held(self) -> None:
        """End all holds of the storage.

        A node that it writes or fetches holds the nodes above it on the device, which would end a server
        (`write_back`).
        """
        self.write_storage()
        if self.manager.storage is not None:
            self.manager.storage.give_up()

    def write_storage(self) -> None:
        """Write the nodes that were copied to the host to the storage, if there is one; this takes no time."""
        storage = self.manager.storage
        if storage is not None:
            storage.run(0, 0, 0, _ALL)
            storage.see()

    # ------------------------------------------------------------------------------------------- a scheduler's

    def make_room(self, requests: Sequence[HybridRequest]) -> bool:
        """Evict until each request that needs a page, or room for its drafts, can get it."""
        if super().make_room(requests):
            return True
        self._release_held()
        return super().make_room(requests)
