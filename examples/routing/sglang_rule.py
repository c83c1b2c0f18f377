"""SGLang's cache-aware rule: a tree of what was sent where, without events; by load where that is uneven."""


class CacheAware:
    """The longest match if it is more than half of the prompt, else the worker of which least is remembered.

    Args:
        threshold: the share of a prompt that must match.
        apart: by how many open requests workers must differ to be uneven,
        ratio: and by which factor.
        blocks: how many blocks are remembered of a worker, those used last.
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
            held[block] = True  # the last used stands last
        while len(held) > self.blocks:
            del held[next(iter(held))]

    def worker_removed(self, worker):
        self.sent.pop(worker, None)
