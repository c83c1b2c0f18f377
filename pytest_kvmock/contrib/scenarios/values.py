"""The contents of a scenario file, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from pytest_kvmock.values.strict_yaml import Place

WorkerName: TypeAlias = tuple[int, int]
"""(worker_id, dp_rank)"""


Numbers: TypeAlias = tuple[range, ...]
"""Numbers as they are written, one range after the other: a few characters must not fill the memory."""


STATUSES: Final = ("waiting", "running", "preempted", "finished", "rejected", "aborted", "lost")
"""What a request may be."""

REQUEST_COUNTS: Final = ("cached_tokens", "generated_tokens", "preemptions")
"""What else can be expected of one; all but the first of an engine's alone."""

METRICS: Final = ("running", "waiting", "arriving", "active_blocks", "preemptions")
"""What can be expected of an engine, in addition to its time."""


class Expected(NamedTuple):
    """One thing that has to be so after a step, and where it stands."""

    place: Place
    value: Any


@dataclass(frozen=True, slots=True)
class Step:
    """One action and its expected results.

    Attributes:
        place: where it stands.
        action: what is done: "use", "prefill", ...; "" where something is only looked at.
        given: its arguments by name.
        expected: what has to be so afterwards, by name, in the order in which it is looked at.
        worker: whose blocks and events `expected` is about; None for the one that the step is about.
    """

    place: Place
    action: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    expected: Mapping[str, Expected] = field(default_factory=dict)
    worker: WorkerName | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """One test of a scenario file.

    Attributes:
        name: its name in the file.
        place: where it begins.
        steps: what is done, in order.
        base: name of the engine profile that it builds on; None for the default one.
        profile: fields of the profile that are laid over that.
        engine: fields of `MockEngineArgs` for the engines of its workers; see `RouterHarness`.
        backends: names of the backends that it runs over; None for the default matrix.
        allow: rules that may be broken without consequence.
        backends_at: where those stand.
        needs_index: it is about an index under test, so that it must be played on a harness that has one.
        engine_at: where those of `engine` stand.
        stores: the stores that its workers share; see `RouterHarness`.
    """

    name: str
    place: Place
    steps: tuple[Step, ...]
    base: str | None = None
    profile: Mapping[str, Any] = field(default_factory=dict)
    backends: tuple[str, ...] | None = None
    allow: tuple[str, ...] = ()
    needs_index: bool = False
    backends_at: Place | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    engine_at: Place | None = None
    stores: Mapping[str, Any] = field(default_factory=dict)
