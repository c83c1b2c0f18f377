"""SGLang's P/D pairs driven directly: workers of a role, changed, dropped or kept hand-overs, and ends of transfers."""

from random import Random

import pytest

from pytest_kvmock import BACKENDS, CapturingSink, Cleared, Stored
from pytest_kvmock.engines import KvWorker, OutOfBlocks, RequestError
from pytest_kvmock.engines.base.pair_options import PairRole
from pytest_kvmock.engines.sglang.pairs.sglang_options import SglangPairOptions, SglangRole

PROMPT = tuple(range(10))


class Engine:
    """A worker of a role over few pages, with its events."""

    def __init__(self, kind, pages=16, block_size=4, backend="sglang", number=0, **options):
        self.sink = CapturingSink()
        spec = BACKENDS[backend]
        made = {"unified": True} if backend == "sglang" else {}
        self.worker = KvWorker(
            lambda sink: spec.make(num_blocks=pages, block_size=block_size, sink=sink, **made),
            number,
            sink=self.sink,
            driver=spec.driver,
            rng=Random(0),
            pair=SglangRole(kind, SglangPairOptions(**options)),
        )

    def __getattr__(self, name):
        return getattr(self.worker, name)

    @property
    def published(self):
        return [type(event.data) for event in self.sink.events]

    @property
    def stored(self):
        data = [event.data for event in self.sink.events]
        return [list(each.block_hashes) for each in data if isinstance(each, Stored)]


@pytest.fixture
def p():
    return Engine("prefill")


@pytest.fixture
def d():
    return Engine("decode", number=1, num_reserved_decode_tokens=4, disaggregation_decode_enable_radix_cache=True)


def phases(engine):
    return [(lease.phase, lease.num_blocks) for lease in engine.leased]


def test_a_hand_over_contains_the_bootstrap_fields_that_a_router_sends_to_both_legs(p):
    first, second = (p.serve(PROMPT, hand_over=True).hand_over for _ in range(2))
    assert {**first} == {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 0}
    assert first["bootstrap_room"] != second["bootstrap_room"]


def test_the_prefill_engine_computes_once_pages_are_reserved_and_publishes_before_the_transfer_ends(p, d):
    served = p.serve(PROMPT, hand_over=True)
    assert p.published == [Cleared]
    request = d.load(PROMPT, served.hand_over)
    assert p.published == [Cleared, Stored]
    assert request.status == "loading"
    assert (phases(p), phases(d)) == ([("kept", 3)], [("loading", 3)])
    assert d.published == [Cleared]


def test_the_end_of_a_transfer_frees_the_prefill_blocks_and_publishes_the_decode_blocks(p, d):
    request = d.load(PROMPT, p.serve(PROMPT, hand_over=True).hand_over)
    request.end_transfer()
    assert request.status == "running"
    assert d.stored == p.stored
    assert (phases(p), phases(d)) == ([], [])
    assert len(request) == len(PROMPT) + 1
    request.decode(3)
    request.finish()
    assert len(d.stored) == 2


def test_the_decode_leg_can_come_first(p, d):
    hand_over = p.pair.new_hand_over()
    request = d.load(PROMPT, hand_over)
    assert p.published == [Cleared]
    served = p.serve(PROMPT, hand_over=hand_over)
    assert len(served.stored_blocks) == 2
    request.end_transfer()
    assert request.status == "running"


def test_a_decode_engine_without_a_radix_cache_publishes_no_event(p):
    d = Engine("decode", number=1, num_reserved_decode_tokens=4)
    for _ in range(2):
        with d.load(PROMPT, p.serve(PROMPT, hand_over=True).hand_over) as request:
            request.end_transfer()
            request.decode(8)
            assert request.cached_tokens == 0
    assert d.published == []
    assert d.cached_tokens(PROMPT) == 0
    assert d.pair.role.names_received == "never"


def test_pages_cached_by_the_decode_engine_are_not_sent(p, d):
    for cached in (0, 8):
        with d.load(PROMPT, p.serve(PROMPT, hand_over=True).hand_over) as request:
            request.end_transfer()
            assert request.cached_tokens == cached


def test_a_failed_transfer_leaves_the_prompt_cached_only_at_the_prefill_engine(p, d):
    request = d.load(PROMPT, p.serve(PROMPT, hand_over=True).hand_over)
    request.fail_transfer()
    assert request.status == "failed"
    assert (phases(p), phases(d)) == ([], [])
    assert p.cached_tokens((*PROMPT, 1)) == 8
    assert d.published == [Cleared]
    with pytest.raises(RequestError, match="not under way: it is failed"):
        request.end_transfer()


def test_a_request_that_ends_while_it_loads_keeps_its_pages_for_30_seconds(p, d):
    request = d.load(PROMPT, p.serve(PROMPT, hand_over=True).hand_over)
    request.finish()
    assert request.status == "aborted"
    assert phases(d) == [("kept", 3)]
    d.tick(29_999)
    assert phases(d) == [("kept", 3)]
    d.tick(30_000)
    assert phases(d) == []
    assert d.published == [Cleared]


def test_a_prefill_leg_without_a_decode_leg_fails_after_its_timeout(p, d):
    served = p.serve(PROMPT, hand_over=True)
    p.tick(300_000)
    request = d.load(PROMPT, served.hand_over)
    assert p.published == [Cleared]
    assert request.status == "loading"
    with pytest.raises(RequestError, match="has not sent all of the prompt"):
        request.end_transfer()
    d.tick(300_000)
    assert request.status == "failed"


def test_a_request_that_does_not_fit_the_decode_engine_holds_back_the_prefill_engine(p, d):
    first = d.load(range(100, 140), p.serve(range(100, 140), hand_over=True).hand_over)
    first.end_transfer()
    second = d.load(range(200, 230), p.serve(range(200, 230), hand_over=True).hand_over)
    third = d.load(PROMPT, p.serve(PROMPT, hand_over=True).hand_over)
    assert (second.status, third.status) == ("waiting", "waiting")
    assert len(p.stored) == 1
    first.finish()
    assert (second.status, third.status) == ("loading", "loading")
    assert len(p.stored) == 3


def test_a_preempted_request_resumes_without_a_transfer(p, d):
    request = d.load(PROMPT, p.serve(PROMPT, hand_over=True).hand_over)
    request.end_transfer()
    request.decode(2)
    request.preempt()
    assert request.status == "preempted"
    request.resume()
    assert (request.status, len(request)) == ("running", len(PROMPT) + 3)
    request.decode(1)
    request.finish()


def test_prompts_are_computed_in_chunks_of_whole_pages():
    spec, sink = BACKENDS["sglang"], CapturingSink()
    chunked = KvWorker(
        lambda sink: spec.make(num_blocks=16, block_size=4, sink=sink, unified=True),
        sink=sink,
        driver=spec.driver,
        chunk=6,
        pair=SglangRole("prefill"),
    )
    d = Engine("decode", number=1, num_reserved_decode_tokens=4)
    request = d.load(PROMPT, chunked.serve(PROMPT, hand_over=True).hand_over)
    assert [type(event.data) for event in sink.events] == [Cleared, Stored, Stored]
    request.end_transfer()
    assert request.status == "running"


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"bootstrap_host": "10.9.9.9"}, "failed"),
        ({"bootstrap_port": 1}, "failed"),
        ({"bootstrap_room": 77}, "loading"),
    ],
)
def test_a_changed_hand_over_fails_or_waits_for_its_timeout(p, d, change, status):
    request = d.load(PROMPT, p.serve(PROMPT, hand_over=True).hand_over.changed(**change))
    assert request.status == status
    assert p.published == [Cleared]


def test_a_missing_bootstrap_port_defaults_to_that_of_the_engine(p, d):
    request = d.load(PROMPT, p.serve(PROMPT, hand_over=True).hand_over.changed(bootstrap_port=None))
    request.end_transfer()
    assert request.status == "running"


def test_a_second_decode_leg_in_the_same_room_fails(p, d):
    hand_over = p.serve(PROMPT, hand_over=True).hand_over
    first = d.load(PROMPT, hand_over)
    second = d.load(PROMPT, hand_over)
    assert (first.status, second.status) == ("loading", "failed")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, d: d.load(PROMPT, None), "load: request without bootstrap room: .* at least 0, got None"),
        (lambda p, d: d.load(PROMPT, {"bootstrap_room": "x"}), "got 'x' .SGLang answers 400"),
        (
            lambda p, d: d.load(PROMPT, {"remote_block_ids": []}),
            "parameters of another kind of engine .remote_block_ids",
        ),
        (lambda p, d: d.load(PROMPT, 5), "hand_over must be a HandOver, a mapping of its fields, or None, got 5"),
        (lambda p, d: p.load(PROMPT, {}), "a decode leg is for worker_type 'decode'; .* is for 'prefill'"),
        (lambda p, d: d.serve(PROMPT, hand_over=True), "hand_over is for worker_type 'prefill'; .* is for 'decode'"),
        (lambda p, d: p.serve(PROMPT, 2, hand_over=True), "generates 1 token, got output_tokens=2"),
        (lambda p, d: p.tick(-1), "time"),
    ],
)
def test_an_invalid_leg_is_refused_and_changes_nothing(p, d, call, message):
    with pytest.raises(ValueError, match=message):
        call(p, d)
    assert (p.requests, d.requests) == ([], [])
    assert (p.published, d.published) == ([Cleared], [Cleared])


def test_a_prompt_larger_than_the_pool_is_refused(p, d):
    with pytest.raises(OutOfBlocks, match="17 blocks are needed and 16 are available"):
        p.serve(range(65), hand_over=True)
    hand_over = p.serve(PROMPT, hand_over=True).hand_over
    with pytest.raises(OutOfBlocks, match="17 blocks") as refused:
        d.load(range(61), hand_over)
    assert refused.value.__notes__ == ["num_reserved_decode_tokens=4 are kept for what the request generates"]
    assert d.requests == []


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("vllm", "hand_over='sglang' is for SGLang's unified cache .* got 'vllm'"),
        ("trtllm", "hand_over='sglang' is for SGLang's unified cache"),
        ("sglang_gpt_oss", "a role over a window was not recorded; got backend 'sglang_gpt_oss'"),
        ("sglang_qwen3_next", "a role over states was not recorded"),
    ],
)
def test_a_pair_over_a_backend_without_recordings_is_refused(backend, message):
    with pytest.raises(ValueError, match=message):
        Engine("prefill", pages=64, block_size=BACKENDS[backend].default_block_size, backend=backend)


def test_an_invalid_role_is_refused():
    with pytest.raises(ValueError, match="must be 'prefill' or 'decode', got 'both'"):
        SglangRole("both")
    with pytest.raises(ValueError, match="hand_over of a pair must be"):
        PairRole("prefill", "sglang")


def test_each_side_can_have_its_own_draft_model(d):
    eagle = Engine("prefill", backend="sglang_eagle")
    request = d.load(PROMPT, eagle.serve(PROMPT, hand_over=True).hand_over)
    request.end_transfer()
    assert eagle.stored[0] != d.stored[0]


def test_a_restart_drops_all_legs(p, d):
    request = d.load(PROMPT, p.serve(PROMPT, hand_over=True).hand_over)
    d.restart()
    assert request.status == "lost"
    assert phases(d) == []
