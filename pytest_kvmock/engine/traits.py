"""Where engines differ by nature, for tests that run over all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Traits:
    """What a test may expect of a worker, where engines differ.

    Attributes:
        recomputes_last_token: the last token of a prompt is computed though it is cached, so of a prompt that is whole
            blocks, all cached, the last one is not reused.
        stores_when: when a block that output fills is published: "next_token", once the next token opens another;
            "full", when its last token is computed; "finish", when the request finishes.
        copies: the same block may be cached, and published, several times.
        removed_first: what a step evicts is published before what it stores; else after.
        cleared_first: its first event is a Cleared.
        chunks: it takes blocks chunk by chunk where a profile says `chunk`; else for the whole prompt at once.
    """

    recomputes_last_token: bool = False
    stores_when: Literal["next_token", "full", "finish"] = "next_token"
    copies: bool = False
    removed_first: bool = False
    cleared_first: bool = False
    chunks: bool = True
