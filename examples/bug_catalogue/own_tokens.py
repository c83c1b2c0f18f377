"""Hand-written events of an engine whose block names cover the next token: a prompt, and its twin with another next
token.
"""

from pytest_kvmock import Stored, block_hashes

PROMPT, TWIN = range(33), [*range(32), 99]
"""Two blocks of 16 tokens, and the next token: the second blocks of both have the same tokens, but different names."""


def stored(names, tokens, parent=None, first=0):
    """Return the arguments that publish blocks from index `first` on: the event, its token ids, and its extra
    fields.
    """
    tokens = list(tokens)[16 * first :]
    rows = [tokens[at : at + 16] for at in range(0, 16 * len(names), 16)]
    after = [[tokens[at]] for at in range(16, 16 * len(names) + 1, 16)]
    local = block_hashes(tokens, 16, lookahead=1)[: len(names)]
    return {
        "event": Stored(parent, names, tuple(local)),
        "token_ids": rows,
        "extra": {"lookahead_token_ids": after},
    }
