"""Workers over vLLM's block pool: which events a router receives, and when."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock import (
    BACKENDS,
    CapturingSink,
    EngineProfile,
    OutOfBlocks,
    Prompt,
    Removed,
    RouterHarness,
    Stored,
    block_hashes,
    sequence_hashes,
)
from pytest_kvmock.engines import KvWorker
from pytest_kvmock.engines.worker import Served

OURS = ("vllm", "vllm_0_19")


@pytest.fixture(params=OURS)
def backend(request):
    return request.param


def new_worker(backend, num_blocks=8, block_size=4, *, seed=0, **options):
    """Return a worker whose events are in `worker.captured`."""
    spec, captured = BACKENDS[backend], CapturingSink()

    def make(sink):
        return spec.make(num_blocks=num_blocks, block_size=block_size, dp_rank=0, sink=sink)

    worker = KvWorker(make, sink=captured, rng=Random(seed), driver=spec.driver, **options)
    worker.captured = captured
    return worker


@pytest.fixture
def worker(backend):
    return new_worker(backend)


def names(worker, tokens):
    return worker.manager.new_request(Prompt(tokens)).tokens.names


def message(worker):
    """Return the kind of each event since the last call, with its blocks."""
    out = []
    for event in worker.captured.take():
        data = event.data
        if isinstance(data, Stored):
            out.append(("S", data.parent_hash, *data.block_hashes))
        else:
            out.append(("R", *data.block_hashes) if isinstance(data, Removed) else "C")
    return out


def test_the_last_token_of_a_cached_prompt_is_computed_again(worker):
    a, b = names(worker, range(8))
    assert Served(0, (a, b)) == worker.serve(range(8))
    assert tuple(map(worker.cached_tokens, (range(8), range(9), range(5)))) == (4, 8, 4)
    assert Served(4, (b,)) == worker.serve(range(8))
    assert [("S", None, a, b), ("S", a, b)] == message(worker)


def test_a_block_is_stored_with_its_last_token_and_allocated_with_its_first(backend):
    worker = new_worker(backend, num_blocks=2)
    worker.serve(range(100, 108))
    old = names(worker, range(100, 108))
    message(worker)
    with worker.prefill(range(3)) as request:
        assert [("R", old[1])] == message(worker)
        request.decode([3])
        first, second = names(worker, range(8))
        assert [("S", None, first)] == message(worker)
        request.decode([4])
        assert [("R", old[0])] == message(worker)
        request.decode([5, 6])
        assert message(worker) == []
        request.decode([7])
        assert [("S", first, second)] == message(worker)


def test_decoding_n_tokens_equals_n_steps_of_one_token(backend):
    streams = []
    for sizes in ([23], [1] * 23, [5, 1, 17]):
        worker = new_worker(backend, num_blocks=7)
        worker.serve(range(100, 126))
        with worker.prefill(range(3)) as request:
            tokens = iter(range(3, 26))
            for size in sizes:
                request.decode([next(tokens) for _ in range(size)])
        streams.append((message(worker), worker.manager.free_queue))
    assert streams[0] == streams[1] == streams[2]
    assert {event[0] for event in streams[0][0]} == {"S", "R"}


def test_a_chunked_prefill_is_published_chunk_by_chunk(backend):
    worker = new_worker(backend, chunk=8)
    blocks = names(worker, range(20))
    worker.serve(range(20))
    assert [("S", None, *blocks[:2]), ("S", blocks[1], *blocks[2:4]), ("S", blocks[3], blocks[4])] == message(worker)
    worker.serve([*range(20), 1])
    assert message(worker) == []  # all hits are allocated with the first chunk that computes tokens


def test_a_request_that_does_not_fit_is_refused_with_the_block_counts_of_vllm(backend):
    worker = new_worker(backend, num_blocks=5)
    worker.serve(range(8))
    held = worker.prefill(range(100, 108))
    before = (worker.manager.free_queue, worker.manager.resident(), list(worker.captured.events))
    with pytest.raises(OutOfBlocks) as raised:
        worker.prefill(range(13))  # two new blocks, and two hits that no request uses
    assert (raised.value.requested, raised.value.available) == (4, 3)
    with pytest.raises(OutOfBlocks) as raised:
        held.decode(13)
    assert (raised.value.requested, raised.value.available) == (4, 3)
    assert before == (worker.manager.free_queue, worker.manager.resident(), list(worker.captured.events))
    worker.prefill(range(9))
    held.decode(0)
    assert worker.manager.num_free_blocks == 0


def test_a_preempted_request_looks_up_its_output_when_it_resumes(worker):
    request = worker.prefill(range(6))
    request.decode(range(6, 13))
    blocks = request.blocks
    request.preempt()
    assert (0, 13, blocks[:3]) == (worker.manager.num_active_blocks, len(request), request.blocks[:3])
    message(worker)
    request.resume()
    assert message(worker) == []
    assert request.cached_tokens == 6  # all tokens of the prompt
    assert blocks[:3] == request.blocks[:3]
    request.preempt()
    worker.serve(range(100, 129))
    request.resume()
    assert request.cached_tokens == 0
    assert ("S", None, *blocks[:3]) == message(worker)[-1]


def test_a_resume_recomputes_blocks_that_were_reset_after_the_preemption(worker):
    request = worker.prefill(range(9))
    request.preempt()
    assert worker.manager.reset_prefix_cache()
    request.resume()
    assert request.cached_tokens == 0
    a, b = names(worker, range(8))
    assert [("S", None, a, b), "C", ("S", None, a, b)] == message(worker)


def test_a_prompt_of_hashes_is_served_without_token_ids(worker):
    served = worker.serve(Prompt(hashes=[11, 12], num_tokens=10), output_tokens=2)
    assert tuple(sequence_hashes([11, 12])) == served.stored_blocks[:2]
    assert len(served.stored_blocks) == 3
    assert [event.token_ids for event in worker.captured.router_events] == [None, None]
    assert worker.cached_tokens(Prompt(hashes=[11, 12, 13])) == 8


def test_without_prefix_caching_no_block_is_published_or_hit(backend):
    worker = new_worker(backend, prefix_caching=False)
    for _ in range(3):
        assert Served(0, ()) == worker.serve(range(10), output_tokens=9)
    one, two = worker.prefill(range(8)), worker.prefill(range(8))
    assert set(one.blocks).isdisjoint(two.blocks)
    assert (worker.captured.events, list(worker.manager.resident())) == ([], [])


def test_clear_keeps_the_free_queue_and_publishes_one_cleared(worker):
    worker.serve(range(9))
    queue = worker.manager.free_queue
    message(worker)
    assert worker.clear()
    assert (["C"], queue, 0) == (message(worker), worker.manager.free_queue, worker.cached_tokens(range(9)))


# ------------------------------------------------------------------------------------------------- in a harness


@pytest.mark.parametrize(
    "options",
    [{}, {"hash_algorithm": "xxhash", "hash_seed": "42"}, {"hash_algorithm": "sha256"}, {"enable_caching": False}],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)
def test_a_variant_is_checked_against_its_own_hashes(options):
    spec = BACKENDS["vllm"].variant("mine", **options)
    with RouterHarness(EngineProfile(block_size=4, num_blocks=8), spec) as kv:
        worker = kv.worker(0)
        for _ in range(6):
            worker.serve(kv.prompt(2, tail=3), 6)
        assert worker.backend == "mine"
        worker.restart(announced=True)
        worker.serve(kv.prompt(2))
    assert kv.events.problems == []


def restored(event, **changes):
    data = event.event.data
    fields = {name: getattr(data, name) for name in ("parent_hash", "block_hashes", "tokens_hashes")}
    return replace(event, event=replace(event.event, data=Stored(**{**fields, **changes})))


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("shared", [0, 1])
def test_a_block_hash_that_does_not_match_its_tokens_is_reported(backend, place, shared):
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=16), backend)
    worker = kv.worker(0)
    first = kv.prompt(shared, tail=1)
    worker.serve(first)
    publish = kv.publisher.publish

    def change(event):
        if isinstance(event.event.data, Stored):
            hashes = list(event.event.data.block_hashes)
            hashes[place] ^= 1
            event = restored(event, block_hashes=tuple(hashes))
        publish(event)

    kv.publisher.publish = change
    worker.serve(kv.prompt(3, after=Prompt(first.tokens[: 4 * shared])))
    assert "wrong_hash" in [problem.rule for problem in kv.events.errors]
    (wrong,) = [problem for problem in kv.events.errors if problem.rule == "wrong_hash"]
    assert (wrong.block ^ 1) in worker.manager.resident()


def test_a_local_hash_that_does_not_match_its_tokens_is_reported(backend):
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=16), backend)
    publish = kv.publisher.publish
    kv.publisher.publish = lambda event: publish(restored(event, tokens_hashes=tuple(block_hashes(range(8), 4))))
    kv.worker(0).serve(kv.prompt(2))
    assert [problem.rule for problem in kv.events.errors] == ["wrong_hash"]


# ---------------------------------------------------------------------------------------------------- properties

tokens = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=9)  # few values, so requests share prefixes
steps = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), tokens),
        st.tuples(st.just("decode"), st.integers(0, 9), tokens),
        st.tuples(st.sampled_from(["finish", "preempt", "resume"]), st.integers(0, 9)),
        st.tuples(st.just("clear")),
    ),
    max_size=30,
)
FROM = {"decode": ("running",), "preempt": ("running",), "resume": ("preempted",)}


class ByHand:
    """The same requests on a manager, as vLLM's scheduler drives it: a lookup, then an allocation per chunk or
    token.
    """

    def __init__(self, backend, chunk, **sizes):
        self.captured = CapturingSink()
        self.manager = BACKENDS[backend].make(dp_rank=0, sink=self.captured, **sizes)
        self.chunk = chunk
        self.requests = []

    def admit(self, request):
        size, length = self.manager.block_size, len(request)
        hits = self.manager.get_computed_blocks(request)
        idle = sum(block_id in self.manager.free_queue for block_id in hits)
        if -(-length // size) - len(hits) + idle > len(self.manager.free_queue):
            return False
        at, chunk = len(hits) * size, self.chunk or length
        while at < length:
            upto = min(length, (at // chunk + 1) * chunk)
            assert self.manager.allocate_slots(request, upto - at, hits) is not None
            at, hits = upto, ()
        return True

    def prefill(self, prompt):
        request = self.manager.new_request(Prompt(prompt))
        if self.admit(request):
            self.requests.append(request)
            return True
        return False

    def decode(self, index, new):
        request, size = self.requests[index], self.manager.block_size
        if -(-(len(request) + len(new)) // size) - len(request.block_ids) > len(self.manager.free_queue):
            return False
        for token in new:
            request.tokens.append(token)
            self.manager.allocate_slots(request, 1)
        return True

    def finish(self, index):
        self.manager.free(self.requests.pop(index))
        return True

    def preempt(self, index):
        self.manager.free(self.requests[index])
        return True

    def resume(self, index):
        return self.admit(self.requests[index])

    def clear(self):
        return True if self.requests else self.manager.reset_prefix_cache()


@given(steps=steps, backend=st.sampled_from(OURS), chunk=st.sampled_from([None, 1, 2, 3]), num_blocks=st.integers(1, 6))
def test_a_worker_publishes_and_refuses_like_a_manager_called_directly(steps, backend, chunk, num_blocks):
    worker = new_worker(backend, num_blocks, 2, chunk=chunk)
    hand = ByHand(backend, chunk, num_blocks=num_blocks, block_size=2)
    for kind, *rest in steps:
        if kind not in ("prefill", "clear"):
            fitting = [
                index
                for index, request in enumerate(worker.requests)
                if request.status in FROM.get(kind, ("running", "preempted"))
            ]
            if not fitting:
                continue
            rest[0] = fitting[rest[0] % len(fitting)]
        done = getattr(hand, kind)(*rest)
        if kind == "prefill":
            call = worker.prefill
        elif kind == "clear":
            call = worker.clear
        else:
            call = getattr(worker.requests[rest.pop(0)], kind)
        if done:
            call(*rest)
        else:
            with pytest.raises(OutOfBlocks):
                call(*rest)
        assert hand.captured.router_events == worker.captured.router_events
        assert hand.manager.free_queue == worker.manager.free_queue
        assert [len(request) for request in hand.requests] == [len(request) for request in worker.requests]
