"""The contents of a scenario file, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from pytest_kvmock.values.strict_yaml import Place

WorkerName: TypeAlias = tuple[int, int]
"""(worker_id, dp_rank)"""


Numbers: TypeAlias = tuple[range, ...]
"""Numbers as written, a sequence of ranges: a few characters must not fill the memory."""


STATUSES: Final = ("waiting", "running", "preempted", "finished", "rejected", "aborted", "lost")
"""The states of a request."""

REQUEST_COUNTS: Final = ("cached_tokens", "generated_tokens", "preemptions")
"""Further values of a request that can be expected; all but the first only of an engine's request."""

METRICS: Final = ("running", "waiting", "arriving", "active_blocks", "preemptions")
"""Values of an engine that can be expected, in addition to its time."""


class Expected(NamedTuple):
    """One expectation after a step, and its place in the file."""

    place: Place
    value: Any


@dataclass(frozen=True, slots=True)
class Step:
    """One action and its expected results.

    Attributes:
        place: its place in the file.
        action: the action: "use", "prefill", ...; "" for a step with expectations only.
        given: its arguments by name.
        expected: the expectations by name, in the order in which they are checked.
        worker: the worker of `expected`; None: the worker of the step.
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
        place: its place in the file.
        steps: the steps, in order.
        base: name of the engine profile that it builds on; None: the default one.
        profile: fields that override this profile.
        engine: fields of `MockEngineArgs` for the engines of its workers; see `RouterHarness`.
        backends: names of the backends that it runs over; None: the default matrix.
        allow: rules that may be broken without consequence.
        backends_at: place of `backends` in the file.
        needs_index: whether it must be played on a harness with an index under test.
        engine_at: place of `engine` in the file.
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
