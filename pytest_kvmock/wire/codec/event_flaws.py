"""The problems of a batch to be written. They are searched after a failed write, because checking each event would cost
a tenth of the speed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from pytest_kvmock.values.checks import is_integer
from pytest_kvmock.values.dialect import FIELD_TYPES
from pytest_kvmock.values.events import (
    Cleared,
    EventData,
    KvCacheEvent,
    Located,
    Removed,
    RouterEvent,
    StorageTier,
    Stored,
    Updated,
)
from pytest_kvmock.wire.codec.defects import EncodeError, shown

_U32: Final = 2**32 - 1
_U64: Final = 2**64 - 1


def check_events(events: Sequence[RouterEvent], *, with_tokens: bool = True) -> None:
    """Raise for the first value of a wrong type in the events of a batch.

    Args:
        events: the events.
        with_tokens: whether their token ids are written.

    Raises:
        TypeError: the events are not a sequence, or an item is not a RouterEvent.
        EncodeError: a value of an event is invalid.
    """
    if not isinstance(events, Sequence):
        raise TypeError(f"the events of a batch are a sequence of RouterEvents, got {events!r:.80}")
    for index, event in enumerate(events):
        if not isinstance(event, RouterEvent):
            raise TypeError(f"event {index} of the batch must be a RouterEvent, got {event!r:.80}")
        if (flaw := event_flaw(event, with_tokens=with_tokens)) is not None:
            raise EncodeError(f"event {index} of the batch: {flaw}")


def check_timestamp(timestamp: object, dialect: str) -> None:
    """Raise an EncodeError, with the name of the dialect, for a timestamp that is not a finite number."""
    if type(timestamp) is float and -math.inf < timestamp < math.inf:
        return
    is_number = isinstance(timestamp, int | float) and not isinstance(timestamp, bool)
    if not is_number or not (is_integer(timestamp) or math.isfinite(timestamp)):  # type: ignore[arg-type]  # a number by now
        raise EncodeError(
            f"the batch cannot be written in {dialect!r}: its timestamp must be a finite number of seconds, got "
            f"{timestamp!r:.80}"
        )


def check_rank(dp_rank: object) -> None:
    """Raise an EncodeError for a rank that is not an unsigned 32-bit integer."""
    if not is_integer(dp_rank, 0) or dp_rank > _U32:
        raise EncodeError(f"the rank of a batch is an integer from 0 to {_U32}, or None, got {dp_rank!r:.80}")


def event_flaw(event: RouterEvent, *, with_tokens: bool = True) -> str | None:
    """Return the first flaw in the types of an event; None if there is none. `with_tokens`: whether to check the
    tokens.
    """
    named, tier, token_ids = event.event, event.storage_tier, event.token_ids
    if not isinstance(named, KvCacheEvent):
        return f"its event must be a KvCacheEvent, got {named!r:.80}"
    if not isinstance(named.data, EventData):
        return f"its data must be Stored, Removed, Located, Updated or Cleared, got {named.data!r:.80}"
    for name, value, most in (
        ("worker_id", event.worker_id, _U64),
        ("event_id", named.event_id, _U64),
        ("dp_rank", named.dp_rank, _U32),
    ):
        if not is_integer(value, 0) or value > most:
            return f"{name} must be an integer from 0 to {most}, got {value!r:.80}"
    if not isinstance(tier, StorageTier):
        return f"storage_tier must be a StorageTier ({', '.join(StorageTier)}), got {tier!r:.80}"
    if event.extra is not None and not isinstance(event.extra, Mapping):
        return f"extra must map names of fields to values, or be None, got {event.extra!r:.80}"
    if not with_tokens:
        token_ids = None
    if token_ids is not None and (not _is_listed(token_ids) or not all(map(_is_listed, token_ids))):
        return f"token_ids must have a sequence of token ids for each block, got {shown(token_ids)}"
    for block, of_block in enumerate(token_ids or ()):
        for token in of_block:
            if not is_integer(token, 0) or token > _U32:
                return f"token_ids must be {FIELD_TYPES['tokens'].text} for each block, got {shown(token)} in block {block}"  # noqa: E501
    return None if isinstance(named.data, Cleared) else _hashes_flaw(named.data)


def _hashes_flaw(data: Stored | Removed | Located | Updated) -> str | None:
    names = ("block_hashes", "tokens_hashes") if isinstance(data, Stored) else ("block_hashes",)
    for name in names:
        hashes = getattr(data, name)
        if not _is_listed(hashes):
            return f"{name} must be a tuple of integers, got {shown(hashes)}"
        if not all(map(is_integer, hashes)):
            return odd_hash(name, hashes)
    if isinstance(data, Stored) and data.parent_hash is not None and not is_integer(data.parent_hash):
        return f"parent_hash must be an integer, or None, got {shown(data.parent_hash)}"
    return None


def odd_hash(name: str, hashes: Sequence[object]) -> str:
    """Return the problem of hashes that include a non-integer."""
    place, odd = next((place, each) for place, each in enumerate(hashes) if not is_integer(each))
    return f"{name} must be integers, got {shown(odd)} at {place}"


def _is_listed(value: object) -> bool:
    """Whether a value is an array; texts and bytes are not."""
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str | bytes | Mapping)
