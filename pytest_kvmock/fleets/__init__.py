"""Engines in virtual time behind a router: the clock, the fleet, reports of a run, traces, routing."""

from typing import TYPE_CHECKING

from pytest_kvmock.values.checks import late_names

if TYPE_CHECKING:
    from pytest_kvmock.fleets.clock.arrivals import FleetRequest as FleetRequest
    from pytest_kvmock.fleets.clock.engine_state import EngineStalled as EngineStalled
    from pytest_kvmock.fleets.clock.mock_engine import MockEngine as MockEngine
    from pytest_kvmock.fleets.clock.pair_handoff import PairLink as PairLink
    from pytest_kvmock.fleets.clock.replay import replay as replay
    from pytest_kvmock.fleets.fleet import Fleet as Fleet
    from pytest_kvmock.fleets.report.report import Report as Report
    from pytest_kvmock.fleets.report.rows import Objectives as Objectives
    from pytest_kvmock.fleets.router_calls import RouterError as RouterError
    from pytest_kvmock.fleets.router_calls import RouterStalled as RouterStalled
    from pytest_kvmock.fleets.routing.load_feed import LoadFeed as LoadFeed
    from pytest_kvmock.fleets.routing.routing import DECODE_ALONE as DECODE_ALONE
    from pytest_kvmock.fleets.routing.routing import REFUSE as REFUSE
    from pytest_kvmock.fleets.routing.routing import Candidate as Candidate
    from pytest_kvmock.fleets.routing.routing import RouterRequest as RouterRequest
    from pytest_kvmock.fleets.routing.routing import Worker as Worker
    from pytest_kvmock.fleets.routing.selection import DynamoRouter as DynamoRouter
    from pytest_kvmock.fleets.routing.selection import LeastLoaded as LeastLoaded
    from pytest_kvmock.fleets.routing.selection import MostCached as MostCached
    from pytest_kvmock.fleets.routing.selection import RoundRobin as RoundRobin
    from pytest_kvmock.fleets.traces.mooncake import MOONCAKE_BLOCK_SIZE as MOONCAKE_BLOCK_SIZE
    from pytest_kvmock.fleets.traces.mooncake import TraceError as TraceError
    from pytest_kvmock.fleets.traces.mooncake import TraceRequest as TraceRequest
    from pytest_kvmock.fleets.traces.mooncake import read_mooncake as read_mooncake
    from pytest_kvmock.fleets.traces.synthetic import synthetic_trace as synthetic_trace

_HOME = {
    "Candidate": "fleets.routing.routing",
    "DECODE_ALONE": "fleets.routing.routing",
    "DynamoRouter": "fleets.routing.selection",
    "EngineStalled": "fleets.clock.engine_state",
    "Fleet": "fleets.fleet",
    "FleetRequest": "fleets.clock.arrivals",
    "LeastLoaded": "fleets.routing.selection",
    "LoadFeed": "fleets.routing.load_feed",
    "MOONCAKE_BLOCK_SIZE": "fleets.traces.mooncake",
    "MockEngine": "fleets.clock.mock_engine",
    "MostCached": "fleets.routing.selection",
    "Objectives": "fleets.report.rows",
    "PairLink": "fleets.clock.pair_handoff",
    "REFUSE": "fleets.routing.routing",
    "Report": "fleets.report.report",
    "RoundRobin": "fleets.routing.selection",
    "RouterError": "fleets.router_calls",
    "RouterRequest": "fleets.routing.routing",
    "RouterStalled": "fleets.router_calls",
    "TraceError": "fleets.traces.mooncake",
    "TraceRequest": "fleets.traces.mooncake",
    "Worker": "fleets.routing.routing",
    "read_mooncake": "fleets.traces.mooncake",
    "replay": "fleets.clock.replay",
    "synthetic_trace": "fleets.traces.synthetic",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the table is the one list

# Loaded on first use, because a test of a router needs none of these.
__getattr__ = late_names(__name__, _HOME)
