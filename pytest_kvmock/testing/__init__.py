"""For authors of backends, indexes and routers: contracts that their tests inherit, and traffic that Hypothesis draws.

The contracts need nothing besides pytest. `traffic` and `KvStateMachine` need Hypothesis: the extra `hypothesis`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pytest

from pytest_kvmock.checks import install_text

if TYPE_CHECKING:
    from pytest_kvmock.programs.operations import Burst as Burst
    from pytest_kvmock.programs.operations import Clear as Clear
    from pytest_kvmock.programs.operations import Decode as Decode
    from pytest_kvmock.programs.operations import DropNext as DropNext
    from pytest_kvmock.programs.operations import Finish as Finish
    from pytest_kvmock.programs.operations import Preempt as Preempt
    from pytest_kvmock.programs.operations import Prefill as Prefill
    from pytest_kvmock.programs.operations import Program as Program
    from pytest_kvmock.programs.operations import RemoveWorker as RemoveWorker
    from pytest_kvmock.programs.operations import Restart as Restart
    from pytest_kvmock.programs.operations import Resume as Resume
    from pytest_kvmock.programs.operations import Serve as Serve
    from pytest_kvmock.programs.operations import ServeNear as ServeNear
    from pytest_kvmock.programs.operations import Tick as Tick
    from pytest_kvmock.testing.drafts import play as play
    from pytest_kvmock.testing.eviction import EvictionContract as EvictionContract
    from pytest_kvmock.testing.index import IndexContract as IndexContract
    from pytest_kvmock.testing.machine import KvStateMachine as KvStateMachine
    from pytest_kvmock.testing.manager import ManagerContract as ManagerContract
    from pytest_kvmock.testing.process import ProcessContract as ProcessContract
    from pytest_kvmock.testing.right_router import RightRouter as RightRouter
    from pytest_kvmock.testing.router_contract import RouterContract as RouterContract
    from pytest_kvmock.testing.router_process import ProcessEnded as ProcessEnded
    from pytest_kvmock.testing.router_process import RouterProcess as RouterProcess
    from pytest_kvmock.testing.router_process import ServedEngine as ServedEngine
    from pytest_kvmock.testing.router_process import ServedEngines as ServedEngines
    from pytest_kvmock.testing.shrinking import ShrinkingStopped as ShrinkingStopped
    from pytest_kvmock.testing.strategies import traffic as traffic
    from pytest_kvmock.testing.worker import WorkerContract as WorkerContract

_HOME = {
    "EvictionContract": "testing.eviction",
    "IndexContract": "testing.index",
    "KvStateMachine": "testing.machine",
    "ManagerContract": "testing.manager",
    "Burst": "programs.operations",
    "Clear": "programs.operations",
    "Decode": "programs.operations",
    "DropNext": "programs.operations",
    "Finish": "programs.operations",
    "Preempt": "programs.operations",
    "Prefill": "programs.operations",
    "Program": "programs.operations",
    "RemoveWorker": "programs.operations",
    "Restart": "programs.operations",
    "Resume": "programs.operations",
    "Serve": "programs.operations",
    "ServeNear": "programs.operations",
    "Tick": "programs.operations",
    "RightRouter": "testing.right_router",
    "RouterContract": "testing.router_contract",
    "ShrinkingStopped": "testing.shrinking",
    "ProcessContract": "testing.process",
    "ProcessEnded": "testing.router_process",
    "RouterProcess": "testing.router_process",
    "ServedEngine": "testing.router_process",
    "ServedEngines": "testing.router_process",
    "play": "testing.drafts",
    "traffic": "testing.strategies",
    "WorkerContract": "testing.worker",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the table is the one list

# Before any of them is imported. Their asserts have messages of their own; pytest adds the values.
pytest.register_assert_rewrite(
    *(f"{__name__}.{home}" for home in ("eviction", "index", "manager", "manager_checks", "slots", "worker", "world"))
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
