"""Reproductions over a hybrid model keep the groups, spans and locations that the failure needs."""

from dataclasses import replace

import pytest
from scenario_files import load_scenarios, play, scenario_text

from pytest_kvmock import RadixIndex, Removed, RouterHarness, Stored
from pytest_kvmock.harness.reduce import reproduce
from pytest_kvmock.values import Located, SparseStored, group_extra

FULL = group_extra(1)
WINDOW = group_extra(0, "sliding_window", 8)


class OneMapForAllGroups(RadixIndex):
    """A router that ignores groups."""

    def apply(self, event):
        super().apply(replace(event, extra=None))


class AsksForEveryParent(RadixIndex):
    """A router that takes the previous block of any group as a block's parent."""

    def apply(self, event):
        data = event.event.data
        if isinstance(data, Stored) and data.parent_hash not in (None, 1):
            raise KeyError(data.parent_hash)
        super().apply(event)


def publish(kv):
    sink = kv.make_sink(residency="counted")
    sink.publish(Stored(None, (90,), (91,)), extra=FULL)
    sink.publish(SparseStored(77, (2,), 8, 4), token_ids=[(1,) * 4, (2,) * 4], extra=WINDOW)
    sink.publish(Located((2, 90)), "host", extra=FULL)
    sink.publish(Stored(None, (1, 2), (11, 12)), extra=FULL)
    sink.publish(Removed((2,)))
    sink.publish(Removed((90,)), extra=FULL)


def test_a_router_that_keeps_groups_apart_has_nothing_to_reproduce():
    kv = RouterHarness(backend=None, index=RadixIndex())
    publish(kv)
    kv.judge()
    assert kv.events.problems == []


@pytest.mark.parametrize(
    ("index", "rule"), [(OneMapForAllGroups, "index_drift"), (AsksForEveryParent, "index_failure")]
)
def test_a_played_reproduction_breaks_the_same_rule_for_a_router_that_ignores_groups(index, rule, failure_of, tmp_path):
    kv = RouterHarness(backend=None, index=index())
    publish(kv)
    kv.judge()
    assert rule in {problem.rule for problem in kv.events.problems}

    cut = reproduce(kv, level="events")
    assert rule == cut.rule
    assert len(cut.events) <= 3
    assert any(isinstance(event.data, SparseStored) for event in cut.events)
    assert rule in failure_of(cut, index())

    file = tmp_path / "groups.kv.yaml"
    file.write_text(scenario_text(cut, "it breaks"))
    (scenario,) = load_scenarios(file)
    played = RouterHarness(backend=None, index=index())
    play(played, scenario, errors_fail=False)
    assert rule in {problem.rule for problem in played.events.problems}
