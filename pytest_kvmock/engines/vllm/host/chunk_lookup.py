"""Look-ups in vLLM's host tier: the longest hit of a request that all its cache groups can resume from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from pytest_kvmock.engines.base.cache_group import STATE
from pytest_kvmock.engines.vllm.host.chunk_eviction import ChunkKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_kvmock.engines.base.hashed import HashedTokens
    from pytest_kvmock.engines.vllm.host.chunk_groups import ChunkGroup
    from pytest_kvmock.engines.vllm.host.chunk_store import Chunk
    from pytest_kvmock.engines.vllm.host.offload_steps import OffloadRequest

# Theory of operation (vLLM: `_lookup_complete_chunks`, `_lookup_partial_tail`)
#
# Full attention needs all chunks behind the hit of the device; a window needs the last run of chunks that it reaches
# into; a state needs the chunk that the hit ends with. Each group is looked up only as far as the groups before it
# reached: full attention first, then the others by window, the largest first. A shorter answer may invalidate earlier
# ones; those groups are looked up again. A group with drafts is looked up for one more chunk and drops it.
#
# If hits of the device may end inside a block, the look-up tries to extend a hit of whole chunks by the first tokens of
# the next block.

Note: TypeAlias = "Callable[[HashedTokens, int, ChunkKey], None]"


class HostView(NamedTuple):
    """The interface of a host for look-ups.

    Attributes:
        find: returns the chunk of a key, written or not; None if there is none.
        note: called with each full-attention chunk that is present or being written: tokens of the request, end of the
            chunk, key.
        note_tail: the same for blocks that a hit ends inside.
    """

    find: Callable[[ChunkKey], Chunk | None]
    note: Note
    note_tail: Note


_PENDING: Final = -1


class ChunkLookup:
    """Looks up the chunks of requests in a host.

    Args:
        groups: the groups of the engine that are stored.
        blocks: blocks per chunk.
        unit: tokens per hash.
        fine: whether hits of the device may end inside a block.

    Attributes:
        groups: as given.
        tail_block: tokens per block, if blocks may be stored in part; else 0.
        margin: tokens that a group with drafts must also have behind a hit that ends inside a block.
    """

    def __init__(self, groups: Sequence[ChunkGroup], blocks: int, unit: int, *, fine: bool) -> None:
        self.groups = groups
        windows = [(-(each.window or 0), place) for place, each in enumerate(groups) if each.window is not None]
        self._windowed = tuple(place for _, place in sorted(windows))
        self._order = (*(place for place, each in enumerate(groups) if each.window is None), *self._windowed)
        states = [each for each in groups if each.of.kind == STATE]
        self._state_chunk = states[0].chunk if states else 1
        one_size = len({each.size for each in groups}) == 1
        has_tails = blocks == 1 and one_size and any(each.size > unit for each in states)
        has_tails = has_tails and all(each.window is None or each.of.kind == STATE for each in groups)
        self.tail_block = groups[0].size if has_tails else 0
        self.margin = (unit if fine else self.tail_block) if any(map(self._reads_ahead, groups)) else 0
        self._unit = unit

    def _reads_ahead(self, group: ChunkGroup) -> bool:
        return bool(self.tail_block) and group.of.drafts and group.of.kind != STATE

    def tail_end(self, group: ChunkGroup, tokens: int) -> int:
        """Return the number of tokens that name a group's block for a hit that ends inside it."""
        return tokens + (self.margin if self._reads_ahead(group) else 0)

    def longest(self, request: OffloadRequest, local: int, host: HostView) -> int | None:
        """Return the tokens of a request that the host has behind those of the device; None: ask again later.

        Args:
            request: the request; its `tail` and `confirmed` are set.
            local: tokens that the device has, a whole number of blocks.
            host: the host.
        """
        request.tail = 0
        hit = self._whole(request, local, host)
        if hit is None or not self.tail_block:
            return hit
        return self._with_tail(request, local, hit, host)

    # ------------------------------------------------------------------------------------------------ whole chunks

    def _whole(self, request: OffloadRequest, local: int, host: HostView) -> int | None:
        tokens, groups = request.tokens, self.groups
        limit, most = tokens.num_tokens, request.max_load_tokens
        if most is not None:
            limit = min(limit, local + most)
        if self._windowed:  # the last token is computed again and needs its window and state
            limit -= 1
            limit -= limit % self._state_chunk
        request.confirmed = [0] * len(groups)
        hit, waits, dropped = 0, False, set[int]()
        again: Sequence[int] = self._order
        while again:
            asked_window, places, again = False, again, ()
            for place in places:
                group = groups[place]
                chunk, keyed = group.chunk, group.keyed(tokens)
                limit = min(limit, keyed * chunk)
                if most is not None:
                    limit -= limit % chunk
                if limit - local < chunk:
                    return 0
                drops = group.of.drafts and place not in dropped
                found = self._chunks_of(request, place, (local, limit), host, drops=drops)
                if not found:
                    return 0
                if found == _PENDING:
                    waits = True
                else:
                    if drops:
                        found -= 1
                        dropped.add(place)
                    limit = min(limit, chunk * (local // chunk + found))
                if limit - local < chunk:
                    return 0
                if limit - local < hit:
                    if not group.of.drafts:
                        dropped.clear()
                    if waits:
                        waits, again = False, self._order
                    elif asked_window and not again:
                        again = self._windowed
                asked_window = asked_window or group.window is not None
                hit = limit - local
        return None if waits or self._is_loaded(tokens, local, local + hit, host) else hit

    def _chunks_of(
        self, request: OffloadRequest, place: int, span: tuple[int, int], host: HostView, *, drops: bool
    ) -> int:
        """Count the chunks that one group has from the device's hit up to a limit, and one more if `drops`.

        Return `_PENDING` if one of them is being written.
        """
        group, tokens, (local, limit) = self.groups[place], request.tokens, span
        chunk, keyed = group.chunk, group.keyed(tokens)
        first = local // chunk
        last = min(-(-min(limit + drops * chunk, keyed * chunk) // chunk), keyed)
        keys = group.keys(tokens, first, last)
        if group.window is None:
            found, waits = 0, False
            for key in keys:
                there = host.find(key)
                if there is None:
                    break
                found += 1
                host.note(tokens, (first + found) * chunk, key)
                waits = waits or not there.is_ready
            request.confirmed[place] = first if waits else first + found
            return _PENDING if waits else found
        window = group.window_before(min(limit, (last - drops) * chunk))
        return _last_run(keys, group.window + drops, window + drops, host)

    def _is_loaded(self, tokens: HashedTokens, local: int, end: int, host: HostView) -> bool:
        """Return whether a chunk of the hit is being loaded between steps for another request."""
        for group in self.groups:
            keys = group.keys(tokens, local // group.chunk, -(-end // group.chunk))
            if group.window is not None:
                keys = keys[-group.window_before(end) :]
            if any((chunk := host.find(key)) is not None and chunk.waits for key in keys):
                return True
        return False

    # ------------------------------------------------------------------------------------------- ends inside a block

    def _with_tail(self, request: OffloadRequest, local: int, hit: int, host: HostView) -> int | None:
        """Extend a hit of whole chunks by the first tokens of the next block, or of the block after that."""
        tokens, unit, size, whole = request.tokens, self._unit, self.tail_block, local + hit
        most = min(tokens.num_prompt_tokens - 1, whole + size * (2 if self.margin else 1) - 1)
        if self.margin:
            most = min(most, len(tokens.names) * tokens.block_size - self.margin)
        if request.max_load_tokens is not None:
            most = min(most, local + request.max_load_tokens)
        most -= most % unit
        if most <= whole:
            return hit
        # A hit that ends behind the next block also loads that block.
        bridge, waits, unsure = whole // size, False, list[ChunkKey]()
        behind = (bridge + 1) * size
        if most >= behind:
            for place, group in enumerate(self.groups):
                if group.of.kind == STATE:
                    continue
                (key,) = group.keys(tokens, bridge, bridge + 1)
                there = host.find(key)
                waits = waits or (there is not None and there.waits > 0)
                if request.confirmed[place] <= bridge:
                    unsure.append(key)
            for key in unsure:
                there = host.find(key)
                if there is None:
                    most = behind - unit
                    break
                waits = waits or not there.is_ready
        bridge_waits = waits
        for end in range(most, whole, -unit):
            found = self._tail(tokens, end, host)
            if found == _PENDING or (found and end >= behind and bridge_waits):
                waits = True
            elif found:
                for key in unsure if end >= behind else ():
                    host.note(tokens, behind, key)
                for group in self.groups:
                    at = self.tail_end(group, end)
                    host.note_tail(tokens, at, group.key(tokens, at))
                request.tail = end
                return end - local
        return None if waits and not hit else hit

    def _tail(self, tokens: HashedTokens, end: int, host: HostView) -> int:
        """Return 1 if all groups have the block for a hit that ends inside it, after `end` tokens; 0 if not.

        Return `_PENDING` if one of these blocks is being written.
        """
        waits = False
        for group in self.groups:
            there = host.find(group.key(tokens, self.tail_end(group, end)))
            if there is None:
                return _PENDING if waits else 0
            waits = waits or not there.is_ready
        return _PENDING if waits else 1


def _last_run(keys: Sequence[ChunkKey], window: int, first: int, host: HostView) -> int:
    """Return the end of the last run of `window` chunks, or of a shorter run that reaches the first key.

    A run at the end of the keys needs `first` chunks. Return `_PENDING` if a chunk of the run is being written.
    """
    run, need, waits = 0, first, False
    for at in range(len(keys) - 1, -1, -1):
        there = host.find(keys[at])
        if there is None:
            run, need, waits = 0, window, False
            continue
        run += 1
        waits = waits or not there.is_ready
        if run == need:
            return _PENDING if waits else at + need
    return _PENDING if waits else run
