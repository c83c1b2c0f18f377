"""Mooncake's store below an engine of vLLM: its connector in place of a `NativeOffload`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pytest_kvmock.engines.vllm.host.mooncake_ranks import LoadJob, MooncakeObjects, MooncakeRequest, SaveJob
from pytest_kvmock.engines.vllm.host.mooncake_store import MooncakeOffload, ScheduledTokensOf
from pytest_kvmock.engines.vllm.host.offload_steps import Hit, OffloadPlan, OffloadStep
from pytest_kvmock.engines.vllm.host.store_host import StoreHost
from pytest_kvmock.values.events import StorageTier

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.hashed import HashedTokens
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.engines.base.offload import TierEvent
    from pytest_kvmock.engines.vllm.host.mooncake_ranks import MooncakeRank
    from pytest_kvmock.engines.vllm.host.store_host import StoreComputing

# Theory of operation
#
# Each job is one transfer per rank, one after the other. The ranks of an engine therefore put at different times, and
# another engine may put some of a block's objects in between. Then no engine announces the block.


class MooncakeHost(StoreHost):
    """The store as the host of one engine.

    Args:
        objects: the store.
        manager: the block manager above it.
        ranks: number of ranks of tensor parallelism.
        heads: KV heads of the model.
        save_decode: whether blocks of generated tokens are put too.
        lookup_async: whether a look-up is answered one step later, with the contents of the store at the question.

    Raises:
        ValueError: this kind of manager was not recorded.

    Attributes:
        connector: plans the jobs and makes the events.
    """

    tier = StorageTier.EXTERNAL

    def __init__(
        self,
        objects: MooncakeObjects,
        manager: KvManager,
        *,
        ranks: int = 1,
        heads: int = 8,
        save_decode: bool = False,
        lookup_async: bool = False,
    ) -> None:
        super().__init__(manager)
        self.connector = MooncakeOffload(
            objects,
            manager.block_size,
            ranks=ranks,
            heads=heads,
            dcp=self._manager.dcp,
            save_decode=save_decode,
            hold=self._hold,
            free=self._free,
        )
        self._jobs: dict[int, tuple[SaveJob | LoadJob, MooncakeRank]] = {}
        self._loading: dict[MooncakeRequest, tuple[int, int]] = {}  # ranks that have not loaded, end of the load
        self._gone: tuple[Sequence[MooncakeRequest], Sequence[MooncakeRequest]] = (), ()
        self._lookup_async = lookup_async
        self._asked: dict[MooncakeRequest, int] = {}  # in this step
        self._answers: dict[MooncakeRequest, int] = {}

    @property
    def has_questions(self) -> bool:  # type: ignore[override]  # it is read alone
        """Whether look-ups wait for their answers in the next step."""
        return bool(self._asked)

    def request(self, tokens: HashedTokens) -> MooncakeRequest:
        """Make the connector's record of a request with these tokens."""
        return MooncakeRequest(tokens)

    def lookup(self, tokens: HashedTokens, start: int) -> int:
        """Count the tokens that can be loaded after `start` tokens on the device."""
        return max(0, self.connector.lookup(tokens) - start)

    def match(self, request: MooncakeRequest, start: int) -> Hit | None:
        """Look up a request that would be admitted, from its first block on; None: ask again in the next step."""
        found = self._answers.pop(request, None)
        if found is None:
            found = self.connector.lookup(request.tokens)
            if self._lookup_async and request.tokens.names:
                self._asked.setdefault(request, found)
                return None
        return Hit(start, self.connector.match(request, start, found))

    def admitted(self, request: MooncakeRequest) -> None:
        """Record that a request has blocks to compute into."""
        self.connector.allocated(request)

    def allocated(
        self,
        request: MooncakeRequest,
        blocks: Sequence[Sequence[int]],
        hit: Hit,  # noqa: ARG002 - the request has it
        named: object = None,  # noqa: ARG002 - as of a `NativeOffload`
    ) -> None:
        """Record that a request has blocks, and that a hit is loaded into them."""
        self.connector.allocated(request, [*blocks[0]])

    def plan(self, step: OffloadStep) -> OffloadPlan:
        """Plan the transfers of a step.

        Raises:
            EngineDied: a reset preempted a computing request since the last step.
        """
        # New requests first, then resumed ones, then running ones: the order in which vLLM gives them to its connector.
        computing: list[StoreComputing] = sorted(
            step.computing,  # type: ignore[arg-type]  # they are this host's
            key=lambda each: (not each.is_admitted, each.is_resumed),
        )
        scheduled = [
            ScheduledTokensOf(each.request, each.before, each.upto - each.before, each.blocks, each.is_admitted)
            for each in computing
        ]
        self._gone = list(step.preempted), list(step.finished)  # type: ignore[arg-type]  # as above
        self._answers.update(self._asked)
        self._asked.clear()
        for request in self._gone[1]:
            self._answers.pop(request, None)
        saves, loads = self.connector.plan(scheduled, *self._gone)
        out, size = OffloadPlan(), self._manager.block_size
        for rank in self.connector.ranks:
            for load in loads:
                transfer = self._transfer(load.request, (load.end - load.start) // size, is_load=True)
                self._jobs[transfer.number] = load, rank
                out.loads.append(transfer)
            for save in saves:
                transfer = self._transfer(save.request, (save.upto - save.start) // size)
                self._jobs[transfer.number] = save, rank
                out.stores.append(transfer)
        self._loading.update({load.request: (len(self.connector.ranks), load.end) for load in loads})
        return out

    def complete(self, jobs: Iterable[int]) -> list[MooncakeRequest]:
        """Carry out jobs of ranks; return the requests whose loads all ranks have finished."""
        saved: list[int] = []
        loaded: list[MooncakeRequest] = []
        for number in jobs:
            job, rank = self._jobs.pop(number)
            if isinstance(job, SaveJob):
                rank.save(job)
                saved.append(job.number)
                continue
            missing = {*rank.load(job)}
            place = next((place for place, block in enumerate(job.blocks) if block in missing), len(job.blocks))
            left, upto = self._loading.pop(job.request)
            upto = min(upto, place * self._manager.block_size)
            if left > 1:
                self._loading[job.request] = left - 1, upto
            else:
                self._loaded(job.request, upto)
                loaded.append(job.request)
        self.connector.end_step(*self._gone)
        self._gone = (), ()
        for job_number in saved:
            self.connector.reported(job_number, 1)
        return loaded

    def take_events(self) -> list[TierEvent]:
        """Take the events since the last call: only a Stored for each block that all ranks have put."""
        return self.connector.take_events()

    def empty(self) -> None:
        """Empty the store for all its engines, without an event."""
        self.connector.reset()
