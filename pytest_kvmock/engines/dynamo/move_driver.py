"""Drives managers that take moves, by an `ActiveSequence` for each request, like Dynamo's vLLM-like schedulers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING, ClassVar
from uuid import UUID

from pytest_kvmock.engines.base.driver import PROMPT_KEYS, Powers, PromptPlan, Traits
from pytest_kvmock.engines.base.event_recorder import EventRecorder
from pytest_kvmock.engines.base.manager_base import RequestLevel
from pytest_kvmock.engines.dynamo.sequence import ActiveSequence, Moves
from pytest_kvmock.values.moves import Deref, Destroy, Use
from pytest_kvmock.values.prompt_keys import LoraIds
from pytest_kvmock.values.tokens import Prompt, chained_hash, keyed_block_hashes

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.values.events import Stored
    from pytest_kvmock.values.moves import Block, Move
    from pytest_kvmock.values.prompt_keys import EventExtra, PromptKeys

_NO_LIMIT = 2**62  # a worker decodes for as long as the test requests tokens


class _MoveRequest(ActiveSequence):
    """A sequence that is also a request of a worker."""

    __slots__ = ()

    @property
    def blocks(self) -> Sequence[Block]:
        return self.unique_blocks


class MoveDriver:
    """Turns requests into Use, Promote and Deref.

    Args:
        manager: takes moves.
        prefix_caching: whether its requests may reuse blocks.
        rng: source of generated tokens and of the names of partial blocks.

    Raises:
        ValueError: the manager takes no moves.

    Attributes:
        recorder: the sink of the manager's events, set by its worker. A move by hand has arbitrary hashes, so events
            are marked as made for a request only while the recorder is entered: in `process`, and in the host time.
    """

    traits = Traits()
    prompt_keys: ClassVar[tuple[str, ...]] = PROMPT_KEYS
    admits_whole = False
    _moves: ClassVar[Moves] = "chunks"

    def __init__(self, manager: KvManager, prefix_caching: bool, rng: Random) -> None:
        if isinstance(manager, RequestLevel):
            raise ValueError(  # noqa: TRY004 - one error a worker
                f"a {manager.backend!r} manager takes no moves; a worker of it needs the driver of its backend: "
                "KvWorker(..., driver=spec.driver), or BackendSpec(..., driver=...)"
            )
        self.manager = manager
        self._prefix_caching = prefix_caching
        self._rng = rng
        # Like Dynamo's, moves carry only tokens and hashes. If a prompt carries more, each of its blocks has an entry
        # here: the prompt's keys, and the block's place.
        self._keyed: dict[int, tuple[PromptKeys, int]] = {}
        self._lora_ids = LoraIds()
        self.recorder = EventRecorder(0, None)

    @property
    def powers(self) -> Powers:
        """Capabilities that not every driver has."""
        return Powers(extra_of=self.extra_of, take_recorder=self.take_recorder)

    def take_recorder(self, recorder: EventRecorder) -> None:
        """Set the sink of the manager's events."""
        self.recorder = recorder

    def process(self, move: Move) -> int:
        """Pass a move of a request to the manager; return its answer."""
        with self.recorder:
            return self.manager.process(move)

    def _request(self, prompt: Prompt, rng: Random | None = None) -> _MoveRequest:
        return _MoveRequest(
            prompt,
            _NO_LIMIT,
            self.manager.block_size,
            self._prefix_caching,
            prompt.has_tokens,
            rng=rng or self._rng,
            moves=self._moves,
        )

    def open(self, prompt: Prompt, *, to_look: bool = False) -> _MoveRequest:
        """Return a new request, without blocks."""
        if to_look:
            # Names from another source: a look-up must not change the names generated next, nor collide with them.
            return self._request(prompt, Random("look"))  # noqa: S311 - mock data
        request = self._request(prompt)
        self._lora_ids.use(prompt.keys)
        if prompt.keys is not None or self._keyed:
            self._remember(request, 0)
        return request

    def _remember(self, sequence: ActiveSequence, first: int) -> None:
        """Record what the blocks of a sequence carry, from number `first` on."""
        keys = sequence.keys if self._prefix_caching else None
        for place, block in enumerate(sequence.unique_blocks[first:], first):
            if isinstance(block, UUID):
                continue
            if keys is None:  # no name contains the session, so the block may have an entry of another request
                self._keyed.pop(block, None)
            else:
                self._keyed[block] = keys, place

    def extra_of(self, stored: Stored) -> EventExtra | None:
        """Return the extra fields of a Stored of the manager; None if there are none."""
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
        """Count the cached tokens of its prompt; Dynamo never counts output."""
        return self.manager.prefill_cost(request).cached_tokens

    def need(self, request: _MoveRequest, upto: int, tokens: Sequence[int] = ()) -> int:
        """Count the needed blocks that no request holds: each takes a slot, cached or new."""
        if tokens:
            return self._need_of_steps(request, tokens)
        return self._need_of(request, upto, self.room())

    def _need_of(self, request: _MoveRequest, upto: int, room: int) -> int:
        size = request.block_size
        start, end = -(-request.num_allocated_tokens // size), -(-upto // size)
        if end - start <= room:  # it fits, even if none of the blocks is held already
            return end - start
        references = self.manager.references
        return sum(not references(block) for block in request.unique_blocks[start:end])

    def plan(self, request: _MoveRequest, upto: int) -> PromptPlan:
        """Return `need`, `room` and `lookup`; the later Use names the blocks."""
        room = self.room()
        return PromptPlan(self._need_of(request, upto, room), room, self.lookup(request))

    def room(self) -> int:
        """Count the blocks that no request holds."""
        return self.manager.num_blocks - self.manager.num_active_blocks

    def admit(self, request: _MoveRequest, upto: int, plan: PromptPlan | None = None) -> None:  # noqa: ARG002 - as above
        """Use the blocks of the first `upto` tokens that it does not hold yet."""
        move = request.allocate_blocks_for_chunk(upto)
        if move is not None:
            self.process(move)

    def _need_of_steps(self, request: _MoveRequest, tokens: Sequence[int]) -> int:
        """Return the maximum number of additional blocks that are held at once during decode steps.

        If a partial block fills up and another request holds the same block, its Promote frees the partial block's
        slot. So the steps are simulated, not only counted.
        """
        needed = most = 0
        for filled in _openings(request, tokens):
            if filled is not None and self.manager.references(filled):
                needed -= 1
            needed += 1
            most = max(most, needed)
        return most

    def extend(self, request: _MoveRequest, tokens: Sequence[int]) -> None:
        """Decode, one step a token."""
        for token in tokens:
            moves = request.push(token)
            if moves:  # few tokens open a block; the others need no slot
                if request.keys is not None or self._keyed:
                    self._remember(request, max(0, len(request.block_hashes) - 1))
                for move in moves:
                    self.process(move)
                request.commit_allocation(len(request))
        request.commit_allocation(len(request))

    def allocate(self, request: _MoveRequest, upto: int) -> int:
        """Use the blocks of the first `upto` tokens that it does not hold yet; the manager may serve fewer."""
        if upto <= request.num_allocated_tokens:
            return upto
        move = request.prepare_allocation(upto)
        if move is not None:
            served = self.process(move)
            if served < len(move.blocks):
                held = -(-request.num_allocated_tokens // request.block_size) + served
                upto = min(held * request.block_size, upto)
        request.commit_allocation(upto)
        return upto

    def generate(self, request: _MoveRequest, token: int) -> bool:
        """Push a token; return False, with the token popped, if the Use of its block is not served.

        A Promote before this Use stays.
        """
        moves = request.push(token)
        if moves:  # few tokens open a block
            if request.keys is not None or self._keyed:
                self._remember(request, max(0, len(request.block_hashes) - 1))
            for move in moves:
                if not self.process(move):
                    request.pop()
                    return False
        request.num_allocated_tokens = request.num_input_tokens + request.generated_tokens
        return True

    def quiet_tokens(self, request: _MoveRequest) -> int:
        """Count the tokens that the last block still takes; 0 if the block is not allocated."""
        length = len(request)
        return -length % request.block_size if request.num_allocated_tokens >= length else 0

    def generate_quietly(self, request: _MoveRequest, tokens: Sequence[int]) -> None:
        """Append tokens to the last block."""
        request.fill(tokens)
        request.commit_allocation(len(request))

    def free(self, request: _MoveRequest, *, done: bool) -> None:
        """Free all blocks, tail first; the sequence keeps its generated tokens."""
        # One move for all full blocks; the sequence would make one a block. A Deref publishes nothing, so the result
        # is the same.
        blocks = request.allocated_blocks[::-1]
        if blocks and isinstance(blocks[0], UUID):
            self.process(Deref(blocks[:1]))
            del blocks[0]
        if blocks:
            self.process(Deref(blocks))
        self._freed(request, done=done)

    def _freed(self, sequence: ActiveSequence, *, done: bool) -> None:
        sequence.num_allocated_tokens = 0
        if done:  # a finished request caches nothing more
            sequence.release()

    def clear(self) -> bool:
        """Drop all cached blocks."""
        return self.manager.clear()


class WholeMoveDriver(MoveDriver):
    """Makes the moves of the scheduler of 1.0.2: one Use for the whole prompt, and a Destroy for a partial block.

    Block names depend on tokens only: later versions of Dynamo added adapters, items and namespaces to the hashes.
    """

    traits = Traits(removed_first=True, chunks=False)
    prompt_keys = ()
    _moves = "whole"

    def admit(self, request: _MoveRequest, upto: int, plan: PromptPlan | None = None) -> None:  # noqa: ARG002 - the first chunk takes all
        """Use all blocks at the first chunk."""
        move = request.take_creation_signal()
        if move is not None:
            self.process(move)

    def extend(self, request: _MoveRequest, tokens: Sequence[int]) -> None:
        """Decode, one step a token."""
        for token in tokens:
            moves = request.push(token)
            if moves and (request.keys is not None or self._keyed):
                self._remember(request, max(0, len(request.block_hashes) - 1))
            for move in moves:
                self.process(move)
        request.commit_allocation(len(request))

    def allocate(self, request: _MoveRequest, upto: int) -> int:
        """Use the blocks of the first `upto` tokens that it does not hold yet, as many as fit.

        It allocates chunk by chunk, like the scheduler of 1.1.1 on this manager. It never tries a Use that does not
        fit, because such a Use keeps the blocks already taken.
        """
        size, held = request.block_size, request.num_allocated_tokens
        if upto > held:
            start, end = -(-held // size), -(-upto // size)
            blocks = request.unique_blocks[:end]
            references, free = self.manager.references, self.room()
            for position in range(start, end):
                if not references(blocks[position]):
                    if not free:
                        upto = position * size
                        del blocks[position:]
                        break
                    free -= 1
            if start < len(blocks):
                hashes = request.block_hashes[start : len(blocks)]
                parent = blocks[start - 1] if start else None
                self.process(Use(blocks[start:], hashes, (), None, parent))
            request.commit_allocation(max(upto, held))
        return max(upto, held)

    def free(self, request: _MoveRequest, *, done: bool) -> None:
        """Free all blocks, tail first, if it has any; the request keeps its generated tokens."""
        # A scheduler may have allocated only some of the blocks.
        blocks = request.unique_blocks[: -(-request.num_allocated_tokens // request.block_size)][::-1]
        if blocks and isinstance(blocks[0], UUID):
            self.process(Destroy(blocks[:1]))
            del blocks[0]
        self.process(Deref(blocks))
        self._freed(request, done=done)


def _openings(sequence: ActiveSequence, steps: Sequence[int]) -> Iterator[int | None]:
    """Yield, for each block that these tokens would open, the name that the block before it is promoted to.

    None if nothing is promoted, or if the name is unknown or never shared (no tokens, no prefix caching).
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
        count -= 1  # the first opened block follows a full one: there is no partial block to promote
        yield None
    for start in range(0, count * size, size):
        local = keyed_block_hashes(tail[start : start + size], size, sequence.keys, full + start // size)[0]
        parent = chained_hash(parent, local)
        yield parent
