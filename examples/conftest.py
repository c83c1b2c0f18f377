"""Registers the backend of `custom_backend/`.

pytest reads this conftest before collection, whether it is started as `pytest`, `pytest examples` or
`pytest examples/custom_backend`. Backends are read before collection, so the hook is here and not next to the
backend; in your own project, put it into the conftest of the root or of a directory in `testpaths`.

It also lists repeats that run only if the environment variable KVMOCK_DEEP is 1: the same test over another engine, and
the costly tests of a contract for its second and third class. An id that you name on the command line always runs.
"""

import os
import re
from pathlib import Path

import pytest
from custom_backend.s3fifo import S3FIFO


@pytest.hookimpl(optionalhook=True)  # so that `pytest -p no:kvmock` still runs
def pytest_kvmock_backends():
    return {"s3fifo": S3FIFO}


HERE = Path(__file__).parent
COSTLY = "test_it_follows_live_traffic|test_it_holds_what_a_fleet_has|test_a_look_up_costs_no_more_than_its_share"
OF_PAIRS = (
    "test_pairs_|test_prompts_are_computed|test_no_prefill|test_the_load_of_prefill|test_legs_meet|test_each_role"
)
DEEP = [  # patterns of ids below this directory; each comment names the part that a quick run keeps
    # TestMyIndex keeps them.
    rf"own_index/.*::(TestTokenIndex|TestHashIndex|TestQueuedIndex)::({COSTLY})$",
    # TestCacheAware, which reports its beliefs, TestDynamoCost, which has a selector, and TestKvCacheAware of
    # TensorRT-LLM.
    r"routing/test_routing_contract\.py::(TestTwoChoices|TestHashRing|TestAibrixRule|TestScorers|TestRayRule)::",
    # A window and a state, one from each product.
    r"routing/test_hybrid_routing\.py::test_who_counts.*\[(vllm_qwen3_next|sglang_gpt_oss)\]$",
    r"routing/test_hybrid_routing\.py::test_where_conversations_branch.*\[vllm_qwen3_next\]$",
    r"routing/test_hybrid_routing\.py::test_of_plain_models.*\[vllm\]$",
    # The first cache of TensorRT-LLM without a host, the second one with a host.
    r"routing/test_trtllm_routing\.py::.*\[(trtllm_v2|v1_with_host)\b",
    # Scenes of pairs, and one seed.
    rf"prefill_decode/.*::Test\w+::(?!{OF_PAIRS})",
    r"prefill_decode/.*::test_whatever_happens.*-[1-4]\]$",
    # A plain cache, windows and states of vLLM and SGLang, both caches of TensorRT-LLM, and Dynamo's mock.
    r"engine_matrix/.*\[(?!(lineage|vllm|vllm_gpt_oss|vllm_qwen3_next|sglang|sglang_gpt_oss|sglang_qwen3_next|trtllm|trtllm_v2)\])",
]


def is_deep(item):
    if not item.path.is_relative_to(HERE):
        return False
    name = item.path.relative_to(HERE).as_posix() + "::" + item.nodeid.partition("::")[2]
    return any(re.match(pattern, name) for pattern in DEEP)


def pytest_collection_modifyitems(config, items):
    if os.environ.get("KVMOCK_DEEP") == "1" or any("::" in argument for argument in config.args):
        return
    deep = {item for item in items if is_deep(item)}
    if deep:
        config.hook.pytest_deselected(items=list(deep))
        items[:] = [item for item in items if item not in deep]
