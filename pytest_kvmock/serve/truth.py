"""What is true of the caches behind a server: what a router should know, and how what it knows differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_kvmock.checks import is_integer
from pytest_kvmock.events import KvCacheEvent, Removed, RouterEvent

if TYPE_CHECKING:
    from pytest_kvmock.harness import RouterHarness
    from pytest_kvmock.tokens import Prompt


class Truth:
    """What the workers of a harness hold, by the events that they published.

    Args:
        harness: whose workers.

    Attributes:
        differences: what `check` found to differ.
    """

    def __init__(self, harness: RouterHarness) -> None:
        self._harness = harness
        self._batches: Mapping[tuple[int, int], Any] = {}
        self.differences: list[str] = []

    def _scores(self, prompt: Prompt) -> Mapping[tuple[int, int], int]:
        hashes = prompt.block_hashes(self._harness.profile.block_size)
        return self._harness.reference.find_matches(hashes).scores

    def held(self, prompt: Prompt) -> dict[int, int]:
        """Return how many leading blocks each worker holds, the best rank of each; workers without any are absent."""
        found: dict[int, int] = {}
        with self._harness.publisher.lock:
            for (worker, _), blocks in self._scores(prompt).items():
                found[worker] = max(blocks, found.get(worker, 0))
        return found

    def expect(self, prompt: Prompt) -> dict[str, Any]:
        """Return what a router should know; see `KvServer.expect`."""
        with self._harness.publisher.lock:
            scores = sorted(self._scores(prompt).items())
            blocks = [{"worker": worker, "rank": rank, "blocks": count} for (worker, rank), count in scores]
            return {"blocks": blocks, "last_batch": self.last_batches(), "tokens": list(prompt.tokens or ())}

    def last_batches(self) -> list[dict[str, int]]:
        """Return of each worker and rank the number of its last batch."""
        return [
            {"worker": worker, "rank": rank, "number": publisher.batches(rank) - 1}
            for (worker, rank), publisher in self._batches.items()
        ]

    def numbered_by(self, publishers: Mapping[tuple[int, int], Any]) -> None:
        """Take note of who numbers the batches of each worker and rank (`KvPublisher`)."""
        self._batches = publishers

    def check(
        self, prompt: Prompt, blocks: Sequence[Mapping[str, int]], last_batch: Sequence[Mapping[str, int]] | None
    ) -> str | None:
        """Compare what a router knows with the truth; see `KvServer.check`."""
        known = _checked("blocks", blocks, "blocks", least=0)
        numbers = None if last_batch is None else _checked("last_batch", last_batch, "number", least=-1)
        with self._harness.publisher.lock:
            expected = self.expect(prompt)
            if numbers is not None and numbers != _by_rank(expected["last_batch"], "number"):
                return None
        true = _by_rank(expected["blocks"], "blocks")
        text = "; ".join(
            f"worker {key[0]} rank {key[1]}: the router knows {known.get(key, 0)} blocks, {true.get(key, 0)} are held"
            for key in sorted(known.keys() | true.keys())
            if known.get(key, 0) != true.get(key, 0)
        )
        if text:
            self.differences.append(f"a prompt of {len(expected['tokens'])} tokens: {text}")
        return text


def _checked(name: str, rows: object, value: str, least: int) -> dict[tuple[int, int], int]:
    """Return rows of numbers by worker and rank.

    Raises:
        TypeError: they are something else.
    """
    shape = f'[{{"worker": 0, "rank": 0, "{value}": 4}}]'
    if not isinstance(rows, list | tuple):
        raise TypeError(f"check: {name} must be rows as expect returns them, {shape}, got {rows!r:.80}")
    for row in rows:
        fits = isinstance(row, Mapping) and {"worker", value} <= set(row)
        if (
            not fits
            or not all(map(is_integer, (row["worker"], row.get("rank", 0))))
            or not is_integer(row[value], least)
        ):
            raise TypeError(f"check: a row of {name} must be as in {shape}, got {row!r:.80}")
    return _by_rank(rows, value)


def _by_rank(rows: Sequence[Mapping[str, int]], value: str) -> dict[tuple[int, int], int]:
    return {(row["worker"], row.get("rank", 0)): row[value] for row in rows}


def all_removed(harness: RouterHarness, worker: int, rank: int) -> list[RouterEvent]:
    """Return Removed of all that a rank's events say is held: the last stored first, so that children come before parents."""
    stream = harness.streams.get((worker, rank))
    if stream is None:
        return []
    found: list[RouterEvent] = []
    for tier, held in stream.tiers.items():
        copies = stream.copies.get(tier, {})
        blocks = [block for block in reversed(held) for _ in range(1 + copies.get(block, 0))]
        if blocks:
            found.append(RouterEvent(worker, KvCacheEvent(0, Removed(tuple(blocks)), rank), tier))
    return found
