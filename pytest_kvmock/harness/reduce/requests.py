"""Reduction of requests to workers: fewer requests, then shorter prompts, fewer steps, a smaller cache.

One subject: what is left out, and in which order.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pytest_kvmock.engines.backends import EngineProfile
from pytest_kvmock.harness.reduce.program import NotReduced, Reproduction
from pytest_kvmock.harness.reduce.search import Spent, minimal
from pytest_kvmock.values.programs.forms import Name, OnRequest, Operation, sizes
from pytest_kvmock.values.programs.operations import Decode, Finish, Prefill, Run, RunPasses, Submit
from pytest_kvmock.values.prompt_keys import PromptKeys

if TYPE_CHECKING:
    from pytest_kvmock.harness.recording import RecordedOperation
    from pytest_kvmock.harness.reduce.replay import Replayer
    from pytest_kvmock.values.events import StreamKey

Asked: TypeAlias = Prefill | Submit
"""The operations that begin a request."""

# Theory of operation
#
# Most engine bugs appear when the cache is full. A long test needs very many requests for that; a smaller cache needs
# few. So the search first tries a few requests around the event that shows the problem, or the last event that names
# its block, in a cache that holds only one of them; then more requests; and last all requests unchanged.

_WINDOWS: Final = (2, 4, 8, 16, 64, 256, 1024)


class RequestCutter:
    """Finds the fewest requests that break a rule.

    Args:
        whole: the failing test as a program without steps: breach, backend, profile, workers, index.
        recorded: the operations on the workers, in order.
        around: numbers of events near which the cause may be, the likeliest first.
        replayer: replays programs.

    Attributes:
        best: the smallest program so far that breaks the rule; None before the first.
    """

    def __init__(
        self, whole: Reproduction, recorded: Sequence[RecordedOperation], around: Iterable[int], replayer: Replayer
    ) -> None:
        self.best: Reproduction | None = None
        self._replayer = replayer
        self._recorded = recorded
        self._around = tuple(around)
        self._size = whole.profile.block_size
        self._decoded: Counter[Name] = Counter()
        for step, _ in recorded:
            if isinstance(step, Decode):
                self._decoded[step.name] += _many(step.tokens)
        self._now = whole

    def cut(self) -> Reproduction:
        """Search.

        Raises:
            NotReduced: no program was found that breaks the rule again.
        """
        try:
            self._start()
            self._make_plain()  # early, in case the search ends at its limit
            before = None
            while before != (before := self._weight()):
                for shorten in (
                    self._one_run,
                    self._fewer_requests,
                    self._smaller_cache,
                    self._simpler_tiers,
                    self._fewer_operations,
                    self._fewer_blocks,
                    self._shorter_prompts,
                    self._fewer_steps,
                    self._earlier,
                    self._one_after_another,
                ):
                    shorten()
            self._make_plain()
        except Spent:
            if self.best is None:
                raise NotReduced("no part of the requests broke the rule again before the limit was reached") from None
            return self.best
        assert self.best is not None
        return self.best.replace(complete=True)

    def _attempt(self, operations: Sequence[Operation] | None = None, **fields: Any) -> bool:
        """Whether the program breaks the rule with these operations or fields; if so, it is reduced next."""
        program = self._now.replace(**fields)
        if operations is not None:
            program = program.replace(steps=tuple(operations))
        # In the best program no operation may raise; later reduction leaves out those that do.
        if not program.steps or not self._replayer.breaks(program):
            return False
        self._now = program
        if self._replayer.breaks(program, strict=True):
            self.best = program
        return True

    @property
    def _steps(self) -> tuple[Operation, ...]:
        return self._now.operations

    def _weight(self) -> tuple[int, ...]:
        sizes = [len(step.blocks) for step in self._steps if isinstance(step, Asked)]
        return len(self._steps), sum(sizes), self._now.profile.num_blocks

    # -------------------------------------------------------------------------------------------------- start

    def _start(self) -> None:
        for operations, num_blocks in self._parts():
            profile = self._now.profile.replace(num_blocks=num_blocks)
            if self._attempt(operations, profile=profile):
                return
        raise NotReduced("replayed, the requests do not break the rule again")

    def _parts(self) -> Iterator[tuple[Sequence[Operation], int]]:
        """Yield parts of the operations, each with a cache size, from the cheapest part to all operations."""
        given = self._now.profile.num_blocks
        done = 0
        for window in _WINDOWS:
            for part in self._windows(window):
                asked = [self._in_blocks(step) for step in part]
                needed = max((self._blocks(step) for step in asked if isinstance(step, Asked)), default=1)
                for num_blocks in sorted({min(needed + 1, given), min(2 * needed, given), given}):
                    yield asked, num_blocks
            done = window
        if done < len(self._recorded) or any(isinstance(step, Submit) for step, _ in self._recorded):
            yield [self._in_blocks(step) for step, _ in self._recorded], given

    def _windows(self, requests: int) -> Iterator[Sequence[Operation]]:
        """Yield `requests` requests with all their operations, around each of the places and at the end."""
        named = [(_request(step), step, at) for step, at in self._recorded]
        prefills = [(step.name, at) for step, at in self._recorded if isinstance(step, Asked)]
        numbers = [name for name, _ in prefills]
        places = [sum(at <= place for _, at in prefills) for place in self._around]
        seen = set()
        for place in (*places, len(numbers)):
            for start in (place - requests, place - 1):
                chosen = range(max(0, start), min(len(numbers), max(0, start) + requests))
                if not chosen or chosen in seen:
                    continue
                seen.add(chosen)
                wanted = {numbers[i] for i in chosen}
                own = [at for name, _, at in named if name in wanted]
                first, last = own[0], own[-1]
                submitted = [step for step, _ in self._recorded if isinstance(step, Submit) and step.name in wanted]
                if submitted:  # their passes may come much later
                    passes = {i for i, (step, at) in enumerate(self._recorded) if _engine(step) and at >= first}
                    chosen_steps = [
                        step
                        for i, (name, step, at) in enumerate(named)
                        if name in wanted or i in passes or (name is None and not _engine(step) and first <= at <= last)
                    ]
                    yield _with_one_run(chosen_steps)
                    yield chosen_steps
                    continue
                yield [step for name, step, at in named if name in wanted or (name is None and first <= at <= last)]

    def _in_blocks(self, step: Operation) -> Operation:
        """Return an operation with the tokens of its prompt split into blocks and a tail."""
        if not isinstance(step, Asked) or not isinstance(step.tail, tuple):
            return step
        tokens, size = step.tail, self._size
        whole = len(tokens) // size * size
        return replace(step, blocks=tuple(tokens[i : i + size] for i in range(0, whole, size)), tail=tokens[whole:])

    def _blocks(self, asked: Asked) -> int:
        """Return the maximum number of blocks that a request holds at its end."""
        output = asked.output_tokens if isinstance(asked, Submit) else self._decoded.get(asked.name, 0)
        return len(asked.blocks) + 1 + output // self._size

    # --------------------------------------------------------------------------------------------- shortening

    def _one_run(self) -> None:
        """Let each engine run only once, after all requests were submitted."""
        if any(map(_engine, self._steps)) and (steps := _with_one_run(self._steps)) != [*self._steps]:
            self._attempt(steps)

    def _fewer_requests(self) -> None:
        """Leave out complete requests, and operations that belong to no request."""
        units: dict[object, list[int]] = {}
        for i, step in enumerate(self._steps):
            units.setdefault(_request(step) or ("alone", i), []).append(i)
        steps = self._steps

        def of(units: Sequence[list[int]]) -> list[Operation]:
            return [steps[i] for i in sorted(i for unit in units for i in unit)]

        minimal([*units.values()], lambda units: self._attempt(of(units)))

    def _fewer_operations(self) -> None:
        """Leave out single operations, except the start and the end of a request."""
        steps = self._steps
        fixed = {i for i, step in enumerate(steps) if isinstance(step, Prefill | Submit | Finish)}
        loose = [i for i in range(len(steps)) if i not in fixed]
        minimal(loose, lambda kept: self._attempt([steps[i] for i in sorted(fixed.union(kept))]))

    def _smaller_cache(self) -> None:
        """Reduce the number of blocks, with unchanged prompts or with prompts cut to the cache."""
        steps = self._steps
        for num_blocks in sizes(self._now.profile.num_blocks):
            profile = self._now.profile.replace(num_blocks=num_blocks)
            if self._attempt(profile=profile):
                return
            for most in (num_blocks, num_blocks - 1):
                if most and self._attempt(self._with_prompts(steps, partial(_first, most)), profile=profile):
                    return

    def _simpler_tiers(self) -> None:
        """Remove the tiers, or use a smaller host, with defaults for the other fields."""
        tiers = self._now.profile.tiers
        if tiers is None:
            return
        from pytest_kvmock.engines.tiers import Tiers  # imported on first use

        if self._attempt(profile=self._now.profile.replace(tiers=None)):
            return
        for host in (*sizes(tiers.host), tiers.host):
            if host % tiers.chunk:
                continue
            for simple in (Tiers(host, chunk=tiers.chunk), dataclasses.replace(tiers, host=host, batch=None)):
                if simple != tiers and self._attempt(profile=self._now.profile.replace(tiers=simple)):
                    return

    def _fewer_blocks(self) -> None:
        """Leave out blocks, each from all prompts, so that shared prefixes stay shared."""
        steps = self._steps
        named = [*dict.fromkeys(b for step in steps if isinstance(step, Asked) for b in step.blocks)]

        def only(blocks: Sequence[tuple[int, ...] | int]) -> list[Operation]:
            kept = set(blocks)
            return self._with_prompts(steps, lambda p: replace(p, blocks=tuple(b for b in p.blocks if b in kept)))

        minimal(named, lambda blocks: self._attempt(only(blocks)))

    @staticmethod
    def _with_prompts(steps: Sequence[Operation], change: Callable[[Asked], Asked]) -> list[Operation]:
        return [change(step) if isinstance(step, Asked) else step for step in steps]

    def _shorter_prompts(self) -> None:
        """Cut the tail of single prompts, then their last blocks."""
        for i, step in enumerate(self._steps):
            if not isinstance(step, Asked):
                continue
            shorter = replace(step, tail=_no_tail(step))
            if not step.tail or not self._attempt(self._changed(i, shorter)):
                shorter = step
            while len(shorter.blocks) > 1:
                shorter = replace(shorter, blocks=shorter.blocks[:-1])
                if not self._attempt(self._changed(i, shorter)):
                    break

    def _fewer_steps(self) -> None:
        """Decode fewer tokens, and simplify the other operations."""
        for i in range(len(self._steps)):
            for less in self._steps[i].simpler():
                if self._attempt(self._changed(i, less)):
                    break
            self._plainer(i)

    def _plainer(self, i: int) -> None:
        """Reset optional fields of an operation, and leave out what its prompt carries in addition to tokens."""
        for name in self._steps[i].optional:
            step = self._steps[i]
            if name in step.changed:
                self._attempt(self._changed(i, step.without(name)))
        self._fewer_keys(i)

    def _fewer_keys(self, i: int) -> None:
        """Leave out single keys of a prompt, then single multimodal items."""
        step = self._steps[i]
        if not isinstance(step, Asked) or step.keys is None:
            return
        keys = step.keys
        for name in keys.given:
            keys = self._with_keys(i, keys, **{name: getattr(PromptKeys(), name)})
        for item in keys.multimodal:
            keys = self._with_keys(i, keys, multimodal=tuple(each for each in keys.multimodal if each != item))

    def _with_keys(self, i: int, keys: PromptKeys, **fewer: Any) -> PromptKeys:
        """Return the keys with fewer entries if the program then still breaks the rule; else the unchanged keys."""
        less = replace(keys, **fewer)
        step = self._steps[i]
        assert isinstance(step, Asked)
        return less if self._attempt(self._changed(i, replace(step, keys=less))) else keys

    def _earlier(self) -> None:
        """Let the first request of engines arrive at once, and shift the others by the same time."""
        arrivals = [s.arrival_ms for s in self._steps if isinstance(s, Submit) and s.arrival_ms is not None]
        if not arrivals or any(isinstance(step, Run) and step.until_ms is not None for step in self._steps):
            return
        first = min(arrivals)

        def shifted(asked: Asked) -> Asked:
            if not isinstance(asked, Submit) or asked.arrival_ms is None:
                return asked
            return replace(asked, arrival_ms=asked.arrival_ms - first or None)

        self._attempt(self._with_prompts(self._steps, shifted))

    def _one_after_another(self) -> None:
        """Finish each request before the next begins, if the rule is still broken: each then needs only one line."""
        for name in [step.name for step in self._steps if isinstance(step, Prefill)]:
            own = [step for step in self._steps if _request(step) == name]
            start = self._steps.index(own[0])
            rest = [step for step in self._steps if _request(step) != name]
            moved = [*rest[:start], *own, *rest[start:]]
            if tuple(moved) != self._steps:
                self._attempt(moved)

    def _changed(self, i: int, step: Operation) -> list[Operation]:
        return [*self._steps[:i], step, *self._steps[i + 1 :]]

    def _make_plain(self) -> None:
        """Use small numbers and a simpler setup, as far as the program still breaks the rule."""
        default = EngineProfile()
        for field in dataclasses.fields(EngineProfile):
            value = getattr(default, field.name)
            if field.name not in ("block_size", "num_blocks") and value != getattr(self._now.profile, field.name):
                self._attempt(profile=self._now.profile.replace(**{field.name: value}))
        for name in [*self._now.engine]:
            self._attempt(engine={key: value for key, value in self._now.engine.items() if key != name})
        for key, _ in self._now.engines:
            self._attempt(engines=tuple(each for each in self._now.engines if each[0] != key))
        if self._now.judge_unpublished:
            self._attempt(judge_unpublished=False)
        for name in [*self._now.stores]:
            self._attempt(stores={each: store for each, store in self._now.stores.items() if each != name})
        asked = (step for step in self._steps if isinstance(step, Asked))
        numbers = {step.name: i for i, step in enumerate(asked, 1)}
        steps = [
            replace(step, name=numbers.get(step.name, step.name)) if isinstance(step, OnRequest) else step
            for step in self._steps
        ]
        self._attempt(steps)
        renamed: dict[object, Any] = {}
        fresh = count(1)
        size = self._size

        def rename(prefill: Asked) -> Asked:
            for block in prefill.blocks:
                if block not in renamed:
                    number = next(fresh)
                    by_hash = isinstance(block, int)
                    renamed[block] = number if by_hash else tuple(range((number - 1) * size, number * size))
            tail = prefill.tail
            if isinstance(tail, tuple) and tail:
                if tail not in renamed:
                    start = (next(fresh) - 1) * size
                    renamed[tail] = tuple(range(start, start + len(tail)))
                tail = renamed[tail]
            return replace(prefill, blocks=tuple(renamed[block] for block in prefill.blocks), tail=tail)

        self._attempt(self._with_prompts(self._steps, rename))


def _request(step: Operation) -> Name | None:
    """Return the request of an operation; None if it belongs to no request."""
    return step.name if isinstance(step, OnRequest) else None


def _first(most: int, prefill: Asked) -> Asked:
    """Return a prompt of at most `most` blocks, without its tail if it has at least `most`."""
    if len(prefill.blocks) < most:
        return prefill
    return replace(prefill, blocks=prefill.blocks[:most], tail=_no_tail(prefill))


def _no_tail(prefill: Asked) -> tuple[int, ...] | int | None:
    return () if isinstance(prefill.tail, tuple) else prefill.tail and 0


def _engine(step: Operation) -> StreamKey | None:
    """Return the worker and rank whose engine runs passes in an operation; None for other operations."""
    return (step.worker, step.rank) if isinstance(step, RunPasses | Run) else None


def _with_one_run(steps: Sequence[Operation]) -> list[Operation]:
    """Return the steps with the passes of each engine replaced by one run at the end."""
    engines = dict.fromkeys((step.worker, step.rank) for step in steps if isinstance(step, Submit | RunPasses | Run))
    return [*(step for step in steps if not _engine(step)), *(Run(None, *key) for key in engines)]


def _many(tokens: int | Sequence[int]) -> int:
    return tokens if isinstance(tokens, int) else len(tokens)
