"""Faults of the wire, batch by batch: the sent batches, the batches of a replay, and the recorded injections."""

import msgspec
import pytest
from depth import each_parameter

from pytest_kvmock.wire import DIALECTS
from pytest_kvmock.wire.sockets.wire_faults import UNKNOWN_FIELD, Numbered, WireFaults, WireInjection

RANKS = 3


def check_rank(rank):
    if not 0 <= rank < RANKS:
        raise ValueError(f"no rank {rank}")
    return rank


class Publisher:
    """A minimal publisher: it numbers batches, and records the results of the faults."""

    def __init__(self, dialect="vllm-0.33"):
        self.faults = WireFaults(DIALECTS[dialect], self.restart, check_rank)
        self.numbers = dict.fromkeys(range(RANKS), 0)

    def restart(self, dp_rank):
        for rank in self.numbers if dp_rank is None else [dp_rank]:
            if self.numbers[rank]:
                self.faults.begun_anew(rank)
            self.numbers[rank] = 0

    def publish(self, rank=0, payload=b"\x93payload"):
        batch = Numbered(self.numbers[rank], payload)
        self.numbers[rank] += 1
        return self.faults.strike(rank, batch)

    def numbers_of(self, count, rank=0):
        """Return for each of `count` batches the sent numbers and the kept number."""
        found = []
        for _ in range(count):
            number, outcome = self.numbers[rank], self.publish(rank)
            found.append(
                ([number], number)
                if outcome is None
                else ([each.number for each in outcome.sent], outcome.kept and outcome.kept.number)
            )
        return found


@pytest.fixture
def publisher():
    return Publisher()


# The request of a fault; the sent and kept numbers of the next batches; the number of injections.
FAULTS = {
    "lose": (lambda faults: faults.lose(), [([], 0), ([1], 1)], 1),
    "lose two": (lambda faults: faults.lose(2), [([], 0), ([], 1), ([2], 2)], 2),
    "double": (lambda faults: faults.double(), [([0, 0], 0), ([1], 1)], 1),
    "reorder": (lambda faults: faults.reorder(), [([], 0), ([1, 0], 1), ([2], 2)], 2),
    "gap_beyond_buffer": (lambda faults: faults.gap_beyond_buffer(), [([], None), ([1], 1)], 1),
    "late_join": (lambda faults: faults.late_join(), [([], 0), ([1], 1)], 1),
    "slow_subscriber": (lambda faults: faults.slow_subscriber(), [([], 0), ([], 1), ([0, 2], 2), ([3], 3)], 3),
    "slow_subscriber of more": (
        lambda faults: faults.slow_subscriber(2, 3),
        [([], 0), ([], 1), ([], 2), ([], 3), ([], 4), ([0, 1, 5], 5), ([6], 6)],
        6,
    ),
    "one after the other": (
        lambda faults: (faults.lose(), faults.double()),
        [([], 0), ([1, 1], 1), ([2], 2)],
        2,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_exactly_n_batches(publisher, fault):
    ask, expected, injected = FAULTS[fault]
    ask(publisher.faults)
    assert publisher.numbers_of(len(expected)) == expected
    assert [*range(injected)] == [each.batch for each in publisher.faults.injected]
    assert publisher.faults.unused == []


@pytest.mark.parametrize(
    "name",
    ["lose", "double", "gap_beyond_buffer", "late_join", "corrupt", "unknown_tag", "unknown_medium", "extra_field"],
)
def test_the_number_of_batches_of_a_fault_must_be_at_least_one(publisher, name):
    for wrong in (0, -1, "two", True):
        with pytest.raises(ValueError, match=f"^batches must be an integer of at least 1, got {wrong!r}$"):
            getattr(publisher.faults, name)(wrong)
    assert publisher.faults.unused == []


@pytest.mark.parametrize("name", ["queued", "lost"])
def test_slow_subscriber_requires_at_least_one_queued_and_one_lost_batch(publisher, name):
    with pytest.raises(ValueError, match=f"^{name} must be an integer of at least 1, got 0$"):
        publisher.faults.slow_subscriber(**{name: 0})


def test_a_fault_of_a_rank_waits_for_a_batch_of_that_rank(publisher):
    publisher.faults.lose(dp_rank=1)
    publisher.faults.double()
    assert publisher.numbers_of(2, rank=0) == [([0, 0], 0), ([1], 1)]
    assert publisher.numbers_of(2, rank=1) == [([], 0), ([1], 1)]
    assert [(each.fault, each.dp_rank) for each in publisher.faults.injected] == [("double", 0), ("lose", 1)]


@pytest.mark.parametrize("fault", ["reorder", "slow_subscriber"])
def test_reordered_batches_belong_to_the_first_rank_that_publishes(publisher, fault):
    getattr(publisher.faults, fault)()
    publisher.publish(2)
    assert publisher.numbers_of(2, rank=0) == [([0], 0), ([1], 1)]
    publisher.numbers_of(2, rank=2)
    assert {each.dp_rank for each in publisher.faults.injected} == {2}


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("truncates", [False, True])
def test_without_a_fault_of_batches_no_batch_is_changed(publisher, rank, truncates):
    if truncates:
        publisher.faults.truncate_replay()
    assert publisher.publish(rank) is None


def test_unused_faults_are_listed_with_their_counts(publisher):
    publisher.faults.lose(3)
    publisher.faults.double()
    publisher.faults.truncate_replay()
    publisher.publish()
    left = "truncate_replay (no replay was long enough to cut)"
    assert ["lose (2 batches left)", "double (1 batch left)", left] == publisher.faults.unused
    assert repr(publisher.faults) == "<WireFaults: 1 injected, 3 not used yet>"


def test_a_corrupt_batch_starts_with_an_invalid_msgpack_byte_and_is_intact_in_a_replay(publisher):
    publisher.faults.corrupt()
    outcome = publisher.publish(payload=b"\x93abc")
    assert ((Numbered(0, b"\xc1abc"),), Numbered(0, b"\x93abc"), False) == outcome


def test_gap_beyond_buffer_drops_older_batches(publisher):
    publisher.faults.gap_beyond_buffer()
    assert publisher.publish().forgets_older


EVENT = {"array": ["BlockRemoved", [1]], "map": {"type": "BlockRemoved", "block_hashes": [1]}}


@pytest.mark.parametrize("dialect", ["vllm-0.19", "vllm-0.33"])
def test_unknown_tag_and_extra_field_change_a_sent_batch_and_its_replay(dialect):
    form = DIALECTS[dialect].form
    publisher = Publisher(dialect)
    publisher.faults.unknown_tag()
    publisher.faults.extra_field()
    for expected in (
        [["BlockPinned"] if form == "array" else {"type": "BlockPinned"}, EVENT[form]],
        [[*EVENT["array"], UNKNOWN_FIELD] if form == "array" else {**EVENT["map"], UNKNOWN_FIELD: True}],
        None,
    ):
        outcome = publisher.publish(payload=msgspec.msgpack.encode([5.0, [EVENT[form]], 0]))
        if expected is None:
            assert None is outcome
        else:
            ((sent,), kept, _) = outcome
            assert (kept, msgspec.msgpack.decode(sent.payload)) == (sent, [5.0, expected, 0])


STORED = {
    "vllm-0.19": ["BlockStored", [7, 8], None, [1, 2], 1, None, "GPU", None],
    "vllm-0.33": {"type": "BlockStored", "block_hashes": [7, 8], "medium": "GPU"},
}
LEFT = {
    "vllm-0.19": ["BlockRemoved", [7, 8], "KVMOCK_TAPE"],
    "vllm-0.33": {"type": "BlockRemoved", "block_hashes": [7, 8], "medium": "KVMOCK_TAPE"},
}


@pytest.mark.parametrize("dialect", STORED)
@each_parameter
def test_unknown_medium_adds_a_removed_of_an_unknown_medium_before_and_after_a_stored(dialect):
    publisher = Publisher(dialect)
    publisher.faults.unknown_medium()
    ((sent,), kept, _) = publisher.publish(payload=msgspec.msgpack.encode([5.0, [STORED[dialect]], 0]))
    expected = [5.0, [LEFT[dialect], STORED[dialect], LEFT[dialect]], 0]
    assert (sent, msgspec.msgpack.decode(sent.payload)) == (kept, expected)


def test_unknown_medium_is_refused_for_a_dialect_without_a_medium():
    with pytest.raises(ValueError, match=r"^unknown_medium: events of vllm-0.9 have no medium$"):
        Publisher("vllm-0.9").faults.unknown_medium()


def test_restarts_are_counted_by_rank_and_default_to_the_rank_that_published(publisher):
    publisher.publish(1)
    publisher.faults.restart()
    assert [WireInjection("restart", 1, 0, 1)] == publisher.faults.injected
    publisher.faults.restart(dp_rank=2)
    assert WireInjection("restart", 2, 0, 0) == publisher.faults.injected[-1]
    publisher.publish(1)
    publisher.faults.restart(dp_rank=1)
    assert (WireInjection("restart", 1, 0, 2), 2, 0) == (
        publisher.faults.injected[-1],
        publisher.faults.restarts(1),
        publisher.faults.restarts(0),
    )


def test_a_fault_injected_after_a_restart_records_the_restart_count(publisher):
    publisher.publish()
    publisher.restart(None)
    publisher.faults.lose()
    publisher.publish()
    assert [WireInjection("lose", 0, 0, 1)] == publisher.faults.injected


@pytest.mark.parametrize(
    ("after", "end_marker", "expected", "batch"),
    [
        (0, True, ([], True), 4),
        (1, True, ([4], True), 5),
        (1, False, ([4], False), 5),
        (2, False, ([4, 5], False), 6),
        (9, False, ([4, 5], False), 6),
    ],
)
def test_truncate_replay_cuts_a_replay_after_the_given_number_of_batches(publisher, after, end_marker, expected, batch):
    publisher.faults.truncate_replay(after, end_marker=end_marker)
    batches = [Numbered(4, b""), Numbered(5, b"")]
    sent, marker = publisher.faults.truncated(1, batches)
    assert ([each.number for each in sent], marker) == expected
    assert [WireInjection("truncate_replay", 1, batch)] == publisher.faults.injected
    assert (batches, True) == publisher.faults.truncated(1, batches)


def test_truncate_replay_can_drop_only_the_end_marker_of_an_empty_replay(publisher):
    publisher.faults.truncate_replay(end_marker=False)
    assert publisher.faults.truncated(0, []) == ([], False)
    assert [WireInjection("truncate_replay", 0, 0)] == publisher.faults.injected


def test_invalid_arguments_of_truncate_replay_are_refused(publisher):
    with pytest.raises(ValueError, match=r"^after must be an integer of at least 0, got -1$"):
        publisher.faults.truncate_replay(-1)
    with pytest.raises(ValueError, match=r"^end_marker must be True or False, got 'no'$"):
        publisher.faults.truncate_replay(end_marker="no")
    assert publisher.faults.unused == []


def test_late_join_is_refused_after_the_first_batch(publisher):
    publisher.publish()
    with pytest.raises(ValueError, match=r"^late_join must be requested before the first batch is published"):
        publisher.faults.late_join()
