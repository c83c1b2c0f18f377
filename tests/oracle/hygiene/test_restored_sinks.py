"""A sink whose manager removes a block that it holds has drift, unless the sink declares `restores`."""

import pytest

from pytest_kvmock import EngineProfile, EventRulesBroken, Removed, RouterHarness, Stored


def publish(**options):
    with RouterHarness(EngineProfile(block_size=4)) as kv:
        sink = kv.make_sink(**options)
        sink.compare(lambda: [1])
        for data in (Stored(None, (1,), (11,)), Stored(None, (1,), (11,)), Removed((1,))):
            sink(data)
        kv.events.assert_no_event_errors()
        return [problem.rule for problem in kv.events.problems]


def test_a_removed_of_a_held_block_that_was_stored_again_is_drift():
    with pytest.raises(EventRulesBroken, match="engine_drift"):
        publish()


def test_restores_makes_a_removed_of_a_restored_block_a_warning():
    assert "evicted_and_restored" in publish(restores=True)


def test_restores_must_be_a_bool():
    with RouterHarness(EngineProfile(block_size=4)) as kv:
        with pytest.raises(ValueError, match=r"make_kv_sink: restores must be True or False, got 'yes'"):
            kv.make_sink(restores="yes")
        kv.make_sink(restores=True)
