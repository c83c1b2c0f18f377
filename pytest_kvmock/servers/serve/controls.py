"""What a test has the engines of a server do: hold and go on, restart, refuse connections, answer with errors, lose
batches.

Methods are called in the test's thread. What waits for something has a twin that is awaited in the server's own loop,
as the control API does.
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
    """Return the names of the faults of the wire that a test can ask for."""
    return [each for each in dir(WireFaults) if not each.startswith("_") and each not in _NO_FAULTS]


def _call(fault: Callable[..., None], name: str, options: Mapping[str, Any]) -> None:
    """Ask for a fault, with options that it takes."""
    takes = list(inspect.signature(fault).parameters)
    for each in options:
        if each not in takes:
            raise TypeError(f"{name}: {unknown_text('option', each, takes)}")
    fault(**options)


class Controls:
    """The part of a `KvServer` that changes what its engines do.

    Attributes:
        harness: whose workers they are.
        inside: what is for the control API, the command and the plugin.
    """

    harness: RouterHarness
    inside: ServerInside

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
        ports = self.inside.ports.values() if worker is None else (self.inside.port(worker),)

        async def change() -> None:
            for port in ports:
                for loop in port.loops:
                    loop.held = held
                    loop.allow()

        self.inside.thread.call(change())

    def step(self, n: int = 1, worker: int | None = None) -> None:
        """Run `n` passes of each rank that is held, and wait for them; None: at all workers.

        Raises:
            ValueError: there is no such worker, or `n` is below 1.
        """
        self.inside.thread.call(self.inside.await_step(n, worker))

    def wait_requests(self, open: int, timeout: float = WAIT_S) -> None:  # noqa: A002 - the word of the issue
        """Wait until `open` requests are open.

        Raises:
            TimeoutError: there were not as many in time; it says how many there are.
        """
        __tracebackhide__ = True
        self.inside.thread.call(self.inside.await_requests(open, timeout))

    def wait_subscribed(self, subscribers: int = 1, timeout: float = WAIT_S) -> None:
        """Wait until `subscribers` subscribe to the events of each rank of each worker; see
        `KvPublisher.wait_subscribed`.

        Raises:
            WireTimeout: there were not as many in time.
        """
        __tracebackhide__ = True
        self.inside.thread.call(self.inside.await_subscribed(subscribers, timeout))

    def fault(self, worker: int, name: str, **options: Any) -> None:
        """Ask for a fault of the wire: a method of `KvPublisher.faults`, by its name.

        Raises:
            ValueError: there is no such worker or fault.
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
        """Ask for a fault of a worker's loads.

        It is a method of `LoadFaults`, by its name, for the messages of its load stream; or "fail_polls": its next
        polls (`times`, 1; None: each, until `start`), of `/metrics`, `/load`, `/get_load` and `/v1/loads`, are answered
        with 503.

        Raises:
            ValueError: there is no such worker or fault, or it has no load stream.
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
        """Who asked for a replay: worker, and what was asked for and sent."""
        return [(worker, each) for worker, port in self.inside.ports.items() for each in port.publisher.replays]

    def restart(self, worker: int) -> None:
        """Restart a worker, announced to the harness: it is empty, its connections are cut, its batches begin with 0.

        Raises:
            ValueError: there is no such worker, or its engine is broken.
        """
        port = self.inside.port(worker)

        async def restart() -> None:
            port.restart()

        self.inside.thread.call(restart())

    def stop(self, worker: int) -> None:
        """Refuse connections to a worker, and cut those that are open, as `restart` does; `start` listens at the same
        port again.

        What the engine has cached stays.

        Raises:
            ValueError: there is no such worker.
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
        """Answer the next requests of a worker with an error in place of serving them, after those that were asked for
        before.

        It is about what an engine would serve: completions, chats and `/generate`. The body is an error in the form of
        the release.

        Args:
            worker: which.
            status: of the answer, from 400 to 599.
            headers: further ones, in addition to its own: `{"Retry-After": "1"}`.
            times: how many requests; None: each, until `start`.

        Raises:
            ValueError: there is no such worker, a status that is none of an error, a header that cannot be sent, or
                `times` below 1.
            TypeError: headers that are no names with texts.
        """
        self._act(self.inside.port(worker).planned.plan_answer, status, headers, times)

    def cut(self, worker: int, after_chunks: int = 0) -> None:
        """Cut the connection of the next request of a worker, as an engine that dies while it answers.

        Args:
            worker: which.
            after_chunks: number of chunks that are sent, each an event of the stream, and never its end: it is the next
                request that streams. 0: nothing is sent, and it is the next request of all.

        Raises:
            ValueError: there is no such worker, or `after_chunks` is below 0.
        """
        self._act(self.inside.port(worker).planned.plan_cut, after_chunks)

    def drain(self, worker: int) -> None:
        """Have a worker serve what it has, and refuse what is new, as its engine does when it is asked to end; `start`
        ends that.

        vLLM refuses connections, and closes each once its request is over. SGLang is not healthy from then on (503),
        takes requests still, and refuses connections once none is open.

        Raises:
            ValueError: there is no such worker.
        """
        self.inside.thread.call(self.inside.port(worker).drain())

    def _act(self, method: Callable[..., None], *arguments: Any) -> None:
        """Call a method in the loop, where what it changes is read."""

        async def act() -> None:
            method(*arguments)

        self.inside.thread.call(act())

    def start(self, worker: int) -> None:
        """Listen again after `stop` or `drain`, and serve what comes: answers and cuts that wait still are taken back.

        Raises:
            ValueError: there is no such worker.
            EndpointError: another has taken the port meanwhile.
        """
        self.inside.thread.call(self.inside.port(worker).start())

    def reset(self, worker: int | None = None) -> bool:
        """Empty the caches, which publish Cleared; False, and nothing of that worker changes, while it has open
        requests.

        Raises:
            ValueError: there is no such worker.
        """
        ports = list(self.inside.ports.values()) if worker is None else [self.inside.port(worker)]

        async def reset() -> bool:
            return sum(port.reset_cache() for port in ports) == len(ports)

        return self.inside.thread.call(reset())
