"""A subscriber to KV events over ZMQ: it feeds a sink from any publisher, requests missed batches, and reports lost
ones.

One subject: the arriving batches of one engine. Theory of operation. Batches of a rank are numbered from 0. The next
one is decoded, and its events go to the sink. A later number shows a gap: missing batches are requested (`replay`), and
the answer is applied first. An earlier number is a repeat if the bytes are the same; otherwise the engine has
restarted. Batches that could not be obtained or read are lost: they are in `lost`, and are reported to the sink's
owner, because its view of the engine is incomplete from then on. Single unreadable events are reported at their place
among the others. There is no thread: `receive` and `poll` do the work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, TypeVar, cast

from pytest_kvmock.values.checks import check_integer, check_number, is_utf8
from pytest_kvmock.values.dialect import Dialect
from pytest_kvmock.values.events import RouterEvent
from pytest_kvmock.wire.codec.batch import Decoded
from pytest_kvmock.wire.codec.decoding import decode
from pytest_kvmock.wire.codec.table import find_dialect
from pytest_kvmock.wire.codec.unread import OtherDialects, events_and_gaps, has_no_events, is_unreadable
from pytest_kvmock.wire.sockets.endpoints import EndpointError, allow_ipv6, check_context, load_zmq, rank_endpoints
from pytest_kvmock.wire.sockets.kv_publisher import KvPublisher
from pytest_kvmock.wire.sockets.receiver import BatchLoss, BatchProblem, LostBatches, Receiver, receiver_of
from pytest_kvmock.wire.sockets.replay_server import END
from pytest_kvmock.wire.sockets.waiting import Deadline, WireTimeout, loop_lines, milliseconds, polled, readable

_T = TypeVar("_T")
_Waits: TypeAlias = Generator[Any, bool, _T]
"""A generator that yields a socket when it waits for a reply, and is sent whether there is one; the caller blocks or
awaits.
"""

MOST_REMEMBERED: Final = 10_000
"""Number of a rank's batches that are remembered to tell a repeat from a restart; older ones are recognized by their
timestamps.
"""

_NUMBER: Final = "8 bytes with the number of the batch"


class _SubscribedRank:
    """The state of one rank."""

    __slots__ = ("brought", "dealer", "due", "due_before", "latest", "next_event_id", "seen", "sub")

    def __init__(self, sub: Any) -> None:
        self.sub = sub
        self.dealer: Any = None
        self.due_before = 0  # the number that was due at the last restart; 0: there was none
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all batches."""
        self.due: int | None = None
        self.next_event_id = 0
        self.seen: OrderedDict[int, int] = OrderedDict()
        self.brought: set[int] = set()  # by replays; each may also arrive live
        self.latest: float | None = None  # timestamp of the last applied batch


class KvSubscriber:
    """Subscribes to the batches of one engine and passes their events to a sink, in order. It is a context manager.

    Events get ids from 0 on for each rank, because a wire numbers only batches. Unreadable events are reported by
    `on_loss`; without a function for losses, an unreadable event leaves a gap of ids. In Dynamo's dialects, events have
    ids.

    Args:
        endpoint: where the publisher is bound: the endpoint of rank 0, or one for each rank.
        sink: called with each `RouterEvent`: a `KvSink` of `make_kv_sink`, the `apply` of an index, `list.append`; or
            `harness.apply` for a `worker_id` that is not a mock engine of this harness.
        dialect: name of the publisher's dialect, or a `Dialect`.
        replay: where missed batches are requested: the endpoint of rank 0, or one for each rank; None: nowhere.
        worker_id: the worker of the events.
        ranks: number of ranks; None: the number of given endpoints.
        topic: the required prefix of a batch's topic.
        from_start: whether batches before the first one to arrive count as missing. If not, the stream begins with that
            batch.
        on_loss: called for batches or events that could not be obtained or read; None: the function that
            `losses_at(endpoints)` returns if `sink` is a `KvSink`, or a method of one or of a harness (a `Receiver`);
            otherwise nothing.
        replay_timeout: maximum seconds from one message of an answer to the next.
        context: a `zmq.Context`; None: a new one. Over inproc it must be the publisher's.

    Raises:
        EndpointError: an endpoint cannot be connected to, or there is not one for each rank.
        ValueError: the dialect is unknown, a number is out of range, the context is closed, or the sink publishes its
            events at one of the endpoints.
        TypeError: the sink or `on_loss` cannot be called, the topic is not a string, `from_start` not a bool, or
            `context` not a context.
        ImportError: pyzmq or msgspec is not installed.

    Attributes:
        batches: number of applied batches.
        events: number of events passed to the sink.
        duplicates: number of repeated batches.
        unreadable: number of arrived batches without any readable event; they are in `lost`.
        recovered: ranges of batches obtained by replays, each with its rank.
        lost: batches that could not be obtained, or had no readable event.
        problems: problems of messages.
    """

    def __init__(
        self,
        endpoint: str | Sequence[str],
        sink: Callable[[RouterEvent], object],
        *,
        dialect: str | Dialect,
        replay: str | Sequence[str] | None = None,
        worker_id: int = 0,
        ranks: int | None = None,
        topic: str = "",
        from_start: bool = True,
        on_loss: LostBatches | None = None,
        replay_timeout: float = 5.0,
        context: Any = None,
    ) -> None:
        if not callable(sink):
            raise TypeError(f"sink is called with each event; got {sink!r:.80}, which cannot be called")
        if on_loss is not None and not callable(on_loss):
            raise TypeError(f"on_loss is called with each loss; got {on_loss!r:.80}, which cannot be called")
        if not isinstance(topic, str):
            raise TypeError(f"topic must be a string, got {topic!r:.80}")
        if not is_utf8(topic):
            raise ValueError(f"topic must be text that UTF-8 can write, got {topic!r:.80}")
        self.dialect = find_dialect(dialect)
        self.worker_id = check_integer("worker_id", worker_id, 0)
        self.endpoints = rank_endpoints(endpoint, ranks)
        receiver = receiver_of(sink)
        if receiver is not None:
            self._check_no_loop(receiver)
        self.replay_endpoints = () if replay is None else rank_endpoints(replay, len(self.endpoints))
        self.batches = self.events = self.duplicates = self.unreadable = 0
        self.recovered: list[tuple[int, range]] = []
        self.lost: list[BatchLoss] = []
        self.problems: list[BatchProblem] = []
        self._others = OtherDialects(self.dialect)
        self._sink = sink
        self._closed = self._is_awaiting = False
        self._on_loss: LostBatches | None = on_loss
        if on_loss is None and receiver is not None:
            self._on_loss = receiver.losses_at(self.endpoints)
        self._from_start = from_start
        self._replay_timeout = check_number("replay_timeout", replay_timeout, unit=" seconds")
        if not isinstance(from_start, bool):
            raise TypeError(f"from_start must be True or False, got {from_start!r:.80}")
        zmq = self._zmq = load_zmq()
        check_context(context)
        self._owns_context = context is None
        self.context = zmq.Context() if context is None else context
        self._ranks: list[_SubscribedRank] = []
        try:
            for each in self.endpoints:
                self._ranks.append(_SubscribedRank(self._subscribed(each, topic)))
        except BaseException:
            self.close()
            raise

    def _check_no_loop(self, receiver: Receiver) -> None:
        """Refuse a harness that publishes its events at one of the endpoints, because each event would arrive again."""
        for publisher, worker_id in receiver.sinks_of(self.worker_id):
            bound = publisher.endpoints if isinstance(publisher, KvPublisher) else ()
            shared = [each for each in self.endpoints if each in bound]
            if shared and worker_id is None:
                raise ValueError(
                    f"the sink is of the harness that publishes at {shared[0]}: an event given to it would be "
                    "published again, as this publisher has the events of all workers: add_sink(publisher, worker_id=0)"
                )
            if shared:
                raise ValueError(
                    f"the sink belongs to the harness that publishes at {shared[0]}, whose worker {worker_id} is a "
                    "mock engine: each event would be published again. Pass a worker_id that this harness does not "
                    "have, or a sink of make_kv_sink"
                )

    def __repr__(self) -> str:
        return f"<KvSubscriber to {self.endpoints[0]}: {self.batches} batches, {len(self.lost)} losses>"

    # ------------------------------------------------------------------------------------------------ to receive

    def receive(self, batches: int = 1, timeout: float = 5.0) -> None:
        """Wait until n more batches were applied or counted as lost; replayed batches count, repeats do not.

        Args:
            batches: number of batches.
            timeout: seconds.

        Raises:
            WireTimeout: they did not arrive in time; the message says what arrived.
            Exception: any exception of the sink; it does not get the remaining events of that batch.
        """
        __tracebackhide__ = True
        wanted, deadline = self._done() + check_integer("batches", batches, 1), Deadline(timeout)
        while self._done() < wanted:
            self.poll(
                deadline.rest(lambda: self._too_late(batches, wanted, timeout, loop_lines("receive", "areceive")))
            )

    async def areceive(self, batches: int = 1, timeout: float = 5.0) -> None:  # noqa: ASYNC109 - as its twin
        """Receive while the asyncio loop runs on, also during a replay; several tasks take turns."""
        __tracebackhide__ = True
        wanted, deadline = self._done() + check_integer("batches", batches, 1), Deadline(timeout)
        while self._done() < wanted:
            if self._is_awaiting or not await self._ado(self._taken(0.0)):
                rest = deadline.rest(lambda: self._too_late(batches, wanted, timeout))
                await readable(rest, *(rank.sub for rank in self._ranks))

    def poll(self, timeout: float = 0.0) -> int:
        """Take the messages that have arrived; if there are none, wait `timeout` seconds for one.

        Returns:
            The number of messages.

        Raises:
            ValueError: the subscriber is closed, a task awaits a replay, or the timeout is not a finite number of at
                least 0.
        """
        self._check_free()
        return self._do(self._taken(timeout))

    def _taken(self, timeout: float) -> _Waits[int]:
        """Take the messages that are there or arrive within `timeout` seconds; return their number."""
        self._check_open()
        check_number("timeout", timeout, unit=" seconds")
        zmq = self._zmq
        poller = zmq.Poller()
        for rank in self._ranks:
            poller.register(rank.sub, zmq.POLLIN)
        ready = dict(poller.poll(milliseconds(timeout)))
        messages = 0
        for dp_rank, rank in enumerate(self._ranks):
            while rank.sub in ready:
                try:
                    frames = rank.sub.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                messages += 1
                waits = self._message(dp_rank, rank, frames)
                if waits is not None:
                    yield from waits
        return messages

    def catch_up(self) -> int:
        """Request all batches of each rank from the next one on, without waiting for a gap.

        Returns:
            The number of applied batches.

        Raises:
            ValueError: the subscriber was made without `replay`, or is closed, or a task awaits a replay.
        """
        self._check_free()
        return self._do(self._caught_up())

    async def acatch_up(self) -> int:
        """Catch up while the asyncio loop runs on."""
        self._check_free()
        return await self._ado(self._caught_up())

    def _caught_up(self) -> _Waits[int]:
        if not self.replay_endpoints:
            raise ValueError("catch_up needs the replay endpoint: KvSubscriber(..., replay=...)")
        before = self.batches
        for dp_rank, rank in enumerate(self._ranks):
            rank.due = rank.due or 0
            yield from self._recover(dp_rank, rank, rank.due)
        return self.batches - before

    def _check_free(self) -> None:
        self._check_open()
        if self._is_awaiting:
            raise ValueError("another task awaits a replay; only one task at a time may take batches")

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this KvSubscriber is closed")

    def _done(self) -> int:
        return self.batches + sum(len(loss.batches) for loss in self.lost)

    def _too_late(self, batches: int, wanted: int, timeout: float, more: Sequence[str] = ()) -> WireTimeout:
        arrived = batches - wanted + self._done()
        lines = [f"{arrived} of {batches} batches arrived in {timeout:g} s"]
        for dp_rank, rank in enumerate(self._ranks):
            last = "no batch yet" if rank.due is None else f"next is batch {rank.due}"
            if rank.due_before:
                last += f"; its numbers began again after batch {rank.due_before - 1}"
            lines.append(f"rank {dp_rank} at {self.endpoints[dp_rank]}: {last}")
        lines += map(str, [*self.lost[-3:], *self.problems[-3:], *more])
        return WireTimeout("\n".join(lines))

    # ------------------------------------------------------------------------------------------------ batches

    def _message(self, dp_rank: int, rank: _SubscribedRank, frames: list[bytes]) -> _Waits[None] | None:
        """Take one message: topic, number, payload. Return the remaining work of a replay; None if there is none."""
        if len(frames) != 3 or len(frames[1]) != 8:
            got = f"{len(frames)} frames" if len(frames) != 3 else f"{len(frames[1])} bytes for a number"
            self.problems.append(BatchProblem(dp_rank, None, f"expected topic, {_NUMBER}, payload; got {got}"))
            return None
        number, payload = int.from_bytes(frames[1], "big"), frames[2]
        if rank.due is None:
            rank.due = 0 if self._from_start else number
        if number < rank.due and not self._begins_anew(dp_rank, rank, number, payload):
            return None
        if number > rank.due:
            if self.replay_endpoints:
                return self._after_gap(dp_rank, rank, number, payload)
            self._lose(dp_rank, rank, number, "did not arrive")
        return self._in_turn(dp_rank, rank, number, payload)

    def _begins_anew(self, dp_rank: int, rank: _SubscribedRank, number: int, payload: bytes) -> bool:
        """Take a batch whose number is not above the last one. Return whether it is the first one after a restart."""
        due = rank.due or 0
        was = rank.seen.get(number)
        is_repeat, was_brought = was == hash(payload), number in rank.brought
        rank.brought.discard(number)
        if is_repeat:
            self.duplicates += not was_brought
            return False
        if has_no_events(decoded := self._decoded(dp_rank, rank, payload)):
            if not was_brought:
                self._note(dp_rank, number, decoded)
            return False
        is_later = _is_later(decoded.timestamp, rank.latest)
        is_lost = was is None and any(number in loss.batches for loss in self.lost if loss.dp_rank == dp_rank)
        if is_lost and not is_later:
            self.problems.append(
                BatchProblem(dp_rank, number, f"arrived after batch {due - 1}, when it counted as lost")
            )
            return False
        is_forgotten = was is None and len(rank.seen) == MOST_REMEMBERED and number < next(iter(rank.seen))
        if is_forgotten and not is_later:
            self.duplicates += 1
            return False
        how = f"came after batch {due - 1}" if number < due - 1 else "came twice, with other events"
        observed = f"batch {number} {how}: numbers went backwards, as after an unannounced restart"
        rank.begin_anew()
        rank.due_before, rank.due = due, 0
        self._report(dp_rank, range(due, due), observed)
        return True

    def _after_gap(self, dp_rank: int, rank: _SubscribedRank, number: int, payload: bytes) -> _Waits[None]:
        """Close the gap before a batch by a replay, then take the batch."""
        yield from self._recover(dp_rank, rank, number)
        waits = self._in_turn(dp_rank, rank, number, payload)
        if waits is not None:
            yield from waits

    def _in_turn(self, dp_rank: int, rank: _SubscribedRank, number: int, payload: bytes) -> _Waits[None] | None:
        """Apply a batch unless a replay has brought it. Return the work that recovers an unreadable one; None if there
        is none.
        """
        if number == rank.due:
            decoded = self._decoded(dp_rank, rank, payload)
            if is_unreadable(decoded) and self.replay_endpoints:
                self._note(dp_rank, number, decoded)
                return self._recover(dp_rank, rank, number + 1)
            self._apply(dp_rank, rank, number, payload, decoded)
        return None

    def _recover(self, dp_rank: int, rank: _SubscribedRank, stop: int) -> _Waits[None]:
        """Request batches from the next one on, and apply the answer; batches below `stop` that are still missing are
        lost.
        """
        due = rank.due or 0
        first = due
        why = "did not arrive, and a replay had no such batches any more"
        if rank.dealer is None:
            rank.dealer = self._socket(self._zmq.DEALER, self.replay_endpoints[dp_rank])
        rank.dealer.send_multipart((b"", due.to_bytes(8, "big")))
        is_whole = False
        try:
            while True:
                if not (yield rank.dealer):
                    nothing = f"nothing more came in {self._replay_timeout:g} s"
                    why = f"did not arrive, and the replay broke off: {nothing}"
                    self.problems.append(BatchProblem(dp_rank, due, f"the replay broke off before it: {nothing}"))
                    break
                frames = rank.dealer.recv_multipart()
                if len(frames) not in (3, 4) or len(frames[-2]) != 8:  # the second has the topic (vLLM from 0.28)
                    text = f"expected a reply of an empty frame, perhaps the topic, {_NUMBER}, payload; got {len(frames)} frames"  # noqa: E501
                    self.problems.append(BatchProblem(dp_rank, None, text))
                    continue
                if frames[-2] == END:
                    is_whole = True
                    break
                number, payload = int.from_bytes(frames[-2], "big"), frames[-1]
                if number < due:
                    continue
                if number > due:
                    self._brought(dp_rank, first, due)
                    self._lose(dp_rank, rank, number, why)
                    first = number
                rank.brought.add(number)
                if not self._apply(dp_rank, rank, number, payload, self._decoded(dp_rank, rank, payload)):
                    self._brought(dp_rank, first, number)
                    first = number + 1
                due = number + 1
        finally:
            if not is_whole:  # late or unread frames would be taken for the answer to the next request
                rank.dealer.close(linger=0)
                rank.dealer = None
        self._brought(dp_rank, first, due)
        if due < stop:
            self._lose(dp_rank, rank, stop, why)

    def _do(self, waits: _Waits[_T]) -> _T:
        """Do the work and block while it waits for replies."""
        try:
            socket = next(waits)
            while True:
                socket = waits.send(bool(socket.poll(milliseconds(self._replay_timeout))))
        except StopIteration as done:
            return cast("_T", done.value)
        finally:
            waits.close()

    async def _ado(self, waits: _Waits[_T]) -> _T:
        """Do the work while the asyncio loop runs on."""
        self._is_awaiting = True
        try:
            socket = next(waits)
            while True:
                is_ready = await polled(socket, self._replay_timeout, self._check_open)
                socket = waits.send(is_ready)
        except StopIteration as done:
            return cast("_T", done.value)
        finally:
            waits.close()
            self._is_awaiting = False

    def _brought(self, dp_rank: int, first: int, due: int) -> None:
        if due > first:
            self.recovered.append((dp_rank, range(first, due)))

    def _decoded(self, dp_rank: int, rank: _SubscribedRank, payload: bytes) -> Decoded:
        first = rank.next_event_id
        return decode(payload, self.dialect, worker_id=self.worker_id, dp_rank=dp_rank, first_event_id=first)

    def _apply(self, dp_rank: int, rank: _SubscribedRank, number: int, payload: bytes, decoded: Decoded) -> bool:
        """Pass the events of a batch to the sink. Return whether any could be read; otherwise the batch is lost."""
        self._note(dp_rank, number, decoded)
        rank.seen[number] = hash(payload)
        if len(rank.seen) > MOST_REMEMBERED:
            rank.seen.popitem(last=False)
        if is_unreadable(decoded):
            self.unreadable += 1
            if self._on_loss is None:
                rank.next_event_id += decoded.num_events
            others = self._others.text(payload, decoded)
            self._lose(dp_rank, rank, number + 1, f"cannot be read ({decoded.problems[0]}{others})")
            return False
        rank.due = number + 1
        rank.latest = decoded.timestamp
        self.batches += 1
        if decoded.problems and self._on_loss is not None:
            self._give_in_part(dp_rank, rank, number, decoded, self._on_loss)
            return True
        rank.next_event_id += decoded.num_events
        for event in decoded.events:
            self.events += 1
            self._sink(event)
        return True

    def _give_in_part(
        self, dp_rank: int, rank: _SubscribedRank, number: int, decoded: Decoded, on_loss: LostBatches
    ) -> None:
        """Pass the readable events to the sink, and report unreadable ones where they are missing."""
        if self.dialect.is_msgpack:  # missing events are reported once, so their ids must not also leave a gap
            for event_id, event in enumerate(decoded.events, rank.next_event_id):
                event.event.event_id = event_id
            rank.next_event_id += len(decoded.events)
        for given in events_and_gaps(decoded, number):
            if isinstance(given, str):
                on_loss(self.worker_id, dp_rank, range(number, number + 1), given)
            else:
                self.events += 1
                self._sink(given)

    def _note(self, dp_rank: int, number: int, decoded: Decoded) -> None:
        self.problems += (BatchProblem(dp_rank, number, str(problem)) for problem in decoded.problems)

    def _lose(self, dp_rank: int, rank: _SubscribedRank, stop: int, why: str) -> None:
        """Count the batches up to `stop` as lost."""
        batches = range(rank.due or 0, stop)
        rank.due = stop
        names = f"batch {batches.start}" if len(batches) == 1 else f"batches {batches.start} to {stop - 1}"
        self._report(dp_rank, batches, f"{names} {why}")

    def _report(self, dp_rank: int, batches: range, observed: str) -> None:
        self.lost.append(BatchLoss(dp_rank, batches, observed))
        if self._on_loss is not None:
            self._on_loss(self.worker_id, dp_rank, batches, observed)

    # ------------------------------------------------------------------------------------------------ sockets

    def _subscribed(self, endpoint: str, topic: str) -> Any:
        socket = self._socket(self._zmq.SUB, endpoint)
        socket.subscribe(topic)
        return socket

    def _socket(self, kind: int, endpoint: str) -> Any:
        zmq = self._zmq
        socket = self.context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVHWM, 0)  # unlimited: everything that the publisher sends is taken
        allow_ipv6(socket, endpoint)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise EndpointError(f"{endpoint} cannot be connected to: {error.strerror}") from None
        return socket

    def close(self) -> None:
        """Close the sockets. A second call does nothing."""
        self._closed = True
        for rank in self._ranks:
            rank.sub.close(linger=0)
            if rank.dealer is not None:
                rank.dealer.close(linger=0)
        if self._owns_context:
            self.context.destroy(linger=0)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _is_later(timestamp: float | None, latest: float | None) -> bool:
    """Whether a batch was written after the last applied one; False if a timestamp is missing."""
    return timestamp is not None and latest is not None and timestamp > latest
