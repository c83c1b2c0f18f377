"""vllm-project/router, a third-party process in Rust, in front of served engines: `--policy kv_aware` over ZMQ events.

Engines are warmed directly, so the router can learn only from their events which worker holds a prompt.
"""

import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "servers" / "serve"))

from served import call, complete

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.engines.backends import served_by
from pytest_kvmock.servers import KvServer
from pytest_kvmock.testing.process.router_process import free_port
from pytest_kvmock.wire import find_dialect
from pytest_kvmock.wire.codec.table import known_dialects

BINARY = shutil.which("vllm-router", path=str(Path(sys.executable).parent))
if BINARY is None:
    pytest.skip("needs vllm-router (dependency group vllm-router)", allow_module_level=True)
READS = ["vllm-0.24", "vllm-0.28", "vllm-0.33", "vllm-0.24-bytes", "vllm-0.28-bytes", "vllm-0.33-bytes"]
# The router logs these texts, goes on, and routes as if it knew nothing (the table in docs/reference/serve.md).
CANNOT_READ = {
    "vllm-0.9": "KV event must be a tagged map",
    "vllm-0.10.2": "KV event must be a tagged map",
    "vllm-0.14": "KV event must be a tagged map",
    "vllm-0.19": "KV event must be a tagged map",
    "vllm-0.23": "KV event must be a tagged map",
    "vllm-0.10.2-bytes": "KV event must be a tagged map",
    "vllm-0.14-bytes": "KV event must be a tagged map",
    "vllm-0.19-bytes": "KV event must be a tagged map",
    "vllm-0.23-bytes": "KV event must be a tagged map",
    "sglang-0.5.9": "KV event must be a tagged map",
    "sglang-0.5.18": "KV event must be a tagged map",
    "sglang-0.5.20": "missing KV event field: lora_name",
    "sglang-0.5.22": "missing KV event field: lora_name",
    "sglang-0.5.23": "missing KV event field: lora_name",
}


@contextmanager
def router_before(server, log):
    """Return the router's URL once it is subscribed to all workers."""
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
    """Return the worker to which the router sends a prompt."""
    complete(url, text, model="mock-model")
    return server.requests[-1].worker


def wait_applied(server, url):
    """Return when the router has applied all earlier events of both workers: it finds prompts that were served later.

    Each prompt is requested once, a while after it was served: if it goes to another worker, that worker holds it too
    from then on. A router that knows nothing sends both prompts of a pair to one worker.
    """
    served, right = [], 0

    def serve():
        pair = [
            server.text(4) + "x" for _ in server.workers
        ]  # a tail: without it, an event of a hybrid model may name nothing
        for worker, text in enumerate(pair):
            complete(server.url(worker), text)
        served.append(pair)

    def finds():
        nonlocal right
        serve()
        right = right + 1 if [routed(server, url, text) for text in served.pop(0)] == [0, 1] else 0
        return right >= 3

    for _ in range(3):
        serve()
    server.publisher(0).settle(finds, timeout=20)


@contextmanager
def behind_router(dialect, tmp_path, num_blocks=1024, model="mock-model"):
    """Run two workers behind a router with a log file; yield the server, the router's URL, and the log."""
    log = tmp_path / "router.log"
    with (
        RouterHarness(EngineProfile(workers=2, num_blocks=num_blocks), served_by(find_dialect(dialect), model)) as kv,
        KvServer(kv, dialect) as server,
        router_before(server, log) as url,
    ):
        yield server, url, log


def test_every_dialect_is_listed_as_readable_or_not():
    of_engines = {name for name in known_dialects() if name.startswith(("vllm", "sglang"))}
    assert of_engines == {*READS, *CANNOT_READ}


@pytest.mark.parametrize("dialect", CANNOT_READ)
def test_the_router_logs_that_it_cannot_read_a_dialect(dialect, tmp_path):
    with behind_router(dialect, tmp_path) as (server, _, log):
        complete(server.url(0), server.text(4))
        said = f"kv_index decode batch: {CANNOT_READ[dialect]}"
        server.publisher(0).settle(lambda: said in log.read_text(), timeout=20)


def test_the_router_forgets_evicted_blocks(tmp_path):
    with behind_router("vllm-0.33", tmp_path, num_blocks=64) as (server, url, _):
        text = server.text(4)
        complete(server.url(0), text)
        wait_applied(server, url)
        assert routed(server, url, text) == 0
        while server.held(text):  # other blocks replace its blocks
            complete(server.url(0), server.text(16))
        wait_applied(server, url)
        complete(server.url(1), text)
        wait_applied(server, url)
        assert routed(server, url, text) == 1
        assert server.requests[-1].overlap == {1: 4}


def test_the_router_recovers_a_lost_batch(tmp_path):
    with behind_router("vllm-0.33", tmp_path) as (server, url, _):
        complete(server.url(0), server.text(4))
        wait_applied(server, url)
        lost = server.text(4)
        server.fault(0, "lose")
        complete(server.url(0), lost)
        wait_applied(server, url)  # the next batch shows the gap, and the router requests the lost one
        assert [worker for worker, _ in server.replays] == [0]
        assert routed(server, url, lost) == 0


@pytest.mark.parametrize("dialect", READS)
def test_the_router_sends_each_prompt_to_its_holder(dialect, tmp_path):
    with behind_router(dialect, tmp_path) as (server, url, _):
        texts = [server.text(4) for _ in range(20)]
        for number, text in enumerate(texts):
            complete(server.url(number % 2), text)
        wait_applied(server, url)
        assert [routed(server, url, text) for text in texts] == [0, 1] * 10

        assert server.reset(1)
        moved = [server.text(4), *texts[1::2]]
        for text in moved:
            complete(server.url(0), text)
        wait_applied(server, url)
        assert [routed(server, url, text) for text in moved] == [0] * 11  # worker 1 has published that it holds nothing

        server.restart(0)
        assert server.held(texts[0]) == {}
        wait_applied(server, url)
        for text in texts[::2]:
            complete(server.url(1), text)
        wait_applied(server, url)
        assert [routed(server, url, text) for text in texts[::2]] == [
            1
        ] * 10  # nothing is left from before the restart of worker 0


# ------------------------------------------------------------------------------------------------- hybrid models


@pytest.mark.parametrize("model", ["gpt-oss", "qwen3-next"])
def test_for_a_hybrid_model_the_router_finds_a_sole_holder_but_not_the_holder_of_more_blocks(model, tmp_path):
    with behind_router("vllm-0.33", tmp_path, num_blocks=4096, model=model) as (server, url, _):
        alone, shared = ([server.text(30) for _ in range(16)] for _ in range(2))
        for number, text in enumerate(alone):
            complete(server.url(number % 2), text + "x")
        for number, text in enumerate(shared):
            complete(server.url(number % 2), text + "x")
            complete(server.url(1 - number % 2), text[:160] + "x")  # ten of the blocks
        wait_applied(server, url)
        assert [routed(server, url, text[:320] + "y") for text in alone] == [0, 1] * 8
        found = [routed(server, url, text[:320] + "y") for text in shared]
        assert found != [0, 1] * 8  # 8 of 16, as by chance


def test_a_batch_with_a_stored_without_hashes_is_refused_and_requested_again_and_again(tmp_path):
    with behind_router("vllm-0.33", tmp_path, model="gpt-oss") as (server, _, log):
        complete(server.url(0), server.text(20) + "x", 40)  # windows keep no block that output fills
        said = "kv_index decode batch: KV event hashes must be a nonempty array"
        server.publisher(0).settle(lambda: said in log.read_text(), timeout=20)
        text = server.text(20) + "x"
        complete(server.url(0), text)
        server.publisher(0).settle(lambda: len(server.replays) > 2, timeout=20)
        assert {worker for worker, _ in server.replays} == {0}
        (start,) = {replay.start for _, replay in server.replays}
        assert start == 1  # the batch of the first block that output filled
