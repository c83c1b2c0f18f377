"""Driver of SGLang's hybrid cache, in the steps of SGLang's scheduler: take slots, match, lock, make room, compute,
checkpoint, slide windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from pytest_kvmock.engines.base.cache_group import CacheGroup
from pytest_kvmock.engines.base.driver import Powers, PromptPlan, checked_manager
from pytest_kvmock.engines.base.tree_driver import TreeDriver
from pytest_kvmock.engines.sglang.hybrid_cache import HybridCacheManager
from pytest_kvmock.engines.sglang.hybrid_request import HybridRequest

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.manager import KvManager


class HybridRadixDriver(TreeDriver):
    """Serves requests from a `HybridCacheManager`.

    A request is checkpointed in whole pages after its prefill, or each chunk, and when it finishes: each time as far as
    a later request can use it. If a prompt lacks window pages, it is computed in more chunks, as in SGLang's chunked
    prefill. Checkpoints of a preempted request stay in the cache.

    Args:
        manager: the cache.
        prefix_caching: whether requests reuse and leave anything; without it, requests share no pages.
        rng: source of the names of partial blocks, and of local hashes where tokens are unknown.

    Raises:
        ValueError: the manager is not a `HybridCacheManager`.
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

    @property
    def powers(self) -> Powers:
        """Its optional abilities."""
        drafts = self if self.drafts else None
        return Powers(
            lacking=self.lacking,
            short=lambda request: request.short,
            brought=lambda request: (request.from_host, request.from_storage),
            drafts=drafts,
            generate_run=self.generate_run,
        )

    def lacking(self, request: HybridRequest) -> tuple[str, ...]:
        """Return the parts missing at the end of the full attention match, each with its size. Changes nothing."""
        return self.manager.missing_parts(request)[1]

    def need(self, request: HybridRequest, upto: int, tokens: Sequence[int] = ()) -> int:
        """Return the pages that a request needs; if window pages or state slots are short, the free room plus their
        shortfall.

        For a request without pages this is its lookup. Recency and splits stay, as in SGLang, even if the request is
        refused.
        """
        return self.need_runs(request, upto, [(token,) for token in tokens])

    def need_runs(self, request: HybridRequest, upto: int, runs: Sequence[Sequence[int]] = ()) -> int:
        """Return the `need` of steps that each generate one of `runs`: accepted drafts and one more token."""
        manager, room = self.manager, self.room()
        if request in manager.requests:
            count = sum(map(len, runs))
            lacking = manager.lacking_steps(request, count)
            if (
                runs and manager.speculative is not None
            ):  # the last step needs room beyond the tokens committed before it
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

    def admit(self, request: HybridRequest, upto: int, plan: PromptPlan | None = None) -> None:
        """Compute the first `upto` tokens and checkpoint; if these are only part of the prompt, in whole pages."""
        size = self.manager.block_size
        super().admit(request, upto // size * size if upto < len(request) else upto, plan)

    def _compute(self, request: HybridRequest, upto: int) -> None:
        """Compute in as many chunks as room requires; the caller checkpoints the last one."""
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
        """Decode in steps that each commit the last sampled token and accepted drafts."""
        for run in runs:
            fits = self.make_room((request,))
            assert fits  # the caller has checked the room
            self.commit(request, run)

    def extend(self, request: HybridRequest, tokens: Sequence[int]) -> None:
        """Decode one token per step."""
        self.extend_runs(request, [(token,) for token in tokens])

    def commit(self, request: HybridRequest, run: Sequence[int]) -> None:
        """Commit the tokens of a step; `make_room` has made room."""
        if self.drafts:
            self.manager.end_verify(request, run)
        else:
            self.manager.end_step(request, run[0])

    # ------------------------------------------------------------------------------------------- a scheduler's

    def step_tokens(self, requests: Sequence[HybridRequest]) -> int:
        """Return the tokens of room that a step of these requests needs.

        If window pages are short, this is the number of unheld tokens plus the shortfall.
        """
        size, window, tokens = self.manager.block_size, self.manager.window, super().step_tokens(requests)
        if self.drafts:
            tokens = sum(map(self.manager.pages_ahead, requests)) * size
        if window is not None and tokens > window.unheld() * size:
            return self.unheld() + tokens - window.unheld() * size
        return tokens

    def make_room(self, requests: Sequence[HybridRequest]) -> bool:
        """Slide windows, and evict until each request that needs a page, or room for its drafts, can get it."""
        return self.manager.begin_verify(requests) if self.drafts else self.manager.begin_step(requests)

    def generate_run(self, request: HybridRequest, tokens: Sequence[int]) -> None:
        """Commit a step: the last sampled token and accepted drafts."""
        self.checkpoint(request)
        self.commit(request, tokens)

    def generate(self, request: HybridRequest, token: int) -> bool:
        """Compute one token; compute nothing and return False if `make_room` has not made room for it."""
        self.checkpoint(request)  # only the prompt: the token is computed in a separate step
        if not (self.drafts or self.manager.may_step(request)):
            return False
        self.commit(request, (token,))
        return True

    def quiet_passes(self, requests: Sequence[HybridRequest]) -> int:
        """Count the next passes in which each request generates a token and none needs a page, slides, keeps a state or
        evicts.
        """
        if self.drafts:  # each step takes room ahead
            return 0
        return self.manager.quiet_steps(requests) if self._prefilled.isdisjoint(requests) else 0

    def generate_quietly(self, request: HybridRequest, tokens: Sequence[int]) -> None:
        """Append the tokens of such passes."""
        super().generate_quietly(request, tokens)
        request.steps += len(tokens)
