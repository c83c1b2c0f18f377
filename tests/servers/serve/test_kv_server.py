"""Mock engines behind HTTP and ZMQ, as a router process and a test use them."""

import asyncio
import http.client
import json
import socket
import threading
from urllib.parse import urlsplit

import pytest
from served import cached, call, chunks, complete

from pytest_kvmock import EngineProfile, EventRulesBroken, RouterHarness
from pytest_kvmock.engines import RequestError
from pytest_kvmock.engines.backends import speaker_of
from pytest_kvmock.servers import CaptureError, KvServer
from pytest_kvmock.wire import find_dialect
from pytest_kvmock.wire.sockets import KvSubscriber
from pytest_kvmock.wire.sockets.endpoints import EndpointError


def harness(workers=2, dialect="vllm-0.33", **profile):
    sizes = {"block_size": 16, "num_blocks": 64, "workers": workers, **profile}
    return RouterHarness(EngineProfile(**sizes), speaker_of(find_dialect(dialect)))


@pytest.fixture
def kv():
    with harness() as kv:
        yield kv


@pytest.fixture
def server(kv):
    with KvServer(kv, ports={"control": 0}) as server:
        yield server


def test_a_prompt_is_cached_only_at_the_worker_that_served_it(server):
    text = server.text(4)
    first, again = complete(server.url(0), text), complete(server.url(0), text)
    elsewhere = complete(server.url(1), text)
    assert [cached(each) for each in (first, again, elsewhere)] == [0, 48, 0]
    assert first["choices"] == again["choices"] == elsewhere["choices"]  # equal prompts, equal answers
    assert [(each.worker, each.overlap, each.cached_tokens) for each in server.requests] == [
        (0, {}, 0),
        (0, {0: 4}, 48),
        (1, {0: 4}, 0),
    ]
    assert server.routing.elsewhere == 1
    assert server.routing.of_best == 0.5


def test_a_second_turn_reuses_the_first_one_with_its_answer(server):
    turns = [{"role": "user", "content": server.text(2)}]
    _, first = call(server.url(0), "/v1/chat/completions", {"messages": turns, "max_tokens": 40})
    said = first["choices"][0]["message"]["content"]
    assert len(said) == 40
    assert said.isalpha()
    turns += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    _, second = call(server.url(0), "/v1/chat/completions", {"messages": turns, "max_tokens": 1})
    assert cached(second) == (first["usage"]["total_tokens"] - 1) // 16 * 16


def test_a_streamed_answer_has_one_part_per_token_and_ends_correctly(server):
    options = {"max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
    _, text = call(server.url(0), "/v1/completions", {"prompt": "abc", **options})
    parts, ended = chunks(text)
    assert ended
    whole = complete(server.url(0), "abc", 5)
    assert "".join(each["choices"][0]["text"] for each in parts[:-1]) == whole["choices"][0]["text"]
    assert [each["choices"][0]["finish_reason"] for each in parts[:-1]] == [None] * 4 + ["length"]
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"] == whole["usage"]
    _, text = call(server.url(0), "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **options})
    parts, ended = chunks(text)
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert ended
    assert len(parts) == 1 + 5 + 1


def test_choices_are_returned_in_order(server):
    answer = complete(server.url(0), ["ab", "cd", "efg"], 3, n=2)
    assert [each["index"] for each in answer["choices"]] == list(range(6))
    texts = [each["text"] for each in answer["choices"]]
    assert texts[0] == texts[1] == complete(server.url(0), "ab", 3)["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["completion_tokens"] == 18


def test_one_batch_per_pass_is_published_before_the_first_token(kv, server):
    publisher = server.publisher(0)
    events = []
    with KvSubscriber(publisher.endpoints, events.append, dialect=server.dialect) as subscriber:
        publisher.wait_subscribed()
        text = server.text(4)
        complete(server.url(0), text, 1)
        subscriber.receive(1)
        assert [len(each.event.data.block_hashes) for each in events] == [4]
    assert publisher.batches() == 1
    assert server.expect(text)["last_batch"][0] == {"worker": 0, "rank": 0, "number": 0}


def test_adapters_and_salts_share_no_blocks():
    with harness(1) as kv, KvServer(kv, adapters=["lora"]) as server:
        text = server.text(3)
        for more in ({}, {"model": "lora"}, {"cache_salt": "a"}):
            assert cached(complete(server.url(0), text, **more)) == 0
        assert cached(complete(server.url(0), text, model="lora")) == 32
        _, models = call(server.url(0), "/v1/models")
        assert [(each["id"], each["parent"]) for each in models["data"]] == [
            ("mock-model", None),
            ("lora", "mock-model"),
        ]


def test_a_rank_can_be_requested_by_header_or_body():
    with harness(1, dp_size=2) as kv, KvServer(kv) as server:
        text = server.text(3)
        complete(server.url(0), text, data_parallel_rank=1)
        status, answer = call(
            server.url(0), "/v1/completions", {"prompt": text, "max_tokens": 1}, headers={"X-data-parallel-rank": "1"}
        )
        assert (status, cached(answer)) == (200, 32)
        assert {each.rank for each in server.requests} == {1}
        assert [row for row in server.expect(text)["blocks"] if row["rank"] == 0] == []
        status, answer = call(server.url(0), "/v1/completions", {"prompt": text, "data_parallel_rank": 2})
        assert status == 400
        assert "out of range [0, 2)" in answer["error"]["message"]


def test_held_requests_queue_up_and_continue_after_release(server):
    server.hold(0)
    text, threads, answers = server.text(2), [], []
    for _ in range(3):
        threads.append(threading.Thread(target=lambda: answers.append(complete(server.url(0), text, 2))))
        threads[-1].start()
    server.wait_requests(open=3)
    assert "vllm:num_requests_waiting" in call(server.url(0), "/metrics")[1]
    assert call(server.url(0), "/load")[1] == {"server_load": 3}
    server.step(1, 0)
    assert not answers
    assert call(server.url(0), "/load")[1] == {"server_load": 3}
    server.release(0)
    for thread in threads:
        thread.join()
    assert len(answers) == 3
    with pytest.raises(TimeoutError, match=r"^0 requests are open after 0.01 s, 2 were waited for$"):
        server.wait_requests(open=2, timeout=0.01)


def test_a_client_that_disconnects_aborts_its_request(kv, server):
    server.hold(0)
    for stream in (True, False):
        connection = http.client.HTTPConnection(urlsplit(server.url(0)).netloc, timeout=20)
        body = json.dumps({"prompt": "abc", "max_tokens": 100, "stream": stream})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        server.wait_requests(open=1)
        connection.close() if not stream else connection.sock.close()
        server.wait_requests(open=0)
    assert [(each.aborted, each.called_off) for each in server.requests] == [(True, True)] * 2
    assert not kv.worker(0).requests
    assert (server.routing.requests, server.routing.called_off) == (2, 2)
    assert call(server.control_url, "/routing")[1]["called_off"] == 2
    assert [row["called_off"] for row in call(server.control_url, "/requests")[1]] == [True, True]


def test_a_full_queue_answers_503():
    with harness(1) as kv, KvServer(kv, max_queued=1) as server:
        server.hold()
        thread = threading.Thread(target=complete, args=(server.url(0), "abc"))
        thread.start()
        server.wait_requests(open=1)
        status, answer = call(server.url(0), "/v1/completions", {"prompt": "x"})
        assert (status, answer["error"]["type"]) == (503, "Service Unavailable")
        assert answer["error"]["message"].startswith("The engine is currently busy")
        server.release()
        thread.join()


def test_check_compares_a_routers_blocks_with_the_truth(server):
    text = server.text(2)
    complete(server.url(1), text)
    truth = server.expect(text)
    assert truth["blocks"] == [{"worker": 1, "rank": 0, "blocks": 2}]
    assert server.check(text, truth["blocks"], truth["last_batch"]) == ""
    wrong = server.check(text, [{"worker": 0, "rank": 0, "blocks": 2}])
    assert wrong == (
        "worker 0 rank 0: the router knows 2 blocks, 0 are held (no batch stored them); worker 1 rank 0: the router "
        "knows 0 blocks, "
        "2 are held (batch 0 stored them: it went to no subscription, no subscriber asked for a replay of it)"
    )
    complete(server.url(0), text)
    old = server.check(text, truth["blocks"], truth["last_batch"])
    assert old == "worker 0: the router answers by no batch, 0 was published"
    assert server.truth.differences == [f"a prompt of 32 tokens: {each}" for each in (wrong, old)]


def test_a_router_that_received_no_batch_never_passes_a_check(server):
    text = server.text(2)
    empty = {"blocks": [], "last_batch": server.expect(text)["last_batch"]}
    assert server.check(text, empty) == ""
    for _ in range(6):
        complete(server.url(0), server.text(2))
    complete(server.url(0), text)
    expected = "worker 0: the router answers by no batch, 6 was published"
    for answer in (empty, lambda: empty):
        assert server.check(text, answer, timeout=0.02) == expected
    assert server.check(text, empty["blocks"], empty["last_batch"]) == expected
    assert server.check(text, list, timeout=0.02).startswith(
        "worker 0 rank 0: the router knows 0 blocks, 2 are held (batch 6 "
    )
    assert len(server.truth.differences) == 4
    rows = [{"worker": 0, "number": 3}]
    for answer in ([], {"blocks": []}, lambda: {"blocks": []}):
        found = server.check(text, answer, rows, timeout=0)
        assert found == "worker 0: the router answers by batch 3, 6 was published"
    with pytest.raises(AssertionError, match=r"^worker 0 rank 0: the router knows 0 blocks, 2 are held \(batch 6 "):
        server.assert_knows(text, [])
    with pytest.raises(
        AssertionError, match=r"^worker 0 rank 0: .* 2 are held \(batch 6 .*\) \(0.02 s after the first question\)$"
    ):
        server.assert_knows(text, list, timeout=0.02)
    assert not call(server.control_url, "/verdict")[1]["right"]


def test_differences_name_ranks_if_a_worker_has_several():
    with harness(1, dp_size=2) as kv, KvServer(kv) as server:
        text = server.text(2)
        rows = server.expect(text)["last_batch"]
        complete(server.url(0), text, data_parallel_rank=1)
        assert server.check(text, [], rows) == "worker 0 rank 1: the router answers by no batch, 0 was published"


def test_a_router_that_lags_is_polled_and_its_last_answer_counts(server):
    text, answers = server.text(2), []
    complete(server.url(0), text)
    truth = server.expect(text)
    lagging = [[], [{"worker": 0, "blocks": 1}], {"blocks": [], "last_batch": []}, truth]

    def ask():
        answers.append(lagging[len(answers)])
        if len(answers) == 1:
            raise AssertionError("it is starting")
        return answers[-1]

    assert server.check(text, ask) == ""
    assert len(answers) == 4
    server.assert_knows(text, lambda: truth["blocks"])
    assert server.truth.differences == []

    def starting():
        raise AssertionError("it is\nstarting")

    assert server.check(text, starting, timeout=0) == "the router gave no answer: it is starting"

    async def coroutine():
        return []

    for answer, error, message in (
        (coroutine, TypeError, "^check takes a probe that answers at once, and got a coroutine$"),
        (lambda: 5, TypeError, "^check: blocks must be rows such as expect returns, "),
        (lambda: {"worker": 0}, TypeError, "^check: blocks must be rows such as expect returns, "),
        (dict, TypeError, "^check: blocks must be rows such as expect returns, "),
        (
            lambda: {"blocks": [], "last_batch": 5},
            TypeError,
            "^check: last_batch must be rows such as expect returns, ",
        ),
        (lambda: 1 / 0, ZeroDivisionError, "division by zero"),
    ):
        with pytest.raises(error, match=message):
            server.check(text, answer)
    with pytest.raises(ValueError, match="timeout must be a finite number of at least 0 seconds, got -1"):
        server.check(text, list, timeout=-1)
    assert len(server.truth.differences) == 1


def test_check_stops_polling_when_the_server_is_closed(kv):
    server = KvServer(kv)
    text = server.text(2)

    def ask():
        server.close()
        return [{"worker": 0, "blocks": 1}]

    with pytest.raises(ValueError, match="this KvServer is closed"):
        server.check(text, ask, timeout=600)


def test_the_control_api_offers_the_methods_of_the_server(server):
    control = server.control_url
    text = call(control, "/text", {"blocks": 2})[1]["text"]
    assert len(text) == 32
    complete(server.url(0), text)
    truth = call(control, "/expect", {"prompt": text})[1]
    assert call(control, "/check", {"prompt": text, **truth})[1] == {"right": True, "differences": ""}
    assert call(control, "/hold", {"worker": 0}) == (200, {"done": True})
    assert call(control, "/release", {}) == (200, {"done": True})
    assert call(control, "/routing")[1]["requests"] == 1
    assert call(control, "/requests")[1][0]["overlap"] == {}
    assert call(control, "/fault", {"worker": 0, "rank": 0, "name": "lose"}) == (200, {"done": True})
    complete(server.url(0), server.text(2))
    assert call(control, "/reset", {}) == (200, {"success": True})
    status, answer = call(control, "/check", {"prompt": text, **truth})
    assert (status, answer["error"], "right" in answer) == (
        409,
        "more was published since last_batch: ask again",
        False,
    )
    assert call(control, "/replays")[1] == []
    verdict = call(control, "/verdict")[1]
    assert verdict["right"]
    assert verdict["requests"] == 2
    for path, body, text in (
        ("/nothing", {}, "unknown path '/nothing'; known: /ready"),
        ("/hold", {"worker": 7}, "hold: KvServer: there is no worker 7; there are 0, 1"),
        ("/check", {"prompt": "x"}, "check: argument 'blocks' is missing"),
        ("/expect", [1], "expect: a body is an object with arguments, got [1]"),
        ("/fault", {"worker": 0, "name": "wrong"}, "fault: unknown fault 'wrong'; known: "),
        (
            "/fault",
            {"worker": 0, "name": "lose", "batch": 1},
            "fault: lose: unknown option 'batch'; did you mean 'batches'?",
        ),
        ("/step", {"n": 0}, "step: n must be"),
        ("/hold", {"wroker": 0}, "hold: unknown argument 'wroker'; did you mean 'worker'?"),
        ("/hold", {"worker": True}, "hold: KvServer: there is no worker True; there are 0, 1"),
        ("/wait_requests", {}, "wait_requests: argument 'open' is missing"),
        ("/reset", {"all": 1}, "reset: unknown argument 'all'; known: worker"),
        ("/text", {"after": 5}, "text: after must be a text, got 5"),
        ("/hold", b"{", "hold: the body is not JSON: "),
        ("/hold", b"[" * 100_000, "hold: the body is not JSON: it is nested deeper than 500"),
        ("/check", {"prompt": "x", "blocks": {"0": 4}}, "check: blocks must be rows such as expect returns, "),
        ("/check", {"prompt": "x", "blocks": False}, "check: blocks must be rows such as expect returns, "),
        ("/check", {"prompt": "x", "blocks": [{"worker": 0}]}, "check: a row of blocks must be as in "),
        ("/check", {"prompt": "x", "blocks": [{"worker": "0", "blocks": 1}]}, "check: a row of blocks must be as in "),
        ("/check", {"prompt": "x", "blocks": [{"worker": 0, "blocks": -1}]}, "check: a row of blocks must be as in "),
        ("/check", {"prompt": "x", "blocks": [], "last_batch": [1]}, "check: a row of last_batch must be as in "),
    ):
        status, answer = call(control, path, body)
        assert status in (400, 404)
        assert answer["error"].startswith(text)
    assert server.truth.differences == []
    large = [5] * 1_000_000  # more than a megabyte
    assert len(call(control, "/expect", {"prompt": large})[1]["tokens"]) == len(large)


READS = ("ready", "expect", "replays", "requests", "routing", "verdict", "wait_subscribed", "wait_requests")
ACTS = (
    *("check", "hold", "release", "fault", "restart", "stop", "start", "reset", "step", "text"),
    *("drain", "answer", "cut"),
)


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS"])
def test_acting_paths_of_the_control_api_accept_only_post(server, method):
    for path in ACTS:
        status, answer = call(server.control_url, f"/{path}", {"worker": 0, "n": 1}, method)
        assert status == 405
        assert answer == ("" if method == "HEAD" else {"error": f"{path}: {method} is not allowed; use POST"})
    for path in READS if method not in ("GET", "HEAD") else ():
        assert call(server.control_url, f"/{path}", {}, method) == (
            405,
            {"error": f"{path}: {method} is not allowed; use GET or POST"},
        )
    assert call(server.control_url, "/verdict")[1]["right"]
    assert not any(loop.held for port in server.inside.ports.values() for loop in port.loops)


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:80"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "localhost.evil.example:1"},
        {"Host": ""},
        {"Host": "[::1"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "http://127.0.0.1"},
        {"Host": "evil.example", "Origin": "http://evil.example"},
    ],
)
def test_a_web_page_in_a_browser_cannot_use_the_control_port(server, headers):
    for path, body, method in (("/hold", {}, None), ("/ready", None, None), ("/nothing", None, None), ("/", {}, "PUT")):
        status, answer = call(server.control_url, path, body, method, headers)
        assert status == 403
        assert "Origin" in answer["error"] if "Origin" in headers else "Host" in answer["error"]
    assert complete(server.url(0), "abc")
    # An engine accepts any host or origin: a proxy passes on the client's.
    assert call(server.url(0), "/v1/models", None, None, headers)[0] == 200


def test_the_control_port_accepts_its_own_host_names(server):
    port = urlsplit(server.control_url).port
    for host in (f"127.0.0.1:{port}", "127.0.0.1", f"localhost:{port}", "LocalHost", "localhost:1"):
        assert call(server.control_url, "/ready", headers={"Host": host})[0] == 200, host
    with socket.create_connection(("127.0.0.1", port)) as plain:  # an HTTP/1.0 client, not a browser
        plain.sendall(b"GET /ready HTTP/1.0\r\n\r\n")
        assert plain.makefile("rb").readline().split()[1] == b"200"


def test_a_request_with_two_host_headers_is_refused(server):
    with socket.create_connection(("127.0.0.1", urlsplit(server.control_url).port)) as plain:
        plain.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert plain.makefile("rb").readline().split()[1] in (b"400", b"403")


def test_the_verdict_lists_faults_that_were_not_injected_yet(server):
    control = server.control_url
    for body in ({"worker": 1, "name": "lose", "batches": 2}, {"worker": 0, "name": "truncate_replay"}):
        assert call(control, "/fault", body)[0] == 200
    left = ["worker 0: truncate_replay (no replay was long enough to cut)", "worker 1: lose (2 batches left)"]
    assert server.inside.faults_left == left
    verdict = call(control, "/verdict")[1]
    assert (verdict["right"], verdict["faults_left"]) == (False, left)
    complete(server.url(1), server.text(2))
    assert call(control, "/verdict")[1]["faults_left"][1:] == ["worker 1: lose (1 batch left)"]
    complete(server.url(1), server.text(2))
    assert call(control, "/verdict")[1]["faults_left"] == left[:1]


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("lose", "batches"),
        ("extra_field", "batches"),
        ("slow_subscriber", "queued"),
        ("slow_subscriber", "lost"),
        ("truncate_replay", "after"),
    ],
)
def test_a_fault_with_too_many_batches_is_refused(server, name, argument):
    fault = {"worker": 0, "name": name}
    for value, text in (
        (10**30, "at most 1073741824, got 1000000000000000000000000000000"),
        (2**30 + 1, "at most 1073741824, got 1073741825"),
        (-1, f"an integer of at least {int(argument != 'after')}, got -1"),
    ):
        answer = call(server.control_url, "/fault", fault | {argument: value})
        assert answer == (400, {"error": f"fault: {argument} must be {text}"})
    assert server.inside.faults_left == []
    assert call(server.control_url, "/fault", fault | {argument: 2**29})[0] == 200


def test_a_restarted_worker_is_empty_and_its_connections_are_closed(kv, server):
    text = server.text(2)
    complete(server.url(0), text)
    server.hold(0)
    failed = []

    def ask():
        try:
            complete(server.url(0), text)
        except (OSError, http.client.HTTPException) as error:
            failed.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    server.wait_requests(open=1)
    server.restart(0)
    thread.join()
    server.release(0)
    assert failed
    assert [(each.status, each.aborted) for each in server.requests] == [(200, False), (None, True)]
    assert (server.routing.called_off, [each.called_off for each in server.requests]) == (0, [False, False])
    assert server.held(text) == {}
    assert cached(complete(server.url(0), text)) == 0
    assert server.publisher(0).batches() == 1


@pytest.mark.parametrize("dialect", ["vllm-0.33", "sglang-0.5.23"])
def test_an_engine_that_raises_is_broken_and_reported_everywhere(dialect, capsys):
    text = "worker 0 rank 1 is broken: ZeroDivisionError: a text of two lines"

    def bad_pass(_now_ms):
        raise ZeroDivisionError("a text\nof two lines")

    with harness(2, dialect, dp_size=2) as kv, KvServer(kv, dialect, ports={"control": 0}) as server:
        url, control = server.url(0), server.control_url
        kv.engine(0, dp_rank=1).inside.start_pass = bad_pass
        server.hold()
        answers = []

        def ask(stream):
            body = {"prompt": "abc", "max_tokens": 2, "stream": stream, "data_parallel_rank": 1}
            answers.append(call(url, "/v1/completions", body))

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        server.wait_requests(open=2)
        server.step()
        for thread in threads:
            thread.join()
        assert sorted(status for status, _ in answers) == [200, 500]  # the stream had already begun
        assert all("ZeroDivisionError: a text of two lines" in str(answer) for _, answer in answers)
        server.step()
        server.release()
        for path in ("/health", "/health_generate" if dialect.startswith("sglang") else "/ping"):
            assert [call(each, path)[0] for each in server.urls] == [503, 200]
        status, answer = call(url, "/v1/completions", {"prompt": "abc", "max_tokens": 2})  # by whatever rank
        assert (status, "ZeroDivisionError" in str(answer)) == (500, True)
        complete(server.url(1), "abc")
        assert [each.status for each in server.requests] == [500, 500, 500, 200]
        verdict = call(control, "/verdict")[1]
        assert (verdict["right"], verdict["broken"], verdict["errors"]) == (False, [text], [])
        status, answer = call(control, "/restart", {"worker": 0})
        assert status == 400
        assert answer["error"].startswith(
            "restart: KvServer: worker 0 is broken and cannot restart (ZeroDivisionError: "
        )
        assert (server.reset(0), server.reset(1)) == (False, True)
        assert server.inside.broken == [text]
    assert capsys.readouterr().err == f"KvServer: {text}\n"
    assert kv.engine(0, dp_rank=1).driver is None
    assert not kv.worker(0, dp_rank=1).requests


def test_a_stopped_worker_refuses_connections_and_returns_at_its_port(server):
    url = server.url(0)
    server.stop(0)
    with pytest.raises(ConnectionError):
        call(url, "/health")
    server.start(0)
    assert call(url, "/health")[0] == 200


@pytest.mark.parametrize(
    ("error", "count"),
    [
        (CaptureError("FILE: cannot be written: No space left on device"), 1),
        (ZeroDivisionError("none"), 1),
        (ValueError("the index under test cannot remove it"), 0),
    ],
)
@pytest.mark.parametrize("method", ["restart", "reset"])
def test_only_a_refused_restart_or_reset_leaves_the_engine_working(server, capsys, error, count, method):
    def raises(**_options):
        raise error

    engine = server.harness.engine(0)
    setattr(engine.worker, {"restart": "restart", "reset": "clear"}[method], raises)
    with pytest.raises(type(error), match=str(error)):
        getattr(server, method)(0)
    text = f"worker 0 rank 0 is broken: {type(error).__name__}: {error}"
    assert server.inside.broken == [text] * count
    assert capsys.readouterr().err == f"KvServer: {text}\n" * count
    assert [call(url, "/health")[0] for url in server.urls] == [503 if count else 200, 200]


def test_an_engine_that_cannot_abort_is_broken_and_all_its_requests_are_answered(kv, server, monkeypatch, capsys):
    server.hold(0)
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(call(server.url(0), "/v1/completions", {"prompt": "abc"})))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    connection = http.client.HTTPConnection(urlsplit(server.url(0)).netloc)
    connection.request("POST", "/v1/completions", b'{"prompt": "abc"}', {"Content-Type": "application/json"})
    server.wait_requests(open=4)
    monkeypatch.setattr(kv.engine(0), "abort", lambda _request: 1 / 0)
    connection.close()
    for thread in threads:
        thread.join()
    assert [status for status, _ in answers] == [500] * 3
    assert server.inside.num_open == 0
    assert capsys.readouterr().err == "KvServer: worker 0 rank 0 is broken: ZeroDivisionError: division by zero\n"
    server.close()
    assert not kv.worker(0).requests


@pytest.mark.parametrize("method", ["stop", "restart", "close"])
def test_open_requests_are_cut_without_a_proper_end(server, method):
    url, text = server.url(0), server.text(3)
    complete(url, text)
    server.hold(0)
    ends = []

    def ask(stream):
        try:
            ends.append(call(url, "/v1/completions", {"prompt": text, "max_tokens": 9, "stream": stream}))
        except (OSError, http.client.HTTPException) as error:
            ends.append(type(error))

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
    for thread in threads:
        thread.start()
    server.wait_requests(open=2)
    server.step(2, 0)
    getattr(server, method)(*[0] * (method != "close"))
    for thread in threads:
        thread.join()
    assert set(ends) <= {http.client.IncompleteRead, http.client.RemoteDisconnected, ConnectionResetError}
    assert [(each.status, each.aborted) for each in server.requests[1:]] == [(None, True)] * 2
    if method == "stop":
        server.start(0)
        server.release(0)
        assert cached(complete(url, text)) == 32  # of 48: at least one block of a prompt is always computed


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("wait_requests", {"open": 3, "timeout": 600}), ("wait_subscribed", {"timeout": 600})],
)
def test_a_wait_ends_when_the_server_is_closed(kv, method, arguments):
    server = KvServer(kv, ports={"control": 0})
    ends, asked = [], threading.Event()

    def wait():
        asked.set()
        try:
            getattr(server, method)(**arguments)
        except ValueError as error:
            ends.append(str(error))

    def ask():
        with pytest.raises((OSError, http.client.HTTPException)):
            call(server.control_url, f"/{method}", arguments)

    threads = [threading.Thread(target=each, daemon=True) for each in (wait, ask)]
    for each in threads:
        each.start()
    asked.wait()
    server.close()
    for each in threads:
        each.join(20)
    assert [each.is_alive() for each in threads] == [False, False]
    assert ends[0] in ("this KvServer is closed", "this KvServer was closed meanwhile")
    with pytest.raises(ValueError, match="this KvServer is closed"):
        getattr(server, method)(**arguments)


def test_many_waits_at_once_do_not_delay_each_other(server):
    control, answers = server.control_url, []

    def wait(body):
        answers.append(call(control, "/wait_requests", body))

    bodies = [{"open": 1, "timeout": 600}] * 40 + [{"open": 2, "timeout": 0.01}]
    threads = [threading.Thread(target=wait, args=(body,)) for body in bodies]
    server.hold()
    for thread in threads:
        thread.start()
    threads[-1].join()  # it ends while all others wait
    assert len(answers) == 1
    assert call(control, "/verdict")[1]["right"]
    client = threading.Thread(target=complete, args=(server.url(), "abc"))
    client.start()
    for thread in threads:
        thread.join()
    assert answers[1:] == [(200, {"done": True})] * 40
    server.release()
    client.join()


def test_a_wait_ends_when_its_client_disconnects(server, monkeypatch):
    server.hold()
    client = threading.Thread(target=complete, args=(server.url(), "abc", 9))
    client.start()
    server.wait_requests(open=1)
    (engine_loop,) = (loop for port in server.inside.ports.values() for loop in port.loops if loop.num_open)
    begun, over = threading.Event(), threading.Event()
    monkeypatch.setattr(engine_loop, "stepped", lambda: forever(begun))
    allow = engine_loop.allow

    def allowed(*, steps=0):
        allow(steps=steps)
        if steps < 0:
            over.set()

    monkeypatch.setattr(engine_loop, "allow", allowed)
    connection = http.client.HTTPConnection(urlsplit(server.control_url).netloc)
    connection.request("POST", "/step", b'{"n": 5000}')
    assert begun.wait(20)
    connection.close()
    assert over.wait(20)
    assert engine_loop.steps == 0
    monkeypatch.undo()
    server.release()
    client.join()


async def forever(begun):
    begun.set()
    await asyncio.Event().wait()


@pytest.mark.parametrize("path", ["/wait_requests", "/wait_subscribed"])
@pytest.mark.parametrize("timeout", [600.5, 10**30, -1, True, "5"])
def test_a_wait_refuses_an_invalid_timeout(server, path, timeout):
    body = {"timeout": timeout} | ({"open": 3} if path == "/wait_requests" else {})
    status, answer = call(server.control_url, path, body)
    assert (status, answer["error"]) == (
        400,
        f"{path[1:]}: timeout must be a finite number from 0 to 600 seconds, got {timeout!r}",
    )


@pytest.mark.parametrize("method", ["hold", "release", "step", "reset", "restart", "stop", "start"])
def test_a_closed_server_refuses_all_methods(kv, method):
    server = KvServer(kv)
    server.close()
    with pytest.raises(ValueError, match="this KvServer is closed"):
        getattr(server, method)(*([0] if method in ("restart", "stop", "start") else []))


def test_only_the_server_drives_the_engines_while_it_serves(kv):
    engine = kv.engine(0)
    with KvServer(kv):
        with pytest.raises(RequestError, match="a KvServer drives it while it serves"):
            engine.step()
        with pytest.raises(RequestError, match="a KvServer drives it while it serves"):
            engine.run()
        with pytest.raises(ValueError, match="is driven by a KvServer already"):
            KvServer(kv)
    engine.submit([1] * 16, 1)
    engine.run()


def test_a_lost_event_fails_the_harness_of_a_server():
    def lose():
        with harness(1, num_blocks=8) as kv, KvServer(kv) as server:
            complete(server.url(0), server.text(6))
            kv.drop_next(kind="removed")
            complete(server.url(0), server.text(6))

    with pytest.raises(EventRulesBroken, match="injected: lose"):
        lose()


def test_served_requests_are_recorded_as_submits_and_passes(kv, server):
    complete(server.url(0), server.text(2), 3)
    assert [type(each.operation).__name__ for each in kv.recording.recorded()] == ["Submit", "RunPasses"]


@pytest.mark.parametrize("dialect", ["vllm-0.33", "vllm-0.33-bytes"])
def test_the_next_harness_is_served_at_the_same_sockets(dialect):
    with harness(dialect=dialect) as first:
        server = KvServer(first, dialect)
        publisher, url = server.publisher(0), server.url(0)
        text = server.text(3)
        heard = []
        with KvSubscriber(publisher.endpoints, heard.append, dialect=server.dialect) as subscriber:
            publisher.wait_subscribed()
            complete(url, text)
            subscriber.receive(1)
            with harness(dialect=dialect) as second:
                server.use(second)
                subscriber.receive(1)
                stored, removed = (each.event.data.block_hashes for each in heard)
                assert removed == tuple(reversed(stored))
                assert publisher.batches() == 2
                assert cached(complete(url, text)) == 0
                assert [each.number for each in server.requests] == [0]
                assert len(second.events) == 1  # withdrawn events are in no ledger
                subscriber.receive(1)
                assert heard[-1].event.data.block_hashes == stored
                server.close()
    with harness(3) as other, harness() as kv, KvServer(kv) as server, pytest.raises(ValueError, match="workers"):
        server.use(other)


def test_a_server_keeps_only_the_last_requests_of_its_log():
    with harness(1) as kv, KvServer(kv, log=2, ports={"control": 0}) as server:
        for text in "abc":
            complete(server.url(0), text)
        assert [each.number for each in server.requests] == [1, 2]
        assert call(server.control_url, "/verdict")[1]["forgotten_requests"] == 1


def test_a_stream_that_the_engine_rejects_ends_with_an_error():
    with harness(1, num_blocks=8) as kv, KvServer(kv) as server:
        object.__setattr__(server._described, "max_model_len", 4096)  # otherwise the face refuses first
        body = {"prompt": "a" * 600, "max_tokens": 1, "stream": True}
        status, text = call(server.url(0), "/v1/completions", body)
        assert status == 200
        (error,), is_whole = chunks(text)
        assert "600 tokens never fit" in error["error"]["message"]
        assert is_whole
        assert call(server.url(0), "/v1/completions", body | {"stream": False})[0] == 500


def test_a_request_with_one_prompt_that_never_fits_leaves_nothing_open():
    with harness(1, num_blocks=8) as kv, KvServer(kv) as server:
        # Otherwise the HTTP frontend answers before the engine does.
        object.__setattr__(server._described, "max_model_len", 4096)
        body = {"prompt": ["a" * 16, "b" * 100], "max_tokens": 60}
        status, answer = call(server.url(0), "/v1/completions", body)
        assert status == 400
        assert "can never fit" in json.dumps(answer)
        server.wait_requests(0, timeout=1)
        assert kv.worker(0).requests == []
        complete(server.url(0), "a" * 16)


def test_a_server_forgets_events_and_requests_beyond_its_log():
    with harness(1) as kv, KvServer(kv, log=2, ports={"control": 0}) as server:
        for _ in range(300):
            complete(server.url(0), server.text(2))
        assert call(server.control_url, "/verdict")[1]["history_is_cut"]
        assert len(kv.events) < kv.events.total
        assert len(kv.engine().requests) < 100
        assert kv.judge().errors == []


def test_routing_assertions_name_the_worst_request(server):
    text = server.text(4)
    complete(server.url(0), text)
    complete(server.url(1), text)
    with pytest.raises(
        AssertionError, match=r"of_best is 0, must be at least 0.9\nrequest 1 \(4 blocks\) was sent to worker 1"
    ):
        server.routing.assert_hit_ratio(of_best=0.9)
    server.routing.assert_balanced()
    server.routing.assert_balanced(within=1.0)
    with pytest.raises(ValueError, match="within=2 can never fail: a pick had 2 candidates"):
        server.routing.assert_balanced(within=2.0)
    with pytest.raises(ValueError, match="got neither"):
        server.routing.assert_hit_ratio()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"dialect": "dynamo-router-event"}, ValueError, "has no engine that serves HTTP"),
        (
            {"dialect": "sglang-0.5.23"},
            ValueError,
            "is spoken by engines of type 'sglang', worker 0 is one of type 'vllm'",
        ),
        ({"time_scale": -1}, ValueError, "time_scale"),
        ({"max_queued": 0}, ValueError, "max_queued"),
        ({"max_model_len": 1}, ValueError, "max_model_len"),
        ({"ports": {"http": 65_536}}, ValueError, "ports['http'] must leave room for 2 ports"),
        ({"ports": {"control": -1}}, ValueError, "ports['control'] must be an integer of at least 0, got -1"),
        ({"ports": {"event": 0}}, ValueError, "unknown ports 'event'"),
        ({"model": ""}, ValueError, "model must be a name, got ''"),
        ({"topic": "kv@{name}"}, ValueError, "topic must be a text in which {host}, {port} and {model} are filled in"),
        ({"topic": "kv@{host"}, ValueError, "topic must be a text in which"),
        ({"topic": "{0}"}, ValueError, "topic must be a text in which"),
        ({"topic": "{host.x}"}, ValueError, "topic must be a text in which"),
        ({"topic": 5}, ValueError, "topic must be a text in which"),
        *(
            ({"topic": topic}, ValueError, "in which {host}, {port} and {model} are filled in, without a format, got")
            for topic in ("{port:>9}", "{port:1000000000}", "{host!r}", "{model:{port}}", "{host[0]}", "{}", "}")
        ),
        ({"adapters": "lora"}, TypeError, "adapters must be a list of names, got 'lora'"),
        ({"adapters": [""]}, ValueError, "each of adapters must be a name, got ''"),
        ({"adapters": [5]}, ValueError, "each of adapters must be a name, got 5"),
        ({"adapters": ["a", "b", "a"]}, ValueError, "adapter 'a' is named twice"),
        ({"adapters": ["mock-model"]}, ValueError, "adapter 'mock-model' has the name of the model"),
        ({"model": "m\ud800"}, ValueError, "model must be a name"),
        (
            {"max_model_len": 1025},
            ValueError,
            "max_model_len must be at most 1024, what 64 blocks of 16 tokens hold, got 1025",
        ),
    ],
)
def test_bad_options_of_a_server_are_refused(kv, options, error, text):
    with pytest.raises(error) as caught:
        KvServer(kv, **options)
    assert text in str(caught.value)
    assert kv.engine(0).driver is None


def test_options_at_their_limits_are_accepted():
    with harness(1) as kv, KvServer(kv, max_model_len=1024, adapters=["a", "b"], topic="{{{host}}}@{model}") as server:
        assert server.publisher().topic == "{127.0.0.1}@mock-model"
        assert complete(server.url(), [5] * 1022, 1, model="b")
    with (
        harness(1, "sglang-0.5.23") as kv,
        pytest.raises(ValueError, match="at most 1008, what 64 blocks of 16 tokens hold without one page, got 1009"),
    ):
        KvServer(kv, "sglang-0.5.23", max_model_len=1009)


def test_a_port_in_use_is_named(kv, server):
    port = urlsplit(server.url(0)).port
    with (
        harness() as other,
        pytest.raises(EndpointError, match=f"port {port} of 127.0.0.1 cannot be bound: Address already in use"),
    ):
        KvServer(other, ports={"http": port})


def test_ports_and_topics_can_be_given(kv):
    for port in range(21_000, 32_000, 97):  # below the ports that the system picks
        try:
            server = KvServer(kv, ports={"http": port}, topic="kv@{host}:{port}@{model}")
        except EndpointError:
            continue
        break
    with server:
        ports = [urlsplit(url).port for url in server.urls]
        assert ports == [port, port + 1]
        assert [server.publisher(each).topic for each in (0, 1)] == [
            f"kv@127.0.0.1:{each}@mock-model" for each in ports
        ]


def test_input_that_is_not_http_and_unknown_paths_are_answered(server, caplog):
    connection = http.client.socket.create_connection(("127.0.0.1", urlsplit(server.url(0)).port))
    with connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")  # like a gRPC probe
        connection.settimeout(20)
        assert connection.recv(100)
    assert caplog.records == []
    assert call(server.url(0), "/nope") == (404, {"detail": "Not Found"})
    assert call(server.url(0), "/v1/completions", b"", "POST")[0] == 400
    assert call(server.url(0), "/v1/completions", b"{}", "POST", {"Content-Type": "text/plain"})[0] == 400


@pytest.mark.parametrize("dialect", ["vllm-0.33", "sglang-0.5.23"])
def test_odd_bytes_are_answered_and_cause_no_server_error(dialect):
    half = "\ud800"  # half a surrogate pair: JSON can name it, and no text contains it
    asked = {
        "prompt": half,
        "messages": [{"role": "user", "content": half}],
        "max_tokens": 1,
        "tokens": [1],
        "text": half,
    }
    with harness(1, dialect) as kv, KvServer(kv, dialect, ports={"control": 0}) as server:
        url = server.url(0)
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            for more in ({}, {"model": half}, {"cache_salt": half}, {"data_parallel_rank": half}, {"n": 10**9}):
                assert call(url, path, asked | more)[0] in (200, 400, 404)
            assert call(url, path, b'{"max_tokens":' + b"9" * 5000 + b"}")[0] == 400
            assert call(url, path, b"{}", headers={"Content-Encoding": "gzip"})[0] == 400
        for count in (0, -1, 10**9) if dialect.startswith("sglang") else ():
            options = {"n": count, "max_new_tokens": 1}
            assert call(url, "/generate", {"text": "a", "sampling_params": options})[0] == 400
        odd = {"X-Request-Id": b"\xff", "X-data-parallel-rank": b"0"}
        assert call(url, "/v1/completions", {"prompt": "a"}, headers=odd)[0] == 200
        assert call(server.control_url, "/requests")[1][-1]["headers"]["x-request-id"] == "?"


def test_virtual_time_can_be_scaled_to_real_time(kv):
    with KvServer(kv, time_scale=0.001) as server:
        assert complete(server.url(0), "abc", 5)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("dialect", ["sglang-0.5.23", "vllm-0.9", "vllm-0.24"])
def test_engines_of_other_releases_serve(dialect):
    with harness(1, dialect) as kv, KvServer(kv, dialect) as server:
        text = server.text(4)
        assert cached(complete(server.url(0), text)) == 0
        assert cached(complete(server.url(0), text)) > 0
        status, answer = call(server.url(0), "/v1/completions", {"prompt": text * 1000})
        assert status == 400
        assert answer["object"] == "error" if dialect != "vllm-0.24" else "error" in answer
        # The longest accepted request can be served.
        most = call(server.url(0), "/tokenize", {"prompt": ""})[1]["max_model_len"]
        assert complete(server.url(0), [5] * (most - 2), 1)["usage"]["prompt_tokens"] == most - 2


def test_sglangs_generate_api_is_served():
    with harness(1, "sglang-0.5.23", dp_size=2) as kv, KvServer(kv, "sglang-0.5.23") as server:
        url, text = server.url(0), server.text(2)
        asked = {"text": text, "sampling_params": {"max_new_tokens": 3}, "data_parallel_rank": 1}
        _, answer = call(url, "/generate", asked)
        assert len(answer["output_ids"]) == len(answer["text"]) == 3
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
        assert call(url, "/generate", asked)[1]["meta_info"]["cached_tokens"] > 0
        events, ended = chunks(call(url, "/generate", asked | {"stream": True})[1])
        assert [each["output_ids"] for each in events] == [answer["output_ids"][: n + 1] for n in range(3)]
        assert ended
        _, rows = call(url, "/generate", {"input_ids": [[1, 2], [3]], "sampling_params": {"max_new_tokens": 1}})
        assert len(rows) == 2
        assert call(url, "/generate", {"text": "a"})[1]["meta_info"]["completion_tokens"] == 128
        for path in ("/server_info", "/get_server_info"):
            info = call(url, path)[1]
            assert info["kv_events"]["endpoint_port_base"] == urlsplit(server.publisher(0).endpoints[0]).port
            assert info["dp_size"] == 2
        assert call(url, "/model_info")[1]["model_path"] == "mock-model"
        assert call(url, "/flush_cache")[0] == 200
        assert call(url, "/detokenize", {"tokens": [104, 105]})[1] == {"text": "hi"}
        assert call(url, "/generate", {"sampling_params": {}})[0] == 400
        assert "sglang:num_running_reqs" in call(url, "/metrics")[1]


def test_a_dialect_from_before_self_describing_events_is_refused():
    profile = EngineProfile(num_blocks=12, tiers={"host": 16, "self_describing": True})
    with (
        RouterHarness(profile, "vllm") as kv,
        pytest.raises(
            ValueError, match=r"^self-describing events of a host are vLLM's from 0\.24 on; got dialect 'vllm-0\.23'$"
        ),
    ):
        KvServer(kv, dialect="vllm-0.23")
