"""The rules of event hygiene: names, severity, and the conditions that break them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

from pytest_kvmock.values.checks import unknown_text


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        name: the name of the rule, in markers, options and messages.
        kind: an "error" fails a test by default; a "warning" is recorded and shown with the log.
        broken_when: the condition that breaks it, in one sentence.
        cases: the ways to break it, one sentence each, by `Problem.case`; empty if there is one way.
        at_end: whether a breach is found only at the end of a test, so that a `with` block cannot expect it.
        unless: the condition for the other kind; "" if there is none.
    """

    name: str
    kind: Literal["error", "warning"]
    broken_when: str
    at_end: bool = False
    unless: str = ""
    cases: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def kind_text(self) -> str:
        """The kind of the rule, and the condition for the other kind: "error; warning where ..."."""
        return f"{self.kind}; {self.unless}" if self.unless else self.kind


PARENT_BLOCK_NOT_FOUND: Final = "parent_block_not_found"
BLOCK_NOT_FOUND: Final = "block_not_found"
INVALID_BLOCK: Final = "invalid_block"
EVENT_ID_GAP: Final = "event_id_gap"
SPARSE_TOKENS: Final = "sparse_tokens"
OVER_CAPACITY: Final = "over_capacity"
SINK_FAILURE: Final = "sink_failure"
INDEX_FAILURE: Final = "index_failure"
WRONG_HASH: Final = "wrong_hash"
ENGINE_DRIFT: Final = "engine_drift"
INDEX_DRIFT: Final = "index_drift"
LOAD_DRIFT: Final = "load_drift"
OVERLAP_DRIFT: Final = "overlap_drift"
WORKER_DRIFT: Final = "worker_drift"
NOT_FLUSHED: Final = "not_flushed"
DUPLICATE_STORE: Final = "duplicate_store"
EVICTED_AND_RESTORED: Final = "evicted_and_restored"
ORPHANED_CHILD: Final = "orphaned_child"
LEAKED_REQUESTS: Final = "leaked_requests"
LEASED_BLOCKS: Final = "leased_blocks"
OVERWRITTEN_BLOCKS: Final = "overwritten_blocks"

RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            Rule(
                PARENT_BLOCK_NOT_FOUND,
                "error",
                "a Stored on the device names a parent that this worker and rank does not hold there",
            ),
            Rule(
                BLOCK_NOT_FOUND,
                "error",
                "a Removed names a block that this worker and rank does not hold in that tier",
            ),
            Rule(
                INVALID_BLOCK,
                "error",
                "a Stored names a block as its own parent, or gives one resident block a second local hash",
            ),
            Rule(
                EVENT_ID_GAP,
                "error",
                "event ids skip, repeat or go backwards, or a published event, or a batch of a wire, never arrived",
                cases={
                    "skip": "an event id is above the next one: ids between them are missing",
                    "repeat": "the event before arrived again",
                    "backwards": "event ids go backwards, and no event of this id is missing",
                    "never_arrived": "a published event never arrived",
                    "batch": "the events of a batch of a wire are missing",
                    "batch_backwards": "batch numbers of a wire go backwards",
                },
            ),
            Rule(SPARSE_TOKENS, "error", "token ids given, but not block_size for every block"),
            Rule(
                OVER_CAPACITY,
                "error",
                "a tier holds more blocks than its capacity (checked at the next Stored and at flush)",
            ),
            Rule(SINK_FAILURE, "error", "a sink raised while an event was published"),
            Rule(
                INDEX_FAILURE,
                "error",
                "your index raised on a valid event, or returned what cannot be read",
            ),
            Rule(
                WRONG_HASH,
                "error",
                "a block hash is not the chain of its parent and local hash, or a local hash not that of its tokens",
                unless="warning where the backend is not prefix_closed and names blocks as Dynamo does",
            ),
            Rule(
                ENGINE_DRIFT,
                "error",
                "the blocks held according to the events are not those that the engine holds",
                at_end=True,
            ),
            Rule(INDEX_DRIFT, "error", "your index disagrees with the reference index"),
            Rule(
                LOAD_DRIFT,
                "error",
                "your router's `loads()` before a pick differs from what it dispatched and saw end",
            ),
            Rule(
                OVERLAP_DRIFT,
                "error",
                "your router's `overlap()` before a pick differs from the reference index on the same events, or its "
                "`believed()` exceeds what was sent there",
            ),
            Rule(
                WORKER_DRIFT,
                "error",
                "your router's `workers()` before a pick differs from the workers that are up",
            ),
            Rule(
                NOT_FLUSHED,
                "error",
                "events for an async index were still waiting when the test body ended",
                at_end=True,
            ),
            Rule(
                DUPLICATE_STORE,
                "warning",
                "a Stored that names blocks changed nothing (not checked where residency is counted)",
            ),
            Rule(
                EVICTED_AND_RESTORED,
                "warning",
                "a Removed takes a block that was already held when the event directly before it stored it again",
            ),
            Rule(
                ORPHANED_CHILD,
                "warning",
                "after a Removed event on the device a child of a removed block is still there (where the backend is "
                "prefix_closed)",
            ),
            Rule(
                LEAKED_REQUESTS,
                "warning",
                "requests are still open when the test ends",
                at_end=True,
            ),
            Rule(
                LEASED_BLOCKS,
                "warning",
                "an engine of a P/D pair still holds blocks for a leg that does not run when the test ends",
                at_end=True,
            ),
            Rule(
                OVERWRITTEN_BLOCKS,
                "error",
                "an engine of a P/D pair frees blocks into which another one still writes",
                at_end=True,
            ),
        )
    }
)
"""Every rule by name, in the order in which the documentation lists them."""


def check_rule(name: object) -> str:
    """Return `name` if it names a rule.

    Raises:
        ValueError: it does not; the message lists the rules.
    """
    if not isinstance(name, str) or name not in RULES:
        raise ValueError(unknown_text("rule", name, RULES))
    return name


def check_allowed(allow: object) -> frozenset[str]:
    """Return the rules whose breach is not a failure.

    Raises:
        TypeError: not a list or tuple.
        ValueError: an unknown rule.
    """
    if isinstance(allow, str | Mapping) or not isinstance(allow, Iterable):
        raise TypeError(f"allow takes a list or tuple of rules, got {allow!r:.80}")
    return frozenset(map(check_rule, allow))
