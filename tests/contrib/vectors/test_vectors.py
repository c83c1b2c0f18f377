"""Vectors: a reader that uses only the files computes the answers in them."""

import json
from collections import Counter
from itertools import takewhile

import msgspec
import pytest
from depth import few, worth_its_time

from pytest_kvmock import Prompt, RadixIndex, Removed, Stored, block_hashes
from pytest_kvmock.contrib.vectors import write_vectors
from pytest_kvmock.servers import CaptureError, check_file
from pytest_kvmock.servers.capture.payload_file import split_payloads
from pytest_kvmock.wire import DIALECTS, decode

VECTORS = [name for name, row in DIALECTS.items() if row.clears]


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    home = tmp_path_factory.mktemp("vectors")
    assert write_vectors(home) == VECTORS
    return home


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def about_of(home, dialect):
    return {each["name"]: each for each in json.loads((home / "index.json").read_text())["dialects"]}[dialect]


def batches_of(home, dialect):
    """Return the batches in the order of `batches.jsonl`, cut out of the files by their offsets, as before ranks."""
    files = [(home / dialect / name).read_bytes() for name in about_of(home, dialect)["workers"]]
    for batch in lines(home / dialect / "batches.jsonl"):
        yield batch, files[batch["worker"]][batch["offset"] : batch["offset"] + batch["size"]]


def batches_in(folder):
    """Return the batches of any set in the order of `batches.jsonl`."""
    for batch in lines(folder / "batches.jsonl"):
        data = (folder / batch["file"]).read_bytes()
        yield batch, data[batch["offset"] : batch["offset"] + batch["size"]]


@worth_its_time
@pytest.mark.parametrize("dialect", few(VECTORS, 8))
def test_the_reference_index_gives_the_answers_of_the_vectors(vectors, dialect):
    index, queries, counted = RadixIndex(count_copies=True), lines(vectors / dialect / "queries.jsonl"), 0
    next_ids = {}
    batches = list(batches_of(vectors, dialect))
    for number, (batch, payload) in enumerate(batches, 1):
        worker = batch["worker"]
        decoded = decode(payload, dialect, worker_id=worker, first_event_id=next_ids.get(worker, 0))
        next_ids[worker] = next_ids.get(worker, 0) + decoded.num_events
        assert decoded.problems == []
        assert batch["events"] == len(decoded.events)
        for event in decoded.events:
            index.apply(event)
        for query in [each for each in queries if each["after"] == number]:
            scores = index.find_matches(query["local_hashes"]).scores
            assert query["overlap"] == {str(worker): blocks for (worker, _), blocks in scores.items() if blocks}
            assert query["local_hashes"] == block_hashes(query["tokens"], 4)
            counted += 1
    assert len(queries) == counted
    assert any(query["overlap"].keys() == {"0", "1"} for query in queries)
    assert any(query["overlap"] == {} for query in queries)
    assert any(isinstance(event, Removed) for event in _data(batches, dialect))


def _data(batches, dialect):
    return [event.event.data for _, payload in batches for event in decode(payload, dialect).events]


def test_a_reader_with_only_msgpack_gets_the_answers(vectors):
    _assert_a_reader_of_msgpack_answers(vectors / "vllm-0.33")


def _assert_a_reader_of_msgpack_answers(home):
    """Check answers as a Go or Rust test would: from token ids and extra keys, without code of this package."""
    held, queries = [{}, {}], lines(home / "queries.jsonl")
    for number, (batch, payload) in enumerate(batches_in(home), 1):
        blocks = held[batch["worker"]]
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "BlockStored":
                parent, size, tokens = event["parent_block_hash"], event["block_size"], event["token_ids"]
                chain = () if parent is None else blocks[parent][0]
                for i, (name, keys) in enumerate(zip(event["block_hashes"], event["extra_keys"], strict=True)):
                    chain = (*chain, (*tokens[i * size : (i + 1) * size], json.dumps(keys)))
                    blocks[name] = chain, blocks.get(name, (chain, 0))[1] + 1
            elif event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    chain, copies = blocks.pop(name)
                    if copies > 1:
                        blocks[name] = chain, copies - 1
            else:
                blocks.clear()
        for query in [each for each in queries if each["after"] == number]:
            asked = query.get("extra_keys", [None] * (len(query["tokens"]) // 4))
            chain = [(*query["tokens"][4 * i : 4 * i + 4], json.dumps(keys)) for i, keys in enumerate(asked)]
            prefixes, found = [tuple(chain[:n]) for n in range(1, len(chain) + 1)], {}
            for worker, blocks in enumerate(held):
                chains = {chain for chain, _ in blocks.values()}
                if hits := len([*takewhile(chains.__contains__, prefixes)]):
                    found[str(worker)] = hits
            assert query["overlap"] == found


@pytest.mark.parametrize("dialect", VECTORS)
def test_the_reference_index_gives_the_answers_of_each_rank(vectors, dialect):
    index, folder = RadixIndex(count_copies=True), vectors / dialect / "ranks"
    queries, next_ids, answered = lines(folder / "queries.jsonl"), Counter(), 0
    for number, (batch, payload) in enumerate(batches_in(folder), 1):
        key = batch["worker"], batch["dp_rank"]
        decoded = decode(payload, dialect, worker_id=key[0], dp_rank=key[1], first_event_id=next_ids[key])
        next_ids[key] += decoded.num_events
        assert {key[1]} == {event.event.dp_rank for event in decoded.events}
        for event in decoded.events:
            index.apply(event)
        for query in [each for each in queries if each["after"] == number]:
            scores = index.find_matches(query["local_hashes"]).scores
            assert _nested(query["by_rank"]) == {key: blocks for key, blocks in scores.items() if blocks}
            assert query["overlap"] == {worker: max(ranks.values()) for worker, ranks in query["by_rank"].items()}
            answered += 1
    assert len(queries) == answered
    assert {*next_ids} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert any(len(ranks) == 2 for query in queries for ranks in query["by_rank"].values())


def test_each_rank_has_its_own_payload_file_and_batch_numbers(vectors):
    folder = vectors / "sglang-0.5.9" / "ranks"
    batches = lines(folder / "batches.jsonl")
    for worker in (0, 1):
        for rank, name in enumerate((f"worker-{worker}.msgpack", f"worker-{worker}-dp1.msgpack")):
            of_rank = [batch for batch in batches if (batch["worker"], batch["dp_rank"]) == (worker, rank)]
            assert {name} == {batch["file"] for batch in of_rank}
            assert [*range(len(of_rank))] == [batch["seq"] for batch in of_rank]
    assert [batch["dp_rank"] for batch in batches] == [
        msgspec.msgpack.decode(each)[2] for _, each in batches_in(folder)
    ]
    about = {each["name"]: each for each in about_of(vectors, "sglang-0.5.9")["sets"]}["ranks"]
    files = ["worker-0.msgpack", "worker-0-dp1.msgpack", "worker-1.msgpack", "worker-1-dp1.msgpack"]
    queries = len(lines(folder / "queries.jsonl"))
    assert {"name": "ranks", "workers": files, "batches": len(batches), "queries": queries} == about


def _nested(by_rank):
    return {(int(worker), int(rank)): blocks for worker, ranks in by_rank.items() for rank, blocks in ranks.items()}


ALL_KEYS = ["lora_name", "cache_salt", "multimodal"]
KEYS = {
    "vllm-0.9": [],
    "vllm-0.10.2": [],
    "vllm-0.14": ["lora_name"],
    "sglang-0.5.9": [],
    "sglang-0.5.18": ["cache_salt"],
    "sglang-0.5.20": ["cache_salt"],
    "sglang-0.5.22": ["lora_name", "cache_salt"],
    "sglang-0.5.23": ["lora_name", "cache_salt"],
}


@pytest.mark.parametrize("dialect", VECTORS)
def test_vector_prompts_carry_the_keys_that_the_dialect_can_express(vectors, dialect):
    sets = {each["name"]: each for each in about_of(vectors, dialect)["sets"]}
    expected = KEYS.get(dialect.removesuffix("-bytes"), ALL_KEYS)
    assert sets.get("keys", {}).get("keys", []) == expected
    assert (vectors / dialect / "keys").exists() == bool(expected)
    if expected:
        queries = lines(vectors / dialect / "keys" / "queries.jsonl")
        assert {name for query in queries for name in query["keys"]} == {*expected}
        for query in queries:
            keys = {"multimodal": [], **query["keys"]}
            assert query["local_hashes"] == Prompt(query["tokens"], **keys).block_hashes(4)


# The salt is among vLLM's extra keys without a mark, and no known router reads it from there: an index of Dynamo's
# hashes treats two tenants as one.
READ_BY_DYNAMO = [name for name in VECTORS if KEYS.get(name.removesuffix("-bytes"), ALL_KEYS) != []]
READ_BY_DYNAMO = [name for name in READ_BY_DYNAMO if not name.startswith("vllm-") or name.startswith("vllm-0.14")]


@pytest.mark.parametrize("dialect", READ_BY_DYNAMO)
def test_the_reference_index_gives_the_answers_of_prompts_with_keys(vectors, dialect):
    index, folder, next_ids = RadixIndex(count_copies=True), vectors / dialect / "keys", Counter()
    queries, answered = lines(folder / "queries.jsonl"), 0
    for number, (batch, payload) in enumerate(batches_in(folder), 1):
        worker = batch["worker"]
        decoded = decode(payload, dialect, worker_id=worker, first_event_id=next_ids[worker])
        next_ids[worker] += decoded.num_events
        for event in decoded.events:
            index.apply(event)
        for query in [each for each in queries if each["after"] == number]:
            scores = index.find_matches(query["local_hashes"]).scores
            assert query["overlap"] == {str(worker): blocks for (worker, _), blocks in scores.items() if blocks}
            answered += 1
    assert len(queries) == answered
    _assert_keys_matter(queries)


def _assert_keys_matter(queries):
    """Check that some tokens are cached for one tenant and not for another, and some only with keys."""
    answers = {}
    for query in queries:
        answers.setdefault((query["after"], *query["tokens"]), []).append((query["keys"], query["overlap"]))
    assert any(
        keys != others and overlap != other
        for asked in answers.values()
        for keys, overlap in asked
        for others, other in asked
    )
    assert any(query["keys"] and query["overlap"] for query in queries)


@pytest.mark.parametrize("dialect", ["vllm-0.24", "vllm-0.33"])
def test_a_reader_with_only_msgpack_distinguishes_tenants(vectors, dialect):
    home = vectors / dialect / "keys"
    _assert_a_reader_of_msgpack_answers(home)
    _assert_keys_matter(lines(home / "queries.jsonl"))


@pytest.mark.parametrize("dialect", VECTORS)
def test_the_check_command_finds_no_problem_in_vector_files(vectors, dialect):
    for path in sorted((vectors / dialect).rglob("worker-*")):
        assert check_file(path, dialect=dialect).is_clean
        assert sum(1 for _ in split_payloads(path.read_bytes(), DIALECTS[dialect], path)) >= 1
    for path in (vectors / dialect).rglob("capture.jsonl"):
        capture = check_file(path)
        assert capture.is_clean
        assert any(isinstance(entry.event.event.data, Stored) for entry in capture.log)


def test_vllm_vectors_contain_copies_of_blocks(vectors):
    stored = [data for data in _data(batches_of(vectors, "vllm-0.33"), "vllm-0.33") if isinstance(data, Stored)]
    blocks = [block for data in stored for block in data.block_hashes]
    assert len(set(blocks)) < len(blocks)


def test_the_same_seed_gives_the_same_vector_files(tmp_path, vectors):
    names = ["sglang-0.5.9", "vllm-0.24-bytes"]
    assert names == write_vectors(tmp_path / "again", dialects=names)
    for name in names:
        written = [path.relative_to(vectors) for path in (vectors / name).rglob("*") if path.is_file()]
        assert (
            {".", "keys", "near", "ranks"}
            >= {str(path.parent.relative_to(name)) for path in written}
            >= {".", "near", "ranks"}
        )
        for path in written:
            assert (vectors / path).read_bytes() == (tmp_path / "again" / path).read_bytes()

    write_vectors(tmp_path / "other", dialects=names[:1], seed=1)
    other = (tmp_path / "other" / names[0] / "queries.jsonl").read_bytes()
    assert (vectors / names[0] / "queries.jsonl").read_bytes() != other


def test_unknown_dialects_and_unwritable_directories_are_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown dialect 'vllm'"):
        write_vectors(tmp_path / "v", dialects=["vllm"])
    assert not (tmp_path / "v").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError, match="cannot be written"):
        write_vectors(tmp_path / "file", dialects=["vllm-0.9"])


def test_a_directory_is_created_even_for_no_dialect(tmp_path):
    home = tmp_path / "new" / "vectors"
    assert write_vectors(home, dialects=[]) == []
    assert sorted(path.name for path in home.iterdir()) == ["README.md", "index.json"]


def test_a_dialect_without_a_cleared_is_refused(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"vectors have a Cleared, which dialect 'trtllm-1\.2' cannot write; they are made of vllm-0\.9",
    ):
        write_vectors(tmp_path, dialects=["trtllm-1.2"])
