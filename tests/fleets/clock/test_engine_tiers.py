"""Engines with a host below the device: recorded replays of Dynamo's mocker 1.2.1, worked examples, and properties."""

import pickle
from collections import defaultdict

import pytest
from depth import few
from hypothesis import example, given
from hypothesis import strategies as st
from recorded_replays import check_summary, recorded, request_of

from pytest_kvmock import CapturingSink, MockEngine, Removed, StorageTier, Stored, create_manager, replay
from pytest_kvmock.engines import KvWorker, MockEngineArgs, OutOfBlocks, backend_spec
from pytest_kvmock.fleets import EngineStalled, TraceRequest
from pytest_kvmock.fleets.clock import engine_inside
from pytest_kvmock.fleets.fleet_events import Heard, TrueCaches

CASES = recorded("replay_offload.json.gz")
NAMES = {StorageTier.DEVICE: [], StorageTier.HOST_PINNED: ["HostPinned"]}
BACKENDS = ("lineage", "lru", "multi_lru")
MS = 1_000_000  # bytes that a link of 1 GB/s transfers in 1 ms
HOST = {"kv_bytes_per_token": MS // 4, "bandwidth_g1_to_g2_gbps": 1.0, "bandwidth_g2_to_g1_gbps": 1.0}
SLOW = {"performance_model": (10.0, 1.0)}


class StampingSink(CapturingSink):
    """A sink that keeps each event with the time of the pass that published it."""

    def __init__(self):
        super().__init__()
        self.engine = None
        self.stamps = []

    def publish(self, *event):
        super().publish(*event)
        self.stamps.append(int(self.engine.now_ms * 1000))


def engine_of(*, backend="lineage", sink=None, blocks=8, host=64, batch=8, **fields):
    args = {"block_size": 4, "num_gpu_blocks": blocks, "num_g2_blocks": host, "offload_batch_size": batch, **HOST}
    return MockEngine(MockEngineArgs(**{**args, **SLOW, **fields}), backend=backend, sink=sink)


def tokens_of(*blocks):
    return [block for block in blocks for _ in range(4)]


def evicted_prompt(engine, *, blocks=6):
    """Serve two prompts and return the first, of which the host then holds the part that the device lacks."""
    first = tokens_of(*range(blocks))
    for prompt in (first, tokens_of(*range(100, 100 + blocks))):
        engine.submit(prompt, 1)
        engine.run(engine.now_ms + 1000)
    return first


def park(engine, prompt):
    """Submit a request and run passes until it is parked for its host blocks."""
    request = engine.submit(prompt, 1)
    for _ in range(10):
        engine.step()
        if engine.inside.scheduler.parked:
            break
    assert [request] == list(engine.inside.scheduler.parked)
    return request


# ------------------------------------------------------------------------------------------------------- recordings


def recorded_form(sink):
    """Return the events in the recorded form: hashes are numbered in the order of first occurrence."""
    names, locals_ = {None: None}, {}
    rows = []
    for moment, event in zip(sink.stamps, sink.router_events, strict=True):
        data, number = event.event.data, event.event.event_id

        def name(block):
            return names.setdefault(block, len(names) - 1)

        if isinstance(data, Stored):
            parent = name(data.parent_hash)
            blocks = [
                [name(block), locals_.setdefault(local, len(locals_))]
                for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True)
            ]
            row = ["S", number, moment, parent, blocks]
        else:
            row = ["R", number, moment, [name(block) for block in data.block_hashes]]
        rows.append(row + NAMES[event.storage_tier])
    return rows


@pytest.mark.parametrize("watched", [False, True], ids=["in-one-go", "each-pass"])
@pytest.mark.parametrize("case", few(CASES, 24), ids=lambda case: case["id"])
def test_a_replay_with_a_host_equals_the_recorded_one(case, watched):
    run, how = case["runs"]["1.2.1"], case["replay"]
    sinks = [StampingSink() for _ in range(how.get("num_workers", 1))]
    engines = [MockEngine(MockEngineArgs.from_json(case["engine"]), sink=sink) for sink in sinks]
    for sink, engine in zip(sinks, engines, strict=True):
        sink.engine = engine
        if watched:
            engine.on_pass(lambda done: None)

    def play():
        requests = map(request_of, case["requests"])
        speedup = how.get("arrival_speedup_ratio", 1.0)
        size = how["trace_block_size"]
        return replay(requests, engines, (), how.get("replay_concurrency"), speedup, trace_block_size=size)

    if "error" in run:  # the recorded replay did not end
        with pytest.raises(EngineStalled):
            play()
        return
    report = play()
    check_summary(run["summary"], report)
    if "events" in run:
        assert run["events"] == recorded_form(sinks[0])
        assert run["token_us"] == sorted(int(ms * 1000) for each in report.requests for ms in each.token_ms)


def test_the_recorded_replays_load_blocks_back_from_the_host():
    """Otherwise the recordings would not cover parked requests."""
    tiers = defaultdict(int)
    for case in CASES:
        events = case["runs"]["1.2.1"].get("events", [])
        in_host = {block for row in events if row[0] == "S" and row[-1] == "HostPinned" for block, _ in row[4]}
        back = [block for row in events if row[0] == "S" and row[-1] != "HostPinned" for block, _ in row[4]]
        tiers["cases"] += bool(in_host)
        tiers["back"] += bool(in_host.intersection(back))
    assert tiers["cases"] >= 20
    assert tiers["back"] >= 15


# ------------------------------------------------------------------------------------------------- worked examples


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prefix_is_loaded_back_from_the_host_before_its_request_is_admitted(backend):
    """A block of 4 tokens of 250,000 bytes takes 1 ms on a link of 1 GB/s."""
    sink = CapturingSink()
    engine = engine_of(backend=backend, sink=sink)
    prompt = evicted_prompt(engine)
    start = engine.now_ms
    on_host = engine.worker.cached_tokens(prompt, tier="host")
    on_device = engine.worker.cached_tokens(prompt)
    sink.take()

    request = park(engine, prompt)
    waited = engine.metrics.waiting
    engine.run()

    assert (waited, on_device + on_host) == (1, 24)
    assert on_host > 0
    assert (24, on_host) == (request.cached_tokens, request.onboarded_tokens)
    assert request.admitted_ms >= start + on_host / 4
    assert not engine.inside.scheduler.parked
    back = [e for e in sink.router_events if e.storage_tier is StorageTier.DEVICE and isinstance(e.event.data, Stored)]
    assert on_host // 4 == sum(len(event.event.data.block_hashes) for event in back)


def test_a_report_counts_the_tokens_loaded_back_from_the_host():
    engine = engine_of()
    prompt = evicted_prompt(engine)
    request = engine.submit(prompt, 1)
    report = engine.run()

    assert (
        request.onboarded_tokens
        == report.figure("onboarded_input_tokens")
        == report.to_json()["onboarded_input_tokens"]
    )
    assert report.figure("onboarded_input_tokens") > 0
    assert [0, 0, request.onboarded_tokens] == [row["onboarded_input_tokens"] for row in report.per_request()]


def test_a_request_behind_a_parked_one_is_served_first():
    engine = engine_of(blocks=16, host=64)
    prompt = evicted_prompt(engine, blocks=12)
    parked = engine.submit(prompt, 1)
    behind = engine.submit([7, 7], 1)
    engine.run()

    assert parked.onboarded_tokens > 0
    assert behind.admitted_ms < parked.admitted_ms


def test_an_idle_engine_publishes_the_events_of_a_transfer_when_time_passes():
    sink = CapturingSink()
    engine = engine_of(sink=sink)
    engine.submit(tokens_of(*range(6)), 1)
    engine.run()
    late = engine.submit(tokens_of(*range(100, 106)), 1)
    engine.inside.start_pass(engine.now_ms)
    engine.close()
    assert late.status == "aborted"
    before = len(engine.worker.manager.resident(StorageTier.HOST_PINNED))
    deadline = engine.worker.manager.offload_deadline()
    engine.run(deadline)

    assert len(engine.worker.manager.resident(StorageTier.HOST_PINNED)) > before
    assert engine.now_ms == engine.worker.now == deadline


def test_a_parked_request_can_be_aborted():
    engine = engine_of(sink=CapturingSink())
    prompt = evicted_prompt(engine)
    request = park(engine, prompt)
    request.abort()

    assert (request.status, engine.inside.scheduler.parked, engine.metrics.waiting) == ("aborted", (), 0)
    manager = engine.worker.manager
    assert manager.num_active_blocks == manager.num_outside
    engine.run(engine.now_ms + 100)
    assert (manager.num_active_blocks, manager.num_outside) == (0, 0)
    again = engine.submit(prompt, 1)
    engine.run()
    assert again.status == "finished"


def test_closing_and_restarting_drop_parked_requests():
    for end in (lambda engine: engine.close(), lambda engine: engine.worker.restart()):
        engine = engine_of()
        prompt = evicted_prompt(engine)
        request = park(engine, prompt)
        end(engine)
        assert not request.is_open
        assert engine.is_idle
        engine.run(engine.now_ms + 100)
        assert engine.worker.manager.num_active_blocks == 0
        engine.submit(prompt, 2)
        assert len([each for each in engine.run().completed if each.generated_tokens == 2]) == 1


def test_an_engine_with_lost_slots_stalls_and_names_that_reason():
    """The host has 1 block and a batch 32, so blocks evicted together are lost, as in the original."""
    engine = engine_of(host=1, batch=32)
    for first in (0, 100):
        engine.submit(tokens_of(*range(first, first + 7)), 1)
    with pytest.raises(EngineStalled) as caught:
        engine.run()
    lost = engine.worker.manager.num_outside
    assert lost > 0
    assert caught.value.lost.startswith(
        f"{lost} blocks of the device are quarantined for ever: the host could not hold a batch whole, and lost it. "
        "Nothing is under way in <HostOffload at "
    )
    assert str(caught.value).endswith(caught.value.lost)
    assert str(caught.value) == str(pickle.loads(pickle.dumps(EngineStalled(1.0, (), (), 5, "x")))).replace(
        str(EngineStalled(1.0, (), (), 5, "x")), str(caught.value)
    )


def test_a_replay_over_an_engine_with_lost_slots_stalls():
    requests = [TraceRequest(0, 28, 1, tuple(range(first, first + 7))) for first in (0, 100)]
    with pytest.raises(EngineStalled, match="quarantined for ever"):
        replay(requests, [engine_of(host=1, batch=32)])


def test_many_small_transfers_do_not_stall(monkeypatch):
    """Transfer 100 blocks one by one: more passes generate nothing than the stall limit without tiers allows."""
    monkeypatch.setattr(engine_inside, "MOST_IDLE_PASSES", 10)
    engine = engine_of(blocks=101, host=300, batch=1, max_num_batched_tokens=None)
    for first in (0, 1000):
        engine.submit(tokens_of(*range(first, first + 100)), 1)
        engine.run()
    assert len(engine.report.completed) == 2
    assert engine.passes > 100


# --------------------------------------------------------------------------------------------------- what is equal


def test_a_host_needs_num_g2_blocks_and_kv_bytes_per_token():
    for fields in ({"num_g2_blocks": 64}, {"kv_bytes_per_token": 1}, {}):
        args = MockEngineArgs(num_gpu_blocks=8, block_size=4, **fields)
        assert not args.has_host
        assert MockEngine(args).worker.tiers is None
    assert MockEngine(MockEngineArgs(num_g2_blocks=64, kv_bytes_per_token=0)).worker.tiers is not None


def test_without_evictions_a_host_makes_no_difference():
    requests = [TraceRequest(n, 20, 3, (n % 3, 10 + n % 3, 20, 21, 22)) for n in range(12)]
    reports = []
    for host in ({}, {"num_g2_blocks": 100, "kv_bytes_per_token": 1000}):
        engine = MockEngine(MockEngineArgs(block_size=4, num_gpu_blocks=100, **host))
        reports.append(replay(requests, [engine]).to_json())
    assert reports[0] == reports[1]


def test_an_engine_over_a_worker_with_tiers_uses_its_host():
    worker = KvWorker(lambda sink: create_manager(num_blocks=8, block_size=4, sink=sink, tiers={"host": 64}))
    engine = MockEngine(MockEngineArgs(block_size=4, num_gpu_blocks=8, **SLOW), worker=worker)
    prompt = evicted_prompt(engine)
    request = engine.submit(prompt, 1)
    engine.run()
    assert request.cached_tokens == 24
    assert request.onboarded_tokens > 0


def test_arguments_of_the_host_are_kept_in_json():
    args = MockEngineArgs(num_g2_blocks=64, kv_bytes_per_token=100, offload_batch_size=4, bandwidth_g1_to_g2_gbps=0)
    assert args == MockEngineArgs.from_json(args.to_json())
    assert {name: value for name, value in args.to_dict().items() if name not in MockEngineArgs().to_dict()} == {
        "num_g2_blocks": 64,
        "offload_batch_size": 4,
        "bandwidth_g1_to_g2_gbps": 0.0,
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_g2_blocks": 0}, "num_g2_blocks must be an integer of at least 1, or None, got 0"),
        ({"offload_batch_size": 0}, "offload_batch_size must be an integer of at least 1, or None, got 0"),
        (
            {"bandwidth_g2_to_g1_gbps": float("inf")},
            "bandwidth_g2_to_g1_gbps must be a finite number of at least 0 GB/s, or None, got inf",
        ),
        (
            {"bandwidth_g1_to_g2_gbps": -1},
            "bandwidth_g1_to_g2_gbps must be a finite number of at least 0 GB/s, or None, got -1",
        ),
    ],
)
def test_arguments_of_the_host_out_of_range_are_refused(fields, message):
    with pytest.raises(ValueError) as caught:
        MockEngineArgs(**fields)
    assert str(caught.value) == message


@pytest.mark.parametrize("backend", ["hash_cache", "vllm_0_19", "mocker_sglang_1_6"])
def test_other_backends_refuse_tiers(backend):
    fields = {"engine_type": "sglang"} if backend == "mocker_sglang_1_6" else {}
    with pytest.raises(ValueError) as caught:
        engine_of(backend=backend, **fields)
    assert (
        str(caught.value)
        == f"backend {backend!r} takes no tiers; lineage, lru, multi_lru, vllm, sglang and some hybrid models do"
    )


def test_tiers_are_refused_for_semantics_1_6_1():
    with pytest.raises(ValueError, match=r"^tiers are for engines that follow the scheduler of 1\.2\.1, .*'1\.6\.1'"):
        engine_of(semantics="1.6.1")


def test_a_host_size_that_contradicts_the_worker_is_refused():
    given = {"block_size": 4, "num_gpu_blocks": 8, "num_g2_blocks": 65}
    for fields, tiers, made in (
        ({"kv_bytes_per_token": 1}, {}, "made without tiers; leave it out, or make the worker with tiers={'host': 65}"),
        (
            {"kv_bytes_per_token": 1},
            {"tiers": {"host": 64}},
            "made with a host of 64 blocks; leave it out, or give it the same",
        ),
        ({}, {"tiers": {"host": 64}}, "made with a host of 64 blocks; leave it out, or give it the same"),
    ):
        worker = KvWorker(lambda sink, tiers=tiers: create_manager(num_blocks=8, block_size=4, sink=sink, **tiers))
        with pytest.raises(ValueError) as caught:
            MockEngine(MockEngineArgs(**given, **fields), worker=worker)
        assert str(caught.value) == f"num_g2_blocks=65, and {worker!r} was {made}"


@pytest.mark.parametrize(
    ("name", "same", "other"),
    [("offload_batch_size", 3, 8), ("bandwidth_g1_to_g2_gbps", 2.0, 14.0), ("bandwidth_g2_to_g1_gbps", 2, 0.0)],
)
def test_link_arguments_that_contradict_the_worker_are_refused(name, same, other):
    tiers = {"host": 64, "gbps": 2.0, "batch": 3}
    worker = KvWorker(lambda sink: create_manager(num_blocks=8, block_size=4, sink=sink, tiers=tiers))
    has = 3 if name == "offload_batch_size" else 2.0
    with pytest.raises(ValueError) as caught:
        MockEngine(MockEngineArgs(block_size=4, num_gpu_blocks=8, **{name: other}), worker=worker)
    assert (
        str(caught.value)
        == f"{name}={other!r}, but the host of {worker!r} was made with {has!r}; leave it out, or give it the same"
    )
    assert worker is MockEngine(MockEngineArgs(block_size=4, num_gpu_blocks=8, **{name: same}), worker=worker).worker


def test_kv_bytes_per_token_that_contradict_the_host_of_the_worker_are_refused():
    tiers = {"host": 64, "bytes_per_token": 7}
    worker = KvWorker(lambda sink: create_manager(num_blocks=8, block_size=4, sink=sink, tiers=tiers))
    with pytest.raises(ValueError) as caught:
        MockEngine(
            MockEngineArgs(block_size=4, num_gpu_blocks=8, num_g2_blocks=64, kv_bytes_per_token=8), worker=worker
        )
    assert (
        str(caught.value)
        == f"kv_bytes_per_token=8, but the host of {worker!r} was made with 7; leave it out, or give it the same"
    )
    same = MockEngineArgs(block_size=4, num_gpu_blocks=8, num_g2_blocks=64, kv_bytes_per_token=7)
    assert worker is MockEngine(same, worker=worker).worker


def test_kv_bytes_per_token_of_a_handoff_can_differ_from_those_of_the_host():
    tiers = {"host": 64, "bytes_per_token": 7}
    worker = KvWorker(lambda sink: create_manager(num_blocks=8, block_size=4, sink=sink, tiers=tiers))
    handoff = MockEngineArgs(block_size=4, num_gpu_blocks=8, kv_bytes_per_token=8, kv_transfer_bandwidth=1.0)
    assert worker is MockEngine(handoff, worker=worker).worker


# --------------------------------------------------------------------------------------------------------- properties


@st.composite
def traffic(draw):
    device = draw(st.integers(4, 12))
    fields = {
        "blocks": device,
        "host": draw(st.integers(1, 40)),
        "batch": draw(st.sampled_from((1, 2, 8, 32))),
        "backend": draw(st.sampled_from(BACKENDS)),
        "kv_bytes_per_token": draw(st.sampled_from((0, 10_000, MS))),
        "max_num_batched_tokens": draw(st.sampled_from((6, 16, 8192))),
        "preemption_mode": draw(st.sampled_from(("lifo", "fifo"))),
    }
    prompts = st.tuples(st.integers(0, 3), st.integers(1, device * 4 - 4), st.integers(1, 4), st.integers(0, 60))
    return fields, draw(st.lists(prompts, min_size=1, max_size=12)), draw(st.booleans())


@example(  # a batch queued behind one that takes no time
    (
        {
            "blocks": 7,
            "host": 1,
            "batch": 1,
            "backend": "lineage",
            "kv_bytes_per_token": 0,
            "max_num_batched_tokens": 8192,
            "preemption_mode": "lifo",
        },
        [(1, 23, 2, 0), (0, 9, 1, 12)],
        True,
    )
)
@given(traffic())
def test_any_traffic_conserves_slots_and_events_equal_the_blocks_of_each_tier(given_traffic):
    fields, requests, steps = given_traffic
    sink = CapturingSink()
    engine = engine_of(sink=sink, **fields)
    manager = engine.worker.manager
    now = 0.0
    opened = []
    for root, length, output, gap in requests:
        now += gap
        prompt = tokens_of(*range(100 * root, 100 * root + 12))[:length]
        opened.append(engine.submit(prompt, output, now))
    stalled = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_inside, "MOST_IDLE_PASSES", 50)  # sooner, as it happens often
        try:
            while not engine.is_idle:
                if steps:
                    engine.step()
                else:
                    engine.run(engine.now_ms + 25)
                assert manager.num_active_blocks <= manager.num_blocks
                assert manager.num_outside <= manager.num_active_blocks
        except EngineStalled:
            stalled = True  # the original loops endlessly here
    if not stalled:
        assert {request.status for request in opened} == {"finished"}
        engine.run(engine.now_ms + 1_000_000)
        if not manager.offload.lost_blocks:
            assert (manager.num_active_blocks, manager.num_outside) == (0, 0)
    held = {StorageTier.DEVICE: set(), StorageTier.HOST_PINNED: set()}
    # A block that left the device twice may reach the host without an event (rule of the original).
    departed, twice = set(), False
    for event in sink.router_events:
        blocks, data = held[event.storage_tier], event.event.data
        if isinstance(data, Removed):
            blocks.difference_update(data.block_hashes)
            if event.storage_tier is StorageTier.DEVICE:
                twice |= not departed.isdisjoint(data.block_hashes)
                departed.update(data.block_hashes)
        else:
            blocks.update(data.block_hashes)
    assert held[StorageTier.DEVICE] == set(manager.resident())
    assert twice or held[StorageTier.HOST_PINNED] == set(manager.resident(StorageTier.HOST_PINNED))


def test_a_request_that_can_never_fit_is_refused_with_a_host():
    with pytest.raises(OutOfBlocks):
        engine_of().submit([1] * 40, 1)


def test_direct_requests_to_a_worker_cannot_take_blocks_of_a_parked_request():
    engine = engine_of()
    request = park(engine, evicted_prompt(engine))
    with pytest.raises(OutOfBlocks, match="7 blocks are needed and 2 are available"):
        engine.worker.serve(tokens_of(*range(200, 207)))
    engine.run()
    assert (request.status, request.onboarded_tokens) == ("finished", 20)


def test_a_parked_request_continues_after_its_manager_was_cleared():
    engine = engine_of()
    request = park(engine, evicted_prompt(engine))
    assert engine.worker.manager.clear()
    engine.run()
    assert (request.status, request.onboarded_tokens) == ("finished", 0)
    other = park(engine, evicted_prompt(engine))
    assert engine.worker.manager.clear()
    other.abort()
    assert engine.is_idle


def test_indexes_of_a_fleet_keep_the_host_blocks_after_a_cleared_of_the_device():
    """vLLM's Cleared covers only the device, which no event reports: a fleet's own indexes read it from the traits."""
    args = MockEngineArgs(num_gpu_blocks=8, block_size=4)
    workers = [
        KvWorker(
            lambda sink: create_manager("vllm", num_blocks=8, block_size=4, tiers={"host": 8, "chunk": 2}, sink=sink),
            driver=backend_spec("vllm").driver,
        )
        for _ in range(2)
    ]
    engines = [MockEngine(args, worker=worker) for worker in workers]
    known = Heard(None, dict(enumerate(engines)), 0.0, has_ranks=False, counts_copies=True)
    for worker in workers:
        worker.serve(list(range(17)))
        worker.tick(100.0)
    workers[0].clear()
    for _ in known.deliver(100.0):
        pass
    held = [event for event in known.reference.dump_events() if event.storage_tier is StorageTier.HOST_PINNED]
    assert sorted(event.worker_id for event in held) == [0, 0, 1, 1]
    all_of = TrueCaches(dict(enumerate(engines)), known.reference.dump_events(), has_ranks=False, counts_copies=True)
    assert [all_of.held_blocks(worker) for worker in (0, 1)] == [0, 4]
