"""`plain_router.py` fulfils the contract of router processes: how it is started, and how its state is queried."""

import http.client
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="the router needs aiohttp")

from pytest_kvmock.testing import ProcessContract

HERE = Path(__file__).parent


def source_of(engine):
    """Return an engine as the router takes it: its URL, and the endpoints of events and replays of each rank."""
    ranks = zip(engine.events, engine.replays, strict=True)
    return f"{engine.url}=" + ",".join("+".join(rank) for rank in ranks)


def ask(url, method, path, body=None):
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


class TestPlainRouter(ProcessContract):
    gives_up_after = 3

    def command(self, engines):
        return [sys.executable, HERE / "plain_router.py", str(engines.block_size), *map(source_of, engines)]

    def ready(self, process):
        return f"http://127.0.0.1:{process.line()}"

    def blocks(self, prompt, cache_salt=None, lora_name=None):
        body = {"prompt": prompt, "model": lora_name or self.engines.model, "cache_salt": cache_salt}
        workers = {engine.url: engine.worker for engine in self.engines}
        return {(workers[row["url"]], row["rank"]): row["blocks"] for row in ask(self.url, "POST", "/blocks", body)}

    def open_requests(self):
        return ask(self.url, "GET", "/open")

    def moved(self, engines):
        ask(self.url, "PUT", "/workers", [source_of(each) for each in engines])
