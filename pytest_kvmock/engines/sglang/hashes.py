"""Names of SGLang's pages: signed 64-bit prefixes of a chain of SHA-256 digests."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Final, NoReturn

if TYPE_CHECKING:
    from pytest_kvmock.values.prompt_keys import EventExtra

_U32: Final = 2**32 - 1
_SALT: Final = b"sglang-cache-salt-v1\0"
_NAMESPACE: Final = b"sglang-kv-event-namespace-v1"
_PAGE_NAMESPACE: Final = b"sglang-cache-namespace-v1"


@dataclass(frozen=True, slots=True)
class SglangHasher:
    """Names pages as SGLang 0.5.23 does (`get_hash_str`, `hash_str_to_int64`); a `BlockHasher`.

    Attributes:
        cache_salt: start of the chain, which keeps tenants apart; None if there is none.
        extra_key: namespace of the request. It is part of a published name only in Dynamo's event format, or if it is
            an adapter. Otherwise pages of two namespaces are published under the same name.
        is_lora: whether the namespace is a LoRA adapter.
        dynamo_kv_event_format: publish names that differ between namespaces.
        is_eagle: whether pages consist of bigrams. Bigram i has the tokens i and i + 1, so n tokens make n - 1 bigrams.
    """

    signed: ClassVar[bool] = True

    cache_salt: str | None = None
    extra_key: str | None = None
    dynamo_kv_event_format: bool = False
    is_eagle: bool = False
    is_lora: bool = False

    def digests(self, tokens: Sequence[int], block_size: int, position: int, parent: bytes | None) -> list[bytes]:  # noqa: ARG002 - the signature of BlockHasher
        """Return the chained digest of each complete page.

        Args:
            tokens: token ids, from 0 to 2**63 - 1. A page with an id above 2**32 - 1 is hashed as 64-bit words.
            block_size: tokens (or bigrams) per page.
            position: ignored; see `BlockHasher.digests`.
            parent: digest of the page before the first; None for a root.

        Raises:
            TypeError: a token is not an integer.
            ValueError: a token is out of range.
        """
        words = _bigrams(tokens) if self.is_eagle else tokens if isinstance(tokens, (list, tuple, range)) else [*tokens]
        width = block_size * (2 if self.is_eagle else 1)
        before = parent if parent is not None else self._root()
        try:
            packed = array("I", words)
        except OverflowError:
            pages: Iterable[bytes] = _wide_pages(words, width)
        except TypeError:
            _raise_for_token(words)
        else:
            if sys.byteorder == "big":
                packed.byteswap()
            data, step = packed.tobytes(), 4 * width
            pages = [data[end - step : end] for end in range(step, len(data) + 1, step)]
        out: list[bytes] = []
        for page in pages:
            before = sha256(before + page).digest()
            out.append(before)
        return out

    def name(self, digest: bytes) -> int:
        """Return the first 64 bits of a digest, signed; an adapter, or in Dynamo's format a namespace, is hashed in."""
        head = digest[:8]
        if self.dynamo_kv_event_format and (self.extra_key is not None or self.cache_salt is not None):
            head = sha256(_namespace_seed(self.extra_key, self.cache_salt) + head).digest()[:8]
        elif self.is_lora:  # the salt is in the digest already
            head = sha256(_namespace_seed(self.extra_key, None) + head).digest()[:8]
        return int.from_bytes(head, "big", signed=True)

    def keyed(self, extra_key: str | None, cache_salt: str | None, *, is_lora: bool = False) -> SglangHasher:
        """Return the same engine's hasher for a request with this namespace (or adapter) and salt."""
        return replace(self, extra_key=extra_key, cache_salt=cache_salt, is_lora=is_lora)

    def looking_ahead(self, lookahead: int) -> SglangHasher:
        """Return the hasher with this look-ahead: 1 for pages of bigrams, 0 for pages of tokens."""
        return self if self.is_eagle == bool(lookahead) else replace(self, is_eagle=bool(lookahead))

    def of_event(self, extra: EventExtra, position: int) -> SglangHasher:  # noqa: ARG002 - as BlockHasher has it
        """Return the hasher for the adapter and salt that an event carries."""
        lora_name = extra.get("lora_name")
        return self.keyed(lora_name, extra.get("cache_salt"), is_lora=lora_name is not None)

    def _root(self) -> bytes:
        return b"" if self.cache_salt is None else sha256(_SALT + self.cache_salt.encode()).digest()


@lru_cache(maxsize=256)
def _namespace_seed(extra_key: str | None, cache_salt: str | None, purpose: bytes = _NAMESPACE) -> bytes:
    parts = [purpose]
    for text in (extra_key, cache_salt):
        if text is None:
            parts.append(b"\0")
        else:
            data = text.encode()
            parts += [b"\1", struct.pack("<Q", len(data)), data]
    return sha256(b"".join(parts)).digest()


def page_root(extra_key: str | None, cache_salt: str | None) -> bytes | None:
    """Return the digest that starts the chains of a namespace in a storage; None if there is none.

    Args:
        extra_key: the namespace or adapter; None and "" differ.
        cache_salt: the salt; None and "" differ.
    """
    if extra_key is None and cache_salt is None:
        return None
    return _namespace_seed(extra_key, cache_salt, _PAGE_NAMESPACE)


def _bigrams(tokens: Sequence[int]) -> list[int]:
    return [token for pair in pairwise(tokens) for token in pair]


def _wide_pages(words: Sequence[int], width: int) -> list[bytes]:
    """Return the bytes of pages; pages with a token above 2**32 - 1 get a mark and 64-bit words."""
    pages = []
    for end in range(width, len(words) + 1, width):
        page = words[end - width : end]
        try:
            pages.append(
                b"\xff" + struct.pack(f"<{width}q", *page) if max(page) > _U32 else struct.pack(f"<{width}I", *page)
            )
        except struct.error:
            _raise_for_token(words)
    if any(word < 0 for word in words):
        _raise_for_token(words)
    return pages


def _raise_for_token(words: Sequence[object]) -> NoReturn:
    allowed = "a token id is an integer from 0 to 2**63 - 1"
    for token in words:
        if not isinstance(token, int):
            raise TypeError(f"token {token!r} ({type(token).__name__}): {allowed}")
        if not 0 <= token < 2**63:
            raise ValueError(f"token {token!r}: {allowed}")
    raise TypeError(f"tokens cannot be read as a sequence of token ids: {allowed}")  # pragma: no cover
