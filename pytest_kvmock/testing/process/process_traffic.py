"""Promises of every router process for request bodies, for engines that are down or fail permanently, and for many
requests at once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, ClassVar, Final

import pytest

from pytest_kvmock.testing.process.process_judge import ProcessJudge
from pytest_kvmock.testing.process.process_subject import ProcessSubject
from pytest_kvmock.testing.process.router_process import ProcessEnded, RouterProcess, status_of
from pytest_kvmock.values.checks import is_integer
from pytest_kvmock.wire.sockets.waiting import Deadline

if TYPE_CHECKING:
    from pytest_kvmock.servers.serve.kv_server import KvServer
    from pytest_kvmock.testing.process.process_world import ProcessWorld

_LARGE: Final = 3 * 2**19
"""Bytes of a body: one and a half times the default limit of servers, 1 MiB."""

_AT_ONCE: Final = 120
"""Requests that are open at the same time: more than the 100 connections that clients keep by default."""

_SLOW_S: Final = 1.2
"""Seconds that engines hold these requests: longer than a timeout of one second."""

_UNREADY_S: Final = 0.5
"""Seconds without an answer after which a process counts as not listening without an engine."""

_TEXT: Final = "Grüße, 世界, κόσμε 🙂 "
"""A text with characters of two, three and four bytes."""

_fleet = pytest.mark.kvmock(workers=2, num_blocks=4096)


class ProcessTraffic(ProcessJudge):
    """The part of `ProcessContract` about bodies, connections, readiness and engines that fail."""

    health: ClassVar[str] = "/health"
    ready_means_engines: ClassVar[bool] = True
    gives_up_after: ClassVar[int | None] = None
    sends_rank: ClassVar[bool] = True

    @classmethod
    def wrong_declaration(cls) -> str:
        """Return the first invalid or contradictory declaration of the class; "" if there is none."""
        for name in ("ready_means_engines", "sends_rank"):
            if not isinstance(flag := getattr(cls, name), bool):
                return f"{name} must be True or False, got {flag!r:.80}"
        if not isinstance(cls.health, str) or not cls.health.startswith("/"):
            return f"health must be a path such as '/health', got {cls.health!r:.80}"
        tries = cls.gives_up_after
        if tries is not None and not (is_integer(tries, 1) and tries <= 100):
            return f"gives_up_after must be an integer from 1 to 100 (requests), or None, got {tries!r:.80}"
        if tries is not None and not cls.goes_by_prefix:
            return "gives_up_after is for a process that goes by prefixes, and goes_by_prefix is False"
        return super().wrong_declaration()

    @_fleet
    def test_it_is_ready_while_an_engine_is(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """The process starts before its engines; one engine starts, and stops.

        `health` is answered with 200 only while an engine is there.
        """
        what = "whether it is ready without an engine"
        if not self.ready_means_engines:
            self.skip("ready_means_engines is False", what, "ready_means_engines = True")
        self._needs_a_start(what)
        with self._world(_kvmock_servers, starts=False) as world:
            for worker in world.server.workers:
                world.server.stop(worker)
            self.engines = world.engines
            url = self._begun(world)
            if url is None:
                return
            if (status := self._health(world, url, while_nothing=True)) == "404":
                self.skip(f"{self.health} is answered with 404", what, "health, the path of its readiness,")
            if status == "200":
                world.fail(
                    f"no engine is up, and {self.health} is answered with 200: expected another status until one is"
                )
            for worker in (0, *world.decode):
                world.server.start(worker)
            self._until(world, url, "one engine came up", lambda status: status == "200", "200")
            for worker in (0, *world.decode):
                world.server.stop(worker)
            self._until(world, url, "all engines are down", lambda status: status != "200", "another status than 200")

    @_fleet
    def test_any_body_reaches_an_engine(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """A non-ASCII text, a body above 1 MiB, a query, and a GET reach an engine unchanged."""
        with self._world(_kvmock_servers, keep_bodies=True) as world:
            prompt = f"{world.text(2)}{_TEXT * 8}"
            path, body = self.completion(prompt, max_tokens=1)
            for what, query, sent in (
                ("a text that is not ASCII", "", body),
                (f"a body of {_LARGE:,} bytes", "", {**body, "kvmock_field": "x" * _LARGE}),
                ("a query", "?kvmock=1&more=a%20b", body),
            ):
                reply = world.post(path + query, sent, self.headers).finish()
                if reply.status != 200 or not world.answered:
                    world.fail(f"{what} was answered with {reply.text}; expected 200")
                came = json.loads(world.answered[-1].body)
                wrong = [name for name, value in sent.items() if came.get(name) != value]
                if wrong:
                    world.fail(
                        f"{what}: {wrong[0]} reached an engine as {came.get(wrong[0])!r:.100}; "
                        f"{sent[wrong[0]]!r:.100} was sent"
                    )
            if self.hears_events:
                world.judge("a prompt that is not ASCII was served", prompt)
            expected = status_of(f"{self.engines[0].url}/v1/models", self.timeout_s)
            status = status_of(f"{self.url}/v1/models", self.timeout_s)
            if status != expected:
                world.fail(f"GET /v1/models is answered with {status}; expected {expected}, as engines answer it")

    @_fleet
    def test_many_slow_requests_are_served(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """More requests are open at once than a client's usual limits allow, for more than a second; all are served.

        Meanwhile `health` is answered, if the process has it.
        """
        with self._world(_kvmock_servers) as world, ExitStack() as opened:
            answers_health = status_of(f"{self.url}{self.health}", self.timeout_s) == "200"
            world.server.hold()
            pending = [world.begin(world.text(1), max_tokens=1) for _ in range(_AT_ONCE)]
            for each in pending:
                opened.callback(each.close)
            world.wait_open(
                _AT_ONCE, f"{_AT_ONCE} completions were asked for at once, and engines do not have them all"
            )
            slow = Deadline(_SLOW_S)
            if answers_health and (status := status_of(f"{self.url}{self.health}", self.timeout_s)) != "200":
                world.fail(f"while {_AT_ONCE} requests are open {self.health} is answered with {status}; expected 200")
            while slow.left:
                world.pause()
            world.server.release()
            bad = Counter(
                reply.text for reply in (each.finish() for each in pending) if reply.status != 200 or not reply.is_whole
            )
            if bad:
                (text, _), *_ = bad.most_common(1)
                world.fail(
                    f"of {_AT_ONCE} requests at once, which engines answered after {_SLOW_S:g} s, {bad.total()} were "
                    f"not served: {text}; expected 200: is there a limit of time, or of connections?"
                )

    @_fleet
    def test_an_engine_that_fails_for_good_loses_its_prompts(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """With `gives_up_after`: an engine answers 500 to all requests.

        After this number of requests, its prompts go to another engine, which serves them.
        """
        tries, what = self.gives_up_after, "whether an engine that fails for good loses its prompts"
        if tries is None:
            self.skip(
                "gives_up_after is None", what, "gives_up_after, the failures after which it leaves an engine alone,"
            )
        with self._world(_kvmock_servers) as world:
            prompt = world.text(8)
            worker = self._known_at(world, prompt)
            world.server.answer(worker, 500, times=None)
            if len(self.engines) > len(world.workers):  # each of its ports fails, and ports get prompts in turn
                tries *= len(self.engines)
            for _ in range(tries):
                world.send(prompt + world.text(1))
            for _ in range(3):
                reply, asked = world.send(prompt + world.text(1))
                if reply.status != 200:
                    world.fail(
                        f"worker {worker} answers 500 to all: after {tries} requests (gives_up_after) "
                        "one for what it holds was answered "
                        f"with {reply.text}, and {len(asked)} engines were asked; expected 200, of another one"
                    )
            world.server.start(worker)

    # ------------------------------------------------------------------------------------------------ the means

    def _begun(self, world: ProcessWorld) -> str | None:
        """Start the process before any engine is up, and return its URL; None if it does not start without one."""
        url = f"http://127.0.0.1:{self.engines.port}"
        try:
            world.process = RouterProcess(self.command(self.engines), self.timeout_s)
            if type(self).ready is not ProcessSubject.ready:
                url = self.ready(world.process)
        except ProcessEnded:
            return None
        self.url = url
        return url

    def _health(self, world: ProcessWorld, url: str, *, while_nothing: bool = False) -> str:
        """Return the status of `health`; with `while_nothing`, retry for a while if there is no answer."""
        deadline = Deadline(_UNREADY_S if while_nothing else 0.0)
        while (status := status_of(f"{url}{self.health}", self.timeout_s)).startswith("nothing") and deadline.left:
            world.pause()
        return status

    def _until(self, world: ProcessWorld, url: str, where: str, fits: Callable[[str], bool], expected: str) -> None:
        __tracebackhide__ = True
        deadline = Deadline(self.timeout_s)
        while not fits(status := self._health(world, url)):
            if not deadline.left:
                world.fail(
                    f"{where}, and {self.health} is answered with {status} {self.timeout_s:g} s later; "
                    f"expected {expected}"
                )
            world.pause()

    def _judge_salt(self, world: ProcessWorld, where: str, prompt: str, cache_salt: str) -> None:
        """With `salt_header`: fail unless the salt of a header reaches an engine, which then finds no block of the
        unsalted prompt.
        """
        __tracebackhide__ = True
        if not self.salt_header:
            return
        text = f"{prompt[:1]}{world.text(4)}"
        world.direct(0, text)
        world.direct(1, text)
        world.picked(where, text, cache_salt=cache_salt)
        row = world.requests[-1]
        if row.cached_tokens:
            world.fail(
                f"{where}: a prompt with {self.salt_header}: {cache_salt} found {row.cached_tokens} tokens cached that "
                "were served without a salt; expected none: the process passes it on as cache_salt"
            )

    def _judge_rank(self, world: ProcessWorld, where: str, rank: int, prompt: str) -> None:
        """Fail unless a prompt that a rank holds is sent to that rank."""
        __tracebackhide__ = True
        if not (self.sends_rank and self.goes_by_prefix):
            return
        world.picked(where, prompt)
        row = world.requests[-1]
        if row.rank != rank:
            world.fail(
                f"{where}: a prompt that rank {rank} of worker {row.worker} holds was served by rank {row.rank}, "
                f"{row.cached_tokens} of its {row.prompt_tokens} tokens cached: is the rank sent "
                "(X-data-parallel-rank)? sends_rank = False: it is the engine's choice"
            )
