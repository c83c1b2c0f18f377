"""Right and wrong indexes, as a user could have written them."""

from contextlib import suppress

from pytest_kvmock import Cleared, Removed, Stored, block_hashes
from pytest_kvmock.oracle import RadixIndex, RadixIndexError


class Sound:
    """The least that an index must offer: lookup by local hashes, answers by rank."""

    def __init__(self):
        self.tree = RadixIndex()
        self.asked = 0

    def apply(self, event):
        self.tree.apply(event)

    def find_matches(self, local_hashes):
        self.asked += 1
        return self.tree.find_matches(local_hashes).scores


class ScoresObject(Sound):
    def find_matches(self, local_hashes):
        return self.tree.find_matches(local_hashes)


class ByWorker(Sound):
    def find_matches(self, local_hashes):
        out = {}
        for (worker, _), blocks in super().find_matches(local_hashes).items():
            out[worker] = max(blocks, out.get(worker, 0))
        return out


class WithZeros(Sound):
    def find_matches(self, local_hashes):
        return dict.fromkeys(self.tree.workers, 0) | super().find_matches(local_hashes)


class ByTokens:
    block_size = 4

    def __init__(self):
        self.tree = RadixIndex()

    def apply(self, event):
        self.tree.apply(event)

    def match_tokens(self, tokens):
        assert all(isinstance(token, int) for token in tokens)
        return self.tree.find_matches(block_hashes(tokens, self.block_size)).scores


class Manageable(Sound):
    """Can be flushed and dumped, and can remove workers."""

    def __init__(self):
        super().__init__()
        self.flushed = 0
        self.removals = []

    def flush(self):
        self.flushed += 1

    def dump_events(self):
        return self.tree.dump_events()

    def remove_worker(self, worker_id):
        self.removals.append(worker_id)
        self.tree.remove_worker(worker_id)

    def remove_worker_dp_rank(self, worker_id, dp_rank):
        self.removals.append((worker_id, dp_rank))
        self.tree.remove_worker_dp_rank(worker_id, dp_rank)


class Queued(Sound):
    """Queues events until it is flushed, like an index fed by a thread."""

    def __init__(self):
        super().__init__()
        self.queue = []

    def apply(self, event):
        self.queue.append(event)

    def flush(self):
        while self.queue:
            self.tree.apply(self.queue.pop(0))


class Async(Sound):
    async def apply(self, event):
        self.tree.apply(event)

    async def find_matches(self, local_hashes):
        return super().find_matches(local_hashes)


class AsyncManageable(Async):
    async def remove_worker(self, worker_id):
        self.tree.remove_worker(worker_id)


class ForgetsOneRemoved(Sound):
    def __init__(self):
        super().__init__()
        self.skips = 1

    def apply(self, event):
        if isinstance(event.event.data, Removed) and self.skips:
            self.skips -= 1
            return
        super().apply(event)


class IgnoresCleared(Sound):
    def apply(self, event):
        if not isinstance(event.event.data, Cleared):
            super().apply(event)


class RemovesFromTheWrongWorker(Sound):
    def apply(self, event):
        if isinstance(event.event.data, Removed):
            event = type(event)(1 - event.worker_id, event.event)
        with suppress(RadixIndexError):  # and reports nothing
            super().apply(event)


class MatchesByContentAlone(Sound):
    """Counts the leading blocks whose local hash a worker has stored anywhere."""

    def __init__(self):
        super().__init__()
        self.held = {}
        self.local = {}

    def apply(self, event):
        key, data = (event.worker_id, event.event.dp_rank), event.event.data
        held = self.held.setdefault(key, {})
        if isinstance(data, Stored):
            held.update(zip(data.block_hashes, data.tokens_hashes, strict=True))
        elif isinstance(data, Removed):
            for block in data.block_hashes:
                held.pop(block, None)
        else:
            held.clear()

    def find_matches(self, local_hashes):
        out = {}
        for key, held in self.held.items():
            count = next((i for i, h in enumerate(local_hashes) if h not in held.values()), len(local_hashes))
            out[key] = count
        return out


class RaisesOnce(Sound):
    def __init__(self, at=0):
        super().__init__()
        self.at = at

    def apply(self, event):
        self.at -= 1
        if self.at == -1:
            raise OSError("disk full")
        super().apply(event)


class RaisesWhenAsked(Sound):
    def find_matches(self, local_hashes):
        raise ZeroDivisionError("no")


class Answers(Sound):
    """Returns the same answer to every lookup."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def find_matches(self, local_hashes):
        return self.answer
