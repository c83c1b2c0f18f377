"""The table of dialects in which engines write KV events on a wire: a new engine version is a new row.

One subject: the differences between dialects, and the registry of all dialects. `encoding.py` and `decoding.py` write
and read all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

from pytest_kvmock.values.checks import unknown_text
from pytest_kvmock.values.dialect import NONE_PER_BLOCK, Dialect, WireField
from pytest_kvmock.values.events import StorageTier

# Theory of operation
#
# A batch is the array [timestamp, events, data-parallel rank]. An event is an array that begins with its tag and has
# every field, or a map with the tag under "type" that leaves out fields with their default. So a dialect is a form and
# an ordered list of fields, each with its type, its default, and the value that an engine writes if nothing special is
# cached. This third column makes the bytes exact: vLLM 0.33 writes group_idx 0 although its default is None. Release by
# release: vllm/distributed/kv_events.py from 0.9.2 to 0.33.0, SGLang's disaggregation/kv_events.py from 0.5.9 to
# 0.5.23.


def _built_in() -> Iterator[Dialect]:
    """Yield the rows, oldest first: each is the previous row plus the changes of a release."""
    field, tier = WireField, StorageTier
    hashes, parent, tokens = (
        field("block_hashes", "hashes"),
        field("parent_block_hash", "parent"),
        field("token_ids", "tokens"),
    )
    size, lora_id, medium = field("block_size", "block_size"), field("lora_id", "integer"), field("medium", "medium")
    optional_medium = field("medium", "medium", default=None)
    group = field("group_idx", "integer", default=None, ordinary=0)
    locality = field("locality", "text", default=None)
    ownership = field("ownership", "text", default=None)
    salt, session = field("cache_salt", "text", default=None), field("session_id", "text", default=None)

    vllm = Dialect(
        "vllm-0.9",
        "vLLM 0.9.2",
        "array",
        stored=(hashes, parent, tokens, size, lora_id),
        removed=(hashes,),
        hashes="either",  # Python's own hash(): 64 bits, signed
        backend="vllm_0_19",
        version="0.9.2",
    )
    rows = [vllm]

    def release(number: str, newest: str, **changes: Any) -> None:
        rows.append(rows[-1].variant(f"vllm-{number}", models=f"vLLM {newest}", **changes))

    media = {tier.DEVICE: "GPU", tier.HOST_PINNED: "CPU", tier.DISK: "STORAGE"}
    unsigned = {"hashes": "unsigned", "media": media, "version": "0.10.2"}
    release("0.10.2", "0.10.2", add_stored=(medium,), add_removed=(medium,), **unsigned)
    release("0.14", "0.14.1", add_stored=(field("lora_name", "text"),), version="0.14.1")
    extra_keys = field("extra_keys", "keys", default=None, ordinary=NONE_PER_BLOCK)
    release("0.19", "0.19.1", add_stored=(extra_keys,), version=None)
    kind = field("kv_cache_spec_kind", "text", default=None, ordinary="full_attention")
    window = field("kv_cache_spec_sliding_window", "integer", default=None)
    release("0.23", "0.23.0", add_stored=(group, kind, window), add_removed=(group,))
    release("0.24", "0.24.0", form="map", backend="vllm", version="0.24.0")  # vllm#42892
    with_locality = {"add_stored": (locality,), "add_removed": (locality,), "version": "0.28.0"}
    release("0.28", "0.28.0", replay="topic", **with_locality)  # vllm#45177
    lookahead = field("lookahead_token_ids", "integer_lists", default=None)  # for each block, the tokens after it
    # MooncakeStoreConnector writes its own medium name (vllm#40900).
    changes = {"add_removed": (ownership,), "media": {**media, tier.EXTERNAL: "cpu"}, "version": None}
    release("0.33", "0.33.0", add_stored=(ownership, session, lookahead), **changes)
    yield from rows

    media = {tier.DEVICE: "GPU", tier.HOST_PINNED: "CPU_PINNED", tier.DISK: "DISK", tier.EXTERNAL: "EXTERNAL"}
    sglang = Dialect(
        "sglang-0.5.9",
        "SGLang 0.5.9",
        "array",
        stored=(hashes, parent, tokens, size, lora_id, optional_medium),
        removed=(hashes, optional_medium),
        hashes="signed",
        media=media,
        rank="nil",
        backend="sglang",
        pairs=True,
    )
    yield sglang
    yield sglang.variant("sglang-0.5.18", models="SGLang 0.5.18", metadata=("cache_salt",))
    later = sglang.variant("sglang-0.5.20", models="SGLang 0.5.20", form="map", add_stored=(salt, session))  # sgl#37482
    yield later
    name = field("lora_name", "text", default=None)
    later = later.variant("sglang-0.5.22", models="SGLang 0.5.22", replay="topic", add_stored=(name,))
    yield later
    filled = "SGLang 0.5.23, whose publisher fills the rank in"
    yield later.variant("sglang-0.5.23", models=filled, rank="filled", in_matrix=False)

    for row in rows[1:]:  # VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0
        models = f"{row.models}, hashes as whole digests"
        yield row.variant(f"{row.name}-bytes", models=models, hashes="bytes", in_matrix=False)

    json = Dialect(
        "dynamo-kv-cache-event", "Dynamo, KvCacheEvent", "json", replay=None, backend="lineage", in_matrix=False
    )
    yield json
    yield json.variant("dynamo-router-event", models="Dynamo, RouterEvent", form="router_json")
    trtllm = "TensorRT-LLM 1.2, as POST /kv_cache_events answers"
    trtllm_json = json.variant("trtllm-1.2", models=trtllm, form="trtllm_json", backend="trtllm")
    yield trtllm_json
    trtllm = "TensorRT-LLM 1.3 with its V2 cache manager, as POST /kv_cache_events answers"
    yield trtllm_json.variant("trtllm-1.3", models=trtllm, backend="trtllm_v2")
    yield Dialect(
        "trtllm-1.3-zmq",
        "TensorRT-LLM 1.3 with its V2 cache manager, over ZMQ",
        "map",
        stored=(hashes, parent, tokens, size, lora_id, medium, field("lora_name", "text")),
        removed=(hashes, medium),
        hashes="signed",
        media={tier.DEVICE: "GPU"},
        replay="topic",
        backend="trtllm_v2",
        in_matrix=False,
        whole_blocks=True,
    )


_BUILT_IN: Final = {dialect.name: dialect for dialect in _built_in()}
DIALECTS: Final[Mapping[str, Dialect]] = MappingProxyType(_BUILT_IN)
"""The built-in dialects by name: vLLM's, SGLang's, vLLM's with full digests, Dynamo's, TensorRT-LLM's."""

_registered: dict[str, Dialect] = {}


def known_dialects() -> dict[str, Dialect]:
    """Return the built-in dialects by name, then the registered ones."""
    return {**DIALECTS, **_registered}


@contextmanager
def registered_dialects(dialects: Mapping[str, Dialect]) -> Iterator[None]:
    """Register these dialects by name in this context, replacing all others except the built-in ones.

    The plugin does this for a pytest run, as with backends.
    """
    if not isinstance(dialects, Mapping) or not all(isinstance(each, Dialect) for each in dialects.values()):
        raise TypeError(f"dialects must map names to Dialects, got {dialects!r:.80}")
    before = dict(_registered)
    _registered.clear()
    _registered.update(dialects)
    try:
        yield
    finally:
        _registered.clear()
        _registered.update(before)


def spoken_dialects() -> dict[str, Dialect]:
    """Return the dialects of `known_dialects()` that are used over ZMQ."""
    return {name: dialect for name, dialect in known_dialects().items() if dialect.replay is not None}


def not_spoken_text(name: object) -> str:
    """Return the error text for a dialect that is unknown or not used over ZMQ."""
    spoken = spoken_dialects()
    given = name.name if isinstance(name, Dialect) else name
    if isinstance(name, Dialect) or (isinstance(given, str) and given in known_dialects()):
        return f"dialect {given!r} is not spoken over ZMQ; these are: {', '.join(spoken)}"
    return unknown_text("dialect", name, spoken)


def check_groups(dialect: Dialect) -> None:
    """Check that a dialect can express the events of vLLM's hybrid models.

    Raises:
        ValueError: it cannot express them (`mocks_groups`).
    """
    if not dialect.mocks_groups:
        able = ", ".join(name for name, each in DIALECTS.items() if each.mocks_groups)
        raise ValueError(f"cache groups of vLLM's hybrid models are mocked in {able}; got dialect {dialect.name!r}")


def field_names(dialect: Dialect) -> list[str]:
    """Return the field names of a dialect and of all known ones, in order, with the keys of their metadata."""
    names = {
        name: None
        for row in (dialect, *known_dialects().values())
        for name in (*(field.name for field in (*row.stored, *row.removed)), *row.metadata)
    }
    return [*names]


def find_dialect(name: str | Dialect) -> Dialect:
    """Look up a dialect by name; a `Dialect` is returned unchanged, so that unlisted ones can be used too.

    Raises:
        ValueError: the name is unknown; the message lists the nearest and the known ones.
    """
    if type(name) is Dialect:
        return name
    found = (_BUILT_IN.get(name) or _registered.get(name)) if isinstance(name, str) else None
    if found is None:
        raise ValueError(unknown_text("dialect", name, known_dialects()))
    return found
