"""Checks of a block manager under contract, and moves that drive it.

PYTEST_DONT_REWRITE: each message is complete; pytest would add the condition below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any
from uuid import UUID

from pytest_kvmock.engines.base.manager import KvManager
from pytest_kvmock.oracle.hygiene.log import EventLog
from pytest_kvmock.values.events import BlockTokens, Cleared, KvCacheEvent, Removed, StorageTier, Stored, value_text
from pytest_kvmock.values.moves import Block, Destroy


class NotTaken(OSError):  # noqa: N818 - raised on purpose
    """The exception of a `RaisingSink`."""


class RaisingSink:
    """A sink that refuses every event.

    Attributes:
        refused: the events, in order.
    """

    def __init__(self) -> None:
        self.refused: list[KvCacheEvent] = []

    def publish(
        self,
        event: KvCacheEvent,
        storage_tier: StorageTier = StorageTier.DEVICE,  # noqa: ARG002 - a sink's signature
        token_ids: BlockTokens | None = None,  # noqa: ARG002 - a sink's signature
    ) -> None:
        """Record and refuse an event."""
        self.refused.append(event)
        raise NotTaken("the contract's sink takes nothing")


class MoveTraffic:
    """Requests that use chains of a small tree, promote, and free their blocks tail first, as schedulers do.

    Args:
        manager: the manager under contract.
        seed: seed of the traffic.
        fitting: whether to make a Use only if it fits, and to destroy a freed partial block.
    """

    def __init__(self, manager: KvManager, seed: int, *, fitting: bool = False) -> None:
        self._manager = manager
        self._fitting = fitting
        self._rng = Random(seed)  # noqa: S311 - mock data
        self._requests: list[list[Block]] = []

    @property
    def references(self) -> dict[Block, int]:
        """The blocks in use, and the number of references to each."""
        counts: dict[Block, int] = {}
        for request in self._requests:
            for block in request:
                counts[block] = counts.get(block, 0) + 1
        return counts

    def step(self) -> None:
        """Do one move; none if the drawn move is not possible now."""
        rng, requests = self._rng, self._requests
        kind = rng.choice(["use", "use", "promote", "free", "clear"])
        if kind == "use":
            chain = _path_to(rng.randint(1, 20))
            blocks: list[Block] = (
                [*chain, UUID(int=rng.getrandbits(128), version=4)] if rng.random() < 0.5 else [*chain]
            )
            if self._fitting and self._shortage(blocks):
                return
            served = self._manager.use(blocks)
            if served:
                requests.append(blocks[:served])
        elif kind == "promote":
            growing = [request for request in requests if len(request) > 1 and isinstance(request[-1], UUID)]
            if growing:
                request = rng.choice(growing)
                parent, partial = request[-2:]
                assert isinstance(parent, int) and isinstance(partial, UUID)
                block = 2 * parent + rng.randint(0, 1)
                self._manager.promote(partial, block, parent=parent)
                request[-1] = block
        elif kind == "free" and requests:
            freed = requests.pop(rng.randrange(len(requests)))[::-1]
            if self._fitting and isinstance(freed[0], UUID):
                self._manager.process(Destroy(freed[:1]))
                del freed[0]
            self._manager.deref(freed)
        elif kind == "clear":
            self._manager.clear()

    def _shortage(self, blocks: Sequence[Block]) -> bool:
        manager = self._manager
        new = sum(not manager.references(block) for block in blocks)
        return new > manager.num_blocks - manager.num_active_blocks


def _path_to(block: int) -> list[int]:
    """Return the chain to a block. Block n is a child of block n // 2, and block 1 is the root."""
    return [block >> shift for shift in range(block.bit_length() - 1, -1, -1)]


# --------------------------------------------------------------------------------------------------- messages


def published_rows(events: EventLog) -> list[tuple[Any, ...]]:
    """Return the events, one row per block: kind, block, and a Stored's parent."""
    rows: list[tuple[Any, ...]] = []
    for entry in events:
        data = entry.event.event.data
        if isinstance(data, Stored):
            parents = (data.parent_hash, *data.block_hashes)
            rows += [("Stored", block, parent) for block, parent in zip(data.block_hashes, parents, strict=False)]
        elif isinstance(data, Removed):
            rows += [("Removed", block) for block in data.block_hashes]
        elif isinstance(data, Cleared):
            rows.append(("Cleared",))
    return rows


def expect_published(events: EventLog, expected: Sequence[tuple[Any, ...]], after: str) -> None:
    """Take the events since the last call, and compare them, one row per block."""
    __tracebackhide__ = True
    published = published_rows(events)
    events.take()
    got, due = (value_text(rows) if rows else "nothing" for rows in (published, list(expected)))
    assert list(expected) == published, f"after {after} it published {got}; expected {due}"


def expect_served(manager: KvManager, blocks: Sequence[Block], expected: int) -> None:
    """Check that a Use returns `expected` leading blocks."""
    __tracebackhide__ = True
    served = manager.use(blocks)
    assert expected == served, f"use({value_text(list(blocks))}) answered {served!r}; expected {expected}, for they fit"


def expect_counts(manager: KvManager, *, active: int, references: int, inactive: int) -> None:
    """Check the three counts, and the share in use."""
    __tracebackhide__ = True
    counts = (manager.num_active_blocks, manager.num_active_block_refs, manager.num_inactive_blocks)
    assert (active, references, inactive) == counts, (
        f"(num_active_blocks, num_active_block_refs, num_inactive_blocks) is {counts}; "
        f"expected {(active, references, inactive)}"
    )
    share = active / manager.num_blocks
    assert share == manager.active_perc, f"active_perc is {manager.active_perc}; expected {share}"


def expect_references(manager: KvManager, expected: dict[Block, int]) -> None:
    """Check the blocks in use, and the number of references to each."""
    __tracebackhide__ = True
    held = dict(manager.active_blocks)
    assert expected == held, f"active_blocks is {value_text(held)}; expected {value_text(expected)}"
    for block, count in expected.items():
        assert count == manager.references(block), (
            f"references({value_text(block)}) is {manager.references(block)}; active_blocks has {count}"
        )


def expect_resident(manager: KvManager, expected: Sequence[int] | set[int]) -> None:
    """Check the cached blocks, in any order."""
    __tracebackhide__ = True
    resident = sorted(manager.resident())
    assert sorted(expected) == resident, (
        f"resident() is {value_text(resident)}; expected {value_text(sorted(expected))}"
    )


def state_of(manager: KvManager) -> dict[str, Any]:
    """Return the visible state of a manager."""
    return {
        "active_blocks": dict(manager.active_blocks),
        "inactive_blocks": manager.inactive_blocks(),
        "resident": sorted(manager.resident()),
        "num_active_blocks": manager.num_active_blocks,
        "num_active_block_refs": manager.num_active_block_refs,
        "num_inactive_blocks": manager.num_inactive_blocks,
    }


def expect_unchanged(manager: KvManager, before: dict[str, Any], by: str) -> None:
    """Check that the visible state (`state_of`) is unchanged."""
    __tracebackhide__ = True
    expect_same(before, state_of(manager), by)


def expect_same(before: dict[str, Any], after: dict[str, Any], by: str) -> None:
    """Check that the visible values in `before` are unchanged."""
    __tracebackhide__ = True
    changed = [
        f"{name} from {value_text(before[name])} to {value_text(after[name])}"
        for name in before
        if before[name] != after[name]
    ]
    assert not changed, f"{by} changed {', '.join(changed)}"
