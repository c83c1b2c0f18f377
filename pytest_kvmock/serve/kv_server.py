"""Mock engines behind sockets: requests over HTTP, KV events over ZMQ, for a router process in any language.

One subject: the workers of a harness, each behind its ports, and what a test asks of them. Theory of operation. A thread of its own runs
one event loop; in it each rank runs passes (`engine_loop`), and each worker listens (`worker_port`). This is the only room with a wall
clock. The harness stays the test's own: ledger, verdict, captures and faults work as they do without sockets.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from random import Random
from string import Formatter
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, cast

from pytest_kvmock.checks import check_integer, check_number, install_text, is_utf8, unknown_text
from pytest_kvmock.long_runs import begin_serving, end_serving
from pytest_kvmock.serve.controls import Controls
from pytest_kvmock.serve.loop_thread import LoopThread
from pytest_kvmock.serve.network import LOOPBACK, Guard, Network, check_secret
from pytest_kvmock.serve.request_log import RequestLog, Routing, ServedRequest
from pytest_kvmock.serve.text import LETTERS
from pytest_kvmock.serve.truth import RouterChecks, Truth, all_removed
from pytest_kvmock.tokens import Prompt
from pytest_kvmock.wire import Dialect, find_dialect
from pytest_kvmock.wire.digests import StreamDigests

try:
    from pytest_kvmock.serve.api import MOST_TOKENS, Call, Model, release_of
    from pytest_kvmock.serve.control import ControlPort
    from pytest_kvmock.serve.engine_loop import EngineLoop
    from pytest_kvmock.serve.listening import check_descriptors
    from pytest_kvmock.serve.polled_events import PolledEvents
    from pytest_kvmock.serve.worker_port import WorkerPort
    from pytest_kvmock.wire.zmq import KvPublisher
except ImportError as error:  # pragma: no cover - the environment without the extra
    raise ImportError(f"a KvServer needs aiohttp, msgspec and pyzmq ({error}): {install_text('serve')}") from None

if TYPE_CHECKING:
    from pytest_kvmock.harness import RouterHarness
    from pytest_kvmock.harness.engines import HarnessEngine

MODEL: Final = "mock-model"

PORTS: Final = ("http", "events", "replay", "control")
"""What a server listens to, each by its port."""

TOKEN_BYTES: Final = 32
"""Random bytes of a token that is made."""

_IN_TOPICS: Final = ("host", "port", "model")

_FORGET_EVERY: Final = 256
"""How many requests come, at least, before what is remembered no more is dropped: that costs a look at all that is held."""


class KvServer(Controls, RouterChecks):
    """The workers of a harness behind sockets. It is a context manager; while it serves, it alone drives the engines.

    Each worker has an HTTP port with the API of the dialect's engine, and each of its ranks an endpoint for KV events and one for replays.
    One batch of events is one forward pass, and it is on the wire before the first token of it.

    Args:
        harness: whose workers; its backend must be one of the dialect's engine.
        dialect: what is spoken: it chooses API, names of metrics and the form of events.
        model: the name of the model.
        adapters: names of LoRA adapters, which are models to a client.
        max_model_len: the most tokens that prompt and output have together, at most what the blocks hold; None: that.
        max_queued: how many requests of a worker wait at most, before it answers that it is busy; None: any number.
        publish_every: of SGLang with tiers: after how many decode steps events are sent, as of `MockEngineArgs`;
            None: after each.
        time_scale: how long a pass takes by the wall, as a share of its virtual time; 0: none. (Measured: within 1 % at 1.0, some
            10 % off at 0.1, meaningless at 0.01.)
        host: the address that engines, events, replays and the control API are bound to; "0.0.0.0" is every address of this machine.
        advertise_host: the name by which others come there: that of URLs, topics and endpoints; None: the address itself.
        token: what clients of the control API must show, as `Authorization: Bearer TOKEN`; None: beyond the loopback one is made.
        allowed_hosts: names that a client of the control API may have as Host, beside the address, `advertise_host` and localhost.
        api_key: what clients of engines must show, as they do with the engine's own option; None: nothing.
        ports: where it listens, by name; 0: the system picks. "http" is the port of the first worker, and those after it have the next
            ones; "events" and "replay" likewise, with a port a rank; "control" is that of the control API, which is there where it is named.
        topic: of events; `{host}` (as advertised), `{port}` (of HTTP) and `{model}` are filled in: "kv@{host}:{port}@{model}".
        log: how many requests are remembered; None: all. With a number memory stays flat: of what came before, the verdict is kept, but
            its story and its reproduction are not (`RouterHarness.forget_history`).
        keep_bodies: whether the body of each request is remembered with it (`ServedRequest.body`).
        timestamp: returns the timestamp of a batch, in seconds, as `KvPublisher` takes it; None: how many there were before.
        seed: of what is generated.
        make_publisher: makes the publisher of a worker, given its id and the options of `KvPublisher`; None: as here.

    Raises:
        ValueError: a dialect without an engine, no address or name, a number out of range, or a harness of another engine.
        EndpointError: an address that this machine has not, a port that is taken, or more workers than the process has descriptors for; nothing is left open.
        ImportError: aiohttp, msgspec or pyzmq is not installed (extra `serve`).

    Attributes:
        harness: as above.
        dialect: as above.
        model: the name of the model.
        token: as above, or the one that was made; None: the control API asks for none.
        log: the requests.
        truth: what the engines hold, and what `check` found to differ.
    """

    def __init__(
        self,
        harness: RouterHarness,
        dialect: str | Dialect = "vllm-0.33",
        *,
        model: str = MODEL,
        adapters: Sequence[str] = (),
        max_model_len: int | None = None,
        max_queued: int | None = None,
        publish_every: int | None = None,
        time_scale: float = 0.0,
        host: str = LOOPBACK,
        advertise_host: str | None = None,
        token: str | None = None,
        allowed_hosts: Sequence[str] = (),
        api_key: str | None = None,
        ports: Mapping[str, int] = MappingProxyType({}),
        topic: str = "",
        log: int | None = None,
        keep_bodies: bool = False,
        timestamp: Callable[[], float] | None = None,
        seed: int = 0,
        make_publisher: Callable[..., KvPublisher] | None = None,
    ) -> None:
        self.dialect = find_dialect(dialect)
        release = release_of(self.dialect.models, self.dialect.backend, sends=self.dialect.replay is not None)
        if release is None or (self.dialect.replay is None and not release.is_polled):
            raise ValueError(
                f"KvServer: dialect {self.dialect.name!r} has no engine that serves HTTP; those of vLLM, SGLang and TensorRT-LLM "
                "have"
            )
        for name in ports:
            if name not in PORTS:
                raise ValueError(f"KvServer: {unknown_text('ports', name, PORTS)}")
        http_port, event_port, replay_port = (ports.get(name, 0) for name in PORTS[:3])
        control_port = ports.get("control")
        network = Network.of(host, advertise_host)
        self._makes_token = token is None and not network.is_loopback and control_port is not None
        if self._makes_token:
            token = secrets.token_urlsafe(TOKEN_BYTES)
        self.token = token
        guard = Guard(network, token, allowed_hosts)
        if api_key is not None:
            check_secret("api_key", api_key)
        check_number("KvServer: time_scale", time_scale)
        for name, value, least in (
            ("max_model_len", max_model_len, 2),
            ("max_queued", max_queued, 1),
            ("publish_every", publish_every, 1),
            ("log", log, 1),
        ):
            if value is not None:
                check_integer(f"KvServer: {name}", value, least)
        _check_models(model, adapters)
        _check_topic(topic)
        self.harness = harness
        self.model = model
        self.log = RequestLog(log)
        self._keeps_bodies = keep_bodies
        self._fields: dict[str, Any] = {} if publish_every is None else {"publish_every": publish_every}
        self._forget_every = max(_FORGET_EVERY, log or 0)
        self._open_changed = asyncio.Event()
        self._seed = seed
        self._texts = Random(f"{seed}:texts")  # noqa: S311 - mock data
        self.truth = Truth(harness)
        self._closed = False
        self._ports: dict[int, WorkerPort] = {}
        self._control: ControlPort | None = None
        profile = harness.profile
        ids = sorted({worker.worker_id for worker in harness.workers.values()})
        if not ids:
            raise ValueError("KvServer: the harness has no workers; its profile says how many there are")
        ranks = profile.dp_size
        for name, base, count in (
            ("http", http_port, len(ids)),
            ("events", event_port, len(ids) * ranks),
            ("replay", replay_port, len(ids) * ranks),
            ("control", control_port or 0, 1),
        ):
            if check_integer(f"KvServer: ports[{name!r}]", base, 0) > 2**16 - count:
                room_text = f"leave room for {count} ports, " if count > 1 else "be "
                raise ValueError(f"KvServer: ports[{name!r}] must {room_text}at most {2**16 - count}, got {base}")
        check_descriptors(len(ids), ranks)
        room = profile.num_blocks * profile.block_size
        if release.is_sglang:  # a request must leave room there, and its prompt counts as whole pages
            room -= profile.block_size
        if max_model_len is not None and max_model_len > room:
            beside = " beside one page" if release.is_sglang else ""
            raise ValueError(
                f"KvServer: max_model_len must be at most {room}, what {profile.num_blocks} blocks of {profile.block_size} tokens "
                f"hold{beside}, got {max_model_len}"
            )
        self._described = Model(
            model,
            release,
            int(profile.block_size),  # one that was not given is a number of its own kind
            room if max_model_len is None else max_model_len,
            tuple(adapters),
            ranks,
            int(time.time()),
            api_key,
        )
        if profile.tiers is not None:
            self.dialect.check_host(self_describing=profile.tiers.self_describing)
        make = self._publisher if make_publisher is None or release.is_polled else make_publisher
        with ExitStack() as undo:
            self._thread = LoopThread("KvServer")
            undo.callback(self._thread.end)
            for place, worker in enumerate(ids):
                listening = network.bound_socket(http_port and http_port + place)
                undo.callback(listening.close)
                port = listening.getsockname()[1]
                publisher = make(
                    worker,
                    topic=topic.format(host=network.advertised, port=port, model=model) if topic else "",
                    endpoint=network.bound_endpoint(event_port and event_port + place * ranks),
                    replay=network.bound_endpoint(replay_port and replay_port + place * ranks),
                    loopback=network.is_loopback,
                    timestamp=timestamp,
                )
                undo.callback(publisher.close)
                undo.callback(harness.publisher.remove_sink, publisher)
                engines = [self._engine(worker, rank, harness) for rank in range(ranks)]
                loops = [
                    EngineLoop(
                        harness, engine, publisher, time_scale=time_scale, seed=seed, open_changed=self._open_changed
                    )
                    for engine in engines
                ]
                self._ports[worker] = WorkerPort(
                    worker,
                    self._described,
                    loops,
                    publisher,
                    listening,
                    network=network,
                    note=self._note,
                    max_queued=max_queued,
                    seed=seed + place,
                )
            self._number_batches()
            if control_port is not None:
                self._control = ControlPort(self, network.bound_socket(control_port), network, guard)
                undo.callback(self._control.close)
            begin_serving(self)
            undo.callback(end_serving, self)
            self._thread.start()
            self._thread.call(self._start())
            undo.pop_all()

    def __repr__(self) -> str:
        shown = ", ".join(port.url for port in self._ports.values())
        return f"<KvServer {self.dialect.name} at {shown}>"

    def _engine(self, worker: int, rank: int, harness: RouterHarness) -> HarnessEngine:
        engine = cast("HarnessEngine", harness.engine(worker, rank, **self._fields))
        wanted = self._described.release.engine
        if engine.args.engine_type != wanted:
            raise ValueError(
                f"KvServer: dialect {self.dialect.name!r} is spoken by engines of type {wanted!r}, worker {worker} is one of "
                f"type {engine.args.engine_type!r} over {engine.worker.backend!r}"
            )
        if engine.worker.traits.publishes_groups and not self._described.release.is_trtllm:
            self.dialect.check_groups()
        if engine.driver is not None:
            raise ValueError(f"KvServer: {engine!r} is driven by {engine.driver} already")
        return engine

    def _publisher(self, worker: int, **options: Any) -> KvPublisher:
        ranks = self.harness.profile.dp_size
        if self._described.release.is_polled:
            most = getattr(self.harness.worker(worker).manager, "event_buffer", None)
            publisher = cast("KvPublisher", PolledEvents(self.dialect, ranks=ranks, most=most))
            for entry in self.harness.events:  # nobody has asked for these yet
                if entry.event.worker_id == worker:
                    publisher.publish(entry.event)
        else:
            publisher = KvPublisher(self.dialect, ranks=ranks, digests=self._digests(worker), **options)
        self.harness.add_sink(publisher, worker_id=worker)
        return publisher

    def _digests(self, worker: int) -> dict[int, StreamDigests]:
        if self.dialect.hashes != "bytes":
            return {}
        ranks = range(self.harness.profile.dp_size)
        return {rank: StreamDigests.of_manager(self.harness.worker(worker, rank).manager) for rank in ranks}

    # ------------------------------------------------------------------------------------------------- the thread

    async def _start(self) -> None:
        for port in self._ports.values():
            for loop in port.loops:
                loop.start()
            await port.start()
        if self._control is not None:
            await self._control.start()

    async def _stop(self) -> None:
        if self._control is not None:
            await self._control.stop()
        for port in self._ports.values():
            port.cut_off("the server ends")
            await port.stop()
            for loop in port.loops:
                await loop.stop()

    def close(self) -> None:
        """Abort what is open, close all sockets, and end the thread. Twice is no error."""
        if self._closed:
            return
        self._closed = True
        self._thread.call(self._stop())
        self._thread.end()
        end_serving(self)
        for port in self._ports.values():
            self.harness.publisher.remove_sink(port.publisher)
            port.publisher.close()

    def halt(self) -> None:
        """Run no further pass, and close what others see, at once; engines and threads stay as they are: for a process that ends now."""

        async def cut() -> None:
            for port in self._ports.values():
                for loop in port.loops:
                    loop.halt()
                port.cut()

        self._thread.call(cut())
        for port in self._ports.values():
            port.publisher.close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------------- the ports

    @property
    def workers(self) -> list[int]:
        """The ids of the workers."""
        return list(self._ports)

    @property
    def urls(self) -> list[str]:
        """Where each worker listens: http://HOST:PORT, as others are given it."""
        return [port.url for port in self._ports.values()]

    @property
    def control_url(self) -> str | None:
        """Where the control API listens; None: nowhere."""
        return None if self._control is None else self._control.url

    def url(self, worker: int = 0) -> str:
        """Where a worker listens.

        Raises:
            ValueError: there is no such worker.
        """
        return self._port(worker).url

    def publisher(self, worker: int = 0) -> KvPublisher:
        """The publisher of a worker: its endpoints, its faults, who subscribed; of one that is polled, a `PolledEvents`.

        Raises:
            ValueError: there is no such worker.
        """
        return self._port(worker).publisher

    def ready_line(self) -> dict[str, Any]:
        """Return what the command prints when it is ready: the addresses of all, as others are given them, and what is served."""
        model = self._described
        return {
            "kvmock_serve": 1,
            "dialect": self.dialect.name,
            "model": model.name,
            "backend": self.harness.backend,
            "block_size": model.block_size,
            "num_blocks": self.harness.profile.num_blocks,
            "max_model_len": model.max_model_len,
            "tokenizer": "bytes",
            "control": self.control_url,
            "token": self.token if self._makes_token else None,
            "workers": [
                {
                    "id": worker,
                    "http": port.url,
                    "events": port.endpoints,
                    "replay": port.replay_endpoints,
                    "topic": port.publisher.topic,
                }
                for worker, port in self._ports.items()
            ],
        }

    def _number_batches(self) -> None:
        self.truth.numbered_by(
            {
                (worker, rank): port.publisher
                for worker, port in self._ports.items()
                for rank in range(port.publisher.ranks)
            }
        )

    # ------------------------------------------------------------------------------------------------ what came in

    def _note(self, worker: int, rank: int, call: Call, prompt: Prompt) -> ServedRequest:
        """Note a prompt that came in, and what every worker holds of it."""
        size = self._described.block_size
        row = ServedRequest(
            self.log.total,
            worker,
            rank,
            call.path,
            call.headers,
            prompt.length(size),
            prompt.length(size) // size,
            self.held(prompt),
            body=call.body if self._keeps_bodies else b"",
        )
        self.log.add(row)
        if self.log.forgotten and self.log.total % self._forget_every == 0:
            self._forget()
        return row

    def _forget(self) -> None:
        """Drop what happened before the requests that are remembered, so that memory does not grow for ever."""
        self.harness.forget_history(events=len(self.log.rows))
        for port in self._ports.values():
            for loop in port.loops:
                with self.harness.publisher.lock:
                    loop.engine.requests = [each for each in loop.engine.requests if each.is_open]

    @property
    def requests(self) -> list[ServedRequest]:
        """The requests that are remembered, in the order in which they came."""
        return list(self.log.rows)

    @property
    def routing(self) -> Routing:
        """What the routing of these was worth: hit ratio, share of the best held, balance, and assertions."""
        return Routing(self.log.rows, self._ports, self._described.block_size)

    def text(self, blocks: int = 4, after: str = "") -> str:
        """Return a text of so many blocks that no other text of this server begins with, after another one.

        Raises:
            ValueError: `blocks` is no integer of at least 0, or so many that the text would have more than 2^22 tokens.
            TypeError: `after` is no text.
        """
        check_integer("text: blocks", blocks, 0)
        if not isinstance(after, str):
            raise TypeError(f"text: after must be a text, got {after!r:.80}")
        most = MOST_TOKENS // self._described.block_size
        if blocks > most:
            raise ValueError(f"text: blocks must be at most {most}, got {blocks}")
        fresh = (self._texts.choice(LETTERS) for _ in range(blocks * self._described.block_size))
        return after + "".join(fresh)

    @property
    def broken(self) -> list[str]:
        """What is broken: of each such worker and rank why, by what its engine raised. A test of `kv_server` fails by it."""
        return [
            f"worker {worker} rank {rank} is broken: {loop.error}"
            for worker, port in self._ports.items()
            for rank, loop in enumerate(port.loops)
            if loop.error is not None
        ]

    # ------------------------------------------------------------------------------------- a router that lives longer

    def use(self, harness: RouterHarness) -> None:
        """Put the engines of another harness behind the same sockets, for a router that lives longer than a test.

        Open requests are aborted. Then one batch of Removed a rank goes on the wire, children first and each copy, for what the last
        engines held; it is in no ledger. Numbers of batches go on.

        Raises:
            ValueError: it has other workers, ranks or sizes.
        """
        self._check_open()
        old = self.harness
        fields = ("block_size", "num_blocks", "dp_size")
        differ = [name for name in fields if getattr(old.profile, name) != getattr(harness.profile, name)]
        ids = sorted({worker.worker_id for worker in harness.workers.values()})
        if differ or ids != list(self._ports):
            raise ValueError(
                f"KvServer.use: workers {list(self._ports)} and {', '.join(fields)} must be those of before, got workers {ids} and "
                f"{', '.join(f'{name}={getattr(harness.profile, name)}' for name in fields)}"
            )
        engines = {
            (worker, rank): self._engine(worker, rank, harness)
            for worker in ids
            for rank in range(self._described.ranks)
        }

        async def exchange() -> None:
            for port in self._ports.values():
                port.cut_off("the test ended")
                # What the engines publish as they are let go, of a pass that is under way too, is on the wire like all before: what is
                # taken back then is what subscribers hold.
                with port.publisher.step(), old.publisher.lock:
                    for loop in port.loops:
                        loop.let_go()
                    old.publisher.remove_sink(port.publisher)
                    for rank in range(port.publisher.ranks):
                        for event in all_removed(old, port.worker, rank):
                            port.publisher.publish(event)
            self.harness = harness
            self.log.clear()
            self.truth = Truth(harness)
            self._number_batches()
            for worker, port in self._ports.items():
                port.publisher.use_digests(self._digests(worker))
                for rank, loop in enumerate(port.loops):
                    loop.use(harness, engines[worker, rank])
                harness.add_sink(port.publisher, worker_id=worker)

        self._thread.call(exchange())


def _check_models(model: object, adapters: Sequence[object]) -> None:
    """Raise unless a client can tell the models apart: the model and its adapters."""
    if isinstance(adapters, str):
        raise TypeError(f"KvServer: adapters must be a list of names, got {adapters!r:.80}")
    for what, name in (("model", model), *(("each of adapters", each) for each in adapters)):
        if not isinstance(name, str) or not name or not is_utf8(name):
            raise ValueError(f"KvServer: {what} must be a name, got {name!r:.80}")
    for place, name in enumerate(adapters):
        if name == model:
            raise ValueError(f"KvServer: adapter {name!r:.80} has the name of the model")
        if name in adapters[:place]:
            raise ValueError(f"KvServer: adapter {name!r:.80} is named twice")


def _check_topic(topic: object) -> None:
    """Raise unless names alone are filled into a topic: a format could make it as long as memory."""
    try:
        parts = list(Formatter().parse(topic)) if isinstance(topic, str) else None
    except ValueError:  # a brace alone
        parts = None
    if parts is None or any(
        field is not None and (field not in _IN_TOPICS or form or conversion) for _, field, form, conversion in parts
    ):
        raise ValueError(
            "KvServer: topic must be a text in which {host}, {port} and {model} are filled in, without a format, got "
            f"{topic!r:.80}"
        )
