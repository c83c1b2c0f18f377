"""Faults of the wire: they change batches that already have numbers, so that a router can find gaps."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from pytest_kvmock.values.checks import check_integer
from pytest_kvmock.values.dialect import Dialect
from pytest_kvmock.wire.codec.event_fields import REMOVED, STORED

UNKNOWN_TAG: Final = "BlockPinned"
"""The tag of an event that no engine has."""

MOST_BATCHES: Final = 2**30
"""Maximum batches of one fault."""

UNKNOWN_FIELD: Final = "kvmock_field"
"""A field that no engine has."""

UNKNOWN_MEDIUM: Final = "KVMOCK_TAPE"
"""A medium that no engine has."""


LOSE: Final = ("lose", "gap_beyond_buffer", "late_join", "slow_subscriber", "corrupt")
"""The faults after which a consumer must request a replay."""

MAY_LOSE: Final = (*LOSE, "reorder", "unknown_tag", "unknown_medium")
"""The faults by which a subscriber may lose a batch or one of its events, such as a late batch, or one with an unknown
tag or medium.
"""


class Numbered(NamedTuple):
    """A batch with its number."""

    number: int
    payload: bytes


class Outcome(NamedTuple):
    """The effect of a fault on a batch: the batches sent now, those kept for a replay, and whether older ones stay."""

    sent: tuple[Numbered, ...]
    kept: Numbered | None
    forgets_older: bool = False


@dataclass(frozen=True, slots=True)
class WireInjection:
    """One injected fault.

    Attributes:
        fault: its name.
        dp_rank: the rank.
        batch: the number of the batch; for a truncated replay, the first batch that was left out or would be next.
        restarts: number of the rank's restarts after it had published; a restart includes itself.
    """

    fault: str
    dp_rank: int
    batch: int
    restarts: int = 0


class _Planned:
    """A requested fault: its change of a batch, and the number of batches left."""

    __slots__ = ("change", "dp_rank", "left", "name")

    def __init__(self, name: str, left: int, dp_rank: int | None, change: Callable[[Numbered], Outcome]) -> None:
        self.name, self.left, self.dp_rank, self.change = name, left, dp_rank, change


class WireFaults:
    """The faults of a publisher, requested by a test: each changes the next batches, in the order of the requests.

    Args:
        dialect: the dialect of the publisher.
        restart: restarts the publisher.
        check_rank: raises a ValueError for an unknown rank.

    Attributes:
        injected: the faults injected so far.
    """

    def __init__(
        self, dialect: Dialect, restart: Callable[[int | None], None], check_rank: Callable[[int], int]
    ) -> None:
        self.injected: list[WireInjection] = []
        self._dialect = dialect
        self._restart = restart
        self._check_rank = check_rank
        self._planned: deque[_Planned] = deque()
        self._truncated: deque[tuple[int, bool]] = deque()
        self._published = False
        self._restarts: Counter[int] = Counter()  # by rank

    def __repr__(self) -> str:
        return f"<WireFaults: {len(self.injected)} injected, {len(self.unused)} not used yet>"

    @property
    def unused(self) -> list[str]:
        """The requested faults that were not injected as often as they should be, as text."""
        planned = [
            f"{each.name} ({each.left} {'batch' if each.left == 1 else 'batches'} left)"
            for each in list(self._planned)  # the publishing thread changes it
        ]
        return planned + ["truncate_replay (no replay was long enough to cut)"] * len(self._truncated)

    # ------------------------------------------------------------------------------------------------ to ask for

    def lose(self, batches: int = 1, *, dp_rank: int | None = None) -> None:
        """Lose the next batches; a replay has them."""
        self._plan("lose", batches, dp_rank, lambda batch: Outcome((), batch))

    def double(self, batches: int = 1, *, dp_rank: int | None = None) -> None:
        """Send each of the next batches twice."""
        self._plan("double", batches, dp_rank, lambda batch: Outcome((batch, batch), batch))

    def reorder(self, *, dp_rank: int | None = None) -> None:
        """Send the next two batches in reverse order: the first one after the second."""
        held: list[Numbered] = []

        def swap(batch: Numbered) -> Outcome:
            held.append(batch)
            return Outcome((batch, held[0]) if len(held) == 2 else (), batch)

        self._plan("reorder", 2, dp_rank, swap)

    def gap_beyond_buffer(self, batches: int = 1, *, dp_rank: int | None = None) -> None:
        """Lose the next batches, and drop them and all earlier ones from the buffer: a replay begins after them."""
        self._plan("gap_beyond_buffer", batches, dp_rank, lambda _: Outcome((), None, forgets_older=True))

    def late_join(self, batches: int = 1, *, dp_rank: int | None = None) -> None:
        """Publish the first batches as if there were no subscriber yet; a replay has them.

        Raises:
            ValueError: a batch was published already.
        """
        if self._published:
            raise ValueError("late_join must be requested before the first batch is published")
        self._plan("late_join", batches, dp_rank, lambda batch: Outcome((), batch))

    def slow_subscriber(self, queued: int = 1, lost: int = 1, *, dp_rank: int | None = None) -> None:
        """Treat subscribers as too slow: the next batches wait in a full queue, and later ones are lost.

        ZMQ drops new messages of a queue at its high-water mark. The waiting batches are sent before the next batch
        after the lost ones.

        Args:
            queued: number of batches that wait.
            lost: number of batches that are lost after these; a replay has them.
            dp_rank: the rank; None: the first one that publishes.
        """
        _check_batches("queued", queued)
        _check_batches("lost", lost)
        waiting: list[Numbered] = []
        seen: list[Numbered] = []

        def slow(batch: Numbered) -> Outcome:
            seen.append(batch)
            if len(seen) <= queued:
                waiting.append(batch)
                return Outcome((), batch)
            return Outcome((*waiting, batch) if len(seen) > queued + lost else (), batch)

        self._plan("slow_subscriber", queued + lost + 1, dp_rank, slow)

    def corrupt(self, batches: int = 1, *, dp_rank: int | None = None) -> None:
        """Send the next batches with a first byte that msgpack does not have; a replay has the original batches."""
        self._plan(
            "corrupt",
            batches,
            dp_rank,
            lambda batch: Outcome((batch._replace(payload=b"\xc1" + batch.payload[1:]),), batch),
        )

    def unknown_tag(self, batches: int = 1, *, dp_rank: int | None = None) -> None:
        """Begin the next batches with an event of an unknown kind, as a later version may; also in a replay."""
        self._edit("unknown_tag", batches, dp_rank, self._with_unknown_tag)

    def unknown_medium(self, batches: int = 1, *, dp_rank: int | None = None) -> None:
        """Add to the next batches, before and after their events, removals of stored blocks from an unknown medium.

        A replay has them too.

        Raises:
            ValueError: the events of the dialect have no medium.
        """
        if not self._dialect.media:
            raise ValueError(f"unknown_medium: events of {self._dialect.name} have no medium")
        self._edit("unknown_medium", batches, dp_rank, self._with_unknown_medium)

    def extra_field(self, batches: int = 1, *, dp_rank: int | None = None) -> None:
        """Give each event of the next batches an unknown field, as a later version may; also in a replay."""
        self._edit("extra_field", batches, dp_rank, self._with_extra_field)

    def restart(self, *, dp_rank: int | None = None) -> None:
        """Restart the publisher now: batches are numbered from 0 again, and a replay has no earlier ones.

        The engine keeps its blocks: `KvWorker.restart()` empties it and also restarts its publisher.
        """
        before = Counter(self._restarts)
        self._restart(dp_rank)
        begun = [rank for rank, restarts in self._restarts.items() if restarts != before[rank]]
        self.injected += (self._injection("restart", rank, 0) for rank in begun or [dp_rank or 0])

    def truncate_replay(self, after: int = 0, *, end_marker: bool = True) -> None:
        """Truncate the next replay answer that has something to leave out: a batch or the end marker.

        Args:
            after: number of batches that are sent.
            end_marker: whether the end marker of the answer follows.
        """
        if not isinstance(end_marker, bool):
            raise ValueError(f"end_marker must be True or False, got {end_marker!r:.80}")  # noqa: TRY004 - as the others
        self._truncated.append((_check_batches("after", after, 0), end_marker))

    # ------------------------------------------------------------------------------------------------ to publish

    def strike(self, dp_rank: int, batch: Numbered) -> Outcome | None:
        """Return the outcome of a fault for a rank's batch; None if the batch is sent and kept unchanged.

        Raises:
            ValueError: a fault cannot change the payload because it is not a batch; the fault still waits.
        """
        self._published = True
        for planned in self._planned:
            if planned.dp_rank in (None, dp_rank):
                break
        else:
            return None
        if planned.dp_rank is None and planned.name in ("reorder", "slow_subscriber"):
            planned.dp_rank = dp_rank  # the swapped batches belong to one rank
        outcome = planned.change(batch)
        planned.left -= 1
        if not planned.left:
            self._planned.remove(planned)
        self.injected.append(self._injection(planned.name, dp_rank, batch.number))
        return outcome

    def truncated(self, dp_rank: int, batches: list[Numbered]) -> tuple[list[Numbered], bool]:
        """Return the batches that a replay sends, and whether the end marker follows."""
        if not self._truncated:
            return batches, True
        after, end_marker = self._truncated[0]
        left_out = batches[after:]
        if end_marker and not left_out:
            return batches, True
        self._truncated.popleft()
        number = left_out[0].number if left_out else batches[-1].number + 1 if batches else 0
        self.injected.append(self._injection("truncate_replay", dp_rank, number))
        return batches[:after], end_marker

    def begun_anew(self, dp_rank: int) -> None:
        """Note that a rank that had published numbers batches from 0 again."""
        self._restarts[dp_rank] += 1

    def take_over(self, closed: WireFaults, dp_rank: int, *, published: bool) -> None:
        """Continue counting the restarts of a rank after a closed publisher; if that had published, add one."""
        self._restarts[dp_rank] = closed.restarts(dp_rank) + published

    def restarts(self, dp_rank: int) -> int:
        """Return the number of a rank's restarts after it had published."""
        return self._restarts[dp_rank]

    def _injection(self, name: str, dp_rank: int, batch: int) -> WireInjection:
        return WireInjection(name, dp_rank, batch, self._restarts[dp_rank])

    # ------------------------------------------------------------------------------------------------ changes

    def _plan(self, name: str, batches: int, dp_rank: int | None, change: Callable[[Numbered], Outcome]) -> None:
        _check_batches("batches", batches)
        if dp_rank is not None:
            self._check_rank(dp_rank)
        self._planned.append(_Planned(name, batches, dp_rank, change))

    def _edit(self, name: str, batches: int, dp_rank: int | None, edit: Callable[[list[Any]], list[Any]]) -> None:
        def change(batch: Numbered) -> Outcome:
            from pytest_kvmock.wire.codec.structs import load_msgspec

            msgspec = load_msgspec()
            try:
                timestamp, events, *rank = msgspec.msgpack.decode(batch.payload)
                payload = msgspec.msgpack.encode([timestamp, edit(events), *rank])
            except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
                raise ValueError(
                    f"{name} changes the events of a batch, and the payload of batch {batch.number} is none: {error}"
                ) from None
            edited = batch._replace(payload=payload)
            return Outcome((edited,), edited)

        self._plan(name, batches, dp_rank, change)

    def _with_unknown_tag(self, events: list[Any]) -> list[Any]:
        return [[UNKNOWN_TAG] if self._dialect.form == "array" else {"type": UNKNOWN_TAG}, *events]

    def _with_unknown_medium(self, events: list[Any]) -> list[Any]:
        left = [self._removed(event) for event in events if event and _tag(event) == STORED]
        return [*left, *events, *left]

    def _removed(self, stored: Any) -> Any:
        """Return a BlockRemoved of a BlockStored's blocks, in the unknown medium."""
        medium = {field.name: UNKNOWN_MEDIUM for field in self._dialect.removed if field.type == "medium"}
        if isinstance(stored, dict):
            same = {field.name: stored[field.name] for field in self._dialect.removed if field.name in stored}
            return {"type": REMOVED, **same, **medium}
        said = {field.name: value for field, value in zip(self._dialect.stored, stored[1:], strict=False)} | medium
        return [REMOVED, *(said.get(field.name) for field in self._dialect.removed)]

    def _with_extra_field(self, events: list[Any]) -> list[Any]:
        if self._dialect.form == "map":
            return [{**event, UNKNOWN_FIELD: True} for event in events]
        return [self._longer(event) for event in events]

    def _longer(self, event: list[Any]) -> list[Any]:
        """Return an array with one more field; if a map may follow the fields, with one more key in the map."""
        if not self._dialect.metadata or event[:1] != [STORED]:
            return [*event, UNKNOWN_FIELD]
        fields = 1 + len(self._dialect.stored)
        metadata = event[fields] if len(event) > fields else {}
        return [*event[:fields], {**metadata, UNKNOWN_FIELD: True}]


def _tag(event: Any) -> Any:
    return event.get("type") if isinstance(event, dict) else event[0]


def _check_batches(name: str, value: int, least: int = 1) -> int:
    """Return a number of batches, after a check.

    Raises:
        ValueError: it is out of range, or not an integer.
    """
    if check_integer(name, value, least) > MOST_BATCHES:
        raise ValueError(f"{name} must be at most {MOST_BATCHES}, got {value!r:.80}")
    return value
