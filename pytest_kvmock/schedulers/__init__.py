"""Schedulers and the arguments of engines, models of how long a pass takes, and the virtual time of hosts."""

from pytest_kvmock.schedulers.args import MockEngineArgs
from pytest_kvmock.schedulers.nested_args import ReasoningConfig, SglangArgs
from pytest_kvmock.schedulers.performance import CallableModel, InterpolatedModel, PerformanceModel, PolynomialModel
from pytest_kvmock.schedulers.scheduler import ForwardPass, ScheduledRequest, ScheduledTokens

__all__ = [
    "CallableModel",
    "ForwardPass",
    "InterpolatedModel",
    "MockEngineArgs",
    "PerformanceModel",
    "PolynomialModel",
    "ReasoningConfig",
    "ScheduledRequest",
    "ScheduledTokens",
    "SglangArgs",
]
