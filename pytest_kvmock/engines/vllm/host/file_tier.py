"""The files below vLLM's host: a folder that engines share, and the look-ups, reads and writes of one engine.

It mocks `FileSystemTierManager` and `AsyncLookupManager` of vLLM 0.33.0 below `TieringOffloadingManager`, without their
threads: a `FileThreads` decides when a file is looked up, read or written.
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
# Each chunk that is written to the host is also written to the folder; the host pins it until the file exists. A thread
# looks up a chunk that the host lacks: the request waits, and the answer is kept as long as any request that asked for
# it lives. A file that is found is read into a slot of the host, and stays on the disk. Engines delete no file, and
# notice a deleted one only when a read of it fails.


class FileStore:
    """A folder of chunks that engines of the same layout share.

    Attributes:
        files: the chunks that have files, the oldest first.
        block_sizes: the block sizes of its engines.
    """

    def __init__(self) -> None:
        self.files: dict[ChunkKey, None] = {}
        self.block_sizes: set[int] = set()

    def __len__(self) -> int:
        return len(self.files)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self.files

    def write(self, keys: Iterable[ChunkKey]) -> None:
        """Write chunks; existing files stay as they are."""
        self.files.update(dict.fromkeys(keys))

    def readable(self, keys: Sequence[ChunkKey]) -> int:
        """Count the leading chunks that a read finds: it stops at the first missing file."""
        return next((place for place, key in enumerate(keys) if key not in self.files), len(keys))

    def delete(self, names: Collection[int]) -> list[ChunkKey]:
        """Delete the files of blocks with these names, as a cleaner does, without notice to engines; return their
        keys.
        """
        return self._gone([key for key in self.files if key[0] in names])

    def drop(self, count: int) -> list[int]:
        """Delete the oldest files without notice to engines; return the names of their blocks."""
        return [name for name, _ in self._gone([*self.files][:count])]

    def lose(self, keys: Iterable[ChunkKey]) -> None:
        """Delete the files of chunks; missing files are skipped."""
        self._gone([key for key in keys if key in self.files])

    def _gone(self, keys: list[ChunkKey]) -> list[ChunkKey]:
        for key in keys:
            del self.files[key]
        return keys


@dataclass(eq=False, slots=True)
class FileJob:
    """Chunks of one request that are written to the folder or read from it.

    Attributes:
        number: 0, 1, 2 ... over both directions.
        request: the request.
        keys: the chunks; for a read, in the order in which the files are read.
        is_load: whether they are read.
        done: number of chunks read or written; a write always writes all.
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
    """The threads of one engine that look up, read and write files.

    Args:
        store: the folder.

    Attributes:
        now: the time of the step, in ms, for threads whose work takes time.
    """

    def __init__(self, store: FileStore) -> None:
        self.store = store
        self.now = 0.0

    @property
    def has_answers(self) -> bool:
        """Whether there are answers that were not taken; only threads with a clock override it."""
        return False

    def deadline(self) -> float | None:
        """Return when the next job is done, in ms; None if there is none. Only threads with a clock override it."""
        return None

    @abstractmethod
    def enter(self, job: FileJob) -> None:
        """Add a job, which may be carried out from now on."""

    @abstractmethod
    def finished(self, *, drain: bool = False) -> list[FileJob]:
        """Take the finished jobs, in the order in which they finished; with `drain`, wait for all jobs."""

    @abstractmethod
    def ask(self, keys: Sequence[ChunkKey]) -> None:
        """Ask for files, which may be looked up from now on."""

    @abstractmethod
    def answers(self) -> list[tuple[ChunkKey, bool]]:
        """Take the answers: whether each file exists, in the order of the questions."""


class TimedFileThreads(FileThreads):
    """Threads whose work takes virtual time: reads one after the other, and writes one after the other.

    Look-ups happen when a step ends, so the answer comes with the next step.

    Args:
        store: the folder.
        gbps: bandwidth of each direction, in GB/s; 0 is infinite.
        chunk_bytes: bytes per chunk.
    """

    def __init__(self, store: FileStore, gbps: float, chunk_bytes: int) -> None:
        super().__init__(store)
        self._chunk_bytes = chunk_bytes
        self._reads: Direction[FileJob] = Direction(gbps)
        self._writes: Direction[FileJob] = Direction(gbps)
        self._found: list[tuple[ChunkKey, bool]] = []

    @property
    def has_answers(self) -> bool:
        """Whether there are answers that were not taken."""
        return bool(self._found)

    def deadline(self) -> float | None:
        """Return when the next job is done, in ms; None if there is none."""
        both = (self._reads.deadline(), self._writes.deadline())
        return min((each for each in both if each is not None), default=None)

    def enter(self, job: FileJob) -> None:
        """Queue a job behind the others of its direction."""
        (self._reads if job.is_load else self._writes).enter(job, len(job.keys) * self._chunk_bytes, self.now)

    def finished(self, *, drain: bool = False) -> list[FileJob]:
        """Take the jobs that are done by now; with `drain`, all jobs."""
        done: list[FileJob] = []
        for direction in (self._reads, self._writes):
            done += direction.finish(inf if drain else self.now)
        for job in done:
            job.run(self.store)
        return done

    def ask(self, keys: Sequence[ChunkKey]) -> None:
        """Look the files up at once."""
        self._found += [(key, key in self.store) for key in keys]

    def answers(self) -> list[tuple[ChunkKey, bool]]:
        """Take the answers."""
        found, self._found = self._found, []
        return found


@dataclass(eq=False, slots=True)
class _Answer:
    """The answer about one file.

    Attributes:
        is_there: whether the file exists; None if not known yet.
        requests: live requests that asked for it.
    """

    is_there: bool | None = None
    requests: set[OffloadRequest] = field(default_factory=set)


class FileTier:
    """The folder as a tier of one engine.

    Args:
        threads: the threads that look up, read and write files.
        locality: the locality in its events: "LOCAL", "REMOTE", or None.
        publishes: whether it publishes written chunks (vLLM: `enable_kv_events` of the tier).

    Attributes:
        threads: as given.
        locality: as given.
        publishes: as given.
        pending: jobs that are not reported yet.
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
        """Whether reads or look-ups wait for the end of a step to begin."""
        return bool(self._promotions or self._questions)

    def serves(self, allowed: Sequence[LoadFrom] | None) -> bool:
        """Return whether a request with these `kv_load_tiers` may load from here; None: it has none and may."""
        if allowed is None:
            return True
        return any(
            each.medium in {None, "STORAGE"} and (each.locality is None or self.locality in {None, each.locality})
            for each in allowed
        )

    def lookup(self, key: ChunkKey, request: OffloadRequest) -> bool | None:
        """Return whether a file exists; None: not known yet, and asked for."""
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
        """Read a file, for which the host has taken a slot, when the step ends."""
        self._promotions.setdefault(request, []).append(key)

    def write(self, request: OffloadRequest, keys: Sequence[ChunkKey]) -> None:
        """Write chunks that have arrived in the host."""
        self._enter(request, keys, is_load=False)

    def end_schedule(self) -> None:
        """Pass the reads and questions of a step to the threads when the step has scheduled everything."""
        for request, keys in self._promotions.items():
            self._enter(request, keys, is_load=True)
        self._promotions.clear()
        self._take_answers()
        if self._questions:
            self.threads.ask(self._questions)
            self._questions = []

    def finished(self, *, drain: bool = False) -> list[FileJob]:
        """Take the finished jobs; files that could not be read count as missing in later answers."""
        done = self.threads.finished(drain=drain)
        for job in done:
            del self.pending[job.number]
            for key in job.keys[job.done :]:
                answer = self._answers.get(key)
                if answer is not None:
                    answer.is_there = False
        return done

    def forget_promotions(self) -> None:
        """Drop the reads that have not begun, because the host was emptied."""
        self._promotions.clear()

    def forget(self, request: OffloadRequest) -> None:
        """Forget the answers that only this request asked for: it is over, and its chunks are on the host."""
        for key in self._asked_by.pop(request, ()):
            answer = self._answers[key]
            answer.requests.discard(request)
            if not answer.requests:
                del self._answers[key]

    def forget_all_but(self, live: Container[OffloadRequest]) -> None:
        """Forget all requests that are not live: the host was emptied, and their stores will not arrive."""
        for request in [each for each in self._asked_by if each not in live]:
            self.forget(request)

    def _enter(self, request: OffloadRequest, keys: Sequence[ChunkKey], *, is_load: bool) -> None:
        job = self.pending[self._next_job] = FileJob(self._next_job, request, keys, is_load)
        self._next_job += 1
        self.threads.enter(job)
