"""TensorRT-LLM's V1 events compared with the contents of its tree and with lookups, on the recordings.

The law: at the end of each iteration, the stored and not removed blocks of each window are those in the tree, except
for leaves that partial matches took. A lookup then reuses only stored blocks; of the last it may reuse a part.
"""

from collections import Counter

import pytest
from players import player

from pytest_kvmock import Removed, Stored
from pytest_kvmock.engines.trtllm.hashes import v1_block_key
from pytest_kvmock.values import Updated

PLAYER = player("engines/trtllm/play_trtllm.py")


class Watched(PLAYER.Player):
    """Play a program, and record for each window the stored blocks and their levels."""

    def __init__(self, config):
        super().__init__(config)
        self.announced = {window.window: {} for window in self.manager.windows}
        self.counts = Counter()

    def play_flush(self):
        before = len(self.sink.events)
        super().play_flush()
        for event in self.sink.router_events[before:]:
            data, held = event.data, self.announced[event.extra["window_size"]]
            if isinstance(data, Stored):
                held.update(zip(data.block_hashes, event.extra["cache_levels"], strict=True))
            elif isinstance(data, Removed):
                for name in data.block_hashes:
                    del held[name]  # only of stored blocks
            elif isinstance(data, Updated) and data.levels:
                assert held[data.block_hash] == data.levels[0]
                held[data.block_hash] = data.levels[1]
        for window in self.manager.windows:
            held = self.announced[window.window]
            tree = {block.name: block.level for block in window.cached()}
            assert held.keys() - tree.keys() == {*window.taken}
            assert tree == {name: level for name, level in held.items() if name in tree}
            self.counts["flushes"] += 1
            self.counts["flushes with one that was taken"] += bool(window.taken)
            behind = any(
                block.level == 0 and block.parent is not window.root and block.parent.level for block in window.cached()
            )
            self.counts["flushes with a device block behind one of the host"] += behind

    def play_add(self, name, prompt, adapter, salt, retention):
        request = self.manager.new_request(prompt, adapter=adapter, cache_salt=salt)
        longest = self.manager.windows[-1]
        found = 0
        for (block, tokens, is_partial), key in zip(
            longest.match(self.manager._keys(request)), self.manager._keys(request), strict=False
        ):
            # It was stored by its name at a flush; later stores of an iteration are published at the next flush.
            assert block.name == v1_block_key(block.key, block.parent.name)
            assert is_partial or block.key == key
            found += tokens
            self.counts["blocks reused by a part"] += is_partial
        assert found == self.manager.lookup(request) <= len(prompt) - 1
        self.counts["look-ups"] += 1
        self.counts["look-ups of a part of a block"] += bool(found % self.manager.block_size)
        return super().play_add(name, prompt, adapter, salt, retention)


def is_lossless(program):
    return program["config"]["event_buffer_max_size"] > 100


def watched(program):
    """Play a program and return the counts."""
    playing = Watched(program["config"])
    for call, *arguments, _ in program["log"]:
        playing.play(call, *arguments)
    return playing.counts


@pytest.mark.parametrize("kind", ["programs", "v1"])
def test_announced_blocks_equal_the_tree_except_for_leaves_taken_by_partial_matches(recording, kind):
    counts = Counter()
    for program in filter(is_lossless, recording("trtllm_v1.json.gz")[kind]):
        counts += watched(program)
    assert counts["flushes with one that was taken"]
    assert counts["look-ups of a part of a block"]
