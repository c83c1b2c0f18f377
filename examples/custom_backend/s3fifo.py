"""S3-FIFO as the eviction policy of a KV cache: three queues, and no block is moved on a hit.

"FIFO queues are all you need for cache eviction" (Yang, Zhang, Qiu, Yue, Rashmi; SOSP 2023). New blocks wait in a small
queue, a tenth of the cache; most are never used again and leave from there. Blocks that were used more than once while
they waited move to the main queue. Names of blocks that the small queue evicted are kept as ghosts for a while: a block
that comes back in this time goes to the main queue at once.

In the paper's cache no object is ever in use. Here a block may be in use when its turn comes: it cannot be evicted
then, and counts as used.
"""

from collections import deque

from pytest_kvmock import BackendSpec, EvictionPolicy

MOST_USES = 3  # two bits per block


class Block:
    """The state of one cached block in the policy."""

    __slots__ = ("idle", "queue", "slot", "uses", "waits")

    def __init__(self, slot, queue):
        self.slot = slot
        self.queue = queue
        self.waits = False  # in its queue: since it was freed for the first time
        self.uses = 0
        self.idle = False  # no request holds it


class Queue:
    """Blocks in order of arrival."""

    def __init__(self):
        self.blocks = deque()
        self.idle = 0

    def append(self, block):
        block.queue, block.waits = self, True
        self.blocks.append(block)
        self.idle += block.idle

    def popleft(self):
        block = self.blocks.popleft()
        self.idle -= block.idle
        return block


class S3FifoPolicy(EvictionPolicy):
    """The eviction policy of one block manager with room for `num_blocks` blocks."""

    def __init__(self, num_blocks):
        self.small_size = max(1, num_blocks // 10)
        self.main_size = num_blocks - self.small_size
        self.clear()

    def clear(self):
        """Drop all blocks and ghosts."""
        self.blocks = {}  # by slot, since each was freed for the first time
        self.small, self.main = Queue(), Queue()
        self.ghosts = {}  # names of blocks that the small queue evicted, oldest first

    # ------------------------------------------------------------------------ what happens to blocks

    def insert(self, slots):
        """Make these blocks evictable: no request holds them any more."""
        for slot in slots:
            block = self.blocks.get(slot)
            if block is None:  # first time freed since its slot was last evicted
                queue = self.small
                if slot.plh in self.ghosts:
                    del self.ghosts[slot.plh]
                    queue = self.main
                block = self.blocks[slot] = Block(slot, queue)
            block.idle = True
            if block.waits:
                block.queue.idle += 1
            else:
                block.queue.append(block)

    def remove(self, slots):
        """Mark these blocks as used again; they keep their places."""
        for slot in slots:
            block = self.blocks[slot]
            block.idle = False
            block.queue.idle -= 1
            block.uses = min(block.uses + 1, MOST_USES)

    # ----------------------------------------------------------------------------------- what is evicted next

    def evict(self, count):
        """Return the next blocks to evict; fewer if there are no more."""
        gone = []
        while len(gone) < count and (self.small.idle or self.main.idle):
            from_small = self.small.idle and (len(self.small.blocks) >= self.small_size or not self.main.idle)
            block = self._next_of_small() if from_small else self._next_of_main()
            if block is not None:
                self.blocks.pop(block.slot, None)  # the copy in `order` has no entries
                gone.append(block.slot)
        return gone

    def _next_of_small(self):
        block = self.small.popleft()
        if not block.idle or block.uses > 1:
            block.uses = 0
            self.main.append(block)
            return None
        self.ghosts[block.slot.plh] = None
        if len(self.ghosts) > self.main_size:
            del self.ghosts[next(iter(self.ghosts))]
        return block

    def _next_of_main(self):
        block = self.main.popleft()
        if block.idle and not block.uses:
            return block
        if block.idle:
            block.uses -= 1
        self.main.append(block)
        return None

    def order(self):
        """Return all blocks that no request holds, in the order of eviction, simulated on a copy."""
        twin = S3FifoPolicy(self.small_size + self.main_size)
        for queue, copies in ((self.small, twin.small), (self.main, twin.main)):
            for block in queue.blocks:
                copy = Block(block.slot, copies)
                copy.uses, copy.idle = block.uses, block.idle
                copies.append(copy)
        return twin.evict(self.small.idle + self.main.idle)


# A prompt's first block may be evicted before its later ones, so prefix_closed is False. It is not in the default
# matrix, because this project has other tests that do not concern it; most projects leave in_matrix=False out.
S3FIFO = BackendSpec.of_policy(
    "s3fifo", S3FifoPolicy, models="S3-FIFO, SOSP 2023", prefix_closed=False, in_matrix=False
)
