"""The fabric: which managers reach each other, and the transfers between them.

In Dynamo, NIXL agents reach each other over a network. Here the managers of one test are in one fabric, and tests cut
links between them. The fabric does not carry block sets: Dynamo finds them by discovery, and here the test passes them
on.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Final, NamedTuple

from pytest_kvmock.contrib.block_manager.block_errors import ProgressEngineShutdown
from pytest_kvmock.contrib.block_manager.block_set import BlockSetLayout, MemType, NixlBlockSet
from pytest_kvmock.contrib.block_manager.manager_config import KvBlockManagerConfig, NixlOptions
from pytest_kvmock.contrib.block_manager.remote_errors import RemoteBlockSetError, WorkerUnreachable
from pytest_kvmock.contrib.block_manager.tier_pool import TierPool
from pytest_kvmock.values.checks import is_integer
from pytest_kvmock.values.events import StorageTier

_U64_DIGITS: Final = 20


_MEM_TYPE_OF: Final = {StorageTier.DEVICE: MemType.VRAM, StorageTier.HOST_PINNED: MemType.DRAM}


class Transfer(NamedTuple):
    """A transfer between two workers."""

    kind: str
    """"put" or "get"."""
    worker_id: int
    """The worker that carried it out."""
    remote_worker_id: int
    """The worker whose blocks were written, or read."""
    blocks: int
    payload_bytes: int
    """Bytes of the payloads; a block that was never written has none."""


class Fabric:
    """A network of block managers. All managers of a fabric reach each other, except over cut links.

    A manager joins when it is made, `KvBlockManager(config, fabric=fabric)`; no two open managers have the same worker
    id.

    Attributes:
        transfers: the transfers between workers so far, in order.
    """

    __slots__ = ("_agents", "_cut", "_joined", "transfers")

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        self._agents: dict[int, NixlAgent] = {}
        self._joined: dict[int, int] = {}
        self._cut: set[frozenset[int]] = set()

    def __repr__(self) -> str:
        cut = ", ".join(f"{a}-{b} cut" for a, b in sorted(sorted(link) for link in self._cut))
        return f"<Fabric of workers {self.workers}{cut and ': '}{cut}>"

    @property
    def workers(self) -> list[int]:
        """Ids of the workers whose managers are open, in the order in which they joined."""
        return [worker_id for worker_id, agent in self._agents.items() if not agent.is_closed]

    def is_reachable(self, worker_id: int, remote_worker_id: int) -> bool:
        """Return whether one worker reaches another: both are in the fabric and open, and the link between them is not
        cut.
        """
        workers = self.workers
        return (
            worker_id in workers
            and remote_worker_id in workers
            and worker_id != remote_worker_id
            and frozenset((worker_id, remote_worker_id)) not in self._cut
        )

    def cut_link(self, worker_id: int, other_worker_id: int) -> CutLink:
        """Cut the link between two workers: transfers between them raise WorkerUnreachable, in both directions.

        A `with` restores it at the end: `with fabric.cut_link(0, 1): ...`.

        Raises:
            ValueError: a worker is not in the fabric, both are the same, or the link is already cut.
        """
        link = self._link("cut_link", worker_id, other_worker_id)
        if link in self._cut:
            raise ValueError(f"cut_link: the link between workers {worker_id} and {other_worker_id} is cut already")
        self._cut.add(link)
        return CutLink(self, worker_id, other_worker_id)

    def restore_link(self, worker_id: int, other_worker_id: int) -> None:
        """Restore a link that was cut.

        Raises:
            ValueError: a worker is not in the fabric, both are the same, or the link is not cut.
        """
        link = self._link("restore_link", worker_id, other_worker_id)
        if link not in self._cut:
            raise ValueError(f"restore_link: the link between workers {worker_id} and {other_worker_id} is not cut")
        self._cut.remove(link)

    def exchange_blocksets(self) -> None:
        """Import the block set of each open manager into each other manager that has not imported it.

        Dynamo's workers do so when discovery shows them each other. Managers without NIXL take no part.
        """
        agents = [agent for agent in self._agents.values() if agent.is_enabled and not agent.is_closed]
        for agent in agents:
            for other in agents:
                if other is not agent and other.worker_id not in agent.imported:
                    agent.import_remote_blockset(other.export_local_blockset())

    def check_free(self, worker_id: int) -> None:
        """Check that a manager with this worker id may join.

        Raises:
            ValueError: an open manager has the same id.
        """
        present = self._agents.get(worker_id)
        if present is not None and not present.is_closed:
            raise ValueError(
                f"worker {worker_id} is in the fabric already; close its manager, or take another worker id"
            )

    def join(self, agent: NixlAgent) -> int:
        """Add an agent, and return the number of earlier agents with its worker id; called by managers.

        Raises:
            ValueError: an open manager has the same worker id.
        """
        self.check_free(agent.worker_id)
        self._agents.pop(agent.worker_id, None)
        self._agents[agent.worker_id] = agent
        incarnation = self._joined.get(agent.worker_id, 0)
        self._joined[agent.worker_id] = incarnation + 1
        return incarnation

    def reach(self, worker_id: int, remote_worker_id: int, incarnation: int) -> NixlAgent:
        """Return the agent of another worker.

        Args:
            worker_id: the worker that asks.
            remote_worker_id: the other worker.
            incarnation: incarnation of the other worker when its block set was exported.

        Raises:
            WorkerUnreachable: it is not in the fabric, closed, restarted, or the link is cut.
        """
        agent = self._agents.get(remote_worker_id)
        if agent is None:
            raise WorkerUnreachable(worker_id, remote_worker_id, "it is not in the same fabric")
        if agent.is_closed:
            raise WorkerUnreachable(worker_id, remote_worker_id, "its manager was closed")
        if agent.incarnation != incarnation:
            raise WorkerUnreachable(
                worker_id,
                remote_worker_id,
                "it was restarted, and the imported block set belongs to its former manager",
            )
        if frozenset((worker_id, remote_worker_id)) in self._cut:
            raise WorkerUnreachable(worker_id, remote_worker_id, "the link between them is cut")
        return agent

    def _link(self, step: str, worker_id: int, other_worker_id: int) -> frozenset[int]:
        for each in (worker_id, other_worker_id):
            if not is_integer(each) or each not in self._agents:
                known = ", ".join(map(str, self._agents)) or "none"
                raise ValueError(f"{step}: worker {each!r:.80} is not in the fabric; there are: {known}")
        if worker_id == other_worker_id:
            raise ValueError(f"{step}: a link has two workers, got {worker_id} twice")
        return frozenset((worker_id, other_worker_id))


class CutLink:
    """A cut link; the end of a `with` restores it, unless it was restored before."""

    __slots__ = ("_fabric", "_workers")

    def __init__(self, fabric: Fabric, worker_id: int, other_worker_id: int) -> None:
        self._fabric = fabric
        self._workers = (worker_id, other_worker_id)

    def __enter__(self) -> None:
        """Return nothing: the link is cut already."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if frozenset(self._workers) in self._fabric._cut:
            self._fabric.restore_link(*self._workers)


class NixlAgent:
    """A manager as others see it: its block sets, its imported sets, and its place in a fabric.

    Args:
        config: the configuration of the manager.
        pools: the pools of the manager.
        fabric: its fabric; None: it exchanges block sets, but reaches no other manager.
        manager: see `LocalBlockSet`.

    Attributes:
        worker_id: the worker.
        manager: the same.
        pools: the pools, by the number of their block sets.
        imported: the imported block sets, by worker id.
        incarnation: number of earlier managers with its worker id in the fabric.

    Raises:
        ValueError: the fabric has an open manager of the same worker id.
        TypeError: the fabric is invalid.
    """

    __slots__ = ("_config", "_fabric", "imported", "incarnation", "manager", "pools", "worker_id")

    def __init__(
        self, config: KvBlockManagerConfig, pools: Sequence[TierPool], fabric: Fabric | None, *, manager: object
    ) -> None:
        if fabric is not None and not isinstance(fabric, Fabric):
            raise TypeError(f"KvBlockManager: fabric must be a Fabric or None, got {fabric!r:.80}")
        self._config = config
        self._fabric = fabric
        self.worker_id = config.runtime.worker_id
        self.manager = manager
        self.pools = {pool.block_set.block_set_idx: pool for pool in pools}
        self.imported: dict[int, NixlBlockSet] = {}
        self.incarnation = 0 if fabric is None else fabric.join(self)

    def __repr__(self) -> str:
        return f"<NixlAgent of worker {self.worker_id}>"

    @property
    def is_enabled(self) -> bool:
        """Whether the configuration has NIXL."""
        return self._config.runtime.nixl is NixlOptions.ENABLED

    @property
    def is_closed(self) -> bool:
        """Whether the manager was closed, or its cancellation token cancelled."""
        return self._config.runtime.cancellation_token.is_cancelled()

    def check_open(self, step: str) -> None:
        """Check that the manager is not closed.

        Raises:
            ProgressEngineShutdown: it is closed; the message names the step.
        """
        if self.is_closed:
            raise ProgressEngineShutdown(
                f"Progress engine shutdown: {step} on the manager of worker {self.worker_id}, which was closed, "
                "or its cancellation token cancelled"
            )

    def export_local_blockset(self) -> NixlBlockSet:
        """Describe all pools; see `KvBlockManager.export_local_blockset`."""
        self.check_open("export_local_blockset")
        config, model = self._config, self._config.model
        block_sets = {}
        for index, pool in self.pools.items():
            layout = config.device_layout if pool.block_set.tier is StorageTier.DEVICE else config.host_layout
            memory = None if layout is None else layout.allocator or (layout.storage or (None,))[0]
            block_sets[index] = BlockSetLayout(
                mem_type=_MEM_TYPE_OF[pool.block_set.tier],
                num_blocks=pool.total_blocks,
                num_layers=model.num_layers,
                page_size=model.page_size,
                inner_dim=model.inner_dim,
                dtype=model.dtype,
                device_id=getattr(memory, "device_id", 0),
            )
        return NixlBlockSet(
            self.worker_id, block_sets, str(self.worker_id) if self.is_enabled else "", self.incarnation
        )

    def import_remote_blockset(self, block_set: NixlBlockSet | bytes) -> None:
        """Import the block set of another worker; see `KvBlockManager.import_remote_blockset`."""
        self.check_open("import_remote_blockset")
        if isinstance(block_set, bytes | bytearray | memoryview):
            block_set = NixlBlockSet.from_bytes(bytes(block_set))
        elif not isinstance(block_set, NixlBlockSet):
            raise TypeError(f"import_remote_blockset takes a NixlBlockSet, or its bytes, got {block_set!r:.80}")
        worker_id = block_set.worker_id
        # These checks have the order of the original.
        if worker_id == self.worker_id:
            raise RemoteBlockSetError(f"Cannot import blockset from self: it is of worker {worker_id}, as the manager")
        if not self.is_enabled:
            raise RemoteBlockSetError(
                f"NIXL agent not initialized: the manager of worker {self.worker_id} was made with nixl=disabled"
            )
        if worker_id in self.imported:
            raise RemoteBlockSetError(f"Worker ID {worker_id} already exists; cannot update remote blockset")
        if not block_set.agent_id:
            raise RemoteBlockSetError(
                f"Loading remote metadata: the block set of worker {worker_id} has none, as that was made with "
                "nixl=disabled"
            )
        if not (
            block_set.agent_id.isascii() and block_set.agent_id.isdigit() and len(block_set.agent_id) <= _U64_DIGITS
        ):
            raise RemoteBlockSetError(
                f"Failed to parse agent ID string into WorkerID (u64): {block_set.agent_id!r:.80}"
            )
        if int(block_set.agent_id) != worker_id:
            raise RemoteBlockSetError(
                f"Mismatch with remote worker ID: the metadata are of agent {block_set.agent_id}, "
                f"the block set is of worker {worker_id}"
            )
        self.imported[worker_id] = block_set

    def reach(self, remote_worker_id: int) -> NixlAgent:
        """Return the agent of a worker whose block set was imported.

        Raises:
            WorkerUnreachable: this manager is in no fabric, or does not reach the other one.
            ProgressEngineShutdown: the manager is closed.
        """
        self.check_open("a transfer")
        if self._fabric is None:
            raise WorkerUnreachable(
                self.worker_id, remote_worker_id, "it is in no fabric; make both managers with the same fabric="
            )
        return self._fabric.reach(self.worker_id, remote_worker_id, self.imported[remote_worker_id].incarnation)

    def record(self, transfer: Transfer) -> None:
        """Record a transfer that this worker carried out."""
        if self._fabric is not None:
            self._fabric.transfers.append(transfer)
