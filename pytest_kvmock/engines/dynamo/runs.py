"""Cached blocks in runs: the quick form of `lineage` and `lru`, for managers that only get moves of schedulers.

One subject: a structure, and the moves on it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Final
from uuid import UUID

from pytest_kvmock.engines.base.eviction_policy import Slot
from pytest_kvmock.engines.dynamo.move_checks import are_plhs
from pytest_kvmock.engines.dynamo.pool import BlockPool, Used
from pytest_kvmock.values.hashed_blocks import part_of
from pytest_kvmock.values.moves import Block, Promote, Use
from pytest_kvmock.values.plh import (
    MAX_POSITION,
    LineageHashes,
    are_lineage,
    lineage_hash,
    lineage_hashes,
    lineage_position,
)

# Theory of operation
#
# Schedulers hold the blocks of a request from the first block on, and free them from the last block on. As long as
# every request does so, a cache is simple:
#
# 1. The cached blocks are a forest, and a block's lineage hash follows from the names on the path to it.
# 2. The parent of a block in use is also in use. So an inactive block has only inactive children, which became inactive
#    before it.
# 3. Hence the block that became inactive longest ago is always a leaf: `lineage` and `lru` evict the same blocks in the
#    same order, and one queue is enough.
#
# A *run* is a piece of a chain whose blocks have the same references, with children below its last block only. It is
# split where a request leaves it, and where a free ends inside it. One comparison of lists compares a request's names
# with a run's names. References and places in the queue belong to a run, not to a block. The run at the front of the
# queue is evicted from its last block on.
#
# Each move is checked before anything changes. A move that breaks a rule, or puts two blocks at one place of the forest
# (their names share the bits that every lineage hash keeps), is not carried out here: the manager switches to blocks in
# slots for good (`CachedSlots`). The two forms differ only in speed.
#
# Runs are found by these bits of a name, not by the whole name. So one look-up finds both the cached names and the
# names that could collide, and no lineage hash is stored.
#
# Blocks may be freed one by one, as real schedulers do. The run in which this happens is open, and is split only when
# another operation comes before its last block is freed.

_BITS: Final = 2**51 - 1  # the bits of a sequence hash that its lineage hash keeps at any position


class ChainRun:
    """A piece of a chain.

    Attributes:
        names: its blocks, in order; at least one.
        parent: the run whose last block is the parent of the first one; None for a root.
        position: number of blocks before the first one.
        refs: references to each block.
        children: number of runs whose parent is this one.
        held_below: sum of the references of these children.
        numbers: the number of each block, from 0, by name, also of some blocks that were evicted since; None until it
            is first needed.
    """

    __slots__ = ("children", "held_below", "names", "numbers", "parent", "position", "refs")

    def __init__(self, names: list[int], parent: ChainRun | None, position: int, refs: int) -> None:
        self.names = names
        self.parent = parent
        self.position = position
        self.refs = refs
        self.children = 0
        self.held_below = 0
        self.numbers: dict[int, int] | None = None

    @property
    def end(self) -> int:
        """Position of a block below the last one."""
        return self.position + len(self.names)


class Runs:
    """The blocks of a manager, in runs.

    Args:
        pool: counts slots and operations only; the blocks are kept here.
        partials: the manager's partial blocks in use, which are changed here.

    Attributes:
        references: number of references to full blocks.
    """

    def __init__(self, pool: BlockPool, partials: dict[UUID, Slot]) -> None:
        self._pool = pool
        self._partials = partials
        self._runs: dict[int, ChainRun] = {}  # the run of each block, by the low bits of its name
        self._idle: OrderedDict[ChainRun, None] = OrderedDict()  # runs without references, in the order of eviction
        self._num_idle = 0
        self._open: ChainRun | None = None  # its blocks from number `_open_from` on were freed one by one
        self._open_from = 0
        self.references = 0

    # ------------------------------------------------------------------------------------------------- queries

    @property
    def num_inactive(self) -> int:
        """Cached blocks that no request uses."""
        if self._open is not None:
            self._settle()
        return self._num_idle

    def blocks(self) -> dict[int, ChainRun]:
        """Return the run of each block, in the order in which the blocks were stored."""
        self._settle()
        names = {name & _BITS: name for run in set(self._runs.values()) for name in run.names}
        return {names[key]: run for key, run in self._runs.items()}

    def held(self) -> dict[int, int]:
        """Return the number of references to each block in use."""
        return {name: run.refs for name, run in self.blocks().items() if run.refs}

    def inactive(self) -> list[int]:
        """Return the cached blocks that no request uses, in the order in which they would be evicted."""
        self._settle()
        return [name for run in self._idle for name in reversed(run.names)]

    def resident(self) -> Collection[int]:
        """Return the cached blocks, in the order in which they were stored."""
        return self.blocks().keys()

    def find(self, name: int) -> tuple[ChainRun, int] | None:
        """Return the run that has a block, and the block's number in it; None if it is not cached."""
        try:
            run = self._runs.get(name & _BITS)
        except TypeError:  # not a block
            return None
        if run is None:
            return None
        if run.numbers is None:
            run.numbers = {of: number for number, of in enumerate(run.names)}
        number = run.numbers.get(name)
        return None if number is None else (run, number)

    def references_of(self, name: int) -> int:
        """Count the references to one full block."""
        self._settle()
        found = self.find(name)
        return 0 if found is None else found[0].refs

    def plh_of(self, name: int) -> int | None:
        """Return the lineage hash of a block; None if it is not cached."""
        found = self.find(name)
        return None if found is None else self._plh(*found)

    def has_plh(self, plh: int) -> bool:
        """Return whether a block is cached under exactly this lineage hash."""
        if not are_plhs((plh,)):
            return False
        run = self._runs.get(plh & _BITS)
        if run is None:
            return False
        number = lineage_position(plh) - run.position
        return 0 <= number < len(run.names) and plh == self._plh(run, number)

    def overlap(self, blocks: Sequence[Block], plhs: Sequence[int]) -> int:
        """Count the leading blocks that are in use by this name, or cached under this lineage hash."""
        count, most = 0, min(len(blocks), len(plhs))
        last: ChainRun | None = None
        are_known = type(plhs) is LineageHashes and plhs.are_of(blocks[:most], None, 0)  # type: ignore[arg-type]  # full ones
        while count < most:  # run by run, as in `use`
            name = blocks[count]
            run = None if isinstance(name, UUID) else self._runs.get(name & _BITS)
            if run is None and are_known and not isinstance(name, UUID):
                return count  # the lineage hash has the same bits as the name, and no run has them
            if run is None or run.parent is not last:
                break
            end = min(count + len(run.names), most)
            names = run.names[: end - count]
            parent = None if last is None else last.names[-1]
            if blocks[count:end] != names:
                break
            if not are_known and plhs[count:end] != lineage_hashes(names, parent=parent, start=run.position):
                break
            count, last = end, run
        while count < most:
            name = blocks[count]
            if not self.has_plh(plhs[count]) and (isinstance(name, UUID) or not self.references_of(name)):
                break
            count += 1
        return count

    def _plh(self, run: ChainRun, number: int) -> int:
        if number:
            parent: int | None = run.names[number - 1]
        else:
            parent = None if run.parent is None else run.parent.names[-1]
        return lineage_hash(run.names[number], parent, run.position + number)

    def plhs(self, run: ChainRun) -> list[int]:
        """Return the lineage hash of each block of a run."""
        parent = None if run.parent is None else run.parent.names[-1]
        return lineage_hashes(run.names, parent=parent, start=run.position)

    # ------------------------------------------------------------------------------------------------- changes

    def _split(self, run: ChainRun, number: int) -> ChainRun:
        """Split a run before its block `number`, which is not its first; return the new run above.

        The lower part remains the old run: it keeps the place in the queue, and the children.
        """
        names = run.names[:number]
        above = ChainRun(names, run.parent, run.position, run.refs)
        above.children = 1
        above.held_below = run.refs
        del run.names[:number]
        run.numbers = None
        run.parent = above
        run.position += number
        self._runs.update(dict.fromkeys([name & _BITS for name in names], above))
        return above

    def _hold(self, run: ChainRun) -> None:
        if not run.refs:
            count = len(run.names)
            self._idle.pop(run, None)  # the upper part of a split run is not in it
            self._num_idle -= count
            self._pool.match_hashes_requested += count
            self._pool.match_blocks_returned += count
        run.refs += 1
        if run.parent is not None:
            run.parent.held_below += 1

    def _release(self, run: ChainRun) -> None:
        run.refs -= 1
        if run.parent is not None:
            run.parent.held_below -= 1
        if not run.refs:
            self._idle[run] = None
            self._num_idle += len(run.names)

    def _is_held(self, run: ChainRun) -> bool:
        """Return whether a reference to a run can be dropped: it has one that no block below it needs."""
        return run.refs > 1 or (run.refs == 1 and not run.held_below)

    def _settle(self) -> None:
        """Close the open run: release the blocks that were freed one by one."""
        run = self._open
        if run is not None:
            self._open = None
            if self._open_from < len(run.names):
                self._split(run, self._open_from)
                self._release(run)

    def _append(self, names: list[int], keys: list[int], parent: ChainRun | None, position: int) -> None:
        """Store blocks below a run that is in use, with one reference each."""
        if parent is not None and parent.refs == 1 and not parent.children:
            parent.names += names
            parent.numbers = None
            run = parent
        else:
            run = ChainRun(names.copy(), parent, position, 1)
            if parent is not None:
                parent.children += 1
                parent.held_below += 1
        self._runs.update(dict.fromkeys(keys, run))
        self.references += len(names)

    def _give_back(self, partial: UUID) -> None:
        del self._partials[partial]
        self._pool.count_given_back(1)

    def _allocate(self, count: int, removed: list[int | None]) -> int:
        """Take empty slots, then evict for the rest; return how many slots were taken."""
        taken = self._pool.count_taken(count)
        while taken < count and self._idle:
            run = next(iter(self._idle))
            names, wanted = run.names, count - taken
            if len(names) <= wanted:
                del self._idle[run]
                if run.parent is not None:
                    run.parent.children -= 1
                gone = names[::-1]
            else:
                gone = names[: -wanted - 1 : -1]
                del names[-wanted:]
            for key in [name & _BITS for name in gone]:
                del self._runs[key]
            removed += gone
            taken += len(gone)
            self._num_idle -= len(gone)
        return taken

    def _below(self, name: int | None) -> tuple[ChainRun | None, int] | None:
        """Return the run that ends with this block, and the position below it; None if no run in use does."""
        if name is None:
            return None, 0
        run = self._runs.get(name & _BITS)
        if run is None or not run.refs or run.names[-1] != name:
            return None
        return run, run.end

    # --------------------------------------------------------------------------------------------------- moves

    def use(self, move: Use, leading: int) -> Used | None:
        """Carry out a Use; all but its lineage hashes was checked. See `Form`."""
        if self._open is not None:
            self._settle()
        blocks, parent = move.blocks, move.parent
        assert not isinstance(parent, UUID)
        partial: UUID | None = None
        if leading < len(blocks):
            last_block = blocks[leading]
            if leading + 1 < len(blocks) or not isinstance(last_block, UUID):
                return None
            partial = last_block
        names: list[int] = list(blocks[:leading])  # type: ignore[arg-type]  # all full
        below = self._below(parent) if names else (None, 0)
        if below is None or below[1] + leading > MAX_POSITION:
            return None
        if not are_lineage(move.plhs, names, parent=parent, start=below[1]):
            return None
        runs = self._runs
        held: list[ChainRun] = []
        hits = rest = 0  # `rest`: hits in the last run, if only a part of it is hit
        last, position = below
        while hits < leading:
            run = runs.get(names[hits] & _BITS)
            if run is None:
                break
            own = run.names
            if run.parent is not last or own[0] != names[hits]:
                return None
            end = hits + len(own)
            held.append(run)
            if own == names[hits:end]:
                hits, last = end, run
                continue
            rest, most = 1, min(leading - hits, len(own))
            while rest < most and own[rest] == names[hits + rest]:
                rest += 1
            hits += rest
            break
        new = names[hits:]
        keys = [name & _BITS for name in new]
        if new and (len(set(keys)) < len(keys) or not runs.keys().isdisjoint(keys)):
            return None

        if rest:
            last = held[-1] = self._split(held[-1], rest)
        for run in held:
            self._hold(run)
        self.references += hits
        used = Used(names[hits - 1] if hits else parent)
        if new:
            count = self._allocate(len(new), used.removed)
            is_refused = count < len(new)
            self._pool.match_hashes_requested += count + is_refused
            if is_refused:
                new, keys, partial = new[:count], keys[:count], None
            if new:
                self._append(new, keys, last, position + hits)
                served = hits + len(new)
                used.stored = new
                used.local_hashes = list(move.local_hashes[hits:served]) or [0] * len(new)
                if move.token_ids is not None:  # one for each full block
                    used.token_ids = part_of(move.token_ids, hits, served)
        used.served = hits + len(new)
        if partial is not None and (partial in self._partials or self._allocate(1, used.removed)):
            self._partials.setdefault(partial, Slot())
            used.served += 1
        return used

    def deref(self, blocks: Sequence[Block]) -> bool:
        """Carry out a Deref; see `Form`."""
        try:
            if len(blocks) != 1:
                return self._deref_many(blocks)
            run, start = self._open, self._open_from
            if run is None or start == 1 or run.names[start - 1] != blocks[0]:
                return self._deref_one(blocks[0])
        except TypeError:  # not a list, or not a block
            return False
        self._open_from = start - 1
        self.references -= 1
        return True

    def _deref_many(self, blocks: Sequence[Block]) -> bool:
        if self._open is not None:
            self._settle()
        partials: list[UUID] = []
        while len(partials) < len(blocks) and isinstance(block := blocks[len(partials)], UUID):
            partials.append(block)
        names: list[int] = list(blocks[len(partials) :])  # type: ignore[arg-type]  # anything else is refused below
        if partials and (len(set(partials)) < len(partials) or not self._partials.keys() >= set(partials)):
            return False
        runs: list[ChainRun] = []
        start = count = 0
        while start < len(names):
            run = self._runs.get(names[start] & _BITS)
            if run is None or not run.refs or run in runs:
                return False
            count = min(len(run.names), len(names) - start)
            if names[start : start + count] != run.names[: -count - 1 : -1]:
                return False
            runs.append(run)
            start += count
        held_below = {run: run.held_below for run in runs}
        for run in runs:
            if run.refs == 1 and held_below[run]:
                return False
            if run.parent in held_below:
                held_below[run.parent] -= 1
        if runs and count < len(runs[-1].names):
            self._split(runs[-1], len(runs[-1].names) - count)
        for run in runs:
            self._release(run)
        self.references -= len(names)
        for partial in partials:
            self._give_back(partial)
        return True

    def _deref_one(self, block: Block) -> bool:
        run, start = self._open, self._open_from
        if run is None or run.names[start - 1] != block:
            self._settle()
            if isinstance(block, UUID):
                if block not in self._partials:
                    return False
                self._give_back(block)
                return True
            run = self._runs.get(block & _BITS)
            if run is None or run.names[-1] != block or not self._is_held(run):
                return False
            self._open, start = run, len(run.names)
        self.references -= 1
        self._open_from = start = start - 1
        if not start:
            self._release(run)
            above = self._open = run.parent if run.parent is not None and self._is_held(run.parent) else None
            self._open_from = 0 if above is None else len(above.names)
        return True

    def promote(self, move: Promote) -> bool | None:
        """Carry out a Promote that was checked; see `Form`."""
        self._settle()
        name = move.block
        below = self._below(move.parent)
        if below is None or below[1] >= MAX_POSITION or move.plh != lineage_hash(name, move.parent, below[1]):
            return None
        run = self._runs.get(name & _BITS)
        if run is not None and (run.parent is not below[0] or run.names[0] != name):
            return None
        if run is None:
            del self._partials[move.partial]  # its slot stays, under the new name
            self._pool.match_hashes_requested += 1
            self._append([name], [name & _BITS], *below)
            return True
        self._give_back(move.partial)
        self._hold(run if len(run.names) == 1 else self._split(run, 1))
        self.references += 1
        return False

    def clear(self) -> None:
        """Drop all blocks; none is in use."""
        self._pool.count_given_back(len(self._runs))
        self._runs.clear()
        self._idle.clear()
        self._num_idle = 0
