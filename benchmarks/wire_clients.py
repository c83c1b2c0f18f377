"""Publish to applied: `KvPublisher` sends to Dynamo's standalone indexer, compared with sending preencoded batches."""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Self

from benchmarks.measure import Figure, dynamo, needs
from benchmarks.wire import BLOCK_SIZE, stored_events
from pytest_kvmock import KvCacheEvent, RouterEvent, Stored

DIALECTS = ("vllm-0.10.2", "vllm-0.33", "sglang-0.5.20")
EVENTS, PER_BATCH, ROUNDS = 2048, 8, 41
LEAST = 0.8
MARK = tuple(range(BLOCK_SIZE))
"""The tokens of the last published block: when the indexer finds it, all earlier events are applied."""


def publish_to_applied() -> Iterator[Figure]:
    _, version = dynamo("1.3", "1.6")
    needs("msgspec", "zmq")  # for the publisher
    from pytest_kvmock.wire import Batch, encode

    mark = RouterEvent(0, KvCacheEvent(EVENTS, Stored(None, (2**62,), (1,))), token_ids=[MARK])
    events = stored_events(EVENTS)
    batches = [*(events[at : at + PER_BATCH] for at in range(0, EVENTS, PER_BATCH)), [mark]]
    with Indexer() as ask:
        for dialect in DIALECTS:
            payloads = [encode(Batch(batch, float(at)), dialect) for at, batch in enumerate(batches)]

            def publish(publisher, batches=batches):
                for batch in batches:
                    with publisher.step():
                        for event in batch:
                            publisher.publish(event)

            def send(publisher, payloads=payloads):
                for payload in payloads:
                    publisher.publish_payload(payload)

            ours, encoded = _medians(ask, dialect, publish, send)
            name = f"publish to applied in Dynamo's indexer, 8 blocks of 16 tokens an event, {PER_BATCH} events a batch"
            peer = f"`publish_payload` of batches encoded before, {version}"
            yield Figure(name, encoded.wall / ours.wall, LEAST, peer, dialect)
            yield Figure(f"{name}, CPU time of both processes", encoded.cpu / ours.cpu, None, peer, dialect)


class Taken(NamedTuple):
    """Seconds from the first publish until the last block is found: wall time, and CPU time of both processes."""

    wall: float
    cpu: float


def _medians(ask: Indexer, dialect: str, *ways: Callable[[Any], None]) -> list[Taken]:
    """Return the median times of each way, with a new publisher each time."""
    from pytest_kvmock.wire.sockets import KvPublisher

    numbers, taken = count(), [[] for _ in ways]

    def timed(way) -> Taken:
        model = f"{dialect}-{next(numbers)}"
        with KvPublisher(dialect) as publisher:
            registered = {"instance_id": 0, "endpoint": publisher.endpoint, "block_size": BLOCK_SIZE}
            ask("/register", registered | {"model_name": model})
            publisher.wait_subscribed()
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time() + ask.cpu_seconds()
            way(publisher)
            while not ask("/query", {"token_ids": MARK, "model_name": model})["scores"]:
                time.sleep(0.001)  # each query also costs CPU time in both processes
            found = Taken(time.perf_counter() - wall, time.process_time() + ask.cpu_seconds() - cpu)
            ask("/unregister", {"instance_id": 0, "model_name": model})
            publisher.settle(lambda: not publisher.subscriptions())
        return found

    for number in range(ROUNDS):
        for place in range(len(ways)) if number % 2 else reversed(range(len(ways))):
            taken[place].append(timed(ways[place]))
    return [Taken(*map(median, zip(*each, strict=True))) for each in taken]


class Indexer:
    """A process `python -m dynamo.indexer` that runs within the context; a call sends it a request, over one
    connection.
    """

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)

    def __call__(self, path: str, body: dict[str, Any]) -> Any:
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        read = answer.read()
        assert answer.status in (200, 201), (path, answer.status, read)
        return json.loads(read)

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of its threads so far; Linux counts them in ns."""
        threads = Path(f"/proc/{self._process.pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9

    def __enter__(self) -> Self:
        while self._process.poll() is None:
            with contextlib.suppress(ConnectionError):
                self._connection.connect()
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.005)
        return self

    def __exit__(self, *raised: object) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.wait(20)
