"""Properties of every program of moves."""

from functools import partial
from uuid import UUID

import pytest
from cache_helpers import POLICIES, event_rows, new_manager, state_of
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvmock import BACKENDS, CapturingSink, sequence_hashes
from pytest_kvmock.engines.dynamo.cached_slots import CachedSlots
from pytest_kvmock.engines.dynamo.logical import LogicalManager
from pytest_kvmock.engines.dynamo.move_checks import check_use_plhs
from pytest_kvmock.engines.dynamo.pool import Used
from pytest_kvmock.engines.dynamo.runs import Runs
from pytest_kvmock.values import Deref, MoveError, Promote, Use, lineage_hash

# Blocks of a small tree: block n > 0 is a child of n // 3; block 0 and every multiple of 7 are roots. Other blocks get
# the lineage hash of one of them under their own name (from 100), or share its place with another parent (200).
PARTIALS = [UUID(int=number, version=4) for number in range(4)]


def parent_of(block):
    return None if block % 7 == 0 else block // 3


def lineage_of(block):
    if block >= 200:
        block -= 200
        return lineage_hash(block, 5000 + block, depth_of(block))
    block %= 100
    return lineage_hash(block, parent_of(block), depth_of(block))


def depth_of(block):
    parent = parent_of(block)
    return 0 if parent is None else 1 + depth_of(parent)


def chain_to(block):
    chain = [block]
    while (parent := parent_of(chain[0])) is not None:
        chain.insert(0, parent)
    return chain


blocks = st.integers(0, 25)
names = st.one_of(blocks, blocks.map(lambda block: 100 + block), blocks.map(lambda block: 200 + block))
partials = st.sampled_from(PARTIALS)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("use"), blocks.map(chain_to)),
        st.tuples(st.just("use"), st.lists(st.one_of(names, partials), max_size=6)),
        st.tuples(st.just("deref"), st.lists(st.one_of(names, partials), min_size=1, max_size=4)),
        st.tuples(st.just("free"), st.randoms(use_true_random=False)),
        st.tuples(st.just("promote"), partials, names),
        st.tuples(st.just("clear")),
    ),
    max_size=60,
)
backends = st.sampled_from(sorted(POLICIES))


def move_of(manager, kind, arguments):
    if kind == "use":
        full = [block for block in arguments[0] if not isinstance(block, UUID)]
        return Use(arguments[0], [block + 1000 for block in full], [lineage_of(block) for block in full])
    if kind == "deref":
        return Deref(arguments[0])
    if kind == "free":  # some active blocks in any order
        active = [block for block, references in manager.active_blocks.items() for _ in range(references)]
        arguments[0].shuffle(active)
        return Deref(active[: len(active) // 2 + 1])
    name, block = arguments
    return Promote(name, block, None, block + 1000, lineage_of(block))


@settings(max_examples=examples(300), deadline=None)
@given(backends, st.integers(1, 12), operations)
def test_any_moves_conserve_slots_and_a_refused_move_changes_nothing(backend, capacity, program):
    manager = new_manager(backend, capacity)
    for operation in program:
        before = state_of(manager)
        if operation == ("clear",):
            idle = not manager.num_active_blocks
            assert idle == manager.clear()
            assert idle or before == state_of(manager)
        else:
            try:
                manager.process(move_of(manager, operation[0], operation[1:]))
            except MoveError:
                assert before == state_of(manager)
        metrics = manager.metrics()
        active, inactive = manager.num_active_blocks, manager.num_inactive_blocks
        assert capacity == active + inactive + metrics.reset_pool_size
        assert inactive == len(manager.inactive_blocks())
        assert active + inactive == len(manager.resident()) + metrics.inflight_mutable
        assert sum(manager.active_blocks.values()) == manager.num_active_block_refs
        assert list(range(len(manager.sink.events))) == [event.event_id for event in manager.sink.events]


@settings(max_examples=examples(300), deadline=None)
@given(
    st.sampled_from([name for name in sorted(POLICIES) if BACKENDS[name].prefix_closed]),
    st.integers(1, 12),
    st.lists(st.tuples(blocks.map(chain_to), st.booleans()), max_size=60),
)
def test_a_ledger_of_the_events_equals_the_resident_blocks(backend, capacity, requests):
    # Chains are used completely and freed tail first, as by schedulers: neither hazard is reachable.
    manager = new_manager(backend, capacity)
    held, ledger = [], set()
    for chain, free_first in requests:
        if held and (free_first or len(held) > 2):
            manager.process(Deref(held.pop(0)[::-1]))
        served = manager.use(chain)
        if served:
            held.append(chain[:served])
        for kind, _, *rest in event_rows(manager.sink.take()):
            if kind == "S":
                parent, pairs = rest
                stored = [block for block, _ in pairs]
                assert parent is None or parent in ledger
                assert not ledger.intersection(stored)  # no Stored of a present block
                ledger.update(stored)
            else:
                (removed,) = rest
                assert ledger.issuperset(removed)
                assert not set(removed) & manager.active_blocks.keys()  # no Removed of an active one
                ledger.difference_update(removed)
        assert sorted(ledger) == sorted(manager.resident())


@settings(max_examples=examples(300), deadline=None)
@given(backends, st.integers(1, 12), st.lists(st.tuples(blocks.map(chain_to), st.booleans()), max_size=60))
def test_a_ledger_lacks_only_blocks_that_one_use_evicted_and_stored_again(backend, capacity, requests):
    # Chains again. Over multi_lru a tail can outlive its head and then be evicted for it: see pending.py.
    manager = new_manager(backend, capacity)
    held, ledger, lost = [], set(), set()
    for chain, free_first in requests:
        if held and (free_first or len(held) > 2):
            manager.process(Deref(held.pop(0)[::-1]))
        served = manager.use(chain)
        if served:
            held.append(chain[:served])
        stored = set()
        for kind, _, *rest in event_rows(manager.sink.take()):
            if kind == "S":
                stored = {block for block, _ in rest[1]}
                ledger |= stored
                lost -= stored
            else:
                removed = set(rest[0])
                assert ledger >= removed
                ledger -= removed
                lost |= removed & stored
        lost &= set(manager.resident())
        assert sorted(ledger | lost) == sorted(manager.resident())
        assert not ledger & lost


@settings(max_examples=examples(200), deadline=None)
@given(backends, st.integers(1, 12), st.lists(st.tuples(blocks.map(chain_to), st.booleans()), max_size=40))
def test_short_forms_have_the_same_effect_as_the_moves_that_they_replace(backend, capacity, requests):
    short, long = new_manager(backend, capacity), new_manager(backend, capacity)
    held = []
    for chain, free_first in requests:
        if held and free_first:
            freed = held.pop(0)[::-1]
            short.deref(freed)
            long.process(Deref(freed))
        served = short.use(chain)
        assert served == long.process(Use(chain, chain, [lineage_of(block) for block in chain]))
        if served:
            held.append(chain[:served])
        assert state_of(long) == state_of(short)


class CarefulSlots(CachedSlots):
    def use(self, move, leading):
        check_use_plhs(move)
        self.flush()
        used = Used(move.parent)
        self._use_one_by_one(move, used)
        return used

    def deref(self, blocks):
        return self._deref_one_by_one(blocks)


class CarefulManager(LogicalManager):
    """A manager that works block by block, never in runs or in bulk."""

    def _new_slots(self, runs=None):
        return CarefulSlots(self.backend, self._pool, self._partials, runs)


def play_on_both(backend, capacity, moves):
    """Play moves in bulk and block by block, and compare the visible state; each move is a function of the manager."""
    bulk = new_manager(backend, capacity)
    careful = CarefulManager(
        backend=backend, eviction=POLICIES[backend](capacity), num_blocks=capacity, sink=CapturingSink()
    )
    for make in moves:
        move = make(bulk)
        outcomes = []
        for manager in (bulk, careful):
            try:
                outcomes.append(manager.process(move))
            except MoveError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        assert state_of(careful) == state_of(bulk)
        assert careful.sink.router_events == bulk.sink.router_events
        assert entries_in(careful) == entries_in(bulk)
        assert homonyms_in(careful) == homonyms_in(bulk)
        if backend == "multi_lru":
            trackers = [manager._pool.inactive._tracker for manager in (careful, bulk)]
            assert (trackers[0].size, trackers[0].words()) == (trackers[1].size, trackers[1].words())
    while bulk.num_active_blocks:  # then the remaining blocks are evicted, which shows their order
        move = Deref(list(bulk.active_blocks))
        try:
            assert bulk.process(move) == careful.process(move)
        except MoveError:
            return
    roots = list(range(1000, 1000 + capacity))
    move = Use(roots, roots, [lineage_hash(root, None, 0) for root in roots])
    assert bulk.process(move) == careful.process(move)
    assert state_of(careful) == state_of(bulk)


def homonyms_in(manager):
    return 0 if isinstance(manager._form, Runs) else manager._form.names.homonyms


def entries_in(manager):
    if isinstance(runs := manager._form, Runs):
        return {runs.plh_of(name): (name, False, run.refs, 0) for name, run in runs.blocks().items()}
    return {
        plh: (slot.name, slot in manager._pool.unknown, slot.refs, slot.aliases)
        for plh, slot in manager._pool.registered.items()
    }


@settings(max_examples=examples(400), deadline=None)
@given(backends, st.integers(1, 12), operations.map(lambda program: [op for op in program if op != ("clear",)]))
def test_any_moves_have_the_same_effect_in_bulk_and_block_by_block(backend, capacity, program):
    play_on_both(backend, capacity, [partial(move_of, kind=kind, arguments=rest) for kind, *rest in program])


@pytest.mark.parametrize("backend", sorted(POLICIES))
def test_a_child_stored_before_its_parent_has_the_same_effect_in_bulk_and_block_by_block(backend):
    child, parent, other = (Use([block], [block], [lineage_of(block)]) for block in (3, 1, 14))
    both = Use([3, 1], [3, 1], child.plhs + parent.plhs)
    play_on_both(backend, 3, [lambda _, move=move: move for move in (both, Deref([1, 3]), other, Deref([14]))])


# A request: the chain to a block, its start, with tokens or not, with a partial block or not, and how it is freed.
requests = st.lists(
    st.tuples(
        st.integers(0, 200).map(chain_to),
        st.integers(0, 3),
        st.booleans(),
        st.booleans(),
        st.sampled_from(["tail first", "root first", "one by one", "kept"]),
    ),
    max_size=40,
)


@settings(max_examples=examples(400), deadline=None)
@given(backends, st.integers(1, 24), requests)
def test_requests_have_the_same_effect_in_bulk_and_block_by_block(backend, capacity, program):
    moves, last = [], []
    for number, (chain, start, with_tokens, with_partial, freed) in enumerate(program):
        part = chain[start:]
        plhs = [lineage_hash(block, parent_of(block), depth_of(block)) for block in part]
        names_ = [*part, UUID(int=number, version=4)] if with_partial else part
        tokens = [[block, number] for block in part] if with_tokens else None
        parent = chain[start - 1] if 0 < start <= len(chain) else None
        moves.append(Use(names_, part if number % 5 else (), plhs, tokens, parent))
        if freed == "one by one":
            last += [Deref([name]) for name in names_[::-1]]
        elif freed != "kept":
            last.append(Deref(names_ if freed == "root first" else names_[::-1]))
        if number % 3 == 2:
            moves += last
            last = []
    play_on_both(backend, capacity, [lambda _, move=move: move for move in moves])


# Steps of a scheduler: requests arrive with a chain, chunk by chunk, grow by generated blocks, are freed completely,
# one by one or in part, and are used again.
steps = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "chunk", "grow", "grow", "free", "free one by one", "free some", "same"]),
        st.integers(0, 200),
        st.integers(0, 5),
    ),
    max_size=60,
)


class Scheduler:
    """Moves of requests for `steps`; each request ends with at most one partial block."""

    def __init__(self):
        self.running = []  # the blocks of each request
        self.waiting = []  # the rest of its chain, behind the held blocks
        self.generated = 0

    def moves(self, kind, number, cut):
        if kind in ("admit", "same") or not self.running:
            chain = chain_to(number % 26 if kind == "same" else number)
            first = max(1, len(chain) - cut)
            self.running.append(chain[:first])
            self.waiting.append(chain[first:])
            yield self.use(self.running[-1], 0)
            return
        index = number % len(self.running)
        held, rest = self.running[index], self.waiting[index]
        if kind == "chunk" and rest:
            start = len(held)
            held += rest[: cut + 1]
            del rest[: cut + 1]
            yield self.use(held, start)
        elif kind == "grow":
            rest.clear()
            if isinstance(held[-1], UUID):
                depth = len(held) - 1
                parent = held[-2] if depth else None
                name = sequence_hashes((cut // 2,), parent=parent)[0]  # two requests may generate the same block
                yield Promote(held.pop(), name, parent, name, lineage_hash(name, parent, depth))
                held.append(name)
            self.generated += 1
            held.append(UUID(int=self.generated, version=4))
            yield Use(held[-1:])
        elif kind == "free some" and len(held) > cut + 1:
            freed = held[-cut - 1 :]
            del held[-cut - 1 :]
            rest.clear()
            yield Deref(freed[::-1])
        elif kind.startswith("free"):
            del self.running[index], self.waiting[index]
            if kind == "free":
                yield Deref(held[::-1])
            else:
                yield from (Deref([block]) for block in reversed(held))

    def fall_short(self, step, missing):
        """Let the request of this step keep its allocated blocks and get no more."""
        index = len(self.running) - 1 if step[0] in ("admit", "same") else step[1] % len(self.running)
        del self.running[index][-missing:]
        self.waiting[index].clear()
        if not self.running[index]:
            del self.running[index], self.waiting[index]

    @staticmethod
    def use(blocks, start):
        plhs = [lineage_hash(block, blocks[depth - 1] if depth else None, depth) for depth, block in enumerate(blocks)]
        return Use(blocks[start:], blocks[start:], plhs[start:], None, blocks[start - 1] if start else None)


@settings(max_examples=examples(400), deadline=None)
@given(st.sampled_from(["lineage", "lru"]), st.integers(1, 40), steps)
def test_scheduler_moves_have_the_same_effect_in_runs_and_block_by_block(backend, capacity, program):
    scheduler = Scheduler()
    in_runs = new_manager(backend, capacity)
    careful = CarefulManager(
        backend=backend, eviction=POLICIES[backend](capacity), num_blocks=capacity, sink=CapturingSink()
    )
    for step in program:
        for move in scheduler.moves(*step):
            served = careful.process(move)
            assert served == in_runs.process(move)
            if isinstance(move, Use) and served < len(move.blocks):
                scheduler.fall_short(step, len(move.blocks) - served)
                break
            if not isinstance(move, Deref) or len(move.blocks) > 1:  # single frees are compared later
                assert entries_in(careful) == entries_in(in_runs)
                assert state_of(careful) == state_of(in_runs)
    assert isinstance(in_runs._form, Runs)
    assert list(careful.resident()) == list(in_runs.resident())
    assert state_of(careful) == state_of(in_runs)
    assert careful.metrics() == in_runs.metrics()
    assert careful.sink.router_events == in_runs.sink.router_events
    in_runs._slots()
    assert entries_in(careful) == entries_in(in_runs)
    assert state_of(careful) == state_of(in_runs)
    roots = list(range(5000, 5000 + in_runs.num_inactive_blocks + 1))
    move = Use(roots, roots, [lineage_hash(root, None, 0) for root in roots])
    assert careful.process(move) == in_runs.process(move)
    assert careful.sink.router_events == in_runs.sink.router_events


@pytest.mark.parametrize("reverse", [True, False])
def test_lineage_and_lru_differ_only_when_a_chain_is_freed_root_first(reverse):
    streams = []
    for backend in ("lineage", "lru"):
        manager = new_manager(backend, 4)
        manager.use([0, 1, 2, 3])
        manager.deref([3, 2, 1, 0] if reverse else [0, 1, 2, 3])
        manager.use([10, 11])
        streams.append(event_rows(manager.sink.take()))
    assert reverse == (streams[0] == streams[1])
