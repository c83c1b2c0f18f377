"""A small asyncio router that subscribes to the KV events of its workers, and sends a request to the worker that holds
its prefix.

It reads the events of every version of vLLM and SGLang (`read_batch`), asks for missed batches, and notices a restart.
Its index uses the engine's hashes only as names: the router hashes the tokens itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

TRIES = 3
"""How often a replay is requested before the missing batches are given up."""

END = b"\xff" * 8
FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size"),
    "BlockRemoved": ("block_hashes",),
    "AllBlocksCleared": (),
}
"""The fields that it reads of each kind of event: an array begins with these, in this order, and a map has them by
name."""

_read = msgspec.msgpack.Decoder().decode


def read_batch(payload: bytes) -> tuple[float, list[tuple[str, list[Any]]]]:
    """Return the time of a batch, and the kind and values of each known event.

    Raises:
        ValueError: the payload is not a batch.
    """
    try:
        time, events, *_ = _read(payload)
        found = []
        for event in events:
            kind = event["type"] if isinstance(event, dict) else event[0]
            if kind in FIELDS:
                names = FIELDS[kind]
                values = [event[name] for name in names] if isinstance(event, dict) else event[1 : 1 + len(names)]
                found.append((kind, values))
    except (msgspec.DecodeError, TypeError, KeyError, IndexError) as error:
        raise ValueError(f"no batch: {error!r}") from error
    return time, found


def chain(tokens: Sequence[int], block_size: int, parent: int = 0) -> Iterator[int]:
    """Yield the router's hash of each whole block, which also covers all tokens before it."""
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = hash((parent, *tokens[end - block_size : end]))
        yield parent


class Worker:
    """The router's state of one worker.

    Attributes:
        next: number of the next batch; None before the first one.
        time: time of the last batch.
        names: the router's hash of each held block, by the engine's hash.
        stored: number of copies, by the engine's hash (vLLM keeps several).
        copies: number of copies under any name, by the router's hash.
    """

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.endpoint, self.replay_endpoint = endpoint, replay_endpoint
        self.next: int | None = None
        self.time = float("-inf")
        self.forget()

    def forget(self) -> None:
        self.names: dict[int, int] = {}
        self.stored: Counter[int] = Counter()
        self.copies: Counter[int] = Counter()

    def apply(self, events: list[tuple[str, list[Any]]]) -> None:
        for kind, values in events:
            if kind == "AllBlocksCleared":
                self.forget()
            elif kind == "BlockRemoved":
                for name in values[0]:
                    if name in self.names:
                        self.remove(name)
            else:
                names, parent, tokens, block_size = values
                before = 0 if parent is None else self.names.get(parent)
                if before is None:
                    continue  # its parent is unknown, so it is no prefix
                for name, block in zip(names, chain(tokens, block_size, before), strict=False):
                    self.names[name] = block
                    self.stored[name] += 1
                    self.copies[block] += 1

    def remove(self, name: int) -> None:
        """Remove a copy, and all entries with the last one: an index that keeps more grows without bound."""
        block = self.names[name]
        self.stored[name] -= 1
        self.copies[block] -= 1
        if not self.stored[name]:
            del self.stored[name], self.names[name]
        if not self.copies[block]:
            del self.copies[block]


class ZmqRouter:
    """A router with an index from its workers' events. It is an async context manager.

    Args:
        block_size: tokens per block of all workers.
        workers: endpoint and replay endpoint of each worker.
        patience: seconds without an answer after which the rest of a replay is requested again.
    """

    def __init__(self, block_size: int, workers: Sequence[tuple[str, str]], patience: float = 2.0) -> None:
        self.block_size = block_size
        self.patience = patience
        self.workers = [Worker(*endpoints) for endpoints in workers]
        self._context = zmq.asyncio.Context()

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._listen(worker)) for worker in self.workers]
        return self

    async def __aexit__(self, *raised: object) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)
        for error in ended:
            if isinstance(error, Exception):  # it had stopped listening; a cancelled task has no error
                raise error

    def overlap(self, tokens: Sequence[int]) -> dict[int, int]:
        """Return the number of leading blocks of a prompt that each worker holds; workers without any are absent."""
        found = {}
        for number, worker in enumerate(self.workers):
            for depth, block in enumerate(chain(tokens, self.block_size), 1):
                if block not in worker.copies:
                    break
                found[number] = depth
        return found

    def route(self, tokens: Sequence[int]) -> int:
        """Choose the worker with the longest prefix; the first of equals."""
        overlap = self.overlap(tokens)
        return max(range(len(self.workers)), key=lambda worker: overlap.get(worker, 0))

    # ------------------------------------------------------------------------------------------------ one worker

    async def _listen(self, worker: Worker) -> None:
        with self._context.socket(zmq.SUB) as socket:
            socket.subscribe(b"")
            socket.connect(worker.endpoint)
            while True:
                _, number, payload = await socket.recv_multipart()
                await self._take(worker, int.from_bytes(number, "big"), payload)

    async def _take(self, worker: Worker, number: int, payload: bytes) -> None:
        try:
            time, events = read_batch(payload)
        except ValueError:  # corrupted on the way; a replay has the original
            await self._replay(worker, number + 1)
            return
        if worker.next is not None and number < worker.next and time > worker.time:
            worker.forget()  # an old number at a later time: it was restarted, and lost its blocks
            worker.next = None
        if number > (worker.next or 0):
            await self._replay(worker, number)
        if number >= (worker.next or 0):
            worker.apply(events)
            worker.next, worker.time = number + 1, time

    async def _replay(self, worker: Worker, end: int) -> None:
        """Ask for the batches before `end`, and drop the worker's blocks if some batches are gone."""
        for _ in range(TRIES):
            start = worker.next or 0
            if start >= end:
                return
            with self._context.socket(zmq.DEALER) as socket:
                socket.linger = 0
                socket.connect(worker.replay_endpoint)
                await socket.send_multipart([b"", start.to_bytes(8, "big")])
                try:
                    while True:
                        async with asyncio.timeout(self.patience):
                            *_, number, payload = await socket.recv_multipart()  # with or without the topic before
                        if number == END:
                            break
                        self._replayed(worker, int.from_bytes(number, "big"), payload)
                except TimeoutError:
                    continue
        if (worker.next or 0) < end:
            worker.forget()
            worker.next = end

    def _replayed(self, worker: Worker, number: int, payload: bytes) -> None:
        if number < (worker.next or 0):
            return
        try:
            time, events = read_batch(payload)
        except ValueError:  # unreadable: lost, like batches that no replay has
            time, events = worker.time, None
        if events is None or number > (worker.next or 0):
            worker.forget()  # the lost batches may have removed any block
        worker.apply(events or [])
        worker.next, worker.time = number + 1, time
