"""How a test controls the engines of a server: hold and continue, restart, refuse connections, answer with errors, lose
batches.

Methods are called in the test's thread. A method that waits has an async version in `ServerInside`, which the control
API awaits in the server's event loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.servers.serve.loop_thread import WAIT_S
from pytest_kvmock.values.checks import unknown_text
from pytest_kvmock.wire.sockets.load_sockets import LoadFaults
from pytest_kvmock.wire.sockets.wire_faults import WireFaults

if TYPE_CHECKING:
    from pytest_kvmock.harness import RouterHarness
    from pytest_kvmock.servers.serve.server_inside import ServerInside
    from pytest_kvmock.wire.sockets.replay_server import Replay

_NO_FAULTS: Final = ("injected", "unused", "strike", "truncated", "begun_anew", "take_over", "restarts")

_NO_LOAD_FAULTS: Final = ("injected", "unused", "strike", "take_jump")

_POLLS: Final = "fail_polls"


def known_faults() -> list[str]:
    """Return the names of the wire faults that a test can request."""
    return [each for each in dir(WireFaults) if not each.startswith("_") and each not in _NO_FAULTS]


def _call(fault: Callable[..., None], name: str, options: Mapping[str, Any]) -> None:
    """Request a fault, after a check of its options."""
    takes = list(inspect.signature(fault).parameters)
    for each in options:
        if each not in takes:
            raise TypeError(f"{name}: {unknown_text('option', each, takes)}")
    fault(**options)


class Controls:
    """The part of a `KvServer` that controls its engines.

    Attributes:
        harness: the harness that has the workers.
        inside: the interface for the control API, the command and the plugin.
    """

    harness: RouterHarness
    inside: ServerInside

    def hold(self, worker: int | None = None) -> None:
        """Start no pass until `release` or `step`, so that requests queue up; None: at all workers.

        Raises:
            ValueError: an unknown worker.
        """
        self._hold(worker, held=True)

    def release(self, worker: int | None = None) -> None:
        """Run passes again after `hold`."""
        self._hold(worker, held=False)

    def _hold(self, worker: int | None, *, held: bool) -> None:
        ports = self.inside.ports.values() if worker is None else (self.inside.port(worker),)

        async def change() -> None:
            for port in ports:
                for loop in port.loops:
                    loop.held = held
                    loop.allow()

        self.inside.thread.call(change())

    def step(self, n: int = 1, worker: int | None = None) -> None:
        """Run `n` passes of each held rank, and wait for them; None: at all workers.

        Raises:
            ValueError: an unknown worker, or `n` is below 1.
        """
        self.inside.thread.call(self.inside.await_step(n, worker))

    def wait_requests(self, open: int, timeout: float = WAIT_S) -> None:  # noqa: A002 - the word of the issue
        """Wait until `open` requests are open.

        Raises:
            TimeoutError: fewer requests were open in time; the message has their number.
        """
        __tracebackhide__ = True
        self.inside.thread.call(self.inside.await_requests(open, timeout))

    def wait_subscribed(self, subscribers: int = 1, timeout: float = WAIT_S) -> None:
        """Wait until `subscribers` subscribe to the events of each rank of each worker; see
        `KvPublisher.wait_subscribed`.

        Raises:
            WireTimeout: there were fewer subscribers in time.
        """
        __tracebackhide__ = True
        self.inside.thread.call(self.inside.await_subscribed(subscribers, timeout))

    def fault(self, worker: int, name: str, **options: Any) -> None:
        """Request a wire fault: a method of `KvPublisher.faults`, by its name.

        Raises:
            ValueError: an unknown worker or fault.
            TypeError: an option that the fault does not take.
        """
        faults = self.inside.port(worker).publisher.faults
        known = known_faults()
        if name not in known:
            raise ValueError(f"unknown fault {name!r:.80}; known: {', '.join(known)}")
        if not hasattr(faults, name):
            raise ValueError(f"fault {name!r} is for events that are sent over ZMQ; this engine's are polled")
        _call(getattr(faults, name), name, options)

    def load_fault(self, worker: int, name: str, **options: Any) -> None:
        """Request a fault of a worker's loads.

        `name` is a method of `LoadFaults`, for the messages of the load stream; or "fail_polls": the next polls of
        `/metrics`, `/load`, `/get_load` and `/v1/loads` are answered with 503. The option `times` is the number of
        polls (default: 1; None: each poll until `start`).

        Raises:
            ValueError: an unknown worker or fault, or a worker without a load stream.
            TypeError: an option that the fault does not take.
        """
        served = self.inside.port(worker)
        if name == _POLLS:
            self._act(lambda: _call(served.planned.plan_polls, name, options))
            return
        known = [each for each in vars(LoadFaults) if not each.startswith("_") and each not in _NO_LOAD_FAULTS]
        if name not in known:
            raise ValueError(f"unknown fault of loads {name!r:.80}; known: {', '.join([*known, _POLLS])}")
        if served.publisher.loads is None:
            raise ValueError(f"fault {name!r} is for a load stream, and worker {worker} has none: see ports['loads']")
        fault = getattr(served.publisher.loads.faults, name)
        self._act(lambda: _call(fault, name, options))

    @property
    def replays(self) -> list[tuple[int, Replay]]:
        """The replays so far: the worker, and the requested and sent batches."""
        return [(worker, each) for worker, port in self.inside.ports.items() for each in port.publisher.replays]

    def restart(self, worker: int) -> None:
        """Restart a worker, announced to the harness: it is empty, its connections are cut, its batches begin with 0.

        Raises:
            ValueError: an unknown worker, or its engine is broken.
        """
        port = self.inside.port(worker)

        async def restart() -> None:
            port.restart()

        self.inside.thread.call(restart())

    def stop(self, worker: int) -> None:
        """Refuse connections to a worker, and cut open ones, as `restart` does; `start` listens at the same port again.

        The engine keeps its cache.

        Raises:
            ValueError: an unknown worker.
        """
        port = self.inside.port(worker)

        async def stop() -> None:
            port.cut_off("the engine stops")
            await port.stop()

        self.inside.thread.call(stop())

    def answer(
        self,
        worker: int,
        status: int,
        headers: Mapping[str, str] = {},
        times: int | None = 1,
    ) -> None:
        """Answer the next requests of a worker with an error instead of serving them, after answers planned earlier.

        It applies to completions, chats and `/generate`. The body is an error in the form of the release.

        Args:
            worker: the worker.
            status: the status of the answer, from 400 to 599.
            headers: additional headers, such as `{"Retry-After": "1"}`.
            times: number of requests; None: each request until `start`.

        Raises:
            ValueError: an unknown worker, a status that is no error, a header that cannot be sent, or `times` below 1.
            TypeError: headers that do not map names to texts.
        """
        self._act(self.inside.port(worker).planned.plan_answer, status, headers, times)

    def cut(self, worker: int, after_chunks: int = 0) -> None:
        """Cut the connection of the next request of a worker, as if the engine died while it answers.

        Args:
            worker: the worker.
            after_chunks: number of chunks (events of the stream, never its end) that are sent before; then it applies
                to the next request that streams. 0: nothing is sent, and it applies to the next request of any kind.

        Raises:
            ValueError: an unknown worker, or `after_chunks` below 0.
        """
        self._act(self.inside.port(worker).planned.plan_cut, after_chunks)

    def drain(self, worker: int) -> None:
        """Let a worker finish its open requests and refuse new ones, as its engine does when it is asked to end;
        `start` ends this.

        vLLM refuses new connections, and closes each connection when its request ends. SGLang is unhealthy (503) from
        then on, still takes requests, and refuses connections when no request is open.

        Raises:
            ValueError: an unknown worker.
        """
        self.inside.thread.call(self.inside.port(worker).drain())

    def _act(self, method: Callable[..., None], *arguments: Any) -> None:
        """Call a method in the event loop, because the loop reads the data that it changes."""

        async def act() -> None:
            method(*arguments)

        self.inside.thread.call(act())

    def start(self, worker: int) -> None:
        """Listen again after `stop` or `drain`, and serve requests; planned answers and cuts are cancelled.

        Raises:
            ValueError: an unknown worker.
            EndpointError: another process has taken the port meanwhile.
        """
        self.inside.thread.call(self.inside.port(worker).start())

    def reset(self, worker: int | None = None) -> bool:
        """Empty the caches, which publish Cleared. A worker with open requests does not change; then return False.

        Raises:
            ValueError: an unknown worker.
        """
        ports = list(self.inside.ports.values()) if worker is None else [self.inside.port(worker)]

        async def reset() -> bool:
            return sum(port.reset_cache() for port in ports) == len(ports)

        return self.inside.thread.call(reset())
