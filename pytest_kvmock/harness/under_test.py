"""The index under test: how it is asked, and what its answers mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import iscoroutinefunction
from typing import Any, TypeAlias

from pytest_kvmock.events import RouterEvent

Scores: TypeAlias = dict[tuple[int, int], int]
"""Matched blocks by (worker_id, dp_rank); who matches none is absent."""

WorkerScores: TypeAlias = dict[int, int]
"""Matched blocks by worker alone: the most over its ranks."""


Call: TypeAlias = tuple[Callable[[Any], Any], Any]
"""A function of the index under test, and the argument to call it with."""


class UnreadableAnswer(ValueError):  # noqa: N818 - named for what it is
    """The index under test answered what is no mapping of workers to numbers of blocks."""


class IndexUnderTest:
    """A user's index behind one shape.

    It offers `apply(event)`, which takes a `RouterEvent`, and one of `find_matches(local_hashes)` and
    `match_tokens(tokens)`; `flush`, `dump_events`, `remove_worker` and `remove_worker_dp_rank` are used where it has
    them. Any of them may be a coroutine function; then the test drives it (`aflush`, `aoverlap`).

    Args:
        index: the user's object.

    Raises:
        TypeError: it lacks a method.
        ValueError: it says through `dump_events` that it is not empty.
    """

    def __init__(self, index: Any) -> None:
        self.index = index
        self.name = name = type(index).__name__
        if isinstance(index, type):
            raise TypeError(
                f"the index under test is a class, {index.__name__}; it must be an object, {index.__name__}()"
            )
        apply = getattr(index, "apply", None)
        if not callable(apply):
            raise TypeError(f"the index under test ({name}) has no apply(event), which takes a RouterEvent")
        find, match = getattr(index, "find_matches", None), getattr(index, "match_tokens", None)
        if not callable(find) and not callable(match):
            raise TypeError(
                f"the index under test ({name}) has neither find_matches(local_hashes) nor match_tokens(tokens)"
            )
        self.takes_tokens = not callable(find)
        self.apply: Callable[[RouterEvent], Any] = apply
        ask: Any = match if self.takes_tokens else find
        self.ask: Callable[[Any], Any] = ask
        self.asked = "match_tokens" if self.takes_tokens else "find_matches"
        self.flush = self._method("flush")
        self.remove_worker = self._method("remove_worker")
        self.remove_rank = self._method("remove_worker_dp_rank")
        dump = self._method("dump_events")
        called = (self.apply, self.ask, self.flush, self.remove_worker, self.remove_rank)
        self.is_async = any(call is not None and iscoroutinefunction(call) for call in called)
        try:
            held = list(dump() or ()) if dump is not None and not iscoroutinefunction(dump) else []
        except Exception as error:
            raise ValueError(f"dump_events() of the index under test ({name}) raised {error!r}") from error
        if held:
            raise ValueError(
                f"the index under test ({name}) is not empty at the start: dump_events() has "
                f"{len(held)} event{'s' * (len(held) != 1)}; each test needs an index of its own"
            )

    def _method(self, name: str) -> Callable[..., Any] | None:
        method = getattr(self.index, name, None)
        return method if callable(method) else None

    def farewell(self, worker_id: int, ranks: Iterable[int], *, whole: bool) -> list[Call]:
        """The calls that tell it that some ranks of a worker are gone.

        Args:
            worker_id: which worker.
            ranks: which of its ranks.
            whole: they are all that it has.

        Raises:
            ValueError: it cannot be told.
        """
        remove, remove_rank = self.remove_worker, self.remove_rank
        if whole and remove is not None:
            return [(remove, worker_id)]
        if remove_rank is not None:
            return [(lambda rank: remove_rank(worker_id, rank), dp_rank) for dp_rank in ranks]
        need = "remove_worker(worker_id)" if whole else "remove_worker_dp_rank(worker_id, dp_rank)"
        raise ValueError(
            f"the index under test ({self.name}) cannot be told that worker {worker_id} is gone: it has no {need}"
        )

    def read(self, answer: Any) -> Scores | WorkerScores:
        """Make one shape of an answer: zeros are dropped, keys stay of the form they have.

        Raises:
            UnreadableAnswer: it is no mapping of workers to numbers of blocks.
        """
        scores = getattr(answer, "scores", answer)
        if not isinstance(scores, Mapping):
            raise UnreadableAnswer(
                f"{self.name} answered {answer!r:.120}; expected a mapping of worker_id or "
                "(worker_id, dp_rank) to a number of blocks, or an object with such a mapping in .scores"
            )
        out: dict[Any, int] = {}
        ranked = None
        for key, blocks in scores.items():
            is_pair = isinstance(key, tuple) and len(key) == 2 and all(isinstance(part, int) for part in key)
            is_count = isinstance(blocks, int) and blocks >= 0
            if not (is_pair or isinstance(key, int)) or not is_count or ranked not in (None, is_pair):
                raise UnreadableAnswer(
                    f"{self.name} answered the entry {key!r}: {blocks!r}; expected worker_id or "
                    "(worker_id, dp_rank), the same form in one answer, and a number of blocks"
                )
            ranked = is_pair
            if blocks:
                out[key] = blocks
        return out


def agree(answer: Scores | WorkerScores, expected: Scores) -> bool:
    """Whether an answer, by worker or by rank, is the expected one."""
    if answer == expected:
        return True
    if not answer or isinstance(next(iter(answer)), tuple):
        return False
    return answer == by_worker(expected)


def by_worker(scores: Scores) -> WorkerScores:
    """The most blocks over each worker's ranks."""
    out: WorkerScores = {}
    for (worker, _), blocks in scores.items():
        out[worker] = max(blocks, out.get(worker, 0))
    return out


def first_difference(answer: Scores | WorkerScores, least: Scores, most: Scores) -> tuple[int, int, int, range] | None:
    """The first worker for which an answer is too low or too high.

    Args:
        answer: by worker or by rank.
        least: the lowest answer that is right, by rank.
        most: the highest.

    Returns:
        (worker_id, dp_rank, blocks answered, what would be right); None where all is right.
    """
    ranked = not answer or isinstance(next(iter(answer)), tuple)
    low: Mapping[Any, int] = least if ranked else by_worker(least)
    high: Mapping[Any, int] = most if ranked else by_worker(most)
    mine: Mapping[Any, int] = answer
    for key in sorted({*mine, *high}):
        right = range(low.get(key, 0), high.get(key, 0) + 1)
        if mine.get(key, 0) not in right:
            worker, rank = key if ranked else (key, 0)
            return worker, rank, mine.get(key, 0), right
    return None


def question(hashes: Sequence[int], tokens: Sequence[int] | None, *, takes_tokens: bool) -> Sequence[int]:
    """What to ask with: the local hashes, or the tokens.

    Raises:
        ValueError: it takes tokens, and there are none.
    """
    __tracebackhide__ = True
    if not takes_tokens:
        return hashes
    if tokens is None:
        raise ValueError(
            "the index under test takes tokens (match_tokens), and this prompt has only hashes; "
            "ask with a prompt of tokens, or give the index a find_matches(local_hashes)"
        )
    return tokens
