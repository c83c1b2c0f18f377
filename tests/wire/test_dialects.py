"""The table of dialects: the recorded bytes, the changes of each release row by row, and refused inputs."""

import msgspec
import pytest
from payloads import MSGPACK, cleared, removed, stored

from pytest_kvmock import BACKENDS, RouterEvent, StorageTier
from pytest_kvmock.values.dialect import NONE_PER_BLOCK, REQUIRED
from pytest_kvmock.wire import DIALECTS, Batch, Dialect, WireField, decode, encode, find_dialect
from pytest_kvmock.wire.codec.table import known_dialects, registered_dialects

VLLM = ["vllm-0.9", "vllm-0.10.2", "vllm-0.14", "vllm-0.19", "vllm-0.23", "vllm-0.24", "vllm-0.28", "vllm-0.33"]
SGLANG = ["sglang-0.5.9", "sglang-0.5.18", "sglang-0.5.20", "sglang-0.5.22"]
RECORDED = ["vllm-0.10.2", "vllm-0.19", "vllm-0.24", "vllm-0.33", "sglang-0.5.9", "sglang-0.5.20"]


def recorded_batch(name):
    first = -2686225575210368064 if name.startswith("sglang") else 15760518052499183552
    return Batch([stored((first, 2), first=1), removed((2,), event_id=1), cleared(event_id=2)], 1700000000.5)


# ---------------------------------------------------------------------------------------------------- as recorded


def test_all_recorded_dialects_are_replayed(recording):
    assert list(recording("wire_dialects.json")) == RECORDED


@pytest.mark.parametrize("name", RECORDED)
def test_encoded_bytes_equal_those_of_the_recorded_engine(recording, name):
    assert recording("wire_dialects.json")[name]["hex"] == encode(recorded_batch(name), name).hex()


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_bytes_are_decoded_to_their_events(recording, name):
    batch = recorded_batch(name)
    decoded = decode(bytes.fromhex(recording("wire_dialects.json")[name]["hex"]), name)

    assert decoded.problems == []
    assert batch.events == decoded.events
    assert [event.token_ids for event in decoded.events] == [[(1, 2, 3, 4), (5, 6, 7, 8)], None, None]
    assert decoded.extra == [None] * 3
    assert (1700000000.5, None if "sglang" in name else 0, 3) == (
        decoded.timestamp,
        decoded.dp_rank,
        decoded.num_events,
    )


# ---------------------------------------------------------------------------------------------------- row by row


def plain(name, batch=None):
    """Return the result of msgspec, which knows no dialect: [stored, removed, cleared], and the rank."""
    _, events, rank = msgspec.msgpack.decode(encode(batch or recorded_batch(name), name))
    return events, rank


def names(name, kind):
    return [field.name for field in getattr(DIALECTS[name], kind)]


ADDED = [  # a release, the one before it, the added fields of BlockStored and BlockRemoved of an ordinary engine
    ("vllm-0.10.2", "vllm-0.9", {"medium": "GPU"}, {"medium": "GPU"}),
    ("vllm-0.14", "vllm-0.10.2", {"lora_name": None}, {}),
    ("vllm-0.19", "vllm-0.14", {"extra_keys": [None, None]}, {}),
    (
        "vllm-0.23",
        "vllm-0.19",
        {"group_idx": 0, "kv_cache_spec_kind": "full_attention", "kv_cache_spec_sliding_window": None},
        {"group_idx": 0},
    ),
]


@pytest.mark.parametrize(("name", "before", "of_stored", "of_removed"), ADDED)
def test_an_array_appends_its_new_fields_to_those_of_the_previous_release(name, before, of_stored, of_removed):
    (old_stored, old_removed, _), _ = plain(before)
    (new_stored, new_removed, last), rank = plain(name)

    assert [*old_stored, *of_stored.values()] == new_stored
    assert [*old_removed, *of_removed.values()] == new_removed
    assert last == ["AllBlocksCleared"]
    assert rank == 0
    assert [*names(before, "stored"), *of_stored] == names(name, "stored")
    assert [*names(before, "removed"), *of_removed] == names(name, "removed")


def test_a_stored_of_the_first_vllm_release_has_five_fields():
    events, rank = plain("vllm-0.9")
    hashes = [15760518052499183552, 2]

    assert [
        ["BlockStored", hashes, None, [*range(1, 9)], 4, None],
        ["BlockRemoved", [2]],
        ["AllBlocksCleared"],
    ] == events
    assert rank == 0


def test_the_first_map_form_has_the_fields_of_the_last_array_form():
    (array, gone, _), _ = plain("vllm-0.23")
    (stored_map, removed_map, cleared_map), _ = plain("vllm-0.24")

    values = dict(zip(["type", *names("vllm-0.23", "stored")], array, strict=True))
    del values["kv_cache_spec_sliding_window"]  # it has its default value
    assert list(values.items()) == list(stored_map.items())
    assert dict(zip(["type", *names("vllm-0.23", "removed")], gone, strict=True)) == removed_map
    assert cleared_map == {"type": "AllBlocksCleared"}


LATER = [  # a release, the one before it, values of the added fields
    ("vllm-0.28", "vllm-0.24", {"locality": "local"}, {"locality": "local"}),
    (
        "vllm-0.33",
        "vllm-0.28",
        {"ownership": "own", "session_id": "s", "lookahead_token_ids": [[4], [8]]},
        {"ownership": "own"},
    ),
    ("sglang-0.5.22", "sglang-0.5.20", {"lora_name": "adapter"}, {}),
    ("sglang-0.5.20", "sglang-0.5.9", {"cache_salt": "salt", "session_id": "s"}, {}),
]


@pytest.mark.parametrize(("name", "before", "of_stored", "of_removed"), LATER)
def test_a_map_contains_new_fields_only_where_they_are_set(name, before, of_stored, of_removed):
    special = Batch([stored(extra=of_stored), removed(extra=of_removed or None)])
    (ordinary, gone, _), rank = plain(name)
    (with_them, gone_with_them), _ = plain(name, special)

    if DIALECTS[before].form == "map":
        assert (ordinary, gone) == (plain(before)[0][0], plain(before)[0][1])  # unset fields are omitted
    assert of_stored == {key: value for key, value in with_them.items() if key in of_stored}
    assert of_removed == {key: value for key, value in gone_with_them.items() if key in of_removed}
    assert [*names(before, "stored"), *of_stored] == names(name, "stored")
    assert not {*of_stored} & {*ordinary}
    assert (None if name.startswith("sglang") else 0) == rank


def test_sglang_0_5_18_appends_a_map_to_salted_events_only():
    batch = Batch([stored((1, 2)), stored((3, 4), extra={"cache_salt": "s"})])
    (ordinary, salted), _ = plain("sglang-0.5.18", batch)

    assert plain("sglang-0.5.9", batch)[0][0] == ordinary
    assert [*plain("sglang-0.5.9", batch)[0][1], {"cache_salt": "s"}] == salted
    assert decode(encode(batch, "sglang-0.5.18"), "sglang-0.5.18").extra == [None, {"cache_salt": "s"}]


def test_the_rank_of_an_sglang_batch_is_nil_until_a_publisher_sets_it():
    batch = Batch([stored(rank=3)])

    assert (plain("sglang-0.5.22", batch)[0], 3) == plain("sglang-0.5.22", Batch(batch.events, 0.0, 3))
    assert (plain("sglang-0.5.22", batch)[0], None) == plain("sglang-0.5.22", batch)
    assert (plain("sglang-0.5.22", batch)[0], 3) == plain("sglang-0.5.23", batch)
    assert plain("vllm-0.33", batch)[1] == 3


def test_replays_carry_the_topic_since_vllm_0_28_and_sglang_0_5_22():
    framing = {name: DIALECTS[name].replay for name in [*VLLM, *SGLANG]}

    with_topic = ["vllm-0.28", "vllm-0.33", "sglang-0.5.22"]
    assert with_topic == [name for name, replay in framing.items() if replay == "topic"]
    assert {*framing.values()} == {"plain", "topic"}


def test_the_default_matrix_has_the_twelve_zmq_dialects():
    assert [name for name, dialect in DIALECTS.items() if dialect.in_matrix] == [*VLLM, *SGLANG]


def test_every_dialect_names_a_known_backend():
    assert {dialect.backend for dialect in DIALECTS.values()} <= {*BACKENDS}
    assert {DIALECTS[name].backend for name in VLLM[:5]} == {"vllm_0_19"}
    assert {DIALECTS[name].backend for name in VLLM[5:]} == {"vllm"}


TIERS = {
    "vllm-0.33": {"device": "GPU", "host_pinned": "CPU", "disk": "STORAGE"},
    "vllm-0.10.2": {"device": "GPU", "host_pinned": "CPU", "disk": "STORAGE"},
    "sglang-0.5.9": {"device": "GPU", "host_pinned": "CPU_PINNED", "disk": "DISK", "external": "EXTERNAL"},
    "sglang-0.5.20": {"device": "GPU", "host_pinned": "CPU_PINNED", "disk": "DISK", "external": "EXTERNAL"},
}


@pytest.mark.parametrize("name", TIERS)
def test_tiers_are_written_under_the_medium_names_of_the_engine(name):
    for tier, medium in TIERS[name].items():
        batch = Batch([stored(tier=StorageTier(tier)), removed(event_id=1, tier=StorageTier(tier))])
        payload = encode(batch, name)
        events = msgspec.msgpack.decode(payload)[1]

        assert [medium] * 2 == [
            event["medium"] if isinstance(event, dict) else event[-1 if event[0] == "BlockRemoved" else 6]
            for event in events
        ]
        assert batch.events == decode(payload, name).events


# ---------------------------------------------------------------------------------------------------- one's own


def test_a_variant_of_a_dialect_adds_and_removes_fields():
    colour = WireField("colour", "text", default=None, ordinary="blue")
    mine = DIALECTS["vllm-0.33"].variant(
        "vllm-0.34", models="vLLM 0.34.0", add_stored=(colour,), without=("ownership",)
    )
    batch = Batch([stored(), stored(event_id=1, extra={"colour": "red"}), removed(event_id=2)])
    payload = encode(batch, mine)
    first, second, _ = msgspec.msgpack.decode(payload)[1]

    assert (first["colour"], second["colour"]) == ("blue", "red")
    assert decode(payload, mine).extra == [None, {"colour": "red"}, None]
    assert "ownership" not in [field.name for field in (*mine.stored, *mine.removed)]


def test_a_variant_for_another_backend_does_not_keep_the_version():
    row = DIALECTS["vllm-0.28"]

    assert (row.variant("mine").backend, row.variant("mine").version) == ("vllm", "0.28.0")
    assert ((mine := row.variant("mine", backend="lineage")).backend, mine.version) == ("lineage", None)
    assert (
        (mine := row.variant("mine", backend="vllm_0_19", version="0.23.0")).backend,
        mine.version,
    ) == ("vllm_0_19", "0.23.0")


def test_a_dialect_can_have_its_fields_in_any_order():
    fields = {field.name: field for field in DIALECTS["vllm-0.19"].stored}
    order = ["lora_id", "token_ids", "block_size", "parent_block_hash", "medium", "block_hashes"]
    media = DIALECTS["vllm-0.19"].media
    mine = Dialect(
        "mine", "ours", "array", tuple(fields[name] for name in order), DIALECTS["vllm-0.19"].removed, media=media
    )
    batch = Batch([stored((5, 6), 4), stored(event_id=1, tier=StorageTier.DISK), removed(event_id=2)])
    payload = encode(batch, mine)

    assert ["BlockStored", None, [*range(8)], 4, 4, "GPU", [5, 6]] == msgspec.msgpack.decode(payload)[1][0]
    assert batch.events == decode(payload, mine).events


def test_find_dialect_accepts_a_name_or_a_dialect():
    assert DIALECTS["vllm-0.33"] is find_dialect("vllm-0.33") is find_dialect(DIALECTS["vllm-0.33"])


@pytest.mark.parametrize(
    ("name", "hint"),
    [("vllm-0.34", "; did you mean 'vllm-0.33' or 'vllm-0.24' or 'vllm-0.23'? "), (7, "; "), (None, "; ")],
)
def test_an_unknown_dialect_is_refused_with_the_nearest_names(name, hint):
    known = ", ".join(DIALECTS)
    for call in (lambda: find_dialect(name), lambda: decode(b"", name), lambda: encode(Batch([]), name)):
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == f"unknown dialect {name!r}{hint}known: {known}"


def test_a_registered_dialect_is_known_only_inside_its_registration():
    mine = DIALECTS["vllm-0.33"].variant("mine")
    with registered_dialects({"mine": mine}):
        assert mine is find_dialect("mine")
        assert [*known_dialects()] == [*DIALECTS, "mine"]
        with registered_dialects({}):
            assert [*known_dialects()] == [*DIALECTS]
        assert "mine" in known_dialects()
    with pytest.raises(ValueError, match="unknown dialect 'mine'"):
        find_dialect("mine")


OF = {field.name: field for field in DIALECTS["vllm-0.33"].stored}
REFUSED = [
    ({"name": "a b"}, "a dialect's name has only letters, digits, '_', '.' and '-', and is not 'all'; got 'a b'"),
    ({"name": "all"}, "a dialect's name has only letters, digits, '_', '.' and '-', and is not 'all'; got 'all'"),
    ({"models": 3}, "dialect 'mine': models must be a string, got 3"),
    (
        {"form": "mapp"},
        (
            "dialect 'mine': form must be 'array' or 'map' or 'json' or 'router_json' or 'trtllm_json', got 'mapp'; "
            "did you mean 'map'?"
        ),
    ),
    (
        {"hashes": "digest"},
        "dialect 'mine': hashes must be 'unsigned' or 'signed' or 'either' or 'bytes', got 'digest'",
    ),
    ({"rank": None}, "dialect 'mine': rank must be 'filled' or 'nil', got None"),
    (
        {"replay": "topics"},
        "dialect 'mine': replay must be 'plain' or 'topic' or None, got 'topics'; did you mean 'topic'?",
    ),
    ({"version": 33}, "dialect 'mine': version must be a string, or None, got 33"),
    ({"in_matrix": 1}, "dialect 'mine': in_matrix must be True or False, got 1"),
    ({"stored": ("block_hashes",)}, "dialect 'mine': stored must be a tuple of WireFields, got ('block_hashes',)"),
    ({"stored": (OF["block_hashes"],)}, "dialect 'mine': stored must have 1 field of type 'parent', got 0"),
    (
        {"removed": (OF["block_hashes"], OF["token_ids"])},
        "dialect 'mine': removed must have no field of type 'tokens', got 1",
    ),
    ({"removed": (OF["block_hashes"],) * 2}, "dialect 'mine': removed has the field 'block_hashes' twice"),
    ({"add_removed": (WireField("type", "text"),)}, "dialect 'mine': removed has the field 'type' next to the tag"),
    (
        {"add_stored": (WireField("colour", "text"),)},
        "dialect 'mine': stored: field 'colour' is required, and stands after one with a default",
    ),
    ({"media": {"device": "GPU", "disk": "GPU"}}, "dialect 'mine': media must be strings, each for one tier; got *"),
    (
        {"media": {"cellar": "GPU"}},
        "unknown tier 'cellar'; known: device, host_pinned, disk, external, host, g1, g2, g3, g4",
    ),
    ({"metadata": "salt"}, "dialect 'mine': metadata must be a tuple of strings, got 'salt'"),
    ({"metadata": (5,)}, "dialect 'mine': metadata must be a tuple of strings, got (5,)"),
    ({"metadata": ("cache_salt",)}, "dialect 'mine': metadata follows an array; a map has fields"),
    ({"without": ("medum",)}, "dialect 'vllm-0.33' has no field 'medum'; did you mean 'medium'?"),
    ({"media": {"device": []}}, "dialect 'mine': media must be strings, each for one tier; got *"),
    ({"add_stored": [OF["medium"]]}, "dialect 'mine': add_stored must be a tuple of WireFields, got [WireField(*"),
    ({"add_removed": None}, "dialect 'mine': add_removed must be a tuple of WireFields, got None"),
    (
        {"stored": DIALECTS["vllm-0.9"].stored, "add_stored": (OF["medium"],)},
        "dialect 'mine': stored are all its fields; leave out add_stored and without",
    ),
    (
        {"removed": DIALECTS["vllm-0.9"].removed, "without": ["medium"]},
        "dialect 'mine': removed are all its fields; leave out add_removed and without",
    ),
    ({"without": "medium"}, "dialect 'mine': without must be names of fields, got 'medium'"),
    ({"without": 5}, "dialect 'mine': without must be names of fields, got 5"),
    ({"without": [[]]}, "dialect 'vllm-0.33' has no field []"),
    ({"hash": "bytes"}, "unknown attribute of a dialect 'hash'; did you mean 'hashes'? known: *"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_an_invalid_dialect_is_refused_in_one_line(changes, message):
    with pytest.raises(ValueError) as error:
        DIALECTS["vllm-0.33"].variant(**{"name": "mine", **changes})

    assert str(error.value) == message or (message.endswith("*") and str(error.value).startswith(message[:-1]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a b", "text"), "a field's name is an identifier and not a keyword, got 'a b'"),
        (("from", "text"), "a field's name is an identifier and not a keyword, got 'from'"),
        (("a", "str"), "field 'a': unknown type 'str'; known: hashes, parent, *"),
        (("a", ["text"]), "field 'a': unknown type ['text']; known: hashes, parent, *"),
        (("a", "text", 5), "field 'a': default must be a string, or nil, or REQUIRED, got 5"),
        (("a", "any", NONE_PER_BLOCK), "field 'a': default must be anything, or REQUIRED, got NONE_PER_BLOCK"),
        (("a", "integer", None, "0"), "field 'a': ordinary must be an integer, or nil, got '0'"),
        (("a", "integer", None, True), "field 'a': ordinary must be an integer, or nil, got True"),
        (("a", "integers", None, [1, "2"]), "field 'a': ordinary must be an array of integers, or nil, got [1, '2']"),
        (("a", "text", None, NONE_PER_BLOCK), "field 'a': ordinary must be a string, or nil, got NONE_PER_BLOCK"),
        (("a", "keys", None, "x"), "field 'a': ordinary must be an array, or nil, or NONE_PER_BLOCK, got 'x'"),
        (("a", "any", None, REQUIRED), "field 'a': ordinary must be anything, or NONE_PER_BLOCK, got REQUIRED"),
        (("a", "hashes", None), "field 'a': default must be an array of block hashes, or REQUIRED, got None"),
        (("a", "hashes", [1.5]), "field 'a': default must be an array of block hashes, or REQUIRED, got [1.5]"),
        (("a", "tokens", [-1]), "field 'a': default must be an array of integers from 0 to 4294967295, or REQUIRED, *"),
        (("a", "block_size", 0), "field 'a': default must be an integer of at least 1, or REQUIRED, got 0"),
        (("a", "parent", "root"), "field 'a': default must be a block hash, or nil, or REQUIRED, got 'root'"),
        (
            ("a", "medium", None, "GPU"),
            "field 'a': ordinary is for a field that travels with an event, and 'medium' is the event's own; got 'GPU'",
        ),
    ],
)
def test_an_invalid_wire_field_is_refused(arguments, message):
    with pytest.raises(ValueError) as error:
        WireField(*arguments)

    assert str(error.value).startswith(message.removesuffix("*"))


@pytest.mark.parametrize(
    ("kind", "default", "ordinary"),
    [
        ("hashes", (), None),
        ("hashes", [b"x" * 32], None),
        ("parent", None, None),
        ("parent", b"x" * 16, None),
        ("tokens", [], None),
        ("block_size", 16, None),
        ("medium", "GPU", None),
        ("integer", 0, 5),
        ("text", "", "blue"),
        ("integers", [1], (2, -3)),
        ("keys", [], NONE_PER_BLOCK),
        ("any", {"a": 1}, NONE_PER_BLOCK),
    ],
)
def test_a_wire_field_accepts_default_values_of_its_type(kind, default, ordinary):
    field = WireField("a", kind, default, ordinary)
    assert (default, ordinary) == (field.default, field.ordinary)


@pytest.mark.parametrize("dialects", [5, {"mine": 5}, ["mine"]])
def test_registering_a_value_that_is_not_a_mapping_to_dialects_is_refused(dialects):
    known = [*known_dialects()]
    with pytest.raises(TypeError, match=r"^dialects must map names to Dialects, got "), registered_dialects(dialects):
        pass
    assert known == [*known_dialects()]


def test_the_repr_of_a_marker_is_its_name():
    assert repr(NONE_PER_BLOCK) == "NONE_PER_BLOCK"


# ---------------------------------------------------------------------------------------------------- Dynamo's JSON


def test_dynamo_dialects_write_one_json_event_per_line():
    batch = Batch([stored((2**64 - 1, 2)), removed(event_id=1, tier=StorageTier.DISK), cleared(event_id=2)])
    whole = encode(batch, "dynamo-router-event")
    bare = encode(batch, "dynamo-kv-cache-event")

    assert [event.to_json() for event in batch.events] == whole.decode().splitlines()
    assert [event.event.to_json() for event in batch.events] == bare.decode().splitlines()
    assert batch.events == decode(whole, "dynamo-router-event").events
    assert [RouterEvent(7, event.event) for event in batch.events] == decode(
        bare, "dynamo-kv-cache-event", worker_id=7
    ).events


def test_every_msgpack_dialect_decodes_its_own_output():
    for name in MSGPACK:
        if DIALECTS[name].hashes != "bytes":
            batch = Batch([stored((5, 6), 4, rank=2), removed(event_id=1, rank=2), cleared(event_id=2, rank=2)], 5.0)
            decoded = decode(encode(batch, name), name, dp_rank=2)
            assert (batch.events, []) == (decoded.events, decoded.problems), name
