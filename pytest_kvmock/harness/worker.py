"""A worker whose events a harness hears."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final

from pytest_kvmock.cache.manager import KvManager, protocol_mismatch
from pytest_kvmock.engine.worker import KvWorker
from pytest_kvmock.events import BlockTokens, KvCacheEvent, RouterEvent, StorageTier
from pytest_kvmock.harness.recording import RecordedRequest

if TYPE_CHECKING:
    from pytest_kvmock.backends import BackendSpec, EngineProfile
    from pytest_kvmock.harness.router_harness import RouterHarness
    from pytest_kvmock.sinks import Sink
    from pytest_kvmock.tokens import Prompt


_MANAGERS: Final[set[type]] = set()
"""Classes whose objects were found to be managers: each test makes some."""


class HarnessWorker(KvWorker):
    """A worker of a harness: made by its profile, heard by it, and it may be told of a restart.

    Args:
        harness: who hears it.
        spec: its backend.
        worker_id: its id.
        dp_rank: its rank.
        rng: source of generated tokens and of the names of partial blocks.
        profile: size and kind, if they are not the harness's.

    Raises:
        ValueError: the backend refused, raised, or made what is no manager or one that calls itself otherwise.

    Attributes:
        spec: its backend.
    """

    def __init__(
        self,
        harness: RouterHarness,
        spec: BackendSpec,
        worker_id: int,
        dp_rank: int,
        rng: Random,
        *,
        profile: EngineProfile | None = None,
    ) -> None:
        profile = profile or harness.profile

        def make(sink: Sink | None) -> KvManager:
            try:
                manager = spec.make(
                    num_blocks=profile.num_blocks, block_size=profile.block_size, dp_rank=dp_rank, sink=sink
                )
            except ValueError:  # it refuses what it was given, and says so
                raise
            except Exception as error:
                raise ValueError(f"backend {spec.name!r}: make raised {type(error).__name__}: {error}") from error
            if type(manager) not in _MANAGERS:
                wrong = protocol_mismatch(manager, KvManager)
                if wrong is not None:
                    raise ValueError(f"backend {spec.name!r} made {wrong}")
                _MANAGERS.add(type(manager))
            if manager.backend != spec.name:
                raise ValueError(
                    f"backend {spec.name!r} made a manager that calls itself {manager.backend!r}; "
                    "a test would run on another backend than its id says"
                )
            return manager

        self.spec = spec
        self._harness = harness
        self._unheard: list[RouterEvent] | None = []
        caching, chunk = profile.prefix_caching, profile.chunk
        super().__init__(
            make, worker_id, dp_rank, sink=self, prefix_caching=caching, chunk=chunk, rng=rng, driver=spec.driver
        )

    def publish(
        self,
        event: KvCacheEvent,
        storage_tier: StorageTier = StorageTier.DEVICE,
        token_ids: BlockTokens | None = None,
    ) -> None:
        """Say an event, with this worker's name; what it says for a request has its engine's hashes."""
        said = RouterEvent(self.worker_id, event, storage_tier, token_ids)
        if self._unheard is None:
            self._harness.hear(said, chained=self.serving)
        else:
            self._unheard.append(said)

    def listen(self) -> None:
        """From now on the harness hears it; first what it said when it was made."""
        unheard, self._unheard = self._unheard, None
        for event in unheard or ():
            self._harness.hear(event)

    def _request(self, prompt: Prompt) -> RecordedRequest:
        return RecordedRequest(self, prompt, self._harness.recording)

    def clear(self) -> bool:
        """As `KvWorker.clear`."""
        self._harness.recording.operate("clear", (self.worker_id, self.dp_rank))
        return super().clear()

    def restart(self, *, announced: bool = False) -> None:
        """As `KvWorker.restart`; harness and index are told, if it is announced."""
        self._harness.recording.operate("restart", (self.worker_id, self.dp_rank), argument=announced)
        self._harness.restarted(self, announced=announced)
        super().restart(announced=announced)
