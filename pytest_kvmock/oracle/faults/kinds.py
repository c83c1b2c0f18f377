"""The faults: their names, what each does, and which of them can be injected at random."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from pytest_kvmock.values.checks import unknown_text


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One way to break a stream.

    Attributes:
        name: the name of the fault, as a method of `Faults`, in markers and in messages.
        does: what it does, in one sentence.
        has_rate: whether it can be injected at random, at a rate.
        can_be_survived: whether a router can recover from it.
        is_block: whether it lasts until it is stopped, or for a `with` block; False: it has taken effect when its
            method returns.
    """

    name: str
    does: str
    has_rate: bool = True
    can_be_survived: bool = True
    is_block: bool = True


FAULTS: Final[Mapping[str, FaultKind]] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            FaultKind("lose", "an event does not arrive"),
            FaultKind("double", "an event arrives twice"),
            FaultKind("reorder", "an event arrives after the next one of its worker and rank"),
            FaultKind("delay", "an event arrives after `by` more of its worker and rank (2); counted, not timed"),
            FaultKind("wrong_parent", "a Stored names another parent: `parent`, or one that was never stored"),
            FaultKind("foreign", "an event arrives as another worker's: that of `to`, or the next one's"),
            FaultKind("unknown_removed", "a Removed also names blocks that were never stored, one first and one last"),
            FaultKind("self_parent", "a Stored names its first block as that block's own parent"),
            FaultKind("sink_failure", "a sink before the router raises, and the router never gets the event"),
            FaultKind("missing_first", "the first event of a worker does not arrive", has_rate=False),
            FaultKind("late_join", "the router receives nothing until the fault is stopped", has_rate=False),
            FaultKind("restart", "a worker restarts unannounced", has_rate=False, is_block=False),
            FaultKind(
                "clear",
                "a Cleared of one worker and rank arrives that it never published",
                has_rate=False,
                is_block=False,
            ),
            FaultKind(
                "salt", "a worker hashes with `lora_name` or `cache_namespace`, the router without", has_rate=False
            ),
            FaultKind("signed", "the index under test is given block hashes as signed numbers", has_rate=False),
            FaultKind(
                "block_size",
                "one more worker has blocks of another size",
                has_rate=False,
                can_be_survived=False,
                is_block=False,
            ),
            FaultKind(
                "evict", "a store drops blocks: files are deleted, a master evicts", has_rate=False, is_block=False
            ),
            FaultKind("restart_store", "a store restarts, with nothing", has_rate=False, is_block=False),
            FaultKind("trim_log", "the log of LMCache's server loses records", has_rate=False, is_block=False),
        )
    }
)
"""Every fault by name, in the order in which the documentation lists them."""


def check_rates(value: object) -> dict[str, float]:
    """Read the rates of random faults: by name, the probability that an event gets the fault, from 0 to 1.

    Raises:
        ValueError: not a mapping, an unknown fault, a fault that has no rate, or a rate out of range.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"got {value!r:.80}; allowed: a mapping of faults to rates")  # noqa: TRY004 - one family of errors
    random = [kind.name for kind in FAULTS.values() if kind.has_rate]
    out = {}
    for name, rate in value.items():
        check_fault(name)
        if name not in random:
            raise ValueError(
                f"`{name}` cannot strike at random; call `faults.{name}()`; allowed at random: {', '.join(random)}"
            )
        if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 <= rate <= 1:
            raise ValueError(f"{name}: got {rate!r}; allowed: a rate from 0 to 1")
        out[name] = float(rate)
    return out


def check_survived(value: object, where: str = "") -> tuple[str, ...]:
    """Read the names of faults that a router must survive.

    Args:
        value: the argument.
        where: the beginning of a message, such as "survive: ".

    Raises:
        ValueError: not names, an unknown fault, or a fault that no router can survive.
    """
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Iterable) or isinstance(names, Mapping):
        raise ValueError(f"{where}got {value!r:.80}; allowed: a fault, or a list of faults")  # noqa: TRY004 - one family of errors
    try:
        out = tuple(check_fault(name) for name in names)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None
    for name in out:
        if not FAULTS[name].can_be_survived:
            raise ValueError(f"{where}no router can survive `{name}`")
    return out


def check_fault(name: object) -> str:
    """Return `name` if it is the name of a fault.

    Raises:
        ValueError: it is not; the message lists the faults.
    """
    if not isinstance(name, str) or name not in FAULTS:
        raise ValueError(unknown_text("fault", name, FAULTS))
    return name
