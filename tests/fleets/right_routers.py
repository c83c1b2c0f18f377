"""Correct routers of eight kinds, their workloads, and the settings in which they are checked.

Three of them follow the events (Dynamo's cost, llm-d's scorers, SGLang's rule). Five are policies that people use
without an index, each by its own rule: the least load, the fewest requests, the better of two, sessions that keep their
worker, AIBrix's prefixes.
"""

from functools import cache, partial
from random import Random
from statistics import fmean, pstdev

from pytest_kvmock import Fleet, MockEngine, MockEngineArgs
from pytest_kvmock.fleets import LeastLoaded, RoundRobin, TraceRequest, synthetic_trace
from pytest_kvmock.testing import RightRouter

BLOCK = 16


class Scorers(RightRouter):
    """llm-d's default scorers: prefix 3, queue 2, KV cache usage 2; each scores from 0 to 1, the highest sum wins."""

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
    """SGLang's rule over a tree of sent prompts: the longest match if above half of the prompt, else the smallest tree;
    the least load if loads are uneven.
    """

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


class Policy:
    """A router that needs no events."""

    def __init__(self, seed=0):
        self.rng = Random(seed)

    def least(self, candidates, load):
        least = min(map(load, candidates))
        return self.rng.choice([each for each in candidates if load(each) == least]).worker


class LeastLoad(Policy):
    """Picks the worker with the fewest blocks in use plus blocks of prompts not yet computed."""

    def pick(self, request, candidates):
        return self.least(candidates, lambda each: each.decode_blocks + each.prefill_tokens / request.block_size)


class LeastRequest(Policy):
    """Picks the worker with the fewest open requests."""

    def pick(self, request, candidates):
        return self.least(candidates, lambda each: each.active_requests)


class TwoChoices(Policy):
    """Draws two workers at random and picks the one with fewer open requests."""

    def pick(self, request, candidates):
        two = self.rng.sample(candidates, min(2, len(candidates)))
        return min(two, key=lambda each: each.active_requests).worker


class Sticky(Policy):
    """Keeps a session on the worker of its first turn until that worker is gone. First turns, and requests without a
    session, go to the worker with the fewest open requests.
    """

    def __init__(self, seed=0):
        super().__init__(seed)
        self.of = {}

    def pick(self, request, candidates):
        kept = self.of.get(request.session_id)
        if request.session_id is None or all(each.worker != kept for each in candidates):
            kept = self.of[request.session_id] = self.least(candidates, lambda each: each.active_requests)
        return kept


class Prefixes(Policy):
    """AIBrix's prefix-cache rule over a table of the blocks sent in the last minute; the fewest requests if loads
    differ by more than 8 or no block matches.
    """

    def __init__(self, seed=0):
        super().__init__(seed)
        self.sent = {}  # by block: the time at which it was sent to each worker

    def pick(self, request, candidates):
        open_ = {each.worker: each.active_requests for each in candidates}
        if max(open_.values()) - min(open_.values()) <= 8:
            most = fmean(open_.values()) + pstdev(open_.values())
            matched = {worker: self.matched(request, worker) for worker, count in open_.items() if count <= most}
            best = max(matched.values())
            if best:
                return min((worker for worker in matched if matched[worker] == best), key=open_.get)
        return self.least(candidates, lambda each: each.active_requests)

    def matched(self, request, worker):
        known = 0
        for block in request.sequence_hashes:
            if request.now_ms - self.sent.get(block, {}).get(worker, float("-inf")) > 60_000:
                break
            known += 1
        return known

    def dispatched(self, request, worker):
        for block in request.sequence_hashes:
            self.sent.setdefault(block, {})[worker] = request.now_ms


POLICIES = (LeastLoad, LeastRequest, TwoChoices, Sticky, Prefixes)


def tenants(seed, count=400, gap_ms=12):
    """Requests that begin with one of 24 system prompts, drawn by Zipf's law; Poisson arrivals."""
    rng, ids = Random(seed), iter(range(10**9))
    prompts = [[next(ids) for _ in range(rng.randint(8, 32))] for _ in range(24)]
    weights = [1 / rank for rank in range(1, 25)]
    now, rows = 0.0, []
    for _ in range(count):
        now += rng.expovariate(1 / gap_ms)
        blocks = [*rng.choices(prompts, weights)[0], *(next(ids) for _ in range(rng.randint(1, 6)))]
        rows.append(TraceRequest(now, BLOCK * len(blocks), rng.randint(8, 64), tuple(blocks)))
    return rows


def chats(seed, count=400, groups=8, interval_ms=60, delay_ms=(200, 2000)):
    """Conversations that share a few prefixes."""
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
            interval_ms=interval_ms,
            delay_ms=delay_ms,
        )
    )


def wide_chats(seed, count=400):
    """Conversations for twice as many workers, with twice as many prefixes."""
    return chats(seed, count, groups=16)


def sparse(seed, count=400):
    """Tenants whose requests are so far apart that most find an idle fleet."""
    return tenants(seed, count, gap_ms=240)


def sparse_chats(seed, count=400):
    """Conversations of a few users with long pauses."""
    return chats(seed, count, interval_ms=600, delay_ms=(2000, 20_000))


# (trace, workers, blocks per worker, event delay in ms, incident of worker 1 during the run)
SETTINGS = {
    "tenants": (tenants, 4, 400, 0, None),
    "chats": (chats, 4, 560, 0, None),
    "eight": (wide_chats, 8, 288, 0, None),
    "small": (tenants, 4, 320, 0, None),
    "late": (tenants, 4, 400, 1000, None),
    "restart": (tenants, 4, 400, 0, "restart"),
    "crash": (tenants, 4, 400, 0, "crash"),
    "leave": (tenants, 4, 400, 0, "leave"),
    "two": (partial(chats, interval_ms=120), 2, 1120, 0, None),
    "three": (partial(chats, interval_ms=80), 3, 748, 0, None),
    "two_tenants": (partial(tenants, gap_ms=24), 2, 800, 0, None),
    "three_tenants": (partial(tenants, gap_ms=16), 3, 534, 0, None),
    "two_sparse": (sparse, 2, 800, 0, None),
    "three_sparse": (sparse, 3, 534, 0, None),
    "sparse": (sparse, 4, 400, 0, None),
    "sparse_chats": (sparse_chats, 4, 560, 0, None),
    "two_sparse_chats": (sparse_chats, 2, 1120, 0, None),
    "three_sparse_chats": (sparse_chats, 3, 748, 0, None),
}

SPARSE = tuple(name for name in SETTINGS if "sparse" in name)
"""Settings with a mostly idle fleet: the worker with the most cached blocks is right, however uneven the result."""

CALM = ("chats", "eight", "two", "three", "two_tenants", "three_tenants", *SPARSE)
"""Settings in which a router without cache information is also below saturation; in the others it has to compute more
than four engines can."""


def run(router, setting, seed, count=400):
    """Return the report of a correct router, or of a baseline, in a setting."""
    rows, workers, blocks, late_ms, incident = SETTINGS[setting]
    args = MockEngineArgs(num_gpu_blocks=blocks, block_size=BLOCK)
    if issubclass(router, RightRouter):
        made = router(range(workers), seed)
    else:
        made = router(seed) if issubclass(router, Policy) else router()
    fleet = Fleet([MockEngine(args, seed=each) for each in range(workers)], made, event_delay_ms=late_ms)
    if incident is not None:
        getattr(fleet.at(5 * count), incident)(1)
    return fleet.run(rows(seed, count), name=f"{setting} {seed}")


@cache
def baselines(setting, seed, count=400):
    """Return the reports of round robin and of the least load in a setting."""
    return run(RoundRobin, setting, seed, count), run(LeastLoaded, setting, seed, count)


def failures(router, setting, seed, count=400):
    """Return the names of the assertions that a correct router fails."""
    report = run(router, setting, seed, count)
    turns, loads = baselines(setting, seed, count)
    asked = {
        "no_worse": lambda: report.assert_no_worse(than=[turns, loads], ttft_p95=1.5),
    }
    if setting not in SPARSE:
        asked["balanced"] = report.assert_balanced
    if router in ROUTERS:
        asked["times"] = lambda: report.assert_hit_ratio(times=(1.0, turns))
    if issubclass(router, RightRouter):
        asked["beliefs"] = report.assert_no_drift
    found = []
    for name, require in asked.items():
        try:
            require()
        except AssertionError:
            found.append(name)
    return found
