"""The KV cache trace in the log: off by default, on at any time, one line for each allocation and eviction."""

import logging

import pytest

from pytest_kvmock import CapturingSink, RouterHarness, create_manager

LOGGER = "pytest_kvmock.cache"


def manager_of(num_blocks=4, sink=None):
    return create_manager("lineage", num_blocks=num_blocks, block_size=4, sink=sink)


def traced(caplog):
    return [record for record in caplog.records if record.name == LOGGER]


def test_nothing_is_logged_unless_somebody_asks(caplog):
    caplog.set_level(logging.INFO)
    manager_of().use([1, 2, 3])

    assert [] == traced(caplog)


def test_allocation_and_eviction_are_logged_with_pool_sizes(caplog):
    caplog.set_level(logging.DEBUG, LOGGER)
    manager = manager_of()
    manager.use([1, 2, 3])
    manager.deref(3, 2, 1)
    manager.use([7, 8])

    sizes = "dp_rank=0 block_size=4 free_blocks={} active_blocks={} inactive_blocks={} total_blocks=4 utilization={}"
    assert [
        f"KV cache trace event=allocation {sizes.format(1, 3, 0, '0.750')} backend=lineage block_ids=[1, 2, 3]",
        f"KV cache trace event=allocation {sizes.format(0, 2, 2, '1.000')} backend=lineage block_ids=[7, 8]",
        f"KV cache trace event=eviction {sizes.format(0, 2, 2, '1.000')} backend=lineage block_ids=[3]",
    ] == [record.getMessage() for record in traced(caplog)]


def test_the_fields_are_attributes_of_the_record(caplog):
    caplog.set_level(logging.DEBUG, LOGGER)
    manager_of().use([1, 2])

    (record,) = traced(caplog)
    assert (logging.DEBUG, "allocation", 2, 2, 0, 4, [1, 2]) == (
        record.levelno,
        record.event,
        record.free_blocks,
        record.active_blocks,
        record.inactive_blocks,
        record.total_blocks,
        record.block_ids,
    )


def test_a_partial_block_is_logged_when_it_is_promoted(caplog):
    caplog.set_level(logging.DEBUG, LOGGER)
    with RouterHarness() as kv:
        kv.worker(0).serve([1] * 8, output_tokens=16)

    assert ["allocation"] == [record.event for record in traced(caplog)]


def test_it_is_logged_without_a_sink_too_as_in_the_original(caplog):
    with caplog.at_level(logging.DEBUG, LOGGER):
        manager_of(sink=CapturingSink()).use([1])
        manager_of(sink=None).use([1])

    assert 2 == len(traced(caplog))


def test_hits_and_frees_are_no_allocations(caplog):
    manager = manager_of()
    manager.use([1, 2])
    caplog.set_level(logging.DEBUG, LOGGER)
    manager.use([1, 2])
    manager.deref(2, 1)

    assert [] == traced(caplog)


@pytest.mark.parametrize("first", [logging.DEBUG, logging.WARNING])
def test_it_can_be_switched_amid_a_test(caplog, first):
    manager = manager_of()
    caplog.set_level(first, LOGGER)
    manager.use([1])
    caplog.set_level(logging.WARNING if first == logging.DEBUG else logging.DEBUG, LOGGER)
    manager.use([2])

    assert [[1] if first == logging.DEBUG else [2]] == [record.block_ids for record in traced(caplog)]
