"""Shared helpers of the block manager tests: managers, and players of recorded programs."""

import random
from dataclasses import dataclass, field
from uuid import UUID

from pytest_kvmock import CapturingSink, Cleared, KvCacheEvent, Removed, StorageTier, Stored
from pytest_kvmock.engines import NoHits, Scheduled
from pytest_kvmock.engines.dynamo.eviction.lineage import LineagePolicy
from pytest_kvmock.engines.dynamo.eviction.lru import LruPolicy
from pytest_kvmock.engines.dynamo.eviction.multi_lru import MultiLruPolicy
from pytest_kvmock.engines.dynamo.host.host_offload import HostOffload
from pytest_kvmock.engines.dynamo.logical import LogicalManager
from pytest_kvmock.engines.dynamo.sequence import ActiveSequence
from pytest_kvmock.values import Deref, Promote, Use, lineage_hash

POLICIES = {
    "lineage": lambda num_blocks: LineagePolicy(),
    "lru": lambda num_blocks: LruPolicy(),
    "multi_lru": MultiLruPolicy,
}


IN_RUNS = ("lineage", "lru")  # the backends whose managers start in runs


def new_manager(backend, num_blocks, block_size=16, *, silent=False, in_runs=True, **options):
    """Return the manager of a backend; with `in_runs=False` it works block by block from the start."""
    sink = None if silent else CapturingSink()
    return LogicalManager(
        backend=backend,
        eviction=POLICIES[backend](num_blocks),
        num_blocks=num_blocks,
        block_size=block_size,
        sink=sink,
        in_runs=in_runs and backend in IN_RUNS,
        **options,
    )


def event_rows(events):
    """Return events in the short form of the recordings."""
    rows = []
    for event in events:
        data = event.data
        if isinstance(data, Stored):
            blocks = [[block, local] for block, local, _ in data.blocks]
            rows.append(["S", event.event_id, data.parent_hash, blocks])
        elif isinstance(data, Cleared):
            rows.append(["C", event.event_id])
        else:
            rows.append(["R", event.event_id, list(data.block_hashes)])
    return rows


def publish_rows(sink, rows):
    """Publish recorded events as a custom engine would."""
    for kind, event_id, *rest in rows:
        if kind == "S":
            parent, blocks = rest
            sink(KvCacheEvent(event_id, Stored(parent, *map(tuple, zip(*blocks, strict=True)))))
        else:
            sink(KvCacheEvent(event_id, Removed(tuple(*rest))))


def state_of(manager):
    """Return a manager's visible state, to check that it did not change."""
    return (
        manager.active_blocks,
        manager.inactive_blocks(),
        sorted(manager.resident()),
        manager.metrics(),
        list(manager.sink.events),
    )


@dataclass
class Player:
    """Plays the operations of a recorded program on one of our managers."""

    manager: LogicalManager
    sequences: dict = field(default_factory=dict)
    partials: dict = field(default_factory=dict)
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def block(self, name):
        if not isinstance(name, str):
            return name
        if name not in self.partials:
            self.partials[name] = UUID(int=self.rng.getrandbits(128), version=4)
        return self.partials[name]

    def blocks(self, names):
        return [self.block(name) for name in names]

    def play(self, operation):
        """Execute one operation and return its row: value, events, active, references, inactive."""
        kind, *arguments = operation
        value = getattr(self, f"play_{kind}")(*arguments)
        manager = self.manager
        events = event_rows(manager.sink.take())
        counts = [manager.num_active_blocks, manager.num_active_block_refs, manager.num_inactive_blocks]
        return [value, events, *counts]

    def send(self, moves):
        for move in moves:
            self.manager.process(move)
        return len(moves)

    def play_use(self, names, local_hashes, plhs, parent):
        plhs = [lineage_hash(*plh) for plh in plhs]
        return self.manager.process(Use(self.blocks(names), local_hashes, plhs, None, self.block(parent)))

    def play_deref(self, names):
        return self.manager.process(Deref(self.blocks(names)))

    def play_promote(self, partial, block, parent, local_hash, plh):
        move = Promote(self.block(partial), block, parent, local_hash, lineage_hash(*plh))
        return self.manager.process(move)

    def play_new(self, name, tokens, max_output):
        sequence = ActiveSequence(tokens, max_output, self.manager.block_size, rng=self.rng)
        self.sequences[name] = sequence
        return len(sequence.unique_blocks)

    def play_alloc(self, name, target):
        sequence = self.sequences[name]
        before = sequence.num_allocated_tokens
        if target <= before:
            return [0, 0]
        move = sequence.prepare_allocation(target)
        if move is None:
            sequence.commit_allocation(target)
            return [0, 0]
        served = self.manager.process(move)
        if served < len(move.blocks):
            size = self.manager.block_size
            target = min(target, (-(-before // size) + served) * size)
        sequence.commit_allocation(target)
        return [len(move.blocks), served]

    def play_push(self, name, token):
        sequence = self.sequences[name]
        for move in sequence.push(token):
            if not self.manager.process(move):
                sequence.pop()
                return False
        sequence.commit_allocation(len(sequence))
        return True

    def play_free(self, name):
        return self.send(self.sequences.pop(name).free_signal())

    def play_reset(self, name):
        return self.send(self.sequences[name].reset_with_signal())

    def play_cost(self, name):
        return list(self.manager.prefill_cost(self.sequences[name]))


def tier_rows(sink):
    """Return captured events in the short form of the recordings; a last item names a tier other than the device."""
    rows = event_rows(sink.events)
    for row, event in zip(rows, sink.router_events, strict=True):
        if event.storage_tier != StorageTier.DEVICE:
            row.append({"host_pinned": "HostPinned"}[event.storage_tier])
    sink.take()
    return rows


def host_of(config):
    """Return the host engine of a recorded program."""
    return HostOffload(
        config["num_g2_blocks"],
        block_bytes=config.get("block_size_bytes") or 0,
        batch_size=config.get("offload_batch_size", 32),
        to_host_gbps=config.get("g1_to_g2_gbps", 14.0),
        to_device_gbps=config.get("g2_to_g1_gbps", 14.0),
    )


@dataclass
class OffloadPlayer(Player):
    """Plays the operations of a program recorded with an offload engine."""

    swaps: dict = field(default_factory=dict)

    @classmethod
    def of(cls, program):
        backend, size = program.get("backend", "lineage"), program.get("block_size", 4)
        return cls(new_manager(backend, program["capacity"], size, offload=host_of(program["offload"])))

    def play(self, operation):
        kind, *arguments = operation
        value = getattr(self, f"play_{kind}")(*arguments)
        manager = self.manager
        counts = [manager.num_active_blocks, manager.num_active_block_refs, manager.num_inactive_blocks]
        return [value, tier_rows(manager.sink), *counts]

    def play_tick(self, now):
        self.manager.tick(now)

    def play_deadline(self):
        return self.manager.offload_deadline()

    def play_swap_in(self, name, plhs, now):
        outcome = self.manager.swap_in([lineage_hash(*plh) for plh in plhs], now)
        if isinstance(outcome, Scheduled):
            before, self.swaps[name] = self.swaps.get(name), outcome
            if before is not None:
                self.manager.put_down(before)
            return ["scheduled", outcome.num_blocks]
        return "no_hits" if isinstance(outcome, NoHits) else "blocked"

    def play_swapped(self, name):
        return self.swaps[name].is_complete

    def play_drop(self, name):
        self.manager.put_down(self.swaps.pop(name))
