"""The source of the loads that a router sees, and losses on the way."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Self, TypeAlias

from pytest_kvmock.values.checks import check_integer, check_number, unknown_text
from pytest_kvmock.values.load_stat import DEFAULT_INTERVAL, HEARTBEAT_S

if TYPE_CHECKING:
    from pytest_kvmock.fleets.routing.routing import Worker

LoadSource: TypeAlias = Literal["router", "engine", "stream"]

SOURCES: Final = ("router", "engine", "stream")


@dataclass(frozen=True, slots=True)
class LoadFeed:
    """The source of the loads of a fleet's candidates.

    Attributes:
        source: "router": the load book of Dynamo's router; "engine": the loads of the engines, polled; "stream": the
            loads that engines publish (SGLang's load stream).
        every_ms: with "engine", the maximum age of loads, in milliseconds; 0: they are read at each pick.
        interval: with "stream", the number of decode steps between load messages.
        late_ms: with "stream", the delay of each message, in milliseconds.
        silent: by worker, the millisecond of the run from which its messages are lost or its polls fail. Earlier
            readings stay and get older; with 0 there is never a reading.
        jumps: with "stream", by worker, the number of sequence numbers that each message skips, as after failed sends.
        short: with "stream", the workers whose messages have the six entries of the first version.

    Raises:
        ValueError: a field is invalid.
    """

    source: LoadSource = "stream"
    every_ms: float = 0.0
    interval: int = DEFAULT_INTERVAL
    late_ms: float = 0.0
    silent: Mapping[Worker, float] = field(default_factory=dict)
    jumps: Mapping[Worker, int] = field(default_factory=dict)
    short: Collection[Worker] = ()

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"Fleet: {unknown_text('loads', self.source, SOURCES)}")
        check_number("Fleet: loads_every_ms", self.every_ms, unit=" (milliseconds)")
        check_number("LoadFeed: late_ms", self.late_ms, unit=" (milliseconds)")
        check_integer("LoadFeed: interval", self.interval, 1)
        for worker, ms in self.silent.items():
            check_number(f"LoadFeed: silent[{worker!r}]", ms, unit=" (milliseconds)")
        for worker, numbers in self.jumps.items():
            check_integer(f"LoadFeed: jumps[{worker!r}]", numbers, 0)

    @classmethod
    def of(cls, given: LoadSource | Self, every_ms: float) -> Self:
        """Return the arguments `loads` and `loads_every_ms` of `Fleet` as one."""
        return given if isinstance(given, cls) else cls(given, every_ms)  # type: ignore[arg-type]  # it is checked

    @property
    def stale_ms(self) -> float | None:
        """Greatest age of the loads that a router sees if no reading is lost; None for loads of the load book."""
        return {"router": None, "engine": self.every_ms, "stream": 1000.0 * HEARTBEAT_S + self.late_ms}[self.source]
