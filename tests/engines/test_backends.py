"""Backends by name and by spec: third-party registrations and their visibility."""

from __future__ import annotations

from uuid import UUID

import pytest

from pytest_kvmock import (
    BACKENDS,
    BackendSpec,
    CapturingSink,
    EngineProfile,
    EvictionPolicy,
    RouterHarness,
    create_manager,
)
from pytest_kvmock.engines import backend_spec
from pytest_kvmock.engines.backends import known_backends, registered
from pytest_kvmock.plugin.options import known_names
from pytest_kvmock.values import MoveError, Promote, lineage_hash


@pytest.fixture(autouse=True)
def _only_built_in_ones():
    with registered({}):  # the test run may have others
        yield


class NewestFirst(EvictionPolicy):
    """The minimal eviction policy."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.slots = []

    def insert(self, slots):
        self.slots += slots

    def remove(self, slots):
        self.slots = [slot for slot in self.slots if slot not in slots]

    def evict(self, count):
        chosen = self.order()[:count]
        self.remove(chosen)
        return chosen

    def clear(self):
        self.slots.clear()

    def order(self):
        return self.slots[::-1]


MINE = BackendSpec.of_policy("mine", NewestFirst, models="nobody", prefix_closed=False)


def test_a_backend_can_be_made_from_an_eviction_policy_alone():
    sink = CapturingSink()
    manager = create_manager(MINE, num_blocks=3, sink=sink)
    manager.use([1, 2, 3])
    for block in (2, 1, 3):
        manager.deref([block])

    assert (manager.backend, manager.num_blocks) == ("mine", 3)
    assert manager.inactive_blocks() == [3, 1, 2]
    manager.use([4, 5])
    assert [event.data.block_hashes for event in sink.events if type(event.data).__name__ == "Removed"] == [(3, 1)]
    assert manager.inactive_blocks() == [2]


def test_each_manager_gets_its_own_policy_with_its_capacity():
    made = []
    spec = BackendSpec.of_policy("mine", lambda num_blocks: made.append(NewestFirst(num_blocks)) or made[-1], models="")
    create_manager(spec, num_blocks=3)
    create_manager(spec, num_blocks=5)

    assert [policy.num_blocks for policy in made] == [3, 5]


def test_optional_methods_of_an_eviction_policy_do_nothing_by_default():
    policy = NewestFirst(1)

    assert policy._collisions == 0
    assert [
        policy._on_register([]),
        policy._on_touch(None),
        policy._find(1),
        policy._first_refused([]),
    ] == [None] * 4
    assert [policy._free_places(plhs, {2: None}) for plhs in ([1], [1, 1], [1, 2])] == [[1], None, None]
    with pytest.raises(TypeError, match="abstract"):
        type("Nothing", (EvictionPolicy,), {})()


def test_an_incomplete_policy_is_named_in_the_error():
    spec = BackendSpec.of_policy("mine", lambda _: object(), models="nobody")

    with pytest.raises(
        ValueError, match="the policy of backend 'mine' has no clear: derive object from EvictionPolicy"
    ):
        create_manager(spec, num_blocks=3)
    looks_like_one = type("Mine", (), dict.fromkeys(["insert", "remove", "evict", "clear", "order"]))()
    spec = BackendSpec.of_policy("mine", lambda _: looks_like_one, models="nobody")
    with pytest.raises(
        ValueError, match="the policy of backend 'mine' is not an EvictionPolicy: derive Mine from EvictionPolicy"
    ):
        create_manager(spec, num_blocks=3)
    with pytest.raises(ValueError, match="num_blocks must be an integer of at least 1, got 0"):
        create_manager(MINE, num_blocks=0)


def test_a_backend_spec_is_accepted_wherever_a_name_is():
    with RouterHarness(backend=MINE) as kv_harness:
        prompt = kv_harness.prompt()
        kv_harness.worker(0).serve(prompt)
        assert (
            "mine"
            == kv_harness.backend
            == kv_harness.worker(0).backend
            == kv_harness.worker(None, backend=MINE).backend
        )
        assert kv_harness.overlap(prompt) == {0: 4}
        with pytest.raises(ValueError, match="the harness has backend 'mine' already; it cannot become 'lru'"):
            kv_harness.inside.use_backend("lru")


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_can_have_variants_under_other_names(name):
    first = BACKENDS[name].variant("first")
    second = first.variant("second")
    assert [create_manager(spec, num_blocks=4).backend for spec in (first, second)] == ["first", "second"]
    assert not second.in_matrix
    assert [BACKENDS[name].variant("x", prefix_closed=closed).prefix_closed for closed in (True, False)] == [
        True,
        False,
    ]
    assert BACKENDS[name].prefix_closed == first.prefix_closed


VARIANTS = [
    *BACKENDS.values(),
    *(spec.variant(f"{name}_variant") for name, spec in BACKENDS.items()),
    BACKENDS["hash_cache"].variant("strict", prefix_closed=True, strict=True),
    BACKENDS["vllm"].variant("uncached", enable_caching=False),
    BACKENDS["sglang"].variant("slru", policy="slru"),
    MINE,
]


@pytest.mark.parametrize("spec", VARIANTS, ids=lambda spec: spec.name)
def test_a_backend_spec_has_the_traits_of_its_workers(spec):
    assert RouterHarness(backend=spec).worker(0).traits == spec.traits


def test_a_variant_models_the_given_version():
    assert BACKENDS["vllm"].variant("older", version="0.28.0", hash_seed="1").models == "vLLM 0.28.0, hash_seed='1'"


def test_a_variant_is_in_the_matrix_only_on_request():
    assert not BACKENDS["sglang"].variant("lfu", policy="lfu").in_matrix
    assert BACKENDS["sglang"].variant("lfu", policy="lfu", in_matrix=True).in_matrix


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("sglang", {"policy": "tlru"}, "policy"),
        ("vllm", {"version": "0.99.0"}, "0.99.0"),
        ("vllm", {"hash_algorithm": "xxhash", "hash_seed": None}, "seed"),
        ("hash_cache", {"strict": 1}, "strict must be True or False, got 1"),
    ],
)
def test_a_variant_with_options_that_its_engine_refuses_is_refused_at_creation(backend, options, message):
    with pytest.raises(ValueError, match=message):
        BACKENDS[backend].variant("variant", **options)


def test_a_backend_of_a_custom_policy_can_have_variants():
    assert create_manager(MINE.variant("other"), num_blocks=4).backend == "other"


def test_a_variant_still_accepts_the_options_that_it_does_not_set():
    xxhash = BACKENDS["vllm"].variant("xxhash", hash_algorithm="xxhash")
    assert create_manager(xxhash, num_blocks=4, version="0.24.0").version.name == "0.24.0"
    with pytest.raises(
        ValueError, match=r"^backend 'xxhash' has no option 'hash_algorithm'; it has version, hash_seed, "
    ):
        xxhash.variant("sha256", hash_algorithm="sha256")


WRONG = [
    ({"name": ""}, "a backend's name has letters, .*; got ''"),
    ({"name": 7}, "a backend's name has letters, .*; got 7"),
    ({"name": "a b"}, "a backend's name has letters, .*; got 'a b'"),
    ({"name": "mine]"}, "a backend's name has letters, .*; got 'mine]'"),
    ({"name": "all"}, "is not one of all, no-backend, hybrid, speculative; got 'all'"),
    ({"make": None}, "backend 'mine': make must be callable, got None"),
    ({"residency": "both"}, "backend 'mine': residency must be 'unique' or 'counted', got 'both'"),
    ({"scheduler": "trt"}, "backend 'mine': scheduler must be 'vllm' or 'sglang' or 'trtllm', got 'trt'"),
    ({"models": None}, "backend 'mine': models must be a string, got None"),
    ({"prefix_closed": "no"}, "backend 'mine': prefix_closed must be True or False, got 'no'"),
    ({"in_matrix": 1}, "backend 'mine': in_matrix must be True or False, got 1"),
    ({"as_read": "no"}, "backend 'mine': as_read must be True or False, got 'no'"),
    ({"driver": 3}, "backend 'mine': driver must be callable, or None, got 3"),
    ({"chain": "sha256"}, "backend 'mine': chain must be callable, or None, got 'sha256'"),
]


@pytest.mark.parametrize(("field", "message"), WRONG)
def test_an_invalid_backend_spec_is_refused(field, message):
    with pytest.raises(ValueError, match=message):
        BackendSpec(**{"name": "mine", "models": "nobody", "make": MINE.make, **field})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chunk": 0}, "chunk must be an integer of at least 1 tokens, or None, got 0"),
        ({"prefix_caching": 1}, "prefix_caching must be True or False, got 1"),
        ({"real_sizes": 1}, "real_sizes must be True or False, got 1"),
        ({"seed": "x"}, "seed must be an integer, got 'x'"),
        ({"workers": -1}, "workers must be an integer of at least 0, got -1"),
        ({"dp_size": 0}, "dp_size must be an integer of at least 1, got 0"),
        ({"num_block": 3}, "unknown profile field 'num_block'; did you mean 'num_blocks'? known: block_size, "),
    ],
)
def test_an_invalid_profile_field_is_refused(fields, message):
    with pytest.raises(ValueError) as raised:
        EngineProfile().replace(**fields)
    assert str(raised.value).startswith(message)


def test_profile_fields_accept_their_minimum_values():
    least = {"block_size": 1, "num_blocks": 1, "workers": 0, "dp_size": 1, "chunk": 1}
    profile = EngineProfile(**least)
    assert least == {name: getattr(profile, name) for name in least}


@pytest.mark.parametrize(
    "name", [name for name, spec in BACKENDS.items() if name not in ("lineage", "lru", "multi_lru") and not spec.group]
)
def test_a_manager_class_and_create_manager_have_the_same_default_sizes(
    name,
):  # the class of a hybrid model needs its groups
    made = create_manager(name, num_blocks=4)
    own = type(made)(num_blocks=4)
    assert (made.block_size, made.dp_rank, made.num_blocks) == (own.block_size, own.dp_rank, own.num_blocks)


def test_a_vllm_manager_can_be_cleared_only_while_no_block_is_in_use():
    worker = RouterHarness(EngineProfile(block_size=4, num_blocks=8), "vllm").worker(0)
    request = worker.prefill(range(9))
    assert (worker.manager.clear(), len(list(worker.manager.resident()))) == (False, 2)
    request.finish()
    assert (worker.manager.clear(), len(list(worker.manager.resident()))) == (True, 0)


def test_the_local_hash_of_a_promoted_block_defaults_to_0():
    sink = CapturingSink()
    manager = create_manager("lineage", num_blocks=4, sink=sink)
    name = UUID(int=7)
    manager.use([name])
    manager.process(Promote(name, 5, plh=lineage_hash(5, None, 0)))
    assert [getattr(sink.events[-1].data, field) for field in ("block_hashes", "tokens_hashes", "parent_hash")] == [
        (5,),
        (0,),
        None,
    ]


class Removal:
    """A move of an unknown kind."""


@pytest.mark.parametrize("name", ["vllm", "sglang", "mocker_sglang_1_6"])
def test_a_manager_that_takes_requests_refuses_every_move(name):
    manager = create_manager(name, num_blocks=4)
    moves = {
        "Use": lambda: manager.use([1]),
        "Deref": lambda: manager.deref([1]),
        "Promote": lambda: manager.promote(1, 2),
        "Removal": lambda: manager.process(Removal()),
        "prefill_cost of a sequence": lambda: manager.prefill_cost(object()),
    }
    for what, move in moves.items():
        with pytest.raises(MoveError, match=rf"^{what}: a '{name}' manager takes requests, not moves \("):
            move()


@pytest.mark.parametrize("ask", [backend_spec, lambda name: known_names((name,), "backend", tuple(BACKENDS))])
def test_the_removed_mock_of_sglang_is_refused_with_its_replacement(ask):
    with pytest.raises(ValueError) as refused:
        ask("mocker_sglang")
    assert str(refused.value) == (
        f"unknown backend 'mocker_sglang'; did you mean 'mocker_sglang_1_6'? known: {', '.join(BACKENDS)}; "
        "Dynamo's mock of SGLang is mocker_sglang_1_6 now, and SGLang's own cache is sglang"
    )


def test_a_policy_that_is_not_callable_is_refused():
    with pytest.raises(ValueError, match="backend 'mine': policy must be callable, got <"):
        BackendSpec.of_policy("mine", NewestFirst(1), models="nobody")


def test_backend_names_are_known_only_inside_their_innermost_registration():
    other = BackendSpec("other", "nobody", MINE.make)
    with registered({"mine": MINE}):
        assert list(known_backends()) == [*BACKENDS, "mine"]
        assert MINE is backend_spec("mine")
        assert create_manager("mine", num_blocks=1).backend == "mine"
        with registered({"other": other}):
            assert list(known_backends()) == [*BACKENDS, "other"]
        assert list(known_backends()) == [*BACKENDS, "mine"]
    with pytest.raises(ValueError, match=f"^unknown backend 'mine'; known: {', '.join(BACKENDS)}$"):
        backend_spec("mine")
    assert "mine" not in BACKENDS


def test_an_exception_ends_a_registration():
    with pytest.raises(OSError, match="x"), registered({"mine": MINE}):
        raise OSError("x")
    assert known_backends() == dict(BACKENDS)
