"""Drives SGLang's cache of a hybrid model as its scheduler does: slots, match, lock, room, compute, checkpoint, slide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from pytest_kvmock.cache.sglang.hybrid_cache import HybridCacheManager
from pytest_kvmock.cache.sglang.hybrid_request import HybridRequest
from pytest_kvmock.cache.vllm.groups import CacheGroup
from pytest_kvmock.drivers.driver import checked_manager
from pytest_kvmock.drivers.tree_driver import TreeDriver

if TYPE_CHECKING:
    from pytest_kvmock.cache.manager import KvManager


class HybridRadixDriver(TreeDriver):
    """Serves requests from a `HybridCacheManager`.

    A request is checkpointed after its prefill, or each chunk, in whole pages, and when it finishes; each time up to where
    a later one can use it. A prompt for whose windows there is no room at once is computed in more chunks, as SGLang's
    chunked prefill does. A preempted request leaves in the cache what was checkpointed.

    Args:
        manager: the cache.
        prefix_caching: whether requests reuse and leave anything; without it, each has pages of its own.
        rng: source of the names of partial blocks, and of local hashes where tokens are unknown.

    Raises:
        ValueError: the manager is no such cache.
    """

    traits = replace(TreeDriver.traits, promises_more=True)

    manager: HybridCacheManager

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        super().__init__(checked_manager(manager, HybridCacheManager, "HybridRadixDriver"), prefix_caching, rng)
        geometry, page = self.manager.geometry, self.manager.block_size
        groups = [CacheGroup("full_attention", page)]
        if geometry.window is not None:
            groups.append(CacheGroup("sliding_window", page, window=geometry.window))
        if geometry.states is not None:
            groups.append(CacheGroup("mamba", geometry.grid(page)))
        parts, pairs = len(groups) > 1, self.manager.hasher.is_eagle
        self.traits = replace(
            self.traits,
            groups=tuple(groups) if parts else (),
            promises_more=parts,
            looks_ahead=int(pairs),
            pairs=pairs,
            takes_hashes=not pairs,
        )
        draft = self.manager.speculative
        self.drafts = 0 if draft is None else draft.drafts

    def lacking(self, request: HybridRequest) -> tuple[str, ...]:
        """The parts that are not there where full attention ends, by their sizes. Changes nothing."""
        return self.manager.missing_parts(request)[1]

    def need(self, request: HybridRequest, upto: int, tokens: Sequence[int] = ()) -> int:
        """Pages. Where pages of windows or slots of states run short, as many more than there is room for as lack of those.

        Without any, this is the lookup of the request: what it did stays, as in SGLang, if it is refused.
        """
        return self.need_runs(request, upto, [(token,) for token in tokens])

    def need_runs(self, request: HybridRequest, upto: int, runs: Sequence[Sequence[int]] = ()) -> int:
        """Return the `need` of steps that generate so many tokens each: accepted drafts and one more."""
        manager, room = self.manager, self.room()
        if request in manager.requests:
            count = sum(map(len, runs))
            lacking = manager.lacking_steps(request, count)
            if (
                runs and manager.speculative is not None
            ):  # the last step needs room ahead of what is committed before it
                count += manager.speculative.ahead(manager.block_size) - len(runs[-1])
                lacking = manager.lacking_steps(request, count)
            return room + lacking if lacking else max(min(room, manager.pages_of(upto + count) - request.allocated), 0)
        if not self._start(request, len(request)):
            return room + 1
        lacking = manager.lacking(request, upto, in_chunks=True)
        manager.withdraw(request)
        return room + lacking if lacking else min(room, manager.pages_of(upto) - request.found)

    def _start(self, request: HybridRequest, upto: int) -> bool:
        manager = self.manager
        if not manager.may_start():
            return False
        manager.find(request, upto if self._prefix_caching else 0)
        manager.admit(request)
        return True

    def _fits(self, request: HybridRequest, upto: int) -> bool:
        return not self.manager.lacking(request, upto, in_chunks=True)

    def _withdraw(self, request: HybridRequest) -> None:
        self.manager.withdraw(request)

    def admit(self, request: HybridRequest, upto: int) -> None:
        """Compute up to this token, or to the whole page before it, and checkpoint."""
        size = self.manager.block_size
        super().admit(request, upto // size * size if upto < len(request) else upto)

    def _compute(self, request: HybridRequest, upto: int) -> None:
        """Compute in as many chunks as there is room for; the last one is checkpointed by who called."""
        while True:
            end = self.manager.chunk_end(request, upto)
            self.manager.prefill([(request, end)])
            if end == upto:
                return
            self._computed(request)

    def _computed(self, request: HybridRequest) -> None:
        if self._prefix_caching:
            self.manager.checkpoint(request)
        else:
            self.manager.slide(request)

    def extend_runs(self, request: HybridRequest, runs: Sequence[Sequence[int]]) -> None:
        """Decode steps, each of which commits the last sampled token and accepted drafts."""
        for run in runs:
            fits = self.make_room((request,))
            assert fits  # it was asked before
            self.commit(request, run)

    def extend(self, request: HybridRequest, tokens: Sequence[int]) -> None:
        """Decode steps, one a token."""
        self.extend_runs(request, [(token,) for token in tokens])

    def commit(self, request: HybridRequest, run: Sequence[int]) -> None:
        """End a step, for which `make_room` has made room."""
        if self.drafts:
            self.manager.end_verify(request, run)
        else:
            self.manager.end_step(request, run[0])

    # ------------------------------------------------------------------------------------------- a scheduler's

    def step_tokens(self, requests: Sequence[HybridRequest]) -> int:
        """A page for each that needs one; where windows have none for them, more than is unheld by what is lacking."""
        size, window, tokens = self.manager.block_size, self.manager.window, super().step_tokens(requests)
        if self.drafts:
            tokens = sum(map(self.manager.pages_ahead, requests)) * size
        if window is not None and tokens > window.unheld() * size:
            return self.unheld() + tokens - window.unheld() * size
        return tokens

    def make_room(self, requests: Sequence[HybridRequest]) -> bool:
        """Slide windows, and evict until there is a page for each that needs one, or room for their drafts."""
        return self.manager.begin_verify(requests) if self.drafts else self.manager.begin_step(requests)

    def generate_run(self, request: HybridRequest, tokens: Sequence[int]) -> None:
        """Commit a step: the last sampled token and accepted drafts."""
        self.checkpoint(request)
        self.commit(request, tokens)

    def generate(self, request: HybridRequest, token: int) -> bool:
        """Compute one token, for which `make_room` has made room; False, and nothing is computed, where it has not."""
        self.checkpoint(request)  # of the prompt alone: the token is computed in a step of its own
        if not (self.drafts or self.manager.may_step(request)):
            return False
        self.commit(request, (token,))
        return True

    def quiet_passes(self, requests: Sequence[HybridRequest]) -> int:
        """Passes in which each generates a token and none needs a page, slides, keeps a state or evicts."""
        if self.drafts:  # each step takes room ahead
            return 0
        return self.manager.quiet_steps(requests) if self._prefilled.isdisjoint(requests) else 0

    def generate_quietly(self, request: HybridRequest, tokens: Sequence[int]) -> None:
        """Append tokens of such passes."""
        super().generate_quietly(request, tokens)
        request.steps += len(tokens)
