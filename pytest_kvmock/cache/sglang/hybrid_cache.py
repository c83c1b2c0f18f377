"""SGLang's cache of a hybrid model, and what its requests have of it (`UnifiedRadixCache` of SGLang 0.5.23).

One subject: who has which pages, pages of windows and slots of states, as free ones, in the tree or outside of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, ClassVar, Final

from pytest_kvmock.cache.hashed import HashedTokens
from pytest_kvmock.cache.sglang.geometry import Geometry
from pytest_kvmock.cache.sglang.hybrid_request import BigramTokens, HybridRequest
from pytest_kvmock.cache.sglang.hybrid_tree import Evicted, HybridTree, TreeMatch
from pytest_kvmock.cache.sglang.page_cache import PageCache
from pytest_kvmock.tokens import Prompt

# Theory of operation
#
# A page of a request has a page of full attention and, unless it slid away, one of the window. The request owns both from
# `protected` on, the window's from `dead` on too; what is before is the tree's. A checkpoint gives the tree what it lacks,
# and frees what it has. So a request that was promised more than it could use computes that again, and frees it then.
#
# Of states a request has one slot that it computes in, spares to note states in, and at a checkpoint one more, for the
# state that the tree keeps.
#
# Lengths are in units, as keys are: tokens, or bigrams with EAGLE, one fewer. What is computed and allocated is tokens.

RETRACT_TOKENS: Final = 20
"""Tokens of room that a retraction makes for each request that is left (`retract_decode_steps`)."""


class HybridCacheManager(PageCache[HybridRequest, HybridTree]):
    """Caches whole pages in a radix tree, with windows and states in its nodes, and publishes those of full attention.

    Args:
        geometry: the parts of the model.
        **options: as `RadixCacheManager`; the policy is "lru", "lfu" or "slru".

    Raises:
        ValueError: an argument is not what it must be, or the geometry does not fit.

    Attributes:
        geometry: as above.
        window: the window part of its tree; None: there is none.
        states: the state part; None: there is none.
    """

    takes: ClassVar[str] = "match_prefix, evict, reset; find, admit, prefill, checkpoint, finish of a request"

    def __init__(self, *, geometry: Geometry, **options: Any) -> None:
        self.geometry = geometry
        self._may_have_pairs = geometry.states is None
        super().__init__(**options)
        self._bigram = int(self.hasher.is_eagle)
        self.window = self._tree.window
        self.states = self._tree.states

    def _new_tree(self, policy: str, protected_threshold: int) -> HybridTree:
        geometry, size = self.geometry, self.block_size
        geometry.check(self.max_capacity, size, policy)
        window = geometry.make_window(self.max_capacity, size)
        return HybridTree(policy, protected_threshold, window, geometry.make_states())

    # --------------------------------------------------------------------------------------------- eviction

    def evict(self, num_tokens: int, window_tokens: int = 0, states: int = 0) -> tuple[int, int, int]:
        """Evict until so much is freed of full attention, of windows and of states, or no more may be evicted.

        Returns:
            What was freed: tokens, tokens of windows, states.
        """
        done = self._reclaim(num_tokens, window_tokens, states)
        self._flush()
        return len(done.names) * self.block_size, done.windows * self.block_size, done.states

    def _reclaim(self, tokens: int = 0, window_tokens: int = 0, states: int = 0) -> Evicted:
        size = self.block_size
        done = self._tree.reclaim(-(-tokens // size), -(-window_tokens // size), states)
        if done.names:
            self._free += len(done.names)
            self._removed(done.names)
        return done

    def _removed(self, names: list[int]) -> None:
        """Queue the Removed of pages that were evicted from the device."""
        self._queue.removed(names)

    def make_room(self, tokens: int) -> None:
        """Evict until so many tokens of full attention and of windows are free, or no more may be evicted."""
        lacking = tokens - self._free * self.block_size
        lacks_windows = 0 if self.window is None else tokens - self.window.free * self.block_size
        if lacking > 0 or lacks_windows > 0:
            self._reclaim(max(lacking, 0), max(lacks_windows, 0))

    def _make_slots(self, slots: int) -> None:
        if self.states is not None and self.states.free < slots:
            self._reclaim(states=slots - self.states.free)

    def _take_slots(self, request: HybridRequest, slots: int) -> None:
        """Give a request slots, or take some back where they are fewer than 0."""
        if self.states is not None:
            self.states.free -= slots
            request.slots += slots

    def _flush(self) -> None:
        self._publish()
        if self._publisher.failure is not None:
            self._publisher.surface()

    # --------------------------------------------------------------------------------------------- requests

    def request(self, prompt: Prompt, rng: Random) -> HybridRequest:
        """A request that has nothing yet."""
        hasher, namespace = self._hasher_of(prompt)
        tokens = (BigramTokens if hasher.is_eagle else HashedTokens)(prompt, self.block_size, hasher, rng)
        return HybridRequest(tokens, rng, namespace)

    def _reusable(self, request: HybridRequest) -> int:
        return (len(request.tokens) - 1 - self._bigram) // self.block_size

    def lookup(self, request: HybridRequest) -> int:
        """Count the pages that `find` would let it use. Changes nothing."""
        return self._tree.lookup(request.tokens.names, self._reusable(request), request.namespace)

    def promised(self, request: HybridRequest) -> int:
        """Count the pages of it that full attention has: what its events promise. Changes nothing."""
        return self._tree.depth(request.tokens.names, self._reusable(request), request.namespace)

    def missing_parts(self, request: HybridRequest) -> tuple[int, tuple[str, ...]]:
        """How many tokens full attention has of it, and the parts that are not there, by their sizes. Changes nothing."""
        names, count = request.tokens.names, self._reusable(request)
        return self._missing_parts(self._tree.look(names, count, request.namespace))

    def _missing_parts(self, found: TreeMatch) -> tuple[int, tuple[str, ...]]:
        page, short = self.block_size, []
        if not found.has_window:
            short.append(f"sliding_window {page} (window {self.geometry.window})")
        if not found.has_state:
            short.append(f"mamba {self.geometry.grid(page)}")
        return found.depth * page, tuple(short)

    def find(self, request: HybridRequest, upto: int | None = None) -> int:
        """Match all of a request but its last token, which is computed anyway, for `admit`.

        Args:
            request: one that has nothing.
            upto: match no more than so many of its tokens; None: all.

        Returns:
            Units that full attention has of it; `request.found` has the pages that it can use.
        """
        size = self.block_size
        count = self._reusable(request)
        if upto is not None:
            count = min(count, upto // size)
        found = self._tree.find(request.tokens.names, count, request.namespace)
        request.match = found
        request.node, request.found = found.node, found.usable
        request.short = self._missing_parts(found)
        depth = found.depth * size
        request.branch = depth if found.usable < found.depth and self.window is not None else None
        request.state_branch = None
        if self.states is not None:
            grid = self.geometry.grid(size)
            branch = depth // grid * grid
            request.state_branch = branch if branch > found.usable * size else None
        return depth

    def admit(self, request: HybridRequest) -> None:
        """Lock what was found for a request. A state that was found is copied into a slot of the request."""
        tree, states = self._tree, self.states
        assert request.node is not None
        if states is not None and request.found:
            if not states.free:
                lock = tree.hold(request.node)
                self._reclaim(states=1)
                tree.release(lock)
            if states.free:
                self._take_slots(request, 1)
        request.lock = tree.hold(request.node)
        self.requests[request] = None
        request.protected = request.allocated = request.found
        request.computed = request.found * self.block_size
        self._flush()

    def withdraw(self, request: HybridRequest) -> None:
        """Take back `admit` of a request for which nothing was allocated; what was found for it stands."""
        assert request.lock is not None
        del self.requests[request]
        self._tree.release(request.lock)
        request.lock = None
        self._take_slots(request, -request.slots)
        request.protected = request.allocated = request.computed = 0

    def may_start(self, slots: int = 0) -> bool:
        """Whether there are slots for a request, besides those that are spoken for; asked before it is matched."""
        return self.states is None or self.geometry.slots_to_start + slots <= self.states.unheld()

    def slots_needed(self, request: HybridRequest) -> int:
        """Slots that a request takes until its prefill is over, besides those that it has."""
        if self.states is None:
            return 0
        return 1 + self.geometry.spare_slots + 1 - request.slots

    def lacking(
        self, request: HybridRequest, upto: int, pages: int = 0, slots: int = 0, *, in_chunks: bool = False
    ) -> int:
        """Count what lacks for the tokens of an admitted request up to one, in the unit of which most is lacking.

        Args:
            request: which one.
            upto: for so many of its tokens, from the first.
            pages: that are spoken for.
            slots: likewise.
            in_chunks: they may be computed in as many chunks as there is room for (`chunk_end`).
        """
        own = self.pages_of(upto) - request.allocated
        lacking = [own + pages - self._free - self._tree.evictable]
        if self.window is not None:
            own = min(own, self._chunk_pages) if in_chunks else own
            lacking.append(own + pages - self.window.unheld())
        if self.states is not None:
            lacking.append(self.slots_needed(request) + slots - self.states.unheld())
        return max(0, *lacking)

    @property
    def _chunk_pages(self) -> int:
        """Pages of windows with which a prefill of any length goes on, chunk by chunk.

        A chunk holds what its predecessor has locked, less than two windows, and what is left of that behind a checkpoint:
        a window and a page. With states, that is as much as there is between two of them, or all behind a branch.
        """
        assert self.window is not None
        pages = 4 * self.window.pages + 4
        return pages if self.states is None else 2 * (pages + 2 * self.pages_of(self.geometry.grid(self.block_size)))

    def chunk_end(self, request: HybridRequest, upto: int) -> int:
        """Tokens that can be computed at once of a request up to one: all, or as many as there are windows for."""
        if self.window is None or self.pages_of(upto) - request.allocated <= self.window.unheld():
            return upto
        pages = self.window.unheld() if self.states is None else self.window.unheld() // 2
        return (request.allocated + max(1, pages)) * self.block_size

    def prefill(self, batch: Sequence[tuple[HybridRequest, int]]) -> None:
        """Allocate, and compute, what requests that were admitted have not of their first tokens.

        Args:
            batch: each with how many tokens, from its first; `lacking` was asked about each.
        """
        size, geometry = self.block_size, self.geometry
        if self.states is not None:
            wanted = [1 + geometry.spare_slots - request.slots for request, _ in batch]
            self._make_slots(sum(wanted))
            for (request, _), slots in zip(batch, wanted, strict=True):
                self._take_slots(request, slots)
        self.make_room(sum(upto - request.computed + (size if size > 1 else 0) for request, upto in batch))
        for request, upto in batch:
            self._allocate(request, upto)
            if geometry.has_grid:
                request.tracked = geometry.tracked(request.computed, upto, request.state_branch, size)
            request.computed = upto
        self._flush()

    def _allocate(self, request: HybridRequest, upto: int) -> None:
        pages = self.pages_of(upto) - request.allocated
        if pages > self._free or (self.window is not None and pages > self.window.free):
            free = self._free if self.window is None else min(self._free, self.window.free)
            raise ValueError(f"{pages} pages are needed, {free} are free")
        self._free -= pages
        if self.window is not None:
            self.window.free -= pages
        request.allocated += pages

    # ------------------------------------------------------------------------------------------- checkpoints

    def checkpoint(self, request: HybridRequest) -> None:
        """Cache what a request that goes on has computed, as far as a later one can use it, and lock it there."""
        size, tree = self.block_size, self._tree
        units = request.computed - self._bigram
        branch = request.branch
        cuts = False
        if self.geometry.has_grid:
            if request.tracked is None:
                return
            units = request.tracked
        elif self.states is None and branch is not None and request.protected * size < branch <= units:
            units, cuts = branch, True
        slots = request.slots
        self._make_slots(1)
        self._take_slots(request, 1)
        self._slide(request, units - 1)
        node = self._insert(request, units // size)
        self._take_slots(request, slots - request.slots)  # the tree had a state there
        assert request.lock is not None
        tree.release(request.lock)
        request.lock = tree.hold(node)
        if cuts:
            self._slide(request, request.computed - self._bigram - 1)
        request.tracked = None
        self._flush()

    def finish(self, request: HybridRequest, outputs: int | None = None) -> None:
        """Cache what a request has computed, as far as a later one can use it, and free the rest.

        Args:
            request: which one.
            outputs: how many it has generated, its last one included: drafts that were accepted behind it do not count. None: all.
        """
        kept = request.computed
        if outputs is not None:
            kept = min(kept, request.tokens.num_prompt_tokens + outputs)
        units: int | None = kept - self._bigram
        if self.geometry.has_grid:
            units = request.tracked if request.tracked is None or request.tracked <= kept else None
        elif self.states is not None and kept < request.computed:
            units = None  # the state is that of all that was accepted
        if units is not None:
            self._insert(request, units // self.block_size)
        self.release(request)
        self._flush()

    def release(self, request: HybridRequest) -> None:
        """Free what a request has outside the tree, and release its lock; nothing if it has none."""
        if request not in self.requests:
            return
        del self.requests[request]
        self._free += request.allocated - request.protected
        if self.window is not None:
            self.window.free += request.allocated - max(request.dead, request.protected)
        self._take_slots(request, -request.slots)
        assert request.lock is not None
        self._tree.release(request.lock)
        request.retract()

    def retract(self, request: HybridRequest) -> None:
        """Free what a request has, uncached, and make some room for those that are left."""
        self.release(request)
        self.make_room(RETRACT_TOKENS * len(self.requests))
        self._flush()

    def _insert(self, request: HybridRequest, count: int) -> Any:
        """Insert the first pages of a request; returns the node where they end."""
        tokens, protected, dead = request.tokens, request.protected, request.dead
        done = self._tree.checkpoint(
            tokens,
            count,
            request.namespace,
            inserted=request.inserted,
            protected=protected,
            dead=dead,
            has_state=self.states is not None,
        )
        if done.matched < count:
            self._stored(tokens, tuple(tokens.names[done.matched : count]), done.matched, count)
        prompt = (tokens.num_prompt_tokens - self._bigram) // self.block_size
        if self.window is None and self.states is None and 0 < prompt < count:  # a node ends where the prompt does
            self._tree.insert(tokens, prompt, request.namespace, 0, prompt)
        self._free += done.matched - protected
        if self.window is not None:
            self.window.free += max(0, count - max(protected, dead)) - done.windows
        request.slots -= done.has_state
        request.protected = count
        request.inserted = max(request.inserted, count)
        return done.node

    def _slide(self, request: HybridRequest, position: int, interval: int = 1) -> None:
        """Free the window of a request that one at this position does not need, if it is as much as an interval."""
        window, size = self.geometry.window, self.block_size
        if self.window is None or window is None or position - window < request.dead * size + interval:
            return
        dead = max(request.dead, request.protected)
        until = position - self.window.pages * size
        if request.tracked is not None:
            until = min(until, request.tracked - window)
        request.dead = max(dead, until // size)
        self.window.free += request.dead - dead

    def slide(self, request: HybridRequest) -> None:
        """Free the window of a request that what it has computed does not need, where nothing is cached."""
        self._slide(request, request.computed - 1)

    # ------------------------------------------------------------------------------------------------ decode

    def lacking_steps(self, request: HybridRequest, steps: int) -> int:
        """Count what lacks for so many tokens of a request, in the unit of which most is lacking.

        What slides away on the way is counted as it is at most there at once.
        """
        window, geometry = self.window, self.geometry
        pages = self.pages_of(request.computed + steps) - request.allocated
        lacking = pages - self._free - self._tree.evictable
        if window is not None and geometry.window is not None:
            most = window.pages + self.pages_of(geometry.window + geometry.window_interval) + 3
            if geometry.has_grid:  # a window before the state that is kept stays
                most += self.pages_of(geometry.state_interval)
            own = request.allocated - max(request.dead, request.protected)
            lacking = max(lacking, min(pages, max(2, most - own)) - window.unheld())
        return max(0, lacking)

    def may_step(self, request: HybridRequest) -> bool:
        """Whether there is a free page for the next token of a request, or it needs none."""
        return not request.opens_page or (self._free > 0 and (self.window is None or self.window.free > 0))

    def quiet_steps(self, requests: Sequence[HybridRequest]) -> int:
        """Count the steps of these requests in which none needs a page, slides, keeps a state or evicts."""
        size, geometry, window = self.block_size, self.geometry, self.window
        demand = len(requests)
        if self._free < demand and self._tree.evictable:
            return 0
        if window is not None and window.free < demand and window.evictable:
            return 0
        most = min(request.allocated * size - request.computed for request in requests)
        if geometry.window is not None:
            for request in requests:
                slides = request.dead * size + geometry.window_interval + geometry.window
                most = min(most, slides - request.computed)
                lock = request.lock
                if geometry.release_window and lock is not None and lock.edge and lock.has_parts:
                    most = min(most, geometry.window - request.steps)
        if geometry.has_grid:
            interval = geometry.state_interval
            most = min(most, *(interval - 1 - request.computed % interval for request in requests))
        return max(0, most)

    def begin_step(self, requests: Sequence[HybridRequest]) -> bool:
        """Make room for a token of each request, and slide their windows; False, and nothing slides, where it is short.

        Room is made for a page a request then, though some need none (`alloc_paged_token_slots_decode`).
        """
        fits = self._slides(requests, sum(request.opens_page for request in requests))
        if fits:
            self.make_room(len(requests) * self.block_size)
        self._flush()
        return fits

    def _slides(self, requests: Sequence[HybridRequest], pages: int) -> bool:
        """Slide the windows of requests, if there is room for so many pages.

        The lock of one that is as old as its window is released.
        """
        geometry = self.geometry
        self.make_room(pages * self.block_size)
        fits = pages <= self._free and (self.window is None or pages <= self.window.free)
        if not fits or geometry.window is None:
            return fits
        for request in requests:
            if request.steps:
                self._slide(request, request.computed, geometry.window_interval)
            if geometry.release_window and request.steps >= geometry.window:
                assert request.lock is not None
                if request.lock.edge:
                    self._tree.release_parts(request.lock)
        return fits

    def end_step(self, request: HybridRequest, token: int) -> None:
        """Append a token, for which `begin_step` has made room, and compute it."""
        geometry = self.geometry
        request.append(token)
        self._allocate(request, request.computed + 1)
        request.computed += 1
        request.steps += 1
        if self.states is not None and geometry.has_grid and not request.computed % geometry.state_interval:
            request.tracked = request.computed

    # -------------------------------------------------------------------------------------- speculative decoding

    def begin_verify(self, requests: Sequence[HybridRequest]) -> bool:
        """Give each request room for its next step, and slide their windows; False, and nothing slides, where it is short.

        Where any slot is needed, room is made for a page a request more (`alloc_paged_token_slots_extend`).
        """
        lacking = [self.pages_ahead(request) for request in requests]
        fits = self._slides(requests, sum(lacking))
        if fits:
            self._take_ahead(requests, lacking)
        self._flush()
        return fits

    def end_verify(self, request: HybridRequest, tokens: Sequence[int]) -> None:
        """Append the tokens that a step commits, the last sampled one and accepted drafts, for which `begin_verify` has made room."""
        for token in tokens:
            request.append(token)
        before, request.computed = request.computed, request.computed + len(tokens)
        request.steps += 1
        if self.geometry.has_grid:
            interval = self.geometry.state_interval
            mark = request.computed // interval * interval
            if mark > before:
                request.tracked = mark
