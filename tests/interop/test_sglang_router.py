"""SGLang's router, a third-party process in Rust, in front of served engines, by prefixes and by its own count of load.

It receives no events. The engines hold requests, because sequential requests would always find both engines idle.
"""

import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "servers" / "serve"))

from served import call
from served import complete as complete_at

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.engines.backends import speaker_of
from pytest_kvmock.servers import KvServer
from pytest_kvmock.testing.process.router_process import free_port
from pytest_kvmock.wire import find_dialect

BINARY = shutil.which("sglang-router", path=str(Path(sys.executable).parent))
if BINARY is None:
    pytest.skip("needs sglang-router (dependency group sglang-router)", allow_module_level=True)

DIALECT = "sglang-0.5.23"


def complete(url, text):
    return complete_at(url, text, model="mock-model")


def is_ready(url):
    try:
        return call(url, "/readiness")[0] == 200
    except OSError:
        return False


@contextmanager
def behind_router(tmp_path, *args, workers=2, pairs=False):
    """Run workers behind a router; yield the server, and the router's URL."""
    profile = EngineProfile(workers=workers, num_blocks=4096, block_size=1)
    with (
        RouterHarness(profile, speaker_of(find_dialect(DIALECT))) as kv,
        KvServer(kv, DIALECT) as server,
        (tmp_path / "router.log").open("w") as out,
    ):
        port = free_port()
        command = [BINARY, "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        if pairs:
            command += ["--pd-disaggregation", "--prefill", server.url(0), "9000", "--decode", server.url(1)]
        else:
            command += ["--worker-urls", *server.urls]
        process = subprocess.Popen([*command, *args], stdout=out, stderr=out)
        try:
            url = f"http://127.0.0.1:{port}"
            server.publisher(0).settle(lambda: is_ready(url), timeout=20)
            yield server, url
        finally:
            process.terminate()
            process.wait()


def test_requests_with_a_prefix_go_to_the_same_worker_again(tmp_path):
    with behind_router(tmp_path, "--policy", "cache_aware") as (server, url):
        prefixes = [server.text(64) for _ in range(2)]
        for turn in range(4):
            for prefix in prefixes:
                complete(url, prefix + "abcd" * turn)
        owners = [{each.worker for each in server.requests[at::2]} for at in range(2)]
        assert [len(each) for each in owners] == [1, 1]
        server.routing.assert_hit_ratio(of_best=1.0)


def test_many_held_requests_of_one_prefix_spread_to_the_other_worker(tmp_path):
    limits = ("--balance-abs-threshold", "4", "--balance-rel-threshold", "1.1")
    with (
        behind_router(tmp_path, "--policy", "cache_aware", *limits) as (server, url),
        ThreadPoolExecutor(16) as pool,
    ):
        prefix = server.text(64)
        complete(url, prefix)
        server.hold()
        sent = []
        for number in range(16):
            sent.append(pool.submit(complete, url, prefix + server.text(4)))
            server.wait_requests(open=number + 1)
        server.release()
        assert [each.result()["usage"]["completion_tokens"] for each in sent] == [1] * 16
        first = server.requests[0].worker
        counts = Counter(each.worker for each in server.requests)
        assert counts[first] > counts[1 - first] > 0
        assert server.routing.elsewhere > 0


def test_both_engines_of_a_pair_get_the_request(tmp_path):
    with behind_router(tmp_path, pairs=True) as (server, url):
        text = server.text(64)
        status, answer = call(url, "/generate", {"text": text, "sampling_params": {"max_new_tokens": 4}})
        assert status == 200, answer
        assert sorted((each.worker, each.path) for each in server.requests) == [(0, "/generate"), (1, "/generate")]
        assert len({each.prompt_tokens for each in server.requests}) == 1
