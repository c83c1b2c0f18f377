"""TensorRT-LLM V2's events over ZMQ: full blocks of the longest window, without levels. From its source, not from a
run.

Its other form, the polled JSON, is complete (`trtllm_json`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from pytest_kvmock.values.events import Cleared, KvCacheEvent, Removed, RouterEvent, Stored, Updated
from pytest_kvmock.values.prompt_keys import FULL_ATTENTION
from pytest_kvmock.wire.codec.defects import EncodeError

TOKENS_PER_BLOCK: Final = "tokens_per_block"
"""In `RouterEvent.extra` of a Stored, the tokens of a full block; without it all blocks are full."""


class WholeBlocks:
    """Converts the events of one rank to those of its stream over ZMQ.

    Updated, `created`, layer groups other than the longest window, and partial blocks with their Removed are left out.
    An offloaded block counts as on the device until it is lost. Names are always the first 8 bytes of sha256, so the
    engine must use these.
    """

    __slots__ = ("_partial",)

    def __init__(self) -> None:
        self._partial: set[int] = set()  # names that were left out

    def passed(self, events: Sequence[RouterEvent]) -> list[RouterEvent]:
        """Return the events that are sent, in order.

        Raises:
            EncodeError: blocks have names other than sha256.
        """
        found = []
        for index, event in enumerate(events):
            try:
                one = self._of(event)
            except EncodeError as error:
                raise EncodeError(f"event {index} of the batch: {error}") from None
            if one is not None:
                found.append(one)
        return found

    def _of(self, event: RouterEvent) -> RouterEvent | None:
        data, extra = event.data, event.extra or {}
        if isinstance(data, Updated) or (isinstance(data, Cleared) and "blocks_per_level" in extra):
            return None
        if extra.get("hash_algo") == "v1_block_key":
            raise EncodeError(
                "TensorRT-LLM's stream over ZMQ names blocks by sha256, whatever hash_algo says, and these have the "
                "names of v1_block_key: give the engine hash_algo='v2_sha256_64'"
            )
        if extra.get("kv_cache_spec_kind", FULL_ATTENTION) != FULL_ATTENTION:
            return None
        if isinstance(data, Stored) and event.token_ids:
            return self._stored(event, data)
        if isinstance(data, Removed):
            names = tuple(name for name in data.block_hashes if name not in self._partial)
            self._partial.difference_update(data.block_hashes)
            return _with(event, Removed(names)) if names else None
        return event

    def _stored(self, event: RouterEvent, data: Stored) -> RouterEvent | None:
        """Return a Stored without its last block if this is partial; no other block can be."""
        sizes = [*map(len, event.token_ids or ())]
        count = len(sizes) - (sizes[-1] < (event.extra or {}).get(TOKENS_PER_BLOCK, sizes[-1]))
        self._partial.update(data.block_hashes[count:])
        self._partial.difference_update(data.block_hashes[:count])
        if not count:
            return None
        whole = Stored(data.parent_hash, data.block_hashes[:count], data.tokens_hashes[:count])
        return replace(_with(event, whole), token_ids=(event.token_ids or ())[:count])


def _with(event: RouterEvent, data: Stored | Removed) -> RouterEvent:
    named = event.event
    return replace(event, event=KvCacheEvent(named.event_id, data, named.dp_rank), extra=None)
