"""The state and size of an engine, and the errors of an engine without progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_kvmock.engines.worker import OutOfBlocks
from pytest_kvmock.values.checks import KvMockError

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.driver import Driver
    from pytest_kvmock.engines.base.scheduled_request import ScheduledRequest
    from pytest_kvmock.engines.schedulers.args import MockEngineArgs
    from pytest_kvmock.engines.vllm.groups import BlocksAlone


class EngineStalled(KvMockError, RuntimeError):  # noqa: N818 - what happened to it, as OutOfBlocks
    """An engine that can never make progress: its requests wait for blocks, or for a budget, that never come.

    Attributes:
        now_ms: when, in virtual milliseconds.
        running: the requests that run.
        waiting: the requests that wait.
        passes: number of passes without progress; 0 if progress needs other engines, which make none.
        lost: the device blocks that will never be free, and why; None if there are none.
    """

    def __init__(
        self,
        now_ms: float,
        running: tuple[ScheduledRequest, ...],
        waiting: tuple[ScheduledRequest, ...],
        passes: int,
        lost: str | None = None,
    ) -> None:
        super().__init__(now_ms, running, waiting, passes, lost)
        self.now_ms = now_ms
        self.running = running
        self.waiting = waiting
        self.passes = passes
        self.lost = lost

    def __str__(self) -> str:
        lost = f". {self.lost}" if self.lost else ""
        first = f"; first in the queue: {self.waiting[0]!r}" if self.waiting else ""
        tried = (
            f"{self.passes} passes up to {self.now_ms:g} ms generated no token"
            if self.passes
            else (f"at {self.now_ms:g} ms nothing is left that could free blocks")
        )
        return (
            f"the engine makes no progress: {tried}, with "
            f"{len(self.running)} requests running and {len(self.waiting)} waiting{first}{lost}"
        )


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """An engine's present state.

    Attributes:
        running: requests that run.
        waiting: requests that arrived and wait, including those that were preempted or wait for blocks from the host.
        arriving: requests that have not arrived yet.
        active_blocks: blocks in use.
        total_blocks: number of its blocks.
        preemptions: number of preemptions.
        prefill_us: time that its passes spent on prompts, in microseconds.
    """

    running: int
    waiting: int
    arriving: int
    active_blocks: int
    total_blocks: int
    preemptions: int
    prefill_us: int = 0

    @property
    def cache_usage(self) -> float:
        """Share of the blocks that are in use, from 0 to 1."""
        return self.active_blocks / self.total_blocks

    def to_json(self) -> dict[str, Any]:
        """Return the state under the keys of Dynamo's worker metrics."""
        return {
            "active_decode_blocks": self.active_blocks,
            "gpu_cache_usage_perc": self.cache_usage,
            "total_blocks": self.total_blocks,
            "num_running_reqs": self.running,
            "num_waiting_reqs": self.waiting,
            "num_preemptions": self.preemptions,
        }


class EngineSize(NamedTuple):
    """The size of an engine: the largest requests that it can serve when it is empty.

    Attributes:
        block_size: tokens in a block.
        blocks: number of its blocks.
        rejects: whether it rejects a prompt that is larger than all of them, at its turn or at the hand-over.
        most_tokens: maximum tokens of a request, prompt and output together: a longer prompt is rejected, and output
            ends there; None: no limit.
        last_token_free: whether the last token of output needs no block.
        groups: the joint needs of a hybrid model's cache groups; None: a request needs a block for each `block_size`
            tokens.
        longest: maximum tokens of a request that its manager takes (`max_model_len` of `VllmHybridManager`); None: no
            limit.
    """

    block_size: int
    blocks: int
    rejects: bool
    most_tokens: int | None
    last_token_free: bool
    groups: BlocksAlone | None
    longest: int | None

    @classmethod
    def of(cls, args: MockEngineArgs, driver: Driver) -> EngineSize:
        """Return the size of an engine with these arguments over a manager."""
        release = args.release
        rejects = release.rejects_prompts or (release.reserves_destination and args.worker_type == "decode")
        last_token_free = release.last_token_free or (release.destination_first and args.worker_type == "prefill")
        # For vLLM's cache groups; only 1.6.1 needs all blocks that windows hold at once (`need_whole`).
        of = driver.powers.groups
        groups = None if of is None else of.alone(args.max_num_batched_tokens, capped=release.last_token_free)
        longest = getattr(driver.manager, "max_model_len", None)
        return cls(args.block_size, args.num_gpu_blocks, rejects, args.most_tokens, last_token_free, groups, longest)

    def rejects_prompt(self, tokens: int) -> bool:
        """Whether a prompt of `tokens` tokens is rejected."""
        if self.most_tokens is not None and tokens >= self.most_tokens:
            return True
        if not self.rejects:
            return False
        return (-(-tokens // self.block_size) if self.groups is None else self.groups.to_admit(tokens)) > self.blocks

    def output_of(self, prompt: int, output: int) -> int:
        """Return the number of tokens generated after `prompt` tokens if a request asks for `output` tokens."""
        return output if self.most_tokens is None else max(0, min(output, self.most_tokens - prompt))

    def check(self, prompt: int, output: int, request: str, engines: str) -> None:
        """Check that a prompt and its output fit.

        Args:
            prompt: tokens of the prompt.
            output: tokens that it asks for.
            request: the first words of the message, which name the request.
            engines: the engines that they must fit, for the message.

        Raises:
            RequestTooLarge: they need more blocks than there are.
            ValueError: they are longer than the manager takes.
        """
        output = self.output_of(prompt, output)
        if self.longest is not None and prompt + output > self.longest:
            raise ValueError(
                f"{request} is too long: max_model_len of its manager is {self.longest} tokens in {engines} "
                "(`MockEngineArgs` of 1.6.1 have a max_model_len at which output ends)"
            )
        needed = self._needed(prompt, output)
        if needed > self.blocks:
            raise RequestTooLarge(needed, self.blocks, request, engines)

    def _needed(self, prompt: int, output: int) -> int:
        if self.groups is None:
            return -(-(prompt + output - (self.last_token_free and output > 0)) // self.block_size)
        computed = prompt + max(output - 1, 0)  # the last token is never computed
        least, most = -(-computed // self.block_size), self.groups.at_most(computed)
        if least > self.blocks:
            return max(least, self.groups.to_admit(prompt))  # it can never fit
        if most <= self.blocks or self.rejects_prompt(prompt):
            return least
        return max(self.groups.to_admit(prompt), self.groups.to_compute(prompt, computed))


class RequestTooLarge(OutOfBlocks):
    """A request that can never fit an engine, even an empty one; nothing has happened.

    Attributes:
        request: the request and its size in tokens: the first words of the message.
        engines: the engines that it does not fit.
    """

    def __init__(self, requested: int, available: int, request: str, engines: str) -> None:
        super().__init__(requested, available)
        self.args = (requested, available, request, engines)  # all four arguments, so that it can be pickled
        self.request = request
        self.engines = engines

    def __str__(self) -> str:
        return (
            f"{self.request} can never fit: {self.requested} blocks are needed for prompt and output, and "
            f"num_gpu_blocks is {self.available} in {self.engines} (of a test: @pytest.mark.kvmock(num_blocks=...))"
        )
