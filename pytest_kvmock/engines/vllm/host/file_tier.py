"""The files below vLLM's host: a folder that engines share, and what one engine asks of it, reads and writes.

It does what `FileSystemTierManager` and `AsyncLookupManager` of vLLM 0.33.0 do below `TieringOffloadingManager`. The
threads are somebody else's: `FileThreads` says when a file is looked for, read or written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from pytest_kvmock.engines.vllm.host.chunk_eviction import ChunkKey
from pytest_kvmock.engines.vllm.host.offload_steps import OffloadRequest
from pytest_kvmock.engines.vllm.host.timed_copies import Direction
from pytest_kvmock.values.prompt_keys import LoadFrom

# Theory of operation
#
# A chunk that is written to the host is handed on to the folder, always; the host pins it until the file is there. A
# chunk that the host lacks is looked for by a thread: the request that asked waits, and the answer is kept as long as a
# request that asked lives. A file that is found is read into a slot of the host, and stays on the disk. No code here
# deletes a file, and a deleted one is noticed only when a read of it fails.


class FileStore:
    """A folder of chunks, which engines of one layout share.

    Attributes:
        files: the chunks that there are, the oldest first.
        block_sizes: those of its engines.
    """

    def __init__(self) -> None:
        self.files: dict[ChunkKey, None] = {}
        self.block_sizes: set[int] = set()

    def __len__(self) -> int:
        return len(self.files)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self.files

    def write(self, keys: Iterable[ChunkKey]) -> None:
        """Write chunks; a file that is there already stays as it is."""
        self.files.update(dict.fromkeys(keys))

    def readable(self, keys: Sequence[ChunkKey]) -> int:
        """Count the chunks that a read finds, from the first on: it ends with the first file that is not there."""
        return next((place for place, key in enumerate(keys) if key not in self.files), len(keys))

    def delete(self, names: Collection[int]) -> list[ChunkKey]:
        """Delete the files of blocks with these names, as a cleaner does; engines are not told. Returns which."""
        return self._gone([key for key in self.files if key[0] in names])

    def drop(self, count: int) -> list[int]:
        """Delete the oldest files; engines are not told. Returns the names of their blocks."""
        return [name for name, _ in self._gone([*self.files][:count])]

    def lose(self, keys: Iterable[ChunkKey]) -> None:
        """Delete the files of chunks; those that are not there are passed over."""
        self._gone([key for key in keys if key in self.files])

    def _gone(self, keys: list[ChunkKey]) -> list[ChunkKey]:
        for key in keys:
            del self.files[key]
        return keys


@dataclass(eq=False, slots=True)
class FileJob:
    """Chunks of one request that are written to the folder, or read from it.

    Attributes:
        number: 0, 1, 2 ... over both directions.
        request: whose.
        keys: which; of a read, in the order in which the files are read.
        is_load: whether they are read.
        done: how many of them were; of a write, all.
    """

    number: int
    request: OffloadRequest
    keys: Sequence[ChunkKey]
    is_load: bool
    done: int = 0

    def run(self, store: FileStore) -> None:
        """Read or write the files."""
        if self.is_load:
            self.done = store.readable(self.keys)
        else:
            store.write(self.keys)
            self.done = len(self.keys)


class FileThreads(ABC):
    """The threads of one engine that look for files, read and write them.

    Args:
        store: the folder.

    Attributes:
        now: the time of the step, in ms, for those whose work takes some.
    """

    def __init__(self, store: FileStore) -> None:
        self.store = store
        self.now = 0.0

    @property
    def has_answers(self) -> bool:
        """Whether something was found out that was not taken; only an object with a clock is asked."""
        return False

    def deadline(self) -> float | None:
        """When the next job is done, in ms; None: there is none. Only an object with a clock is asked."""
        return None

    @abstractmethod
    def enter(self, job: FileJob) -> None:
        """A job may be carried out from now on."""

    @abstractmethod
    def finished(self, *, drain: bool = False) -> list[FileJob]:
        """Take the jobs that were carried out, in that order; with `drain` all, after they were waited for."""

    @abstractmethod
    def ask(self, keys: Sequence[ChunkKey]) -> None:
        """Files may be looked for from now on."""

    @abstractmethod
    def answers(self) -> list[tuple[ChunkKey, bool]]:
        """Take what was found out: whether there is a file, in the order of the questions."""


class TimedFileThreads(FileThreads):
    """Threads whose work takes virtual time: reads one after the other, and writes.

    A folder is looked at as a step ends, so an answer comes with the next one.

    Args:
        store: the folder.
        gbps: bandwidth of each direction, in GB/s; 0 is infinite.
        chunk_bytes: bytes of a chunk.
    """

    def __init__(self, store: FileStore, gbps: float, chunk_bytes: int) -> None:
        super().__init__(store)
        self._chunk_bytes = chunk_bytes
        self._reads: Direction[FileJob] = Direction(gbps)
        self._writes: Direction[FileJob] = Direction(gbps)
        self._found: list[tuple[ChunkKey, bool]] = []

    @property
    def has_answers(self) -> bool:
        """Whether something was found out that was not taken."""
        return bool(self._found)

    def deadline(self) -> float | None:
        """When the next job is done; None: there is none."""
        both = (self._reads.deadline(), self._writes.deadline())
        return min((each for each in both if each is not None), default=None)

    def enter(self, job: FileJob) -> None:
        """Put a job behind the others of its direction."""
        (self._reads if job.is_load else self._writes).enter(job, len(job.keys) * self._chunk_bytes, self.now)

    def finished(self, *, drain: bool = False) -> list[FileJob]:
        """Take what is done by now."""
        done: list[FileJob] = []
        for direction in (self._reads, self._writes):
            done += direction.finish(inf if drain else self.now)
        for job in done:
            job.run(self.store)
        return done

    def ask(self, keys: Sequence[ChunkKey]) -> None:
        """Look at the folder."""
        self._found += [(key, key in self.store) for key in keys]

    def answers(self) -> list[tuple[ChunkKey, bool]]:
        """Take what was found out."""
        found, self._found = self._found, []
        return found


@dataclass(eq=False, slots=True)
class _Answer:
    """What is known of one file.

    Attributes:
        is_there: None: not known yet.
        requests: those that asked, and live.
    """

    is_there: bool | None = None
    requests: set[OffloadRequest] = field(default_factory=set)


class FileTier:
    """What one engine has to do with a folder.

    Args:
        threads: those that look for files, read and write them.
        locality: as its events say: "LOCAL", "REMOTE", or None.
        publishes: whether it publishes what it has written (vLLM: `enable_kv_events` of the tier).

    Attributes:
        threads: as above, like the next two.
        locality: as above.
        publishes: as above.
        pending: jobs that are not reported.
    """

    def __init__(self, threads: FileThreads, *, locality: str | None = None, publishes: bool = True) -> None:
        self.threads = threads
        self.locality = locality
        self.publishes = publishes
        self.pending: dict[int, FileJob] = {}
        self._next_job = 0
        self._answers: dict[ChunkKey, _Answer] = {}
        self._asked_by: dict[OffloadRequest, set[ChunkKey]] = {}
        self._questions: list[ChunkKey] = []
        self._promotions: dict[OffloadRequest, list[ChunkKey]] = {}

    @property
    def needs_step(self) -> bool:
        """Whether a read or a question begins with the end of a step."""
        return bool(self._promotions or self._questions)

    def serves(self, allowed: Sequence[LoadFrom] | None) -> bool:
        """Whether a request with these `kv_load_tiers` may load from here; None: it has none."""
        if allowed is None:
            return True
        return any(
            each.medium in {None, "STORAGE"} and (each.locality is None or self.locality in {None, each.locality})
            for each in allowed
        )

    def lookup(self, key: ChunkKey, request: OffloadRequest) -> bool | None:
        """Say whether a file is there; None: that is not known yet, and is asked."""
        self._take_answers()
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = _Answer()
            self._questions.append(key)
        answer.requests.add(request)
        self._asked_by.setdefault(request, set()).add(key)
        return answer.is_there

    def _take_answers(self) -> None:
        for asked, is_there in self.threads.answers():
            found = self._answers.get(asked)
            if found is not None and found.is_there is None:
                found.is_there = is_there

    def promote(self, request: OffloadRequest, key: ChunkKey) -> None:
        """Read a file, for which the host has taken a slot, with the end of the step."""
        self._promotions.setdefault(request, []).append(key)

    def write(self, request: OffloadRequest, keys: Sequence[ChunkKey]) -> None:
        """Write chunks that have come to the host."""
        self._enter(request, keys, is_load=False)

    def end_schedule(self) -> None:
        """A step has scheduled all that it does: the reads that it began with, and its questions, go to the threads."""
        for request, keys in self._promotions.items():
            self._enter(request, keys, is_load=True)
        self._promotions.clear()
        self._take_answers()
        if self._questions:
            self.threads.ask(self._questions)
            self._questions = []

    def finished(self, *, drain: bool = False) -> list[FileJob]:
        """Take the jobs that are done; a file that could not be read is missing, for the requests that asked."""
        done = self.threads.finished(drain=drain)
        for job in done:
            del self.pending[job.number]
            for key in job.keys[job.done :]:
                answer = self._answers.get(key)
                if answer is not None:
                    answer.is_there = False
        return done

    def forget_promotions(self) -> None:
        """The host was emptied: what has not begun is not read."""
        self._promotions.clear()

    def forget(self, request: OffloadRequest) -> None:
        """A request is over, and what it stored is on the host: nothing that it alone asked for is kept."""
        for key in self._asked_by.pop(request, ()):
            answer = self._answers[key]
            answer.requests.discard(request)
            if not answer.requests:
                del self._answers[key]

    def forget_all_but(self, live: Container[OffloadRequest]) -> None:
        """The host was emptied, and nothing that requests stored will come there: forget those that are over."""
        for request in [each for each in self._asked_by if each not in live]:
            self.forget(request)

    def _enter(self, request: OffloadRequest, keys: Sequence[ChunkKey], *, is_load: bool) -> None:
        job = self.pending[self._next_job] = FileJob(self._next_job, request, keys, is_load)
        self._next_job += 1
        self.threads.enter(job)
