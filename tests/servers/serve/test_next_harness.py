"""Engines of the next harness behind the same sockets, and what a router that stays connected holds afterwards."""

import http.client
import random
import threading
from collections import Counter
from contextlib import ExitStack, closing, suppress

import pytest
from served import call, complete

from pytest_kvmock import Cleared, EngineProfile, Removed, RouterHarness, Stored
from pytest_kvmock.engines.backends import speaker_of
from pytest_kvmock.servers import KvServer
from pytest_kvmock.wire import find_dialect
from pytest_kvmock.wire.sockets import KvSubscriber

USES = 20
CLIENTS = 6


def harness(dialect, **profile):
    sizes = {"block_size": 16, "num_blocks": 48, "workers": 1, **profile}
    return RouterHarness(EngineProfile(**sizes), speaker_of(find_dialect(dialect)))


class RoutersIndex:
    """Blocks of one worker according to the batches that a router received.

    Attributes:
        held: blocks by rank, each with its number of copies.
        wrong: each Removed of a block that is not held.
    """

    def __init__(self, publisher, dialect):
        self.held, self.wrong = {}, []
        self._publisher = publisher
        self._subscriber = KvSubscriber(publisher.endpoints, self._apply, dialect=dialect)
        publisher.wait_subscribed()

    def _apply(self, event):
        rank, data = event.event.dp_rank, event.event.data
        held = self.held.setdefault(rank, Counter())
        if isinstance(data, Stored):
            held.update(data.block_hashes)
        elif isinstance(data, Removed):
            for block in data.block_hashes:
                if held[block]:
                    held[block] -= 1
                else:
                    self.wrong.append(block)
        elif isinstance(data, Cleared):
            held.clear()

    def receive(self, batches):
        self._subscriber.receive(batches, timeout=20)

    def catch_up(self):
        published = sum(map(self._publisher.batches, range(self._publisher.ranks)))
        if published > self._subscriber.batches:
            self.receive(published - self._subscriber.batches)

    def close(self):
        self._subscriber.close()


@pytest.fixture
def load():
    """Run clients that keep sending requests until the test ends, whatever the answers are."""
    ended, threads = threading.Event(), []

    def client(url, texts, seed):
        rng = random.Random(seed)
        while not ended.is_set():
            with suppress(OSError, http.client.HTTPException):
                body = {"prompt": rng.choice(texts), "max_tokens": rng.randrange(1, 40), "stream": rng.random() < 0.3}
                call(url, "/v1/completions", body)

    def begin(server):
        stems = [server.text(3) for _ in range(4)]
        texts = [server.text(1 + place % 4, after=stem) for stem in stems for place in range(4)]
        for seed in range(CLIENTS):
            threads.append(threading.Thread(target=client, args=(server.url(), texts, seed), daemon=True))
            threads[-1].start()

    yield begin
    ended.set()
    for each in threads:
        each.join(20)


@pytest.mark.parametrize(
    ("dialect", "ranks"),
    [("vllm-0.33", 1), ("vllm-0.33-bytes", 2), ("vllm-0.9", 1), ("sglang-0.5.23", 2), ("sglang-0.5.9", 1)],
)
def test_a_router_that_stays_connected_holds_what_the_next_engines_hold(dialect, ranks, load):
    with ExitStack() as stack:
        kv = stack.enter_context(harness(dialect, dp_size=ranks))
        server = stack.enter_context(KvServer(kv, dialect, time_scale=0.1))
        index = stack.enter_context(closing(RoutersIndex(server.publisher(), server.dialect)))
        load(server)
        stale = 0
        for _ in range(USES):
            index.receive(4)
            server.hold()  # a pass under way ends later
            kv = stack.enter_context(harness(dialect, dp_size=ranks))
            server.use(kv)
            index.catch_up()
            stale += sum(each.total() for each in index.held.values())
            server.release()
        assert (index.wrong, stale) == ([], 0)


def test_use_refuses_engines_of_another_server_and_changes_nothing():
    with harness("vllm-0.33") as first, harness("vllm-0.33") as second, KvServer(first) as server, KvServer(second):
        complete(server.url(), server.text(2))
        with pytest.raises(ValueError, match="is driven by a KvServer already"):
            server.use(second)
        assert server.harness is first
        assert len(server.requests) == 1


def test_engines_of_the_next_harness_replace_a_broken_engine():
    with harness("vllm-0.33") as first, KvServer(first) as server, harness("vllm-0.33") as second:
        first.engine(0).inside.start_pass = lambda _now_ms: 1 / 0
        assert call(server.url(), "/v1/completions", {"prompt": "abc"})[0] == 500
        server.use(second)
        first.worker(0).serve(first.prompt(2))
        assert len(first.events) == 1
        assert server.publisher().batches() == 0  # events of the old engine are no longer published
        assert server.inside.broken == []
        assert call(server.url(), "/health")[0] == 200
        complete(server.url(), "abc")
