"""Random use of a manager: no block is lost or owned twice, payloads survive, counts and events are correct."""

import pytest
from block_helpers import MODEL, PAGE, chain, device_layout, host_layout
from depth import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pytest_kvmock import CapturingSink, Removed
from pytest_kvmock.contrib.block_manager import (
    BlockState,
    KvBlockManager,
    KvBlockManagerConfig,
    KvManagerRuntimeConfig,
    NotEnoughBlocksAvailable,
)

LONG = chain(4)
CONTENTS = [*LONG, LONG[0].next_block(range(50, 54)), LONG[1].next_block(range(60, 64)), *chain(2, 100)]
BY_HASH = {content.sequence_hash: content for content in CONTENTS}
SIDES = st.sampled_from(["device", "host"])
content_of = st.sampled_from(CONTENTS)


def payload_of(sequence_hash):
    return sequence_hash.to_bytes(8, "little")


class Machine(RuleBasedStateMachine):
    """A manager with 5 and 4 blocks, and all operations of its users, in any order."""

    def __init__(self):
        super().__init__()
        self.sink = CapturingSink()
        config = KvBlockManagerConfig(KvManagerRuntimeConfig(1), MODEL, device_layout(5), host_layout(4))
        self.manager = KvBlockManager(config, sink=self.sink)
        self.pools = {"device": self.manager.device(), "host": self.manager.host()}
        self.mutable = {"device": [], "host": []}
        self.shared = {"device": [], "host": []}
        self.resident = {pool.block_set.tier: set() for pool in self.pools.values()}
        self.next_id = self.queued = 0

    # Positions are drawn, not handles: Hypothesis keeps drawn values, but a handle must be dropped to return its
    # block.

    def draw_from(self, data, handles):
        return handles[data.draw(st.integers(0, len(handles) - 1))] if handles else None

    def draw_some(self, data, handles, **how_many):
        return [handles[i] for i in data.draw(st.lists(st.integers(0, len(handles) - 1), **how_many))]

    # ------------------------------------------------------------------------------------------------ users do

    @rule(side=SIDES, count=st.integers(0, 4))
    def allocate(self, side, count):
        pool = self.pools[side]
        inactive = [pool.block(i) for i in range(pool.total_blocks) if pool.block(i).next is not None]
        inactive.sort(key=lambda b: (b.priority, b.returned_tick, b.acquired_tick, b.sequence_hash))
        due = [*(block.index for block in pool._free), *(block.index for block in inactive)]
        if count > len(due):
            before = pool.counts
            with pytest.raises(NotEnoughBlocksAvailable) as caught:
                pool.allocate_blocks_blocking(count)
            assert (count, len(due)) == (caught.value.requested, caught.value.available)
            assert before == pool.counts
            return
        blocks = pool.allocate_blocks_blocking(count)
        assert due[:count] == [block.block_idx for block in blocks]
        assert all(block.state is BlockState.RESET and block.payload == b"" for block in blocks)
        self.mutable[side] += blocks

    @rule(side=SIDES, content=content_of, data=st.data(), by_tokens=st.booleans())
    def fill(self, side, content, data, by_tokens):
        reset = [block for block in self.mutable[side] if block.state is BlockState.RESET]
        block = self.draw_from(data, reset)
        if block is None:
            return
        if by_tokens and content.parent_sequence_hash is None:
            block.initialize_sequence()
            assert block.add_tokens(content.tokens) == []
            block.commit()
        else:
            block.apply_token_block(content)
        block.payload = payload_of(content.sequence_hash)

    @rule(side=SIDES, data=st.data(), tokens=st.integers(0, PAGE))
    def begin(self, side, data, tokens):
        block = self.draw_from(data, [block for block in self.mutable[side] if block.state is BlockState.RESET])
        if block is not None:
            block.initialize_sequence()
            block.add_tokens(range(tokens))

    @rule(side=SIDES, data=st.data())
    def reset(self, side, data):
        block = self.draw_from(data, self.mutable[side])
        if block is not None:
            block.reset()

    @rule(side=SIDES, data=st.data(), priority=st.integers(0, 2))
    def prioritise(self, side, data, priority):
        handle = self.draw_from(data, self.mutable[side] + self.shared[side])
        if handle is not None:
            handle.metadata.priority = priority

    @rule(side=SIDES, data=st.data())
    def register(self, side, data):
        complete = [block for block in self.mutable[side] if block.state is BlockState.COMPLETE]
        if not complete:
            return
        chosen = self.draw_some(data, complete, min_size=1, unique=True)
        hashes = [block.sequence_hash for block in chosen]
        shared = self.pools[side].register_blocks_blocking(chosen)
        assert hashes == [handle.sequence_hash for handle in shared]
        self.mutable[side] = [block for block in self.mutable[side] if block.is_open]
        self.shared[side] += shared

    @rule(side=SIDES, asked=st.lists(content_of, max_size=4))
    def match(self, side, asked):
        hashes = [content.sequence_hash for content in asked]
        resident = set(self.pools[side].registered_hashes())
        run = next((i for i, each in enumerate(hashes) if each not in resident), len(hashes))
        found = self.pools[side].match_sequence_hashes_blocking(hashes)
        assert hashes[:run] == [handle.sequence_hash for handle in found]
        self.shared[side] += found

    @rule(side=SIDES, asked=st.lists(content_of, max_size=4))
    def touch(self, side, asked):
        self.pools[side].touch_blocks_blocking([content.sequence_hash for content in asked])

    @rule(side=SIDES, data=st.data())
    def clone(self, side, data):
        handle = self.draw_from(data, self.shared[side])
        if handle is not None:
            self.shared[side].append(handle.clone())

    @rule(side=SIDES, data=st.data(), kind=st.sampled_from(["mutable", "shared"]), dropped=st.booleans())
    def close(self, side, data, kind, dropped):
        handles = getattr(self, kind)[side]
        if not handles:
            return
        handle = handles.pop(data.draw(st.integers(0, len(handles) - 1)))
        if not dropped:
            handle.close()

    @rule(side=SIDES)
    def flush_pool(self, side):
        pool = self.pools[side]
        assert pool.counts.returning == pool.flush()

    # ------------------------------------------------------------------------------------------ and the manager

    @precondition(lambda self: self.shared["device"])
    @rule(data=st.data(), priority=st.integers(0, 2))
    def offload(self, data, priority):
        self.manager.offload(self.draw_from(data, self.shared["device"]), priority)
        self.queued += 1

    @rule()
    def flush(self):
        returning = sum(pool.counts.returning for pool in self.pools.values())
        done = self.manager.flush()
        assert (returning, self.queued) == (done.returned, sum(done[1:]))
        self.queued = 0
        assert (self.pools["device"].counts.returning, self.pools["host"].counts.returning) == (0, 0)

    @precondition(lambda self: self.shared["host"])
    @rule(data=st.data())
    def onboard(self, data):
        chosen = self.draw_some(data, self.shared["host"], max_size=3)
        before = self.pools["device"].counts
        try:
            back = self.manager.onboard(chosen)
        except NotEnoughBlocksAvailable:
            assert before == self.pools["device"].counts
            return
        assert [each.sequence_hash for each in chosen] == [each.sequence_hash for each in back]
        self.shared["device"] += back

    # ------------------------------------------------------------------------------------------- always so

    @invariant()
    def every_block_is_in_one_place(self):
        for side, pool in self.pools.items():
            free = [block.index for block in pool._free]
            returning = [block.index for block in pool._returned]
            inactive = [i for i in range(pool.total_blocks) if pool.block(i).next is not None]
            mutable = [handle.block_idx for handle in self.mutable[side]]
            shared = sorted({handle.block_idx for handle in self.shared[side]})
            everywhere = free + returning + inactive + mutable + shared
            assert list(range(pool.total_blocks)) == sorted(everywhere)
            assert (
                len(everywhere),
                len(free),
                len(inactive),
                len(mutable) + len(shared),
                len(returning),
            ) == pool.counts
            assert len(free) + len(inactive) == pool.available_blocks

    @invariant()
    def what_is_registered_keeps_hash_and_payload(self):
        for side, pool in self.pools.items():
            for handle in self.shared[side]:
                assert BlockState.REGISTERED is handle.state
                assert payload_of(handle.sequence_hash) == handle.payload
            blocks = [pool.block(i) for i in range(pool.total_blocks)]
            registered = {
                block.sequence_hash: block.payload for block in blocks if block.state is BlockState.REGISTERED
            }
            assert {each: payload_of(each) for each in pool.registered_hashes()} == registered

    @invariant()
    def events_name_what_is_resident(self):
        for event in self.sink.router_events[:]:
            assert self.next_id == event.event.event_id
            self.next_id += 1
            held, data = self.resident[event.storage_tier], event.event.data
            if isinstance(data, Removed):
                assert held >= set(data.block_hashes)
                held -= set(data.block_hashes)
            else:
                assert held.isdisjoint(data.block_hashes)
                parents = [data.parent_hash, *data.block_hashes]
                assert parents[:-1] == [BY_HASH[each].parent_sequence_hash for each in data.block_hashes]
                held |= set(data.block_hashes)
        self.sink.take()
        for pool in self.pools.values():
            assert self.resident[pool.block_set.tier] == set(pool.registered_hashes())

    def teardown(self):
        for side in self.pools:
            self.mutable[side].clear()
            self.shared[side].clear()
        self.manager.flush()
        for pool in self.pools.values():
            assert pool.total_blocks == pool.available_blocks


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=examples(80), stateful_step_count=40)


@pytest.mark.parametrize("side", ["device", "host"])
def test_a_new_state_machine_has_all_blocks_free(side):
    machine = Machine()
    assert machine.pools[side].total_blocks == machine.pools[side].counts.free
