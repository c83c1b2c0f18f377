"""The blocks of a manager, one in each slot: the form that handles every special case, and asks the eviction policy.

One subject: the effects of each move on slots, names and references.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from uuid import UUID

from pytest_kvmock.engines.base.eviction_policy import Slot
from pytest_kvmock.engines.dynamo import move_checks
from pytest_kvmock.engines.dynamo.names import Names
from pytest_kvmock.engines.dynamo.pool import BlockPool, Used
from pytest_kvmock.engines.dynamo.runs import Runs
from pytest_kvmock.values.events import value_text
from pytest_kvmock.values.hashed_blocks import part_of
from pytest_kvmock.values.moves import Block, Promote, Use

# Theory of operation
#
# There are three identities. Moves and events name blocks by sequence hash, the pool caches them by lineage hash (PLH),
# and a slot is the place of a block. Reuse is decided by PLH, so a slot that was stored under one sequence hash may be
# held under others with the same PLH; its Removed names the first. `Names` maps blocks to slots. Nearly always a slot
# is held by its own name only: then a Use takes its cached blocks in bulk, and then its new blocks in bulk. While
# aliases (other names) exist, and wherever cached blocks come after new ones, blocks are taken one by one. `Used` in
# pool.py has the events of a Use and their times.


class Pin:
    """Blocks of the device that stay active without a request, until `unpin`."""

    __slots__ = ("is_open", "numbers")

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers  # its aliases
        self.is_open = True

    def __repr__(self) -> str:
        return f"<Pin of {len(self.numbers)} blocks{'' if self.is_open else ', dropped'}>"


class CachedSlots:
    """The full blocks of a manager, each in a slot.

    Args:
        backend: name of the manager's behaviour, for errors.
        pool: has the slots, and the eviction policy.
        partials: the manager's partial blocks in use, which are changed here.
        runs: the previous form of the blocks; None if there was none.

    Attributes:
        names: the names that hold slots.
        references: number of references to full blocks.
        makes_room: whether a Use that finds no empty slot may evict. False with an offload engine, because evicted
            blocks make no room at once.
    """

    def __init__(self, backend: str, pool: BlockPool, partials: dict[UUID, Slot], runs: Runs | None = None) -> None:
        self._backend = backend
        self._pool = pool
        self._partials = partials
        self.names = Names()
        self.references = 0
        self.makes_room = True
        self._num_inactive = 0
        self._freed: list[Slot] = []  # inactive slots that are not in the policy yet
        self._last_pin = 0  # numbers of pins go down from -1, so they never equal a block's name
        if runs is not None:
            self._take_over(runs)

    def _take_over(self, runs: Runs) -> None:
        own, registered, policy = self.names.own, self._pool.registered, self._pool.inactive
        blocks = runs.blocks()
        plhs = {name: plh for run in set(blocks.values()) for name, plh in zip(run.names, runs.plhs(run), strict=True)}
        for name, run in blocks.items():
            own[name] = registered[plhs[name]] = slot = Slot()
            slot.name, slot.plh, slot.refs = name, plhs[name], run.refs
        policy._on_register(list(own.values()))
        policy.insert([own[name] for name in runs.inactive()])
        self.references, self._num_inactive = runs.references, runs.num_inactive

    # ------------------------------------------------------------------------------------------------- queries

    @property
    def num_inactive(self) -> int:
        """Cached blocks that no request uses."""
        return self._num_inactive + len(self._freed)

    def held(self) -> dict[int, int]:
        """Return the number of references to each block in use."""
        return self.names.references()

    def references_of(self, name: int) -> int:
        """Count the references to one full block."""
        return self.names.references_of(name)

    def inactive(self) -> list[int]:
        """Return the cached blocks that no request uses, in the order of their eviction. May cost a sort."""
        self.flush()
        return [slot.name for slot in self._pool.inactive.order()]

    def resident(self) -> list[int]:
        """Return the names under which the cached blocks were stored, in the order of storing."""
        return [slot.name for slot in self._pool.registered.values()]

    def has_plh(self, plh: int) -> bool:
        """Return whether a block is cached under exactly this lineage hash."""
        return plh in self._pool.registered

    def plh_of(self, name: int) -> int | None:
        """Return the lineage hash of the block that a name holds, or else of a block stored under it; or None."""
        slot = self.names.held_by(name) or self.names.own.get(name)
        if slot is None and self.names.homonyms:
            same = (slot for slot in self._pool.registered.values() if slot.name == name)
            slot = next(same, None)
        return None if slot is None else slot.plh

    def overlap(self, blocks: Sequence[Block], plhs: Sequence[int]) -> int:
        """Count the leading blocks that are in use by their name, or for which the manager has an entry."""
        registered, unknown, held_by = self._pool.registered, self._pool.unknown, self.names.held_by
        count = 0
        for block, plh in zip(blocks, plhs, strict=False):
            slot = registered.get(plh)
            if (slot is None or slot in unknown) and (isinstance(block, UUID) or held_by(block) is None):
                break
            count += 1
        return count

    # ----------------------------------------------------------------------------------------------------- Use

    def use(self, move: Use, leading: int) -> Used:
        """Carry out a Use; all but its lineage hashes was checked. See `Form`.

        Raises:
            MoveError: a lineage hash is invalid; nothing has changed.
        """
        move_checks.check_use_plhs(move)
        self.flush()
        used = Used(move.parent)
        # In bulk while every name refers to the slot that was stored under it.
        if leading and not self.names.alias_slots and not self.names.homonyms:
            self._hold_leading(move, used)
            if used.served < leading:
                self._store_unknown(move, leading, used)
        if used.served < len(move.blocks) and not used.refused:
            self._use_one_by_one(move, used)
        return used

    def _hold_leading(self, move: Use, used: Used) -> None:
        """Hold the leading cached blocks, up to the first that is not cached; most Uses have mostly such blocks."""
        own = self.names.own
        woken: list[Slot] = []
        held = 0
        for slot, plh in zip(map(own.get, move.blocks), move.plhs, strict=False):  # type: ignore[arg-type]  # no partial block is among the keys
            if slot is None:
                break
            refs = slot.refs
            if not refs:
                if slot.plh != plh:
                    break
                woken.append(slot)
            slot.refs = refs + 1
            held += 1
        if held:
            used.anchor = move.blocks[held - 1]
            self.references += held
        if woken:
            self._pool.inactive.remove(woken)
            self._pool.match_hashes_requested += len(woken)
            self._pool.match_blocks_returned += len(woken)
            self._num_inactive -= len(woken)
        used.served = held

    def _store_unknown(self, move: Use, end: int, used: Used) -> None:
        """Store the blocks before `end` that are not served yet, if none of them is cached or held under any name.

        All slots are taken at once. No block of the run needs a block that is evicted for them, and no two blocks of
        the run share a name or place. So the order in which the slots are taken and filled has no visible effect.
        """
        start, pool = used.served, self._pool
        names, plhs = move.blocks[start:end], move.plhs[start:end]
        own, policy = self.names.own, pool.inactive
        if len(set(names)) < len(names) or not own.keys().isdisjoint(names):
            return
        places = policy._free_places(plhs, pool.registered)
        if places is None:
            return
        slots = self._allocate(len(names), used)
        count = len(slots)
        if count < len(names):
            used.refused = True
            names, plhs, places = names[:count], plhs[:count], places[:count]
        local_hashes = move.local_hashes[start : start + count] or (0,) * count
        for slot, name, plh in zip(slots, names, plhs, strict=True):
            slot.name = name  # type: ignore[assignment]  # the leading blocks are full ones
            slot.plh = plh
            slot.refs = 1
        own.update(zip(names, slots, strict=True))  # type: ignore[arg-type]  # as above
        pool.registered.update(zip(plhs, slots, strict=True))
        policy._on_register(slots, places)
        used.stored.extend(names)  # type: ignore[arg-type]  # as above
        used.local_hashes.extend(local_hashes)
        if move.token_ids:
            used.token_ids = part_of(move.token_ids, start, start + count)
        self.references += count
        pool.match_hashes_requested += count + used.refused
        used.served += count

    def _use_one_by_one(self, move: Use, used: Used) -> None:
        """Use the blocks that are not served yet one by one."""
        pool, partials, names = self._pool, self._partials, self.names
        served = partial = matched = stored = 0
        used.in_bulk = False

        for name, plh, local, tokens in move_checks.iter_blocks(move, used.served):
            if plh is None:
                # A partial block has no references to count, and changes neither anchor nor parent.
                if name not in partials:
                    empty = self._allocate(1, used)
                    if not empty:
                        break
                    partials[name] = empty[0]
                partial += 1
            elif names.held_by(name) is not None:
                names.hold_again(name)
                used.anchor = name
            elif (slot := pool.match(plh)) is not None:
                self._hold_cached(slot, name)
                matched += 1
                used.anchor = name  # only hits change it, even hits after new blocks
            else:
                empty = self._allocate(1, used)
                if not empty:
                    used.refused = True
                    break
                self._register(empty[0], name, plh)
                stored += 1
                used.stored.append(name)
                used.local_hashes.append(local)
                if tokens is not None:
                    if not isinstance(used.token_ids, list):  # the rows of blocks stored in bulk
                        used.token_ids = list(used.token_ids)
                    used.token_ids.append(tokens)
            served += 1

        used.served += served
        self.references += served - partial
        pool.match_blocks_returned += matched
        pool.match_hashes_requested += matched + stored + used.refused

    def _hold_cached(self, slot: Slot, name: int) -> None:
        """Hold a cached block by a name that holds no block yet."""
        if slot.refs or slot.aliases:
            self._pool.inactive._on_touch(slot)
        else:
            self._pool.inactive.remove((slot,))
            self._num_inactive -= 1
        self.names.hold(slot, name)

    def _register(self, slot: Slot, name: int, plh: int) -> None:
        """Cache a block in an empty slot, held by its name."""
        slot.name, slot.plh = name, plh
        self._pool.registered[plh] = slot
        self.names.hold_new(slot)
        self._pool.inactive._on_register((slot,))

    def _allocate(self, count: int, used: Used) -> list[Slot]:
        """Take up to `count` slots, from the reset pool, then by eviction; fewer if no more blocks can be evicted.

        With an offload engine nothing is evicted here: the engine keeps an evicted slot while its block is copied to
        the next tier.
        """
        slots = self._pool.take_reset(count)
        if len(slots) == count or not self.makes_room:
            return slots
        return slots + self.evict(count - len(slots), used)

    def evict_for(self, move: Use, used: Used) -> list[Slot]:
        """Evict one block for each slot that the unserved part of a Use still needs, as far as there are blocks."""
        if used.served == len(move.blocks) or not self._num_inactive:
            return []
        victims = self.evict(1, used)
        # Counted after the first eviction: its victim may be one of these blocks.
        held_by, registered, rest = self.names.held_by, self._pool.registered, move.blocks[used.served :]
        full = used.served - sum(isinstance(block, UUID) for block in move.blocks[: used.served])
        plhs = iter(move.plhs[full + isinstance(rest[0], int) :])
        needed = 0
        for block in rest[1:]:
            if isinstance(block, UUID):
                needed += block not in self._partials
            else:
                needed += next(plhs) not in registered and held_by(block) is None
        return victims + self.evict_some(needed, used)

    def evict_some(self, count: int, used: Used) -> list[Slot]:
        """Evict up to `count` blocks."""
        self.flush()
        count = min(count, self._num_inactive)
        return self.evict(count, used) if count else []

    def evict(self, count: int, used: Used) -> list[Slot]:
        """Evict the next `count` blocks, or fewer if no more can be evicted; return their slots."""
        pool, own = self._pool, self.names.own
        wanted = min(count, self._num_inactive)
        victims = pool.inactive.evict(count)
        if (
            not isinstance(victims, list)
            or len(set(victims)) != wanted
            or len(victims) != wanted
            or any(slot.refs for slot in victims)
        ):
            raise RuntimeError(
                f"the eviction policy {type(pool.inactive).__name__} is wrong: evict({count}) gave "
                f"{value_text(victims):.200}; {wanted} different slots that are not held could be evicted"
            )
        plhs = [slot.plh for slot in victims]
        for plh in plhs:
            del pool.registered[plh]
        used.evicted += plhs
        names = [slot.name for slot in victims]
        if self.names.homonyms:
            for slot in victims:
                self.names.drop(slot)
        else:
            for name in names:
                del own[name]
        used.removed += names if not pool.unknown else [pool.name_to_publish(slot) for slot in victims]
        self._num_inactive -= len(victims)
        return victims

    # ------------------------------------------------------------------------------------------ the other moves

    def deref(self, blocks: Sequence[Block]) -> bool:
        """Carry out a Deref; see `Form`.

        Raises:
            MoveError: it breaks a rule; nothing has changed.
        """
        if self.names.alias_slots or self._pool.inactive._collisions:
            return self._deref_one_by_one(blocks)
        own = self.names.own
        slots: list[Slot] = []
        try:
            if len(blocks) == 1:  # as the real scheduler frees blocks
                slot = own[blocks[0]]  # type: ignore[index]  # a partial block is a KeyError
                refs = slot.refs
                if refs:
                    slot.refs = refs - 1
                    self.references -= 1
                    if refs == 1:
                        self._freed.append(slot)
                    return True
            else:
                slots = list(map(own.__getitem__, blocks))  # type: ignore[arg-type]  # as above
        except (KeyError, TypeError):  # a partial or unknown block
            pass
        if not slots:
            return self._deref_one_by_one(blocks)
        idle: list[Slot] = []
        for i, slot in enumerate(slots):
            refs = slot.refs = slot.refs - 1
            if not refs:
                idle.append(slot)
            elif refs < 0:
                for undo in slots[: i + 1]:
                    undo.refs += 1
                return self._deref_one_by_one(blocks)
        self.references -= len(slots)
        self._freed += idle
        return True

    def _deref_one_by_one(self, blocks: Sequence[Block]) -> bool:
        self.flush()
        policy = self._pool.inactive
        move_checks.check_deref(blocks, self._references_to, self.names, policy, self._backend)
        for block in blocks:
            if isinstance(block, UUID):
                self._pool.give_back(self._partials.pop(block))
            else:
                self.references -= 1
                self._release(block)
        return True

    def _references_to(self, block: Block) -> int:
        return int(block in self._partials) if isinstance(block, UUID) else self.names.references_of(block)

    def _release(self, name: int) -> None:
        """Drop one reference of a name, or a pin."""
        slot = self.names.release(name)
        if not slot.refs and not slot.aliases:
            self._pool.inactive.insert((slot,))
            self._num_inactive += 1

    def flush(self) -> None:
        """Insert the slots freed since the last flush into the policy.

        Schedulers free block by block; the policy takes many slots at once.
        """
        freed = self._freed
        if freed:
            self._pool.inactive.insert(freed)
            self._num_inactive += len(freed)
            freed.clear()

    def promote(self, move: Promote) -> bool:
        """Carry out a Promote that was checked; see `Form`."""
        self.flush()
        name, plh, pool = move.block, move.plh, self._pool
        assert plh is not None  # checked
        mutable = self._partials.pop(move.partial)
        self.references += 1
        if self.names.held_by(name) is not None:
            self.names.hold_again(name)
            pool.give_back(mutable)
            return False
        pool.match_hashes_requested += 1
        slot = pool.match(plh)
        if slot is None:
            self._register(mutable, name, plh)
            return True
        pool.match_blocks_returned += 1
        self._hold_cached(slot, name)
        pool.give_back(mutable)
        return False

    def clear(self) -> None:
        """Drop all blocks; none is in use."""
        self.flush()
        self._pool.drain()
        self.names = Names()
        self._num_inactive = 0

    # -------------------------------------------------------------------------- blocks that belong to no request

    def cache(self, slot: Slot, name: int, plh: int) -> bool:
        """Cache a block in an empty slot, inactive; do nothing and return False if it is cached already."""
        self.flush()
        if self.names.held_by(name) is not None or self._pool.match(plh) is not None:
            return False
        self._register(slot, name, plh)
        self._release(name)
        return True

    def pin(self, plhs: Sequence[int]) -> Pin | None:
        """Keep these blocks active; see `LogicalManager.pin`."""
        self.flush()
        pool, policy = self._pool, self._pool.inactive
        found: list[Slot] = []
        for plh in plhs:
            slot = pool.registered.get(plh)
            if slot is None or not (slot.refs or slot.aliases):
                break
            policy._on_touch(slot)
            found.append(slot)
        woken: list[Slot] = []
        for plh in plhs[len(found) :]:
            slot = pool.match(plh)
            if slot is None or slot.refs or slot.aliases or slot in woken:
                break
            woken.append(slot)
        if woken:
            policy._wake_run(woken)
            self._num_inactive -= len(woken)
        found += woken
        pool.match_hashes_requested += len(plhs)
        pool.match_blocks_returned += len(found)
        numbers: list[int] = []
        for slot in found:
            self._last_pin -= 1
            self.names.hold(slot, self._last_pin)
            numbers.append(self._last_pin)
        pin = Pin(numbers)
        if len(found) == len(plhs):
            return pin
        self.unpin(pin)
        return None

    def has_pin(self, pin: Pin) -> bool:
        """Return whether a pin is not dropped yet."""
        return pin.is_open and all(number in self.names.alias_slots for number in pin.numbers)

    def unpin(self, pin: Pin) -> None:
        """Drop a pin."""
        pin.is_open = False
        for number in pin.numbers:
            self._release(number)

    def unpin_all(self) -> None:
        """Drop all pins."""
        self.unpin(Pin([number for number in self.names.alias_slots if number < 0]))

    def num_held_by(self, pins: Iterable[Pin]) -> int:
        """Count the blocks that only these pins keep active."""
        slots = Counter(self.names.alias_slots[number] for pin in pins for number in pin.numbers)
        return sum(not slot.refs and slot.aliases == count for slot, count in slots.items())
