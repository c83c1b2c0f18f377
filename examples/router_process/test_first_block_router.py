"""A test of a router process with `kv_server`: it warms a worker, and checks where a request goes."""

import http.client
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.kv_dialects("vllm-0.33"), pytest.mark.kvmock(workers=2)]


def post(url, path, **body):
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


@pytest.fixture
def router(kv_server):
    sources = [f"{kv_server.url(worker)}={kv_server.publisher(worker).endpoint}" for worker in kv_server.workers]
    command = [sys.executable, Path(__file__).with_name("first_block_router.py"), *sources]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline())
        kv_server.wait_subscribed()  # nothing is lost from here on
        yield f"http://127.0.0.1:{port}"
        process.terminate()


def test_requests_go_where_their_prefix_is(kv_server, router):
    text = kv_server.text(blocks=1)
    post(kv_server.url(1), "/v1/completions", prompt=text, max_tokens=1)  # warms worker 1
    kv_server.assert_knows(text, lambda: post(router, "/blocks", prompt=text))
    post(router, "/v1/completions", prompt=text, max_tokens=1)
    assert [(request.worker, request.overlap) for request in kv_server.requests] == [(1, {}), (1, {1: 1})]
    kv_server.routing.assert_hit_ratio(of_best=1.0)


def test_a_request_that_goes_elsewhere_is_named(kv_server):
    text = kv_server.text(blocks=4)
    for worker in (0, 0, 1):  # as a router that reads no events
        post(kv_server.url(worker), "/v1/completions", prompt=text, max_tokens=1)
    with pytest.raises(AssertionError, match=r"request 2 .* was sent to worker 1: worker 0 held 4"):
        kv_server.routing.assert_hit_ratio(of_best=0.9)
