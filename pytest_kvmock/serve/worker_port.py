"""The HTTP port of one worker: what comes in is answered by the face, or served by one of the worker's ranks."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from pytest_kvmock.engine.worker import OutOfBlocks
from pytest_kvmock.serve.answers import Encoder
from pytest_kvmock.serve.api import SSE, Answer, Call, Generate, RankState, Usage
from pytest_kvmock.serve.engine_loop import EngineLoop, Job
from pytest_kvmock.serve.face import Face
from pytest_kvmock.serve.network import Network
from pytest_kvmock.serve.request_checks import BadRequest
from pytest_kvmock.serve.request_log import ServedRequest
from pytest_kvmock.tokens import Prompt
from pytest_kvmock.wire.endpoints import EndpointError

if TYPE_CHECKING:
    from pytest_kvmock.serve.api import Model
    from pytest_kvmock.wire.zmq import KvPublisher

MOST_BODY: Final = 2**26
"""Bytes of a body, at most."""

WORKER_DESCRIPTORS: Final = 8
RANK_DESCRIPTORS: Final = 4
"""Descriptors that a worker has open, and those of each rank of it beside: sockets, and what ZMQ's threads wait with."""
SPARE_DESCRIPTORS: Final = 32
"""Descriptors for the loop, the control API and the first connections."""

SILENT: Final = logging.getLogger("pytest_kvmock.serve.silent")
"""Where aiohttp says what it found wrong with a client's bytes, as with a probe of HTTP/2: nobody listens."""
SILENT.disabled = True  # pytest's capture of logs hears loggers that do not propagate, too

Note = Callable[[int, int, Call, Prompt], ServedRequest]
"""Notes a prompt that came in for a worker and a rank."""


class WorkerPort:
    """One worker as clients see it.

    Args:
        worker: its id.
        model: what it serves.
        loops: its ranks.
        publisher: where its events are sent.
        listening: its socket, bound already.
        network: where that is.
        note: notes each prompt.
        max_queued: how many requests wait at most before it answers that it is busy; None: any number.
        seed: of the names of requests.

    Attributes:
        worker: as above.
        loops: as above.
        publisher: as above.
        port: the number of its port.
    """

    def __init__(
        self,
        worker: int,
        model: Model,
        loops: Sequence[EngineLoop],
        publisher: KvPublisher,
        listening: socket.socket,
        *,
        network: Network,
        note: Note,
        max_queued: int | None = None,
        seed: int = 0,
    ) -> None:
        self.worker = worker
        self.loops = loops
        self.publisher = publisher
        self.port: int = listening.getsockname()[1]
        self._model = model
        self._network = network
        self._note = note
        self._most_queued = max_queued
        self._face = Face(model, self, seed)
        self._listening: socket.socket | None = listening
        self._runner: web.ServerRunner | None = None
        self._server: web.Server | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return self._network.url(self.port)

    @property
    def endpoints(self) -> list[str]:
        """Where the events of each rank are published, as others are given it."""
        return [self._network.endpoint(each) for each in self.publisher.endpoints]

    @property
    def replay_endpoints(self) -> list[str]:
        """Where each rank is asked for replays; empty: nowhere."""
        return [self._network.endpoint(each) for each in self.publisher.replay_endpoints]

    # ----------------------------------------------------------------------------------------------------- the port

    async def start(self) -> None:
        """Listen, at the same port as before.

        Raises:
            EndpointError: another has taken the port meanwhile.
        """
        if self._runner is not None:
            return
        if self._listening is None:
            self._listening = self._network.bound_socket(self.port)
        server = self._server = web.Server(
            self._handle,
            request_factory=large_request,
            handler_cancellation=True,
            access_log=None,
            logger=SILENT,
            keepalive_timeout=75.0,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.SockSite(self._runner, self._listening).start()

    async def stop(self) -> None:
        """Listen no more; open connections are cut."""
        runner, self._runner = self._runner, None
        listening, self._listening = self._listening, None
        if listening is not None and runner is not None and self._server is not None:
            await end_listening(runner, self._server, listening)
        elif listening is not None:
            listening.close()

    def cut(self) -> None:
        """Cut all connections, as a process that dies does."""
        cut_all(self._server)

    def cut_off(self, reason: str) -> None:
        """Cut all connections, and end all that is open with a reason."""
        self.cut()
        for loop in self.loops:
            loop.fail(reason)

    # --------------------------------------------------------------------------------------------------- the engine

    @property
    def error(self) -> str | None:
        """Why its engine is broken, that of one rank; None: none is."""
        return next((loop.error for loop in self.loops if loop.error is not None), None)

    def restart(self) -> None:
        """Restart the engine, announced: it is empty, its connections are cut, its batches begin with 0.

        Raises:
            ValueError: it is broken; nothing has changed.
        """
        if self.error is not None:
            raise ValueError(f"KvServer: worker {self.worker} is broken and cannot restart ({self.error}): serve anew")
        self.cut_off("the engine restarts")
        for loop in self.loops:
            loop.restart()

    def states(self) -> list[RankState]:
        """Return the state of each rank."""
        return [loop.look() for loop in self.loops]

    def reset_cache(self) -> bool:
        """Empty the cache of all ranks; False, and nothing changes, while requests are open, or where it is broken."""
        if self.error is not None or any(loop.num_open or loop.engine.worker.requests for loop in self.loops):
            return False
        with self.publisher.step():
            return sum(loop.clear() for loop in self.loops) == len(self.loops)  # of each, whatever others say

    def event_sources(self) -> list[dict[str, Any]]:
        """Return of each rank where its events are published."""
        endpoints = self.endpoints
        replays: Sequence[str | None] = self.replay_endpoints or [None] * len(endpoints)
        return [
            {
                "endpoint": endpoint,
                "replay_endpoint": replay,
                "topic": self.publisher.topic,
                "host": self._network.advertised,
                "port": _port_of(endpoint),
                "replay_port": _port_of(replay),
            }
            for endpoint, replay in zip(endpoints, replays, strict=True)
        ]

    # ---------------------------------------------------------------------------------------------------- requests

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return _response(self._face.refusal(BadRequest("Request body is too large", status=413)))
        except web.RequestPayloadError as error:  # compressed, it says, and is not
            return _response(self._face.refusal(BadRequest(f"The body cannot be read: {error}")))
        # Bytes that are no UTF-8 would be half a pair of UTF-16, which no answer can hold.
        headers = {name.lower(): value.encode("utf-8", "replace").decode() for name, value in request.headers.items()}
        call = Call(request.method, request.path, headers, body, dict(request.query))
        found = self._face.answer(call)
        if isinstance(found, Answer):
            return _response(found, is_head=request.method == "HEAD")
        return await self._serve(request, call, found)

    async def _serve(self, request: web.BaseRequest, call: Call, asked: Generate) -> web.StreamResponse:
        waiting = sum(loop.look().waiting for loop in self.loops) if self._most_queued is not None else 0
        if self._most_queued is not None and waiting >= self._most_queued:
            return _response(self._face.busy())
        rank = asked.rank if asked.rank is not None else self._least_open()
        loop = self.loops[rank]
        prompts = [Prompt(each, lora_name=asked.lora_name, cache_salt=asked.cache_salt) for each in asked.prompts]
        try:
            rows = [self._note(self.worker, rank, call, prompt) for prompt in prompts]
            if self.error is not None:
                return _response(self._refused(rows, _failed(self.error)))
            job = Job(asked, rows)
            loop.submit(job, prompts)
        except OutOfBlocks as error:
            return _response(self._refused(rows, BadRequest(str(error))))
        except ValueError as error:  # what its engine names no blocks by: an adapter, or a salt
            return _response(self._face.refusal(BadRequest(str(error))))
        encoder = Encoder(asked, self._model.name, int(time.time()))
        try:
            if asked.stream:
                return await self._stream(request, job, encoder)
            return _response(await self._whole(job, encoder))
        finally:
            for row in rows:
                row.aborted = row.status is None  # the client went, or an engine that restarts or stops cut it off
                row.called_off = row.aborted and job.failure is None
            if not job.is_over:
                loop.abort(job)

    def _refused(self, rows: Sequence[ServedRequest], error: BadRequest) -> Answer:
        answer = self._face.refusal(error)
        for row in rows:
            row.status = answer.status
        return answer

    def _least_open(self) -> int:
        return min(range(len(self.loops)), key=lambda rank: self.loops[rank].num_open)

    async def _whole(self, job: Job, encoder: Encoder) -> Answer:
        while not job.is_over:
            await job.changed.wait()
            job.changed.clear()
        if job.failure is not None:
            return self._refused(job.rows, _failed(job.failure))
        _note_status(job)
        return encoder.whole(job.choices, _usage(job))

    async def _stream(self, request: web.BaseRequest, job: Job, encoder: Encoder) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": SSE, "Cache-Control": "no-cache"})
        await response.prepare(request)
        started: set[int] = set()
        while True:
            if not job.fresh and not job.is_over:
                await job.changed.wait()
            job.changed.clear()
            fresh, job.fresh = job.fresh, []
            out: list[bytes] = []
            for choice, count in fresh:
                if choice.index not in started:
                    started.add(choice.index)
                    out.append(encoder.begin(choice))
                choice.sent += count
                out.append(encoder.tokens(choice, choice.tokens[choice.sent - count : choice.sent]))
            if job.is_over:
                if job.failure is not None:
                    out.append(b"data: " + self._refused(job.rows, _failed(job.failure)).body + b"\n\n")
                else:
                    _note_status(job)
                out.append(encoder.done(_usage(job)))
            await response.write(b"".join(out))
            if job.is_over:
                break
        await response.write_eof()
        return response


def large_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    """Return a request whose body may have `MOST_BODY` bytes."""
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=MOST_BODY)


def cut_all(server: web.Server | None) -> None:
    """Cut all connections of a server, as a process that dies does; None: there is none."""
    for handler in list(server.connections) if server is not None else ():
        if handler.transport is not None:
            handler.transport.abort()


async def end_listening(runner: web.ServerRunner, server: web.Server, listening: socket.socket) -> None:
    """Listen no more, and cut all connections.

    One that is being accepted is waited for: asyncio, closed meanwhile, would leave it open and its client waiting (CPython's issue 109564).
    """
    asyncio.get_running_loop().remove_reader(listening.fileno())
    for _ in range(3):  # steps of the loop from a connection that was accepted to one that the server knows
        await asyncio.sleep(0)
    cut_all(server)
    await runner.cleanup()


def check_descriptors(workers: int, ranks: int) -> None:
    """Raise where a process cannot open what so many workers need: without an eventfd, ZMQ would end it.

    Raises:
        EndpointError: the message says how many there are.
    """
    needed = SPARE_DESCRIPTORS + workers * (WORKER_DESCRIPTORS + ranks * RANK_DESCRIPTORS)
    opened: list[int] = []
    try:
        while len(opened) < needed:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise EndpointError(
            f"KvServer: {needed} descriptors are needed, {len(opened)} can be opened ({reason}): fewer workers or ranks, or a higher "
            "limit (ulimit -n)"
        ) from None
    finally:
        for each in opened:
            os.close(each)


def _port_of(endpoint: str | None) -> int | None:
    number = (endpoint or "").rpartition(":")[2]
    return int(number) if number.isdigit() else None


def _response(answer: Answer, *, is_head: bool = False) -> web.Response:
    body = None if is_head else answer.body
    return web.Response(body=body, status=answer.status, headers={"Content-Type": answer.content_type})


def _failed(reason: str) -> BadRequest:
    return BadRequest(reason, kind="InternalServerError", status=500)


def _note_status(job: Job) -> None:
    for row in job.rows:
        row.status = 200


def _usage(job: Job) -> Usage:
    """Return what a request used: each prompt once, the output of all choices."""
    n = job.asked.n
    firsts = job.choices[::n]
    return Usage(
        sum(each.usage.prompt_tokens for each in firsts),
        sum(len(each.tokens) for each in job.choices),
        sum(each.usage.cached_tokens for each in firsts),
    )
