"""Whole engines in virtual time: scheduler, clock and worker in one, several of them on one clock, and their reports."""

from pytest_kvmock.fleet.engine_request import EngineRequest
from pytest_kvmock.fleet.mock_engine import EngineMetrics, EngineStalled, MockEngine
from pytest_kvmock.fleet.replay import replay
from pytest_kvmock.fleet.report import EngineReport, ReplayReport

__all__ = [
    "EngineMetrics",
    "EngineReport",
    "EngineRequest",
    "EngineStalled",
    "MockEngine",
    "ReplayReport",
    "replay",
]
