"""A served engine of TensorRT-LLM: polled events in its JSON form, its answers, and a recorder in place of a router."""

import json
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from pytest_kvmock import BACKENDS, EngineProfile, RouterHarness
from pytest_kvmock.servers import KvServer, check_file, record

PROMPT = [*range(1, 11)]


def call(url, body=None):
    """POST a body, or GET without one; return the answer, or the status if it is not 200."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(url, data, {"content-type": "application/json"})) as answer:
            return json.loads(answer.read() or b"null")
    except HTTPError as error:
        return error.code


def complete(url, prompt=PROMPT, max_tokens=3):
    return call(f"{url}/v1/completions", {"model": "mock-model", "prompt": prompt, "max_tokens": max_tokens})


@pytest.fixture
def served():
    servers = []

    def serve(backend="trtllm", dialect="trtllm-1.2", **sizes):
        kv = RouterHarness(EngineProfile(**{"block_size": 4, "num_blocks": 64, **sizes}), backend=backend)
        servers.append(KvServer(kv, dialect))
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


def test_each_event_is_polled_once_in_trtllms_json_form(served):
    url = served().url()
    answer = complete(url)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    created, stored, partial = call(f"{url}/kv_cache_events", {})
    assert created == {
        "event_id": 0,
        "data": {"type": "created", "num_blocks_per_cache_level": [64, 0]},
        "window_size": 256,
    }
    assert (stored["event_id"], stored["data"]["type"], stored["data"]["parent_hash"]) == (1, "stored", None)
    first = stored["data"]["blocks"][0]
    assert {
        "type": "stored_block",
        "block_hash": 924206229973855,
        "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in (1, 2, 3, 4)],
        "cache_level": 0,
        "priority": 35,
    } == first
    assert 2728178455351807326 == stored["data"]["blocks"][1]["block_hash"] == partial["data"]["parent_hash"]
    assert [token["token_id"] for token in partial["data"]["blocks"][0]["tokens"]][:2] == [9, 10]
    assert call(f"{url}/kv_cache_events", {}) == []


def test_reuse_of_part_of_a_block_is_reported_as_cached_tokens(served):
    url = served().url()
    complete(url)
    assert complete(url)["usage"]["prompt_tokens_details"]["cached_tokens"] == 9


def test_server_info_names_the_hash_algorithm_and_other_paths_are_404(served):
    url = served().url()
    assert call(f"{url}/server_info") == {"tokens_per_block": 4, "kv_cache_hash_algo": "v1_block_key"}
    assert call(f"{url}/health") is None
    for path in ("/metrics", "/v1/models", "/version", "/tokenize"):
        assert call(f"{url}{path}") == 404
    chat = {"model": "mock-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    assert call(f"{url}/v1/chat/completions", chat)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("algo", "name"),
    [
        ("v1_block_key", 924206229973855),
        ("v2_sha256", "e432228522a304ab556d66e6e40979ad05575f28b19b554264dd3c6277aaf073"),
        ("v2_sha256_64", 16443243144690205867),
    ],
)
def test_v2_events_name_their_layer_group_and_server_info_the_hash_algorithm(served, algo, name):
    url = served(BACKENDS["trtllm_v2"].variant(algo, hash_algo=algo), "trtllm-1.3").url()
    complete(url)
    assert {"tokens_per_block": 4, "kv_cache_hash_algo": algo} == call(f"{url}/server_info")
    created, stored = call(f"{url}/kv_cache_events", {})
    assert {
        "event_id": 0,
        "data": {"type": "created", "num_blocks_per_cache_level": [64]},
        "window_size": 256,
        "hash_algo": algo,
        "layer_group_id": 0,
    } == created
    assert [len(block["tokens"]) for block in stored["data"]["blocks"]] == [4, 4, 2]
    assert name == stored["data"]["blocks"][0]["block_hash"]
    assert complete(url)["usage"]["prompt_tokens_details"]["cached_tokens"] == 9
    assert call(f"{url}/kv_cache_events", {}) == []  # the prompt was cached


def test_a_full_event_buffer_keeps_the_newest_events_and_leaves_a_gap(served):
    server = served(BACKENDS["trtllm"].variant("small_buffer", event_buffer=2))
    for first in (0, 100, 200):
        complete(server.url(), [*range(first, first + 10)])
    left = call(f"{server.url()}/kv_cache_events", {})
    assert [event["event_id"] for event in left] == [5, 6]


def test_a_reader_that_starts_late_never_receives_created(served):
    url = served().url()
    complete(url)
    call(f"{url}/kv_cache_events", {})
    complete(url, [*range(100, 110)])
    assert {event["data"]["type"] for event in call(f"{url}/kv_cache_events", {})} == {"stored"}


def test_the_server_fixture_serves_trtllm_by_its_dialect(pytester):
    pytester.makepyfile(
        """
        import json
        from urllib.request import Request, urlopen
        import pytest

        @pytest.mark.kv_dialects("trtllm-1.2")
        @pytest.mark.kvmock(block_size=4)
        def test_it(kv_server):
            prompt = json.dumps({"prompt": list(range(9)), "max_tokens": 2}).encode()
            head = {"content-type": "application/json"}
            urlopen(Request(f"{kv_server.url()}/v1/completions", prompt, head)).close()
            with urlopen(Request(f"{kv_server.url()}/kv_cache_events", b"{}", head)) as answer:
                assert ["created", "stored", "stored"] == [row["data"]["type"] for row in json.load(answer)]
        """
    )
    result = pytester.runpytest_inprocess("-p", "kvmock", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["kvmock: 1 test on trtllm; 3 events; no warnings"])


def test_events_of_all_ranks_are_polled_at_the_first_rank_with_their_numbers(served):
    url = served(dp_size=2).url()
    complete(url)
    complete(url)
    assert {0, 1} >= {event["attention_dp_rank"] for event in call(f"{url}/kv_cache_events", {})}


def test_wire_faults_are_refused_for_polled_events(served):
    server = served()
    with pytest.raises(
        ValueError, match=r"^fault 'lose' is for events that are sent over ZMQ; this engine's are polled$"
    ):
        server.fault(0, "lose")
    assert [] == server.inside.faults_left == server.replays


@pytest.mark.parametrize(
    ("backend", "dialect"),
    [("trtllm", "trtllm-1.2")]
    + [
        (BACKENDS["trtllm_v2"].variant(algo, hash_algo=algo, levels=(8,)), "trtllm-1.3")
        for algo in ("v1_block_key", "v2_sha256", "v2_sha256_64")
    ],
    ids=lambda each: getattr(each, "name", each),
)
def test_polled_events_can_be_recorded(served, tmp_path, backend, dialect):
    url = served(backend, dialect).url()
    for first in (0, 100, 0, 3):
        complete(url, [*range(first, first + 30)])
    recorded = record(url, tmp_path / "trtllm.jsonl", dialect=dialect, batches=1)
    assert (recorded.unreadable, recorded.errors) == ([], [])
    assert {
        "created" if event.kind == "cleared" else event.kind for event in (each.event.data for each in recorded.log)
    } - {"removed"} == {"created", "stored"}
    assert call(f"{url}/kv_cache_events", {}) == []
    checked = check_file(tmp_path / "trtllm.jsonl")
    assert (recorded.log.total, []) == (checked.log.total, checked.log.errors)


def test_a_recording_that_is_impossible_is_refused(tmp_path):
    with pytest.raises(ValueError, match="an engine whose events are polled is at http://HOST:PORT, got 'tcp://x:1'"):
        record("tcp://x:1", tmp_path / "a", dialect="trtllm-1.2", batches=1)
    with pytest.raises(ValueError, match="replay and topic are of events over ZMQ"):
        record("http://x:1", tmp_path / "a", dialect="trtllm-1.2", topic="kv")
    silent = record("http://127.0.0.1:9", tmp_path / "b", dialect="trtllm-1.2", seconds=0.01)
    assert silent.silence.startswith("nothing was received: no answer from http://127.0.0.1:9/kv_cache_events")


@pytest.mark.parametrize(("backend", "dialect"), [("trtllm", "trtllm-1.2"), ("trtllm_v2", "trtllm-1.3")])
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_trtllms_own_scheduler_policies_can_be_served(backend, dialect, policy):
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=16), backend=backend)
    kv.engine(0, semantics=policy)
    with KvServer(kv, dialect) as server:
        assert complete(server.url())["usage"]["completion_tokens"] == 3
