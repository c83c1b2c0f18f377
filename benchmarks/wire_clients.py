"""Publish to applied: what `KvPublisher` sends to Dynamo's standalone indexer, beside batches that were encoded before."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from benchmarks.measure import Figure, alternating, dynamo, needs, profile_of, rate
from benchmarks.wire import BLOCK_SIZE, stored_events
from pytest_kvmock import KvCacheEvent, RouterEvent, Stored

DIALECTS = ("vllm-0.10.2", "vllm-0.33", "sglang-0.5.20")
EVENTS, PER_BATCH, ROUNDS = 2048, 8, 41
LEAST = 0.8
MARK = tuple(range(BLOCK_SIZE))
"""The tokens of the last block that is published: when the indexer finds it, all before it are applied."""

Ask = Callable[[str, dict[str, Any]], Any]


def publish_to_applied() -> Iterator[Figure]:
    _, version = dynamo("1.3", "1.6")
    needs("msgspec", "zmq")  # the publisher's
    from pytest_kvmock.wire import Batch, encode

    mark = RouterEvent(0, KvCacheEvent(EVENTS, Stored(None, (2**62,), (1,))), token_ids=[MARK])
    events = stored_events(EVENTS)
    batches = [*(events[at : at + PER_BATCH] for at in range(0, EVENTS, PER_BATCH)), [mark]]
    with indexer() as ask:
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

            (ours, encoded), (our_best, best) = _medians_and_best(ask, dialect, publish, send)
            met = encoded / ours >= LEAST
            yield Figure(
                f"publish to applied in Dynamo's indexer, {dialect}, 8 blocks of 16 tokens an event, {PER_BATCH} events a batch",
                f"{LEAST} × batches that were encoded before",
                f"{encoded / ours:.2f} ×, {rate(EVENTS, ours)} events; of the fastest rounds {best / our_best:.2f} ×, {rate(EVENTS, our_best)}",
                met,
                f"{version}, `publish_payload` to the same sockets: {rate(EVENTS, encoded)}",
                "" if met else profile_of(lambda publish=publish, dialect=dialect: _alone(publish, dialect)),
            )


def _medians_and_best(ask: Ask, dialect: str, *ways: Callable[[Any], None]) -> tuple[list[float], list[float]]:
    """Seconds from the first publish until the last block is found, of each way; a new publisher each time.

    The medians, and the fastest: two processes take turns here, and what else runs on the machine changes how.
    """
    from pytest_kvmock.wire.zmq import KvPublisher

    numbers, taken = count(), {way: [] for way in ways}

    def of(way):
        def timed() -> float:
            model = f"{dialect}-{next(numbers)}"
            with KvPublisher(dialect) as publisher:
                registered = {"instance_id": 0, "endpoint": publisher.endpoint, "block_size": BLOCK_SIZE}
                ask("/register", registered | {"model_name": model})
                publisher.wait_subscribed()
                start = time.perf_counter()
                way(publisher)
                while not ask("/query", {"token_ids": MARK, "model_name": model})["scores"]:
                    pass
                taken[way].append(time.perf_counter() - start)
                ask("/unregister", {"instance_id": 0, "model_name": model})
                publisher.settle(lambda: not publisher.subscriptions())
            return taken[way][-1]

        return timed

    medians = alternating(ROUNDS, *map(of, ways), clock=lambda timed: timed())
    return medians, [min(taken[way]) for way in ways]


def _alone(publish: Callable[[Any], None], dialect: str) -> None:
    from pytest_kvmock.wire.zmq import KvPublisher

    with KvPublisher(dialect) as publisher:
        publish(publisher)


@contextlib.contextmanager
def indexer() -> Iterator[Ask]:
    """Run `python -m dynamo.indexer`; what is given asks it, over one connection."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)

    def ask(path: str, body: dict[str, Any]) -> Any:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        read = answer.read()
        assert answer.status in (200, 201), (path, answer.status, read)
        return json.loads(read)

    try:
        while process.poll() is None:
            with contextlib.suppress(ConnectionError):
                connection.connect()
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.005)
        yield ask
    finally:
        connection.close()
        process.terminate()
        process.wait(20)
