"""Served engines of vLLM and SGLang apart from completions: full reports, sizes, resets."""

import pytest
from served import call, complete

from pytest_kvmock import BACKENDS, EngineProfile, RouterHarness
from pytest_kvmock.engines.backends import speaker_of
from pytest_kvmock.servers import KvServer
from pytest_kvmock.wire import find_dialect


def serving(dialect="vllm-0.33", backend=None, **profile):
    sizes = {"block_size": 16, "num_blocks": 64, "workers": 1, **profile}
    return RouterHarness(EngineProfile(**sizes), backend or speaker_of(find_dialect(dialect)))


def stored(harness):
    return [event.event.data for event in harness.events if event.event.data.kind == "stored"]


def asks(server, text, **body):
    return call(server.url(0), "/v1/completions", {"prompt": text, "max_tokens": 1, **body})


def test_a_request_in_full_report_mode_reports_its_hits():
    with serving() as harness, KvServer(harness) as server:
        text = server.text(4)
        complete(server.url(0), text)
        before = len(stored(harness))
        status, _ = asks(server, text, vllm_xargs={"kv_cache_report_mode": "full"})
        again = stored(harness)[before:]
    assert status == 200
    reported, computed_again = again
    assert (reported.parent_hash, len(reported.block_hashes)) == (None, 3)
    assert computed_again.parent_hash == reported.block_hashes[-1]


@pytest.mark.parametrize("mode", ["Full", True])
def test_an_unknown_report_mode_is_ignored(mode, capfd):
    with serving() as harness, KvServer(harness) as server:
        text = server.text(4)
        complete(server.url(0), text)
        before = len(stored(harness))
        status, _ = asks(server, text, vllm_xargs={"kv_cache_report_mode": mode})
        again = stored(harness)[before:]
    assert (status, [each for each in again if each.parent_hash is None]) == (200, [])
    assert f"kv_cache_report_mode {mode!r} is ignored, as vLLM ignores it" in capfd.readouterr().err


def test_a_full_report_with_dcp_ends_the_engine():
    backend = BACKENDS["vllm"].variant("vllm_dcp", dcp=4)
    with serving(backend=backend, block_size=64) as harness, KvServer(harness, dialect="vllm-0.33") as server:
        text = server.text(4)
        complete(server.url(0), text)
        status, answer = asks(server, text, vllm_xargs={"kv_cache_report_mode": "full"})
        health, _ = call(server.url(0), "/health")
    assert status == 500
    assert "FullReportError: a full report ends this engine" in answer["error"]["message"]
    assert health == 503


def test_vllms_metrics_show_page_and_block_size_under_context_parallelism():
    backend = BACKENDS["vllm"].variant("vllm_dcp", dcp=4)
    with serving(backend=backend, block_size=64) as harness, KvServer(harness, dialect="vllm-0.33") as server:
        complete(server.url(0), server.text(2))
        _, page = call(server.url(0), "/metrics")
        (event,) = [each for each in harness.events if each.event.data.kind == "stored"]
    assert 'block_size="16",effective_attention_block_size="64"' in page
    assert len(event.token_ids[0]) == 64


def test_a_reset_is_published_with_the_next_request():
    with serving() as harness, KvServer(harness) as server:
        text = server.text(3)
        complete(server.url(0), text)
        before = len(harness.events)
        assert call(server.url(0), "/reset_prefix_cache", {}) == (200, {"success": True})
        assert len(harness.events) == before
        complete(server.url(0), text)
        kinds = [each.event.data.kind for each in list(harness.events)[before:]]
    assert kinds == ["cleared", "stored"]


def test_sliding_windows_refuse_context_parallelism():
    with pytest.raises(ValueError, match="dcp must be 1 with a cache group of kind 'sliding_window', as vLLM refuses"):
        BACKENDS["vllm_gpt_oss"].variant("wrong", dcp=2)


def test_sglang_advertises_page_and_block_size_under_context_parallelism():
    backend = BACKENDS["sglang"].variant("sglang_dcp", dcp=4)
    with serving(backend=backend, block_size=64) as harness, KvServer(harness, dialect="sglang-0.5.22") as server:
        complete(server.url(0), server.text(1) + server.text(1)[:32])
        _, info = call(server.url(0), "/server_info")
        (event,) = stored(harness)
        sizes = [len(each.token_ids[0]) for each in harness.events if each.token_ids]
    assert (info["page_size"], info["kv_events"]["block_size"]) == (16, 64)
    assert (len(event.block_hashes), sizes) == (1, [64])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dcp": 3}, "dcp must divide block_size, 16 tokens, into pages; got 3"),
        ({"dcp": 2, "window": 64}, "dcp of sglang is for full attention alone, without tiers, drafts and pairs"),
    ],
)
def test_sglang_refuses_unsupported_context_parallelism(options, text):
    with pytest.raises(ValueError, match=text):
        BACKENDS["sglang"].variant("wrong", **options)
