"""How much of a chain the engines of hybrid models would reuse: the smallest correct answer of an index under test.

Events do not show which cached blocks such an engine can use. So an index may answer what the attention group holds, or
less, but not less than the engine would reuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from pytest_kvmock.harness.chains import QueriedChain
from pytest_kvmock.oracle.hygiene.stream import Stream
from pytest_kvmock.values.events import Removed, SparseStored, Stored, StreamKey, block_text
from pytest_kvmock.values.prompt_keys import FULL_ATTENTION, EventExtra, group_kind, hash_options
from pytest_kvmock.values.tokens import Prompt


class Reusing(Protocol):
    """The part of an engine that is used here (`HarnessWorker`)."""

    @property
    def next_id(self) -> int | None:
        """The id of its next event; None while it is running or holds events."""

    def cached_tokens(self, prompt: Prompt) -> int:
        """Return the number of tokens of a prompt that it would reuse now."""


class Reuse:
    """Asks engines how many blocks of a chain they would reuse.

    Attributes:
        engines: the engines whose events promise more than a request can use, by worker and rank.
    """

    def __init__(self) -> None:
        self.engines: dict[StreamKey, Reusing] = {}

    def widen(
        self,
        streams: Mapping[StreamKey, Stream],
        chain: QueriedChain,
        least: dict[StreamKey, int],
        most: dict[StreamKey, int],
        *,
        at_rest: bool,
        exactly: bool,
    ) -> None:
        """Lower the smallest correct answers to what engines would reuse, or to 0 if an engine cannot be asked.

        Args:
            streams: the blocks that are held according to the events.
            chain: the chain that was looked up; the engine is asked for a longer prompt that begins with it.
            least: the smallest correct answers according to the events; changed in place.
            most: the largest correct answers; changed in place.
            at_rest: whether no engine is in the middle of an operation.
            exactly: whether the index answers what is reused; then only that is correct if an engine can be asked.
        """
        for key, stream in streams.items():
            engine = self.engines.get(key)
            if engine is None and not (exactly and stream.groups):
                continue  # no engine to ask: the index must answer what is held, or what is reused if it claims so
            reused = None
            if at_rest and engine is not None and (exactly or least.get(key)):
                reused = _blocks_reused(engine, stream, streams, chain)
            if reused is None:
                least[key] = 0
                continue
            least[key] = min(reused, least.get(key, 0))
            if exactly:
                least[key] = most[key] = min(reused, most.get(key, 0))


def _blocks_reused(
    engine: Reusing, stream: Stream, streams: Mapping[StreamKey, Stream], chain: QueriedChain
) -> int | None:
    """Return the number of blocks of a chain that an engine would reuse; None if not all its events have arrived, or if
    the tokens are unknown.
    """
    size = stream.spec.block_size
    if size is None or chain.negative or stream.holes or stream.desync is not None or engine.next_id != stream.next_id:
        return None
    tokens, after, extra = _tokens_of(chain, streams)
    if tokens is None or len(tokens) != size * len(chain.local):
        return None
    options = hash_options(extra)
    if "mm_hashes" in options:
        return None
    lora_name, salt = options.get("lora_name"), options.get("cache_namespace")
    prompt = Prompt((*tokens, *after, 0), lora_name=lora_name, cache_salt=salt)
    return min(engine.cached_tokens(prompt), len(tokens)) // size


def _tokens_of(
    chain: QueriedChain, streams: Mapping[StreamKey, Stream]
) -> tuple[tuple[int, ...] | None, tuple[int, ...], EventExtra | None]:
    """Return the tokens of a chain, the next tokens that its last name covers, and extra data: the chain's own, or from
    the events of a stream that stored it.
    """
    if chain.tokens is not None:
        return chain.tokens, (), chain.extra
    block = chain.blocks[-1]
    for stream in streams.values():
        if stream.was_stored(block):
            stored = stream.read_chain(block, with_tokens=True)
            if stored.local_hashes == chain.local:
                after = () if stored.tokens is None else stream.next_tokens(block)
                return stored.tokens, after, stream.extra_of(stored.blocks)
    return None, (), None


def bounds_text(right: range, *, exactly: bool) -> str:
    """Return the expected answer for a hybrid model, as text; `exactly`: the index answers what is reused."""
    least, most = right.start, right.stop - 1
    blocks = "1 block" if most == 1 else f"{most} blocks"
    if least < most:
        return f"{least} to {blocks}: from what its engine would reuse to what its attention group holds"
    return f"{blocks}, as its engine would reuse" if exactly else f"{blocks}, as its attention group holds"


def misread(stream: Stream, block: int, *, too_many: bool) -> str:
    """Return a guess, from the events, which group's event an index misread that answers too many or too few blocks.

    Args:
        stream: the stream of the worker and rank with the wrong answer.
        block: the first block that is counted wrongly.
        too_many: whether the block is counted and must not be; False: it is not counted and must be.

    Returns:
        A text that calls the block "it"; empty if the events show nothing.
    """
    clues = _of_counted(stream, block) if too_many else _of_not_counted(stream, block)
    return next(clues, "")


def _of_counted(stream: Stream, block: int) -> Iterator[str]:
    """Yield possible reasons why an index counts a block that is not held, the likeliest first."""
    main = "no group" if stream.group_idx is None else _called(stream)
    for part in stream.groups.values():
        if block in part.device:
            stored = part.events[part.stored_at[block]].event.event_id
            yield f"{_called(part)} has it by event {stored}, and that is no block of {main}, the attention group"
    parents = {None, *stream.chain(block)} if stream.was_stored(block) else {None}
    for event in reversed(stream.events):
        data = event.event.data
        if isinstance(data, Stored) and stream.tails.intersection(data.block_hashes) and data.parent_hash in parents:
            yield f"event {event.event.event_id} of {main} names a part of a block, a prompt's tail, which is none"
    for part in stream.groups.values():
        for event in reversed(part.events):
            data = event.event.data
            if isinstance(data, SparseStored) and block not in data.block_hashes and data.parent_hash in parents:
                yield f"event {event.event.event_id} of {_called(part)} has a span and names {_named(data)} of it"


def _of_not_counted(stream: Stream, block: int) -> Iterator[str]:
    """Yield possible reasons why an index does not count a block that is held, the likeliest first."""
    main = "no group" if stream.group_idx is None else _called(stream)
    parent = stream.parent(block) if stream.was_stored(block) else None
    for each, it in ((block, "it"), (parent, "its parent")):
        for part in stream.groups.values():
            if each in part.removed_at and each not in part.device and each in stream.device:
                inner = part.events[part.removed_at[each]].event
                if isinstance(inner.data, Removed):
                    took = f"event {inner.event_id} removed {it} from {_called(part)} alone"
                    yield f"{took}, and {main}, the attention group, has it"
    for part in stream.groups.values():
        for event in reversed(part.events):
            data = event.event.data
            if isinstance(data, SparseStored) and parent in data.block_hashes[:-1]:
                names = f"names {_named(data)} of it, its parent {block_text(parent)} among them"
                yield f"event {event.event.event_id} of {_called(part)} has a span and {names}; these need not be its first"  # noqa: E501
    for part in stream.groups.values():
        if block not in part.device:
            yield f"{_called(part)} does not have it, which takes nothing from {main}, the attention group"


def _named(data: SparseStored) -> str:
    count, blocks = len(data.block_hashes), data.span // data.block_size
    return f"{count} of the {blocks} blocks"


def _called(part: Stream) -> str:
    """Return the text of a group: its number and its kind."""
    stored = (event for event in reversed(part.events) if isinstance(event.event.data, Stored))
    kind = next((group_kind(event.extra) for event in stored), None)
    return f"group {part.group_idx} ({kind or FULL_ATTENTION})"
