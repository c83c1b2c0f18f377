"""Ray Serve's `PrefixTree` as the heart of a routing policy: it knows what was sent where, and no events.

Its rule is that of Ray's `PrefixCacheAffinityRouter`, by its defaults: the longest match above a tenth of the prompt, else who has the
smallest tree, and by load where that is uneven.
"""

import pytest

tree = pytest.importorskip(
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree", reason="needs ray[serve] (extra ray)"
)

from pytest_kvmock.fleet import Fleet, MockEngine, MockEngineArgs  # noqa: E402 - after it is known that Ray is here
from pytest_kvmock.router import LeastLoaded, RoundRobin  # noqa: E402
from pytest_kvmock.testing import RouterContract  # noqa: E402
from pytest_kvmock.traces import synthetic_trace  # noqa: E402

BLOCK = 16


class PrefixAffinity:
    """Ray's policy over its own tree; a block is one letter of a text."""

    def __init__(self, workers, imbalance=10, least_match=0.1, most=4_000):
        self.tree = tree.PrefixTree()
        self.tree.add_tenants([str(worker) for worker in workers], 0.0)
        self.imbalance, self.least_match, self.most = imbalance, least_match, most
        self.letters = {}

    def text(self, request):
        return "".join(
            self.letters.setdefault(each, chr(0x4E00 + len(self.letters))) for each in request.sequence_hashes
        )

    def pick(self, request, candidates):
        named = {str(each.worker): each for each in candidates}
        loads = {name: each.active_requests for name, each in named.items()}
        if max(loads.values()) - min(loads.values()) <= self.imbalance:
            text = self.text(request)
            matched, tenants = self.tree.prefix_match(text, list(named))
            if text and len(matched) / len(text) < self.least_match:
                tenants = self.tree.get_smallest_tenants()
            known = [name for name in tenants or () if name in named]
            if known:
                return named[min(known, key=loads.get)].worker
        return named[min(loads, key=loads.get)].worker

    def dispatched(self, request, worker):
        name = str(worker)
        self.tree.insert(self.text(request), name, request.now_ms / 1000)
        excess = self.tree.tenant_to_char_count[name] - self.most
        if excess > 0:
            self.tree.evict_tenant_by_lru(name, excess)

    def worker_added(self, worker):
        self.tree.add_tenants([str(worker)], 0.0)

    def worker_removed(self, worker):
        self.tree.remove_tenants([str(worker)])


class TestPrefixAffinity(RouterContract):
    def make_router(self, workers):
        return PrefixAffinity(workers)


def served_by(router):
    args = MockEngineArgs(num_gpu_blocks=600, block_size=BLOCK)
    trace = synthetic_trace(
        300,
        seed=2,
        block_size=BLOCK,
        groups=12,
        prefix_blocks=(4, 16),
        turns=(1, 4),
        input_tokens=(16, 200),
        output_tokens=(8, 64),
        interval_ms=40,
        delay_ms=(200, 2_000),
    )
    return Fleet([MockEngine(args) for _ in range(4)], router).run(trace, name="chats")


def test_it_reuses_more_than_turns_and_lets_nobody_wait():
    turns, loads = served_by(RoundRobin()), served_by(LeastLoaded())
    report = served_by(PrefixAffinity(range(4)))
    report.assert_hit_ratio(times=(1.2, turns))
    report.assert_balanced(within=2.0)
    report.assert_no_worse(than=[turns, loads], ttft_p95=1.15)
    again = served_by(PrefixAffinity(range(4)))
    assert again.compare(report).differences == {}
