"""SGLang's cache of a hybrid model, and the parts of it that its requests hold (`UnifiedRadixCache` of SGLang 0.5.23).

One subject: which full attention pages, window pages and state slots are free, in the tree, or owned by a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, ClassVar, Final

from pytest_kvmock.engines.base.hashed import HashedTokens
from pytest_kvmock.engines.sglang.geometry import Geometry
from pytest_kvmock.engines.sglang.hybrid_request import BigramTokens, HybridRequest
from pytest_kvmock.engines.sglang.hybrid_tree import Evicted, HybridTree, TreeMatch
from pytest_kvmock.engines.sglang.page_cache import PageCache
from pytest_kvmock.values.tokens import Prompt

# Theory of operation
#
# Each page of a request has a full attention page and, until the window slides past it, a window page. The request owns
# the pages from `protected` on (window pages also only from `dead` on); the tree owns the pages before. A checkpoint
# gives the tree the pages that it lacks and frees the request's copies of the others. A request that could not use a
# cached prefix therefore computes it again, and its checkpoint frees the copy.
#
# A request has one state slot in which it computes, spare slots in which it keeps states for later, and during a
# checkpoint one more, for the state that goes into the tree.
#
# Lengths are in the units of the keys: tokens, or with EAGLE bigrams, one fewer. Computing and allocating count tokens.

RETRACT_TOKENS: Final = 20
"""Tokens of room that a retraction makes for each remaining request (`retract_decode_steps`)."""


class HybridCacheManager(PageCache[HybridRequest, HybridTree]):
    """Caches whole pages in a radix tree with windows and states in its nodes; publishes the full attention pages.

    Args:
        geometry: the parts of the model.
        **options: see `RadixCacheManager`; the policy is "lru", "lfu" or "slru".

    Raises:
        ValueError: an argument is invalid, or the geometry does not fit.

    Attributes:
        geometry: as given.
        window: the window part of its tree; None if there is none.
        states: the state part; None if there is none.
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
        geometry.check(self.num_blocks, size, policy)
        window = geometry.make_window(self.num_blocks, size)
        return HybridTree(policy, protected_threshold, window, geometry.make_states())

    # --------------------------------------------------------------------------------------------- eviction

    def evict(self, num_tokens: int, window_tokens: int = 0, states: int = 0) -> tuple[int, int, int]:
        """Evict until these amounts of full attention, windows and states are freed, or nothing more can be evicted.

        Returns:
            The freed amounts: full attention tokens, window tokens, states.
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
        """Evict until `tokens` tokens of full attention and of windows are free, or nothing more can be evicted."""
        lacking = tokens - self._free * self.block_size
        lacks_windows = 0 if self.window is None else tokens - self.window.free * self.block_size
        if lacking > 0 or lacks_windows > 0:
            self._reclaim(max(lacking, 0), max(lacks_windows, 0))

    def _make_slots(self, slots: int) -> None:
        if self.states is not None and self.states.free < slots:
            self._reclaim(states=slots - self.states.free)

    def _take_slots(self, request: HybridRequest, slots: int) -> None:
        """Give a request `slots` slots; a negative number takes slots back."""
        if self.states is not None:
            self.states.free -= slots
            request.slots += slots

    # --------------------------------------------------------------------------------------------- requests

    def request(self, prompt: Prompt, rng: Random) -> HybridRequest:
        """Make a request without pages."""
        hasher, namespace = self._hasher_of(prompt)
        tokens = (BigramTokens if hasher.is_eagle else HashedTokens)(prompt, self.block_size, hasher, rng)
        return HybridRequest(tokens, rng, namespace)

    def _reusable(self, request: HybridRequest) -> int:
        return (len(request.tokens) - 1 - self._bigram) // self.block_size

    def lookup(self, request: HybridRequest) -> int:
        """Count the pages that `find` would let it use. Changes nothing."""
        return self._tree.lookup(request.tokens.names, self._reusable(request), request.namespace)

    def promised(self, request: HybridRequest) -> int:
        """Count the pages of a request that full attention has, as events promise. Changes nothing."""
        return self._tree.depth(request.tokens.names, self._reusable(request), request.namespace)

    def missing_parts(self, request: HybridRequest) -> tuple[int, tuple[str, ...]]:
        """Return the number of its tokens that full attention has, and the missing parts with their sizes. Changes
        nothing.
        """
        names, count = request.tokens.names, self._reusable(request)
        return self._missing_parts(self._tree.look(names, count, request.namespace))

    def _missing_parts(self, found: TreeMatch) -> tuple[int, tuple[str, ...]]:
        page, short = self.block_size, []
        if not found.has_window:
            short.append(f"sliding_window {page} (window {self.geometry.window})")
        if not found.has_state:
            short.append(f"mamba {self.geometry.grid(page)}")
        return found.depth * page, tuple(short)

    def find(self, request: HybridRequest, upto: int | None = None, *, whole: bool = False) -> int:
        """Match a request's tokens, except the last one, which is computed anyway; `admit` uses the match.

        Args:
            request: a request without pages.
            upto: match at most this many of its tokens; None: all.
            whole: match its last token too, because another engine computes the prompt (`disaggregation/decode.py`).

        Returns:
            Units of it that full attention has; `request.found` has the number of pages that it can use.
        """
        size = self.block_size
        count = len(request.tokens.names) if whole else self._reusable(request)
        if upto is not None:
            count = min(count, upto // size)
        found = self._tree.find(request.tokens.names, count, request.namespace)
        request.match = found
        request.node, request.found = found.node, found.usable
        request.short = self._missing_parts(found)
        request.branch, request.state_branch = self.branches(found)
        return found.depth * size

    def branches(self, found: TreeMatch) -> tuple[int | None, int | None]:
        """Return the end, in units, of the unusable match of full attention, and its end on the grid of states.

        Each is None if there is none.
        """
        size = self.block_size
        depth = found.depth * size
        branch = depth if found.promised < found.depth and self.window is not None else None
        if self.states is None:
            return branch, None
        grid = self.geometry.grid(size)
        state_branch = depth // grid * grid
        return branch, state_branch if state_branch > found.promised * size else None

    def admit(self, request: HybridRequest) -> None:
        """Lock the match of a request. A matched state is copied into a slot of the request."""
        tree, states = self._tree, self.states
        assert request.node is not None
        assert request.match is not None
        best = request.match.best
        if states is not None and best is not tree.root and best.state.there:
            if not states.free:
                lock = tree.hold(best)
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
        """Undo `admit` of a request for which nothing was allocated; its match stays."""
        assert request.lock is not None
        del self.requests[request]
        self._tree.release(request.lock)
        request.lock = None
        self._take_slots(request, -request.slots)
        request.protected = request.allocated = request.computed = 0

    def may_start(self, slots: int = 0) -> bool:
        """Return whether there are slots for a request after `slots` reserved ones; call it before the match."""
        return self.states is None or self.geometry.slots_to_start + slots <= self.states.unheld()

    def slots_needed(self, request: HybridRequest) -> int:
        """Return the number of slots that a request will still take until the end of its prefill."""
        if self.states is None:
            return 0
        return 1 + self.geometry.spare_slots + 1 - request.slots

    def lacking(
        self, request: HybridRequest, upto: int, pages: int = 0, slots: int = 0, *, in_chunks: bool = False
    ) -> int:
        """Count the units missing to compute the first `upto` tokens of an admitted request: the largest shortfall of
        any pool.

        Args:
            request: the request.
            upto: number of its tokens, from the first.
            pages: pages that are reserved for others.
            slots: slots that are reserved for others.
            in_chunks: the tokens may be computed in several chunks, as room allows (`chunk_end`).
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
        """Window pages with which a prefill of any length can proceed chunk by chunk.

        A chunk holds the pages that its predecessor has locked, less than two windows, and the pages left after a
        checkpoint: a window and a page. With states the latter is the distance between two states, or everything after
        a branch.
        """
        assert self.window is not None
        pages = 4 * self.window.pages + 4
        return pages if self.states is None else 2 * (pages + 2 * self.pages_of(self.geometry.grid(self.block_size)))

    def chunk_end(self, request: HybridRequest, upto: int) -> int:
        """Return the end of the chunk in which a request can be computed: `upto`, or less if window pages are short."""
        if self.window is None or self.pages_of(upto) - request.allocated <= self.window.unheld():
            return upto
        pages = self.window.unheld() if self.states is None else self.window.unheld() // 2
        return (request.allocated + max(1, pages)) * self.block_size

    def prefill(self, batch: Sequence[tuple[HybridRequest, int]]) -> None:
        """Allocate pages for the first tokens of admitted requests, and compute those that are not cached.

        Args:
            batch: requests, each with the number of tokens from its first; `lacking` was called for each.
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

    def preallocate(self, request: HybridRequest) -> None:
        """Allocate pages for all tokens of an admitted request, which another engine computes.

        Missing pages are freed by eviction.
        """
        self.make_room((self.pages_of(len(request.tokens)) - request.allocated) * self.block_size)
        self._allocate(request, len(request.tokens))
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
        """Cache the computed part of a running request, as far as a later request can use it, and lock it in the
        tree.
        """
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
        self._take_slots(request, slots - request.slots)  # the tree already had a state here
        assert request.lock is not None
        tree.release(request.lock)
        request.lock = tree.hold(node)
        if cuts:
            self._slide(request, request.computed - self._bigram - 1)
        request.tracked = None
        self._flush()

    def finish(self, request: HybridRequest, outputs: int | None = None) -> None:
        """Cache the computed part of a request, as far as a later request can use it, and free the rest.

        Args:
            request: the request.
            outputs: number of generated tokens, the last one included; drafts accepted after it do not count. None:
                all.
        """
        kept = request.computed
        if outputs is not None:
            kept = min(kept, request.tokens.num_prompt_tokens + outputs)
        units: int | None = kept - self._bigram
        if self.geometry.has_grid:
            units = request.tracked if request.tracked is None or request.tracked <= kept else None
        elif self.states is not None and kept < request.computed:
            units = None  # the state covers all accepted tokens
        if units is not None:
            self._insert(request, units // self.block_size)
        self.release(request)
        self._flush()

    def release(self, request: HybridRequest) -> None:
        """Free a request's pages outside the tree, and release its lock if it has one."""
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
        """Free a request's pages without caching them, and make room for the remaining requests."""
        self.release(request)
        self.make_room(RETRACT_TOKENS * len(self.requests))
        self._flush()

    def _insert(self, request: HybridRequest, count: int) -> Any:
        """Insert the first pages of a request; return the node where they end."""
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
        if self.window is None and self.states is None and 0 < prompt < count:  # a node ends at the end of the prompt
            self._tree.insert(tokens, prompt, request.namespace, 0, prompt)
        self._free += done.matched - protected
        if self.window is not None:
            self.window.free += max(0, count - max(protected, dead)) - done.windows
        request.slots -= done.has_state
        request.protected = count
        request.inserted = max(request.inserted, count)
        return done.node

    def _slide(self, request: HybridRequest, position: int, interval: int = 1) -> None:
        """Free the window pages that a request at this position no longer needs, if they are at least an interval."""
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
        """Free the window pages that a request no longer needs, when nothing is cached."""
        self._slide(request, request.computed - 1)

    # ------------------------------------------------------------------------------------------------ decode

    def lacking_steps(self, request: HybridRequest, steps: int) -> int:
        """Count the units missing for `steps` more tokens of a request: the largest shortfall of any pool.

        Window pages that slide away in between are counted at their peak.
        """
        window, geometry = self.window, self.geometry
        pages = self.pages_of(request.computed + steps) - request.allocated
        lacking = pages - self._free - self._tree.evictable
        if window is not None and geometry.window is not None:
            most = window.pages + self.pages_of(geometry.window + geometry.window_interval) + 3
            if geometry.has_grid:  # a window before the kept state stays
                most += self.pages_of(geometry.state_interval)
            own = request.allocated - max(request.dead, request.protected)
            lacking = max(lacking, min(pages, max(2, most - own)) - window.unheld())
        return max(0, lacking)

    def may_step(self, request: HybridRequest) -> bool:
        """Return whether the next token of a request needs no page, or a page is free."""
        return not request.opens_page or (self._free > 0 and (self.window is None or self.window.free > 0))

    def quiet_steps(self, requests: Sequence[HybridRequest]) -> int:
        """Count the next steps in which none of these requests needs a page, slides, keeps a state or evicts."""
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
        """Make room for a token of each request, and slide their windows; slide nothing and return False if room is
        short.

        In that case room is made for one page per request, though some need none (`alloc_paged_token_slots_decode`).
        """
        fits = self._slides(requests, sum(request.opens_page for request in requests))
        if fits:
            self.make_room(len(requests) * self.block_size)
        self._flush()
        return fits

    def _slides(self, requests: Sequence[HybridRequest], pages: int) -> bool:
        """Slide the windows of requests if there is room for `pages` pages.

        The lock of a request that has generated a window's length is released.
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
        """Append a token and compute it; `begin_step` has made room."""
        geometry = self.geometry
        request.append(token)
        self._allocate(request, request.computed + 1)
        request.computed += 1
        request.steps += 1
        if self.states is not None and geometry.has_grid and not request.computed % geometry.state_interval:
            request.tracked = request.computed

    # -------------------------------------------------------------------------------------- speculative decoding

    def begin_verify(self, requests: Sequence[HybridRequest]) -> bool:
        """Give each request room for its next step, and slide their windows; slide nothing and return False if room is
        short.

        If any request needs a slot, room is made for one page more per request (`alloc_paged_token_slots_extend`).
        """
        lacking = [self.pages_ahead(request) for request in requests]
        fits = self._slides(requests, sum(lacking))
        if fits:
            self._take_ahead(requests, lacking)
        self._flush()
        return fits

    def end_verify(self, request: HybridRequest, tokens: Sequence[int]) -> None:
        """Append the tokens that a step commits: the last sampled token and accepted drafts.

        `begin_verify` has made room.
        """
        for token in tokens:
            request.append(token)
        before, request.computed = request.computed, request.computed + len(tokens)
        request.steps += 1
        if self.geometry.has_grid:
            interval = self.geometry.state_interval
            mark = request.computed // interval * interval
            if mark > before:
                request.tracked = mark
