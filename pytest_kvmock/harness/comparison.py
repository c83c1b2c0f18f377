"""Index against reference: after each event, what does the index under test answer, and what should it?

Which chains are asked comes from the history of the stream, not from what is resident: a stale block stands on no
resident chain, and a comparison of those at the end alone would miss every Removed that an index forgot.

Where a backend is not prefix-closed the reference itself can be wrong: it loses the children of a block that goes
before them, and believes an engine that links a block to its own descendant. There, any answer between the reference's
and the leading run of blocks that the events say are held is right. So it is for chains through a block that an engine
has left without its parent (`orphaned_child`); and what an index answers outside of that is listed under the warning. But
where both are the same, an index that answers more has counted what is not held, or is behind a hole: no orphan excuses
that.

All of it is written once, for sync and async indexes: generators yield the calls to make and are sent what came back.
`run` makes the calls, `arun` awaits them.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from inspect import isawaitable
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from pytest_kvmock.events import Cleared, Removed, RouterEvent, Stored, block_text
from pytest_kvmock.harness.under_test import (
    Call,
    IndexUnderTest,
    Scores,
    UnreadableAnswer,
    WorkerScores,
    agree,
    first_difference,
    question,
)
from pytest_kvmock.hygiene.ledger import Ledger
from pytest_kvmock.hygiene.orphans import Orphaned, orphaned, stored_as
from pytest_kvmock.hygiene.problem import Problem
from pytest_kvmock.hygiene.stream import Stream, StreamKey, Wound
from pytest_kvmock.hygiene.text import NOBODY, worker_text
from pytest_kvmock.tokens import sequence_hashes

if TYPE_CHECKING:
    from pytest_kvmock.harness.standard import Standard
    from pytest_kvmock.router.index import RadixIndex

Sync: TypeAlias = Literal["every", "auto", "burst", "end"]
SYNC: Final = ("every", "auto", "burst", "end")

ALWAYS_UPTO: Final = 2000
"""With sync="auto", this many events are each followed by a comparison, then one in `THEN_ONE_IN`."""
THEN_ONE_IN: Final = 16

MOST_IN_A_BURST: Final = 10_000
"""How many events an index is given at most without a flush."""

Findings: TypeAlias = Generator[Call, Any, list[Problem]]


def run(findings: Findings) -> list[Problem]:
    """Make the calls that a generator asks for; return what it found."""
    try:
        function, argument = next(findings)
        while True:
            try:
                answer = function(argument)
            except Exception as error:  # noqa: BLE001 - whatever a user's index raises is a finding
                function, argument = findings.throw(error)
            else:
                function, argument = findings.send(answer)
    except StopIteration as stop:
        return list(stop.value)


async def arun(findings: Findings) -> list[Problem]:
    """As `run`, awaiting what is awaitable."""
    try:
        function, argument = next(findings)
        while True:
            try:
                answer = function(argument)
                if isawaitable(answer):
                    answer = await answer
            except Exception as error:  # noqa: BLE001 - as above
                function, argument = findings.throw(error)
            else:
                function, argument = findings.send(answer)
    except StopIteration as stop:
        return list(stop.value)


class Chain(NamedTuple):
    """A chain to ask for: local hashes and block hashes from the first to the last, and the tokens where known.

    Of a stranger the block hashes only tell which chain it was made from.
    """

    local: tuple[int, ...]
    blocks: tuple[int, ...]
    tokens: tuple[int, ...] | None
    stranger: bool = False

    @property
    def block_size(self) -> int:
        """Tokens a block; 0 where they are not known."""
        return len(self.tokens) // len(self.local) if self.tokens and self.local else 0

    def part(self, start: int, stop: int) -> Chain:
        """Its blocks from `start` up to `stop`."""
        size = self.block_size
        tokens = None if self.tokens is None else self.tokens[start * size : stop * size]
        return Chain(self.local[start:stop], self.blocks[start:stop], tokens, self.stranger)


class Heard(NamedTuple):
    """An event that the index under test has not been given yet.

    Attributes:
        event: the event.
        position: its number in the log.
        problems: what the ledger found wrong with it.
        refused: the reference index raised on it.
        given: what the index gets, where a fault at its own door changes that.
        orphaned: the blocks that its worker and rank holds without their parents, each with the warning.
    """

    event: RouterEvent
    position: int
    problems: list[Problem]
    refused: bool = False
    given: RouterEvent | None = None
    orphaned: Mapping[int, Problem] = MappingProxyType({})

    @property
    def key(self) -> StreamKey:
        """Whose it is."""
        return self.event.worker_id, self.event.event.dp_rank


class Gone(NamedTuple):
    """The news, which the index under test has not been told yet, that these begin anew."""

    keys: Sequence[StreamKey]
    calls: Sequence[Call]


class Comparison:
    """Asks an index under test what the reference is asked, and reports where they differ.

    Args:
        under_test: the user's index.
        reference: the reference index; it has every event before the index under test.
        ledger: whose history the chains come from.
        rng: picks foreign blocks, and events in long tests.
        sync: after every event, after some of many, after a burst of events, or at the end alone.
        settle: has ledger and reference take what the index was told when it asked a worker.

    Attributes:
        waiting: what the index has not been given yet: an async one's events, until it is flushed.
        standard: in place of ledger and reference, where the index must survive faults.
        in_burst: whether the index is given events without a flush and a question in between, until `end_burst`.
    """

    def __init__(
        self,
        under_test: IndexUnderTest,
        reference: RadixIndex,
        ledger: Ledger,
        rng: Random,
        sync: Sync,
        *,
        settle: Callable[[], None],
    ) -> None:
        self.waiting: deque[Heard | Gone] = deque()
        self._under_test = under_test
        self._standard: Standard | None = None
        self._reference = reference
        self._ledger = self._arrived = ledger
        self._rng = rng
        self._sync = sync
        self._settle = settle
        self._catching_up = False
        self.in_burst = sync == "burst" and not under_test.is_async
        self._unasked: list[tuple[Heard, bool]] = []  # given to the index; what they changed is still to be asked
        self._naming: list[tuple[Wound, tuple[int, ...]]] = []
        self._wounds: dict[StreamKey, Wound] = {}
        self._recovered: dict[StreamKey, int] = {}
        self._told: set[tuple[int, int, int]] = set()
        self._warned: dict[Problem, Problem] = {}  # of problems that are no news yet, which warning they follow from

    @property
    def standard(self) -> Standard | None:
        """What an index that must survive faults should know; it takes the place of ledger and reference."""
        return self._standard

    @standard.setter
    def standard(self, standard: Standard) -> None:
        self._standard, self._reference, self._ledger = standard, standard.reference, standard.ledger

    # ---------------------------------------------------------------------------------------------- events

    def heard(self, heard: Heard) -> None:
        """Queue an event that ledger and reference have taken."""
        self.waiting.append(heard)

    def catch_up(self) -> Findings:
        """Give the index what is waiting, in order; then compare with where the reference is now.

        Raises:
            RuntimeError: that is under way already, in another task: events would arrive out of order.
        """
        if self._catching_up:
            raise RuntimeError("aflush() is under way already; await one at a time")
        self._catching_up = True
        try:
            return (yield from self._catch_up())
        finally:
            self._catching_up = False

    def end_burst(self) -> Findings:
        """Flush the index, and ask what the events of the burst have changed; nothing to do where there were none."""
        return self._compare() if self._unasked or self._naming else _nothing()

    def _catch_up(self) -> Findings:
        found = yield from self._give()
        if not self.in_burst or len(self._unasked) >= MOST_IN_A_BURST:
            found += yield from self._compare()
        return found

    def _give(self) -> Findings:
        """Give the index what is waiting."""
        found: list[Problem] = []
        while self.waiting:
            heard = self.waiting.popleft()
            if isinstance(heard, Gone):
                found += yield from self._tell(heard)
                continue
            data, key = heard.event.event.data, heard.key
            if self._standard is not None and self._hurt(key):
                self._standard.touched(key, heard.event)
            wound = self._wounds.get(key)
            try:
                yield self._under_test.apply, heard.given or heard.event
            except Exception as error:  # noqa: BLE001 - as in run
                # A dump leaves blocks out that no query can reach; the reference raises, too, when those are removed.
                if not heard.refused or any(problem.is_error for problem in heard.problems):
                    found.append(self._failure("apply", error, key, heard))
            else:
                if isinstance(data, Cleared):
                    self._wounds.pop(key, None)
            if self._due(heard.position):
                self._unasked.append((heard, self._hurt(key)))
            if isinstance(data, Cleared):
                continue
            if wound is not None:
                self._naming.append((wound, data.block_hashes))
            if self._told:  # what an event names again may drift again
                self._told.difference_update((*key, block) for block in data.block_hashes)
        return found

    def _compare(self) -> Findings:
        """Ask what the events have changed that the index was given."""
        found: list[Problem] = []
        questions, self._unasked = self._unasked, []
        naming, self._naming = self._naming, []
        if questions:
            found += yield from self.flush()
        if self._standard is not None:
            for key in dict.fromkeys(heard.key for heard, _ in questions):
                if self._hurt(key):
                    yield from self._heal(key)
        for heard, was_hurt in reversed(questions):  # a later event explains a difference better than an earlier one
            for chain in () if was_hurt else self._touched(heard.event):
                differences = yield from self._differences(chain, heard.key, heard)
                found += self.news(differences, heard)
                if any(problem.rule == "index_failure" for problem in differences):
                    break  # it would fail the other questions too
        for wound, blocks in naming:  # last, so that an event's own names do not count for itself
            wound.named.update(blocks)
        return found

    def recovered(self, key: StreamKey, position: int) -> None:
        """The index has asked a worker and rank, and knows what it missed: it has no excuse from here on.

        Args:
            key: whom it asked.
            position: number of the last event that had arrived.
        """
        self._recovered[key] = position
        self._wounds.pop(key, None)
        self._told = {told for told in self._told if told[:2] != key}

    def gone(self, keys: Sequence[StreamKey], calls: Sequence[Call]) -> None:
        """Tell the index that some begin anew; an async one is told in its turn, after the events before.

        Raises:
            Exception: whatever the index raises when it is told.
        """
        if self._under_test.is_async:
            self.waiting.append(Gone(keys, calls))
            return
        for function, argument in calls:
            function(argument)
        for key in keys:
            self._wounds.pop(key, None)

    def _tell(self, gone: Gone) -> Findings:
        found: list[Problem] = []
        for function, argument in gone.calls:
            try:
                yield function, argument
            except Exception as error:  # noqa: BLE001 - as in run
                found.append(self._failure("remove_worker", error, gone.keys[0] if gone.keys else NOBODY))
        for key in gone.keys:
            self._wounds.pop(key, None)
        return found

    def flush(self) -> Findings:
        """Have the index catch up with itself, where it has a `flush`."""
        flush = self._under_test.flush
        found = []
        if flush is not None:
            try:
                yield lambda _: flush(), None
            except Exception as error:  # noqa: BLE001 - as in run
                found.append(self._failure("flush", error, NOBODY))
        self._settle()
        return found

    def everything(self, position: int) -> Findings:
        """Compare all chains ever stored; for the end of a test. What is found may be known already: see `news`.

        Args:
            position: number of the last event.
        """
        found = yield from self.flush()
        for key in list(self._ledger.streams):
            found += yield from self._all_of(key, position)
        return found

    def recheck(self, position: int) -> Findings:
        """Compare all chains of the streams that faults have hurt, and that the index is to have right by now."""
        found: list[Problem] = []
        for key in [] if self._standard is None else list(self._standard.hurt):
            if key in self._ledger.streams:
                found += yield from self._all_of(key, position)
        return found

    def _all_of(self, key: StreamKey, position: int) -> Findings:
        found: list[Problem] = []
        stream, leaves = self._ledger.streams[key], self._leaves(key)
        for block in leaves:
            found += yield from self._differences(self._chain(stream, block), key, None, position)
        for chain in self._strangers(self._chain(stream, leaves[-1])) if leaves else ():
            found += yield from self._differences(chain, key, None, position)
        if self._standard is not None and not found:
            self._standard.healed(key)
        return found

    def _hurt(self, key: StreamKey) -> bool:
        return self._standard is not None and key in self._standard.hurt

    def _heal(self, key: StreamKey) -> Generator[Call, Any, None]:
        """Look whether the index has recovered from what hurt a stream."""
        assert self._standard is not None
        others = self._standard.hurt.keys() - {key}
        for where, block in list(self._standard.hurt[key]):
            try:
                agrees = yield from self._agrees(self._chain(self._ledger.streams[where], block), others)
            except Exception:  # noqa: BLE001 - it has not; at the end it is asked again, and that is reported
                return
            if not agrees:
                return
        self._standard.healed(key)

    def news(self, found: list[Problem], heard: Heard | None = None) -> list[Problem]:
        """Those of `found` that were not reported before, each listed where it belongs."""
        out = []
        warned, self._warned = self._warned, {}
        for problem in found:
            if problem.rule == "index_drift":
                told = (problem.worker_id, problem.dp_rank, problem.blocks[0])
                if told in self._told:
                    continue
                self._told.add(told)
                self._fold(problem, heard, warned.get(problem))
            out.append(problem)
        return out

    def _due(self, position: int) -> bool:
        if self._sync == "auto" and not self.in_burst:
            return position < ALWAYS_UPTO or self._rng.randrange(THEN_ONE_IN) == 0
        return self._sync != "end"

    # ---------------------------------------------------------------------------------------------- chains

    def _touched(self, event: RouterEvent) -> Iterator[Chain]:
        """Yield the chains whose answers an event changes.

        Those of the last block stored, of each first block removed, and of three that were cleared; and once more
        with the first block exchanged and without it, which must match nothing that the chain matched. After a Cleared
        also those that it must not change: one of each other rank of the worker.
        """
        key = (event.worker_id, event.event.dp_rank)
        stream = self._ledger.streams[key]
        data = event.event.data
        if isinstance(data, Stored):
            touched = list(data.block_hashes[-1:])
        elif isinstance(data, Removed):
            removed = set(data.block_hashes)
            touched = [b for b in data.block_hashes if b in stream.origin and stream.parent(b) not in removed]
        else:
            touched = list(stream.emptied)
        for block in touched:
            yield self._chain(stream, block)
        if touched:
            yield from self._strangers(self._chain(stream, touched[-1]))
        if isinstance(data, Cleared):
            for other, spared in self._ledger.streams.items():
                if other[0] == key[0] and other != key and spared.device:
                    block = next(reversed(spared.device))
                    if block in spared.origin:
                        yield self._chain(spared, block)

    def _strangers(self, chain: Chain) -> Iterator[Chain]:
        """Yield a chain with its first block exchanged, and without it."""
        if len(chain.local) > 1:
            foreign, size, rest = self._rng.getrandbits(64), chain.block_size, chain.part(1, len(chain.local))
            tokens = None
            if rest.tokens is not None:
                tokens = (*(self._rng.getrandbits(32) for _ in range(size)), *rest.tokens)
            yield Chain((foreign, *rest.local), chain.blocks, tokens, stranger=True)
            yield rest._replace(stranger=True)

    def _leaves(self, key: StreamKey) -> list[int]:
        """Last blocks of all chains that a worker and rank ever stored, oldest first."""
        events = {id(event): event.event.data for event in self._ledger.streams[key].origin.values()}
        stored = [data for data in events.values() if isinstance(data, Stored)]
        parents = {data.parent_hash for data in stored}
        return [data.block_hashes[-1] for data in stored if data.block_hashes[-1] not in parents]

    def _chain(self, stream: Stream, block: int) -> Chain:
        blocks = tuple(stream.chain(block))
        tokens: tuple[int, ...] | None = None
        if self._under_test.takes_tokens:
            parts = [stream.tokens(b) for b in blocks]
            if all(part is not None for part in parts):
                tokens = tuple(token for part in parts for token in part or ())
        return Chain(tuple(map(stream.local_hash, blocks)), blocks, tokens)

    # --------------------------------------------------------------------------------------------- answers

    def _differences(self, chain: Chain, key: StreamKey, heard: Heard | None, position: int = -1) -> Findings:
        """Ask for a chain; where the answer is not the reference's, find the shortest part of it that shows so."""
        ignored = None if heard is None or self._standard is None else self._standard.hurt.keys()
        try:
            if (yield from self._agrees(chain, ignored)):
                return []
            for count in range(1, len(chain.local) + 1):
                shortest = chain.part(0, count)
                if not (yield from self._agrees(shortest, ignored)):
                    break
            answer = self._under_test.read((yield self._question(shortest)))
        except Exception as error:  # noqa: BLE001 - as in run
            return [self._failure(self._under_test.asked, error, key, heard, position)]
        wrong = self._wrong(answer, shortest, ignored)
        if wrong is None:
            return []  # an index that changes its mind between two questions: the next question shows it again
        worker, rank, got, right = wrong
        block, story = self._story((worker, rank), shortest, too_many=got >= right.stop)
        if heard is not None and heard.key == (worker, rank) and self._left_a_copy(heard.event, block):
            story += "; this Removed took one copy of it, and the engine has another"
        orphan, warning = self._orphan(answer, (worker, rank), shortest)
        if len(right) == 1 and got >= right.stop:
            warning = None  # more than anybody holds there: what an orphan leaves open is no excuse for that
        if warning is not None:
            story += f"; block {block_text(orphan)} was left without its parent by event {warning.event_id}"
        problem = Problem(
            "index_drift",
            worker,
            rank,
            f"{self._under_test.asked}() of your index ({self._under_test.name}) returned {got} for "
            f"{worker_text(worker, rank)} on a {len(shortest.local)}-block prefix (ends in {block_text(block)}); {story}",
            _right(right, "the reference index says" if self._standard is None else "was published"),
            heard.event if heard else None,
            heard.position if heard else position,
            (block,),
            fault=None if self._standard is None else self._standard.strike((worker, rank), (block,)),
        )
        if warning is not None:
            self._warned[problem] = warning
        return [problem]

    def _story(self, key: StreamKey, chain: Chain, *, too_many: bool) -> tuple[int, str]:
        """The last block of a chain, as the worker and rank has named it if it has, and what the events say of it.

        Args:
            key: the worker and rank of which the answer is wrong.
            chain: what was asked.
            too_many: the answer is too high: the index may have had blocks before the first event.
        """
        early = "; was the index empty at the start?"
        streams, block = self._ledger.streams, chain.blocks[-1]
        own = streams.get(key)
        if own is not None:
            if chain.stranger:  # without its first block, it may be another chain that somebody has stored
                named = stored_as(own, chain.local)
                block = min(named) if named else block
            if block in own.origin:
                return block, own.history(block)
        others = [other for other, stream in streams.items() if other != key and block in stream.origin]
        others.sort(key=lambda other: other[0] != key[0])  # another rank of the worker tells most
        if others:
            known = f"it never stored it, {worker_text(*others[0])} did"
            return block, known + early * (too_many and others[0][0] != key[0])
        return block, f"nobody ever stored it{early}"

    def _orphan(
        self, answer: Scores | WorkerScores, key: StreamKey, chain: Chain
    ) -> tuple[int, Problem] | tuple[Literal[0], None]:
        """The first block of a chain that a worker and rank has left without its parent, and the warning of it.

        Args:
            answer: of the index; where it is by worker alone, each rank of the worker counts.
            key: the worker and rank of which it is wrong.
            chain: what was asked.
        """
        ranked = not answer or isinstance(next(iter(answer)), tuple)
        others = [] if ranked else [other for other in self._ledger.streams if other[0] == key[0] and other != key]
        for each in (key, *others):
            if each not in self._ledger.streams or each not in self._arrived.streams:
                continue
            found = _orphaned(self._ledger.streams[each], chain)
            warnings = self._arrived.streams[each].orphaned
            for block in () if found is None else found.blocks:
                if block in warnings and not warnings[block].excused:
                    return block, warnings[block]
        return 0, None

    def _left_a_copy(self, event: RouterEvent, block: int) -> bool:
        data, stream = event.event.data, self._ledger.streams[event.worker_id, event.event.dp_rank]
        return (
            stream.residency == "counted"
            and isinstance(data, Removed)
            and block in data.block_hashes
            and block in stream.held(event.storage_tier)
        )

    def _agrees(self, chain: Chain, ignored: Collection[StreamKey] | None) -> Generator[Call, Any, bool]:
        answer = self._under_test.read((yield self._question(chain)))
        return self._wrong(answer, chain, ignored) is None

    def _wrong(
        self, answer: Scores | WorkerScores, chain: Chain, ignored: Collection[StreamKey] | None
    ) -> tuple[int, int, int, range] | None:
        """The first worker for which an answer is wrong: (worker_id, dp_rank, blocks answered, what would be right)."""
        if self._standard is None:
            expected = self._reference.find_matches(chain.local).scores
        else:
            expected = self._standard.expected(answer, chain.local, ignored)
        if agree(answer, expected):
            return None
        least, most = dict(expected), dict(expected)
        for key, stream in self._ledger.streams.items():
            if not stream.prefix_closed:
                run, due = _leading_run(stream, chain), expected.get(key, 0)
            elif (found := _orphaned(stream, chain)) is not None:
                run, due = found.run, expected.get(key, 0)
            else:
                continue
            least[key], most[key] = min(run, due), max(run, due)
        return first_difference(answer, least, most)

    def _question(self, chain: Chain) -> Call:
        return self._under_test.ask, question(
            list(chain.local), chain.tokens, takes_tokens=self._under_test.takes_tokens
        )

    def _failure(
        self, what: str, error: Exception, key: StreamKey, heard: Heard | None = None, position: int = -1
    ) -> Problem:
        """The index under test raised, or answered what cannot be read."""
        event = heard.event if heard else None
        unreadable = isinstance(error, UnreadableAnswer)
        known = str(error) if unreadable else f"{what} raised {type(error).__name__}: {error}{_place(error)}"
        problem = Problem(
            "index_failure",
            *key,
            known,
            "an index takes every sound event, and answers every question",
            event,
            heard.position if heard else position,
            fault=None
            if self._standard is None
            else self._standard.strike(key, () if event is None else _blocks(event)),
        )
        warning = None if heard is None or what != "apply" else self._of_an_orphan(heard)
        self._fold(problem, heard, warning)
        if warning is None or problem.cause is not warning:  # of other chains it has no excuse
            self._wounds[key] = Wound(problem.cause or problem)
        return problem

    # ---------------------------------------------------------------------------------------------- wounds

    def _of_an_orphan(self, heard: Heard) -> Problem | None:
        """The warning of an orphan that an event names, or names a descendant of; an index may have dropped it."""
        if not heard.orphaned:
            return None
        stream = self._ledger.streams[heard.key]
        for named in _blocks(heard.event):
            for block in (named, *stream.chain(named)):
                if block in heard.orphaned and not heard.orphaned[block].excused:
                    return heard.orphaned[block]
        return None

    def _fold(self, problem: Problem, heard: Heard | None, warning: Problem | None = None) -> None:
        """List a problem under the fault of the event itself, a warning, or a wound of the index or of the stream."""
        own = next((p for p in self._faults(heard) if p.is_error and not p.excused), None) if heard else None
        key = (problem.worker_id, problem.dp_rank)
        wound = self._wounds.get(key)
        if own is not None:
            problem.follows_from(own)
        elif warning is not None:
            problem.follows_from(warning)
        elif wound is not None and problem.block not in wound.named:
            problem.follows_from(wound.cause)
        elif key in self._arrived.streams:
            Ledger.fold(self._arrived.streams[key], problem)
            if problem.cause is not None and problem.cause.excused:
                problem.stand()  # an index that survives a fault is right all the same
        if problem.cause is not None:
            problem.fault = None  # that of its cause

    def _faults(self, heard: Heard) -> list[Problem]:
        """What is wrong with an event, but for what its index has mended by a recovery."""
        if heard.position > self._recovered.get(heard.key, -1):
            return heard.problems
        return [p for p in heard.problems if p.rule != "event_id_gap" and p.cause is None]


def _nothing() -> Findings:
    return []
    yield  # a generator, as the others are


def _place(error: Exception) -> str:
    """Where an error was raised, for a message: the last line of the user's own."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name})" if own else ""


def _leading_run(stream: Stream, chain: Chain) -> int:
    """How many leading blocks of a chain the events say are held, a parent that is only implied counted.

    The chain's block hashes are those of its history, which a wrong link leads astray (in a circle even, where the run
    ends), and a stranger has none of its own: so the hashes that its local hashes make are looked for too.
    """
    ways = (sequence_hashes(chain.local),) if chain.stranger else (chain.blocks, sequence_hashes(chain.local))
    most = 0
    for way in ways:
        run: set[int] = set()
        for block in way:
            if block in run or not (block in stream.device or block in stream.implied):
                break
            run.add(block)
        most = max(most, len(run))
    return most


def _blocks(event: RouterEvent) -> tuple[int, ...]:
    """The blocks that an event stores or removes."""
    data = event.event.data
    return () if isinstance(data, Cleared) else data.block_hashes


def _orphaned(stream: Stream, chain: Chain) -> Orphaned | None:
    return orphaned(stream, chain.local, () if chain.stranger else chain.blocks) if stream.orphaned else None


def _right(answers: range, as_what: str) -> str:
    least, most = answers.start, answers.stop - 1
    if least == most:
        return f"{_count(most)}, as {as_what}"
    return f"{least} to {_count(most)}: between what the reference index says and what the events say is held"


def _count(blocks: int) -> str:
    return "1 block" if blocks == 1 else f"{blocks} blocks"
