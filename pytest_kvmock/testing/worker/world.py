"""A worker under contract in its harness: calls, their events, and the held blocks.

PYTEST_DONT_REWRITE: each message is complete; pytest would add the condition below it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from pytest_kvmock.engines.worker import KvWorker
from pytest_kvmock.harness.router_harness import RouterHarness
from pytest_kvmock.testing.drafts import Player, random_traffic
from pytest_kvmock.testing.manager.manager_checks import expect_same
from pytest_kvmock.values.events import EventData, Stored
from pytest_kvmock.values.prompt_keys import is_attention_group
from pytest_kvmock.values.tokens import Prompt

P = ParamSpec("P")
T = TypeVar("T")


class World:
    """A harness whose worker 0 is under contract; its events are checked after each call."""

    def __init__(self, harness: RouterHarness) -> None:
        self.harness = harness

    @property
    def worker(self) -> KvWorker:
        """The worker under contract."""
        return self.harness.worker(0)

    def do(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call, and check the events."""
        __tracebackhide__ = True
        answer = call(*args, **kwargs)
        self.harness.events.assert_no_event_errors()
        return answer

    def play(self, seed: int, workers: int = 1) -> None:
        """Play random traffic; check the events after each step."""
        __tracebackhide__ = True
        player = Player(self.harness)
        for step in random_traffic(seed, 80, workers=workers):
            self.do(player.do, step)

    def kinds(self) -> list[type[EventData]]:
        """Return the kinds of the events since the log was cleared, in order."""
        return [type(entry.event.event.data) for entry in self.harness.events]

    def finds(self, prompt: Prompt) -> bool:
        """Whether the router finds all whole blocks of a prompt on the worker."""
        return len(prompt.block_hashes(self.harness.profile.block_size)) == self.harness.overlap(prompt).get(0, 0)

    def state(self) -> dict[str, Any]:
        """Return the requests and blocks that the worker holds, and the number of events."""
        worker = self.worker
        manager = worker.manager
        return {
            "requests": [(len(request), request.status) for request in worker.requests],
            "resident": sorted(manager.resident()),
            "num_active_blocks": manager.num_active_blocks,
            "num_active_block_refs": manager.num_active_block_refs,
            "num_inactive_blocks": manager.num_inactive_blocks,
            "events": self.harness.events.total,
        }

    def expect_state(self, before: dict[str, Any], by: str) -> None:
        """Check that the visible state is unchanged."""
        __tracebackhide__ = True
        expect_same(before, self.state(), by)

    def expect_refused(self, error: type[Exception], call: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Check that a call raises this error and leaves the events valid."""
        __tracebackhide__ = True
        name = getattr(call, "__name__", repr(call))
        try:
            answer = self.do(call, *args, **kwargs)
        except error:
            self.harness.events.assert_no_event_errors()
        else:
            raise AssertionError(f"{name}{args} answered {answer!r}; expected {error.__name__}")

    def prompt(self, blocks: int, after: Prompt | None = None, *, tail: int = 0) -> Prompt:
        """Make a prompt; if names look ahead, add the tokens that they cover, so that all blocks have names."""
        more = self.worker.traits.looks_ahead if after is None else 0
        return self.harness.prompt(blocks, after, tail=tail + more)

    def expect_cached(self, prompt: Prompt, blocks: int) -> None:
        """Check that a longer prompt reuses `blocks` leading blocks of a prompt.

        The longer prompt keeps its last token out of these blocks. An engine whose events promise more than it can use
        may reuse fewer.
        """
        __tracebackhide__ = True
        size = self.harness.profile.block_size
        found = self.do(self.worker.cached_tokens, self.harness.prompt(0, after=prompt, tail=1))
        assert self.may_reuse(found, blocks), (
            f"{found} tokens of a prompt are cached; expected {blocks} blocks, {blocks * size} tokens"
        )

    def may_reuse(self, tokens: int, blocks: int) -> bool:
        """Whether `tokens` is right for `blocks` cached blocks; it may be less if the engine's events promise more.

        An engine that reuses parts of blocks may reuse up to a block more, or one block fewer, as a leaf may leave
        without an event.
        """
        size = self.harness.profile.block_size
        if self.worker.traits.partial_blocks:
            return (blocks - 1) * size <= tokens < (blocks + 1) * size
        return tokens == blocks * size or (self.worker.traits.promises_more and tokens < blocks * size)

    def stored(self) -> list[int]:
        """Return the number of whole blocks in each Stored; for a hybrid model, only of the attention group."""
        size = self.harness.profile.block_size
        found = []
        for event in (entry.event for entry in self.harness.events):
            data, whole = event.event.data, all(len(ids) == size for ids in event.token_ids or ())
            if isinstance(data, Stored) and whole and is_attention_group(event.extra):
                found.append(len(data.block_hashes))
        return found

    def expect_idle(self, resident: int | None = None) -> None:
        """Check that no block is in use, and that `resident` blocks are cached."""
        __tracebackhide__ = True
        manager = self.worker.manager
        active = (manager.num_active_blocks, manager.num_active_block_refs)
        assert active == (0, 0), f"no request has blocks; (num_active_blocks, num_active_block_refs) is {active}"
        names, idle = len(manager.resident()), manager.num_inactive_blocks
        if not self.worker.traits.takes_hashes and names > idle:
            names = idle  # a prompt's tail is a second name of a block
        if self.worker.traits.partial_blocks and resident is not None and names == idle == resident + 1:
            return  # the extra block has the tokens after the whole blocks
        assert resident is None or (resident, resident) == (names, idle), (
            f"{resident} blocks are cached; (resident, num_inactive_blocks) is {(names, idle)}"
        )
