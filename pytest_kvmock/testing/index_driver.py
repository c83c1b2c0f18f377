"""Drives an index under contract: events and look-ups, in prompts of letters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from inspect import isawaitable
from typing import Any

from pytest_kvmock.events import Cleared, EventData, KvCacheEvent, Removed, RouterEvent, StorageTier, Stored
from pytest_kvmock.harness.under_test import IndexUnderTest, Scores, UnreadableAnswer, WorkerScores, agree, question
from pytest_kvmock.tokens import Prompt


def prompt_of(letters: str, block_size: int, tail: int = 0) -> Prompt:
    """A prompt with a block for each letter, whose tokens are all that letter's; and some tokens more."""
    return Prompt([*(ord(letter) for letter in letters for _ in range(block_size)), *[0] * tail])


class IndexDriver:
    """Gives an index events, looks prompts up in it, and keeps the last events for the messages.

    A block is named by the letters from the root to it: "abc" is block c below b below a. Hashes are Dynamo's, and the
    tokens travel beside the events.

    Args:
        index: what is under contract.
        block_size: tokens a block.
        wait: waits for what an async index answers.
    """

    def __init__(self, index: IndexUnderTest, block_size: int, wait: Callable[[Awaitable[Any]], Any]) -> None:
        self.index = index
        self._size = block_size
        self._wait = wait
        self._ids: dict[tuple[int, int], int] = {}
        self._applied: list[str] = []

    def store(
        self,
        letters: str,
        worker: int = 0,
        *,
        after: str = "",
        rank: int = 0,
        tier: StorageTier = StorageTier.DEVICE,
    ) -> None:
        """Apply a Stored: the blocks of these letters, after those of `after`."""
        prompt = prompt_of(after + letters, self._size)
        start = len(after)
        local, blocks = prompt.block_hashes(self._size), prompt.sequence_hashes(self._size)
        tokens = [[ord(letter)] * self._size for letter in letters]
        data = Stored(blocks[start - 1] if start else None, tuple(blocks[start:]), tuple(local[start:]))
        what = f"stored {letters}" + (f" after {after}" if after else "")
        self._apply(worker, rank, data, what, tokens, tier=tier)

    def remove(self, *chains: str, worker: int = 0, rank: int = 0, tier: StorageTier = StorageTier.DEVICE) -> None:
        """Apply a Removed: the last block of each chain."""
        blocks = tuple(self._last(chain) for chain in chains)
        self._apply(worker, rank, Removed(blocks), f"removed the last block of {', '.join(chains)}", tier=tier)

    def _last(self, chain: str) -> int:
        return prompt_of(chain, self._size).sequence_hashes(self._size)[-1]

    def publish(self, steps: Iterable[tuple[str, str]]) -> None:
        """Publish many events of worker 0, without a flush or a look-up in between.

        Args:
            steps: "store" with the letters of a chain, or "remove" with the chain whose last block is removed.
        """
        __tracebackhide__ = True
        events = []
        for kind, chain in steps:
            tokens = None
            if kind == "store":
                prompt = prompt_of(chain, self._size)
                blocks, local = prompt.sequence_hashes(self._size), prompt.block_hashes(self._size)
                data: EventData = Stored(None, tuple(blocks), tuple(local))
                tokens = [[ord(letter)] * self._size for letter in chain]
            else:
                data = Removed((self._last(chain),))
            event_id = self._ids.get((0, 0), 0)
            self._ids[0, 0] = event_id + 1
            events.append(RouterEvent(0, KvCacheEvent(event_id, data), token_ids=tokens))
        self._applied.append(f"worker 0 published {len(events):,} events, without a flush in between")

        async def apply_all() -> None:
            for event in events:
                answer = self.index.apply(event)
                if isawaitable(answer):
                    await answer

        try:
            if self.index.is_async:
                self._wait(apply_all())
            else:
                for event in events:
                    self.index.apply(event)
        except Exception as error:
            raise AssertionError(f"apply raised {type(error).__name__}: {error}\n{self._story()}") from error

    def size(self) -> int | None:
        """How many entries the index has, flushed; None where it has no `size`.

        Raises:
            AssertionError: it answers no number.
        """
        __tracebackhide__ = True
        count = getattr(self.index.index, "size", None)
        if not callable(count):
            return None
        self._flush()
        size = self._do(count)
        if not isinstance(size, int):
            raise AssertionError(f"size() answered {size!r:.80}; expected a number of entries")  # noqa: TRY004 - a promise broken
        return size

    def _flush(self) -> None:
        __tracebackhide__ = True
        if self.index.flush is not None:
            self._do(self.index.flush)

    def clear(self, worker: int = 0, *, rank: int = 0) -> None:
        """Apply a Cleared."""
        self._apply(worker, rank, Cleared(), "cleared all")

    def remove_worker(self, worker: int) -> None:
        """Remove a worker, where the index has `remove_worker`."""
        if self.index.remove_worker is not None:
            self._do(self.index.remove_worker, worker)
            self._applied.append(f"worker {worker} removed")

    def _apply(
        self,
        worker: int,
        rank: int,
        data: EventData,
        what: str,
        tokens: list[list[int]] | None = None,
        *,
        tier: StorageTier = StorageTier.DEVICE,
    ) -> None:
        __tracebackhide__ = True
        event_id = self._ids.get((worker, rank), 0)
        self._ids[worker, rank] = event_id + 1
        event = RouterEvent(worker, KvCacheEvent(event_id, data, rank), tier, tokens)
        where = "" if tier is StorageTier.DEVICE else f" in {tier.value}"
        self._applied.append(f"worker {worker}{f' rank {rank}' if rank else ''} {what}{where}")
        try:
            self._do(self.index.apply, event)
        except Exception as error:
            raise AssertionError(f"apply raised {type(error).__name__}: {error}\n{self._story()}") from error

    def expect(
        self,
        letters: str,
        expected: dict[tuple[int, int], int] | dict[int, int],
        *,
        tail: int = 0,
        any_rank: bool = False,
    ) -> None:
        """Look up a prompt of these letters, and compare the answer.

        Args:
            letters: the blocks.
            expected: leading blocks by worker (of rank 0), or by (worker, rank).
            tail: tokens after the blocks.
            any_rank: whether the index may answer of any rank of the worker.
        """
        __tracebackhide__ = True
        due: Scores = {key if isinstance(key, tuple) else (key, 0): blocks for key, blocks in expected.items()}
        answer = self.ask(letters, tail=tail)
        if any_rank:
            answer = {key[0] if isinstance(key, tuple) else key: blocks for key, blocks in answer.items()}
        assert agree(answer, due), (
            f"looked up {letters[:40] or 'an empty prompt'}: expected {expected}, the index answered {answer}\n{self._story()}"
        )

    def expect_tiers(self, letters: str, expected: dict[str, dict[int, int]]) -> None:
        """Look up a prompt of these letters tier by tier, where the index has `find_tiered`, and compare the answer.

        Args:
            letters: the blocks.
            expected: blocks by worker (of rank 0), by the name of the tier; without what is empty.
        """
        __tracebackhide__ = True
        find_tiered = self.index.find_tiered
        if find_tiered is None:
            return
        self._flush()
        try:
            answer = self.index.read_tiered(
                self._do(find_tiered, list(prompt_of(letters, self._size).block_hashes(self._size)))
            )
        except UnreadableAnswer as error:
            raise AssertionError(f"{error}\n{self._story()}") from error
        except Exception as error:
            raise AssertionError(f"find_tiered raised {type(error).__name__}: {error}\n{self._story()}") from error
        for tier in StorageTier:
            due: Scores = {(worker, 0): blocks for worker, blocks in expected.get(tier, {}).items()}
            got = answer.get(tier, {})
            assert agree(got, due), (
                f"looked up {letters} by tier: expected {expected.get(tier, {})} in {tier}, the index answered {got}\n"
                f"{self._story()}"
            )

    def ask(self, letters: str, *, tail: int = 0) -> Scores | WorkerScores:
        """The answer of the index for a prompt of these letters, zeros dropped."""
        __tracebackhide__ = True
        under_test = self.index
        prompt = prompt_of(letters, self._size, tail)
        asked = question(list(prompt.block_hashes(self._size)), prompt.tokens, takes_tokens=under_test.takes_tokens)
        self._flush()
        try:
            return under_test.read(self._do(under_test.ask, asked))
        except UnreadableAnswer as error:
            raise AssertionError(f"{error}\n{self._story()}") from error
        except Exception as error:
            raise AssertionError(
                f"{under_test.asked} raised {type(error).__name__}: {error}\n{self._story()}"
            ) from error

    def _do(self, call: Callable[..., Any], *arguments: Any) -> Any:
        __tracebackhide__ = True
        answer = call(*arguments)
        return self._wait(answer) if isawaitable(answer) else answer

    def _story(self) -> str:
        """The events that the index was given: the last of them."""
        shown = [line if len(line) <= 100 else line[:97] + "..." for line in self._applied[-12:]]
        more = [f"  ... {len(self._applied) - 12} events before"] if len(self._applied) > 12 else []
        return "\n".join(["the index was given, in this order:", *more, *(f"  {line}" for line in shown)])
