"""The keys that a prompt carries in addition to its tokens: a LoRA adapter, a cache salt, multimodal items, a session.

The first three are part of block names, so requests of two adapters or two tenants share nothing. The session is not
part of block names and travels with events.

One subject: these keys, of a prompt and of the events about its blocks.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple, Self, TypeAlias

from xxhash import xxh3_64_intdigest

from pytest_kvmock.values.checks import is_integer, is_utf8

EventExtra: TypeAlias = Mapping[str, Any]
"""The fields that travel with an event, by their names on the wire; missing fields are absent.

`lora_id`, `lora_name`, `cache_salt`, `session_id`; and `extra_keys`: per block, the values that vLLM hashes with its
tokens (a tuple, or None): the adapter's name, `(identifier, offset)` of each multimodal item, and in the first block
the salt. `lora_path` is on no wire. `lookahead_token_ids`: `LOOKAHEAD`. A cache group has `group_idx`,
`kv_cache_spec_kind` and `kv_cache_spec_sliding_window` (`group_extra`). TensorRT-LLM's events have `window_size`, in
tokens; a Stored has `cache_levels` and `priorities` of each block, a Cleared made from its created event has
`blocks_per_level`. In process only, they have `silently_gone`: names evicted without a Removed since the window's last
event. `full_report` is on no wire either: it marks a Stored of vLLM that repeats the hits of a look-up (`is_report`).
"""

LOOKAHEAD: Final = "lookahead_token_ids"
"""The key of a Stored whose names look ahead: for each block, the next tokens that its name also covers."""

LOOKAHEAD_KEYS: Final = "lookahead_keys"
"""Not on the wire: `extra_keys` of names that look ahead at multimodal items, including those items."""

FULL_ATTENTION: Final = "full_attention"
"""The cache kind (`kv_cache_spec_kind` in vLLM's events) of engines with one cache."""

_WHOLE_PREFIX: Final = frozenset({FULL_ATTENTION, "mla_attention", "sink_full_attention"})
"""Kinds that keep all blocks of a prefix; other kinds keep a chunk, a window or a state."""

_OF_A_GROUP: Final = ("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")

_DIGEST: Final = re.compile(r"[0-9a-fA-F]{64}", re.ASCII)


FULL_REPORT: Final = "full"
"""The mode (`kv_cache_report_mode`) of a vLLM request whose hits are published again at each look-up."""

REPORT: Final = "full_report"
"""The key of an in-process Stored that is a full report."""

INCREMENTAL_REPORT: Final = "incremental"
"""The mode of all other requests."""


def report_mode_of(value: object) -> str | None:
    """Return the mode of a request, "full" or None; other values are ignored, with a warning."""
    if value == FULL_REPORT:
        return FULL_REPORT
    if value not in (None, INCREMENTAL_REPORT):
        warnings.warn(
            f"report_mode must be {FULL_REPORT!r} or {INCREMENTAL_REPORT!r}; {value!r:.80} is ignored, "
            "as vLLM ignores it",
            stacklevel=3,
        )
    return None


class LoadFrom(NamedTuple):
    """A tier that a request may load from: an entry of vLLM's `kv_load_tiers`. None matches anything.

    Attributes:
        medium: "GPU", "CPU" or "STORAGE".
        locality: "LOCAL" or "REMOTE".
    """

    medium: str | None = None
    locality: str | None = None


_MEDIA: Final = ("GPU", "CPU", "STORAGE")


def load_tiers_of(value: object) -> tuple[LoadFrom, ...] | None:
    """Return the tiers below the host that a request may load from; None: all.

    Entries with an unknown medium are ignored, with a warning, as in vLLM; if none is left, all tiers are allowed.

    Args:
        value: a list of mappings of "medium" and "locality"; an empty one allows none.

    Raises:
        ValueError: `value` is not a list.
    """
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence):
        text = f"load_tiers must be a list of mappings such as {{'medium': 'STORAGE'}}, got {value!r:.80}"
        raise ValueError(text)  # noqa: TRY004 - as of the others
    read = []
    for each in value:
        entry = (each.get("medium"), each.get("locality")) if isinstance(each, Mapping) else each
        if isinstance(entry, tuple | list) and len(entry) == 2 and entry[0] in (None, *_MEDIA):
            read.append(LoadFrom(*entry))
        else:
            warnings.warn(
                f"load_tiers: {each!r:.80} is not a medium ({', '.join(_MEDIA)}) and is ignored, as vLLM ignores it",
                stacklevel=3,
            )
    return tuple(read) if read or not value else None


class MultimodalItem(NamedTuple):
    """A multimodal item in a prompt, such as an image.

    Attributes:
        identifier: the engine's name for it, the hash of its content.
        offset: position of its first token in the prompt.
        length: its number of tokens.
    """

    identifier: str
    offset: int
    length: int


def mm_hash(identifier: str) -> int:
    """Return the u64 that represents a multimodal item in Dynamo's local hashes.

    It is the first 16 of an identifier's 64 hexadecimal digits, the form of vLLM's identifiers (Dynamo,
    `parse_mm_hash_from_extra_key`). Dynamo ignores other identifiers; here it is the XXH3-64 of the text, so that short
    names in tests also differ.
    """
    return int(identifier[:16], 16) if _DIGEST.fullmatch(identifier) else xxh3_64_intdigest(identifier.encode())


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """The keys that a prompt carries in addition to its tokens.

    Attributes:
        lora_name: name of the adapter; None if there is none.
        cache_salt: a tenant's salt or namespace; None if there is none.
        multimodal: the multimodal items, in the order of their offsets. No two share a token: vLLM processes them one
            after the other, and would name most blocks of two overlapping items (a video and its sound) by the first
            only.
        session_id: its session; None if there is none. Not part of block names.
        lora_path: the adapter's path; only vLLM 0.33 hashes it.
        report_mode: vLLM's `kv_cache_report_mode`: with "full", the hits of a look-up are published again. Not part of
            block names. Any other text means the engine's default and is kept as None.
        load_tiers: the tiers below its host that vLLM may load from for it (`kv_load_tiers`); None: all. Not part of
            block names.

    Raises:
        ValueError: a text is invalid or empty, an item is not (identifier, offset, length), or items overlap.
    """

    lora_name: str | None = None
    cache_salt: str | None = None
    multimodal: tuple[MultimodalItem, ...] = ()
    session_id: str | None = None
    lora_path: str = ""
    report_mode: str | None = None
    load_tiers: tuple[LoadFrom, ...] | None = None

    def __post_init__(self) -> None:
        if self.report_mode != FULL_REPORT:
            object.__setattr__(self, "report_mode", report_mode_of(self.report_mode))
        object.__setattr__(self, "load_tiers", load_tiers_of(self.load_tiers))
        for name in ("lora_name", "cache_salt", "session_id"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"{name} must be a string that is not empty, or None, got {value!r:.80}")
            if value is not None:
                _check_text(name, value)
        if not isinstance(self.lora_path, str):
            raise ValueError(f"lora_path must be a string, got {self.lora_path!r:.80}")  # noqa: TRY004 - as of the others
        _check_text("lora_path", self.lora_path)
        if self.multimodal != ():
            object.__setattr__(self, "multimodal", _checked_items(self.multimodal))

    def __repr__(self) -> str:
        return f"PromptKeys({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are not their defaults, by name; items and tiers as plain tuples."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        found["multimodal"] = tuple(map(tuple, self.multimodal))
        if self.load_tiers is not None:
            found["load_tiers"] = tuple(map(tuple, self.load_tiers))
        nothing = {"load_tiers": (None,)}  # an empty list of tiers is not all of them
        return {name: value for name, value in found.items() if value not in nothing.get(name, (None, (), ""))}

    @property
    def naming(self) -> list[str]:
        """Names of the given fields that are part of block names."""
        return [name for name in self.given if name not in ("session_id", "lora_path", "report_mode", "load_tiers")]

    def named(self) -> Self | None:
        """Return the keys that are part of block names; None if there are none."""
        return replace(self, session_id=None, report_mode=None, load_tiers=None) if self.naming else None

    def check_fits(self, num_tokens: int) -> None:
        """Raise a ValueError for an item that exceeds `num_tokens` tokens."""
        for identifier, offset, length in self.multimodal:
            if offset + length > num_tokens:
                raise ValueError(
                    f"multimodal item {identifier!r:.80} has tokens {offset} to {offset + length - 1}, and the prompt "
                    f"has {num_tokens} tokens"
                )

    def block_keys(self, position: int, block_size: int, lookahead: int = 0) -> tuple[Any, ...] | None:
        """Return the values that vLLM hashes with the tokens of one block, untagged, as on the wire; None if there are
        none.

        Args:
            position: number of blocks before it.
            block_size: tokens per block.
            lookahead: number of next tokens that count as its own, as in names that look ahead; on the wire they do
                not.
        """
        keys: list[Any] = [] if self.lora_name is None else [self.lora_name]
        start = position * block_size
        for identifier, offset, length in self.multimodal:
            if offset < start + block_size + lookahead and offset + length > start:
                keys.append((identifier, offset - start))  # below 0 if it began in an earlier block
        if self.cache_salt is not None and not position:
            keys.append(self.cache_salt)
        return tuple(keys) or None

    def mm_hashes(self, start: int, end: int, block_size: int) -> list[list[int]] | None:
        """Return, for each block from `start` to `end`, the u64 of each multimodal item in it; None without items."""
        if not self.multimodal:
            return None
        hashes: list[list[int]] = []
        for first in range(start * block_size, end * block_size, block_size):
            inside = (item for item in self.multimodal if item.offset < first + block_size and sum(item[1:]) > first)
            hashes.append([mm_hash(item.identifier) for item in inside])
        return hashes

    def carried(self, start: int, end: int, block_size: int, lora_ids: LoraIds | None = None) -> dict[str, Any]:
        """Return the fields of an event that stores the blocks from `start` to `end` of the prompt.

        Args:
            start: the first block.
            end: the block after the last one.
            block_size: tokens per block.
            lora_ids: the adapter numbers of the storing engine; None: there is no engine, as in a look-up.
        """
        found: dict[str, Any] = {}
        if self.lora_name is not None:
            found = {} if lora_ids is None else {"lora_id": lora_ids.of(self.lora_name)}
            found["lora_name"] = self.lora_name
            if self.lora_path:
                found["lora_path"] = self.lora_path
        if self.cache_salt is not None:
            found["cache_salt"] = self.cache_salt
        if self.session_id is not None:
            found["session_id"] = self.session_id
        if self.naming:
            found["extra_keys"] = [self.block_keys(position, block_size) for position in range(start, end)]
        return found


class LoraIds:
    """The numbers of adapters in one engine process: from 1, in the order of first use or loading.

    Other engines, and the same engine after a restart, have different numbers. A number is never given twice.
    """

    __slots__ = ("_by_name", "_last")

    def __init__(self) -> None:
        self._by_name: dict[str, int] = {}
        self._last = 0

    def use(self, keys: PromptKeys | None) -> None:
        """Number the adapter of a request, if it has one."""
        if keys is not None and keys.lora_name is not None:
            self.of(keys.lora_name)

    def of(self, lora_name: str) -> int:
        """Return the number of an adapter."""
        if lora_name not in self._by_name:
            self.load(lora_name)
        return self._by_name[lora_name]

    def load(self, lora_name: str) -> int:
        """Give an adapter the next number, even if it already had one, and return it."""
        self._last += 1
        self._by_name[lora_name] = self._last
        return self._last

    def unload(self, lora_name: str) -> None:
        """Forget an adapter; when it is loaded again, it gets another number."""
        self._by_name.pop(lora_name, None)

    def looked_up(self, lora_name: str) -> int:
        """Return the number of an adapter for a look-up; a new number is not kept, and the next adapter also gets
        it.
        """
        return self._by_name.get(lora_name, self._last + 1)


def hashed_lora_id(lora_name: str) -> int:
    """Return the number that vLLM 0.9 hashes for an adapter, from 1 to 2**31 - 1; here it is made from the name, so
    that block names are stable.
    """
    return xxh3_64_intdigest(lora_name.encode()) % (2**31 - 1) + 1


def _check_text(name: str, value: str) -> None:
    """Raise a ValueError for a text that cannot be hashed or written on a wire."""
    if not is_utf8(value):
        raise ValueError(f"{name} must be text that UTF-8 can write, got {value!r:.80}")


def _checked_items(items: object) -> tuple[MultimodalItem, ...]:
    allowed = "multimodal has items (identifier, offset, length): a string, and numbers of at least 0 and 1"
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise ValueError(f"{allowed}; got {items!r:.80}")  # noqa: TRY004 - one error for all that is wrong with it
    checked = []
    for item in items:
        parts = tuple(item) if isinstance(item, Sequence) and not isinstance(item, str) else ()
        if len(parts) != 3 or not isinstance(parts[0], str) or not parts[0]:
            raise ValueError(f"{allowed}; got {item!r:.80}")
        if not is_integer(parts[1], 0) or not is_integer(parts[2], 1):
            raise ValueError(f"{allowed}; got {item!r:.80}")
        _check_text("the identifier of a multimodal item", parts[0])
        checked.append(MultimodalItem(*parts))
    checked.sort(key=lambda item: item.offset)
    for item, after in pairwise(checked):
        if item.offset + item.length > after.offset:
            raise ValueError(
                f"multimodal items must not overlap; {item.identifier!r:.80} has "
                f"{_span(item)}, and {after.identifier!r:.80} has {_span(after)}"
            )
    return tuple(checked)


def _span(item: MultimodalItem) -> str:
    last = item.offset + item.length - 1
    return f"token {item.offset}" if item.length == 1 else f"tokens {item.offset} to {last}"


# -------------------------------------------------------------------------------------------- with an event


def is_report(extra: EventExtra | None) -> bool:
    """Whether a Stored repeats the hits of a look-up; nothing on the wire shows it."""
    return extra is not None and REPORT in extra


def names_blocks(extra: EventExtra | None) -> bool:
    """Whether the fields of an event include keys that are part of block names."""
    return extra is not None and any(extra.get(key) for key in ("lora_name", "cache_salt", "extra_keys"))


def group_of(extra: EventExtra | None) -> int:
    """Return the cache group of an event, from its `group_idx`; 0 if it has none.

    vLLM publishes the blocks of a hybrid model once for each of its groups, under the same hashes.
    """
    group = None if extra is None else extra.get("group_idx")
    return group if is_integer(group, 1) else 0


def group_extra(
    group_idx: int, kind: str = FULL_ATTENTION, window: int | None = None, extra: EventExtra | None = None
) -> dict[str, Any] | None:
    """Return the fields of a Stored of a cache group; a Removed has only the `group_idx`.

    Group 0, full attention and no window are the values of engines with one cache, and travel with no event.

    Args:
        group_idx: number of the group, from 0.
        kind: its kind, as vLLM's `kv_cache_spec_kind`.
        window: tokens of its window, if it has one.
        extra: the other fields of the event.
    """
    found = dict(extra or {})
    if group_idx:
        found["group_idx"] = group_idx
    if kind != FULL_ATTENTION:
        found["kv_cache_spec_kind"] = kind
    if window is not None:
        found["kv_cache_spec_sliding_window"] = window
    return found or None


def has_window_size(extra: EventExtra | None) -> bool:
    """Whether an event has a window size, as TensorRT-LLM's do: its last block may be partial, and leaves may be
    evicted without an event.
    """
    return extra is not None and "window_size" in extra


def is_of_group(extra: EventExtra | None) -> bool:
    """Whether an event names its cache group, as those of a hybrid model do, except for group 0 of full attention."""
    return extra is not None and any(name in extra for name in _OF_A_GROUP)


def group_kind(extra: EventExtra | None) -> str | None:
    """Return the kind of a Stored's cache group; None if the event says that there is no kind."""
    kind = FULL_ATTENTION if extra is None else extra.get("kv_cache_spec_kind", FULL_ATTENTION)
    return kind if isinstance(kind, str) else None


def is_attention_group(extra: EventExtra | None) -> bool:
    """Whether a Stored is about an attention group, which keeps every block of a prefix; routers query these.

    Without a kind on the wire, a router assumes full attention only.
    """
    kind = group_kind(extra)
    return kind is None or kind == "unknown" or kind in _WHOLE_PREFIX


def may_be_sparse(extra: EventExtra | None) -> bool:
    """Whether the cache group of a Stored may leave out blocks of a span, by its kind.

    A Stored with neither kind nor group is of full attention, as in engines with one cache.
    """
    kind = group_kind(extra)
    return bool(group_of(extra)) if kind is None else kind not in _WHOLE_PREFIX


def is_tail(
    blocks: int, token_ids: Sequence[Sequence[int]] | None, block_size: int | None, *, parent_is_missing: bool
) -> bool:
    """Whether a Stored of an attention group names a prompt's tail: part of a block's tokens under a second name.

    Its size shows this. If the block size is not known yet, a parent that is not held shows it, because the parent may
    end in the middle of a block.

    Args:
        blocks: number of its blocks; a tail has one.
        token_ids: the token ids of each block, as received.
        block_size: tokens per block of the group; None: unknown.
        parent_is_missing: whether it has a parent that is not held.
    """
    if blocks != 1 or not token_ids or len(token_ids) != 1:
        return False
    size = len(token_ids[0])
    return parent_is_missing if block_size is None else 0 < size < block_size and not block_size % size


def hash_options(extra: EventExtra | None) -> dict[str, Any]:
    """Return the options of `block_hashes` for the blocks of an event, from its fields."""
    if not extra:
        return {}
    options = {"lora_name": extra.get("lora_name"), "cache_namespace": extra.get("cache_salt")}
    found: dict[str, Any] = {name: text for name, text in options.items() if isinstance(text, str)}
    mm_hashes = [[mm_hash(key[0]) for key in _listed(keys) if _is_item(key)] for keys in block_keys(extra)]
    return {**found, "mm_hashes": mm_hashes} if any(mm_hashes) else found


def block_keys(extra: EventExtra) -> Sequence[Any]:
    """Return the `extra_keys` of an event, one entry per block; empty if there are none."""
    return _listed(extra.get("extra_keys"))


def _listed(value: object) -> Sequence[Any]:
    """Return the value if it is a list or tuple, else an empty tuple; a value from a wire may have any type."""
    return value if isinstance(value, (list, tuple)) else ()


def part_of(extra: EventExtra | None, places: Iterable[int]) -> EventExtra | None:
    """Return the fields of an event that has only some of the blocks.

    Args:
        extra: the fields of the full event.
        places: the positions of these blocks, from 0.
    """
    if extra is None:
        return None
    given = [(name, _listed(extra.get(name))) for name in ("extra_keys", LOOKAHEAD, LOOKAHEAD_KEYS)]
    if not any(entries for _, entries in given):
        return extra
    kept = list(places)
    parts = {name: [entries[at] for at in kept if at < len(entries)] for name, entries in given if entries}
    return {**extra, **parts}


def keys_looked_at(extra: EventExtra, block_size: int, lookahead: int) -> EventExtra:
    """Return the fields of an event whose names look ahead, with all covered items in `extra_keys`.

    An event from a wire lacks the items that begin after its last block.

    Args:
        extra: the fields of the event.
        block_size: tokens per block.
        lookahead: number of next tokens that a name also covers.
    """
    if LOOKAHEAD_KEYS in extra:
        return {**extra, "extra_keys": extra[LOOKAHEAD_KEYS]}
    keys = [_listed(each) for each in block_keys(extra)]
    if not any(_is_item(key) for each in keys for key in each):
        return extra
    found = []
    for own, after in zip(keys, [*keys[1:], ()], strict=True):
        ahead = [(key[0], key[1] + block_size) for key in after if _is_item(key) and 0 <= key[1] < lookahead]
        items = [*(key for key in own if _is_item(key)), *ahead]
        others = [key for key in own if not _is_item(key)]
        lora = others[:1] if others and others[0] == extra.get("lora_name") else []
        found.append((*lora, *items, *others[len(lora) :]) or None)
    return {**extra, "extra_keys": found}


def has_items(extra: EventExtra | None) -> bool:
    """Whether any block of an event has a multimodal item in its `extra_keys`."""
    return extra is not None and any(_is_item(key) for keys in block_keys(extra) for key in _listed(keys))


def _is_item(key: object) -> bool:
    return isinstance(key, (tuple, list)) and len(key) == 2 and isinstance(key[0], str)
