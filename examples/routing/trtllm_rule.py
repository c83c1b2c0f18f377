"""TensorRT-LLM's KvCacheAwareRouter (`serve/router.py`): one set of hashes per server, polled after each request. Read
from its sources, not run.

A set has no counts, levels, windows or layer groups: Stored adds, Removed discards, and other events are ignored.
"""

from collections import Counter, defaultdict
from itertools import takewhile

from pytest_kvmock import Removed, Stored
from pytest_kvmock.engines import V1Hasher


class KvCacheAware:
    """The largest share of found blocks of a prompt, minus a weight for each open request; equals take turns.

    Args:
        weight: the deduction for an open request.
        tracks: whether blocks of a prompt count as cached at its server before the server reports them (newer).
        hasher: names blocks, by `kv_cache_hash_algo` of `/server_info`.
        tokens_per_block: tokens per block of its hashes; None: as on the servers.

    Attributes:
        found: by request, the worker that it was sent to and the number of blocks believed to be cached there.
    """

    needs_candidates = True

    def __init__(self, weight=0.25, tracks=False, hasher=None, tokens_per_block=None):
        self.weight, self.tracks, self.tokens_per_block = weight, tracks, tokens_per_block
        self.hasher = V1Hasher() if hasher is None else hasher
        self.known = defaultdict(set)
        self.unread = defaultdict(list)  # events that a server holds until it is polled
        self.open = Counter()
        self.turn = 0
        self.found, self.sent_to = {}, {}

    def hashes(self, tokens, size):
        """Return the hashes of all tokens except the last one, including a partial last block."""
        tokens = list(tokens)[:-1]
        return [self.hasher.name(each) for each in self.hasher.digests(tokens, size, 0, None)]

    def matched(self, request, worker):
        known = self.known[worker]
        return sum(1 for _ in takewhile(known.__contains__, self.hashes(request.tokens, self.size(request))))

    def size(self, request):
        size = request.block_size if self.tokens_per_block is None else self.tokens_per_block
        if request.block_size % size:
            raise ValueError(f"tokens_per_block of a server is {request.block_size}, no multiple of {size}")
        return size

    def score(self, request, worker):
        blocks = len(self.hashes(request.tokens, self.size(request)))
        return (self.matched(request, worker) / blocks if blocks else 0.0) - self.weight * self.open[worker]

    def pick(self, request, candidates):
        workers = sorted(each.worker for each in candidates)
        scores = {worker: self.score(request, worker) for worker in workers}
        best = [worker for worker in workers if scores[worker] == max(scores.values())]
        self.turn += 1
        return best[self.turn % len(best)]

    def dispatched(self, request, worker):
        self.found[request.number] = worker, self.matched(request, worker)
        self.sent_to[request] = worker
        self.open[worker] += 1
        if self.tracks:
            self.known[worker].update(self.hashes(request.tokens, self.size(request)))

    def apply(self, event):
        self.unread[event.worker_id].append(event)

    def finished(self, request):
        worker = self.sent_to.pop(request)
        self.open[worker] -= 1
        self.polled(worker, self.unread.pop(worker, ()))

    def polled(self, worker, events):
        """Apply the events that a server returns after a request to it has finished."""
        for event in events:
            if isinstance(event.data, Stored):
                self.known[worker].update(event.data.block_hashes)
            elif isinstance(event.data, Removed):
                self.known[worker].difference_update(event.data.block_hashes)

    def worker_removed(self, worker):
        for of_workers in (self.known, self.unread, self.open):
            of_workers.pop(worker, None)
