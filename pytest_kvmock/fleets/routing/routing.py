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
"""A worker as routers name it: its id, or (id, rank) where workers have several ranks."""


def id_of(worker: Worker) -> int:
    """Return the id of a worker, whatever its rank."""
    return worker[0] if isinstance(worker, tuple) else worker


def stream_of(worker: Worker) -> tuple[int, int]:
    """Return the id and rank of a worker, whose events are one stream; rank 0 if it has a single one."""
    return worker if isinstance(worker, tuple) else (worker, 0)


RequestStatus: TypeAlias = Literal[
    "waiting", "running", "finished", "rejected", "aborted", "lost", "unfinished", "failed", "refused"
]

Phase: TypeAlias = Literal["prefill", "decode"]
"""The leg that a router of P/D pairs is asked for, or told of; also the role of its workers."""

PHASES: Final[tuple[Phase, Phase]] = ("prefill", "decode")


class PairAnswer(Enum):
    """Answers of a router of P/D pairs other than a worker."""

    DECODE_ALONE = "DECODE_ALONE"
    REFUSE = "REFUSE"

    def __repr__(self) -> str:
        return self.value


DECODE_ALONE: Final = PairAnswer.DECODE_ALONE
"""Answer when asked for a prefill worker: there is no prefill leg, and the decode worker computes the prompt."""

REFUSE: Final = PairAnswer.REFUSE
"""Answer when asked for either: the client gets an error that it may retry, such as a 503."""


class RouterRequest:
    """One request as a router sees it, the same object in all its methods; equal to itself only.

    Args:
        number: its place in the order of arrival, from 0.
        prompt: its prompt.
        block_size: tokens in a block of the workers.
        max_output_tokens: how many tokens it generates.
        arrival_ms: when it arrived at the router.
        session_id: the conversation that it belongs to; None if there is none.
        priority: larger is served first, where engines have priorities.

    Attributes:
        prompt: as given; also the other arguments.
        tokens: the prompt's tokens; None if only hashes are known.
        local_hashes: local hash of each full block of the prompt (u64), by which a `RadixIndex` is asked.
        sequence_hashes: sequence hash of each full block (u64).
        prompt_tokens: length of the prompt in tokens.
        lora_name: its LoRA adapter; None if there is none.
        now_ms: the time now, in virtual milliseconds; a router that needs a clock takes this one.
        attempt: 1, plus one each time it was sent again because its worker was lost.
        status: "waiting" until a worker was picked, then "running", then how it ended.
        overlaps: blocks of its prompt that each worker held when it arrived; a worker without one may be absent. None:
            unknown.
        reused_tokens: in `finished`, tokens of its prompt that its engine, or that of the leg, reused, wherever they
            came from; None: it was not admitted.
        phase: for P/D pairs, the leg that the router is asked for, or told of: "prefill" or "decode"; `block_size` and
            hashes are then those of the workers of that role. None if there is one leg.
        picked: for P/D pairs, the pick for the other leg, a worker or `DECODE_ALONE`; None: none yet.
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
        """Local hashes to look up for workers whose block names also cover the next `lookahead` tokens.

        A prompt of hashes has only its own.
        """
        return self.prompt.block_hashes(self.block_size, lookahead if self.prompt.has_tokens else 0)

    @property
    def lora_name(self) -> str | None:
        """Its LoRA adapter; None if there is none."""
        return self.prompt.lora_name

    @property
    def cache_salt(self) -> str | None:
        """Its tenant's salt; None if there is none."""
        return self.prompt.cache_salt

    @property
    def multimodal(self) -> tuple[MultimodalItem, ...]:
        """The multimodal items in its prompt, as an engine names them: identifier, offset of the first token, and
        length, in tokens.
        """
        return self.prompt.multimodal


class NameForms:
    """How many of the next tokens the block names of each worker also cover, by its events; look-ups use windows that
    much longer.

    An index is asked once for each number that occurs, and each answer counts for the workers with that number.
    """

    __slots__ = ("_forms",)

    def __init__(self) -> None:
        self._forms: dict[tuple[int, int], int] = {}

    def take(self, event: RouterEvent) -> None:
        """Note what an event shows: the first Stored with tokens of a worker and rank counts."""
        key, data = event.key, event.event.data
        if key in self._forms or not event.token_ids or not isinstance(data, Stored) or not data.block_hashes:
            return
        self._forms[key] = windows_of(event.token_ids, None if event.extra is None else event.extra.get(LOOKAHEAD))[1]

    def know(self, key: tuple[int, int], ahead: int) -> None:
        """Note how many of the next tokens the names of a worker and rank cover, before it has published any."""
        self._forms[key] = ahead

    def forget(self, worker_id: int) -> None:
        """Forget a worker that is gone: another engine may come back under its id."""
        self._forms = {key: form for key, form in self._forms.items() if key[0] != worker_id}

    def find(self, find: Callable[[list[int]], Any], hashes: Callable[[int], list[int]]) -> Mapping[Any, int]:
        """Ask an index for a prompt, once for each number.

        Args:
            find: its `find_matches`.
            hashes: the local hashes of the prompt, by how many of the next tokens names cover.

        Returns:
            Blocks by worker, or by worker and rank, as the index answers.
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
    """One worker as it is when a router picks.

    Attributes:
        worker: the value that `pick` returns to pick it.
        overlap: leading full blocks of the prompt that it holds, by the events delivered so far.
        prefill_tokens: prompt tokens of its other requests still to compute.
        decode_blocks: blocks of its other requests.
        new_blocks: blocks that this request would add to those.
        active_requests: how many open requests it has.
        waiting: how many of them wait in the engine.
        usage: share of the engine's blocks that is in use, from 0 to 1.
        num_blocks: how many blocks the engine has.
        max_batched_tokens: most tokens that one of its passes computes; None: unlimited.
        held_blocks: all blocks that it holds, by the events delivered so far.
        reading: with loads of engines or of their stream, the last reading of its load and its age. None: nothing was
            ever read, so the load is unknown (not idle), or loads are those of the load book.
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
