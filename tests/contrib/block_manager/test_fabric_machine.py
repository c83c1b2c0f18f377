"""Random traffic between three managers: no block is lost or owned twice, payloads and counts are correct."""

from collections import Counter
from itertools import combinations

import pytest
from block_helpers import MODEL, chain, device_layout, host_layout
from depth import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pytest_kvmock.contrib.block_manager import (
    BlockDescriptorList,
    Fabric,
    KvBlockManager,
    KvBlockManagerConfig,
    KvManagerRuntimeConfig,
    MismatchedWorkerID,
    StaleBlockDescriptor,
    TransferError,
    TransferRequestGet,
    TransferRequestPut,
    WorkerUnreachable,
    as_block_descriptor_set,
)

WORKERS = range(3)
CONTENTS = [*chain(3), *chain(2, 100)]
KINDS = ("mutable", "shared")
workers = st.sampled_from(WORKERS)
sets = st.sampled_from([1, 2])


def address(handle):
    return handle.worker_id, handle.block_set_idx, handle.block_idx


class FabricMachine(RuleBasedStateMachine):
    """Three workers with few blocks each, and the expected contents of each block, by worker, set and number.

    `life` counts how often a block was released with its contents, by the test's own actions and observations, not by
    the block's counter.
    """

    def __init__(self):
        super().__init__()
        self.fabric = Fabric()
        self.managers = [
            KvBlockManager(
                KvBlockManagerConfig(KvManagerRuntimeConfig(worker), MODEL, device_layout(3), host_layout(4)),
                fabric=self.fabric,
            )
            for worker in WORKERS
        ]
        self.fabric.exchange_blocksets()
        self.pools = {(m.worker_id(), pool.block_set.block_set_idx): pool for m in self.managers for pool in m.pools}
        self.mutable = {key: [] for key in self.pools}
        self.shared = {key: [] for key in self.pools}
        self.payloads = {(*key, index): b"" for key, pool in self.pools.items() for index in range(pool.total_blocks)}
        self.life = Counter()
        self.registered = {}  # the sequence hash by address
        self.remote = []  # the requested blocks: a remote block, and the life of its block when it was described
        self.cut = set()
        self.carried = []
        self.written = 0
        for key in self.pools:  # so that transfers are possible from the first step on
            self.allocate(*key, 2)
            for block in self.mutable[key]:
                block.payload = self.payloads[address(block)] = self.fresh()
        for asks in WORKERS:
            for owner, block_set in self.pools:
                if owner != asks:
                    self.ask_for(self.mutable[owner, block_set], asks, writable=True)

    # Positions are drawn, not handles: Hypothesis keeps drawn values, but a handle must be dropped to return its
    # block.

    def some(self, data, values, least=1, most=3):
        if not values:
            return []
        positions = st.lists(st.integers(0, len(values) - 1), min_size=least, max_size=most)
        return [values[position] for position in data.draw(positions)]

    def fresh(self):
        self.written += 1
        return self.written.to_bytes(4, "big") * (1 + self.written % 5)

    def handles(self, worker, kinds=KINDS):
        return [h for kind in kinds for s in (1, 2) for h in getattr(self, kind)[worker, s]]

    # -------------------------------------------------------------------------------------------- each by itself

    @rule(worker=workers, block_set=sets, count=st.integers(1, 3))
    def allocate(self, worker, block_set, count):
        pool = self.pools[worker, block_set]
        for block in pool.allocate_blocks_blocking(min(count, pool.available_blocks)):
            where = address(block)
            if self.registered.pop(where, None) is not None:
                self.life[where] += 1  # it was evicted
            self.payloads[where] = b""
            self.mutable[worker, block_set].append(block)

    @rule(worker=workers, data=st.data())
    def write(self, worker, data):
        for block in self.some(data, self.handles(worker, ["mutable"])):
            block.payload = self.payloads[address(block)] = self.fresh()

    @rule(worker=workers, block_set=sets, content=st.sampled_from(CONTENTS), data=st.data())
    def register(self, worker, block_set, content, data):
        owned = self.mutable[worker, block_set]
        for block in self.some(data, owned, most=1):
            where = address(block)
            owned.remove(block)
            block.apply_token_block(content)
            (shared,) = self.pools[worker, block_set].register_blocks_blocking([block])
            if address(shared) == where:
                self.registered[where] = content.sequence_hash
            else:  # the pool already has the contents, and keeps its own block
                assert self.registered[address(shared)] == content.sequence_hash
                self.life[where] += 1
            self.shared[worker, block_set].append(shared)

    @rule(worker=workers, block_set=sets, content=st.sampled_from(CONTENTS))
    def match(self, worker, block_set, content):
        found = self.pools[worker, block_set].match_sequence_hashes_blocking([content.sequence_hash])
        present = [where for where, held in self.registered.items() if held == content.sequence_hash]
        assert [w for w in present if w[:2] == (worker, block_set)] == [address(block) for block in found]
        self.shared[worker, block_set] += found

    @rule(worker=workers, block_set=sets, kind=st.sampled_from(KINDS), data=st.data())
    def give_back(self, worker, block_set, kind, data):
        handles = getattr(self, kind)[worker, block_set]
        for block in self.some(data, handles, most=1):
            if kind == "mutable":
                self.life[address(block)] += 1
            handles.remove(block)
            block.close()

    @rule(worker=workers)
    def flush(self, worker):
        manager = self.managers[worker]
        waiting = sum(pool.counts.returning for pool in manager.pools)
        assert waiting == manager.flush().returned

    @rule(worker=workers, block_set=sets)
    def evict_all_that_can_be(self, worker, block_set):
        shared = self.shared[worker, block_set]
        while shared:
            shared.pop().close()
        self.flush(worker)
        self.allocate(worker, block_set, self.pools[worker, block_set].total_blocks)

    # -------------------------------------------------------------------------------------------- between workers

    @rule(
        asks=workers, owner=workers, block_set=sets, kind=st.sampled_from(KINDS), to_write=st.booleans(), data=st.data()
    )
    def describe(self, asks, owner, block_set, kind, to_write, data):  # noqa: PLR0917 - Hypothesis draws them by name
        blocks = self.some(data, getattr(self, kind)[owner, block_set])
        if asks == owner or not blocks:
            return
        self.ask_for(blocks, asks, writable=to_write and kind == "mutable")

    def ask_for(self, blocks, asks, *, writable):
        descriptors = BlockDescriptorList.from_bytes(as_block_descriptor_set(blocks).to_bytes())
        manager = self.managers[asks]
        get = manager.get_remote_blocks_mutable if writable else manager.get_remote_blocks_immutable
        found = get(descriptors)
        assert [address(block) for block in blocks] == [address(block) for block in found]
        self.remote += [(block, asks, writable, self.life[address(block)]) for block in found]

    @rule(pair=st.sampled_from(list(combinations(WORKERS, 2))), turned=st.booleans())
    def cut_or_restore(self, pair, turned):
        link = pair[::-1] if turned else pair
        if pair in self.cut:
            self.fabric.restore_link(*link)
        else:
            self.fabric.cut_link(*link)
        self.cut ^= {pair}

    @rule(worker=workers, changed=st.booleans(), data=st.data())
    def put(self, worker, changed, data):
        chosen = self.some(data, self.asked_for(worker, to_write=True, changed=changed))
        sources = self.some(data, self.handles(worker), least=len(chosen), most=len(chosen)) if chosen else []
        if sources:
            wrong = self.wrong(chosen, worker, to_write=True)
            self.transfer(TransferRequestPut, worker, sources, [entry[0] for entry in chosen], wrong)

    @rule(worker=workers, changed=st.booleans(), data=st.data())
    def get(self, worker, changed, data):
        chosen = self.some(data, self.asked_for(worker, to_write=False, changed=changed))
        targets = self.handles(worker, ["mutable"])
        targets = self.some(data, targets, least=len(chosen), most=len(chosen)) if chosen else []
        if targets:
            wrong = self.wrong(chosen, worker, to_write=False)
            self.transfer(TransferRequestGet, worker, [entry[0] for entry in chosen], targets, wrong)

    @rule(worker=workers, data=st.data())
    def put_among_ones_own(self, worker, data):
        targets = self.some(data, self.handles(worker, ["mutable"]))
        sources = self.some(data, self.handles(worker), least=len(targets), most=len(targets)) if targets else []
        if sources:
            self.transfer(TransferRequestPut, worker, sources, targets, set())

    @rule(worker=workers, other=workers, data=st.data())
    def put_as_another(self, worker, other, data):
        chosen = self.some(data, [e for e in self.remote if e[2] and e[1] == worker], most=1)
        sources = self.some(data, self.handles(other), most=1) if chosen else []
        if sources and other != worker:
            wrong = {MismatchedWorkerID}
            self.transfer(TransferRequestPut, worker, sources, [chosen[0][0]], wrong)

    def asked_for(self, worker, *, to_write, changed):
        """Return the blocks with which a worker may transfer; if `changed`, only those released or registered since."""
        entries = [entry for entry in self.remote if entry[1] == worker and (entry[2] or not to_write)]
        if not changed:
            return entries
        return [
            (b, *rest) for b, *rest in entries if rest[-1] != self.life[address(b)] or address(b) in self.registered
        ]

    def wrong(self, entries, worker, *, to_write):
        errors = set()
        for block, _, _, life in entries:
            where = address(block)
            if tuple(sorted((worker, block.worker_id))) in self.cut:
                errors.add(WorkerUnreachable)
            if life != self.life[where] or (to_write and where in self.registered):
                errors.add(StaleBlockDescriptor)
        return errors

    def transfer(self, kind, worker, sources, destinations, wrong):
        """Execute a request; a wrong one must be refused with its reason, and the invariants check that it had no
        effect.
        """
        origins, targets = [address(block) for block in sources], [address(block) for block in destinations]
        if len(set(targets)) < len(targets) or set(targets) & set(origins):
            wrong = {TransferError}
        request = kind(sources, destinations)
        if wrong:
            with pytest.raises(TransferError) as raised:
                request.execute()
            assert type(raised.value) in wrong
            return
        request.execute()
        moved = [self.payloads[origin] for origin in origins]
        self.payloads.update(zip(targets, moved, strict=True))
        away = Counter(where[0] for where in (*targets, *origins) if where[0] != worker)
        self.carried += [(kind.kind, worker, other, blocks) for other, blocks in away.items()]

    # -------------------------------------------------------------------------------------------------- invariants

    @invariant()
    def every_block_holds_what_was_written(self):
        for key in self.pools:
            for handle in (*self.mutable[key], *self.shared[key]):
                assert self.payloads[address(handle)] == handle.payload
        for (worker, block_set, index), sequence_hash in self.registered.items():
            block = self.pools[worker, block_set].block(index)
            assert (sequence_hash, self.payloads[worker, block_set, index]) == (block.sequence_hash, block.payload)

    @invariant()
    def each_block_has_one_owner_or_several_that_share_it(self):
        for key in self.pools:
            owned = Counter(address(handle) for handle in self.mutable[key])
            assert all(count == 1 for count in owned.values())
            assert not owned.keys() & {address(handle) for handle in self.shared[key]}

    @invariant()
    def counts_add_up(self):
        for key, pool in self.pools.items():
            counts = pool.counts
            held = {address(handle) for handle in (*self.mutable[key], *self.shared[key])}
            assert len(held) == counts.active
            assert counts.total == counts.free + counts.inactive + counts.active + counts.returning
            present = [held for where, held in self.registered.items() if where[:2] == key]
            assert sorted(present) == sorted(pool.registered_hashes())

    @invariant()
    def the_fabric_knows_what_it_carried(self):
        assert self.carried == [transfer[:4] for transfer in self.fabric.transfers]

    def teardown(self):
        for key, pool in self.pools.items():
            for handle in (*self.mutable[key], *self.shared[key]):
                handle.close()
            pool.flush()
            assert (pool.counts.active, pool.counts.returning) == (0, 0)
            assert pool.total_blocks == pool.available_blocks


TestFabricMachine = FabricMachine.TestCase
TestFabricMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
