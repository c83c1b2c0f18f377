"""What is no request: each is answered with what is wrong, soon, on both ports; nothing of it stays."""

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
    """Where both faces do the same, and it takes a while."""
    with harness(1) as kv, KvServer(kv, ports={"control": 0}) as server:
        yield server


def refused(url, path, body, **more):
    """Return the text of a refusal."""
    status, answer = call(url, path, body, **more)
    assert status == 400, answer
    error = answer.get("error", answer)
    return error if isinstance(error, str) else error["message"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_malformed_request_is_an_error_of_ours(dialect, capfd):
    statuses, wrong, longest = fuzz(COUNT, 40, dialect)
    assert wrong == []
    assert {200, 400, 403, 404} <= set(statuses)
    assert sum(statuses.values()) == COUNT
    assert longest < 20
    assert capfd.readouterr() == ("", "")


def test_a_compressed_body_that_is_none_is_refused(server):
    for path in ("/hold", "/verdict", "/wait_requests"):
        text = refused(server.control_url, path, b'{"open": 0}', headers={"Content-Encoding": "gzip"})
        assert text.startswith(f"{path[1:]}: the body cannot be read: ")
    assert refused(server.url(), "/v1/completions", b"{}", headers={"Content-Encoding": "gzip"})


def test_a_body_that_grows_beyond_the_limit_is_refused(vllm):
    body = gzip.compress(b"[" + b" " * 2**26 + b"]")
    for url, path in ((vllm.url(), "/v1/completions"), (vllm.control_url, "/hold")):
        assert call(url, path, body, headers={"Content-Encoding": "gzip"})[0] == 413


@pytest.mark.parametrize("begin", [b"[", b'{"a":'])
def test_nesting_has_a_limit(server, begin):
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


def test_one_token_below_zero_is_named(server):
    assert "greater than or equal to 0" in refused(server.url(), "/v1/completions", {"prompt": [5, -1]})


def test_booleans_are_tokens_to_engines_as_to_pydantic_and_to_nobody_else(server):
    assert complete(server.url(), [True, False])["usage"]["prompt_tokens"] == 2
    for prompt in ([True, "a"], [[True], "a"], [[True], None]):
        assert "validation errors" in refused(server.url(), "/v1/completions", {"prompt": prompt})
    for prompt in ([True], [1, False]):
        for path in ("/expect", "/check"):
            text = refused(server.control_url, path, {"prompt": prompt, "blocks": []})
            assert text == f"{path[1:]}: a token id is an integer, not a boolean"


def test_null_is_a_list_without_elements(server):
    text = server.text(2)
    for body in ({"prompt": text, "blocks": None}, {"prompt": text, "blocks": {"blocks": None, "last_batch": None}}):
        assert call(server.control_url, "/check", body) == (200, {"right": True, "differences": ""})
    assert call(server.control_url, "/expect", {"prompt": None})[1]["tokens"] == []
    complete(server.url(), text)
    assert not call(server.control_url, "/check", {"prompt": text, "blocks": None})[1]["right"]


def test_a_router_that_names_no_worker_does_not_know_of_its_one_block(server):
    text = server.text(1)
    complete(server.url(), text)
    _, answer = call(server.control_url, "/check", {"prompt": text, "blocks": []})
    assert not answer["right"]
    assert answer["differences"].startswith(
        "worker 0 rank 0: the router knows 0 blocks, 1 are held (batch 0 stored them: "
    )


def test_half_a_pair_of_utf_16_is_a_question_mark(server):
    assert call(server.control_url, "/text", {"blocks": 0, "after": "a\ud800"}) == (200, {"text": "a?"})


def test_errors_are_listed_up_to_a_number_and_large_values_are_not_repeated(server):
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
def test_twenty_megabytes_of_nothing_are_answered_soon(vllm):
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
def test_a_prompt_that_is_too_long_costs_no_more_than_its_length(server):
    for prompt in ([5] * 4_000_000, "a" * 20_000_000):
        text = refused(server.url(), "/v1/completions", {"prompt": prompt, "max_tokens": 1})
        assert str(len(prompt)) in text
    status, answer = call(server.url(), "/tokenize", {"prompt": "é" * 500_000, "return_token_strs": True})
    assert (status, answer["count"], len(answer["token_strs"])) == (200, 1_000_000, 1_000_000)


def test_choices_of_all_prompts_are_counted(server):
    for prompt, n in ((["a"] * 20_000, 1), (["a", "b"], 10_000), ([[1]] * 3, 6000)):
        text = refused(server.url(), "/v1/completions", {"prompt": prompt, "n": n})
        assert text == f"{len(prompt)} prompts with n={n} are too many: at most 16384 choices a request."
    if server.dialect.name.startswith("sglang"):
        body = {"text": ["a", "b"], "sampling_params": {"n": 10_000}}
        assert "are too many" in refused(server.url(), "/generate", body)


@takes_long
def test_texts_and_prompts_of_the_control_api_have_a_longest(vllm):
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
