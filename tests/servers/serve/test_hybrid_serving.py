"""Engines of hybrid models behind sockets: a router may know from the reusable blocks up to the held ones."""

import pytest
from served import cached, call, complete

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.engines.backends import served_by
from pytest_kvmock.servers import KvServer
from pytest_kvmock.wire import find_dialect


@pytest.fixture
def server():
    with (
        RouterHarness(EngineProfile(num_blocks=400), "vllm_gpt_oss") as kv,
        KvServer(kv, ports={"control": 0}) as server,
    ):
        yield server


def test_the_third_request_about_a_document_reuses_it(server):
    document = server.text(20)
    assert [cached(complete(server.url(0), server.text(3, after=document))) for _ in range(3)] == [0, 0, 320]
    assert server.expect(document + "x")["blocks"] == [{"worker": 0, "rank": 0, "blocks": 20, "reusable": 320}]


def test_a_router_may_know_any_number_of_blocks_from_reusable_to_held(server):
    text = server.text(20)
    complete(server.url(0), text + "x")
    part = text[: 16 * 12] + "x"
    complete(server.url(0), server.text(3, after=text[: 16 * 4]))  # keeps a window where it branches
    assert server.expect(part)["blocks"] == [{"worker": 0, "rank": 0, "blocks": 12, "reusable": 64}]

    def known(blocks):
        return server.check(part, [{"worker": 0, "rank": 0, "blocks": blocks}])

    assert [known(blocks) for blocks in (4, 8, 12)] == [""] * 3
    wrong = [known(blocks) for blocks in (3, 13)]
    assert [each.partition(" (")[0] for each in wrong] == [
        f"worker 0 rank 0: the router knows {blocks} blocks, 12 are held, and 4 would be reused" for blocks in (3, 13)
    ]
    assert [each.partition(" (")[2] for each in wrong] == [
        "batch 1 stored them: it went to no subscription, no subscriber asked for a replay of it)",
        "the prompt has 12 full blocks)",
    ]
    assert [each.rpartition(": the router")[0] for each in server.truth.differences] == [
        "a prompt of 193 tokens: worker 0 rank 0"
    ] * 2
    _, answer = call(server.control_url, "/check", {"prompt": part, "blocks": [], "last_batch": None})
    assert answer["differences"].startswith(
        "worker 0 rank 0: the router knows 0 blocks, 12 are held, and 4 would be reused (batch "
    )


def test_the_ready_line_has_the_default_block_size(server):
    assert call(server.control_url, "/ready")[1]["block_size"] == 16


@pytest.mark.parametrize("dialect", ["vllm-0.19", "vllm-0.33-bytes"])
def test_a_dialect_without_cache_groups_is_refused(dialect):
    with (
        RouterHarness(EngineProfile(num_blocks=400), "vllm_gpt_oss") as kv,
        pytest.raises(
            ValueError,
            match="^cache groups of vLLM's hybrid models are mocked in vllm-0.23, vllm-0.24, vllm-0.28, vllm-0.33; "
            "got dialect "
            f"'{dialect}'$",
        ),
    ):
        KvServer(kv, dialect)


@pytest.mark.parametrize(
    ("dialect", "model", "backend"),
    [
        ("vllm-0.33", "gpt-oss", "vllm_gpt_oss"),
        ("vllm-0.24", "Qwen3-Next", "vllm_qwen3_next"),
        ("vllm-0.23", "kimi_k3", "vllm_kimi_k3"),
        ("sglang-0.5.23", "gpt-oss", "sglang_gpt_oss"),
        ("vllm-0.33", "mock-model", "vllm"),
        ("vllm-0.33", "0-19", "vllm"),  # not a model, although `vllm_0_19` is a backend
        ("dynamo-router-event", "gpt-oss", "lineage"),
    ],
)
def test_the_model_name_selects_the_engine_of_a_hybrid_model(dialect, model, backend):
    assert served_by(find_dialect(dialect), model).name == backend
