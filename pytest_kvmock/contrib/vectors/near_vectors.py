"""The set `near` of vectors: blocks whose names, and tokens whose local hashes, agree in a part that a truncating index
keeps.

Two engines have arbitrary block names; their events are written by hand, as no engine produces such hashes. In Dynamo's
dialects blocks still have Dynamo's names: the name of a prompt's first block is its local hash.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from pytest_kvmock.engines.base.hashed import BlockHasher
from pytest_kvmock.values.dialect import Dialect
from pytest_kvmock.values.events import BlockTokens, Cleared, EventData, Removed, Stored
from pytest_kvmock.values.programs.near_hashes import TRUNCATIONS, hash_pair, token_pair
from pytest_kvmock.values.prompt_keys import EventExtra
from pytest_kvmock.values.tokens import Prompt, block_hashes, sequence_hashes

_SIGN: Final = 2**63


class NearStep(NamedTuple):
    """An event of a worker, and the prompts that are queried after it.

    Attributes:
        worker: the worker that publishes it.
        data: the event.
        tokens: for a Stored, the tokens of each block.
        asked: the queried prompts.
    """

    worker: int
    data: EventData
    tokens: BlockTokens | None
    asked: tuple[Prompt, ...]


def near_steps(dialect: Dialect, block_size: int) -> Iterator[NearStep]:
    """Yield the events of two workers, and the queries.

    Args:
        dialect: the dialect of the events.
        block_size: tokens per block.
    """
    for number, kept in enumerate(TRUNCATIONS):
        first, second = token_pair(block_size, kept)
        third, fourth = (
            tuple(range(start, start + block_size)) for start in (1000 * number + 1000, 1000 * number + 1500)
        )
        if dialect.is_msgpack:
            one, other = (_written(name, dialect) for name in hash_pair(kept))
            after = [_written(7919 * number + place, dialect) for place in (1, 2)]
        else:
            (one,), (other,) = block_hashes(first, block_size), block_hashes(second, block_size)
            local = [block_hashes(tokens, block_size)[0] for tokens in (third, fourth)]
            after = [sequence_hashes([own], parent=parent)[0] for parent, own in zip((one, other), local, strict=True)]

        def stored(parent: int | None, name: int, tokens: tuple[int, ...]) -> tuple[Stored, BlockTokens]:
            return Stored(parent, (name,), tuple(block_hashes(tokens, block_size))), [tokens]

        heads = Prompt((*first, *third)), Prompt((*second, *fourth))
        asked = *heads, Prompt((*first, *fourth)), Prompt((*second, *third))
        yield NearStep(0, *stored(None, one, first), asked)
        yield NearStep(1, *stored(None, other, second), asked)
        yield NearStep(0, *stored(None, other, second), asked)
        yield NearStep(0, *stored(one, after[0], third), asked)
        yield NearStep(0, *stored(other, after[1], fourth), asked)
        yield NearStep(0, Removed((after[0],)), None, asked)
        yield NearStep(0, Removed((one,)), None, asked)
        yield NearStep(0, Cleared(), None, asked)


def _written(name: int, dialect: Dialect) -> int:
    """Return a block hash as written in a dialect; some dialects write signed hashes."""
    return name - 2 * _SIGN if dialect.hashes == "signed" and name >= _SIGN else name


class NamedBlocks(BlockHasher):
    """A hasher for dialects with whole digests: the last 64 bits of a digest are the given name of the block.

    Args:
        steps: the events that name the blocks.
    """

    def __init__(self, steps: Iterator[NearStep]) -> None:
        self._names: dict[tuple[int, ...], int] = {}
        for step in steps:
            if isinstance(step.data, Stored) and step.tokens is not None:
                for name, tokens in zip(step.data.block_hashes, step.tokens, strict=True):
                    self._names[tuple(tokens)] = name

    @property
    def signed(self) -> bool:
        """Whether names are signed."""
        return False

    def digests(self, tokens: Sequence[int], block_size: int, position: int, parent: bytes | None) -> list[bytes]:  # noqa: ARG002 - as BlockHasher
        """Return the digests of whole blocks."""
        blocks = (tuple(tokens[at : at + block_size]) for at in range(0, len(tokens), block_size))
        return [sum(block).to_bytes(24, "big") + self._names[block].to_bytes(8, "big") for block in blocks]

    def name(self, digest: bytes) -> int:
        """Return the name of a block from its digest."""
        return int.from_bytes(digest[-8:], "big")

    def looking_ahead(self, lookahead: int) -> BlockHasher:  # noqa: ARG002 - as BlockHasher
        """Return this hasher: the blocks have given names."""
        return self

    def of_event(self, extra: EventExtra, position: int) -> BlockHasher:  # noqa: ARG002 - as BlockHasher
        """Return the hasher of blocks with extra keys: this one."""
        return self
