"""The load book: the loads of a router's workers by its own open requests, as Dynamo's router counts
them.

A request counts from its pick, whatever the engine does with it later. The uncached tokens of its prompt stop counting
at its first token, its blocks at its end. Generated tokens, partial blocks, eviction and preemption do not count.

With P/D pairs, a request has one entry for each leg (`request.phase`); the two end separately. A decode leg with a
prefill worker (`request.picked`) has no tokens to compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pytest_kvmock.fleets.routing.routing import DECODE_ALONE

if TYPE_CHECKING:
    from pytest_kvmock.fleets.routing.routing import Phase, RouterRequest, Worker


class Load:
    """The load of one worker.

    Attributes:
        prefill_tokens: uncached tokens of prompts without a first token.
        requests: open requests.
    """

    __slots__ = ("_blocks", "prefill_tokens", "requests")

    def __init__(self) -> None:
        self.prefill_tokens = 0
        self.requests = 0
        self._blocks: dict[int, int] = {}

    @property
    def blocks(self) -> int:
        """Distinct full blocks of the prompts of its open requests."""
        return len(self._blocks)

    def new_blocks(self, chain: Sequence[int]) -> int:
        """Return the number of blocks of a chain (sequence hashes) that are not leading blocks of an open request."""
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
        held = self._blocks
        for block in chain:
            held[block] = held.get(block, 0) + 1

    def take(self, chain: Sequence[int], prefill_tokens: int) -> None:
        """Remove a request; `prefill_tokens` are those that still count for it."""
        self.requests -= 1
        self.prefill_tokens -= prefill_tokens
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
        workers: the workers that are there from the start.

    Attributes:
        loads: the load of each worker.
    """

    def __init__(self, workers: Iterable[Worker] = ()) -> None:
        self.loads: dict[Worker, Load] = {worker: Load() for worker in workers}
        self._open: dict[tuple[RouterRequest, Phase | None], tuple[Load, int]] = {}

    def dispatched(self, request: RouterRequest, worker: Worker, overlap: int) -> None:
        """Count a request that goes to a worker; the worker holds `overlap` blocks of its prompt."""
        load = self.loads[worker]
        prefill = max(0, request.prompt_tokens - overlap * request.block_size)
        if request.phase == "decode" and request.picked is not DECODE_ALONE:
            prefill = 0
        load.add(request.sequence_hashes, prefill)
        self._open[request, request.phase] = load, prefill

    def first_token(self, request: RouterRequest) -> None:
        """Stop counting the tokens of a prompt that is computed."""
        load, prefill = self._open[request, request.phase]
        load.prefill_tokens -= prefill
        self._open[request, request.phase] = load, 0

    def finished(self, request: RouterRequest) -> None:
        """Remove a request that is over; nothing changes if it was never dispatched."""
        load, prefill = self._open.pop((request, request.phase), (None, 0))
        if load is not None:
            load.take(request.sequence_hashes, prefill)

    def add_worker(self, worker: Worker) -> None:
        """Add a worker."""
        self.loads[worker] = Load()

    def remove_worker(self, worker: Worker) -> None:
        """Remove a worker; its requests may still end."""
        del self.loads[worker]
