"""Right indexes crossed with every backend, in random traffic and in every test of the contract; none may fail.

The quick run takes one cell per kind; the deep run all. A new backend is included automatically.
"""

import random
from functools import partial

import pytest
from contract_runs import names_of_tests
from depth import each_parameter, few, seeds, takes_long
from right_indexes import (
    ByEngineNames,
    ByPlace,
    OfAllTiersAlike,
    OfAttention,
    OfEdges,
    OfEdgesThatObey,
    OfEngineNames,
    OfLongestWindow,
    OfReference,
    OfWindows,
)

from pytest_kvmock import BACKENDS, EngineProfile, EventRulesBroken, Prompt, RouterHarness
from pytest_kvmock.testing import IndexContract
from pytest_kvmock.testing.drafts import random_traffic

BY_HASHES = (OfEdges, OfEdgesThatObey, OfReference)
BACKENDS_OF_ONE_CACHE = [
    name
    for name, spec in BACKENDS.items()
    if not (spec.traits.publishes_groups or spec.traits.promises_more or spec.traits.looks_ahead)
]


HYBRIDS = [name for name, spec in BACKENDS.items() if spec.traits.publishes_groups or spec.traits.promises_more]
DRAFTS = [name for name, spec in BACKENDS.items() if spec.traits.looks_ahead]
OF_SEVERAL_CACHES = [
    *((OfReference, name) for name in (*HYBRIDS, *DRAFTS)),
    *((OfAttention, name) for name in HYBRIDS),
    *((OfWindows, name) for name in DRAFTS),
]


def over(contract, *backends):
    return type(contract.__name__, (contract,), {"backends": backends})()


def follow(contract, backend, seed):
    """Let an index follow random traffic of a backend."""
    mine = over(contract, backend)
    (spec,) = mine._specs()
    program = random_traffic(seed, 60, workers=2, ranks=1, most_blocks=5, most_in_a_burst=20)
    mine._follow(spec, mine._profile(spec, 8, 2, 1), program, seed)


def hold(contract, name):
    try:
        getattr(contract, name)()
    except pytest.skip.Exception:
        return


@pytest.mark.parametrize(("contract", "seed"), [(OfEdges, 6), (OfEdgesThatObey, 6), (OfReference, 0)])
def test_an_index_of_hashes_follows_an_engine_that_drops_leaves_silently(contract, seed):
    follow(contract, "trtllm", seed)


@takes_long
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("backend", BACKENDS_OF_ONE_CACHE)
@pytest.mark.parametrize("contract", BY_HASHES)
def test_an_index_of_hashes_follows_every_engine(contract, backend, seed):
    follow(contract, backend, seed)


@pytest.mark.parametrize(("contract", "backend"), few(OF_SEVERAL_CACHES, 4))
@each_parameter
def test_an_index_of_groups_or_windows_follows_every_engine(contract, backend):
    for seed in seeds(8):
        follow(contract, backend, seed)


CELLS = [
    (OfEngineNames, None, "test_a_stored_prompt_is_found_whole"),
    (OfEngineNames, None, "test_many_events_may_come_before_a_flush"),
    (OfAllTiersAlike, None, "test_what_another_tier_alone_has_is_not_found"),
    (OfLongestWindow, "trtllm", "test_a_partial_block_is_never_promised"),
    (OfLongestWindow, "trtllm", "test_what_left_without_a_word_is_stored_once_more_and_removed_once"),
    (OfReference, "trtllm_v2", "test_layer_groups_have_any_order"),
    (OfEdges, "trtllm_v2", "test_layer_groups_have_any_order"),
]


@pytest.mark.parametrize(("contract", "backend", "name"), CELLS)
def test_a_right_index_passes_tests_that_once_failed_it(contract, backend, name):
    hold(contract() if backend is None else over(contract, backend), name)


NAMES = names_of_tests(IndexContract)
CONTRACTS = [
    (OfEngineNames, ()),
    (OfAllTiersAlike, ()),
    (OfLongestWindow, ("trtllm",)),
    (OfLongestWindow, ("trtllm_v2",)),
    *((contract, (backend,)) for contract in BY_HASHES[::2] for backend in BACKENDS_OF_ONE_CACHE),
]
OF_WINDOWS = {
    "test_a_shorter_window_is_another_group",
    "test_it_follows_traffic_of_two_windows",
    "test_layer_groups_have_any_order",
}
"""Tests that `OfEdges` fails over `trtllm` because it does not read windows; `OfLongestWindow` passes them there."""

EVERY = 8
"""Of the tests over several caches, each backend has one in eight, and each test one backend in eight: all cells take
three hours."""


@takes_long
@pytest.mark.parametrize(
    ("contract", "backends", "name"),
    [
        *(
            (contract, backends, name)
            for contract, backends in CONTRACTS
            for name in NAMES
            if not (contract is OfEdges and backends == ("trtllm",) and name in OF_WINDOWS)
        ),
        *(
            (contract, (backend,), name)
            for place, (contract, backend) in enumerate(OF_SEVERAL_CACHES)
            if contract is not OfAttention
            for name in NAMES[place % EVERY :: EVERY]
        ),
    ],
)
def test_a_right_index_passes_every_test(contract, backends, name):
    hold(over(contract, *backends) if backends else contract(), name)


# ------------------------------------------------------------------------------------------- images, by their place


def images(index, backend, seed):
    """Serve prompts with equal tokens that differ in the offset of an image, with constant evictions."""
    rng = random.Random(seed)
    harness = RouterHarness(EngineProfile(block_size=4, num_blocks=12), backend, index)
    for _ in range(60):
        tokens = [*[rng.choice([1, 2])] * 4, *[3] * rng.randint(4, 8)]
        harness.worker(0).serve(Prompt(tokens, multimodal=[("cat", rng.randint(0, 5), rng.randint(1, 3))]))
    harness.judge()
    harness.events.assert_no_event_errors()


class Never(ByPlace):
    """Wrong: ignores each Removed."""

    def apply(self, event):
        if type(event.event.data).__name__ != "Removed":
            super().apply(event)


class NoPlace(ByPlace):
    """Hashes images without their offsets, like Dynamo's local hashes."""

    def chain(self, tokens, extra, prefix=()):
        keys = (extra or {}).get("extra_keys") or [None] * len(tokens)
        named = [[key[0] for key in each or ()] for each in keys]
        return super().chain(tokens, {"extra_keys": [tuple(each) for each in named]}, prefix)


def reusing(kind):
    return type(kind.__name__, (kind,), {"answers": "reusable"})(4)


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize(
    "make", [partial(ByPlace, 4), partial(NoPlace, 4), partial(reusing, ByPlace)], ids=["place", "none", "exact"]
)
@each_parameter
def test_an_index_that_keys_images_by_offset_follows_vllm(make, seed):
    images(make(), "vllm", seed)


@pytest.mark.parametrize("seed", [0, 3])
def test_an_index_without_image_offsets_does_not_return_reusable_blocks(seed):
    with pytest.raises(EventRulesBroken, match="index_drift"):
        images(reusing(NoPlace), "vllm", seed)


def test_an_index_that_removes_no_image_is_found():
    with pytest.raises(EventRulesBroken, match="index_drift"):
        images(Never(4), "vllm", 0)


# ------------------------------------------------------------------------------------------------ what is declared


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"names": "vllm", "backends": ("lineage",)},
            "names is 'vllm', and backends has 'lineage', whose blocks have other names",
        ),
        ({"names": "lineage"}, "names is 'lineage', and backends has 'lineage', whose blocks have other names"),
        ({"one_tier": 1}, "one_tier must be True or False, got 1"),
    ],
)
def test_a_contradictory_declaration_is_refused_in_one_line(fields, text):
    mine = type("Mine", (OfEngineNames,), {"names": None, **fields})()
    with pytest.raises(pytest.fail.Exception, match=f"^Mine: {text}$"):
        mine.test_a_stored_prompt_is_found_whole()


def test_an_index_that_computes_names_without_declaring_it_gets_advice():
    mine = type("Mine", (OfEngineNames,), {"names": None, "backends": ("vllm",)})()
    with pytest.raises(
        pytest.fail.Exception, match=r'^ByEngineNames has answered nothing .* names = "vllm", or a variant'
    ):
        mine.test_a_stored_prompt_is_found_whole()


def test_a_declared_variant_gives_names_with_another_hash():
    other = BACKENDS["vllm"].variant("vllm_sha256", hash_algorithm="sha256", hash_seed="7")
    mine = type(
        "Mine", (OfEngineNames,), {"names": other, "make_index": lambda self, size: ByEngineNames(size, "sha256", "7")}
    )()
    mine.test_a_stored_prompt_is_found_whole()
