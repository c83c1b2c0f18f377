"""Pauses, sleeps, resets and aborts of served engines by their routes, and the resulting events."""

import threading

import pytest
from depth import each_parameter
from served import call, complete

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.engines.backends import speaker_of
from pytest_kvmock.servers import KvServer
from pytest_kvmock.wire import find_dialect

VLLM, SGLANG = "vllm-0.33", "sglang-0.5.22"


@pytest.fixture
def serving(request):
    dialect = getattr(request, "param", VLLM)
    profile = EngineProfile(block_size=16, num_blocks=64, workers=1)
    with RouterHarness(profile, speaker_of(find_dialect(dialect))) as harness, KvServer(harness, dialect) as server:
        yield harness, server


def post(server, path, body=None):
    return call(server.url(0), path, {} if body is None else body)


def kinds(harness, start):
    return [each.event.data.kind for each in list(harness.events)[start:]]


class Open:
    """An open request in its own thread."""

    def __init__(self, server, prompt, **body):
        self.found = None

        def ask():
            self.found = call(server.url(0), "/v1/completions", {"prompt": prompt, "max_tokens": 8, **body})

        self.thread = threading.Thread(target=ask)
        self.thread.start()
        server.wait_requests(open=1)

    def result(self):
        self.thread.join(10)
        return self.found


def held_after(server, steps=2):
    """Return an open request of which a held engine has run `steps` passes."""
    server.hold()
    request = Open(server, server.text(3))
    server.step(steps)
    return request


def test_no_event_is_published_between_sleep_and_the_next_step(serving):
    harness, server = serving
    complete(server.url(0), server.text(3))
    start = len(harness.events)
    assert post(server, "/sleep?level=1")[0] == 200
    assert call(server.url(0), "/is_sleeping") == (200, {"is_sleeping": True})
    assert (
        'vllm:engine_sleep_state{engine="0",model_name="mock-model",sleep_state="weights_offloaded"} 1.0'
        in (call(server.url(0), "/metrics")[1])
    )
    status, answer = post(server, "/v1/completions", {"prompt": server.text(2), "max_tokens": 1})
    assert (status, answer["error"]["message"]) == (503, "The engine is asleep. Please try again later.")
    harness.assert_in_sync()
    assert post(server, "/wake_up")[0] == 200
    assert kinds(harness, start) == []
    complete(server.url(0), server.text(2))
    assert kinds(harness, start) == ["cleared", "stored"]
    harness.assert_in_sync()
    assert list(harness.events.errors) == []


def test_a_pause_in_abort_mode_ends_all_requests(serving):
    harness, server = serving
    request = held_after(server)
    assert post(server, "/pause") == (200, {"status": "paused"})
    status, answer = request.result()
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")
    assert call(server.url(0), "/is_paused") == (200, {"is_paused": True})
    server.release()
    assert post(server, "/resume") == (200, {"status": "resumed"})
    complete(server.url(0), server.text(2))
    harness.assert_in_sync()


def test_a_pause_in_wait_mode_clears_after_the_last_request(serving):
    harness, server = serving
    request = held_after(server)
    start = len(harness.events)
    assert post(server, "/pause?mode=wait") == (200, {"status": "paused"})
    server.release()
    assert request.result()[1]["choices"][0]["finish_reason"] == "length"
    assert "cleared" not in kinds(harness, start)
    post(server, "/resume")
    complete(server.url(0), server.text(2))
    assert "cleared" in kinds(harness, start)


@pytest.mark.parametrize(("clears", "expected"), [("true", ["cleared", "stored"]), ("false", [])])
@each_parameter
def test_a_pause_in_keep_mode_freezes_requests_and_computes_them_again_after_a_clear(serving, clears, expected):
    harness, server = serving
    request = held_after(server)
    start = len(harness.events)
    post(server, f"/pause?mode=keep&clear_cache={clears}")
    server.release()
    assert (request.found, kinds(harness, start)) == (None, [])
    post(server, "/resume")
    status, answer = request.result()
    assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
    assert kinds(harness, start)[: len(expected)] == expected
    harness.assert_in_sync()
    assert list(harness.events.errors) == []


def test_a_reset_with_running_requests_computes_them_again(serving):
    harness, server = serving
    request = held_after(server)
    start = len(harness.events)
    assert post(server, "/reset_prefix_cache") == (200, {"success": False})
    assert post(server, "/reset_prefix_cache?reset_running_requests=true") == (200, {"success": True})
    server.release()
    assert request.result()[0] == 200
    assert kinds(harness, start)[:2] == ["cleared", "stored"]


@pytest.mark.parametrize("serving", [SGLANG], indirect=True)
def test_sglang_aborts_by_the_prefix_of_a_request_id(serving):
    _, server = serving
    server.hold()
    found = {}

    def ask(rid):
        body = {"input_ids": [*range(40)], "rid": rid, "sampling_params": {"max_new_tokens": 4}}
        found[rid] = call(server.url(0), "/generate", body)

    threads = [threading.Thread(target=ask, args=(rid,)) for rid in ("a-1", "b-1")]
    for each in threads:
        each.start()
    server.wait_requests(open=2)
    assert post(server, "/abort_request", {"rid": "a"})[0] == 200
    threads[0].join(10)
    assert found["a-1"][1]["meta_info"]["finish_reason"]["type"] == "abort"
    server.release()
    threads[1].join(10)
    assert found["b-1"][1]["meta_info"]["completion_tokens"] == 4


@pytest.mark.parametrize("serving", [SGLANG], indirect=True)
@pytest.mark.parametrize(("mode", "flushed"), [("retract", 200), ("in_place", 400)])
@each_parameter
def test_sglang_can_be_flushed_in_a_pause_that_retracts(serving, mode, flushed):
    harness, server = serving
    request = held_after(server)
    start = len(harness.events)
    assert post(server, "/pause_generation", {"mode": mode})[0] == 200
    assert call(server.url(0), "/flush_cache")[0] == flushed
    assert ("cleared" in kinds(harness, start)) is (flushed == 200)
    server.release()
    assert post(server, "/continue_generation")[0] == 200
    assert request.result()[0] == 200
    harness.assert_in_sync()


@pytest.mark.parametrize("serving", [SGLANG], indirect=True)
def test_sglang_flushes_when_it_becomes_idle_in_time_and_refuses_a_second_flush(serving):
    harness, server = serving
    url, request = server.url(0), held_after(server)
    start, found = len(harness.events), []
    flush = threading.Thread(target=lambda: found.append(call(url, "/flush_cache?timeout=10")))
    flush.start()
    busy = (400, "Another flush_cache is already in progress.")
    server.publisher(0).settle(lambda: call(url, "/flush_cache") == busy)
    assert (found, "cleared" in kinds(harness, start)) == ([], False)
    server.release()
    flush.join(10)
    assert request.result()[0] == 200
    assert [status for status, _ in found] == [200]
    assert kinds(harness, start)[-1] == "cleared"
    harness.assert_in_sync()


@pytest.mark.parametrize("serving", [SGLANG], indirect=True)
@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("", "Flush cache failed.\n"),
        ("?timeout=0.05", "Timed out waiting for idle state."),
        ("?timeout=-1", "Input should be greater than or equal to 0"),
        ("?timeout=soon", "Input should be a valid number"),
    ],
)
@each_parameter
def test_a_flush_that_is_impossible_names_the_reason(serving, query, text):
    _, server = serving
    request = held_after(server)
    status, answer = call(server.url(0), f"/flush_cache{query}")
    assert (status, text in str(answer)) == (400, True)
    server.release()
    assert request.result()[0] == 200


@pytest.mark.parametrize("serving", [SGLANG], indirect=True)
def test_an_idle_sglang_clears_when_it_releases_memory(serving):
    harness, server = serving
    complete(server.url(0), server.text(3))
    start = len(harness.events)
    assert post(server, "/release_memory_occupation")[0] == 200
    assert kinds(harness, start) == ["cleared"]
    assert post(server, "/resume_memory_occupation")[0] == 200
    complete(server.url(0), server.text(3))


def test_an_unknown_pause_mode_is_refused(serving):
    status, answer = post(serving[1], "/pause?mode=stop")
    assert (status, answer["error"]["message"]) == (400, "mode must be one of 'abort', 'wait', 'keep', got 'stop'")
