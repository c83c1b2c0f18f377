"""A router under test: what it must look like, its methods called, and the errors where it does what it must not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Generator, Sequence
from inspect import isawaitable, iscoroutine, iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pytest_kvmock.fleet.routing_figures import aligned

if TYPE_CHECKING:
    from pytest_kvmock.router.routing import Candidate, RouterRequest, Worker

HOOKS: Final = ("dispatched", "first_token", "finished", "apply", "worker_added", "worker_removed", "next_waiting")
"""The methods that a router may have beside `pick`."""

Calls: TypeAlias = Generator["Awaitable[Any]", Any, Any]
"""What awaits in an async run, and is run to its end in another."""


def candidates_table(candidates: Sequence[Candidate]) -> str:
    """Return the candidates as a table, for messages."""
    columns = ("worker", "overlap", "prefill_tokens", "decode_blocks", "new_blocks", "active_requests", "waiting")
    rows = [columns, *([str(getattr(each, name)) for name in columns] for each in candidates)]
    return aligned(rows)


class RouterError(RuntimeError):
    """The router under test did what a router must not; what it raised is the cause.

    Attributes:
        now_ms: when, in virtual milliseconds.
        request: the request that it was called for; None: none.
        candidates: what it could pick; empty for other methods than `pick`.
    """

    def __init__(
        self, problem: str, now_ms: float, request: RouterRequest | None = None, candidates: Sequence[Candidate] = ()
    ) -> None:
        super().__init__(problem, now_ms, request, candidates)
        self.problem = problem
        self.now_ms = now_ms
        self.request = request
        self.candidates = tuple(candidates)

    def __str__(self) -> str:
        about = "" if self.request is None else f", {self.request!r}"
        table = f"\n{candidates_table(self.candidates)}" if self.candidates else ""
        return f"{self.problem} (at {self.now_ms:g} ms{about}){table}"


class RouterStalled(RuntimeError):  # noqa: N818 - what happened to it, as EngineStalled
    """Requests wait in the router, which picks no worker for them though nothing runs any more.

    Attributes:
        now_ms: when, in virtual milliseconds.
        requests: the requests that wait, in order.
        candidates: what the router could have picked when it was asked last.
    """

    def __init__(self, now_ms: float, requests: Sequence[RouterRequest], candidates: Sequence[Candidate]) -> None:
        super().__init__(now_ms, requests, candidates)
        self.now_ms = now_ms
        self.requests = tuple(requests)
        self.candidates = tuple(candidates)

    def __str__(self) -> str:
        first = ", ".join(map(repr, self.requests[:3])) + (", ..." if len(self.requests) > 3 else "")
        return (
            f"the router's pick() returned None and nothing runs, so {len(self.requests)} requests would wait for ever "
            f"(at {self.now_ms:g} ms): {first}\n{candidates_table(self.candidates)}"
        )


class RouterCalls:
    """Calls the methods of a router.

    Args:
        router: the router under test.
        timeout_s: how long an async pick may take, in seconds of real time.

    Raises:
        TypeError: it is a class, or has no method `pick`.

    Attributes:
        router: as above.
        asynchronous: the names of its methods that are coroutine functions.
    """

    def __init__(self, router: object, timeout_s: float = 5.0) -> None:
        if isinstance(router, type):
            raise TypeError(f"router is the class {router.__name__}; it must be an object, {router.__name__}()")
        if not callable(getattr(router, "pick", None)):
            raise TypeError(f"router must have a method pick(request, candidates), got {router!r:.80}")
        self.router = router
        self._timeout_s = timeout_s
        self._hooks = {name: hook for name in HOOKS if callable(hook := getattr(router, name, None))}
        self._pick: Callable[..., Any] = router.pick  # type: ignore[attr-defined]  # as was checked
        methods = {"pick": self._pick, **self._hooks}
        self.asynchronous = [name for name, method in methods.items() if iscoroutinefunction(method)]

    @property
    def name(self) -> str:
        """What messages call it."""
        return type(self.router).__name__

    def has(self, hook: str) -> bool:
        """Whether it has a method."""
        return hook in self._hooks

    def check_sync(self) -> None:
        """Check that it needs not be awaited.

        Raises:
            TypeError: it does.
        """
        if self.asynchronous:
            raise TypeError(f"{self.name}.{self.asynchronous[0]} is async; run the fleet by `await fleet.arun(trace)`")

    def pick(
        self,
        request: RouterRequest,
        candidates: Sequence[Candidate],
        known: Collection[Worker],
        *,
        has_ranks: bool,
    ) -> Calls:
        """Ask for a worker; None: the request waits.

        Raises:
            RouterError: it raised, was slow, or returned what is no worker.
        """
        chosen = yield from self._call("pick", self._pick, request, candidates, request, candidates)
        if chosen is None or chosen in {each.worker for each in candidates}:
            return chosen
        offered = ", ".join(repr(each.worker) for each in candidates[:8]) + (", ..." if len(candidates) > 8 else "")
        if has_ranks and not isinstance(chosen, tuple):
            why = "workers have ranks, so it must be a pair (worker id, rank)"
        elif chosen in known:
            why = "that worker is gone"
        else:
            why = "there is no such worker"
        raise RouterError(
            f"{self.name}.pick() returned {chosen!r:.80}; {why}. Candidates: {offered}",
            request.now_ms,
            request,
            candidates,
        )

    def hook(self, name: str, now_ms: float, argument: Any, *more: Any, request: RouterRequest | None = None) -> Calls:
        """Call a method if the router has it.

        Raises:
            RouterError: it raised.
        """
        hook = self._hooks.get(name)
        if hook is None:
            return None
        return (yield from self._call(name, hook, request, (), argument, *more, now_ms=now_ms))

    def next_waiting(self, requests: Sequence[RouterRequest], now_ms: float) -> Calls:
        """Ask who of those that wait is asked for next; None: nobody.

        Raises:
            RouterError: it raised, or returned none of them.
        """
        chosen = yield from self.hook("next_waiting", now_ms, requests)
        if chosen is None or any(chosen is each for each in requests):
            return chosen
        raise RouterError(
            f"{self.name}.next_waiting() returned {chosen!r:.80}, which is none of the {len(requests)} that wait",
            now_ms,
        )

    def _call(
        self,
        name: str,
        method: Callable[..., Any],
        request: RouterRequest | None,
        candidates: Sequence[Candidate],
        *arguments: Any,
        now_ms: float | None = None,
    ) -> Calls:
        now = now_ms if now_ms is not None or request is None else request.now_ms
        now = 0.0 if now is None else now
        try:
            answer = method(*arguments)
            if isawaitable(answer):
                answer = yield asyncio.wait_for(answer, self._timeout_s) if self._awaits else answer
        except RouterError:
            raise
        except TimeoutError as error:
            raise RouterError(
                f"{self.name}.{name}() took longer than pick_timeout_s={self._timeout_s:g}", now, request, candidates
            ) from error
        except Exception as error:
            raise RouterError(f"{self.name}.{name}() raised {error!r:.200}", now, request, candidates) from error
        return answer

    _awaits = False

    def run(self, calls: Calls) -> Any:
        """Run to the end without awaiting anything.

        Raises:
            RouterError: a method returned an awaitable.
        """
        self._awaits = False
        try:
            waiting = calls.send(None)
            while True:
                if iscoroutine(waiting):
                    waiting.close()
                error = TypeError(
                    f"it returned an awaitable; run the fleet by `await fleet.arun(trace)`: {waiting!r:.80}"
                )
                waiting = calls.throw(error)
        except StopIteration as done:
            return done.value

    async def arun(self, calls: Calls) -> Any:
        """Run to the end, and await what the router returns."""
        self._awaits = True
        try:
            waiting = calls.send(None)
            while True:
                try:
                    answer = await waiting
                except Exception as error:  # noqa: BLE001 - it is thrown where the router was called
                    waiting = calls.throw(error)
                else:
                    waiting = calls.send(answer)
        except StopIteration as done:
            return done.value
