"""Engines of vLLM 0.33.0 with a draft model: recorded programs, step by step, and the effects on names and hits.

The recording is a part of the programs that `play_speculative.py` plays: one for each geometry, cut after about 110
steps.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from players import player

from pytest_kvmock import BACKENDS, EngineProfile, Prompt, RouterHarness, block_hashes, create_manager
from pytest_kvmock.engines import CacheGroup, MockEngineArgs, Speculative
from pytest_kvmock.engines.vllm.hybrid import VllmHybridManager
from pytest_kvmock.fleets import MockEngine, TraceRequest, replay

PLAYER = player("engines/play_speculative.py")

FILE = "vllm_0.33.0_eagle.json.gz"
FULL = CacheGroup("full_attention", block_size=4)


def test_every_geometry_gives_the_recorded_answers_tables_queues_and_events(recording):
    programs = recording(FILE)
    assert len({program["geometry"] for program in programs}) == 40
    assert [found for program in programs if (found := PLAYER.vllm_difference(program)) is not None] == []


def test_the_recordings_cover_padding_stale_outputs_look_ahead_and_preemption(recording):
    steps = [step for program in recording(FILE) for step in program["steps"]]
    assert any(step["op"][0] == "admit" and len(step["op"]) == 4 and step["ok"] for step in steps)  # padded
    assert any(step["op"][0] == "out" and step["op"][4] for step in steps)  # stale
    assert any(step["op"][0] == "out" and len(step["op"][3] or ()) > 2 for step in steps)
    assert any(event[-1] == [] for step in steps for event in step["events"])  # names look ahead, and no block was kept
    assert any(step["op"][0] == "preempt" for step in steps)


@pytest.mark.parametrize("name", ["events", "free", "crc", "computed", "promised", "flying", "want"])
def test_the_player_finds_a_difference_in_any_field_of_a_step(recording, name):
    program = recording(FILE)[0]
    number = next(number for number, step in enumerate(program["steps"]) if name in step)
    program["steps"][number] = {**program["steps"][number], name: ["other"]}
    assert f"step {number}" in PLAYER.vllm_difference(program)
    assert name in PLAYER.vllm_difference(program)


class Sink:
    """Record the events of a manager in a short form."""

    def __init__(self):
        self.events = []

    def publish(self, event, storage_tier, token_ids=None, extra=None):
        self.events.append((event.data, token_ids, extra))

    def taken(self):
        events, self.events = self.events, []
        return [
            (
                list(data.block_hashes),
                data.parent_hash,
                [token for block in token_ids for token in block],
                (extra or {}).get("lookahead_token_ids"),
            )
            for data, token_ids, extra in events
        ]


def engine(sink=None, **fields):
    return VllmHybridManager(groups=[FULL], num_blocks=100, sink=sink, speculative=Speculative(**fields))


def admit(manager, request):
    hits = manager.get_computed_blocks(request)
    tokens = len(request) - hits.num_tokens
    assert manager.allocate_slots(request, tokens, hits, full_sequence_must_fit=True) is not None
    request.drafts.scheduled(request, tokens)
    return hits.num_tokens, tokens


def step(manager, request, sampled):
    """Make a decode step with all drafts; it accepts one draft fewer than there are tokens."""
    request.drafts.proposed = manager.speculative.tokens
    tokens = manager.chunk_tokens(request, request.drafts.wanted(request))
    assert manager.allocate_slots(request, tokens) is not None
    request.drafts.scheduled(request, tokens)
    manager.take_output(request, tokens, sampled)


def test_block_names_that_look_ahead_follow_the_worked_example():
    sink = Sink()
    manager = engine(sink, method="mtp", tokens=3)
    first = manager.new_request(range(16))
    assert admit(manager, first) == (0, 16)
    k = list(first.tokens.names)
    assert [(k, None, [*range(12)], [[4], [8], [12]])] == sink.taken()
    assert len(first.tables[0].blocks) == 5  # 16 tokens and 3 slots
    manager.take_output(first, 16, [900])
    k = list(first.tokens.names)
    assert [([k[3]], k[2], [12, 13, 14, 15], [[900]])] == sink.taken()
    step(manager, first, [901, 902, 903])
    assert (sink.taken(), first.num_computed_tokens, len(first.tables[0].blocks)) == ([], 19, 6)
    step(manager, first, [904])
    k = list(first.tokens.names)
    assert [([k[4]], k[3], [900, 901, 902, 903], [[904]])] == sink.taken()
    assert first.num_computed_tokens == 20
    again = manager.new_request(range(16))
    assert admit(manager, again) == (12, 4)
    manager.take_output(again, 4, [909])
    ((twin,), parent, tokens, ahead), *others = sink.taken()
    assert (k[2], [12, 13, 14, 15], [[909]], []) == (parent, tokens, ahead, others)
    assert twin != k[3]
    other = manager.new_request([*range(8), *range(50, 58)])
    assert admit(manager, other) == (4, 12)  # the name of the second block depends on token 8
    assert [(other.tokens.names[1:3], k[0])] == [event[:2] for event in sink.taken()]
    assert admit(manager, manager.new_request([*range(10), *range(60, 66)])) == (8, 8)


def test_hits_that_drop_a_block_follow_the_worked_example():
    sink = Sink()
    manager = engine(sink, method="mtp", tokens=3, plain_hashes=True)
    first = manager.new_request(range(16))
    assert admit(manager, first) == (0, 16)
    k = list(first.tokens.names)
    assert [(k, None, [*range(16)], None)] == sink.taken()
    assert admit(manager, manager.new_request(range(16))) == (8, 8)
    assert [(k[2:], k[1])] == [event[:2] for event in sink.taken()]
    assert admit(manager, manager.new_request([*range(8), *range(50, 58)])) == (4, 12)
    assert [k[0]] == [event[1] for event in sink.taken()]
    assert admit(manager, manager.new_request([*range(10), *range(60, 66)])) == (4, 12)


def test_a_window_group_next_to_larger_blocks_keeps_no_unneeded_first_block():
    groups = [CacheGroup("sliding_window", 8, window=8), CacheGroup("full_attention", 32)]
    drop = Speculative("eagle", tokens=1, plain_hashes=True)
    manager = VllmHybridManager(groups=groups, num_blocks=100, retention=None, speculative=drop)
    request = manager.new_request(range(128))
    assert list(manager._coordinator.policies[0].kept(request, 0, 16)) == [3, 4, 7, 8, 11, 12, 15]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(3, 5), st.integers(1, 3))
def test_local_hashes_cover_look_ahead_windows_also_when_tokens_are_appended(tokens, block_size, lookahead):
    manager = VllmHybridManager(
        groups=[CacheGroup("full_attention", block_size)],
        num_blocks=4,
        speculative=Speculative("mtp", tokens=lookahead, modules=lookahead),
    )
    whole = manager.new_request(tokens).tokens
    grown = manager.new_request(tokens[:1]).tokens
    for token in tokens[1:]:
        grown.append(token)
    assert (whole.names, whole.local_hashes) == (grown.names, grown.local_hashes)
    assert block_hashes(tokens, block_size, lookahead=lookahead) == whole.local_hashes
    assert max((len(tokens) - lookahead) // block_size, 0) == len(whole.names)


@pytest.mark.parametrize(
    ("fields", "lookahead", "drops", "slots"),
    [
        ({}, 1, False, 3),
        ({"method": "eagle3", "tokens": 5}, 1, False, 5),
        ({"tokens": 3, "modules": 2}, 3, False, 3),
        ({"tokens": 2, "modules": 9}, 2, False, 2),
        ({"tokens": 1, "modules": 4}, 1, False, 1),
        ({"plain_hashes": True}, 0, True, 3),
        ({"connector": True}, 0, True, 3),
        ({"connector": True, "no_drop": True}, 0, False, 3),
        ({"no_drop": True}, 0, False, 3),
        ({"method": "dflash", "tokens": 4}, 0, False, 5),
        ({"method": "draft_model"}, 0, False, 3),
        ({"method": "ngram"}, 0, False, 0),
    ],
)
def test_lookahead_and_drops_and_slots_follow_from_the_speculative_options(fields, lookahead, drops, slots):
    draft = Speculative(**fields)
    assert (lookahead, drops, slots) == (draft.lookahead, draft.drops, draft.slots)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "eagel"}, r"speculative: unknown method 'eagel'; did you mean 'eagle' or 'eagle3'\?"),
        ({"method": "medusa"}, "method 'medusa' is not mocked, as it was not recorded; those that are: eagle, eagle3"),
        ({"tokens": 0}, r"speculative: tokens must be .* at least 1"),
        ({"modules": 0}, r"speculative: modules must be .* at least 1"),
        ({"method": "eagle", "modules": 2}, "modules are those of method 'mtp'"),
        ({"plain_hashes": True, "no_drop": True}, "plain_hashes and no_drop were not recorded together"),
        ({"connector": 1}, "connector must be True or False, got 1"),
        ({"tokens": 1, "acceptance": (0.5, 0.5)}, "at most 1 rates from 0 to 1"),
        ({"acceptance": (1.5,)}, r"rates from 0 to 1, one a draft, .* got \(1.5,\)"),
        ({"acceptance": [4]}, r"integers from 0 to 3; got \[4\]"),
        ({"acceptance": "0.5"}, "got '0.5'"),
    ],
)
def test_invalid_speculative_options_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Speculative(**fields)


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("vllm", {"version": "0.28.0", "speculative": Speculative()}, "vLLM 0.33.0, .* got version '0.28.0'"),
        ("vllm_0_19", {"speculative": Speculative()}, "has no option 'speculative'"),
        ("vllm", {"speculative": "mtp"}, "speculative must be a Speculative, or None; got 'mtp'"),
        ("vllm", {"retention": 0}, "give groups, too"),
        ("vllm_llama4", {"speculative": Speculative()}, "no draft model with groups of kind 'chunked_local_attention'"),
        (
            "vllm",
            {
                "groups": [CacheGroup("mamba", 4, speculative_blocks=1), FULL],
                "speculative": Speculative(),
            },
            "speculative_blocks is the number of tokens of speculative, 3",
        ),
    ],
)
def test_managers_refuse_speculative_options_that_they_do_not_support(backend, options, message):
    with pytest.raises(ValueError, match=message):
        create_manager(backend, num_blocks=4, **options)


@pytest.mark.parametrize(
    ("drafts", "skipped", "freed", "cap"),
    [(1, 13, 3, 19), (2, 12, 3, 19), (3, 11, 2, 20), (4, 10, 2, 20), (6, 8, 2, 20), (7, 7, 1, 21)],
)
@pytest.mark.parametrize("mode", [{}, {"no_drop": True}, {"plain_hashes": True}], ids=str)
def test_windows_keep_the_tokens_that_several_draft_modules_may_recompute(drafts, skipped, freed, cap, mode):
    """20 tokens are computed, and one more is allocated: a window of 8 drops `skipped` tokens."""
    groups = [CacheGroup("sliding_window", 4, window=8), CacheGroup("full_attention", 8)]
    draft = Speculative(tokens=drafts, modules=drafts, **mode)
    sizes = {"num_blocks": 100, "max_num_batched_tokens": 64, "max_model_len": 1000}
    manager = VllmHybridManager(groups=groups, speculative=draft, **sizes)
    assert manager.geometry.groups[0].skipped(20, manager.geometry.computed_again) == skipped
    assert manager.admission_caps == [cap, None]
    request = manager.new_request(range(20))
    manager.allocate_slots(request, 20)
    request.tokens.append(20)
    manager.allocate_slots(request, 1)
    assert request.tables[0].blocks[:4].count(0) == freed


def test_names_that_look_several_tokens_ahead_need_full_attention():
    windows = [CacheGroup("sliding_window", 4, window=8)]
    two = Speculative(tokens=2, modules=2)
    with pytest.raises(ValueError, match=r"look 2 tokens ahead .* got groups of sliding_window 4 \(window 8\)"):
        VllmHybridManager(groups=windows, num_blocks=8, speculative=two)
    VllmHybridManager(groups=windows, num_blocks=8, speculative=Speculative())
    VllmHybridManager(groups=windows, num_blocks=8, speculative=replace(two, plain_hashes=True))


def test_a_prompt_of_hashes_is_refused_if_names_look_ahead():
    manager = create_manager("vllm", num_blocks=4, speculative=Speculative())
    with pytest.raises(ValueError, match="give tokens"):
        manager.new_request(Prompt(hashes=[1, 2]))
    assert manager.num_free_blocks == 4
    dropping = create_manager("vllm", num_blocks=4, speculative=Speculative(plain_hashes=True))
    assert len(dropping.new_request(Prompt(hashes=[1, 2]))) == 32


@pytest.mark.parametrize("given", [{}, {"no_drop": True}, {"plain_hashes": True}, {"modules": 2}], ids=str)
@pytest.mark.parametrize("backend", ["vllm", "vllm_gpt_oss"])
def test_with_a_host_hits_drop_a_block_unless_no_drop(backend, given):
    manager = create_manager(backend, num_blocks=4, speculative=Speculative(**given), tiers={"host": 4})
    assert (manager.geometry.lookahead, manager.geometry.drop) == (0, "no_drop" not in given)
    assert manager.hasher.lookahead == 0
    reading = create_manager(
        backend, num_blocks=4, speculative=Speculative("ngram", **given | {"modules": 1}), tiers={"host": 4}
    )
    assert (reading.geometry.lookahead, reading.geometry.drop) == (0, False)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_on_an_engine_that_hands_over_hits_drop_a_block_unless_no_drop(kind):
    args = MockEngineArgs(num_gpu_blocks=64, block_size=16, worker_type=kind, semantics="1.2.1")
    no_drop = BACKENDS["vllm_gpt_oss"].variant("no_drop", speculative=Speculative(no_drop=True))
    for backend, drops in (("vllm_mtp", True), (no_drop, False)):
        worker = MockEngine(args, backend=backend).worker
        assert (worker.traits.looks_ahead, worker.traits.drops_last) == (0, drops)
        worker.restart()
        assert (worker.traits.looks_ahead, worker.traits.drops_last) == (0, drops)
    alone = MockEngine(MockEngineArgs(num_gpu_blocks=64, block_size=16), backend="vllm_mtp").worker
    assert (alone.traits.looks_ahead, alone.traits.drops_last) == (1, False)


def test_a_prompt_that_is_handed_over_again_hits_only_two_of_its_four_blocks():
    def engine(kind, blocks=64):
        return MockEngine(
            MockEngineArgs(num_gpu_blocks=blocks, block_size=16, worker_type=kind, semantics="1.2.1"),
            backend="vllm_mtp",
        )

    prompts = [TraceRequest(0, 64, 2, (1, 2, 3, 4)), TraceRequest(60_000, 64, 2, (1, 2, 3, 4))]
    report = replay(prompts, [engine("decode")], [engine("prefill")], trace_block_size=16)
    assert sorted(row["reused_input_tokens"] for row in report.per_request()) == [0, 32]


def test_a_draft_model_worker_without_a_connector_is_refused_for_a_handoff():
    with RouterHarness(EngineProfile(block_size=16, num_blocks=64), "vllm_mtp") as kv:
        refused = r"worker_type='prefill' hands prompts over, .*<KvWorker 0 rank 0 vllm_mtp> was made without one: .*connector=True"  # noqa: E501
        with pytest.raises(ValueError, match=refused):
            kv.engine(0, worker_type="prefill")
        assert len(kv.worker(0).requests) == 0
    behind = BACKENDS["vllm_mtp"].variant("behind", speculative=Speculative(connector=True))
    with RouterHarness(EngineProfile(block_size=16, num_blocks=64), behind) as kv:
        assert kv.engine(0, worker_type="prefill").worker.traits.drops_last


def test_decode_steps_with_drafts_work_over_a_host():
    drafts = BACKENDS["vllm"].variant("drafts", speculative=Speculative())
    with RouterHarness(EngineProfile(block_size=16, num_blocks=64, tiers={"host": 64}), drafts) as kv:
        request = kv.worker(0).prefill(range(50))
        request.decode(4, accepted=(0, 2))
        assert len(request) == 54
        request.decode(3)
        request.finish()
        assert (kv.overlap(range(50)), kv.reusable(range(50))) == ({0: 3}, {0: 32})


def test_an_engine_with_one_full_attention_group_uses_the_given_step_limits():
    manager = create_manager("vllm", num_blocks=9, groups=[FULL], max_model_len=20, max_num_batched_tokens=8)
    assert (manager.max_num_batched_tokens, manager._most_tokens) == (8, 20)


def test_a_group_drops_a_block_again_after_another_group_shortened_the_hit():
    groups = [
        CacheGroup("sliding_window_mla", 2, window=20, eagle=True),
        CacheGroup("full_attention", 4, eagle=True),
        CacheGroup("sliding_window", 4, window=9),
    ]
    draft = Speculative("eagle", tokens=1, plain_hashes=True)
    manager = VllmHybridManager(groups=groups, num_blocks=60, retention=16, speculative=draft)
    first = manager.new_request(range(46))
    while (tokens := manager.chunk_tokens(first, 46 - first.num_computed_tokens)) > 0:
        assert manager.allocate_slots(first, tokens) is not None
    manager.free(first)
    # At 16, where the plain window resumes, the first window lacks the block that it would drop.
    assert manager.get_computed_blocks(manager.new_request([*range(30), 99])).num_tokens == 0
