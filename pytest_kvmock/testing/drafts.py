"""Arbitrary traffic as a program of requests, made of drafts that Hypothesis can draw and shrink."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, Final, Literal, TypeAlias

from pytest_kvmock.engines.base.driver import SlotsLost, WouldWait
from pytest_kvmock.engines.worker import OutOfBlocks
from pytest_kvmock.harness.router_harness import RouterHarness
from pytest_kvmock.harness.under_test import asked_by_tokens
from pytest_kvmock.testing.shrinking import MOST_EVENTS, SHRINKING
from pytest_kvmock.values.checks import check_integer
from pytest_kvmock.values.events import StreamKey
from pytest_kvmock.values.programs.forms import OnRequest, Operation
from pytest_kvmock.values.programs.interpreter import Interpreter
from pytest_kvmock.values.programs.near_hashes import TRUNCATIONS
from pytest_kvmock.values.programs.operations import (
    OPERATIONS,
    Burst,
    Clear,
    Decode,
    Finish,
    Prefill,
    Program,
    ServeNear,
    Step,
    Tick,
)
from pytest_kvmock.values.prompt_keys import PromptKeys


class Player(Interpreter):
    """Does the steps of programs on the workers of a harness, and skips those that do not fit.

    A request that does not fit is refused, as by an engine; this is not a failure. It is then not admitted, or keeps
    its state, and later steps that its state does not allow are skipped.

    Args:
        harness: the harness of the workers.

    Attributes:
        requests: the requests that were admitted, by the names that their Prefill gave them.
    """

    def __init__(self, harness: RouterHarness) -> None:
        super().__init__(harness, by_tokens=asked_by_tokens(harness.index))

    def do(self, step: Operation) -> Any:
        """Do one step, and return its answer; None if it does not fit.

        Raises:
            TypeError: it is not a step.
        """
        if isinstance(step, Operation) and not step.fits(self):
            return None
        with suppress(OutOfBlocks, WouldWait, SlotsLost):
            return super().do(step)
        return None


def play(harness: RouterHarness, program: Iterable[Step], *, most_shrink_events: int | None = MOST_EVENTS) -> None:
    """Play a program on the workers of a harness, and check the events after each step.

    A request that does not fit is not a failure (see `Player`).

    Args:
        harness: the harness of the workers.
        program: the steps; a `Program`, or any other series of them.
        most_shrink_events: how many events Hypothesis may play to shrink a failure, in at most 20 s; None: no limit,
            which takes minutes if an index is slow.

    Raises:
        EventRulesBroken: an unexpected error; a note names the step after which it appeared.
        TypeError: something in the program is not a step.
        ValueError: `most_shrink_events` is below 1.
        ShrinkingStopped: the program fails, and shrinking it exceeded the limit of events or seconds.
    """
    __tracebackhide__ = True
    if most_shrink_events is not None:
        check_integer("play: most_shrink_events", most_shrink_events, 1)
    player, before = Player(harness), harness.events.total
    for number, step in enumerate(program):
        try:
            player.do(step)
            harness.events.assert_no_event_errors()
        except Exception as error:
            error.add_note(f"at step {number} of the program: {step!r}")
            SHRINKING.played(program, harness.events.total - before, error, most_shrink_events)
            raise
    SHRINKING.played(program, harness.events.total - before, None, most_shrink_events)


# ---------------------------------------------------------------------------------------------------- any traffic

Kind: TypeAlias = Literal[
    "prefill", "decode", "finish", "preempt", "resume", "clear", "serve", "again", "burst", "tick", "near"
]


@dataclass(frozen=True, slots=True)
class Draft:
    """A step that is drawn before the open requests are known; `resolve` gives it a request.

    Attributes:
        kind: the step's kind. "serve" prefills and finishes at once; "again" does the same with the blocks of an
            earlier prompt.
        which: an index, modulo the number of choices: for "again" the earlier prompts with whole blocks, for "near"
            `TRUNCATIONS`, else the open requests that the step fits.
        worker: the worker, for a step that names no open request.
        blocks: for "prefill" and "serve", the blocks of the prompt.
        tokens: for "prefill" and "serve" the length of the tail, for "decode" the number of tokens, for "burst" the
            number of prompts, for "tick" the ms since the last tick.
        of: for "decode", the number of the token.
        rank: the data-parallel rank, where `worker` counts.
        wait: for a prefill, whether it waits.
        keys: for a prefill, what its prompt carries in addition to its tokens.
    """

    kind: Kind
    which: int = 0
    worker: int = 0
    blocks: tuple[int, ...] = ()
    tokens: int = 0
    of: int = 0
    rank: int = 0
    wait: bool = True
    keys: PromptKeys | None = None


_ON_REQUESTS: Final = {each.kind: each for each in OPERATIONS if issubclass(each, OnRequest)}

MOST_BURSTS: Final = 2
"""Most bursts in a program: one fills the caches, and the events of the other show what is evicted."""


def resolve(drafts: Iterable[Draft], most_steps: int | None = None) -> Program:
    """Make a program from drafts: name the requests, and leave out steps for which no request is open.

    Args:
        drafts: the drafts.
        most_steps: length of the program; further steps are cut off. None: no limit.
    """
    held: dict[str, list[str]] = {"running": [], "preempted": []}
    steps: list[Step] = []
    admitted: list[Prefill] = []
    bursts = 0
    now: Counter[StreamKey] = Counter()
    for draft in drafts:
        kind = draft.kind
        if kind in ("prefill", "serve", "again"):
            name = f"r{len(admitted)}"
            if kind != "again":
                tail = draft.tokens if draft.blocks else draft.tokens or 1
                prefill = Prefill(name, draft.blocks, tail, draft.worker, draft.rank, wait=draft.wait, keys=draft.keys)
            else:
                whole = [step for step in admitted if step.blocks]
                if not whole:
                    continue
                prefill = dataclasses.replace(whole[draft.which % len(whole)], name=name, tail=0, wait=True)
            admitted.append(prefill)
            steps.append(prefill)
            if kind == "prefill":
                held["running"].append(name)
            else:
                steps.append(Finish(name))
            continue
        if kind == "clear":
            steps.append(Clear(draft.worker, draft.rank))
            continue
        if kind == "tick":
            now[draft.worker, draft.rank] += draft.tokens
            steps.append(Tick(float(now[draft.worker, draft.rank]), draft.worker, draft.rank))
            continue
        if kind == "near":
            kept = [*TRUNCATIONS][draft.which % len(TRUNCATIONS)]
            steps.append(ServeNear(kept, draft.worker, draft.rank))
            continue
        if kind == "burst":
            if bursts == MOST_BURSTS:
                continue
            bursts += 1
            steps.append(Burst(draft.tokens or 1, draft.worker, draft.rank))
            continue
        operation = _ON_REQUESTS[kind]
        fitting = [name for state in operation.states for name in held[state]]
        if not fitting:
            continue
        name = fitting[draft.which % len(fitting)]
        if operation is Decode:
            steps.append(Decode(name, draft.tokens or 1, draft.of))
            continue
        for names in held.values():
            if name in names:
                names.remove(name)
        if operation.becomes is not None:
            held[operation.becomes].append(name)
        steps.append(operation(name))
    return Program(*steps[:most_steps])


def random_traffic(
    seed: int,
    steps: int = 60,
    *,
    workers: int = 1,
    ranks: int = 1,
    most_blocks: int = 5,
    numbers: int = 3,
    most_tokens: int = 9,
    most_in_a_burst: int = 0,
    most_ms: int = 0,
) -> Program:
    """Return traffic made from a seed, without Hypothesis: the same arguments give the same program.

    Args:
        seed: seed of the random numbers.
        steps: how many drafts; some make no step.
        workers: number of workers.
        ranks: data-parallel ranks of each worker.
        most_blocks: blocks of the longest prompt.
        numbers: number of different blocks; the fewer, the more is shared.
        most_tokens: tokens of the longest tail, and of the longest decode.
        most_in_a_burst: prompts of the longest `Burst`; 0: no bursts, and no prompt is served again.
        most_ms: the longest `Tick`, in ms, on a worker with tiers; 0: no ticks.
    """
    rng = Random(seed)  # noqa: S311 - mock data
    weighted: Sequence[Kind] = (*("prefill",) * 4, *("decode",) * 3, *("finish",) * 3, "preempt", "resume", "clear")
    if most_in_a_burst:
        weighted = (*weighted, "again", "burst")
    if most_ms:
        weighted = (*weighted, *("tick",) * 4)
    most_of: dict[Kind, int] = {"burst": most_in_a_burst, "tick": most_ms}

    def draft() -> Draft:
        kind = rng.choice(weighted)
        return Draft(
            kind,
            rng.randrange(8),
            rng.randrange(workers),
            tuple(rng.randrange(numbers) for _ in range(rng.randint(0, most_blocks))),
            rng.randint(1, most_of[kind]) if kind in most_of else rng.randint(0, most_tokens),
            rng.randrange(numbers),
            rng.randrange(ranks) if ranks > 1 else 0,
        )

    return resolve(draft() for _ in range(steps))
