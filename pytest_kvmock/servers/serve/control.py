"""The control API: a test in any language controls a server with JSON over a separate port.

Each path is a method of `KvServer`; a body has its arguments. Paths that change something accept only POST, and a page
in a browser can use no path (see `network`). Rejected requests are answered with 400 and `{"error": text}`. Methods
that wait are awaited in the server's event loop, so that any number can wait at once and the wait ends when the client
disconnects. All other methods run in threads, because they call that loop.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures.thread import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from aiohttp import web

from pytest_kvmock.servers.serve.api import MOST_TOKENS, from_json, to_json
from pytest_kvmock.servers.serve.listening import SILENT, end_listening, large_request
from pytest_kvmock.servers.serve.truth import prompt_of
from pytest_kvmock.values.checks import check_number, unknown_text

if TYPE_CHECKING:
    import socket

    from pytest_kvmock.servers.serve.network import Guard, Network

MOST_WAIT_S: Final = 600.0
"""Maximum time limit of a wait, in seconds."""

Server: TypeAlias = Any
"""A `KvServer`, which imports this module."""


class ControlPort:
    """The port of the control API.

    Args:
        server: the server that it controls.
        listening: its bound socket.
        network: the address of the socket.
        guard: decides who may use it.
    """

    def __init__(self, server: Server, listening: socket.socket, network: Network, guard: Guard) -> None:
        self._server = server
        self._listening = listening
        self._network = network
        self._guard = guard
        self.port: int = listening.getsockname()[1]
        self._runner: web.ServerRunner | None = None
        self._accepting: web.Server | None = None

    @property
    def url(self) -> str:
        """The URL that it listens at."""
        return self._network.url(self.port)

    async def start(self) -> None:
        """Start to listen."""
        # Made here, because the loop would import the executor at the first call, which needs a free descriptor.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(thread_name_prefix="KvServer control"))
        self._accepting = web.Server(
            self._handle, request_factory=large_request, handler_cancellation=True, access_log=None, logger=SILENT
        )
        self._runner = web.ServerRunner(self._accepting, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.SockSite(self._runner, self._listening).start()

    async def stop(self) -> None:
        """Stop listening; waiting clients get no answer."""
        if self._runner is not None and self._accepting is not None:
            await end_listening(self._runner, self._accepting, self._listening)

    def close(self) -> None:
        """Close the socket of a port that never listened."""
        self._listening.close()

    def _refused(self, request: web.BaseRequest) -> web.Response | None:
        """Return the answer to a request that is not allowed, before its body is read; None if it is allowed."""
        headers = request.headers
        arrived_at = request.transport.get_extra_info("sockname")[0] if request.transport is not None else ""
        text = self._guard.foreign_text(headers.getall("Host", ()), headers.getall("Origin", ()), arrived_at)
        if text is not None:
            return _json(403, {"error": text})
        if not self._guard.admits(headers.get("Authorization", "")):
            text = "the control API needs its token: send 'Authorization: Bearer TOKEN'"
            return _json(401, {"error": text}, {"WWW-Authenticate": "Bearer"})
        name = request.path.strip("/")
        if name not in _METHODS and name not in _WAITS:
            return _json(404, {"error": f"unknown path {request.path!r}; known: /{', /'.join((*_METHODS, *_WAITS))}"})
        allowed = ("GET", "POST") if name in _READS else ("POST",)
        if request.method not in (*allowed, *({"HEAD"} if "GET" in allowed else ())):
            text = f"{name}: {request.method} is not allowed; use {' or '.join(allowed)}"
            return _json(405, {"error": text}, {"Allow": ", ".join(allowed)})
        return None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        refused = self._refused(request)
        if refused is not None:
            return refused
        name = request.path.strip("/")
        try:
            body = await request.read()
            given = _read(body)
            if not isinstance(given, dict):
                raise TypeError(f"a body is an object with arguments, got {given!r:.80}")  # noqa: TRY301 - answered below
            if name in _WAITS:
                check_number("timeout", given.get("timeout", 0), most=MOST_WAIT_S, unit=" seconds")
                await _call(getattr(self._server.inside, _WAITS[name]), given)
                return _json(200, {"done": True})
            method = partial(_METHODS[name], self._server, given)
            answer = await asyncio.get_running_loop().run_in_executor(None, method)
        except web.RequestPayloadError as error:  # declared as compressed, but is not
            return _json(400, {"error": f"{name}: the body cannot be read: {error}"})
        except web.HTTPRequestEntityTooLarge as error:
            return _json(413, {"error": f"{name}: {error.text}"})
        except (ValueError, TypeError, KeyError, OSError) as error:
            text = f"argument {error} is missing" if isinstance(error, KeyError) else str(error)
            return _json(400, {"error": f"{name}: {text.removeprefix(f'{name}: ')}"})
        if isinstance(answer, web.Response):
            return answer
        return _json(200, answer)


def _read(body: bytes) -> Any:
    try:
        return from_json(body) if body else {}
    except ValueError as error:
        raise ValueError(f"the body is not JSON: {error}") from None


def _call(method: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Call a method with arguments by name.

    Raises:
        TypeError: an unknown argument.
        KeyError: an argument is missing.
    """
    takes = inspect.signature(method).parameters
    for name in given:
        if name not in takes:
            raise TypeError(unknown_text("argument", name, list(takes)))
    for name, each in takes.items():
        if each.default is each.empty and name not in given:
            raise KeyError(name)
    return method(**given)


def _json(status: int, value: Any, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=to_json(value), status=status, headers={"Content-Type": "application/json", **(headers or {})}
    )


def _check(server: Server, given: dict[str, Any]) -> Any:
    asked, truth = prompt_of(_prompt(given)), server.truth
    answer = given["blocks"]
    if isinstance(answer, dict) and answer.get("blocks", ()) is None:
        answer = {**answer, "blocks": []}
    found = truth.compare(asked, [] if answer is None else answer, given.get("last_batch"))
    if found.is_outdated:  # the client asks again, so no difference is recorded
        return _json(409, {"error": "more was published since last_batch: ask again", **truth.expect(asked)})
    return {"right": not found.text, "differences": truth.keep(asked, found)}


def _prompt(given: dict[str, Any]) -> Any:
    prompt = [] if given["prompt"] is None else given["prompt"]  # an empty list in Go
    if not isinstance(prompt, str | list):
        raise TypeError(f"prompt must be a text or a list of tokens, got {prompt!r:.80}")
    if len(prompt) > MOST_TOKENS:
        raise ValueError(f"prompt must have at most {MOST_TOKENS} tokens, got {len(prompt)}")
    if isinstance(prompt, list) and bool in set(map(type, prompt)):
        raise TypeError("a token id is an integer, not a boolean")
    return prompt


def _doing(name: str) -> Callable[[Server, dict[str, Any]], dict[str, bool]]:
    """Return a handler that calls a method without a result."""

    def do(server: Server, given: dict[str, Any]) -> dict[str, bool]:
        _call(getattr(server, name), given)
        return {"done": True}

    return do


def _replays(server: Server, _: dict[str, Any]) -> Any:
    return [
        {"worker": worker, "rank": each.dp_rank, "start": each.start, "sent": each.sent, "client": repr(each.client)}
        for worker, each in server.replays
    ]


def _faulting(method: str) -> Callable[[Server, dict[str, Any]], dict[str, bool]]:
    """Return a handler that requests a fault of a worker by a method of the server."""

    def ask(server: Server, given: dict[str, Any]) -> dict[str, bool]:
        options = dict(given)
        worker, name = options.pop("worker"), options.pop("name")
        if "rank" in options:
            options["dp_rank"] = options.pop("rank")
        getattr(server, method)(worker, name, **options)
        return {"done": True}

    return ask


def _pairs_of(server: Server) -> Any:
    if server.pairs is None:
        raise ValueError("the engines of this server have no roles; serve them with --role prefill=2,decode=2")
    return server.pairs


def _transfers(pairs: Any, given: dict[str, Any]) -> Any:
    """Fail, delay, hold or release the transfers of P/D pairs, as the body requests."""
    for name in given:
        if name not in ("fail", "delay_s", "hold"):
            raise TypeError(unknown_text("argument", name, ("fail", "delay_s", "hold")))
    if not isinstance(given.get("hold", False), bool):
        raise TypeError(f"hold must be true or false, got {given['hold']!r:.80}")
    if "fail" in given:
        pairs.fail_transfers(given["fail"])
    if "delay_s" in given:
        pairs.delay_transfers(given["delay_s"])
    if "hold" in given:
        (pairs.hold_transfers if given["hold"] else pairs.release_transfers)()
    return {"done": True}


def verdict_of(server: Server) -> dict[str, Any]:
    """Return the verdict on events and routing so far."""
    log = server.harness.events
    with server.harness.publisher.lock:
        server.harness.flush()
        errors = [str(problem) for problem in log.unexcused(log.errors)]
        warnings = [str(problem) for problem in log.unexcused(log.warnings)]
    faults_left = server.inside.faults_left
    return {
        "right": not (errors or server.truth.differences or faults_left or server.inside.broken),
        "errors": errors,
        "warnings": warnings,
        "differences": server.truth.differences,
        "broken": server.inside.broken,
        "faults_left": faults_left,
        "events": log.total,
        "requests": server.log.total,
        "forgotten_requests": server.log.forgotten,
        "history_is_cut": server.harness.recording.is_cut,
        "routing": server.routing.to_json(),
    }


_METHODS: Final[dict[str, Callable[[Server, dict[str, Any]], Any]]] = {
    "ready": lambda server, _: server.inside.ready_line(),
    "expect": lambda server, given: server.expect(_prompt(given)),
    "check": _check,
    "hold": _doing("hold"),
    "release": _doing("release"),
    "fault": _faulting("fault"),
    "load_fault": _faulting("load_fault"),
    "replays": _replays,
    "pairs": lambda server, _: _pairs_of(server).to_json(),
    "transfers": lambda server, given: _transfers(_pairs_of(server), given),
    "restart": _doing("restart"),
    "stop": _doing("stop"),
    "start": _doing("start"),
    "drain": _doing("drain"),
    "answer": _doing("answer"),
    "cut": _doing("cut"),
    "reset": lambda server, given: {"success": _call(server.reset, given)},
    "requests": lambda server, _: [each.to_json() for each in server.requests],
    "routing": lambda server, _: server.routing.to_json(),
    "text": lambda server, given: {"text": _call(server.text, given)},
    "verdict": lambda server, _: verdict_of(server),
}

_WAITS: Final = {"wait_subscribed": "await_subscribed", "wait_requests": "await_requests", "step": "await_step"}
"""The awaited method of each path that waits."""

_READS: Final = frozenset(
    {"ready", "expect", "replays", "pairs", "requests", "routing", "verdict", "wait_subscribed", "wait_requests"}
)
"""The paths that change nothing and also accept GET."""
