"""`LocalIndex` and `RouterCursor` against recordings of Dynamo's own (kv-router 1.2.1)."""

import gzip
import json
from contextlib import suppress
from pathlib import Path

import pytest

from pytest_kvmock import KvCacheEvent, RouterEvent, Stored
from pytest_kvmock.oracle import Events, InvalidRange, RadixIndex, RadixIndexError, RouterCursor, TooNew, TreeDump
from pytest_kvmock.oracle.index.recovery import LocalIndex

DATA = Path(__file__).parents[2] / "data" / "kv_router_1.2.1_recovery.json.gz"
RECORDED = json.loads(gzip.decompress(DATA.read_bytes()))
KINDS = {kind.__name__: kind for kind in (Events, InvalidRange, TooNew, TreeDump)}


def events_of(values):
    return tuple(RouterEvent(0, KvCacheEvent.from_dict(value)) for value in values)


def recorded_answer(value):
    ((name, fields),) = value.items()
    if "events" in fields:
        fields = {**fields, "events": events_of(fields["events"])}
    return KINDS[name](**fields)


def built_by(events):
    """Return the blocks that events build. A dump of 1.2.1 may be an older one plus the later events."""
    index = RadixIndex()
    for event in events:
        with suppress(RadixIndexError):
            index.apply(event)
    return {event.event.data for event in index.dump_events()}


@pytest.mark.parametrize("run", RECORDED["runs"], ids=range(len(RECORDED["runs"])))
def test_a_worker_gives_the_same_answers_as_dynamos(run):
    index = LocalIndex(run["ring"])
    for step in run["steps"]:
        if "apply" in step:
            index.apply(*events_of([step["apply"]]))
            continue
        expected, answer = recorded_answer(step["answer"]), index.get_events_in_id_range(*step["ask"])
        if isinstance(expected, TreeDump):
            assert (type(answer), answer.last_event_id) == (TreeDump, expected.last_event_id)
            assert built_by(answer.events) == built_by(expected.events)
        else:
            assert answer == expected


def test_the_recording_has_every_kind_of_answer_many_times():
    kinds = [kind for run in RECORDED["runs"] for step in run["steps"] for kind in step.get("answer", ())]
    assert all(kinds.count(kind) > 20 for kind in KINDS)


@pytest.mark.parametrize(("last", "got", "observed"), RECORDED["cursor"])
def test_a_cursor_reacts_to_ids_like_dynamos(last, got, observed):
    cursor = RouterCursor()
    stored = Stored(None, (1,), (1,))
    if last is not None:
        first = RouterEvent(0, KvCacheEvent(last, stored))
        cursor.answered(cursor.observe(first).ask, TreeDump((first,), last))
    step = cursor.observe(RouterEvent(0, KvCacheEvent(got, stored)))
    means = {
        "Stale": (False, False),
        "Contiguous": (True, False),
        "Gap": (False, True),
        "Initial": (True, True),
    }
    assert means[observed] == (step.apply != (), step.ask is not None)
