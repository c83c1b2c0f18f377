"""The stores that the workers of a fleet share. Each engine is put over the stores of its worker."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_kvmock.engines.shared import SHARED
from pytest_kvmock.values.shared_stores import read_stores

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.driver import MakeManager
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.engines.worker import KvWorker
    from pytest_kvmock.values.shared_stores import StoreSpec
    from pytest_kvmock.values.sinks import Sink


class FleetStores:
    """The shared stores of a fleet. Each is made when its first worker comes.

    Args:
        specs: the stores, by name.

    Attributes:
        specs: as above.
    """

    __slots__ = ("_made", "specs")

    @classmethod
    def of(cls, stores: Mapping[str, Any]) -> FleetStores:
        """Read the stores of a fleet.

        Raises:
            ValueError: as `read_stores`.
        """
        try:
            return cls(read_stores(stores))
        except ValueError as error:
            raise ValueError(f"Fleet: {error}") from None

    def __init__(self, specs: Mapping[str, StoreSpec]) -> None:
        self.specs = specs
        self._made: dict[str, dict[str, Any]] = {}

    def put(self, worker_id: int, worker: KvWorker) -> None:
        """Put a worker over its stores, also after each restart.

        Workers of different layouts in one store do not find each other's blocks, as in the originals; this gives one
        warning. A worker that uses a store in place of its host tier restarts empty.

        Raises:
            ValueError: the worker cannot use one of the stores; it is then put over none of them.
        """
        mine = [spec for spec in self.specs.values() if worker_id in spec.workers and spec.kind in SHARED]
        layouts = [(spec, SHARED[spec.kind], _layout(spec, worker_id, worker)) for spec in mine]
        for spec, kind, layout in layouts:
            made = self._made.setdefault(spec.name, {})
            if made and layout not in made and len(made) == 1:
                warnings.warn(
                    f"stores[{spec.name!r}]: worker {worker_id} has {layout}, and another one "
                    f"{next(iter(made))}: neither finds what the other has written",
                    stacklevel=2,
                )
            if layout not in made:
                made[layout] = kind.make(spec)
            put = partial(kind.put, spec, made[layout])
            worker.make_by(partial(_then, put), restarts=kind.is_first)
            if not kind.is_first:
                put(worker.manager)


def _then(put: Callable[[Any], object], make: MakeManager) -> MakeManager:
    """Return a function that makes a manager and puts it over a store."""

    def make_and_put(sink: Sink | None) -> KvManager:
        manager = make(sink)
        put(manager)
        return manager

    return make_and_put


def _layout(spec: StoreSpec, worker_id: int, worker: KvWorker) -> str:
    try:
        return SHARED[spec.kind].layout(worker.manager)
    except ValueError as error:
        raise ValueError(f"stores[{spec.name!r}]: worker {worker_id} has no place for it: {error}") from None
