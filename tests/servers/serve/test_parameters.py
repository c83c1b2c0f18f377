"""Parameters of real engines: their effects, and that none is refused; and SGLang's loads."""

import pytest
from served import call, chunks, complete
from test_kv_server import harness

from pytest_kvmock.servers import KvServer

DIALECTS = ["vllm-0.33", "sglang-0.5.23"]
TAKEN = (
    *({"stop": "a"}, {"stop": ["a", "b"]}, {"stop": None}, {"stop_token_ids": [5]}, {"include_stop_str_in_output": True}),  # noqa: E501
    *({"logprobs": 1}, {"logprobs": True, "top_logprobs": 2}, {"prompt_logprobs": 1}, {"echo": True}, {"best_of": 1}),
    *({"response_format": {"type": "json_object"}}, {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}),  # noqa: E501
    *({"tools": [], "tool_choice": "none"}, {"tools": None, "tool_choice": None}, {"parallel_tool_calls": False}),
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], "tool_choice": "auto"},  # noqa: E501
    *({"return_token_ids": True}, {"ignore_eos": True}, {"min_tokens": 1}, {"seed": 5}, {"user": "u"}, {"logit_bias": {"5": 1}}),  # noqa: E501
    *({"temperature": 0}, {"top_p": 0.5}, {"top_k": -1}, {"presence_penalty": 1.0}, {"guided_json": "{}"}, {"suffix": None}),  # noqa: E501
    *({"chat_template_kwargs": {"enable_thinking": False}}, {"skip_special_tokens": True}, {"structured_outputs": {"regex": "a"}}),  # noqa: E501
    *({"kv_transfer_params": {"do_remote_decode": True}}, {"rid": "r"}, {"lora_path": None}, {"separate_reasoning": True}),  # noqa: E501
)  # fmt: skip


@pytest.fixture(params=DIALECTS)
def server(request):
    with harness(1, request.param, dp_size=2) as kv, KvServer(kv, request.param) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_no_parameter_of_a_real_engine_is_refused(server, stream):
    message = [{"role": "user", "content": "abc"}]
    for more in TAKEN:
        for path, prompt in (("/v1/completions", {"prompt": "abc"}), ("/v1/chat/completions", {"messages": message})):
            status, answer = call(server.url(), path, {**prompt, "max_tokens": 2, "stream": stream, **more})
            assert status == 200, (path, more, answer)


def test_a_streamed_echo_begins_with_the_prompt(server):
    asked = {"prompt": ["abc", "de"], "max_tokens": 3, "n": 2, "echo": True}
    whole = call(server.url(), "/v1/completions", asked)[1]["choices"]
    parts, ended = chunks(call(server.url(), "/v1/completions", asked | {"stream": True})[1])
    texts = ["", "", "", ""]
    for part in parts:
        (choice,) = part["choices"]
        texts[choice["index"]] += choice["text"]
    assert ended
    assert texts == [each["text"] for each in whole]
    assert [text[:-3] for text in texts] == ["abc", "abc", "de", "de"]
    assert len(parts) == 12


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_usage_can_come_with_each_part_of_a_stream(server, max_tokens):
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"max_tokens": max_tokens, "stream": True, "stream_options": options}
    parts, ended = chunks(call(server.url(), "/v1/completions", {**asked, "prompt": "abc"})[1])
    assert ended
    assert [each["usage"]["completion_tokens"] for each in parts] == [*range(1, max_tokens + 1), max_tokens]
    assert parts[0]["usage"] == {"prompt_tokens": 3, "total_tokens": 4, "completion_tokens": 1}
    parts, _ = chunks(
        call(server.url(), "/v1/chat/completions", {**asked, "messages": [{"role": "a", "content": "b"}]})[1]
    )
    assert [each["usage"]["completion_tokens"] for each in parts] == [*range(max_tokens + 1), max_tokens]
    alone = asked | {"prompt": "abc", "stream_options": {"continuous_usage_stats": True}}
    parts, _ = chunks(call(server.url(), "/v1/completions", alone)[1])
    is_sglang = server.dialect.name.startswith("sglang")
    assert ["usage" in each for each in parts] == [is_sglang] * max_tokens  # vLLM needs include_usage


def test_vllm_returns_token_ids_next_to_texts():
    with harness(1) as kv, KvServer(kv) as server:
        asked = {"max_tokens": 3, "return_token_ids": True}
        completion, chat = asked | {"prompt": "abc"}, asked | {"messages": [{"role": "user", "content": "a"}]}
        (choice,) = complete(server.url(), "abc", 3, return_token_ids=True)["choices"]
        assert choice["prompt_token_ids"] == [97, 98, 99]
        assert bytes(choice["token_ids"]).decode() == choice["text"]
        parts, _ = chunks(call(server.url(), "/v1/completions", completion | {"stream": True})[1])
        assert [each["choices"][0].get("prompt_token_ids") for each in parts] == [[97, 98, 99], None, None]
        assert [token for each in parts for token in each["choices"][0]["token_ids"]] == choice["token_ids"]
        answer = call(server.url(), "/v1/chat/completions", chat)[1]
        assert bytes(answer["prompt_token_ids"]).decode() == "<user>a</><assistant>"
        assert bytes(answer["choices"][0]["token_ids"]).decode() == answer["choices"][0]["message"]["content"]
        parts, _ = chunks(call(server.url(), "/v1/chat/completions", chat | {"stream": True})[1])
        assert [each.get("prompt_token_ids") for each in parts] == [answer["prompt_token_ids"], None, None, None]
        found = [token for each in parts[1:] for token in each["choices"][0]["token_ids"]]
        assert found == answer["choices"][0]["token_ids"]


def test_sglangs_loads_are_served():
    with harness(1, "sglang-0.5.23", dp_size=2) as kv, KvServer(kv, "sglang-0.5.23") as server:
        url = server.url()
        complete(url, "x" * 64, data_parallel_rank=1)
        answer = call(url, "/v1/loads?include=core,disagg,queues,memory")[1]
        assert answer["version"] == "0.5.23"
        assert [(each["dp_rank"], each["num_total_reqs"]) for each in answer["loads"]] == [(0, 0), (1, 0)]
        row = answer["loads"][1]
        assert row["max_total_num_tokens"] == row["memory"]["token_capacity"] == 1024
        assert row["queues"] == {"waiting": 0, "grammar": 0, "paused": 0, "retracted": 0}
        assert row["disaggregation"] == {"mode": "null"}
        assert call(url, "/v1/loads")[1]["loads"] == answer["loads"]
        assert call(url, "/v1/loads?dp_rank=1&include=core")[1]["loads"] == [
            {name: value for name, value in row.items() if not isinstance(value, dict)}
        ]
        assert [call(url, f"/v1/loads?dp_rank={rank}")[1]["loads"] for rank in (2, -1)] == [[], []]
        text = call(url, "/v1/loads?format=prometheus")[1]
        assert '# TYPE sglang_num_running_reqs gauge\nsglang_num_running_reqs{dp_rank="0"} 0\n' in text
        assert 'sglang_queues_waiting{dp_rank="1"} 0\n' in text
        assert "null" not in text
        for query, word in (("include=core,x", "Invalid include sections: x."), ("dp_rank=a", "valid integer")):
            status, refusal = call(url, f"/v1/loads?{query}")
            assert status == 400
            assert word in refusal["message"]
        assert call(url, "/get_load")[1][1]["num_reqs"] == 0


def test_each_engine_serves_the_load_paths_of_its_release():
    with harness(1) as kv, KvServer(kv) as server:
        assert [call(server.url(), path)[0] for path in ("/get_load", "/v1/loads", "/load")] == [404, 404, 200]
    with harness(1, "sglang-0.5.9") as kv, KvServer(kv, "sglang-0.5.9") as server:
        assert [call(server.url(), path)[0] for path in ("/get_load", "/v1/loads", "/load")] == [200, 200, 404]
        assert call(server.url(), "/get_load")[1][0]["dp_rank"] == 0
