"""What is heard is judged: by the ledger, against the engines, and index against reference."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from inspect import isawaitable
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from pytest_kvmock.events import RouterEvent, StorageTier, check_block_hashes
from pytest_kvmock.harness.comparison import Comparison, Heard, Sync, arun, run
from pytest_kvmock.harness.recording import Forgotten, Recording
from pytest_kvmock.harness.standard import Standard
from pytest_kvmock.harness.under_test import IndexUnderTest, Scores, WorkerScores, question
from pytest_kvmock.hygiene.ledger import Ledger
from pytest_kvmock.hygiene.log import EventLog
from pytest_kvmock.hygiene.problem import Problem
from pytest_kvmock.hygiene.stream import Stream, StreamKey
from pytest_kvmock.hygiene.truth import Truth
from pytest_kvmock.router.index import KvEventError, RadixIndex
from pytest_kvmock.tokens import Prompt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_kvmock.engine.worker import KvWorker, Request

Residents: TypeAlias = Iterable[tuple[StreamKey, StorageTier, Callable[[], Iterable[int]]]]
"""Who can tell what is resident: worker and rank, tier, and a callable that answers block hashes."""


_DRIFTS: Final = ("engine_drift", "index_drift")


class Verdict(NamedTuple):
    """What was found since the last verdict.

    Attributes:
        errors: errors that stand by themselves and that the test did not expect.
        warnings: warnings, likewise.
        unmet: a sentence for each error that the test expected, and for each fault that it asked for, that did not come
            as often as it said.
    """

    errors: list[Problem]
    warnings: list[Problem]
    unmet: list[str]


class Told(NamedTuple):
    """What a router was told when it asked a worker for events that it missed.

    Attributes:
        said: all that the worker's rank had said by then, in the order in which it did.
        ids: the event ids that it was asked for, up to the newest.
        events: what the router was told; or all that it knows of the rank by now.
        replace: they are all that it knows, and not the events that were missed.
    """

    said: Stream
    ids: range
    events: Sequence[RouterEvent]
    replace: bool


class Judge:
    """Hears every event that arrives, and notes in the log what is wrong.

    Args:
        log: where events and problems are noted.
        index: the index under test; None for the reference alone.
        sync: when it is compared; see `RouterHarness`.
        rng: source of what a comparison picks at random.
        recording: keeps what arrives.
        reference: an empty reference index.

    Attributes:
        ledger: what the events say is held.
        reference: the reference index.
        under_test: the index under test.
        told: what routers were told when they asked, and that is not settled yet.
        truth: what was published, beside what arrived; None until a test injects a fault.
        standard: what an index that survives faults should know; None where no test says so.
        door: what the index under test is given for an event; None: the event.
        unheard: the first event that a sink kept from the router, of itself; None: there was none.
    """

    def __init__(
        self, log: EventLog, index: Any, sync: Sync, rng: Random, recording: Recording, *, reference: RadixIndex
    ) -> None:
        self.log = log
        self._recording = recording
        self.ledger = Ledger()
        self.reference = reference
        self.under_test = None if index is None else IndexUnderTest(index)
        self.truth: Truth | None = None
        self.standard: Standard | None = None
        self.door: Callable[[RouterEvent], RouterEvent] | None = None
        self.unheard: Problem | None = None
        self._comparison = None
        if self.under_test is not None:
            self._comparison = Comparison(self.under_test, self.reference, self.ledger, rng, sync, settle=self.settle)
        self._judged = 0
        self._mute: set[StreamKey] = set()  # whose callable has failed to say what is resident
        self._leaked: set[Request] = set()
        self.told: deque[Told] = deque()

    @property
    def is_async(self) -> bool:
        """Whether the index under test is to be awaited."""
        return self.under_test is not None and self.under_test.is_async

    def open(self, key: StreamKey, **about: Any) -> None:
        """Begin to listen to a worker and rank; the arguments are those of `Ledger.open`."""
        for ledger in self._ledgers():
            ledger.open(key, **about)

    def _ledgers(self) -> list[Ledger]:
        return [self.ledger, *(each.ledger for each in (self.truth, self.standard) if each is not None)]

    def begin_truth(self) -> Truth:
        """From here on, tell what was published from what arrived."""
        if self.truth is None:
            self.truth = Truth(self.ledger, self.log.problems)
        return self.truth

    def survive(self) -> Standard | None:
        """From here on the index under test must be right though faults strike; what has arrived was published so."""
        if self._comparison is not None and self.standard is None:
            self.settle()
            self.standard = self._comparison.standard = Standard(self.ledger, self.reference)
        return self.standard

    def note(self, found: list[Problem], real: Sequence[Problem] | None = None) -> None:
        """Note problems in the log.

        Args:
            found: what is wrong with what arrived.
            real: what is wrong with what was published, at the same point; see `Truth.sort`.
        """
        if self.truth is not None:
            self.truth.sort(found, real)
        self.log.note(found)

    def arrive(self, event: RouterEvent, chained: bool) -> None:
        """Judge an event, and give it to the indexes."""
        self.settle()
        entry = self.log.append(event)
        self._recording.arrive((event, chained))
        problems: list[Problem] = []
        refused = False
        if not self.ledger.told_before(event):
            problems = self.ledger.observe(event, entry.position, chained=chained)
            if problems:
                self.note(problems)
            try:
                self.reference.apply(self.ledger.uncounted(event))
            except KvEventError:  # the ledger has said so already, with what was known
                refused = True
        comparison = self._comparison
        if comparison is not None:
            given = None if self.door is None else self.door(event)
            orphaned = self.ledger.streams[event.worker_id, event.event.dp_rank].orphaned
            comparison.heard(Heard(event, entry.position, problems, refused, given, orphaned))
            if not self.is_async and (found := run(comparison.catch_up())):
                self.note(self._oldest_first(found))

    def judge_hashes(self, events: Iterable[RouterEvent]) -> None:
        """Judge hashes of events that may have arrived before it was known that they are a chain."""
        late = {id(event) for event in events}
        for entry in self.log:
            if id(entry.event) in late:
                found = self.ledger.wrong_hash(entry.event, entry.position, entry.problems)
                self.note(found, found)  # it arrived as it was published
        self._recording.chain(late)

    def sink_failed(self, problem: Problem, event: RouterEvent, missed: bool) -> None:
        """Note that a sink raised; the event is missed where the sink stood between worker and router."""
        problem.position = self.log.total - 1
        self.log.note([problem])
        if missed:
            if problem.fault is None:
                self.unheard = self.unheard or problem
            self.ledger.missed((event.worker_id, event.event.dp_rank), event.event.event_id, problem)
            if self.truth is not None and problem.fault is None:
                self.truth.missed(problem, event)

    def settle(self) -> None:
        """Take what routers were told when they asked: it counts as arrived.

        The index under test is not given it: it has asked, and has to apply the answer itself.
        """
        while self.told:
            said, ids, events, replace = self.told.popleft()
            key = (said.worker_id, said.dp_rank)
            if replace:
                self.reference.remove_worker_dp_rank(*key)
            for event in events:
                with suppress(KvEventError):  # what is told again was removed already, or stands already
                    self.reference.apply(event)
            for problem in (news := self.ledger.recovered(said, ids)):
                problem.position = self.log.total - 1
            self.note(news, () if self.truth is None else self.truth.astray(key))
            if self.truth is not None:
                self.truth.recovered(key, ids)
            if self.standard is not None:
                self.standard.recovered(key, ids)
            if self._comparison is not None:
                self._comparison.recovered(key, self.log.total - 1)

    def gone(self, worker_id: int, dp_rank: int | None = None, *, first_id: int | None) -> list[StreamKey]:
        """The router is told that a worker, or one rank of it, begins anew: what it held is forgotten everywhere.

        Args:
            worker_id: which worker.
            dp_rank: which rank; None for all.
            first_id: the id that its next event has; None for any.

        Returns:
            The workers and ranks that are forgotten.

        Raises:
            ValueError: the index under test cannot be told; nothing is forgotten.
            Exception: whatever the index under test raises when it is told; nothing else is forgotten.
        """
        known = [key for key in self.ledger.streams if key[0] == worker_id]
        gone = known if dp_rank is None else [(worker_id, dp_rank)]
        if self._comparison is not None and self.under_test is not None:
            ranks = [rank for _, rank in gone]
            self._comparison.gone(gone, self.under_test.farewell(worker_id, ranks, whole=gone == known))
        self._recording.arrive(Forgotten(worker_id, dp_rank, first_id))
        self.log.forgotten(worker_id, dp_rank, gone)
        for key in gone:
            self.reference.remove_worker_dp_rank(*key)
            self.ledger.restarted(key, first_id=first_id)
            if self.truth is not None:
                self.truth.gone(key, first_id=first_id)
            if self.standard is not None:
                self.standard.announced(key, first_id=first_id)
        return gone

    # -------------------------------------------------------------------------------------------- questions

    @contextmanager
    def burst(self) -> Iterator[None]:
        """See `RouterHarness.burst`."""
        comparison = self._comparison
        if comparison is None or self.is_async:
            yield
            return
        before, comparison.in_burst = comparison.in_burst, True
        try:
            yield
        finally:
            comparison.in_burst = before

    def end_burst(self) -> None:
        """Flush the index under test after a burst of events, and compare what they changed."""
        if self._comparison is not None and not self.is_async and (found := run(self._comparison.end_burst())):
            self.note(found)

    def ask(self, prompt: Prompt, block_size: int) -> Scores | WorkerScores:
        """What the index answers for a prompt: the one under test, or the reference.

        Raises:
            ValueError: it takes tokens, and the prompt has none.
            UnreadableAnswer: it is no answer.
        """
        __tracebackhide__ = True
        under_test = self.under_test
        if under_test is None:
            return self.reference.find_matches(prompt.block_hashes(block_size)).scores
        self.end_burst()
        if under_test.flush is not None:
            under_test.flush()
        return under_test.read(under_test.ask(self._question(under_test, prompt, block_size)))

    async def aask(self, prompt: Prompt, block_size: int) -> Scores | WorkerScores:
        """As `ask`, for an async index, as far as it was flushed."""
        __tracebackhide__ = True
        under_test = self.under_test
        assert under_test is not None
        answer = under_test.ask(self._question(under_test, prompt, block_size))
        return under_test.read(await answer if isawaitable(answer) else answer)

    @staticmethod
    def _question(under_test: IndexUnderTest, prompt: Prompt, block_size: int) -> Sequence[int]:
        __tracebackhide__ = True
        hashes = () if under_test.takes_tokens else list(prompt.block_hashes(block_size))
        return question(hashes, prompt.tokens, takes_tokens=under_test.takes_tokens)

    # ------------------------------------------------------------------------------------------ comparisons

    def flush(self, published: Mapping[StreamKey, int], residents: Residents) -> None:
        """Compare what can be compared by now: ids with what was published, the stream with the engines.

        Args:
            published: the id after the last one that was published, by worker and rank.
            residents: who can tell what is resident.
        """
        position = self.log.total - 1
        truth = None if self.truth is None else self.truth.ledger
        if self._comparison is not None and not self.is_async:
            self.end_burst()
            self.note(run(self._comparison.flush()))
            if self.standard is not None:
                self.note(self._comparison.news(run(self._comparison.recheck(position))))
        for key, next_id in published.items():
            real = truth.published(key, next_id, position) if truth is not None else ()
            self.note(self.ledger.published(key, next_id, position), real)
        self.note(self.ledger.over_capacity(position), truth.over_capacity(position) if truth is not None else ())
        drift: list[Problem] = []
        for key, tier, resident in residents:
            blocks = self._told_by(key, resident)
            if blocks is not None:
                real = truth.drift(key, blocks, position, tier) if truth is not None else ()
                found = self.ledger.drift(key, blocks, position, tier)
                if self.truth is not None:
                    self.truth.sort(found, real)
                drift += found
        self.log.note(self._oldest_first(drift))

    def _oldest_first(self, problems: list[Problem]) -> list[Problem]:
        """Drifts in the order of the events that stored their blocks; those that none did come last."""
        if len(problems) < 2 or any(problem.rule not in _DRIFTS for problem in problems):
            return problems
        positions = {id(entry.event): entry.position for entry in self.log}

        def age(problem: Problem) -> int:
            stream = self.ledger.streams.get((problem.worker_id, problem.dp_rank))
            stored = None if stream is None or problem.block is None else stream.origin.get(problem.block)
            return self.log.total if stored is None else positions.get(id(stored), -1)

        return sorted(problems, key=age)

    def _told_by(self, key: StreamKey, resident: Callable[[], Iterable[int]]) -> list[int] | None:
        """What a callable says is resident; None, and a problem noted once, where it cannot say."""
        try:
            blocks = list(resident())
            check_block_hashes(blocks)
        except Exception as error:  # noqa: BLE001 - a user's callable; what else was found must not be lost
            if key not in self._mute:
                self._mute.add(key)
                known = f"what is resident could not be told: {type(error).__name__}: {error}"
                right = "a callable given to compare answers the block hashes that are resident"
                self.log.note([Problem("engine_drift", *key, known, right, position=self.log.total - 1)])
            return None
        return blocks

    def compare(self) -> list[Problem]:
        """Compare all chains ever stored, and note what is new; nothing to do without an index under test, or async.

        Returns:
            All differences there are now, reported before or not.
        """
        if self._comparison is None or self.is_async:
            return []
        self.end_burst()
        found = self._oldest_first(run(self._comparison.everything(self.log.total - 1)))
        self.note(self._comparison.news(found))
        return found

    async def acompare(self) -> list[Problem]:
        """As `compare`, for an async index, which is first given the events that wait."""
        assert self._comparison is not None
        self.note(self._oldest_first(await arun(self._comparison.catch_up())))
        found = self._oldest_first(await arun(self._comparison.everything(self.log.total - 1)))
        self.note(self._comparison.news(found))
        return found

    def differences(self, residents: Residents) -> list[Problem]:
        """Where stream and engines differ now, reported before or not; nothing is noted."""
        ledger = self.ledger if self.standard is None else self.standard.ledger  # what came of survived faults is none
        found = []
        for key, tier, resident in residents:
            stream = ledger.streams[key]
            for blocks, right, had in ledger.differences(stream, self._told_by(key, resident) or [], tier):
                if blocks:
                    found.append(ledger.drift_problem(stream, tuple(blocks), right, had))
        for problem in found:
            problem.position = self.log.total - 1
        return self._oldest_first(found)

    # ---------------------------------------------------------------------------------------------- verdict

    def leaked(self, workers: Iterable[KvWorker], spared: Collection[Request] = ()) -> None:
        """The test has ended: note the requests that are still open, each once.

        Args:
            workers: whose requests.
            spared: requests that somebody may finish yet.
        """
        for worker in workers:
            requests = [r for r in worker.requests if r not in spared and r not in self._leaked]
            if not requests:
                continue
            self._leaked.update(requests)
            sizes = [len(request.blocks) if request.status == "running" else 0 for request in requests]
            shown = ", ".join(map(str, sizes[:8])) + (f" and {len(sizes) - 8} more" if len(sizes) > 8 else "")
            known = f"{len(requests)} request{'s are' if len(requests) > 1 else ' is'} open, with {shown} blocks"
            right = "a request is finished, or left by its with block, before the test ends"
            key = (worker.worker_id, worker.dp_rank)
            self.log.note([Problem("leaked_requests", *key, known, right, position=self.log.total - 1)])

    def close_async(self) -> None:
        """The test body has ended: note events that an async index was not given."""
        if self._comparison is None or not self.is_async:
            return
        waiting = [heard for heard in self._comparison.waiting if isinstance(heard, Heard)]
        self._comparison.waiting.clear()
        if not waiting:
            return
        first, count = waiting[0], len(waiting)
        problem = Problem(
            "not_flushed",
            first.event.worker_id,
            first.event.event.dp_rank,
            f"{count} event{'s' * (count != 1)} waited for the async index when the test body ended, this one first",
            "`await kv_router.aflush()` comes after the last event",
            first.event,
            first.position,
        )
        self.log.note([problem])

    def verdict(self) -> Verdict:
        """What is new since the last verdict. Expectations for the whole test are settled by the first."""
        unmet = self.log.settle()
        self.log.expectations.clear()
        new, self._judged = self.log.problems[self._judged :], len(self.log.problems)
        standing = [p for p in new if p.cause is None and p.expected_by is None and not p.excused]
        return Verdict([p for p in standing if p.is_error], [p for p in standing if not p.is_error], unmet)
