"""TensorRT-LLM's router in front of its own engines, in virtual time and over HTTP, and its inherent errors."""

import json
from random import Random
from urllib.request import Request, urlopen

import pytest
from trtllm_rule import KvCacheAware

from pytest_kvmock import BACKENDS, EngineProfile, Fleet, MockEngine, MockEngineArgs, Prompt, RouterHarness
from pytest_kvmock.engines import V2Hasher
from pytest_kvmock.fleets import FleetRequest, RoundRobin, RouterRequest
from pytest_kvmock.servers import KvServer
from pytest_kvmock.wire import read_events

BLOCK = 8
V1_WITH_HOST = BACKENDS["trtllm"].variant("v1_with_host", secondary_blocks=60)
V2_WITH_HOST = BACKENDS["trtllm_v2"].variant("v2_with_host", levels=(60,))
TWO_GROUPS = BACKENDS["trtllm_v2"].variant("v2_two_groups", groups=((None, 0), (32, 0)), pool_groups=(0, 1))
ENGINES = [BACKENDS["trtllm"], V1_WITH_HOST, BACKENDS["trtllm_v2"], V2_WITH_HOST, TWO_GROUPS]


def turns(count=240, seed=0):
    """Yield prompts that begin with one of 12 texts, some of which are much more frequent than others."""
    rng = Random(seed)
    texts = [[rng.randrange(50_000) for _ in range(rng.randint(30, 90))] for _ in range(12)]
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(1 / 15)
        tail = [rng.randrange(50_000) for _ in range(rng.randint(3, 30))]
        text = rng.choices(texts, [1 / rank for rank in range(1, 13)])[0]
        yield FleetRequest(Prompt([*text, *tail]), rng.randint(4, 20), timestamp=now)


def run(backend, router, policy="guaranteed_no_evict", blocks=60):
    args = MockEngineArgs(engine_type="trtllm", semantics=policy, num_gpu_blocks=blocks, block_size=BLOCK)
    fleet = Fleet([MockEngine(args, backend=backend) for _ in range(3)], router)
    return fleet, fleet.run(turns())


def errors(router, report):
    """Return the numbers of requests for which the router believed more, and fewer, blocks to be cached than were
    reused.
    """
    pairs = [
        (router.found[number][1], request.first_reused_tokens // BLOCK)
        for number, request in enumerate(report.requests)
    ]
    return sum(believed > true for believed, true in pairs), sum(believed < true for believed, true in pairs)


@pytest.mark.parametrize(
    ("backend", "policy"),
    [("trtllm", "guaranteed_no_evict"), ("trtllm", "max_utilization"), (V2_WITH_HOST, "max_utilization")],
    ids=lambda each: getattr(each, "name", each),
)
def test_it_serves_all_and_reuses_more_than_turns_do(backend, policy):
    _, report = run(backend, KvCacheAware(), policy)
    _, by_turns = run(backend, RoundRobin(), policy)
    assert len(report.completed) == 240
    assert report.figure("prefix_cache_reused_ratio") > by_turns.figure("prefix_cache_reused_ratio")


# Of 240 requests, those with more and those with fewer blocks believed than reused; then the same for the newer router,
# which adds the blocks that it routed.
WRONG = {
    "trtllm": (44, 17, 39, 3),
    "v1_with_host": (15, 12, 10, 3),
    "trtllm_v2": (37, 15, 31, 4),
    "v2_with_host": (7, 9, 7, 0),
    "v2_two_groups": (44, 47, 36, 6),
}


@pytest.mark.parametrize("backend", ENGINES, ids=lambda spec: spec.name)
def test_what_it_believes_is_often_not_so(backend):
    found = []
    for tracks in (False, True):
        router = KvCacheAware(tracks=tracks)
        _, report = run(backend, router)
        found += errors(router, report)
    assert WRONG[backend.name] == tuple(found)


# ------------------------------------------------------------------------------------------------------ one by one


def asked(tokens):
    return RouterRequest(0, Prompt(tokens), 4, 1)


def heard(backend, num_blocks=16, **router):
    """Return a router, a worker over a backend, and a function that polls the worker."""
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=num_blocks, workers=1), backend=backend)
    mine = KvCacheAware(**router)
    kv.add_sink(mine.apply)
    return mine, kv.worker(0), lambda: mine.polled(0, mine.unread.pop(0, ()))


def test_until_a_request_has_finished_it_knows_nothing_new():
    router, worker, poll = heard("trtllm")
    worker.serve(range(1, 14), 1)
    request = asked(range(1, 14))
    assert router.matched(request, 0) == 0
    poll()
    assert router.matched(request, 0) == 3


@pytest.mark.parametrize(("backend", "blocks"), [("trtllm", 3), ("trtllm_v2", 2)])
def test_the_partial_last_block_is_found_only_over_v1(backend, blocks):
    """V1 stores all but the last token at the end, V2 a prompt including its last one; a look-up covers all but the
    last.
    """
    router, worker, poll = heard(backend)
    worker.serve(range(1, 12), 1)
    poll()
    assert blocks == router.matched(asked(range(1, 13) if backend == "trtllm" else range(1, 12)), 0)


def test_a_leaf_that_a_partial_match_took_counts_on():
    """The second request takes the block of 5 to 8 without a Removed; two of its tokens are then cached."""
    router, worker, poll = heard("trtllm")
    worker.serve(range(1, 9))
    worker.serve([1, 2, 3, 4, 5, 6])
    poll()
    assert (router.matched(asked(range(1, 10)), 0), worker.cached_tokens(range(1, 10))) == (2, 6)


def test_what_one_layer_group_removed_is_gone_for_all():
    groups = BACKENDS["trtllm_v2"].variant("window_first", groups=((8, 0), (None, 0)), pool_groups=(0, 1))
    router, worker, poll = heard(groups, num_blocks=8)
    for first in (1, 100):
        worker.serve(range(first, first + 17))
    poll()
    held = sum(name in router.known[0] for name in worker.manager.resident())
    assert held < len(worker.manager.resident())


def test_an_offloaded_block_counts_as_one_of_the_device():
    router, worker, poll = heard(V1_WITH_HOST, num_blocks=6)
    for first in (1, 100):
        worker.serve(range(first, first + 17))
    poll()
    assert router.matched(asked(range(1, 18)), 0) == 4


def test_a_server_with_other_hashes_matches_nothing_and_nobody_says_so():
    sha = BACKENDS["trtllm_v2"].variant("v2_sha", hash_algo="v2_sha256_64")
    for hasher, blocks in ((None, 0), (V2Hasher(), 3)):
        router, worker, poll = heard(sha, hasher=hasher)
        worker.serve(range(1, 14))
        poll()
        assert blocks == router.matched(asked(range(1, 14)), 0)


def test_a_server_whose_blocks_are_no_multiple_of_its_own_is_refused():
    with pytest.raises(ValueError, match=r"^tokens_per_block of a server is 4, no multiple of 3$"):
        KvCacheAware(tokens_per_block=3).matched(asked(range(9)), 0)


# --------------------------------------------------------------------------------------------------------- behind HTTP


def post(url, body):
    data = json.dumps(body).encode()
    with urlopen(Request(url, data, {"content-type": "application/json"})) as answer:
        return answer.read()


def served_over_http(router, urls, number, tokens):
    """Send a prompt to the server that the router picks, then poll that server, as the original does."""
    request = RouterRequest(number, Prompt(tokens), BLOCK, 4)
    scores = {worker: router.score(request, worker) for worker in range(len(urls))}
    worker = max(scores, key=lambda each: (scores[each], -each))
    router.dispatched(request, worker)
    post(f"{urls[worker]}/v1/completions", {"model": "mock-model", "prompt": tokens, "max_tokens": 4})
    router.finished(request)
    events, _ = read_events(post(f"{urls[worker]}/kv_cache_events", {}), worker, [])
    router.polled(worker, events)
    return worker, router.found[number][1]


@pytest.mark.parametrize(("backend", "dialect"), [("trtllm", "trtllm-1.2"), ("trtllm_v2", "trtllm-1.3")])
def test_before_served_engines_it_goes_where_a_prompt_was(backend, dialect):
    kv = RouterHarness(EngineProfile(block_size=BLOCK, num_blocks=64, workers=2), backend=backend)
    router, first, second = KvCacheAware(), [*range(1, 34)], [*range(100, 133)]
    with KvServer(kv, dialect) as server:
        urls = [server.url(worker) for worker in range(2)]
        router.open[0] = 1  # so that the first prompt goes to the other server
        assert served_over_http(router, urls, 0, first) == (1, 0)
        router.open.clear()
        assert served_over_http(router, urls, 1, second) == (0, 0)
        assert served_over_http(router, urls, 2, first) == (1, 4)
        assert served_over_http(router, urls, 3, second) == (0, 4)
