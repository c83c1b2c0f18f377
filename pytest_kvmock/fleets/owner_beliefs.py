"""A router's beliefs about the blocks that workers can load from shared stores.

Theory of operation. A router that offers `overlap_by_owner(request)` is queried before each pick. No event reports what
a store has dropped, so the router may promise less than the reference index, or nothing, if it promises the same to all
workers of a store. It must not promise a worker more than the store holds, nor anything to a worker that does not use
the store. A promise begins where the faster tiers that the router tracks end: the device only, or device and host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.fleets.fleet_events import by_worker
from pytest_kvmock.fleets.report.rows import OwnerPromise
from pytest_kvmock.fleets.routing.routing import id_of
from pytest_kvmock.oracle.index.owners import first_wrong_promise
from pytest_kvmock.values.checks import is_integer, unknown_text
from pytest_kvmock.values.events import StorageTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pytest_kvmock.fleets.fleet_events import Knowledge
    from pytest_kvmock.fleets.routing.routing import RouterRequest, Worker
    from pytest_kvmock.values.shared_stores import StoreSpec

SHAPE: Final = "{store: {worker: blocks}}"


class OwnerBeliefs:
    """Compares a router's promises about stores with the reference index of the same events.

    Args:
        knowledge: the reference.
        name: the name of the router.

    Attributes:
        promises: the router's promises at each pick, in order.
    """

    def __init__(self, knowledge: Knowledge[Any], name: str) -> None:
        self._knowledge = knowledge
        self._name = name
        self.promises: list[OwnerPromise] = []

    def read(self, answer: object) -> tuple[Mapping[str, Mapping[Worker, int]], str]:
        """Return an answer by the fleet's names of workers, and the error in its shape; "" if there is none."""
        stores = self._knowledge.reference.stores
        if not isinstance(answer, Mapping) or not all(
            isinstance(each, Mapping) and all(map(is_integer, each.values())) for each in answer.values()
        ):
            return {}, f"must return {SHAPE}, got {answer!r:.80}"
        for store in answer:
            if store not in stores:
                return {}, unknown_text("store", store, stores)
        has_ranks = self._knowledge.has_ranks
        return {store: by_worker(each, has_ranks=has_ranks) for store, each in answer.items()}, ""

    def compare(
        self,
        request: RouterRequest,
        said: Mapping[str, Mapping[Worker, int]],
        is_left_out: Callable[[Worker], bool],
        noticed: Mapping[Worker, int],
    ) -> tuple[Worker, str, str, bool] | None:
        """Return the first wrong promise for a request's prompt; None if there is none.

        Args:
            request: the request.
            said: the promised blocks that each worker can load, by store.
            is_left_out: whether a worker may be promised nothing.
            noticed: blocks on the devices of workers that restarted unannounced, by an index that notices it.
        """
        self.promises.append(OwnerPromise(request.now_ms, request.number, said))
        reference, has_ranks = self._knowledge.reference, self._knowledge.has_ranks
        tiers = {
            tier: by_worker(scores, has_ranks=has_ranks)
            for tier, scores in reference.find_tiered(request.local_hashes).items()
        }

        def loaders(spec: StoreSpec) -> list[Worker]:
            there: Iterable[Worker] = tiers.get(spec.tier, {}) if has_ranks else spec.workers
            promised = said.get(spec.name, {})
            return [
                each for each in there if id_of(each) in spec.workers and (promised.get(each) or not is_left_out(each))
            ]

        device = {**tiers.get(StorageTier.DEVICE, {}), **noticed}
        wrong = first_wrong_promise(reference.stores, tiers, said, loaders, [device])
        if wrong is None:
            return None
        whole = len(request.local_hashes)
        observed = (
            f"{self._name}.overlap_by_owner() promises worker {wrong.worker!r} {wrong.blocks} of {whole} blocks from "
            f"the store {wrong.store!r}"
        )
        return wrong.worker, observed, wrong.expected, False
