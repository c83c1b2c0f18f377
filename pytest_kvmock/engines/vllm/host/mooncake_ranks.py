"""Mooncake's store below vLLM: the objects that engines share, and the puts and loads of one engine's ranks.

It mocks the threads of `MooncakeStoreConnector` of vLLM 0.33.0, for one cache group. The store itself is invented,
because Mooncake's client is a binary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.hashed import HashedTokens

ObjectKey: TypeAlias = tuple[int, int]
"""Key of an object: the name of its block, and the number of its share of the heads."""

OK: Final = 0
FAILED: Final = -1
NO_ROOM: Final = -200
"""Answers to a put; the last is Mooncake's NO_AVAILABLE_HANDLE."""


class MooncakeObjects:
    """A store that engines of the same layout share.

    Args:
        capacity: the most objects, at least 1; the oldest are dropped. None: no limit.
        fails: numbers of the puts that fail, counted from 1 over all engines.

    Attributes:
        objects: its objects, the oldest first.
        is_full: the store answers puts with "no room".
        block_sizes: the block sizes of its engines.
    """

    def __init__(self, capacity: int | None = None, fails: Iterable[int] = ()) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"MooncakeObjects: capacity must be at least 1, or None, got {capacity!r}")
        self.objects: dict[ObjectKey, None] = {}
        self.is_full = False
        self.block_sizes: set[int] = set()
        self._capacity = capacity
        self._fails = frozenset(fails)
        self._puts = 0

    def put(self, key: ObjectKey) -> int:
        """Put one object; return the store's answer."""
        self._puts += 1
        if self.is_full:
            return NO_ROOM
        if self._puts in self._fails:
            return FAILED
        self.objects[key] = None
        if self._capacity is not None and len(self.objects) > self._capacity:
            self.drop(len(self.objects) - self._capacity)
        return OK

    def __len__(self) -> int:
        """Return the number of objects."""
        return len(self.objects)

    def drop(self, count: int) -> list[int]:
        """Evict the oldest objects without notice to engines; return the names of their blocks."""
        gone = list(self.objects)[:count]
        for key in gone:
            del self.objects[key]
        return [name for name, _ in gone]

    def restart(self) -> None:
        """Restart the master with no objects, without notice to engines."""
        self.objects.clear()


@dataclass(eq=False, slots=True)
class MooncakeRequest:
    """The connector's record of one request.

    Attributes:
        tokens: its tokens and their names; grows as tokens are generated.
        seen: number of computed tokens that were reported to the connector.
        saved: number of tokens that jobs were made for.
        prompt_end: number of tokens at its admission, including generated ones if it was preempted.
        token_ids: the reported tokens.
        to_load: start and end of its load, in tokens; None if it loads nothing.
        is_known: whether it has blocks in the connector's books.
    """

    tokens: HashedTokens
    seen: int = 0
    saved: int = 0
    prompt_end: int = 0
    token_ids: list[int] = field(default_factory=list)
    to_load: tuple[int, int] | None = None
    is_known: bool = False


class SaveJob(NamedTuple):
    """Blocks of a request that every rank puts.

    Attributes:
        number: 0, 1, 2 ...
        request: the request.
        names: the names of the request's blocks, from the first on.
        upto: token count up to which blocks are put.
        start: the first token of the job.
        token_ids: the tokens from `start` to `upto`.
        blocks: the blocks of the device that the job holds.
    """

    number: int
    request: MooncakeRequest
    names: Sequence[int]
    upto: int
    start: int
    token_ids: Sequence[int]
    blocks: list[int]


class LoadJob(NamedTuple):
    """Blocks of a request that every rank loads.

    Attributes:
        request: the request.
        names: the names of the request's blocks, from the first on.
        start: the first token that is loaded.
        end: the end of the load, in tokens.
        blocks: all blocks of the device that the request has.
    """

    request: MooncakeRequest
    names: Sequence[int]
    start: int
    end: int
    blocks: Sequence[int]


PutEvent: TypeAlias = tuple[int, int | None, tuple[int, ...]]
"""Name, parent and tokens of a block that was put."""


class MooncakeRank:
    """The threads of one rank, which put and load its objects.

    Args:
        objects: the store.
        number: the rank.
        sharers: number of ranks that hold the same heads; each puts its part of the blocks.
        block_size: tokens per block.
    """

    def __init__(self, objects: MooncakeObjects, number: int, sharers: int, block_size: int) -> None:
        self._objects = objects
        self._share, self._sharers, self._phase = number // sharers, sharers, number % sharers
        self._size = block_size
        self._live: dict[MooncakeRequest, set[int]] = {}
        self._saved: dict[MooncakeRequest, int] = {}
        self._retried: dict[MooncakeRequest, tuple[int, Sequence[int]]] = {}
        self._skipped: set[MooncakeRequest] = set()
        self._has_pressure = False
        self._ended: set[MooncakeRequest] = set()
        self.events: list[PutEvent] = []

    def enter(self, job: SaveJob) -> None:
        """Add a job, which may be carried out from now on."""
        self._live.setdefault(job.request, set()).add(job.number)

    def forget(self, request: MooncakeRequest) -> None:
        """Forget a preempted request: its jobs no longer put anything."""
        self._live.pop(request, None)
        self._saved.pop(request, None)
        self._retried.pop(request, None)
        self._skipped.discard(request)

    def end(self, request: MooncakeRequest) -> None:
        """Record that a request is over; it is forgotten once its jobs are done."""
        self._ended.add(request)
        self._forget_ended(request)

    def _forget_ended(self, request: MooncakeRequest) -> None:
        if request in self._ended and not self._live.get(request):
            self._ended.discard(request)
            self.forget(request)

    def save(self, job: SaveJob) -> list[tuple[ObjectKey, int]]:
        """Carry out a job; return the objects that it put, with the store's answers."""
        request = job.request
        live = self._live.get(request)
        if live is None or job.number not in live:
            return []
        start, token_ids = job.start, job.token_ids
        retried = self._retried.get(request)
        if retried is not None and retried[0] + len(retried[1]) == start:
            start, token_ids = retried[0], [*retried[1], *token_ids]
        is_done, answers = False, []
        if not (self._has_pressure and request in self._skipped):
            answers = self._put(job)
            is_done = all(code == OK for _, code in answers)
            if any(code == NO_ROOM for _, code in answers):
                self._has_pressure = True
                self._skipped.add(request)
            if is_done:
                self._saved[request] = job.upto
                if answers:
                    self._has_pressure = False
                    self._skipped.clear()
            self._note(job, start, token_ids, {name for (name, _), code in answers if code == OK})
        if is_done:
            self._retried.pop(request, None)
        else:
            self._retried[request] = start, token_ids
        live.discard(job.number)
        self._forget_ended(request)
        return answers

    def _put(self, job: SaveJob) -> list[tuple[ObjectKey, int]]:
        first = -(-self._saved.get(job.request, 0) // self._size)
        places = range(first, job.upto // self._size)
        keys = [(job.names[place], self._share) for place in places if place % self._sharers == self._phase]
        missing = [key for key in keys if key not in self._objects.objects]
        return [(key, self._objects.put(key)) for key in missing]

    def _note(self, job: SaveJob, start: int, token_ids: Sequence[int], put: Collection[int]) -> None:
        size = self._size
        for place in range(job.upto // size):
            name, begin = job.names[place], place * size - start
            if name in put:
                tokens = tuple(token_ids[begin : begin + size]) if begin >= 0 else ()
                self.events.append((name, job.names[place - 1] if place else None, tokens))

    def load(self, job: LoadJob) -> list[int]:
        """Load a job's blocks; return the blocks of the device whose objects are missing."""
        places = range(job.start // self._size, job.end // self._size)
        return [job.blocks[place] for place in places if (job.names[place], self._share) not in self._objects.objects]
