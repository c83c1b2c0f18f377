"""Recording a live engine: the capture contains everything that it publishes, with a replay from the start."""

import json
import threading

import pytest

from pytest_kvmock import Cleared, EngineProfile, Removed, RouterHarness, Stored
from pytest_kvmock.servers import CaptureError, check_file, record
from pytest_kvmock.wire.sockets import KvPublisher
from pytest_kvmock.wire.sockets.endpoints import EndpointError

PROFILE = EngineProfile(block_size=4, num_blocks=16)


class Engine:
    """A worker over a real socket: it serves requests before and after the first subscription."""

    def __init__(self, publisher, backend="vllm", before=3, after=5):
        self.publisher, self.after = publisher, after
        self.kv = RouterHarness(PROFILE, None)
        self.kv.add_sink(publisher, worker_id=0)
        self.kv.inside.use_backend(backend)
        self.serve(before)
        self.thread = threading.Thread(target=self.run)

    def serve(self, requests):
        for _ in range(requests):
            with self.publisher.step():
                self.kv.worker(0).serve(self.kv.prompt(3))

    def run(self):
        self.publisher.wait_subscribed()
        self.serve(self.after)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *raised):
        self.thread.join()


@pytest.mark.parametrize(
    ("dialect", "backend"), [("vllm-0.33", "vllm"), ("vllm-0.19", "vllm_0_19"), ("sglang-0.5.22", "sglang")]
)
def test_a_live_engine_is_recorded_from_the_start(tmp_path, dialect, backend):
    with KvPublisher(dialect) as publisher, Engine(publisher, backend) as engine:
        recorded = record(
            publisher.endpoints[0],
            tmp_path / "a.jsonl",
            dialect=dialect,
            replay=publisher.replay_endpoints[0],
            batches=8 + (backend == "sglang"),  # sglang starts with a Cleared
        )

    checked = check_file(tmp_path / "a.jsonl")
    assert [entry.event for entry in engine.kv.events] == [entry.event for entry in checked.log]
    assert [] == checked.problems == recorded.lost
    assert checked.is_clean
    assert dialect == checked.header["engine"]["dialect"]


def test_a_recording_without_a_replay_starts_with_the_first_batch_that_arrives(tmp_path):
    with KvPublisher("vllm-0.33") as publisher, Engine(publisher) as engine:
        recorded = record(publisher.endpoints[0], tmp_path / "a.jsonl", batches=5)

    stored = [entry.event.event.data for entry in recorded.log][:1]
    assert recorded.lost == []
    assert stored == [entry.event.event.data for entry in list(engine.kv.events)[3:4]]


def test_lost_and_unreadable_batches_are_in_the_capture(tmp_path):
    with KvPublisher("vllm-0.33") as publisher:

        def run():
            publisher.wait_subscribed()
            publisher.publish(Stored(None, (5,), (15,)), token_ids=[[1, 2]])
            publisher.faults.lose()
            publisher.publish(Cleared())
            publisher.publish(Removed((9,)))
            publisher.faults.corrupt()
            publisher.publish(Removed((5,)))
            publisher.publish(Cleared())

        thread = threading.Thread(target=run)
        thread.start()
        recorded = record(publisher.endpoints[0], tmp_path / "a.jsonl", batches=3)
        thread.join()

    checked = check_file(tmp_path / "a.jsonl")
    assert recorded.lost[:1] == ["rank 0: batch 1 did not arrive"]
    assert recorded.unreadable == checked.unreadable
    assert len(checked.unreadable) >= 1
    assert not checked.is_clean
    assert checked.errors[0].observed == "batch 1 did not arrive"
    assert [problem.observed for problem in recorded.log.problems] == [each.observed for each in checked.log.problems]


@pytest.mark.parametrize("replay", [True, False])
def test_a_recording_in_another_dialect_ends_and_is_not_clean(tmp_path, replay):
    with KvPublisher("vllm-0.33") as publisher, Engine(publisher):
        endpoint = publisher.replay_endpoint if replay else None
        recorded = record(
            publisher.endpoint, tmp_path / "a.jsonl", dialect="vllm-0.23", replay=endpoint, batches=5, seconds=30
        )

    assert 5 <= recorded.batches <= 8
    assert "it reads as vllm-0.24, vllm-0.28, vllm-0.33" in recorded.lost[0]
    assert not check_file(tmp_path / "a.jsonl").is_clean


def test_ranks_are_recorded_from_consecutive_ports(tmp_path):
    with KvPublisher("vllm-0.33", ranks=2) as publisher:

        def run():
            publisher.wait_subscribed()
            for rank in (0, 1):
                publisher.publish(_of_rank(rank, Stored(None, (5,), (15,))))

        thread = threading.Thread(target=run)
        thread.start()
        record(publisher.endpoints[0], tmp_path / "a.jsonl", ranks=2, batches=2)
        thread.join()

    checked = check_file(tmp_path / "a.jsonl")
    assert {entry.event.event.dp_rank for entry in checked.log} == {0, 1}
    assert checked.problems == []


def _of_rank(rank, data):
    from pytest_kvmock import KvCacheEvent, RouterEvent

    return RouterEvent(0, KvCacheEvent(0, data, rank), token_ids=[[1, 2]])


def test_an_interrupt_ends_a_recording_and_keeps_its_events(tmp_path):
    def interrupt(_):
        raise KeyboardInterrupt

    with KvPublisher("vllm-0.33") as publisher:
        recorded = record(publisher.endpoints[0], tmp_path / "a.jsonl", progress=interrupt)

    assert recorded.batches == 0
    assert check_file(tmp_path / "a.jsonl").complete


def test_a_recording_ends_after_its_seconds(tmp_path):
    with KvPublisher("vllm-0.33") as publisher:
        assert record(publisher.endpoints[0], tmp_path / "a.jsonl", seconds=0.01).batches == 0


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"dialect": "vllm-1"}, ValueError, "unknown dialect 'vllm-1'"),
        ({"batches": 0}, ValueError, "batches must be an integer of at least 1, got 0"),
        ({"seconds": -1.0}, ValueError, "seconds must be a finite number of at least 0"),
        ({"ranks": 0}, ValueError, "ranks must be"),
    ],
)
def test_wrong_arguments_of_record_are_refused_and_nothing_is_written(tmp_path, given, kind, message):
    with pytest.raises(kind, match=message):
        record("tcp://127.0.0.1:5557", tmp_path / "a.jsonl", **given)
    assert list(tmp_path.iterdir()) == []


def test_an_invalid_endpoint_is_refused(tmp_path):
    with pytest.raises(EndpointError):
        record("nowhere", tmp_path / "a.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(CaptureError, match="cannot be written"):
        record("tcp://127.0.0.1:5557", tmp_path)


def test_a_capture_is_json_lines(tmp_path):
    with KvPublisher("vllm-0.33") as publisher, Engine(publisher):
        record(publisher.endpoints[0], tmp_path / "a.jsonl", batches=1)
    kinds = [next(iter(json.loads(line))) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert kinds[:3] == ["kvmock_capture", "stream", "event"]
    assert kinds[-1] == "end"
