"""A worker behind its HTTP ports: the face answers a request, or one of the ranks behind the port serves it.

One subject: a worker as its clients see it. It has one port, or several (`HTTP_FORMS`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, cast

from aiohttp import web

from pytest_kvmock.engines.worker import OutOfBlocks
from pytest_kvmock.servers.serve.answers import Encoder
from pytest_kvmock.servers.serve.api import SSE, Answer, Call, Generate, RankState, Usage
from pytest_kvmock.servers.serve.engine_loop import EngineLoop, Job
from pytest_kvmock.servers.serve.face import Face
from pytest_kvmock.servers.serve.listening import SILENT, cut_all, end_listening, large_request, listen_no_more
from pytest_kvmock.servers.serve.network import Network
from pytest_kvmock.servers.serve.planned import PlannedAnswers
from pytest_kvmock.servers.serve.request_checks import BadRequest
from pytest_kvmock.servers.serve.request_log import ServedRequest
from pytest_kvmock.servers.serve.served_pairs import PairRefused
from pytest_kvmock.servers.serve.served_pauses import ServedPauses
from pytest_kvmock.values.checks import check_integer
from pytest_kvmock.values.tokens import Prompt

if TYPE_CHECKING:
    from pytest_kvmock.servers.serve.api import Model
    from pytest_kvmock.values.prompt_keys import LoraIds, PromptKeys
    from pytest_kvmock.wire.sockets.kv_publisher import KvPublisher

_POLLS: Final = frozenset({"/metrics", "/load", "/get_load", "/v1/loads"})
"""The paths where routers poll the load of an engine."""

Note = Callable[[int, int, Call, Prompt], ServedRequest]
"""Records a prompt that arrived for a worker and a rank."""


class WorkerPort:
    """A port of one worker as clients see it.

    Args:
        worker: its id.
        model: the served model.
        loops: the ranks behind this port.
        publisher: sends the events of all ranks of the worker.
        listening: its bound socket.
        network: the address of the socket.
        note: records each prompt.
        planned: planned answers to the next requests of the worker, at any of its ports.
        max_queued: maximum number of waiting requests; beyond it the answer is that the engine is busy. None: no limit.
        seed: seed of the names of requests.

    Attributes:
        worker: its id.
        loops: the ranks behind this port.
        ranks: the numbers of these ranks in the deployment; clients name a rank by its position behind the port.
        publisher: sends the events of all ranks of the worker.
        planned: planned answers to the next requests of the worker.
        port: the number of its port.
        is_draining: whether it finishes open requests and takes no new ones.
        pauses: its pauses and sleeps.
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
        planned: PlannedAnswers,
        max_queued: int | None = None,
        seed: int = 0,
    ) -> None:
        self.worker = worker
        self.loops = loops
        self.ranks = range(model.first_rank, model.first_rank + len(loops))
        self.publisher = publisher
        self.planned = planned
        self.port: int = listening.getsockname()[1]
        self.is_draining = False
        self.pauses = ServedPauses(loops, self.reset_cache)
        self._busy: set[web.RequestHandler] = set()  # connections with an open request
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
        """The advertised URL of the port."""
        return self._network.url(self.port)

    @property
    def endpoints(self) -> list[str]:
        """The advertised endpoints of the events of each rank behind the port; for polled events, the URL of polls."""
        if self._model.release.is_polled:
            return [f"{self.url}/kv_cache_events"]
        return self._of_ranks(self.publisher.endpoints)

    @property
    def replay_endpoints(self) -> list[str]:
        """The replay endpoint of each of these ranks; empty if there is none."""
        return self._of_ranks(self.publisher.replay_endpoints)

    @property
    def load_endpoints(self) -> list[str]:
        """The load endpoint of each of these ranks; empty if there is none."""
        loads = self.publisher.loads
        return [] if loads is None else self._of_ranks(loads.endpoints)

    def _of_ranks(self, endpoints: Sequence[str]) -> list[str]:
        return [self._network.endpoint(each) for each in endpoints[self.ranks.start : self.ranks.stop]]

    def to_json(self) -> dict[str, Any]:
        """Return its URL and the deployment's numbers of the ranks behind it, for the ready line."""
        return {"http": self.url, "ranks": list(self.ranks)}

    # ----------------------------------------------------------------------------------------------------- the port

    async def start(self) -> None:
        """Listen, at the same port as before, and serve every request.

        Raises:
            EndpointError: another process has taken the port meanwhile.
        """
        self.planned.clear()
        self.is_draining = False
        if self._listening is None:
            self._listening = self._network.bound_socket(self.port)
        if self._runner is not None:
            if not self._runner.sites:  # it was drained
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
        """Stop listening, and cut open connections."""
        runner, self._runner = self._runner, None
        listening, self._listening = self._listening, None
        if runner is not None and self._server is not None:
            await end_listening(runner, self._server, listening)
        elif listening is not None:
            listening.close()

    async def drain(self) -> None:
        """Finish open requests and refuse new ones, as the engine does when it is asked to end.

        vLLM (launcher.py: the HTTP server is shut down) stops listening, and closes each connection when it has no open
        request. SGLang (tokenizer_manager.py: `sigterm_watchdog`) is unhealthy from then on, still takes requests, and
        ends when none is open.
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
                handler.close()  # closes when its request has ended
            elif handler.transport is not None:
                handler.transport.close()

    def cut(self) -> None:
        """Cut all connections, as if the process died."""
        cut_all(self._server)

    def cut_off(self, reason: str) -> None:
        """Cut all connections, and end all open requests with a reason."""
        self.cut()
        for loop in self.loops:
            loop.fail(reason)

    # --------------------------------------------------------------------------------------------------- the engine

    @property
    def error(self) -> str | None:
        """Why the engine of one of its ranks is broken; None if none is."""
        return next((loop.error for loop in self.loops if loop.error is not None), None)

    def turn(self) -> None:
        """Let idle ranks publish their loads, as their loops would; a stopped worker publishes nothing."""
        if self._runner is not None:
            for loop in self.loops:
                if not loop.engine.is_in_pass:
                    loop.say_load(force=True)

    @property
    def bootstrap_port(self) -> int | None:
        """The port of the bootstrap server of a prefill engine in a P/D pair; None if it has none."""
        pairs = self.loops[0].pairs
        found = None if pairs is None else pairs.bootstraps.get(self.worker)
        return None if found is None else found.port

    @property
    def role(self) -> str | None:
        """The role of its engine in P/D pairs; None if it is in no pair."""
        return self._model.role

    def states(self) -> list[RankState]:
        """Return the state of each rank."""
        states = [loop.look() for loop in self.loops]
        for each in states:
            each.sleeps = self.pauses.sleeps
        return states

    def reset_cache(self) -> bool:
        """Empty the caches of its ranks. If requests are open or a rank is broken, change nothing and return False."""
        return clear_all(self.loops, self.publisher)

    def number_adapter(self, name: str) -> None:
        """Give a loaded adapter its next number, in these ranks."""
        for loop in self.loops:
            ids: LoraIds | None = getattr(loop.engine.worker.manager, "lora_ids", None)
            if ids is not None:
                ids.load(name)

    def take_events(self) -> list[dict[str, Any]]:
        """Return the events that wait to be polled, and drop them; empty if events are sent."""
        if not self._model.release.is_polled:
            return []
        polled: Any = self.publisher
        rows: list[dict[str, Any]] = polled.take()
        return rows

    def hash_algo(self) -> str:
        """Return the hash algorithm that names the blocks of TensorRT-LLM's events; V1 has only one."""
        return getattr(self.loops[0].engine.worker.manager, "hash_algo", "v1_block_key")

    def event_sources(self) -> list[dict[str, Any]]:
        """Return where the events of each rank are published."""
        endpoints = self.endpoints
        replays: Sequence[str | None] = self.replay_endpoints or [None] * len(endpoints)
        loads: Sequence[str | None] = self.load_endpoints or [None] * len(endpoints)
        return [
            {
                "endpoint": endpoint,
                "replay_endpoint": replay,
                "topic": self.publisher.topic,
                "buffer_steps": self.publisher.buffer_steps,
                "host": self._network.advertised,
                "port": _port_of(endpoint),
                "replay_port": _port_of(replay),
                "load_port": _port_of(load),
            }
            for endpoint, replay, load in zip(endpoints, replays, loads, strict=True)
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
        except web.RequestPayloadError as error:  # declared as compressed, but is not
            return _response(self._face.refusal(BadRequest(f"The body cannot be read: {error}")))
        # Invalid UTF-8 would become lone surrogates, which no answer can encode.
        headers = {name.lower(): value.encode("utf-8", "replace").decode() for name, value in request.headers.items()}
        call = Call(request.method, request.path, headers, body, dict(request.query))
        if call.path in _POLLS and (failed := self.planned.take_poll()) is not None:
            return _response(self._face.refusal(failed), is_head=request.method == "HEAD")
        found = self._face.answer(call)
        if isinstance(found, Generate):
            return await self._serve(request, call, found)
        answer = found if isinstance(found, Answer) else await found
        return _response(answer, is_head=request.method == "HEAD")

    async def _serve(self, request: web.BaseRequest, call: Call, asked: Generate) -> web.StreamResponse:
        waiting = sum(loop.look().waiting for loop in self.loops) if self._most_queued is not None else 0
        if self._most_queued is not None and waiting >= self._most_queued:
            return _response(self._face.busy())
        ranks = self._ranks_of(asked)
        loops = [self.loops[rank] for rank in dict.fromkeys(ranks)]
        carried = {name: getattr(asked, name) for name in ("lora_name", "cache_salt", "report_mode")}
        prompts = [Prompt(each, **carried) for each in asked.prompts]
        if path := self._face.adapters.path_of(asked.lora_name):
            prompts = [each.with_keys(replace(cast("PromptKeys", each.keys), lora_path=path)) for each in prompts]
        try:
            rows = [
                self._note(self.worker, self.ranks[rank], call, each) for rank, each in zip(ranks, prompts, strict=True)
            ]
            self._note_legs(rows, asked)
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
            if self.pauses.paused is not None:
                return _response(self._refused(rows, self.pauses.refusal()))
            job = Job(asked, rows)
            for loop in loops:  # several only if prompts have rooms at several ranks
                loop.submit(job, prompts, [at for at, rank in enumerate(ranks) if self.loops[rank] is loop])
        except OutOfBlocks as error:
            return _response(self._refused(rows, BadRequest(str(error))))
        except PairRefused as error:
            return _response(self._refused(rows, BadRequest(str(error), kind="BadRequest")))
        except ValueError as error:  # an adapter or salt that the engine does not support
            return _response(self._face.refusal(BadRequest(str(error))))
        encoder = Encoder(asked, self._model.name, int(time.time()), hands_over=self._model.hands_over)
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
                # The client disconnected, or the engine restarted, stopped or cut the connection.
                row.aborted = row.status is None
                row.called_off = row.aborted and job.failure is None and not was_cut
            if not job.is_over or len(loops) > 1:  # if one rank has ended it, others may still run
                for loop in loops:
                    loop.abort(job)

    def _note_legs(self, rows: Sequence[ServedRequest], asked: Generate) -> None:
        pairs = self.loops[0].pairs
        if pairs is None:
            return
        for row, given in zip(rows, asked.hand_overs, strict=True):
            row.role, row.hand_over = self._model.role, given
            if given is not None:
                pairs.meet(row, pairs.shared(given))

    def _refused(self, rows: Sequence[ServedRequest], error: BadRequest) -> Answer:
        answer = self._face.refusal(error)
        for row in rows:
            row.status = answer.status
        return answer

    def _ranks_of(self, asked: Generate) -> list[int]:
        """Return the rank that serves each prompt: the requested rank; or, for a prefill engine of SGLang, that of the
        room; or else the rank with the fewest open requests.
        """
        pairs, rank = self.loops[0].pairs, asked.rank
        if rank is None and pairs is not None and self._model.role == "prefill":
            found = [pairs.rank_of(given) for given in asked.hand_overs]
            if None not in found:
                return [each for each in found if each is not None]
        if rank is None:
            rank = min(range(len(self.loops)), key=lambda each: self.loops[each].num_open)
        return [rank] * len(asked.prompts)

    async def _whole(self, job: Job, encoder: Encoder) -> Answer:
        while not job.is_over:
            await job.changed.wait()
            job.changed.clear()
        if job.failure is not None:
            return self._refused(job.rows, _failed(job.failure, job.failure_kind))
        _note_status(job)
        return encoder.whole(job.choices, _usage(job))

    async def _stream(
        self, request: web.BaseRequest, job: Job, encoder: Encoder, cut: int | None
    ) -> web.StreamResponse:
        """Send an answer in parts. If it is to be cut, send only `cut` chunks, and never the end."""
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
                    refused = self._refused(job.rows, _failed(job.failure, job.failure_kind)).body
                    out.append(encoder.failed(job.choices[0], job.failure, refused, nests=self.loops[0].in_rooms))
                else:
                    _note_status(job)
                out.append(encoder.done(_usage(job)))
            await response.write(b"".join(out))
            if job.is_over:
                break
        await response.write_eof()
        return response


class ServedWorker:
    """A worker behind one HTTP port or several.

    Args:
        ports: the ports, in the order of their ranks; at least one.

    Attributes:
        ports: the ports.
        worker: its id.
        loops: its ranks.
        publisher: sends its events.
        planned: planned answers to the next requests, at any of its ports.
        role: the role of its engine in P/D pairs; None if it is in no pair.
    """

    def __init__(self, ports: Sequence[WorkerPort]) -> None:
        self.ports = ports
        first = ports[0]
        self.worker, self.publisher, self.planned, self.role = first.worker, first.publisher, first.planned, first.role
        self.loops = [loop for port in ports for loop in port.loops]

    # ------------------------------------------------------------------------------------------------ where it is

    @property
    def url(self) -> str:
        """The advertised URL of its first port."""
        return self.ports[0].url

    def port_of(self, rank: int) -> WorkerPort:
        """Return the port of a rank, given by its number in the deployment.

        Raises:
            ValueError: an unknown rank.
        """
        if check_integer("rank", rank, 0) >= len(self.loops):
            raise ValueError(f"rank must be below {len(self.loops)}, the ranks of worker {self.worker}; got {rank}")
        return next(port for port in self.ports if rank in port.ranks)

    @property
    def endpoints(self) -> list[str]:
        """The advertised endpoints of the events of each rank; for polled events, the URLs of polls."""
        return self._of_each(lambda port: port.endpoints)

    @property
    def replay_endpoints(self) -> list[str]:
        """The replay endpoint of each rank; empty if there is none."""
        return self._of_each(lambda port: port.replay_endpoints)

    @property
    def load_endpoints(self) -> list[str]:
        """The load endpoint of each rank; empty if there is none."""
        return self._of_each(lambda port: port.load_endpoints)

    def _of_each(self, what: Callable[[WorkerPort], list[str]]) -> list[str]:
        return list(chain.from_iterable(what(port) for port in self.ports))

    @property
    def bootstrap_port(self) -> int | None:
        """The port of the bootstrap server of a prefill engine in a P/D pair; None if it has none."""
        return self.ports[0].bootstrap_port

    # ---------------------------------------------------------------------------------------------- what it does

    async def start(self) -> None:
        """Listen, at the same ports as before, and serve every request.

        Raises:
            EndpointError: another process has taken a port meanwhile.
        """
        for port in self.ports:
            await port.start()

    async def stop(self) -> None:
        """Stop listening, and cut open connections."""
        for port in self.ports:
            await port.stop()

    async def drain(self) -> None:
        """Finish open requests and refuse new ones; see `WorkerPort.drain`."""
        for port in self.ports:
            await port.drain()

    def cut(self) -> None:
        """Cut all connections, as if the process died."""
        for port in self.ports:
            port.cut()

    def cut_off(self, reason: str) -> None:
        """Cut all connections, and end all open requests with a reason."""
        for port in self.ports:
            port.cut_off(reason)

    def restart(self) -> None:
        """Restart the engine, announced: it is empty, its connections are cut, its batches begin with 0.

        Raises:
            ValueError: the engine is broken; nothing has changed.
        """
        error = next((port.error for port in self.ports if port.error is not None), None)
        if error is not None:
            raise ValueError(f"KvServer: worker {self.worker} is broken and cannot restart ({error}): serve again")
        self.cut_off("the engine restarts")
        for loop in self.loops:
            loop.restart()
        for port in self.ports:
            port.pauses.resume()
        if self.publisher.loads is not None:
            self.publisher.loads.restart()

    def reset_cache(self) -> bool:
        """Empty the caches of all ranks. If requests are open or a rank is broken, change nothing and return False."""
        return clear_all(self.loops, self.publisher)

    def turn(self) -> None:
        """Let idle ranks publish their loads; see `WorkerPort.turn`."""
        for port in self.ports:
            port.turn()


def clear_all(loops: Sequence[EngineLoop], publisher: KvPublisher) -> bool:
    """Empty the caches of ranks. If requests are open or a rank is broken, change nothing and return False."""
    if any(loop.error is not None or loop.num_open or loop.engine.worker.requests for loop in loops):
        return False
    with publisher.step():
        cleared = [loop.clear() for loop in loops]  # a list, so that every rank is cleared
    return all(cleared)


def _port_of(endpoint: str | None) -> int | None:
    number = (endpoint or "").rpartition(":")[2]
    return int(number) if number.isdigit() else None


def _response(answer: Answer, headers: Mapping[str, str] = {}, *, is_head: bool = False) -> web.Response:
    body = None if is_head else answer.body
    return web.Response(body=body, status=answer.status, headers={"Content-Type": answer.content_type, **headers})


class _CutOff(ConnectionResetError):  # noqa: N818 - it is what was asked for
    """Raised if a connection was cut because the test requested it."""


def _cut_off(request: web.BaseRequest) -> _CutOff:
    """Cut the connection of a request; return the exception for its handler to raise."""
    if request.transport is not None:
        request.transport.abort()
    return _CutOff()


def _failed(reason: str, kind: str = "InternalServerError") -> BadRequest:
    return BadRequest(reason, kind=kind, status=500)


def _note_status(job: Job) -> None:
    for row in job.rows:
        row.status = 200


def _usage(job: Job) -> Usage:
    """Return the usage of a request: each prompt once, and the output of all choices."""
    n = job.asked.n
    firsts = job.choices[::n]
    return Usage(
        sum(each.usage.prompt_tokens for each in firsts),
        sum(len(each.tokens) for each in job.choices),
        sum(each.usage.cached_tokens for each in firsts),
    )
