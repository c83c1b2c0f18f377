"""The interface of a server for its control API, the command and the plugin: `KvServer.inside`.

Methods that wait are awaited in the server's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pytest_kvmock.servers.serve.loop_thread import WAIT_S
from pytest_kvmock.values.checks import check_integer, check_number, is_integer

if TYPE_CHECKING:
    from pytest_kvmock.servers.serve.loop_thread import LoopThread
    from pytest_kvmock.servers.serve.served_pairs import ServedPairs
    from pytest_kvmock.servers.serve.worker_port import ServedWorker
    from pytest_kvmock.wire.sockets.load_sockets import LoadFaults
    from pytest_kvmock.wire.sockets.wire_faults import WireFaults


class ServerInside:
    """The interface of a server for the rest of the package.

    Args:
        thread: runs the server's event loop.
        served: the part of `ready_line` that describes the served engines.
        made_token: the generated token of the control API; None if none was generated.

    Attributes:
        thread: runs the server's event loop.
        ports: each worker with its ports, by its id.
        control_url: the URL of the control API; None if there is none.
        open_changed: set when a request opens or ends.
        closed: whether the server is closed.
        pairs: the P/D pairs; None if engines have no roles.
    """

    def __init__(self, thread: LoopThread, served: Mapping[str, Any], made_token: str | None) -> None:
        self.thread = thread
        self._served, self._made_token = served, made_token
        self.ports: dict[int, ServedWorker] = {}
        self.control_url: str | None = None
        self.open_changed = asyncio.Event()
        self.closed = False
        self.pairs: ServedPairs | None = None

    def check_open(self) -> None:
        """Check that the server is not closed.

        Raises:
            ValueError: it is closed.
        """
        if self.closed:
            raise ValueError("this KvServer is closed")

    def port(self, worker: int) -> ServedWorker:
        """Return a worker with its ports.

        Raises:
            ValueError: an unknown worker, or the server is closed.
        """
        self.check_open()
        found = self.ports.get(worker) if is_integer(worker) else None
        if found is None:
            raise ValueError(
                f"KvServer: there is no worker {worker!r:.80}; there are {', '.join(map(str, self.ports))}"
            )
        return found

    def ready_line(self) -> dict[str, Any]:
        """Return the content of the command's ready line: all advertised addresses, and what is served."""
        return {
            **self._served,
            "control": self.control_url,
            "token": self._made_token,
            "workers": [
                {
                    "id": worker,
                    "http": port.url,
                    "events": port.endpoints,
                    "replay": port.replay_endpoints,
                    "topic": port.publisher.topic,
                    **({} if port.role is None else {"role": port.role, "bootstrap_port": port.bootstrap_port}),
                    **({"loads": port.load_endpoints} if port.load_endpoints else {}),
                    **({"ports": [each.to_json() for each in port.ports]} if len(port.ports) > 1 else {}),
                }
                for worker, port in self.ports.items()
            ],
        }

    @property
    def num_open(self) -> int:
        """Number of open requests (choices)."""
        return sum(loop.num_open for port in self.ports.values() for loop in port.loops)

    async def await_requests(self, open: int, timeout: float = WAIT_S) -> None:  # noqa: A002, ASYNC109 - as its twin
        """Wait until `open` requests are open, in the server's event loop."""
        __tracebackhide__ = True
        check_integer("wait_requests: open", open, 0)
        check_number("wait_requests: timeout", timeout)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.num_open != open:
                    self.open_changed.clear()
                    await self.open_changed.wait()
        if self.num_open != open:
            raise TimeoutError(f"{self.num_open} requests are open after {timeout:g} s, {open} were waited for")

    async def await_step(self, n: int = 1, worker: int | None = None) -> None:
        """Do what `step` does, in the server's event loop. A cancelled call withdraws the passes that have not run."""
        check_integer("step: n", n, 1)
        ports = list(self.ports.values()) if worker is None else [self.port(worker)]
        loops = [loop for port in ports for loop in port.loops if loop.held]
        for loop in loops:
            loop.allow(steps=n)
        try:
            for loop in loops:
                await loop.stepped()
        except asyncio.CancelledError:
            for loop in loops:
                loop.allow(steps=-n)
            raise

    async def await_subscribed(self, subscribers: int = 1, timeout: float = WAIT_S) -> None:  # noqa: ASYNC109 - as its twin
        """Wait for subscribers, in the server's event loop."""
        __tracebackhide__ = True
        publishers = [port.publisher for port in self.ports.values()]
        await asyncio.gather(*(each.await_subscribed(subscribers, timeout) for each in publishers))

    @property
    def faults_left(self) -> list[str]:
        """The requested faults, answers and cuts that were applied less often than requested; they fail a test that
        uses `kv_server`.
        """
        faults: list[tuple[int, WireFaults | LoadFaults]] = []
        for worker, port in self.ports.items():
            faults.append((worker, port.publisher.faults))
            faults += [] if port.publisher.loads is None else [(worker, port.publisher.loads.faults)]
        return [f"worker {worker}: {text}" for worker, each in faults for text in each.unused] + self.answers_left

    @property
    def answers_left(self) -> list[str]:
        """The requested answers and cuts among `faults_left`."""
        return [f"worker {worker}: {text}" for worker, port in self.ports.items() for text in port.planned.unused]

    @property
    def broken(self) -> list[str]:
        """Each broken worker and rank, with the exception of its engine; they fail a test that uses `kv_server`."""
        return [
            f"worker {worker} rank {rank} is broken: {loop.error}"
            for worker, port in self.ports.items()
            for rank, loop in enumerate(port.loops)
            if loop.error is not None
        ]

    def halt(self) -> None:
        """Run no further pass, and close all connections and publishers at once, for a process that ends now. Engines
        and threads are not cleaned up.
        """

        async def cut() -> None:
            for port in self.ports.values():
                for loop in port.loops:
                    loop.halt()
                port.cut()

        self.thread.call(cut())
        for port in self.ports.values():
            port.publisher.close()
