"""SGLang's cache-aware rule: a tree of the prompts sent to each worker, without events; load decides if it is
uneven.
"""


class CacheAware:
    """The longest match if it is more than half of the prompt; otherwise the worker with the smallest tree.

    Args:
        threshold: the share of a prompt that must match.
        apart: loads are uneven if open requests differ by more than this number,
        ratio: and by more than this factor.
        blocks: number of most recently used blocks in a worker's tree.
    """

    needs_candidates = True

    def __init__(self, threshold=0.5, apart=32, ratio=1.1, blocks=1024):
        self.threshold = threshold
        self.apart = apart
        self.ratio = ratio
        self.blocks = blocks
        self.sent = {}

    def pick(self, request, candidates):
        open_ = {each.worker: each.active_requests for each in candidates}
        if max(open_.values()) > max(min(open_.values()) + self.apart, self.ratio * min(open_.values())):
            return min(open_, key=open_.get)
        matched = {worker: self.matched(request, worker) for worker in open_}
        best = max(matched, key=lambda worker: (matched[worker], -open_[worker]))
        if matched[best] > self.threshold * len(request.sequence_hashes):
            return best
        return min(open_, key=lambda worker: len(self.sent.get(worker, ())))

    def matched(self, request, worker):
        held = self.sent.get(worker, {})
        chain = request.sequence_hashes
        return next((at for at, block in enumerate(chain) if block not in held), len(chain))

    def believed(self, request):
        return {worker: self.matched(request, worker) for worker in self.sent}

    def dispatched(self, request, worker):
        held = self.sent.setdefault(worker, {})
        for block in request.sequence_hashes:
            held.pop(block, None)
            held[block] = True  # the most recently used is last
        while len(held) > self.blocks:
            del held[next(iter(held))]

    def worker_removed(self, worker):
        self.sent.pop(worker, None)
