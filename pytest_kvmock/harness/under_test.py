"""The index under test: its calls, and its answers in one shape.

The code that calls it is written once for sync and async indexes: generators yield the calls to make, and are sent the
results. `run` makes the calls, `arun` awaits them.

One subject: a call of the user's index, and the meaning of its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from functools import partial
from inspect import Parameter, isawaitable, iscoroutinefunction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, TypeVar, cast

from pytest_kvmock.oracle.hygiene.content import sparse
from pytest_kvmock.oracle.hygiene.problem import Problem
from pytest_kvmock.values.checks import parameter_kind
from pytest_kvmock.values.events import RouterEvent, StorageTier, Stored, StreamKey
from pytest_kvmock.values.prompt_keys import names_blocks
from pytest_kvmock.values.tokens import Prompt

if TYPE_CHECKING:
    from pytest_kvmock.oracle.hygiene.stream import Stream
    from pytest_kvmock.values.prompt_keys import EventExtra

Scores: TypeAlias = dict[tuple[int, int], int]
"""Matched blocks by (worker_id, dp_rank); ranks without any are absent."""

WorkerScores: TypeAlias = dict[int, int]
"""Matched blocks by worker: the maximum over its ranks."""

TierScores: TypeAlias = dict[StorageTier, Scores | WorkerScores]
"""Matched blocks by tier; tiers without any are absent."""

Call: TypeAlias = tuple[Callable[[Any], Any], Any]
"""A function of the index under test, and the argument to call it with."""

_T = TypeVar("_T")
Calls: TypeAlias = Generator[Call, Any, _T]
"""Yields calls of the index under test, one by one, and returns their combined result."""

Findings: TypeAlias = Calls[list[Problem]]
"""Calls that return the problems found."""


def run(calls: Calls[_T]) -> _T:
    """Make the calls that a generator yields; return the generator's result."""
    __tracebackhide__ = True
    try:
        function, argument = next(calls)
        while True:
            try:
                answer = function(argument)
            except Exception as error:  # noqa: BLE001 - whatever a user's index raises is a finding
                function, argument = calls.throw(error)
            else:
                function, argument = calls.send(answer)
    except StopIteration as stop:
        return cast("_T", stop.value)


async def arun(calls: Calls[_T]) -> _T:
    """Make the calls that a generator yields, and await awaitable results; see `run`."""
    __tracebackhide__ = True
    try:
        function, argument = next(calls)
        while True:
            try:
                answer = function(argument)
                if isawaitable(answer):
                    answer = await answer
            except Exception as error:  # noqa: BLE001 - as above
                function, argument = calls.throw(error)
            else:
                function, argument = calls.send(answer)
    except StopIteration as stop:
        return cast("_T", stop.value)


_WITH_TOKENS: Final = "sink.publish(event, token_ids=[...]), a list of tokens a block"

_BY_TIER: Final = (
    "expected a mapping of tiers to mappings of worker_id or (worker_id, dp_rank) to a number of blocks, "
    "such as {'device': {(0, 0): 2}}"
)

CALLERS: Final = (__file__, str(Path(__file__).with_name("index_comparison.py")))
"""Files that call the user's index, for `raised_at`."""


class UnreadableAnswer(ValueError):  # noqa: N818 - named for what it is
    """Raised if the index under test did not return a mapping of workers to numbers of blocks."""


_OF_HASHES: Final = {"match_tokens": "find_matches", "match_tiered": "find_tiered"}
"""The methods that take tokens, each with the method that takes local hashes instead."""

_TIERED: Final = ("find_tiered", "match_tiered")
"""The methods that answer tier by tier; a method that takes hashes is preferred, as everywhere."""


class IndexMethod:
    """A lookup method of an index.

    Args:
        index: the user's object.
        name: the name of the method.

    Attributes:
        name: the name of the method.
        call: the method.
        by_tier: whether it answers tier by tier.
        takes_tokens: whether it takes tokens; False: local hashes.
    """

    def __init__(self, index: object, name: str) -> None:
        self.name = name
        self.call: Callable[..., Any] = getattr(index, name)
        self.by_tier = name in _TIERED
        self.takes_tokens = name in _OF_HASHES
        self._index = type(index).__name__
        self._extra_kind = parameter_kind(self.call, "extra") if self.takes_tokens else None

    @classmethod
    def first(cls, index: object, names: Iterable[str]) -> Self | None:
        """Return the first of these methods that an index has; None if it has none of them."""
        return next((cls(index, name) for name in names if callable(getattr(index, name, None))), None)

    @property
    def takes_extra(self) -> bool:
        """Whether it supports prompts that carry more than tokens: it takes hashes, or has a parameter `extra`."""
        return not self.takes_tokens or self._extra_kind is not None

    def asking(self, extra: EventExtra | None) -> Callable[[Any], Any]:
        """Return the function that looks up a prompt that carries `extra`; local hashes already cover it.

        A method with a parameter `extra` always gets it: None for a prompt of only tokens. A request only has the name
        of its adapter; an engine's number for the adapter appears in events, but in no lookup.

        Raises:
            ValueError: the method takes only tokens, but the block names of the prompt also cover other data.
        """
        __tracebackhide__ = True
        ask = self.call
        if not self.takes_tokens:
            return ask
        if extra is not None and extra.get("lora_name"):
            extra = {name: value for name, value in extra.items() if name != "lora_id"}
        if self._extra_kind is not None:
            by_place = self._extra_kind == Parameter.POSITIONAL_ONLY
            return (lambda tokens: ask(tokens, extra)) if by_place else partial(ask, extra=extra)
        if extra is not None and names_blocks(extra):
            given = [key for key in ("lora_name", "cache_salt") if extra.get(key)]
            raise ValueError(
                f"the index under test ({self._index}) takes tokens alone, {self.name}(tokens), and this prompt has "
                f"{' and '.join(given) or 'multimodal items'}: give it {self.name}(tokens, extra)"
            )
        return ask

    def question(
        self, hashes: Sequence[int], tokens: Sequence[int] | None, *, of_events: bool = False
    ) -> Sequence[int]:
        """Return the argument of a lookup: the local hashes, or the tokens.

        Args:
            hashes: the local hashes.
            tokens: the tokens; None if unknown.
            of_events: whether the blocks come from events; False: from a prompt.

        Raises:
            ValueError: the method takes tokens, and there are none.
        """
        __tracebackhide__ = True
        if not self.takes_tokens:
            return hashes
        if tokens is not None:
            return tokens
        instead = f"give the index a {_OF_HASHES[self.name]}(local_hashes)"
        if of_events:
            raise ValueError(
                f"the index under test takes tokens ({self.name}), and a Stored of these blocks had no token_ids for "
                f"each: give them with the event, {_WITH_TOKENS}, or {instead}"
            )
        raise ValueError(
            f"the index under test takes tokens ({self.name}), and this prompt has only hashes; give a prompt of "
            "tokens (of a trace: request.prompt(tokens=True), @pytest.mark.kvmock(trace_tokens=True) or "
            f"--kv-trace-tokens), or {instead}"
        )


def _asked_by(index: object) -> IndexMethod | None:
    """Return the method that looks up blocks on the device; None if the index has none."""
    return IndexMethod.first(index, ("find_matches", "match_tokens", *_TIERED))


def asked_by_tokens(index: object) -> bool:
    """Whether an index is queried by tokens, not by local hashes."""
    asked = _asked_by(index)
    return asked is not None and asked.takes_tokens


class IndexUnderTest:
    """Wraps a user's index in one interface.

    The index has `apply(event)`, which takes a `RouterEvent`, and at least one of `find_matches(local_hashes)`,
    `match_tokens(tokens)` (or `match_tokens(tokens, extra)`, for prompts that carry more than tokens),
    `find_tiered(local_hashes)` and `match_tiered(tokens, extra)`. `flush`, `dump_events`, `remove_worker` and
    `remove_worker_dp_rank` are optional. With `find_tiered` or `match_tiered` the index answers tier by tier, otherwise
    only for the device. If it has methods for hashes and for tokens, it is queried by hashes. Any method may be a
    coroutine function; then the test awaits it (`aflush`, `aoverlap`).

    If the index has an attribute `takes_updates` that is True, it is also given Updated events, and its answer by tier
    must tell their levels apart. Otherwise its answers are compared as if there were no Updated, as all known readers
    ignore them.

    Args:
        index: the user's object.
        bounded: minimum number of blocks that it keeps, if it may drop blocks beyond that; None: it drops nothing.

    Attributes:
        plain: the method that looks up blocks on the device.
        tiered: the method that answers tier by tier; None if there is none.
        by_tokens: the one of these two methods that takes tokens; None if neither does.
        answers_reusable: whether its attribute `answers` is "reusable": it answers exactly what the engine of a hybrid
            model would reuse, also for an image at another place in its block. By default ("held") any answer is
            correct from that number up to the blocks that the attention group holds, or that match if the image's place
            is ignored.

    Raises:
        TypeError: the index lacks a method.
        ValueError: the index is not empty, according to its `dump_events`; or its `answers` is an unknown text.
    """

    def __init__(self, index: Any, *, bounded: int | None = None) -> None:
        self.index = index
        self.name = name = type(index).__name__
        if isinstance(index, type):
            raise TypeError(
                f"the index under test is a class, {index.__name__}; it must be an object, {index.__name__}()"
            )
        apply = getattr(index, "apply", None)
        if not callable(apply):
            raise TypeError(f"the index under test ({name}) has no apply(event), which takes a RouterEvent")
        asked = _asked_by(index)
        if asked is None:
            raise TypeError(
                f"the index under test ({name}) has none of find_matches(local_hashes), match_tokens(tokens), "
                "find_tiered(local_hashes) and match_tiered(tokens, extra)"
            )
        answers = getattr(index, "answers", "held")
        if isinstance(answers, str) and answers not in (
            "held",
            "reusable",
        ):  # an attribute of another type is the index's own
            raise ValueError(
                f"the index under test ({name}): answers must be 'held' or 'reusable', got {answers!r:.80}"
            )
        self.answers_reusable = answers == "reusable"
        self._bounded, self._stored = bounded, 0
        self.apply: Callable[[RouterEvent], Any] = apply
        self.plain, self.tiered = asked, IndexMethod.first(index, _TIERED)
        self.by_tokens = next((each for each in (asked, self.tiered) if each is not None and each.takes_tokens), None)
        self.takes_updates = getattr(index, "takes_updates", False) is True
        self.flush = self._method("flush")
        self.remove_worker = self._method("remove_worker")
        self.remove_rank = self._method("remove_worker_dp_rank")
        dump = self._method("dump_events")
        tiered = None if self.tiered is None else self.tiered.call
        called = (self.apply, asked.call, tiered, self.flush, self.remove_worker, self.remove_rank)
        self.is_async = any(call is not None and iscoroutinefunction(call) for call in called)
        if bounded is not None:
            self.apply = partial(self._apply_counted, apply)
        try:
            held = list(dump() or ()) if dump is not None and not iscoroutinefunction(dump) else []
        except Exception as error:
            raise ValueError(f"dump_events() of the index under test ({name}) raised {error!r}") from error
        if held:
            raise ValueError(
                f"the index under test ({name}) is not empty at the start: dump_events() has "
                f"{len(held)} event{'s' * (len(held) != 1)}; each test needs an index of its own"
            )

    @classmethod
    def of(cls, index: Any) -> Self:
        """Wrap an index; return an `IndexUnderTest` unchanged, as it was checked already."""
        return index if isinstance(index, cls) else cls(index)

    @property
    def may_forget(self) -> bool:
        """Whether more blocks were stored than the index keeps, so that it may find fewer than are held."""
        return self._bounded is not None and self._stored > self._bounded

    def _apply_counted(self, apply: Callable[[RouterEvent], Any], event: RouterEvent) -> Any:
        """Apply an event to a bounded index, and count the stored blocks, in every tier and including repetitions."""
        if isinstance(event.event.data, Stored):
            self._stored += len(event.event.data.block_hashes)
        return apply(event)

    def _method(self, name: str) -> Callable[..., Any] | None:
        method = getattr(self.index, name, None)
        return method if callable(method) else None

    def removal_calls(self, worker_id: int, ranks: Iterable[int], *, whole: bool) -> list[Call]:
        """Return the calls that remove some ranks of a worker from the index.

        Args:
            worker_id: the worker.
            ranks: the ranks to remove.
            whole: whether they are all ranks of the worker.

        Raises:
            ValueError: the index has no method for this.
        """
        remove, remove_rank = self.remove_worker, self.remove_rank
        if whole and remove is not None:
            return [(remove, worker_id)]
        if remove_rank is not None:
            return [(lambda rank: remove_rank(worker_id, rank), dp_rank) for dp_rank in ranks]
        need = "remove_worker(worker_id)" if whole else "remove_worker_dp_rank(worker_id, dp_rank)"
        raise ValueError(f"the index under test ({self.name}) cannot remove worker {worker_id}: it has no {need}")

    def look_up(
        self,
        prompt: Prompt,
        block_size: int,
        *,
        extra: EventExtra | None,
        by_tier: bool,
        streams: Mapping[StreamKey, Stream] | None = None,
    ) -> Calls[TierScores]:
        """Look up a prompt. A sync index is flushed first; an async index answers as of its last flush.

        If names of blocks look ahead, the index is asked once for each number of next tokens, and each answer counts
        for the workers whose names cover that number. An index that hashes tokens itself is asked once.

        Args:
            prompt: the prompt.
            block_size: tokens per block.
            extra: what it carries in addition to its tokens, in the form of the engines' events; None for nothing.
            by_tier: whether to ask for all tiers; False: only for the device.
            streams: the streams of the workers; None: no names look ahead.

        Raises:
            ValueError: the index takes tokens and the prompt has none; or tiers are requested and the index does not
                answer by tier.
            UnreadableAnswer: the answer is no mapping of workers to blocks, or of tiers to such mappings.
        """
        __tracebackhide__ = True
        asked = self._telling_tiers() if by_tier else self.plain
        flush = self.flush
        if flush is not None and not self.is_async:
            yield lambda _: flush(), None
        forms = forms_of(streams or {}, prompt)
        once = len(forms) == 1 or asked.takes_tokens
        tiers: dict[StorageTier, dict[int, Scores | WorkerScores]] = {}
        for ahead in forms[:1] if once else forms:
            hashes = () if asked.takes_tokens else list(prompt.block_hashes(block_size, ahead))
            answer = yield asked.asking(extra), asked.question(hashes, prompt.tokens)
            read = self.read_tiered(answer) if by_tier else {StorageTier.DEVICE: self.read(answer)}
            for tier, scores in read.items():
                tiers.setdefault(tier, {})[ahead] = scores
        if once:
            return {tier: answers[forms[0]] for tier, answers in tiers.items()}
        return {tier: of_each_form(answers, streams or {}) for tier, answers in tiers.items()}

    def _telling_tiers(self) -> IndexMethod:
        __tracebackhide__ = True
        if self.tiered is None:
            raise ValueError(
                f"the index under test ({self.name}) does not tell tiers apart: it has no find_tiered(local_hashes), "
                "nor "
                "match_tiered(tokens, extra), which return {tier: {(worker_id, dp_rank): blocks}}"
            )
        return self.tiered

    def want_of_tokens(self, event: RouterEvent, block_size: int | None) -> str:
        """Return the end of a message: what an event lacks for an index that takes tokens; "" if it lacks nothing."""
        data = event.event.data
        if self.by_tokens is None or not isinstance(data, Stored):
            return ""
        if event.token_ids is not None and sparse(event, data, block_size) is None:
            return ""
        return f"; the event had no token_ids for each block: {_WITH_TOKENS}"

    def read_tiered(self, answer: Any) -> TierScores:
        """Read an answer by tier into one shape, without zeros and empty tiers.

        Raises:
            UnreadableAnswer: not a mapping of tiers to mappings of workers to numbers of blocks.
        """
        asked = self._telling_tiers().name
        if not isinstance(answer, Mapping):
            raise UnreadableAnswer(f"{asked}() of {self.name} returned {answer!r:.120}; {_BY_TIER}")
        out: TierScores = {}
        for tier, scores in answer.items():
            try:
                known = StorageTier.of(tier)
            except ValueError as error:
                what = (
                    f"the {error}" if isinstance(tier, str) else f"the key {tier!r:.80} in place of a tier; {_BY_TIER}"
                )
                raise UnreadableAnswer(f"{asked}() of {self.name} returned {what}") from None
            if found := self._read_scores(scores, asked, f" in {known}"):
                out[known] = found
        return out

    def read(self, answer: Any) -> Scores | WorkerScores:
        """Read an answer for the device into one shape: zeros are dropped, keys keep their form.

        Raises:
            UnreadableAnswer: not a mapping of workers to numbers of blocks.
        """
        if self.plain.by_tier:
            return self.read_tiered(answer).get(StorageTier.DEVICE, {})
        return self._read_scores(answer, self.plain.name)

    def _read_scores(self, answer: Any, asked: str, where: str = "") -> Scores | WorkerScores:
        """Read what a method returned for one tier.

        Args:
            answer: the returned value.
            asked: the name of the method.
            where: the tier, for a message.

        Raises:
            UnreadableAnswer: not a mapping of workers to numbers of blocks.
        """
        scores = getattr(answer, "scores", answer)
        if not isinstance(scores, Mapping):
            raise UnreadableAnswer(
                f"{asked}() of {self.name} returned {answer!r:.120}{where}; expected a mapping of worker_id or "
                "(worker_id, dp_rank) to a number of blocks, or an object with such a mapping in .scores"
            )
        out: dict[Any, int] = {}
        ranked = None
        for key, blocks in scores.items():
            is_pair = isinstance(key, tuple) and len(key) == 2 and all(isinstance(part, int) for part in key)
            is_count = isinstance(blocks, int) and blocks >= 0
            if not (is_pair or isinstance(key, int)) or not is_count or ranked not in (None, is_pair):
                raise UnreadableAnswer(
                    f"{asked}() of {self.name} returned{where} the entry {key!r}: {blocks!r}; expected worker_id or "
                    "(worker_id, dp_rank), the same form in one answer, and a number of blocks"
                )
            ranked = is_pair
            if blocks:
                out[key] = blocks
        return out


def forms_of(streams: Mapping[StreamKey, Stream], prompt: Prompt | None = None) -> tuple[int, ...]:
    """Return the different numbers of next tokens that the workers' block names cover, the smallest first.

    Args:
        streams: the streams of the workers.
        prompt: the prompt to look up; for a hash-only prompt there is one form, as its hashes are fixed.
    """
    if prompt is not None and not prompt.has_tokens:
        return (0,)
    return tuple(sorted({stream.lookahead for stream in streams.values()})) or (0,)


def of_each_form(answers: Mapping[int, Scores | WorkerScores], streams: Mapping[StreamKey, Stream | int]) -> Any:
    """Combine the answers for each number of next tokens: each counts for the workers whose names cover that number.

    Args:
        answers: the answers by number of next tokens, each by worker or by rank.
        streams: the streams of the workers, or the number of next tokens that their names cover.
    """
    by_rank = {key: each if isinstance(each, int) else each.lookahead for key, each in streams.items()}
    forms: dict[Any, int] = {**by_rank, **{key[0]: ahead for key, ahead in by_rank.items()}}
    return {
        key: blocks for ahead, scores in answers.items() for key, blocks in scores.items() if forms.get(key, 0) == ahead
    }


def agree(answer: Scores | WorkerScores, expected: Scores) -> bool:
    """Whether an answer, by worker or by rank, is the expected one."""
    if answer == expected:
        return True
    if not answer or isinstance(next(iter(answer)), tuple):
        return False
    return answer == by_worker(expected)


def by_worker(scores: Scores) -> WorkerScores:
    """Return the maximum number of blocks over each worker's ranks."""
    out: WorkerScores = {}
    for (worker, _), blocks in scores.items():
        out[worker] = max(blocks, out.get(worker, 0))
    return out


def first_difference(answer: Scores | WorkerScores, least: Scores, most: Scores) -> tuple[int, int, int, range] | None:
    """Return the first worker for which an answer is too low or too high.

    Args:
        answer: the answer, by worker or by rank.
        least: the smallest correct answer, by rank.
        most: the largest correct answer, by rank.

    Returns:
        (worker_id, dp_rank, blocks returned, blocks expected); None if all is right.
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


def difference_below(
    answer: TierScores,
    expected: Mapping[StorageTier, Scores],
    ignored: Collection[StreamKey],
    *,
    forgets: bool = False,
) -> tuple[StorageTier, int, int, int, range] | None:
    """Return the first tier below the device, and the first worker in it, for which an answer by tier is wrong.

    A tier continues where the faster ones end. So once the answer for a worker differs in a tier, the tiers below it
    are not checked for that worker: on the device the answer may differ and still be right.

    Args:
        answer: the answer, by worker (the maximum over its ranks) or by rank.
        expected: the right answer.
        ignored: workers and ranks for which any answer is accepted.
        forgets: whether an answer that is too low is accepted.

    Returns:
        (tier, worker_id, dp_rank, blocks returned, blocks expected); None if all is right.
    """
    before = [StorageTier.DEVICE]
    for tier in StorageTier:
        if tier is StorageTier.DEVICE:
            continue
        mine, due = answer.get(tier, {}), expected.get(tier, {})
        ranked = not mine or isinstance(next(iter(mine)), tuple)
        names: set[Any] = {*mine, *(due if ranked else by_worker(due))}
        for name in sorted(names):
            got, right = _score(mine, name), _score(due, name)
            accepted = any(name in (key, key[0]) for key in ignored) or any(
                _score(answer.get(each, {}), name) != _score(expected.get(each, {}), name) for each in before
            )
            if got != right and not accepted and not (forgets and got < right):
                worker, rank = name if ranked else (name, 0)
                return tier, worker, rank, got, range(right, right + 1)
        before.append(tier)
    return None


def _score(scores: Scores | WorkerScores, name: Any) -> int:
    """Return the number of blocks of a worker, or of a worker and rank, in either form of an answer."""
    blocks: Mapping[Any, int] = scores
    if name in blocks:
        return blocks[name]
    if isinstance(name, tuple):
        return blocks.get(name[0], 0)
    return max((count for key, count in blocks.items() if isinstance(key, tuple) and key[0] == name), default=0)
