"""AIBrix's prefix-cache rule: a table of what was sent where, without events; by load where that is uneven."""

from random import Random
from statistics import fmean, pstdev


class AibrixRule:
    """The longest prefix that the table has, among the workers that are not busier than most; else the fewest open
    requests.

    Its table believes that a worker keeps a block for `ttl_ms`: it hears of no eviction and of no restart.

    Args:
        seed: of the choice among equals.
        imbalance: from which difference of open requests on prefixes do not count.
        ttl_ms: how long a block is remembered that is not asked for, by the fleet's clock: `time.monotonic()` stands
            still there.
    """

    needs_candidates = True

    def __init__(self, seed=0, imbalance=8, ttl_ms=60_000):
        self.rng = Random(seed)
        self.imbalance = imbalance
        self.ttl_ms = ttl_ms
        self.sent = {}  # by block: when it was sent to which worker

    def pick(self, request, candidates):
        open_ = {each.worker: each.active_requests for each in candidates}
        if max(open_.values()) - min(open_.values()) <= self.imbalance:
            most = fmean(open_.values()) + pstdev(open_.values())
            matched = {worker: self.matched(request, worker) for worker, count in open_.items() if count <= most}
            best = max(matched.values())
            if best:
                return min((worker for worker in matched if matched[worker] == best), key=open_.get)
        least = min(open_.values())
        return self.rng.choice([worker for worker, count in open_.items() if count == least])

    def matched(self, request, worker):
        known = 0
        for block in request.sequence_hashes:
            if request.now_ms - self.sent.get(block, {}).get(worker, float("-inf")) > self.ttl_ms:
                break
            known += 1
        return known

    def dispatched(self, request, worker):
        for block in request.sequence_hashes:
            self.sent.setdefault(block, {})[worker] = request.now_ms
