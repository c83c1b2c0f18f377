"""SGLang's trees with only full attention are equal: with empty parts, and over a host without a page."""

from random import Random

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_kvmock import CapturingSink, OutOfBlocks, Prompt
from pytest_kvmock.engines import KvWorker
from pytest_kvmock.engines.base.bandwidth import HostLinks
from pytest_kvmock.engines.makers import sglang_driver
from pytest_kvmock.engines.sglang.geometry import Geometry
from pytest_kvmock.engines.sglang.host.hicache_cache import HiCacheManager
from pytest_kvmock.engines.sglang.hybrid_cache import HybridCacheManager
from pytest_kvmock.engines.sglang.radix_cache import RadixCacheManager

SIZE, CAPACITY = 4, 8

prompts = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=6).map(
    lambda blocks: [block for block in blocks for _ in range(SIZE)] + [7]
)
calls = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), prompts),
        st.tuples(st.just("decode"), st.integers(0, 9), st.integers(1, 9)),
        st.tuples(st.just("finish"), st.integers(0, 9)),
        st.tuples(st.just("evict"), st.integers(1, CAPACITY)),
        st.tuples(st.just("look"), prompts),
    ),
    max_size=30,
)


def over_no_host(**options):
    manager = HiCacheManager(host_blocks=0, **options)
    manager.offload = HostLinks(0, 0)
    return manager


def with_no_parts(**options):
    return HybridCacheManager(geometry=Geometry(), **options)


def played(make, policy, program):
    """Return the result of each call with the events published by then."""
    sink = CapturingSink()
    worker = KvWorker(
        lambda into: make(num_blocks=CAPACITY, block_size=SIZE, policy=policy, sink=into),
        sink=sink,
        rng=Random(0),
        driver=sglang_driver,
    )
    requests, rows = [], []
    for kind, *arguments in program:
        answer = None
        try:
            if kind == "prefill":
                requests.append(worker.prefill(Prompt(arguments[0])))
                answer = requests[-1].cached_tokens
            elif kind == "look":
                answer = worker.cached_tokens(Prompt(arguments[0]))
            elif kind == "evict":
                worker.manager.evict(arguments[0] * SIZE)
            elif requests:
                request = requests[arguments[0] % len(requests)]
                if kind == "finish":
                    requests.remove(request)
                    request.finish()
                else:
                    request.decode([3] * arguments[1])
        except OutOfBlocks as error:
            answer = "out", error.requested > error.available
        rows.append(
            ((kind, *arguments), answer, [event.data for event in sink.take()], worker.manager.available_size())
        )
    return rows


@pytest.mark.parametrize("make", [with_no_parts, over_no_host])
@pytest.mark.parametrize("policy", ["lru", "lfu", "slru"])
@settings(max_examples=examples(200), database=None, deadline=None)
@given(program=calls)
def test_a_tree_without_components_or_host_pages_equals_a_plain_radix_cache(make, policy, program):
    expected, found = (played(each, policy, program) for each in (RadixCacheManager, make))
    if (
        make is over_no_host
    ):  # a worker with a host checks for room before it matches, because a match would leave a split
        refused = next((at for at, row in enumerate(expected) if row[1] == ("out", True)), len(expected))
        expected, found = expected[:refused], found[:refused]
    assert found == expected
