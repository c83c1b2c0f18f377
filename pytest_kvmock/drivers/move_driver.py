"""Drives the managers that take moves, as Dynamo's vLLM-like schedulers do with an `ActiveSequence`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING, ClassVar, Literal
from uuid import UUID

from pytest_kvmock.cache.base import RequestLevel
from pytest_kvmock.cache.dynamo.sequence import ActiveSequence
from pytest_kvmock.drivers.driver import PROMPT_KEYS, Traits
from pytest_kvmock.drivers.event_recorder import EventRecorder
from pytest_kvmock.moves import Deref, Destroy, Use
from pytest_kvmock.prompt_keys import LoraIds
from pytest_kvmock.tokens import Prompt, chained_hash, keyed_block_hashes

if TYPE_CHECKING:
    from pytest_kvmock.cache.manager import KvManager
    from pytest_kvmock.events import Stored
    from pytest_kvmock.moves import Block, Move
    from pytest_kvmock.prompt_keys import EventExtra, PromptKeys

_NO_LIMIT = 2**62  # a worker decodes for as long as the test asks it to


class _MoveRequest:
    """A request as the worker sees it: a view of its sequence."""

    __slots__ = ("sequence",)

    def __init__(self, sequence: ActiveSequence) -> None:
        self.sequence = sequence

    @property
    def blocks(self) -> Sequence[Block]:
        return self.sequence.unique_blocks

    def __len__(self) -> int:
        return len(self.sequence)


class MoveDriver:
    """Turns requests into Use, Promote and Deref.

    Args:
        manager: takes moves.
        prefix_caching: whether its requests may reuse blocks.
        rng: source of generated tokens and of the names of partial blocks.

    Raises:
        ValueError: the manager takes no moves.

    Attributes:
        recorder: what the manager publishes to, set by its worker. A move by hand has free hashes, so what is published is
            marked as for a request only while the recorder is entered: `process` does that, and the time of its host.
    """

    traits = Traits()
    prompt_keys: ClassVar[tuple[str, ...]] = PROMPT_KEYS
    admits_whole = False
    _semantics: ClassVar[Literal["e0"] | None] = None

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        if isinstance(manager, RequestLevel):
            raise ValueError(  # noqa: TRY004 - one error a worker
                f"a {manager.backend!r} manager takes no moves; a worker of it needs the driver of its backend: "
                "KvWorker(..., driver=spec.driver), or BackendSpec(..., driver=...)"
            )
        self.manager = manager
        self._prefix_caching = prefix_caching
        self._rng = rng
        # Moves carry tokens and hashes alone, as Dynamo's do: of each block of a prompt that carries more, that and its place.
        self._keyed: dict[int, tuple[PromptKeys, int]] = {}
        self._lora_ids = LoraIds()
        self.recorder = EventRecorder(0, None)

    def process(self, move: Move) -> int:
        """Give the manager a move of a request; return what it returns."""
        with self.recorder:
            return self.manager.process(move)

    def _sequence(self, prompt: Prompt, rng: Random | None = None) -> ActiveSequence:
        return ActiveSequence(
            prompt,
            _NO_LIMIT,
            self.manager.block_size,
            self._prefix_caching,
            prompt.has_tokens,
            rng=rng or self._rng,
            semantics=self._semantics,
        )

    def open(self, prompt: Prompt, *, to_look: bool = False) -> _MoveRequest:
        """A request that has no block yet."""
        if to_look:
            # With names from elsewhere: whoever only looks must not change what is generated next, nor meet it.
            return _MoveRequest(self._sequence(prompt, Random("look")))  # noqa: S311 - mock data
        request = _MoveRequest(self._sequence(prompt))
        self._lora_ids.use(prompt.keys)
        if prompt.keys is not None or self._keyed:
            self._remember(request.sequence, 0)
        return request

    def _remember(self, sequence: ActiveSequence, first: int) -> None:
        """Remember what the blocks of a sequence carry, from this one on."""
        keys = sequence.keys if self._prefix_caching else None
        for place, block in enumerate(sequence.unique_blocks[first:], first):
            if isinstance(block, UUID):
                continue
            if keys is None:  # a session is in no name: the same block may have been another request's
                self._keyed.pop(block, None)
            else:
                self._keyed[block] = keys, place

    def extra_of(self, stored: Stored) -> EventExtra | None:
        """What travels beside a Stored of the manager; None for nothing."""
        found = [self._keyed.get(block) for block in stored.block_hashes]
        first = found[0] if found else None
        if first is None:
            return None
        keys, size = first[0], self.manager.block_size
        extra = keys.carried(0, 0, size, self._lora_ids)
        if "extra_keys" in extra:
            extra["extra_keys"] = [None if each is None else each[0].block_keys(each[1], size) for each in found]
        return extra

    def lookup(self, request: _MoveRequest) -> int:
        """Tokens of its prompt that are cached; Dynamo never counts output."""
        return self.manager.prefill_cost(request.sequence).cached_tokens

    def need(self, request: _MoveRequest, upto: int, tokens: Sequence[int] = ()) -> int:
        """Blocks that no request holds: each takes a slot, whether it is cached or new."""
        if tokens:
            return self._need_of_steps(request, tokens)
        sequence = request.sequence
        size = sequence.block_size
        start, end = -(-sequence.num_allocated_tokens // size), -(-upto // size)
        if end - start <= self.room():  # so it fits, however many of them are held already
            return end - start
        references = self.manager.references
        return sum(not references(block) for block in sequence.unique_blocks[start:end])

    def room(self) -> int:
        """Blocks that no request holds."""
        return self.manager.max_capacity - self.manager.num_active_blocks

    def admit(self, request: _MoveRequest, upto: int) -> None:
        """Use the blocks of the first `upto` tokens that it does not hold yet."""
        move = request.sequence.allocate_blocks_for_chunk(upto)
        if move is not None:
            self.process(move)

    def _need_of_steps(self, request: _MoveRequest, tokens: Sequence[int]) -> int:
        """The most blocks that decode steps hold at once beyond today's.

        A partial block that fills up as one that another request holds gives its own back (Promote), so the steps
        are walked through, not only counted.
        """
        needed = most = 0
        for filled in _openings(request.sequence, tokens):
            if filled is not None and self.manager.references(filled):
                needed -= 1
            needed += 1
            most = max(most, needed)
        return most

    def extend(self, request: _MoveRequest, tokens: Sequence[int]) -> None:
        """Decode steps, one a token."""
        sequence = request.sequence
        for token in tokens:
            moves = sequence.push(token)
            if moves:  # few tokens open a block; the others need no slot
                if sequence.keys is not None or self._keyed:
                    self._remember(sequence, max(0, len(sequence.block_hashes) - 1))
                for move in moves:
                    self.process(move)
                sequence.commit_allocation(len(sequence))
        sequence.commit_allocation(len(sequence))

    def allocate(self, request: _MoveRequest, upto: int) -> int:
        """Use the blocks of the first `upto` tokens that it does not hold yet; the manager may serve fewer."""
        sequence = request.sequence
        if upto <= sequence.num_allocated_tokens:
            return upto
        move = sequence.prepare_allocation(upto)
        if move is not None:
            served = self.process(move)
            if served < len(move.blocks):
                held = -(-sequence.num_allocated_tokens // sequence.block_size) + served
                upto = min(held * sequence.block_size, upto)
        sequence.commit_allocation(upto)
        return upto

    def generate(self, request: _MoveRequest, token: int) -> bool:
        """Push a token. Where the Use of its block is not served, the token is popped; a Promote before it stays."""
        sequence = request.sequence
        moves = sequence.push(token)
        if moves:  # few tokens open a block
            if sequence.keys is not None or self._keyed:
                self._remember(sequence, max(0, len(sequence.block_hashes) - 1))
            for move in moves:
                if not self.process(move):
                    sequence.pop()
                    return False
        sequence.num_allocated_tokens = sequence.num_input_tokens + sequence.generated_tokens
        return True

    def quiet_tokens(self, request: _MoveRequest) -> int:
        """Tokens that the last block still takes, if the request has it."""
        sequence = request.sequence
        length = len(sequence)
        return -length % sequence.block_size if sequence.num_allocated_tokens >= length else 0

    def generate_quietly(self, request: _MoveRequest, tokens: Sequence[int]) -> None:
        """Append tokens to the last block."""
        request.sequence.fill(tokens)
        request.sequence.commit_allocation(len(request.sequence))

    def free(self, request: _MoveRequest, *, done: bool) -> None:
        """Free all blocks, tail first; the sequence keeps what it generated."""
        # One move for all full blocks instead of one a block, as the sequence would make them: a Deref publishes nothing,
        # so it makes no difference.
        blocks = request.sequence.allocated_blocks[::-1]
        if blocks and isinstance(blocks[0], UUID):
            self.process(Deref(blocks[:1]))
            del blocks[0]
        if blocks:
            self.process(Deref(blocks))
        self._freed(request.sequence, done=done)

    def _freed(self, sequence: ActiveSequence, *, done: bool) -> None:
        sequence.commit_allocation(0)
        if done:  # nothing more is cached at the end
            sequence.release()

    def clear(self) -> bool:
        """Drop all that is cached."""
        return self.manager.clear()


class WholeMoveDriver(MoveDriver):
    """Makes moves as the scheduler of 1.0.2: one Use for the whole prompt, and a Destroy for a partial block.

    Blocks are named by tokens alone: adapters, items and namespaces came to Dynamo's hashes later.
    """

    traits = Traits(removed_first=True, chunks=False)
    prompt_keys = ()
    _semantics = "e0"

    def admit(self, request: _MoveRequest, upto: int) -> None:  # noqa: ARG002 - the first chunk takes the whole
        """Use all blocks, when the first chunk comes."""
        move = request.sequence.take_creation_signal()
        if move is not None:
            self.process(move)

    def extend(self, request: _MoveRequest, tokens: Sequence[int]) -> None:
        """Decode steps, one a token."""
        sequence = request.sequence
        for token in tokens:
            moves = sequence.push(token)
            if moves and (sequence.keys is not None or self._keyed):
                self._remember(sequence, max(0, len(sequence.block_hashes) - 1))
            for move in moves:
                self.process(move)
        sequence.commit_allocation(len(sequence))

    def allocate(self, request: _MoveRequest, upto: int) -> int:
        """Use the blocks of the first `upto` tokens that it does not hold yet, as many of them as fit.

        Chunk by chunk, as the scheduler of 1.1.1 does over this manager; a Use that does not fit is not tried, as it
        would keep what it took.
        """
        sequence = request.sequence
        size, held = sequence.block_size, sequence.num_allocated_tokens
        if upto > held:
            start, end = -(-held // size), -(-upto // size)
            blocks = sequence.unique_blocks[:end]
            references, free = self.manager.references, self.room()
            for position in range(start, end):
                if not references(blocks[position]):
                    if not free:
                        upto = position * size
                        del blocks[position:]
                        break
                    free -= 1
            if start < len(blocks):
                hashes = sequence.block_hashes[start : len(blocks)]
                parent = blocks[start - 1] if start else None
                self.process(Use(blocks[start:], hashes, (), None, parent))
            sequence.commit_allocation(max(upto, held))
        return max(upto, held)

    def free(self, request: _MoveRequest, *, done: bool) -> None:
        """Free all blocks, tail first, if it has any; the sequence keeps what it generated."""
        sequence = request.sequence
        # A scheduler may have allocated a part of them.
        blocks = sequence.unique_blocks[: -(-sequence.num_allocated_tokens // sequence.block_size)][::-1]
        if blocks and isinstance(blocks[0], UUID):
            self.process(Destroy(blocks[:1]))
            del blocks[0]
        self.process(Deref(blocks))
        self._freed(sequence, done=done)


def _openings(sequence: ActiveSequence, steps: Sequence[int]) -> Iterator[int | None]:
    """For each block that these tokens would open: the name that the block before it is promoted to.

    None where nothing is promoted, or where the name cannot be known or shared (no tokens, no prefix caching).
    """
    size, length = sequence.block_size, len(sequence)
    count = -(-(length + len(steps)) // size) - -(-length // size)
    if not count:
        return
    tokens = sequence.tokens if sequence.enable_prefix_caching else None
    if tokens is None:
        yield from [None] * count
        return
    full = len(sequence.block_hashes)
    parent = sequence.unique_blocks[full - 1] if full else None
    assert not isinstance(parent, UUID)
    tail = [*tokens[full * size :], *steps]
    if not length % size and len(sequence.unique_blocks) == full:
        count -= 1  # the first opens a block right after a full one: there is no partial block to promote
        yield None
    for start in range(0, count * size, size):
        local = keyed_block_hashes(tail[start : start + size], size, sequence.keys, full + start // size)[0]
        parent = chained_hash(parent, local)
        yield parent
