"""Cutting down requests to workers: fewer of them, then shorter prompts, fewer steps, a smaller cache.

One subject: what is left out, in which order.
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
"""What begins a request."""

# Theory of operation
#
# Most engine bugs show when room is short. A long test needs a great many requests until then; a smaller cache needs
# few. So the first thing that is tried is a few requests around the event that shows the problem, or the last one
# that named its block, in a cache that holds just one of them; then more requests; and all of them as they were,
# last.

_WINDOWS: Final = (2, 4, 8, 16, 64, 256, 1024)


class RequestCutter:
    """Finds the fewest requests that break a rule.

    Args:
        whole: the failing test as a program without steps: breach, backend, profile, workers, index.
        recorded: what was asked of the workers, in order.
        around: numbers of events where the cause may be, the likeliest first.
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
            NotReduced: nothing was found that breaks the rule again.
        """
        try:
            self._start()
            self._make_plain()  # now already: should the search end early, this much is done
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
        """Whether it breaks the rule with these operations, or in another world; then it is what is cut next."""
        program = self._now.replace(**fields)
        if operations is not None:
            program = program.replace(steps=tuple(operations))
        # Nothing may raise in the end. What raises is cut by itself: it has done nothing, or it is the fault.
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
        """Parts of the operations, and the size of a cache for each, from the cheapest to the whole."""
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
        """`requests` requests, with all that belongs to them, around each of the places and at the end."""
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
                if submitted:  # their passes may come long after them
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
        """An operation with the tokens of its prompt as blocks, and what is left over."""
        if not isinstance(step, Asked) or not isinstance(step.tail, tuple):
            return step
        tokens, size = step.tail, self._size
        whole = len(tokens) // size * size
        return replace(step, blocks=tuple(tokens[i : i + size] for i in range(0, whole, size)), tail=tokens[whole:])

    def _blocks(self, asked: Asked) -> int:
        """Blocks that a request holds in the end, at most."""
        output = asked.output_tokens if isinstance(asked, Submit) else self._decoded.get(asked.name, 0)
        return len(asked.blocks) + 1 + output // self._size

    # --------------------------------------------------------------------------------------------- shortening

    def _one_run(self) -> None:
        """Have engines run once, when they have been given everything."""
        if any(map(_engine, self._steps)) and (steps := _with_one_run(self._steps)) != [*self._steps]:
            self._attempt(steps)

    def _fewer_requests(self) -> None:
        """Leave out whole requests, and what belongs to none."""
        units: dict[object, list[int]] = {}
        for i, step in enumerate(self._steps):
            units.setdefault(_request(step) or ("alone", i), []).append(i)
        steps = self._steps

        def of(units: Sequence[list[int]]) -> list[Operation]:
            return [steps[i] for i in sorted(i for unit in units for i in unit)]

        minimal([*units.values()], lambda units: self._attempt(of(units)))

    def _fewer_operations(self) -> None:
        """Leave out single operations; the end of a request is none."""
        steps = self._steps
        fixed = {i for i, step in enumerate(steps) if isinstance(step, Prefill | Submit | Finish)}
        loose = [i for i in range(len(steps)) if i not in fixed]
        minimal(loose, lambda kept: self._attempt([steps[i] for i in sorted(fixed.union(kept))]))

    def _smaller_cache(self) -> None:
        """Take fewer blocks, with the prompts as they are, or cut to what fits."""
        steps = self._steps
        for num_blocks in sizes(self._now.profile.num_blocks):
            profile = self._now.profile.replace(num_blocks=num_blocks)
            if self._attempt(profile=profile):
                return
            for most in (num_blocks, num_blocks - 1):
                if most and self._attempt(self._with_prompts(steps, partial(_first, most)), profile=profile):
                    return

    def _simpler_tiers(self) -> None:
        """Take no tiers, or a smaller host, and what is default of the rest."""
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
        """Leave out blocks, each from all prompts, so that what was shared stays shared."""
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
        """Decode less: the least of some counts that does; and ask no more of an engine than is needed."""
        for i in range(len(self._steps)):
            for less in self._steps[i].simpler():
                if self._attempt(self._changed(i, less)):
                    break
            self._plainer(i)

    def _plainer(self, i: int) -> None:
        """Leave out what an operation has by default, and what its prompt carries in addition to tokens."""
        for name in self._steps[i].optional:
            step = self._steps[i]
            if name in step.changed:
                self._attempt(self._changed(i, step.without(name)))
        self._fewer_keys(i)

    def _fewer_keys(self, i: int) -> None:
        """Leave out single keys of what a prompt carries, then single multimodal items."""
        step = self._steps[i]
        if not isinstance(step, Asked) or step.keys is None:
            return
        keys = step.keys
        for name in keys.given:
            keys = self._with_keys(i, keys, **{name: getattr(PromptKeys(), name)})
        for item in keys.multimodal:
            keys = self._with_keys(i, keys, multimodal=tuple(each for each in keys.multimodal if each != item))

    def _with_keys(self, i: int, keys: PromptKeys, **fewer: Any) -> PromptKeys:
        """The keys of an operation with less in them, if it breaks the rule so too; else as they were."""
        less = replace(keys, **fewer)
        step = self._steps[i]
        assert isinstance(step, Asked)
        return less if self._attempt(self._changed(i, replace(step, keys=less))) else keys

    def _earlier(self) -> None:
        """Have the first request of engines arrive at once, and the others as long after it as they did."""
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
        """Have requests finished before the next begins, where it does not matter: that reads as one line each."""
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
        """Write it down with small numbers, and with less of the world, where it breaks the rule so too."""
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
    """Which request an operation is about."""
    return step.name if isinstance(step, OnRequest) else None


def _first(most: int, prefill: Asked) -> Asked:
    """A prompt of at most `most` blocks; without its tail, where it has as many or more."""
    if len(prefill.blocks) < most:
        return prefill
    return replace(prefill, blocks=prefill.blocks[:most], tail=_no_tail(prefill))


def _no_tail(prefill: Asked) -> tuple[int, ...] | int | None:
    return () if isinstance(prefill.tail, tuple) else prefill.tail and 0


def _engine(step: Operation) -> StreamKey | None:
    """The worker and rank whose engine an operation has run passes."""
    return (step.worker, step.rank) if isinstance(step, RunPasses | Run) else None


def _with_one_run(steps: Sequence[Operation]) -> list[Operation]:
    """The steps with the passes of each engine as one run to the end."""
    engines = dict.fromkeys((step.worker, step.rank) for step in steps if isinstance(step, Submit | RunPasses | Run))
    return [*(step for step in steps if not _engine(step)), *(Run(None, *key) for key in engines)]


def _many(tokens: int | Sequence[int]) -> int:
    return tokens if isinstance(tokens, int) else len(tokens)
