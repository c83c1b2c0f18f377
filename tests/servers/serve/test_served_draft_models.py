"""Draft models of `serve --speculative`."""

import pytest

from pytest_kvmock import BACKENDS, RouterHarness
from pytest_kvmock.servers.serve.command import _with_draft_model as with_draft_model


@pytest.mark.parametrize(
    ("backend", "text", "ahead"),
    [
        ("vllm", "mtp", 1),
        ("vllm", "mtp:3:3", 3),
        ("vllm", "ngram:2", 0),
        ("vllm_gpt_oss", "eagle3:2", 1),
        ("sglang", "EAGLE", 1),
        ("sglang", "EAGLE3:5", 1),
        ("sglang", "NGRAM", 0),
    ],
)
def test_an_engine_gets_the_requested_draft_model(backend, text, ahead):
    worker = RouterHarness(backend=with_draft_model(BACKENDS[backend], text)).worker(0)
    assert ahead == worker.traits.looks_ahead


def test_without_the_option_the_backend_is_unchanged():
    assert BACKENDS["vllm"] is with_draft_model(BACKENDS["vllm"], None)


@pytest.mark.parametrize(
    ("backend", "text", "why"),
    [
        ("vllm", "medusa", "not recorded"),
        ("vllm", "mtp:three", "--speculative must be METHOD"),
        ("vllm", "mtp:3:1:1", "--speculative must be METHOD"),
        ("vllm", "mtp:0", "at least 1"),
        ("vllm", "eagle:3:2", "modules are those of method 'mtp'"),
        ("sglang", "EAGLE:3:4", "--speculative must be ALGORITHM"),
        ("sglang", "EAGLE:0", "at least 1"),
    ],
)
def test_an_unknown_draft_model_is_refused(backend, text, why):
    with pytest.raises(ValueError, match=why):
        with_draft_model(BACKENDS[backend], text)


@pytest.mark.parametrize(("backend", "text"), [("vllm", "EAGLE"), ("sglang", "mtp")])
def test_a_draft_option_of_another_engine_is_refused(backend, text):
    with pytest.raises((ValueError, TypeError), match="speculative"):
        RouterHarness(backend=with_draft_model(BACKENDS[backend], text)).worker(0)


@pytest.mark.parametrize(
    ("backend", "accepted"), [("vllm_mtp", [4]), ("sglang_eagle", [4]), ("vllm_mtp", [-1]), ("vllm", [1])]
)
def test_a_step_cannot_accept_more_tokens_than_it_has_drafts(backend, accepted):
    harness = RouterHarness(backend=backend)
    request = harness.worker(0).prefill(range(20))
    with pytest.raises(ValueError, match="accepted"):
        request.decode(range(5), accepted=accepted)
