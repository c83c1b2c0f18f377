"""A router in Go, which receives no events and keeps a tree of sent prompts, fulfils the contract of router processes
as far as it applies.
"""

import http.client
import json
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="engines that serve HTTP need aiohttp")

from pytest_kvmock.testing import ProcessContract

HERE = Path(__file__).parent
GO = shutil.which("go")

pytestmark = pytest.mark.skipif(GO is None, reason="needs Go 1.22 (no `go` on the path), to build the router")


@pytest.fixture(scope="module", autouse=True)
def binary(tmp_path_factory):
    """Build the router."""
    path = tmp_path_factory.mktemp("go") / "router"
    built = subprocess.run(
        [GO, "build", "-o", path, "."], check=False, cwd=HERE / "go_router", capture_output=True, text=True
    )
    if built.returncode:
        pytest.fail(f"go build failed: {built.stderr.strip()}", pytrace=False)
    TestGoRouter.binary = path


class TestGoRouter(ProcessContract):
    hears_events = False
    takes_token_ids = False  # it compares texts

    def command(self, engines):
        return [self.binary, str(engines.port), str(engines.block_size), *engines.urls]

    def open_requests(self):
        return self.ask("GET", "/open")

    def moved(self, engines):
        self.ask("PUT", "/workers", engines.urls)

    def ask(self, method, path, body=None):
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=20)
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return answer
