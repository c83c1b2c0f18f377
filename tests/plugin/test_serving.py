"""The fixtures `kv_server` and `_kvmock_servers`: a test's own workers behind sockets, with the usual verdict."""

import pytest

CLIENT = """
import http.client
import json
import pytest


def ask(url, body, close=True):
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    if not close:
        return connection
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer

"""


@pytest.fixture
def client(pytester):
    def write(test):
        pytester.makepyfile(CLIENT + test)

    return write


def test_events_of_served_engines_are_judged(nested, client):
    client(
        """
@pytest.mark.kv_dialects("vllm-0.33", "sglang-0.5.23")
@pytest.mark.kvmock(workers=2)
def test_hit(kv_server, kv_events):
    text = kv_server.text(4)
    for worker in (0, 0, 1):
        ask(kv_server.url(worker), {"prompt": text, "max_tokens": 1})
    assert [each.overlap for each in kv_server.requests] == [{}, {0: 4}, {0: 4}]
    assert len(set(kv_events.stored_blocks)) == 4


@pytest.mark.kv_dialects("vllm-0.33")
def test_loss(_kvmock_servers, kv_harness):
    server = _kvmock_servers(log=5)
    kv_harness.drop_next()
    for _ in range(2):
        ask(server.url(), {"prompt": server.text(2), "max_tokens": 1})


@pytest.fixture
def opened():
    connections = []
    yield connections
    connections[0].close()


@pytest.mark.kv_dialects("vllm-0.33")
def test_open(opened, kv_server):
    kv_server.hold()
    opened.append(ask(kv_server.url(), {"prompt": "abc"}, close=False))
    kv_server.wait_requests(open=1)


@pytest.mark.kv_dialects("vllm-0.33")
def test_twice(_kvmock_servers):
    _kvmock_servers()
    _kvmock_servers()


@pytest.mark.kv_dialects("vllm-0.33")
def test_stepped(kv_server, kv_engine):
    kv_engine.step()
"""
    )
    result = nested()
    result.assert_outcomes(passed=3, failed=3)
    result.stdout.fnmatch_lines_random(
        [
            "*event_id_gap*",
            "*1 leaked_requests*",
            "*is driven by a KvServer already*",
            "*step of <MockEngine*: a KvServer drives it while it serves*",
        ]
    )


def test_a_served_engine_that_raises_fails_the_test(nested, client):
    client(
        """
def bad_pass(now_ms):
    raise ZeroDivisionError("no time")


@pytest.mark.kv_dialects("vllm-0.33")
def test_broken(kv_server, kv_engine):
    kv_engine.inside.start_pass = bad_pass
    assert "error" in ask(kv_server.url(), {"prompt": "abc", "max_tokens": 1})
"""
    )
    result = nested()
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["kvmock: kv_server: worker 0 rank 0 is broken: ZeroDivisionError: no time"])


def test_an_unused_answer_or_cut_fails_the_test(nested, client):
    client(
        """
@pytest.mark.kv_dialects("vllm-0.33")
def test_unused(kv_server):
    kv_server.answer(0, 503, times=2)
    kv_server.cut(0)
    assert "error" in ask(kv_server.url(), {"prompt": "abc", "max_tokens": 1})


@pytest.mark.kv_dialects("vllm-0.33")
def test_failed(kv_server):
    kv_server.answer(0, 503)
    assert not kv_server.urls
"""
    )
    result = nested()
    result.assert_outcomes(passed=1, failed=1, errors=1)
    text = "kvmock: kv_server: planned answers that no request got: worker 0: answer 503 (1 left); worker 0: cut after 0 chunks"  # noqa: E501
    result.stdout.fnmatch_lines([text.replace("[", "[[]")])
