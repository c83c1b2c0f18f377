"""The HTTP port of one worker: what comes in is answered by the face, or served by one of the worker's ranks."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from pytest_kvmock.engine.worker import OutOfBlocks
from pytest_kvmock.serve.answers import Encoder
from pytest_kvmock.serve.api import SSE, Answer, Call, Generate, RankState, Usage
from pytest_kvmock.serve.engine_loop import EngineLoop, Job
from pytest_kvmock.serve.face import Face
from pytest_kvmock.serve.listening import SILENT, cut_all, end_listening, large_request, listen_no_more
from pytest_kvmock.serve.network import Network
from pytest_kvmock.serve.planned import PlannedAnswers
from pytest_kvmock.serve.request_checks import BadRequest
from pytest_kvmock.serve.request_log import ServedRequest
from pytest_kvmock.tokens import Prompt

if TYPE_CHECKING:
    from pytest_kvmock.serve.api import Model
    from pytest_kvmock.wire.zmq import KvPublisher

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
        planned: what the next requests are answered with in place of being served.
        port: the number of its port.
        is_draining: whether it serves what it has, and takes nothing new.
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
        self.planned = PlannedAnswers()
        self.port: int = listening.getsockname()[1]
        self.is_draining = False
        self._busy: set[web.RequestHandler] = set()  # connections that have a request now
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
        """Where the events of each rank are published, as others are given it; of those that are polled, where they are asked for."""
        if self._model.release.is_polled:
            return [f"{self.url}/kv_cache_events"]
        return [self._network.endpoint(each) for each in self.publisher.endpoints]

    @property
    def replay_endpoints(self) -> list[str]:
        """Where each rank is asked for replays; empty: nowhere."""
        return [self._network.endpoint(each) for each in self.publisher.replay_endpoints]

    # ----------------------------------------------------------------------------------------------------- the port

    async def start(self) -> None:
        """Listen, at the same port as before, and serve every request that comes.

        Raises:
            EndpointError: another has taken the port meanwhile.
        """
        self.planned.clear()
        self.is_draining = False
        if self._listening is None:
            self._listening = self._network.bound_socket(self.port)
        if self._runner is not None:
            if not self._runner.sites:  # it has drained
                await web.SockSite(self._runner, self._listening).start()
            return
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
        if runner is not None and self._server is not None:
            await end_listening(runner, self._server, listening)
        elif listening is not None:
            listening.close()

    async def drain(self) -> None:
        """Serve what is open, and refuse what is new, as its engine does when it is asked to end.

        vLLM (launcher.py: the server of HTTP is shut down) listens no more, and closes each connection once it has nothing open. SGLang
        (tokenizer_manager.py: `sigterm_watchdog`) is not healthy from then on, goes on to take requests, and ends once none is open.
        """
        if self._runner is None or self.is_draining:
            return
        self.is_draining = True
        if not self._model.release.is_sglang or not self._busy:
            await self._end_listening()

    async def _end_listening(self) -> None:
        if self._listening is None or self._runner is None or self._server is None:
            return
        listening, self._listening = self._listening, None
        await listen_no_more(self._runner, listening)
        for handler in list(self._server.connections):
            if handler in self._busy:
                handler.close()  # once its request is over
            elif handler.transport is not None:
                handler.transport.close()

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

    def take_events(self) -> list[dict[str, Any]]:
        """Return the events that wait to be polled, and forget them; none where they are sent."""
        if not self._model.release.is_polled:
            return []
        polled: Any = self.publisher
        rows: list[dict[str, Any]] = polled.take()
        return rows

    def hash_algo(self) -> str:
        """Return what names the blocks of TensorRT-LLM's events; V1 has one algorithm."""
        return getattr(self.loops[0].engine.worker.manager, "hash_algo", "v1_block_key")

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
        self._busy.add(request.protocol)
        try:
            return await self._answer(request)
        finally:
            if self.is_draining and self._busy == {request.protocol}:
                await self._end_listening()
            self._busy.discard(request.protocol)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
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
            planned = self.planned.take_answer()
            if planned is not None:
                return _response(self._refused(rows, planned.error), planned.headers)
            cut = self.planned.take_cut(streams=asked.stream)
            if cut == 0:
                for row in rows:
                    row.aborted = True
                raise _cut_off(request)
            if self.error is not None:
                return _response(self._refused(rows, _failed(self.error)))
            job = Job(asked, rows)
            loop.submit(job, prompts)
        except OutOfBlocks as error:
            return _response(self._refused(rows, BadRequest(str(error))))
        except ValueError as error:  # what its engine names no blocks by: an adapter, or a salt
            return _response(self._face.refusal(BadRequest(str(error))))
        encoder = Encoder(asked, self._model.name, int(time.time()))
        was_cut = False
        try:
            if asked.stream:
                return await self._stream(request, job, encoder, cut)
            return _response(await self._whole(job, encoder))
        except _CutOff:
            was_cut = True
            raise
        finally:
            for row in rows:
                row.aborted = (
                    row.status is None
                )  # the client went, or an engine that restarts, stops or dies cut it off
                row.called_off = row.aborted and job.failure is None and not was_cut
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

    async def _stream(
        self, request: web.BaseRequest, job: Job, encoder: Encoder, cut: int | None
    ) -> web.StreamResponse:
        """Send an answer in parts; of one that is cut, so many chunks, and never its end."""
        response = web.StreamResponse(headers={"Content-Type": SSE, "Cache-Control": "no-cache"})
        await response.prepare(request)
        started: set[int] = set()
        sent = 0
        while True:
            if not job.fresh and not job.is_over:
                await job.changed.wait()
            job.changed.clear()
            fresh, job.fresh = job.fresh, []
            out: list[bytes] = []
            for choice, count in fresh:
                if choice.index not in started and (begun := encoder.begin(choice)):
                    out.append(begun)
                started.add(choice.index)
                choice.sent += count
                out.append(encoder.tokens(choice, choice.tokens[choice.sent - count : choice.sent]))
            sent += len(out)
            if cut is not None and (sent >= cut or job.is_over):
                await response.write(b"".join(out[: len(out) - max(0, sent - cut)]))
                raise _cut_off(request)
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


def _port_of(endpoint: str | None) -> int | None:
    number = (endpoint or "").rpartition(":")[2]
    return int(number) if number.isdigit() else None


def _response(answer: Answer, headers: Mapping[str, str] = {}, *, is_head: bool = False) -> web.Response:
    body = None if is_head else answer.body
    return web.Response(body=body, status=answer.status, headers={"Content-Type": answer.content_type, **headers})


class _CutOff(ConnectionResetError):  # noqa: N818 - it is what was asked for
    """A connection was cut, as the test asked for."""


def _cut_off(request: web.BaseRequest) -> _CutOff:
    """Cut the connection of a request, and return what its handler raises then."""
    if request.transport is not None:
        request.transport.abort()
    return _CutOff()


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
