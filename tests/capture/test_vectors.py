"""Vectors: a reader that knows the files alone gets the answers that are in them."""

import json
from itertools import takewhile

import msgspec
import pytest

from pytest_kvmock import RadixIndex, Removed, Stored
from pytest_kvmock.capture import CaptureError, check_file, write_vectors
from pytest_kvmock.capture.payload_file import split_payloads
from pytest_kvmock.tokens import block_hashes
from pytest_kvmock.wire import DIALECTS, decode


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    home = tmp_path_factory.mktemp("vectors")
    assert list(DIALECTS) == write_vectors(home)
    return home


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def batches_of(home, dialect):
    """The batches in the order of `batches.jsonl`, cut out of the files by their places."""
    about = {each["name"]: each for each in json.loads((home / "index.json").read_text())["dialects"]}[dialect]
    files = [(home / dialect / name).read_bytes() for name in about["workers"]]
    for batch in lines(home / dialect / "batches.jsonl"):
        yield batch, files[batch["worker"]][batch["offset"] : batch["offset"] + batch["size"]]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_index_that_is_fed_the_batches_gives_the_answers(vectors, dialect):
    index, queries, counted = RadixIndex(count_copies=True), lines(vectors / dialect / "queries.jsonl"), 0
    next_ids = {}
    batches = list(batches_of(vectors, dialect))
    for number, (batch, payload) in enumerate(batches, 1):
        worker = batch["worker"]
        decoded = decode(payload, dialect, worker_id=worker, first_event_id=next_ids.get(worker, 0))
        next_ids[worker] = next_ids.get(worker, 0) + decoded.num_events
        assert [] == decoded.problems
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


def test_a_reader_with_nothing_but_msgpack_gets_the_answers(vectors):
    """As a Go or Rust test would do it: token ids in, a table of copies, no code of this package."""
    held, home = [{}, {}], vectors / "vllm-0.33"
    queries = lines(home / "queries.jsonl")
    for number, (batch, payload) in enumerate(batches_of(vectors, "vllm-0.33"), 1):
        blocks = held[batch["worker"]]
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "BlockStored":
                parent, size, tokens = event["parent_block_hash"], event["block_size"], event["token_ids"]
                chain = () if parent is None else blocks[parent][0]
                for i, name in enumerate(event["block_hashes"]):
                    chain = (*chain, *tokens[i * size : (i + 1) * size])
                    blocks[name] = chain, blocks.get(name, (chain, 0))[1] + 1
            elif event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    chain, copies = blocks.pop(name)
                    if copies > 1:
                        blocks[name] = chain, copies - 1
            else:
                blocks.clear()
        for query in [each for each in queries if each["after"] == number]:
            tokens = tuple(query["tokens"])
            prefixes = [tokens[: 4 * n] for n in range(1, len(tokens) // 4 + 1)]
            found = {}
            for worker, blocks in enumerate(held):
                chains = {chain for chain, _ in blocks.values()}
                if hits := len([*takewhile(chains.__contains__, prefixes)]):
                    found[str(worker)] = hits
            assert query["overlap"] == found


@pytest.mark.parametrize("dialect", DIALECTS)
def test_its_files_are_clean_for_a_check(vectors, dialect):
    for path in sorted((vectors / dialect).glob("worker-*")):
        assert check_file(path, dialect=dialect).is_clean
        assert sum(1 for _ in split_payloads(path.read_bytes(), DIALECTS[dialect], path)) >= 1
    capture = check_file(vectors / dialect / "capture.jsonl")
    assert capture.is_clean
    assert any(isinstance(entry.event.event.data, Stored) for entry in capture.log)


def test_copies_occur_where_an_engine_makes_them(vectors):
    stored = [data for data in _data(batches_of(vectors, "vllm-0.33"), "vllm-0.33") if isinstance(data, Stored)]
    blocks = [block for data in stored for block in data.block_hashes]
    assert len(set(blocks)) < len(blocks)


def test_the_same_seed_gives_the_same_bytes(tmp_path, vectors):
    names = ["sglang-0.5.9", "vllm-0.24-bytes"]
    assert names == write_vectors(tmp_path / "again", dialects=names)
    for name in names:
        for path in (vectors / name).iterdir():
            assert path.read_bytes() == (tmp_path / "again" / name / path.name).read_bytes()

    write_vectors(tmp_path / "other", dialects=names[:1], seed=1)
    other = (tmp_path / "other" / names[0] / "queries.jsonl").read_bytes()
    assert (vectors / names[0] / "queries.jsonl").read_bytes() != other


def test_what_cannot_be_done_is_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown dialect 'vllm'"):
        write_vectors(tmp_path / "v", dialects=["vllm"])
    assert not (tmp_path / "v").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError, match="cannot be written"):
        write_vectors(tmp_path / "file", dialects=["vllm-0.9"])
