"""A right router with books of its own, index, loads and workers, all from its hooks; and thirteen wrong ones made of it."""

from contextlib import suppress
from random import Random

from pytest_kvmock.router import KvEventError, RadixIndex
from pytest_kvmock.router.loads import LoadBook


class OwnBooks:
    """Dynamo's cost over its own index, loads and list of workers; it says what it believes."""

    def __init__(self, workers, seed=0, *, ranks=False, copies=False):
        self.index = RadixIndex(count_copies=copies)
        self.book = LoadBook(workers)
        self.ranks = ranks
        self.rng = Random(seed)

    # what it believes

    def loads(self):
        return {worker: (load.prefill_tokens, load.blocks, load.requests) for worker, load in self.book.loads.items()}

    def overlap(self, request):
        scores = self.index.find_matches(request.local_hashes).scores
        return {key if self.ranks else key[0]: score for key, score in scores.items()}

    def workers(self):
        return list(self.book.loads)

    # what it does

    def cost(self, request, worker, overlap):
        load, size = self.book.loads[worker], request.block_size
        raw = (load.prefill_tokens + max(0, request.prompt_tokens - overlap * size) + overlap * size) / size
        return max(0.0, raw - overlap) + load.blocks + load.new_blocks(request.sequence_hashes)

    def pick(self, request, candidates):
        overlaps = self.overlap(request)
        costs = {worker: self.cost(request, worker, overlaps.get(worker, 0)) for worker in self.workers()}
        return self.rng.choice([worker for worker, cost in costs.items() if cost == min(costs.values())])

    def dispatched(self, request, worker):
        self.book.dispatched(request, worker, self.overlap(request).get(worker, 0))

    def first_token(self, request):
        self.book.first_token(request)

    def finished(self, request):
        self.book.finished(request)

    def apply(self, event):
        with suppress(KvEventError):
            self.index.apply(event)

    def worker_added(self, worker):
        self.book.add_worker(worker)

    def worker_removed(self, worker):
        self.book.remove_worker(worker)
        self.index.remove_worker(worker[0] if self.ranks else worker)


class StaleIndex(OwnBooks):
    def worker_removed(self, worker):
        self.book.remove_worker(worker)


class NeverFreed(OwnBooks):
    def finished(self, request):
        pass


class CountedTwice(OwnBooks):
    def dispatched(self, request, worker):
        super().dispatched(request, worker)
        self.book.loads[worker].prefill_tokens += request.prompt_tokens


class NewWorkerNotLearnt(OwnBooks):
    def worker_added(self, worker):
        pass


class DeadWorkerKept(OwnBooks):
    def worker_removed(self, worker):
        self.index.remove_worker(worker)

    def pick(self, request, candidates):
        live = {each.worker for each in candidates}
        return min(live & set(self.workers()), key=lambda worker: self.cost(request, worker, 0))


class LoraBlind(OwnBooks):
    def overlap(self, request):
        plain = request.prompt.tokens
        from pytest_kvmock import Prompt

        scores = self.index.find_matches(Prompt(plain).block_hashes(request.block_size)).scores
        return {key[0]: score for key, score in scores.items()}


class RanksSummed(OwnBooks):
    def overlap(self, request):
        scores = self.index.find_matches(request.local_hashes).scores
        whole = {}
        for (worker, _), score in scores.items():
            whole[worker] = whole.get(worker, 0) + score
        return {worker: whole.get(worker[0], 0) for worker in self.workers()}


class NeverMatches(OwnBooks):
    def overlap(self, request):
        return {}


class IgnoresLoad(OwnBooks):
    def cost(self, request, worker, overlap):
        return -overlap


class EmptyScores(OwnBooks):
    def pick(self, request, candidates):
        return super().pick(request, candidates) if any(self.overlap(request).values()) else self.workers()[0]


class Dearest(OwnBooks):
    def cost(self, request, worker, overlap):
        return -super().cost(request, worker, overlap)


class RemovesForAll(OwnBooks):
    """A Removed of one worker takes the block from all."""

    def apply(self, event):
        from dataclasses import replace

        super().apply(event)
        if type(event.event.data).__name__ == "Removed":
            for worker in self.workers():
                if worker != event.worker_id:
                    super().apply(replace(event, worker_id=worker))


class IgnoresCleared(OwnBooks):
    def apply(self, event):
        if type(event.event.data).__name__ != "Cleared":
            super().apply(event)
