"""The scheduler matrix: eight cases of one workload, from Dynamo's test of its schedulers.

`test_scheduler_token_generation_patterns` of dynamo-mocker runs 200 requests over them, on each of its backends.
"""

from __future__ import annotations

from itertools import product
from random import Random
from struct import unpack
from typing import Any, Final, NamedTuple

from pytest_kvmock.values.tokens import Prompt

NUM_GPU_BLOCKS: Final = 500
BLOCK_SIZE: Final = 64
SPEEDUP_RATIO: Final = 1000.0
NUM_REQUESTS: Final = 200
PROMPT_TOKENS: Final = 1000
SHARED_TOKENS: Final = 500
"""Number of leading tokens that all prompts share, in the shared cases."""

OUTPUT_TOKENS: Final = 100


class SchedulerCase(NamedTuple):
    """One case of the scheduler matrix.

    Attributes:
        shared: whether the first half of all prompts is the same.
        caching: whether prefixes are cached (`enable_prefix_caching`).
        chunked: whether a prompt may be computed in several passes (`enable_chunked_prefill`).
    """

    shared: bool
    caching: bool
    chunked: bool

    def __str__(self) -> str:
        return self.id

    @property
    def id(self) -> str:
        """Its part of a test's id: "shared-cached-chunked", or "distinct-nocache-whole" if all three are False."""
        return "-".join(
            (
                "shared" if self.shared else "distinct",
                "cached" if self.caching else "nocache",
                "chunked" if self.chunked else "whole",
            )
        )

    @property
    def sizes(self) -> dict[str, Any]:
        """The fields of an `EngineProfile` that it sets."""
        return {
            "num_blocks": NUM_GPU_BLOCKS,
            "block_size": BLOCK_SIZE,
            "prefix_caching": self.caching,
            "chunk": None,
        }

    @property
    def engine(self) -> dict[str, Any]:
        """The fields of `MockEngineArgs` that it also sets."""
        return {"speedup_ratio": SPEEDUP_RATIO, "enable_chunked_prefill": self.chunked}


SCHEDULER_CASES: Final = tuple(
    SchedulerCase(shared=shared, caching=caching, chunked=chunked)
    for chunked, shared, caching in product((False, True), repeat=3)
)
"""The eight cases, in Dynamo's order."""


class SchedulerRequest(NamedTuple):
    """One request of the matrix: `engine.submit(*request)` submits it to an engine.

    Attributes:
        prompt: 1000 tokens.
        max_output_tokens: 100.
    """

    prompt: Prompt
    max_output_tokens: int


def make_scheduler_requests(case: SchedulerCase, rng: Random) -> tuple[SchedulerRequest, ...]:
    """Make the 200 requests of a case.

    Args:
        case: the case, which sets whether prompts begin with the same tokens.
        rng: source of the tokens.
    """

    def tokens(count: int) -> tuple[int, ...]:
        return unpack(f"<{count}I", rng.randbytes(4 * count))

    common = tokens(SHARED_TOKENS)
    return tuple(
        SchedulerRequest(
            Prompt((*(common if case.shared else tokens(SHARED_TOKENS)), *tokens(PROMPT_TOKENS - SHARED_TOKENS))),
            OUTPUT_TOKENS,
        )
        for _ in range(NUM_REQUESTS)
    )
