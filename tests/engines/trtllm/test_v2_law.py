"""TensorRT-LLM's V2 events compared with the contents of its tree and with lookups, on the recordings.

The law: at the end of each iteration, the stored and not removed blocks of a layer group are exactly those with pages
in the tree, on the level of their events. A lookup reuses only blocks that are stored in each layer group that needs
them.
"""

from collections import Counter

import pytest
from players import player

from pytest_kvmock import Removed, Stored
from pytest_kvmock.values import Updated

PLAYER = player("engines/trtllm/play_trtllm.py")


class Watched(PLAYER.V2Player):
    """Play a program, and record for each layer group the stored blocks and their levels."""

    def __init__(self, config):
        super().__init__(config)
        self.announced = [{} for _ in self.manager.groups]
        self.counts = Counter()

    def play_flush(self):
        before = len(self.sink.events)
        super().play_flush()
        for event in self.sink.router_events[before:]:
            data, held = event.data, self.announced[event.extra["layer_group_id"]]
            if isinstance(data, Stored):
                assert not held.keys() & {*data.block_hashes}  # no block is stored twice
                held.update(zip(data.block_hashes, event.extra["cache_levels"], strict=True))
            elif isinstance(data, Removed):
                for name in data.block_hashes:
                    del held[name]  # only of stored blocks
            elif isinstance(data, Updated):
                assert held[data.block_hash] == data.levels[0]
                held[data.block_hash] = data.levels[1]
        for group, held in enumerate(self.announced):
            pages = ((block, block.pages[group]) for block in self.manager.tree.blocks())
            in_tree = {block.name: page.level for block, page in pages if page is not None}
            assert in_tree == held
        self.counts["flushes"] += 1
        self.counts["flushes with a device block behind one of a lower level"] += self.is_behind()
        return []

    def is_behind(self):
        """Return whether in a layer group a block on the device follows a block on a lower level."""
        pairs = (
            pair
            for block in self.manager.tree.blocks()
            if block.position
            for pair in zip(block.pages, block.parent.pages, strict=True)
        )
        return any(page and before and before.level > page.level == 0 for page, before in pairs)

    def play_prepare_context(self, name, prompt, adapter, salt):
        request = self.manager.new_request(prompt, adapter=adapter, cache_salt=salt)
        matched = self.manager.tree.match(request.hasher, prompt[:-1])
        length = sum(tokens for _, tokens in matched)
        self.counts["look-ups"] += 1
        self.counts["look-ups of a part of a block"] += bool(length % self.manager.block_size)
        for group, rule in enumerate(self.manager.groups):
            passed = rule.passed(length, self.manager.block_size)
            for place, (block, _) in enumerate(matched):
                assert place in passed or group in block.announced
        return super().play_prepare_context(name, prompt, adapter, salt)


def watched(program):
    """Play a program and return the counts."""
    playing = Watched(program["config"])
    for call, *arguments, _ in program["log"]:
        playing.play(call, *arguments)
    return playing.counts


@pytest.mark.parametrize("kind", ["programs", "v2"])
def test_announced_blocks_equal_the_pages_of_the_tree(recording, kind):
    counts = Counter()
    for program in recording("trtllm_v2.json.gz")[kind]:
        if program["config"]["event_buffer_max_size"] > 100:
            counts += watched(program)
    assert counts["look-ups of a part of a block"]
    if kind == "programs":
        assert counts["flushes with a device block behind one of a lower level"]
