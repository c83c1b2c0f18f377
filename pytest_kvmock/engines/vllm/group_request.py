"""One request of an engine with cache groups: its tokens, its blocks in each group, and the span that it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.hashed import HashedTokens
    from pytest_kvmock.values.moves import Block


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state that is exported within a chunk.

    Attributes:
        tokens: number of tokens that the state covers.
        position: position of its block in the table.
    """

    tokens: int
    position: int


class GroupTable:
    """The blocks that one request holds of one group.

    Attributes:
        blocks: by position; the null block where it needs none.
        cached: number of leading positions considered for caching; None if none was, and no hit was found.
        shares_last: the last block belongs to another request too, and is copied before it is written.
        begun: state groups: blocks were taken, so the last ones are the scratch blocks, if the group has any.
        retired: state groups: all positions before this one are null.
        checkpoint: state groups: the checkpoint of the last chunk.
        named_inside: state groups: the position of a state that was named inside its block and must be copied.
    """

    __slots__ = ("begun", "blocks", "cached", "checkpoint", "named_inside", "retired", "shares_last")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.cached: int | None = None
        self.shares_last = False
        self.begun = False
        self.retired = 0
        self.checkpoint: Checkpoint | None = None
        self.named_inside: int | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """The span that a request asks its groups for.

    Attributes:
        hit: tokens that the lookup found, for a request without blocks; else 0.
        start: computed tokens, hits included.
        end: computed tokens after the chunk.
        slots: tokens that need a slot: `end` plus the lookahead slots of a draft model.
    """

    hit: int
    start: int
    end: int
    slots: int


class ComputedBlocks(NamedTuple):
    """The blocks that a request could start with.

    Attributes:
        num_tokens: tokens that need not be computed.
        blocks: per group, by position; null where it needs none, empty if there is no hit.
        junction: the longest hit of a single group, if it exceeds the common hit of all groups; else 0.
        short: of each spec that cannot resume as far as full attention, one group.
    """

    num_tokens: int
    blocks: tuple[list[int], ...]
    junction: int = 0
    short: tuple[int, ...] = ()


class Drafts:
    """The drafts of one request: for its next step, and in the steps that the model has not answered.

    Attributes:
        proposed: drafts that its next step tries.
        placeholders: outstanding outputs that steps scheduled ahead assume (async scheduling).
    """

    __slots__ = ("_sent", "placeholders", "proposed")

    def __init__(self) -> None:
        self.proposed = self.placeholders = 0
        self._sent: list[int] = []

    def wanted(self, request: GroupRequest) -> int:
        """Return the number of tokens that a running request asks for, before any limit."""
        return len(request) + self.proposed + self.placeholders - request.num_computed_tokens

    def scheduled(self, request: GroupRequest, num_tokens: int) -> None:
        """Record a scheduled step of `num_tokens` tokens, counted as computed; it tries the drafts among them."""
        ahead = request.num_computed_tokens - len(request) - self.placeholders
        self._sent.append(max(min(self.proposed, ahead), 0))
        self.proposed = 0
        request.num_in_flight_tokens += num_tokens

    def assume(self, drafts: int) -> None:
        """Schedule ahead (async): assume the last step gives all its drafts and one more; the next tries `drafts`."""
        self.placeholders += 1 + self._sent[-1]
        self.proposed = drafts

    def answered(self) -> int:
        """Record the answer to the oldest open step; return the number of drafts that it tried."""
        return self._sent.pop(0)

    def forget(self) -> None:
        """Forget drafts and placeholders when the blocks are freed; tokens in flight become stale."""
        self.proposed = self.placeholders = 0


class GroupRequest:
    """One request and the blocks that it holds, made by `VllmHybridManager.new_request`.

    Args:
        tokens: its tokens, in hash units.
        num_groups: number of groups.
        main: the group whose blocks `blocks` shows, and its tokens per block.

    Attributes:
        tokens: its tokens, and the hashes of their units; grows as tokens are generated.
        tables: its blocks in each group.
        num_computed_tokens: number of its tokens that were given to the model.
        num_in_flight_tokens: number of these tokens that the model has not answered yet, under async scheduling.
        junction: the longest hit of a single group at its admission, if it exceeded the common hit: up to there its
            tokens are shared with another request; else 0.
        short: at its last admission, the number of its tokens that the attention group had, and the other groups that
            could not resume there, with their sizes.
        drafts: its drafts, if there is a draft model.
        skip_reading_prefix_cache: the request reuses no cached block, as requests for prompt logprobs do.
        computes_last_token: the last token is computed even if it is cached, because its output is needed.
    """

    __slots__ = (
        "_found",
        "_main",
        "computes_last_token",
        "drafts",
        "junction",
        "num_computed_tokens",
        "num_in_flight_tokens",
        "short",
        "skip_reading_prefix_cache",
        "tables",
        "tokens",
    )

    def __init__(self, tokens: HashedTokens, num_groups: int, main: tuple[int, int]) -> None:
        self.tokens = tokens
        self.tables = [GroupTable() for _ in range(num_groups)]
        self.num_computed_tokens = self.num_in_flight_tokens = self.junction = 0
        self.short: tuple[int, tuple[str, ...]] = (0, ())
        self.drafts = Drafts()
        self.skip_reading_prefix_cache = False
        self.computes_last_token = True
        self._main = main
        self._found: tuple[int, int, ComputedBlocks] | None = None  # the last lookup: change count, tokens, result

    def __len__(self) -> int:
        return self.tokens.num_tokens

    @property
    def holds_blocks(self) -> bool:
        """Whether it holds blocks, that is, was admitted."""
        return any(table.blocks for table in self.tables)

    @property
    def blocks(self) -> list[Block]:
        """Names of its complete blocks in the attention group; for the others, the number of the block as a UUID.

        The number is 0, vLLM's null block, while the request holds no blocks.
        """
        group, size = self._main
        names = self.tokens.names[size // self.tokens.block_size - 1 :: size // self.tokens.block_size]
        held = self.tables[group].blocks or [0] * -(-len(self) // size)
        return [*names, *(UUID(int=block) for block in held[len(names) :])]

    def key(self, tokens: int) -> int:
        """Return the hash of its first `tokens` tokens, a whole number of units."""
        return self.tokens.names[tokens // self.tokens.block_size - 1]

    def forget_blocks(self) -> None:
        """Drop its blocks, which the caller frees; tokens, and those in flight, are kept."""
        self.tables = [GroupTable() for _ in self.tables]
        self.num_computed_tokens = 0
        self.drafts.forget()
