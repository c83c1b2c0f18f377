"""The ledger against a plain model: random hand-made streams of few blocks, so that every rule is broken."""

from collections import Counter

from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvmock import Cleared, KvCacheEvent, Removed, RouterEvent, StorageTier, Stored
from pytest_kvmock.oracle.hygiene.entries import Resident
from pytest_kvmock.oracle.hygiene.ledger import Ledger

BLOCKS = st.integers(1, 8)
CAPACITY = 5

STREAMS = st.lists(
    st.one_of(
        st.builds(
            lambda parent, blocks: Stored(parent, tuple(blocks), tuple(blocks)),
            st.none() | BLOCKS,
            st.lists(BLOCKS, max_size=4),
        ),
        st.builds(lambda blocks: Removed(tuple(blocks)), st.lists(BLOCKS, max_size=4)),
        st.builds(lambda blocks: Removed(tuple(blocks)), st.lists(BLOCKS, min_size=3, max_size=6)),
        st.sampled_from([Cleared()]),
    ),
    max_size=25,
)


class PlainLedger:
    """Keeps the number of copies of each block, and its last parent."""

    def __init__(self, residency):
        self.unique = residency == "unique"
        self.copies = Counter()
        self.parents = {}
        self.implied = set()
        self.again = set()
        self.resident = set()  # held by the engine, though a Removed named them
        self.overfull = False

    def observe(self, data):
        """Return by rule the blocks with which the event breaks it, of the rules that need memory."""
        if isinstance(data, Stored):
            return self.stored(data)
        if isinstance(data, Removed):
            return self.removed(data)
        self.__init__("unique" if self.unique else "counted")
        return {}

    def stored(self, data):
        found = {}
        over, self.overfull = self.overfull, self.copies.total() > CAPACITY
        if self.overfull and not over:
            found["over_capacity"] = []
        held = {block for block in data.block_hashes if self.copies[block]}
        if self.unique and data.block_hashes and held.issuperset(data.block_hashes):
            found["duplicate_store"] = sorted(held)
        self.again = held | self.resident.intersection(data.block_hashes)
        self.resident.difference_update(data.block_hashes)
        if data.parent_hash is not None and not self.copies[data.parent_hash]:
            self.implied.add(data.parent_hash)
        for block in data.block_hashes:
            self.copies[block] = 1 if self.unique else self.copies[block] + 1
        pairs = list(zip((data.parent_hash, *data.block_hashes), data.block_hashes, strict=False))
        self.parents.update({block: parent for parent, block in reversed(pairs)})
        self.implied.difference_update(data.block_hashes)
        return found

    def removed(self, data):
        taken = {block for block in data.block_hashes if self.copies[block]}
        gone = {block for block in data.block_hashes if self.copies[block] or block in self.implied}
        found = {"evicted_and_restored": sorted(self.again & taken) if self.unique else []}
        self.resident.difference_update(data.block_hashes)
        self.resident.update(found["evicted_and_restored"])
        self.again = set()
        for block in data.block_hashes:
            self.copies[block] = max(0, self.copies[block] - 1)
        self.implied.difference_update(data.block_hashes)
        gone = {block for block in gone if not self.copies[block]}
        found["orphaned_child"] = sorted(b for b in +self.copies if self.parents[b] in gone)
        return {rule: blocks for rule, blocks in found.items() if blocks}


@settings(max_examples=examples(200))
@given(st.sampled_from(["unique", "counted"]), STREAMS)
def test_the_ledger_finds_what_a_plain_model_finds(residency, stream):
    ledger, plain = Ledger(), PlainLedger(residency)
    known = ledger.open((0, 0), first_id=0, num_blocks=CAPACITY, residency=residency)
    for number, data in enumerate(stream):
        problems = ledger.take(RouterEvent(0, KvCacheEvent(number, data)))
        found = {}
        for problem in problems:
            found.setdefault(problem.rule, []).extend(problem.blocks)
        expected = plain.observe(data)
        for rule in ("over_capacity", "evicted_and_restored", "orphaned_child"):
            assert (sorted(found[rule]) if rule in found else None) == expected.get(rule), (rule, number)
        if not any(rule in found for rule in ("invalid_block", "parent_block_not_found")):
            assert ("duplicate_store" in found) == ("duplicate_store" in expected)
        assert plain.copies.total() == known.count(StorageTier.DEVICE)
        assert +plain.copies == Counter(
            {block: 1 + known.copies.get(StorageTier.DEVICE, {}).get(block, 0) for block in known.device}
        )
        assert [
            p for p in ledger.take(Resident((0, 0), StorageTier.DEVICE, list(plain.copies.elements()))) if not p.cause
        ] == []
