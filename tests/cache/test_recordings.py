"""The recordings of the real manager (dynamo-mocker 1.2.1 on kvbm-logical 1.2.1), step by step."""

import hashlib
import json
from collections import deque

import pytest
from conftest import Player, event_rows, new_manager, state_of

from pytest_kvmock.moves import Deref, MoveError, Use
from pytest_kvmock.tokens import lineage_hashes, sequence_hashes

FILES = (
    "logical_scenarios",
    "logical_lineage_moves",
    "logical_lru_moves",
    "logical_lineage_requests",
    "logical_lru_requests",
)


@pytest.mark.parametrize("file", FILES)
def test_a_recorded_program_gives_the_recorded_answers_events_and_counts(recording, file):
    for program in recording(f"{file}.json.gz")["programs"]:
        player = Player(new_manager(program["backend"], program["capacity"], program["block_size"]))
        for number, (operation, *expected) in enumerate(program["steps"]):
            where = (program["backend"], program.get("name", program.get("seed")), number, operation)
            if isinstance(expected[0], dict):  # the real manager panicked
                before = state_of(player.manager)
                with pytest.raises(MoveError):
                    player.play(operation)
                assert before == state_of(player.manager), where
            else:
                assert expected == player.play(operation), where
                assert expected[4] == len(player.manager.inactive_blocks()), where


@pytest.mark.parametrize("number", range(16))
def test_a_request_trace_gives_the_recorded_event_stream(recording, traces, number):
    run = recording("logical_mooncake.json")["runs"][number]
    manager = new_manager(run["backend"], run["capacity"])
    digest = hashlib.sha256()
    totals = dict.fromkeys(("requests", "blocks", "stored", "removed", "refused", "events"), 0)
    held = deque()
    with (traces / run["trace"]).open() as lines:
        for n, line in enumerate(lines):
            ids = json.loads(line)["hash_ids"]
            if len(held) == run["open"]:
                victim = 5 * n % run["open"]
                manager.process(Deref(held[victim][::-1]))
                del held[victim]
            blocks = sequence_hashes(ids)
            served = manager.process(Use(blocks, ids, lineage_hashes(blocks)))
            held.append(blocks[:served])
            totals["requests"] += 1
            totals["blocks"] += len(ids)
            totals["refused"] += served < len(ids)
            for kind, event_id, *rest in event_rows(manager.sink.take()):
                totals["events"] += 1
                if kind == "S":
                    parent, pairs = rest
                    totals["stored"] += len(pairs)
                    hashes = [block for block, _ in pairs]
                    head = ["S", event_id, "-" if parent is None else parent]
                else:
                    hashes = rest[0]
                    totals["removed"] += len(hashes)
                    head = ["R", event_id]
                digest.update((" ".join(map(str, [*head, *hashes])) + "\n").encode())
    assert {key: run[key] for key in totals} == totals
    assert run["hits"] == totals["blocks"] - totals["stored"]
    assert run["stream_sha256"] == digest.hexdigest()
