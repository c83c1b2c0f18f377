"""The common parts of a `ProcessContract`'s tests: engines and the process in front of them, incidents, and checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from time import time
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.engines.backends import EngineProfile, served_by, speaker_of
from pytest_kvmock.engines.tiers import Tiers
from pytest_kvmock.harness.router_harness import RouterHarness
from pytest_kvmock.servers.serve.kv_server import KvServer
from pytest_kvmock.testing.process.process_subject import ProcessSubject
from pytest_kvmock.testing.process.process_world import ProcessWorld
from pytest_kvmock.wire.codec.table import find_dialect

if TYPE_CHECKING:
    from pytest_kvmock.engines.backends import BackendSpec
    from pytest_kvmock.servers.serve.request_log import ServedRequest
    from pytest_kvmock.testing.process.process_client import Reply
    from pytest_kvmock.values.dialect import Dialect

_seeds: Final = count(1)
"""Seeds of the texts of each test: a process that outlives a test has seen none of the next one's."""

FRESH: Final = 16
"""Number of prompts that no worker holds, enough to show whether a fleet is shared.

By chance one of two workers gets none in 1 case of 32,768.
"""


_HOSTS: Final[tuple[dict[str, Any], ...]] = (
    {"host": 8, "self_describing": True},
    {"host": 8, "write_policy": "write_through"},
)
"""Hosts below a device with room for two short prompts, of vLLM's kind and of SGLang's; both copy what the device
computes."""


def host_of(dialect: Dialect) -> Tiers | None:
    """Return a host as engines of a dialect have it; None if they have none, or their events have no medium."""
    spec = speaker_of(dialect)
    if "tiers" not in spec.options or not dialect.media:
        return None
    for given in _HOSTS:
        host = Tiers.of(given)
        try:
            dialect.check_host(self_describing=host.self_describing)
            spec.make(num_blocks=8, block_size=spec.default_block_size, dp_rank=0, sink=None, tiers=host)
        except ValueError:
            continue
        return host
    return None


def next_seed() -> int:
    """Return the seed of the next server."""
    return next(_seeds)


class ProcessJudge(ProcessSubject):
    """The means of the tests of a `ProcessContract`."""

    @contextmanager
    def _world(
        self, _kvmock_servers: Callable[..., KvServer], *, spare: int = 0, starts: bool = True, **options: Any
    ) -> Iterator[ProcessWorld]:
        """Yield engines with the process in front of them; at the end nothing may be open."""
        __tracebackhide__ = True
        server = _kvmock_servers(ports=self.ports, http=self.http, seed=next(_seeds), timestamp=time, **options)
        with self._before(server, spare=spare, starts=starts) as world:
            yield world

    @contextmanager
    def _listening(self, _kvmock_servers: Callable[..., KvServer]) -> Iterator[ProcessWorld]:
        """Make the `_world` of a process that receives events."""
        __tracebackhide__ = True
        self._needs_events()
        with self._world(_kvmock_servers) as world:
            yield world

    @contextmanager
    def _special(
        self,
        kv_dialect: str,
        *,
        model: str = "mock-model",
        num_blocks: int = 4096,
        spec: BackendSpec | None = None,
        dcp: int = 1,
        workers: int = 2,
        stores: Mapping[str, Any] | None = None,
        **profile: Any,
    ) -> Iterator[ProcessWorld]:
        """Make the `_world` of engines with a backend, ranks, or tiers that not every dialect has."""
        __tracebackhide__ = True
        dialect = find_dialect(kv_dialect)
        spec = spec or served_by(dialect, model)
        if dcp > 1:
            spec = spec.variant(f"{spec.name}_dcp{dcp}", dcp=dcp)
        with ExitStack() as stack:
            sizes, problem = EngineProfile(workers=workers, num_blocks=num_blocks, **profile), ""
            try:
                harness = stack.enter_context(RouterHarness(sizes, spec, roles=self.roles(), stores=stores))
            except ValueError as error:
                if self.hand_over is None:
                    raise
                problem = str(error)
            if problem:
                self.skip(f"hand_over is set: {problem}", "it", "a class of its own, without hand_over,")
            options: dict[str, Any] = {"http": self.http, "seed": next(_seeds), "timestamp": time}
            server = stack.enter_context(KvServer(harness, dialect, **options))
            yield stack.enter_context(self._before(server))

    @contextmanager
    def _before(self, server: KvServer, *, spare: int = 0, starts: bool = True) -> Iterator[ProcessWorld]:
        __tracebackhide__ = True
        if self.hears_events and server.dialect.replay is None:
            self.skip(
                f"{server.dialect.name} is polled, and not heard", "it", "hears_events = False, of all but events,"
            )
        world = ProcessWorld(self, server, spare)
        try:
            if starts:
                world.start()
            yield world
            world.judge_nothing_open()
        finally:
            world.close()

    def _needs_events(self) -> None:
        __tracebackhide__ = True
        if not self.hears_events:
            self.skip("hears_events is False", "what it knows by events", "hears_events = True")

    def _needs_blocks(self, what: str) -> None:
        __tracebackhide__ = True
        if not self.tells_blocks():
            self.skip("it has no blocks(prompt)", what, "blocks(prompt) -> {worker: blocks}")

    def _needs_a_start(self, what: str) -> None:
        __tracebackhide__ = True
        if not self.is_started:
            self.skip("url is set", what, "command(engines), which starts it,")

    def _sends_ids(self, world: ProcessWorld) -> bool:
        """Whether prompts may be sent as token ids: `takes_token_ids` allows it, and clients send completions."""
        return self.takes_token_ids and "prompt" in self.completion(world.text())[1]

    def _needs_open(self, what: str) -> None:
        __tracebackhide__ = True
        if not self.counts_open:
            self.skip("counts_open is False", what, "counts_open = True")
        if not self.goes_by_prefix:
            self.skip("goes_by_prefix is False", what, "goes_by_prefix = True")
        if self.packs:
            self.skip("packs is True", what, "packs = False")

    def _known_at(self, world: ProcessWorld, prompt: str) -> int:
        """Send a prompt to an idle fleet, wait until the process knows which worker holds it, and return this
        worker.
        """
        __tracebackhide__ = True
        worker = world.picked("a prompt that no worker holds", prompt)
        if self.hears_events:
            world.judge(f"worker {worker} has served a prompt", prompt)
        return worker

    def _faulted(self, world: ProcessWorld, keys: Mapping[str, Any] = {}) -> list[int]:
        """Return the workers whose batches get a fault: both if the process does not report its blocks, as one pick may
        be right by chance.
        """
        return [1] if self.tells_blocks(keys) else world.workers

    def _heard_from(self, world: ProcessWorld, worker: int) -> str:
        """Let a worker serve a prompt, and return it. If the process reports its blocks, it has finished its first
        replay by then.
        """
        __tracebackhide__ = True
        prompt = world.text(8)
        world.direct(worker, prompt)
        if self.tells_blocks({}):
            world.judge_blocks(f"before anything happens to the events of worker {worker}", prompt)
        return prompt

    def _strike(self, world: ProcessWorld, fault: str, where: str) -> None:
        """Inject a fault into a batch of a worker, and check that the prompts before, in and after the batch are
        known.
        """
        __tracebackhide__ = True
        for worker in self._faulted(world):
            changed, after = world.text(8), world.text(8)
            before = self._heard_from(world, worker)
            world.server.fault(worker, fault)
            world.direct(worker, changed)
            world.direct(worker, after)
            for what, prompt in (
                (", of what came after it", after),
                ("", changed),
                (", of what came before it", before),
            ):
                world.judge(f"{where.format(worker)}{what}", prompt)

    def _forget(self, world: ProcessWorld, where: str, happens: Callable[[], object], prompt: str = "") -> None:
        """Let worker 1 lose its blocks, and check what the process knows of them."""
        __tracebackhide__ = True
        prompt, after = prompt or world.text(8), world.text(8)
        world.direct(1, world.text())
        world.direct(1, prompt)
        world.judge(f"before {where}", prompt)
        world.server.reset(0)  # the check before may have been served by worker 0
        happens()
        world.direct(0, prompt[: len(prompt) // 2])
        world.direct(1, after)
        world.judge(f"{where}, of what it has served since", after)
        world.judge(f"{where}, of what it held before", prompt)

    def _next_of(self, world: ProcessWorld, prompt: str) -> str:
        """Return a prompt that begins with a known one.

        Its further blocks add load, in any unit of load.
        """
        # A router that only follows prefixes may also prefer the worker that was sent the fewest; the sent ones then
        # count for ever, on purpose.
        return prompt if self.follows_prefix else prompt + world.text(2)

    def _still_used(self, world: ProcessWorld, where: str, worker: int) -> None:
        """Fail unless a worker gets some prompts that no worker holds."""
        __tracebackhide__ = True
        picks = Counter(world.picked(where, world.text(2)) for _ in range(FRESH))
        if not picks[worker]:
            world.fail(
                f"{where}: of {FRESH} prompts that no worker holds it got none; expected some: finished requests still "
                "count as load, or follows_prefix = True says that it goes by how much a worker was sent"
            )

    def _each_got_some(self, world: ProcessWorld, where: str, picks: Counter[int]) -> None:
        __tracebackhide__ = True
        shown = ", ".join(f"worker {each}: {picks[each]}" for each in world.workers)
        for worker in world.workers:
            if not picks[worker]:
                world.fail(f"{where}: worker {worker} got none of {picks.total()} ({shown}); expected some")

    def _refused_by_all(self, world: ProcessWorld, status: int, headers: Mapping[str, str] = {}) -> None:
        """Let all engines answer with an error, and check what the client gets."""
        __tracebackhide__ = True
        for worker in world.workers:
            world.server.answer(worker, status, headers, times=None)
        prompt = world.text()
        expected = world.begin_direct(0, prompt).finish()
        for stream in (False, True):
            reply, asked = world.send(prompt, stream=stream)
            where = f"engines answer {status}{' to a stream' if stream else ''}"
            self._judge_status(world, where, reply, asked)
            if reply.status == 200:
                continue
            for name, value in headers.items():
                if (found := reply.headers.get(name.lower())) != value:
                    world.fail(f"{where} with {name}: {value}, and the client got {found!r}")
            if reply.body != expected.body:
                world.fail(
                    f"{where}, and the client got {reply.body[:200]!r}; expected what they say: {expected.body[:200]!r}"
                )
            if status >= 500:
                world.cool()
        for worker in world.workers:
            world.server.start(worker)

    def _judge_status(
        self,
        world: ProcessWorld,
        where: str,
        reply: Reply,
        asked: Sequence[ServedRequest],
        *,
        may_break: bool = False,
    ) -> None:
        """Fail unless a client got the answer of the engine that was asked last.

        Args:
            world: the world of the test.
            where: what has happened, for the message.
            reply: the client's answer.
            asked: the engines' records of the request.
            may_break: whether the process may ask no engine after errors of all (a circuit breaker), if it answers with
                a status from 500 on.
        """
        __tracebackhide__ = True
        if not asked and may_break and reply.status is not None and reply.status >= 500:
            return
        if not asked:
            world.fail(f"{where}: no engine was asked, and the client got {reply.text}")
        status = asked[-1].status
        if self.falls_back and reply.status == 200 and (status is None or status >= 500):
            return  # the decode engine has computed the prompt
        if status is not None and reply.status != status:
            world.fail(
                f"{where}: the engine that was asked last answered {status}, and the client got {reply.text}; "
                f"expected {status}"
            )
        if status is None and reply.status is not None and reply.status < 500:
            world.fail(f"{where}: no engine answered, and the client got {reply.text}; expected an error, or no answer")

    def _judge_refused(self, world: ProcessWorld, where: str, reply: Reply, asked: Sequence[ServedRequest]) -> None:
        """Fail unless a running engine served the request, or a process without retries returned an error."""
        __tracebackhide__ = True
        if reply.status == 200 and asked and asked[-1].status == 200:
            return
        told = reply.status is not None and reply.status >= 500
        if self.retries or not told:
            expected = "200, from the other one" if self.retries else "200, or an error from 500 on"
            world.fail(f"{where}: the client got {reply.text}; expected {expected}")
