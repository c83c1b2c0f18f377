"""Served engines of P/D pairs: vLLM's HTTP contract with both connectors, SGLang's rooms, and the control methods."""

import http.client
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from served import cached, call, chunks, complete

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.__main__ import main as kvmock
from pytest_kvmock.servers import KvServer

P, D = 0, 2
"""The first prefill worker and the first decode worker of two each."""

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
TWO = {"prefill": 2, "decode": 2}
MOONCAKE = {kind: {"workers": 2, "hand_over": "vllm-mooncake"} for kind in TWO}
CACHES = {"prefill": 2, "decode": {"workers": 2, "disaggregation_decode_enable_radix_cache": True}}


@pytest.fixture
def server():
    with KvServer(roles=TWO, ports={"control": 0}) as server:
        yield server
        assert server.inside.broken == []
        assert server.harness.events.problems == []


@pytest.fixture
def in_rooms():
    with KvServer(None, "sglang-0.5.23", roles=CACHES) as server:
        yield server
        assert server.inside.broken == []
        assert server.harness.events.problems == []


def prefilled(server, prompt, worker=P, **more):
    """Return the parameters with which a prefill engine answers its leg."""
    return complete(server.url(worker), prompt, kv_transfer_params=PREFILL, **more)["kv_transfer_params"]


def until(condition):
    """Wait until a condition holds."""
    for _ in range(500):
        if condition():
            return
        call_later()
    raise AssertionError("it never held")


def call_later():
    """Let the thread of the server run."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: None).result()


# ------------------------------------------------------------------------------------------------------------- vLLM


def test_a_prompt_is_handed_over_from_the_prefill_to_the_decode_engine(server):
    text = server.text(3) + "abc"
    answer = complete(server.url(P), text, kv_transfer_params=PREFILL)
    given = answer["kv_transfer_params"]
    request = given.pop("remote_request_id")
    assert given == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3, 4]],
        "remote_engine_id": "prefill-0",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 51,
        "remote_blocks_expiry_time": None,
        "remote_registration_generation": 0,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }
    assert request.startswith(f"{answer['id']}-0-")
    assert [(lease.phase, lease.num_blocks) for lease in server.pairs.leased[P]] == [("kept", 4)]

    decoded = complete(server.url(D), text, 5, kv_transfer_params={**given, "remote_request_id": request})
    assert decoded["kv_transfer_params"] is None
    assert decoded["choices"][0]["text"].startswith(answer["choices"][0]["text"])
    assert server.pairs.notified == [("decode-2", "prefill-0", request)]
    until(lambda: server.pairs.leased == {})
    assert {row["worker"]: row["blocks"] for row in server.expect(text)["blocks"]} == {P: 3, D: 3}


def test_the_decode_leg_reports_what_the_prefill_engine_had_cached(server):
    text = server.text(3)
    for hits in (0, 32):
        given = prefilled(server, text)
        assert given["remote_prefill_cached_tokens"] == hits
        assert cached(complete(server.url(D), text, 2, kv_transfer_params=given)) == hits
    given = prefilled(server, text)
    del given["remote_prefill_cached_tokens"]
    assert cached(complete(server.url(D), text, 2, kv_transfer_params=given)) == 48  # almost the whole prompt


def test_a_streamed_answer_has_the_parameters_only_in_its_last_part(server):
    body = {"prompt": server.text(2), "max_tokens": 2, "stream": True, "kv_transfer_params": PREFILL}
    _, text = call(server.url(P), "/v1/completions", body)
    parts, ended = chunks(text)
    assert ended
    assert ["kv_transfer_params" in part for part in parts] == [False, True]
    assert parts[1]["kv_transfer_params"]["remote_block_ids"] == [[1, 2, 3]]


def test_without_parameters_the_decode_engine_computes_the_whole_prompt(server):
    text = server.text(2)
    prefilled(server, text)
    assert cached(complete(server.url(D), text, 2)) == 0
    assert [row.hand_over for row in server.requests] == [PREFILL, None]
    assert list(server.pairs.leased) == [P]


def test_a_lease_ends_by_wall_clock_time():
    roles = {"prefill": {"kv_lease_duration": 0.05}, "decode": 1}
    with KvServer(roles=roles) as server:
        prefilled(server, server.text(2))
        until(lambda: server.pairs.leased == {})
        assert server.pairs.notified == []


@pytest.mark.parametrize("streams", [False, True])
def test_a_failed_transfer_ends_its_request_with_an_error(server, streams):
    text = server.text(2)
    given = prefilled(server, text)
    server.pairs.fail_transfers()
    body = {"prompt": text, "max_tokens": 2, "stream": streams, "kv_transfer_params": given}
    status, answer = call(server.url(D), "/v1/completions", body)
    error = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
    if streams:
        assert (status, chunks(answer)) == (200, ([{"error": error}], True))
    else:
        assert (status, answer) == (500, {"error": error})
    assert server.requests[-1].status == 500
    assert list(server.pairs.leased) == [P]  # P is not notified


def test_a_held_transfer_ends_after_its_release(server):
    text = server.text(2)
    given = prefilled(server, text)
    server.pairs.hold_transfers()
    with ThreadPoolExecutor(1) as pool:
        open_leg = pool.submit(complete, server.url(D), text, 2, kv_transfer_params=given)
        until(lambda: [lease.phase for lease in server.pairs.leased.get(D, ())] == ["loading"])
        assert not open_leg.done()
        server.pairs.release_transfers()
        assert open_leg.result()["usage"]["completion_tokens"] == 2


def test_a_decode_leg_continues_after_its_transfer_while_the_prefill_engine_is_held(server):
    text = server.text(2)
    given = prefilled(server, text)
    server.pairs.delay_transfers(0.05)
    server.hold(P)
    assert complete(server.url(D), text, 2, kv_transfer_params=given)["usage"]["completion_tokens"] == 2


def test_a_client_that_disconnects_during_a_transfer_leaves_nothing_open(server):
    text = server.text(2)
    given = prefilled(server, text)
    server.pairs.hold_transfers()
    server.cut(D, after_chunks=0)
    body = {"prompt": text, "max_tokens": 2, "kv_transfer_params": given}
    with pytest.raises(http.client.RemoteDisconnected):
        call(server.url(D), "/v1/completions", body)
    assert list(server.pairs.leased) == [P]  # the request was cut before it reached its engine
    with ThreadPoolExecutor(1) as pool:
        open_leg = pool.submit(call, server.url(D), "/v1/completions", body)
        until(lambda: [lease.phase for lease in server.pairs.leased.get(D, ())] == ["loading"])
        server.stop(D)
        assert open_leg.exception() is not None
    assert [lease.phase for lease in server.pairs.leased[D]] == ["kept"]  # blocks being read into are not free
    server.pairs.release_transfers()
    until(lambda: server.pairs.leased == {})
    server.start(D)


def test_parameters_with_another_host_fail_without_a_connection(server):
    text = server.text(2)
    given = prefilled(server, text)
    wrong = {**given, "remote_host": urlsplit(server.url(P)).hostname}
    status, _ = call(server.url(D), "/v1/completions", {"prompt": text, "max_tokens": 2, "kv_transfer_params": wrong})
    assert status == 500
    complete(server.url(D), text, 2, kv_transfer_params=given)


def test_with_several_children_the_answer_has_the_parameters_of_the_last_one(server):
    given = prefilled(server, server.text(2), n=2)
    assert len(server.pairs.leased[P]) == 2
    assert given["remote_request_id"] == server.pairs.leased[P][1].request


def test_parameters_that_are_not_an_object_are_refused(server):
    body = {"prompt": "abc", "max_tokens": 1, "kv_transfer_params": [1]}
    status, answer = call(server.url(P), "/v1/completions", body)
    assert status == 400
    assert "Input should be a valid dictionary" in answer["error"]["message"]


def test_parameters_that_kill_the_original_engine_kill_the_mock():
    with KvServer(roles=TWO) as server:
        text = server.text(2)
        given = {**prefilled(server, text), "remote_block_ids": None}
        body = {"prompt": text, "max_tokens": 2, "kv_transfer_params": given}
        assert call(server.url(D), "/v1/completions", body)[0] == 500
        assert call(server.url(D), "/v1/completions", {"prompt": text, "max_tokens": 2})[0] == 500
        assert call(server.url(D), "/health")[0] == 503
        assert call(server.url(P), "/health")[0] == 200
        assert "EngineDied" in server.inside.broken[0]
        complete(server.url(P), text)


def test_blocks_that_a_restarted_engine_handed_over_cannot_be_read(server):
    text = server.text(2)
    given = prefilled(server, text)
    server.restart(P)
    body = {"prompt": text, "max_tokens": 2, "kv_transfer_params": given}
    assert call(server.url(D), "/v1/completions", body)[0] == 500
    given = prefilled(server, text)
    assert given["remote_engine_id"] == "prefill-0-1"
    complete(server.url(D), text, 2, kv_transfer_params=given)


def test_the_control_api_lists_both_legs_of_a_request(server):
    text = server.text(2)
    for _ in range(2):
        complete(server.url(D), text, 2, kv_transfer_params=prefilled(server, text))
    _, rows = call(server.control_url, "/requests")
    assert [(row["role"], row["legs"]) for row in rows] == [
        ("prefill", [0, 1]),
        ("decode", [0, 1]),
        ("prefill", [2, 3]),
        ("decode", [2, 3]),
    ]
    assert rows[0]["hand_over"] == PREFILL
    assert call(server.control_url, "/transfers", {"fail": 1, "delay_s": 0.01})[0] == 200
    given = prefilled(server, text)
    body = {"prompt": text, "max_tokens": 2, "kv_transfer_params": given}
    assert call(server.url(D), "/v1/completions", body)[0] == 500
    _, found = call(server.control_url, "/pairs")
    assert [(row["worker"], row["phase"], row["blocks"]) for row in found["leased"]] == [(P, "kept", 2)]
    assert len(found["notified"]) == 2
    assert call(server.control_url, "/transfers", {"lose": 1})[0] == 400


def test_mooncake_legs_meet_by_the_routers_transfer_id_in_either_order():
    with KvServer(roles=MOONCAKE) as server:
        bootstrap = server.pairs.bootstraps[P].url
        status, engines = call(bootstrap, "/query")
        assert (status, engines["0"]["engine_id"]) == (200, "prefill-0")
        for decode_first in (False, True):
            text = server.text(2)
            p_leg = {**PREFILL, "transfer_id": f"t-{decode_first}"}
            d_leg = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "transfer_id": f"t-{decode_first}",
                "remote_engine_id": "prefill-0",
                "remote_bootstrap_addr": bootstrap,
            }
            if not decode_first:
                assert complete(server.url(P), text, kv_transfer_params=p_leg)["kv_transfer_params"] is None
                complete(server.url(D), text, 3, kv_transfer_params=d_leg)
            else:
                with ThreadPoolExecutor(1) as pool:
                    open_leg = pool.submit(complete, server.url(D), text, 3, kv_transfer_params=d_leg)
                    until(lambda: D in server.pairs.leased)
                    complete(server.url(P), text, kv_transfer_params=p_leg)
                    open_leg.result()
            assert {row["worker"]: row["blocks"] for row in server.expect(text)["blocks"]} == {P: 2, D: 2}
        until(lambda: server.pairs.leased == {})
        assert [row.legs for row in server.requests] == [[0, 1], [0, 1], [2, 3], [2, 3]]
        assert server.inside.broken == []


def test_a_mooncake_leg_without_a_partner_ends_at_its_timeout():
    role = {"hand_over": "vllm-mooncake", "abort_request_timeout": 0.05}
    with KvServer(roles={"prefill": role, "decode": role}) as server:
        bootstrap, text = server.pairs.bootstraps[0].url, server.text(2)
        given = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": "t",
            "remote_engine_id": "prefill-0",
            "remote_bootstrap_addr": bootstrap,
        }
        body = {"prompt": text, "max_tokens": 2, "kv_transfer_params": given}
        assert call(server.url(1), "/v1/completions", body)[0] == 500
        complete(server.url(0), text, kv_transfer_params={**PREFILL, "transfer_id": "u"})
        until(lambda: server.pairs.leased == {})
        elsewhere = {**given, "remote_engine_id": "engine-7"}
        body = {"prompt": text, "max_tokens": 2, "kv_transfer_params": elsewhere}
        assert call(server.url(1), "/v1/completions", body)[0] == 500  # the bootstrap server does not know its id
        assert server.inside.broken == []


def test_a_leg_with_a_missing_field_waits_for_ever_and_keeps_its_blocks(server):
    text = server.text(2)
    given = prefilled(server, text)
    del given["remote_port"]
    body = {"prompt": text, "max_tokens": 2, "kv_transfer_params": given}
    with ThreadPoolExecutor(1) as pool:
        open_leg = pool.submit(call, server.url(D), "/v1/completions", body)
        until(lambda: [lease.phase for lease in server.pairs.leased.get(D, ())] == ["loading"])
        server.stop(D)
        assert open_leg.exception() is not None
    server.start(D)
    complete(server.url(D), server.text(2), 2)
    assert [lease.phase for lease in server.pairs.leased[D]] == ["kept"]


# ----------------------------------------------------------------------------------------------------------- SGLang


def room_of(server, room, worker=P):
    place = urlsplit(server.pairs.bootstraps[worker].url)
    return {"bootstrap_host": place.hostname, "bootstrap_port": place.port, "bootstrap_room": room}


def both(server, body, path="/v1/completions"):
    """Send both legs at once; return status and answer of each."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda worker: call(server.url(worker), path, body), (P, D)))


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_sglangs_legs_meet_in_a_room(in_rooms, path):
    text = in_rooms.text(3)
    body = {"text": text, "sampling_params": {"max_new_tokens": 4}} if path == "/generate" else {"prompt": text}
    for room, hits in ((2**62, 0), (7, 32)):
        (p_status, p_answer), (d_status, d_answer) = both(
            in_rooms, {**body, "max_tokens": 4, **room_of(in_rooms, room)}, path
        )
        assert (p_status, d_status) == (200, 200)
        if path == "/generate":
            counts = [each["meta_info"] for each in (p_answer, d_answer)]
            assert [(each["completion_tokens"], each["cached_tokens"]) for each in counts] == [(1, hits), (4, hits)]
            assert d_answer["text"].startswith(p_answer["text"])
        else:
            assert [each["usage"]["completion_tokens"] for each in (p_answer, d_answer)] == [1, 4]
            assert [cached(each) for each in (p_answer, d_answer)] == [hits, hits]
    assert sorted(in_rooms.pairs.rooms) == sorted((P, 0, room, leg) for room in (2**62, 7) for leg in TWO)
    assert {row["worker"]: row["blocks"] for row in in_rooms.expect(text)["blocks"]} == {P: 3, D: 3}
    assert [sorted(row.legs) for row in in_rooms.requests] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert in_rooms.pairs.leased == {}


@pytest.mark.parametrize("tokens", [1, 3])
def test_an_answer_of_an_sglang_pair_can_be_streamed(in_rooms, tokens):
    body = {"prompt": in_rooms.text(2), "max_tokens": tokens, "stream": True, **room_of(in_rooms, 5)}
    for (_, text), count in zip(both(in_rooms, body), (1, tokens), strict=True):
        parts, ended = chunks(text)
        assert ended
        # A decode engine gets its first token with the KV, and emits it with the next token in one pass.
        assert len("".join(part["choices"][0]["text"] for part in parts)) == count
        assert parts[-1]["choices"][0]["finish_reason"] == "length"


def test_a_request_without_a_room_is_refused(in_rooms):
    status, answer = call(in_rooms.url(D), "/v1/completions", {"prompt": "abc", "max_tokens": 2})
    assert status == 400
    assert "without bootstrap room" in answer["message"]
    assert in_rooms.requests[-1].status == 400
    body = {"prompt": ["ab", "cd"], "max_tokens": 2, **room_of(in_rooms, [1])}
    assert call(in_rooms.url(D), "/v1/completions", body)[0] == 400
    assert call(in_rooms.url(D), "/v1/completions", {"prompt": "ab", "bootstrap_room": "x"})[0] == 400


def test_prompts_of_a_batch_have_consecutive_rooms(in_rooms):
    body = {"prompt": [in_rooms.text(1), in_rooms.text(2)], "max_tokens": 2, **room_of(in_rooms, 40)}
    assert [status for status, _ in both(in_rooms, body)] == [200, 200]
    assert {room for _, _, room, _ in in_rooms.pairs.rooms} == {40, 41}


def test_a_failed_transfer_fails_both_legs(in_rooms):
    in_rooms.pairs.fail_transfers()
    for answer in both(in_rooms, {"prompt": in_rooms.text(2), "max_tokens": 3, **room_of(in_rooms, 5)}):
        status, error = answer
        assert (status, error["type"], error["code"]) == (500, "500", 500)
        assert "transfer failed for request" in error["message"]
    in_rooms.pairs.fail_transfers()
    body = {"prompt": in_rooms.text(2), "max_tokens": 3, "stream": True, **room_of(in_rooms, 6)}
    (_, (_, text)) = both(in_rooms, body)
    parts, ended = chunks(text)
    assert ended
    assert parts[-1]["error"]["code"] == 500


def test_an_sglang_leg_without_a_partner_ends_at_its_timeout():
    roles = {"prefill": {"bootstrap_timeout": 0.05}, "decode": {"waiting_timeout": 0.05}}
    with KvServer(None, "sglang-0.5.23", roles=roles) as server:
        place = urlsplit(server.pairs.bootstraps[0].url)
        fields = {"bootstrap_host": place.hostname, "bootstrap_port": place.port}
        for worker, room in ((0, 5), (1, 6)):
            body = {"prompt": server.text(2), "max_tokens": 3, **fields, "bootstrap_room": room}
            assert call(server.url(worker), "/v1/completions", body)[0] == 500
        assert server.pairs.leased == {}


def test_pending_news_for_a_restarted_engine_is_dropped(in_rooms):
    port, gone = (in_rooms.harness.worker(each).pair for each in (P, D))
    port._news[gone] = None  # from a pass under way
    in_rooms.restart(D)
    body = {"prompt": in_rooms.text(2), "max_tokens": 3, **room_of(in_rooms, 5)}
    assert [status for status, _ in both(in_rooms, body)] == [200, 200]


def test_a_decode_leg_with_a_wrong_bootstrap_port_fails_at_once(in_rooms):
    body = {"prompt": in_rooms.text(2), "max_tokens": 3, **room_of(in_rooms, 5), "bootstrap_port": 1}
    assert call(in_rooms.url(D), "/v1/completions", body)[0] == 500


def test_sglangs_bootstrap_server_answers_its_routes(in_rooms):
    url = in_rooms.pairs.bootstraps[P].url
    assert call(url, "/health") == (200, "OK")
    status, sizes = call(url, "/route?prefill_dp_rank=-1")
    assert (status, sizes["dp_size"], sizes["page_size"]) == (200, 1, 16)
    assert call(url, "/query_dp_ranks", {"bootstrap_rooms": [5, 6]}) == (200, {"5": 0, "6": 0})
    assert call(url, "/query")[0] == 404
    status, info = call(in_rooms.url(P), "/server_info")
    assert (info["disaggregation_mode"], info["disaggregation_bootstrap_port"]) == ("prefill", urlsplit(url).port)


# ------------------------------------------------------------------------------------------------------- what is given


def test_the_ready_line_names_the_role_of_each_worker(server):
    rows = server.inside.ready_line()["workers"]
    assert [(row["id"], row["role"]) for row in rows] == [(0, "prefill"), (1, "prefill"), (2, "decode"), (3, "decode")]
    json.dumps(rows)


def test_a_server_takes_either_a_harness_or_roles():
    with pytest.raises(ValueError, match="give a harness, or roles="):
        KvServer()
    with pytest.raises(ValueError, match="all roles must hand over alike"):
        KvServer(roles={"prefill": {"hand_over": "vllm-mooncake"}, "decode": 1})
    with RouterHarness(EngineProfile(), "vllm") as harness:
        with pytest.raises(ValueError, match="give a harness, or roles="):
            KvServer(harness, roles=TWO)
        with KvServer(harness) as server:
            assert server.pairs is None


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--role", "prefill"], "--role must be KIND=N for each kind once"),
        (["--role", "prefill=1,prefill=1"], "--role must be KIND=N for each kind once"),
        (["--role", "prefil=1"], "roles: unknown worker type 'prefil'"),
        (["--role", "prefill=1,decode=1", "--workers", "2"], "--role says how many engines there are"),
        (["--role", "prefill=1,decode=1", "--pair", "kv_lease_duration"], "--pair must be KEY=VALUE"),
        (["--pair", "kv_lease_duration=2"], "--pair is about P/D pairs"),
    ],
)
def test_the_serve_command_reports_wrong_roles(arguments, why, capsys):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(kvmock(["serve", *arguments]))
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_the_serve_command_can_serve_roles():
    command = [sys.executable, "-m", "pytest_kvmock", "serve", "--role", "prefill=1,decode=2"]
    command += ["--pair", "hand_over=vllm-mooncake", "--pair", "abort_request_timeout=2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        ready = json.loads(process.stdout.readline())
        assert [row["role"] for row in ready["workers"]] == ["prefill", "decode", "decode"]
        assert call(f"http://127.0.0.1:{ready['workers'][0]['bootstrap_port']}", "/query")[0] == 200
        assert call(ready["control"], "/pairs")[1]["roles"] == {"0": "prefill", "1": "decode", "2": "decode"}
        process.stdin.close()
        assert process.wait(20) == 0


def test_pairs_of_the_next_harness_replace_those_of_the_first():
    roles = {"prefill": 1, "decode": 1}
    with RouterHarness(EngineProfile(), "vllm", roles=roles) as first, KvServer(first) as server:
        text = server.text(3)
        given = prefilled(server, text, 0)
        with RouterHarness(EngineProfile(), "vllm", roles=roles) as second:
            server.use(second)
            body = {"prompt": text, "max_tokens": 2, "kv_transfer_params": given}
            assert call(server.url(1), "/v1/completions", body)[0] == 500  # that prefill engine is gone
            given = prefilled(server, text, 0)
            complete(server.url(1), text, 2, kv_transfer_params=given)
            until(lambda: server.pairs.leased == {})
        with (
            RouterHarness(EngineProfile(workers=2), "vllm") as third,
            pytest.raises(ValueError, match="roles of before"),
        ):
            server.use(third)
