"""A policy for hybrid models: count the held blocks of a prompt only up to where an earlier request's chain ended or
branched.

An engine keeps windows and states where a chain ends, and where a prompt branched off. In between it holds blocks of
full attention from which no prompt can resume, and no event shows this.
"""

from pytest_kvmock import Cleared, RadixIndex, Removed, Stored, sequence_hashes
from pytest_kvmock.values import SparseStored

ATTENTION = ("full_attention", "mla_attention")


class PlainOverlap:
    """The most blocks by events, then the fewest open requests."""

    needs_candidates = True

    def __init__(self):
        self.index = RadixIndex(count_copies=True)
        self.counted = {}  # by the tokens of a prompt: the overlap for which it was sent

    def apply(self, event):
        self.index.apply(event)

    def blocks(self, request, worker):
        return self.index.find_matches(request.local_hashes).scores.get((worker, 0), 0)

    def rank(self, request, candidate):
        """Return the key of a candidate: the greatest is picked."""
        return self.blocks(request, candidate.worker), -candidate.active_requests

    def pick(self, request, candidates):
        best = max(candidates, key=lambda each: self.rank(request, each)).worker
        self.counted[request.tokens] = self.blocks(request, best)
        return best

    def worker_removed(self, worker):
        self.index.remove_worker(worker)


class ChainEnds(PlainOverlap):
    """The same, but counts up to the last end of a chain, or branch, that the worker holds."""

    def __init__(self):
        super().__init__()
        self.names = {}  # by worker: our hash for each of its block names, of all tokens up to the block's end
        self.ends = {}

    def apply(self, event):
        super().apply(event)
        data, extra, worker = event.event.data, event.extra or {}, event.worker_id
        if isinstance(data, Cleared):
            self.ends.pop(worker, None)
        if isinstance(data, Cleared | Removed | SparseStored) or not isinstance(data, Stored):
            return  # the index does not count removed blocks
        if extra.get("kv_cache_spec_kind", ATTENTION[0]) not in ATTENTION:
            return
        names = self.names.setdefault(worker, {})
        if data.parent_hash is None or data.parent_hash in names:
            ours = sequence_hashes(data.tokens_hashes, parent=names.get(data.parent_hash))
            names.update(zip(data.block_hashes, ours, strict=True))
            self.ends.setdefault(worker, set()).add(ours[-1])

    def blocks(self, request, worker):
        held, ends = super().blocks(request, worker), self.ends.get(worker, ())
        return next((depth for depth in range(held, 0, -1) if request.sequence_hashes[depth - 1] in ends), 0)

    def rank(self, request, candidate):
        """Return the key of a candidate. Among equals, a worker that holds more will leave a branch there, which the
        next request finds.
        """
        held = super().blocks(request, candidate.worker)
        return self.blocks(request, candidate.worker), held, -candidate.active_requests

    def dispatched(self, request, worker):
        held = super().blocks(request, worker)
        if held:
            self.ends.setdefault(worker, set()).add(request.sequence_hashes[held - 1])

    def worker_removed(self, worker):
        super().worker_removed(worker)
        self.names.pop(worker, None)
        self.ends.pop(worker, None)
