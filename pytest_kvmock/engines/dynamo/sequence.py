"""One request's tokens as blocks, and the moves for them.

One subject: Dynamo's `ActiveSequence`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from random import Random
from typing import Any, Final, Literal, TypeAlias, cast
from uuid import UUID

from pytest_kvmock.values.checks import check_integer, unknown_text
from pytest_kvmock.values.hashed_blocks import HashedBlocks
from pytest_kvmock.values.moves import Block, Deref, Destroy, Move, Promote, Use
from pytest_kvmock.values.plh import LineageHashes, lineage_hash
from pytest_kvmock.values.tokens import GrowingTokens, Prompt, TokenIds, TokenRows, chained_hash, keyed_block_hashes

Moves: TypeAlias = Literal["chunks", "whole"]
"""How a sequence takes blocks: chunk by chunk (E1), or all by one Use (1.0.2)."""

MOVES: Final = ("chunks", "whole")


class ActiveSequence:
    """A request from its prompt to its last token (Dynamo's mocker, `ActiveSequence` of 1.2.1, or of 1.0.2).

    Methods return moves; the caller processes them, and reports the served part by `commit_allocation`.

    A block that the prompt fills is full from the start. A generated block becomes full, by a Promote, when the first
    token of the *next* block is pushed. So a block that the last token fills stays partial and is never cached.

    `moves="whole"` makes the moves of 1.0.2. There are no chunks and no commit: the creation signal is one Use of all
    blocks, with the local hashes of all complete ones. After a preemption there may be one more local hash than full
    blocks, because the last token filled a block that is not promoted yet. A free covers all blocks, allocated or not,
    and frees a partial block by a Destroy.

    Args:
        tokens: the prompt, at least one token: token ids, or a `Prompt`. For a prompt of hashes, token values are
            unknown: pushed tokens are only counted, and a generated block gets a random local hash.
        max_output_tokens: number of tokens that `generate` makes.
        block_size: tokens a block, at least 2.
        enable_prefix_caching: False gives every block a random name, so no two requests share a block. The sequence
            keeps its names: after a preemption it finds its own blocks again.
        emit_token_ids: put token ids into the moves; ignored without prefix caching or token values.
        rng: source of everything random: names of partial blocks, generated tokens, hashes without caching. By default
            a new, unseeded one.
        moves: "whole" for the moves of 1.0.2, where one Use takes all blocks.

    Attributes:
        unique_blocks: all blocks in order: sequence hashes, and at most one UUID, at the end.
        block_hashes: local hash of each full block.
        num_input_tokens: length of the prompt.
        generated_tokens: number of tokens pushed since.
        num_allocated_tokens: tokens for which blocks were committed; with whole moves, the tokens of the last creation
            signal, or 0 before it is taken.
        moves: as given.
        keys: what the prompt carries in addition to its tokens; None if nothing.

    Raises:
        ValueError: the prompt is empty, a token or number is out of range, a hash prompt does not fit the block size,
            or `moves` is unknown.
        TypeError: a token is not an integer.
    """

    __slots__ = (
        "_plhs",
        "_rng",
        "_tokens",
        "block_hashes",
        "block_size",
        "emit_token_ids",
        "enable_prefix_caching",
        "generated_tokens",
        "keys",
        "max_output_tokens",
        "moves",
        "num_allocated_tokens",
        "num_input_tokens",
        "unique_blocks",
    )

    def __init__(
        self,
        tokens: TokenIds | Prompt,
        max_output_tokens: int,
        block_size: int = 64,
        enable_prefix_caching: bool = True,
        emit_token_ids: bool = False,
        *,
        rng: Random | None = None,
        moves: Moves = "chunks",
    ) -> None:
        if moves not in MOVES:
            raise ValueError(unknown_text("moves", moves, MOVES))
        check_integer("block_size", block_size, 2, " (tokens a block)")
        check_integer("max_output_tokens", max_output_tokens, 0)
        prompt = Prompt.of(tokens)
        self.num_input_tokens = prompt.length(block_size)
        if not self.num_input_tokens:
            raise ValueError("the prompt is empty; a sequence needs at least one token")
        self.moves: Moves = moves
        self.max_output_tokens = max_output_tokens
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.keys = prompt.keys
        self._tokens = GrowingTokens(prompt) if prompt.has_tokens else None
        self.emit_token_ids = emit_token_ids and enable_prefix_caching and self._tokens is not None
        self.generated_tokens = 0
        self.num_allocated_tokens = 0
        self._rng = Random() if rng is None else rng  # noqa: S311 - names, not secrets

        self.block_hashes = list(prompt.block_hashes(block_size))
        self.unique_blocks: list[Block]
        self._plhs: LineageHashes | list[int] | None  # None: to be computed again for generated blocks
        if enable_prefix_caching:
            self.unique_blocks = list(prompt.sequence_hashes(block_size))
            self._plhs = prompt.lineage_hashes(block_size)
        else:
            full = range(len(self.block_hashes))
            self.unique_blocks = [self._random_u64() for _ in full]
            self._plhs = [lineage_hash(self._random_u64(), None, i) for i in full]
        if self.num_input_tokens % block_size:
            self.unique_blocks.append(self._new_partial())

    @classmethod
    def new_with_signal(
        cls,
        tokens: TokenIds | Prompt,
        max_output_tokens: int,
        block_size: int = 64,
        enable_prefix_caching: bool = True,
        *,
        rng: Random | None = None,
        moves: Moves = "chunks",
    ) -> tuple[ActiveSequence, Use | None]:
        """Return a new sequence, and the Use of its whole prompt (`take_creation_signal`)."""
        sequence = cls(tokens, max_output_tokens, block_size, enable_prefix_caching, rng=rng, moves=moves)
        return sequence, sequence.take_creation_signal()

    def __len__(self) -> int:
        return self.num_input_tokens + self.generated_tokens

    def __repr__(self) -> str:
        return (
            f"<ActiveSequence of {self.num_input_tokens} + {self.generated_tokens} tokens, "
            f"{len(self.unique_blocks)} blocks>"
        )

    @property
    def positional_lineage_hashes(self) -> LineageHashes | list[int]:
        """Lineage hash of each full block; computed on first access."""
        if self._plhs is None:
            names: list[Any] = self.unique_blocks[: len(self.block_hashes)]
            self._plhs = LineageHashes(names)
        return self._plhs

    @property
    def is_empty(self) -> bool:
        """Whether it has no tokens; always False, because the prompt has some."""
        return len(self) == 0

    @property
    def extra_tokens(self) -> int:
        """Number of tokens in the last block if it is not full."""
        return len(self) % self.block_size

    @property
    def to_completion_blocks(self) -> int:
        """Number of blocks that the prompt and all output need."""
        return -(-(self.num_input_tokens + self.max_output_tokens) // self.block_size)

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """All token ids so far; None if only the prompt's hashes are known."""
        return None if self._tokens is None else self._tokens.whole

    # --------------------------------------------------------------------------------------------- allocation

    def prepare_allocation(self, cumulative_tokens: int) -> Use | None:
        """Return the Use of the blocks that the first `cumulative_tokens` tokens still need.

        Changes nothing, and returns the same move until `commit_allocation`.

        Returns:
            None if no block is missing.

        Raises:
            ValueError: the sequence makes whole moves, which allocate all blocks at once.
        """
        if self.moves == "whole":
            raise ValueError('moves="whole" has no chunks; take_creation_signal makes the one Use of a sequence')
        blocks = self.unique_blocks
        size, full = self.block_size, len(self.block_hashes)
        start = min(-(-self.num_allocated_tokens // size), len(blocks))
        end = min(-(-cumulative_tokens // size), len(blocks))
        if end <= start:
            return None
        return Use(
            blocks[start:end],
            self.block_hashes[start:end],
            self._plhs_of(start, min(end, full)),
            self._token_ids(start, min(end, full)),
            blocks[start - 1] if start else None,
        )

    def _plhs_of(self, start: int, end: int) -> Sequence[int]:
        """Return the lineage hashes of the full blocks from `start` to `end`."""
        plhs = self.positional_lineage_hashes if self._plhs is None else self._plhs
        if start == 0 and end == len(self.block_hashes):
            return plhs.copy() if isinstance(plhs, list) else plhs
        return plhs[start:end] if isinstance(plhs, list) else plhs.part(start, end)

    def _token_ids(self, start: int, end: int) -> TokenRows | None:
        """Return the token ids of the complete blocks from `start` to `end`; None if they are not published."""
        if not self.emit_token_ids or start >= end:
            return None
        assert self._tokens is not None
        blocks = self.unique_blocks
        rows = self._tokens.rows(start, end, self.block_size)
        if self.keys is not None:
            return rows
        names: tuple[Any, ...] = tuple(blocks[start:end])  # a block before another is full
        parent: Any = blocks[start - 1] if start else None
        return HashedBlocks(rows, parent, names, tuple(self.block_hashes[start:end]))

    def _block_tokens(self, index: int) -> tuple[int, ...]:
        assert self._tokens is not None
        return tuple(self._tokens.cut(index * self.block_size, (index + 1) * self.block_size))

    def _local_hash(self, index: int) -> int:
        """Return the local hash of a complete generated block; random if token values are unknown."""
        if self._tokens is None:
            return self._random_u64()
        return keyed_block_hashes(self._block_tokens(index), self.block_size, self.keys, index)[0]

    def commit_allocation(self, cumulative_tokens: int) -> None:
        """Record that blocks for the first `cumulative_tokens` tokens are allocated."""
        self.num_allocated_tokens = cumulative_tokens

    def allocate_blocks_for_chunk(self, cumulative_tokens: int) -> Use | None:
        """Call `prepare_allocation` and `commit_allocation`; return the Use."""
        use = self.prepare_allocation(cumulative_tokens)
        self.num_allocated_tokens = cumulative_tokens
        return use

    def take_creation_signal(self) -> Use | None:
        """Return the Use that allocates all tokens so far; None if no block is missing.

        With whole moves: None if it was taken since the last reset.
        """
        if self.moves == "chunks":
            return self.allocate_blocks_for_chunk(len(self))
        if self.num_allocated_tokens:
            return None
        self.num_allocated_tokens = len(self)
        complete = len(self) // self.block_size
        local_hashes = self.block_hashes.copy()
        if complete > len(local_hashes):  # the last block has all its tokens, and no Promote was made yet
            local_hashes.append(self._local_hash(complete - 1))
        return Use(self.unique_blocks.copy(), local_hashes, (), self._token_ids(0, complete))

    # ----------------------------------------------------------------------------------------------- decoding

    def push(self, token: int) -> list[Move]:
        """Add one token.

        Returns:
            Empty, unless the token opens a new block: then the Promote of the previous block, if it was partial, and
            the Use of a new partial block. `num_allocated_tokens` does not change: commit when both are done, or call
            `pop` if the Use found no room (the Promote stays).

        Raises:
            TypeError: the token is not an integer.
            ValueError: it is below 0 or above 2**32 - 1.
        """
        if self._tokens is not None:
            self._tokens.output.append(_checked(token))
        self.generated_tokens += 1
        if (self.num_input_tokens + self.generated_tokens) % self.block_size != 1:
            return []
        moves: list[Move] = []
        if self.unique_blocks and isinstance(self.unique_blocks[-1], UUID):
            moves.append(self._promote_last())
        partial = self._new_partial()
        self.unique_blocks.append(partial)
        moves.append(Use([partial]))
        return moves

    def fill(self, tokens: Sequence[int]) -> None:
        """Add tokens that all fit into the last block, so no move is needed.

        Raises:
            TypeError: a token is not an integer.
            ValueError: a token opens another block, or is below 0 or above 2**32 - 1.
        """
        if len(tokens) > -len(self) % self.block_size:
            raise ValueError(f"the last block takes {-len(self) % self.block_size} tokens, got {len(tokens)}")
        if self._tokens is not None:
            are_words = isinstance(tokens, array) and tokens.typecode == "I"
            self._tokens.output.extend(tokens if are_words else map(_checked, tokens))
        self.generated_tokens += len(tokens)

    def _promote_last(self) -> Promote:
        """Return the Promote of the full block before the token just pushed; give this block its hashes."""
        partial = self.unique_blocks.pop()
        assert isinstance(partial, UUID)
        index = len(self.unique_blocks)
        parent = self.unique_blocks[-1] if self.unique_blocks else None
        assert not isinstance(parent, UUID)
        local = self._local_hash(index)
        if self.enable_prefix_caching:
            block = chained_hash(parent, local)
            plh = lineage_hash(block, parent, index)
        else:
            block = self._random_u64()
            plh = lineage_hash(self._random_u64(), None, index)
        self.unique_blocks.append(block)
        self.block_hashes.append(local)
        if isinstance(self._plhs, list):
            self._plhs.append(plh)
        else:
            self._plhs = None
        tokens = self._block_tokens(index) if self.emit_token_ids else None
        return Promote(partial, block, parent, local, plh, tokens)

    def generate(self) -> list[Move]:
        """Push a random token; after the last one, free everything.

        Returns:
            The moves of `push`; after the last token, also the moves that free all blocks.

        Raises:
            ValueError: all output tokens were generated already.
        """
        if self.generated_tokens >= self.max_output_tokens:
            raise ValueError(f"all {self.max_output_tokens} output tokens were generated; there is nothing to generate")
        moves = self.push(self._rng.getrandbits(32))
        if self.generated_tokens == self.max_output_tokens:
            moves.extend(self._frees(len(self)))
        return moves

    def pop(self) -> None:
        """Take back the token that was pushed last, because its block got no slot.

        Raises:
            ValueError: there is no generated token, or the token filled a block that was promoted since.
        """
        if not self.generated_tokens:
            raise ValueError("pop takes a generated token back, and there is none")
        if not len(self) % self.block_size and not isinstance(self.unique_blocks[-1], UUID):
            raise ValueError("the last token belongs to a block that was promoted; pop takes back a token just pushed")
        if self._tokens is not None:
            self._tokens.output.pop()
        self.generated_tokens -= 1
        if not len(self) % self.block_size:
            self.unique_blocks.pop()

    # ------------------------------------------------------------------------------------------------- freeing

    @property
    def allocated_blocks(self) -> list[Block]:
        """The blocks that are allocated, in order."""
        if self.moves == "whole":
            return self.unique_blocks.copy() if self.num_allocated_tokens else []
        return self.unique_blocks[: -(-self.num_allocated_tokens // self.block_size)]

    def free_signal(self) -> list[Move]:
        """Return one Deref for each allocated block, tail first.

        With whole moves: for each block, and a Destroy for a partial one.
        """
        return self._frees(self.num_allocated_tokens)

    def reset_with_signal(self) -> list[Move]:
        """Preempt: return `free_signal`, with nothing allocated after it. Generated tokens stay, to be recomputed."""
        frees = self.free_signal()
        self.num_allocated_tokens = 0
        return frees

    def _frees(self, tokens: int) -> list[Move]:
        if self.moves == "whole":
            return [
                Destroy([block]) if isinstance(block, UUID) else Deref([block])
                for block in reversed(self.unique_blocks)
            ]
        return [Deref([block]) for block in reversed(self.unique_blocks[: -(-tokens // self.block_size)])]

    def release(self) -> None:
        """Compact the data of a finished sequence; no move follows."""
        self.block_hashes = cast("list[int]", array("Q", self.block_hashes))
        if self.enable_prefix_caching:
            self._plhs = None
        if self._tokens is not None:
            self._tokens.release()

    # -------------------------------------------------------------------------------------------------- random

    def _random_u64(self) -> int:
        return self._rng.getrandbits(64)

    def _new_partial(self) -> UUID:
        return UUID(int=self._rng.getrandbits(128), version=4)


def _checked(token: int) -> int:
    if not isinstance(token, int):
        raise TypeError(f"a token id is an integer from 0 to 4294967295, got {token!r} ({type(token).__name__})")
    if not 0 <= token <= 0xFFFFFFFF:
        raise ValueError(f"a token id is an integer from 0 to 4294967295, got {token!r}")
    return token
