"""Traffic that Hypothesis draws and shrinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from hypothesis import strategies as st

from pytest_kvmock.testing.drafts import Draft, resolve
from pytest_kvmock.values.checks import check_integer
from pytest_kvmock.values.programs.near_hashes import TRUNCATIONS
from pytest_kvmock.values.programs.operations import Program
from pytest_kvmock.values.prompt_keys import PromptKeys

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy


_KEYS: Final[Mapping[str, tuple[Any, Any]]] = {
    "lora_name": ("a", "b"),
    "cache_salt": ("a", "b"),  # equal to the names of adapters: an index that joins both names confuses them
    "multimodal": ((("1c" * 32, 0, 1),), (("2d" * 32, 0, 1),)),
}
"""The keys that a prompt may carry, with two values each."""


def _carried(keys: Sequence[str]) -> list[PromptKeys | None]:
    """Return what prompts carry in addition to their tokens: nothing, one of these keys, or all of them."""
    alone = [PromptKeys(**{key: value}) for key in keys for value in _KEYS[key]]
    both = [PromptKeys(**{key: _KEYS[key][at] for key in keys}) for at in range(2)] if len(keys) > 1 else []
    return [None, *alone, *both]


def traffic(
    *,
    workers: int = 1,
    ranks: int = 1,
    most_steps: int = 30,
    most_blocks: int = 5,
    numbers: int = 3,
    most_tokens: int = 9,
    most_in_a_burst: int = 100,
    tiers: bool = False,
    near_hashes: bool = True,
    keys: Sequence[str] = (),
) -> SearchStrategy[Program]:
    """Return a strategy for any mix of requests that share prefixes on some workers: prefill, decode, finish, preempt,
    resume and clear.

    The blocks of a prompt may be served again, which makes copies in an engine that keeps them (vLLM). Bursts of
    prompts come without a flush in between, so that a queue of smaller capacity overflows.

    A program shrinks to few steps, short prompts and small numbers, and is printed as the Python code that makes it.
    `play` plays it on a `RouterHarness`.

    Args:
        workers: number of workers.
        ranks: data-parallel ranks of each worker; more than one only for an index that tells ranks apart.
        most_steps: the largest number of steps.
        most_blocks: whole blocks of the longest prompt.
        numbers: number of different blocks; the fewer, the more is shared.
        most_tokens: tokens of the longest tail, and of the longest decode.
        most_in_a_burst: prompts of the longest `Burst`, with up to two events each; 0 for no bursts.
        tiers: whether time passes, for workers with host memory below the device: adds a `Tick` now and then, and
            prefills that do not wait for copies under way.
        near_hashes: whether an extra worker sometimes has hashes that agree in part with others (`ServeNear`).
        keys: what prompts may carry in addition to their tokens, singly and all together: "lora_name", "cache_salt",
            "multimodal" (an image over the first token). The engine must have them (`BackendSpec.prompt_keys`): it
            refuses the others.

    Raises:
        ValueError: a count is below its least value (0 or 1); `tiers` or `near_hashes` is not a boolean; or `keys` has
            an unknown name.
    """
    for name, value, least in (
        ("workers", workers, 1),
        ("ranks", ranks, 1),
        ("most_steps", most_steps, 1),
        ("most_blocks", most_blocks, 0),
        ("numbers", numbers, 1),
        ("most_tokens", most_tokens, 1),
        ("most_in_a_burst", most_in_a_burst, 0),
    ):
        check_integer(f"traffic: {name}", value, least)
    for name, flag in (("tiers", tiers), ("near_hashes", near_hashes)):
        if not isinstance(flag, bool):
            raise ValueError(f"traffic: {name} must be True or False, got {flag!r:.80}")  # noqa: TRY004 - one error
    if not isinstance(keys, tuple | list) or not all(isinstance(key, str) and key in _KEYS for key in keys):
        raise ValueError(f"traffic: keys must be a tuple or list of {', '.join(map(repr, _KEYS))}, got {keys!r:.80}")
    # At most five choices per step, including the one to go on: Hypothesis deletes runs of up to five when it shrinks.
    number, which = st.integers(0, numbers - 1), st.integers(0, 7)
    worker = st.integers(0, workers - 1) if workers > 1 else st.just(0)
    rank = st.integers(0, ranks - 1) if ranks > 1 else st.just(0)
    blocks = st.lists(number, max_size=most_blocks).map(tuple)
    tail, tokens = st.integers(0, most_tokens), st.integers(1, most_tokens)
    carried = st.sampled_from(_carried(keys)) if keys else st.none()
    drafts = [
        st.builds(Draft, st.just("prefill"), worker=worker, rank=rank, blocks=blocks, tokens=tail, keys=carried),
        st.builds(Draft, st.just("decode"), which, tokens=tokens, of=number),
        st.builds(Draft, st.just("finish"), which),
        st.builds(Draft, st.just("preempt"), which),
        st.builds(Draft, st.just("resume"), which),
        st.builds(Draft, st.just("clear"), worker=worker, rank=rank),
        st.builds(Draft, st.just("serve"), worker=worker, rank=rank, blocks=blocks, tokens=tail, keys=carried),
        st.builds(Draft, st.just("again"), which),
    ]
    if most_in_a_burst:
        count = st.integers(1, most_in_a_burst)
        drafts.append(st.builds(Draft, st.just("burst"), worker=worker, rank=rank, tokens=count))
    if near_hashes:
        kept = st.integers(0, len(TRUNCATIONS) - 1)
        drafts.append(st.builds(Draft, st.just("near"), kept, worker=worker, rank=rank))
    if tiers:
        impatient = st.builds(
            Draft, st.just("prefill"), worker=worker, rank=rank, blocks=blocks, tokens=tail, wait=st.just(False)
        )
        drafts += [impatient, st.builds(Draft, st.just("tick"), worker=worker, rank=rank, tokens=tail)]
    # By default Hypothesis draws short lists, which hardly ever fill a cache and evict from it.
    draft, least = st.one_of(drafts), max(1, most_steps // 2)
    lists = st.lists(draft, min_size=1, max_size=most_steps) | st.lists(draft, min_size=least, max_size=most_steps)
    return _programs(lists, most_steps)


@st.composite
def _programs(draw: DrawFn, drafts: SearchStrategy[list[Draft]], most_steps: int) -> Program:
    # A composite, not a map: Hypothesis prints a mapped value by its function, but a composite value by its repr.
    return resolve(draw(drafts), most_steps)
