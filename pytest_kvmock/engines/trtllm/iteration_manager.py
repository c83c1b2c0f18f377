"""The common base of TensorRT-LLM's managers: it turns the events of an iteration into events of this package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any, Protocol

from pytest_kvmock.engines.base.manager_base import RequestLevel
from pytest_kvmock.engines.trtllm.hashes import ReuseScope, salt_number
from pytest_kvmock.engines.trtllm.iteration_events import Queued
from pytest_kvmock.values.checks import check_integer
from pytest_kvmock.values.events import BlockTokens, Cleared, EventData, Removed, StorageTier, Stored, Updated
from pytest_kvmock.values.moves import Block
from pytest_kvmock.values.prompt_keys import LoraIds
from pytest_kvmock.values.sinks import Sink
from pytest_kvmock.values.tokens import keyed_block_hashes


class IterationQueue(Protocol):
    """The events of one iteration."""

    def take(self) -> list[Queued]:
        """End the iteration: return its events, in order."""


class IterationManager(RequestLevel):
    """Publishes an iteration's events at its end, with `flush`; until then nothing is published.

    Args:
        num_blocks: blocks of the device, at least 1.
        block_size: tokens a block, at least 1.
        dp_rank: data-parallel rank that events name.
        sink: where events are published; None to publish nothing and consume no event id.
        backend: name of the backend.
        max_seq_len: maximum tokens of a request, or None.
        event_buffer: number of events of an iteration that are kept; older ones are dropped. None to keep all.
        flags: arguments that must be True or False, by name.
        events: the queue of events.

    Raises:
        ValueError: an argument is invalid.

    Attributes:
        event_buffer: as given.
        enable_caching: whether requests reuse cached blocks and leave blocks in the cache.
    """

    def __init__(
        self,
        *,
        backend: str,
        num_blocks: int,
        block_size: int,
        dp_rank: int,
        sink: Sink | None,
        max_seq_len: int | None,
        event_buffer: int | None,
        flags: Mapping[str, object],
        events: IterationQueue,
    ) -> None:
        super().__init__(backend=backend, num_blocks=num_blocks, block_size=block_size, dp_rank=dp_rank, sink=sink)
        if max_seq_len is not None:
            check_integer("max_seq_len", max_seq_len, 1, " tokens, or None")
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r:.80}")  # noqa: TRY004 - one error
        if event_buffer is not None:
            check_integer("event_buffer", event_buffer, 1, " events, or None")
        self.event_buffer = event_buffer
        self.enable_caching = True
        self._lora_ids = LoraIds()
        self._rng = Random(0)  # noqa: S311 - mock data
        self._queue = events

    def turn_caching_off(self) -> None:
        """Turn caching off; call it before the first request."""
        self.enable_caching = False

    def _scope(
        self, keys: object, adapter: int | None, cache_salt: int | None, *, to_look: bool
    ) -> tuple[int | None, int | None]:
        """Return the numbers of a request's adapter and salt: the given ones, or else those of its prompt's keys."""
        of_prompt = ReuseScope.of_prompt(keys, self._lora_ids, to_look=to_look)
        return (
            of_prompt.adapter if adapter is None else adapter,
            of_prompt.salt if cache_salt is None else salt_number(cache_salt),
        )

    # ---------------------------------------------------------------------------------------------------- events

    def flush(self) -> None:
        """End an iteration: publish its events, or only the last ones that fit into the buffer."""
        taken = self._queue.take()
        if self._publisher.sink is None:
            return
        dropped = 0 if self.event_buffer is None else max(0, len(taken) - self.event_buffer)
        self._publisher.next_event_id += dropped
        for event in taken[dropped:]:
            data, token_ids, extra = self._published(event)
            self._publisher.publish(data, token_ids, StorageTier.DEVICE, extra)
        self._publisher.surface()

    def _published(self, event: Queued) -> tuple[EventData, BlockTokens | None, dict[str, Any]]:
        """Return an event as this package publishes it: its data, its tokens, and its extra fields."""
        extra = self._extra(event)
        if event.kind == "created":
            return Cleared(), None, {**extra, "blocks_per_level": event.levels}
        if event.kind == "removed":
            return Removed(tuple(event.names)), None, extra
        if event.kind == "updated":
            assert event.levels is None or len(event.levels) == 2
            return Updated(event.names[0], event.levels, event.priorities), None, extra
        keys = event.keys
        tokens = [block.key.tokens for block in event.blocks]
        local = [
            keyed_block_hashes(each, len(each), keys, event.position + place)[0] for place, each in enumerate(tokens)
        ]
        extra |= {
            "cache_levels": [block.level for block in event.blocks],
            "priorities": [block.priority for block in event.blocks],
            "tokens_per_block": self.block_size,
        }
        if keys is not None:
            extra |= keys.carried(event.position, event.position + len(tokens), self.block_size, self._lora_ids)
        names = tuple(block.name for block in event.blocks)
        return Stored(event.parent, names, tuple(local)), tokens, extra

    def _extra(self, event: Queued) -> dict[str, Any]:
        """Return the extra fields of an event."""
        raise NotImplementedError

    # --------------------------------------------------------------------------------------------------- queries

    def _in_use(self) -> Iterator[tuple[Block, int]]:
        """Yield each block that requests use, with the number of references to it."""
        raise NotImplementedError

    @property
    def num_active_block_refs(self) -> int:
        """References of requests to blocks of the attention group."""
        return sum(self.active_blocks.values())

    @property
    def active_blocks(self) -> Mapping[Block, int]:
        """References to each block in use; a block outside the tree, such as a partial one, has a UUID."""
        blocks: Counter[Block] = Counter()
        for block, refs in self._in_use():
            blocks[block] += refs
        return blocks

    def references(self, block: Block) -> int:
        """Count the references to one block; 0 if it is not in use."""
        return self.active_blocks.get(block, 0)
