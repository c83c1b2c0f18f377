"""Right routers of three kinds, two workloads, and the settings in which they are judged."""

from functools import cache
from random import Random

from pytest_kvmock.fleet import Fleet, MockEngine, MockEngineArgs
from pytest_kvmock.router import LeastLoaded, RoundRobin
from pytest_kvmock.testing import RightRouter
from pytest_kvmock.traces import TraceRequest, synthetic_trace

BLOCK = 16


class Scorers(RightRouter):
    """llm-d's default: prefix 3, queue 2, KV cache usage 2; each from 0 to 1, the best sum wins."""

    def pick(self, request, candidates):
        overlaps = self.overlap(request)
        blocks = max(1, len(request.local_hashes))
        waiting = [each.waiting for each in candidates]
        least, most = min(waiting), max(waiting)

        def score(each):
            queue = (most - each.waiting) / (most - least) if most > least else 1.0
            return 3 * overlaps.get(each.worker, 0) / blocks + 2 * queue + 2 * (1 - each.usage)

        scores = [score(each) for each in candidates]
        best = [each.worker for each, value in zip(candidates, scores, strict=True) if value == max(scores)]
        return self.rng.choice(best)


class CacheAware(RightRouter):
    """SGLang's rule: a tree of what was sent where; the longest match above a half, else the smallest tree; by load where uneven."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.sent = {worker: {} for worker in self.workers()}

    def pick(self, request, candidates):
        open_ = {each.worker: each.active_requests for each in candidates}
        for worker in open_:
            self.sent.setdefault(worker, {})
        if max(open_.values()) - min(open_.values()) > 32 and max(open_.values()) > 1.1 * min(open_.values()):
            return min(open_, key=open_.get)
        matched = self.believed(request)
        best = max(open_, key=lambda worker: (matched[worker], -open_[worker]))
        if matched[best] > 0.5 * len(request.sequence_hashes):
            return best
        return min(open_, key=lambda worker: (len(self.sent[worker]), worker))

    def believed(self, request):
        chain = request.sequence_hashes
        return {
            worker: next((at for at, block in enumerate(chain) if block not in held), len(chain))
            for worker, held in self.sent.items()
        }

    def dispatched(self, request, worker):
        super().dispatched(request, worker)
        held = self.sent[worker]
        for block in request.sequence_hashes:
            held.pop(block, None)
            held[block] = True
        while len(held) > 1024:
            held.pop(next(iter(held)))

    def worker_removed(self, worker):
        super().worker_removed(worker)
        self.sent.pop(worker, None)


ROUTERS = (RightRouter, Scorers, CacheAware)


def tenants(seed, count=400):
    """Each begins with one of 24 system prompts, by Zipf; Poisson arrivals."""
    rng, ids = Random(seed), iter(range(10**9))
    prompts = [[next(ids) for _ in range(rng.randint(8, 32))] for _ in range(24)]
    weights = [1 / rank for rank in range(1, 25)]
    now, rows = 0.0, []
    for _ in range(count):
        now += rng.expovariate(1 / 12)
        blocks = [*rng.choices(prompts, weights)[0], *(next(ids) for _ in range(rng.randint(1, 6)))]
        rows.append(TraceRequest(now, BLOCK * len(blocks), rng.randint(8, 64), tuple(blocks)))
    return rows


def chats(seed, count=400, groups=8):
    """Conversations over a few prefixes."""
    return list(
        synthetic_trace(
            count,
            seed=seed,
            block_size=BLOCK,
            groups=groups,
            prefix_blocks=(2, 12),
            turns=(2, 5),
            input_tokens=(16, 200),
            output_tokens=(8, 64),
            interval_ms=60,
            delay_ms=(200, 2000),
        )
    )


def wide_chats(seed, count=400):
    """Conversations for twice the workers: over twice the prefixes."""
    return chats(seed, count, groups=16)


# (trace, workers, blocks of each, late by ms, what happens to worker 1 in the midst of it)
SETTINGS = {
    "tenants": (tenants, 4, 400, 0, None),
    "chats": (chats, 4, 560, 0, None),
    "eight": (wide_chats, 8, 288, 0, None),
    "small": (tenants, 4, 320, 0, None),
    "late": (tenants, 4, 400, 1000, None),
    "restart": (tenants, 4, 400, 0, "restart"),
    "crash": (tenants, 4, 400, 0, "crash"),
}


def run(router, setting, seed, count=400):
    """The report of a right router, or of one to compare with, in a setting."""
    rows, workers, blocks, late_ms, incident = SETTINGS[setting]
    args = MockEngineArgs(num_gpu_blocks=blocks, block_size=BLOCK)
    made = router(range(workers), seed) if issubclass(router, RightRouter) else router()
    fleet = Fleet([MockEngine(args, seed=each) for each in range(workers)], made, event_delay_ms=late_ms)
    if incident is not None:
        getattr(fleet.at(5 * count), incident)(1)
    return fleet.run(rows(seed, count), name=f"{setting} {seed}")


@cache
def baselines(setting, seed, count=400):
    """What round robin and the least load make of it."""
    return run(RoundRobin, setting, seed, count), run(LeastLoaded, setting, seed, count)


def failures(router, setting, seed, count=400):
    """The assertions that a right router fails, by name."""
    report = run(router, setting, seed, count)
    turns, loads = baselines(setting, seed, count)
    asked = {
        "beliefs": report.assert_no_drift,
        "times": lambda: report.assert_hit_ratio(times=(1.0, turns)),
        "no_worse": lambda: report.assert_no_worse(than=[turns, loads], ttft_p95=1.15),
    }
    if SETTINGS[setting][-1] is None:
        asked["balanced"] = report.assert_balanced
    found = []
    for name, require in asked.items():
        try:
            require()
        except AssertionError:
            found.append(name)
    return found
