"""Mooncake's store below vLLM: the objects that engines share, and what the ranks of one engine put and load.

It does what the threads of `MooncakeStoreConnector` of vLLM 0.33.0 do, for one cache group. The store itself is made
up, as Mooncake's client is a binary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.hashed import HashedTokens

ObjectKey: TypeAlias = tuple[int, int]
"""An object: the name of its block, and which share of the heads it has."""

OK: Final = 0
FAILED: Final = -1
NO_ROOM: Final = -200
"""Answers to a put; the last one is Mooncake's NO_AVAILABLE_HANDLE."""


class MooncakeObjects:
    """A store that engines of one layout share.

    Args:
        capacity: objects that it has room for, at least 1; the oldest go. None: no limit.
        fails: numbers of puts that fail, counted from 1 over all engines.

    Attributes:
        objects: what is there, the oldest first.
        is_full: it answers puts with "no room".
        block_sizes: those of its engines.
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
        """Put one object; returns what the store answers."""
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
        """How many objects there are."""
        return len(self.objects)

    def drop(self, count: int) -> list[int]:
        """Evict the oldest objects; engines are not told. Returns the names of their blocks."""
        gone = list(self.objects)[:count]
        for key in gone:
            del self.objects[key]
        return [name for name, _ in gone]

    def restart(self) -> None:
        """Restart its master: it has nothing, and engines are not told."""
        self.objects.clear()


@dataclass(eq=False, slots=True)
class MooncakeRequest:
    """One request as the connector knows it.

    Attributes:
        tokens: its tokens and their names; it grows as tokens are generated.
        seen: tokens that the connector has seen computed.
        saved: tokens that jobs were made for.
        prompt_end: tokens that it began with, generated ones included where it was preempted.
        token_ids: the tokens that were seen.
        to_load: from which token to which it loads; None: nothing.
        is_known: whether it has blocks, as far as the connector knows.
    """

    tokens: HashedTokens
    seen: int = 0
    saved: int = 0
    prompt_end: int = 0
    token_ids: list[int] = field(default_factory=list)
    to_load: tuple[int, int] | None = None
    is_known: bool = False


class SaveJob(NamedTuple):
    """Blocks of a request that every rank is to put.

    Attributes:
        number: 0, 1, 2 ...
        request: whose.
        names: of its blocks, from the first on.
        upto: tokens up to which they are put.
        start: the first token that the job is for.
        token_ids: those from there on.
        blocks: the blocks of the device that it holds.
    """

    number: int
    request: MooncakeRequest
    names: Sequence[int]
    upto: int
    start: int
    token_ids: Sequence[int]
    blocks: list[int]


class LoadJob(NamedTuple):
    """Blocks of a request that every rank is to load.

    Attributes:
        request: whose.
        names: of its blocks, from the first on.
        start: from which token.
        end: to which.
        blocks: all blocks of the device that it has.
    """

    request: MooncakeRequest
    names: Sequence[int]
    start: int
    end: int
    blocks: Sequence[int]


PutEvent: TypeAlias = tuple[int, int | None, tuple[int, ...]]
"""Name, parent and tokens of a block that was put."""


class MooncakeRank:
    """The threads of one rank: what it puts of jobs, and loads.

    Args:
        objects: the store.
        number: the rank.
        sharers: ranks that hold the same heads; each puts its part of the blocks.
        block_size: tokens a block.
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
        """A job may be carried out from now on."""
        self._live.setdefault(job.request, set()).add(job.number)

    def forget(self, request: MooncakeRequest) -> None:
        """A request was preempted: none of its jobs puts anything any more."""
        self._live.pop(request, None)
        self._saved.pop(request, None)
        self._retried.pop(request, None)
        self._skipped.discard(request)

    def end(self, request: MooncakeRequest) -> None:
        """A request is over; it is forgotten once its jobs are done."""
        self._ended.add(request)
        self._forget_ended(request)

    def _forget_ended(self, request: MooncakeRequest) -> None:
        if request in self._ended and not self._live.get(request):
            self._ended.discard(request)
            self.forget(request)

    def save(self, job: SaveJob) -> list[tuple[ObjectKey, int]]:
        """Carry a job out; returns what was put, with the store's answers."""
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
        """Load; returns the blocks of the device whose object was not there."""
        places = range(job.start // self._size, job.end // self._size)
        return [job.blocks[place] for place in places if (job.names[place], self._share) not in self._objects.objects]
