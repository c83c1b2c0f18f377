"""Mock engines behind sockets: requests over HTTP, KV events over ZMQ, for a router process in any language.

One subject: the workers of a harness behind ports, and their control by a test. Theory of operation. A separate thread
runs one event loop. In it each rank runs passes (`engine_loop`), and each worker listens (`worker_port`). Only this
package uses a wall clock. The harness still belongs to the test: ledger, verdict, captures and faults work as without
sockets.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from random import Random
from string import Formatter
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, cast

from pytest_kvmock.engines.backends import EngineProfile, speaker_of
from pytest_kvmock.engines.base.pair_options import IN_ROOMS
from pytest_kvmock.servers.serve.controls import Controls
from pytest_kvmock.servers.serve.loop_thread import LoopThread
from pytest_kvmock.servers.serve.network import LOOPBACK, Guard, Network, check_ports, check_secret, ranks_of_ports
from pytest_kvmock.servers.serve.request_log import RequestLog, Routing, ServedRequest
from pytest_kvmock.servers.serve.server_inside import ServerInside
from pytest_kvmock.servers.serve.text import LETTERS
from pytest_kvmock.servers.serve.truth import RouterChecks, Truth, all_removed
from pytest_kvmock.values.checks import check_integer, check_number, install_text, is_utf8, unknown_text
from pytest_kvmock.values.dialect import Dialect
from pytest_kvmock.values.long_runs import begin_serving, end_serving
from pytest_kvmock.values.tokens import Prompt
from pytest_kvmock.wire.codec.digests import StreamDigests
from pytest_kvmock.wire.codec.load_stream import load_ports
from pytest_kvmock.wire.codec.table import check_groups, find_dialect

try:
    from pytest_kvmock.servers.serve.api import MOST_TOKENS, Call, Model, release_of
    from pytest_kvmock.servers.serve.control import ControlPort
    from pytest_kvmock.servers.serve.engine_loop import EngineLoop
    from pytest_kvmock.servers.serve.listening import check_descriptors
    from pytest_kvmock.servers.serve.planned import PlannedAnswers
    from pytest_kvmock.servers.serve.polled_events import PolledEvents
    from pytest_kvmock.servers.serve.served_pairs import ServedPairs, pairs_of
    from pytest_kvmock.servers.serve.worker_port import ServedWorker, WorkerPort
    from pytest_kvmock.wire.sockets.kv_publisher import KvPublisher
    from pytest_kvmock.wire.sockets.load_sockets import LoadSender
except ImportError as error:  # pragma: no cover - the environment without the extra
    raise ImportError(f"a KvServer needs aiohttp, msgspec and pyzmq ({error}): {install_text('serve')}") from None

if TYPE_CHECKING:
    from pytest_kvmock.harness import RouterHarness
    from pytest_kvmock.harness.engines import HarnessEngine
    from pytest_kvmock.harness.roles import Role
    from pytest_kvmock.wire.sockets.master_sockets import MasterPublisher

MODEL: Final = "mock-model"

PORTS: Final = ("http", "events", "replay", "control", "loads", "master")
"""The keys of `ports`."""

NETWORK: Final = ("host", "advertise_host", "token", "allowed_hosts")
"""The keys of `network`."""

TOKEN_BYTES: Final = 32
"""Number of random bytes of a generated token."""

_IN_TOPICS: Final = ("host", "port", "model")

_TURN_S: Final = 0.05
"""Seconds between two turns of an idle loop of SGLang in this mock; in SGLang a stuck loop turns at this rate."""

_FORGET_EVERY: Final = 256
"""Minimum number of requests between two drops of old history, as each drop scans all held blocks."""


class KvServer(Controls, RouterChecks):
    """The workers of a harness behind sockets. It is a context manager; while it serves, only it drives the engines.

    Each worker has an HTTP port with the API of the dialect's engine; each rank has an endpoint for KV events and one
    for replays. One batch of events is one forward pass, and it is on the wire before the pass's first token.

    Args:
        harness: the harness with the workers; its backend must be one of the dialect's engine. None: the server makes
            one from `roles` or `stores`.
        dialect: the dialect, which sets API, names of metrics and the form of events.
        roles: the workers of each role in P/D pairs, such as `{"prefill": 2, "decode": 2}`, as for `RouterHarness`;
            only without `harness`.
        stores: the stores that workers share, as for `RouterHarness`; only without `harness`.
        model: the name of the model.
        adapters: names of LoRA adapters, which clients use as models.
        max_model_len: maximum number of tokens of prompt and output together, at most what the blocks hold (the
            default).
        max_queued: maximum number of waiting requests of a worker; beyond it the worker answers that it is busy. None:
            no limit.
        time_scale: the time of a pass on the wall clock, as a share of its virtual time; 0: none. (Measured: within 1 %
            at 1.0, about 10 % off at 0.1, meaningless at 0.01.)
        network: how others reach the server, by key. "host": the address that engines, events, replays and the control
            API are bound to (default: "127.0.0.1"; "0.0.0.0": every address of this machine). "advertise_host": the
            name or address in URLs, topics and endpoints (default: the address itself). "token": the token that clients
            of the control API must send as `Authorization: Bearer TOKEN` (beyond the loopback one is generated).
            "allowed_hosts": a list of further names that such a client may send as Host.
        api_key: the key that clients of engines must send, like the engine's own option; None: no key.
        ports: the ports, by key; 0: the system picks one. "http": the port of the first worker; further workers have
            the next ports. "events" and "replay": the same, with one port per rank. Three ports exist only if they are
            named: "control", the control API; "loads", SGLang's load stream, with one port per rank; "master", the
            stream of the master of a store of kind "hicache".
        http: how ranks share HTTP ports, one of `HTTP_FORMS`: "worker", one port for all ranks of a worker; "rank", one
            port per rank; "node", two ports per worker, with ranks numbered from 0 behind each. Events and metrics
            always have the number of the rank in the worker.
        topic: the topic of events, such as "kv@{host}:{port}@{model}"; `{host}` (as advertised), `{port}` (the first
            HTTP port) and `{model}` are filled in.
        log: number of requests that are kept; None: all. With a number, memory use stays constant: the verdict on
            earlier requests is kept, but not their stories, and they cannot be reproduced (`Inside.forget_history`).
        keep_bodies: whether the body of each request is kept (`ServedRequest.body`).
        timestamp: returns the timestamp of a batch, in seconds, as for `KvPublisher`; None: the number of earlier
            batches.
        seed: seed of generated tokens.

    Raises:
        ValueError: a dialect without an engine, an invalid address or name, a number out of range, or a harness of
            another engine.
        EndpointError: an address that this machine does not have, a port that is taken, or more workers than the
            process has descriptors for; nothing is left open.
        ImportError: aiohttp, msgspec or pyzmq is not installed (extra `serve`).

    Attributes:
        harness: the harness with the workers.
        dialect: the dialect.
        model: the name of the model.
        token: the given or generated token; None: the control API needs no token.
        log: the requests.
        truth: the blocks that the engines hold, and the differences that `check` found (`truth.differences`).
        inside: the interface for the control API, the command and the plugin.
    """

    def __init__(
        self,
        harness: RouterHarness | None = None,
        dialect: str | Dialect = "vllm-0.33",
        *,
        roles: Mapping[str, Any] | None = None,
        stores: Mapping[str, Any] | None = None,
        model: str = MODEL,
        adapters: Sequence[str] = (),
        max_model_len: int | None = None,
        max_queued: int | None = None,
        time_scale: float = 0.0,
        network: Mapping[str, Any] = MappingProxyType({}),
        api_key: str | None = None,
        ports: Mapping[str, int] = MappingProxyType({}),
        http: str = "worker",
        topic: str = "",
        log: int | None = None,
        keep_bodies: bool = False,
        timestamp: Callable[[], float] | None = None,
        seed: int = 0,
    ) -> None:
        self.dialect = find_dialect(dialect)
        release = release_of(self.dialect.models, self.dialect.backend, sends=self.dialect.replay is not None)
        if release is None or (self.dialect.replay is None and not release.is_polled):
            raise ValueError(
                f"KvServer: dialect {self.dialect.name!r} has no engine that serves HTTP; those of vLLM, SGLang and "
                "TensorRT-LLM have"
            )
        if roles is not None and stores is not None:
            raise ValueError("KvServer: a store below engines of P/D pairs was not recorded; give roles or stores")
        if (harness is None and roles is None and stores is None) or (harness is not None and roles is not None):
            raise ValueError(
                "KvServer: give a harness, or roles={'prefill': 2, 'decode': 2} or stores={'disk': {'kind': 'files', "
                "'workers': [0, 1]}} for a harness that it makes"
            )
        if harness is None:
            harness = _harness_of(self.dialect, roles, stores)
        elif stores is not None:
            raise ValueError("KvServer: stores are for a harness that it makes; the given harness has its own")
        for name in ports:
            if name not in PORTS:
                raise ValueError(f"KvServer: {unknown_text('ports', name, PORTS)}")
        http_port, event_port, replay_port = (ports.get(name, 0) for name in PORTS[:3])
        control_port, load_port, master_port = (ports.get(name) for name in PORTS[3:])
        if load_port is not None and not release.is_sglang:
            raise ValueError(
                f"KvServer: ports['loads'] is for the load stream of SGLang; dialect {self.dialect.name!r} has none"
            )
        if not isinstance(network, Mapping):
            raise TypeError(f"KvServer: network must be a mapping such as {{'host': '0.0.0.0'}}, got {network!r:.80}")
        for name in network:
            if name not in NETWORK:
                raise ValueError(f"KvServer: {unknown_text('network', name, NETWORK)}")
        at = Network.of(network.get("host", LOOPBACK), network.get("advertise_host"))
        token: str | None = network.get("token")
        makes_token = token is None and not at.is_loopback and control_port is not None
        if makes_token:
            token = secrets.token_urlsafe(TOKEN_BYTES)
        self.token = token
        guard = Guard(at, token, network.get("allowed_hosts", ()))
        if api_key is not None:
            check_secret("api_key", api_key)
        check_number("KvServer: time_scale", time_scale)
        for name, value, least in (
            ("max_model_len", max_model_len, 2),
            ("max_queued", max_queued, 1),
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
        self._forget_every = max(_FORGET_EVERY, log or 0)
        self._seed = seed
        self._texts = Random(f"{seed}:texts")  # noqa: S311 - mock data
        self.truth = Truth(harness)
        self._control: ControlPort | None = None
        self._turning: asyncio.Task[None] | None = None
        profile = harness.profile
        ids = sorted({worker.worker_id for worker in harness.workers.values()})
        if not ids:
            raise ValueError("KvServer: the harness has no workers; its profile says how many there are")
        ranks = profile.dp_size
        has_roles = any(role is not None for role in _roles_in(harness, ids).values())
        if has_roles:
            _check_ranks(harness, ids, ranks)
        behind = ranks_of_ports(http, release, ranks, has_roles=has_roles)
        first_ports = {"http": http_port, "events": event_port, "replay": replay_port, "control": control_port or 0}
        counts = dict.fromkeys(PORTS, len(ids) * ranks) | {"http": len(ids) * len(behind), "control": 1, "master": 1}
        check_ports(first_ports | {"loads": load_port or 0, "master": master_port or 0}, counts)
        check_descriptors(len(ids), ranks, len(behind))
        room = profile.num_blocks * profile.block_size
        if release.is_sglang:  # in SGLang a request must leave room, and its prompt counts as full pages
            room -= profile.block_size
        if max_model_len is not None and max_model_len > room:
            less = " without one page" if release.is_sglang else ""
            raise ValueError(
                f"KvServer: max_model_len must be at most {room}, what {profile.num_blocks} blocks of "
                f"{profile.block_size} tokens hold{less}, got {max_model_len}"
            )
        self._described = Model(
            model,
            release,
            int(profile.block_size),  # the default is a subclass of int
            room if max_model_len is None else max_model_len,
            tuple(adapters),
            ranks,
            int(time.time()),
            api_key,
            _page_of(next(iter(harness.workers.values())).manager),
        )
        if profile.tiers is not None:
            self.dialect.check_host(self_describing=profile.tiers.self_describing)
        of_role = {worker: role for worker, role in _roles_in(harness, ids).items() if role is not None}
        served = {
            "kvmock_serve": 1,
            "dialect": self.dialect.name,
            "model": model,
            "backend": harness.backend,
            "block_size": self._described.block_size,
            "num_blocks": profile.num_blocks,
            "max_model_len": self._described.max_model_len,
            "tokenizer": "bytes",
        }
        if shared := harness.inside.reference.stores:
            served["stores"] = {name: each.to_dict() for name, each in shared.items()}
        make = self._polled if release.is_polled else self._publisher
        with ExitStack() as undo:
            self._master: MasterPublisher | None = None
            if master_port is not None:
                self._master = _master_of(harness, at.bound_endpoint(master_port))
                undo.callback(self._master.close)
                served["master"] = at.endpoint(self._master.endpoint)
            self.inside = ServerInside(LoopThread("KvServer"), served, token if makes_token else None)
            undo.callback(self.inside.thread.end)
            if of_role:
                self.inside.pairs = pairs_of(self.inside.thread, of_role, at, self._described, seed)
                undo.callback(self.inside.pairs.close)
            for place, worker in enumerate(ids):
                listening = []
                for number in range(place * len(behind), (place + 1) * len(behind)):
                    listening.append(at.bound_socket(http_port and http_port + number))
                    undo.callback(listening[-1].close)
                port = listening[0].getsockname()[1]
                publisher = make(
                    worker,
                    topic=topic.format(host=at.advertised, port=port, model=model) if topic else "",
                    endpoint=at.bound_endpoint(event_port and event_port + place * ranks),
                    replay=at.bound_endpoint(replay_port and replay_port + place * ranks),
                    loopback=at.is_loopback,
                    timestamp=timestamp,
                )
                undo.callback(publisher.close)
                undo.callback(harness.publisher.remove_sink, publisher)
                if load_port is not None:
                    publisher.loads = self._load_sender(publisher, at, load_port and load_port + place * ranks)
                engines = [self._engine(worker, rank, harness) for rank in range(ranks)]
                loops = [
                    EngineLoop(
                        harness,
                        engine,
                        publisher,
                        time_scale=time_scale,
                        seed=seed,
                        open_changed=self.inside.open_changed,
                        pairs=self.inside.pairs,
                    )
                    for engine in engines
                ]
                planned = PlannedAnswers()
                self.inside.ports[worker] = ServedWorker(
                    [
                        WorkerPort(
                            worker,
                            self._described_of(worker, own),
                            loops[own.start : own.stop],
                            publisher,
                            listening[number],
                            network=at,
                            note=self._note,
                            planned=planned,
                            max_queued=max_queued,
                            seed=seed + place * len(behind) + number,
                        )
                        for number, own in enumerate(behind)
                    ]
                )
            self._number_batches()
            if control_port is not None:
                self._control = ControlPort(self, at.bound_socket(control_port), at, guard)
                undo.callback(self._control.close)
                self.inside.control_url = self._control.url
            begin_serving(self)
            undo.callback(end_serving, self)
            self.inside.thread.start()
            self.inside.thread.call(self._start())
            undo.pop_all()

    def __repr__(self) -> str:
        shown = ", ".join(port.url for port in self.inside.ports.values())
        return f"<KvServer {self.dialect.name} at {shown}>"

    def _described_of(self, worker: int, ranks: range) -> Model:
        """Return the model of a worker's port with these ranks; a role in a P/D pair may have different sizes."""
        own = self.harness.worker(worker)
        role, described = getattr(own, "role", None), self._described
        if len(ranks) < described.ranks:
            described = replace(described, ranks=len(ranks), first_rank=ranks.start)
        if role is None:
            return described
        size = int(own.manager.block_size)
        room = (own.manager.num_blocks - described.release.is_sglang) * size
        return replace(
            described,
            block_size=size,
            max_model_len=min(described.max_model_len, room),
            role=role.pair.worker_type,
            hand_over=role.pair.hand_over,
        )

    def _engine(self, worker: int, rank: int, harness: RouterHarness) -> HarnessEngine:
        engine = cast("HarnessEngine", harness.engine(worker, dp_rank=rank))
        wanted = self._described.release.engine
        if engine.args.engine_type != wanted:
            raise ValueError(
                f"KvServer: dialect {self.dialect.name!r} is spoken by engines of type {wanted!r}, worker {worker} is "
                f"one of type {engine.args.engine_type!r} over {engine.worker.backend!r}"
            )
        if engine.worker.traits.publishes_groups and not self._described.release.is_trtllm:
            check_groups(self.dialect)
        if engine.driver is not None:
            raise ValueError(f"KvServer: {engine!r} is driven by {engine.driver} already")
        return engine

    def _publisher(self, worker: int, **options: Any) -> KvPublisher:
        """Make the publisher of a worker, with options of `KvPublisher`."""
        ranks = self.harness.profile.dp_size
        publisher = KvPublisher(self.dialect, ranks=ranks, digests=self._digests(worker), **options)
        self.harness.add_sink(publisher, worker_id=worker)
        return publisher

    def _polled(self, worker: int, **_: object) -> KvPublisher:
        """Make the buffer that keeps the events of a worker until they are polled."""
        most = getattr(self.harness.worker(worker).manager, "event_buffer", None)
        publisher = cast("KvPublisher", PolledEvents(self.dialect, ranks=self.harness.profile.dp_size, most=most))
        for entry in self.harness.events:  # published before the buffer existed
            if entry.event.worker_id == worker:
                publisher.publish(entry.event)
        self.harness.add_sink(publisher, worker_id=worker)
        return publisher

    def _load_sender(self, publisher: KvPublisher, network: Network, port: int) -> LoadSender:
        """Return the sender of a worker's loads, at ports other than those of its events.

        Raises:
            ValueError: the ports overlap, which SGLang rejects.
        """
        kv, replay = publisher.endpoint, publisher.replay_endpoint
        if port:
            load_ports(f"tcp://*:{port}", kv_endpoint=kv, replay_endpoint=replay, ranks=publisher.ranks)
        return LoadSender(network.bound_endpoint(port), publisher.ranks)

    def _digests(self, worker: int) -> dict[int, StreamDigests]:
        if self.dialect.hashes != "bytes":
            return {}
        ranks = range(self.harness.profile.dp_size)
        return {rank: StreamDigests.of_manager(self.harness.worker(worker, dp_rank=rank).manager) for rank in ranks}

    # ------------------------------------------------------------------------------------------------- the thread

    async def _turn(self) -> None:
        """Turn the loops of idle engines, without end, so that they publish their loads."""
        while True:
            for port in self.inside.ports.values():
                port.turn()
            await asyncio.sleep(_TURN_S)

    async def _start(self) -> None:
        if self.inside.pairs is not None:
            await self.inside.pairs.start()
        for port in self.inside.ports.values():
            for loop in port.loops:
                loop.start()
            await port.start()
        if self._control is not None:
            await self._control.start()
        if any(port.publisher.loads is not None for port in self.inside.ports.values()):
            self._turning = asyncio.get_running_loop().create_task(self._turn())

    async def _stop(self) -> None:
        if self._turning is not None:
            self._turning.cancel()
        if self._control is not None:
            await self._control.stop()
        for port in self.inside.ports.values():
            port.cut_off("the server ends")
            await port.stop()
            for loop in port.loops:
                await loop.stop()
        if self.inside.pairs is not None:
            await self.inside.pairs.stop()

    def close(self) -> None:
        """Abort open requests, close all sockets, and end the thread. A second call does nothing."""
        if self.inside.closed:
            return
        self.inside.closed = True
        self.inside.thread.call(self._stop())
        self.inside.thread.end()
        end_serving(self)
        for port in self.inside.ports.values():
            self.harness.publisher.remove_sink(port.publisher)
            port.publisher.close()
        if self._master is not None:
            self._master.close()

    def __enter__(self) -> Self:
        self.inside.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------------- the ports

    @property
    def workers(self) -> list[int]:
        """The ids of the workers."""
        return list(self.inside.ports)

    @property
    def urls(self) -> list[str]:
        """The advertised URLs of all workers, one for each port: http://HOST:PORT."""
        return [port.url for worker in self.inside.ports.values() for port in worker.ports]

    @property
    def pairs(self) -> ServedPairs | None:
        """The transfers, leases and rooms of engines with roles; None if they are in no P/D pairs."""
        return self.inside.pairs

    @property
    def control_url(self) -> str | None:
        """The URL of the control API; None if there is none."""
        return self.inside.control_url

    def url(self, worker: int = 0, rank: int = 0) -> str:
        """Return the URL of a worker's port that serves a rank.

        Raises:
            ValueError: an unknown worker or rank.
        """
        return self.inside.port(worker).port_of(rank).url

    def publisher(self, worker: int = 0) -> KvPublisher:
        """Return the publisher of a worker, with its endpoints, faults and subscribers; for polled events, a
        `PolledEvents`.

        Raises:
            ValueError: an unknown worker.
        """
        return self.inside.port(worker).publisher

    def _number_batches(self) -> None:
        self.truth.numbered_by(
            {
                (worker, rank): port.publisher
                for worker, port in self.inside.ports.items()
                for rank in range(port.publisher.ranks)
            }
        )

    # ------------------------------------------------------------------------------------------------ what came in

    def _note(self, worker: int, rank: int, call: Call, prompt: Prompt) -> ServedRequest:
        """Record an incoming prompt, and how much of it each worker holds."""
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
        """Drop the history before the kept requests, so that memory use does not grow."""
        self.harness.inside.forget_history(events=len(self.log.rows))
        for port in self.inside.ports.values():
            for loop in port.loops:
                with self.harness.publisher.lock:
                    loop.engine.inside.requests = [each for each in loop.engine.requests if each.is_open]

    @property
    def requests(self) -> list[ServedRequest]:
        """The kept requests, in order of arrival."""
        return list(self.log.rows)

    @property
    def routing(self) -> Routing:
        """The quality of the routing of the kept requests: hit ratio, share of the best held, balance, assertions."""
        return Routing(self.log.rows, self.inside.ports, self._described.block_size)

    def text(self, blocks: int = 4, after: str = "") -> str:
        """Return the text `after`, followed by `blocks` blocks of random text that no other text of this server has.

        Raises:
            ValueError: `blocks` is no integer of at least 0, or the text would have more than 2^22 tokens.
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

    # ------------------------------------------------------------------------------------- a router that lives longer

    def use(self, harness: RouterHarness) -> None:
        """Put the engines of another harness behind the same sockets, for a router that lives longer than a test.

        Open requests are aborted. Then each rank sends one batch of Removed, children first and every copy, for the
        blocks that the previous engines held; no ledger gets it. Batch numbers continue.

        Raises:
            ValueError: the harness has other workers, ranks, sizes or roles.
        """
        self.inside.check_open()
        old = self.harness
        fields = ("block_size", "num_blocks", "dp_size")
        differ = [name for name in fields if getattr(old.profile, name) != getattr(harness.profile, name)]
        ids = sorted({worker.worker_id for worker in harness.workers.values()})
        if differ == [] and ids == list(self.inside.ports) and _roles_in(old, ids) != _roles_in(harness, ids):
            raise ValueError("KvServer.use: workers must have the roles of before")
        if differ or ids != list(self.inside.ports):
            raise ValueError(
                f"KvServer.use: workers {list(self.inside.ports)} and {', '.join(fields)} must be those of before, got "
                f"workers {ids} and {', '.join(f'{name}={getattr(harness.profile, name)}' for name in fields)}"
            )
        engines = {
            (worker, rank): self._engine(worker, rank, harness)
            for worker in ids
            for rank in range(self._described.ranks)
        }

        async def exchange() -> None:
            for port in self.inside.ports.values():
                port.cut_off("the test ended")
                # Events that the engines publish while they close, also those of a pass under way, are still sent. So
                # the Removed that follow match the blocks that subscribers hold.
                with port.publisher.step(), old.publisher.lock:
                    for loop in port.loops:
                        loop.let_go()
                    old.publisher.remove_sink(port.publisher)
                    for rank in range(port.publisher.ranks):
                        for event in all_removed(old, port.worker, rank):
                            port.publisher.publish(event)
            self.harness = harness
            if self.inside.pairs is not None:
                self.inside.pairs.reset()
            self.log.clear()
            self.truth = Truth(harness)
            self._number_batches()
            for worker, port in self.inside.ports.items():
                port.publisher.use_digests(self._digests(worker))
                for rank, loop in enumerate(port.loops):
                    loop.use(harness, engines[worker, rank])
                harness.add_sink(port.publisher, worker_id=worker)

        self.inside.thread.call(exchange())


def _harness_of(dialect: Dialect, roles: Mapping[str, Any] | None, stores: Mapping[str, Any] | None) -> RouterHarness:
    """Make a harness of a dialect's engine, with roles or with stores."""
    from pytest_kvmock.harness import RouterHarness  # imported on first use

    backend = speaker_of(dialect)
    roles, profile = roles_by_dialect(dialect, roles), EngineProfile()
    if stores is not None:
        from pytest_kvmock.engines.shared import tiers_of  # imported on first use
        from pytest_kvmock.values.shared_stores import read_stores

        shared = read_stores(stores).values()
        workers = 1 + max(worker for each in shared for worker in each.workers)
        profile = replace(profile, workers=workers, tiers=tiers_of(shared, profile.num_blocks))
    return RouterHarness(profile, backend, name="KvServer", roles=roles, stores=stores)


def _check_ranks(harness: RouterHarness, workers: Iterable[int], ranks: int) -> None:
    """Check that the workers of all roles have the same number of ranks.

    Raises:
        ValueError: a worker has fewer ranks.
    """
    made = Counter(each.worker_id for each in harness.workers.values())
    for worker in workers:
        if made[worker] != ranks:
            raise ValueError(
                f"KvServer: workers of all roles must have the same dp_size, got {made[worker]} for worker {worker} "
                f"and {ranks} for another"
            )


def _roles_in(harness: RouterHarness, workers: Iterable[int]) -> dict[int, Role | None]:
    """Return the role of each worker in P/D pairs; None for a worker without a role."""
    return {worker: getattr(harness.worker(worker), "role", None) for worker in workers}


def roles_by_dialect(dialect: Dialect, roles: Any) -> Any:
    """Return roles as for `RouterHarness`; by default those of SGLang's engines hand over in rooms."""
    release = release_of(dialect.models, dialect.backend)
    if release is None or not release.is_sglang or not isinstance(roles, Mapping):
        return roles
    own = {"hand_over": IN_ROOMS}
    return {kind: {**own, **(each if isinstance(each, Mapping) else {"workers": each})} for kind, each in roles.items()}


def _check_models(model: object, adapters: Sequence[object]) -> None:
    """Check that the names of the model and its adapters are valid and different."""
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


def _page_of(manager: object) -> int | None:
    """Return the tokens per page if blocks have several pages (vLLM's context parallelism); None: a block is a page."""
    page: int | None = getattr(manager, "page_size", None)
    return page if getattr(manager, "dcp", 1) > 1 else None


def _check_topic(topic: object) -> None:
    """Check that a topic only has plain names to fill in, as a format could make it arbitrarily long."""
    try:
        parts = list(Formatter().parse(topic)) if isinstance(topic, str) else None
    except ValueError:  # a single brace
        parts = None
    if parts is None or any(
        field is not None and (field not in _IN_TOPICS or form or conversion) for _, field, form, conversion in parts
    ):
        raise ValueError(
            "KvServer: topic must be a text in which {host}, {port} and {model} are filled in, without a format, got "
            f"{topic!r:.80}"
        )


def _master_of(harness: RouterHarness, endpoint: str) -> MasterPublisher:
    """Bind the stream of the harness's master.

    Raises:
        ValueError: the harness has no master, or several.
    """
    from pytest_kvmock.wire.sockets.master_sockets import MasterPublisher  # imported on first use

    shared = harness.inside.reference.stores
    found = [name for name, each in shared.items() if each.kind == "hicache"]
    if len(found) != 1:
        had = ", ".join(f"{name!r} ({each.kind})" for name, each in shared.items()) or "no stores"
        raise ValueError(f"KvServer: ports['master'] is for one store of kind 'hicache'; the harness has {had}")
    master, publisher = harness.store(found[0]), MasterPublisher(endpoint)
    master.listeners.append(publisher.publish)
    return publisher
