"""A router in front of engines on one clock: the fleet, what happens to it, and what a router may raise."""

from pytest_kvmock.clock.arrivals import FleetRequest
from pytest_kvmock.fleet.fleet import Fleet
from pytest_kvmock.fleet.incidents import Moment
from pytest_kvmock.fleet.router_calls import RouterError, RouterStalled

__all__ = ["Fleet", "FleetRequest", "Moment", "RouterError", "RouterStalled"]
