"""A failing stream as a value: the setup that it needs, and the steps that break the rule."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from pytest_kvmock.engines.backends import EngineProfile, known_backends
from pytest_kvmock.engines.base.driver import Traits
from pytest_kvmock.harness.reduce.breach import Breach
from pytest_kvmock.harness.reduce.text import event_lines, sink_name
from pytest_kvmock.harness.user_sink import FIRST_SINK_WORKER
from pytest_kvmock.oracle.hygiene.content import is_chained
from pytest_kvmock.oracle.hygiene.entries import NoEvent
from pytest_kvmock.oracle.hygiene.stream_spec import Residency
from pytest_kvmock.values.checks import KvMockError
from pytest_kvmock.values.events import RouterEvent, Stored
from pytest_kvmock.values.programs.forms import Operation
from pytest_kvmock.values.programs.interpreter import calls
from pytest_kvmock.values.programs.operations import Prefill, Submit
from pytest_kvmock.values.programs.python import is_literal, literal, quoted

if TYPE_CHECKING:
    from pytest_kvmock.harness.index_comparison import Sync
    from pytest_kvmock.oracle.index.index import Clears
    from pytest_kvmock.values.events import StreamKey

Step: TypeAlias = RouterEvent | NoEvent | Operation
"""An arriving event, the removal of a worker, lost batches of a worker, or an operation on a worker."""

Level: TypeAlias = Literal["events", "requests"]

_PUBLIC_EVENTS: Final = ("Located", "SparseStored", "Updated")
_PUBLIC: Final = (
    "Cleared",
    "EngineProfile",
    "KvCacheEvent",
    "Prompt",
    "Removed",
    "RouterEvent",
    "RouterHarness",
    "StorageTier",
    "Stored",
)
_PUBLIC_ENGINE: Final = ("WouldWait",)
"""Names that a test may need to import: from `engines`; above, from `values` and from the root."""


class NotReduced(KvMockError):  # noqa: N818 - its message is a reason, no error
    """Raised if no smaller stream was found. The message is one line with the reason."""


class SinkKind(NamedTuple):
    """How a sink of a program is made: the arguments of `make_kv_sink`."""

    chained: bool = False
    num_blocks: int | None = None
    tier_blocks: Mapping[str, int] | None = None
    residency: Residency = "unique"
    prefix_closed: bool = True
    hash: str | None = None
    seed: str | None = None


@dataclass(frozen=True, slots=True)
class Reproduction:
    """The smallest stream found that breaks a rule in the same way as a larger one.

    Attributes:
        breach: the breach.
        level: whether its steps are events that arrive at the router, or requests to workers.
        backend: the workers' backend.
        profile: the workers' profile.
        steps: the steps, in order.
        workers: workers that must be made: (worker_id, dp_rank) and their backend, None for `backend`. Other workers
            exist from the start, or are not needed.
        sinks: the sinks that publish; the first is worker 2**16.
        with_index: whether the index under test takes part.
        sync: when the index is compared; see `RouterHarness`.
        clears: what a Cleared empties; see `RouterHarness`.
        aflush: when the test awaits `aflush()`: after "every" step, or at the "end"; None without an async index.
        engine: fields of `MockEngineArgs` for the engines of all workers; see `RouterHarness`.
        engines: engines with different fields: (worker_id, dp_rank) and these fields.
        judge_unpublished: whether unpublished events are judged; see `RouterHarness`.
        stores: the stores that workers share; see `RouterHarness`.
        with_ids: whether the ids of the events matter; False: they count from 0.
        allow: other rules that it breaks and that the test allowed.
        cut_from: number of events, or requests, of the failing test.
        replays: number of replays of the search.
        complete: whether nothing more can be left out; False: the search ended at its limit.
    """

    breach: Breach
    level: Level
    backend: str
    profile: EngineProfile
    steps: tuple[Step, ...] = ()
    workers: tuple[tuple[StreamKey, str | None], ...] = ()
    sinks: tuple[SinkKind, ...] = ()
    with_index: bool = False
    sync: Sync = "auto"
    clears: Clears = "rank"
    aflush: Literal["every", "end"] | None = None
    engine: Mapping[str, Any] = field(default_factory=dict, hash=False)
    engines: tuple[tuple[StreamKey, Mapping[str, Any]], ...] = field(default=(), hash=False)
    judge_unpublished: bool = False
    stores: Mapping[str, Any] = field(default_factory=dict, hash=False)
    with_ids: bool = False
    allow: tuple[str, ...] = ()
    cut_from: int = 0
    replays: int = 0
    complete: bool = False

    @property
    def rule(self) -> str:
        """The rule that it breaks."""
        return self.breach.rule

    @property
    def events(self) -> tuple[RouterEvent, ...]:
        """Its events; empty if it consists of requests."""
        return tuple(step for step in self.steps if isinstance(step, RouterEvent))

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Its operations; empty if it consists of events."""
        return tuple(step for step in self.steps if isinstance(step, Operation))

    @property
    def size(self) -> int:
        """Number of its events, or of its requests."""
        if self.level == "events":
            return len(self.events)
        return sum(isinstance(step, Prefill | Submit) for step in self.steps)

    @property
    def unwritable(self) -> str | None:
        """A field of its engines whose value cannot be written as a literal; None if there is none."""
        given = (self.engine, *(fields for _, fields in self.engines))
        return next((name for fields in given for name, value in fields.items() if not is_literal(value)), None)

    def replace(self, **fields: Any) -> Reproduction:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **fields)

    def as_test(
        self,
        name: str = "test_reproduction",
        *,
        awaited_by: str | None = None,
        made_by: tuple[str, str] | None = None,
    ) -> str:
        """Return the text of a Python test that breaks the rule; an index comes from the fixture `kv_index`.

        Args:
            name: the name of the test.
            awaited_by: with an async index, the marker with which a plugin runs async tests ("asyncio", "anyio"), or ""
                if it needs none; None: the test runs itself (`asyncio.run`).
            made_by: instead of the fixture, the class of a contract and the call of its method that makes the index:
                ("TestMyIndex", "make_index()").
        """
        return _test_text(self, name, awaited_by, made_by)


def _test_text(program: Reproduction, name: str, awaited_by: str | None, made_by: tuple[str, str] | None) -> str:
    """Return the text of a test that runs the program and fails with the same rule."""
    size = program.profile.block_size
    body = [*_world(program)]
    after_each = "await kv.aflush()" if program.aflush == "every" else None
    if program.level == "events":
        body += event_lines(program.steps, sinks=len(program.sinks), with_ids=program.with_ids, after_each=after_each)
    else:
        body += calls(program.operations, size, after_each=after_each)
    if program.aflush == "end":
        body.append("await kv.aflush()")
    if not program.breach.is_error:
        body.append(f'assert [] == [p for p in kv.judge().warnings if p.rule == "{program.rule}"]')
    index, fixtures = "kv_index", "kv_index" if program.with_index else ""
    marks, before, profile_of = [], [], list[str]()
    of_backend = f'@pytest.mark.parametrize("kv_backend", ["{program.backend}"])'
    if program.with_index and made_by is not None:
        contract, call = made_by
        index, fixtures = f"{contract}().{call}", ""
        if _traits(program) != Traits():  # for a `make_index` that reads traits
            marks.append(of_backend)
            before = [f"contract = {contract}()", "contract.traits = kv_traits"]
            index, fixtures = f"contract.{call}", "kv_backend, kv_traits"
            profile_of += _tiers_of(program)
    elif program.with_index:
        if size != EngineProfile().block_size:  # for a `kv_index` that reads `kv_profile`
            profile_of.append(f"block_size={size}")
        if _traits(program).copies:  # for a `kv_index` that reads `kv_traits`, as it may count copies
            marks.append(of_backend)
            fixtures = "kv_index, kv_backend"
            profile_of += _tiers_of(program)
    if profile_of:
        marks.append(f"@pytest.mark.kvmock({', '.join(profile_of)})")
    if program.aflush is not None and awaited_by:
        marks.append(f"@pytest.mark.{awaited_by}")
    with_harness = [
        *before,
        f"with RouterHarness({_harness(program, index)}) as kv:",
        *(f"    {line}" for line in body),
    ]
    runs_itself = program.aflush is not None and awaited_by is None
    if runs_itself:
        with_harness = ["async def body():", *(f"    {line}" for line in with_harness), "", "asyncio.run(body())"]
    kind = "def" if program.aflush is None or runs_itself else "async def"
    lines = [*marks, f"{kind} {name}({fixtures}):", *(f"    {line}".rstrip() for line in with_harness)]
    text = "\n".join(lines)
    ours = [f"from pytest_kvmock import {', '.join(_named(_PUBLIC, text))}"]
    for module, public in (("engines", _PUBLIC_ENGINE), ("values", _PUBLIC_EVENTS)):
        if used := _named(public, text):
            ours.append(f"from pytest_kvmock.{module} import {', '.join(used)}")
    standard = ["import asyncio"] * runs_itself + ["from contextlib import suppress"] * ("suppress(" in text)
    groups = ["\n".join(standard), "import pytest" * bool(marks)]
    imports = [f"{group}\n\n" for group in groups if group]
    return "".join(imports) + "\n".join(ours) + f"\n\n\n{text}\n"


def _named(public: Sequence[str], text: str) -> list[str]:
    """Return the public names that a text uses."""
    return [name for name in public if re.search(rf"\b{name}[(.)]", text)]


def profile_text(profile: EngineProfile) -> str:
    """Return a profile as written in a test, with only the fields that differ from the default."""
    default = EngineProfile()
    fields = [
        f"{field.name}={literal(plain_field(profile, field.name))}"
        for field in dataclasses.fields(EngineProfile)
        if getattr(profile, field.name) != getattr(default, field.name)
    ]
    return f"EngineProfile({', '.join(fields)})"


def _harness(program: Reproduction, index: str) -> str:
    arguments = [] if program.profile == EngineProfile() else [profile_text(program.profile)]
    named = "" if arguments else "backend="
    spec = known_backends().get(program.backend)
    judged_otherwise = spec is not None and (spec.residency == "counted" or not spec.prefix_closed)
    if program.level == "requests" or (judged_otherwise and len(program.sinks) < len(_publishers(program))):
        arguments.append(f'{named}"{program.backend}"')
    if program.with_index:
        arguments.append(f"index={index}")
    if program.sync != "auto":
        arguments.append(f"sync={quoted(program.sync)}")
    if program.clears != "rank":
        arguments.append(f"clears={quoted(program.clears)}")
    if program.engine:
        arguments.append(f"engine={literal(program.engine)}")
    if program.judge_unpublished:
        arguments.append("judge_unpublished=True")
    if program.stores:
        arguments.append(f"stores={literal(program.stores)}")
    if program.allow:
        arguments.append(f"allow=[{', '.join(map(quoted, program.allow))}]")
    return ", ".join(arguments)


def plain_field(profile: EngineProfile, name: str) -> Any:
    """Return a field of a profile as users write it: tiers as a mapping."""
    value = getattr(profile, name)
    return value.to_dict() if name == "tiers" and value is not None else value


def _tiers_of(program: Reproduction) -> list[str]:
    """Return the tiers of its workers as an argument of the marker; empty if there are none."""
    return [] if program.profile.tiers is None else [f"tiers={literal(plain_field(program.profile, 'tiers'))}"]


def _traits(program: Reproduction) -> Traits:
    """Return the traits of the engine; the default traits if its backend is not registered."""
    spec = known_backends().get(program.backend)
    return Traits() if spec is None else program.profile.traits(spec)


def _publishers(program: Reproduction) -> set[int]:
    return {event.worker_id for event in program.events}


def _world(program: Reproduction) -> Iterator[str]:
    for (worker_id, rank), backend in program.workers:
        of = "" if backend is None else f', backend="{backend}"'
        yield f"kv.worker({worker_id}{f', dp_rank={rank}' if rank else ''}{of})"
    for (worker_id, rank), given in program.engines:
        arguments = ", ".join(f"{name}={literal(value)}" for name, value in given.items())
        yield f"kv.engine({worker_id}{f', dp_rank={rank}' if rank else ''}, {arguments})"
    for i, sink in enumerate(program.sinks):
        fields = {name: value for name, value in sink._asdict().items() if value != sink._field_defaults[name]}
        own = [event for event in program.events if event.worker_id == FIRST_SINK_WORKER + i]
        if not sink.chained and any(map(_is_chained, own)):  # otherwise the sink would detect the chain
            fields["chained"] = False
        arguments = ", ".join(f"{name}={_argument(value)}" for name, value in fields.items())
        yield f"{sink_name(FIRST_SINK_WORKER + i, len(program.sinks))} = kv.make_sink({arguments})"


def _argument(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{quoted(key)}: {one}' for key, one in value.items())}}}"
    return quoted(value) if isinstance(value, str) else str(value)


def _is_chained(event: RouterEvent) -> bool:
    return isinstance(event.event.data, Stored) and is_chained(event.event.data)
