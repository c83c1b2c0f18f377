"""Why a router's state of a prompt may differ from the held blocks: which batch had the change, and its fate."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_kvmock.values.events import Cleared, Removed, RouterEvent, StorageTier, Stored
from pytest_kvmock.values.prompt_keys import is_attention_group
from pytest_kvmock.values.tokens import Prompt
from pytest_kvmock.wire.codec.decoding import decode

if TYPE_CHECKING:
    from pytest_kvmock.wire.sockets.kv_publisher import KvPublisher


class _BlocksRead:
    """The batches of a rank that stored or removed blocks of a prompt, as far as they are kept for a replay.

    Args:
        blocks: the local hashes of each block of the prompt: with its salt, and without, as in vLLM's events.
        salt: the salt of the prompt, or None.

    Attributes:
        stored: by the position of a block, the number of the last batch that stored it.
        gone: by the position of a block, the number of the batch that later removed or cleared it.
    """

    def __init__(self, blocks: Sequence[Collection[int]], salt: str | None) -> None:
        self.stored: dict[int, int] = {}
        self.gone: dict[int, int] = {}
        self._blocks = blocks
        self._salt = salt
        self._places: dict[tuple[int, int], int] = {}  # position of a block, by group and block hash

    def take(self, number: int, event: RouterEvent) -> None:
        """Apply an event of a batch."""
        data, group = event.event.data, (event.extra or {}).get("group_idx", 0)
        if event.storage_tier is not StorageTier.DEVICE:
            return
        if isinstance(data, Stored):
            if is_attention_group(event.extra):
                self._store(number, group, data, event.extra or {})
            return
        if isinstance(data, Removed):
            names = [(group, name) for name in data.block_hashes]
            self.gone |= {self._places[name]: number for name in names if name in self._places}
        elif isinstance(data, Cleared):
            self.gone |= dict.fromkeys(self._places.values(), number)

    def _store(self, number: int, group: int, data: Stored, extra: Mapping[str, Any]) -> None:
        place = -1 if data.parent_hash is None else self._places.get((group, data.parent_hash))
        if place == -1 and self._salt != _salt_of(extra):
            return
        for name, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
            if place is None or place + 1 >= len(self._blocks) or local not in self._blocks[place + 1]:
                return
            place += 1
            self._places[group, name] = place
            self.stored[place] = number
            self.gone.pop(place, None)


def _salt_of(extra: Mapping[str, Any]) -> str | None:
    """Return the salt of a Stored that begins a prompt: from a separate field (SGLang), or from the keys of its first
    block (vLLM).
    """
    keys = (extra.get("extra_keys") or [None])[0] or ()
    named = [each for each in keys if isinstance(each, str) and each != extra.get("lora_name")]
    found = extra.get("cache_salt", named[-1] if named else None)
    return found if isinstance(found, str) else None


def reason(publisher: KvPublisher, dp_rank: int, prompt: Prompt, block_size: int, *, known: int, held: int) -> str:
    """Return why a router may know a different number of a prompt's leading blocks than a rank holds, in words.

    Args:
        publisher: the publisher of the rank's worker.
        dp_rank: the rank.
        prompt: the prompt.
        block_size: tokens per block.
        known: number of blocks that the router knows.
        held: number of blocks that the rank holds.
    """
    unsalted = prompt
    if prompt.tokens is not None and prompt.cache_salt is not None:
        unsalted = Prompt(prompt.tokens, lora_name=prompt.lora_name, multimodal=prompt.multimodal)
    blocks = [*zip(prompt.block_hashes(block_size), unsalted.block_hashes(block_size), strict=True)]
    place = min(known, held)
    if place >= len(blocks):
        return f"the prompt has {len(blocks)} full blocks"
    read = _BlocksRead(blocks, prompt.cache_salt)
    for number, payload in publisher.kept(dp_rank):
        for event in decode(payload, publisher.dialect, dp_rank=dp_rank).events:
            read.take(number, event)
    stored, gone = read.stored.get(place), read.gone.get(place)
    if known < held:
        if stored is None:
            return "no batch that a replay still has stored them"
        return f"batch {stored} stored them: {publisher.fate(stored, dp_rank)}"
    if gone is not None:
        return f"batch {gone} removed them: {publisher.fate(gone, dp_rank)}"
    if stored is not None:
        return "no batch that a replay has removed them"
    if not publisher.faults.restarts(dp_rank):
        return "no batch stored them"
    last = publisher.batches(dp_rank) - 1
    since = f"; batch {last}, the last one since: {publisher.fate(last, dp_rank)}" if last >= 0 else ""
    return f"it began again, and is empty since{since}"
