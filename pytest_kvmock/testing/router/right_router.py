"""A correct router, to compare others with, and to plant bugs in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

from pytest_kvmock.fleets.routing.loads import LoadBook
from pytest_kvmock.fleets.routing.routing import NameForms
from pytest_kvmock.oracle.index.index import RadixIndex, RadixIndexError
from pytest_kvmock.values.checks import check_integer
from pytest_kvmock.values.events import RouterEvent

if TYPE_CHECKING:
    from pytest_kvmock.fleets.routing.routing import Candidate, RouterRequest, Worker


class RightRouter:
    """A router that picks by Dynamo's cost and breaks ties at random.

    Its hooks maintain an index, loads and a list of workers, and it reports what it believes.
    `examples/bug_catalogue/router_bugs.py` plants bugs in it.

    Args:
        workers: the workers at the start; pairs (id, rank) if workers have ranks.
        seed: seed of the choice among equals.
        copies: whether the engines publish every copy of a block, as vLLM does.
    """

    def __init__(self, workers: Iterable[Worker], seed: int = 0, *, copies: bool = False) -> None:
        check_integer("RightRouter: seed", seed, 0)
        self.book = LoadBook(workers)
        self.index, self.forms = RadixIndex(count_copies=copies), NameForms()
        self.has_ranks = any(isinstance(worker, tuple) for worker in self.book.loads)
        self.rng = Random(seed)  # noqa: S311 - mock data

    # --------------------------------------------------------------------------------------- what it believes

    def loads(self) -> dict[Worker, tuple[int, int, int]]:
        """Return prefill tokens, blocks and requests of each worker."""
        return {worker: (load.prefill_tokens, load.blocks, load.requests) for worker, load in self.book.loads.items()}

    def overlap(self, request: RouterRequest) -> dict[Worker, int]:
        """Return the number of leading blocks of a prompt that each worker holds; a worker without any may be
        absent.
        """
        return self._by_name(self.forms.find(self.index.find_matches, request.hashes))

    def _matched(self, local_hashes: Sequence[int]) -> dict[Worker, int]:
        return self._by_name(self.index.find_matches(local_hashes).scores)

    def _by_name(self, scores: Mapping[tuple[int, int], int]) -> dict[Worker, int]:
        return {key if self.has_ranks else key[0]: score for key, score in scores.items()}

    def workers(self) -> list[Worker]:
        """Return the workers in its list."""
        return list(self.book.loads)

    # ------------------------------------------------------------------------------------------ what it does

    def cost(self, request: RouterRequest, worker: Worker, overlap: int) -> float:
        """Return what a request costs on a worker, in blocks."""
        load, size = self.book.loads[worker], request.block_size
        prefill = (load.prefill_tokens + max(request.prompt_tokens, overlap * size)) / size
        return max(0.0, prefill - overlap) + load.blocks + load.new_blocks(request.sequence_hashes)

    def choices(self, candidates: Sequence[Candidate]) -> list[Worker]:
        """Return the candidates that it may pick: those in its list of workers."""
        there = {each.worker for each in candidates}
        return [worker for worker in self.workers() if worker in there]

    def pick(self, request: RouterRequest, candidates: Sequence[Candidate]) -> Worker | None:
        """Return a candidate of the least cost by its own load book; None if there is no candidate."""
        if not candidates:
            return None
        overlaps = self.overlap(request)
        costs = {each: self.cost(request, each, overlaps.get(each, 0)) for each in self.choices(candidates)}
        least = min(costs.values())
        return self.rng.choice([worker for worker, cost in costs.items() if cost == least])

    def dispatched(self, request: RouterRequest, worker: Worker) -> None:
        """Count a dispatched request."""
        self.book.dispatched(request, worker, self.overlap(request).get(worker, 0))

    def first_token(self, request: RouterRequest) -> None:
        """Stop counting the prefill of a request."""
        self.book.first_token(request)

    def finished(self, request: RouterRequest) -> None:
        """Stop counting a request."""
        self.book.finished(request)

    def apply(self, event: RouterEvent) -> None:
        """Apply an event; skip one that cannot be applied, as the reference index does."""
        with suppress(RadixIndexError):
            self.forms.take(event)
            self.index.apply(event)

    def worker_added(self, worker: Worker) -> None:
        """Add a worker."""
        self.has_ranks = isinstance(worker, tuple)
        self.book.add_worker(worker)

    def worker_removed(self, worker: Worker) -> None:
        """Remove a worker and its blocks."""
        self.book.remove_worker(worker)
        worker_id = worker[0] if isinstance(worker, tuple) else worker
        self.index.remove_worker(worker_id)
        self.forms.forget(worker_id)
