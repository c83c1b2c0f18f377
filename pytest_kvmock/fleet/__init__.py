"""A router in front of engines on one clock: the fleet, what happens to it, and what a router may raise."""

from pytest_kvmock.fleet.fleet import Fleet
from pytest_kvmock.fleet.incidents import Moment
from pytest_kvmock.fleet.router_calls import RouterError, RouterStalled
from pytest_kvmock.report.comparison import Comparison
from pytest_kvmock.report.regret import Regret
from pytest_kvmock.report.report import Report
from pytest_kvmock.report.rows import PassSample, Pick, PickRecord
from pytest_kvmock.schedulers.args import MockEngineArgs
from pytest_kvmock.schedulers.nested_args import ReasoningConfig, SglangArgs
from pytest_kvmock.schedulers.performance import CallableModel, InterpolatedModel, PerformanceModel, PolynomialModel
from pytest_kvmock.schedulers.scheduler import ForwardPass, ScheduledRequest, ScheduledTokens

__all__ = [
    "CallableModel",
    "Comparison",
    "EngineMetrics",
    "EngineRequest",
    "EngineStalled",
    "Fleet",
    "Moment",
    "RouterError",
    "RouterStalled",
    "ScheduledRequest",
    "ScheduledTokens",
    "SchedulerDriver",
    "SglangArgs",
    "replay",
]
