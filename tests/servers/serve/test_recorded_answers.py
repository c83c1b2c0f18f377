"""Answers of vLLM 0.29's own frontend to 47 requests, good and bad, compared with those of our face of it.

Status, type, param and code must be equal, and the texts that clients read: unknown model, sizes, empty prompts. If a
value fits none of several types, the original lists each; ours names the first.
"""

import ast
import gzip
import json
from pathlib import Path

import pytest

from pytest_kvmock.servers.serve.api import Call, Model, RankState, release_of
from pytest_kvmock.servers.serve.face import Face, Generate

DATA = Path(__file__).parents[2] / "data" / "vllm_0.29_http_answers.json.gz"
RECORDED = json.loads(gzip.decompress(DATA.read_bytes()))
# Only the first part of these was recorded; what they were follows from the answers.
SIZED = {
    "too long text": {"prompt": "x" * 3048},
    "too long tokens": {"prompt": [1] * 3048},
    "exactly max_model_len": {"prompt": [1] * 2048, "max_tokens": 1},
    "max_model_len - 1, 1 out": {"prompt": [1] * 2047, "max_tokens": 1},
    "prompt + output too long": {"prompt": [1] * 2038, "max_tokens": 20},
    "chat: too long": {"messages": [{"role": "user", "content": "x" * (2078 - len("<user></><assistant>"))}]},
}
FIRST_BRANCH = {"chat: no role", "chat: content 5"}


class Engine:
    error = None
    is_draining = False

    def states(self):
        return [RankState()]

    def reset_cache(self, *, waits=False):
        return True

    def event_sources(self):
        return []


def face_of(models="vLLM 0.29.0", backend="vllm"):
    return Face(Model("MODEL", release_of(models, backend), 16, 2048), Engine())


def call_of(case):
    method, path, given = case["request"]
    if case["what"] in SIZED:
        given = {"json": repr({"model": "MODEL", **SIZED[case["what"]]})}
    if "json" in given:
        return Call(
            method, path, {"content-type": "application/json"}, json.dumps(ast.literal_eval(given["json"])).encode()
        )
    headers = ast.literal_eval(given.get("headers", "{}"))
    return Call(method, path, headers, ast.literal_eval(given.get("content", "b''")))


@pytest.mark.parametrize("case", [pytest.param(case, id=case["what"]) for case in RECORDED])
def test_each_answer_equals_the_recorded_one(case):
    status, recorded = case["answer"]
    if case["what"] == "GET completions":  # the recorded server lacks this path; ours has it for POST
        assert face_of().answer(call_of(case)).status == 405
        return
    answer = face_of().answer(call_of(case))
    assert not isinstance(answer, Generate)
    assert answer.status == status
    if recorded == "":
        assert answer.body == b""
        return
    body = json.loads(answer.body)
    if isinstance(recorded, dict) and "code" in recorded:
        own, message, expected = body["error"], body["error"]["message"], recorded["message"].replace("<path>", "MODEL")
        assert {**own, "message": ""} == {**recorded, "message": ""}
        if case["what"] in FIRST_BRANCH:
            message, expected = message.partition("\n")[2], expected.partition("\n")[2]
            assert expected.startswith(message.partition("}")[0])
        else:
            assert message == expected
        return
    if isinstance(recorded, str):
        recorded = json.loads(recorded)
    if case["what"] == "models":
        for each in (body, recorded):
            del (
                each["data"][0]["created"],
                each["data"][0]["permission"][0]["created"],
                each["data"][0]["permission"][0]["id"],
            )
        assert body == recorded
    elif "/render" in case["request"][1]:
        rows = zip(
            body if isinstance(body, list) else [body],
            recorded if isinstance(recorded, list) else [recorded],
            strict=True,
        )
        for own, theirs in rows:
            same = (
                "token_ids",
                "model",
                "stream",
                "stream_options",
                "cache_salt",
                "priority",
                "kv_transfer_params",
                "features",
            )
            assert {name: own[name] for name in same} == {name: theirs[name] for name in same}
            assert own["request_id"].partition("-")[0] == theirs["request_id"].partition("-")[0]
            if "max_tokens" in theirs["sampling_params"]:
                assert own["sampling_params"]["max_tokens"] == theirs["sampling_params"]["max_tokens"]
    else:
        assert body == recorded
