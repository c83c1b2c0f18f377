"""SGLang 0.5.23 with speculative decoding: recorded programs, step by step, and the effects of its server
arguments.
"""

from random import Random

import pytest
from players import player

from pytest_kvmock import CapturingSink, Prompt, block_hashes, create_manager
from pytest_kvmock.engines import SglangSpeculative
from pytest_kvmock.engines.sglang.geometry import Geometry
from pytest_kvmock.engines.sglang.hybrid_cache import HybridCacheManager
from pytest_kvmock.engines.sglang.radix_cache import RadixCacheManager
from pytest_kvmock.engines.sglang.speculative import ALGORITHMS

PLAYER = player("engines/play_speculative.py")

FILE = "sglang_0.5.23_eagle.json.gz"
KINDS = ["full", "plain", "swa", "tight"]


@pytest.mark.parametrize("kind", KINDS)
def test_programs_give_the_recorded_answers_lengths_events_sizes_and_trees(recording, kind):
    programs = [program for program in recording(FILE) if program["kind"] == kind]
    assert len(programs) >= 2
    for program in programs:
        assert list(PLAYER.SglangPlayer.differences(program)) == [], program["seed"]


@pytest.mark.parametrize("name", ["events", "sizes", "tree", "lengths"])
def test_the_player_finds_a_difference_in_any_field_of_a_step(recording, name):
    program = recording(FILE)[0]
    number = next(number for number, step in enumerate(program["steps"]) if step.get(name))
    program["steps"][number] = {**program["steps"][number], name: ["other"]}
    found = dict(PLAYER.SglangPlayer.differences(program))
    assert [name] == [field for field, *_ in found[number]]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_keys_are_pairs_for_drafts_that_read_the_next_token_except_with_states(algorithm):
    pairs = algorithm in ("EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP")
    draft = SglangSpeculative(algorithm)
    assert pairs == create_manager("sglang", num_blocks=8, speculative=draft).hasher.is_eagle
    assert pairs == create_manager("sglang_gpt_oss", num_blocks=32, speculative=draft).hasher.is_eagle
    assert not create_manager("sglang_qwen3_next", num_blocks=64, block_size=64, speculative=draft).hasher.is_eagle


@pytest.mark.parametrize(
    ("fields", "page", "ahead"),
    [
        ({"steps": 3, "topk": 1, "draft_tokens": 4}, 64, 8),
        ({"steps": 5, "topk": 4, "draft_tokens": 8}, 1, 40),
        ({"steps": 5, "topk": 4, "draft_tokens": 8}, 16, 256),
        ({"steps": 5, "topk": 8, "draft_tokens": 8}, 64, 2048),
        ({"algorithm": "NGRAM", "steps": 2, "topk": 2, "draft_tokens": 3}, 16, 8),
    ],
)
def test_a_request_reserves_slots_for_the_drafts_of_two_steps(fields, page, ahead):
    assert ahead == SglangSpeculative(**fields).ahead(page)


def test_pages_of_pairs_have_the_hashes_of_the_worked_example():
    sink = CapturingSink()
    manager = RadixCacheManager(num_blocks=8, block_size=4, sink=sink, speculative=SglangSpeculative())
    manager.insert(range(10, 19))
    stored = sink.events[-1]
    assert stored.data.block_hashes == (324192900769577877, 7472740086027314498)
    assert stored.data.tokens_hashes[0] == 14007131388421011022
    assert block_hashes(range(10, 15), 5) == [14007131388421011022]


def test_tokens_accepted_after_a_stop_are_not_cached():
    manager = HybridCacheManager(geometry=Geometry(), num_blocks=32, block_size=2, speculative=SglangSpeculative())
    request = manager.request(Prompt(range(6)), Random(0))
    manager.find(request)
    manager.admit(request)
    manager.prefill([(request, 6)])
    manager.checkpoint(request)
    assert len(manager.resident()) == 2  # 5 pairs
    assert manager.begin_verify([request])
    manager.end_verify(request, [100, 101, 102, 103])
    manager.finish(request, 2)
    assert len(manager.resident()) == 3  # 8 tokens, 7 pairs


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"algorithm": "EAGEL"}, r"speculative: unknown algorithm 'EAGEL'; did you mean 'EAGLE'"),
        ({"steps": 0}, "speculative: steps must be .* at least 1"),
        ({"topk": 0}, "speculative: topk must be .* at least 1"),
        ({"draft_tokens": 1}, "speculative: draft_tokens must be .* at least 2"),
        ({"steps": 1, "acceptance": (0.5, 0.5)}, "at most 1 rates from 0 to 1"),
    ],
)
def test_invalid_options_of_speculative_decoding_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SglangSpeculative(**fields)


def test_the_radix_cache_refuses_invalid_use_with_speculative_decoding():
    with pytest.raises(ValueError, match="speculative must be an SglangSpeculative, or None; got 'EAGLE'"):
        create_manager("sglang", num_blocks=8, speculative="EAGLE")
    with pytest.raises(ValueError, match="policy must be lru, lfu or slru"):
        create_manager("sglang", num_blocks=8, speculative=SglangSpeculative(), policy="fifo")
    manager = create_manager("sglang", num_blocks=8, speculative=SglangSpeculative())
    with pytest.raises(ValueError, match="a prompt of hashes has no tokens"):
        manager.request(Prompt(hashes=[1]), Random(0))
