"""Served engines of P/D pairs with several ranks: the rank of a leg, and the rank at which the other leg looks."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from depth import each_parameter
from served import call, complete

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.engines.backends import speaker_of
from pytest_kvmock.servers import KvServer
from pytest_kvmock.servers.serve.kv_server import roles_by_dialect
from pytest_kvmock.wire import find_dialect

P, D = 0, 1
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
SOON = {"waiting_timeout": 0.1, "bootstrap_timeout": 0.1}


@contextmanager
def ranks_of(dialect, **role):
    """Return a server of a prefill and a decode engine with two ranks each."""
    found = find_dialect(dialect)
    roles = roles_by_dialect(found, {"prefill": role, "decode": role})
    profile = EngineProfile(dp_size=2, block_size=16, num_blocks=512)
    with RouterHarness(profile, speaker_of(found), roles=roles) as kv, KvServer(kv, dialect) as server:
        yield server
        assert server.inside.broken == []
        assert kv.events.problems == []


def at_rank(rank):
    return {"X-data-parallel-rank": str(rank)}


# ------------------------------------------------------------------------------------------------------------- vLLM


def test_a_vllm_rank_hands_over_under_its_own_engine_id_and_port():
    with ranks_of("vllm-0.33") as server:
        for rank in (0, 1):
            text = server.text(3)
            body = {"prompt": text, "max_tokens": 1, "kv_transfer_params": PREFILL}
            given = call(server.url(P), "/v1/completions", body, headers=at_rank(rank))[1]["kv_transfer_params"]
            assert (given["remote_engine_id"], given["remote_port"]) == (f"prefill-0_dp{rank}", 5600 + rank)
            wrong = {"prompt": text, "max_tokens": 2, "kv_transfer_params": {**given, "remote_port": 5601 - rank}}
            assert call(server.url(D), "/v1/completions", wrong)[0] == 500  # the port of another rank
            right = {**wrong, "kv_transfer_params": given}
            assert call(server.url(D), "/v1/completions", right, headers=at_rank(1 - rank))[0] == 200  # any decode rank
            assert server.requests[-1].rank == 1 - rank
            assert server.requests[-1].cached_tokens == 48
        assert [to for _, to, _ in server.pairs.notified] == ["prefill-0_dp0", "prefill-0_dp1"]
        assert server.pairs.leased == {}


def test_vllm_ignores_a_rank_that_is_no_integer():
    with ranks_of("vllm-0.33") as server:
        body = {"prompt": server.text(1), "max_tokens": 1}
        assert call(server.url(P), "/v1/completions", body, headers=at_rank("first"))[0] == 200
        assert call(server.url(P), "/v1/completions", body, headers=at_rank(2))[0] == 400


@each_parameter
@pytest.mark.parametrize(("named", "status", "options"), [("1", 200, {}), ("0", 500, {"abort_request_timeout": 0.1})])
def test_mooncakes_bootstrap_server_names_each_rank(named, status, options):
    with ranks_of("vllm-0.33", hand_over="vllm-mooncake", **options) as server:
        place = server.pairs.bootstraps[P].url
        engines = call(place, "/query")[1]
        assert {rank: each["engine_id"] for rank, each in engines.items()} == {
            "0": "prefill-0_dp0",
            "1": "prefill-0_dp1",
        }
        text, transfer = server.text(2), {"transfer_id": "t"}
        first = {"prompt": text, "max_tokens": 1, "kv_transfer_params": {**PREFILL, **transfer}}
        assert call(server.url(P), "/v1/completions", first, headers=at_rank(1))[0] == 200
        given = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": engines[named]["engine_id"],
            "remote_bootstrap_addr": place,
            **transfer,
        }
        second = {"prompt": text, "max_tokens": 2, "kv_transfer_params": given}
        # At another rank the leg waits until its timeout.
        assert call(server.url(D), "/v1/completions", second)[0] == status


# ----------------------------------------------------------------------------------------------------------- SGLang


def in_room(server, room, prefill=None, decode=None, prompt=None):
    """Send both legs of a room at once, each with its own fields; return both statuses."""
    place = urlsplit(server.pairs.bootstraps[P].url)
    body = {"prompt": prompt or server.text(3), "max_tokens": 3, "bootstrap_room": room}
    body |= {"bootstrap_host": place.hostname, "bootstrap_port": place.port}
    bodies = ({**body, **(prefill or {})}, {**body, **(decode or {})})
    with ThreadPoolExecutor(2) as pool:
        sent = [pool.submit(call, server.url(at), "/v1/completions", each) for at, each in enumerate(bodies)]
    return tuple(each.result()[0] for each in sent)


@each_parameter
@pytest.mark.parametrize(
    ("room", "prefill", "decode", "ranks", "statuses"),
    [
        (4, {}, {}, (0, 0), (200, 200)),
        (5, {}, {}, (1, 1), (200, 200)),
        (6, {"routed_dp_rank": 1}, {"disagg_prefill_dp_rank": 1}, (1, 1), (200, 200)),
        (6, {"data_parallel_rank": 1}, {"disagg_prefill_dp_rank": "1"}, (1, 1), (200, 200)),
        (6, {"routed_dp_rank": 1}, {}, (1, 0), (500, 500)),
        (6, {}, {"disagg_prefill_dp_rank": 1}, (0, 1), (500, 500)),
        (6, {}, {"disagg_prefill_dp_rank": 7}, (0, 7), (500, 500)),
        (6, {}, {"routed_dp_rank": 1}, (0, 0), (200, 200)),
    ],
)
def test_a_decode_leg_looks_at_the_rank_of_its_room_or_at_the_given_rank(room, prefill, decode, ranks, statuses):
    with ranks_of("sglang-0.5.23", **(SOON if 500 in statuses else {})) as server:
        assert in_room(server, room, prefill, decode) == statuses
        seen = {leg: rank for _, rank, _, leg in server.pairs.rooms}
        assert (seen["prefill"], seen["decode"]) == ranks
        assert {row.role: row.rank for row in server.requests}["prefill"] == ranks[0]
        assert server.pairs.leased == {}


def test_sglang_refuses_a_rank_that_is_no_integer():
    with ranks_of("sglang-0.5.23", **SOON) as server:
        assert in_room(server, 4, {"routed_dp_rank": 2}, {"disagg_prefill_dp_rank": "x"}) == (400, 400)


def test_each_prompt_of_a_batch_goes_to_the_rank_of_its_room():
    with ranks_of("sglang-0.5.23") as server:
        prompts = [server.text(2) for _ in range(3)]
        assert in_room(server, 20, prompt=prompts) == (200, 200)
        rooms = sorted((room, rank) for _, rank, room, _ in server.pairs.rooms)
        assert rooms == [(20, 0), (20, 0), (21, 1), (21, 1), (22, 0), (22, 0)]
        url = server.pairs.bootstraps[P].url
        assert call(url, "/query_dp_ranks", {"bootstrap_rooms": [20, 21, 99]}) == (200, {"20": 0, "21": 1})
        assert call(url, "/route?prefill_dp_rank=-1")[1]["dp_size"] == 2


def test_ranks_of_a_restarted_engine_are_found():
    with ranks_of("sglang-0.5.23") as server:
        assert in_room(server, 5) == (200, 200)
        server.restart(P)
        assert [in_room(server, room) for room in (6, 7)] == [(200, 200)] * 2
    with ranks_of("vllm-0.33") as server:
        server.restart(P)
        text = server.text(2)
        body = {"prompt": text, "max_tokens": 1, "kv_transfer_params": PREFILL}
        given = call(server.url(P), "/v1/completions", body, headers=at_rank(1))[1]["kv_transfer_params"]
        assert given["remote_engine_id"] == "prefill-0-1_dp1"
        complete(server.url(D), text, 2, kv_transfer_params=given)
