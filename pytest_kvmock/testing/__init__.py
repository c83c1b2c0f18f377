"""For authors of backends, indexes and routers: contracts that their tests inherit, and traffic that Hypothesis draws.

The contracts need only pytest. `traffic` and `KvStateMachine` need Hypothesis: the extra `hypothesis`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pytest

from pytest_kvmock.values.checks import install_text

if TYPE_CHECKING:
    from pytest_kvmock.testing.drafts import play as play
    from pytest_kvmock.testing.index.index_contract import IndexContract as IndexContract
    from pytest_kvmock.testing.machine import KvStateMachine as KvStateMachine
    from pytest_kvmock.testing.manager.eviction_contract import EvictionContract as EvictionContract
    from pytest_kvmock.testing.manager.manager_contract import ManagerContract as ManagerContract
    from pytest_kvmock.testing.process.process_contract import ProcessContract as ProcessContract
    from pytest_kvmock.testing.router.right_router import RightRouter as RightRouter
    from pytest_kvmock.testing.router.router_contract import RouterContract as RouterContract
    from pytest_kvmock.testing.shrinking import ShrinkingStopped as ShrinkingStopped
    from pytest_kvmock.testing.strategies import traffic as traffic
    from pytest_kvmock.testing.worker.worker_contract import WorkerContract as WorkerContract
    from pytest_kvmock.values.programs.operations import Burst as Burst
    from pytest_kvmock.values.programs.operations import Clear as Clear
    from pytest_kvmock.values.programs.operations import Decode as Decode
    from pytest_kvmock.values.programs.operations import DropNext as DropNext
    from pytest_kvmock.values.programs.operations import Finish as Finish
    from pytest_kvmock.values.programs.operations import Preempt as Preempt
    from pytest_kvmock.values.programs.operations import Prefill as Prefill
    from pytest_kvmock.values.programs.operations import Program as Program
    from pytest_kvmock.values.programs.operations import RemoveWorker as RemoveWorker
    from pytest_kvmock.values.programs.operations import Restart as Restart
    from pytest_kvmock.values.programs.operations import Resume as Resume
    from pytest_kvmock.values.programs.operations import Serve as Serve
    from pytest_kvmock.values.programs.operations import ServeNear as ServeNear
    from pytest_kvmock.values.programs.operations import Tick as Tick

_HOME = {
    "EvictionContract": "testing.manager.eviction_contract",
    "IndexContract": "testing.index.index_contract",
    "KvStateMachine": "testing.machine",
    "ManagerContract": "testing.manager.manager_contract",
    "Burst": "values.programs.operations",
    "Clear": "values.programs.operations",
    "Decode": "values.programs.operations",
    "DropNext": "values.programs.operations",
    "Finish": "values.programs.operations",
    "Preempt": "values.programs.operations",
    "Prefill": "values.programs.operations",
    "Program": "values.programs.operations",
    "RemoveWorker": "values.programs.operations",
    "Restart": "values.programs.operations",
    "Resume": "values.programs.operations",
    "Serve": "values.programs.operations",
    "ServeNear": "values.programs.operations",
    "Tick": "values.programs.operations",
    "RightRouter": "testing.router.right_router",
    "RouterContract": "testing.router.router_contract",
    "ShrinkingStopped": "testing.shrinking",
    "ProcessContract": "testing.process.process_contract",
    "play": "testing.drafts",
    "traffic": "testing.strategies",
    "WorkerContract": "testing.worker.worker_contract",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the table is the one list

# Must run before any of these modules is imported. Their asserts have their own messages; pytest adds the values.
pytest.register_assert_rewrite(
    *(
        f"{__name__}.{home}"
        for home in (
            "index.index_contract",
            "manager.eviction_contract",
            "manager.manager_checks",
            "manager.manager_contract",
            "manager.slots",
            "worker.worker_contract",
            "worker.world",
        )
    )
)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"pytest_kvmock.{home}")
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ImportError(f"{__name__}.{name} needs Hypothesis: {install_text('hypothesis')}") from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
