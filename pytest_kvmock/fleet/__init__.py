"""A router in front of engines on one clock: the fleet, what happens to it, and what a router may raise."""

from pytest_kvmock.fleet.fleet import Fleet
from pytest_kvmock.fleet.incidents import Moment
from pytest_kvmock.fleet.router_calls import RouterError, RouterStalled
from pytest_kvmock.fleet.scheduler_cases import (
    SCHEDULER_CASES,
    SchedulerCase,
    SchedulerRequest,
    make_scheduler_requests,
)
from pytest_kvmock.fleet.sweep import Sweep, SweepRun, sweep

__all__ = [
    "SCHEDULER_CASES",
    "Fleet",
    "Moment",
    "RouterError",
    "RouterStalled",
    "SchedulerCase",
    "SchedulerRequest",
    "Sweep",
    "SweepRun",
    "make_scheduler_requests",
    "sweep",
]
