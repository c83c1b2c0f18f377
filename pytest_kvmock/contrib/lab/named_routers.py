"""Routers by name: routers to compare with, and the user's own, for callers that cannot pass an object."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from pytest_kvmock.fleets.router_calls import RouterCalls
from pytest_kvmock.fleets.routing.selection import LeastLoaded, MostCached, RoundRobin
from pytest_kvmock.values.checks import unknown_text

MakeRouter: TypeAlias = "str | Callable[[], object]"
"""A name of `ROUTERS`, "module:name" of a class or function that makes a router without arguments, or the class or
function itself."""

ROUTERS: Final[Mapping[str, Callable[[], object] | None]] = {
    "dynamo": None,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "most_cached": MostCached,
}
"""Routers by name; "dynamo" is the router of the engines' release."""


def make_router(given: MakeRouter) -> object | None:
    """Make a router; None for the router of the engines' release.

    Args:
        given: what makes it.

    Raises:
        TypeError: it cannot make a router, or the result has no `pick(request, candidates)`.
        ValueError: the name is unknown, or it cannot be imported or called without arguments.
    """
    name = given if isinstance(given, str) else getattr(given, "__name__", repr(given))
    made_by: object
    if isinstance(given, str):
        if ":" not in given:
            if given not in ROUTERS:
                raise ValueError(f"{unknown_text('router', given, ROUTERS)}; or module:name of one of your own")
            made_by = ROUTERS[given]
            if made_by is None:
                return None
        else:
            made_by = _imported(given)
    else:
        made_by = given
    if not callable(made_by):
        raise TypeError(
            f"router {name!r} must be a class, or a function that makes a router: each run has one of its own; got "
            f"{made_by!r:.80}"
        )
    try:
        router: object = made_by()
    except Exception as error:
        raise ValueError(
            f"router {name!r} cannot be made without arguments: {type(error).__name__}: {error}"
        ) from error
    RouterCalls(router, 1.0)  # its error names a missing method
    return router


def _imported(name: str) -> object:
    module, _, attribute = name.partition(":")
    try:
        found: object = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ValueError(f"router {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    return found
