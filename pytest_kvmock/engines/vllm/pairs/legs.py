"""One leg of a request at an engine with a connector, and the values that two engines exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pytest_kvmock.values.checks import KvMockError

Tables: TypeAlias = "tuple[list[int], ...]"
"""Blocks by group and position."""

Ended: TypeAlias = "tuple[bool, dict[str, Any] | None]"
"""Whether the blocks of an ended leg are kept, and the parameters of its answer, if any."""

Finish: TypeAlias = Literal["length", "stop", "abort", "error"]

LegStatus: TypeAlias = Literal["waiting", "loading", "received", "taken up", "running", "preempted", "kept", "over"]
"""Status of a leg. A leg that is loading, received or taken up holds blocks and does not run.

A kept leg is over, and still holds blocks.
"""


class EngineDied(KvMockError, RuntimeError):  # noqa: N818 - what happened
    """An engine received input that ends the original engine.

    Attributes:
        error: the exception that the original raises.
        where: the file and function of the original that raise it.
    """

    def __init__(self, error: str, where: tuple[str, str], why: str) -> None:
        super().__init__(error, where, why)
        self.error, self.where, self.why = error, where, why

    def __str__(self) -> str:
        return f"the engine died, as the original does ({self.error} in {self.where[0]}: {self.where[1]}): {self.why}"


class Leg:
    """A request on the connector's side of an engine.

    Args:
        name: its name at its engine, by which other engines read and notify it.
        state: the driver's request.
        params: the parameters that it came with, which the engine changes when it has used them; None if there are
            none.
        prompt_tokens: the length of its prompt.

    Attributes:
        status: its status.
        local_tokens: tokens that its last lookup found at this engine.
        external_tokens: tokens that the other engine was to send, by that lookup.
        found: both numbers from the last lookup before a preemption, which the engine reports.
        in_flight: tokens that are scheduled and not yet processed.
        last_step: number of the last step that computed tokens of it (`DeferredFrees`).
        stale: tokens in flight whose output is dropped because of a preemption.
        preemptions: number of its preemptions.
        failed: whether its load failed, so that this engine computes it.
        finish: how it ended; None while it is open.
    """

    __slots__ = (
        "external_tokens",
        "failed",
        "finish",
        "found",
        "in_flight",
        "last_step",
        "local_tokens",
        "name",
        "params",
        "preemptions",
        "prompt_tokens",
        "stale",
        "state",
        "status",
    )

    def __init__(self, name: str, state: Any, params: Mapping[str, Any] | None, prompt_tokens: int) -> None:
        self.name, self.state, self.prompt_tokens = name, state, prompt_tokens
        self.params: dict[str, Any] | None = None if params is None else dict(params)
        self.status: LegStatus = "waiting"
        self.local_tokens = self.external_tokens = self.in_flight = self.last_step = 0
        self.stale = self.preemptions = 0
        self.found = 0, 0
        self.failed = False
        self.finish: Finish | None = None

    def __repr__(self) -> str:
        return f"<Leg {self.name}, {self.status}>"

    def asks(self, field: str) -> bool:
        """Return whether this field of its parameters is true."""
        return self.params is not None and bool(self.params.get(field))

    @property
    def cached_tokens(self) -> int:
        """Number of its tokens that the engine reports as not computed."""
        return sum(self.found)


@dataclass(frozen=True, slots=True)
class PairTransfer:
    """A transfer of KV from another engine.

    Attributes:
        name: name of the receiving leg.
        engine: name of the sending engine.
        remote_name: its name at that engine: of the request, with Mooncake of the transfer.
        local: the blocks to write, by group; if empty, the other engine is only notified.
        remote: the blocks to read; empty with Mooncake, where the other engine chooses them.
        is_awaited: whether an admission waits for it.
        expires_s: time at which the other engine frees these blocks, by its own clock; None if it is unknown.
    """

    name: str
    engine: str
    remote_name: str
    local: Sequence[Sequence[int]]
    remote: Sequence[Sequence[int]]
    is_awaited: bool
    expires_s: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no block is written."""
        return not any(self.local)


class WorkerReport:
    """The report of a connector's worker at the end of a step.

    Attributes:
        sent: legs of this engine whose blocks are no longer needed.
        received: legs whose transfer has ended, with or without success.
        failed: legs whose transfer failed, if it is known which.
        invalid: blocks that a failed transfer did not write.
    """

    __slots__ = ("failed", "invalid", "received", "sent")

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.received: list[str] = []
        self.failed: list[str] = []
        self.invalid: set[int] = set()
