"""Ranks behind HTTP ports: one port per worker, per rank, or per node of two."""

import re

import pytest
from depth import each_parameter
from served import call, complete

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.engines.backends import speaker_of
from pytest_kvmock.servers import KvServer
from pytest_kvmock.wire import find_dialect
from pytest_kvmock.wire.sockets.endpoints import EndpointError

RANKS = 4
BEHIND = {"worker": [[0, 1, 2, 3]], "rank": [[0], [1], [2], [3]], "node": [[0, 1], [2, 3]]}


def serving(ranks=RANKS, workers=1, dialect="vllm-0.33", **roles):
    profile = EngineProfile(block_size=16, num_blocks=64, workers=workers, dp_size=ranks)
    return RouterHarness(profile, speaker_of(find_dialect(dialect)), **roles)


def asked_of(url, text, rank):
    """Request a completion with a rank in a header; return its status and error message."""
    body = {"prompt": text, "max_tokens": 1}
    status, answer = call(url, "/v1/completions", body, headers={"X-data-parallel-rank": str(rank)})
    return status, answer["error"]["message"] if status != 200 else ""


@pytest.fixture(params=BEHIND)
def form(request):
    with serving(workers=2) as kv, KvServer(kv, http=request.param) as server:
        yield server, BEHIND[request.param]


@each_parameter
def test_a_header_names_a_rank_by_its_position_behind_the_port(form):
    server, behind = form
    for ranks in behind:
        for place, rank in enumerate(ranks):
            url = server.url(1, rank)
            assert asked_of(url, server.text(2), place) == (200, "")
            row = server.requests[-1]
            assert (row.worker, row.rank) == (1, rank)
            event = list(server.harness.events)[-1].event
            assert (event.worker_id, event.dp_rank) == (1, rank)
        out = f"data_parallel_rank {len(ranks)} is out of range [0, {len(ranks)})."
        assert asked_of(server.url(1, ranks[0]), server.text(2), len(ranks)) == (400, out)


@each_parameter
def test_event_sources_and_metrics_number_ranks_within_the_whole_worker(form):
    server, behind = form
    bound = server.publisher(1).endpoints
    for ranks in behind:
        url = server.url(1, ranks[-1])
        sources = call(url, "/kv_event_sources")[1]
        assert [*sources] == [str(rank) for rank in ranks]
        assert [each["endpoint"] for each in sources.values()] == [bound[rank] for rank in ranks]
        assert {each["buffer_steps"] for each in sources.values()} == {10_000}
        engines = re.findall(r'vllm:num_requests_running\{engine="(\d)"', call(url, "/metrics")[1])
        assert engines == [*sources]


@each_parameter
def test_the_ready_line_names_each_port_and_its_ranks(form):
    server, behind = form
    row = server.inside.ready_line()["workers"][1]
    urls = [server.url(1, ranks[0]) for ranks in behind]
    assert (row["http"], len(row["events"])) == (urls[0], RANKS)
    expected = [{"http": url, "ranks": ranks} for url, ranks in zip(urls, behind, strict=True)]
    assert row.get("ports", expected[:1]) == expected
    assert server.urls[len(behind) :] == urls


def server_at(kv, firsts):
    """Return a server at the first of these ports that is followed by enough free ones."""
    for first in firsts:
        try:
            return KvServer(kv, http="rank", ports={"http": first}), first
        except EndpointError:
            continue
    raise AssertionError("no ports in a row are free")


def test_ports_of_ranks_are_consecutive():
    with serving(ranks=3, workers=2) as kv:
        server, first = server_at(kv, range(20_000, 30_000, 6))  # below the ports that the system picks
        with server:
            assert [int(url.rpartition(":")[2]) for url in server.urls] == [*range(first, first + 6)]


def test_each_port_of_a_rank_has_its_own_adapters_and_sleep_state():
    with serving(ranks=2) as kv, KvServer(kv, http="rank") as server:
        complete(server.url(0, 1), server.text(2))
        complete(server.url(0, 0), server.text(2))
        load = {"lora_name": "a", "lora_path": "/one"}
        assert call(server.url(0, 1), "/v1/load_lora_adapter", load)[0] == 200
        assert [len(call(server.url(0, rank), "/v1/models")[1]["data"]) for rank in (0, 1)] == [1, 2]
        assert call(server.url(0, 1), "/sleep?level=1", {})[0] == 200
        assert [call(server.url(0, rank), "/is_sleeping")[1]["is_sleeping"] for rank in (0, 1)] == [False, True]
        assert complete(server.url(0, 0), server.text(2))
        server.restart(0)
        assert complete(server.url(0, 1), server.text(2))  # awake again


def test_stop_start_drain_and_reset_apply_to_all_ports_of_a_worker():
    with serving(ranks=2) as kv, KvServer(kv, http="rank") as server:
        urls, text = server.urls, server.text(2)
        for url in urls:
            complete(url, text)
        assert server.reset(0)
        assert server.held(text) == {}
        for away in (server.stop, server.drain):
            away(0)
            for url in urls:
                with pytest.raises(OSError):
                    call(url, "/health")
            server.start(0)
            assert [call(url, "/health")[0] for url in urls] == [200, 200]
        server.answer(0, 503)
        assert asked_of(urls[1], text, 0) == (503, "Service Unavailable")
        assert asked_of(urls[0], text, 0) == (200, "")


def test_a_rank_header_that_is_no_integer_is_ignored_as_by_the_engine():
    with serving(ranks=2) as kv, KvServer(kv) as server:
        assert asked_of(server.url(0), server.text(1), "second") == (200, "")


def test_a_body_may_name_a_rank_in_two_ways_for_sglang():
    with serving(ranks=2, dialect="sglang-0.5.23") as kv, KvServer(kv, "sglang-0.5.23") as server:
        for body in ({"data_parallel_rank": 1}, {"routed_dp_rank": 1}, {"routed_dp_rank": 1, "data_parallel_rank": 0}):
            complete(server.url(0), server.text(1), **body)
        assert [row.rank for row in server.requests] == [1, 1, 1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"http": "ranks"}, "KvServer: http: got 'ranks'; did you mean 'rank'? allowed: worker, rank, node"),
        ({"http": None}, "KvServer: http: got None; allowed: worker, rank, node"),
        (
            {"ports": {"events": 25_557, "replay": 25_558}},
            "KvServer: ports['replay'], 25558 to 25561, overlap ports['events'], 25557 to 25560",
        ),
        (
            {"http": "rank", "ports": {"http": 25_000, "control": 25_003}},
            "KvServer: ports['control'], 25003, overlap ports['http'], 25000 to 25003",
        ),
        (
            {"http": "node", "ports": {"http": 65_535}},
            "KvServer: ports['http'] must leave room for 2 ports, at most 65534, got 65535",
        ),
    ],
)
@each_parameter
def test_an_impossible_http_form_is_refused_in_one_line(options, text):
    with serving() as kv, pytest.raises(ValueError) as caught:
        KvServer(kv, **options)
    assert str(caught.value) == text


def test_engines_with_one_port_for_all_ranks_refuse_other_forms():
    sglang = find_dialect("sglang-0.5.23")
    with (
        serving(dialect="sglang-0.5.23") as kv,
        pytest.raises(
            ValueError, match="http must be 'worker' for SGLang's engines, one port for all ranks; got 'rank'"
        ),
    ):
        KvServer(kv, sglang, http="rank")
    with pytest.raises(ValueError, match="http must be 'worker' for workers with roles"):
        KvServer(roles={"prefill": 1, "decode": 1}, http="node")


def test_url_refuses_a_rank_that_does_not_exist():
    with (
        serving(ranks=2) as kv,
        KvServer(kv) as server,
        pytest.raises(ValueError, match="rank must be below 2, the ranks of worker 0; got 2"),
    ):
        server.url(0, 2)
