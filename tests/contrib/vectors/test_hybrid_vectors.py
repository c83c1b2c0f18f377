"""Vectors of hybrid models: readers with only json and msgpack answer between the two bounds, and naive ones do
not.
"""

import json
from collections import defaultdict

import msgspec
import pytest
from hybrid_readers import (
    NAIVE,
    AnyGroup,
    Dense,
    DividesTheSpanByItsHashes,
    Exact,
    LooksUpParentsAcrossGroups,
    MinimumOverGroups,
    OneMap,
    RemovesOfAnyGroup,
    TakesGroupZero,
    TakesTailsForBlocks,
)

from pytest_kvmock import RadixIndex
from pytest_kvmock.contrib.vectors import write_vectors
from pytest_kvmock.contrib.vectors.hybrid_vectors import hybrid_engines
from pytest_kvmock.wire import DIALECTS, decode

SIZE = 4
SETS = ["vllm_gpt_oss", "vllm_qwen3_next", "vllm_kimi_k3", "full_first"]


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("vectors")
    write_vectors(home, dialects=["vllm-0.33"])
    return home / "vllm-0.33"


@pytest.fixture(scope="module")
def about(home):
    (dialect,) = json.loads((home.parent / "index.json").read_text(encoding="utf-8"))["dialects"]
    return {each["name"]: each for each in dialect["sets"]}


FOUND_IN = {
    OneMap: "full_first",
    AnyGroup: "full_first",  # elsewhere the blocks of a sparse group are evicted before those of the attention group
    MinimumOverGroups: "vllm_qwen3_next",
    DividesTheSpanByItsHashes: "full_first",  # elsewhere the attention group corrects it at once
    LooksUpParentsAcrossGroups: "vllm_qwen3_next",
    TakesGroupZero: "vllm_gpt_oss",
    RemovesOfAnyGroup: "vllm_gpt_oss",
    TakesTailsForBlocks: "vllm_kimi_k3",  # the others have no tails
}


def wrong_answers(home, about, kind, *, exactly=False):
    """Return how many answers of a reader are not between the bounds in the vectors; `exactly`: not the lower one."""
    workers = {worker: kind(about) for worker in ("0", "1")}
    queries, wrong = defaultdict(list), 0
    for query in lines(home / "queries.jsonl"):
        queries[query["after"]].append(query)
    for number, batch in enumerate(lines(home / "batches.jsonl"), 1):
        data = (home / batch["file"]).read_bytes()[batch["offset"] : batch["offset"] + batch["size"]]
        for event in msgspec.msgpack.decode(data)[1]:
            workers[str(batch["worker"])].apply(event)
        for query in queries.pop(number, ()):
            for worker, index in workers.items():
                most, least = query["overlap"].get(worker, 0), query["reusable"].get(worker, 0) // SIZE
                wrong += not least <= index.answer(query["tokens"]) <= (least if exactly else most)
    assert queries == {}
    return wrong


@pytest.mark.parametrize("name", SETS)
def test_correct_indexes_answer_all_hybrid_vectors(home, about, name):
    assert wrong_answers(home / name, about[name], Dense) == 0
    assert wrong_answers(home / name, about[name], Exact, exactly=True) == 0
    assert wrong_answers(home / name, about[name], Dense, exactly=True)  # it answers with the held blocks


@pytest.mark.parametrize("naive", NAIVE)
def test_naive_indexes_give_wrong_answers(home, about, naive):
    assert wrong_answers(home / FOUND_IN[naive], about[FOUND_IN[naive]], naive)


@pytest.mark.parametrize("name", SETS)
def test_an_answer_below_the_reusable_tokens_is_wrong(home, about, name):
    class Less(Exact):
        def answer(self, tokens):
            return max(super().answer(tokens) - 1, 0)

    assert wrong_answers(home / name, about[name], Less)


@pytest.mark.parametrize("name", SETS)
def test_the_reference_index_finds_the_held_blocks_and_engines_reuse_no_more(home, name):
    index, batches, number = RadixIndex(count_copies=True), lines(home / name / "batches.jsonl"), 0
    for query in lines(home / name / "queries.jsonl"):
        for batch in batches[number : query["after"]]:
            data = (home / name / batch["file"]).read_bytes()[batch["offset"] : batch["offset"] + batch["size"]]
            for event in decode(data, "vllm-0.33", worker_id=batch["worker"]).events:
                index.apply(event)
        number = query["after"]
        scores = index.find_matches(query["local_hashes"]).scores
        assert query["overlap"] == {str(worker): blocks for (worker, _), blocks in scores.items() if blocks}
        assert all(
            tokens <= query["overlap"].get(worker, 0) * SIZE + SIZE // 2 for worker, tokens in query["reusable"].items()
        )
        assert len(query["tokens"]) % SIZE


def test_the_index_file_of_the_vectors_has_the_groups_and_sizes_of_the_engine(about):
    kimi = about["vllm_kimi_k3"]
    assert (kimi["block_size"], kimi["num_blocks"], kimi["hash_unit"], kimi["alignment"]) == (4, 72, 2, 2)
    state = {"kv_cache_spec_kind": "mamba", "block_size": 4}
    attention = {"kv_cache_spec_kind": "mla_attention", "block_size": 4}
    assert [*(state | {"group_idx": n} for n in range(3)), attention | {"group_idx": 3}] == kimi["groups"]
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 32}
    assert {"group_idx": 0, "block_size": 4} | window == about["vllm_gpt_oss"]["groups"][0]


def test_only_the_newest_vllm_dialect_has_hybrid_vectors():
    assert [name for name, dialect in DIALECTS.items() if hybrid_engines(dialect)] == ["vllm-0.33"]
    assert [*hybrid_engines(DIALECTS["vllm-0.33"])] == SETS
