"""One request of a scheduler, also used by hosts, fleets and reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

ScheduledStatus: TypeAlias = Literal[
    "waiting", "running", "preempted", "finished", "rejected", "failed", "aborted", "lost", "unfinished"
]


class ScheduledRequest:
    """One request of a scheduler.

    Attributes:
        state: the driver's request, with blocks and a length in tokens.
        prompt_tokens: length of the prompt.
        max_output_tokens: number of tokens that it generates before it finishes.
        priority: larger values are served first, if the scheduler has priorities.
        arrival_ms: time of its arrival.
        status: "waiting" before its first admission, "running", "preempted" (it waits again), "finished", "rejected"
            (it could never fit), "failed" (it could never fit at the destination of its hand-over),
            "aborted", "lost" (its worker restarted) or "unfinished" (the clock of its fleet stopped).
        computed_tokens: number of leading tokens whose KV is computed, cached ones included; 0 while it waits.
        generated_tokens: number of generated tokens.
        reused_tokens: the most tokens that one of its admissions found cached (as in Dynamo).
        first_reused_tokens: tokens that its first admission found cached.
        lacking: with a hybrid model, the tokens that full attention had at its first admission, and the caches that
            could not resume there.
        onboarded_tokens: tokens that came back from the host for it, before its first admission.
        fetched_tokens: the part of these tokens that came from a storage, not from the host.
        admitted_ms: start of the pass that first gave it blocks; None before.
        admissions: for each admission the start of its pass, and the number of tokens that it found cached.
        token_ms: time of each generated token, in milliseconds.
        ended_ms: end of the pass that finished or rejected it, or the time at which it was called off; None before.
        keeps_blocks: whether its blocks stay allocated after it finishes, until its engine releases them.
        preemptions: number of its preemptions.
        opened: its position among all requests of its engine, in the order in which they were opened.
        place: its position among the running requests, if the scheduler lets requests sleep.
    """

    __slots__ = (
        "admissions",
        "admitted_ms",
        "arrival_ms",
        "computed_tokens",
        "ended_ms",
        "fetched_tokens",
        "first_reused_tokens",
        "generated_tokens",
        "keeps_blocks",
        "lacking",
        "max_output_tokens",
        "onboarded_tokens",
        "opened",
        "place",
        "preemptions",
        "priority",
        "prompt_tokens",
        "reused_tokens",
        "state",
        "status",
        "token_ms",
    )

    def __init__(
        self, state: Any, prompt_tokens: int, max_output_tokens: int, *, arrival_ms: float = 0.0, priority: int = 0
    ) -> None:
        self.state = state
        self.prompt_tokens = prompt_tokens
        self.max_output_tokens = max_output_tokens
        self.priority = priority
        self.arrival_ms = arrival_ms
        self.status: ScheduledStatus = "waiting"
        self.computed_tokens = 0
        self.generated_tokens = 0
        self.reused_tokens = 0
        self.first_reused_tokens = 0
        self.lacking: tuple[int, tuple[str, ...]] = (0, ())
        self.onboarded_tokens = self.fetched_tokens = 0
        self.admitted_ms: float | None = None
        self.admissions: list[tuple[float, int]] = []
        self.token_ms: list[float] = []
        self.ended_ms: float | None = None
        self.keeps_blocks = False
        self.preemptions = 0
        self.opened = 0
        self.place = 0

    def __len__(self) -> int:
        return self.prompt_tokens + self.generated_tokens

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.prompt_tokens} + {self.generated_tokens} tokens, {self.status}>"

    @property
    def is_open(self) -> bool:
        """Whether it still waits or runs."""
        return self.status in ("waiting", "running", "preempted")

    @property
    def ttft_ms(self) -> float | None:
        """Milliseconds from its arrival to its first token; None without one. The same holds for the other times."""
        return self.token_ms[0] - self.arrival_ms if self.token_ms else None

    @property
    def ttst_ms(self) -> float | None:
        """Milliseconds from its first token to its second."""
        return self.token_ms[1] - self.token_ms[0] if len(self.token_ms) > 1 else None

    @property
    def itl_ms(self) -> float | None:
        """Mean milliseconds between its tokens."""
        tokens = self.token_ms
        return (tokens[-1] - tokens[0]) / (len(tokens) - 1) if len(tokens) > 1 else None

    @property
    def e2e_ms(self) -> float | None:
        """Milliseconds from its arrival to its last token."""
        return self.token_ms[-1] - self.arrival_ms if self.token_ms else None

    @property
    def device_tokens(self) -> int:
        """Tokens that its first admission found on the device."""
        return max(0, self.first_reused_tokens - self.onboarded_tokens)

    @property
    def host_tokens(self) -> int:
        """Tokens that came back for it from the host, without those of a storage."""
        return self.onboarded_tokens - self.fetched_tokens

    def admit(self, now_ms: float, reused_tokens: int) -> None:
        """Record an admission that found `reused_tokens` tokens cached."""
        if self.admitted_ms is None:
            self.admitted_ms = now_ms
            self.first_reused_tokens = reused_tokens
        self.reused_tokens = max(self.reused_tokens, reused_tokens)
        self.admissions.append((now_ms, reused_tokens))

    def next_token(self) -> int:
        """Return the next token that it generates; subclasses choose it."""
        return 0

    def next_tokens(self, count: int) -> Sequence[int]:
        """Return the next tokens that it generates, equal to `count` calls of `next_token`."""
        return [0] * count
