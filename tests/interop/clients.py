"""Dynamo's clients of KV events, queried as their users query them: the standalone indexer over HTTP, and the
SelectionService.
"""

import contextlib
import http.client
import itertools
import json
import socket
import subprocess
import sys
from time import monotonic

from pytest_kvmock import RadixIndex, RadixIndexError, RouterEvent, StorageTier

PATIENCE = 20.0
"""Seconds until a process must be up, or an answer must be right."""

_names = itertools.count()


class ClientError(AssertionError):
    """A client did not start, or refused a request that its users may make."""


class SetIndex:
    """The answers of an index that does not count copies. It gets all published events, and skips contradictory ones.

    Args:
        harness: the harness whose workers publish.
        clears: what a Cleared empties, as in `RadixIndex`.

    Attributes:
        misses: whether events published now are lost.
    """

    def __init__(self, harness, clears="rank"):
        self.misses = False
        self._index = RadixIndex(clears=clears)
        self._block_size = harness.profile.block_size
        for worker in range(harness.profile.workers):
            harness.add_sink(_Sink(worker, self), worker_id=worker)

    def take(self, event):
        if not self.misses:
            with contextlib.suppress(RadixIndexError):
                self._index.apply(event)

    def forget(self, worker):
        """Forget all ranks of a worker."""
        self._index.remove_worker(worker)

    def answer(self, prompt):
        """Return the leading blocks of a prompt that each worker and rank holds, by `(worker, rank)`."""
        return self._index.find_matches(prompt.block_hashes(self._block_size)).scores

    def answer_below(self, prompt):
        """Return the leading blocks of worker 0 on the device, and the blocks by which its host extends them."""
        found = self._index.find_tiered(prompt.block_hashes(self._block_size))
        return tuple(found.get(tier, {}).get((0, 0), 0) for tier in (StorageTier.DEVICE, StorageTier.HOST_PINNED))


class _Sink:
    def __init__(self, worker, index):
        self.worker, self.index = worker, index

    def publish(self, event, storage_tier, token_ids):
        self.index.take(RouterEvent(self.worker, event, storage_tier))


class Indexer:
    """`python -m dynamo.indexer`: a process with the models that it knows.

    Args:
        log: the file for its log.
    """

    def __init__(self, log):
        self.log = log
        self._stack = contextlib.ExitStack()
        written = self._stack.enter_context(log.open("wb"))
        for _ in range(5):  # another program may take the port between our check and its bind
            with socket.create_server(("127.0.0.1", 0)) as taken:
                self.port = taken.getsockname()[1]
            command = [sys.executable, "-m", "dynamo.indexer", "--port", str(self.port), "--threads", "1"]
            self._process = subprocess.Popen(command, stdout=written, stderr=written)
            if self._is_up():
                break
        else:
            raise ClientError(f"the indexer did not start:\n{self.log_text()[-2000:]}")

    def _is_up(self):
        until = monotonic() + PATIENCE
        while monotonic() < until:
            with contextlib.suppress(ConnectionError):
                return self.ask("GET", "/health")[0] == 200
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.005)
                return False
        return False

    def close(self):
        self._process.terminate()
        self._process.wait(PATIENCE)
        self._stack.close()

    def log_text(self):
        return self.log.read_text(errors="replace")

    def ask(self, method, path, body=None):
        """Send a request; return the status and the answer, which is parsed if it is JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            read = answer.read()
            return answer.status, json.loads(read) if read[:1] in b"{[" and read else read
        finally:
            connection.close()

    def model(self, block_size):
        """Return a model with a name that no earlier test used, so that the tests of a module can share a process."""
        return Model(self, f"model-{next(_names)}", block_size)


class Model:
    """One model of an indexer, and the workers that serve it.

    Attributes:
        name: of the model.
    """

    def __init__(self, indexer, name, block_size):
        self.indexer, self.name, self.block_size = indexer, name, block_size
        self.workers = {}

    def close(self):
        """Unregister all workers: a worker's id must be unique over all models."""
        for worker in sorted(self.workers):
            self.unregister(worker)

    def _asked(self, path, body):
        status, answer = self.indexer.ask("POST", path, {"model_name": self.name, **body})
        if status not in (200, 201):
            raise ClientError(f"{path} {body}: {status} {answer!r:.300}")
        return answer

    def register(self, worker, publisher, *, replay=True):
        """Make the indexer subscribe to each rank of a publisher, and return when it has."""
        self.workers[worker] = publisher
        for rank, endpoint in enumerate(publisher.endpoints):
            body = {"instance_id": worker, "endpoint": endpoint, "dp_rank": rank, "block_size": self.block_size}
            if replay:
                body["replay_endpoint"] = publisher.replay_endpoints[rank]
            self._asked("/register", body)
        publisher.wait_subscribed(timeout=PATIENCE)

    def unregister(self, worker):
        """Make the indexer forget a worker, and return when its subscriptions have ended."""
        self._asked("/unregister", {"instance_id": worker})
        publisher = self.workers.pop(worker)
        publisher.settle(lambda: not any(map(publisher.subscriptions, range(publisher.ranks))), timeout=PATIENCE)

    def answer(self, prompt, **keys):
        """Return the leading blocks of a prompt that each worker and rank holds on the device, by `(worker, rank)`."""
        scores = self._asked("/query", {"token_ids": list(prompt.tokens), **keys})["scores"]
        return {
            (int(worker), int(rank)): tokens // self.block_size
            for worker, ranks in scores.items()
            for rank, tokens in ranks.items()
            if tokens
        }
