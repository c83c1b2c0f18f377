"""Handles, which own blocks: the transitions of a block's state, its metadata and payload, and its return.

One subject: the operations on one block. A `MutableBlock` is the only owner of its block and fills it;
`ImmutableBlock`s share a registered block. A handle returns its block when it is closed, at the end of its `with`, or
when Python drops it, as in the original.

A return takes effect at the pool's `flush()`. In the original a dropped block goes through a channel to the pool's
thread, so that the pool may or may not have it at the next request. Here the pool has it only after `flush()`: a test
that passes here does not depend on that race.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final, NoReturn, Self

from pytest_kvmock.contrib.block_manager.block_errors import BlockClosed, BlockStateInvalid, TokenBlockError
from pytest_kvmock.contrib.block_manager.local_block import (
    Block,
    BlockState,
    PartialTokens,
    give_back,
    illegal_step,
    write_payload,
)
from pytest_kvmock.contrib.block_manager.token_block import TokenBlock, check_tokens
from pytest_kvmock.values.checks import check_iterable, check_u64, is_integer
from pytest_kvmock.values.tokens import SEED, TokenIds

_U32: Final = 2**32 - 1
_RESET: Final = BlockState.RESET
_PARTIAL: Final = BlockState.PARTIAL
_COMPLETE: Final = BlockState.COMPLETE
_REGISTERED: Final = BlockState.REGISTERED


class BasicMetadata:
    """Metadata of a block, read and set through its handle; it orders the eviction of inactive blocks.

    The order is (priority, returned tick, acquired tick, sequence hash), the lowest first. Ticks count both allocations
    and returns of a pool, so no two blocks of a pool have the same tick.
    """

    __slots__ = ("_handle",)

    def __init__(self, handle: BlockHandle) -> None:
        self._handle = handle

    def __repr__(self) -> str:
        return (
            f"BasicMetadata(priority={self.priority}, returned_tick={self.returned_tick}, "
            f"acquired_tick={self.acquired_tick})"
        )

    @property
    def priority(self) -> int:
        """The priority to keep the block, u32; 0 after its pool has reset it. Can be set.

        The original lets only the owner of a mutable block set it.
        """
        return self._handle.held.priority

    @priority.setter
    def priority(self, value: int) -> None:
        if not is_integer(value, 0) or value > _U32:
            raise ValueError(f"priority must be an integer from 0 to {_U32} (u32), got {value!r:.80}")
        self._handle.held.priority = value

    @property
    def returned_tick(self) -> int:
        """The pool's tick when the block was last returned; 0: never."""
        return self._handle.held.returned_tick

    @property
    def acquired_tick(self) -> int:
        """The pool's tick when the block was last allocated; a match does not count."""
        return self._handle.held.acquired_tick


class BlockHandle:
    """The common part of mutable and immutable handles: reading, and return.

    Once the handle holds no block, every use except `is_open` and the end of a `with` raises BlockClosed.
    """

    __slots__ = ("_block",)

    _block: Block | None

    def __init__(self, block: Block) -> None:
        self._block = block

    def __repr__(self) -> str:
        block = self._block
        return f"<{type(self).__name__}: {'closed' if block is None else f'{block.place}, {block.state}'}>"

    def __bool__(self) -> bool:
        return True  # without this, a handle with no tokens would be false

    def __reduce__(self) -> NoReturn:
        # A copy would be an uncounted owner.
        raise TypeError(
            f"a {type(self).__name__} owns its block and cannot be copied or pickled; an ImmutableBlock has clone()"
        )

    def __enter__(self) -> Self:
        if self._block is None:
            self._raise_closed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._block is not None:
            self.close()

    def __del__(self) -> None:
        if self._block is not None:
            self.close()

    def close(self) -> None:
        """Return the block; the pool has it again after its next `flush()`."""
        raise NotImplementedError  # pragma: no cover

    @property
    def held(self) -> Block:
        """The block itself, for the pool and for transfers.

        Raises:
            BlockClosed: the handle was closed, or given to `register_blocks`.
        """
        block = self._block
        if block is None:
            self._raise_closed()
        return block

    def _raise_closed(self) -> NoReturn:
        raise BlockClosed(
            f"this {type(self).__name__} holds no block any more: it was closed, or given to register_blocks"
        )

    @property
    def is_open(self) -> bool:
        """Whether the handle holds a block."""
        return self._block is not None

    @property
    def worker_id(self) -> int:
        """The worker that owns the block."""
        return self.held.set.worker_id

    @property
    def block_set_idx(self) -> int:
        """Number of the block's set in the worker's block sets."""
        return self.held.set.block_set_idx

    @property
    def block_idx(self) -> int:
        """Number of the block in its set."""
        return self.held.index

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.held.set.model.num_layers

    @property
    def page_size(self) -> int:
        """Capacity of the block in tokens."""
        return self.held.set.page_size

    @property
    def inner_dim(self) -> int:
        """Numbers per token and layer."""
        return self.held.set.model.inner_dim

    @property
    def block_bytes(self) -> int:
        """Capacity of the block in bytes."""
        return self.held.set.block_bytes

    @property
    def state(self) -> BlockState:
        """The state of the block's contents."""
        return self.held.state

    @property
    def metadata(self) -> BasicMetadata:
        """Priority and ticks of the block."""
        return BasicMetadata(self)

    @property
    def sequence_hash(self) -> int:
        """Sequence hash of the block.

        Raises:
            BlockStateInvalid: it is neither Complete nor Registered.
        """
        block = self.held
        if block.state is _REGISTERED:
            return block.sequence_hash
        content = block.content
        if type(content) is TokenBlock:
            return content.sequence_hash
        raise illegal_step(block, "sequence_hash", "Invalid state: Block is not complete")

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """Tokens of a Partial or Complete block; None if it is Reset, or Registered, which keeps no tokens."""
        content = self.held.content
        return None if content is None else tuple(content.tokens)

    def __len__(self) -> int:
        """Return the number of tokens in the block."""
        block = self.held
        if block.state is _REGISTERED:
            return block.set.page_size
        content = block.content
        return 0 if content is None else len(content.tokens)

    @property
    def remaining(self) -> int:
        """Number of tokens that can be added: 0 unless the block is Partial."""
        block = self.held
        return block.set.page_size - len(self) if block.state is _PARTIAL else 0

    @property
    def is_empty(self) -> bool:
        """Whether the block has no token."""
        return len(self) == 0

    @property
    def is_full(self) -> bool:
        """Whether the block is full."""
        return len(self) == self.page_size


class MutableBlock(BlockHandle):
    """The only owner of a block, which fills it. Pools make them; `register_blocks` takes them."""

    __slots__ = ()

    def close(self) -> None:
        """Return the block, whose contents are lost; the pool has it again after its next `flush()`.

        Raises:
            BlockClosed: the handle holds no block any more.
        """
        block = self._block
        if block is None:
            self._raise_closed()
        self._block = None
        give_back(block)

    @property
    def payload(self) -> bytes:
        """The bytes of the block, at most `block_bytes`; empty until they are written. Can be set.

        Setting raises TypeError for a value that is not bytes, and PayloadTooLarge for more than `block_bytes`.
        """
        return self.held.payload

    @payload.setter
    def payload(self, value: bytes) -> None:
        write_payload(self.held, value)

    def initialize_sequence(self, salt_hash: int = SEED) -> None:
        """Start a sequence: a Reset block becomes Partial. It is a root; later blocks of the sequence need
        `apply_token_block`.

        Args:
            salt_hash: u64 that the hashes depend on; the default is the routers' salt.

        Raises:
            BlockStateInvalid: the block is not Reset.
            ValueError: the salt is not a u64.
        """
        block = self.held
        if block.state is not _RESET:
            raise illegal_step(block, "initialize_sequence", "Block state is invalid: Block is not reset")
        block.content = PartialTokens(check_u64("salt_hash", salt_hash))
        block.state = _PARTIAL

    init_sequence = initialize_sequence
    """Another name of `initialize_sequence`: the original has both, one on the block and one on its state."""

    def add_token(self, token: int) -> None:
        """Add a token to a Partial block.

        Raises:
            BlockStateInvalid: the block is not Partial.
            TokenBlockError: it is full.
            TypeError, ValueError: `token` is not a token id.
        """
        partial = self._partial("add_token")
        if len(partial.tokens) >= self.page_size:
            raise TokenBlockError(f"TokenBlock is full: {self.held.place} has {self.page_size} tokens")
        partial.tokens += check_tokens((token,))

    def add_tokens(self, tokens: TokenIds) -> list[int]:
        """Add as many of these tokens to a Partial block as it has room for, and return the rest.

        Raises:
            BlockStateInvalid: the block is not Partial.
            TypeError, ValueError: one is not a token id.
        """
        partial = self._partial("add_tokens")
        checked = check_tokens(check_iterable("add_tokens", tokens, "token ids"))
        room = self.page_size - len(partial.tokens)
        partial.tokens += checked[:room]
        return checked[room:]

    def pop_token(self) -> None:
        """Remove the last token of a Partial block.

        Raises:
            BlockStateInvalid: the block is not Partial.
            TokenBlockError: it has no token.
        """
        partial = self._partial("pop_token")
        if not partial.tokens:
            raise TokenBlockError(f"TokenBlock is empty: {self.held.place} has no token to pop")
        partial.tokens.pop()

    def pop_tokens(self, count: int) -> None:
        """Remove the last `count` tokens of a Partial block.

        Raises:
            BlockStateInvalid: the block is not Partial.
            TokenBlockError: it has fewer tokens.
            ValueError: the count is not an integer of at least 0.
        """
        partial = self._partial("pop_tokens")
        if not is_integer(count, 0):
            raise ValueError(f"pop_tokens: count must be an integer of at least 0, got {count!r:.80}")
        if count > len(partial.tokens):
            raise TokenBlockError(
                f"TokenBlock has insufficient tokens: {count} are to be popped, "
                f"{self.held.place} has {len(partial.tokens)}"
            )
        del partial.tokens[len(partial.tokens) - count :]

    def commit(self) -> None:
        """Make a full Partial block Complete, and compute its hashes.

        Raises:
            BlockStateInvalid: the block is not Partial.
            TokenBlockError: it is not full.
        """
        partial = self._partial("commit")
        if len(partial.tokens) != self.page_size:
            raise TokenBlockError(
                f"TokenBlock is incomplete: {self.held.place} has {len(partial.tokens)} of {self.page_size} tokens"
            )
        block = self.held
        block.content = TokenBlock(partial.tokens, partial.salt_hash)
        block.state = _COMPLETE

    def apply_token_block(self, token_block: TokenBlock) -> None:
        """Fill a Reset block with a token block: it becomes Complete.

        Raises:
            BlockStateInvalid: the block is not Reset, or has another capacity.
            TypeError: `token_block` is not a TokenBlock.
        """
        block = self._block
        if block is None:
            self._raise_closed()
        if type(token_block) is not TokenBlock:
            raise TypeError(f"apply_token_block takes a TokenBlock, got {token_block!r:.80}")
        if len(token_block.tokens) != block.set.page_size:
            raise BlockStateInvalid(
                f"Block state is invalid: TokenBlock size ({len(token_block.tokens)}) does not match Block page size "
                f"({block.set.page_size}): apply_token_block on {block.place}"
            )
        if block.state is not _RESET:
            raise illegal_step(block, "apply_token_block", "Block state is invalid: Block is not reset")
        block.content = token_block
        block.state = _COMPLETE

    def reset(self) -> None:
        """Drop the block's contents and priority; the handle still owns the block."""
        self.held.reset()

    def _partial(self, step: str) -> PartialTokens:
        content = self.held.content
        if type(content) is not PartialTokens:
            raise illegal_step(self.held, step, "Block state is invalid: Block is not partial")
        return content


class ImmutableBlock(BlockHandle):
    """One of the owners of a registered block, made by `register_blocks` and `match_sequence_hashes`."""

    __slots__ = ()

    @property
    def payload(self) -> bytes:
        """The bytes of the block, at most `block_bytes`; empty if they were never written."""
        return self.held.payload

    def close(self) -> None:
        """Release this share; the last one returns the block, still registered.

        Raises:
            BlockClosed: the handle holds no block any more.
        """
        block = self._block
        if block is None:
            self._raise_closed()
        self._block = None
        block.refs -= 1
        if not block.refs:
            block.set.returned.append(block)

    def clone(self) -> ImmutableBlock:
        """Return one more handle of the same block.

        Raises:
            BlockClosed: the handle holds no block any more.
        """
        block = self.held
        block.refs += 1
        return ImmutableBlock(block)
