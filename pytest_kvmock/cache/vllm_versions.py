"""In what releases of vLLM differ, as far as their block pool and its hashes show it."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class VllmVersion:
    """What one release does.

    Attributes:
        name: the release.
        prepends_unhashed: freed blocks without a hash go to the front of the free queue, and are used again first; else
            to its end, before the hashed ones of the same request.
        tagged_keys: what is hashed beside tokens says what it is: `("cache_salt", salt)`, and not `salt`.
        fixed_seed: seed of the SHA-256 hashes where none is set; None: it is another in each process.
    """

    name: str
    prepends_unhashed: bool
    tagged_keys: bool
    fixed_seed: str | None


VERSIONS: Final = MappingProxyType(
    {
        version.name: version
        for version in (
            VllmVersion("0.33.0", prepends_unhashed=True, tagged_keys=True, fixed_seed="vllm-none-hash"),
            VllmVersion("0.28.0", prepends_unhashed=True, tagged_keys=False, fixed_seed=None),
            VllmVersion("0.24.0", prepends_unhashed=True, tagged_keys=False, fixed_seed=None),
            VllmVersion("0.23.0", prepends_unhashed=False, tagged_keys=False, fixed_seed=None),
            VllmVersion("0.19.1", prepends_unhashed=False, tagged_keys=False, fixed_seed=None),
        )
    }
)
"""The releases that are known, newest first. 0.33.0 and 0.19.1 were recorded; the others were read."""


def vllm_version(name: str) -> VllmVersion:
    """The release of this name.

    Raises:
        ValueError: it is not known; the known ones are listed.
    """
    if isinstance(name, str) and name in VERSIONS:
        return VERSIONS[name]
    raise ValueError(f"unknown vLLM version {name!r}; known: {', '.join(VERSIONS)}")
