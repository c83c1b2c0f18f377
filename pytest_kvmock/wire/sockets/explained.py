"""Explanations of a consumer's late answer: the lines of a `WireTimeout`, from the published and requested batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pytest_kvmock.wire.sockets.replay_server import Replay
from pytest_kvmock.wire.sockets.waiting import WireTimeout
from pytest_kvmock.wire.sockets.wire_faults import LOSE, WireInjection

_MOST_SHOWN: Final = 5
_MOST_ELEMENTS: Final = 8
"""Longer lists and maps show only their differences."""


@dataclass(frozen=True, slots=True)
class PublishedRank:
    """The batches of a rank, and their receivers.

    Attributes:
        dp_rank: the rank.
        endpoint: where it is bound.
        batches: number of published batches.
        since: for each subscription to its topic, the number of the first batch published to it.
        before: number of batches before its last restart; 0 if there was no restart, or no batch.
        unheard: number of first batches that were sent before any subscription.
        restarted_alone: whether it was restarted without its worker.
        replays: whether it answers replays.
    """

    dp_rank: int
    endpoint: str
    batches: int
    since: Sequence[int]
    unheard: int
    before: int
    restarted_alone: bool
    replays: bool

    def lines(self, asked: Sequence[Replay], injected: Sequence[WireInjection]) -> list[str]:
        """Return the lines on its published batches and their consequences.

        Args:
            asked: the replays requested from it.
            injected: the faults that were injected.
        """
        who = f"rank {self.dp_rank}"
        late = sorted({first for first in self.since if first})
        since = f", seen from batch {' and '.join(map(str, late))} on" if late else ""
        lines = [
            f"{who} has published {batches_text(self.batches) or 'no batch'}, to {len(self.since)} subscriptions{since}"
        ]
        if self.before:
            gone = f"{batches_text(self.before)} went out before that, and no replay has {'it' if self.before == 1 else 'them'}"  # noqa: E501
            lines.append(f"{who} restarted: its numbers begin with 0 again; {gone} any more")
        if self.unheard and not any(each.start == 0 and each.sent for each in asked):
            lines.append(
                f"{who}: {batches_text(self.unheard)} went out with 0 subscriptions: call wait_subscribed first"
            )
        if not self.since:
            lines += inproc_lines(self.endpoint)
        if self.restarted_alone:
            lines.append(
                f"{who} was restarted without its worker: worker.restart() empties the engine, and restarts its "
                "publisher"
            )
        lines += map(_asked_text, asked[-_MOST_SHOWN:])
        lines += [f"injected: {each.fault} at {who}, batch {each.batch}" for each in injected[-_MOST_SHOWN:]]
        lost = [each for each in injected if each.fault in LOSE]
        if lost and not asked:
            why = "" if self.replays else ", and it answers none: replay=False"
            lines.append(f"no subscriber asked {who} for a replay after {lost[0].fault} of batch {lost[0].batch}{why}")
        return lines

    def fate(self, number: int, asked: Sequence[Replay], injected: Sequence[WireInjection]) -> str:
        """Describe the fate of a batch: which subscribers got it, what fault changed it, and whether a replay had it.

        Args:
            number: the number of the batch.
            asked: the replays requested from the rank.
            injected: the faults that were injected.
        """
        faults = [each.fault for each in injected if each.batch == number]
        subscribed = sum(first <= number for first in self.since)
        parts = [f"{' and '.join(faults)} changed it on its way"] if faults else []
        if not subscribed:
            parts.append("it went to no subscription")
        elif not any(each in LOSE for each in faults):
            parts.append(f"it went to {subscribed} {'subscription' if subscribed == 1 else 'subscriptions'}")
        replay = next((each for each in reversed(asked) if each.start is not None and each.start <= number), None)
        if not self.replays:
            parts.append("it cannot be replayed")
        elif replay is None:
            parts.append("no subscriber asked for a replay of it")
        else:
            parts.append(_replay_text(replay, number))
        return ", ".join(parts)


def batches_text(count: int) -> str:
    """Return the first `count` batches as text; empty for none."""
    return "" if not count else "batch 0" if count == 1 else f"batches 0 to {count - 1}"


def inproc_lines(endpoint: str) -> list[str]:
    """Return the line to add without a subscriber: over inproc, all need the same context."""
    return ["over inproc a subscriber uses the publisher's `context`"] if endpoint.startswith("inproc://") else []


def _replay_text(replay: Replay, number: int) -> str:
    """Return a text on the last replay that could include a batch."""
    if number in replay.sent:
        return f"a replay from {replay.start} on was asked for, and had it"
    last = max(replay.sent, default=None)
    if last is not None and last > number:
        return f"a replay from {replay.start} on was asked for, and did not have it"
    ended = "sent none" if last is None else f"ended with batch {last}"
    return f"the last replay that was asked for, from {replay.start} on, {ended}, before it; none was asked for since"


def _asked_text(replay: Replay) -> str:
    swapped = None if replay.start is None else int.from_bytes(replay.start.to_bytes(8, "big"), "little")
    note = ""
    if swapped is not None and replay.start is not None and swapped < 2**32 <= replay.start:
        note = f": that is {swapped} in little-endian, and a number has its high byte first"
    return f"rank {replay.dp_rank} was asked for batches from {replay.start} on, and sent {len(replay.sent)}{note}"


def not_settled(
    probe: object,
    answer: object,
    expected: object,
    timeout: float,
    *,
    published: Sequence[PublishedRank],
    replays: Sequence[Replay],
    injected: Sequence[WireInjection],
    more: Sequence[str] = (),
) -> WireTimeout:
    """Return the error for a consumer that did not give the expected answer in time.

    Args:
        probe: the probe that queried it.
        answer: its last answer, or the AssertionError that the probe raised.
        expected: the expected answer; None: any true value.
        timeout: seconds.
        published: the published batches of each rank.
        replays: the requested replays.
        injected: the faults that were injected.
        more: further lines.
    """
    name = getattr(probe, "__qualname__", repr(probe))
    differing = _differences(answer, expected)
    if differing:
        places = "1 place" if len(differing) == 1 else f"{len(differing)} places"
        lines = [f"{name}: the answer differs from what is expected in {places} after {timeout:g} s"]
        lines += differing[:_MOST_SHOWN]
        lines += [f"  and {len(differing) - _MOST_SHOWN} more"] * (len(differing) > _MOST_SHOWN)
    else:
        wanted = "something true" if expected is None else f"{expected!r:.200}"
        lines = [f"{name}: expected {wanted}, got {answer!r:.200} after {timeout:g} s"]
    for rank in published:
        asked = [each for each in replays if each.dp_rank == rank.dp_rank]
        lines += rank.lines(asked, [each for each in injected if each.dp_rank == rank.dp_rank])
    error = WireTimeout("\n".join([*lines, *more]))
    error.__cause__ = answer if isinstance(answer, BaseException) else None
    return error


def _differences(answer: Any, expected: Any) -> list[str]:
    """Return the elements in which a long list or map differs from the expected one, one line each; empty for other
    values.
    """
    if type(answer) is not type(expected) or not isinstance(expected, list | tuple | Mapping):
        return []
    if max(len(answer), len(expected)) <= _MOST_ELEMENTS:
        return []
    if isinstance(expected, Mapping):
        ours, theirs = dict(expected), dict(answer)
    else:
        ours, theirs = dict(enumerate(expected)), dict(enumerate(answer))
    nothing = object()

    def text(value: object) -> str:
        return "nothing" if value is nothing else f"{value!r:.80}"

    pairs = [(key, ours.get(key, nothing), theirs.get(key, nothing)) for key in {**ours, **theirs}]
    return [f"  [{key!r:.80}]: expected {text(one)}, got {text(other)}" for key, one, other in pairs if one != other]
