"""What the events say is held: the ledger that judges a stream.

Theory of operation. The ledger keeps no tree. Per worker, rank and tier it knows which blocks the events say are
held, each with its local hash; and per worker and rank, which Stored last named a block, from which parents and chains
follow. It believes every event: after a problem it holds what the event said, so that one fault is reported once.

Where events are known to be missing it is *wounded*: every block of that worker and rank counts as unknown until an
event names it again. A problem with an unknown block is no news then; it is listed under what opened the wound. A rule
that needs no memory of the stream, such as the chain of hashes inside one event, is judged as ever.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import repeat

from pytest_kvmock.events import Cleared, Removed, RouterEvent, StorageTier, Stored
from pytest_kvmock.hygiene.problem import Problem
from pytest_kvmock.hygiene.stream import Stream, StreamKey, Wound
from pytest_kvmock.hygiene.text import block_text, blocks_text, ids_text
from pytest_kvmock.tokens import block_hashes, sequence_hashes


class Ledger:
    """Judges events one by one, and holds what they said.

    `observe` answers the problems that an event shows, causes before what follows from them. Nothing is ever raised
    for a problem.
    """

    def __init__(self) -> None:
        self.streams: dict[StreamKey, Stream] = {}

    def open(
        self, key: StreamKey, *, first_id: int | None, block_size: int | None = None, prefix_closed: bool = True
    ) -> Stream:
        """Begin to listen to a worker and rank, knowing nothing of it.

        Args:
            key: (worker_id, dp_rank).
            first_id: the id that its first event has; None for any.
            block_size: tokens a block, to judge token ids by; None: not judged.
            prefix_closed: see `BackendSpec`; where it is false a wrong hash is a warning.
        """
        stream = self.streams[key] = Stream(key, first_id=first_id, block_size=block_size, prefix_closed=prefix_closed)
        return stream

    def restarted(self, key: StreamKey, *, first_id: int | None) -> None:
        """The worker said that it begins anew: nothing held, ids from `first_id` on."""
        stream = self.streams.get(key)
        if stream is not None:
            stream.forget()
            stream.next_id, stream.last = first_id, None
            stream.holes.clear()
            stream.late.clear()

    # ------------------------------------------------------------------------------------------------ events

    def observe(self, event: RouterEvent, position: int, *, chained: bool = False) -> list[Problem]:
        """Judge one event and take over what it says.

        Args:
            event: as it arrived.
            position: its number in the log.
            chained: whether its hashes must be Dynamo's chain; hand-made moves have free hashes.
        """
        inner = event.event
        key = (event.worker_id, inner.dp_rank)
        stream = self.streams.get(key) or self.open(key, first_id=None)
        problems: list[Problem] = []
        cause = None
        if inner.event_id != stream.next_id and stream.next_id is not None:
            if not stream.take_hole(inner.event_id):
                cause = self._gap(stream, event, position, problems)
                if cause is None:  # a repeat leaves what is due as it was
                    stream.next_id = inner.event_id + 1
        else:
            stream.next_id = inner.event_id + 1
        data = inner.data
        if isinstance(data, Stored):
            found = self._stored(stream, event, data, chained=chained)
        elif isinstance(data, Removed):
            found = self._removed(stream, event, data)
        else:
            found = []
        for problem in found:
            problem.event, problem.position = event, position
            if cause is not None and problem.cause is None:
                problem.follows_from(cause)
        problems += found
        if isinstance(data, Cleared):
            stream.forget()
        stream.last = event
        return problems

    def _gap(self, stream: Stream, event: RouterEvent, position: int, problems: list[Problem]) -> Problem | None:
        """Note an id that was not due. Return the cause of what else the event breaks, where it opens no wound."""
        got, due = event.event.event_id, stream.next_id
        assert due is not None
        if got > due:
            missing = range(due, got)
            stream.holes.append(missing)
            known = f"{ids_text(missing)} did not arrive" + (f" after event {due - 1}" if due else "")
        elif event == stream.last:
            known = f"event {got} had arrived already"
        else:
            before = "another event" if got == due - 1 else "event"
            known = f"{before} {due - 1} had arrived: ids went backwards, as after a restart that nobody announced"
        problem = Problem(
            "event_id_gap", stream.worker_id, stream.dp_rank, known, f"event {due} was due", event, position
        )
        problems.append(problem)
        if event == stream.last:  # a repeat of the event before: only its own consequences follow from it
            self.fold(stream, problem)
            return problem
        self._wound(stream, problem)
        return None

    def _stored(self, stream: Stream, event: RouterEvent, data: Stored, *, chained: bool) -> list[Problem]:
        hashes, parent = data.block_hashes, data.parent_hash
        held = stream.tiers.setdefault(event.storage_tier, {})
        problems = [*self._unsound(stream, held, data)]
        if chained and (wrong := _wrong_hash(stream, event, data)) is not None:
            problem = self._problem("wrong_hash", stream, wrong[1], wrong[2], (wrong[0],))
            problem.is_error = stream.prefix_closed
            if problems and problems[0].cause is None:  # the parent is wrong, so the chain is: one fault
                problem.follows_from(problems[0])
            problems.append(problem)
        if hashes and not problems and all(map(held.__contains__, hashes)):
            known = f"{blocks_text(hashes)} {'is' if len(hashes) == 1 else 'are'} held already"
            problem = self._problem(
                "duplicate_store", stream, known, "a block that is held is not stored again", hashes
            )
            problems.append(self.fold(stream, problem, every=True))
        if parent is not None and parent not in held and not stream.holds(parent):
            stream.implied.add(parent)
        held.update(zip(hashes, data.tokens_hashes, strict=True))
        stream.said.append(event)
        stream.settle(hashes)
        if stream.wound is not None:
            stream.wound.named.update(hashes)
            if parent is not None:
                stream.wound.named.add(parent)
        return problems

    def _unsound(self, stream: Stream, held: dict[int, int], data: Stored) -> Iterator[Problem]:
        """The one of invalid_block and parent_block_not_found that a Stored breaks, if any."""
        hashes, parent = data.block_hashes, data.parent_hash
        twice = len(set(hashes)) != len(hashes)
        if (twice or parent in hashes) and (own := _own_parent(hashes, parent)) is not None:
            known = f"block {block_text(own)} is named as its own parent"
            yield self._problem("invalid_block", stream, known, "a block's parent is another block", (own,))
            return
        if twice or not held.keys().isdisjoint(hashes):
            had = {**dict(zip(hashes[::-1], data.tokens_hashes[::-1], strict=True)), **held} if twice else held
            for block, local in zip(hashes, data.tokens_hashes, strict=True):
                if had.get(block, local) != local:
                    known = f"block {block_text(block)} is held with local hash {block_text(had[block])}"
                    right = f"one block hash has one local hash, not {block_text(local)} too"
                    yield self.fold(stream, self._problem("invalid_block", stream, known, right, (block,)))
                    return
        if parent is not None and parent not in held and not stream.holds(parent):
            right = "the parent is a block that this worker and rank holds, or none for a root"
            problem = self._problem("parent_block_not_found", stream, stream.history(parent), right, (parent,))
            yield self.fold(stream, problem)

    def _removed(self, stream: Stream, event: RouterEvent, data: Removed) -> list[Problem]:
        hashes = data.block_hashes
        pop = stream.tiers.setdefault(event.storage_tier, {}).pop
        popped = list(map(pop, hashes, repeat(None)))
        unknown: list[int] = []
        if None in popped:
            pairs = zip(hashes, popped, strict=True)
            unknown = [block for block, local in pairs if local is None and block not in stream.implied]
        right = "a Removed names blocks that are held"
        problems = [
            self.fold(stream, self._problem("block_not_found", stream, stream.history(part[0]), right, part))
            for part in self._parts(stream, unknown)
        ]
        stream.said.append(event)
        stream.settle(hashes)
        if stream.wound is not None:
            stream.wound.named.update(hashes)
        return problems

    # ------------------------------------------------------------------------------------------- comparisons

    def missed(self, key: StreamKey, event_id: int, cause: Problem) -> None:
        """An event is known not to have arrived, and `cause` says why: its id is no gap, its blocks are unknown."""
        stream = self.streams.get(key) or self.open(key, first_id=None)
        stream.holes.append(range(event_id, event_id + 1))
        stream.next_id = event_id + 1
        self._wound(stream, cause)

    def recovered(self, said: Stream, ids: range) -> None:
        """A worker and rank was asked for some event ids, up to the newest, and has told them: they have arrived.

        Args:
            said: all that it has said, in the order in which it did.
            ids: what it was asked for.
        """
        key = (said.worker_id, said.dp_rank)
        stream = self.streams.get(key) or self.open(key, first_id=None)
        stream.recover(said, ids)

    def told_before(self, event: RouterEvent) -> bool:
        """Whether an event that arrives was told by a recovery, so that it says nothing new. It is so once."""
        stream = self.streams.get((event.worker_id, event.event.dp_rank))
        return stream is not None and stream.take_late(event.event.event_id)

    def published(self, key: StreamKey, next_id: int, position: int) -> list[Problem]:
        """Compare with what the worker says that it published: ids below `next_id`, all of which are due by now."""
        stream = self.streams.get(key) or self.open(key, first_id=0)
        due = next_id - 1 if stream.next_id is None else stream.next_id  # what came before the first is unknown
        if next_id <= due:
            return []
        missing = range(due, next_id)
        problem = self._problem(
            "event_id_gap",
            stream,
            f"the worker published ids up to {next_id - 1}; {ids_text(missing)} did not arrive",
            "what is published arrives",
            (),
        )
        problem.position = position
        stream.holes.append(missing)
        stream.next_id = next_id
        self._wound(stream, problem)
        return [problem]

    def drift(
        self, key: StreamKey, resident: Collection[int], position: int, tier: StorageTier = StorageTier.DEVICE
    ) -> list[Problem]:
        """Compare what the events say is held with what the engine holds. A block is reported once.

        Args:
            key: (worker_id, dp_rank).
            resident: block hashes that the engine holds in the tier.
            position: number of the last event so far, for the record.
            tier: which tier.
        """
        stream = self.streams.get(key) or self.open(key, first_id=None)
        problems = []
        for differing, said, had in self.differences(stream, resident, tier):
            fresh = [block for block in differing if block not in stream.drifted]
            stream.drifted.update(fresh)
            for part in self._parts(stream, fresh):
                problem = self.drift_problem(stream, part, said, had)
                problem.position = position
                problems.append(self.fold(stream, problem))
        return problems

    def drift_problem(self, stream: Stream, blocks: tuple[int, ...], right: str, had: str) -> Problem:
        """The record of blocks of which stream and engine say different things."""
        known = f"{had} {blocks_text(blocks)}; to the events, {stream.history(blocks[0])}"
        return self._problem("engine_drift", stream, known, right, blocks)

    @staticmethod
    def differences(
        stream: Stream, resident: Collection[int], tier: StorageTier = StorageTier.DEVICE
    ) -> list[tuple[list[int], str, str]]:
        """Blocks of which stream and engine say different things: (blocks, what would be right, what the engine has)."""
        held = stream.tiers.get(tier, {})
        there = resident if isinstance(resident, (set, frozenset, dict)) else set(resident)
        extra = [block for block in held if block not in there]
        silent = [block for block in resident if block not in held and block not in stream.implied]
        return [
            (extra, "what the engine drops is published as Removed", "the engine does not hold"),
            (silent, "what the engine caches is published as Stored", "the engine holds"),
        ]

    # ----------------------------------------------------------------------------------------------- wounds

    @staticmethod
    def fold(stream: Stream, problem: Problem, *, every: bool = False) -> Problem:
        """List the problem under the stream's wound if it names no block that is known.

        Args:
            stream: whose wound.
            problem: what was found.
            every: it takes all its blocks to be known, not the telling one alone.
        """
        wound = stream.wound
        if wound is not None and problem is not wound.cause:
            known = wound.named.issuperset(problem.blocks) if every else problem.block in wound.named
            if not problem.blocks or not known:
                problem.follows_from(wound.cause)
        return problem

    def _wound(self, stream: Stream, cause: Problem) -> None:
        """Every block is unknown from here on. A second cause is listed under the first, and blocks are unknown anew."""
        self.fold(stream, cause)
        stream.wound = Wound(cause if cause.cause is None else cause.cause)

    @staticmethod
    def _parts(stream: Stream, blocks: Iterable[int]) -> list[tuple[int, ...]]:
        """Blocks that are known apart from those that a wound makes unknown: only the latter have a cause."""
        blocks = tuple(blocks)
        if stream.wound is None:
            return [blocks] if blocks else []
        named = stream.wound.named
        known = tuple(block for block in blocks if block in named)
        unknown = tuple(block for block in blocks if block not in named)
        return [part for part in (known, unknown) if part]

    @staticmethod
    def _problem(rule: str, stream: Stream, known: str, right: str, blocks: tuple[int, ...]) -> Problem:
        return Problem(rule, stream.worker_id, stream.dp_rank, known, right, blocks=blocks)


def _own_parent(hashes: tuple[int, ...], parent: int | None) -> int | None:
    """The first block that stands right after itself, if any; a longer cycle is legal (DESIGN 7: multi_lru)."""
    for block in hashes:
        if block == parent:
            return block
        parent = block
    return None


def _wrong_hash(stream: Stream, event: RouterEvent, data: Stored) -> tuple[int, str, str] | None:
    """The first block whose hashes do not follow from what came with it: (block, known, right)."""
    tokens, size = event.token_ids, stream.block_size
    if tokens is not None and size is not None and all(len(ids) == size for ids in tokens):
        flat = [token for ids in tokens for token in ids]
        for block, local, right in zip(data.block_hashes, data.tokens_hashes, block_hashes(flat, size), strict=False):
            if local != right:
                return (
                    block,
                    f"block {block_text(block)} has local hash {block_text(local)}",
                    f"its {size} tokens have local hash {block_text(right)}",
                )
    rights = sequence_hashes(data.tokens_hashes, parent=data.parent_hash)
    if tuple(rights) != data.block_hashes:
        for block, local, right in zip(data.block_hashes, data.tokens_hashes, rights, strict=True):
            if block != right:
                parent = "no parent" if data.parent_hash is None else f"parent {block_text(data.parent_hash)}"
                return (
                    block,
                    f"block {block_text(block)} is stored with local hash {block_text(local)}; the event has {parent}",
                    f"the chain of parent and local hash is {block_text(right)}",
                )
    return None
