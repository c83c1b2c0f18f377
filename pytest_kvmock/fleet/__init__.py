"""Whole engines in virtual time: scheduler, clock and worker in one, several of them on one clock, and their reports."""

from pytest_kvmock.clock.arrivals import FleetRequest
from pytest_kvmock.clock.engine_request import EngineRequest
from pytest_kvmock.clock.engine_state import EngineMetrics, EngineStalled
from pytest_kvmock.clock.mock_engine import MockEngine
from pytest_kvmock.clock.replay import replay
from pytest_kvmock.drivers.driver import SchedulerDriver
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
from pytest_kvmock.report.comparison import Comparison
from pytest_kvmock.report.regret import Regret
from pytest_kvmock.report.report import Report
from pytest_kvmock.report.rows import PassSample, Pick, PickRecord
from pytest_kvmock.schedulers.args import MockEngineArgs
from pytest_kvmock.schedulers.nested_args import ReasoningConfig, SglangArgs
from pytest_kvmock.schedulers.performance import CallableModel, InterpolatedModel, PerformanceModel, PolynomialModel
from pytest_kvmock.schedulers.scheduler import ForwardPass, ScheduledRequest, ScheduledTokens

__all__ = [
    "SCHEDULER_CASES",
    "CallableModel",
    "Comparison",
    "EngineMetrics",
    "EngineRequest",
    "EngineStalled",
    "Fleet",
    "FleetRequest",
    "ForwardPass",
    "InterpolatedModel",
    "MockEngine",
    "MockEngineArgs",
    "Moment",
    "PassSample",
    "PerformanceModel",
    "Pick",
    "PickRecord",
    "PolynomialModel",
    "ReasoningConfig",
    "Regret",
    "Report",
    "RouterError",
    "RouterStalled",
    "ScheduledRequest",
    "ScheduledTokens",
    "SchedulerCase",
    "SchedulerDriver",
    "SchedulerRequest",
    "SglangArgs",
    "Sweep",
    "SweepRun",
    "make_scheduler_requests",
    "replay",
    "sweep",
]
