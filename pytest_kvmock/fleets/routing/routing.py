"""The request and the workers as a router sees them when it picks."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from pytest_kvmock.values.events import RouterEvent, Stored
from pytest_kvmock.values.prompt_keys import LOOKAHEAD
from pytest_kvmock.values.tokens import windows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_kvmock.values.load_stat import LoadReading
    from pytest_kvmock.values.prompt_keys import MultimodalItem
    from pytest_kvmock.values.tokens import Prompt

Worker: TypeAlias = "int | tuple[int, int]"
"""A worker's name for routers: its id, or (id, rank) if workers have several ranks."""


def id_of(worker: Worker) -> int:
    """Return the id of a worker without its rank."""
    return worker[0] if isinstance(worker, tuple) else worker


def stream_of(worker: Worker) -> tuple[int, int]:
    """Return the id and rank that name a worker's event stream; the rank is 0 if there is only one."""
    return worker if isinstance(worker, tuple) else (worker, 0)


RequestStatus: TypeAlias = Literal[
    "waiting", "running", "finished", "rejected", "aborted", "lost", "unfinished", "failed", "refused"
]

Phase: TypeAlias = Literal["prefill", "decode"]
"""The leg that a call of a P/D pair's router is about; also the role of the leg's workers."""

PHASES: Final[tuple[Phase, Phase]] = ("prefill", "decode")


class PairAnswer(Enum):
    """Answers of a router of P/D pairs other than a worker."""

    DECODE_ALONE = "DECODE_ALONE"
    REFUSE = "REFUSE"

    def __repr__(self) -> str:
        return self.value


DECODE_ALONE: Final = PairAnswer.DECODE_ALONE
"""Answer to a prefill pick: there is no prefill leg, and the decode worker computes the prompt."""

REFUSE: Final = PairAnswer.REFUSE
"""Answer to either pick: the client gets an error after which it may retry, such as a 503."""


class RouterRequest:
    """One request as a router sees it: the same object in all calls, equal only to itself.

    Args:
        number: its place in the order of arrival, from 0.
        prompt: its prompt.
        block_size: tokens in a block of the workers.
        max_output_tokens: how many tokens it generates.
        arrival_ms: when it arrived at the router.
        session_id: the conversation that it belongs to; None if there is none.
        priority: larger is served first, if the engines have priorities.

    Attributes:
        prompt: as given; the other arguments are attributes too.
        tokens: the prompt's tokens; None if only hashes are known.
        local_hashes: local hash of each full block of the prompt (u64), as `RadixIndex.find_matches` takes them.
        sequence_hashes: sequence hash of each full block (u64).
        prompt_tokens: length of the prompt in tokens.
        lora_name: its LoRA adapter; None if there is none.
        now_ms: the present virtual time, in milliseconds; use it if your router needs a clock.
        attempt: 1, plus 1 for each time that it was sent again because its worker was lost.
        status: "waiting" until a worker is picked, then "running", then how it ended.
        overlaps: blocks of its prompt that each worker held when it arrived; a worker without one may be absent. None:
            unknown.
        reused_tokens: in `finished`, tokens of its prompt that the engine (of this leg) reused, from any source; None:
            it was not admitted.
        phase: for P/D pairs, the leg that the present call is about, "prefill" or "decode"; `block_size` and hashes are
            those of that role's workers. None if there is one leg.
        picked: for P/D pairs, the pick for the other leg, a worker or `DECODE_ALONE`; None: no pick yet.
    """

    __slots__ = (
        "arrival_ms",
        "attempt",
        "block_size",
        "local_hashes",
        "max_output_tokens",
        "now_ms",
        "number",
        "overlaps",
        "phase",
        "picked",
        "priority",
        "prompt",
        "prompt_tokens",
        "reused_tokens",
        "sequence_hashes",
        "session_id",
        "status",
    )

    def __init__(
        self,
        number: int,
        prompt: Prompt,
        block_size: int,
        max_output_tokens: int,
        arrival_ms: float = 0.0,
        *,
        session_id: str | None = None,
        priority: int = 0,
    ) -> None:
        self.number = number
        self.prompt = prompt
        self.block_size = block_size
        self.local_hashes = prompt.block_hashes(block_size)
        self.sequence_hashes = prompt.sequence_hashes(block_size)
        self.prompt_tokens = prompt.length(block_size)
        self.max_output_tokens = max_output_tokens
        self.arrival_ms = self.now_ms = arrival_ms
        self.session_id = session_id
        self.priority = priority
        self.attempt = 1
        self.status: RequestStatus = "waiting"
        self.overlaps: Mapping[Worker, int] | None = None
        self.reused_tokens: int | None = None
        self.phase: Phase | None = None
        self.picked: Worker | PairAnswer | None = None

    def __repr__(self) -> str:
        return f"<request {self.number} of {self.prompt_tokens} + {self.max_output_tokens} tokens, {self.status}>"

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """The prompt's tokens; None if only hashes are known."""
        return self.prompt.tokens

    def hashes(self, lookahead: int = 0) -> list[int]:
        """Return the local hashes to look up for workers whose block names also cover the next `lookahead` tokens.

        A prompt of hashes returns its own hashes.
        """
        return self.prompt.block_hashes(self.block_size, lookahead if self.prompt.has_tokens else 0)

    @property
    def lora_name(self) -> str | None:
        """The LoRA adapter of the request; None if there is none."""
        return self.prompt.lora_name

    @property
    def cache_salt(self) -> str | None:
        """The cache salt of its tenant; None if there is none."""
        return self.prompt.cache_salt

    @property
    def multimodal(self) -> tuple[MultimodalItem, ...]:
        """The multimodal items in its prompt as an engine names them: identifier, offset of the first token, and length
        in tokens.
        """
        return self.prompt.multimodal


class NameForms:
    """The look-ahead of each worker's block names (how many of the next tokens they also cover), learned from its
    events.

    Look-ups use windows of that length. An index is asked once for each look-ahead that occurs, and each answer counts
    for the workers with that look-ahead.
    """

    __slots__ = ("_forms",)

    def __init__(self) -> None:
        self._forms: dict[tuple[int, int], int] = {}

    def take(self, event: RouterEvent) -> None:
        """Learn the look-ahead from an event: the first Stored with tokens of a worker and rank counts."""
        key, data = event.key, event.event.data
        if key in self._forms or not event.token_ids or not isinstance(data, Stored) or not data.block_hashes:
            return
        self._forms[key] = windows_of(event.token_ids, None if event.extra is None else event.extra.get(LOOKAHEAD))[1]

    def know(self, key: tuple[int, int], ahead: int) -> None:
        """Set the look-ahead of a worker and rank before its first event."""
        self._forms[key] = ahead

    def forget(self, worker_id: int) -> None:
        """Forget a worker that is gone, because another engine may come back under its id."""
        self._forms = {key: form for key, form in self._forms.items() if key[0] != worker_id}

    def find(self, find: Callable[[list[int]], Any], hashes: Callable[[int], list[int]]) -> Mapping[Any, int]:
        """Look up a prompt in an index, once for each look-ahead.

        Args:
            find: its `find_matches`.
            hashes: returns the local hashes of the prompt for a look-ahead.

        Returns:
            Blocks by worker, or by worker and rank, with the keys of the index.
        """
        forms = sorted({*self._forms.values()}) or [0]
        if len(forms) == 1:
            return _scores(find(hashes(forms[0])))
        known: dict[Any, int] = {**self._forms, **{key[0]: ahead for key, ahead in self._forms.items()}}
        return {
            key: blocks
            for ahead in forms
            for key, blocks in _scores(find(hashes(ahead))).items()
            if known.get(key, 0) == ahead
        }


def _scores(answer: Any) -> Mapping[Any, int]:
    found: Mapping[Any, int] = getattr(answer, "scores", answer)
    return found


class Candidate(NamedTuple):
    """One worker at the moment of a pick.

    Attributes:
        worker: the value that `pick` returns to pick it.
        overlap: leading full blocks of the prompt that the worker holds, by the events delivered so far.
        prefill_tokens: prompt tokens of its other requests still to compute.
        decode_blocks: blocks of its other requests.
        new_blocks: blocks that this request would add to `decode_blocks`.
        active_requests: number of its open requests.
        waiting: number of requests that wait in the engine.
        usage: share of the engine's blocks that is in use, from 0 to 1.
        num_blocks: number of the engine's blocks.
        max_batched_tokens: most tokens that one of its passes computes; None: unlimited.
        held_blocks: all blocks that it holds, by the events delivered so far.
        reading: with loads of engines or of their stream, the last reading of its load and its age. None: there was no
            reading, so the load is unknown (not idle), or loads come from the load book.
    """

    worker: Worker
    overlap: int = 0
    prefill_tokens: int = 0
    decode_blocks: int = 0
    new_blocks: int = 0
    active_requests: int = 0
    waiting: int = 0
    usage: float = 0.0
    num_blocks: int = 0
    max_batched_tokens: int | None = None
    held_blocks: int = 0
    reading: LoadReading | None = None
