"""Chains to look up in an index: those whose answers an event changes, and some that must match nothing.

They come from the history of the stream, not from the resident blocks: a stale block is on no resident chain, so a
comparison of resident chains would miss every Removed that an index did not apply.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Literal, NamedTuple

from pytest_kvmock.harness.queued import AskedPrompt
from pytest_kvmock.oracle.hygiene.orphans import Orphaned, orphaned, places_of
from pytest_kvmock.oracle.hygiene.stream import Stream
from pytest_kvmock.values.events import Cleared, RouterEvent, Stored, StreamKey
from pytest_kvmock.values.prompt_keys import EventExtra, hash_options, part_of
from pytest_kvmock.values.tokens import block_hashes, sequence_hashes


class QueriedChain(NamedTuple):
    """A chain to look up: local hashes and block hashes in order; tokens and extra data if known.

    `after` are the next tokens, if the name of the last block also covers them; a query by tokens includes them.

    A negative query must match nothing. Its block hashes only show the chain that it was made from, by leaving out the
    first block ("tail") or replacing it by one that no worker stored ("foreign").
    """

    local: tuple[int, ...]
    blocks: tuple[int, ...]
    tokens: tuple[int, ...] | None
    negative: Literal["", "tail", "foreign"] = ""
    extra: EventExtra | None = None
    after: tuple[int, ...] = ()

    @property
    def block_size(self) -> int:
        """Tokens per block; 0 if tokens are unknown."""
        return len(self.tokens) // len(self.local) if self.tokens and self.local else 0

    def part(self, start: int, stop: int) -> QueriedChain:
        """Return the part of the chain from block `start` up to `stop`."""
        size = self.block_size
        tokens = None if self.tokens is None else self.tokens[start * size : stop * size]
        extra = None if self.extra is None else part_of(self.extra, range(start, stop))
        after = self.after
        if after and self.tokens is not None:
            after = (*self.tokens, *after)[stop * size :][: len(after)]
        return QueriedChain(self.local[start:stop], self.blocks[start:stop], tokens, self.negative, extra, after)

    @property
    def asked_tokens(self) -> tuple[int, ...] | None:
        """The tokens of a query by tokens; None if unknown."""
        return None if self.tokens is None else (*self.tokens, *self.after)


class Chains:
    """Makes the chains to look up.

    Args:
        rng: picks foreign blocks.
        with_tokens: whether the index under test is queried by tokens.
        by_tier: whether it answers tier by tier.
    """

    def __init__(self, rng: Random, *, with_tokens: bool, by_tier: bool) -> None:
        self._rng = rng
        self._with_tokens = with_tokens
        self._by_tier = by_tier

    def touched(self, event: RouterEvent, streams: Mapping[StreamKey, Stream]) -> Iterator[QueriedChain]:
        """Yield the chains whose answers an event changes.

        These are the chains to the last stored block, to the first block of each removed run, and to a sample of the
        cleared blocks; then the last of them again with its first block replaced, and without its first block, which
        must not match. After a Cleared there are also chains that it must not change: one of each other rank of the
        worker. A chain includes the blocks held below the device that follow it; they may have arrived before the
        blocks that link them.
        """
        key = (event.worker_id, event.event.dp_rank)
        stream = streams[key]
        data = event.event.data
        if isinstance(data, Stored):
            touched = [
                block for block in data.block_hashes[-1:] if stream.was_stored(block)
            ]  # another cache group may have stored it
        elif not isinstance(data, Cleared):
            removed = set(data.block_hashes)
            touched = [b for b in data.block_hashes if stream.was_stored(b) and stream.parent(b) not in removed]
        else:
            touched = [block for block in stream.emptied if stream.was_stored(block)]  # a prompt's tail is on no chain
        chain = None
        for block in dict.fromkeys(map(stream.whole, touched)):
            if block is not None:
                chain = self._through(stream, block)
                yield chain
        for block in touched if self._with_tokens else ():
            if stream.whole(block) != block and (longer := self._filled(stream, block)) is not None:
                yield longer
        if chain is not None:
            yield from self.negative_queries(chain)
        if isinstance(data, Cleared):
            for other, spared in streams.items():
                if other[0] == key[0] and other != key and spared.device:
                    block = next(reversed(spared.device))
                    if spared.was_stored(block) and (whole := spared.whole(block)) is not None:
                        yield self.upto(spared, whole)

    def _through(self, stream: Stream, block: int) -> QueriedChain:
        """Return the chain from the root through a block to the last block held below the device that follows it."""
        chain = self.upto(stream, block)
        last = stream.last_below(block) if self._by_tier else block
        if last == block:
            return chain
        longer = self.upto(stream, last)
        # An index that takes tokens cannot be asked for blocks that came without tokens.
        return chain if chain.tokens is not None and longer.tokens is None else longer

    def all_of(self, stream: Stream) -> Iterator[QueriedChain]:
        """Yield all chains that a worker and rank ever stored, oldest first, then two chains that must not match."""
        chain = None
        for block in dict.fromkeys(map(stream.whole, stream.leaves())):
            if block is not None:
                chain = self.upto(stream, block)
                yield chain
        if chain is not None:
            yield from self.negative_queries(chain)

    def upto(self, stream: Stream, block: int) -> QueriedChain:
        """Return the chain from the root to a block, as last stored."""
        stored = stream.read_chain(block, with_tokens=self._with_tokens)
        extra = stream.extra_of(stored.blocks) if self._with_tokens else None
        after = stream.next_tokens(block) if self._with_tokens and stored.tokens is not None else ()
        return QueriedChain(stored.local_hashes, stored.blocks, stored.tokens, extra=extra, after=after)

    def of_prompt(self, asked: AskedPrompt, streams: Mapping[StreamKey, Stream]) -> QueriedChain:
        """Return the chain of a prompt that a test looks up, with the block hashes of the stream that stored most of
        it.
        """
        size, prompt = asked.block_size, asked.prompt
        local = tuple(prompt.block_hashes(size))
        named = max((places_of(stream, local) for stream in streams.values()), key=len, default=[])
        names = [min(blocks) for blocks in named]
        blocks = (*names, *sequence_hashes(local)[len(names) :])
        tokens = None if prompt.tokens is None else tuple(prompt.tokens[: len(local) * size])
        return QueriedChain(local, blocks, tokens, extra=asked.extra)

    def _filled(self, stream: Stream, block: int) -> QueriedChain | None:
        """Return the chain to a partial block, filled up with tokens: a different block, of which only the parents are
        held.
        """
        event, parent = stream.stored_by(block), stream.parent(block)
        assert event is not None
        assert event.token_ids is not None
        assert stream.block_size is not None
        before = QueriedChain((), (), ()) if parent is None else self.upto(stream, parent)
        if before.tokens is None:
            return None
        part = event.token_ids[-1]
        filled = [*part, *(self._rng.getrandbits(32) for _ in range(stream.block_size - len(part)))]
        local = block_hashes(filled, stream.block_size, **hash_options(event.extra))
        blocks = (*before.blocks, self._rng.getrandbits(64))
        return QueriedChain((*before.local, *local), blocks, (*before.tokens, *filled), extra=before.extra)

    def negative_queries(self, chain: QueriedChain) -> Iterator[QueriedChain]:
        """Yield a chain with its first block replaced, and without it. A query by tokens changes one token of it."""
        if len(chain.local) > 1:
            foreign, size, rest = self._rng.getrandbits(64), chain.block_size, chain.part(1, len(chain.local))
            tokens = None
            if rest.tokens is not None:
                assert chain.tokens is not None
                first = list(chain.tokens[:size])
                place, token = self._rng.randrange(size), self._rng.getrandbits(32)
                first[place] = token ^ 1 if token == first[place] else token
                tokens = (*first, *rest.tokens)
            yield QueriedChain((foreign, *rest.local), chain.blocks, tokens, "foreign", chain.extra, chain.after)
            yield rest._replace(negative="tail")


def leading_run(stream: Stream, chain: QueriedChain) -> int:
    """Return how many leading blocks of a chain are held according to the events, including implied parents.

    The chain's block hashes come from its history, where a wrong link may lead anywhere (a cycle ends the run), and a
    negative query has no block hashes. So the hashes that follow from its local hashes are looked up too.
    """
    ways = (sequence_hashes(chain.local),) if chain.negative else (chain.blocks, sequence_hashes(chain.local))
    most = 0
    for way in ways:
        run: set[int] = set()
        for block in way:
            if block in run or not (block in stream.device or block in stream.implied):
                break
            run.add(block)
        most = max(most, len(run))
    return most


def without_a_word(stream: Stream, chain: QueriedChain) -> tuple[int, int] | None:
    """Return the smallest and largest correct number of leading blocks if leaves were dropped without a Removed.

    An index may apply `silently_gone`, or, if it keeps edges, may match such a leaf again after its parent was removed
    and stored again. None if no leaf was dropped in this way (TensorRT-LLM's V1: a free leaf that a partial match
    takes).
    """
    if not stream.gone and not stream.untold:
        return None
    most = leading_run(stream, chain)
    gone = (place for place, block in enumerate(chain.blocks) if block in stream.gone)
    return (most if chain.negative else min(next(gone, most), most)), most


def orphaned_in(stream: Stream, chain: QueriedChain) -> Orphaned | None:
    """Return the orphans of a chain in a stream; None if it has none."""
    return orphaned(stream, chain.local, () if chain.negative else chain.blocks) if stream.orphaned else None
