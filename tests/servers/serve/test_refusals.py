"""Engines that answer with errors, cut connections or drain when a test asks for it."""

import http.client
import json
import threading
from urllib.parse import urlsplit

import pytest
from served import call, chunks, complete

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.engines.backends import speaker_of
from pytest_kvmock.servers import KvServer
from pytest_kvmock.wire import find_dialect


@pytest.fixture
def dialect():
    return "vllm-0.33"


@pytest.fixture
def server(dialect):
    profile = EngineProfile(block_size=16, num_blocks=64, workers=2)
    with (
        RouterHarness(profile, speaker_of(find_dialect(dialect))) as kv,
        KvServer(kv, dialect, ports={"control": 0}) as server,
    ):
        yield server


def connect(server, worker=0):
    return http.client.HTTPConnection(urlsplit(server.url(worker)).netloc, timeout=20)


def send(connection, prompt="abc", **more):
    body = json.dumps({"prompt": prompt, "max_tokens": 4, **more})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})


def test_the_next_requests_get_the_given_answers_and_later_ones_are_served(server):
    server.answer(0, 429, {"Retry-After": "3"}, times=2)
    server.answer(0, 503)
    for status, kind, after in (
        (429, "TooManyRequests", "3"),
        (429, "TooManyRequests", "3"),
        (503, "ServiceUnavailable", None),
    ):
        connection = connect(server)
        send(connection)
        answer = connection.getresponse()
        assert (status, after) == (answer.status, answer.headers["Retry-After"])
        error = json.loads(answer.read())["error"]
        assert (status, kind) == (error["code"], error["type"])
        connection.close()
    assert complete(server.url(0), "abc")
    assert [each.status for each in server.requests] == [429, 429, 503, 200]
    assert server.expect(server.text(1))["blocks"] == []
    assert server.inside.faults_left == []


def test_a_given_answer_applies_to_completions_of_its_worker_only(server):
    server.answer(0, 500)
    assert call(server.url(0), "/health")[0] == 200
    assert call(server.url(0), "/v1/models")[0] == 200
    assert complete(server.url(1), "abc")
    assert call(server.url(0), "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})[0] == 500


@pytest.mark.parametrize("dialect", ["sglang-0.5.23"])
def test_a_given_answer_has_the_form_of_the_engine(server):
    server.answer(0, 503)
    status, answer = call(server.url(0), "/generate", {"text": "abc"})
    assert (status, answer["object"], answer["type"]) == (503, "error", "ServiceUnavailable")


def test_start_ends_an_answer_without_a_count(server):
    server.answer(0, 500, times=None)
    for _ in range(3):
        assert call(server.url(0), "/v1/completions", {"prompt": "abc"})[0] == 500
    assert server.inside.faults_left == []
    server.start(0)
    assert complete(server.url(0), "abc")


@pytest.mark.parametrize("chunks_sent", [1, 2, 4, 9])
def test_a_stream_is_cut_after_the_given_number_of_chunks_and_never_ends(server, chunks_sent):
    server.cut(0, after_chunks=chunks_sent)
    assert complete(server.url(0), "abc")  # a request without streaming is not cut
    connection = connect(server)
    send(connection, stream=True)
    answer = connection.getresponse()
    assert answer.status == 200
    with pytest.raises(http.client.IncompleteRead) as cut:
        answer.read()
    parts, _ = chunks(cut.value.partial.decode() + "data: [DONE]")
    assert min(chunks_sent, 4) == len(parts)
    connection.close()
    row = server.requests[-1]
    assert (row.status, row.aborted, row.called_off) == (None, True, False)
    server.wait_requests(open=0)
    _, text = call(server.url(0), "/v1/completions", {"prompt": "abc", "stream": True})
    assert chunks(text)[1]


def test_a_streamed_chat_is_cut_after_its_role(server):
    server.cut(0, after_chunks=1)
    connection = connect(server)
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    with pytest.raises(http.client.IncompleteRead) as cut:
        connection.getresponse().read()
    assert cut.value.partial.count(b"data: ") == 1
    assert b'"role":"assistant"' in cut.value.partial
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_can_be_cut_before_any_byte_is_sent(server, stream):
    server.cut(0)
    connection = connect(server)
    send(connection, stream=stream)
    with pytest.raises(ConnectionError):
        connection.getresponse()
    connection.close()
    assert [(each.status, each.aborted, each.called_off) for each in server.requests] == [(None, True, False)]
    assert complete(server.url(0), "abc")


def test_refused_and_cut_requests_leave_nothing_open(server):
    server.answer(0, 500)
    server.cut(0)
    server.cut(0, after_chunks=2)
    assert call(server.url(0), "/v1/completions", {"prompt": "abc"})[0] == 500
    for _ in range(2):
        connection = connect(server)
        send(connection, stream=True)
        with pytest.raises((ConnectionError, http.client.IncompleteRead)):
            connection.getresponse().read()
        connection.close()
    server.wait_requests(open=0)
    assert not server.harness.worker(0).requests


@pytest.mark.parametrize(
    ("method", "arguments", "text"),
    [
        ("answer", (0, 200), "answer: status must be one of an error, an integer from 400 to 599, got 200"),
        ("answer", (0, "503"), "answer: status must be one of an error, an integer from 400 to 599, got '503'"),
        ("answer", (0, True), "answer: status must be one of an error, an integer from 400 to 599, got True"),
        ("answer", (0, 503, {}, 0), "answer: times must be an integer of at least 1, got 0"),
        ("answer", (0, 503, {"a b": "c"}), "answer: 'a b' is not the name of a header"),
        ("answer", (0, 503, {"": "c"}), "answer: '' is not the name of a header"),
        ("answer", (0, 503, {"a": "b\r\nc: d"}), "answer: header 'a' must be printable ASCII, got 'b\\r\\nc: d'"),
        ("answer", (0, 503, {"Content-Length": "0"}), "answer: header 'Content-Length' says how an answer is sent"),
        ("answer", (0, 503, {"Retry-After": 1}), "answer: headers must be names with texts, as in "),
        ("answer", (0, 503, "Retry-After: 1"), "answer: headers must be names with texts, as in "),
        ("answer", (7, 503), "KvServer: there is no worker 7; there are 0, 1"),
        ("cut", (0, -1), "cut: after_chunks must be an integer of at least 0, got -1"),
        ("cut", (0, None), "cut: after_chunks must be an integer of at least 0, got None"),
        ("cut", (7,), "KvServer: there is no worker 7; there are 0, 1"),
        ("drain", (7,), "KvServer: there is no worker 7; there are 0, 1"),
    ],
)
def test_an_impossible_refusal_is_refused_in_one_line_and_changes_nothing(server, method, arguments, text):
    with pytest.raises((ValueError, TypeError)) as refused:
        getattr(server, method)(*arguments)
    assert str(refused.value).startswith(text)
    assert "\n" not in str(refused.value)
    assert server.inside.faults_left == []
    assert complete(server.url(0), "abc")


def test_the_control_api_offers_refusals_cuts_and_drains(server):
    control = server.control_url
    assert call(control, "/answer", {"worker": 0, "status": 429, "headers": {"Retry-After": "1"}, "times": 2}) == (
        200,
        {"done": True},
    )
    assert call(control, "/cut", {"worker": 1, "after_chunks": 1}) == (200, {"done": True})
    assert call(control, "/verdict")[1]["faults_left"] == [
        "worker 0: answer 429 (2 left)",
        "worker 1: cut after 1 chunk",
    ]
    assert call(control, "/answer", {"worker": 0, "status": 99}) == (
        400,
        {"error": "answer: status must be one of an error, an integer from 400 to 599, got 99"},
    )
    assert call(control, "/cut", {"worker": 0, "after_chunks": -1})[0] == 400
    assert call(control, "/drain", {"worker": 0}) == (200, {"done": True})
    with pytest.raises(ConnectionRefusedError):
        complete(server.url(0), "abc")
    assert call(control, "/start", {"worker": 0}) == (200, {"done": True})
    assert complete(server.url(0), "abc")


# ---------------------------------------------------------------------------------------------------------- draining


def held(server, answers):
    """Let worker 0 hold a request; return the thread of its client."""
    server.hold(0)
    thread = threading.Thread(target=lambda: answers.append(complete(server.url(0), "abc", 3)))
    thread.start()
    server.wait_requests(open=1)
    return thread


def test_a_draining_vllm_completes_open_requests_and_refuses_connections(server):
    answers = []
    idle = connect(server)
    send(idle)
    assert idle.getresponse().read()
    thread = held(server, answers)
    server.drain(0)
    server.drain(0)  # a second time is no error
    with pytest.raises(ConnectionRefusedError):
        complete(server.url(0), "abc")
    assert idle.sock.recv(1) == b""  # the idle connection is closed
    server.release(0)
    thread.join()
    assert len(answers) == 1
    assert complete(server.url(1), "abc")
    idle.close()


def test_a_drained_worker_starts_again_with_its_cached_blocks(server):
    text = server.text(2)
    complete(server.url(0), text)
    server.drain(0)
    server.start(0)
    complete(server.url(0), text)
    assert server.requests[-1].overlap == {0: 2}
    server.drain(0)
    server.stop(0)
    server.start(0)
    assert complete(server.url(0), text)


def test_start_ends_a_drain_while_a_request_is_open(server):
    answers = []
    thread = held(server, answers)
    server.drain(0)
    server.start(0)
    server.release(0)
    thread.join()
    assert len(answers) == 1
    assert complete(server.url(0), "abc")


@pytest.mark.parametrize("dialect", ["sglang-0.5.23"])
def test_a_draining_sglang_is_unhealthy_and_refuses_connections_once_nothing_is_open(server):
    answers = []
    thread = held(server, answers)
    server.drain(0)
    assert [call(server.url(0), path)[0] for path in ("/health", "/health_generate")] == [503, 503]
    late = connect(server)
    send(late)
    server.wait_requests(open=2)
    server.release(0)
    thread.join()
    assert late.getresponse().status == 200
    late.close()
    server.publisher(1).settle(lambda: refuses(server))
    server.start(0)
    assert call(server.url(0), "/health")[0] == 200


def refuses(server):
    try:
        call(server.url(0), "/health")
    except ConnectionError:
        return True
    return False


@pytest.mark.parametrize("dialect", ["sglang-0.5.23"])
def test_an_idle_sglang_drains_at_once(server):
    server.drain(0)
    with pytest.raises(ConnectionRefusedError):
        call(server.url(0), "/health")
