"""Traffic that Hypothesis draws, and shrinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from pytest_kvmock.checks import check_integer
from pytest_kvmock.testing.program import Draft, Program, resolve

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy


def traffic(
    *, workers: int = 1, most_steps: int = 30, most_blocks: int = 5, numbers: int = 3, most_tokens: int = 9
) -> SearchStrategy[Program]:
    """Any mix of requests: prefill, decode, finish, preempt, resume and clear, on some workers, sharing prefixes.

    It shrinks to few steps, short prompts and small numbers, and is printed as the Python that makes it. `play` plays
    it on a `RouterHarness`.

    Args:
        workers: on how many workers.
        most_steps: how many steps at most.
        most_blocks: whole blocks of the longest prompt.
        numbers: how many different blocks there are; the fewer, the more is shared.
        most_tokens: tokens of the longest tail, and of the longest decode.

    Raises:
        ValueError: a count below 1, or below 0 where none is allowed.
    """
    for name, value, least in (
        ("workers", workers, 1),
        ("most_steps", most_steps, 1),
        ("most_blocks", most_blocks, 0),
        ("numbers", numbers, 1),
        ("most_tokens", most_tokens, 1),
    ):
        check_integer(f"traffic: {name}", value, least)
    # At most five choices a step, that of going on counted: Hypothesis deletes runs of up to five when it shrinks.
    number, which = st.integers(0, numbers - 1), st.integers(0, 7)
    worker = st.integers(0, workers - 1) if workers > 1 else st.just(0)
    blocks = st.lists(number, max_size=most_blocks).map(tuple)
    tail, tokens = st.integers(0, most_tokens), st.integers(1, most_tokens)
    drafts = st.one_of(
        st.builds(Draft, st.just("prefill"), worker=worker, blocks=blocks, tokens=tail),
        st.builds(Draft, st.just("decode"), which, tokens=tokens, of=number),
        st.builds(Draft, st.just("finish"), which),
        st.builds(Draft, st.just("preempt"), which),
        st.builds(Draft, st.just("resume"), which),
        st.builds(Draft, st.just("clear"), worker=worker),
    )
    return _programs(st.lists(drafts, min_size=1, max_size=most_steps))


@st.composite
def _programs(draw: DrawFn, drafts: SearchStrategy[list[Draft]]) -> Program:
    # A composite, not a map: Hypothesis prints what was mapped by its function, and this by its own repr.
    return resolve(draw(drafts))
