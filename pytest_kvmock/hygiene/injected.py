"""One strike of a fault that a test put between worker and router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_kvmock.hygiene.text import worker_text

if TYPE_CHECKING:
    from pytest_kvmock.hygiene.stream import StreamKey


@dataclass(slots=True, eq=False, repr=False)
class Injected:
    """What a fault did on purpose, once: no worker is to blame for what comes of it.

    Attributes:
        kind: the fault's name: "lose", "double", ...
        worker_id: whose stream it struck.
        dp_rank: and of which rank.
        event_id: the event that it struck; None where it struck none, as a restart.
        keys: every worker and rank whose stream it changed.
        blocks: the blocks that the event named, as published and as it arrived.
        survived: the test says that its router must survive faults of this kind.
        survivable: a router can survive faults of this kind.
        missing: the event that was struck has not arrived where it was due.
    """

    kind: str
    worker_id: int
    dp_rank: int
    event_id: int | None = None
    keys: frozenset[StreamKey] = frozenset()
    blocks: frozenset[int] = frozenset()
    survived: bool = False
    survivable: bool = True
    missing: bool = False

    def __str__(self) -> str:
        who = worker_text(self.worker_id, self.dp_rank)
        return f"{self.kind} of {who}" if self.event_id is None else f"{self.kind}, event {self.event_id} of {who}"

    def __repr__(self) -> str:
        return f"<injected: {self}>"
