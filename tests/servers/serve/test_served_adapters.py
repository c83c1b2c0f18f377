"""Adapters that clients load and unload while an engine runs: routes, numbers, and cache hits."""

import pytest
from depth import each_parameter
from served import cached, call, complete

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.engines.backends import speaker_of
from pytest_kvmock.servers import KvServer
from pytest_kvmock.wire import find_dialect

VLLM, SGLANG = "vllm-0.33", "sglang-0.5.22"


@pytest.fixture
def serving(request):
    dialect, ranks = getattr(request, "param", (VLLM, 1))
    profile = EngineProfile(block_size=16, num_blocks=64, workers=1, dp_size=ranks)
    with RouterHarness(profile, speaker_of(find_dialect(dialect))) as harness, KvServer(harness, dialect) as server:
        yield harness, server


def load(server, name="a", path="/one", **more):
    prefix = "" if server.dialect.name == SGLANG else "/v1"
    return call(server.url(0), f"{prefix}/load_lora_adapter", {"lora_name": name, "lora_path": path, **more})


def unload(server, name="a"):
    prefix = "" if server.dialect.name == SGLANG else "/v1"
    return call(server.url(0), f"{prefix}/unload_lora_adapter", {"lora_name": name})


def stored(harness):
    return [each for each in harness.events if each.event.data.kind == "stored"]


def test_a_loaded_adapter_is_listed_as_a_model_until_it_is_unloaded(serving):
    _, server = serving
    assert load(server) == (200, "Success: LoRA adapter 'a' added successfully.")
    cards = call(server.url(0), "/v1/models")[1]["data"]
    assert [(each["id"], each["root"]) for each in cards] == [("mock-model", "mock-model"), ("a", "/one")]
    complete(server.url(0), server.text(2), model="a")
    assert unload(server) == (200, "Success: LoRA adapter 'a' removed successfully.")
    status, answer = call(server.url(0), "/v1/completions", {"prompt": "x", "model": "a"})
    assert (status, answer["error"]["message"]) == (404, "The model `a` does not exist.")


@pytest.mark.parametrize(
    ("path", "hit", "hashes"), [("/one", 32, "the same"), ("/two", 0, "others")], ids=["same path", "other path"]
)
@each_parameter
def test_adapter_blocks_depend_on_name_and_path_and_a_reload_gets_another_number(serving, path, hit, hashes):
    harness, server = serving
    text = server.text(2) + "x"
    load(server)
    complete(server.url(0), text, model="a")
    unload(server)
    load(server, path=path)
    assert cached(complete(server.url(0), text, model="a")) == hit
    complete(server.url(0), text + server.text(1), model="a")
    first, *_, last = stored(harness)
    assert (first.extra["lora_name"], last.extra["lora_name"]) == ("a", "a")
    assert (first.extra["lora_id"], last.extra["lora_id"]) == (1, 2)
    roots = {each.event.data.block_hashes[0] for each in stored(harness) if each.event.data.parent_hash is None}
    assert len(roots) == {"the same": 1, "others": 2}[hashes]
    harness.assert_in_sync()


def test_an_adapter_loaded_in_place_keeps_its_number(serving):
    harness, server = serving
    load(server)
    complete(server.url(0), server.text(2), model="a")
    assert load(server, path="/two", load_inplace=True)[0] == 200
    complete(server.url(0), server.text(2), model="a")
    assert {each.extra["lora_id"] for each in stored(harness)} == {1}


@pytest.mark.parametrize("serving", [(SGLANG, 1)], indirect=True)
def test_a_reloaded_adapter_hits_nothing_on_sglang(serving):
    harness, server = serving
    text = server.text(2) + "x"
    assert load(server)[1] == {"success": True, "error_message": "", "loaded_adapters": {"a": "/one"}}
    complete(server.url(0), text, model="a")
    assert cached(complete(server.url(0), text, model="a")) == 32
    assert unload(server)[1] == {"success": True, "error_message": "", "loaded_adapters": {}}
    load(server)
    assert cached(complete(server.url(0), text, model="a")) == 0
    harness.assert_in_sync()
    assert list(harness.events.errors) == []


@pytest.mark.parametrize(
    ("ask", "status", "text"),
    [
        (lambda server: load(server, path=""), 400, "Both 'lora_name' and 'lora_path' must be provided."),
        (
            lambda server: load(server, name="mock-model"),
            400,
            "The lora adapter name 'mock-model' conflicts with a served base model.",
        ),
        (lambda server: [load(server), load(server)][1], 400, "The lora adapter 'a' has already been loaded."),
        (lambda server: unload(server, "b"), 404, "The lora adapter 'b' cannot be found."),
        (lambda server: unload(server, ""), 400, "'lora_name' needs to be provided to unload"),
    ],
)
@each_parameter
def test_an_impossible_adapter_request_is_refused(serving, ask, status, text):
    got, answer = ask(serving[1])
    assert (got, text in answer["error"]["message"]) == (status, True)


def test_a_missing_field_of_an_adapter_request_is_named(serving):
    status, answer = call(serving[1].url(0), "/v1/load_lora_adapter", {"lora_name": "a"})
    assert (status, answer["error"]["param"]) == (400, "body.lora_path")


def sglang_refusal(text, loaded):
    return 400, {"success": False, "error_message": text, "loaded_adapters": loaded}


@pytest.mark.parametrize("serving", [(SGLANG, 1)], indirect=True)
def test_sglang_refuses_adapter_requests_in_its_own_form(serving):
    _, server = serving
    load(server)
    text = "Failed to load LoRA adapter a because it is already loaded"
    assert load(server, path="/two") == sglang_refusal(text, {"a": "/one"})
    text = "LoRA with name b does not exist. Loaded LoRAs: dict_keys(['a'])"
    assert unload(server, "b") == sglang_refusal(text, None)


@pytest.mark.parametrize("serving", [(SGLANG, 2)], indirect=True)
def test_sglang_loads_no_adapter_with_several_ranks(serving):
    assert load(serving[1]) == sglang_refusal("dp_size must be 1 for dynamic lora loading", {})
    assert unload(serving[1]) == sglang_refusal("dp_size must be 1 for dynamic lora loading", None)
