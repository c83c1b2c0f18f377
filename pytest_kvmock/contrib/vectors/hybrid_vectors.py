"""The sets of vectors of hybrid models: the models, the requests of two engines of each, and the queries.

vLLM publishes a Stored for each cache group of such a model. The right answers of an index range from the blocks that
the engine would reuse to those that the attention group holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_kvmock.engines.backends import BackendSpec, EngineProfile, backend_spec, speaker_of
from pytest_kvmock.engines.base.cache_group import CacheGroup
from pytest_kvmock.values.tokens import Prompt

if TYPE_CHECKING:
    from pytest_kvmock.values.dialect import Dialect

PROFILE: Final = EngineProfile(block_size=4, num_blocks=72, workers=2)
"""The profile of all sets. A window of gpt-oss has 32 tokens in it, and a prompt up to 88."""

_STEPS: Final = 36
_VOCABULARY: Final = 30_000


def hybrid_engines(dialect: Dialect) -> dict[str, BackendSpec]:
    """Return the engines of hybrid models that write a dialect, by the names of their sets; only vLLM's newest dialect,
    with hashes of 64 bits, has any.

    gpt-oss has a window before its attention group, and Qwen3-Next has states. Kimi-K3 has MLA, and hashes of half a
    block, so that a prompt's tail has its own name and a hit may end within a block. In the last engine the attention
    group comes first, so that its blocks are evicted before those of the window.
    """
    vllm = backend_spec("vllm")
    if not dialect.mocks_groups or speaker_of(dialect) is not vllm:
        return {}
    size = PROFILE.block_size
    groups = (CacheGroup("full_attention", size), CacheGroup("sliding_window", size, window=4 * size))
    full_first = vllm.variant("vllm", groups=groups)
    return {
        "vllm_gpt_oss": backend_spec("vllm_gpt_oss"),
        "vllm_qwen3_next": backend_spec("vllm_qwen3_next"),
        "vllm_kimi_k3": backend_spec("vllm_kimi_k3").variant("vllm_kimi_k3", match_unit=size // 2),
        "full_first": replace(full_first, models=f"{vllm.models}, full attention in group 0 and a window in group 1"),
    }


def about_engine(spec: BackendSpec) -> dict[str, Any]:
    """Return the facts of an engine that an index needs but no event has, and its groups, for `index.json`."""
    sizes = {"num_blocks": PROFILE.num_blocks, "block_size": PROFILE.block_size}
    manager: Any = spec.make(**sizes, dp_rank=0, sink=None)
    geometry = manager.geometry
    groups = [
        {
            "group_idx": number,
            "kv_cache_spec_kind": group.kind,
            "block_size": group.block_size,
            **({} if group.window is None else {"kv_cache_spec_sliding_window": group.window}),
        }
        for number, group in enumerate(geometry.groups)
    ]
    units = {"hash_unit": geometry.hash_unit, "alignment": geometry.alignment}
    return {"engine": spec.models, **sizes, **units, "groups": groups}


class HybridStep(NamedTuple):
    """An action of a worker, and the prompts that are queried after it; each ends within a block.

    Attributes:
        worker: the worker.
        prompts: the prompts that it serves, each while the earlier ones are still open; none: its cache is cleared.
        outputs: tokens that each request generates.
        asked: the queried prompts.
    """

    worker: int
    prompts: tuple[Prompt, ...]
    outputs: tuple[int, ...]
    asked: tuple[Prompt, ...]


def hybrid_steps(seed: str) -> Iterator[HybridStep]:
    """Yield the actions of two workers: documents with several questions, prompts that branch, chats in turns, two at a
    time.

    Args:
        seed: seed of the traffic.
    """
    rng = Random(seed)  # noqa: S311 - mock data
    size = PROFILE.block_size
    longest = size * 22
    chats: list[list[int]] = []  # prompts with their output
    for step in range(_STEPS):
        worker = step % 2 if step % 3 == 0 else 0
        if step == _STEPS * 2 // 3:
            yield HybridStep(0, (), (), tuple(Prompt(_within(chat, size, rng)) for chat in chats[-3:]))
            continue
        before = rng.choice(chats[-6:]) if chats and rng.random() < 0.75 else _fresh(size * rng.randint(8, 16), rng)
        if rng.random() < 0.5:  # a branch; otherwise the next turn
            before = before[: rng.randrange(len(before) // 2, len(before))]
        tokens = _within([*before[: longest - 5 * size], *_fresh(size * rng.randint(1, 3), rng)], size, rng)
        outputs = tuple(_fresh(rng.choice((0, 0, 3, 2 * size)), rng))
        prompts = (Prompt(tokens),) * (2 if step % 9 == 4 else 1)
        chats.append([*tokens, *outputs])
        turn = [*tokens, *outputs, *_fresh(size, rng)]
        branch = chats[rng.randrange(len(chats))]
        branch = [*branch[: rng.randrange(size, len(branch))], *_fresh(size, rng)]
        earlier = rng.sample(chats[-9:], min(len(chats), 3))  # some of them are partly evicted
        asked = tuple(Prompt(_within(each, size, rng)) for each in (tokens, turn, branch, *earlier))
        yield HybridStep(worker, prompts, outputs, asked)


def _within(tokens: list[int], size: int, rng: Random) -> list[int]:
    """Return tokens that end within a block."""
    return tokens if len(tokens) % size else [*tokens, *_fresh(rng.randrange(1, size), rng)]


def _fresh(count: int, rng: Random) -> list[int]:
    """Return `count` random tokens."""
    return [rng.randrange(_VOCABULARY) for _ in range(count)]
