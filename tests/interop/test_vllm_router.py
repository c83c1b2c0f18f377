"""vllm-project/router, a process in Rust that is not ours, in front of served engines: `--policy kv_aware` over ZMQ events.

Engines are warmed directly, so that only their events can tell the router who holds a prompt.
"""

import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))

from served import call, complete

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.backends import speaker_of
from pytest_kvmock.serve import KvServer
from pytest_kvmock.wire import find_dialect

BINARY = shutil.which("vllm-router", path=str(Path(sys.executable).parent))
if BINARY is None:
    pytest.skip("needs vllm-router (extra vllm-router)", allow_module_level=True)
READS = ["vllm-0.24", "vllm-0.33"]  # events as maps; of arrays and of SGLang's it indexes nothing (0.1.17)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


@contextmanager
def router_before(server, log):
    """Return where the router listens, once it hears all workers."""
    port = free_port()
    args = [BINARY, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    args += ["--policy", "kv_aware", "--worker-urls", *server.urls]
    args += ["--kv-event-block-size", "16", "--kv-event-model", "mock-model"]
    for worker in server.workers:
        publisher = server.publisher(worker)
        args += ["--kv-event-source", f"{server.url(worker)}={publisher.endpoint}"]
        args += ["--kv-event-replay-source", f"{server.url(worker)}={publisher.replay_endpoint}"]
    with log.open("w") as out:
        process = subprocess.Popen(args, stdout=out, stderr=out)
    try:
        server.wait_subscribed(timeout=20)
        server.publisher(0).settle(lambda: is_healthy(f"http://127.0.0.1:{port}"), timeout=20)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def is_healthy(url):
    try:
        return call(url, "/health")[0] == 200
    except OSError:
        return False


def routed(server, url, text):
    """Return to whom the router sends a prompt."""
    complete(url, text, model="mock-model")
    return server.requests[-1].worker


def wait_applied(server, url, worker):
    """Return when the router has applied the events of a worker so far: it finds what was served there after them.

    Each prompt is asked for once, and a while after it was served: one that goes elsewhere is held there, too, from then on.
    """
    served = [server.text(4) for _ in range(3)]
    for text in served:
        complete(server.url(worker), text)
    right = 0

    def finds():
        nonlocal right
        served.append(server.text(4))
        complete(server.url(worker), served[-1])
        right = right + 1 if routed(server, url, served.pop(0)) == worker else 0
        return right >= 3

    server.publisher(worker).settle(finds, timeout=20)


@pytest.mark.parametrize("dialect", READS)
def test_it_sends_each_prompt_to_its_holder(dialect, tmp_path):
    profile = EngineProfile(workers=2, num_blocks=1024)
    with (
        RouterHarness(profile, speaker_of(find_dialect(dialect))) as kv,
        KvServer(kv, dialect) as server,
        router_before(server, tmp_path / "router.log") as url,
    ):
        texts = [server.text(4) for _ in range(20)]
        for number, text in enumerate(texts):
            complete(server.url(number % 2), text)
        for worker in (0, 1):
            wait_applied(server, url, worker)
        assert [routed(server, url, text) for text in texts] == [0, 1] * 10

        assert server.reset(1)
        moved = [server.text(4), *texts[1::2]]
        for text in moved:
            complete(server.url(0), text)
        for worker in (0, 1):
            wait_applied(server, url, worker)
        assert [routed(server, url, text) for text in moved] == [0] * 11  # worker 1 has said that it holds nothing

        server.restart(0)
        assert server.held(texts[0]) == {}
        wait_applied(server, url, 0)
        for text in texts[::2]:
            complete(server.url(1), text)
        wait_applied(server, url, 1)
        assert [routed(server, url, text) for text in texts[::2]] == [
            1
        ] * 10  # of a former life of worker 0 nothing is left
