"""One request of an engine with cache groups: its tokens, the blocks that it holds of each group, and what it asks
for.
"""

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
        tokens: the state is the one after this many.
        position: where in the table its block stands.
    """

    tokens: int
    position: int


class GroupTable:
    """The blocks that one request holds of one group.

    Attributes:
        blocks: by position; the null block where it needs none.
        cached: how many positions, from the first, were considered for caching; None: none, and nothing was found.
        shares_last: the last block is another's, which is copied before anything is written into it.
        begun: of states: blocks were taken, so that the last ones are scratch blocks, if the group has any.
        retired: of states: all positions before it are null.
        checkpoint: of states: the one of the last chunk.
        named_inside: of states: the position of the state that was named inside its block, and is to be copied.
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
        start: tokens that are computed, those found included.
        end: tokens once the chunk is computed.
        slots: tokens that need a slot: `end`, and those that a draft model looks ahead.
    """

    hit: int
    start: int
    end: int
    slots: int


class ComputedBlocks(NamedTuple):
    """The blocks that a request could start with.

    Attributes:
        num_tokens: tokens that need not be computed.
        blocks: of each group by position, null where it needs none; empty if there is no hit.
        junction: tokens that one group has, where that is more than all of them can resume from; else 0.
        short: one of the groups of each spec that cannot resume from what full attention has.
    """

    num_tokens: int
    blocks: tuple[list[int], ...]
    junction: int = 0
    short: tuple[int, ...] = ()


class Drafts:
    """The drafts of one request: those for its next step, and those of the steps that the model has not answered.

    Attributes:
        proposed: drafts that its next step tries.
        placeholders: outputs that the model owes it, as far as they are scheduled ahead (async scheduling).
    """

    __slots__ = ("_sent", "placeholders", "proposed")

    def __init__(self) -> None:
        self.proposed = self.placeholders = 0
        self._sent: list[int] = []

    def wanted(self, request: GroupRequest) -> int:
        """Tokens that a running request asks for, before any limit."""
        return len(request) + self.proposed + self.placeholders - request.num_computed_tokens

    def scheduled(self, request: GroupRequest, num_tokens: int) -> None:
        """A step of `num_tokens` tokens was scheduled, which count as computed: it tries those drafts that are among
        them.
        """
        ahead = request.num_computed_tokens - len(request) - self.placeholders
        self._sent.append(max(min(self.proposed, ahead), 0))
        self.proposed = 0
        request.num_in_flight_tokens += num_tokens

    def assume(self, drafts: int) -> None:
        """Schedule ahead (async): the last step will give an output more than its drafts, and the next one has
        `drafts` drafts.
        """
        self.placeholders += 1 + self._sent[-1]
        self.proposed = drafts

    def answered(self) -> int:
        """The first step that was not answered is: how many drafts it tried."""
        return self._sent.pop(0)

    def forget(self) -> None:
        """Its blocks are freed: tokens in flight become stale."""
        self.proposed = self.placeholders = 0


class GroupRequest:
    """One request, and the blocks that it holds. `VllmHybridManager.new_request` makes one.

    Args:
        tokens: its tokens, in hash units.
        num_groups: how many groups there are.
        main: the group that its blocks are shown of, and the tokens of a block there.

    Attributes:
        tokens: its tokens, and the hashes of their units; it grows as tokens are generated.
        tables: what it holds of each group.
        num_computed_tokens: how many of its tokens were given to the model.
        num_in_flight_tokens: how many of these the model has not answered yet, under async scheduling.
        junction: how many of its tokens another request has in common with it, as far as the attention group has them,
            where no request could resume as far as that when it was admitted; 0: there is no such place.
        short: at its last admission, how many of its tokens the attention group had, and the other groups that could
            not resume there, by their sizes.
        drafts: of a draft model, if there is one.
        skip_reading_prefix_cache: it computes everything itself, as requests for prompt logprobs do.
        computes_last_token: its last token is computed whatever is cached, as its output is needed.
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
        self._found: tuple[int, int, ComputedBlocks] | None = None  # the manager's: when, for how many tokens, what

    def __len__(self) -> int:
        return self.tokens.num_tokens

    @property
    def holds_blocks(self) -> bool:
        """Whether it was admitted."""
        return any(table.blocks for table in self.tables)

    @property
    def blocks(self) -> list[Block]:
        """Names of its complete blocks in the attention group, and a UUID for each that has none: the number of the
        block.

        That is 0, vLLM's null block, while the request holds no blocks.
        """
        group, size = self._main
        names = self.tokens.names[size // self.tokens.block_size - 1 :: size // self.tokens.block_size]
        held = self.tables[group].blocks or [0] * -(-len(self) // size)
        return [*names, *(UUID(int=block) for block in held[len(names) :])]

    def key(self, tokens: int) -> int:
        """The hash of its first tokens, whole units."""
        return self.tokens.names[tokens // self.tokens.block_size - 1]

    def forget_blocks(self) -> None:
        """Hold nothing, as its blocks are freed; it keeps its tokens, and what the model has not answered."""
        self.tables = [GroupTable() for _ in self.tables]
        self.num_computed_tokens = 0
        self.drafts.forget()
