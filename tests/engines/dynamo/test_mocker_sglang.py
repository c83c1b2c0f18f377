"""The cache of Dynamo's mock of SGLang, called directly: pages, evictions and events."""

from random import Random

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvmock import CapturingSink, Cleared, Prompt, Removed, Stored, block_hashes, create_manager, sequence_hashes
from pytest_kvmock.engines.dynamo.mocker_sglang_request import MockerRadixRequest
from pytest_kvmock.engines.dynamo.mocker_sglang_tree import PageTree
from pytest_kvmock.values import MoveError

SIZE = 4


def make(num_blocks=8):
    sink = CapturingSink()
    manager = create_manager("mocker_sglang_1_6", num_blocks=num_blocks, block_size=SIZE, sink=sink)
    return manager, sink


def request(*pages, tail=0, size=SIZE):
    """Return a request of pages given by number, plus some tokens."""
    return MockerRadixRequest(Prompt([*(page for page in pages for _ in range(size)), *[0] * tail]), size, Random(0))


def names(*pages, size=SIZE):
    return sequence_hashes(block_hashes([page for page in pages for _ in range(size)], size))


def take(sink):
    """Return kind and blocks of each event since the last call."""
    kinds = {Stored: "S", Removed: "R", Cleared: "C"}
    return [(kinds[type(event.data)], *getattr(event.data, "block_hashes", ())) for event in sink.take()]


def serve(manager, *pages, tail=0):
    one = request(*pages, tail=tail)
    assert manager.allocate(one, len(one)) is not None
    manager.finish(one)


def step(manager, one, *tokens):
    """Generate tokens, as a driver does."""
    for token in tokens:
        assert manager.make_room(one.opens_page)
        one.append(token)
        manager.extend(one, one.computed + 1)
        manager.checkpoint(one)


# --------------------------------------------------------------------------------------------------- the cache


def test_a_request_allocates_whole_pages_and_leaves_its_full_pages_cached():
    manager, _ = make()
    one = request(1, 2, tail=1)
    assert manager.allocate(one, 9) == 0
    assert (manager.free_pages, manager.num_active_blocks, manager.num_inactive_blocks) == (5, 3, 0)
    manager.finish(one)
    assert (manager.free_pages, manager.num_active_blocks, manager.num_inactive_blocks) == (6, 0, 2)


def test_an_identical_prompt_reuses_all_pages_except_that_of_its_last_token():
    manager, _ = make()
    serve(manager, 1, 2)
    assert manager.allocate(request(1, 2), 8) == 4
    without_output = request(1, 2)
    without_output.computes_last_token = False
    assert manager.allocate(without_output, 8) == 8


def test_the_cached_prefix_of_a_prompt_is_not_evicted_for_its_new_pages():
    manager, sink = make(2)
    serve(manager, 1, 2)
    take(sink)
    assert manager.allocate(request(1, 3), 8) == 4
    assert [("R", names(1, 2)[1]), ("S", names(1, 3)[1])] == take(sink)


def test_an_allocation_that_does_not_fit_evicts_no_page():
    manager, sink = make(4)
    serve(manager, 1)
    serve(manager, 2)
    held = request(3, 4)
    manager.allocate(held, 8)
    take(sink)
    assert manager.allocate(request(1, 5, 6, 7), 16) is None
    assert ([held], 2, []) == (list(manager.requests), manager.num_inactive_blocks, take(sink))


def test_the_least_recently_used_leaf_is_trimmed_first_from_its_tail():
    manager, sink = make(8)
    serve(manager, 1, 2, 3)
    serve(manager, 4, 5)
    serve(manager, 1, 2, 3)
    take(sink)
    assert manager.evict(1) == 4
    assert manager.evict(8) == 8
    assert [("R", names(4, 5)[1]), ("R", *names(4), names(1, 2, 3)[2])] == take(sink)


def test_a_parent_is_evicted_after_its_children_in_the_same_event():
    manager, sink = make(8)
    serve(manager, 1, 2)
    serve(manager, 1, 3)
    assert names(1, 2)[1:] + names(1, 3)[1:] + names(1) == manager.inactive_blocks()
    take(sink)
    assert manager.evict(12) == 12
    assert [("R", names(1, 2)[1], names(1, 3)[1], *names(1))] == take(sink)


def test_both_halves_of_a_split_node_keep_its_last_access_time():
    manager, _ = make(16)
    serve(manager, 1, 2, 3)
    serve(manager, 4, 5)
    assert manager.allocate(request(1, 6), 8) == 4  # splits the first node without using it
    assert names(1, 2, 3)[1:] == manager.inactive_blocks()[:2]


def test_a_leaf_grows_in_place_with_the_tokens_of_its_request():
    manager, _ = make(16)
    one = request(1, tail=3)
    manager.allocate(one, 7)
    manager.checkpoint(one)
    step(manager, one, 0, 5, 5, 5, 5)
    assert [tuple(names(1, 0, 5))] == [node.names for node in manager._tree.nodes()]


def test_reserved_pages_are_not_published_before_they_are_claimed():
    manager, sink = make(4)
    serve(manager, 1)
    take(sink)
    one = request(1, 2, tail=1)
    assert manager.reserve(one, 9) == 2
    assert (take(sink), manager.free_pages) == ([], 1)
    manager.extend(one, 9)
    manager.checkpoint(one)
    assert [("S", names(1, 2)[1])] == take(sink)
    assert manager.reserve(request(3, 4, 5), 12) is None


# ---------------------------------------------------------------------------------------------------- events


def test_a_prompt_is_published_when_it_is_computed_and_output_when_a_page_is_full():
    manager, sink = make()
    one = request(1, tail=3)
    manager.allocate(one, 7)
    assert [("S", *names(1))] == take(sink)
    step(manager, one, 0)
    assert [("S", names(1, 0)[1])] == take(sink)
    step(manager, one, 5, 5, 5)
    manager.finish(one)
    assert take(sink) == []


def test_pages_with_the_same_hash_are_stored_once_and_removed_with_the_last_copy():
    manager, sink = make()
    first, second = request(1, 2), request(1, 2)
    manager.allocate(first, 8)
    manager.allocate(second, 8)  # neither request is in the tree yet
    assert [("S", *names(1, 2))] == take(sink)
    assert manager.free_pages == 4
    manager.release(first)
    assert take(sink) == []
    manager.release(second)
    assert [("R", *names(1, 2))] == take(sink)
    assert manager.resident() == []


def test_a_stored_begins_at_the_first_page_that_was_not_cached():
    manager, sink = make()
    manager.allocate(request(1, 2), 8)
    second = request(1, 2, 3)
    manager.allocate(second, 12)
    assert [("S", *names(1, 2)), ("S", names(1, 2, 3)[2])] == take(sink)


def test_duplicate_pages_are_freed_when_their_request_is_checkpointed():
    manager, sink = make()
    first, second = request(1, 2), request(1, 2)
    manager.allocate(first, 8)
    manager.allocate(second, 8)
    manager.finish(first)
    assert manager.free_pages == 4
    manager.checkpoint(second)
    assert manager.free_pages == 6
    manager.finish(second)
    assert [("S", *names(1, 2))] == take(sink)
    manager.evict(8)
    assert [("R", *names(1, 2))] == take(sink)


def test_a_release_frees_only_pages_that_are_not_cached():
    manager, _ = make(8)
    serve(manager, 1, 2)
    one = request(1, 2, 3)
    manager.allocate(one, 12)
    manager.release(one)
    assert (manager.unused_pages(), manager.free_pages) == (8, 6)
    assert sorted(names(1, 2)) == sorted(manager.resident())


def test_a_clear_is_refused_while_a_request_has_pages():
    manager, sink = make()
    serve(manager, 1)
    one = request(2)
    manager.allocate(one, 4)
    assert not manager.clear()
    manager.finish(one)
    take(sink)
    assert manager.clear()
    assert take(sink) == [("C",)]
    assert (manager.free_pages, manager.resident()) == (8, [])


# ------------------------------------------------------------------------------------------------- arguments


def test_a_move_is_refused():
    manager, _ = make()
    with pytest.raises(MoveError, match="a 'mocker_sglang_1_6' manager takes requests, not moves"):
        manager.use([1])


def test_a_page_can_be_a_single_token():
    manager = create_manager("mocker_sglang_1_6", num_blocks=3, block_size=1)
    one = request(1, 2, size=1)
    assert manager.allocate(one, 2) == 0
    manager.finish(one)
    assert names(1, 2, size=1) == manager.inactive_blocks()


# ------------------------------------------------------------------------------------------------ any program


class Model:
    """A sink with the blocks that its events leave present."""

    def __init__(self):
        self.present = set()

    def publish(self, event, storage_tier=None, token_ids=None):
        data = event.data
        if isinstance(data, Stored):
            self.present.update(data.block_hashes)
        elif isinstance(data, Removed):
            assert self.present.issuperset(data.block_hashes)
            self.present.difference_update(data.block_hashes)


PAGES = st.lists(st.integers(1, 3), min_size=1, max_size=4)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), PAGES, st.integers(0, SIZE - 1)),
        st.tuples(st.sampled_from(["step", "checkpoint", "finish", "release"]), st.integers(0, 5), st.integers(1, 2)),
        st.tuples(st.just("evict"), st.integers(1, 20), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=examples(300))
@given(calls=CALLS, num_blocks=st.sampled_from([3, 6, 12]))
def test_any_requests_conserve_pages_and_events_equal_the_cached_pages(calls, num_blocks):
    model = Model()
    manager = create_manager("mocker_sglang_1_6", num_blocks=num_blocks, block_size=SIZE, sink=model)
    for name, what, number in calls:
        running = list(manager.requests)
        if name == "allocate":
            one = request(*what, tail=number)
            manager.allocate(one, len(one))
        elif name == "evict":
            manager.evict(what)
        elif running:
            one = running[what % len(running)]
            if name == "step":
                if manager.make_room(one.opens_page):
                    step(manager, one, number)
            else:
                getattr(manager, name)(one)
        own = sum(one.allocated - one.shared for one in manager.requests)
        cached = sum(len(node.names) for node in manager._tree.nodes())
        assert num_blocks == manager.free_pages + cached + own
        assert model.present == set(manager.resident())
        assert manager._tree.evictable == len(manager.inactive_blocks())
        assert set(manager.inactive_blocks()) <= model.present
    for one in list(manager.requests):
        manager.finish(one)
    assert num_blocks == manager.unused_pages()


def test_eviction_orders_two_halves_of_a_node_with_the_same_access_time():
    tree = PageTree()
    tree.put_behind(tree.root, [1, 2, 3], [10, 11, 12], 0, 3)
    upper, pages = tree.find([1, 2, 4], 3)
    assert pages == [10, 11]
    assert {node.last for node in tree.nodes()} == {upper.last}
    assert tree.trim(3) == [12, 10, 11]
