"""The KV cache trace in the log: off by default, switchable at any time, one line per allocation and eviction."""

import logging
import os
import subprocess
import sys
import time
from uuid import UUID

import pytest

from pytest_kvmock import CapturingSink, RouterHarness, create_manager
from pytest_kvmock.engines.base.cache_trace import is_asked_for
from pytest_kvmock.values import Use

LOGGER = "pytest_kvmock.engines"
DYNAMO = ("lineage", "lru", "multi_lru")


def manager_of(backend="lineage", num_blocks=4, **options):
    return create_manager(backend, num_blocks=num_blocks, block_size=4, **options)


def traced(caplog):
    return [record for record in caplog.records if record.name == LOGGER]


def rows(caplog):
    """Return event, tier, blocks, and the active and inactive block counts of each trace line."""
    return [
        (record.event, record.tier, record.block_ids, record.active_blocks, record.inactive_blocks)
        for record in traced(caplog)
    ]


def lines(caplog):
    """Return the lines without their time."""
    return [record.getMessage().replace(f"={record.timestamp_ms} ", "=T ") for record in traced(caplog)]


def test_the_trace_is_off_by_default(caplog):
    caplog.set_level(logging.INFO)
    manager_of().use([1, 2, 3])

    assert traced(caplog) == []


@pytest.mark.parametrize("backend", DYNAMO)
def test_allocations_and_evictions_are_logged_as_in_1_2_1_with_backend_tier_and_blocks(caplog, backend):
    caplog.set_level(logging.DEBUG, LOGGER)
    manager = manager_of(backend)
    manager.use([1, 2, 3])
    manager.deref(3, 2, 1)
    manager.use([7, 8])

    head = "KV cache trace engine_type=vllm event={} timestamp_ms=T dp_rank=0 block_size=4 "
    sizes = "free_blocks={} active_blocks={} inactive_blocks={} total_blocks=4 utilization={} "
    tail = f"backend={backend} tier=device block_ids=[{{}}]"
    line = head + sizes + tail
    assert [
        line.format("allocation", 1, 3, 0, "0.750", "1, 2, 3"),
        line.format("allocation", 0, 2, 2, "1.000", "7, 8"),
        line.format("eviction", 0, 2, 2, "1.000", "3"),
    ] == lines(caplog)


def test_hash_cache_logs_each_eviction_as_1_0_2_with_the_sizes_of_that_moment(caplog):
    caplog.set_level(logging.DEBUG, LOGGER)
    manager = manager_of("hash_cache", dp_rank=3)
    manager.use([1, 2, 3, 4])
    manager.deref(1, 2, 3)
    caplog.clear()
    manager.process(Use((5, 2, 6), (5, 2, 6)))

    line = (
        "KV cache trace event={} timestamp_ms=T block_ids=[{}] block_size=4 free_blocks_after={} active_blocks={} "
        "inactive_blocks={} total_blocks=4 dp_rank=3"
    )
    assert [
        line.format("eviction", "1", 1, 1, 2),  # 5 takes its place, then 2 is reactivated
        line.format("eviction", "3", 1, 3, 0),
        line.format("allocation", "5, 6", 0, 4, 0),
    ] == lines(caplog)


def test_a_failed_use_of_hash_cache_logs_its_evictions(caplog):
    manager = manager_of("hash_cache", num_blocks=2)
    manager.use([1, 2])
    manager.deref(1)
    caplog.set_level(logging.DEBUG, LOGGER)

    assert manager.process(Use((3, 4), (3, 4))) == 0
    assert rows(caplog) == [("eviction", "device", [1], 1, 0)]


def test_an_evicted_partial_block_is_not_logged(caplog):
    manager = manager_of("hash_cache", num_blocks=2)
    partial = UUID(int=1, version=4)
    manager.use([1, partial])
    manager.deref(partial, 1)
    caplog.set_level(logging.DEBUG, LOGGER)
    manager.use([2, 3])

    assert rows(caplog) == [("eviction", "device", [1], 1, 0), ("allocation", "device", [2, 3], 2, 0)]


def test_a_block_that_one_use_evicts_and_stores_again_is_logged_as_both(caplog):
    manager = manager_of("hash_cache", num_blocks=2)
    manager.use([1, 2])
    manager.deref(1, 2)
    caplog.set_level(logging.DEBUG, LOGGER)
    manager.process(Use((3, 1), (3, 1)))

    assert rows(caplog) == [
        ("eviction", "device", [1], 0, 1),
        ("eviction", "device", [2], 1, 0),
        ("allocation", "device", [3, 1], 2, 0),
    ]


def test_blocks_of_one_destroy_are_logged_as_one_eviction(caplog):
    manager = manager_of("hash_cache")
    manager.use([1, 2, 3])
    caplog.set_level(logging.DEBUG, LOGGER)
    manager.destroy(3, 2)

    assert rows(caplog) == [("eviction", "device", [3, 2], 1, 0)]


@pytest.mark.parametrize("backend", DYNAMO)
def test_host_allocations_and_evictions_are_logged_with_the_sizes_of_the_device(caplog, backend):
    caplog.set_level(logging.DEBUG, LOGGER)
    manager = manager_of(backend, num_blocks=2, tiers={"host": 1})
    manager.use([1])
    manager.use([2])
    manager.deref(1)
    manager.deref(2)
    manager.use([3])  # evicts 1, which is copied at the next tick; only then is its slot free
    manager.tick(1.0)
    manager.use([3])
    manager.use([4])  # evicts 2; the host evicts 1 for it
    manager.tick(2.0)

    assert rows(caplog) == [
        ("allocation", "device", [1], 1, 0),
        ("allocation", "device", [2], 2, 0),
        ("eviction", "device", [1], 1, 1),
        ("allocation", "host_pinned", [1], 0, 1),
        ("allocation", "device", [3], 1, 1),
        ("eviction", "device", [2], 2, 0),
        ("eviction", "host_pinned", [1], 2, 0),
        ("allocation", "host_pinned", [2], 1, 0),
    ]


def test_the_fields_of_a_trace_line_are_attributes_of_the_log_record(caplog):
    caplog.set_level(logging.DEBUG, LOGGER)
    before = int(time.time() * 1000)
    manager_of().use([1, 2])

    (record,) = traced(caplog)
    assert (
        record.levelno,
        record.event,
        record.free_blocks,
        record.free_blocks_after,
        record.active_blocks,
        record.inactive_blocks,
        record.total_blocks,
        record.utilization,
        record.block_ids,
    ) == (logging.INFO, "allocation", 2, 2, 2, 0, 4, 0.5, [1, 2])
    assert int(record.created * 1000) == record.timestamp_ms
    assert before <= record.timestamp_ms <= time.time() * 1000


def test_a_partial_block_is_logged_when_it_is_promoted(caplog):
    caplog.set_level(logging.DEBUG, LOGGER)
    with RouterHarness() as kv:
        kv.worker(0).serve([1] * 8, output_tokens=16)

    assert [record.event for record in traced(caplog)] == ["allocation"]


@pytest.mark.parametrize("backend", ["hash_cache", "lineage"])
def test_the_trace_is_logged_without_a_sink_as_in_the_original(caplog, backend):
    with caplog.at_level(logging.DEBUG, LOGGER):
        manager_of(backend, sink=CapturingSink()).use([1])
        manager_of(backend, sink=None).use([1])

    assert len(traced(caplog)) == 2


@pytest.mark.parametrize("backend", ["vllm", "sglang", "mocker_sglang_1_6"])
def test_engines_that_take_requests_log_allocations_too(caplog, backend):
    with caplog.at_level(logging.DEBUG, LOGGER), RouterHarness(backend=backend) as kv:
        kv.worker(0).serve([1] * 32)

    (record,) = traced(caplog)
    assert f"KV cache trace event=allocation timestamp_ms={record.timestamp_ms} dp_rank=0" in record.getMessage()
    assert len(record.block_ids) == 2


def test_hits_and_frees_are_not_logged_as_allocations(caplog):
    manager = manager_of()
    manager.use([1, 2])
    caplog.set_level(logging.DEBUG, LOGGER)
    manager.use([1, 2])
    manager.deref(2, 1)

    assert traced(caplog) == []


@pytest.mark.parametrize("first", [logging.DEBUG, logging.WARNING])
def test_the_trace_can_be_switched_on_and_off_during_a_test(caplog, first):
    manager = manager_of()
    caplog.set_level(first, LOGGER)
    manager.use([1])
    caplog.set_level(logging.WARNING if first == logging.DEBUG else logging.DEBUG, LOGGER)
    manager.use([2])

    assert [[1] if first == logging.DEBUG else [2]] == [record.block_ids for record in traced(caplog)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1", True), ("true", True), ("TRUE", True), ("tRuE", True)]
    + [(value, False) for value in (None, "", "0", "2", "01", "yes", "on", "false", " true", "1 ")],
)
def test_the_environment_variable_is_parsed_as_by_dynamo_mocker(value, expected):
    assert is_asked_for(value) == expected


@pytest.mark.parametrize(("value", "expected"), [("1", ["INFO allocation", "WARNING"]), ("0", ["WARNING"])])
def test_the_environment_variable_logs_the_trace_at_info_and_enables_no_debug_lines(value, expected):
    program = """if True:
        import logging
        logging.basicConfig(format="%(levelname)s %(event)s", level=logging.WARNING)
        from pytest_kvmock import create_manager
        create_manager("hash_cache", num_blocks=4).use([1])
        logging.getLogger("pytest_kvmock.engines").debug("never", extra={"event": ""})
        logging.getLogger("pytest_kvmock.engines").warning("as ever", extra={"event": ""})
    """
    environment = {**os.environ, "DYN_MOCKER_KV_CACHE_TRACE": value}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)

    assert [line.strip() for line in run.stderr.splitlines()] == expected
