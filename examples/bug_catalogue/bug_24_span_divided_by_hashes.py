"""The index divides the tokens of a Stored by its hashes, so that hashes of a window get the tokens of other blocks.

A window names only the blocks that it kept of a span, but has the tokens of the whole span. The second question about a
document leaves a window at the end of the document, and one at its own end: the name of the first then stands for half
of the span. Later blocks of the attention group get the wrong place: the third question is not found.
"""

import pytest


class DividesSpans:
    """An index of blocks by name, each with all tokens up to its end."""

    def __init__(self, block_size):
        self.size, self.blocks, self.held = block_size, {}, set()

    def apply(self, event):
        data, group = event.event.data, (event.extra or {}).get("group_idx", 0)
        tokens = [token for block in event.token_ids or () for token in block]
        prefix = self.blocks.get(getattr(data, "parent_hash", None), ())
        size = len(tokens) // max(len(data.block_hashes), 1)
        for number, block in enumerate(data.block_hashes if tokens else ()):
            prefix = self.blocks[block] = (*prefix, *tokens[number * size : (number + 1) * size])
            if group == 2:  # the attention group of this model
                self.held.add(prefix)

    def match_tokens(self, tokens):
        ends = range(self.size, len(tokens) + 1, self.size)
        return {0: next((n for n, end in enumerate(ends) if tuple(tokens[:end]) not in self.held), len(ends))}


@pytest.fixture
def kv_index():
    return DividesSpans(block_size=64)


@pytest.mark.kv_backends("vllm_deepseek_v4")
@pytest.mark.kvmock(num_blocks=2000)
def test_questions_about_a_document_are_known(kv_worker, kv_prompt):
    document = kv_prompt(blocks=1)
    for _ in range(3):
        kv_worker.serve(kv_prompt(blocks=3, after=document, tail=1))
