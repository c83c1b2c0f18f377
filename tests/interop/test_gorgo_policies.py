"""The fifteen policies of gorgo-lb pass the contract of routers; at most a line each declares what they do on purpose.

The tests supply what the reference proxy of the policies keeps: a trie of the requests sent, its own count of open
tokens and requests, and metrics of the engines, which the candidates have. All replicas are one network hop away, so
their latencies are equal.
"""

import random
import sys
from pathlib import Path

import pytest
from peer import engine

sys.path.append(str(Path(__file__).parents[1] / "testing"))

from contract_runs import names_of_tests

from pytest_kvmock.testing import RouterContract

base, weights, trie = engine("gorgo", "policy.base", "policy.gorgo", "radix_trie", group="interop")

DECLARED = {
    "gorgo": "first_of_equals",
    "gorgo-2d": "first_of_equals",
    "least-kv-cache": None,
    "least-latency": None,
    "least-load": None,
    "least-request": None,
    "least-utilization": None,
    "pack-load": "packs",
    "power-of-two": None,
    "prefix-cache": "follows_prefix",
    "queue-router": None,
    "random": None,
    "session-affinity": None,
    "simple-session-affinity": None,
    "vtc-basic": None,
}
TESTS = names_of_tests(RouterContract)


class Proxy:
    """A policy behind the state that a proxy keeps."""

    needs_candidates = True  # without candidates the policies raise

    def __init__(self, name):
        self.policy = base.get_policy(name)
        self.trie = trie.RadixTrie()
        self.store = weights.make_default_store()
        self.open = {}

    def ids(self, request):
        known = request.local_hashes if request.tokens is None else request.tokens
        return [each % 2**32 for each in known]

    def pick(self, request, candidates):
        urls = {f"http://worker-{each.worker}": each for each in candidates}
        metrics = {url: self.metrics(each, request.block_size) for url, each in urls.items()}
        tokens, requests = dict.fromkeys(urls, 0), dict.fromkeys(urls, 0)
        for url, count in self.open.values():
            if url in urls:
                tokens[url] += count
                requests[url] += 1
        context = base.RouteContext(
            list(urls),
            metrics,
            tokens,
            tokens,
            requests,
            self.trie,
            self.ids(request),
            request.prompt_tokens,
            self.store,
            request.session_id,
        )
        return urls[self.policy.fn(context).target].worker

    def metrics(self, candidate, block_size):
        return base.ReplicaSnapshot(
            num_running_reqs=candidate.active_requests,
            num_queue_reqs=candidate.waiting,
            num_used_tokens=round(candidate.usage * candidate.num_blocks) * block_size,
            latency=0.001,
            utilization=candidate.usage,
        )

    def dispatched(self, request, worker):
        url = f"http://worker-{worker}"
        self.trie.insert(self.ids(request), url)
        self.open[request] = url, request.prompt_tokens

    def finished(self, request):
        self.open.pop(request, None)

    def worker_removed(self, worker):
        self.trie.remove_endpoint(f"http://worker-{worker}")


@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("name", DECLARED)
def test_each_gorgo_policy_passes_the_contract_of_routers(name, test):
    random.seed(0)  # the policies draw from it
    traits = {DECLARED[name]: True} if DECLARED[name] else {}
    contract = type("OfPolicy", (RouterContract,), {"make_router": lambda self: Proxy(name), **traits})
    getattr(contract(), test)()
