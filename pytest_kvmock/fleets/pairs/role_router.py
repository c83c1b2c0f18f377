"""Adapters that join the two routers of P/D pairs, or the two indexes, one for each role, into one object.

Theory of operation. Each router and each index gets only the workers, events and legs of its role. Answers of both are
merged, because workers of different roles never share an id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import isawaitable, iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.fleets.routing.routing import PHASES, id_of

if TYPE_CHECKING:
    from pytest_kvmock.fleets.routing.routing import Phase, RouterRequest, Worker

RoleOf = Callable[[int], "Phase"]
"""Returns the role of a worker, by its id."""

_OF_LEG: Final = (
    *("pick", "dispatched", "first_token", "finished", "withdrawn", "overlap", "believed", "hand_over"),
    "leg_failed",
)
"""Methods that are about one leg of a request."""

_OF_WORKER: Final = ("worker_added", "worker_removed")


def check_roles(what: str, given: Mapping[Any, Any]) -> dict[Phase, Any]:
    """Return the given objects by role.

    Raises:
        ValueError: a role is missing or unknown.
    """
    if set(given) != set(PHASES):
        found = ", ".join(map(repr, given)) or "none"
        raise ValueError(f"Fleet: {what} by role needs 'prefill' and 'decode', got {found}")
    return dict(given)


class RoleRouter:
    """One router for each role, as one object; it has every method that at least one of them has.

    Args:
        routers: by role.
        role_of: returns the role of a worker.
    """

    def __init__(self, routers: Mapping[Phase, Any], role_of: RoleOf) -> None:
        self._routers, self._role_of = routers, role_of
        self.needs_candidates = any(getattr(each, "needs_candidates", False) for each in routers.values())
        self.survives = tuple({name for each in routers.values() for name in getattr(each, "survives", ())})
        self.holds_prefill = getattr(routers["prefill"], "holds_prefill", False)
        for name in _OF_LEG:
            self._offer(name, lambda request, *_: request.phase or "prefill")
        for name in _OF_WORKER:
            self._offer(name, lambda worker, *_: role_of(id_of(worker)))
        self._offer("apply", lambda event: role_of(event.worker_id))
        self._offer_both("started", self._started)
        for name in ("loads", "workers"):
            if len(self._methods(name)) == len(routers):  # otherwise the workers of one role would count as missing
                self._offer_both(name, self._union)
        self._offer_both("next_waiting", self._next_waiting)

    def __repr__(self) -> str:
        return f"RoleRouter({self._routers!r})"

    def _methods(self, name: str) -> dict[Phase, Any]:
        found = {phase: getattr(router, name, None) for phase, router in self._routers.items()}
        return {phase: method for phase, method in found.items() if callable(method)}

    def _offer(self, name: str, phase_of: Callable[..., Phase]) -> None:
        """Add a method that calls the router of one role; it returns None if that router lacks the method."""
        methods = self._methods(name)

        def call(*arguments: Any) -> Any:
            method = methods.get(phase_of(*arguments))
            # A router of one role does not need the role argument.
            return None if method is None else method(*arguments[: 1 if name in _OF_WORKER else None])

        self._have(name, methods, call)

    def _offer_both(self, name: str, both: Callable[..., Any]) -> None:
        methods = self._methods(name)
        self._have(name, methods, lambda *arguments: both(methods, *arguments))

    def _have(self, name: str, methods: Mapping[Phase, Any], call: Callable[..., Any]) -> None:
        if any(map(iscoroutinefunction, methods.values())):

            async def awaited(*arguments: Any) -> Any:
                answer = call(*arguments)
                return await answer if isawaitable(answer) else answer

            setattr(self, name, awaited)
        elif methods:
            setattr(self, name, call)

    def _started(self, methods: Mapping[Phase, Any], workers: Mapping[Phase, Sequence[Worker]]) -> Any:
        return _joined([method(workers[phase]) for phase, method in methods.items()], lambda _: None)

    def _union(self, methods: Mapping[Phase, Any]) -> Any:
        return _joined([method() for method in methods.values()], _union_of)

    def _next_waiting(self, methods: Mapping[Phase, Any], requests: Sequence[RouterRequest]) -> Any:
        """Return the next request; decode legs come first, because a prefill worker keeps blocks for them."""
        for phase in reversed(PHASES):
            waiting = tuple(each for each in requests if (each.phase or "prefill") == phase)
            if not waiting:
                continue
            chosen = methods[phase](waiting) if phase in methods else waiting[0]
            if chosen is not None:
                return chosen
        return None


def _joined(answers: Sequence[Any], join: Callable[[Sequence[Any]], Any]) -> Any:
    """Join answers, or return an awaitable that joins them."""
    if not any(map(isawaitable, answers)):
        return join(answers)

    async def awaited() -> Any:
        return join([await each if isawaitable(each) else each for each in answers])

    return awaited()


def _union_of(answers: Sequence[Any]) -> Any:
    if all(isinstance(each, Mapping) for each in answers):
        return {worker: load for each in answers for worker, load in each.items()}
    return [worker for each in answers for worker in each]


class RoleIndexes:
    """One index for each role, as one object.

    It has `remove_worker(worker_id)` if both have it.

    Args:
        indexes: by role.
        role_of: returns the role of a worker.

    Raises:
        TypeError: an index lacks a method, or a method is async.
    """

    def __init__(self, indexes: Mapping[Phase, Any], role_of: RoleOf) -> None:
        self._indexes, self._role_of = indexes, role_of
        for phase, index in indexes.items():
            for name in ("apply", "find_matches"):
                method = getattr(index, name, None)
                if not callable(method):
                    raise TypeError(f"index of {phase!r} must have a method {name}(), got {index!r:.80}")
                if iscoroutinefunction(method):
                    raise TypeError(f"index of {phase!r}: {name}() is async, and indexes by role cannot be")
        if all(callable(getattr(index, "remove_worker", None)) for index in indexes.values()):
            self.remove_worker: Callable[[int], Any] = self._remove_worker

    def apply(self, event: Any) -> None:
        """Give an event to the index of its worker's role."""
        self._indexes[self._role_of(event.worker_id)].apply(event)

    def find_matches(self, local_hashes: Sequence[int]) -> dict[Any, int]:
        """Return the matches of both indexes."""
        found: dict[Any, int] = {}
        for index in self._indexes.values():
            answer = index.find_matches(local_hashes)
            found |= getattr(answer, "scores", answer)
        return found

    def _remove_worker(self, worker_id: int) -> None:
        """Remove a worker from the index of its role."""
        self._indexes[self._role_of(worker_id)].remove_worker(worker_id)
