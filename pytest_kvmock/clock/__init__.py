"""Whole engines in virtual time, and the clock that several of them share: passes, arrivals, handoffs; no router."""

from pytest_kvmock.clock.engine_request import EngineRequest
from pytest_kvmock.clock.engine_state import EngineMetrics, EngineStalled
from pytest_kvmock.clock.mock_engine import MockEngine
from pytest_kvmock.clock.replay import replay

__all__ = ["EngineMetrics", "EngineRequest", "EngineStalled", "MockEngine", "replay"]
