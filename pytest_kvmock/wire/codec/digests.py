"""Full digests of a stream's blocks, which vLLM publishes if its hashes are bytes.

An event has 64 bits of a digest, but a chain needs all of it. So digests are computed again from tokens and parents,
and kept while a block is held.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from pytest_kvmock.engines.base.hashed import event_digests
from pytest_kvmock.values.events import Located, Removed, RouterEvent, SparseStored, Stored, block_text
from pytest_kvmock.wire.codec.defects import EncodeError

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.hashed import BlockHasher

_U64 = 2**64 - 1


class _Held(NamedTuple):
    """The digest of a held block, the number of blocks before it, and the number of its copies."""

    digest: bytes
    position: int
    copies: int


class StreamDigests:
    """The digests of one stream, that of one worker and rank.

    Args:
        hasher: names the blocks of the stream; for requests with an adapter, a salt or multimodal items it uses the
            `extra` of their events.

    Raises:
        TypeError: it is not a hasher.
    """

    __slots__ = ("_hasher", "_held", "_undo")

    def __init__(self, hasher: BlockHasher) -> None:
        if not callable(getattr(hasher, "digests", None)):
            raise TypeError(f"hasher must be the hasher of a manager, as manager.hasher; got {hasher!r:.80}")
        self._hasher = hasher
        self._held: dict[int, _Held] = {}
        self._undo: list[tuple[int, _Held | None]] | None = None

    @classmethod
    def of_manager(cls, manager: object) -> StreamDigests:
        """Return the digests of a block manager's stream.

        Raises:
            EncodeError: its engine publishes only numbers: those of Dynamo's managers are not digests, and SGLang has
                no dialect with digests.
        """
        hasher = getattr(manager, "hasher", None)
        # TensorRT-LLM's V1 publishes full names.
        if hasher is None or hasher.signed or len(hasher.digests((0,), 1, 0, None)[0]) == 8:
            name = getattr(manager, "backend", type(manager).__name__)
            raise EncodeError(
                f"backend {name!r} has no digests to write as bytes: its engine publishes numbers; vllm and vllm_0_19 "
                "have"
            )
        return cls(hasher)

    @contextmanager
    def one_batch(self) -> Iterator[None]:
        """In this context, undo changes of digests if an event is refused."""
        self._undo = []
        try:
            yield
        except BaseException:
            for name, before in reversed(self._undo):
                self._set(name, before)
            raise
        finally:
            self._undo = None

    def stored(self, event: RouterEvent) -> tuple[list[bytes], bytes | None]:
        """Return the digests of a Stored's blocks, and that of its parent.

        Raises:
            EncodeError: the parent is not held, token ids are missing, or a name does not follow from them.
        """
        data = event.event.data
        assert isinstance(data, Stored)
        if isinstance(data, SparseStored):
            raise EncodeError("a sparse Stored has no digests: its blocks are named in units that no event says")
        before: bytes | None = None
        position = 0
        if data.parent_hash is not None:
            parent = self._held.get(data.parent_hash & _U64)
            if parent is None:
                raise EncodeError(
                    f"the parent {block_text(data.parent_hash)} is not held, so that there is no digest to chain to"
                )
            before, position = parent.digest, parent.position + 1
        if not event.token_ids:
            raise EncodeError("a Stored without token ids has no digests")
        size = len(event.token_ids[0])
        made = event_digests(self._hasher, event.token_ids, size, before, event.extra, position=position)
        assert made is not None  # without units it is always known
        digests, hasher = made
        for place, (name, digest) in enumerate(zip(data.block_hashes, digests, strict=True), position):
            if (right := hasher.name(digest)) != name:
                raise EncodeError(
                    f"block {block_text(name)} does not follow from its tokens: their digest is named "
                    f"{block_text(right)}"
                )
            held = self._held.get(name & _U64)
            self._change(name & _U64, _Held(digest, place, 1 if held is None else held.copies + 1))
        return digests, before

    def removed(self, event: RouterEvent) -> list[bytes]:
        """Return the digests of a Removed's blocks; forget a block with its last copy.

        Raises:
            EncodeError: a block is not held.
        """
        data = event.event.data
        assert isinstance(data, Removed)
        out = []
        for name in data.block_hashes:
            held = self._known(name)
            out.append(held.digest)
            self._change(name & _U64, held._replace(copies=held.copies - 1) if held.copies > 1 else None)
        return out

    def located(self, data: Located) -> list[bytes]:
        """Return the digests of a location's blocks.

        Raises:
            EncodeError: a block is not held.
        """
        return [self._known(name).digest for name in data.block_hashes]

    def _known(self, name: int) -> _Held:
        held = self._held.get(name & _U64)
        if held is None:
            raise EncodeError(f"block {block_text(name)} is not held, so that there is no digest of it")
        return held

    def cleared(self) -> None:
        """Forget all blocks."""
        for name in [*self._held]:
            self._change(name, None)

    def _change(self, name: int, held: _Held | None) -> None:
        if self._undo is not None:
            self._undo.append((name, self._held.get(name)))
        self._set(name, held)

    def _set(self, name: int, held: _Held | None) -> None:
        if held is None:
            self._held.pop(name, None)
        else:
            self._held[name] = held
