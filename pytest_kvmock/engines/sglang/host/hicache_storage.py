"""The storage below the host of SGLang's HiCache, which workers share, and one worker's reads and writes there.

One subject: look-ups, prefetches and backups. They are not published; only the changes that they make on the host are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, Final, Protocol

from pytest_kvmock.engines.base.hashed import HashedTokens
from pytest_kvmock.engines.sglang.host.hicache_tree import HiCacheTree, HostLock
from pytest_kvmock.engines.sglang.hybrid_tree import TreeMatch
from pytest_kvmock.engines.sglang.radix_tree import TreeNode

# Theory of operation
#
# An arriving request is looked up. If its match ends on the host, or is empty, a query asks the storage for the rest.
# The next step sees the answer; then the host makes room, and a transfer reads batch after batch. The pages that
# arrived are put under the node where the request's match ended, when the transfer reports its end or the policy ends
# the wait. A later admission loads them like any other host pages.
#
# The four queues are those of SGLang's threads: `run` processes items of each, and `step` shows the results to the
# scheduler.

PREFETCH_POLICIES: Final = ("best_effort", "wait_complete", "timeout")
"""How long a request waits for its prefetch (`--hicache-storage-prefetch-policy`)."""


class PrefetchReport(Enum):
    """Reports of a transfer, apart from the number of pages that have arrived."""

    PARTS = "the window and the state that belong to it have come"
    NO_PARTS = "they have not"
    END = "that it is over"


class PageStore:
    """Pages in a storage, by name; workers share one.

    Attributes:
        pages: names of the stored pages.
        windows: names of the pages whose window is stored.
        states: names of the pages whose end state is stored.
        now_ms: the time of the last look-up or write, in ms.
    """

    now_ms = 0.0

    def __init__(self) -> None:
        self.pages: set[int] = set()
        self.windows: set[int] = set()
        self.states: set[int] = set()

    def __len__(self) -> int:
        """Return the number of its keys."""
        return len(self.pages) + len(self.windows) + len(self.states)

    def know(self, names: Sequence[int], rows: Sequence[Any] | None, extra: Any, before: int | None) -> None:
        """Do nothing: it needs only the names of pages."""

    def knows(self, name: int) -> bool:  # noqa: ARG002 - it needs to know nothing
        """Return whether a page is known well enough to write the page behind it."""
        return True

    def add(self, names: Iterable[int], windows: Iterable[int] = (), states: Iterable[int] = ()) -> None:
        """Store pages, pages of windows, and states."""
        self.pages.update(names)
        self.windows.update(windows)
        self.states.update(states)

    def lose(self, names: Iterable[int], windows: Iterable[int] = (), states: Iterable[int] = ()) -> None:
        """Lose these; names that are not stored are ignored."""
        self.pages.difference_update(names)
        self.windows.difference_update(windows)
        self.states.difference_update(states)

    def last_end(self, names: Sequence[int], windows: int, states: int) -> int:
        """Count the leading pages of the longest prefix that is stored with the window and state that it must end with.

        Args:
            names: names of the pages.
            windows: number of last pages whose window must be stored, or all if there are fewer; 0: none.
            states: 1 if the end state must be stored, else 0.
        """
        ends = [self.leading(names)]
        if windows:
            run = end = 0
            for number, name in enumerate(names[: ends[0]]):
                run = run + 1 if name in self.windows else 0
                end = number + 1 if run >= min(windows, number + 1) else end
            ends.append(end)
        if states:
            ends.append(max((at + 1 for at, name in enumerate(names[: ends[0]]) if name in self.states), default=0))
        return min(ends)

    def leading(self, names: Sequence[int]) -> int:
        """Count the leading pages that are stored."""
        for number, name in enumerate(names):
            if name not in self.pages:
                return number
        return len(names)


class _Arrived(Protocol):
    """The interface of a request that the storage needs."""

    tokens: HashedTokens
    namespace: Any


class Prefetch:
    """One look-up of a request, and its result. Counts are in pages.

    Attributes:
        seeker: the request's entry.
        anchor: the node under which its pages are put.
        hold: the lock that keeps the anchor on the host.
        start: pages of the prompt before its first one.
        count: pages that were looked up, and are reserved.
        hit: leading pages that the storage has; None before the answer.
        slots: host pages that it was given.
        done: arrived pages that the scheduler has seen.
        stopped: whether no request waits for it any more.
        windows: number of last pages that come with their window; 0: none.
        states: 1 if a state comes with it; else 0.
        parts: the report on these; None before it.
    """

    __slots__ = (
        "anchor",
        "count",
        "done",
        "hit",
        "hold",
        "parts",
        "seeker",
        "slots",
        "start",
        "states",
        "stopped",
        "windows",
    )

    def __init__(self, seeker: Seeker, anchor: TreeNode, hold: HostLock, start: int, count: int) -> None:
        self.seeker, self.anchor, self.hold, self.start, self.count = seeker, anchor, hold, start, count
        self.hit: int | None = None
        self.slots = self.done = self.windows = self.states = 0
        self.stopped = False
        self.parts: PrefetchReport | None = None


class Seeker:
    """The storage's entry for one waiting request.

    Attributes:
        request: the request.
        prefetch: its look-up under way; None if there is none.
        length: pages that its last look-up matched in the tree.
        tries: look-ups after the first.
        timed_out: whether its wait timed out; then it is not looked up again.
        missed: whether its last look-up brought nothing.
        polls: steps since the miss; None before the first step.
        known: pages of the request up to the end of a hit for which there was no room; None if there is none.
        budget: the time at which it was first blocked, and the seconds that it waits from then on; None if it never
            was.
        loaded: tokens that its last prefetch brought, and the position of the first of them (None if there are none).
    """

    __slots__ = ("budget", "known", "length", "loaded", "missed", "polls", "prefetch", "request", "timed_out", "tries")

    def __init__(self, request: _Arrived) -> None:
        self.request = request
        self.prefetch: Prefetch | None = None
        self.length = self.tries = 0
        self.timed_out = self.missed = False
        self.polls: int | None = None
        self.known: int | None = None
        self.budget: tuple[float, float] | None = None
        self.loaded: tuple[int, int | None] = (0, None)


class HostStorage:
    """One worker's access to the storage.

    Args:
        store: the pages.
        prefetch_policy: one of `PREFETCH_POLICIES`.
        prefetch_threshold: minimum tokens of a look-up and of a hit.
        batch: pages that are read at once.
        retry_interval: steps after which a failed look-up is repeated; 0: never.
        retry_attempts: maximum repetitions for one request.
        timeout_base: seconds that a request waits with policy "timeout".
        timeout_per_ki_token: additional seconds for each 1024 tokens.

    Attributes:
        store: as given.
        waiting: requests that are not admitted yet, in order of arrival.
        prefetching: look-ups under way.
        now: the time in seconds, which its owner moves.
        queries: look-ups that are not answered yet.
        transfers: prefetches that are not read yet.
        reports: reports of transfers that the scheduler has not taken.
        backups: nodes to be written.
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
        """Drop all look-ups, transfers and backups; the stored pages stay."""
        self.queries: deque[Prefetch] = deque()
        self.transfers: deque[Prefetch] = deque()
        self.reports: deque[tuple[Prefetch, int | PrefetchReport]] = deque()
        self.backups: deque[tuple[HostLock, tuple[Sequence[int], ...]]] = deque()
        self._answered: deque[Prefetch] = deque()
        self._reported: deque[tuple[Prefetch, int | PrefetchReport]] = deque()
        self._written: deque[HostLock] = deque()
        self._released: deque[tuple[int, int, int]] = deque()
        self._reserved = 0
        self.prefetching = 0

    def attach(self, tree: HiCacheTree, page_size: int, bigram: int = 0) -> None:
        """Attach the storage to a tree; the tree's owner calls this once. `bigram` is 1 if keys are pairs."""
        self._tree, self._size, self._bigram = tree, page_size, bigram

    def parts_of(self, names: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Return the pages whose windows, and the pages whose states, a worker stores when it computes a prompt."""
        tree = self._tree
        windows = () if tree.window is None else names[-tree.window.pages :]
        return windows, names[-1:] if tree.states is not None else ()

    @property
    def backing_up(self) -> int:
        """Number of nodes whose backup the scheduler has not yet seen done."""
        return len(self.backups) + len(self._written)

    @property
    def is_busy(self) -> bool:
        """Whether prefetches or backups are under way."""
        return bool(self.prefetching or self.backing_up)

    # ------------------------------------------------------------------------------------------------- requests

    def arrive(self, request: Any) -> tuple[TreeMatch, bool]:
        """Add a waiting request and look it up; return the tree's match, and whether the storage is asked."""
        self.waiting[request] = Seeker(request)
        return self.look_up(self.waiting[request])

    def leave(self, request: Any) -> None:
        """Forget a request that was admitted or went away, and free the pages of its prefetch that are not in the
        tree.
        """
        seeker = self.waiting.pop(request, None)
        if seeker is None or seeker.prefetch is None:
            return
        prefetch = seeker.prefetch
        self._finish(prefetch)
        if prefetch.slots:
            self._give_back(prefetch)

    def look_up(self, seeker: Seeker, known: int | None = None) -> tuple[TreeMatch, bool]:
        """Match a request in the tree, and ask the storage for the rest if that is long enough.

        Args:
            seeker: the entry of the request.
            known: pages that the storage has by an earlier answer; then it is not asked again.
        """
        request, size, tree = seeker.request, self._size, self._tree
        tokens = request.tokens
        whole = (len(tokens) - 1 - self._bigram) // size
        found = tree.find(tokens.names, whole, request.namespace)
        seeker.length = found.promised
        if not found.best.host.on_host:
            return found, False
        seeker.missed, seeker.polls, seeker.known = False, None, None
        is_known = known is not None and found.promised < known <= whole
        count = (known if is_known and known is not None else whole) - found.promised
        if seeker.timed_out or count * size < self.prefetch_threshold:
            return found, False
        if self._reserved * size >= tree.host_pages * size // 2:
            seeker.missed, seeker.known = True, known
            return found, False
        prefetch = Prefetch(seeker, found.best, tree.hold_host(found.best), found.promised, count)
        prefetch.windows, prefetch.states = self._parts(found.best, count)
        if is_known:
            prefetch.hit = count
        elif found.promised < found.reach:
            # names continue those of the anchor, so that nothing can have stored them (`write_back`)
            prefetch.hit = 0
        seeker.prefetch = prefetch
        self._reserved += count
        self.prefetching += 1
        self.queries.append(prefetch)
        return found, True

    def blocks(self, request: Any) -> bool:
        """Return whether a request must wait for its prefetch; call it when the request could be admitted.

        Depending on the policy, this may end the prefetch.
        """
        seeker = self.waiting.get(request)
        prefetch = None if seeker is None else seeker.prefetch
        if seeker is None or prefetch is None:
            return False
        if self.prefetch_policy == "wait_complete":
            return True
        if self.prefetch_policy == "timeout":
            if prefetch.slots and prefetch.done == prefetch.slots:
                return True
            if seeker.budget is None:
                seeker.budget = self.now, self._patience(prefetch)
            since, patience = seeker.budget
            if self.now - since <= patience:
                return True
            seeker.timed_out = True
        self._cut(prefetch)
        return False

    def _cut(self, prefetch: Prefetch) -> None:
        """End a prefetch early, and keep the pages that have arrived."""
        if prefetch.slots:
            self._put(prefetch)
        else:
            self._miss(prefetch)

    def _patience(self, prefetch: Prefetch) -> float:
        return self.timeout_base + prefetch.count * self._size / 1024 * self.timeout_per_ki_token

    @property
    def timeouts(self) -> list[float]:
        """The latest times, in seconds, at which the waits of blocked requests end."""
        return [sum(each.budget) for each in self.waiting.values() if each.prefetch and each.budget is not None]

    def give_up(self) -> None:
        """End all prefetches early, and keep the pages that have arrived."""
        for seeker in self.waiting.values():
            if seeker.prefetch is not None:
                self._cut(seeker.prefetch)

    def take_loaded(self, request: Any) -> tuple[int, int | None]:
        """Return the tokens that a prefetch brought since the last call, and the position of the first of them."""
        seeker = self.waiting.get(request)
        if seeker is None:
            return 0, None
        loaded, seeker.loaded = seeker.loaded, (0, None)
        return loaded

    def shrank(self, request: Any, pages: int) -> tuple[TreeMatch, bool] | None:
        """Look a request up again if its match became shorter; return None if it did not, or no attempt is left."""
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
        """Let the threads process these numbers of items; return the numbers that they processed."""
        ran = [0, 0, 0, 0]
        self.store.now_ms = 1000 * self.now
        while ran[0] < queries and self.queries:
            prefetch = self.queries.popleft()
            if prefetch.hit is None:
                names = self._names(prefetch, prefetch.count)
                prefetch.hit = self.store.last_end(names, prefetch.windows, prefetch.states)
            self._answered.append(prefetch)
            ran[0] += 1
        while ran[1] < transfers and self.transfers:
            self._transfer(self.transfers.popleft())
            ran[1] += 1
        while ran[2] < reports and self.reports:
            self._reported.append(self.reports.popleft())
            ran[2] += 1
        while ran[3] < backups and self.backups:
            hold, keys = self.backups.popleft()
            self.store.add(*keys)
            self._written.append(hold)
            ran[3] += 1
        return ran

    def _parts(self, anchor: TreeNode, count: int) -> tuple[int, int]:
        """Return the numbers of window pages and states to ask for with `count` pages.

        No window pages are asked for if the window cannot be complete.
        """
        window = self._tree.window
        has_window = window is not None and (count >= window.pages or anchor is self._tree.root)
        windows = min(window.pages, count) if window is not None and has_window else 0
        return windows, int(self._tree.states is not None)

    def leading(self, anchor: TreeNode, names: Sequence[int]) -> int:
        """Count the leading pages after an anchor that a look-up would find now."""
        return self.store.last_end(names, *self._parts(anchor, len(names)))

    def _names(self, prefetch: Prefetch, count: int) -> Sequence[int]:
        return prefetch.seeker.request.tokens.names[prefetch.start : prefetch.start + count]

    def _transfer(self, prefetch: Prefetch) -> None:
        names = self._names(prefetch, prefetch.slots)
        for at in range(0, len(names), self.batch):
            self.reports.append((prefetch, self.store.leading(names[: at + self.batch])))
        if prefetch.windows or prefetch.states:
            windows, states = names[len(names) - prefetch.windows :], names[len(names) - prefetch.states :]
            has_parts = self.store.windows.issuperset(windows) and self.store.states.issuperset(states)
            self.reports.append((prefetch, PrefetchReport.PARTS if has_parts else PrefetchReport.NO_PARTS))
        self.reports.append((prefetch, PrefetchReport.END))

    def back_up(self, node: TreeNode) -> None:
        """Queue the backup of a node on the host; it stays there until that is done."""
        part, names = node.host, tuple(node.names)
        self._know(node)
        windows = names if self._tree.window is not None and part.window.there else ()
        states = names[-1:] if self._tree.states is not None and part.state.there else ()
        self.backups.append((self._tree.hold_host(node), (names, windows, states)))

    def _know(self, node: TreeNode) -> None:
        """Make the pages of a node known to the store, after the pages before it."""
        path = [node]
        while (parent := path[-1].parent) is not None and parent is not self._tree.root:
            if self.store.knows(parent.names[-1]):
                break
            path.append(parent)
        for each in reversed(path):
            parent, part = each.parent, each.host
            before = None if parent is None or parent is self._tree.root else parent.names[-1]
            self.store.know(each.names, part.token_ids, part.extra, before)

    # ---------------------------------------------------------------------------------------------------- steps

    def step(self) -> list[tuple[Any, TreeMatch, bool]]:
        """Take the results of the threads, and repeat failed look-ups; return the repeated ones."""
        self.see()
        return self._retry()

    def see(self) -> None:
        """Take the results of the threads."""
        released = len(self._released)
        for _ in range(len(self._answered)):
            self._answer(self._answered.popleft())
        for _ in range(len(self._reported)):
            self._see_report(*self._reported.popleft())
        for _ in range(len(self._written)):
            self._tree.release_host(self._written.popleft())
        for _ in range(released):
            pages, *parts = self._released.popleft()
            self._tree.host_free += pages
            for pool, units in zip((self._tree.windows_below, self._tree.states_below), parts, strict=True):
                if pool is not None:
                    pool.free += units

    def _retry(self) -> list[tuple[Any, TreeMatch, bool]]:
        done: list[tuple[Any, TreeMatch, bool]] = []
        if not self.retry_interval:
            return done
        for request, seeker in [*self.waiting.items()][1:]:  # the first request of the queue is never looked up again
            if seeker.prefetch or not seeker.missed or seeker.timed_out or seeker.tries >= self.retry_attempts:
                continue
            seeker.polls = 0 if seeker.polls is None else seeker.polls + 1
            if seeker.polls >= self.retry_interval:
                seeker.tries += 1
                seeker.missed, seeker.polls = False, None
                done.append((request, *self.look_up(seeker, seeker.known)))
        return done

    def _answer(self, prefetch: Prefetch) -> None:
        tree, size, seeker = self._tree, self._size, prefetch.seeker
        hit = prefetch.hit or 0
        if prefetch.stopped or hit * size < self.prefetch_threshold:
            if seeker.prefetch is not None:  # SGLang finds the prefetch by its request, which may have a later one
                self._miss(seeker.prefetch)
            return
        if hit > tree.host_free:
            tree.evict_host(hit)
        slots = min(hit, tree.host_free)
        if slots * size < self.prefetch_threshold:
            self._miss(prefetch, prefetch.start + hit)
            return
        tree.host_free -= slots
        prefetch.windows = min(prefetch.windows, hit)
        taken = [slots, 0, 0]
        parts = ((1, tree.windows_below, prefetch.windows), (2, tree.states_below, prefetch.states))
        for number, pool, units in parts:
            if pool is not None and units:
                if not tree.make_room_in(pool, units):
                    self._released.append((taken[0], taken[1], taken[2]))
                    self._miss(prefetch, prefetch.start + hit)
                    return
                pool.free -= units
                taken[number] = units
        prefetch.slots = slots
        self.transfers.append(prefetch)

    def _see_report(self, prefetch: Prefetch, report: int | PrefetchReport) -> None:
        """Take one report of a transfer; if no request waits for it, only its end counts."""
        is_awaited = prefetch.seeker.prefetch is prefetch
        if report is not PrefetchReport.END:
            if is_awaited and isinstance(report, PrefetchReport):
                prefetch.parts = report
            elif is_awaited and isinstance(report, int):
                prefetch.done = report
            return
        if is_awaited:
            self._put(prefetch)
        left = prefetch.slots - prefetch.done
        self._release(left, *((prefetch.windows, prefetch.states) if prefetch.parts is None else (0, 0)))

    def _miss(self, prefetch: Prefetch, known: int | None = None) -> None:
        self._finish(prefetch)
        prefetch.seeker.missed, prefetch.seeker.known = True, known

    def _finish(self, prefetch: Prefetch) -> None:
        """End the wait for a prefetch."""
        prefetch.stopped = True
        self._tree.release_host(prefetch.hold)
        self._reserved -= prefetch.count
        self.prefetching -= 1
        prefetch.seeker.prefetch = None

    def _release(self, pages: int, windows: int, states: int) -> None:
        """Free, one step later, host pages, windows and states that were reserved and stayed unused."""
        if pages or windows or states:
            self._released.append((pages, windows, states))

    def _give_back(self, prefetch: Prefetch) -> None:
        """Free the arrived pages of a request that no longer needs them; the rest is freed at the end of the
        transfer.
        """
        has_parts = prefetch.parts is not None
        self._release(prefetch.done, prefetch.windows * has_parts, prefetch.states * has_parts)

    def _put(self, prefetch: Prefetch) -> None:
        """Put the arrived pages under the anchor; with windows or states, all or nothing."""
        seeker, count, anchor = prefetch.seeker, prefetch.done, prefetch.anchor
        seeker.loaded = (0, None)
        is_whole = count == prefetch.slots and prefetch.parts is PrefetchReport.PARTS
        if (prefetch.windows or prefetch.states) and not is_whole:
            self._finish(prefetch)
            self._give_back(prefetch)
            return
        start, size, request = prefetch.start, self._size, seeker.request
        spare, node = self._tree.insert_host(anchor, request.tokens, start, start + count, request.namespace)
        self._tree.host_free += spare
        window = self._tree.window
        # otherwise the window cannot be complete
        has_window = window is not None and (anchor is self._tree.root or prefetch.windows >= window.pages)
        windows, states = prefetch.windows if has_window and node is not None else 0, prefetch.states
        spare_windows = prefetch.windows - windows
        if node is not None:
            left, states = self._tree.insert_parts(node, anchor, windows, states)
            spare_windows += left
        self._release(0, spare_windows, states)
        self._finish(prefetch)
        if spare < count:
            seeker.loaded = ((count - spare) * size, (start + spare) * size)
