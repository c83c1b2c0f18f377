"""The names that hold slots, with their references."""

from __future__ import annotations

from pytest_kvmock.engines.base.eviction_policy import Slot


class Names:
    """The names that hold slots, and the names under which slots were stored.

    A slot's own name is the one it was stored under. Nearly always a slot is held by its own name only: then `own`
    finds it, and `Slot.refs` counts its references. Any other holder is an *alias*. A name that is not an alias holds
    its slot in `own`, if that slot has references.

    Attributes:
        own: registered slots by their own name; the first of several slots with one name.
        homonyms: number of registered slots that are not in `own`, because another slot has their name.
        alias_slots: the slot that each alias holds. A pin, which keeps a block active without a request, is also an
            alias, with a negative number instead of a name.
        alias_refs: references of each alias.
    """

    __slots__ = ("alias_refs", "alias_slots", "homonyms", "own")

    def __init__(self) -> None:
        self.own: dict[int, Slot] = {}
        self.homonyms = 0
        self.alias_slots: dict[int, Slot] = {}
        self.alias_refs: dict[int, int] = {}

    def held_by(self, name: int) -> Slot | None:
        """Return the slot that a name holds."""
        slot = self.alias_slots.get(name)
        if slot is None:
            slot = self.own.get(name)
            if slot is not None and not slot.refs:
                return None
        return slot

    def references_of(self, name: int) -> int:
        """Count the references of a name."""
        if name in self.alias_refs:
            return self.alias_refs[name]
        slot = self.own.get(name)
        return 0 if slot is None else slot.refs

    def hold(self, slot: Slot, name: int) -> None:
        """Add a name, which holds no slot yet, as a holder of a registered slot."""
        if self.own.get(name) is slot:
            slot.refs = 1
        else:
            self.alias_slots[name] = slot
            self.alias_refs[name] = 1
            slot.aliases += 1

    def hold_new(self, slot: Slot) -> None:
        """Make the own name of a newly registered slot its holder."""
        if slot.name in self.own:
            self.homonyms += 1
        else:
            self.own[slot.name] = slot
        self.hold(slot, slot.name)

    def hold_again(self, name: int) -> None:
        """Add one reference to a name that holds a slot."""
        if name in self.alias_refs:
            self.alias_refs[name] += 1
        else:
            self.own[name].refs += 1

    def release(self, name: int) -> Slot:
        """Drop one reference of a name; return the slot."""
        slot = self.alias_slots.get(name)
        if slot is None:
            slot = self.own[name]
            slot.refs -= 1
            return slot
        self.alias_refs[name] -= 1
        if not self.alias_refs[name]:
            del self.alias_refs[name], self.alias_slots[name]
            slot.aliases -= 1
        return slot

    def drop(self, slot: Slot) -> None:
        """Drop the name of an evicted slot; other slots may have the same name."""
        if self.own.get(slot.name) is slot:
            del self.own[slot.name]
        else:
            self.homonyms -= 1

    def references(self) -> dict[int, int]:
        """Return the references of each name that holds a slot; pins have no name."""
        named = {name: slot.refs for name, slot in self.own.items() if slot.refs}
        return named | {name: refs for name, refs in self.alias_refs.items() if name >= 0}
