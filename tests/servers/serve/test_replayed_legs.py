"""Recorded legs of two real routers, replayed to served engines: each is answered, and nothing stays open."""

import gzip
import http.client
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from served import call

from pytest_kvmock.servers import KvServer

LEGS = json.loads(gzip.decompress((Path(__file__).parents[2] / "data" / "pd_router_legs.json.gz").read_bytes()))
"""55 requests through vllm-router 0.1.17 (both connectors) and sglang-router 0.3.2 in front of stubs."""

WORKERS = {"p0": 0, "p1": 1, "d0": 2, "d1": 3}
ROUTERS = {
    "vllm-router 0.1.17": ("vllm-0.33", "vllm"),
    "vllm-router 0.1.17 --kv-connector mooncake": ("vllm-0.33", "vllm-mooncake"),
    "sglang-router 0.3.2": ("sglang-0.5.23", "sglang"),
}
HALF = {"p500": ("p", 500), "p400": ("p", 400), "d500": ("d", 500)}


def served(router):
    dialect, way = ROUTERS[router]
    role = {"workers": 2, "hand_over": way}
    return KvServer(None, dialect, roles={"prefill": role, "decode": role}, model="m")


def test_the_recording_has_all_requests():
    assert len(LEGS) == 55
    assert set(Counter(each["router"] for each in LEGS)) == set(ROUTERS)


def faulty(record):
    """Return by worker the error status with which its stub answered its first legs."""
    kind, status = HALF.get(record["fault"], ("", 0))
    return {who: status for who in WORKERS if who[0] == kind}


class Replay:
    """One request, leg by leg, as its router sent it."""

    def __init__(self, server, record, left):
        self.server, self.record, self.left = server, record, left
        self.statuses = []
        self.planned = set()  # workers that answer the next leg with an error

    def body(self, leg, answers):
        """Return the body of a leg, with values of these engines' answers in place of the stubs'."""
        body = dict(leg["body"])
        server, worker = self.server, WORKERS[leg["who"]]
        given = body.get("kv_transfer_params")
        if given is not None and given.get("remote_block_ids") is not None:
            body["kv_transfer_params"] = answers[-1]["kv_transfer_params"]
        elif given is not None and given.get("remote_bootstrap_addr") is not None:
            prefill = WORKERS[next(each["who"] for each in self.record["legs"])]
            bootstrap = server.pairs.bootstraps[prefill]
            found = call(bootstrap.url, "/query")[1]["0"]["engine_id"]
            body["kv_transfer_params"] = {**given, "remote_engine_id": found, "remote_bootstrap_addr": bootstrap.url}
        elif "bootstrap_room" in body:
            prefill = next(
                WORKERS[each["who"]]
                for each in self.record["legs"]
                if each["who"][0] == "p" and each.get("body", {}).get("bootstrap_room") == body["bootstrap_room"]
            )
            port = server.pairs.bootstraps[prefill].port
            many = isinstance(body["bootstrap_port"], list)
            body["bootstrap_port"] = [port] * len(body["bootstrap_port"]) if many else port
        assert worker in server.workers
        return body

    def serial(self):
        """Send vLLM's legs, one after the other."""
        answers = []
        for leg in self.record["legs"]:
            if "gone" in leg:
                continue
            goes = any(each.get("gone") and each["who"] == leg["who"] for each in self.record["legs"])
            self.fault(leg)
            if goes:
                self.leave([leg], answers)
                continue
            status, answer = call(self.server.url(WORKERS[leg["who"]]), leg["path"], self.body(leg, answers))
            self.statuses.append((leg["who"], status))
            if isinstance(answer, dict):
                answers.append(answer)

    def at_once(self):
        """Send SGLang's two legs of each room at once; if one is refused, drop the other."""
        rooms = {}
        for leg in self.record["legs"]:
            if "gone" not in leg:
                rooms.setdefault(str(leg["body"]["bootstrap_room"]), []).append(leg)
        goes = self.record["status"] == "left"
        for legs in rooms.values():
            for leg in legs:
                self.fault(leg)
            if goes:
                self.leave(legs, [])
            elif any(leg["who"] in self.planned for leg in legs):
                self.one_refused(legs)
            else:
                with ThreadPoolExecutor(2) as pool:
                    sent = [(self.server.url(WORKERS[leg["who"]]), leg["path"], self.body(leg, [])) for leg in legs]
                    for leg, (status, _) in zip(legs, pool.map(lambda each: call(*each), sent), strict=True):
                        self.statuses.append((leg["who"], status))

    def fault(self, leg):
        """Let an engine answer with an error where its stub did: the first time, or with 400 each time."""
        who, status = leg["who"], faulty(self.record).get(leg["who"])
        self.planned.discard(who)
        if status is not None and (status == 400 or self.left[who]):
            self.left[who] = 0
            self.server.answer(WORKERS[who], status)
            self.planned.add(who)

    def one_refused(self, legs):
        """Send the leg that waits, and close its connection when the other one is refused."""
        refused = [leg for leg in legs if leg["who"] in self.planned]
        waiting = [leg for leg in legs if leg["who"] not in self.planned]
        self.leave(waiting, [], then=refused)

    def leave(self, legs, answers, then=()):
        """Send legs that get no answer, and close their connections."""
        open_legs = []
        self.server.hold()
        for leg in legs:
            connection = http.client.HTTPConnection(urlsplit(self.server.url(WORKERS[leg["who"]])).netloc, timeout=20)
            data = json.dumps(self.body(leg, answers)).encode()
            connection.request("POST", leg["path"], data, {"Content-Type": "application/json"})
            open_legs.append(connection)
        self.server.wait_requests(open=sum(map(choices, legs)))
        for leg in then:
            status, _ = call(self.server.url(WORKERS[leg["who"]]), leg["path"], self.body(leg, answers))
            self.statuses.append((leg["who"], status))
        for connection in open_legs:
            connection.close()
        self.server.wait_requests(open=0)
        self.server.release()


def choices(leg):
    prompt = leg["body"].get("prompt", "")
    return leg["body"].get("n", 1) * (len(prompt) if isinstance(prompt, list) else 1)


@pytest.mark.parametrize("router", ROUTERS)
def test_recorded_legs_of_a_real_router_get_the_same_answers_as_from_its_stubs(router):
    records = [each for each in LEGS if each["router"] == router]
    by_fault = {}
    for record in records:
        by_fault.setdefault(record["fault"], []).append(record)
    for fault, group in by_fault.items():
        with served(router) as server:
            left = Counter(dict.fromkeys(WORKERS, 1))
            for record in group:
                replay = Replay(server, record, left)
                (replay.at_once if router.startswith("sglang") else replay.serial)()
                statuses = [status for _, status in replay.statuses]
                where = f"{router}, {fault}, {record['case']}: {replay.statuses}"
                shares_rooms = router.startswith("sglang") and record["request"]["body"].get("n", 1) > 1
                if shares_rooms:
                    assert set(statuses) == {500}, where  # all children have one room, which fails
                elif record["status"] != "left":
                    assert record["status"] in statuses, where
                if fault not in HALF and not shares_rooms:
                    assert set(statuses) <= {200}, where
                assert server.inside.broken == [], where
            leased = {lease.phase for each in server.pairs.leased.values() for lease in each}
            assert leased <= {"kept"}
            if fault == "noparams":
                assert sum(map(len, server.pairs.leased.values())) == len(group)
            assert server.inside.faults_left == []
