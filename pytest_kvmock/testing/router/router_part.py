"""The members of the router contract that its parts use: how a trace is played and checked.

Each part is a class of tests about one subject, and `RouterContract` inherits from all parts. This module only declares
the members that `RouterContract` defines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

if TYPE_CHECKING:
    from pytest_kvmock.engines.backends import BackendSpec
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine
    from pytest_kvmock.fleets.fleet import Fleet
    from pytest_kvmock.fleets.report.report import Report
    from pytest_kvmock.fleets.report.rows import Pick
    from pytest_kvmock.fleets.routing.routing import Worker
    from pytest_kvmock.fleets.traces.mooncake import TraceRequest


class RouterPart:
    """A part of `RouterContract`, where the attributes are documented."""

    block_size: ClassVar[int]
    backend: ClassVar[str | BackendSpec | None]
    selector: ClassVar[Any]
    packs: ClassVar[bool]
    first_of_equals: ClassVar[bool]
    follows_prefix: ClassVar[bool]
    cools_down_s: ClassVar[float]
    uses_overlap: ClassVar[bool | None]
    switches_by_load: ClassVar[bool]
    forgets_cordoned: ClassVar[bool]
    names_return: ClassVar[bool]
    keeps_siblings: ClassVar[bool]
    repeats: ClassVar[bool]
    tiers: ClassVar[Mapping[str, Any] | None]
    hand_over: ClassVar[str | None]

    if TYPE_CHECKING:

        def _engine(self, num_blocks: int = 400, ranks: int = 1) -> MockEngine: ...

        def _rows(self) -> list[TraceRequest]: ...

        def _burst(self, ms: float, apart_ms: float = 0.0, first: int = ...) -> list[TraceRequest]: ...

        def _played(self, happens: Callable[[Fleet], object] | None = None, **options: Any) -> Report: ...

        def _run_fleet(
            self,
            engines: Mapping[Worker, MockEngine],
            happens: Callable[[Fleet], object] | None,
            rows: Sequence[Any],
            **options: Any,
        ) -> tuple[Report, Fleet]: ...

        def _with_decode(self, engines: Mapping[Worker, MockEngine], blocks: int = 800) -> dict[Worker, MockEngine]: ...

        def _judge(self, where: str, report: Report) -> None: ...

        def _each_is_picked(
            self,
            where: str,
            report: Report,
            workers: Sequence[Worker],
            of: Callable[[Pick], bool] = ...,
            *,
            hint: str = ...,
        ) -> None: ...

        def _check_selector(self) -> None: ...

        def _subject(self) -> Any: ...

        def _skip_if_alone(self, where: str, report: Report) -> None: ...

        def _fail(self, text: str) -> NoReturn: ...
