"""A worker compared with the same requests driven by hand, move by move: equal events and equal admissions."""

from copy import deepcopy
from random import Random

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvmock import BACKENDS, CapturingSink, OutOfBlocks, Removed, Stored, create_manager
from pytest_kvmock.engines import KvWorker
from pytest_kvmock.engines.dynamo.sequence import ActiveSequence

CAPACITY, SIZE = 3, 2
SPECS = {spec.name: spec for spec in BACKENDS.values() if spec.in_matrix or spec.name == "hash_cache"}
SPECS["strict"] = SPECS["hash_cache"].variant("strict", prefix_closed=True, strict=True)
"""The backends that accept moves."""

tokens = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=4)  # few values, so requests share prefixes
steps = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), tokens),
        st.tuples(st.just("decode"), st.integers(0, 9), tokens),
        st.tuples(st.sampled_from(["finish", "preempt", "resume"]), st.integers(0, 9)),
        st.tuples(st.just("clear")),
    ),
    max_size=30,
)


class NoRoomByHandError(Exception):
    pass


class ByHand:
    """Requests as Dynamo's schedulers drive them: one Use per chunk (1.0.2: per request), one move per freed block,
    tail first.
    """

    def __init__(self, backend, chunk):
        self.captured = CapturingSink()
        self.moves = "chunks" if SPECS[backend].in_matrix else "whole"
        self.manager = create_manager(SPECS[backend], num_blocks=CAPACITY, block_size=SIZE, sink=self.captured)
        self.chunk = chunk
        self.requests = []
        self.rng = Random(0)

    def send(self, moves):
        for move in moves:
            if self.manager.process(move) < len(getattr(move, "blocks", "1")) and type(move).__name__ == "Use":
                raise NoRoomByHandError

    def allocate(self, sequence):
        if self.moves == "whole":
            self.send([sequence.take_creation_signal()])
            return
        chunk = self.chunk or len(sequence)
        for upto in range(chunk, len(sequence) + chunk, chunk):
            use = sequence.allocate_blocks_for_chunk(min(upto, len(sequence)))
            if use is not None:
                self.send([use])

    def prefill(self, prompt):
        sequence = ActiveSequence(prompt, 1000, SIZE, emit_token_ids=True, rng=self.rng, moves=self.moves)
        self.allocate(sequence)
        self.requests.append(sequence)

    def decode(self, index, new):
        sequence = self.requests[index]
        for token in new:
            self.send(sequence.push(token))
            if self.moves == "chunks":
                sequence.commit_allocation(len(sequence))

    def finish(self, index):
        sequence = self.requests.pop(index)
        if sequence.num_allocated_tokens:  # 1.0.2 frees all blocks, allocated or not: it does not free waiting requests
            self.send(sequence.free_signal())

    def preempt(self, index):
        self.send(self.requests[index].reset_with_signal())

    def resume(self, index):
        self.allocate(self.requests[index])

    def clear(self):
        return not self.requests and self.manager.clear()


def allowed(worker, step):
    """Return the step with its request, or None if no request is in the required state."""
    kind, *rest = step
    if kind in ("prefill", "clear"):
        return step
    status = {"decode": ("running",), "preempt": ("running",), "resume": ("preempted",)}
    states = status.get(kind, ("running", "preempted"))
    fitting = [i for i, request in enumerate(worker.requests) if request.status in states]
    if not fitting:
        return None
    return (kind, fitting[rest[0] % len(fitting)], *rest[1:])


def do(worker, kind, *rest):
    if kind == "prefill":
        worker.prefill(rest[0])
    elif kind == "clear":
        return worker.clear()
    else:
        getattr(worker.requests[rest[0]], kind)(*rest[1:])
    return None


def shown(manager):
    return (
        manager.num_active_blocks,
        manager.num_active_block_refs,
        manager.inactive_blocks(),
        sorted(manager.resident()),
        sorted(manager.active_blocks.values()),
    )


@settings(max_examples=examples(200))
@given(steps=steps, backend=st.sampled_from(sorted(SPECS)), chunk=st.sampled_from([None, 1, 2, 3]))
def test_a_worker_publishes_and_refuses_like_requests_driven_move_by_move(steps, backend, chunk):
    captured = CapturingSink()

    def make_manager(sink):
        return create_manager(SPECS[backend], num_blocks=CAPACITY, block_size=SIZE, sink=sink)

    worker = KvWorker(make_manager, sink=captured, chunk=chunk, rng=Random(1), driver=SPECS[backend].driver)
    hand = ByHand(backend, chunk)
    for given_step in steps:
        step = allowed(worker, given_step)
        if step is None:
            continue
        tried = deepcopy(hand)
        try:
            answer = getattr(tried, step[0])(*step[1:])
        except NoRoomByHandError:
            before = (shown(worker.manager), list(captured.events), [len(r) for r in worker.requests])
            with pytest.raises(OutOfBlocks) as raised:
                do(worker, *step)
            assert CAPACITY - worker.manager.num_active_blocks == raised.value.available < raised.value.requested
            assert before == (shown(worker.manager), list(captured.events), [len(r) for r in worker.requests])
            continue
        hand = tried
        assert answer == do(worker, *step)
        assert hand.captured.router_events == captured.router_events
        assert shown(hand.manager) == shown(worker.manager)
        in_pools = worker.manager.num_active_blocks + worker.manager.num_inactive_blocks
        if hand.moves == "chunks":
            assert in_pools + worker.manager.metrics().reset_pool_size == CAPACITY
        assert in_pools <= CAPACITY
        if backend != "multi_lru":
            assert _held(captured.events) == set(worker.manager.resident())
    for request in list(worker.requests):
        request.finish()
    assert 0 == worker.manager.num_active_block_refs == worker.manager.num_active_blocks
    if backend != "multi_lru":
        assert len(_held(captured.events)) == worker.manager.num_inactive_blocks
    assert list(range(len(captured.events))) == [event.event_id for event in captured.events]


def _held(events):
    """Return the cached blocks in a listener's view."""
    held = set()
    for event in events:
        if isinstance(event.data, Stored):
            assert held.isdisjoint(event.data.block_hashes)
            held.update(event.data.block_hashes)
        elif isinstance(event.data, Removed):
            assert held.issuperset(event.data.block_hashes)
            held.difference_update(event.data.block_hashes)
        else:
            held.clear()
    return held
