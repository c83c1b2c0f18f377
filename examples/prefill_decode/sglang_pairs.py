"""SGLang's router for pairs: two independent policies, and both legs at once.

The prefill policy uses a tree of the prompts that it sent, the decode policy the open requests. The request counts on
both workers until it ends. When a leg answers 5xx, a new pair is picked, with a new room, up to a limit.
"""


class SglangPairs:
    """Cache-aware prefill, least loaded decode.

    Args:
        threshold: the share of a prompt that must match to send it to the same worker again.
        retries: how often a request is retried.
    """

    needs_candidates = True
    holds_prefill = True

    def __init__(self, threshold=0.5, retries=2):
        self.threshold = threshold
        self.retries = retries
        self.sent = {}
        self.open = {}
        self.tried = {}

    def started(self, workers):
        for each in (*workers["prefill"], *workers["decode"]):
            self.worker_added(each)

    def worker_added(self, worker):
        self.open[worker] = 0
        self.sent[worker] = {}

    def worker_removed(self, worker):
        del self.open[worker], self.sent[worker]

    def loads(self):
        """Return its counts: requests only, no tokens or blocks."""
        return {worker: (None, None, count) for worker, count in self.open.items()}

    def pick(self, request, candidates):
        names = [each.worker for each in candidates]
        if request.phase == "prefill":
            best = max(names, key=lambda worker: (self.matched(request, worker), -self.open[worker]))
            if self.matched(request, best) > self.threshold * len(request.sequence_hashes):
                return best
        return min(names, key=lambda worker: (self.open[worker], len(self.sent[worker])))

    def matched(self, request, worker):
        held = self.sent[worker]
        chain = request.sequence_hashes
        return next((at for at, block in enumerate(chain) if block not in held), len(chain))

    def dispatched(self, request, worker):
        self.open[worker] += 1
        self.sent[worker] |= dict.fromkeys(request.sequence_hashes)
        self.tried[request, request.phase] = worker

    def finished(self, request):
        worker = self.tried.pop((request, request.phase))
        if worker in self.open:
            self.open[worker] -= 1

    def leg_failed(self, request):
        return "retry" if request.attempt <= self.retries else None
