"""A hash ring with bounded loads: prompts with the same beginning go to one worker, unless it is too busy."""

from bisect import bisect
from hashlib import blake2b


def place(*parts):
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


class HashRing:
    """A worker that joins or leaves moves only the prompts of its own places on the ring.

    Args:
        points: places of a worker on the ring.
        bound: factor by which a worker may exceed the mean of open requests.
    """

    needs_candidates = True

    def __init__(self, points=40, bound=1.25):
        self.points = points
        self.bound = bound
        self.workers = ()
        self.ring = []

    def pick(self, request, candidates):
        workers = tuple(each.worker for each in candidates)
        if workers != self.workers:
            self.workers = workers
            self.ring = sorted((place(worker, point), worker) for worker in workers for point in range(self.points))
        open_ = {each.worker: each.active_requests for each in candidates}
        most = self.bound * (sum(open_.values()) + 1) / len(open_)
        start = bisect(self.ring, (place(request.local_hashes[:1]),))
        for _, worker in self.ring[start:] + self.ring[:start]:
            if open_[worker] < most:
                return worker
        return min(open_, key=open_.get)
