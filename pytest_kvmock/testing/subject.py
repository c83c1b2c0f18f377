"""The subject of a contract: checks of its kind, and the harness made of it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NoReturn, TypeVar, cast

import pytest

from pytest_kvmock.engines.backends import BackendSpec, EngineProfile, backend_spec, known_backends
from pytest_kvmock.engines.base.cache_group import STATE
from pytest_kvmock.engines.base.manager import KvManager, protocol_mismatch
from pytest_kvmock.harness.router_harness import RouterHarness
from pytest_kvmock.values.checks import integer_text, is_integer

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.driver import Traits
    from pytest_kvmock.values.sinks import Sink

T = TypeVar("T")

UNJUDGED: Final = "kvmock.unjudged"
"""The property of a test's report that lists what a contract cannot judge of its class. The plugin prints it at the end
of the run."""

STORES: Final = "stores that workers share (stores)"
"""The item that is not judged of a subject without stores."""


class SaysUnjudged:
    """Base of the contracts that report, at the end of a run, which points no test could judge of a class."""

    _properties: list[tuple[str, object]] | None = None

    @pytest.fixture(autouse=True)
    def _kvmock_properties(self, request: pytest.FixtureRequest) -> None:
        self._properties, self._class_id = request.node.user_properties, request.node.nodeid.rpartition("::")[0]

    def _note_unjudged(self, text: str, about: str = "") -> None:
        """Add a text to the summary of the run, one per class and subject; "" adds nothing."""
        if text and self._properties is not None:
            self._properties.append((UNJUDGED, f"{self._class_id}{about and f', {about}'}: {text}"))


def unjudged_text(lets: Mapping[str, bool], rare: Collection[str] = (STORES,)) -> str:
    """Return a line that lists what was not judged, each with the setting that would allow it; "" if all was judged.

    Args:
        lets: for each point, whether it is judged.
        rare: points that make no line by themselves, as they concern few subjects.
    """
    parts = [what for what, is_judged in lets.items() if not is_judged]
    return f"not judged: {', '.join(parts)}" if set(parts) - {*rare} else ""


def refuse(contract: object, why: str) -> NoReturn:
    """Fail the test with one line: the contract is applied to an object of another kind."""
    __tracebackhide__ = True
    pytest.fail(f"{type(contract).__name__}: {why}", pytrace=False)


def refuse_to_wait(contract: object, what: str, awaitable: Awaitable[Any]) -> NoReturn:
    """Fail the test of an async index or router whose contract does not define how to wait for it."""
    __tracebackhide__ = True
    close = getattr(awaitable, "close", None)
    if close is not None:  # otherwise Python warns that it was never awaited
        close()
    refuse(
        contract,
        f"the {what} is async, and a contract has no loop: define run(self, awaitable), which runs it in yours",
    )


_OF_DRAFTS: Final = 4
"""Extra blocks that a request holds with a draft model: slots for the drafts of a step or two."""


def room_for(blocks: int, traits: Traits, block_size: int) -> int:
    """Return the size of a pool, in blocks, that a prompt of `blocks` blocks just fills. The cache groups of a hybrid
    model share the pool: each needs its own blocks.

    Args:
        blocks: number of blocks of the prompt.
        traits: traits of the engine at this block size.
        block_size: tokens per block.
    """
    if traits.looks_ahead or traits.drops_last:
        blocks += _OF_DRAFTS
    if not traits.publishes_groups:
        return blocks
    sizes = [None if group.kind == STATE else group.block_size for group in traits.groups]
    # A state is held together with the one before it.
    return sum(2 if size is None else blocks * block_size // size for size in sizes)


def check_offers(contract: object, subject: object, protocol: type, made_by: str) -> None:
    """Fail the test unless an object has the members of a protocol.

    Args:
        contract: the contract of the test.
        subject: the object.
        protocol: the protocol.
        made_by: its maker, for the message.
    """
    __tracebackhide__ = True
    wrong = protocol_mismatch(subject, protocol)
    if wrong is not None:
        refuse(contract, f"{made_by} gave {wrong}")


def check_backends(contract: object, backends: object, block_size: int) -> list[BackendSpec]:
    """Return the backends that a contract runs over; fail the test if one is unknown or refuses the block size.

    Args:
        contract: the contract of the test.
        backends: names or `BackendSpec`s; None: those of the default matrix.
        block_size: tokens per block, the contract's attribute of this name.
    """
    __tracebackhide__ = True
    if not is_integer(block_size, 1):
        refuse(contract, f"block_size must be {integer_text(1)}, got {block_size!r:.80}")
    if backends is not None and (
        not isinstance(backends, (list, tuple)) or not all(isinstance(each, (str, BackendSpec)) for each in backends)
    ):
        refuse(contract, f"backends must be a tuple or list of backends, got {backends!r:.80}")
    specs = []
    for backend in _default_matrix() if backends is None else backends:
        wrong = None
        try:
            spec = backend_spec(backend)
        except ValueError as error:
            wrong = str(error)
        if wrong is not None:
            refuse(contract, f"backends has {getattr(backend, 'name', backend)!r}: {wrong}")
        specs.append(spec)
    for spec in specs:
        wrong = _refusal(spec.make, block_size)
        if wrong is None:
            continue
        least = least_block_size(specs)
        if least is None or least == block_size:
            refuse(contract, f"backends has {spec.name!r}: {wrong}")
        refuse(
            contract,
            f"block_size = {block_size} is not for backend {spec.name!r}: {wrong}; blocks of {least} are for all "
            "backends of the contract",
        )
    return specs


LEAST_BLOCK: Final = 4
"""Tokens per block in a contract, if its backends allow it: with fewer, an index that confuses tokens passes."""

_MOST_TRIED: Final = 1024


def _default_matrix() -> list[BackendSpec]:
    return [spec for spec in known_backends().values() if spec.in_matrix]


def _refusal(make: Callable[..., KvManager], block_size: int) -> str | None:
    """Return why a backend refuses blocks of `block_size` tokens; None if it accepts them."""
    try:
        make(num_blocks=8, block_size=block_size, dp_rank=0, sink=None)
    except ValueError as error:
        return str(error)
    return None


def least_block_size(backends: Sequence[str | BackendSpec] | None) -> int | None:
    """Return the smallest block size, from `LEAST_BLOCK` to 1,024 tokens, that all of these backends allow; None if
    there is none.

    Args:
        backends: by name or as `BackendSpec`s; None: those of the default matrix.

    Raises:
        ValueError: no backend has one of the names.
    """
    specs = _default_matrix() if backends is None else [backend_spec(each) for each in backends]
    return _least_allowed(tuple(spec.make for spec in specs))


@lru_cache(maxsize=64)
def _least_allowed(makes: tuple[Callable[..., KvManager], ...]) -> int | None:
    sizes = range(LEAST_BLOCK, _MOST_TRIED + 1)
    return next((size for size in sizes if all(_refusal(make, size) is None for make in makes)), None)


class _LeastOfBackends:
    """The `block_size` of a contract that sets none: the smallest that all of its `backends` allow."""

    def __get__(self, contract: object, owner: type) -> int:
        """Return this size; if there is none, or `backends` is invalid, `LEAST_BLOCK`, with which the contract refuses
        them.
        """
        backends = getattr(owner if contract is None else contract, "backends", None)
        try:
            return least_block_size(backends) or LEAST_BLOCK
        except (TypeError, ValueError):
            return LEAST_BLOCK


LEAST_OF_BACKENDS: Final = cast("int", _LeastOfBackends())
"""The default of the attribute: both a class and its objects have an integer."""


def call_with(contract: object, make: Callable[..., T], made_by: str, argument: object) -> T:
    """Call a `make_...` method of a contract, with the argument if it takes one."""
    __tracebackhide__ = True
    if not callable(make):
        refuse(contract, f"{made_by} must be a method, got {make!r:.80}")
    needed = _needed(make)
    if needed > 1:
        refuse(contract, f"{made_by} takes {needed} arguments; it takes none or one besides self")
    return make(argument) if needed else make()


def takes_argument(make: Callable[..., Any]) -> bool:
    """Whether `call_with` passes the argument to a `make_...` method of a contract."""
    return _needed(make) > 0


def _needed(make: Callable[..., Any]) -> int:
    """Return the number of arguments that a call needs."""
    placed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.default is each.empty and each.kind in placed for each in _parameters(make))


def _parameters(make: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(make).parameters.values())
    except ValueError:  # a class of C has no signature
        return []


class OverBackend:
    """Base of the contracts of managers and workers: the backend under contract.

    A subclass sets `backend`, or defines `make_manager`.

    Attributes:
        backend: name of a backend, or a `BackendSpec`.
        block_size: tokens per block in the contract's harnesses.
        prefix_closed: as in `BackendSpec`, for `make_manager`; a `backend` has its own.
        residency: the same.
    """

    backend: ClassVar[str | BackendSpec | None] = None
    block_size: ClassVar[int] = 4
    prefix_closed: ClassVar[bool] = True
    residency: ClassVar[Literal["unique", "counted"]] = "unique"

    def make_manager(self, num_blocks: int, block_size: int, sink: Sink | None) -> KvManager:  # noqa: ARG002 - for those who define it
        """Make a block manager that has no backend yet. A subclass defines this.

        Args:
            num_blocks: capacity in blocks.
            block_size: tokens per block.
            sink: receives its events; None for no sink.
        """
        __tracebackhide__ = True
        refuse(
            self, 'set backend = "name" (or a BackendSpec), or define make_manager(self, num_blocks, block_size, sink)'
        )

    def spec(self) -> BackendSpec:
        """Return the backend under contract; its managers are checked when they are made."""
        __tracebackhide__ = True
        size = self.block_size
        if not is_integer(size, 1):
            refuse(self, f"block_size must be {integer_text(1)}, got {size!r:.80}")
        spec = self._given()
        made_by = "make_manager" if self.backend is None else f"backend {spec.name!r}"
        if self.backend is not None:
            self._probe(made_by, lambda: spec.make(num_blocks=8, block_size=size, dp_rank=0, sink=None))

        def make(*, num_blocks: int, block_size: int, dp_rank: int, sink: Sink | None) -> KvManager:
            __tracebackhide__ = True
            manager = spec.make(num_blocks=num_blocks, block_size=block_size, dp_rank=dp_rank, sink=sink)
            check_offers(self, manager, KvManager, made_by)
            return manager

        return dataclasses.replace(spec, make=make)

    def _given(self) -> BackendSpec:
        __tracebackhide__ = True
        if isinstance(self.backend, BackendSpec):
            return self.backend
        if isinstance(self.backend, str):
            try:
                return backend_spec(self.backend)
            except ValueError as error:
                unknown = str(error)
            refuse(self, unknown)
        if self.backend is not None:
            refuse(self, f"backend must be the name of a backend or a BackendSpec, got {self.backend!r:.80}")
        if not callable(self.make_manager):
            refuse(self, f"make_manager must be a method, got {self.make_manager!r:.80}")
        parameters = inspect.Signature(_parameters(self.make_manager))
        fits = False
        with suppress(TypeError):
            fits = bool(parameters.bind(8, self.block_size, None))
        if not fits:
            refuse(
                self, f"make_manager is called with num_blocks, block_size and sink; besides self it takes {parameters}"
            )
        probe = self._probe("make_manager", lambda: self.make_manager(8, self.block_size, None))
        check_offers(self, probe, KvManager, "make_manager")

        def make(*, num_blocks: int, block_size: int, dp_rank: int, sink: Sink | None) -> KvManager:  # noqa: ARG001 - the signature of BackendSpec.make
            return self.make_manager(num_blocks, block_size, sink)

        try:
            return BackendSpec(probe.backend, type(self).__name__, make, self.residency, self.prefix_closed)
        except ValueError as error:
            wrong = str(error)
        refuse(self, wrong)

    def _probe(self, made_by: str, make: Callable[[], KvManager]) -> KvManager:
        """Make the first manager; fail the test if it refuses the contract's block size."""
        __tracebackhide__ = True
        try:
            return make()
        except ValueError as error:
            wrong = str(error)
        refuse(self, f"{made_by} refuses 8 blocks of {self.block_size} tokens: {wrong}")

    def make_harness(self, num_blocks: int = 8, *, workers: int = 1, **fields: Any) -> RouterHarness:
        """Return a `RouterHarness` whose workers have this backend.

        Args:
            num_blocks: capacity of each worker in blocks.
            workers: number of workers.
            fields: further fields of its `EngineProfile`.
        """
        __tracebackhide__ = True
        spec = self.spec()
        sizes = {"block_size": self.block_size, "num_blocks": num_blocks, "workers": workers}
        return RouterHarness(EngineProfile(**{**sizes, **fields}), spec)
