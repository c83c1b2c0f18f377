"""OpenAI's own client for Python against a served engine: it is served, and it finds what it reads."""

import asyncio

import pytest

openai = pytest.importorskip("openai", reason="needs openai (dependency group openai)")

from pytest_kvmock import EngineProfile, RouterHarness  # noqa: E402 - after it is known that the client is here
from pytest_kvmock.engines.backends import speaker_of  # noqa: E402
from pytest_kvmock.servers import KvServer  # noqa: E402
from pytest_kvmock.wire import find_dialect  # noqa: E402

MODEL = "mock-model"


@pytest.fixture(params=["vllm-0.33", "sglang-0.5.23"])
def served(request):
    profile = EngineProfile(workers=1, num_blocks=512)
    with (
        RouterHarness(profile, speaker_of(find_dialect(request.param))) as kv,
        KvServer(kv, request.param, adapters=["sql"]) as server,
        openai.OpenAI(base_url=f"{server.url(0)}/v1", api_key="none", max_retries=0) as client,
    ):
        yield server, client


def test_models_are_listed(served):
    _, client = served
    assert [model.id for model in client.models.list()][:2] == [MODEL, "sql"]


def test_completions_are_served_and_streamed(served):
    server, client = served
    text = server.text(4)
    first = client.completions.create(model=MODEL, prompt=text, max_tokens=8)
    again = client.completions.create(model=MODEL, prompt=text, max_tokens=8)
    assert first.choices[0].text == again.choices[0].text
    assert first.usage.completion_tokens == 8
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    parts = list(client.completions.create(model=MODEL, prompt=text, max_tokens=8, stream=True))
    assert "".join(part.choices[0].text for part in parts if part.choices) == first.choices[0].text


def test_later_turns_of_a_chat_hit_the_cache(served):
    server, client = served
    turns = [{"role": "user", "content": server.text(4)}]
    answer = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=16)
    said = answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    turns += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    parts = list(client.chat.completions.create(model=MODEL, messages=turns, max_tokens=4, **options))
    assert parts[0].choices[0].delta.role == "assistant"
    assert len("".join(part.choices[0].delta.content or "" for part in parts if part.choices)) == 4
    assert parts[-1].usage.completion_tokens == 4
    assert parts[-1].usage.prompt_tokens_details.cached_tokens > 0  # the second turn hits


def test_errors_raise_the_clients_own_exceptions(served):
    server, client = served
    if server.dialect.backend == "vllm":  # SGLang does not check the model's name
        with pytest.raises(openai.NotFoundError, match="nothing"):
            client.completions.create(model="nothing", prompt="a")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt="a", max_tokens=10**9)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=[])


def test_a_stream_that_the_client_closes_is_aborted(served):
    server, client = served
    server.hold()
    stream = client.completions.create(model=MODEL, prompt=server.text(2), max_tokens=64, stream=True)
    server.wait_requests(open=1)
    stream.close()
    server.wait_requests(open=0)
    server.release()
    assert server.requests[-1].aborted


def test_the_async_client_can_send_many_requests_at_once(served):
    server, _ = served

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url(0)}/v1", api_key="none") as client:
            asked = [client.completions.create(model=MODEL, prompt=server.text(2), max_tokens=4) for _ in range(20)]
            return await asyncio.gather(*asked)

    assert [each.usage.completion_tokens for each in asyncio.run(ask())] == [4] * 20
