"""The pool and its blocks compared with those of dynamo-llm 0.2.1: recorded random programs, and every step of a
block.
"""

import pytest
from block_helpers import make_pool

from pytest_kvmock import CapturingSink, Removed
from pytest_kvmock.contrib.block_manager import BlockManagerError, NotEnoughBlocksAvailable, TokenBlock

PROGRAMS = 60


class Player:
    """A pool, and the handles of the recorded program in its order."""

    def __init__(self, program):
        self.sink = CapturingSink()
        self.pool = make_pool(program["num_blocks"], self.sink)
        self.contents = []
        for tokens, _ in program["contents"]:
            parent = None
            for start in range(0, len(tokens), 4):
                block = TokenBlock(tokens[start : start + 4], parent_sequence_hash=parent)
                parent = block.sequence_hash
            self.contents.append(block)
        self.mutable, self.shared = [], []

    def play(self, step):
        """Do one step; returns its result in the form of the recording."""
        return getattr(self, step["op"])(step)

    def allocate(self, step):
        try:
            blocks = self.pool.allocate_blocks_blocking(step["count"])
        except NotEnoughBlocksAvailable as error:
            return {"refused": [error.requested, error.available]}
        self.mutable += blocks
        return {"blocks": [block.block_idx for block in blocks]}

    def fill(self, step):
        self.mutable[step["handle"]].apply_token_block(self.contents[step["content"]])
        return {}

    def priority(self, step):
        self.mutable[step["handle"]].metadata.priority = step["priority"]
        return {}

    def register(self, step):
        chosen = [self.mutable[i] for i in step["handles"]]
        self.mutable = [block for i, block in enumerate(self.mutable) if i not in step["handles"]]
        shared = self.pool.register_blocks_blocking(chosen)
        self.shared += shared
        return {"blocks": [block.block_idx for block in shared]}

    def match(self, step):
        found = self.pool.match_sequence_hashes_blocking(self.contents[i].sequence_hash for i in step["contents"])
        self.shared += found
        return {"blocks": [block.block_idx for block in found]}

    def close_mutable(self, step):
        self.mutable.pop(step["handle"]).close()
        return {}

    def close_shared(self, step):
        self.shared.pop(step["handle"]).close()
        return {}

    def close_first(self, step):
        for _ in range(step["count"]):
            self.shared.pop(0).close()
        return {}

    def close_mutable_first(self, step):
        for _ in range(step["count"]):
            self.mutable.pop(0).close()
        return {}

    def flush(self, step):
        return {"returned": self.pool.flush()}

    def events(self):
        """Return the published events: the hash of a Removed; the blocks of a Stored with their parents, in any order.

        Dynamo passes all blocks of a call to its publisher; here they are one Stored per chain.
        """
        removed, stored = [], []
        for event in self.sink.take():
            data = event.data
            if isinstance(data, Removed):
                removed += data.block_hashes
            else:
                stored += zip(
                    data.block_hashes, [data.parent_hash, *data.block_hashes], data.tokens_hashes, strict=False
                )
        return removed, sorted(stored, key=str)


@pytest.fixture(scope="module")
def programs(recording):
    return recording("block_pool_0.2.1.json.gz")["programs"]


@pytest.mark.parametrize("number", range(PROGRAMS))
def test_each_program_gives_the_recorded_results(programs, number):
    program = programs[number]
    player = Player(program)
    assert [each[1] for each in program["contents"]] == [each.sequence_hash for each in player.contents]
    for position, step in enumerate(program["steps"]):
        done = player.play(step)
        assert {key: step[key] for key in done} == done, (position, step)
        assert step["available"] == player.pool.available_blocks, (position, step)
        removed = [event["removed"] for event in step.get("events", ()) if "removed" in event]
        stored = [tuple(each) for event in step.get("events", ()) for each in event.get("stored", ())]
        assert (removed, sorted(stored, key=str)) == player.events(), (position, step)
        shared = [
            [b.block_idx, b.metadata.priority, b.metadata.returned_tick, b.metadata.acquired_tick]
            for b in player.shared
        ]
        assert step["shared"] == shared, (position, step)


def test_all_programs_are_played(programs):
    assert len(programs) == PROGRAMS


STEPS = {
    "init_sequence": lambda block: block.init_sequence(1337),
    "apply_token_block": lambda block: block.apply_token_block(TokenBlock([1, 2, 3, 4])),
    "add_token": lambda block: block.add_token(7),
    "add_tokens": lambda block: block.add_tokens([7, 8]),
    "pop_token": lambda block: block.pop_token(),
    "pop_tokens_1": lambda block: block.pop_tokens(1),
    "pop_tokens_3": lambda block: block.pop_tokens(3),
    "pop_tokens_9": lambda block: block.pop_tokens(9),
    "commit": lambda block: block.commit(),
    "reset": lambda block: block.reset(),
    "sequence_hash": lambda block: block.sequence_hash,
}


def test_every_step_of_a_block_gives_the_recorded_result(recording):
    rows = recording("block_pool_0.2.1.json.gz")["states"]
    assert 5 * len(STEPS) == len(rows)
    for row in rows:
        (block,) = make_pool(1).allocate_blocks_blocking(1)
        if row["state"] == "Complete":
            STEPS["apply_token_block"](block)
        elif row["state"] != "Reset":
            block.initialize_sequence()
            block.add_tokens(range(1, 1 + int(row["state"].removeprefix("Partial"))))
        expected = row["result"]
        if "ok" in expected:
            assert STEPS[row["step"]](block) == expected["ok"], row
        else:
            with pytest.raises(BlockManagerError) as error:
                STEPS[row["step"]](block)
            assert str(error.value).startswith(expected["error"] + ":"), row
        tokens = None if block.tokens is None else list(block.tokens)
        after = [block.state, len(block), block.remaining, block.is_empty, block.is_full, tokens]
        assert row["after"] == after, row
