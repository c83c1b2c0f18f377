"""The index under test: its calls, and its answers in one shape.

The code that calls it is written once, for sync and async indexes: generators yield the calls to make, and are sent the
results. `run` makes the calls, `arun` awaits them.

One subject: a call of the user's index, and what its answer means.
"""

from __future__ import annotations

import traceback
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
"""Matched blocks by worker alone: the most over its ranks."""

TierScores: TypeAlias = dict[StorageTier, Scores | WorkerScores]
"""Matched blocks by tier; tiers without any are absent."""

Call: TypeAlias = tuple[Callable[[Any], Any], Any]
"""A function of the index under test, and the argument to call it with."""

_T = TypeVar("_T")
Calls: TypeAlias = Generator[Call, Any, _T]
"""Yields calls of the index under test, one by one, and returns what comes of them."""

Findings: TypeAlias = Calls[list[Problem]]
"""Calls that return the problems found."""


def run(calls: Calls[_T]) -> _T:
    """Make the calls that a generator yields; return what it returns."""
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
    """Do what `run` does, and await what is awaitable."""
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


def raised_at(error: Exception) -> str:
    """Where a call has raised, for a message: the last line of the user's own."""
    frames = traceback.walk_tb(error.__traceback__)  # without the lines of source, which cost more than the rest
    own = [(frame.f_code, line) for frame, line in frames if frame.f_code.co_filename not in _CALLERS]
    if not own:
        return ""
    code, line = own[-1]
    return f" ({Path(code.co_filename).name}:{line} in {code.co_name})"


_WITH_TOKENS: Final = "sink.publish(event, token_ids=[...]), a list of tokens a block"

_BY_TIER: Final = (
    "expected a mapping of tiers to mappings of worker_id or (worker_id, dp_rank) to a number of blocks, "
    "such as {'device': {(0, 0): 2}}"
)

_CALLERS: Final = (__file__, str(Path(__file__).with_name("index_comparison.py")))
"""Whose frames are not the user's."""


class UnreadableAnswer(ValueError):  # noqa: N818 - named for what it is
    """Raised where the index under test returned no mapping of workers to numbers of blocks."""


_OF_HASHES: Final = {"match_tokens": "find_matches", "match_tiered": "find_tiered"}
"""The methods that take tokens, each with the one that takes local hashes in its place."""

_TIERED: Final = ("find_tiered", "match_tiered")
"""The methods that answer tier by tier; one that takes hashes comes first, as everywhere."""


class IndexMethod:
    """A method by which an index is asked.

    Args:
        index: the user's object.
        name: of the method.

    Attributes:
        name: as above.
        call: the method.
        by_tier: whether it answers tier by tier.
        takes_tokens: whether it takes tokens, and not local hashes.
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
        """The first of these methods that an index has; None where it has none."""
        return next((cls(index, name) for name in names if callable(getattr(index, name, None))), None)

    @property
    def takes_extra(self) -> bool:
        """Whether it can be asked for prompts that carry more than tokens: by tokens, it has a parameter `extra`."""
        return not self.takes_tokens or self._extra_kind is not None

    def asking(self, extra: EventExtra | None) -> Callable[[Any], Any]:
        """The function that asks for a prompt, by what it carries in addition to its tokens; local hashes have that
        in them.

        One that has a parameter `extra` is given it always: None for a prompt of tokens alone. A request has the name
        of its adapter alone: the number that one engine has for it is in events, and in no question.

        Raises:
            ValueError: it takes tokens alone, and blocks of the prompt are named by more.
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
        """The argument of a look-up: the local hashes, or the tokens.

        Args:
            hashes: the local hashes.
            tokens: the tokens; None where they are not known.
            of_events: the blocks are known by events, and not by a prompt.

        Raises:
            ValueError: it takes tokens, and there are none.
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
                "each: "
                f"give them with the event, {_WITH_TOKENS}, or {instead}"
            )
        raise ValueError(
            f"the index under test takes tokens ({self.name}), and this prompt has only hashes; give a prompt of "
            "tokens "
            "(of a trace: request.prompt(tokens=True), @pytest.mark.kvmock(trace_tokens=True) or --kv-trace-tokens), "
            f"or {instead}"
        )


def _asked_by(index: object) -> IndexMethod | None:
    """The method by which an index is asked for what the device has; None where it has none."""
    return IndexMethod.first(index, ("find_matches", "match_tokens", *_TIERED))


def asked_by_tokens(index: object) -> bool:
    """Whether an index is asked by tokens, and not by local hashes."""
    asked = _asked_by(index)
    return asked is not None and asked.takes_tokens


class IndexUnderTest:
    """Wraps a user's index in one interface.

    The index has `apply(event)`, which takes a `RouterEvent`, and one of `find_matches(local_hashes)`,
    `match_tokens(tokens)` (or `match_tokens(tokens, extra)`, by which prompts are asked for that carry more than
    tokens), `find_tiered(local_hashes)` and `match_tiered(tokens, extra)`; `flush`, `dump_events`, `remove_worker` and
    `remove_worker_dp_rank` are used where it has them. Where it has `find_tiered` or `match_tiered` it answers tier
    by tier; else it is asked for the device alone. What has a method for hashes and one for tokens is asked by
    hashes. Any of them may be a coroutine function; then the test awaits it (`aflush`, `aoverlap`).

    Where it has an attribute `takes_updates` that is True it is given Updated too, and its answer by tier must keep
    apart the levels that these name; else it is compared with what its events say without them, as all known readers
    ignore them.

    Args:
        index: the user's object.
        bounded: how many blocks it keeps at least, if it forgets what is stored beyond that; None: it forgets nothing.

    Attributes:
        plain: the method by which it is asked for what the device has.
        tiered: that by which it is asked tier by tier; None: it does not answer tier by tier.
        by_tokens: that of the two which takes tokens; None: neither does.
        answers_reusable: whether it answers exactly what the engine of a hybrid model would reuse, or of an image at
            another place in its block, by its attribute `answers`: "reusable". By default, "held", any answer is right
            from that up to what the attention group holds, or what there is without the place.

    Raises:
        TypeError: it lacks a method.
        ValueError: it is not empty, by its `dump_events`; or its `answers` is something else.
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
        ):  # what else has the name is the index's own
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
        """Wrap an index that is not wrapped yet; one that is has been checked."""
        return index if isinstance(index, cls) else cls(index)

    @property
    def may_forget(self) -> bool:
        """Whether more blocks were stored by now than it keeps, so that it may find fewer than are held."""
        return self._bounded is not None and self._stored > self._bounded

    def _apply_counted(self, apply: Callable[[RouterEvent], Any], event: RouterEvent) -> Any:
        """Apply an event to a bounded index, and count the blocks that it stores, in any tier and however often."""
        if isinstance(event.event.data, Stored):
            self._stored += len(event.event.data.block_hashes)
        return apply(event)

    def _method(self, name: str) -> Callable[..., Any] | None:
        method = getattr(self.index, name, None)
        return method if callable(method) else None

    def removal_calls(self, worker_id: int, ranks: Iterable[int], *, whole: bool) -> list[Call]:
        """The calls that remove some ranks of a worker from the index.

        Args:
            worker_id: which worker.
            ranks: which of its ranks.
            whole: they are all that it has.

        Raises:
            ValueError: the index has no method for it.
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
        """Look up a prompt; a sync index is flushed before, an async one is asked as far as it was flushed.

        Where names of blocks look ahead, it is asked once for each number of tokens that they look at, and of each
        answer those workers count whose names do. One that hashes tokens itself is asked once.

        Args:
            prompt: the prompt.
            block_size: tokens a block.
            extra: what it carries in addition to its tokens, in the form of the engines' events; None for nothing.
            by_tier: ask for all tiers, and not for the device alone.
            streams: those of the workers; None: no names look ahead.

        Raises:
            ValueError: it takes tokens, and the prompt has none; or it is asked for tiers, and has no answer by tier.
            UnreadableAnswer: the answer is no mapping of workers to blocks, or of tiers to such.
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
        """What an event lacks for an index that takes tokens, to end a message; "" where it lacks nothing."""
        data = event.event.data
        if self.by_tokens is None or not isinstance(data, Stored):
            return ""
        if event.token_ids is not None and sparse(event, data, block_size) is None:
            return ""
        return f"; the event had no token_ids for each block: {_WITH_TOKENS}"

    def read_tiered(self, answer: Any) -> TierScores:
        """Read an answer by tier into one shape: what has no blocks is dropped.

        Raises:
            UnreadableAnswer: it is no mapping of tiers to mappings of workers to numbers of blocks.
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
        """Read an answer, of the device, into one shape: zeros are dropped, keys keep their form.

        Raises:
            UnreadableAnswer: it is no mapping of workers to numbers of blocks.
        """
        if self.plain.by_tier:
            return self.read_tiered(answer).get(StorageTier.DEVICE, {})
        return self._read_scores(answer, self.plain.name)

    def _read_scores(self, answer: Any, asked: str, where: str = "") -> Scores | WorkerScores:
        """Read what a method has returned of one tier.

        Args:
            answer: what it has.
            asked: the method.
            where: the tier, for a message.

        Raises:
            UnreadableAnswer: it is no mapping of workers to numbers of blocks.
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
    """How many of the next tokens the names of blocks look at, for each number that a worker has, the least first.

    Args:
        streams: those of the workers.
        prompt: for which prompt; of one of hashes there is one, as its hashes are what they are.
    """
    if prompt is not None and not prompt.has_tokens:
        return (0,)
    return tuple(sorted({stream.lookahead for stream in streams.values()})) or (0,)


def of_each_form(answers: Mapping[int, Scores | WorkerScores], streams: Mapping[StreamKey, Stream | int]) -> Any:
    """The workers whose names look at each number of tokens, by the answers' keys.

    Args:
        answers: by worker or by rank.
        streams: those of the workers; or how many tokens their names look at.
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
        (worker_id, dp_rank, blocks returned, blocks expected); None where all is right.
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
    """The first tier below the device, and the first worker in it, for which an answer by tier is wrong.

    A tier goes on where the faster ones end. So what the answer has of a worker below a tier in which it differs is not
    looked at: on the device it may differ, and be right.

    Args:
        answer: by worker or by rank; by worker alone, the most over its ranks.
        expected: the right answer.
        ignored: workers and ranks for which any answer is accepted.
        forgets: whether an answer that is too low is accepted.

    Returns:
        (tier, worker_id, dp_rank, blocks returned, blocks expected); None where all is right.
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
    """The blocks of a worker, or of a worker and rank, in either form of an answer."""
    blocks: Mapping[Any, int] = scores
    if name in blocks:
        return blocks[name]
    if isinstance(name, tuple):
        return blocks.get(name[0], 0)
    return max((count for key, count in blocks.items() if isinstance(key, tuple) and key[0] == name), default=0)
