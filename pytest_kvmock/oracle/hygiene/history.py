"""The events of one worker and rank in order, with lookups: which event stored a block last, its parent, its tokens.

The index is built at the first lookup, so a stream without a problem costs only a list of its events.

One subject: the data that the events of a stream give for a block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_kvmock.oracle.hygiene.content import MOST_PARENTS, BlockFlaw, sparse
from pytest_kvmock.values.events import (
    BlockTokens,
    Cleared,
    Removed,
    RouterEvent,
    SparseStored,
    StorageTier,
    Stored,
    block_text,
)
from pytest_kvmock.values.prompt_keys import LOOKAHEAD, LOOKAHEAD_KEYS, block_keys, has_window_size
from pytest_kvmock.values.tokens import windows_of

if TYPE_CHECKING:
    from pytest_kvmock.values.prompt_keys import EventExtra

MOST_DESCENDANTS: Final = 1000
"""Maximum number of blocks that are searched for the longest chain below another."""


class StoredChain(NamedTuple):
    """A chain of blocks from the root, as last stored, in parallel sequences.

    Attributes:
        blocks: block hashes.
        local_hashes: the local hash of each block.
        tokens: the token ids of all blocks, concatenated; None if those of a block are missing.
    """

    blocks: tuple[int, ...]
    local_hashes: tuple[int, ...]
    tokens: tuple[int, ...] | None


class History:
    """The events of one worker and rank, with an index by block.

    Args:
        block_size: tokens per block; None if unknown.

    Attributes:
        events: every event, in order.
        resets: each time that event ids began again: the number of `events` by then, and the reason
            (`EVENTS_BEGAN_ANEW`).
        block_size: tokens per block, if known.
        tails: names of prompts' tails. A tail is a second name of a block, made from part of its tokens; no chain
            continues it.
    """

    __slots__ = (
        "_cleared",
        "_form_read",
        "_last_removed",
        "_last_stored",
        "_lookahead",
        "_parents_left",
        "_read",
        "block_size",
        "events",
        "on_device",
        "resets",
        "tails",
    )

    def __init__(self, block_size: int | None = None) -> None:
        self.block_size = block_size
        self.events: list[RouterEvent] = []
        self.resets: list[tuple[int, str]] = []
        self.tails: set[int] = set()
        self._parents_left = MOST_PARENTS
        self._lookahead: int | None = None
        self._form_read = 0
        self._reset_index()

    def _reset_index(self) -> None:
        """Drop the index, as the events were replaced; the next lookup reads them again."""
        self.on_device = OnDevice()
        self._read = 0
        self._last_stored: dict[int, int] = {}
        self._last_removed: dict[int, int] = {}
        self._cleared: list[int] = []

    def forget(self, needed: Iterable[int]) -> None:
        """Drop all events except those that last stored one of these blocks; other blocks become unknown."""
        stored_at = self._index()
        places = sorted({stored_at[block] for block in needed if block in stored_at})
        self.resets = [(bisect_left(places, at), why) for at, why in self.resets]
        self.events = [self.events[place] for place in places]
        self._form_read = 0
        self._reset_index()

    def _index(self) -> dict[int, int]:
        """Read the events since the last lookup; return the position of the Stored that last stored each block."""
        for place in range(self._read, len(self.events)):
            data = self.events[place].event.data
            if isinstance(data, Stored):
                if not self.tails or self.tails.isdisjoint(data.block_hashes):
                    self._last_stored.update(zip(data.block_hashes, repeat(place)))
            elif isinstance(data, Removed):
                self._last_removed.update(zip(data.block_hashes, repeat(place)))
            elif isinstance(data, Cleared):
                self._cleared.append(place)
        self._read = len(self.events)
        return self._last_stored

    @property
    def stored_at(self) -> dict[int, int]:
        """For every block ever stored, the position in `events` of the Stored that last stored it."""
        return self._index()

    @property
    def removed_at(self) -> dict[int, int]:
        """The position in `events` of the Removed that last removed a block."""
        self._index()
        return self._last_removed

    @property
    def cleared_at(self) -> list[int]:
        """The position in `events` of each Cleared, in order."""
        self._index()
        return self._cleared

    def stored_by(self, block: int) -> RouterEvent | None:
        """Return the event that last stored a block; None if it was never stored."""
        place = self._index().get(block)
        return None if place is None else self.events[place]

    def was_stored(self, block: int) -> bool:
        """Whether a block was ever stored."""
        return block in self._index()

    # ----------------------------------------------------------------------------------------------- blocks

    def oldest_first(self, blocks: list[int]) -> list[int]:
        """Sort blocks by the events that last stored them; blocks that were never stored come last, in the given
        order.
        """
        if len(blocks) < 2:
            return blocks
        stored_at, wanted = self._index(), set(blocks)
        age: dict[int, int] = {}
        for place in sorted({stored_at[block] for block in blocks if block in stored_at}):
            for block in _stored(self.events[place]).block_hashes:
                if block in wanted and stored_at[block] == place:
                    age.setdefault(block, len(age))
        return sorted(blocks, key=lambda block: age.get(block, len(age)))

    def leaves(self) -> list[int]:
        """Return the last blocks of all chains ever stored, the oldest first."""
        stored = [_stored(self.events[place]) for place in dict.fromkeys(self._index().values())]
        parents = {data.parent_hash for data in stored}
        return [data.block_hashes[-1] for data in stored if data.block_hashes[-1] not in parents]

    def whole(self, block: int) -> int | None:
        """Return the block itself, or, for a partial block, its parent, as no prompt of full blocks has a partial one;
        None if it has no parent.
        """
        event = self.stored_by(block)
        if event is None or self.block_size is None or not event.token_ids or not has_window_size(event.extra):
            return block
        is_partial = len(event.token_ids[-1]) < self.block_size and _stored(event).block_hashes[-1] == block
        return self.parent(block) if is_partial else block

    def parent(self, block: int) -> int | None:
        """Return the parent of a block, as last stored; None for a root and for a block that was never stored."""
        place = self._index().get(block)
        if place is None:
            return None
        data = _stored(self.events[place])
        i = data.block_hashes.index(block)
        return data.block_hashes[i - 1] if i else data.parent_hash

    def parents_of(self, block: int) -> Iterator[int]:
        """Yield candidates for the right parent of a block with a wrong one, the likeliest first.

        They are all blocks ever stored, the newest first. For a stream with very many wrong parents, later calls yield
        none.
        """
        before = self.parent(block)
        if before is not None:
            yield before
        for candidate in reversed(self._index()):
            if not self._parents_left:
                return
            self._parents_left -= 1
            yield candidate

    def local_hash(self, block: int) -> int:
        """Return the local hash of a block that was stored."""
        data = _stored(self.events[self._index()[block]])
        return data.tokens_hashes[data.block_hashes.index(block)]

    def local_hashes(self, blocks: Iterable[int]) -> dict[int, int]:
        """Return the local hashes of blocks that were stored."""
        stored_at = self._index()
        tables: dict[int, dict[int, int]] = {}
        out = {}
        for block in blocks:
            place = stored_at[block]
            if place not in tables:
                data = _stored(self.events[place])
                tables[place] = dict(zip(data.block_hashes, data.tokens_hashes, strict=True))
            out[block] = tables[place][block]
        return out

    def is_of_other_adapter(self, event: RouterEvent, block: int) -> bool:
        """Whether an event stores a block for a different adapter than before.

        SGLang's names do not differ between adapters, unless it publishes in Dynamo's format; each adapter has a
        separate copy.
        """
        before = self.events[self._index()[block]].extra or {}
        return bool(before.get("lora_name") != (event.extra or {}).get("lora_name"))

    def unlike_before(self, event: RouterEvent, data: Stored) -> BlockFlaw | None:
        """Return the first block of a Stored whose parent or tokens differ from the last time that it was stored.

        This is the only possible check of an event that lacks the keys hashed with its tokens.
        """
        parent = data.parent_hash
        ids = None if event.token_ids is None or sparse(event, data, self.block_size) is not None else event.token_ids
        for at, (block, local) in enumerate(zip(data.block_hashes, data.tokens_hashes, strict=True)):
            if self.was_stored(block):
                name, known, before = block_text(block), self.tokens(block), self.parent(block)
                if parent != before:
                    return BlockFlaw(
                        block, f"block {name} is stored {_under(parent)}", f"it was stored {_under(before)}"
                    )
                if local != self.local_hash(block) if ids is None or known is None else tuple(ids[at]) != known:
                    return BlockFlaw(
                        block, f"block {name} is stored with other tokens than before", "a block has one content"
                    )
            parent = block
        return None

    def unlike_device(self, event: RouterEvent, data: Stored) -> BlockFlaw | None:
        """Return the first block of a Stored below the device if its parent differs from that on the device.

        Only the first of several blocks is compared, as the others may come in any order (kvbm-logical), and only if it
        has a parent. It is compared with the block that the device stored since it was last empty, if that block has
        the same number of tokens.
        """
        if data.parent_hash is None or not data.block_hashes or not data.tokens_hashes:
            return None
        block = data.block_hashes[0]
        place = self.on_device.place(block, self.events)
        if place is None or place < max([*self.cleared_at[-1:], *(at for at, _ in self.resets[-1:])], default=0):
            return None
        before = _stored(self.events[place])
        at = before.block_hashes.index(block)
        parent = before.block_hashes[at - 1] if at else before.parent_hash
        if parent == data.parent_hash or not self._covers_as_much(event, data, self.events[place], at):
            return None
        name = block_text(block)
        return BlockFlaw(
            block,
            f"block {name} is stored {_under(data.parent_hash)}",
            f"on the device it was stored {_under(parent)}, by event {self.events[place].event_id}",
        )

    @staticmethod
    def _covers_as_much(event: RouterEvent, data: Stored, before: RouterEvent, at: int) -> bool:
        """Whether the first block of a Stored has as many tokens as a block of an earlier event. Without tokens, local
        hashes are compared.
        """
        sizes = []
        for each, place, blocks in (
            (event, 0, len(data.block_hashes)),
            (before, at, len(_stored(before).block_hashes)),
        ):
            if each.token_ids is None or len(each.token_ids) != blocks:
                return data.tokens_hashes[0] == _stored(before).tokens_hashes[at] != 0
            sizes.append(len(each.token_ids[place]))
        return sizes[0] == sizes[1]

    def tokens(self, block: int) -> tuple[int, ...] | None:
        """Return the token ids of a stored block; None if it is partial or its event lacks token ids of any block."""
        event = self.events[self._index()[block]]
        ids = self._all_tokens(event)
        row = None if ids is None else ids[_stored(event).block_hashes.index(block)]
        return None if row is None or self._is_part(row) else tuple(row)

    def _all_tokens(self, event: RouterEvent) -> BlockTokens | None:
        """Return the token ids of a Stored, one sequence per block (a partial last block has fewer); None if any are
        missing.
        """
        ids = event.token_ids
        return None if ids is None or sparse(event, _stored(event), self.block_size, partial=True) is not None else ids

    def _is_part(self, row: Sequence[int]) -> bool:
        """Whether a block with these tokens is partial."""
        return self.block_size is not None and len(row) < self.block_size

    # ----------------------------------------------------------------------------------------------- chains

    def chain(self, block: int) -> list[int]:
        """Return the block hashes from the root, or else from the first known block, to a block, as last stored."""
        return [each for _, run in self._runs(block) for each in run]

    def read_chain(self, block: int, *, with_tokens: bool = False) -> StoredChain:
        """Return the chain up to a block with local hashes, and with tokens if wanted and known, in one pass."""
        stored_at = self._index()
        blocks: list[int] = []
        local_hashes: list[int] = []
        tokens: list[int] | None = [] if with_tokens else None
        for place, run in self._runs(block):
            event, count = self.events[place], len(run)
            blocks += run
            whole = list(map(stored_at.__getitem__, run)) == [place] * count and len(set(run)) == count
            if whole:
                local_hashes += _stored(event).tokens_hashes[:count]
            else:  # some blocks were stored again later, perhaps with other hashes and tokens
                local_hashes += map(self.local_hash, run)
            if tokens is not None:
                parts: Sequence[Sequence[int] | None]
                if whole:
                    ids = self._all_tokens(event)
                    parts = [None] if ids is None else ids[:count]
                else:
                    parts = list(map(self.tokens, run))
                if any(
                    part is None or self._is_part(part) for part in parts
                ):  # compared by identity, as a user's sequences may compare like arrays
                    tokens = None
                else:
                    tokens += [token for part in parts if part is not None for token in part]
        if tokens and isinstance(tokens[0], (tuple, list)):
            pairs: Any = tokens
            tokens = [first for first, _ in pairs]
        return StoredChain(tuple(blocks), tuple(local_hashes), None if tokens is None else tuple(tokens))

    @property
    def lookahead(self) -> int:
        """Number of next tokens that block names also cover, from the first Stored that shows it; 0 until then."""
        if self._lookahead is None:
            for event in self.events[self._form_read :]:
                ids, data = event.token_ids, event.event.data
                if ids and isinstance(data, Stored) and data.block_hashes:
                    with suppress(TypeError, IndexError, KeyError):  # a user's own tokens may be anything
                        self._lookahead = windows_of(ids, None if event.extra is None else event.extra.get(LOOKAHEAD))[
                            1
                        ]
                    if self._lookahead is not None:
                        break
            self._form_read = len(self.events)
        return self._lookahead or 0

    def next_tokens(self, block: int) -> tuple[int, ...]:
        """Return the tokens after a stored block that its name also covers; empty if names do not look ahead."""
        event = self.events[self._index()[block]]
        ids, place = event.token_ids, _stored(event).block_hashes.index(block)
        lists = None if event.extra is None else event.extra.get(LOOKAHEAD)
        windows, ahead = windows_of((), None) if ids is None else windows_of(ids, lists)
        return tuple(windows[place][-ahead:]) if ahead else ()

    def extra_of(self, blocks: Sequence[int]) -> EventExtra | None:
        """Return the extra data of the events that last stored these blocks of a chain, combined for one event with all
        of them.
        """
        stored_at = self._index()
        events = [self.events[stored_at[block]] for block in blocks]
        if all(event.extra is None for event in events):
            return None
        extra: dict[str, Any] = {}
        keys: list[Any] = []
        for block, event in zip(blocks, events, strict=True):
            carried = event.extra or {}
            extra.update(carried)
            place, of_blocks = _stored(event).block_hashes.index(block), block_keys(carried)
            keys.append(of_blocks[place] if place < len(of_blocks) else None)
        extra.pop(LOOKAHEAD, None)  # the chain's tokens include them
        extra.pop(LOOKAHEAD_KEYS, None)
        return ({**extra, "extra_keys": keys} if "extra_keys" in extra else extra) or None

    def _runs(self, block: int) -> list[tuple[int, Sequence[int]]]:
        """Return the parts of a chain, from the root: leading blocks of a Stored, with its position in `events`."""
        stored_at = self._index()
        runs: list[tuple[int, Sequence[int]]] = []
        seen: set[int] = set()
        current: int | None = block
        while current is not None and current not in seen:
            place = stored_at.get(current)
            if place is None:
                break
            data = _stored(self.events[place])
            run = data.block_hashes[: data.block_hashes.index(current) + 1]
            seen.update(run)
            runs.append((place, run))
            current = data.parent_hash
        runs.reverse()
        return runs


class Links:
    """The children of each block of a stream, by local hash.

    Workers name blocks by different rules, so a chain of local hashes is looked up here for each worker.
    """

    __slots__ = ("_after", "_read")

    def __init__(self) -> None:
        self._after: dict[tuple[int | None, int], set[int]] = {}
        self._read = 0

    def read(self, events: Sequence[RouterEvent]) -> None:
        """Add the events since the last call; `events` are all of the stream."""
        for event in events[self._read :]:
            data = event.event.data
            if isinstance(data, Stored):
                parent = data.parent_hash
                for block, local in zip(
                    data.block_hashes, data.tokens_hashes, strict=not isinstance(data, SparseStored)
                ):
                    self._after.setdefault((parent, local), set()).add(block)
                    parent = block
        self._read = len(events)

    def after(self, parents: set[int | None], local: int) -> set[int]:
        """Return the blocks with this local hash that were stored after one of these parents; None is the root."""
        return {block for parent in parents for block in self._after.get((parent, local), ())}


class OnDevice:
    """The event that last stored each block on the device, for comparison with blocks in tiers below."""

    __slots__ = ("_places", "_read")

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._read = 0

    def place(self, block: int, events: Sequence[RouterEvent]) -> int | None:
        """Return the position of that event in the stream; None if the device never had the block."""
        for place in range(self._read, len(events)):
            event = events[place]
            if event.storage_tier is StorageTier.DEVICE and isinstance(event.event.data, Stored):
                self._places.update(zip(event.event.data.block_hashes, repeat(place)))
        self._read = len(events)
        return self._places.get(block)


class Below:
    """The children of blocks below the device, where a block often arrives before its parent."""

    __slots__ = ("_children", "_read")

    def __init__(self) -> None:
        self._children: dict[int, set[int]] = {}
        self._read = 0

    def read(self, events: Sequence[RouterEvent]) -> None:
        """Add the events since the last call; `events` are all of the stream."""
        for event in islice(events, self._read, None):
            data = event.event.data
            if event.storage_tier is not StorageTier.DEVICE and isinstance(data, Stored):
                parent = data.parent_hash
                for block in data.block_hashes:
                    if parent is not None:
                        self._children.setdefault(parent, set()).add(block)
                    parent = block
        self._read = len(events)

    def deepest(self, block: int, is_child: Callable[[int, int], bool]) -> int:
        """Return the last block of the longest chain below a block; the block itself if it has no children.

        Args:
            block: the block.
            is_child: returns whether the second block is still a child of the first, and should be followed.

        Returns:
            The deepest block among the nearest `MOST_DESCENDANTS`.
        """
        level, seen = [block], {block}
        while len(seen) <= MOST_DESCENDANTS:
            below = [(parent, child) for parent in level for child in self._children.get(parent, ())]
            children = dict.fromkeys(child for parent, child in below if child not in seen and is_child(parent, child))
            if not children:
                break
            level = list(children)
            seen.update(children)
        return level[-1]


def _under(parent: int | None) -> str:
    return "as a root" if parent is None else f"under block {block_text(parent)}"


def _stored(event: RouterEvent) -> Stored:
    """Return the data of an event that is a Stored."""
    data = event.event.data
    assert isinstance(data, Stored)
    return data
