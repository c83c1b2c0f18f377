"""A router in another process, tested from outside: requests over HTTP, KV events over ZMQ, and the worker of each
request.

The test has no access to the router: it warms workers directly, sends requests to the router, and checks where
`kv_server` saw them.
"""

import http.client
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = [pytest.mark.kv_dialects("vllm-0.33"), pytest.mark.kvmock(workers=2, num_blocks=1024)]


def has_selection_service():
    try:
        return hasattr(import_module("dynamo._core"), "SelectionService")
    except ImportError:
        return False


def complete(port, prompt):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    body = json.dumps({"model": "mock-model", "prompt": prompt, "max_tokens": 1})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200
    answer.read()
    connection.close()


def port_of(url):
    return int(url.rpartition(":")[2])


@pytest.fixture(params=["plain_router.py", "dynamo_router.py"])
def router(request, kv_server):
    """Yield the port of a router that receives the events of all workers."""
    if request.param == "dynamo_router.py" and not has_selection_service():
        pytest.skip("needs ai-dynamo-runtime 1.6")
    workers = [f"{kv_server.url(each)}={kv_server.publisher(each).endpoint}" for each in kv_server.workers]
    command = [sys.executable, HERE / request.param, "16", *workers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline())
        kv_server.wait_subscribed()
        yield port
        process.terminate()


def sent_to(kv_server, router, prompt):
    """Send a prompt to the router, and return the worker that it picked."""
    complete(router, prompt)
    return kv_server.requests[-1].worker


def wait_applied(kv_server, router, worker):
    """Wait until the router has applied the events of a worker so far: it repeatedly finds prompts that were served
    there after them.

    Each prompt is requested once, and a while after it was served: a worker that gets a prompt holds it from then on.
    """
    served, right = [], 0

    def finds():
        nonlocal right
        served.append(kv_server.text(blocks=4))
        complete(port_of(kv_server.url(worker)), served[-1])
        if len(served) > 2:
            right = right + 1 if sent_to(kv_server, router, served.pop(0)) == worker else 0
        return right >= 6

    kv_server.publisher(worker).settle(finds, timeout=20)


def test_each_prompt_goes_to_who_holds_it(kv_server, router):
    texts = [kv_server.text(blocks=4) for _ in range(8)]
    for number, text in enumerate(texts):
        complete(port_of(kv_server.url(number % 2)), text)
    for worker in (0, 1):
        wait_applied(kv_server, router, worker)
    assert [sent_to(kv_server, router, text) for text in texts] == [0, 1] * 4


@pytest.mark.parametrize(
    "router", ["plain_router.py"], indirect=True
)  # Dynamo's service gets restarts from its control plane, not from events
def test_a_restarted_worker_is_empty(kv_server, router):
    text = kv_server.text(blocks=4)
    complete(port_of(kv_server.url(1)), text)
    wait_applied(kv_server, router, 1)
    assert sent_to(kv_server, router, text) == 1
    kv_server.restart(1)
    assert kv_server.held(text) == {}
    complete(port_of(kv_server.url(0)), text)
    for worker in (1, 0):  # the batch numbers of worker 1 begin again, which shows the restart
        wait_applied(kv_server, router, worker)
    assert sent_to(kv_server, router, text) == 0
