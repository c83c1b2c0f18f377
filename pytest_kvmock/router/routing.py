"""What a router is shown of a request and of a worker when it picks one for the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from pytest_kvmock.events import RouterEvent, Stored
from pytest_kvmock.prompt_keys import LOOKAHEAD
from pytest_kvmock.tokens import windows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_kvmock.tokens import Prompt

Worker: TypeAlias = "int | tuple[int, int]"
"""A worker as routers name it: its id, or its id and rank where workers have more ranks than one."""


def id_of(worker: Worker) -> int:
    """Return the id of a worker, whatever its rank."""
    return worker[0] if isinstance(worker, tuple) else worker


def stream_of(worker: Worker) -> tuple[int, int]:
    """Return the id and rank of a worker, whose events are one stream: rank 0 where it has no more."""
    return worker if isinstance(worker, tuple) else (worker, 0)


RequestStatus: TypeAlias = Literal["waiting", "running", "finished", "rejected", "aborted", "lost", "unfinished"]


class RouterRequest:
    """One request as a router sees it, the same object in all its methods; equal to itself only.

    Args:
        number: its place in the order of arrival, from 0.
        prompt: what is asked.
        block_size: tokens in a block of the workers.
        max_output_tokens: how many tokens it generates.
        arrival_ms: when it arrived at the router.
        session_id: the conversation that it is a turn of; None: none.
        priority: larger is served first, where engines have priorities.

    Attributes:
        prompt: as above, and so the others.
        tokens: the prompt's tokens; None where only hashes are known.
        local_hashes: local hash of each full block of the prompt (u64), by which a `RadixIndex` is asked.
        sequence_hashes: sequence hash of each full block (u64).
        prompt_tokens: length of the prompt in tokens.
        lora_name: its LoRA adapter; None: none.
        now_ms: the time now, in virtual milliseconds; a router that needs a clock takes this one.
        attempt: 1, and one more each time that it was sent anew, as its worker was lost.
        status: "waiting" until a worker was picked, then "running", and how it ended.
        overlaps: blocks of its prompt that each worker held when it arrived; a worker without one may be absent. None: unknown.
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
        "priority",
        "prompt",
        "prompt_tokens",
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

    def __repr__(self) -> str:
        return f"<request {self.number} of {self.prompt_tokens} + {self.max_output_tokens} tokens, {self.status}>"

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """The prompt's tokens; None where only hashes are known."""
        return self.prompt.tokens

    def hashes(self, lookahead: int = 0) -> list[int]:
        """Local hashes to ask an index by for workers whose names of blocks cover so many of the next tokens, too.

        Of a prompt of hashes there are no others than its own.
        """
        return self.prompt.block_hashes(self.block_size, lookahead if self.prompt.has_tokens else 0)

    @property
    def lora_name(self) -> str | None:
        """Its LoRA adapter; None: none."""
        return self.prompt.lora_name


class NameForms:
    """How many of the next tokens the names of each worker's blocks cover, too, by its events: so long are the windows to ask by.

    An index is asked once for each number that a worker has, and of each answer those workers count whose names are so.
    """

    __slots__ = ("_forms",)

    def __init__(self) -> None:
        self._forms: dict[tuple[int, int], int] = {}

    def take(self, event: RouterEvent) -> None:
        """Note what an event shows; the first Stored with tokens of a worker and rank shows it."""
        key, data = event.key, event.event.data
        if key in self._forms or not event.token_ids or not isinstance(data, Stored) or not data.block_hashes:
            return
        self._forms[key] = windows_of(event.token_ids, None if event.extra is None else event.extra.get(LOOKAHEAD))[1]

    def find(self, find: Callable[[list[int]], Any], hashes: Callable[[int], list[int]]) -> Mapping[Any, int]:
        """Ask an index for a prompt, as often as need be.

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
    """One worker as it stands when a router picks.

    Attributes:
        worker: what to return to pick it.
        overlap: leading full blocks of the prompt that it holds, by the events delivered so far.
        prefill_tokens: tokens of prompts of its other requests that are yet to be computed.
        decode_blocks: blocks of its other requests.
        new_blocks: blocks that this request would add to those.
        active_requests: how many open requests it has.
        waiting: how many of them wait in the engine.
        usage: share of the engine's blocks that is in use, from 0 to 1.
        num_blocks: how many blocks the engine has.
        max_batched_tokens: most tokens that one of its passes computes; None: unlimited.
        held_blocks: blocks that it holds in all, by the events delivered so far.
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
