"""P/D pairs driven directly: blocks that are kept, loading, named and freed."""

import pytest
from pair_makers import WAYS, pair_of, stored, worker_of

from pytest_kvmock.engines import OutOfBlocks, RequestError
from pytest_kvmock.engines.base.pair_options import PairOptions, PairRole
from pytest_kvmock.engines.vllm.pairs.legs import EngineDied

TEN = list(range(10))


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_is_handed_over_from_the_prefill_to_the_decode_engine(way):
    p, d, of_p, of_d = pair_of(way)
    served = p.serve(TEN, hand_over=True)
    assert [(each.phase, each.num_blocks) for each in p.leased] == [("kept", 3)]
    request = d.load(TEN, served.hand_over)
    assert request.status == "loading"
    assert [(each.phase, each.num_blocks) for each in d.leased] == [("loading", 3)]
    assert of_d.events == []
    request.end_transfer()
    assert (request.status, request.cached_tokens) == ("running", 10)
    assert p.leased == d.leased == ()
    assert stored(of_d) == stored(of_p)
    request.decode(3)
    request.finish()
    assert (p.manager.num_active_blocks, d.manager.num_active_blocks) == (0, 0)


def test_received_blocks_are_published_when_the_request_is_taken_up():
    p, d, _, of_d = pair_of()
    request = d.load(TEN, p.serve(TEN, hand_over=True).hand_over)
    request.end_transfer(take_up=False)
    assert (request.status, of_d.events) == ("received", [])
    assert p.leased == ()
    request.take_up()
    assert request.status == "running"
    assert len(stored(of_d)) == 1
    assert d.traits.names_received == "taken up"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("phase", ["loading", "received", "running"])
def test_a_request_that_ends_before_it_runs_publishes_nothing(way, phase):
    p, d, _, of_d = pair_of(way)
    request = d.load(TEN, p.serve(TEN, hand_over=True).hand_over)
    if phase != "loading":
        request.end_transfer(take_up=phase == "running")
    request.finish()
    assert bool(of_d.events) == (phase == "running")
    held = 3 if phase == "loading" else 0  # blocks that are being read into stay allocated
    assert d.manager.num_active_blocks == held
    if phase == "loading":
        request.end_transfer()
    assert (d.manager.num_active_blocks, p.manager.num_active_blocks) == (0, 0)
    assert bool(of_d.events) == (phase == "running")


@pytest.mark.parametrize("way", WAYS)
def test_a_failed_transfer_fails_the_request_and_keeps_the_lease(way):
    p, d, _, of_d = pair_of(way)
    request = d.load(TEN, p.serve(TEN, hand_over=True).hand_over)
    request.fail_transfer()
    assert (request.status, d.leased, of_d.events) == ("failed", (), [])
    assert len(p.leased) == 1
    p.tick(p.leased[0].until_ms + 10)
    assert p.leased == ()


def test_the_recompute_policy_computes_the_prompt_after_a_failed_transfer():
    p, d, _, of_d = pair_of(kv_load_failure_policy="recompute")
    request = d.load(TEN, p.serve(TEN, hand_over=True).hand_over)
    request.fail_transfer()
    assert (request.status, request.cached_tokens) == ("running", 0)
    assert len(stored(of_d)) == 1


def test_heartbeats_renew_a_lease_that_expires_otherwise():
    p, d, _, _ = pair_of()
    served = p.serve(TEN, hand_over=True)
    d.load(TEN, served.hand_over)
    for seconds in (20, 40, 60):
        d.tick(seconds * 1000)
        p.tick(seconds * 1000)
    assert len(p.leased) == 1
    p.tick(81_000)
    assert p.leased == ()


def test_a_read_after_the_end_of_the_lease_succeeds_and_is_marked_as_stale():
    p, d, _, of_d = pair_of()
    hand_over = p.serve(TEN, hand_over=True).hand_over
    p.tick(31_000)
    request = d.load(TEN, hand_over)
    request.end_transfer()
    assert (request.status, request.is_stale) == ("running", True)
    assert len(stored(of_d)) == 1


def test_without_transfer_parameters_the_decode_engine_computes_the_whole_prompt():
    p, d, _, of_d = pair_of()
    p.serve(TEN, hand_over=True)
    request = d.load(TEN, None)
    assert (request.status, len(stored(of_d))) == ("running", 1)
    assert len(p.leased) == 1


def test_a_request_waits_forever_if_its_parameters_lack_a_field():
    p, d, _, _ = pair_of()
    hand_over = p.serve(TEN, hand_over=True).hand_over
    request = d.load(TEN, hand_over.without("remote_port"))
    assert request.status == "loading"
    with pytest.raises(RequestError, match="its parameters lack a field, so that it waits for ever"):
        request.end_transfer()
    request.finish()
    assert d.manager.num_active_blocks == 3


def test_parameters_that_crash_the_original_engine_crash_ours():
    p, d, _, _ = pair_of()
    hand_over = p.serve(TEN, hand_over=True).hand_over
    with pytest.raises(EngineDied, match=r"AssertionError in pull_scheduler\.py: update_state_after_alloc"):
        d.load(TEN, hand_over.changed(remote_block_ids=None))
    with pytest.raises(EngineDied, match="has do_remote_prefill and no remote_block_ids"):
        d.load(TEN, hand_over)  # it stays dead
    d.restart()
    with pytest.raises(EngineDied, match="more blocks to fill than remote_block_ids names"):
        d.load(list(range(20)), hand_over)


@pytest.mark.parametrize("ids", [[1, 2, 3], [None], 7])
def test_block_ids_that_are_no_list_for_each_group_crash_the_decode_engine(ids):
    p, d, _, _ = pair_of()
    hand_over = p.serve(TEN, hand_over=True).hand_over
    with pytest.raises(EngineDied) as caught:
        d.load(TEN, hand_over.changed(remote_block_ids=ids))
    died = caught.value
    assert (died.error, died.where) == ("TypeError", ("base_worker.py", "_apply_prefix_caching"))
    assert died.why.endswith(f": expected a list of block ids for each group in remote_block_ids, got {ids!r}")
    with pytest.raises(EngineDied, match="expected a list of block ids for each group"):
        d.load(TEN, hand_over)  # it stays dead


def test_with_mooncake_both_legs_can_be_sent_at_the_same_time():
    p, d, _, of_d = pair_of("vllm-mooncake")
    hand_over = p.pair.new_hand_over()
    request = d.load(TEN, hand_over)
    with pytest.raises(RequestError, match="the prefill engine has offered nothing yet"):
        request.end_transfer()
    p.serve(TEN, hand_over=hand_over)
    request.end_transfer()
    assert (request.status, len(stored(of_d)), p.leased) == ("running", 1, ())


def test_with_mooncake_a_prefill_that_never_comes_fails_after_the_timeout():
    p, d, _, _ = pair_of("vllm-mooncake", abort_request_timeout=60)
    request = d.load(TEN, p.pair.new_hand_over())
    d.tick(59_000)
    assert request.status == "loading"
    d.tick(60_000)
    assert request.status == "failed"
    assert d.manager.num_active_blocks == 0


def test_a_second_turn_reads_back_the_blocks_that_the_decode_engine_kept():
    options = {"kv_recompute_threshold": 4, "decoder_kv_blocks_ttl": 60}
    p, _ = worker_of("both", 0, **options)
    d, _ = worker_of("both", 1, **options)
    request = d.load(TEN, p.serve(TEN, hand_over=True).hand_over)
    request.end_transfer()
    request.decode([20, 21, 22, 23, 24, 25])
    request.finish()
    assert [each.phase for each in d.leased] == ["kept"]
    back = d.pair.answers[request.name]
    assert (back["do_remote_decode"], back["remote_num_tokens"]) == (True, 16)

    turn = p.load([*TEN, 20, 21, 22, 23, 24, 25, 30, 31], back)
    assert (turn.status, turn.cached_tokens) == ("loading", 8)
    turn.end_transfer()
    assert (turn.status, turn.cached_tokens, d.leased) == ("running", 16, ())
    turn.finish()
    assert p.pair.answers[turn.name]["remote_num_tokens"] == 18
    with pytest.raises(ValueError, match=r"a second turn is load\(prompt, hand_over\)"):
        p.serve(TEN, hand_over=back)


def test_a_handed_over_prompt_that_does_not_fit_changes_nothing():
    p, d, _, of_d = pair_of(d={"num_blocks": 2})
    hand_over = p.serve(TEN, hand_over=True).hand_over
    with pytest.raises(OutOfBlocks):
        d.load(TEN, hand_over)
    assert (d.leased, d.manager.num_active_blocks, of_d.events) == ((), 0, [])


def test_block_sizes_can_differ_by_role():
    p, d, of_p, of_d = pair_of(d={"block_size": 8})
    request = d.load(TEN, p.serve(TEN, hand_over=True).hand_over)
    request.end_transfer()
    assert [len(each) for each in stored(of_p)] == [2]
    assert [len(each) for each in stored(of_d)] == [1]


def test_a_leg_for_an_engine_of_the_other_role_is_refused():
    p, d, _, _ = pair_of()
    hand_over = p.serve(TEN, hand_over=True).hand_over
    with pytest.raises(ValueError, match="a decode leg is for worker_type 'decode' or 'both'"):
        p.load(TEN, hand_over)
    with pytest.raises(ValueError, match="hand_over is for worker_type 'prefill' or 'both'"):
        d.serve(TEN, hand_over=True)


@pytest.mark.parametrize("field", ["transfer_id", "bootstrap_room"])
def test_transfer_parameters_of_another_engine_type_are_refused(field):
    _, d, _, _ = pair_of()
    with pytest.raises(ValueError, match=f"another kind of engine \\({field}\\) at an engine of hand_over='vllm'"):
        d.load(TEN, {"do_remote_prefill": True, field: "x"})


def test_invalid_roles_and_options_of_a_pair_are_refused():
    with pytest.raises(ValueError, match="worker_type of a pair must be 'prefill', 'decode', 'both', got 'aggregated'"):
        PairRole("aggregated")
    with pytest.raises(ValueError, match="hand_over of a pair must be 'vllm' or 'vllm-mooncake', got 'nixl'"):
        PairRole("prefill", "nixl")
    with pytest.raises(ValueError, match="kv_lease_duration must be"):
        PairOptions(kv_lease_duration=-1)


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ("sglang", "is for vLLM's backends, got 'sglang'"),
        ("vllm_0_19", "pairs are those of vLLM 0.33.0; got backend 'vllm_0_19' of version 0.19.1"),
        ("trtllm", "TensorRT-LLM's pairs were not recorded"),
        ("vllm_qwen3_next", "over groups of kind 'mamba' was not recorded"),
    ],
)
def test_a_pair_over_a_backend_without_recordings_is_refused(backend, why):
    with pytest.raises(ValueError, match=why):
        worker_of("prefill", 0, backend=backend, num_blocks=64, block_size=32)


def test_a_load_publishes_the_cleared_of_a_reset_and_is_refused_by_a_paused_engine():
    p, d, _, of_d = pair_of()
    d.serve(TEN)
    assert d.reset()
    named = len(of_d.events)
    request = d.load(TEN, p.serve(TEN, hand_over=True).hand_over)
    assert [type(each.data).__name__ for each in of_d.events[named:]] == ["Cleared"]
    request.finish()
    d.pause()
    with pytest.raises(RequestError, match="is paused"):
        d.load(TEN, p.serve(TEN, hand_over=True).hand_over)


@pytest.mark.parametrize("length", [8, 9, 10, 12])
def test_a_load_into_an_engine_with_a_draft_model_allocates_no_draft_slots(length):
    p, d, of_p, of_d = pair_of(backend="vllm_mtp")
    prompt = list(range(length))
    request = d.load(prompt, p.serve(prompt, hand_over=True).hand_over)
    assert [(each.phase, each.num_blocks) for each in d.leased] == [("loading", -(-length // 4))]
    request.end_transfer()
    request.decode(3)
    request.finish()
    assert stored(of_d)[0] == stored(of_p)[0]
