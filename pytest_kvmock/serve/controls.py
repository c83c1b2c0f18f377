"""What a test has the engines of a server do: hold and go on, restart, refuse connections, answer with errors, lose batches.

Methods are called in the test's thread. What waits for something has a twin that is awaited in the server's own loop, as the control API does.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.checks import check_integer, check_number, is_integer, unknown_text
from pytest_kvmock.serve.loop_thread import WAIT_S
from pytest_kvmock.wire.wire_faults import WireFaults

if TYPE_CHECKING:
    from pytest_kvmock.harness import RouterHarness
    from pytest_kvmock.serve.loop_thread import LoopThread
    from pytest_kvmock.serve.worker_port import WorkerPort
    from pytest_kvmock.wire.replay_server import Replay

_NO_FAULTS: Final = ("injected", "unused", "strike", "truncated", "begun_anew", "take_over", "restarts")


def known_faults() -> list[str]:
    """Return the names of the faults of the wire that a test can ask for."""
    return [each for each in dir(WireFaults) if not each.startswith("_") and each not in _NO_FAULTS]


class Controls:
    """The part of a `KvServer` that changes what its engines do.

    Attributes:
        harness: whose workers they are.
    """

    harness: RouterHarness
    _ports: dict[int, WorkerPort]
    _thread: LoopThread
    _open_changed: asyncio.Event
    _closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this KvServer is closed")

    def _port(self, worker: int) -> WorkerPort:
        self._check_open()
        found = self._ports.get(worker) if is_integer(worker) else None
        if found is None:
            raise ValueError(
                f"KvServer: there is no worker {worker!r:.80}; there are {', '.join(map(str, self._ports))}"
            )
        return found

    def hold(self, worker: int | None = None) -> None:
        """Start no pass until `release` or `step`, so that requests pile up; None: at all workers.

        Raises:
            ValueError: there is no such worker.
        """
        self._hold(worker, held=True)

    def release(self, worker: int | None = None) -> None:
        """Go on after `hold`."""
        self._hold(worker, held=False)

    def _hold(self, worker: int | None, *, held: bool) -> None:
        ports = self._ports.values() if worker is None else (self._port(worker),)

        async def change() -> None:
            for port in ports:
                for loop in port.loops:
                    loop.held = held
                    loop.allow()

        self._thread.call(change())

    def step(self, n: int = 1, worker: int | None = None) -> None:
        """Run so many passes of each rank that is held, and wait for them; None: at all workers.

        Raises:
            ValueError: there is no such worker, or `n` is below 1.
        """
        self._thread.call(self.await_step(n, worker))

    async def await_step(self, n: int = 1, worker: int | None = None) -> None:
        """Do what `step` does, in the server's loop. Who is cancelled takes back the passes that have not run."""
        check_integer("step: n", n, 1)
        ports = list(self._ports.values()) if worker is None else [self._port(worker)]
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

    @property
    def num_open(self) -> int:
        """How many requests (choices) are open now."""
        return sum(loop.num_open for port in self._ports.values() for loop in port.loops)

    def wait_requests(self, open: int, timeout: float = WAIT_S) -> None:  # noqa: A002 - the word of the issue
        """Wait until so many requests are open.

        Raises:
            TimeoutError: there were not so many in time; it says how many there are.
        """
        __tracebackhide__ = True
        self._thread.call(self.await_requests(open, timeout))

    async def await_requests(self, open: int, timeout: float = WAIT_S) -> None:  # noqa: A002, ASYNC109 - as its twin
        """Wait for requests, in the server's loop."""
        __tracebackhide__ = True
        check_integer("wait_requests: open", open, 0)
        check_number("wait_requests: timeout", timeout)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.num_open != open:
                    self._open_changed.clear()
                    await self._open_changed.wait()
        if self.num_open != open:
            raise TimeoutError(f"{self.num_open} requests are open after {timeout:g} s, {open} were waited for")

    def wait_subscribed(self, subscribers: int = 1, timeout: float = WAIT_S) -> None:
        """Wait until so many subscribe to the events of each rank of each worker; see `KvPublisher.wait_subscribed`.

        Raises:
            WireTimeout: there were not so many in time.
        """
        __tracebackhide__ = True
        self._thread.call(self.await_subscribed(subscribers, timeout))

    async def await_subscribed(self, subscribers: int = 1, timeout: float = WAIT_S) -> None:  # noqa: ASYNC109 - as its twin
        """Wait for subscribers, in the server's loop."""
        __tracebackhide__ = True
        publishers = [port.publisher for port in self._ports.values()]
        await asyncio.gather(*(each.await_subscribed(subscribers, timeout) for each in publishers))

    def fault(self, worker: int, name: str, **options: Any) -> None:
        """Ask for a fault of the wire: a method of `KvPublisher.faults`, by its name.

        Raises:
            ValueError: there is no such worker or fault.
            TypeError: an option that the fault does not take.
        """
        faults = self._port(worker).publisher.faults
        known = known_faults()
        if name not in known:
            raise ValueError(f"unknown fault {name!r:.80}; known: {', '.join(known)}")
        if not hasattr(faults, name):
            raise ValueError(f"fault {name!r} is of events that are sent over ZMQ; this engine's are polled")
        fault = getattr(faults, name)
        takes = list(inspect.signature(fault).parameters)
        for each in options:
            if each not in takes:
                raise TypeError(f"{name}: {unknown_text('option', each, takes)}")
        fault(**options)

    @property
    def faults_left(self) -> list[str]:
        """The faults, answers and cuts that were asked for and did not strike as often as they should; a test of `kv_server` fails by them."""
        faults = [(worker, port.publisher.faults) for worker, port in self._ports.items()]
        return [f"worker {worker}: {text}" for worker, each in faults for text in each.unused] + self.answers_left

    @property
    def answers_left(self) -> list[str]:
        """Of these the answers and cuts alone."""
        return [f"worker {worker}: {text}" for worker, port in self._ports.items() for text in port.planned.unused]

    @property
    def replays(self) -> list[tuple[int, Replay]]:
        """Who asked for a replay: worker, and what was asked for and sent."""
        return [(worker, each) for worker, port in self._ports.items() for each in port.publisher.replays]

    def restart(self, worker: int) -> None:
        """Restart a worker, announced to the harness: it is empty, its connections are cut, its batches begin with 0.

        Raises:
            ValueError: there is no such worker, or its engine is broken.
        """
        port = self._port(worker)

        async def restart() -> None:
            port.restart()

        self._thread.call(restart())

    def stop(self, worker: int) -> None:
        """Refuse connections to a worker, and cut those that are open, as `restart` does; `start` listens at the same port again.

        What the engine has cached stays.

        Raises:
            ValueError: there is no such worker.
        """
        port = self._port(worker)

        async def stop() -> None:
            port.cut_off("the engine stops")
            await port.stop()

        self._thread.call(stop())

    def answer(
        self,
        worker: int,
        status: int,
        headers: Mapping[str, str] = {},
        times: int | None = 1,
    ) -> None:
        """Answer the next requests of a worker with an error in place of serving them, after those that were asked for before.

        It is about what an engine would serve: completions, chats and `/generate`. The body is an error in the form of the release.

        Args:
            worker: which.
            status: of the answer, from 400 to 599.
            headers: what it has beside its own: `{"Retry-After": "1"}`.
            times: how many requests; None: each, until `start`.

        Raises:
            ValueError: there is no such worker, a status that is none of an error, a header that cannot be sent, or `times` below 1.
            TypeError: headers that are no names with texts.
        """
        self._act(self._port(worker).planned.plan_answer, status, headers, times)

    def cut(self, worker: int, after_chunks: int = 0) -> None:
        """Cut the connection of the next request of a worker, as an engine that dies while it answers.

        Args:
            worker: which.
            after_chunks: so many chunks are sent, each an event of the stream, and never its end: it is the next request that streams.
                0: nothing is sent, and it is the next request of all.

        Raises:
            ValueError: there is no such worker, or `after_chunks` is below 0.
        """
        self._act(self._port(worker).planned.plan_cut, after_chunks)

    def drain(self, worker: int) -> None:
        """Have a worker serve what it has, and refuse what is new, as its engine does when it is asked to end; `start` ends that.

        vLLM refuses connections, and closes each once its request is over. SGLang is not healthy from then on (503), takes requests still,
        and refuses connections once none is open.

        Raises:
            ValueError: there is no such worker.
        """
        self._thread.call(self._port(worker).drain())

    def _act(self, method: Callable[..., None], *arguments: Any) -> None:
        """Call a method in the loop, where what it changes is read."""

        async def act() -> None:
            method(*arguments)

        self._thread.call(act())

    def start(self, worker: int) -> None:
        """Listen again after `stop` or `drain`, and serve what comes: answers and cuts that wait still are taken back.

        Raises:
            ValueError: there is no such worker.
            EndpointError: another has taken the port meanwhile.
        """
        self._thread.call(self._port(worker).start())

    def reset(self, worker: int | None = None) -> bool:
        """Empty the caches, which publish Cleared; False, and nothing of that worker changes, while it has open requests.

        Raises:
            ValueError: there is no such worker.
        """
        ports = list(self._ports.values()) if worker is None else [self._port(worker)]

        async def reset() -> bool:
            return sum(port.reset_cache() for port in ports) == len(ports)

        return self._thread.call(reset())
