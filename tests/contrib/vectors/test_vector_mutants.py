"""Vectors detect index errors: a small index with only json and msgpack passes, and each of its mutants fails."""

import json
from collections import defaultdict

import msgspec
import pytest
from depth import few, worth_its_time

from pytest_kvmock import block_hashes
from pytest_kvmock.contrib.vectors import write_vectors
from pytest_kvmock.values.programs.near_hashes import TRUNCATIONS, truncated
from pytest_kvmock.wire import DIALECTS

VECTORS = [name for name, row in DIALECTS.items() if row.clears]

SIZE = 4
FIELDS = {name: [field.name for field in row.stored] for name, row in DIALECTS.items()}
COUNTED = [name for name in DIALECTS if name.startswith("vllm-")]  # only vLLM publishes copies


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    home = tmp_path_factory.mktemp("vectors")
    write_vectors(home)
    return home


class Index:
    """The chains of blocks of each (worker, rank): for each engine name a chain and the number of its copies.

    A block in a chain is its identity: its tokens and their keys, or Dynamo's local hash.
    """

    def __init__(self, dialect, mutant=None):
        self.dialect, self.mutant = dialect, mutant
        self.held = defaultdict(dict)

    def name(self, name):
        """Return a block's name in the index: the last 64 bits of a whole digest."""
        if not str(self.mutant).startswith("names "):
            return name
        return truncated(int.from_bytes(name[-8:], "big") if isinstance(name, bytes) else name, self.mutant.split()[1])

    def local(self, local_hashes):
        """Return the local hashes of blocks in the index."""
        is_kept = str(self.mutant).startswith("local hashes ")
        return [truncated(each, self.mutant.split()[2]) if is_kept else each for each in local_hashes]

    def apply(self, worker, rank, payload):
        held = self.held[worker, 0 if self.mutant == "rank ignored" else rank]
        for kind, event in self.events(payload):
            if kind == "stored":
                self.store(held, *event)
            elif kind == "removed" and self.mutant != "Removed ignored":
                for name in map(self.name, event):
                    chain, copies = held.pop(name, ((), 1))
                    if copies > 1:
                        held[name] = chain, copies - 1
            elif kind == "cleared" and self.mutant != "Cleared ignored":
                held.clear()

    def store(self, held, parent, names, blocks):
        if parent is None or self.mutant == "parent ignored":
            chain = ()
        else:
            chain = held.get(self.name(parent), (("unknown",), 0))[0]
        for name, block in zip(map(self.name, names), blocks, strict=True):
            chain = (*chain, block)
            copies = 0 if self.mutant == "copies not counted" else held.get(name, (chain, 0))[1]
            held[name] = chain, copies + 1

    def events(self, payload):
        """Yield kind and (parent, names, blocks), or names, of each event of a batch."""
        if not DIALECTS[self.dialect].is_msgpack:
            for line in map(json.loads, payload.splitlines()):
                ((kind, data),) = (
                    line.get("event", line)["data"].items() if "cleared" not in str(line) else (("cleared", 0),)
                )
                if kind == "stored":
                    blocks = data["blocks"]
                    names = [block["block_hash"] for block in blocks]
                    yield kind, (data["parent_hash"], names, self.local(block["tokens_hash"] for block in blocks))
                else:
                    yield kind, kind == "removed" and data["block_hashes"]
            return
        for event in msgspec.msgpack.decode(payload)[1]:
            tag, *values = event.values() if isinstance(event, dict) else event
            if tag == "BlockStored":
                yield "stored", self.stored(event if isinstance(event, dict) else self.by_name(values))
            elif tag == "BlockRemoved":
                yield "removed", values[0]
            else:
                yield "cleared", None

    def by_name(self, values):
        fields = FIELDS[self.dialect]
        return {**dict(zip(fields, values, strict=False)), **(values[len(fields)] if len(values) > len(fields) else {})}

    def stored(self, event):
        tokens, extra = event["token_ids"], event.get("extra_keys")
        beside = {"lora_name": event.get("lora_name"), "cache_salt": event.get("cache_salt")}
        blocks = [
            self.block(tokens[SIZE * i : SIZE * i + SIZE], extra[i] if extra else None, **beside)
            for i in range(len(event["block_hashes"]))
        ]
        return event["parent_block_hash"], event["block_hashes"], blocks

    def block(self, tokens, extra, lora_name, cache_salt):
        """Return the identity of a block; vLLM's newer dialects have adapter and salt among the extra keys."""
        items = [each for each in extra or () if isinstance(each, list)]
        texts = [each for each in extra or () if isinstance(each, str)]
        if "extra_keys" in FIELDS[self.dialect]:
            cache_salt = next((each for each in texts if each != lora_name), None)
        if self.mutant == "adapter ignored":
            lora_name = None
        if self.mutant == "salt ignored":
            cache_salt = None
        if self.mutant == "multimodal ignored":
            items = []
        if str(self.mutant).startswith("local hashes "):  # the index hashes tokens itself, as Dynamo's router does
            tokens = self.local(block_hashes(tokens, SIZE))
        return json.dumps([tokens, lora_name, cache_salt, items])

    def overlap(self, query):
        """Return the leading blocks of a prompt by worker and rank, in the form of `by_rank`."""
        tokens, count = query["tokens"], len(query["tokens"]) // SIZE
        if not DIALECTS[self.dialect].is_msgpack:
            asked = self.local(query["local_hashes"])
        else:
            keys, extra = query.get("keys", {}), query.get("extra_keys", [None] * count)
            lora, salt = keys.get("lora_name"), keys.get("cache_salt")
            of_first = "extra_keys" in FIELDS[self.dialect]  # there only the first block has the salt
            asked = [
                self.block(
                    tokens[SIZE * i : SIZE * i + SIZE], extra[i], lora_name=lora, cache_salt=None if of_first else salt
                )
                for i in range(count)
            ]
        found = {}
        for (worker, rank), held in self.held.items():
            chains = {chain for chain, _ in held.values()}
            depth = next((n for n in range(count) if tuple(asked[: n + 1]) not in chains), count)
            if depth:
                found.setdefault(str(worker), {})[str(rank)] = depth
        return found


def wrong_answers(folder, dialect, mutant=None):
    """Return the number of queries of a set that an index answers wrongly."""
    index, queries, wrong = Index(dialect, mutant), defaultdict(list), 0
    for query in lines(folder / "queries.jsonl"):
        queries[query["after"]].append(query)
    for number, batch in enumerate(lines(folder / "batches.jsonl"), 1):
        data = (folder / batch["file"]).read_bytes()
        index.apply(batch["worker"], batch["dp_rank"], data[batch["offset"] : batch["offset"] + batch["size"]])
        for query in queries.pop(number, ()):
            expected = query.get("by_rank") or {worker: {"0": most} for worker, most in query["overlap"].items()}
            wrong += expected != index.overlap(query)
    assert queries == {}
    return wrong


def folders(vectors, dialect):
    return {
        name: path
        for name in (".", "ranks", "near", "keys")
        if (path := vectors / dialect / name / "queries.jsonl").exists()
    }


@worth_its_time
@pytest.mark.parametrize("dialect", few(VECTORS, 8))
def test_the_plain_index_answers_all_vectors(vectors, dialect):
    assert sum(wrong_answers(path.parent, dialect) for path in folders(vectors, dialect).values()) == 0


EVERYWHERE = ["parent ignored", "Removed ignored", "Cleared ignored"]


@pytest.mark.parametrize("mutant", EVERYWHERE)
@pytest.mark.parametrize("dialect", VECTORS)
def test_the_vectors_catch_an_index_that_ignores_parents_removed_or_cleared(vectors, dialect, mutant):
    assert wrong_answers(vectors / dialect, dialect, mutant) >= 1


@pytest.mark.parametrize("dialect", COUNTED)
def test_the_vectors_catch_an_index_that_does_not_count_copies(vectors, dialect):
    wrong = {
        name: wrong_answers(path.parent, dialect, "copies not counted")
        for name, path in folders(vectors, dialect).items()
        if name != "near"  # not from an engine: no block is stored twice
    }
    assert [name for name, count in wrong.items() if not count] == []


@pytest.mark.parametrize("dialect", VECTORS)
def test_the_vectors_catch_an_index_that_mixes_ranks(vectors, dialect):
    assert wrong_answers(vectors / dialect / "ranks", dialect, "rank ignored") >= 1


@pytest.mark.parametrize("kept", few(TRUNCATIONS, 2))
@pytest.mark.parametrize("what", ["names", "local hashes"])
@pytest.mark.parametrize("dialect", few(VECTORS, 6))
def test_the_near_vectors_catch_an_index_that_compares_only_a_part_of_a_hash(vectors, dialect, what, kept):
    assert wrong_answers(vectors / dialect / "near", dialect, f"{what} {kept}") >= 1


@pytest.mark.parametrize("what", ["names", "local hashes"])
@pytest.mark.parametrize("dialect", VECTORS)
def test_the_plain_vectors_do_not_catch_an_index_that_compares_only_a_part_of_a_hash(vectors, dialect, what):
    assert wrong_answers(vectors / dialect, dialect, f"{what} low63") == 0


KEYS = {"lora_name": "adapter ignored", "cache_salt": "salt ignored", "multimodal": "multimodal ignored"}


@pytest.mark.parametrize("dialect", [name for name in VECTORS if DIALECTS[name].is_msgpack])
def test_the_vectors_catch_an_index_that_ignores_a_prompt_key_of_the_dialect(vectors, dialect):
    about = {each["name"]: each for each in lines_of_index(vectors)}[dialect]
    carried = next((each["keys"] for each in about["sets"] if each["name"] == "keys"), [])
    assert [key for key in carried if not wrong_answers(vectors / dialect / "keys", dialect, KEYS[key])] == []


def lines_of_index(home):
    return json.loads((home / "index.json").read_text(encoding="utf-8"))["dialects"]


@pytest.mark.parametrize("dialect", VECTORS)
def test_the_queries_of_a_vector_set_are_unique(vectors, dialect):
    for path in folders(vectors, dialect).values():
        asked = [json.dumps(query) for query in lines(path)]
        assert len(set(asked)) == len(asked)
