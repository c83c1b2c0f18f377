"""Recording of a live engine: its KV events (over ZMQ; TensorRT-LLM's over HTTP) are judged and written to a file."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Final
from urllib.parse import urlsplit

from pytest_kvmock.engines.backends import backend_spec
from pytest_kvmock.oracle.hygiene.entries import BatchesLost, Opened
from pytest_kvmock.oracle.hygiene.ledger import Ledger
from pytest_kvmock.oracle.hygiene.log import EventLog
from pytest_kvmock.oracle.hygiene.problem import Problem
from pytest_kvmock.oracle.hygiene.stream_spec import StreamSpec
from pytest_kvmock.servers.capture.capture_file import CaptureFile, check_replaceable
from pytest_kvmock.servers.capture.capturing_journal import CapturingJournal
from pytest_kvmock.servers.capture.lines import header
from pytest_kvmock.servers.capture.polled_recorder import Polled
from pytest_kvmock.values.checks import check_integer, check_number
from pytest_kvmock.values.dialect import Dialect
from pytest_kvmock.values.events import RouterEvent
from pytest_kvmock.wire.codec.table import find_dialect

_LOOK: Final = 0.2
"""Seconds between two checks of the time."""

_REPLAY: Final = 5.0
"""Maximum time limit of a replay's answer, in seconds."""

_CONNECT: Final = 1.0
"""Time limit, in seconds, of the check whether anything listens at a silent endpoint."""


@dataclass(slots=True)
class Recorded:
    """The result of a recording.

    Attributes:
        path: the capture.
        batches: number of received batches.
        lost: batches that did not arrive and could not be replayed, one line each.
        unreadable: the errors in messages, one line each.
        silence: why no batch was received, in words; "" if one was.
        log: the events, with their problems.
    """

    path: Path
    batches: int = 0
    lost: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    silence: str = ""
    log: EventLog = field(default_factory=EventLog)

    @property
    def errors(self) -> list[Problem]:
        """The errors that stand by themselves."""
        return self.log.errors


def record(
    endpoint: str,
    path: str | Path,
    *,
    dialect: str = "vllm-0.33",
    replay: str | None = None,
    ranks: int | None = None,
    topic: str = "",
    batches: int | None = None,
    seconds: float | None = None,
    overwrite: bool = False,
    progress: Callable[[Recorded], object] | None = None,
) -> Recorded:
    """Record the events of an engine, up to a limit or until Ctrl-C; KeyboardInterrupt is not raised.

    Args:
        endpoint: the endpoint of the engine's first rank; other ranks have the next ports. For TensorRT-LLM, its HTTP
            address: its events are polled, which empties its buffer, so the recorder replaces a router and cannot run
            next to it.
        path: the capture to write.
        dialect: the dialect of the engine.
        replay: the endpoint where the engine replays earlier batches; None: there is none, and the stream begins with
            the first batch that arrives.
        ranks: number of data-parallel ranks; None: one.
        topic: prefix of the topics of batches.
        batches: number of batches to record; None: no limit.
        seconds: duration; None: until it is interrupted. It also limits the wait for a replay.
        overwrite: whether an existing file is replaced.
        progress: called after each poll.

    Raises:
        CaptureError: the file cannot be written, or exists already.
        EndpointError: an endpoint that cannot be connected to.
        ValueError: an unknown dialect, or a number out of range.
        ImportError: pyzmq or msgspec is not installed.
    """
    from pytest_kvmock.wire.sockets.endpoints import EndpointError
    from pytest_kvmock.wire.sockets.kv_subscriber import KvSubscriber

    row = find_dialect(dialect)
    for each in (endpoint, replay):
        if isinstance(each, str) and each.startswith("inproc://"):
            raise EndpointError(f"{each!r:.80} is within one process; an engine is recorded over tcp or ipc")
    if batches is not None:
        check_integer("batches", batches, 1)
    until = None if seconds is None else monotonic() + check_number("seconds", seconds, unit=" seconds")
    spec = backend_spec(row.backend)
    recorded = Recorded(Path(path))
    check_replaceable(path, overwrite=overwrite)

    def judge(event: RouterEvent) -> None:
        recorded.log.append(event)
        recorded.log.note(ledger.take(event))

    if row.form == "trtllm_json":
        if replay is not None or topic:
            raise ValueError(f"replay and topic are of events over ZMQ; those of dialect {row.name!r} are polled")
        return _record_polled(endpoint, recorded, row, batches=batches, until=until, progress=progress)

    def lose(worker_id: int, dp_rank: int, batches: range, observed: str) -> None:
        recorded.lost.append(f"rank {dp_rank}: {observed}")
        recorded.log.note(ledger.take(BatchesLost(worker_id, dp_rank, batches, observed)))

    with KvSubscriber(
        endpoint,
        judge,
        dialect=row,
        replay=replay,
        ranks=ranks,
        topic=topic,
        from_start=replay is not None,
        on_loss=lose,
        replay_timeout=_REPLAY if seconds is None else min(_REPLAY, seconds / (ranks or 1)),
    ) as subscriber:
        engine = {"dialect": row.name, "models": row.models, "endpoint": endpoint, "replay": replay}
        file = CaptureFile(path, header(engine, None))
        ledger = Ledger(CapturingJournal(file))
        with file:
            for rank in range(len(subscriber.endpoints)):
                about = StreamSpec(residency=spec.residency, prefix_closed=spec.prefix_closed)
                ledger.take(Opened((subscriber.worker_id, rank), None, about))
            try:
                if replay is not None:
                    subscriber.catch_up()
                while (batches is None or recorded.batches < batches) and (until is None or monotonic() < until):
                    subscriber.poll(_LOOK)
                    _write_unreadable(recorded, file, subscriber.problems)
                    recorded.batches = subscriber.batches + subscriber.unreadable
                    if progress is not None:
                        progress(recorded)
            except KeyboardInterrupt:
                pass
            _write_unreadable(recorded, file, subscriber.problems)
            recorded.batches = subscriber.batches + subscriber.unreadable
    if not (recorded.batches or recorded.lost):
        recorded.silence = "nothing was received: " + "; ".join(map(_silence, subscriber.endpoints))
    return recorded


def _record_polled(
    endpoint: str,
    recorded: Recorded,
    row: Dialect,
    *,
    batches: int | None,
    until: float | None,
    progress: Callable[[Recorded], object] | None,
) -> Recorded:
    """Record an engine whose events are polled; an answer with events counts as a batch."""
    spec = backend_spec(row.backend)
    engine = {"dialect": row.name, "models": row.models, "endpoint": endpoint, "replay": None}
    about = StreamSpec(residency=spec.residency, prefix_closed=spec.prefix_closed)

    def judge(event: RouterEvent) -> None:
        recorded.log.append(event)
        recorded.log.note(ledger.take(event))

    ledger = Ledger()
    polled = Polled(endpoint, ledger, about, judge)
    file = CaptureFile(recorded.path, header(engine, None))
    ledger.journal = CapturingJournal(file)
    with file:
        try:
            while True:
                polled.poll()
                _write_unreadable(recorded, file, polled.problems)
                recorded.batches = polled.answers
                if progress is not None:
                    progress(recorded)
                if (batches is not None and recorded.batches >= batches) or (
                    until is not None and monotonic() >= until
                ):
                    break
                sleep(_LOOK)
        except KeyboardInterrupt:
            pass
    if not recorded.batches:
        recorded.silence = f"nothing was received: {polled.silence or f'no event from {endpoint}'}"
    return recorded


def _silence(endpoint: str) -> str:
    """Return why nothing came from an endpoint: nothing listens there, or the engine published nothing."""
    address = urlsplit(endpoint)
    if address.scheme == "tcp" and address.hostname and address.port:
        try:
            socket.create_connection((address.hostname, address.port), _CONNECT).close()
        except OSError as error:
            return f"no connection to {endpoint} ({error.strerror or error})"
    return f"no batch from {endpoint}"


def _write_unreadable(recorded: Recorded, file: CaptureFile, problems: Sequence[object]) -> None:
    """Write the new errors in messages."""
    for text in map(str, problems[len(recorded.unreadable) :]):
        recorded.unreadable.append(text)
        file.write({"unreadable": {"text": text}})
