"""What ledger, reference index and index under test held after each event of a failed test, rebuilt from its journal.

Theory of operation. Nothing is kept while a test runs. After it, a new ledger, a new reference index and a new index
like the one under test take the entries of its journal again, as far as needed. Around the problem their blocks are
read after each event, and the changes are recorded. So a state is the first snapshot plus the changes up to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from inspect import isawaitable
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pytest_kvmock.harness.reduce.program import NotReduced
from pytest_kvmock.harness.reduce.replay import MakeIndex, in_a_thread
from pytest_kvmock.harness.under_test import IndexUnderTest, by_worker
from pytest_kvmock.oracle.hygiene import entries
from pytest_kvmock.oracle.hygiene.ledger import Ledger
from pytest_kvmock.oracle.index.index import RadixIndexError
from pytest_kvmock.values.events import Removed, RouterEvent, StorageTier, Stored, block_text
from pytest_kvmock.values.long_runs import long_run

if TYPE_CHECKING:
    from pytest_kvmock.harness import RouterHarness

BEFORE: Final = 200
"""Maximum number of steps (events) before the problem."""

AFTER: Final = 50
"""Maximum number of steps after the problem."""

MOST_HELD: Final = 10_000
"""Maximum number of shown blocks of all workers; if there are more, only those of the problem's worker are shown."""

MOST_LOOKED: Final = 300_000
"""Maximum number of blocks that are read, over all steps and books; if many are held, there are fewer steps."""

_LEAST: Final = 4
"""Minimum number of steps."""

_Held: TypeAlias = set[tuple[int, int, str, int]]
"""(worker_id, dp_rank, tier, block hash)."""


def states(
    kv: RouterHarness, position: int, worker: int, *, expired: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Return what each book held around an event, as plain data.

    Args:
        kv: the harness; it does not change.
        position: the number of the event in the log, from 0.
        worker: the worker that published it.
        expired: called before each event; True ends the steps.

    Returns:
        `first`: the number of the first step's event; `books`: the names of the books that show their blocks; `base`:
        by book, the blocks before that event; `left_out`: the text for chains on which the books do not differ;
        `steps`: for each event, by book, the added (`+`) and removed (`-`) blocks, `answers` for the event's prefix,
        and `left_out`; `held`: rows of [worker, tier, block] as texts of messages, which books reference by number;
        `parents`: by block; `notes`.
    """

    def rebuild(is_over: Callable[[], bool] | None) -> dict[str, Any]:
        with asyncio.Runner() as runner:
            return _Replay(kv, position, worker, is_over or expired, runner).run()

    if kv.recording.is_cut:
        why = "The history of this harness was dropped: what was held cannot be rebuilt."
        return {
            "first": 0,
            "books": [],
            "base": {},
            "left_out": "",
            "steps": [],
            "held": [],
            "parents": {},
            "notes": [why],
        }
    with long_run():
        # Only an async index needs an event loop, in a separate thread: the caller's thread may already run one.
        return in_a_thread(rebuild, expired) if kv.inside.is_async else _Replay(kv, position, worker, expired).run()


class _Replay:
    def __init__(
        self,
        kv: RouterHarness,
        position: int,
        worker: int,
        expired: Callable[[], bool],
        runner: asyncio.Runner | None = None,
    ) -> None:
        self._kv, self._worker, self._runner, self._expired = kv, worker, runner, expired
        self._ledger = Ledger()
        self._reference = kv.inside.reference.new()
        self._position, self._first, self._last = position, max(0, position - BEFORE), position + AFTER
        self._notes: list[str] = []
        self._numbers: dict[tuple[int, int, str, int], int] = {}
        self._parents: dict[int, int | None] = {}
        self._only: int | None = None
        self._watched = {(each.worker_id, each.dp_rank) for each in kv.workers.values() if each.is_watched}
        if (
            any(isinstance(entry, entries.Injected) for entry in kv.recording.journal)
            and kv.index is not kv.inside.reference
        ):
            self._notes.append(
                "Your index receives the same events here as the reference: a fault that changes only its input "
                "is not in its steps."
            )
        self._index = None if kv.index is kv.inside.reference else self._second()
        self._dump = None if self._index is None else getattr(self._index.index, "dump_events", None)
        if self._index is not None and not callable(self._dump):
            self._notes.append(f"{self._index.name} has no dump_events: its answers are shown, and not what it holds.")

    def _second(self) -> IndexUnderTest | None:
        """Return an empty index like the one under test; None, with a note, if none can be made."""
        kv = self._kv
        try:
            make = MakeIndex(kv.index, kv.profile, is_async=kv.inside.is_async)
            return IndexUnderTest(make() if self._runner is None else self._runner.run(make.amake()))
        except NotReduced as reason:
            why = str(reason)
        except Exception as error:  # noqa: BLE001 - the user's own class
            why = f"a new {type(kv.index).__name__} raised {error!r:.200}"
        self._notes.append(f"Your index is not shown: {why}.")
        return None

    def run(self) -> dict[str, Any]:
        """Take the journal, and record the changes after each event from the first step."""
        held: dict[str, _Held] | None = None
        base: dict[str, list[int]] = {}
        steps: list[dict[str, Any]] = []
        position, looked_at = -1, 0
        for entry in self._kv.recording.journal:
            event = entry.event if isinstance(entry, entries.Replayed) else entry
            if isinstance(event, RouterEvent):
                position += 1
                if position > self._last:
                    break
                # The steps up to the problem are never cut: they are few, and the page needs them.
                if not self._first <= position <= self._position and self._expired():
                    self._notes.append(f"The steps end before entry {position} of the log: they took too long.")
                    break
                if position == self._first:
                    held = self._look()
                    looked_at = max(looked_at, sum(map(len, held.values())))
                    if len(held["ledger"]) > MOST_HELD and self._only is None:
                        self._only = self._worker
                        self._notes.append(
                            f"More than {MOST_HELD:,} blocks are held: those of worker {self._only} are shown."
                        )
                        held = self._look()
                    if self._narrow(looked_at):
                        held = None  # the steps begin later
                    else:
                        base = {book: self._shown(each) for book, each in held.items()}
            self._take(entry)
            if held is not None and isinstance(event, RouterEvent):
                now = self._look()
                step: dict[str, Any] = {
                    book: {"+": self._shown(now[book] - held[book]), "-": self._shown(held[book] - now[book])}
                    for book in held
                    if book in now
                }
                answers = self._answers(event)
                steps.append(step | {"answers": answers, "left_out": _left_out(now, answers)})
                held = now
        rows = [[worker_name(worker, rank), tier, block_text(block)] for worker, rank, tier, block in self._numbers]
        parents = {block: self._parents.get(block) for _, _, _, block in self._numbers}
        return {
            "first": self._first,
            "books": [*base],
            "base": base,
            "left_out": _left_out(base),
            "steps": steps,
            "held": rows,
            "parents": {block_text(block): None if up is None else block_text(up) for block, up in parents.items()},
            "notes": self._notes,
        }

    def _shown(self, held: _Held) -> list[int]:
        numbers = self._numbers
        return [numbers.setdefault(each, len(numbers)) for each in sorted(held)]

    def _narrow(self, held: int) -> bool:
        """Reduce the number of steps if many blocks are held; return whether the first step then comes later."""
        looks, first = max(_LEAST, MOST_LOOKED // max(1, held)), self._first
        if looks < self._last - first:
            self._first = max(first, self._position - looks * 4 // 5)
            self._last = self._position + looks // 5
        return self._first > first

    def _take(self, entry: entries.Entry) -> None:
        ledger = self._ledger
        ledger.take(entry)
        if isinstance(entry, RouterEvent):
            data = entry.event.data
            if isinstance(data, Stored):
                self._parents.update(zip(data.block_hashes, (data.parent_hash, *data.block_hashes), strict=False))
            if entry.key in self._watched:  # no index got the event
                return
            with suppress(RadixIndexError):  # the ledger has found the problem
                self._reference.apply(ledger.uncounted(entry))
            if self._index is not None:
                self._call(self._index.apply, entry)
        elif isinstance(entry, entries.WorkerRemoved):
            for key in entry.keys:
                self._reference.remove_worker_dp_rank(*key)
            if self._index is not None:
                ranks = [rank for _, rank in entry.keys]
                try:
                    calls = self._index.removal_calls(entry.worker_id, ranks, whole=entry.dp_rank is None)
                except ValueError:
                    calls = []
                for call, of in calls:
                    self._call(call, of)

    def _call(self, function: Any, *arguments: Any) -> Any:
        """Call the index under test; return None if it raises, as the test has already shown this."""
        try:
            answer = function(*arguments)
            return answer if self._runner is None or not isawaitable(answer) else self._runner.run(_awaited(answer))
        except Exception:  # noqa: BLE001 - the user's own
            return None

    # ------------------------------------------------------------------------------------------------------- looks

    def _look(self) -> dict[str, _Held]:
        """Return the blocks that each book holds now."""
        found: _Held = set()
        for (worker, rank), stream in self._ledger.streams.items():
            if self._only not in (None, worker):
                continue
            for part in (stream, *stream.groups.values()):
                for tier, held in part.tiers.items():
                    found.update(zip(repeat(worker), repeat(rank), repeat(str(tier)), held, strict=False))
        edges = self._reference.edges(self._only)
        reference = {(worker, rank, tier.value, block) for tier, (worker, rank), (_, block, _) in edges}
        books = {"ledger": found, "reference": reference}
        if self._index is not None and callable(self._dump):
            if self._index.flush is not None:
                self._call(self._index.flush)
            try:
                books["index"] = _dumped(self._call(self._dump) or ())
            except (AttributeError, TypeError):
                self._dump = None
                self._notes.append(f"dump_events() of {self._index.name} has no RouterEvents: its answers are shown.")
        if self._only is None:
            return books
        return {book: {each for each in held if each[0] == self._only} for book, held in books.items()}

    def _answers(self, event: RouterEvent) -> dict[str, Any] | None:
        """Return the answers of the reference and of the index under test for the prefix of an event."""
        data = event.event.data
        if not isinstance(data, Stored | Removed) or not data.block_hashes:
            return None
        stream = self._ledger.stream(event.key)
        block = data.block_hashes[-1] if isinstance(data, Stored) else data.block_hashes[0]
        try:
            chain = stream.read_chain(block, with_tokens=True)
        except KeyError:  # the block was never stored
            return None
        out: dict[str, Any] = {
            "block": block_text(block),
            "blocks": len(chain.blocks),
            "reference": _scores(by_worker(self._reference.find_matches(chain.local_hashes).scores)),
            "differ": False,
        }
        index = self._index
        if index is not None:
            if index.flush is not None:
                self._call(index.flush)
            try:
                asked = index.plain.question(chain.local_hashes, chain.tokens, of_events=True)
                answer = index.read(self._call(index.plain.asking(stream.extra_of(chain.blocks)), asked))
            except ValueError as error:
                out["index"] = str(error)
            else:
                by_rank = any(isinstance(name, tuple) for name in answer)
                out["index"] = _scores(by_worker(answer) if by_rank else answer)  # type: ignore[arg-type]  # of which shape, its names tell
            out["differ"] = out["index"] != out["reference"]
        return out


def _left_out(books: Collection[str], answers: Mapping[str, Any] | None = None) -> str:
    """Return the text for chains on which the books do not differ; "all agree" only if the index has a book and its
    answers match the reference.
    """
    if answers is not None and answers["differ"]:
        return "which the books hold alike, though the answers above differ"
    return "on which all agree" if "index" in books else "which ledger and reference hold alike"


async def _awaited(answer: Any) -> Any:
    return await answer


def _dumped(events: Iterable[Any]) -> _Held:
    """Return the blocks that the events of a dump store."""
    found: _Held = set()
    for event in events:
        inner = event.event
        tier = str(StorageTier.of(event.storage_tier))
        found |= {(event.worker_id, inner.dp_rank, tier, block) for block in inner.data.block_hashes}
    return found


def _scores(scores: Any) -> dict[str, int]:
    return {str(worker): count for worker, count in sorted(scores.items(), key=repr)}


def worker_name(worker: int, rank: int) -> str:
    """Return the name of a worker and rank on a page."""
    return f"{worker}.{rank}" if rank else str(worker)
