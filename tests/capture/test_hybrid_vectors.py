"""Vectors of hybrid models: readers with nothing but json and msgpack are right between the two answers, and naive ones are not."""

import json
from collections import Counter, defaultdict

import msgspec
import pytest

from pytest_kvmock import RadixIndex
from pytest_kvmock.capture import write_vectors
from pytest_kvmock.capture.hybrid_vectors import hybrid_engines
from pytest_kvmock.wire import DIALECTS, decode

SIZE = 4
ATTENTION = ("full_attention", "mla_attention")
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


class Index:
    """Answers what the attention group of a worker holds: the tokens of its blocks, chained, and how many copies."""

    reads_tails = False

    def __init__(self, about):
        self.about = about
        self.blocks = {}  # of each name all tokens up to the end of its block, as the attention group has said
        self.copies = defaultdict(Counter)  # by group
        self.attention = None

    def apply(self, event):
        if event["type"] == "BlockStored":
            self.stored(event, event["group_idx"], event["block_hashes"])
        elif event["type"] == "BlockRemoved":
            self.removed(event["group_idx"], event["block_hashes"])
        else:
            self.copies.clear()

    def stored(self, event, group, names):
        self.copies[group].update(names)
        if event["kv_cache_spec_kind"] in ATTENTION:
            self.attention = group
            self.learn(event)

    def learn(self, event):
        """Note which tokens the blocks of a dense event have."""
        size, tokens = event["block_size"], tuple(event["token_ids"])
        chain = self.blocks.get(event["parent_block_hash"], ())
        if size == SIZE or self.reads_tails:
            for name in event["block_hashes"]:
                chain, tokens = chain + tokens[:size], tokens[size:]
                self.blocks[name] = chain

    def removed(self, group, names):
        self.copies[group].subtract(names)

    def held(self, group):
        return {self.blocks[name] for name, copies in self.copies[group].items() if copies > 0 and name in self.blocks}

    def answer(self, tokens):
        """Leading blocks of a prompt."""
        return leading(tokens, self.held(self.attention))


def leading(tokens, held):
    ends = range(SIZE, len(tokens), SIZE)
    return next((n for n, end in enumerate(ends) if tuple(tokens[:end]) not in held), len(ends))


class Exact(Index):
    """Answers what the engine would reuse: the last place at which each group has what a request goes on from."""

    reads_tails = True

    def stored(self, event, group, names):
        super().stored(event, group, names)
        if len(event["token_ids"]) < SIZE:  # a place within a block, in any group
            self.learn(event)

    def answer(self, tokens):
        held = {each["group_idx"]: self.held(each["group_idx"]) for each in self.about["groups"]}
        step = self.about["alignment"]
        for end in range((len(tokens) - 1) // step * step, 0, -step):
            if all(self.can_go_on(each, tokens, end, held[each["group_idx"]]) for each in self.about["groups"]):
                return end // SIZE
        return 0

    def can_go_on(self, group, tokens, end, held):
        kind, ends = group["kv_cache_spec_kind"], [*range(SIZE, end + 1, SIZE)]
        if end % SIZE:
            ends.append(end)
        if kind == "mamba":
            ends = ends[-1:]
        elif kind == "sliding_window":
            ends = ends[-((group["kv_cache_spec_sliding_window"] + SIZE - 2) // SIZE) :]
        return all(tuple(tokens[:each]) in held for each in ends)


class OneMap(Index):
    """Takes all groups for one."""

    def stored(self, event, group, names):
        self.attention = 0
        self.copies[0].update(names)
        if len(event["token_ids"]) == SIZE * len(names):
            self.learn(event)

    def removed(self, group, names):
        for name in names:
            del self.copies[0][name]


class AnyGroup(OneMap):
    """Takes all groups for one, and counts copies."""

    def removed(self, group, names):
        self.copies[0].subtract(names)


class MinimumOverGroups(Index):
    def answer(self, tokens):
        return min((leading(tokens, self.held(group)) for group in self.copies), default=0)


class DividesTheSpanByItsHashes(AnyGroup):
    """Takes the tokens of a span for those of the blocks that were kept of it."""

    def stored(self, event, group, names):
        tokens = event["token_ids"][: SIZE * len(names)]
        super().stored({**event, "token_ids": tokens, "block_size": SIZE}, group, names)


class LooksUpParentsAcrossGroups(Index):
    """Refuses what hangs on a block that was removed, in whichever group."""

    def stored(self, event, group, names):
        parent = event["parent_block_hash"]
        if parent is None or self.blocks.get(parent) is not None:
            super().stored(event, group, names)

    def removed(self, group, names):
        super().removed(group, names)
        for name in names:
            self.blocks[name] = None

    def held(self, group):
        return super().held(group) - {None}


class TakesGroupZero(Index):
    def answer(self, tokens):
        return leading(tokens, self.held(0))


class TakesTailsForBlocks(Index):
    """Counts a prompt's tail, in the attention group, as one block more."""

    def stored(self, event, group, names):
        super().stored(event, group, names)
        if group == self.attention and len(event["token_ids"]) < SIZE:
            chain = self.blocks.get(event["parent_block_hash"], ()) + tuple(event["token_ids"])
            self.blocks[names[0]] = chain

    def answer(self, tokens):
        held, whole = self.held(self.attention), super().answer(tokens)
        return whole + any(tuple(tokens[:end]) in held for end in range(whole * SIZE + 1, (whole + 1) * SIZE))


NAIVE = {
    OneMap: SETS,
    AnyGroup: ["full_first"],  # elsewhere what a sparse group holds is evicted before the attention group's
    MinimumOverGroups: SETS,
    DividesTheSpanByItsHashes: ["full_first"],  # elsewhere the attention group corrects it at once
    LooksUpParentsAcrossGroups: SETS,
    TakesGroupZero: SETS[:3],
    TakesTailsForBlocks: ["vllm_kimi_k3"],  # the others have none
}


def wrong_answers(home, about, kind, *, exactly=False):
    """How many answers of an index are not between the two that stand in the vectors, or not the lower one."""
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
    assert {} == queries
    return wrong


@pytest.mark.parametrize("name", SETS)
def test_right_indexes_are_right(home, about, name):
    assert 0 == wrong_answers(home / name, about[name], Index)
    assert 0 == wrong_answers(home / name, about[name], Exact, exactly=True)
    assert wrong_answers(home / name, about[name], Index, exactly=True)  # it answers what is held


@pytest.mark.parametrize("naive", NAIVE)
def test_naive_indexes_are_found(home, about, naive):
    assert NAIVE[naive] == [name for name in SETS if wrong_answers(home / name, about[name], naive)]


@pytest.mark.parametrize("name", SETS)
def test_an_answer_below_what_is_reused_is_wrong(home, about, name):
    class Less(Exact):
        def answer(self, tokens):
            return max(super().answer(tokens) - 1, 0)

    assert wrong_answers(home / name, about[name], Less)


@pytest.mark.parametrize("name", SETS)
def test_what_is_held_is_what_our_index_answers_and_what_is_reused_is_no_more(home, name):
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


def test_the_index_of_vectors_says_what_no_event_does(about):
    kimi = about["vllm_kimi_k3"]
    assert (4, 72, 2, 2) == (kimi["block_size"], kimi["num_blocks"], kimi["hash_unit"], kimi["alignment"])
    state = {"kv_cache_spec_kind": "mamba", "block_size": 4}
    attention = {"kv_cache_spec_kind": "mla_attention", "block_size": 4}
    assert [*(state | {"group_idx": n} for n in range(3)), attention | {"group_idx": 3}] == kimi["groups"]
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 32}
    assert {"group_idx": 0, "block_size": 4} | window == about["vllm_gpt_oss"]["groups"][0]


def test_only_the_newest_dialect_of_vllm_has_them():
    assert ["vllm-0.33"] == [name for name, dialect in DIALECTS.items() if hybrid_engines(dialect)]
    assert [*hybrid_engines(DIALECTS["vllm-0.33"])] == SETS
