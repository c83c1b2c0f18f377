"""Hand-overs between engines.

A hand-over is the parameters that a router carries, as a value that tests may change, drop or keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pytest_kvmock.engines.base.pair_options import HAND_OVERS

_FOREIGN: Final = {
    "vllm": ("transfer_id", "bootstrap_room", "disagg_request_id", "ctx_request_id"),
    "vllm-mooncake": ("remote_block_ids", "bootstrap_room", "disagg_request_id", "ctx_request_id"),
    "sglang": ("remote_block_ids", "transfer_id", "disagg_request_id", "ctx_request_id"),
}
"""Fields that identify parameters of another kind of engine."""


class Source(Protocol):
    """The port of the engine that made a hand-over."""

    engine_id: str


class HandOver(Mapping[str, Any]):
    """The parameters of one hand-over, by the engine's own field names; immutable.

    Args:
        fields: the parameters.
        way: the way to hand over, one of `HAND_OVERS`.
        source: the port of the engine that made them, which is notified when they are used; None if there is none.

    Attributes:
        way: as given.
        source: as given.
    """

    __slots__ = ("_fields", "source", "way")

    def __init__(self, fields: Mapping[str, Any], way: str, source: Source | None = None) -> None:
        self._fields = dict(fields)
        self.way, self.source = way, source

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return f"HandOver({self._fields!r}, {self.way!r})"

    def changed(self, **fields: Any) -> HandOver:
        """Return a copy with some fields changed or added."""
        return HandOver({**self._fields, **fields}, self.way, self.source)

    def without(self, *names: str) -> HandOver:
        """Return a copy without some fields.

        Raises:
            ValueError: it has no field of that name.
        """
        for name in names:
            if name not in self._fields:
                raise ValueError(f"without: the hand-over has no field {name!r}; it has {', '.join(self._fields)}")
        return HandOver(
            {name: value for name, value in self._fields.items() if name not in names}, self.way, self.source
        )


def check_kind(given: object, way: str, where: str) -> Mapping[str, Any] | None:
    """Check and return parameters for an engine, or None if there are none.

    Raises:
        ValueError: they are not a mapping, or belong to another kind of engine.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ValueError(  # noqa: TRY004 - one error
            f"{where}: hand_over must be a HandOver, a mapping of its fields, or None, got {given!r:.80}"
        )
    other = given.way if isinstance(given, HandOver) and given.way != way else None
    foreign = [name for name in _FOREIGN[way] if name in given]
    if other is not None or foreign:
        whose = f"hand_over={other!r}" if other is not None else f"another kind of engine ({foreign[0]})"
        raise ValueError(f"{where}: parameters of {whose} at an engine of hand_over={way!r}")
    return given


def check_way(value: object, where: str = "") -> str:
    """Check and return a way to hand over.

    Raises:
        ValueError: it is invalid.
    """
    if value not in HAND_OVERS:
        raise ValueError(f"{where}hand_over must be {', '.join(map(repr, HAND_OVERS))}, got {value!r:.80}")
    return str(value)


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks that an engine holds for a leg that does not run.

    Attributes:
        request: the name of the leg.
        phase: "kept" if the leg is over; "loading", "received" or "taken up" if its prompt comes from another engine.
        num_blocks: number of blocks, over all groups.
        until_ms: end of the lease in ms; None if there is none.
    """

    request: str
    phase: str
    num_blocks: int
    until_ms: float | None
