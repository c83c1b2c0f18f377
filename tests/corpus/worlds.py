"""A differential over random worlds: all problems found in them, as text that can be compared between two versions of
the code.

    python tests/corpus/worlds.py 0 160 > after           # the worlds of seeds 0 to 159
    PYTHONPATH=CHECKOUT python tests/corpus/worlds.py 0 160 > before
    diff before after
    python tests/corpus/worlds.py --write                  # replaces worlds.tsv, a digest for each of the first 160

A seed decides everything in a world: the engine (sometimes a buggy one), its sizes, the index under test (none, a right
one, a wrong one, or one that requests missed events), faults at random and by hand, the faults to survive, restarts,
clears, removed workers, sinks that raise, events by hand, flushes, expectations. It is the same under any
PYTHONHASHSEED.

A line is `SEED fact ...` or `SEED text ...`. Facts are the findings: each problem with all fields except messages, and
the verdict. Texts are the wording: messages, log lines, the report. worlds.tsv has a digest of each. If only the second
digest changes, messages were reworded; if the first one changes, so did a verdict. That is wrong if the change of the
code should not affect verdicts; otherwise the change gives the reason for each seed.
"""

# ruff: noqa: T201 - it is a program too

import logging
import re
import sys
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from random import Random

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "oracle" / "faults"))

from buggy_engines import BUGGY_ENGINES, altered  # noqa: E402 - the paths come first
from buggy_indexes import BUGGY_INDEXES, RIGHT_INDEXES, Tree  # noqa: E402 - as above
from surviving_indexes import AsksByCursor, WaitsForLateEvents  # noqa: E402 - as above

from pytest_kvmock import (  # noqa: E402 - as above
    BACKENDS,
    Cleared,
    EngineProfile,
    EventRulesBroken,
    RadixIndexError,
    Removed,
    RouterHarness,
    StorageTier,
    Stored,
)
from pytest_kvmock.harness import Recovery  # noqa: E402 - as above

DIGESTS = HERE / "worlds.tsv"
SEEDS = range(160)
STEPS = 60
COLUMNS = "seed", "backend", "index", "events", "errors", "warnings", "facts", "texts"

AT_RANDOM = (
    "lose",
    "double",
    "reorder",
    "delay",
    "wrong_parent",
    "foreign",
    "unknown_removed",
    "self_parent",
    "sink_failure",
)
"""Faults that can occur at a rate; each is also injected by hand, with a number."""
SURVIVABLE = (*AT_RANDOM, "missing_first", "late_join", "restart", "clear", "salt", "signed")
IF_MEANT = "If that is meant: python tests/corpus/worlds.py --write, and say why of each seed whose facts changed."
EXPECTED = ("event_id_gap", "block_not_found", "index_drift", "engine_drift", "sink_failure")


# ----------------------------------------------------------------------------------------------------- indexes


CHOICE = ("lineage", "lru", "multi_lru", "hash_cache", "vllm", "vllm_0_19", "sglang")
"""The backends that a seed chooses from. Another number of them would change the world of each seed."""


class Forgets(Tree):
    """Ignores one Removed in ten."""

    def __init__(self, rng, *, counts):
        super().__init__(counts=counts)
        self.rng = rng

    def apply(self, event):
        if not isinstance(event.event.data, Removed) or self.rng.random() > 0.1:
            super().apply(event)


class Raises(Tree):
    """Raises an error for one event in fifty."""

    def __init__(self, rng, *, counts):
        super().__init__(counts=counts)
        self.rng = rng

    def apply(self, event):
        if self.rng.random() < 0.02:
            raise OSError("disk full")
        super().apply(event)


class Quiet(Tree):
    """Ignores events that the tree refuses."""

    def apply(self, event):
        with suppress(RadixIndexError):
            super().apply(event)


class AsksCarelessly(Quiet):
    """Requests missed events, and takes the answer in place of the event, whatever the answer is."""

    def __init__(self, recovery, *, counts):
        super().__init__(counts=counts)
        self.ask, self.due = recovery, {}

    def apply(self, event):
        key, event_id = (event.worker_id, event.event.dp_rank), event.event.event_id
        due = self.due.get(key, 0)
        self.due[key] = event_id + 1
        if event_id <= due:
            super().apply(event)
            return
        for missed in getattr(self.ask(key[0], due, None, key[1]), "events", ()):
            super().apply(missed)


INDEXES = {
    "none": lambda **_: None,
    **{name: lambda counts, make=make, **_: make(counts=counts) for name, make in RIGHT_INDEXES.items()},
    "quiet": lambda counts, **_: Quiet(counts=counts),
    "forgets": lambda counts, rng, **_: Forgets(rng, counts=counts),
    "raises": lambda counts, rng, **_: Raises(rng, counts=counts),
    "waits": lambda **_: WaitsForLateEvents(),
    "asks": lambda recovery, **_: AsksByCursor(recovery),
    "asks_carelessly": lambda recovery, counts, **_: AsksCarelessly(recovery, counts=counts),
    **{name: lambda counts, make=make, **_: make(counts=counts) for name, make in BUGGY_INDEXES.items()},
}
COMMON = [name for name in INDEXES if name not in BUGGY_INDEXES]


# ------------------------------------------------------------------------------------------------------- world


class FailingSink:
    """Raises an error for one event in thirty."""

    def __init__(self, rng):
        self.rng = rng

    def publish(self, event, storage_tier=None, token_ids=None):
        if self.rng.random() < 0.03:
            raise OSError("broken pipe")


class World:
    """The world of a seed.

    Args:
        seed: decides everything in the world.
        harness: makes the harness.

    Attributes:
        facts: the findings.
        texts: their wording.
    """

    def __init__(self, seed, harness=RouterHarness):
        self.rng = rng = Random(f"world {seed}")
        self.facts, self.texts = [], []
        self.prompts, self.requests, self.sinks, self.faults = [], [], [], []
        self.engines = []
        self.backend = rng.choice(CHOICE)
        engine = rng.choice(list(BUGGY_ENGINES)) if rng.random() < 0.2 else None
        self.index_name = rng.choice(COMMON) if rng.random() < 0.7 else rng.choice(list(BUGGY_INDEXES))
        self.asks = self.index_name.startswith("asks")
        self.recovery = Recovery(rng.choice([4, 64])) if self.asks or rng.random() < 0.3 else None
        faults = rng.choice(["none", "by hand", "by hand", "at random", "both"])
        self.by_hand = faults in ("by hand", "both")
        rates = {}
        if faults in ("at random", "both"):
            rates = {name: rng.choice([0.01, 0.03, 0.1]) for name in rng.sample(AT_RANDOM, 3)}
        survive = ()
        if faults != "none" and rng.random() < (0.7 if self.asks or self.index_name == "waits" else 0.3):
            survive = rng.sample(SURVIVABLE, rng.choice([2, 6, len(SURVIVABLE)]))
        profile = EngineProfile(
            block_size=4,
            num_blocks=rng.choice([10, 24]),
            workers=2,
            dp_size=rng.choice([1, 1, 2]),
            chunk=rng.choice([None, None, 8]),
            seed=seed,
        )
        spec = BACKENDS[self.backend]
        counts = spec.residency == "counted" and rng.random() < 0.9
        self.index = INDEXES[self.index_name](counts=counts, rng=Random(f"index {seed}"), recovery=self.recovery)
        sync = rng.choice(["every", "auto", "auto", "end"])
        self.facts.append(
            f"world {self.backend} {engine} {self.index_name} counts={counts} recovery={self.recovery is not None} "
            f"rates={rates} survive={list(survive)} ranks={profile.dp_size} sync={sync}"
        )
        self.kv = harness(
            profile,
            spec if engine is None else altered(self.backend, BUGGY_ENGINES[engine], self.engines),
            self.index,
            sync=sync,
            recovery=self.recovery,
            faults=rates,
            survive=survive,
        )
        if rng.random() < 0.2:
            self.kv.add_sink(FailingSink(Random(f"sink {seed}")), before=rng.random() < 0.7)
        if rng.random() < 0.15:
            self.kv.events.expect_error(rng.choice(EXPECTED), rng.randrange(1, 4))

    def play(self):
        """Run all steps and the verdict; return the world."""
        acts, weights = zip(*self.acts(), strict=True)
        for step in range(STEPS):
            act = self.rng.choices(acts, weights)[0]
            try:
                act()
            except Exception as error:  # noqa: BLE001 - what was refused, by engine, harness or index
                self.facts.append(f"step {step} {act.__name__} raised {type(error).__name__}")
                self.texts.append(f"step {step} {act.__name__}: {error}")
            for engine in self.engines:
                engine.end_step()
        self.judge()
        return self

    # ------------------------------------------------------------------------------------------------- acts

    def acts(self):
        """Return the possible actions with their weights."""
        return [
            (self.serve, 60),
            (self.open_request, 5),
            (self.continue_request, 8),
            (self.clear, 4),
            (self.restart, 3),
            (self.announce_restart, 2),
            (self.remove_worker, 2),
            (self.flush, 4),
            (self.check, 1),
            (self.expect, 1),
            (self.publish_by_hand, 2),
            *([(self.ask, 3)] if self.recovery is not None else []),
            *([(self.break_events, 12), (self.break_worker, 4), (self.stop_fault, 3)] if self.by_hand else []),
        ]

    def worker(self):
        return self.rng.choice(list(self.kv.workers.values()))

    def worker_id(self):
        return self.worker().worker_id

    def prompt(self):
        rng = self.rng
        after = rng.choice(self.prompts) if self.prompts and rng.random() < 0.7 else None
        if after is not None and rng.random() < 0.2:
            return after
        prompt = self.kv.prompt(rng.randrange(1, 4), after=after, tail=rng.choice([0, 0, 3]))
        if len(prompt.tokens) <= 20:
            self.prompts.append(prompt)
            del self.prompts[:-6]
        return prompt

    def serve(self):
        self.worker().serve(self.prompt(), output_tokens=self.rng.randrange(6))

    def open_request(self):
        self.requests.append(self.worker().prefill(self.prompt()))

    def continue_request(self):
        self.requests = [request for request in self.requests if request.status in ("running", "preempted")]
        if self.requests:
            request = self.rng.choice(self.requests)
            doing = self.rng.choice(["decode", "preempt", "finish"] if request.status == "running" else ["resume"])
            getattr(request, doing)(*[self.rng.randrange(1, 6)] * (doing == "decode"))

    def clear(self):
        self.worker().clear()

    def restart(self):
        self.worker().restart()

    def announce_restart(self):
        self.worker().restart(announced=True)

    def remove_worker(self):
        worker_id = self.worker_id()
        self.kv.remove_worker(worker_id)
        if self.rng.random() < 0.5 or not self.kv.workers:
            self.kv.worker(worker_id)

    def flush(self):
        self.kv.flush()

    def check(self):
        self.kv.events.assert_no_event_errors()

    def expect(self):
        with self.kv.events.expect_error(self.rng.choice(["event_id_gap", "index_drift", "sink_failure"])):
            self.serve()

    def publish_by_hand(self):
        rng = self.rng
        if not self.sinks or rng.random() < 0.3:
            closed, residency = rng.random() < 0.5, rng.choice(["unique", "counted"])
            self.sinks.append(self.kv.make_sink(prefix_closed=closed, residency=residency))
        sink, tier = rng.choice(self.sinks), rng.choice([StorageTier.DEVICE] * 3 + [StorageTier.HOST_PINNED])
        for _ in range(rng.randrange(1, 4)):
            blocks = tuple(rng.sample(range(1, 9), rng.randrange(1, 4)))
            stored = Stored(rng.choice([None, *range(1, 9)]), blocks, blocks)
            sink(rng.choice([stored, stored, stored, Removed(blocks), Removed(blocks[:1]), Cleared()]), tier)

    def ask(self):
        self.recovery(self.worker_id(), self.rng.choice([None, 0, 3]))

    def break_events(self):
        rng = self.rng
        name = rng.choice([*AT_RANDOM, "self_parent", "missing_first", "late_join", "salt", "signed"])
        fault, worker = getattr(self.kv.faults, name), rng.choice([None, self.worker_id()])
        if name == "salt":
            self.faults.append(fault(lora_name="adapter", worker=worker))
        elif name == "late_join":
            self.faults.append(fault(worker=self.worker_id()))
        elif name == "signed":
            if self.index is not None:
                self.faults.append(fault(rng.choice([None, 2]), kind=rng.choice([None, "removed"]), worker=worker))
        elif name == "delay":
            fault(rng.choice([1, 2]), by=rng.choice([1, 2, 5]), worker=worker)
        elif name == "wrong_parent":
            known = [block for block in self.kv.events.stored_blocks if block >= 0]
            fault(parent=rng.choice([None, *known[-20:]]), worker=worker)
        else:
            fault(rng.choice([1, 1, 3]), worker=worker)

    def break_worker(self):
        rng = self.rng
        name = rng.choice(["restart", "restart", "clear", "block_size"])
        if name == "block_size":
            if rng.random() < 0.2:
                self.kv.faults.block_size(8)
        else:
            getattr(self.kv.faults, name)(self.worker_id())

    def stop_fault(self):
        if self.faults:
            self.faults.pop().stop()

    # -------------------------------------------------------------------------------------------- the verdict

    def judge(self):
        """Record the findings and their texts."""
        if self.rng.random() < 0.7:
            for fault in self.faults:
                fault.stop()
        for request in self.requests:
            if self.rng.random() < 0.8 and request.status in ("running", "preempted"):
                request.finish()
        verdict, events = self.kv.judge(), self.kv.events
        problems = events.problems
        number = {id(problem): place for place, problem in enumerate(problems)}
        self.facts.append(
            f"verdict errors={[number[id(p)] for p in verdict.errors]} "
            f"warnings={[number[id(p)] for p in verdict.warnings]} unmet={len(verdict.unmet)}"
        )
        for problem in problems:
            self.facts.append(fact_of(problem, number, missing=self.is_missing(problem.fault)))
            self.texts.append(f"problem {number[id(problem)]}: {problem!r} | {problem.observed} | {problem.expected}")
        self.texts += [f"unmet: {sentence}" for sentence in verdict.unmet]
        self.texts += [f"entry {entry!r}" for entry in events]
        try:
            events.assert_no_event_errors()
        except EventRulesBroken as error:
            self.texts += str(error).splitlines()
        self.texts = [without_lines_of_code(text) for text in self.texts]

    def is_missing(self, fault):
        """Return whether what a fault withheld is still missing: an event, or a restart if survival is checked."""
        if fault is None or fault.kind == "sink_failure":  # a sink failure has its own problem
            return False
        if fault.kind == "restart":
            return self.kv._judge.book.survival is not None
        held = [held.delivery.injection for held in self.kv.publisher.injector._held]
        return fault.missing and (not fault.late or fault in held)

    def text(self):
        """Return all lines."""
        return [*(f"fact {fact}" for fact in self.facts), *(f"text {text}" for text in self.texts)]


def fact_of(problem, number, *, missing):
    """Return a problem in one line without its messages; it names other problems by number."""
    fault = problem.fault
    return (
        f"problem {number[id(problem)]} {problem.rule} {'error' if problem.is_error else 'warning'} "
        f"{problem.worker_id}.{problem.dp_rank} event={problem.event_id} position={problem.position} "
        f"blocks={[f'{block:#x}' for block in problem.blocks]} "
        f"cause={None if problem.cause is None else number.get(id(problem.cause), 'not noted')} "
        f"folded={[number.get(id(each), 'not noted') for each in problem.folded]} "
        f"expected={problem.expected_by is not None} covered={problem.covered()} excused={problem.excused} "
        f"fault={None if fault is None else (fault.kind, fault.worker_id, fault.dp_rank, fault.event_id, missing)}"
    )


def without_lines_of_code(text):
    """Return a message without the line number where an index raised: any change of that file would move it."""
    return re.sub(r"[\w/.]+\.py:\d+", "a line of code", text)


def digest(texts):
    return sha256("\n".join(texts).encode()).hexdigest()[:12]


def row_of(seed):
    """Return the row of a seed in worlds.tsv."""
    world = World(seed).play()
    log = world.kv.events
    found = (log.total, len(log.errors), len(log.warnings), digest(world.facts), digest(world.texts))
    return "\t".join(map(str, (seed, world.backend, world.index_name, *found)))


def main(arguments):
    logging.disable()  # a recovery logs its guesses
    if arguments == ["--write"]:
        DIGESTS.write_text("\n".join(["\t".join(COLUMNS), *map(row_of, SEEDS)]) + "\n", encoding="utf-8")
        return
    for seed in range(*map(int, arguments)):
        for text in World(seed).play().text():
            print(seed, text)


if __name__ == "__main__":
    main(sys.argv[1:])
