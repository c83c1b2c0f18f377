"""The lines of a capture, as JSON: one object per line, the header first. Conversion of journal entries to lines and
back.

The first key of a line is its kind; other keys may follow:

* `kvmock_capture`: the header, with the version of the format, engine, profile, seed and test.
* `stream`: the stream of a worker and rank begins; the known properties of its engine.
* `event`: an event as the router received it, in Dynamo's JSON. Other keys: `token_ids`, `extra`, `as_published` (its
  parent and blocks, if hashes are signed), `chained`, `replayed`, `unpublished` (removed blocks that were there without
  a Stored), `anew` (event ids began again before it).
* `hashes_of`: the hashes of the event at this position were later found to be a chain.
* `restarted`: a worker and rank was removed, or its restart was announced.
* `missed`: an event that a sink kept from the router.
* `lost`: batches of a wire that did not arrive, and their publisher, if known.
* `unreadable`: an error in a message of a wire.
* `skipped`: ids that a worker left out.
* `published`: ids below this were published, and some did not arrive.
* `full`: the held blocks were counted and exceed a capacity.
* `recovered`: a router asked for missed events.
* `injected`: a fault that the test injected, with its `event_id`, or on a wire with `publisher`, `restarts` and
  `batch`.
* `result`: the problem of this rule, at this position, results from the injected fault with this number.
* `end`: the capture is complete.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import merge
from importlib import metadata
from operator import itemgetter
from typing import Any, Final

from pytest_kvmock.oracle.hygiene import entries
from pytest_kvmock.oracle.hygiene.injection import Injection
from pytest_kvmock.oracle.hygiene.stream import Stream
from pytest_kvmock.values.checks import MOST_U64, KvMockError, check_integer, is_integer
from pytest_kvmock.values.events import (
    Cleared,
    EventData,
    KvCacheEvent,
    RouterEvent,
    SparseStored,
    Stored,
    StreamKey,
    renamed,
)

HEADER: Final = "kvmock_capture"
VERSION: Final = 1
"""The version of the format that is written; no other is read."""

KINDS: Final = (
    "stream",
    "event",
    "hashes_of",
    "restarted",
    "missed",
    "lost",
    "unreadable",
    "skipped",
    "published",
    "full",
    "recovered",
    "injected",
    "result",
    "end",
)
"""The keys of lines after the header."""


class CaptureError(KvMockError, ValueError):
    """Raised if a file cannot be read or written. The message is one line; it names the file and the line in it."""


def version() -> str:
    """Return the version of this package; "" if it is not installed."""
    try:
        return metadata.version("pytest-kvmock")
    except metadata.PackageNotFoundError:
        return ""


def header(engine: Mapping[str, Any] | None, seed: int | None, **more: Any) -> dict[str, Any]:
    """Return the content of a capture's first line, without the version of the format.

    Args:
        engine: the engine that published: its backend or dialect, and what it models; None: unknown.
        seed: seed of the engine's random choices; None if it has none.
        **more: profile and test.
    """
    return {"made_by": f"pytest-kvmock {version()}".strip(), "engine": engine, "seed": seed, "profile": None, **more}


def to_text(line: Mapping[str, Any]) -> str:
    """Return a line as JSON, without the newline."""
    return json.dumps(line, separators=(",", ":"), default=_plain)


def _plain(value: object) -> object:
    """Return a value that JSON can have: bytes as `{"hex": ...}`, any sequence as a list, the rest as its repr."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return list(value) if isinstance(value, Iterable) else repr(value)


def who(key: StreamKey) -> dict[str, int]:
    """Return worker and rank as keys of a line."""
    return {"worker_id": key[0], "dp_rank": key[1]}


def lines_of(entry: entries.Entry, **more: Any) -> list[dict[str, Any]]:
    """Return the lines of an entry that is not an event; empty for an entry that a check does not need.

    Args:
        entry: the entry.
        **more: further keys of the line.
    """
    if isinstance(entry, entries.WorkerRemoved):
        alone = {"alone": True} if entry.first_id is None and entry.dp_rank is not None else {}
        return [{"restarted": {**who(key), "first_id": entry.first_id, **alone}} for key in entry.keys]
    make = _LINES.get(type(entry))
    if make is None:
        return []
    kind, value = make(entry)
    return [{kind: {**value, **more} if isinstance(value, dict) else value}]


def entry_of(kind: str, value: Mapping[str, Any]) -> entries.Entry:
    """Return the entry of a line, for kinds that need no other data.

    Args:
        kind: the kind of the line.
        value: its value.

    Raises:
        ValueError: an invalid number, or a kind without an entry.
        KeyError: a key is missing.
    """
    key = key_of(value)
    if kind == "restarted":
        of_worker = value["first_id"] is None and not value.get("alone", False)
        return entries.WorkerRemoved(key[0], None if of_worker else key[1], value["first_id"], (key,))
    if kind == "missed":
        event = None if value["event"] is None else event_of(value["event"])
        return entries.Missed(key, value["event_id"], value["rule"], value["observed"], value["expected"], event)
    if kind == "lost":
        return entries.BatchesLost(*key, range(value["start"], value["stop"]), value["observed"])
    if kind == "skipped":
        return entries.Skipped(key, value["due"], value["got"])
    if kind == "published":
        return entries.IdsPublished(key, value["next_id"])
    raise ValueError(f"{kind}: no entry")


def key_of(value: Mapping[str, Any]) -> StreamKey:
    """Return the worker and rank of a line."""
    return check_integer("worker_id", value["worker_id"], 0), check_integer("dp_rank", value["dp_rank"], 0)


def _opened(entry: entries.Opened) -> dict[str, Any]:
    spec, line = entry.spec, {**who(entry.key), "first_id": entry.first_id}
    if spec is None:
        return line
    sizes = {"block_size": spec.block_size, "num_blocks": spec.num_blocks, "tier_blocks": spec.tier_blocks}
    below: dict[str, Any] = {} if spec.clears_below else {"clears_below": False}
    if spec.stores is not None:
        below["stores"] = {str(tier): store for tier, store in spec.stores.items()}
    named = {} if spec.hash is None else {"hash": spec.hash, "seed": spec.seed}
    closed = {"residency": spec.residency, "prefix_closed": spec.prefix_closed}
    return {**line, **sizes, **closed, **below, **named}


def _missed(entry: entries.Missed) -> dict[str, Any]:
    why = {"rule": entry.rule, "observed": entry.observed, "expected": entry.expected}
    event = None if entry.event is None else bare_line(entry.event)
    return {**who(entry.key), "event_id": entry.event_id, **why, "event": event}


def _lost(entry: entries.BatchesLost) -> dict[str, Any]:
    batches = {"start": entry.batches.start, "stop": entry.batches.stop, "observed": entry.text}
    return {**who((entry.worker_id, entry.dp_rank)), **batches}


def _recovered(entry: entries.Recovered) -> dict[str, Any]:
    published = entry.published
    merged = merge(*map(_in_order, (published, *published.groups.values())), key=itemgetter(0))
    events = {id(event): event for _, event in merged}.values()  # each group has the same Cleared
    ids = {"start": entry.ids.start, "stop": entry.ids.stop}
    return {**who((published.worker_id, published.dp_rank)), **ids, "events": list(map(bare_line, events))}


def _in_order(part: Stream) -> Iterator[tuple[tuple[int, int], RouterEvent]]:
    """Yield the events of a cache group in the order of publishing, each with its place among those of other groups.

    The place is the number of times that ids begin again after it (negative), and the id. It is counted from the end,
    because a group may begin late.
    """
    begun = [place for place, _ in part.resets]
    for place, event in enumerate(part.events):
        yield (bisect_right(begun, place) - len(begun), event.event_id), event


def _injected(injection: Injection) -> dict[str, Any]:
    what = {"fault": injection.kind, "event_id": injection.event_id, "survived": injection.survived}
    return {**who((injection.worker_id, injection.dp_rank)), **what}


_LINES: Final[Mapping[type, Callable[[Any], tuple[str, Any]]]] = {
    entries.Opened: lambda entry: ("stream", _opened(entry)),
    entries.Missed: lambda entry: ("missed", _missed(entry)),
    entries.BatchesLost: lambda entry: ("lost", _lost(entry)),
    entries.Skipped: lambda entry: ("skipped", {**who(entry.key), "due": entry.due, "got": entry.got}),
    entries.HashesChained: lambda entry: ("hashes_of", entry.position),
    entries.IdsPublished: lambda entry: ("published", {**who(entry.key), "next_id": entry.next_id}),
    entries.Counted: lambda _: ("full", True),
    entries.Recovered: lambda entry: ("recovered", _recovered(entry)),
    entries.Injected: lambda entry: ("injected", _injected(entry.injection)),
}
"""The key and the value of the line of an entry."""


def event_line(event: RouterEvent, *, replayed: bool = False) -> dict[str, Any]:
    """Return the line of an arrived event.

    Args:
        event: the event.
        replayed: whether a recovery had already brought it, so that it changes nothing.
    """
    line = bare_line(event)
    if replayed:
        line["replayed"] = True
    elif event.chained:
        line["chained"] = True
    return line


def bare_line(event: RouterEvent) -> dict[str, Any]:
    """Return the line of an event, without the mark that it belongs to a request."""
    line: dict[str, Any] = {"event": event.to_dict()}
    if event.token_ids is not None:
        line["token_ids"] = event.token_ids
    if event.extra is not None:
        line["extra"] = dict(event.extra)
    data = event.event.data
    if not isinstance(data, Cleared):
        parent = data.parent_hash if isinstance(data, Stored) else None
        if min((*data.block_hashes, parent or 0), default=0) < 0:
            line["as_published"] = [parent, data.block_hashes]
    return line


def event_of(line: Mapping[str, Any]) -> RouterEvent:
    """Return the event of a line.

    Raises:
        ValueError: the line has no valid event. The message names the wrong part.
    """
    event = RouterEvent.from_dict(line["event"])
    tokens, extra = line.get("token_ids"), line.get("extra")
    if tokens is not None and not (isinstance(tokens, list) and all(isinstance(each, list) for each in tokens)):
        raise ValueError(f"token_ids: expected an array of arrays, got {tokens!r:.80}")
    if extra is not None and not isinstance(extra, dict):
        raise ValueError(f"extra: expected an object, got {extra!r:.80}")
    if "as_published" in line:
        event.event = KvCacheEvent(
            event.event.event_id, _with_hashes(event.event.data, line["as_published"]), event.event.dp_rank
        )
    event.token_ids = tokens
    event.extra = None if extra is None else {key: _extra(key, value) for key, value in extra.items()}
    event.chained = line.get("chained") is True
    return event


def _with_hashes(data: EventData, published: Any) -> EventData:
    """Return the data with the engine's block hashes, which may be signed: Dynamo's JSON has the u64 of the same bits.

    Raises:
        ValueError: the hashes do not have the same bits.
    """
    if not isinstance(data, Cleared) and isinstance(published, list) and len(published) == 2:
        parent, hashes = published
        before = data.parent_hash if isinstance(data, Stored) else None
        if isinstance(hashes, list) and _u64(hashes) == list(data.block_hashes) and _u64([parent]) == [before]:
            if not isinstance(data, Stored):
                return renamed(data, hashes)
            if isinstance(data, SparseStored):
                return SparseStored(parent, tuple(hashes), data.span, data.block_size)
            return Stored(parent, tuple(hashes), data.tokens_hashes, data.start_position, data.mm_extra_info)
    raise ValueError(f"as_published: expected the parent and the block hashes of the event, got {published!r:.80}")


def _u64(hashes: list[Any]) -> list[Any]:
    return [block & MOST_U64 if is_integer(block) else block for block in hashes]


def _extra(key: str, value: Any) -> Any:
    """Return a value of `RouterEvent.extra` with its original tuples and bytes."""
    if key == "extra_keys" and isinstance(value, list):
        return [_tuples(each) for each in value]
    if key == "digests" and isinstance(value, list):
        return _tuples(value)
    return _tuples(value) if isinstance(value, dict) else value


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    if isinstance(value, dict) and value.keys() == {"hex"} and isinstance(value["hex"], str):
        return bytes.fromhex(value["hex"])
    return value
