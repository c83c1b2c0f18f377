"""AIBrix's prefix-cache rule: a table of sent blocks, without events; load decides if it is uneven."""

from random import Random
from statistics import fmean, pstdev


class AibrixRule:
    """The longest prefix in the table among workers that are not unusually busy; otherwise the fewest open requests.

    The table assumes that a worker keeps a block for `ttl_ms`, as it receives neither evictions nor restarts.

    Args:
        seed: seed of the choice among equals.
        imbalance: difference of open requests above which prefixes do not count.
        ttl_ms: how long an unused block is kept in the table, by the fleet's clock: `time.monotonic()` stands still
            there.
    """

    needs_candidates = True

    def __init__(self, seed=0, imbalance=8, ttl_ms=60_000):
        self.rng = Random(seed)
        self.imbalance = imbalance
        self.ttl_ms = ttl_ms
        self.sent = {}  # by block and worker: when it was sent there

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
