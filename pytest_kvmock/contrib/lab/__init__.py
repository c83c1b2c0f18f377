"""Experiments with engines in time: sweeps of replays, the command `replay`, routers by name, the scheduler matrix."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pytest_kvmock.contrib.lab.scheduler_cases import SCHEDULER_CASES as SCHEDULER_CASES
    from pytest_kvmock.contrib.lab.scheduler_cases import SchedulerCase as SchedulerCase
    from pytest_kvmock.contrib.lab.scheduler_cases import SchedulerRequest as SchedulerRequest
    from pytest_kvmock.contrib.lab.scheduler_cases import make_scheduler_requests as make_scheduler_requests
    from pytest_kvmock.contrib.lab.sweeps import Sweep as Sweep
    from pytest_kvmock.contrib.lab.sweeps import SweepRun as SweepRun
    from pytest_kvmock.contrib.lab.sweeps import sweep as sweep

SCHEDULER_MATRIX: Final = "kv_scheduler_matrix"
"""The marker that runs a test over the cases of the scheduler matrix."""

CASE_OF_MATRIX: Final = "kv_scheduler_case"
"""The fixture that has the case of a test."""

_HOME = {
    "SCHEDULER_CASES": "scheduler_cases",
    "SchedulerCase": "scheduler_cases",
    "SchedulerRequest": "scheduler_cases",
    "Sweep": "sweeps",
    "SweepRun": "sweeps",
    "make_scheduler_requests": "scheduler_cases",
    "sweep": "sweeps",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the table is the one list


def __getattr__(name: str) -> Any:
    """Load a name on first use: the plugin is loaded in every run of pytest, and needs none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
