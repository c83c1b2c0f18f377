"""The load book: what a router knows of the loads of its workers by its own open requests, as Dynamo's router counts them.

A request counts from its pick, whatever the engine does with it later. Its prompt's uncached tokens are taken away as a whole at its
first token, its blocks at its end. Generated tokens, partial blocks, eviction and preemption are not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_kvmock.router.routing import RouterRequest, Worker


class Load:
    """What one worker has to do.

    Attributes:
        prefill_tokens: uncached tokens of prompts without a first token.
        requests: open requests.
        all_blocks: full blocks of the prompts of its open requests, one that several share counted as often.
    """

    __slots__ = ("_blocks", "all_blocks", "prefill_tokens", "requests")

    def __init__(self) -> None:
        self.prefill_tokens = 0
        self.requests = 0
        self.all_blocks = 0
        self._blocks: dict[int, int] = {}

    @property
    def blocks(self) -> int:
        """Distinct full blocks of the prompts of its open requests."""
        return len(self._blocks)

    def new_blocks(self, chain: Sequence[int]) -> int:
        """Return how many blocks of a chain (sequence hashes) are no leading run of an open request's."""
        held, known = self._blocks, 0
        for block in chain:
            if block not in held:
                break
            known += 1
        return len(chain) - known

    def add(self, chain: Sequence[int], prefill_tokens: int) -> None:
        """Count a request."""
        self.requests += 1
        self.prefill_tokens += prefill_tokens
        self.all_blocks += len(chain)
        held = self._blocks
        for block in chain:
            held[block] = held.get(block, 0) + 1

    def take(self, chain: Sequence[int], prefill_tokens: int) -> None:
        """Count a request no more; `prefill_tokens` are those that are left of it."""
        self.requests -= 1
        self.prefill_tokens -= prefill_tokens
        self.all_blocks -= len(chain)
        held = self._blocks
        for block in chain:
            left = held[block] - 1
            if left:
                held[block] = left
            else:
                del held[block]


class LoadBook:
    """The loads of all workers.

    Args:
        workers: who is there from the start.

    Attributes:
        loads: the load of each worker.
    """

    def __init__(self, workers: Iterable[Worker] = ()) -> None:
        self.loads: dict[Worker, Load] = {worker: Load() for worker in workers}
        self._open: dict[RouterRequest, tuple[Load, int]] = {}

    def dispatched(self, request: RouterRequest, worker: Worker, overlap: int) -> None:
        """Count a request that goes to a worker, of whose prompt so many blocks are there."""
        load = self.loads[worker]
        prefill = max(0, request.prompt_tokens - overlap * request.block_size)
        load.add(request.sequence_hashes, prefill)
        self._open[request] = load, prefill

    def first_token(self, request: RouterRequest) -> None:
        """Take away the tokens of a prompt that is computed."""
        load, prefill = self._open[request]
        load.prefill_tokens -= prefill
        self._open[request] = load, 0

    def finished(self, request: RouterRequest) -> None:
        """Take away a request that is over; one that was never dispatched is none."""
        load, prefill = self._open.pop(request, (None, 0))
        if load is not None:
            load.take(request.sequence_hashes, prefill)

    def add_worker(self, worker: Worker) -> None:
        """Open the page of one worker more."""
        self.loads[worker] = Load()

    def remove_worker(self, worker: Worker) -> None:
        """Close the page of a worker; its requests still end on it."""
        del self.loads[worker]
