"""Recorded streams of Dynamo's manager with its offload engine: they break no rule, and the index finds each tier."""

import gzip
import json
from pathlib import Path

import pytest

from pytest_kvmock import KvCacheEvent, Removed, RouterEvent, StorageTier, Stored
from pytest_kvmock.oracle import RadixIndex
from pytest_kvmock.oracle.hygiene.entries import Counted
from pytest_kvmock.oracle.hygiene.ledger import Ledger
from pytest_kvmock.oracle.index.index import ParentBlockNotFound

DATA = Path(__file__).parents[2] / "data"
DEVICE, HOST, *_ = StorageTier
PROGRAMS = {
    f"{name}-{program.get('name', program.get('seed'))}": program
    for name in ("offload", "offload_swaps")
    for program in json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))["programs"]
}


def events_of(program):
    """Yield each recorded event, with whether requests caused it: blocks moved by hand have their own hashes."""
    for operation, answer, *rest in program["steps"]:
        if isinstance(answer, dict):
            return
        for kind, event_id, *about in rest[0]:
            tier = HOST if about[-1] == "HostPinned" else DEVICE
            if kind == "S":
                data = Stored(about[0], *map(tuple, zip(*about[1], strict=True)))
            else:
                data = Removed(tuple(about[0]))
            yield RouterEvent(0, KvCacheEvent(event_id, data), tier, chained=operation[0] in ("alloc", "push"))


def orphans_of(program):
    """Yield the events that store a block on the device under a missing parent: moves by hand sometimes promote one."""
    device = set()
    for event in events_of(program):
        data = event.event.data
        if event.storage_tier is DEVICE and isinstance(data, Stored):
            if data.parent_hash is not None and data.parent_hash not in device:
                yield event
            device.update(data.block_hashes)
        elif event.storage_tier is DEVICE:
            device.difference_update(data.block_hashes)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_recorded_stream_of_two_tiers_breaks_no_rule(program):
    ledger = Ledger()
    host = program["offload"]["num_g2_blocks"]
    ledger.open((0, 0), first_id=0, num_blocks=program["capacity"], tier_blocks={HOST: host})
    problems = []
    for event in events_of(program):
        problems += ledger.take(event)
    problems += ledger.take(Counted())
    promoted = [event.event.event_id for event in orphans_of(program)]
    assert [("parent_block_not_found", event_id) for event_id in promoted] == [
        (problem.rule, problem.event_id) for problem in problems if problem.is_error
    ]


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_the_index_finds_the_blocks_of_each_tier(program):
    index, held, chains = RadixIndex(), {DEVICE: set(), HOST: set()}, {None: ()}
    refused = list(orphans_of(program))
    for event in events_of(program):
        if event in refused:
            with pytest.raises(ParentBlockNotFound):
                index.apply(event)
            return
        index.apply(event)
        data, blocks = event.event.data, held[event.storage_tier]
        if isinstance(data, Removed):
            blocks.difference_update(data.block_hashes)
        else:
            parent = data.parent_hash
            for block, local in zip(data.block_hashes, data.tokens_hashes, strict=True):
                chains[block] = (*chains[parent], (block, local))
                parent = block
            blocks.update(data.block_hashes)
        chain = chains[data.block_hashes[-1]]
        expected, depth = {}, 0
        for tier in (DEVICE, HOST):
            start = depth
            while depth < len(chain) and chain[depth][0] in held[tier]:
                depth += 1
            if depth > start:
                expected[tier] = {(0, 0): depth - start}
        assert index.find_tiered(local for _, local in chain) == expected
    assert {tier: len(blocks) for tier, blocks in held.items()} == {t: index.num_blocks(0, tier=t) for t in held}


def test_many_recorded_streams_offload_a_child_before_its_parent():
    tail_first = set()
    for name, program in PROGRAMS.items():
        host = set()
        for event in events_of(program):
            data = event.event.data
            if event.storage_tier is HOST and isinstance(data, Stored):
                host.update(data.block_hashes)
                if data.parent_hash is not None and data.parent_hash not in host:
                    tail_first.add(name)
    assert sum(any(orphans_of(program)) for program in PROGRAMS.values()) == 3
    assert tuple(sum(name.startswith(f"{file}-") for name in PROGRAMS) for file in ("offload", "offload_swaps")) == (
        24,
        40,
    )
    assert len(tail_first) > 30
