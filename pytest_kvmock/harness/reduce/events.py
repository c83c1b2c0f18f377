"""Reduction of arrived events: fewer events, then fewer blocks in them, then small numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.engines.backends import EngineProfile
from pytest_kvmock.harness.reduce.mending import Mender, Renamer, Roots
from pytest_kvmock.harness.reduce.pieces import Piece, blocks_of, longest_stored, names_blocks, parents_of, pieces_of
from pytest_kvmock.harness.reduce.program import NotReduced, Reproduction, SinkKind
from pytest_kvmock.harness.reduce.search import Spent, minimal
from pytest_kvmock.harness.user_sink import FIRST_SINK_WORKER
from pytest_kvmock.oracle.hygiene.entries import Arrival, BatchesLost, NoEvent, WorkerRemoved
from pytest_kvmock.oracle.hygiene.rules import EVENT_ID_GAP, WRONG_HASH
from pytest_kvmock.oracle.hygiene.text import NO_WORKER
from pytest_kvmock.values.events import Cleared, KvCacheEvent, RouterEvent, SparseStored, StorageTier, Stored
from pytest_kvmock.values.prompt_keys import part_of

if TYPE_CHECKING:
    from pytest_kvmock.harness.reduce.replay import Replayer
    from pytest_kvmock.values.events import StreamKey
    from pytest_kvmock.values.prompt_keys import EventExtra

# Theory of operation
#
# A part of a stream must not break rules that the full stream did not break. So a cut is repaired: ids are counted
# again (with the jumps of the full stream, if ids matter), the child of a block that is left out is stored under that
# block's parent, and blocks that are not held are not removed. Only a wrong hash cannot be repaired in this way, as it
# is judged by its parent. There, blocks are cut from the front and the back of an event, and the first remaining block
# becomes a root whose local hash equals its block hash.
#
# Nearly always the events that name the block of the problem, or one of its ancestors, are enough. They are tried first
# and the full stream last, so that a stream of a million events costs no more than a short one.


_WINDOWS: Final = (16, 64, 256)
_ROOMS: Final = (16, 64, 256, 1024)
"""Tried sizes of a queue that overflows: numbers of filler events before, between or after the events that matter."""


@dataclass(frozen=True, slots=True)
class _Look:
    """How the pieces are written: the parts of the original that are kept or simplified.

    A bare event has neither a tier nor extra data; `without` names the keys of the extra data that are left out.
    """

    with_ids: bool
    bare: bool = False
    tokens: bool = True
    renamed: bool = False
    profile: EngineProfile | None = None
    made: bool = True
    without: frozenset[str] = frozenset()


class EventCutter:
    """Finds the fewest events that break a rule.

    Args:
        whole: the failing test as a program without steps: breach, backend, profile, workers, index.
        arrivals: the arrivals at the router, up to the event that shows the problem.
        replayer: replays programs.
        kinds: the kind of sink that can publish the events of a worker or sink, by worker id.
        sinks: the worker ids of sinks.
        later: the later arrivals at the router, if they may contain the cause.

    Attributes:
        best: the smallest program so far that breaks the rule; None before the first.
    """

    def __init__(
        self,
        whole: Reproduction,
        arrivals: Sequence[Arrival],
        replayer: Replayer,
        kinds: Mapping[int, SinkKind],
        *,
        sinks: Collection[int],
        later: Sequence[Arrival] = (),
    ) -> None:
        self.best: Reproduction | None = None
        self._whole = whole
        self._replayer = replayer
        self._kinds = kinds
        self._sinks = sinks
        self._chained = whole.rule == WRONG_HASH
        self._arrivals = arrivals
        self._later = later
        self._parents = parents_of([*arrivals, *later])
        self._look = _Look(with_ids=whole.rule == EVENT_ID_GAP)

    def cut(self) -> Reproduction:
        """Search.

        Raises:
            NotReduced: no program was found that breaks the rule again.
        """
        try:
            if not self._filled():
                pieces = self._start()
                self._make_plain(pieces)  # early, in case the search ends at its limit
                pieces = self._minimal(pieces)
                self._make_plain(pieces)
                self._minimal(pieces)
        except Spent:
            if self.best is None:
                raise NotReduced("no part of the events broke the rule again before the limit was reached") from None
            return self.best
        assert self.best is not None
        return self.best.replace(complete=True)

    # ----------------------------------------------------------------------------------------------- searching

    def _attempt(self, pieces: Sequence[Piece]) -> bool:
        program = self._program(pieces, self._look)
        if program is None or not program.steps or not self._replayer.breaks(program):
            return False
        self.best = program
        return True

    def _start(self) -> Sequence[Piece]:
        """Return the first part that breaks the rule, tried from the likeliest part to the full stream."""
        pieces = [*pieces_of(self._arrivals)]
        if not pieces:
            raise NotReduced("no event arrived")
        own = self._own(pieces)
        for with_ids in (True,) if self._look.with_ids else (False, True):
            self._look = replace(self._look, with_ids=with_ids)
            for part in self._parts(pieces, own):
                if self._attempt(part):
                    return part
        raise NotReduced("replayed, the events do not break the rule again")

    def _parts(self, pieces: list[Piece], own: list[Piece]) -> Iterator[Sequence[Piece]]:
        block = self._whole.breach.block
        # A part of the event that shows the problem must be kept; for a gap, also of the event before it.
        shows = [*pieces[-1].blocks[:1], *(own[-2].blocks[:1] if block is None and len(own) > 1 else ())]
        named = [] if block is None else [block]
        for blocks in ((*shows, *named), (*shows, *named, *pieces[-1].blocks)):
            line = self._line(blocks)
            for among in (own, pieces):
                kept = [piece.only(line) for piece in among]
                yield [piece for piece in kept if piece.blocks or not names_blocks(piece)]
        if self._whole.sync != "auto" or self._whole.aflush is not None:
            # A late comparison may fail because a queue overflows: try the events before the last that names the block.
            end = next((n for n in range(len(own), 0, -1) if block in own[n - 1].blocks), len(own))
            for size in _WINDOWS:
                yield own[max(0, end - size) : end]
        yield own
        yield pieces
        if self._later:
            everything = [*pieces_of([*self._arrivals, *self._later])]
            yield self._own(everything)
            yield everything

    def _own(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return the pieces of the problem's worker and rank; all pieces if it is about no worker (a failed flush)."""
        worker = self._whole.breach.worker
        return [piece for piece in pieces if worker in (NO_WORKER, piece.key)]

    def _line(self, blocks: Iterable[int]) -> frozenset[int]:
        """Return blocks and their ancestors."""
        parents = self._parents.get(self._whole.breach.worker, {})
        line: set[int] = set()
        for block in blocks:
            current: int | None = block
            while current is not None and current not in line:
                line.add(current)
                current = parents.get(current)
        return frozenset(line)

    def _minimal(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Leave out events, then blocks from all events, then blocks from single events, until nothing more can be left
        out.
        """
        before = -1
        while before != (before := sum(1 + len(piece.blocks) for piece in pieces)):
            pieces = minimal(pieces, self._attempt)
            named = [*dict.fromkeys(block for piece in pieces for block in piece.blocks)]
            whole = pieces

            def only(blocks: Sequence[int], whole: Sequence[Piece] = whole) -> list[Piece]:
                return [piece.only(frozenset(blocks)) for piece in whole]

            pieces = only(minimal(named, lambda blocks: self._attempt(only(blocks))))
            spots = [(i, place) for i, piece in enumerate(pieces) for place in piece.places or ()]

            def at(spots: Sequence[tuple[int, int]], whole: Sequence[Piece] = pieces) -> list[Piece]:
                places: dict[int, list[int]] = {}
                for i, place in spots:
                    places.setdefault(i, []).append(place)
                return [replace(piece, places=tuple(places.get(i, ()))) for i, piece in enumerate(whole)]

            pieces = at(minimal(spots, lambda spots: self._attempt(at(spots))))
            pieces = [piece for piece in pieces if piece.blocks or not names_blocks(piece)]
        return pieces

    def _make_plain(self, pieces: Sequence[Piece]) -> None:
        """Simplify how the pieces are written, as far as they still break the rule."""
        size = self._whole.profile.block_size
        self._try_look(pieces, bare=True, tokens=False)
        if not self._look.bare:
            self._try_look(pieces, tokens=False)
            for name in dict.fromkeys(name for piece in pieces for name in (piece.event and piece.event.extra) or ()):
                self._try_look(pieces, without=self._look.without | {name})
        self._try_look(pieces, made=False)
        self._try_look(pieces, profile=EngineProfile(block_size=size))
        if not self._look.tokens:  # tokens come in blocks of that size
            self._try_look(pieces, profile=EngineProfile())
        if not self._chained:
            self._try_look(pieces, renamed=True)

    def _try_look(self, pieces: Sequence[Piece], **fields: Any) -> None:
        before, self._look = self._look, replace(self._look, **fields)
        if not self._attempt(pieces):
            self._look = before

    # ------------------------------------------------------------------------------------------------- filling

    def _filled(self) -> bool:
        """Whether a full queue breaks the rule: one or two events that matter, among any others.

        Then `best` has as few other events as possible. They are all of one form, so that a test can write hundreds of
        them as a range.
        """
        if (self._whole.sync == "auto" and self._whole.aflush is None) or not self._whole.with_index:
            return False
        before, self._look = (
            self._look,
            replace(self._look, profile=EngineProfile(), made=False, bare=True, tokens=False),
        )
        upto = len(self._own(pieces_of(self._arrivals)))
        pieces = self._own(pieces_of([*self._arrivals, *self._later]))
        amid = [*self._amid(pieces, upto)]
        for room in dict.fromkeys(min(room, len(pieces)) for room in _ROOMS):
            roomy = EngineProfile(num_blocks=max(room + 2, EngineProfile().num_blocks))
            self._look = replace(self._look, profile=roomy)
            for kept in amid:
                for gap in range(len(kept) + 1):
                    if self._attempt(self._put(kept, gap, room)):
                        fewest = self._fewest(kept, gap, room)
                        self._try_look(fewest, profile=EngineProfile())
                        self._try_look(fewest, renamed=True)
                        return True
        self._look = before
        return False

    def _amid(self, pieces: Sequence[Piece], upto: int) -> Iterator[list[Piece]]:
        """Yield candidates for the events that matter: none, or the last one or two of a block.

        Args:
            pieces: the arrivals of the worker and rank.
            upto: the number of arrivals up to the event that shows the problem.
        """
        block = self._whole.breach.block
        if block is None:
            yield []
            block = longest_stored(pieces)
        if block is None:
            return
        own = [piece.only(frozenset([block])) for piece in pieces[:upto] if block in piece.blocks]
        yield own[-1:]
        if len(own) > 1:
            yield own[-2:]

    def _put(self, kept: Sequence[Piece], gap: int, others: int) -> list[Piece]:
        """Return the kept events with `others` filler events before, between or after them."""
        worker_id, rank = kept[0].key if kept else self._whole.breach.worker
        worker_id = max(worker_id, 0)  # -1 means no worker
        known = {block for piece in kept for block in piece.blocks}
        fresh = islice((block for block in count(1) if block not in known), others)
        events = (KvCacheEvent(block, Stored(None, (block,), (block,)), rank) for block in fresh)
        fillers = [Piece(RouterEvent(worker_id, event), 0) for event in events]
        return [*kept[:gap], *fillers, *kept[gap:]]

    def _fewest(self, kept: Sequence[Piece], gap: int, enough: int) -> list[Piece]:
        """Return the kept events with as few filler events as possible."""
        too_few = -1
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            if self._attempt(self._put(kept, gap, middle)):
                enough = middle
            else:
                too_few = middle
        return self._put(kept, gap, enough)

    # ------------------------------------------------------------------------------------------------- writing

    def _program(self, pieces: Sequence[Piece], look: _Look) -> Reproduction | None:
        """Return the program of some pieces; None if they cannot be combined."""
        steps: list[RouterEvent | NoEvent] = []
        names: dict[int, int] = {}  # worker ids in the program
        sinks: list[SinkKind] = []
        counts: dict[StreamKey, int] = {}
        taken = (piece.key[0] + 1 for piece in pieces if piece.key[0] < FIRST_SINK_WORKER)
        free = max(1, self._whole.profile.workers, *taken)
        stored: dict[StreamKey, set[int]] = {}
        for piece in pieces:
            if piece.event is not None and isinstance(piece.event.event.data, Stored):
                stored.setdefault(piece.key, set()).update(piece.blocks)
        mender = (Roots if self._chained else Mender)(self._parents, self._whole.breach.block, stored)
        for piece in pieces:
            arrival = piece.arrival
            worker_id, rank = piece.key
            if worker_id not in names:
                names[worker_id] = worker_id
                kind = self._kinds.get(worker_id, SinkKind())
                if worker_id in self._sinks or kind.chained:
                    names[worker_id] = FIRST_SINK_WORKER + len(sinks)
                    sinks.append(kind)
                elif worker_id >= FIRST_SINK_WORKER:  # these ids belong to the sinks of a program
                    names[worker_id] = free
                    free += 1
            if isinstance(arrival, WorkerRemoved):
                steps.append(arrival._replace(worker_id=names[worker_id], keys=()))
                mender.forget(piece.key)
                counts.pop(piece.key, None)
                continue
            if isinstance(arrival, BatchesLost):
                steps.append(arrival._replace(worker_id=names[worker_id], consumer=None))
                continue
            event = arrival
            tier, tokens = StorageTier.DEVICE if look.bare else event.storage_tier, event.token_ids
            data = mender.mend(piece.key, event.event.data, piece.places, on_device=tier is StorageTier.DEVICE)
            if data is None:
                return None
            if not isinstance(data, Cleared) and not data.block_hashes and blocks_of(event):
                continue
            number = counts[piece.key] = counts.get(piece.key, -1) + 1
            event_id = max(0, number + piece.jumps) if look.with_ids else number
            extra = None if look.bare else _part(event.extra, look.without)
            if not look.tokens:
                tokens = None
                if isinstance(data, Stored) and not isinstance(data, SparseStored):
                    data = Stored(data.parent_hash, data.block_hashes, data.tokens_hashes)
            if piece.places is not None:
                if tokens is not None and not isinstance(data, SparseStored):  # those of a SparseStored cover its span
                    tokens = [tokens[i] for i in piece.places]
                extra = part_of(extra, piece.places)
            steps.append(RouterEvent(names[worker_id], KvCacheEvent(event_id, data, rank), tier, tokens, extra))
        breach = self._whole.breach
        names.setdefault(NO_WORKER[0], NO_WORKER[0])
        if breach.worker[0] not in names:
            return None
        renamer = Renamer() if look.renamed else None
        if renamer is not None:
            steps = [renamer.renamed(step) for step in steps]
        block = breach.block if renamer is None or breach.block is None else renamer.blocks.get(breach.block)
        return self._whole.replace(
            breach=breach.replace(worker=(names[breach.worker[0]], breach.worker[1]), block=block),
            profile=look.profile or self._whole.profile,
            steps=tuple(steps),
            workers=tuple(
                ((names[worker_id], rank), backend)
                for (worker_id, rank), backend in self._whole.workers
                if names.get(worker_id, FIRST_SINK_WORKER) < FIRST_SINK_WORKER
            )
            * look.made,
            sinks=tuple(sinks),
            with_ids=look.with_ids,
        )


def _part(extra: EventExtra | None, without: Collection[str]) -> EventExtra | None:
    """Return the extra data of an event without some keys; None if nothing is left."""
    if not extra or not without:
        return extra
    return {name: value for name, value in extra.items() if name not in without} or None
