"""A worker behind its HTTP ports: what comes in is answered by the face, or served by one of the ranks behind the port.

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
"""Where routers poll the load of an engine."""

Note = Callable[[int, int, Call, Prompt], ServedRequest]
"""Notes a prompt that came in for a worker and a rank."""


class WorkerPort:
    """A port of one worker as clients see it.

    Args:
        worker: its id.
        model: what it serves.
        loops: the ranks behind this port.
        publisher: where the events of all ranks of the worker are sent.
        listening: its socket, bound already.
        network: where that is.
        note: notes each prompt.
        planned: what the next requests are answered with in place of being served, whichever port they come to.
        max_queued: how many requests wait at most before it answers that it is busy; None: any number.
        seed: of the names of requests.

    Attributes:
        worker: as above.
        loops: as above.
        ranks: their numbers in the whole deployment; clients name a rank by its place behind the port.
        publisher: as above.
        planned: as above.
        port: the number of its port.
        is_draining: whether it serves what it has, and takes nothing new.
        pauses: whether it is paused, or asleep, and what it does then.
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
        """Where the events of each rank behind it are published, as others are given it; of those that are polled,
        where they are asked for.
        """
        if self._model.release.is_polled:
            return [f"{self.url}/kv_cache_events"]
        return self._of_ranks(self.publisher.endpoints)

    @property
    def replay_endpoints(self) -> list[str]:
        """Where each of these ranks is asked for replays; empty: nowhere."""
        return self._of_ranks(self.publisher.replay_endpoints)

    @property
    def load_endpoints(self) -> list[str]:
        """Where each of these ranks says its load; empty: nowhere."""
        loads = self.publisher.loads
        return [] if loads is None else self._of_ranks(loads.endpoints)

    def _of_ranks(self, endpoints: Sequence[str]) -> list[str]:
        return [self._network.endpoint(each) for each in endpoints[self.ranks.start : self.ranks.stop]]

    def to_json(self) -> dict[str, Any]:
        """Where it listens, and the ranks behind it by their numbers in the deployment, as the ready line says it."""
        return {"http": self.url, "ranks": list(self.ranks)}

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

        vLLM (launcher.py: the server of HTTP is shut down) listens no more, and closes each connection once it has
        nothing open. SGLang (tokenizer_manager.py: `sigterm_watchdog`) is not healthy from then on, goes on to take
        requests, and ends once none is open.
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
        """Why its engine is broken, that of one of its ranks; None: none is."""
        return next((loop.error for loop in self.loops if loop.error is not None), None)

    def turn(self) -> None:
        """Let the ranks turn their idle loops, in which they say their loads; one that is stopped says nothing."""
        if self._runner is not None:
            for loop in self.loops:
                if not loop.engine.is_in_pass:
                    loop.say_load(force=True)

    @property
    def bootstrap_port(self) -> int | None:
        """Of a prefill engine of a P/D pair, where its bootstrap server listens; None: it has none."""
        pairs = self.loops[0].pairs
        found = None if pairs is None else pairs.bootstraps.get(self.worker)
        return None if found is None else found.port

    @property
    def role(self) -> str | None:
        """What its engine is for in P/D pairs; None: it is in none."""
        return self._model.role

    def states(self) -> list[RankState]:
        """Return the state of each rank."""
        states = [loop.look() for loop in self.loops]
        for each in states:
            each.sleeps = self.pauses.sleeps
        return states

    def reset_cache(self) -> bool:
        """Empty the caches of its ranks; False, and nothing changes, while requests are open or one is broken."""
        return clear_all(self.loops, self.publisher)

    def number_adapter(self, name: str) -> None:
        """Give an adapter that is loaded its next number, in these ranks."""
        for loop in self.loops:
            ids: LoraIds | None = getattr(loop.engine.worker.manager, "lora_ids", None)
            if ids is not None:
                ids.load(name)

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
        except web.RequestPayloadError as error:  # compressed, it says, and is not
            return _response(self._face.refusal(BadRequest(f"The body cannot be read: {error}")))
        # Bytes that are no UTF-8 would be half a pair of UTF-16, which no answer can hold.
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
            for loop in loops:  # several only where prompts have rooms at several ranks
                loop.submit(job, prompts, [at for at, rank in enumerate(ranks) if self.loops[rank] is loop])
        except OutOfBlocks as error:
            return _response(self._refused(rows, BadRequest(str(error))))
        except PairRefused as error:
            return _response(self._refused(rows, BadRequest(str(error), kind="BadRequest")))
        except ValueError as error:  # what its engine names no blocks by: an adapter, or a salt
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
                row.aborted = (
                    row.status is None
                )  # the client went, or an engine that restarts, stops or dies cut it off
                row.called_off = row.aborted and job.failure is None and not was_cut
            if not job.is_over or len(loops) > 1:  # where one rank has ended it, others go on
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
        """The rank that serves each prompt: the one that was asked for; of a prefill engine of SGLang's, that of its
        room; else the one with the least open requests.
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
        """Send an answer in parts; of one that is cut, a number of chunks, and never its end."""
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
        ports: these, in the order of their ranks; one at least.

    Attributes:
        ports: as above.
        worker: its id.
        loops: its ranks.
        publisher: where its events are sent.
        planned: what the next requests are answered with in place of being served, whichever port they come to.
        role: what its engine is for in P/D pairs; None: it is in none.
    """

    def __init__(self, ports: Sequence[WorkerPort]) -> None:
        self.ports = ports
        first = ports[0]
        self.worker, self.publisher, self.planned, self.role = first.worker, first.publisher, first.planned, first.role
        self.loops = [loop for port in ports for loop in port.loops]

    # ------------------------------------------------------------------------------------------------ where it is

    @property
    def url(self) -> str:
        """Where it listens: the port of its first rank."""
        return self.ports[0].url

    def port_of(self, rank: int) -> WorkerPort:
        """The port that a rank stands behind, by its number in the deployment.

        Raises:
            ValueError: there is no such rank.
        """
        if check_integer("rank", rank, 0) >= len(self.loops):
            raise ValueError(f"rank must be below {len(self.loops)}, the ranks of worker {self.worker}; got {rank}")
        return next(port for port in self.ports if rank in port.ranks)

    @property
    def endpoints(self) -> list[str]:
        """Where the events of each rank are published, as others are given it; of those that are polled, where they
        are asked for.
        """
        return self._of_each(lambda port: port.endpoints)

    @property
    def replay_endpoints(self) -> list[str]:
        """Where each rank is asked for replays; empty: nowhere."""
        return self._of_each(lambda port: port.replay_endpoints)

    @property
    def load_endpoints(self) -> list[str]:
        """Where each rank says its load; empty: nowhere."""
        return self._of_each(lambda port: port.load_endpoints)

    def _of_each(self, what: Callable[[WorkerPort], list[str]]) -> list[str]:
        return list(chain.from_iterable(what(port) for port in self.ports))

    @property
    def bootstrap_port(self) -> int | None:
        """Of a prefill engine of a P/D pair, where its bootstrap server listens; None: it has none."""
        return self.ports[0].bootstrap_port

    # ---------------------------------------------------------------------------------------------- what it does

    async def start(self) -> None:
        """Listen, at the same ports as before, and serve every request that comes.

        Raises:
            EndpointError: another has taken a port meanwhile.
        """
        for port in self.ports:
            await port.start()

    async def stop(self) -> None:
        """Listen no more; open connections are cut."""
        for port in self.ports:
            await port.stop()

    async def drain(self) -> None:
        """Serve what is open, and refuse what is new; see `WorkerPort.drain`."""
        for port in self.ports:
            await port.drain()

    def cut(self) -> None:
        """Cut all connections, as a process that dies does."""
        for port in self.ports:
            port.cut()

    def cut_off(self, reason: str) -> None:
        """Cut all connections, and end all that is open with a reason."""
        for port in self.ports:
            port.cut_off(reason)

    def restart(self) -> None:
        """Restart the engine, announced: it is empty, its connections are cut, its batches begin with 0.

        Raises:
            ValueError: it is broken; nothing has changed.
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
        """Empty the cache of all ranks; False, and nothing changes, while requests are open, or where it is broken."""
        return clear_all(self.loops, self.publisher)

    def turn(self) -> None:
        """Let the ranks turn their idle loops, in which they say their loads; one that is stopped says nothing."""
        for port in self.ports:
            port.turn()


def clear_all(loops: Sequence[EngineLoop], publisher: KvPublisher) -> bool:
    """Empty the caches of ranks; False, and nothing changes, while requests are open, or where one is broken."""
    if any(loop.error is not None or loop.num_open or loop.engine.worker.requests for loop in loops):
        return False
    with publisher.step():
        cleared = [loop.clear() for loop in loops]  # of each, whatever others say
    return all(cleared)


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


def _failed(reason: str, kind: str = "InternalServerError") -> BadRequest:
    return BadRequest(reason, kind=kind, status=500)


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
