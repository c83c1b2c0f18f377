"""Drives an index under contract: events and look-ups, for prompts written as letters.

One subject: the calls of the index, and the message when it is wrong.

PYTEST_DONT_REWRITE: each message is complete; pytest would add the condition below it.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from inspect import isawaitable
from itertools import pairwise
from reprlib import Repr
from threading import Barrier, Event, Thread
from time import monotonic, sleep
from typing import Any, Final, Literal, TypeAlias

import pytest

from pytest_kvmock.harness.under_test import (
    IndexUnderTest,
    Scores,
    UnreadableAnswer,
    WorkerScores,
    agree,
    difference_below,
    first_difference,
    of_each_form,
)
from pytest_kvmock.testing.index.reachable import reachable_from
from pytest_kvmock.values.events import (
    Cleared,
    EventData,
    KvCacheEvent,
    Located,
    Removed,
    RouterEvent,
    SparseStored,
    StorageTier,
    Stored,
    StreamKey,
    Updated,
)
from pytest_kvmock.values.programs.near_hashes import TRUNCATIONS, hash_pair, token_pair
from pytest_kvmock.values.prompt_keys import LOOKAHEAD, EventExtra, LoraIds, group_extra
from pytest_kvmock.values.tokens import Prompt, block_hashes, sequence_hashes

_THREADS: Final = 3
"""Number of threads that look up while another applies events."""

_SWITCH_S: Final = 1e-5
"""The switch interval of these threads, in seconds."""

_MOST_S: Final = 60
"""Timeout of the threads that write, in seconds: far longer than a thread takes unless it is stuck."""

_FINDS_NOTHING: Final = (
    "{} has answered nothing by {}() so far, whatever was stored: names of blocks are Dynamo's here; of an index that "
    'computes those of an engine from tokens, declare which: names = "vllm", or a variant of it with its '
    "hash_algorithm and hash_seed"
)

_SHORT: Final = Repr()
_SHORT.maxstring = 25  # identifiers of multimodal items have 64 digits


Group: TypeAlias = tuple[int, str, int | None]
"""A cache group: its number, vLLM's name of its kind, and the tokens of its window."""


FULL_WINDOW: Final = 2**15
"""The window, in tokens, of TensorRT-LLM events made by hand: longer than any request."""


def _of_group(group: Group) -> str:
    return f" in group {group[0]} ({group[1]})"


def prompt_of(letters: str, block_size: int, tail: int = 0, **keys: Any) -> Prompt:
    """Return a prompt with one block for each letter, filled with the letter's token, then `tail` tokens 0; it carries
    `keys`.
    """
    return Prompt([*(ord(letter) for letter in letters for _ in range(block_size)), *[0] * tail], **keys)


class IndexDriver:
    """Applies events to an index, looks prompts up in it, and keeps the last events for the messages.

    A block is named by the letters from the root to it: "abc" is block c below b below a. Hashes are Dynamo's, and the
    tokens are passed next to the events.

    Args:
        index: the index under contract.
        block_size: tokens per block.
        wait: waits for the answers of an async index.

    Attributes:
        index: as given.
        carries: the names of the keys that an engine publishes next to its events; None: all of them.
        names_of: returns an engine's block hashes for a prompt; None: Dynamo's.
        says_window: whether each event has its window, and a Stored its levels and priorities, as TensorRT-LLM's have.
        stored_at: the level and priority of stored blocks, if events have them.
    """

    def __init__(self, index: IndexUnderTest, block_size: int, wait: Callable[[Awaitable[Any]], Any]) -> None:
        self.index = index
        self.carries: frozenset[str] | None = None
        self.names_of: Callable[[Prompt], list[int]] | None = None
        self.says_window = False
        self.stored_at = (0, 35)
        self._has_answered = False
        self._lora_ids: dict[int, LoraIds] = {}
        self._size = block_size
        self._wait = wait
        self._ids: dict[tuple[int, int], int] = {}
        self._applied: list[str] = []
        self._last_event: RouterEvent | None = None
        self._about = ""
        self._tokens: dict[str, tuple[int, ...]] = {}
        self._hashes: dict[str, int] = {}
        self._roots: dict[str, int] = {}
        self._forms: dict[StreamKey, tuple[int, bool]] = {}

    def look_ahead(self, worker: int, ahead: int, *, pairs: bool = False) -> None:
        """Make later block names of a worker cover the next `ahead` tokens; if `ahead` is 1, its token ids may be
        `pairs`.
        """
        self._forms[worker, 0] = ahead, pairs

    def near(self, what: Literal["local", "block"], kept: str) -> None:
        """Make p and q first blocks whose hashes agree in a part, the part that a truncating index keeps.

        For an index that is queried by local hashes, local hash and name of each are the same number. An index that is
        queried by tokens gets tokens with such local hashes, or blocks with such names.

        Args:
            what: which hashes: of their tokens, or the names of the blocks.
            kept: the part; a name of `TRUNCATIONS`.
        """
        if not self.index.plain.takes_tokens:
            self._hashes = dict(zip("pq", hash_pair(kept), strict=True))
        elif what == "local":
            self._tokens = dict(zip("pq", token_pair(self._size, kept), strict=True))
        elif self.names_of is None:  # otherwise they follow from tokens
            self._roots = dict(zip("pq", hash_pair(kept), strict=True))
        self._about = f"p and q are blocks whose {what} hashes agree {TRUNCATIONS[kept].words}\n"

    def near_tokens(self, first: tuple[int, ...], second: tuple[int, ...]) -> None:
        """Make p and q first blocks of these tokens."""
        self._tokens = {"p": first, "q": second}
        self._about = f"p is a block of the tokens {_short(first)}, q one of {_short(second)}\n"

    def _prompt(self, letters: str, tail: int = 0, keys: Mapping[str, Any] | None = None) -> Prompt:
        """Return a prompt of these letters with these keys."""
        if letters[:1] not in self._hashes:
            prompt = prompt_of(letters, self._size, tail, **(keys or {}))
            first = self._tokens.get(letters[:1])
            return prompt if first is None else Prompt((*first, *(prompt.tokens or ())[self._size :]))
        local = prompt_of(letters, self._size).block_hashes(self._size)
        return Prompt(hashes=[self._hashes[letters[0]], *local[1:]])

    def _published(self, extra: EventExtra) -> EventExtra:
        """Return the part of `extra` that an engine publishes next to its events."""
        return {name: value for name, value in extra.items() if self.carries is None or name in self.carries}

    def _names(
        self, letters: str, keys: Mapping[str, Any] | None = None, *, then: str = "", ahead: int = 0
    ) -> list[int]:
        """Return the block hashes of a chain. Each covers the next `ahead` tokens; the next block is `then`."""
        prompt = self._prompt(letters, keys=keys)
        if ahead:
            windows = self._prompt(letters + then, keys=keys).block_hashes(self._size, ahead)
            return sequence_hashes(windows[: len(letters)])
        root = self._roots.get(letters[:1])
        if root is None:
            return self._names_of_prompt(prompt)
        return [root, *sequence_hashes(prompt.block_hashes(self._size)[1:], parent=root)]

    def _names_of_prompt(self, prompt: Prompt) -> list[int]:
        return prompt.sequence_hashes(self._size) if self.names_of is None else self.names_of(prompt)

    def store(
        self,
        letters: str,
        worker: int = 0,
        *,
        after: str = "",
        rank: int = 0,
        tier: StorageTier = StorageTier.DEVICE,
        keys: Mapping[str, Any] | None = None,
        group: Group | None = None,
        then: str = "",
        may_be_refused: bool = False,
    ) -> None:
        """Apply a Stored: the blocks of `letters` after those of `after`, for a prompt that carries `keys`.

        With `group` it belongs to this cache group. `then` is the next block, which the names may cover (`look_ahead`).
        With `may_be_refused` the index may raise.
        """
        if self._forms.get((worker, rank), (0, False))[0]:
            self._store_ahead(letters, worker, after, then, keys)
            return
        prompt = self._prompt(after + letters, keys=keys)
        start, size = len(after), self._size
        local, blocks = prompt.block_hashes(size), self._names(after + letters, keys)
        flat, extra = prompt.tokens, None
        tokens = None if flat is None else [list(flat[at : at + size]) for at in range(start * size, len(flat), size)]
        if prompt.keys is not None:
            ids = self._lora_ids.setdefault(worker, LoraIds())
            extra = self._published(prompt.keys.carried(start, len(local), size, ids))
        data = Stored(blocks[start - 1] if start else None, tuple(blocks[start:]), tuple(local[start:]))
        what = f"stored {_chain(letters)}" + (f" after {_chain(after)}" if after else "") + _with(keys)
        if group is not None:
            extra, what = group_extra(*group, extra), what + _of_group(group)
        self._apply(worker, rank, data, what, tokens, tier=tier, extra=extra, may_be_refused=may_be_refused)

    def _store_ahead(
        self, letters: str, worker: int, after: str, then: str, keys: Mapping[str, Any] | None = None
    ) -> None:
        """Apply a Stored of blocks whose names look ahead."""
        (ahead, pairs), start, size = self._forms[worker, 0], len(after), self._size
        prompt = self._prompt(after + letters + then, keys=keys)
        flat, end = prompt.tokens or (), start + len(letters)
        local = prompt.block_hashes(size, ahead)[start:end]
        blocks = self._names(after + letters, keys, then=then, ahead=ahead)
        starts = range(start * size, end * size, size)
        extra: dict[str, Any] = {}
        if prompt.keys is not None:
            extra = dict(
                self._published(prompt.keys.carried(start, end, size, self._lora_ids.setdefault(worker, LoraIds())))
            )
        tokens: list[Any] = [list(flat[at : at + size]) for at in starts]
        if pairs:
            tokens = [list(pairwise(flat[at : at + size + 1])) for at in starts]
        else:
            extra[LOOKAHEAD] = [list(flat[at + size : at + size + ahead]) for at in starts]
        what = f"stored {_chain(letters)}" + (f" after {_chain(after)}" if after else "") + f", followed by {then}"
        what += " in pairs" if pairs else f", of which names cover {ahead} token{'s' * (ahead > 1)}"
        data = Stored(blocks[start - 1] if start else None, tuple(blocks[start:]), tuple(local))
        self._apply(worker, 0, data, what + _with(keys), tokens, extra=extra or None)

    def store_each(self, letters: str, *, after: str) -> None:
        """Apply one Stored per block to worker 0, as decoding does."""
        start, size = len(after), self._size
        prompt, blocks = self._prompt(after + letters), self._names(after + letters)
        local = prompt.block_hashes(size)
        for at, letter in enumerate(letters, start):
            data = Stored(blocks[at - 1] if at else None, (blocks[at],), (local[at],))
            self._apply(0, 0, data, "stored one more block of a chain", [[ord(letter)] * size])

    def remove(
        self,
        *chains: str,
        worker: int = 0,
        rank: int = 0,
        tier: StorageTier = StorageTier.DEVICE,
        keys: Mapping[str, Any] | None = None,
        group: Group | None = None,
        then: str = "",
        may_be_refused: bool = False,
    ) -> None:
        """Apply a Removed: the last block of each chain, the one that `then` follows. With `may_be_refused` the index
        may raise.
        """
        ahead = self._forms.get((worker, rank), (0, False))[0]
        blocks = tuple(self._names(chain, keys, then=then, ahead=ahead)[-1] for chain in chains)
        what = f"removed the last block of {', '.join(map(_chain, chains))}{_with(keys)}"
        if ahead:
            what += f", the one that {then} followed"
        extra = None
        if group is not None:
            extra = group_extra(*group) if self.says_window else group_extra(group[0])
            what += _of_group(group)
        self._apply(worker, rank, Removed(blocks), what, tier=tier, extra=extra, may_be_refused=may_be_refused)

    def locate(self, *chains: str) -> None:
        """Apply a Located of worker 0's host: the last block of each chain."""
        what = f"located the last block of {', '.join(map(_chain, chains))}"
        data = Located(self._names(chain)[-1] for chain in chains)
        self._apply(0, 0, data, what, tier=StorageTier.HOST_PINNED)

    def store_kept(self, letters: str, kept: str, group: Group, *, after: str = "") -> None:
        """Apply a Stored of a sparse cache group of worker 0: a span of `letters`, whose blocks `kept` were kept."""
        start, size = len(after), self._size
        blocks, flat = self._names(after + letters), self._prompt(after + letters).tokens or ()
        names = tuple(block for block, letter in zip(blocks[start:], letters, strict=True) if letter in kept)
        data = SparseStored(blocks[start - 1] if start else None, names, len(letters) * size, size)
        tokens = [list(flat[at : at + size]) for at in range(start * size, len(flat), size)]
        what = f"stored {_chain(kept) if kept else 'no block'} of the span {_chain(letters)}"
        what += (f" after {_chain(after)}" if after else "") + _of_group(group)
        self._apply(0, 0, data, what, tokens, extra=group_extra(*group))

    def name_roots(self, **names: int) -> None:
        """Give the first blocks of these letters these names from now on."""
        self._roots = names

    def store_tail(self, letter: str, *, after: str, group: Group | None) -> None:
        """Apply a Stored of the first half of a block's tokens to worker 0, under a separate name.

        With a cache group it is a prompt's tail; without one, a partial block of TensorRT-LLM.
        """
        tokens = [ord(letter)] * (self._size // 2)
        local = tuple(block_hashes(tokens, len(tokens)))
        data = Stored(self._names(after)[-1], (self._tail_name(after, letter),), local)
        self._apply(
            *(0, 0, data, f"stored half of {_chain(letter)} after {_chain(after)}", [tokens]),
            extra=None if group is None else group_extra(*group),
        )

    def remove_tail(self, letter: str, *, after: str, group: Group | None) -> None:
        """Apply a Removed of a tail (see `store_tail`)."""
        what = f"removed half of {_chain(letter)} after {_chain(after)}"
        extra = None if group is None else group_extra(group[0])
        self._apply(0, 0, Removed((self._tail_name(after, letter),)), what, extra=extra)

    def update(
        self, chain: str, *, levels: tuple[int, int] | None = None, priorities: tuple[int, int] | None = None
    ) -> None:
        """Apply an Updated of worker 0: the last block of a chain changes its level or priority."""
        changes = [
            f"{name} {pair[0]} to {pair[1]}" for name, pair in (("level", levels), ("priority", priorities)) if pair
        ]
        what = f"updated the last block of {_chain(chain)} ({', '.join(changes)})"
        self._apply(0, 0, Updated(self._names(chain)[-1], levels, priorities), what)

    def _tail_name(self, after: str, letter: str) -> int:
        tokens = [ord(letter)] * (self._size // 2)
        return sequence_hashes(block_hashes(tokens, len(tokens)), parent=self._names(after)[-1])[0]

    def give(self, event: RouterEvent) -> None:
        """Apply an engine's event; the index may refuse it."""
        __tracebackhide__ = True
        self._give(event, f"{event.event.data!r:.200}", may_be_refused=True)

    def redeliver(self) -> None:
        """Apply the last event again, with the same id."""
        assert self._last_event is not None
        self._give(self._last_event, f"{self._applied[-1]}, delivered again")

    def lose(self, worker: int = 0, events: int = 1) -> None:
        """Lose events of a worker with one rank: their ids are used up, and the index does not receive them."""
        self._ids[worker, 0] = self._ids.get((worker, 0), 0) + events
        self._applied.append(f"{events} event{'s' * (events > 1)} of worker {worker} were lost")

    def restart(self, worker: int = 0) -> None:
        """Restart a worker with one rank, unannounced: its event ids begin again."""
        del self._ids[worker, 0]
        self._lora_ids.pop(worker, None)
        self._applied.append(f"worker {worker} restarted, unannounced: its event ids begin with 0")

    def events_of(self, steps: Iterable[tuple[str, ...]], worker: int = 0) -> list[RouterEvent]:
        """Make the next events of a worker, without applying them.

        Args:
            steps: "store" with the letters of a chain, and optionally the letters before them; "remove" with the chain
                whose last block is removed; or "clear".
            worker: their worker.
        """
        events = []
        for kind, *chains in steps:
            tokens = None
            if kind == "store":
                letters, after = (*chains, "")[:2]
                start, prompt = len(after), prompt_of(after + letters, self._size)
                blocks, local = self._names_of_prompt(prompt), prompt.block_hashes(self._size)
                parent = blocks[start - 1] if start else None
                data: EventData = Stored(parent, tuple(blocks[start:]), tuple(local[start:]))
                tokens = [[ord(letter)] * self._size for letter in letters]
            else:
                data = Removed((self._names(chains[0])[-1],)) if kind == "remove" else Cleared()
            event_id = self._ids.get((worker, 0), 0)
            self._ids[worker, 0] = event_id + 1
            events.append(RouterEvent(worker, KvCacheEvent(event_id, data), token_ids=tokens))
        return events

    def publish(self, steps: Iterable[tuple[str, ...]], worker: int = 0) -> None:
        """Publish many events of a worker, without a flush or a look-up in between; see `events_of`."""
        __tracebackhide__ = True
        events = self.events_of(steps, worker)
        self._applied.append(f"worker {worker} published {len(events):,} events, without a flush in between")

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
        """Flush the index, and return its number of entries; None if it has no `size`.

        Raises:
            AssertionError: it returns no number.
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

    def dropped(self) -> int:
        """Flush the index, and return how many events it reports as dropped; 0 if it has no `dropped`.

        Raises:
            AssertionError: it returns no number.
        """
        __tracebackhide__ = True
        count = getattr(self.index.index, "dropped", None)
        if not callable(count):
            return 0
        self._flush()
        dropped = self._do(count)
        if not isinstance(dropped, int):
            text = f"dropped() answered {dropped!r:.80}; expected a number of events"
            raise AssertionError(text)  # noqa: TRY004 - the index is wrong, not a type
        return dropped

    def kept(self) -> int:
        """Flush the index, and return how many Python objects it holds: see `reachable_from`."""
        self._flush()
        return reachable_from(self.index.index)

    def _flush(self) -> None:
        __tracebackhide__ = True
        if self.index.flush is not None:
            self._do(self.index.flush)

    def clear(self, worker: int = 0, *, rank: int = 0) -> None:
        """Apply a Cleared."""
        self._apply(worker, rank, Cleared(), "cleared all")

    def remove_worker(self, worker: int) -> None:
        """Remove a worker, if the index has `remove_worker`; its ids begin again when it returns, as in a harness."""
        if self.index.remove_worker is not None:
            self._do(self.index.remove_worker, worker)
            self._lora_ids.pop(worker, None)
            self._ids = {key: next_id for key, next_id in self._ids.items() if key[0] != worker}
            self._applied.append(f"worker {worker} removed: its event ids begin with 0")

    def remove_rank(self, worker: int, rank: int) -> None:
        """Remove a rank of a worker, if the index has `remove_worker_dp_rank`; its ids begin again when it returns."""
        remove = self.index.remove_rank
        if remove is not None:
            self._do(remove, worker, rank)
            self._ids.pop((worker, rank), None)
            self._applied.append(f"worker {worker} rank {rank} removed: its event ids begin with 0")

    def _apply(
        self,
        worker: int,
        rank: int,
        data: EventData,
        what: str,
        tokens: list[list[int]] | None = None,
        *,
        tier: StorageTier = StorageTier.DEVICE,
        extra: EventExtra | None = None,
        may_be_refused: bool = False,
    ) -> None:
        __tracebackhide__ = True
        event_id = self._ids.get((worker, rank), 0)
        self._ids[worker, rank] = event_id + 1
        if self.says_window and not isinstance(data, Cleared):
            extra = {"window_size": FULL_WINDOW, **(extra or {})}
            if (window := extra.get("kv_cache_spec_sliding_window")) is not None:
                extra["window_size"] = window
            if isinstance(data, Stored):
                count = len(data.block_hashes)
                level, priority = self.stored_at
                extra |= {"cache_levels": [level] * count, "priorities": [priority] * count}
                what += f", at level {level} and priority {priority}" * (self.stored_at != (0, 35))
        self._last_event = event = RouterEvent(worker, KvCacheEvent(event_id, data, rank), tier, tokens, extra)
        where = "" if tier is StorageTier.DEVICE else f" in {tier.value}"
        self._give(event, f"worker {worker}{f' rank {rank}' if rank else ''} {what}{where}", may_be_refused)

    def _give(self, event: RouterEvent, what: str, may_be_refused: bool = False) -> None:
        """Apply an event to the index."""
        __tracebackhide__ = True
        self._applied.append(what)
        try:
            self._do(self.index.apply, event)
            if may_be_refused:  # an index that queues events raises at the flush
                self._flush()
        except Exception as error:
            if may_be_refused:
                self._applied[-1] += f", which the index refused ({type(error).__name__})"
                return
            raise AssertionError(f"apply raised {type(error).__name__}: {error}\n{self._story()}") from error

    def expect(
        self,
        letters: str,
        expected: dict[tuple[int, int], int] | dict[int, int],
        *,
        tail: int = 0,
        any_rank: bool = False,
        keys: Mapping[str, Any] | None = None,
        least: dict[int, int] | None = None,
    ) -> None:
        """Look up a prompt of these letters, and compare the answer.

        Args:
            letters: the blocks.
            expected: leading blocks by worker (rank 0), or by (worker, rank).
            tail: tokens after the blocks.
            any_rank: whether the answer may name any rank of the worker.
            keys: what the prompt carries in addition to its tokens.
            least: the fewest blocks that are right, by worker; None: exactly `expected`.
        """
        __tracebackhide__ = True
        due: Scores = {key if isinstance(key, tuple) else (key, 0): blocks for key, blocks in expected.items()}
        answer = self.ask(letters, tail=tail, keys=keys)
        if any_rank:
            answer = {key[0] if isinstance(key, tuple) else key: blocks for key, blocks in answer.items()}
        if self.index.may_forget:
            least = {}
        low: Scores = due if least is None else {(worker, 0): blocks for worker, blocks in least.items()}
        self._has_answered |= bool(answer)
        names_are_ours = self.names_of is None and not self._about and self.index.plain.takes_tokens
        if due and low and names_are_ours and not self._has_answered:
            pytest.fail(_FINDS_NOTHING.format(self.index.name, self.index.plain.name), pytrace=False)
        few = "" if least is None else "at most " if not least else f"{least} to "
        assert agree(answer, due) or (least is not None and first_difference(answer, low, due) is None), (
            f"looked up {_chain(letters) or 'an empty prompt'}{_with(keys)}: expected {few}{expected}, the index "
            f"answered {answer}\n{self._story()}"
        )

    def expect_tiers(self, letters: str, expected: Mapping[str, Mapping[int, int]], *, or_fewer: bool = False) -> None:
        """Look up a prompt of these letters tier by tier, and compare the answer; do nothing if the index does not tell
        tiers apart.

        Args:
            letters: the blocks.
            expected: blocks by tier name, then by worker (rank 0); empty ones are left out.
            or_fewer: whether fewer blocks are right too, as after lost events.
        """
        __tracebackhide__ = True
        tiered = self.index.tiered
        if tiered is None:
            return
        self._flush()
        prompt = prompt_of(letters, self._size)
        asked = tiered.question(list(prompt.block_hashes(self._size)), prompt.tokens)
        try:
            answer = self.index.read_tiered(self._do(tiered.asking(None), asked))
        except UnreadableAnswer as error:
            raise AssertionError(f"{error}\n{self._story()}") from error
        except Exception as error:
            raise AssertionError(f"{tiered.name} raised {type(error).__name__}: {error}\n{self._story()}") from error
        by_tier = {
            tier: {(worker, 0): blocks for worker, blocks in expected.get(tier, {}).items()} for tier in StorageTier
        }
        forgets = or_fewer or self.index.may_forget
        for tier, due in by_tier.items():
            got = answer.get(tier, {})
            if forgets:
                right = first_difference(answer.get(StorageTier.DEVICE, {}), {}, by_tier[StorageTier.DEVICE]) is None
                right = right and difference_below(answer, by_tier, (), forgets=True) is None
            else:
                right = agree(got, due)
            assert right, (
                f"looked up {_chain(letters)} by tier: expected {expected.get(tier, {})} in {tier}, the index answered "
                f"{got}\n{self._story()}"
            )

    def ask(self, letters: str, *, tail: int = 0, keys: Mapping[str, Any] | None = None) -> Scores | WorkerScores:
        """Return the index's answer for a prompt of these letters, without zeros."""
        __tracebackhide__ = True
        under_test = self.index
        prompt = self._prompt(letters, tail, keys)
        extra = None if prompt.keys is None else self._published(prompt.keys.carried(0, len(letters), self._size))
        forms = {key: ahead for key, (ahead, _) in self._forms.items()}
        wanted = {0} if under_test.plain.takes_tokens or not forms else {*forms.values()}
        self._flush()
        try:
            answers: dict[int, Scores | WorkerScores] = {}
            for ahead in sorted(wanted):
                asked = under_test.plain.question(list(prompt.block_hashes(self._size, ahead)), prompt.tokens)
                answers[ahead] = under_test.read(self._do(under_test.plain.asking(extra), asked))
            return answers[0] if wanted == {0} else of_each_form(answers, forms)
        except UnreadableAnswer as error:
            raise AssertionError(f"{error}\n{self._story()}") from error
        except Exception as error:
            raise AssertionError(
                f"{under_test.plain.name} raised {type(error).__name__}: {error}\n{self._story()}"
            ) from error

    def expect_the_last_of(self, chains: Sequence[str], worker: int, gone: int) -> Sequence[str]:
        """Check that a worker, removed while it stored these chains in this order, has only the last of them, each
        whole.

        Args:
            chains: as stored, one an event.
            worker: their worker.
            gone: for how many chains `apply` had returned at the worker's last removal: none of these may be found.

        Returns:
            The chains that it has.
        """
        __tracebackhide__ = True
        found: list[int] = []
        for letters in chains:
            answer = self.ask(letters)
            found.append(
                max(
                    (n for key, n in answer.items() if worker in (key, key[0] if isinstance(key, tuple) else key)),
                    default=0,
                )
            )
        back = next((place for place in range(gone) if found[place]), None)
        assert back is None, (
            f"worker {worker} stored {len(chains)} chains, one after the other, and was removed meanwhile: when it was "
            f"removed for the last time, apply had returned for the first {gone}, and the index has {found[back or 0]} "
            f"blocks of number {back}; expected none of these: did an apply or a look-up write back what it had read "
            f"before the removal?\n{self._story()}"
        )
        lost = next((place for place in range(len(chains), 0, -1) if found[place - 1] != len(chains[place - 1])), 0)
        wrong = next((place for place in range(lost) if found[place]), None)
        assert wrong is None, (
            f"worker {worker} stored {len(chains)} chains, one after the other, and was removed meanwhile: the index "
            f"has {found[wrong or 0]} of {len(chains[0])} blocks of number {wrong}, and {found[lost - 1]} of number "
            f"{lost - 1}, which came {'later' if lost - 1 != wrong else 'then'}; expected all from some number on, "
            f"whole, and none before\n{self._story()}"
        )
        return chains[lost:]

    def ask_meanwhile(self, letters: str, events: Iterable[Callable[[], None]], expected: Mapping[int, range]) -> None:
        """Look up a prompt of these letters repeatedly in several threads while this thread applies events.

        Args:
            letters: the blocks.
            events: functions that apply one event each; the rest are skipped once an answer is wrong.
            expected: the numbers of leading blocks that are right at any time, by worker; other workers have no blocks.
        """
        __tracebackhide__ = True
        under_test, prompt = self.index, self._prompt(letters)
        asked = under_test.plain.question(list(prompt.block_hashes(self._size)), prompt.tokens)
        ask = under_test.plain.asking(None)
        started, done = Barrier(_THREADS + 1), Event()
        wrong: list[str] = []

        def look_up() -> None:
            started.wait()
            while not done.is_set() and not wrong:
                try:
                    answer = under_test.read(ask(asked))
                except Exception as error:  # noqa: BLE001 - of the user's index, in a thread
                    wrong.append(f"{under_test.plain.name} raised {type(error).__name__}: {error}")
                    return
                found = {key[0] if isinstance(key, tuple) else key: blocks for key, blocks in answer.items()}
                if any(found.get(each, 0) not in expected.get(each, range(1)) for each in {*found, *expected}):
                    wrong.append(f"looked up {letters}: the index answered {answer}")

        threads = [Thread(target=look_up, daemon=True) for _ in range(_THREADS)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        try:
            for thread in threads:
                thread.start()
            started.wait()
            for apply in events:
                if wrong:
                    break
                apply()
        finally:
            sys.setswitchinterval(interval)
            done.set()
            for thread in threads:
                thread.join()
        # The message leaves out the events: how many were applied by then differs from run to run.
        due = " and ".join(_at_any_time(worker, blocks) for worker, blocks in expected.items())
        assert not wrong, f"in a thread, while another applied events: {wrong[0]}; expected {due}"

    def apply_at_once(
        self, streams: Mapping[int, Sequence[RouterEvent]], removed: Sequence[int], gone: dict[int, int] | None = None
    ) -> None:
        """Apply the events of several workers in one thread each, while another thread removes some of the workers.

        Args:
            streams: the events of each worker, in order.
            removed: the workers to remove repeatedly until they have published half of their events; none if the index
                has no `remove_worker`. Every second one is removed by rank, if the index can do that.
            gone: is filled by worker: for how many of its events `apply` had returned when its last removal began.
        """
        __tracebackhide__ = True
        under_test, started = self.index, Barrier(len(streams) + bool(removed))
        applied = dict.fromkeys(streams, 0)
        wrong: list[str] = []

        def write(worker: int) -> None:
            started.wait()
            try:
                for number, event in enumerate(streams[worker], 1):
                    under_test.apply(event)
                    applied[worker] = number
            except Exception as error:  # noqa: BLE001 - of the user's index, in a thread
                wrong.append(f"apply raised {type(error).__name__}: {error}")

        def remove() -> None:
            remove_worker, remove_rank = under_test.remove_worker, under_test.remove_rank
            assert remove_worker is not None
            started.wait()
            left = list(removed)
            try:
                while left and not wrong:
                    for worker in left:
                        if gone is not None:
                            gone[worker] = applied.get(worker, 0)
                        if remove_rank is not None and worker % 2:
                            remove_rank(worker, 0)
                        else:
                            remove_worker(worker)
                    left = [each for each in left if each in streams and 2 * applied[each] < len(streams[each])]
                    sleep(0)  # yields to the writers
            except Exception as error:  # noqa: BLE001 - the index under test may raise anything
                wrong.append(f"remove_worker raised {type(error).__name__}: {error}")

        threads = [Thread(target=write, args=(worker,), daemon=True) for worker in streams]
        threads += [Thread(target=remove, daemon=True)] * bool(removed)
        for thread in threads:
            thread.start()
        end = monotonic() + _MOST_S
        for thread in threads:
            thread.join(max(0.0, end - monotonic()))
        count = sum(map(len, streams.values()))
        what = f"{len(streams)} workers published {count} events, from a thread each"
        what += f", and another removed {' and '.join(f'worker {each}' for each in removed)} meanwhile" * bool(removed)
        self._applied.append(what)
        if any(thread.is_alive() for thread in threads):
            wrong.append(f"a thread is still at it after {_MOST_S} s; do two locks wait for each other?")
        if wrong:
            raise AssertionError(f"{what}: {wrong[0]}")

    def _do(self, call: Callable[..., Any], *arguments: Any) -> Any:
        __tracebackhide__ = True
        answer = call(*arguments)
        return self._wait(answer) if isawaitable(answer) else answer

    def _story(self) -> str:
        """Return the last events that the index received, for a message."""
        shown = [line if len(line) <= 100 else line[:97] + "..." for line in self._applied[-12:]]
        more = [f"  ... {len(self._applied) - 12} events before"] if len(self._applied) > 12 else []
        return "\n".join([f"{self._about}the index was given, in this order:", *more, *(f"  {line}" for line in shown)])


def _at_any_time(worker: int, blocks: range) -> str:
    """Return the right numbers of blocks for a worker while events are applied, for a message."""
    least, most = blocks.start, blocks.stop - 1
    return f"{least if least == most else f'{least} to {most}'} of worker {worker}"


def _short(tokens: tuple[int, ...]) -> str:
    """Return tokens for a message; of many, the first and the last."""
    ends = tokens if len(tokens) <= 8 else (*tokens[:4], "...", *tokens[-4:])
    return ", ".join(map(str, ends))


def _chain(letters: str) -> str:
    """Return the letters of a chain for a message; its number of blocks if it is long or not ASCII."""
    return letters if letters.isascii() and len(letters) <= 40 else f"{len(letters):,} blocks"


def _with(keys: Mapping[str, Any] | None) -> str:
    """Return what a prompt carries, for a message."""
    return "".join(f" with {name}={_SHORT.repr(value)}" for name, value in (keys or {}).items())
