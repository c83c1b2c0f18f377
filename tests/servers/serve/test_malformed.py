"""Malformed requests: each is answered soon with its error, on both ports, and leaves nothing behind."""

import gzip

import pytest
from depth import takes_long
from malformed import fuzz
from served import call, complete
from test_kv_server import harness

from pytest_kvmock.servers import KvServer
from pytest_kvmock.servers.serve.api import MOST_DEPTH, MOST_TOKENS, from_json
from pytest_kvmock.servers.serve.request_checks import MOST_ERRORS, MOST_SHOWN

COUNT = 300
DIALECTS = ["vllm-0.33", "sglang-0.5.23"]


@pytest.fixture(params=DIALECTS)
def server(request):
    with harness(1, request.param) as kv, KvServer(kv, request.param, ports={"control": 0}) as server:
        yield server


@pytest.fixture
def vllm():
    """Serve vLLM only, for slow tests where both faces behave alike."""
    with harness(1) as kv, KvServer(kv, ports={"control": 0}) as server:
        yield server


def refused(url, path, body, **more):
    """Return the error text of a refused request."""
    status, answer = call(url, path, body, **more)
    assert status == 400, answer
    error = answer.get("error", answer)
    return error if isinstance(error, str) else error["message"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_malformed_request_causes_a_server_error(dialect, capfd):
    statuses, wrong, longest = fuzz(COUNT, 40, dialect)
    assert wrong == []
    assert {200, 400, 403, 404} <= set(statuses)
    assert sum(statuses.values()) == COUNT
    assert longest < 20
    assert capfd.readouterr() == ("", "")


def test_an_invalid_gzip_body_is_refused(server):
    for path in ("/hold", "/verdict", "/wait_requests"):
        text = refused(server.control_url, path, b'{"open": 0}', headers={"Content-Encoding": "gzip"})
        assert text.startswith(f"{path[1:]}: the body cannot be read: ")
    assert refused(server.url(), "/v1/completions", b"{}", headers={"Content-Encoding": "gzip"})


def test_a_body_that_decompresses_beyond_the_limit_is_refused(vllm):
    body = gzip.compress(b"[" + b" " * 2**26 + b"]")
    for url, path in ((vllm.url(), "/v1/completions"), (vllm.control_url, "/hold")):
        assert call(url, path, body, headers={"Content-Encoding": "gzip"})[0] == 413


@pytest.mark.parametrize("begin", [b"[", b'{"a":'])
def test_nesting_of_json_has_a_limit(server, begin):
    def nested(depth, name=b"x"):
        end = b"]" if begin == b"[" else b"}"
        return b'{"max_tokens": 1, "prompt": "abc", "' + name + b'":' + begin * depth + b"1" + end * depth + b"}"

    assert from_json(nested(MOST_DEPTH - 1))["max_tokens"] == 1
    text = f"it is nested deeper than {MOST_DEPTH}"
    for depth in (MOST_DEPTH, 960, 970, 980, 985, 990, 1000, 100_000):
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            assert text in refused(server.url(), path, nested(depth))
        for path in ("/hold", "/expect", "/check", "/text"):
            assert refused(server.control_url, path, nested(depth)) == f"{path[1:]}: the body is not JSON: {text}"
    for name in (b"x", b"tools"):
        assert call(server.url(), "/v1/completions", nested(MOST_DEPTH - 1, name))[0] == 200
    for name in (b"prompt", b"model", b"max_tokens", b"stream_options"):
        assert refused(server.url(), "/v1/completions", nested(MOST_DEPTH - 1, name))
    for name in (b"worker", b"prompt", b"after"):
        assert refused(server.control_url, "/text", nested(MOST_DEPTH - 1, name))


def test_one_negative_token_in_a_prompt_is_named(server):
    assert "greater than or equal to 0" in refused(server.url(), "/v1/completions", {"prompt": [5, -1]})


def test_engines_accept_booleans_as_tokens_like_pydantic_and_the_control_api_does_not(server):
    assert complete(server.url(), [True, False])["usage"]["prompt_tokens"] == 2
    for prompt in ([True, "a"], [[True], "a"], [[True], None]):
        assert "validation errors" in refused(server.url(), "/v1/completions", {"prompt": prompt})
    for prompt in ([True], [1, False]):
        for path in ("/expect", "/check"):
            text = refused(server.control_url, path, {"prompt": prompt, "blocks": []})
            assert text == f"{path[1:]}: a token id is an integer, not a boolean"


def test_null_counts_as_an_empty_list(server):
    text = server.text(2)
    for body in ({"prompt": text, "blocks": None}, {"prompt": text, "blocks": {"blocks": None, "last_batch": None}}):
        assert call(server.control_url, "/check", body) == (200, {"right": True, "differences": ""})
    assert call(server.control_url, "/expect", {"prompt": None})[1]["tokens"] == []
    complete(server.url(), text)
    assert not call(server.control_url, "/check", {"prompt": text, "blocks": None})[1]["right"]


def test_a_router_that_names_no_worker_fails_for_a_single_held_block(server):
    text = server.text(1)
    complete(server.url(), text)
    _, answer = call(server.control_url, "/check", {"prompt": text, "blocks": []})
    assert not answer["right"]
    assert answer["differences"].startswith(
        "worker 0 rank 0: the router knows 0 blocks, 1 are held (batch 0 stored them: "
    )


def test_an_unpaired_surrogate_becomes_a_question_mark(server):
    assert call(server.control_url, "/text", {"blocks": 0, "after": "a\ud800"}) == (200, {"text": "a?"})


def test_listed_errors_are_limited_and_large_values_are_shortened(server):
    url = server.url()
    for prompt in ([None] * MOST_ERRORS * 3, [{"a": None}] * 50_000, [None] * 200_000):
        text = refused(url, "/v1/completions", {"prompt": prompt})
        assert text.startswith(f"More than {MOST_ERRORS} validation errors:\n")
        assert text.count("\n") == MOST_ERRORS
        assert len(text) < 2 * MOST_SHOWN
    text = refused(url, "/detokenize", {"tokens": [None] * 200_000})
    assert "'input': <list of 200000>" in text
    text = refused(url, "/v1/completions", {"prompt": "a", "max_tokens": "x" * 100_000})
    assert f"'input': '{'x' * MOST_SHOWN}'..." in text
    text = refused(url, "/v1/completions", {"prompt": "a", "max_tokens": {"a": ["b" * MOST_SHOWN]}})
    assert "'input': <dict of 1>" in text
    assert "'input': {'a': [1, 'b']}" in refused(url, "/v1/completions", {"prompt": "a", "max_tokens": {"a": [1, "b"]}})


@takes_long
def test_twenty_megabytes_of_nulls_are_refused_soon(vllm):
    nulls = b"[" + b",".join([b"null"] * 4_000_000) + b"]"
    for name, path in (
        (b"prompt", "/v1/completions"),
        (b"tokens", "/detokenize"),
        (b"messages", "/v1/chat/completions"),
    ):
        assert refused(vllm.url(), path, b'{"' + name + b'":' + nulls + b"}")
    assert refused(vllm.control_url, "/expect", b'{"prompt":' + nulls + b"}")
    bools = b"[" + b",".join([b"true"] * 4_000_000) + b"]"
    last = b"[" + b"5," * 4_000_000 + b"null]"
    for name, path in ((b"prompt", "/v1/completions"), (b"tokens", "/detokenize")):
        for body in (bools, last):
            assert refused(vllm.url(), path, b'{"' + name + b'":' + body + b"}")
    for body in (b"[" + b"[]," * 4_000_000 + b"[]]", b"[" + b"{}," * 4_000_000 + b"{}]"):
        for url, path in ((vllm.url(), "/v1/completions"), (vllm.control_url, "/expect")):
            assert "more than 262144 lists and objects" in refused(url, path, b'{"prompt":' + body + b"}")
    assert len(refused(vllm.control_url, "/check", b'{"prompt": "a", "blocks":' + nulls + b"}")) < 300


@takes_long
def test_a_prompt_that_is_too_long_is_refused_in_time_linear_in_its_length(server):
    for prompt in ([5] * 4_000_000, "a" * 20_000_000):
        text = refused(server.url(), "/v1/completions", {"prompt": prompt, "max_tokens": 1})
        assert str(len(prompt)) in text
    status, answer = call(server.url(), "/tokenize", {"prompt": "é" * 500_000, "return_token_strs": True})
    assert (status, answer["count"], len(answer["token_strs"])) == (200, 1_000_000, 1_000_000)


def test_choices_are_limited_over_all_prompts_of_a_request(server):
    for prompt, n in ((["a"] * 20_000, 1), (["a", "b"], 10_000), ([[1]] * 3, 6000)):
        text = refused(server.url(), "/v1/completions", {"prompt": prompt, "n": n})
        assert text == f"{len(prompt)} prompts with n={n} are too many: at most 16384 choices a request."
    if server.dialect.name.startswith("sglang"):
        body = {"text": ["a", "b"], "sampling_params": {"n": 10_000}}
        assert "are too many" in refused(server.url(), "/generate", body)


@takes_long
def test_texts_and_prompts_of_the_control_api_have_a_maximum_length(vllm):
    most = MOST_TOKENS // 16
    text = f"text: blocks must be at most {most}, got "
    for blocks in (most + 1, 10**30):
        assert refused(vllm.control_url, "/text", {"blocks": blocks}) == f"{text}{blocks}"
    for prompt in ([5] * (MOST_TOKENS + 1), "a" * (MOST_TOKENS + 1)):
        for path in ("/expect", "/check"):
            body = {"prompt": prompt, "blocks": []}
            assert refused(vllm.control_url, path, body) == (
                f"{path[1:]}: prompt must have at most {MOST_TOKENS} tokens, got {MOST_TOKENS + 1}"
            )
