"""A router process under contract: its engines, its start and end, and its output."""

from __future__ import annotations

import http.client
import os
import queue
import secrets
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pytest_kvmock.wire.sockets.waiting import Deadline

_MOST_LINES: Final = 200
"""Lines of standard error that are kept."""

_SHOWN_LINES: Final = 3
"""The last lines that a message shows."""

_PORTS: Final = range(10_000, 16_000)

_MOMENT_S: Final = 0.02
"""Seconds between two checks whether it is ready."""


class ProcessEnded(Exception):  # noqa: N818 - not an error of the contract
    """A process has ended, or has not answered in time; the message says which."""


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """One engine as a router process is given it: an HTTP port, and the ranks behind it.

    Attributes:
        worker: its number, by which `blocks` names it.
        url: its URL, such as "http://127.0.0.1:8000".
        events: the endpoint of each rank's events.
        replays: the endpoint of each rank's replays; empty: no replays.
        topic: the topic of its events.
        role: its role in a P/D pair, "prefill" or "decode"; None: it is in no pair.
        bootstrap_port: the port of a prefill engine's bootstrap server, at the host of its URL; None: it has none.
        ranks: the number of each rank in its events. Clients name a rank by its place here.
    """

    worker: int
    url: str
    events: tuple[str, ...]
    replays: tuple[str, ...]
    topic: str = ""
    role: str | None = None
    bootstrap_port: int | None = None
    ranks: tuple[int, ...] = (0,)


class ServedEngines(tuple[ServedEngine, ...]):  # noqa: SLOT001 - it also has attributes
    """The engines that a router process is started with.

    Attributes:
        port: a free port, for a process that is told where to listen.
        model: the name of the model that they serve.
        block_size: tokens per block.
    """

    port: int
    model: str
    block_size: int

    @classmethod
    def at_a_port(cls, engines: Sequence[ServedEngine], model: str, block_size: int) -> ServedEngines:
        """Return engines with a free port."""
        found = cls(engines)
        found.port, found.model, found.block_size = free_port(), model, block_size
        return found

    def of(self, role: str) -> list[ServedEngine]:
        """Return the engines of a role in P/D pairs, "prefill" or "decode".

        Raises:
            ValueError: no engine has this role.
        """
        found = [each for each in self if each.role == role]
        if not found:
            roles = [each.role for each in self if each.role is not None]
            there = ", ".join(map(repr, dict.fromkeys(roles))) or "none"
            raise ValueError(f"of: no engine has the role {role!r:.80}; roles here: {there}")
        return found

    @property
    def urls(self) -> list[str]:
        """The URL of each engine."""
        return [each.url for each in self]


def free_port() -> int:
    """Return a port without a listener. It is below the ephemeral ports, which may be taken before use."""
    while True:
        port = secrets.choice(_PORTS)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port


def status_of(url: str, timeout: float) -> str:
    """Return the status of a GET of a URL, or why there is no answer."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.netloc, timeout=timeout)
    try:
        connection.request("GET", place.path)
        return str(connection.getresponse().status)
    except (OSError, http.client.HTTPException) as error:
        return f"nothing ({type(error).__name__})"
    finally:
        connection.close()


class RouterProcess:
    """A running command with its output.

    Args:
        command: the program and its arguments.
        timeout: seconds to wait for it.

    Raises:
        ProcessEnded: it cannot be started.

    Attributes:
        command: as above.
    """

    def __init__(self, command: Sequence[str | Path], timeout: float) -> None:
        self.command = [str(each) for each in command]
        self._timeout = timeout
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors: deque[str] = deque(maxlen=_MOST_LINES)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the command of the test
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # its children end with it
            )
        except (OSError, ValueError) as error:
            raise ProcessEnded(f"the command {self.command[0]!r:.200} cannot be started: {error}") from None
        self._readers = [
            threading.Thread(target=self._read_lines, name="RouterProcess stdout", daemon=True),
            threading.Thread(target=self._read_errors, name="RouterProcess stderr", daemon=True),
        ]
        for each in self._readers:
            each.start()

    def __repr__(self) -> str:
        return f"<RouterProcess {self.command[0]}: {self.state_text}>"

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.strip():
                self._errors.append(line.rstrip("\n"))

    def line(self) -> str:
        """Return the next line of its standard output.

        Raises:
            ProcessEnded: it ended, or printed no line in time; the message has its last lines of standard error.
        """
        try:
            found = self._lines.get(timeout=self._timeout)
        except queue.Empty:
            raise ProcessEnded(f"it has printed no line after {self._timeout:g} s: {self.state_text}") from None
        if found is None:
            self.wait()
            raise ProcessEnded(f"it has printed no line: {self.state_text}")
        return found

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    @property
    def errors(self) -> list[str]:
        """Its last lines of standard error."""
        return list(self._errors)

    @property
    def state_text(self) -> str:
        """Whether it runs or how it ended, and its last lines of standard error, in one line."""
        code = self._process.poll()
        if code is not None:  # its output is read to the end
            self._readers[1].join(self._timeout)
        state = "the process is alive" if code is None else f"the process has exited with {code}"
        shown = " | ".join(self.errors[-_SHOWN_LINES:])
        return (
            f"{state}; its standard error ends with: {shown}" if shown else f"{state}, with nothing on standard error"
        )

    def terminate(self) -> None:
        """Ask it to end, by SIGTERM."""
        self._process.terminate()

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until it has ended, and return its exit code; None if it has not ended in time.

        Args:
            timeout: seconds; None: the timeout of the process.
        """
        try:
            return self._process.wait(self._timeout if timeout is None else timeout)
        except subprocess.TimeoutExpired:
            return None

    def until_healthy(self, url: str) -> None:
        """Wait until a URL is answered with 200.

        Raises:
            ProcessEnded: the process ended, or the URL was not answered with 200 in time.
        """
        deadline = Deadline(self._timeout)
        while (answer := status_of(url, self._timeout)) != "200":
            if self.wait(min(_MOMENT_S, deadline.left)) is not None:  # it may end between two questions
                raise ProcessEnded(f"it is not ready: {self.state_text}")
            if not deadline.left:
                raise ProcessEnded(f"{url} answers {answer} after {self._timeout:g} s: {self.state_text}")

    def close(self) -> None:
        """End it and all processes that it has started."""
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for each in self._readers:
            each.join(self._timeout)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
