"""A router under test: the methods that it must have, the calls of them, and the errors for broken rules.

One subject: the calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import isawaitable, iscoroutine, iscoroutinefunction, signature
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.fleets.noticed_restarts import NoticedRestarts
from pytest_kvmock.fleets.report.regret import candidates_table
from pytest_kvmock.fleets.report.rows import BELIEFS
from pytest_kvmock.fleets.routing.routing import Candidate, PairAnswer, id_of
from pytest_kvmock.fleets.sent import SentBlocks
from pytest_kvmock.oracle.hygiene.text import event_text
from pytest_kvmock.values.checks import KvMockError, raised_at

if TYPE_CHECKING:
    from pytest_kvmock.fleets.clock.passes import Calls
    from pytest_kvmock.fleets.routing.routing import RouterRequest, Worker
    from pytest_kvmock.values.events import RouterEvent

HOOKS: Final = (
    *("started", "dispatched", "first_token", "finished", "apply", "worker_added", "worker_removed", "next_waiting"),
    *("withdrawn", "hand_over", "leg_failed"),
)
"""The methods that a router may have in addition to `pick`."""

_NOBODY: Final = (
    "no worker was there. Without candidates pick() must return None, and the request waits; a router that cannot be "
    "asked without candidates declares needs_candidates = True"
)


class RouterError(KvMockError, RuntimeError):
    """The router under test raised, or broke a rule for routers; an error that it raised is the cause.

    Attributes:
        now_ms: when, in virtual milliseconds.
        request: the request of the call; None if there is none.
        candidates: the candidates of the pick; empty for other methods.
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


class RouterStalled(KvMockError, RuntimeError):  # noqa: N818 - what happened to it, as EngineStalled
    """Requests wait in the router, and it picks no worker for them although nothing runs.

    Attributes:
        now_ms: when, in virtual milliseconds.
        requests: the requests that wait, in order.
        candidates: the candidates of the last pick.
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


def believing(router: object) -> dict[str, Any]:
    """Return the belief methods of a router, by name.

    Raises:
        TypeError: a method does not take its arguments.
    """
    found = {}
    for name, arguments in BELIEFS.items():
        method = getattr(router, name, None)
        if not callable(method):
            continue
        try:
            taken = signature(method)
        except ValueError:  # a builtin may have no signature
            taken = None
        try:
            if taken is not None:
                taken.bind(*arguments)
        except TypeError:
            raise TypeError(
                f"{type(router).__name__}.{name}() says what the router believes and is asked as "
                f"{name}({', '.join(arguments)}); got {name}{taken}. A method for something else needs another name"
            ) from None
        found[name] = method
    return found


class RouterCalls:
    """Calls the methods of a router.

    Args:
        router: the router under test.
        timeout_s: how long an async method may take, in seconds of real time.
        survives: the faults declared for it, in addition to its own `survives`.
        forgets_cordoned: whether it drops, on purpose, the blocks of a worker that is not a candidate for a while.
        holds_prefill: whether, for P/D pairs, it counts the load of a prefill worker to the end of the request on
            purpose; its own `holds_prefill` also says so.

    Raises:
        TypeError: the router is a class or has no method `pick`, a method of `BELIEFS` does not take its arguments,
            `needs_candidates` is neither True nor False, or `survives` names something other than "restart".

    Attributes:
        router: as given.
        beliefs: its belief methods, by name.
        asynchronous: the names of its methods that are coroutine functions.
        needs_candidates: whether it gets no pick while there is no worker.
        survives: the faults that it must notice: "restart", the unannounced restart of a worker.
        forgets_cordoned: as given.
        holds_prefill: as given.
        excused: its errors on events that an index with parent tracking must refuse, one line each.
        left_open: whether a clock stopped while requests were open; the router never gets their ends.
        sent: the prompts sent to each worker, over all runs; used only if the router has `believed`.
        restarts: the unannounced restarts, over all runs; used only if the router has belief methods.
        on_hook: called after each hook, whether the router has it or not; None: nothing is called.
    """

    def __init__(
        self,
        router: object,
        timeout_s: float = 5.0,
        survives: Collection[str] = (),
        *,
        forgets_cordoned: bool = False,
        holds_prefill: bool = False,
    ) -> None:
        if isinstance(router, type):
            raise TypeError(f"router is the class {router.__name__}; it must be an object, {router.__name__}()")
        if not callable(getattr(router, "pick", None)):
            raise TypeError(f"router must have a method pick(request, candidates), got {router!r:.80}")
        self.router = router
        self.needs_candidates = getattr(router, "needs_candidates", False)
        if not isinstance(self.needs_candidates, bool):
            name = type(router).__name__
            raise TypeError(f"{name}.needs_candidates must be True or False, got {self.needs_candidates!r:.80}")
        own = getattr(router, "survives", ())
        for declared in (own, survives):
            if not isinstance(declared, tuple | list) or not all(each == "restart" for each in declared):
                raise TypeError(f"{type(router).__name__}: survives must be ('restart',) or (), got {declared!r:.80}")
        self.survives = {*own, *survives}
        self.forgets_cordoned = forgets_cordoned
        self.holds_prefill = holds_prefill or getattr(router, "holds_prefill", False) is True
        self.on_hook: Callable[..., Calls] | None = None
        self.left_open = False
        self.sent = SentBlocks()
        self.restarts = NoticedRestarts()
        self._is_started = False
        self.excused: list[str] = []
        self._removed_ms: dict[Worker, float] = {}  # workers reported to it as gone, with the time
        self._timeout_s = timeout_s
        self._hooks = {name: hook for name in HOOKS if callable(hook := getattr(router, name, None))}
        self._pick: Callable[..., Any] = router.pick  # type: ignore[attr-defined]  # as was checked
        self.beliefs = believing(router)
        methods = {"pick": self._pick, **self._hooks, **self.beliefs}
        self.asynchronous = [name for name, method in methods.items() if iscoroutinefunction(method)]

    @property
    def name(self) -> str:
        """The router's name in messages."""
        return type(self.router).__name__

    def takes(self, hook: str, count: int) -> bool:
        """Whether the router has this method and the method takes `count` arguments."""
        try:
            signature(self._hooks[hook]).bind(*range(count))
        except (KeyError, TypeError, ValueError):
            return False
        return True

    def start(self, workers: Sequence[Worker] | Mapping[str, Sequence[Worker]], now_ms: float) -> Calls:
        """Give the router the workers, for P/D pairs by role, before its very first pick. Later runs do not, because
        the router got each change.

        Raises:
            RouterError: it raised.
        """
        if not self._is_started and self.has("started"):
            self._is_started = True
            yield from self.hook("started", now_ms, workers)

    def has(self, hook: str) -> bool:
        """Whether the router has a method."""
        return hook in self._hooks

    def wants(self, hook: str) -> bool:
        """Whether a hook is used: the router has the method, or `on_hook` is set."""
        return hook in self._hooks or self.on_hook is not None

    def check_sync(self) -> None:
        """Check that no method of the router is async.

        Raises:
            TypeError: a method is async.
        """
        if self.asynchronous:
            raise TypeError(
                f"{self.name}.{self.asynchronous[0]} is async; run the fleet with `await fleet.arun(trace)`"
            )

    def pick(
        self,
        request: RouterRequest,
        candidates: Sequence[Candidate],
        known: Collection[Worker],
        cordoned: Collection[Worker] = (),
        *,
        has_ranks: bool,
        besides: Collection[object] = (),
    ) -> Calls:
        """Ask the router for a worker; None means that the request waits. `besides`: other allowed answers.

        Raises:
            RouterError: it raised, was slow, or returned something that is not a worker.
        """
        try:
            chosen = yield from self._call("pick", self._pick, request, candidates, request, candidates)
        except RouterError as error:
            if candidates or isinstance(error.__cause__, TimeoutError):
                raise
            raise RouterError(f"{error.problem}: {_NOBODY}", error.now_ms, request) from error.__cause__
        if chosen is None or any(chosen is each for each in besides):
            return chosen
        for each in candidates:
            if each.worker == chosen:
                return each.worker
        offered = ", ".join(repr(each.worker) for each in candidates[:8]) + (", ..." if len(candidates) > 8 else "")
        of = next((each for each in cordoned if each == chosen), None)
        if not candidates and of is None:
            raise RouterError(f"{self.name}.pick() returned {chosen!r:.80}: {_NOBODY}", request.now_ms, request)
        if of is not None:
            why = f"worker {id_of(of)!r} is cordoned"
        elif has_ranks and not isinstance(chosen, tuple):
            why = "workers have ranks, so it must be a pair (worker id, rank)"
        elif isinstance(chosen, Candidate):
            why = "that is a candidate; return its worker"
        elif isinstance(chosen, PairAnswer):
            why = "that is an answer only for the prefill leg of a P/D pair"
        elif any(chosen == each for each in known):
            why = "that worker is gone" + ("" if request.phase is None else f", or is none for {request.phase}")
        else:
            why = "there is no such worker"
        raise RouterError(
            f"{self.name}.pick() returned {chosen!r:.80}; {why}. Candidates: {offered or 'none'}",
            request.now_ms,
            request,
            candidates,
        )

    def hook(self, name: str, now_ms: float, argument: Any, *more: Any, request: RouterRequest | None = None) -> Calls:
        """Call a method if the router has it.

        Raises:
            RouterError: it raised.
        """
        if name == "worker_removed":
            self._removed_ms[argument] = now_ms
        elif name == "worker_added":
            self._removed_ms.pop(argument, None)
        hook, answer = self._hooks.get(name), None
        if hook is not None:
            answer = yield from self._call(name, hook, request, (), argument, *more, now_ms=now_ms)
        if self.on_hook is not None and name not in ("next_waiting", "hand_over", "leg_failed"):
            yield from self.on_hook(name, now_ms, argument, *more)
        return answer

    def apply(
        self, event: RouterEvent, now_ms: float, story: Callable[[RouterEvent], str], *, may_be_refused: bool = False
    ) -> Calls:
        """Give the router an event.

        Args:
            event: the event.
            now_ms: when, in virtual milliseconds.
            story: returns the history of an event's parent block, for the message.
            may_be_refused: whether the router may raise, as the reference index does: some engines publish a Stored
                below a block that they have removed.

        Raises:
            RouterError: it raised although it must not.
        """
        hook = self._hooks.get("apply")
        if hook is not None:
            try:
                yield from self._call("apply", hook, None, (), event, now_ms=now_ms)
            except RouterError as error:
                text = f"{error.problem} at {' '.join(event_text(event).split())}"
                text += "".join(f"; {each}" for each in (story(event), self._gone(event)) if each)
                if not may_be_refused or isinstance(error.__cause__, TimeoutError):
                    raise RouterError(text, now_ms) from error.__cause__
                self.excused.append(text)
        if self.on_hook is not None:
            yield from self.on_hook("apply", now_ms, event)

    def _gone(self, event: RouterEvent) -> str:
        """Return a text that says when the worker of an event left; empty if it has not left."""
        for worker in (event.worker_id, event.key):
            if worker in self._removed_ms:
                return f"worker {worker!r} has left: worker_removed({worker!r}) at {self._removed_ms[worker]:g} ms"
        return ""

    def ask(
        self, name: str, method: Callable[..., Any], request: RouterRequest | None, now_ms: float, *arguments: Any
    ) -> Calls:
        """Call a method of the router that is not a hook.

        Raises:
            RouterError: it raised.
        """
        return (yield from self._call(name, method, request, (), *arguments, now_ms=now_ms))

    def next_waiting(self, requests: Sequence[RouterRequest], now_ms: float) -> Calls:
        """Ask the router which waiting request is next; None if there is none.

        Raises:
            RouterError: it raised, or returned something else.
        """
        chosen = yield from self.hook("next_waiting", now_ms, requests)
        if chosen is None or any(chosen is each for each in requests):
            return chosen
        raise RouterError(
            f"{self.name}.next_waiting() returned {chosen!r:.80}, which is not one of the {len(requests)} waiting "
            "requests",
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
            text = f"{self.name}.{name}() raised {error!r:.200}{raised_at(error, (__file__,))}"
            raise RouterError(text, now, request, candidates) from error
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
        """Run to the end, awaiting the router's answers."""
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
