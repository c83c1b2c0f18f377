"""What is behind the host of SGLang's HiCache: a storage that workers share, and what one worker reads and writes there.

One subject: look-ups, prefetches and backups, none of which is published; only what they change on the host is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

from pytest_kvmock.cache.hashed import HashedTokens
from pytest_kvmock.cache.sglang.hicache_tree import HiCacheTree
from pytest_kvmock.cache.sglang.hybrid_tree import TreeMatch
from pytest_kvmock.cache.sglang.radix_tree import Hold, TreeNode

# Theory of operation
#
# A request that arrives is looked up: where what the tree has of it ends on the host, or has nothing, a query asks the
# storage for the rest. Its answer is seen at the next step; then the host makes room, and a transfer reads batch after
# batch. What has come is put under the node where the request's match ended, when the end is reported or when the policy
# does not wait any longer. A later admission loads it from there, as anything on the host.
#
# The four queues are those of SGLang's threads: `run` says how much of each is done, `step` what the scheduler sees.

PREFETCH_POLICIES: Final = ("best_effort", "wait_complete", "timeout")
"""How long a request waits for its prefetch (`--hicache-storage-prefetch-policy`)."""


class PageStore:
    """Pages in a storage, by name; workers share one.

    Attributes:
        pages: names of those that are there.
    """

    def __init__(self) -> None:
        self.pages: set[int] = set()

    def add(self, names: Iterable[int]) -> None:
        """Store pages."""
        self.pages.update(names)

    def lose(self, names: Iterable[int]) -> None:
        """Lose pages; what is not there is passed over."""
        self.pages.difference_update(names)

    def leading(self, names: Sequence[int]) -> int:
        """Count the pages that are there, from the first on."""
        for number, name in enumerate(names):
            if name not in self.pages:
                return number
        return len(names)


class _Arrived(Protocol):
    """A request as the storage sees it."""

    tokens: HashedTokens
    namespace: Any


class Prefetch:
    """One look-up of a request, and what came of it. Counts are in pages.

    Attributes:
        seeker: whose it is.
        anchor: the node under which its pages belong.
        hold: what keeps the anchor on the host.
        start: pages before its first.
        count: that were looked for, and are reserved.
        hit: that the storage has, from the first on; None before the answer.
        slots: that it has on the host.
        done: that have come.
        taken: that the tree has, or that were freed already.
        stopped: nobody waits for it any more.
        waits_since: when a request was first blocked by it; None: it was not.
    """

    __slots__ = (
        "anchor",
        "count",
        "done",
        "hit",
        "hold",
        "seeker",
        "slots",
        "start",
        "stopped",
        "taken",
        "waits_since",
    )

    def __init__(self, seeker: Seeker, anchor: TreeNode, hold: Hold, start: int, count: int) -> None:
        self.seeker, self.anchor, self.hold, self.start, self.count = seeker, anchor, hold, start, count
        self.hit: int | None = None
        self.slots = self.done = self.taken = 0
        self.stopped = False
        self.waits_since: float | None = None


class Seeker:
    """What the storage keeps of one request that waits.

    Attributes:
        request: the request.
        prefetch: its look-up that is under way; None for none.
        length: pages that its last look-up matched.
        tries: look-ups beyond the first.
        timed_out: it makes no further one.
        missed: its last one brought nothing.
        polls: steps since it missed; None before the first.
        known: pages that a look-up without room found; None for none.
        loaded: tokens that its last prefetch brought, and the token where they begin (None: nothing came).
    """

    __slots__ = ("known", "length", "loaded", "missed", "polls", "prefetch", "request", "timed_out", "tries")

    def __init__(self, request: _Arrived) -> None:
        self.request = request
        self.prefetch: Prefetch | None = None
        self.length = self.tries = 0
        self.timed_out = self.missed = False
        self.polls: int | None = None
        self.known: int | None = None
        self.loaded: tuple[int, int | None] = (0, None)


class HostStorage:
    """The storage as one worker has it.

    Args:
        store: the pages.
        prefetch_policy: one of `PREFETCH_POLICIES`.
        prefetch_threshold: tokens that a look-up and a hit must have at least.
        batch: pages that are read at once.
        retry_interval: steps after which what was not found is looked up again; 0: never.
        retry_attempts: how often, a request.
        timeout_base: seconds that a request waits with policy "timeout".
        timeout_per_ki_token: seconds besides for each 1024 tokens.

    Attributes:
        store: as above.
        waiting: requests that were not admitted yet, in the order in which they came.
        prefetching: look-ups under way.
        now: the time, in seconds; its owner moves it.
        queries: look-ups that were not answered yet.
        transfers: prefetches that were not read yet.
        reports: what transfers have reported and nobody has taken.
        backups: nodes that are to be written.
    """

    def __init__(
        self,
        store: PageStore,
        *,
        prefetch_policy: str = "timeout",
        prefetch_threshold: int = 256,
        batch: int = 128,
        retry_interval: int = 8,
        retry_attempts: int = 8,
        timeout_base: float = 1.0,
        timeout_per_ki_token: float = 0.25,
    ) -> None:
        self.store = store
        self.prefetch_policy, self.prefetch_threshold, self.batch = prefetch_policy, prefetch_threshold, batch
        self.retry_interval, self.retry_attempts = retry_interval, retry_attempts
        self.timeout_base, self.timeout_per_ki_token = timeout_base, timeout_per_ki_token
        self.now = 0.0
        self.waiting: dict[Any, Seeker] = {}
        self.reset()

    def reset(self) -> None:
        """Forget what is under way; the pages stay."""
        self.queries: deque[Prefetch] = deque()
        self.transfers: deque[Prefetch] = deque()
        self.reports: deque[tuple[Prefetch, int | None]] = deque()
        self.backups: deque[tuple[Hold, tuple[int, ...]]] = deque()
        self._answered: deque[Prefetch] = deque()
        self._ended: deque[Prefetch] = deque()
        self._written: deque[Hold] = deque()
        self._released: deque[int] = deque()
        self._reserved = 0
        self.prefetching = 0

    def attach(self, tree: HiCacheTree, page_size: int) -> None:
        """Belong to a tree; called once, by its owner."""
        self._tree, self._size = tree, page_size

    @property
    def backing_up(self) -> int:
        """Nodes whose backup the scheduler has not seen done."""
        return len(self.backups) + len(self._written)

    @property
    def is_busy(self) -> bool:
        """Whether prefetches or backups are under way."""
        return bool(self.prefetching or self.backing_up)

    # ------------------------------------------------------------------------------------------------- requests

    def arrive(self, request: Any) -> tuple[TreeMatch, bool]:
        """Take a request that waits, and look it up; returns what the tree has, and whether the storage is asked."""
        self.waiting[request] = Seeker(request)
        return self.look_up(self.waiting[request])

    def leave(self, request: Any) -> None:
        """Forget a request that was admitted, or went away: then what had come for it is freed."""
        seeker = self.waiting.pop(request, None)
        if seeker is None or seeker.prefetch is None:
            return
        prefetch = seeker.prefetch
        self._stop(prefetch)
        if prefetch.done and prefetch not in self._ended:  # else what reported its end frees all
            prefetch.taken = prefetch.done
            self._released.append(prefetch.done)

    def look_up(self, seeker: Seeker) -> tuple[TreeMatch, bool]:
        """Match a request, and ask the storage for the rest if that is worth it."""
        request, size, tree = seeker.request, self._size, self._tree
        tokens = request.tokens
        found = tree.find(tokens.names, (len(tokens) - 1) // size, request.namespace)
        seeker.length, seeker.missed, seeker.polls = found.depth, False, None
        count = (len(tokens) - 1) // size - found.depth
        if seeker.timed_out or not found.end.host.on_host or count * size < self.prefetch_threshold:
            return found, False
        if self._reserved * size >= tree.host_pages * size // 2:
            seeker.missed = True
            return found, False
        prefetch = Prefetch(seeker, found.end, tree.hold_host(found.end), found.depth, count)
        prefetch.hit, seeker.known = seeker.known, None
        seeker.prefetch = prefetch
        self._reserved += count
        self.prefetching += 1
        self.queries.append(prefetch)
        return found, True

    def blocks(self, request: Any) -> bool:
        """Whether a request has to wait for its prefetch, asked when it would be admitted; the policy may end it."""
        seeker = self.waiting.get(request)
        prefetch = None if seeker is None else seeker.prefetch
        if seeker is None or prefetch is None:
            return False
        if self.prefetch_policy == "wait_complete":
            return True
        if self.prefetch_policy == "timeout":
            if prefetch.slots and prefetch.done == prefetch.slots:
                return True
            if prefetch.waits_since is None:
                prefetch.waits_since = self.now
            if self.now - prefetch.waits_since <= self._patience(prefetch):
                return True
            seeker.timed_out = True
        self._stop(prefetch)
        self._put(prefetch)
        return False

    def _patience(self, prefetch: Prefetch) -> float:
        return self.timeout_base + prefetch.count * self._size / 1024 * self.timeout_per_ki_token

    @property
    def timeouts(self) -> list[float]:
        """Until when requests that were blocked wait for their prefetches at most, in seconds."""
        under_way = (seeker.prefetch for seeker in self.waiting.values())
        return [each.waits_since + self._patience(each) for each in under_way if each and each.waits_since is not None]

    def give_up(self) -> None:
        """Wait for no prefetch any longer, and keep what has come."""
        for seeker in self.waiting.values():
            if seeker.prefetch is not None:
                prefetch = seeker.prefetch
                self._stop(prefetch)
                self._put(prefetch)

    def take_loaded(self, request: Any) -> tuple[int, int | None]:
        """Tokens that a prefetch brought since this was asked last, and where they begin."""
        seeker = self.waiting.get(request)
        if seeker is None:
            return 0, None
        loaded, seeker.loaded = seeker.loaded, (0, None)
        return loaded

    def shrank(self, request: Any, pages: int) -> tuple[TreeMatch, bool] | None:
        """Look a request up again whose match has become shorter; None if it has not, or may not be."""
        seeker = self.waiting.get(request)
        if seeker is None or pages >= seeker.length:
            return None
        if seeker.tries >= self.retry_attempts:
            seeker.length = pages
            return None
        seeker.tries += 1
        return self.look_up(seeker)

    # ------------------------------------------------------------------------------------------------- threads

    def run(self, queries: int, transfers: int, reports: int, backups: int) -> list[int]:
        """Let the threads do so much; returns how much of each there was to do."""
        ran = [0, 0, 0, 0]
        while ran[0] < queries and self.queries:
            prefetch = self.queries.popleft()
            if prefetch.hit is None:
                prefetch.hit = self.store.leading(self._names(prefetch, prefetch.count))
            self._answered.append(prefetch)
            ran[0] += 1
        while ran[1] < transfers and self.transfers:
            self._transfer(self.transfers.popleft())
            ran[1] += 1
        while ran[2] < reports and self.reports:
            prefetch, done = self.reports.popleft()
            if done is None:
                self._ended.append(prefetch)
            elif not prefetch.stopped:
                prefetch.done = done
            ran[2] += 1
        while ran[3] < backups and self.backups:
            hold, names = self.backups.popleft()
            self.store.add(names)
            self._written.append(hold)
            ran[3] += 1
        return ran

    def _names(self, prefetch: Prefetch, count: int) -> Sequence[int]:
        return prefetch.seeker.request.tokens.names[prefetch.start : prefetch.start + count]

    def _transfer(self, prefetch: Prefetch) -> None:
        names = self._names(prefetch, prefetch.slots)
        for at in range(0, len(names), self.batch):
            self.reports.append((prefetch, self.store.leading(names[: at + self.batch])))
        self.reports.append((prefetch, None))

    def back_up(self, node: TreeNode) -> None:
        """Write a node that is on the host; it stays there until that is done."""
        self.backups.append((self._tree.hold_host(node), tuple(node.names)))

    # ---------------------------------------------------------------------------------------------------- steps

    def step(self) -> list[tuple[Any, TreeMatch, bool]]:
        """See what the threads have done, and look up again what was not found; returns what was looked up."""
        self.see()
        return self._retry()

    def see(self) -> None:
        """See what the threads have done."""
        released = len(self._released)
        for _ in range(len(self._answered)):
            self._answer(self._answered.popleft())
        for _ in range(len(self._ended)):
            prefetch = self._ended.popleft()
            if prefetch.stopped:
                self._release(prefetch)
            else:
                self._finish(prefetch)
                self._put(prefetch)
                self._release(prefetch)
        for _ in range(len(self._written)):
            self._tree.release_host(self._written.popleft())
        for _ in range(released):
            self._tree.host_free += self._released.popleft()

    def _retry(self) -> list[tuple[Any, TreeMatch, bool]]:
        done: list[tuple[Any, TreeMatch, bool]] = []
        if not self.retry_interval:
            return done
        for request, seeker in [*self.waiting.items()][1:]:  # the head of the queue is never asked for again
            if seeker.prefetch or not seeker.missed or seeker.timed_out or seeker.tries >= self.retry_attempts:
                continue
            seeker.polls = 0 if seeker.polls is None else seeker.polls + 1
            if seeker.polls >= self.retry_interval:
                seeker.tries += 1
                seeker.polls = None
                done.append((request, *self.look_up(seeker)))
        return done

    def _answer(self, prefetch: Prefetch) -> None:
        tree, size, seeker = self._tree, self._size, prefetch.seeker
        hit = prefetch.hit or 0
        if prefetch.stopped or hit * size < self.prefetch_threshold:
            if seeker.prefetch is not None:  # found by the request: that may be a later one
                self._miss(seeker.prefetch)
            return
        if hit > tree.host_free:
            tree.evict_host(hit)
        slots = min(hit, tree.host_free)
        if slots * size < self.prefetch_threshold:
            seeker.known = hit
            self._miss(prefetch)
            return
        tree.host_free -= slots
        prefetch.slots = slots
        self.transfers.append(prefetch)

    def _miss(self, prefetch: Prefetch) -> None:
        self._stop(prefetch)
        prefetch.seeker.missed = True

    def _stop(self, prefetch: Prefetch) -> None:
        prefetch.stopped = True
        self._finish(prefetch)

    def _finish(self, prefetch: Prefetch) -> None:
        """Wait for it no longer."""
        self._tree.release_host(prefetch.hold)
        self._reserved -= prefetch.count
        self.prefetching -= 1
        prefetch.seeker.prefetch = None

    def _release(self, prefetch: Prefetch) -> None:
        """Free, one step later, the pages of the host into which nothing came that is used."""
        if prefetch.slots > prefetch.taken:
            self._released.append(prefetch.slots - prefetch.taken)

    def _put(self, prefetch: Prefetch) -> None:
        """Put what came under the anchor."""
        seeker, count = prefetch.seeker, prefetch.done
        prefetch.taken = count
        if not count:
            seeker.missed = True
            return
        seeker.missed = False
        start, size = prefetch.start, self._size
        request = seeker.request
        spare = self._tree.insert_host(prefetch.anchor, request.tokens, start, start + count, request.namespace)
        self._tree.host_free += spare
        if spare < count:
            seeker.loaded = ((count - spare) * size, (start + spare) * size)
