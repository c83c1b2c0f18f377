"""Prompts with an adapter, a salt, multimodal items or a session: names, events, overlap and verdict by engine."""

import asyncio
import dataclasses

import pytest
from depth import examples
from hybrid_sizes import EACH, block_size_of, sized
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvmock import (
    BACKENDS,
    CapturingSink,
    EngineProfile,
    KvCacheEvent,
    KvWorker,
    Prompt,
    RouterEvent,
    RouterHarness,
    StorageTier,
    Stored,
    block_hashes,
    sequence_hashes,
)
from pytest_kvmock.engines.base.driver import PROMPT_KEYS
from pytest_kvmock.engines.vllm.hashes import VERSIONS
from pytest_kvmock.values import group_extra
from pytest_kvmock.values.prompt_keys import hash_options, is_attention_group
from pytest_kvmock.values.tokens import windows_of

BY_NAMESPACE = BACKENDS["sglang"].variant("sglang_dynamo", dynamo_kv_event_format=True)
ENGINES = [BACKENDS[name] for name in EACH if name not in ("hash_cache", "sglang")]
ENGINES.append(BY_NAMESPACE)
IMAGE = ("00000000deadbeef" + "0" * 48, 2, 4)
KEYS = (
    {},
    {"lora_name": "a"},
    {"lora_name": "b"},
    {"cache_salt": "a"},
    {"lora_name": "a", "cache_salt": "a"},
    {"multimodal": (IMAGE,)},
    {"lora_name": "b", "multimodal": (("cat", 0, 3), ("dog", 3, 9))},
)


def stored_by(kv):
    """Return the Stored events as they arrived; of several caches the attention group's whole blocks only."""
    stored = [entry.event for entry in kv.events if isinstance(entry.event.event.data, Stored)]
    whole = [event for event in stored if all(len(ids) == kv.profile.block_size for ids in event.token_ids)]
    return [event for event in whole if is_attention_group(event.extra)]


def beside(event):
    """Return an event's extras without the keys that name its cache."""
    of_cache = {*group_extra(1, "", 1), "window_size", "cache_levels", "priorities", "silently_gone"}
    of_cache |= {"layer_group_id", "hash_algo"}
    return {name: value for name, value in (event.extra or {}).items() if name not in of_cache}


def named_by(spec):
    """Return the keys by which an engine can name blocks."""
    if spec.name.startswith(("sglang", "trtllm")):
        return [keys for keys in KEYS if "multimodal" not in keys]
    if spec.name == "vllm_0_19":  # it cannot distinguish a salt from an adapter of that name
        return [keys for keys in KEYS if keys != {"cache_salt": "a"}]
    return list(KEYS)


engines = pytest.mark.parametrize("spec", ENGINES, ids=lambda spec: spec.name)


# ----------------------------------------------------------------------------------------------------- recordings


def test_vllm_names_the_blocks_of_a_prompt_as_recorded(recording):
    carried = {
        "plain": {},
        "salt": {"cache_salt": "salt1"},
        "lora": {"lora_name": "adapter-a"},
        "mm in block 0, over block 1": {"multimodal": [("img-1", 2, 4)]},
        "two mm": {"multimodal": [("img-1", 1, 2), ("img-2", 5, 3)]},
        "all": {"lora_name": "adapter-a", "cache_salt": "salt1", "multimodal": [("img-1", 2, 4)]},
    }
    checked = 0
    for run in recording("vllm_block_hashes_extra.json.gz"):
        for case in run["cases"]:
            options = {"hash_algorithm": case["algorithm"], "hash_seed": run["seed"]}
            spec = BACKENDS["vllm"].variant(
                "recorded", version=run["vllm"], lora_paths={"adapter-a": "/adapters/a"}, **options
            )
            with RouterHarness(EngineProfile(block_size=4), spec) as kv:
                stored = kv.worker(0).serve(Prompt(run["tokens"], **carried[case["case"]])).stored_blocks
            assert stored == tuple(int(digest[-16:], 16) for digest in case["hashes"]), case["case"]
            if not VERSIONS[run["vllm"]].tagged_keys and case["case"] != "plain":
                on_the_wire = [None if keys is None else list(keys) for keys in stored_by(kv)[0].extra["extra_keys"]]
                assert on_the_wire == [
                    keys and [tuple(k) if type(k) is list else k for k in keys] for keys in case["extra_keys"]
                ]
            checked += 1
    assert checked == 60


def test_sglang_names_the_pages_of_a_salt_and_of_an_adapter_as_recorded():
    """Scenarios `cache_salt` and `extra_key_plain_format`: in the plain format a namespace does not change the names,
    and an adapter does.
    """
    with RouterHarness(EngineProfile(block_size=4), "sglang") as kv:
        worker = kv.worker(0)
        plain = worker.serve(Prompt(range(8))).stored_blocks
        salted = worker.serve(Prompt(range(8), cache_salt="s1")).stored_blocks
        assert worker.cached_tokens(Prompt(range(8), lora_name="k1")) == 0
        adapter = worker.serve(Prompt(range(8), lora_name="k1")).stored_blocks
        beside = [event.extra for event in stored_by(kv)]
    assert plain == (-4977211910723114241, 90435953025800507)
    assert not {*plain} & {*adapter}
    assert salted == (-8021339544225929516, -2546974396340174739)
    assert beside == [None, {"cache_salt": "s1"}, {"lora_name": "k1"}]


def test_sglang_in_dynamos_format_names_the_blocks_of_each_adapter_differently():
    with RouterHarness(EngineProfile(block_size=4), BY_NAMESPACE) as kv:
        stored = [kv.worker(0).serve(Prompt(range(8), **keys)).stored_blocks for keys in named_by(BY_NAMESPACE)]
    assert 2 * len(stored) == len({block for blocks in stored for block in blocks})


@pytest.mark.parametrize("backend", ["lineage", "lru", "multi_lru", "mocker_sglang_1_6"])
def test_dynamos_engines_name_blocks_as_its_router_looks_them_up(backend, recording):
    (case,) = (case for case in recording("dynamo_block_hashes.json") if case["name"] == "lora+ns")
    with RouterHarness(EngineProfile(block_size=4), backend) as kv:
        prompt = Prompt(case["tokens"], lora_name=case["lora_name"], cache_salt=case["cache_namespace"])
        served = kv.worker(0).serve(prompt, 1)
    assert tuple(case["seq_hashes"]) == served.stored_blocks
    assert tuple(case["local_hashes"]) == stored_by(kv)[0].event.data.tokens_hashes


# ------------------------------------------------------------------------------------------------------- sharing


@engines
@settings(max_examples=examples(15), deadline=None)
@given(data=st.data())
def test_prompts_share_blocks_only_with_equal_keys_and_overlap_is_what_the_worker_reuses(spec, data):
    carried = st.sampled_from(named_by(spec))
    asked = st.tuples(st.sampled_from("ab"), st.integers(1, 5), carried, st.integers(0, 6))
    # Eviction from the middle of a prompt is tested elsewhere: here everything fits.
    num_blocks = 24 if spec.prefix_closed else 200
    with RouterHarness(sized(EngineProfile(block_size=4, num_blocks=num_blocks), spec), spec) as kv:
        worker, names, size = kv.worker(0), {}, kv.profile.block_size
        for letter, blocks, keys, output in data.draw(st.lists(asked, min_size=1, max_size=12)):
            tokens = [*range(3 * size), *[ord(letter)] * (size * blocks)]
            prompt = Prompt([*tokens, *[7] * spec.traits.looks_ahead], **keys)
            # One more token, which is computed in any case: so only whole blocks can be shared.
            longer = prompt.followed_by([7])
            promised, usable = kv.overlap(longer).get(0, 0) * size, worker.cached_tokens(longer)
            assert promised == usable or (spec.traits.promises_more and promised > usable)
            with worker.prefill(prompt) as request:
                for block in request.blocks[: len(tokens) // size]:
                    assert keys == names.setdefault(block, keys)
                request.decode(output)
            promised, usable = kv.overlap(longer).get(0, 0) * size, worker.cached_tokens(longer)
            if spec.traits.promises_more:
                assert len(tokens) >= promised >= usable
            else:
                assert len(tokens) == promised == usable


@engines
def test_a_session_id_is_in_no_block_name(spec):
    size = block_size_of(spec, 4)
    with RouterHarness(EngineProfile(block_size=size, num_blocks=512), spec) as kv:
        worker, longer = kv.worker(0), range(3 * size + 1 + spec.traits.looks_ahead)
        worker.serve(Prompt(longer[:-1], session_id="x"))
        assert {0: 3} == kv.overlap(Prompt(longer)) == kv.overlap(Prompt(longer, session_id="y"))
        reused = worker.cached_tokens(Prompt(longer))
        assert 3 * size == reused or (spec.traits.promises_more and reused == 2 * size)
        assert reused == worker.cached_tokens(Prompt(longer, session_id="y"))
        found = beside(stored_by(kv)[0])
        for what_the_engine_adds in ("lookahead_token_ids", "tokens_per_block"):
            found.pop(what_the_engine_adds, None)
        assert found == {"session_id": "x"}
        worker.serve(Prompt(range(50, 50 + 2 * size)))
        assert {"lookahead_token_ids", "tokens_per_block"} >= beside(stored_by(kv)[-1]).keys()


def test_a_prompt_after_another_inherits_its_keys(make_kv):
    kv = make_kv()
    first = kv.prompt(2, lora_name="a", session_id="x")
    second = kv.prompt(1, after=first, session_id="y")
    kv.worker(0).serve(first)
    assert (second.keys.lora_name, second.keys.session_id) == ("a", "y")
    assert kv.overlap(second) == {0: 2}
    assert kv.overlap(second.tokens) == {}


def test_sglangs_plain_names_distinguish_adapters_too():
    """0.5.23 names the pages of adapters by them in both formats (`KVCacheEventRecorder._namespace_seed`)."""
    with RouterHarness(EngineProfile(block_size=4), "sglang") as kv:
        worker = kv.worker(0)
        for name in ("a", "b"):
            worker.serve(Prompt(range(8), lora_name=name))
            assert kv.overlap(Prompt(range(8), lora_name=name)) == {0: 2}
        assert kv.overlap(Prompt(range(8))) == {}
        first, second = (event.event.data for event in stored_by(kv))
    assert not {*first.block_hashes} & {*second.block_hashes}
    assert first.tokens_hashes != second.tokens_hashes


def test_vllm_0_19_takes_a_salt_for_an_adapter_of_that_name_and_vllm_0_33_does_not():
    """0.19 does not tag its keys, so both are hashed as ("a",) in the first block; a known fault of the original."""
    for backend, cached in (("vllm_0_19", 4), ("vllm", 0)):
        with RouterHarness(EngineProfile(block_size=4), backend) as kv:
            kv.worker(0).serve(Prompt(range(13), lora_name="a"))
            assert cached == kv.worker(0).cached_tokens(Prompt(range(13), cache_salt="a"))


# -------------------------------------------------------------------------------------------------------- events


@engines
def test_every_stored_has_the_keys_of_its_request(spec):
    size = block_size_of(spec, 4)
    with RouterHarness(EngineProfile(block_size=size, num_blocks=2048), spec) as kv:
        length = 4 * size - (spec.traits.stores_when != "never")  # stored output fills the last block
        prompts = [Prompt(range(length), session_id="x", **keys) for keys in named_by(spec)]
        for prompt in prompts:
            seen = len(stored_by(kv))
            kv.worker(0).serve(prompt, 6)  # may complete a block of the prompt, with its items
            stored = stored_by(kv)[seen:]
            windows = [windows_of(event.token_ids, event.extra.get("lookahead_token_ids")) for event in stored]
            tokens = [token for rows, _ in windows for ids in rows for token in ids[:size]]
            local = [h for event in stored for h in event.event.data.tokens_hashes]
            assert local == [
                h
                for event, (rows, ahead) in zip(stored, windows, strict=True)
                for h in block_hashes(
                    [token for ids in rows for token in ids], size + ahead, **hash_options(event.extra)
                )
            ]
            assert tuple(range(length)) == tuple(tokens[:length])
            assert {event.extra["session_id"] for event in stored} == {"x"}
            for name in ("lora_name", "cache_salt"):
                assert {getattr(prompt.keys, name)} == {event.extra.get(name) for event in stored}


@pytest.mark.parametrize("backend", ["lineage", "vllm", "sglang", "mocker_sglang_1_6"])
def test_an_engine_in_virtual_time_names_and_publishes_keyed_blocks(backend):
    with RouterHarness(EngineProfile(block_size=4, num_blocks=32), backend) as kv:
        engine = kv.engine(0)
        for name in ("a", "b", "a"):
            engine.submit(Prompt(range(13), lora_name=name), 6)
        engine.run()
        assert {event.extra["lora_name"] for event in stored_by(kv)} == {"a", "b"}
        assert kv.overlap(Prompt(range(13), lora_name="b")) == {0: 3}
        assert kv.overlap(Prompt(range(13), lora_name="c")) == {}


def test_events_of_the_host_have_the_keys_too():
    spec = BACKENDS["lineage"].variant("with_host", tiers={"host": 16})
    with RouterHarness(EngineProfile(block_size=4, num_blocks=4), spec) as kv:
        worker = kv.worker(0)
        worker.serve(Prompt(range(16), lora_name="a"))
        worker.serve(Prompt(range(50, 66)))
        worker.tick(1e6)
        below = [e for e in stored_by(kv) if e.storage_tier is StorageTier.HOST_PINNED]
        assert below
        assert {event.extra["lora_name"] for event in below} == {"a"}
        assert worker.cached_tokens(Prompt(range(16), lora_name="a"), "host") == 16
        assert worker.cached_tokens(Prompt(range(16)), "host") == 0


class _Old:
    def __init__(self):
        self.got = []

    def publish(self, event, storage_tier=StorageTier.DEVICE, token_ids=None):
        self.got.append(event)


class _New(_Old):
    def publish(self, event, storage_tier=StorageTier.DEVICE, token_ids=None, extra=None):
        self.got.append(extra)


class _Any(_Old):
    def publish(self, *arguments, **fields):
        self.got.append(fields.get("extra"))


@pytest.mark.parametrize("before", [False, True])
def test_a_sink_receives_extra_if_its_signature_has_it(before):
    sinks = [_Old(), _New(), _Any(), CapturingSink()]
    with RouterHarness(EngineProfile(block_size=4), "lineage") as kv:
        for sink in sinks:
            kv.add_sink(sink, before=before)
        kv.worker(0).serve(Prompt(range(4), session_id="x"))
    old, new, any_, capturing = sinks
    assert [event.event for event in stored_by(kv)] == old.got
    assert [{"session_id": "x"}] == new.got == any_.got == [event.extra for event in capturing.router_events]


def test_a_worker_without_a_harness_publishes_the_keys_too():
    sink = CapturingSink()
    spec = BACKENDS["lru"]
    worker = KvWorker(lambda to: spec.make(num_blocks=8, block_size=4, dp_rank=0, sink=to), sink=sink)
    worker.serve(Prompt(range(4), session_id="x"))
    worker.restart()
    worker.serve(Prompt(range(4)))
    worker.serve(Prompt(range(4), lora_name="a"))
    assert [
        e.extra if e.extra is None or "lora_name" not in e.extra else e.extra["lora_name"] for e in sink.router_events
    ] == [{"session_id": "x"}, None, "a"]


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", PROMPT_KEYS[:3])
def test_an_engine_without_a_key_refuses_it_and_changes_nothing(name):
    prompt = Prompt(range(8), **{name: [IMAGE] if name == "multimodal" else "a"})
    refused = f"^backend 'hash_cache' names no blocks by {name}; it names them by tokens alone$"
    with RouterHarness(EngineProfile(block_size=4), "hash_cache") as kv:
        worker = kv.worker(0)
        for call in (worker.prefill, worker.serve, worker.cached_tokens, lambda prompt: kv.engine(0).submit(prompt, 1)):
            with pytest.raises(ValueError, match=refused):
                call(prompt)
        assert (worker.requests, kv.events.total) == ([], 0)
        worker.serve(Prompt(range(8), session_id="x"))


def test_sglang_refuses_multimodal_items_as_a_key():
    refused = "^backend 'sglang' names no blocks by multimodal; it names them by tokens and lora_name, cache_salt$"
    with RouterHarness(EngineProfile(block_size=4), "sglang") as kv, pytest.raises(ValueError, match=refused):
        kv.worker(0).serve(Prompt(range(8), multimodal=[IMAGE]))


def test_lora_paths_must_be_a_mapping():
    with pytest.raises(ValueError, match=r"^lora_paths must be a mapping of adapter names to paths, got 'a'"):
        BACKENDS["vllm"].variant("wrong", lora_paths="a")


# ------------------------------------------------------------------------------------------------------ judgement


def _stored(local, extra):
    blocks = tuple(sequence_hashes(local))
    return RouterEvent(
        0, KvCacheEvent(0, Stored(None, blocks, tuple(local))), token_ids=[range(4), range(4, 8)], extra=extra
    )


def test_local_hashes_are_checked_with_the_extras_of_the_event(make_kv):
    right = block_hashes(range(8), 4, lora_name="a", mm_hashes=[[0xDEADBEEF], None])
    extra = {"lora_name": "a", "extra_keys": [("a", (IMAGE[0], 1)), ("a",)]}
    kv = make_kv()
    kv.make_sink(chained=True)(_stored(right, extra))
    assert kv.events.problems == []
    kv.make_sink(chained=True)(_stored(right, {"lora_name": "b"}))
    (problem,) = kv.events.problems
    assert problem.rule == "wrong_hash"
    assert "its 4 tokens (with lora_name 'b') have local hash" in problem.expected


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_an_engine_that_omits_the_salt_in_its_names_is_found(backend):
    spec = BACKENDS[backend]

    def make(**options):
        manager = spec.make(**options)
        manager.hasher = _Forgetful(manager.hasher)
        return manager

    def chain(_):
        return spec.chain(spec.make(num_blocks=1, block_size=4))

    kv = RouterHarness(EngineProfile(block_size=4), dataclasses.replace(spec, make=make, chain=chain))
    kv.worker(0).serve(Prompt(range(8), cache_salt="s"))
    assert kv.events.problems[0].rule == "wrong_hash"


class _Forgetful:
    """A hasher that ignores the keys of a request."""

    def __init__(self, hasher):
        self._hasher = hasher

    def __getattr__(self, name):
        return getattr(self._hasher, name)

    def keyed(self, *_, **__):
        return self._hasher


# ------------------------------------------------------------------------------------------------ indexes by tokens


class ByTokens:
    """An index of one worker that hashes tokens and the extras next to them in its own way."""

    def __init__(self):
        self.held, self.named = {}, {}

    def _chain(self, tokens, extra):
        lora, salt = (extra or {}).get("lora_name"), (extra or {}).get("cache_salt")
        keys = (extra or {}).get("extra_keys") or [None] * (len(tokens) // 4)
        chain = (lora, salt)
        for place in range(len(tokens) // 4):
            items = tuple(key[0] for key in keys[place] or () if not isinstance(key, str))
            chain = (chain, tuple(tokens[4 * place : 4 * place + 4]), items)
            yield chain

    def apply(self, event):
        data = event.event.data
        if isinstance(data, Stored):
            keys = (event.extra or {}).get("extra_keys") or [None] * len(data.block_hashes)
            before = self.named.get(data.parent_hash)
            for block, tokens, key in zip(data.block_hashes, event.token_ids, keys, strict=True):
                start = ((event.extra or {}).get("lora_name"), (event.extra or {}).get("cache_salt"))
                items = tuple(one[0] for one in key or () if not isinstance(one, str))
                before = (before or start, tuple(tokens), items)
                self.named[block] = before
                self.held[before] = block
        else:
            for block in getattr(data, "block_hashes", ()):
                self.held.pop(self.named[block], None)

    def match_tokens(self, tokens, extra=None):
        found = 0
        for chain in self._chain(tokens, extra):
            if chain not in self.held:
                break
            found += 1
        return {0: found} if found else {}


class ByTokensAlone(ByTokens):
    def match_tokens(self, tokens):
        return super().match_tokens(tokens)


class AByTokens(ByTokens):
    async def match_tokens(self, tokens, *, extra=None):
        return super().match_tokens(tokens, extra)


def test_an_index_by_tokens_is_queried_with_the_keys_of_the_prompt():
    with RouterHarness(EngineProfile(block_size=4, num_blocks=12), "lineage", ByTokens()) as kv:
        for keys in KEYS:
            prompt = Prompt(range(13), **keys)
            assert kv.overlap(prompt) == {}
            kv.worker(0).serve(prompt, 8)
            assert kv.overlap(prompt) == {0: 3}
    assert kv.events.problems == []


def test_an_async_index_by_tokens_is_queried_with_the_keys_of_the_prompt():
    async def main():
        with RouterHarness(EngineProfile(block_size=4), "lineage", AByTokens()) as kv:
            kv.worker(0).serve(Prompt(range(8), lora_name="a"))
            await kv.aflush()
            assert await kv.aoverlap(Prompt(range(8), lora_name="a")) == {0: 2}
            assert await kv.aoverlap(Prompt(range(8), lora_name="b")) == {}

    asyncio.run(main())


class ByPlace(ByTokens):
    def match_tokens(self, tokens, extra, /):
        return super().match_tokens(tokens, extra)


class ByName(ByTokens):
    def match_tokens(self, tokens, *, extra):
        return super().match_tokens(tokens, extra)


class WithoutADefault(ByTokens):
    def match_tokens(self, tokens, extra):
        return super().match_tokens(tokens, extra)


class AnyName(ByTokens):
    def match_tokens(self, tokens, **more):
        assert [*more] == ["extra"]
        return super().match_tokens(tokens, more["extra"])


@pytest.mark.parametrize("kind", [ByPlace, ByName, WithoutADefault, AnyName])
def test_an_index_whose_signature_has_extra_always_receives_it(kind):
    with RouterHarness(EngineProfile(block_size=4, num_blocks=12), "lineage", kind()) as kv:
        for keys in KEYS:
            kv.worker(0).serve(Prompt(range(13), **keys), 8)
            assert kv.overlap(Prompt(range(13), **keys)) == {0: 3}


class Recalls(ByTokens):
    """Records the extras of its lookups."""

    def __init__(self):
        super().__init__()
        self.extras = []

    def match_tokens(self, tokens, extra):
        self.extras.append(extra)
        return super().match_tokens(tokens, extra)


@pytest.mark.parametrize("backend", ["sglang", "vllm", "lineage", "sglang_gpt_oss"])
def test_a_lookup_has_the_same_keys_as_the_events_of_the_engine(backend):
    index, published = Recalls(), []
    prompt = Prompt([*range(40)], lora_name="a", cache_salt="b", session_id="c")
    with RouterHarness(EngineProfile(block_size=4, num_blocks=100), backend, index, sync="end") as kv:
        kv.add_sink(published.append)
        kv.worker(0).serve(prompt)
        kv.overlap(prompt)
        asked = index.extras[-1]
        kv.overlap(list(range(8)))
    of_events = {name for event in published for name in event.extra or ()} - {"lora_id", *group_extra(1, "", 1)}
    assert of_events == {*asked}
    assert ("extra_keys" in asked) == (not backend.startswith("sglang"))
    assert None in index.extras


def test_with_two_engines_a_lookup_has_the_keys_of_both():
    index, prompt = Recalls(), Prompt([*range(8)], lora_name="a")
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=16), "sglang", index, sync="end")
    kv.overlap(prompt)
    kv.worker(1, backend="vllm")
    kv.overlap(prompt)
    assert [{*extra} for extra in index.extras] == [{"lora_name"}, {"lora_name", "extra_keys"}]


def test_an_index_that_reads_only_vllms_keys_drifts_over_sglang():
    class OfVllm(ByTokens):
        def match_tokens(self, tokens, extra):
            keys = (extra or {}).get("extra_keys")
            return super().match_tokens(tokens, None if keys is None else extra)

    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=16), "sglang", OfVllm(), sync="burst")
    kv.worker(0).serve([*range(8)])
    assert kv.overlap(Prompt([*range(8)], lora_name="a")) == {0: 2}
    assert [problem.rule for problem in kv.events.problems] == ["index_drift"]


def test_an_index_that_takes_only_tokens_cannot_be_queried_for_an_adapter():
    refused = (
        r"the index under test \(ByTokensAlone\) takes tokens alone, match_tokens\(tokens\), and this prompt has "
        r"lora_name: give it match_tokens\(tokens, extra\)"
    )
    with RouterHarness(EngineProfile(block_size=4), "lineage", ByTokensAlone(), allow=["index_failure"]) as kv:
        kv.worker(0).serve(Prompt(range(8), session_id="x"))
        assert kv.overlap(Prompt(range(8), session_id="y")) == {0: 2}
        with pytest.raises(ValueError, match=f"^{refused}"):
            kv.overlap(Prompt(range(8), lora_name="a"))
        assert kv.events.problems == []
        kv.worker(0).serve(Prompt(range(8), lora_name="a"))
        assert kv.events.problems[0].rule == "index_failure"
        assert "takes tokens alone" in kv.events.problems[0].observed
