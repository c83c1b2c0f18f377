"""Prompt keys: recorded hashes, refused values, and the extra data of events."""

import pytest
from hybrid_sizes import EACH, sized
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock import (
    EngineProfile,
    EventRulesBroken,
    KvCacheEvent,
    Prompt,
    RadixIndex,
    RouterEvent,
    RouterHarness,
    Stored,
    block_hashes,
)
from pytest_kvmock.engines.vllm.hashes import VERSIONS
from pytest_kvmock.values import group_extra
from pytest_kvmock.values.prompt_keys import (
    LoraIds,
    MultimodalItem,
    PromptKeys,
    group_kind,
    hash_options,
    is_attention_group,
    mm_hash,
    names_blocks,
    part_of,
)

DIGEST = "00000000deadbeef" + "0" * 48
OTHER = "00000000cafebabe" + "f" * 48


def test_local_hashes_equal_the_recorded_ones_of_dynamo(recording):
    checked = 0
    for case in recording("dynamo_block_hashes.json"):
        if case["is_eagle"]:
            continue
        size, infos = case["block_size"], case["mm_infos"] or []
        items = [
            (f"{each['mm_hash']:016x}{'0' * 48}", place * size, 1)
            for place, info in enumerate(infos)
            for each in (info or {}).get("mm_objects", ())
        ]
        keys = {"lora_name": case["lora_name"], "cache_salt": case["cache_namespace"], "multimodal": items}
        prompt = Prompt(case["tokens"], **keys)
        assert case["local_hashes"] == prompt.block_hashes(size), case["name"]
        assert case["seq_hashes"] == prompt.sequence_hashes(size), case["name"]
        checked += 1
    assert checked == 9


def test_a_prompt_has_its_keys_as_attributes():
    prompt = Prompt(range(8), lora_name="a", cache_salt="s", multimodal=[("cat", 1, 2)], session_id="x")
    found = prompt.lora_name, prompt.cache_salt, prompt.multimodal, prompt.session_id
    assert ("a", "s", (MultimodalItem("cat", 1, 2),), "x") == found
    bare = Prompt(range(8))
    assert (bare.lora_name, bare.cache_salt, bare.multimodal, bare.session_id) == (None, None, (), None)


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({"lora_name": "a"}, {"lora_name": "a"}),
        ({"cache_salt": "s"}, {"cache_namespace": "s"}),
        ({"multimodal": [(DIGEST, 2, 4)]}, {"mm_hashes": [[0xDEADBEEF], [0xDEADBEEF]]}),
        ({"multimodal": [(OTHER, 8, 1), (DIGEST, 9, 1)]}, {"mm_hashes": [(), (), [0xDEADBEEF, 0xCAFEBABE]]}),
        ({"multimodal": [("cat", 4, 4)]}, {"mm_hashes": [None, [mm_hash("cat")]]}),
        ({"session_id": "x"}, {}),
    ],
)
def test_prompt_keys_change_local_hashes_like_the_hash_options(keys, options):
    assert block_hashes(range(13), 4, **options) == Prompt(range(13), **keys).block_hashes(4)


def test_a_prompt_without_keys_is_unchanged():
    assert None is Prompt([1]).keys
    assert None is Prompt([1], lora_name=None, multimodal=[]).keys
    assert repr(Prompt([1])) == "<Prompt of 1 tokens>"
    assert (
        repr(Prompt([1, 2], lora_name="a", multimodal=[["m", 0, 2]]))
        == "<Prompt of 2 tokens, lora_name='a', multimodal=(('m', 0, 2),)>"
    )


def test_the_continuation_of_a_prompt_has_the_same_keys():
    prompt = Prompt([1, 2], lora_name="a", session_id="x")
    longer = prompt.followed_by([3], session_id="y")
    assert ((1, 2, 3), PromptKeys("a", session_id="y")) == (longer.tokens, longer.keys)
    assert prompt.with_keys(prompt.keys) is prompt
    assert None is prompt.with_keys(None).keys
    assert PromptKeys(session_id="z") == Prompt(hashes=[1]).with_keys(PromptKeys(session_id="z")).keys
    with pytest.raises(ValueError, match=r"^a prompt of hashes cannot be followed by tokens"):
        Prompt(hashes=[1]).followed_by([1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lora_name": ""}, "lora_name must be a string that is not empty, or None, got ''"),
        ({"cache_salt": 7}, "cache_salt must be a string that is not empty, or None, got 7"),
        ({"session_id": b"x"}, "session_id must be a string that is not empty, or None, got b'x'"),
        ({"multimodal": "cat"}, r"multimodal has items \(identifier, offset, length\): .*; got 'cat'"),
        ({"multimodal": 7}, "multimodal has items .*; got 7"),
        ({"multimodal": [("cat", 0)]}, r"multimodal has items .*; got \('cat', 0\)"),
        ({"multimodal": [("", 0, 1)]}, "multimodal has items"),
        ({"multimodal": [("cat", -1, 1)]}, "multimodal has items"),
        ({"multimodal": [("cat", 0, 0)]}, "multimodal has items"),
        ({"multimodal": [("cat", 0, True)]}, "multimodal has items"),
        ({"multimodal": [("cat", 2, 3)]}, "multimodal item 'cat' has tokens 2 to 4, and the prompt has 4 tokens"),
        (
            {"multimodal": [("dog", 2, 2), ("cat", 0, 3)]},
            ("multimodal items must not overlap; 'cat' has tokens 0 to 2, and 'dog' has tokens 2 to 3$"),
        ),
        (
            {"multimodal": [("cat", 1, 1), ("sound", 1, 1)]},
            "multimodal items must not overlap; 'cat' has token 1, and 'sound' has token 1$",
        ),
        (
            {"lora_name": "\ud800"},
            r"lora_name must be text that UTF-8 can write, got '\\ud800'$",
        ),
        (
            {"multimodal": [("\ud800", 0, 1)]},
            "the identifier of a multimodal item must be text that UTF-8 can write, got",
        ),
    ],
)
def test_invalid_prompt_keys_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Prompt(range(4), **arguments)


def test_the_path_of_an_adapter_must_be_a_string():
    with pytest.raises(ValueError, match=r"^lora_path must be a string, got 5$"):
        PromptKeys("a", lora_path=5)


def test_adjacent_multimodal_items_do_not_overlap():
    assert [
        tuple(item[0] for item in Prompt(range(8), multimodal=items).keys.multimodal[1:])
        for items in ([("a", 0, 8)], [("b", 4, 4), ("a", 0, 4)])
    ] == [(), ("b",)]


def test_a_prompt_of_hashes_accepts_only_the_session_as_a_key():
    assert Prompt(hashes=[1], session_id="x").keys.session_id == "x"
    with pytest.raises(
        ValueError, match=r"^a prompt of hashes= cannot take lora_name and cache_salt: the hashes include that already"
    ):
        Prompt(hashes=[1], lora_name="a", cache_salt="s")


# ---------------------------------------------------------------------------------------------- beside an event


def test_prompt_keys_are_carried_under_the_field_names_of_the_wire():
    keys = PromptKeys("a", "s", (("m", 2, 4),), "x")
    assert keys.carried(0, 3, 4, LoraIds()) == {
        "lora_id": 1,
        "lora_name": "a",
        "cache_salt": "s",
        "session_id": "x",
        "extra_keys": [("a", ("m", 2), "s"), ("a", ("m", -2)), ("a",)],
    }
    assert "lora_id" not in keys.carried(0, 3, 4)  # a request has only the name
    assert PromptKeys(session_id="x").carried(0, 3, 4) == {"session_id": "x"}
    assert PromptKeys(cache_salt="s").carried(1, 3, 4)["extra_keys"] == [None, None]


ENGINES = [name for name in EACH if name != "hash_cache" and not name.startswith("sglang")]
"""The backends with numbers for adapters; the others refuse adapters, or have only names."""


def ids_of(worker, events, *names):
    """Return the adapter numbers of a worker's Stored events, one prompt per adapter."""
    ids = []
    for name in names:
        worker.serve(Prompt(range(1, 4 * worker.manager.block_size + 2), lora_name=name))
        ids.append(events[-1].extra["lora_id"])
    return ids


@pytest.mark.parametrize("backend", ENGINES)
def test_each_engine_numbers_adapters_from_1_in_the_order_of_first_use(backend):
    with RouterHarness(sized(EngineProfile(block_size=4, num_blocks=64, workers=2), backend), backend) as kv:
        stored = []
        kv.add_sink(stored.append)
        first, second = kv.worker(0), kv.worker(1)
        assert ids_of(first, stored, "a", "b") == [1, 2]
        assert ids_of(second, stored, "b", "a", "c") == [1, 2, 3]
        first.serve(Prompt(range(1000, 1001 + 4 * first.manager.block_size), lora_name="a"))
        assert stored[-1].extra["lora_id"] == 1
        first.clear()
        assert ids_of(first, stored, "b", "a") == [2, 1]
        first.restart(announced=True)
        assert ids_of(first, stored, "b", "a") == [1, 2]


@pytest.mark.parametrize("backend", ENGINES)
def test_an_adapter_is_numbered_even_if_its_request_stores_nothing(backend):
    with RouterHarness(sized(EngineProfile(block_size=4, num_blocks=64), backend), backend) as kv:
        stored = []
        kv.add_sink(stored.append)
        kv.worker(0).serve(Prompt((1, 2), lora_name="short"))
        assert ids_of(kv.worker(0), stored, "a") == [2]
        kv.worker(0).cached_tokens(Prompt((1, 2, 3, 4, 5), lora_name="only looked up"))
        assert ids_of(kv.worker(0), stored, "b") == [3]


class ById:
    """An index that identifies adapters by number."""

    def __init__(self):
        self.tree = RadixIndex()

    def apply(self, event):
        data = event.event.data
        if isinstance(data, Stored):
            local = self.local([token for block in event.token_ids for token in block], event.extra)
            data = Stored(data.parent_hash, data.block_hashes, local)
        self.tree.apply(RouterEvent(event.worker_id, KvCacheEvent(event.event.event_id, data)))

    def local(self, tokens, extra):
        return tuple(block_hashes(tokens, 4, lora_name=str((extra or {}).get("lora_id"))))

    def match_tokens(self, tokens, extra=None):
        return self.tree.find_matches(self.local(tokens, extra))


def test_an_index_that_identifies_adapters_by_number_drifts():
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=64, workers=2), "vllm", ById())
    kv.worker(0).serve(Prompt(range(1, 10), lora_name="a"))
    kv.worker(1).serve(Prompt(range(1, 10), lora_name="b"))
    with pytest.raises(EventRulesBroken, match="index_drift"):
        kv.events.assert_no_event_errors()


def test_the_extra_keys_of_a_block_equal_those_hashed_by_vllm(recording):
    """Compare with 0.19.1, whose keys are untagged, as on the wire."""
    keys = {
        "salt": PromptKeys(cache_salt="salt1"),
        "lora": PromptKeys("adapter-a"),
        "mm in block 0, over block 1": PromptKeys(multimodal=(("img-1", 2, 4),)),
        "two mm": PromptKeys(multimodal=(("img-2", 5, 3), ("img-1", 1, 2))),
        "all": PromptKeys("adapter-a", "salt1", (("img-1", 2, 4),)),
    }
    (run,) = (run for run in recording("vllm_block_hashes_extra.json.gz") if not VERSIONS[run["vllm"]].tagged_keys)
    for case in run["cases"]:
        if case["case"] in keys:
            recorded = [
                None if of_block is None else tuple(tuple(k) if isinstance(k, list) else k for k in of_block)
                for of_block in case["extra_keys"]
            ]
            assert recorded == keys[case["case"]].carried(0, 3, 4)["extra_keys"]


def test_extra_keys_do_not_affect_equality_or_json():
    event = KvCacheEvent(0, Stored(None, (1,), (1,)))
    plain, other = RouterEvent(0, event), RouterEvent(0, event, extra={"lora_name": "a"})
    assert plain == other
    assert hash(plain) == hash(other)
    assert plain.to_json() == other.to_json()
    assert repr(plain).endswith("token_ids=None)")
    assert repr(other).endswith("extra={'lora_name': 'a'})")


def one_behind_the_other(drawn):
    """Return items that follow each other; each is given as (identifier, tokens before it, length)."""
    found, end = [], 0
    for identifier, gap, length in drawn:
        found.append((identifier, end + gap, length))
        end += gap + length
    return tuple(found)


items = st.lists(
    st.tuples(st.sampled_from([DIGEST, OTHER, "cat"]), st.integers(0, 4), st.integers(1, 4)), max_size=3
).map(one_behind_the_other)
any_keys = st.builds(
    PromptKeys,
    st.sampled_from([None, "a", "b"]),
    st.sampled_from([None, "a", "s"]),
    items,
    st.sampled_from([None, "x"]),
)


@given(keys=any_keys, start=st.integers(0, 3), count=st.integers(1, 3))
def test_local_hashes_follow_from_the_tokens_and_extra_data_of_an_event(keys, start, count):
    prompt = Prompt(range(24)).with_keys(keys)
    extra = keys.carried(start, start + count, 4)
    tokens = range(4 * start, 4 * (start + count))
    assert prompt.block_hashes(4)[start : start + count] == block_hashes(tokens, 4, **hash_options(extra))
    assert bool(keys.naming) == names_blocks(extra)


@given(keys=any_keys, start=st.integers(0, 2), end=st.integers(0, 3))
def test_part_of_selects_the_extra_keys_of_the_given_blocks(keys, start, end):
    assert keys.carried(start, start + end, 4) == part_of(keys.carried(0, 6, 4), range(start, start + end))


@given(first=any_keys, second=any_keys)
def test_prompts_share_local_hashes_only_where_their_keys_are_equal(first, second):
    """Ignore the position and order of items within a block: Dynamo's hashes do not include them."""

    def of(keys):
        return [(keys.lora_name, keys.cache_salt, sorted(of)) for of in keys.mm_hashes(0, 6, 4) or [[]] * 6]

    hashes = zip(*(Prompt(range(24)).with_keys(keys).block_hashes(4) for keys in (first, second)), strict=True)
    assert [a == b for a, b in zip(of(first), of(second), strict=True)] == [a == b for a, b in hashes]


def test_multimodal_items_are_sorted_by_offset():
    keys = PromptKeys(multimodal=[("b", 4, 1), ["a", 0, 2]])
    assert (MultimodalItem("a", 0, 2), MultimodalItem("b", 4, 1)) == keys.multimodal
    assert repr(keys) == "PromptKeys(multimodal=(('a', 0, 2), ('b', 4, 1)))"


def test_events_of_cache_groups_carry_their_group_and_window_fields():
    assert None is group_extra(0)
    assert group_extra(1) == {"group_idx": 1}
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8}
    assert window == group_extra(0, "sliding_window", 8)
    assert group_extra(2, extra={"lora_name": "a"}) == {"lora_name": "a", "group_idx": 2}


@pytest.mark.parametrize(
    ("extra", "kind", "is_attention"),
    [
        (None, "full_attention", True),
        ({"group_idx": 1}, "full_attention", True),
        ({"kv_cache_spec_kind": "mla_attention"}, "mla_attention", True),
        ({"kv_cache_spec_kind": None}, None, True),
        ({"kv_cache_spec_kind": 7}, None, True),
        ({"kv_cache_spec_kind": "mamba"}, "mamba", False),
        ({"kv_cache_spec_kind": "chunked_local_attention"}, "chunked_local_attention", False),
    ],
)
def test_the_attention_group_is_identified_by_its_kind(extra, kind, is_attention):
    assert (kind, is_attention) == (group_kind(extra), is_attention_group(extra))
