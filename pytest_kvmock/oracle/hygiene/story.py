"""The story of a block in a stream, for messages: the events that stored and removed it, and where it is now."""

from __future__ import annotations

from bisect import bisect_right

from pytest_kvmock.oracle.hygiene.stream import Stream
from pytest_kvmock.oracle.hygiene.text import event_name, worker_text
from pytest_kvmock.values.events import Located, Removed, RouterEvent, StorageTier, Stored, block_text


def story_of(stream: Stream, block: int, tier: StorageTier = StorageTier.DEVICE) -> str:
    """Return the state of a block according to the events, for messages.

    Args:
        stream: the stream.
        block: the block.
        tier: the tier in question, if there are several.
    """
    name = f"block {block_text(block)}"
    if block in stream.implied and tier is StorageTier.DEVICE:
        return f"{name} was named as a parent and never stored"
    stored, removed = stream.stored_at.get(block), stream.removed_at.get(block)
    if stored is None:
        return f"{name} was {'never stored' if removed is None else f'removed by {_called(stream, removed)}'}"
    if _has_tiers(stream) and (by_tier := _history_by_tier(stream, block, tier)):
        return f"{name} was {by_tier}"
    if block in stream.device:
        return f"{name} was stored{_held(stream, block, stored, -1 if removed is None else removed)}"
    if removed is not None and removed > stored:
        after = ", right after it was stored again" if block in stream.removed_but_resident else ""
        return f"{name} was removed by {_called(stream, removed)}{after}"
    return f"{name} was stored by {_emptied_by(stream, stored)}"


def removal_of(stream: Stream, block: int) -> str:
    """Return what last removed a block, even if a later event named it as a parent; if nothing did, return its
    story.
    """
    removed = stream.removed_at.get(block)
    if removed is None or (block in stream.device and stream.stored_at.get(block, -1) > removed):
        return story_of(stream, block)
    return f"block {block_text(block)} was removed by {_called(stream, removed)}"


def _has_tiers(stream: Stream) -> bool:
    """Whether tiers below the device are known, so that messages name tiers."""
    return len(stream.tiers) > 1 or bool(stream.spec.tier_blocks)


def where_text(stream: Stream, tier: StorageTier) -> str:
    """Return the text of a tier, to be put after the blocks of a message; "" if there is only the device."""
    return f" in {tier}" if _has_tiers(stream) or tier is not StorageTier.DEVICE else ""


def _history_by_tier(stream: Stream, block: int, tier: StorageTier) -> str:
    """Return the state of a stored block by the events of each tier; "" if they do not show it.

    Args:
        stream: the stream.
        block: the block.
        tier: the tier in question.
    """
    tiers = [each for each in StorageTier if block in stream.tiers.get(each, ())]
    if moved := _moved(stream, block, tier, tiers) or _left_below(stream, block, tier, tiers):
        return moved
    if tiers:
        found = [(each, *_last(stream, block, each, _since_empty(stream, each))) for each in tiers]
        if any(stored < 0 for _, stored, _ in found):
            return ""
        if tier is StorageTier.DEVICE and any(isinstance(stream.events[at].event.data, Located) for _, at, _ in found):
            return ""  # a copy on the host does not show whether the device holds the block
        if len(tiers) > 1 and not stream.copies and all(removed < stored for _, stored, removed in found):
            where = ", ".join(f"in {each} by {_called(stream, stored)}" for each, stored, _ in found)
            return f"stored {where}, and never removed"
        held = [f" in {each}{_held(stream, block, stored, removed, each)}" for each, stored, removed in found]
        return f"stored{';'.join(held)}"
    if block in stream.removed_but_resident:
        return ""
    # All tiers were emptied at the same time, including the tier that had the block.
    last = max(stream.stored_at[block], stream.removed_at.get(block, 0))
    ends = [*stream.cleared_at, *(when for when, why in stream.resets if why != "backwards")]
    places = range(max((end for end in ends if end <= last), default=0), last + 1)
    found = [(each, *_last(stream, block, each, places)) for each in StorageTier]
    dropped = [(each, stored) for each, stored, removed in found if removed < stored]
    gone = {each: removed for each, stored, removed in found if removed > stored}
    if not dropped:
        place, where = max((removed, where) for where, removed in gone.items())
        return f"removed from {where} by {_called(stream, place)}"
    before = f"removed from {tier} by {_called(stream, gone[tier])}, " if tier in gone else ""
    *others, (where, stored) = dropped
    listed = "".join(f"in {each} by {_called(stream, place)}, " for each, place in others)
    return f"{before}stored {listed}in {where} by {_emptied_by(stream, stored, comma=bool(others))}"


def _last(stream: Stream, block: int, tier: StorageTier, places: range) -> tuple[int, int]:
    """Return the positions in `events` of the last Stored (or location) and the last Removed of a block in a tier,
    among `places`; -1 if there is none.
    """
    return _last_of(stream, Stored, block, tier, places), _last_of(stream, Removed, block, tier, places)


def _last_of(stream: Stream, kind: type[Stored | Removed], block: int, tier: StorageTier, places: range) -> int:
    return next((place for place in reversed(places) if _names(stream.events[place], block, kind) is tier), -1)


def _moved(stream: Stream, block: int, tier: StorageTier, tiers: list[StorageTier]) -> str:
    """Return the text for a block that the tier does not hold: what removed it there, and where it is now.

    Args:
        stream: the stream.
        block: the block.
        tier: the tier in question.
        tiers: the tiers that hold it.

    Returns:
        "" if no Removed removed it from there, or if all blocks were dropped later.
    """
    if tier in tiers or block in stream.removed_but_resident:
        return ""
    removed = _last_of(stream, Removed, block, tier, _since_empty(stream, tier))
    if removed < 0:  # it was never in this tier; describe the other tiers
        removed, last = max(
            (_last_of(stream, Removed, block, each, _since_empty(stream, each)), each) for each in StorageTier
        )
        return "" if removed < 0 or tiers else f"removed from {last} by {_called(stream, removed)}; in no tier since"
    return (
        f"removed from {tier} by {_called(stream, removed)}; {_where_since(stream, block, tiers) or 'in no tier since'}"
    )


def _left_below(stream: Stream, block: int, tier: StorageTier, tiers: list[StorageTier]) -> str:
    """Return the text for a block that a Cleared removed from the device only; "" if none did. For the arguments see
    `_moved`.
    """
    if (
        tier is not StorageTier.DEVICE
        or tier in tiers
        or not tiers
        or stream.spec.clears_below
        or not stream.cleared_at
    ):
        return ""
    cleared = stream.cleared_at[-1]
    stored, removed = _last(stream, block, tier, range(cleared))
    since = _where_since(stream, block, tiers)
    if stored < 0 or removed > stored or not since:
        return ""
    return f"stored by {_called(stream, stored)} and cleared by {_called(stream, cleared)}; {since}"


def _where_since(stream: Stream, block: int, tiers: list[StorageTier]) -> str:
    """Return the text of the tiers that hold a block, each with the event that stored it there."""
    found = [(each, _last_of(stream, Stored, block, each, _since_empty(stream, each))) for each in tiers]
    return ", ".join(f"in {each} since {_called(stream, stored)}" for each, stored in found if stored >= 0)


def _since_empty(stream: Stream, tier: StorageTier) -> range:
    """Return the positions in `events` since a Cleared, or ids that began again, last emptied the tier."""
    is_cleared = tier is StorageTier.DEVICE or stream.spec.clears_below
    cleared = stream.cleared_at[-1] + 1 if is_cleared and stream.cleared_at else 0
    return range(max([cleared, *(when for when, why in stream.resets if why != "backwards")]), len(stream.events))


def _held(stream: Stream, block: int, stored: int, removed: int, tier: StorageTier = StorageTier.DEVICE) -> str:
    """Return the text of how long a tier has held a block; `stored` and `removed` are the positions in `events` of its
    last Stored and Removed there (-1: none).
    """
    copies = 1 + stream.copies.get(tier, {}).get(block, 0)
    if removed < stored:
        count = f"; {copies} copies are held" if copies > 1 else ""
        return f" by {_called(stream, stored)} and never removed{count}"
    left = f"{copies} {'is' if copies == 1 else 'are'} held"
    return f" by {_called(stream, stored)}; {_called(stream, removed)} removed a copy, and {left}"


def _called(stream: Stream, place: int) -> str:
    """Return the name of an event: its id, and restarts of ids since then."""
    return event_name(stream.events[place].event.event_id, [why for when, why in stream.resets if when > place])


def _emptied_by(stream: Stream, stored: int, *, comma: bool = False) -> str:
    """Return the name of a Stored, and what removed its blocks without a Removed; `comma`: whether it ends a list."""
    and_ = ", and" if comma else " and"
    called, cleared_at = _called(stream, stored), stream.cleared_at
    later = [why for when, why in stream.resets if when > stored]
    cleared = next(iter(cleared_at[bisect_right(cleared_at, stored) :]), None)
    end = next(((when, why) for when, why in stream.resets if when > stored and why != "backwards"), None)
    if cleared is not None and (end is None or cleared < end[0]):
        return f"{called}{and_} cleared by {_called(stream, cleared)}"
    if end is None:
        return f"{called}{and_} is no longer held"
    called = event_name(stream.events[stored].event.event_id, later if len(later) > 1 else ())
    what = "restarted" if end[1] == "restart" else "was removed"
    return f"{called}{and_} dropped when {worker_text(stream.worker_id, stream.dp_rank)} {what}"


def _names(event: RouterEvent, block: int, kind: type[Stored | Removed]) -> StorageTier | None:
    """Return the tier in which an event stores (or removes) a block, if it does."""
    data = event.event.data
    kinds = (Stored, Located) if kind is Stored else kind  # below the device only a location may store it
    return event.storage_tier if isinstance(data, kinds) and block in data.block_hashes else None
