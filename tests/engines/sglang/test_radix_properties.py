"""The radix cache under random calls: compared with a plain model, and checked for its invariants."""

import gc
from collections import Counter
from random import Random

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_radix import KEYS, PlainTree

from pytest_kvmock import CapturingSink, Cleared, Prompt, Removed, Stored, create_manager
from pytest_kvmock.engines import KvWorker
from pytest_kvmock.engines.makers import sglang_driver
from pytest_kvmock.engines.sglang.radix_cache import RadixCacheManager
from pytest_kvmock.engines.sglang.radix_driver import RadixDriver
from pytest_kvmock.engines.sglang.radix_tree import POLICIES, TreeNode

SIZE, CAPACITY = 2, 12

tokens = st.lists(st.sampled_from([0, 0, 0, 1]), max_size=4 * SIZE)
namespaces = st.sampled_from([None, None, None, "a", "b"])
calls = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), tokens, namespaces, st.integers(0, 2), st.integers(0, 2 * SIZE)),
        st.tuples(st.just("insert"), tokens, namespaces, st.just(0), st.just(0)),
        st.tuples(st.just("match"), tokens, namespaces),
        st.tuples(st.just("lock"), tokens, namespaces),
        st.tuples(st.just("unlock"), st.integers(0, 9)),
        st.tuples(st.just("evict"), st.integers(0, 3 * SIZE)),
        st.tuples(st.just("evict"), st.just(1)),
    ),
    max_size=40,
)


def pages_of(tokens, namespace):
    """Return the pages of the plain model; the first contains the namespace."""
    pages = [tuple(tokens[at : at + SIZE]) for at in range(0, len(tokens) - SIZE + 1, SIZE)]
    return [(namespace, *page) if not i else page for i, page in enumerate(pages)]


def shape(node):
    return [
        [len(child.names), child.lock_ref, child.hit_count, child.priority, shape(child)]
        for child in node.children.values()
    ]


class Both:
    """Our cache and its plain model."""

    def __init__(self, policy):
        self.sink = CapturingSink()
        self.manager = RadixCacheManager(num_blocks=CAPACITY, block_size=SIZE, sink=self.sink, policy=policy)
        self.plain = PlainTree(policy)
        self.locked = []
        self.held = Counter()
        self.take_events()

    def take_events(self):
        events = [event.data for event in self.sink.take()]
        for data in events:
            if isinstance(data, Stored):
                assert data.parent_hash is None or self.held[data.parent_hash]
                self.held.update(data.block_hashes)
            elif isinstance(data, Removed):
                assert not Counter(data.block_hashes) - self.held
                self.held -= Counter(data.block_hashes)
            else:
                self.held.clear()
        return events

    def do(self, kind, *arguments):
        getattr(self, kind)(*arguments)
        manager, events = self.manager, self.take_events()
        assert self.plain.shape() == shape(manager._tree.root)
        assert self.held == Counter(manager.resident())
        sizes = (manager.available_size(), manager.evictable_size(), manager.protected_size())
        assert sum(sizes) == CAPACITY * SIZE
        assert sizes[1] // SIZE == manager.num_inactive_blocks == len(manager.inactive_blocks())
        assert sum(manager.active_blocks.values()) == manager.num_active_block_refs
        allowed = {"insert": Stored, "evict": Removed}.get(kind)
        assert all(type(event) is allowed for event in events)

    def insert(self, tokens, namespace, priority, inserted):
        pages = pages_of(tokens, namespace)
        before = self.manager._tree.lookup(*self.key(tokens, namespace))
        if len(pages) - before > self.manager.available_size() // SIZE:
            with pytest.raises(ValueError, match=r"^insert: \d+ pages are new and \d+ are free; evict first$"):
                self.manager.insert(tokens, extra_key=namespace)
            return
        expected = self.plain.insert(pages, priority, inserted / SIZE)
        found = self.manager.insert(tokens, extra_key=namespace, priority=priority, inserted_len=inserted)
        assert expected * SIZE == found == before * SIZE

    def key(self, tokens, namespace):
        names = self.manager._key(tokens, namespace, None)[0].names
        return names, len(names), namespace and (namespace, None)

    def match(self, tokens, namespace):
        looked = self.manager._tree.lookup(*self.key(tokens, namespace))
        plain, pages = self.plain.match(pages_of(tokens, namespace))
        found, node = self.manager.match_prefix(tokens, extra_key=namespace)
        assert looked * SIZE == pages * SIZE == found
        return plain, node

    def lock(self, tokens, namespace):
        plain, node = self.match(tokens, namespace)
        evictable = self.manager.evictable_size()
        self.plain.lock(plain, 1)
        assert self.manager.inc_lock_ref(node) == self.manager.evictable_size() - evictable
        self.locked.append((plain, node))

    def unlock(self, which):
        if self.locked:
            plain, node = self.locked.pop(which % len(self.locked))
            evictable = self.manager.evictable_size()
            self.plain.lock(plain, -1)
            assert self.manager.dec_lock_ref(node) == self.manager.evictable_size() - evictable

    def evict(self, tokens):
        foretold = self.manager.inactive_blocks()
        sizes = [len(pages) * SIZE for pages in self.plain.evict(-(-tokens // SIZE))]
        assert sizes == self.manager.evict(tokens)
        events = [event.data for event in self.sink.events]
        names = foretold[: sum(sizes) // SIZE]
        assert ([Removed(tuple(names))] if names else []) == events


def test_the_plain_model_has_every_eviction_policy():
    assert POLICIES.keys() == KEYS.keys()


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(80))
@given(calls=calls)
def test_the_radix_tree_equals_the_plain_model_under_any_calls(policy, calls):
    both = Both(policy)
    for call in calls:
        both.do(*call)
    while both.locked:
        both.do("unlock", 0)
    assert 0 == both.manager.protected_size() == both.manager.num_active_block_refs
    both.do("evict", CAPACITY * SIZE)
    assert both.manager.resident() == []
    assert not both.held


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), tokens.filter(bool)),
        st.tuples(st.just("decode"), st.integers(0, 9), tokens),
        st.tuples(st.sampled_from(["finish", "preempt"]), st.integers(0, 9)),
        st.tuples(st.just("clear")),
    ),
    max_size=40,
)


@given(steps=steps, policy=st.sampled_from(sorted(POLICIES)))
def test_any_requests_conserve_pages_and_locks(steps, policy):
    sink = CapturingSink()
    manager = RadixCacheManager(num_blocks=5, block_size=SIZE, sink=sink, policy=policy)
    driver = RadixDriver(manager, True, Random(0))
    open_requests = []
    for kind, *arguments in steps:
        if kind == "add":
            request = driver.open(Prompt(arguments[0]))
            needed, available = driver.need(request, len(request)), driver.room()
            if needed <= available:
                driver.admit(request, len(request))
                open_requests.append(request)
        elif kind == "clear":
            assert driver.clear() == (not open_requests)
        elif open_requests:
            which = arguments[0] % len(open_requests)
            if kind == "decode":
                request = open_requests[which]
                if driver.need(request, len(request), arguments[1]) <= driver.room():
                    driver.extend(request, arguments[1])
            else:
                driver.free(open_requests.pop(which), done=kind == "finish")
        own = sum(request.allocated - request.protected for request in open_requests)
        assert (manager.available_size() + manager.evictable_size() + manager.protected_size() + own * SIZE) == 5 * SIZE
        assert all(request.allocated == -(-len(request) // SIZE) for request in open_requests)
        assert manager.num_active_block_refs == own + sum(request.protected for request in open_requests)
        assert held(sink.events) == Counter(manager.resident())
    for request in open_requests:
        driver.free(request, done=True)
    assert 0 == manager.protected_size() == manager.num_active_blocks


def held(events):
    """Return the cached blocks in a listener's view, with the number of copies."""
    out = Counter()
    for event in events:
        data = event.data
        if isinstance(data, Stored):
            out.update(data.block_hashes)
        elif isinstance(data, Removed):
            out.subtract(data.block_hashes)
        else:
            assert isinstance(data, Cleared)
            out.clear()
    assert all(copies >= 0 for copies in out.values())
    return +out


@pytest.mark.parametrize("policy", POLICIES)
def test_lookups_do_not_grow_the_heap_or_the_change_list(policy):
    manager = RadixCacheManager(num_blocks=8, block_size=SIZE, policy=policy)
    for start in range(8):
        manager.insert([start] * SIZE)
    for turn in range(4000):
        manager.touch([turn % 7] * SIZE)
        if not turn % 4:
            manager.evict(1)
            manager.insert([turn] * SIZE)
    assert len(manager._tree._leaves._heap) <= 2 * 8 + 64 + 8
    assert len(manager._tree._changed) <= 8


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 4},
        {"tiers": {"host": 64}},
        {"tiers": {"host": 64, "write_policy": "write_through_selective"}},
        {"tiers": {"host": 64, "write_policy": "write_back"}},
    ],
    ids=["full", "window", "through", "selective", "back"],
)
def test_deleted_nodes_are_not_kept_in_memory(options):
    worker = KvWorker(
        lambda sink: create_manager("sglang", num_blocks=16, block_size=SIZE, sink=sink, **options),
        sink=CapturingSink(),
        rng=Random(0),
        driver=sglang_driver,
    )
    before = deleted_nodes()
    for turn in range(200):
        worker.serve([turn] * 6 * SIZE)
    assert deleted_nodes() - before <= 64, "a queue may have so many that it passes over"


def deleted_nodes():
    gc.collect()
    return sum(isinstance(each, TreeNode) and bool(each.names) and each.parent is None for each in gc.get_objects())
