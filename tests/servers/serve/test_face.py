"""HTTP faces of engines without sockets: releases, metrics, tokens."""

import json

import pytest
from test_recorded_answers import face_of

from pytest_kvmock.servers.serve.api import Call, Model, RankState, release_of
from pytest_kvmock.servers.serve.metrics import metrics_text
from pytest_kvmock.servers.serve.text import Letters, chat_text, decode, encode, letters_of, write_tokenizer

JSON = {"content-type": "application/json"}


def answer(face, path, body=None, method=None):
    data = b"" if body is None else json.dumps(body).encode()
    return face.answer(Call(method or ("GET" if body is None else "POST"), path, JSON, data))


@pytest.mark.parametrize(
    ("models", "there", "absent"),
    [
        (
            "vLLM 0.9.2",
            ("gpu_cache_usage_perc", "gpu_prefix_cache_hits_total", "time_per_output_token_seconds"),
            ("inter_token",),
        ),
        ("vLLM 0.10.2, hashes as whole digests", ("gpu_cache_usage_perc", "kv_cache_usage_perc"), ()),
        (
            "vLLM 0.14.1",
            ("kv_cache_usage_perc", "prefix_cache_hits_total", "inter_token_latency_seconds"),
            ("gpu_c", "gpu_p", "time_per_out"),
        ),
        ("vLLM 0.33.0", ("kv_cache_usage_perc", "cache_config_info", "num_preemptions_total"), ("gpu_c", "gpu_p")),
    ],
)
def test_metrics_have_the_names_of_the_release(models, there, absent):
    page = metrics_text(Model("m", release_of(models, "vllm"), 16, 100), [RankState(running=1), RankState(waiting=2)])
    assert all(f"vllm:{name}" in page for name in there)
    assert not any(f"vllm:{name}" in page for name in absent)
    assert 'vllm:num_requests_waiting{engine="1",model_name="m"} 2.0' in page


def test_a_name_is_escaped_in_metrics():
    page = metrics_text(Model('a"b\\', release_of("vLLM 0.33.0", "vllm"), 16, 100), [RankState()])
    assert r'model_name="a\"b\\"' in page


def test_histograms_count_values_cumulatively():
    state = RankState()
    for value in (0.03, 0.05, 9999.0):
        state.ttft.add(value)
    page = metrics_text(Model("m", release_of("vLLM 0.33.0", "vllm"), 16, 100), [state])
    lines = dict(line.rpartition(" ")[::2] for line in page.splitlines() if "time_to_first" in line)
    labels = 'engine="0",model_name="m"'
    assert lines[f'vllm:time_to_first_token_seconds_bucket{{{labels},le="0.04"}}'] == "1.0"
    assert lines[f'vllm:time_to_first_token_seconds_bucket{{{labels},le="2560.0"}}'] == "2.0"
    assert lines[f'vllm:time_to_first_token_seconds_bucket{{{labels},le="+Inf"}}'] == "3.0"


def test_event_sources_are_served_by_vllm_0_33_and_not_by_0_28():
    assert answer(face_of("vLLM 0.33.0"), "/kv_event_sources").status == 200
    assert answer(face_of("vLLM 0.28.0"), "/kv_event_sources").status == 404


def test_errors_have_the_form_of_the_release():
    for models, backend, is_nested in (
        ("vLLM 0.9.2", "vllm", False),
        ("vLLM 0.33.0", "vllm", True),
        ("SGLang 0.5.23", "sglang", False),
    ):
        body = json.loads(answer(face_of(models, backend), "/v1/completions", {"prompt": "x", "max_tokens": -1}).body)
        assert ("error" in body) is is_nested
        assert (body.get("error") or body)["code"] == 400


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", "max_tokens": True},
        {"prompt": "x", "stream": "perhaps"},
        {"prompt": "x", "n": []},
        {"prompt": {"a": 1}},
        {"prompt": [[1], "a"]},
        {"prompt": [True]},
        {"prompt": [""]},
        {"prompt": [2**40]},
        {"prompt": "x", "cache_salt": ""},
        {"prompt": "x", "cache_salt": 5},
        {"prompt": "x", "model": 5},
        {"prompt": "x", "stream_options": 5},
        {"prompt": "x", "data_parallel_rank": "a"},
        {"prompt": "x", "priority": "high"},
        {"prompt": "x", "max_tokens": float("inf")},
        {"prompt": None},
    ],
)
def test_wrong_types_are_refused_and_cause_no_server_error(body):
    for face in (face_of(), face_of("SGLang 0.5.23", "sglang")):
        found = answer(face, "/v1/completions", body)
        if body in ({"prompt": "x", "max_tokens": True}, {"prompt": [True]}):
            continue  # pydantic takes a boolean as an integer
        assert getattr(found, "status", None) == 400, found


def test_a_text_has_one_token_per_byte():
    assert encode("hé") == (104, 195, 169)
    assert decode(encode("hé\N{SNOWMAN}")) == "hé\N{SNOWMAN}"
    assert decode([104, 300, 105]) == "h\N{REPLACEMENT CHARACTER}i"
    assert chat_text([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]) == (
        "<user>a[image_url]</><assistant>"
    )


def test_generated_text_depends_on_seed_and_prompt_only():
    def text(seed, prompt):
        source = letters_of(seed, prompt)
        assert isinstance(source, Letters)
        return decode(source.getrandbits(32) for _ in range(20))

    assert text(0, (1, 2)) == text(0, (1, 2))
    assert len({text(0, (1, 2)), text(1, (1, 2)), text(0, (1, 2, 3)), text(0, ())}) == 4
    assert text(0, (1,)).isalpha()


def test_the_tokenizer_is_written_as_files(tmp_path):
    names = write_tokenizer(tmp_path / "made")
    assert names == ["tokenizer.json", "tokenizer_config.json", "config.json"]
    vocabulary = json.loads((tmp_path / "made" / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256))
    assert vocabulary["a"] == 97
    assert vocabulary["\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"] == ord(" ")
