"""The table of verdicts: the problems found for every known bug, over every backend.

    python tests/corpus/verdicts.py                    # prints the table
    python tests/corpus/verdicts.py engine/ sglang     # prints cases whose names begin with engine/, over this backend
    python tests/corpus/verdicts.py --write            # replaces verdicts.tsv

A case is a bug of a router's index or of an engine. Each case runs the same traffic over each backend, with some seeds.
A row is one problem, and the rows of a run are in the order of discovery. The columns: the rule, whether it is an
error, the worker and rank, the event, the block, the problem that it follows from, and the injected fault that caused
it. The rule "none" means that no problem was found: either the case is right over this backend (no engine publishes
copies over `lru`), or the bug is missed. After the first problems of a run the others are only counted.

Messages are not in the table, so they can be reworded. A changed row is a changed verdict: it is wrong if the change of
the code should not affect verdicts; otherwise the change gives the reason for each row.

To compare another version of the package: `PYTHONPATH=CHECKOUT python tests/corpus/verdicts.py | diff
tests/corpus/verdicts.tsv -`.
"""

# ruff: noqa: T201 - it is a program too

import dataclasses
import importlib.util
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).parent
TESTS = HERE.parent
CATALOGUE = TESTS.parent / "examples" / "bug_catalogue"
sys.path += [str(TESTS / part) for part in (".", "oracle/faults", "harness", "harness/reduce", "testing")]

import faulty_indexes as of_harness  # noqa: E402 - the paths come first
import faulty_worlds as of_reduce  # noqa: E402 - as above
import mutants_indexes  # noqa: E402 - as above
import mutants_managers  # noqa: E402 - as above
import surviving_indexes as of_faults  # noqa: E402 - as above
from buggy_engines import BUGGY_ENGINES, Alters, altered  # noqa: E402 - as above
from buggy_indexes import BUGGY_INDEXES, RIGHT_INDEXES  # noqa: E402 - as above

from pytest_kvmock import (  # noqa: E402 - as above
    BACKENDS,
    BackendSpec,
    EngineProfile,
    KvSink,
    Removed,
    RouterHarness,
    StorageTier,
    Stored,
)
from pytest_kvmock.harness import Recovery  # noqa: E402 - as above

TABLE = HERE / "verdicts.tsv"
SEEDS = 3
SHOWN = 4
"""The number of problems of a run that have a row each."""
COLUMNS = "case", "backend", "seed", "rule", "kind", "worker", "event", "position", "block", "under", "fault"


@dataclasses.dataclass(frozen=True)
class Case:
    """One case of the table.

    Attributes:
        name: first column.
        index: makes the index under test from the backend's spec and the recovery; None: there is no index.
        engine: makes a sink between the managers and the router; None: the engines are right.
        spec: a backend of its own, which replaces the usual ones.
        ranks: ranks of each worker.
        faults: rates of random faults.
        survive: the faults that the index must survive.
        asks: whether the index is made with a `Recovery` as its second argument.
        amid: called in the midst of the traffic.
        early: injects a fault that is stopped after the first requests.
        script: publishes to a sink in place of all traffic; no backend is involved.
    """

    name: str
    index: Callable[[BackendSpec, Recovery], Any] | None = None
    engine: Callable[[Any], Any] | None = None
    spec: BackendSpec | None = None
    ranks: int = 2
    faults: dict[str, float] = dataclasses.field(default_factory=dict)
    survive: tuple[str, ...] = ()
    asks: bool = False
    amid: Callable[[RouterHarness], None] | None = None
    early: Callable[[RouterHarness], Any] | None = None
    script: Callable[[KvSink], None] | None = None

    def backends(self):
        """Return the names of the backends that the case runs over."""
        if self.script is not None:
            return ["-"]
        plain = [
            name for name, spec in BACKENDS.items() if spec.group is None
        ]  # hybrid engines are tested by their recordings
        return [self.spec.name] if self.spec is not None else plain

    def seeds(self):
        """Return the seeds of the case: cases from elsewhere than this table's own lists have only one."""
        return range(SEEDS if self.name.startswith(("right/", "index/", "engine/")) else 1)


# ------------------------------------------------------------------------------------------------------ traffic


def run(case, backend, seed):
    """Return the harness after the traffic and the verdict, and the errors that the traffic raised."""
    if case.script is not None:
        kv = RouterHarness(backend=None)
        case.script(kv.make_sink())
        kv.judge()
        return kv, []
    recovery = Recovery() if case.asks else None
    spec = case.spec or BACKENDS[backend]
    index = None if case.index is None else case.index(spec, recovery)
    sinks = []
    kv = RouterHarness(
        EngineProfile(block_size=4, num_blocks=8, workers=2, dp_size=case.ranks, seed=seed),
        spec if case.engine is None else altered(backend, case.engine, sinks),
        index,
        recovery=recovery,
        faults=case.faults,
        survive=case.survive,
    )
    traffic = Traffic(kv, seed, index, sinks)
    fault = None if case.early is None else case.early(kv)
    traffic.serve(6)
    if fault is not None:
        fault.stop()
    if index is not None:
        traffic.by_hand()
    traffic.serve(5)
    if case.amid is not None:
        traffic.attempt(case.amid, kv)
    traffic.clear()
    traffic.serve(5)
    traffic.restart()
    traffic.remove_worker()
    traffic.serve(7)
    kv.judge()
    return kv, traffic.raised


class Traffic:
    """Requests that share prefixes, on all workers and ranks, in caches that have to evict."""

    def __init__(self, kv, seed, index, sinks):
        self.kv, self.index, self.sinks = kv, index, sinks
        self.rng = Random(seed)
        self.prompts = [kv.prompt(2) for _ in range(3)]
        self.raised = []

    def attempt(self, function, *given, **named):
        """Call a function, and record its error if it raises one; the traffic continues."""
        try:
            function(*given, **named)
        except Exception as error:  # noqa: BLE001 - of any wrong engine or index
            self.raised.append(type(error).__name__)

    def serve(self, requests):
        """Serve this many requests, most of them on the first two workers and ranks; compare engine and events then."""
        rng = self.rng
        for _ in range(requests):
            workers = list(self.kv.workers.values())
            worker = rng.choice([*workers, *workers[:2]])
            prompt = rng.choice(self.prompts)
            if rng.random() < 0.6:  # otherwise the whole prompt may be cached
                prompt = self.kv.prompt(rng.randrange(1, 3), after=prompt, tail=rng.choice([0, 0, 3]))
                if len(prompt.tokens) <= 16:
                    self.prompts[rng.randrange(3)] = prompt
            self.attempt(worker.serve, prompt, output_tokens=rng.choice([0, 0, 5]))
            for sink in self.sinks:
                sink.end_step()
        self.attempt(self.kv.flush)

    def clear(self):
        """Clear the second worker and rank while the first one holds blocks."""
        self.attempt(list(self.kv.workers.values())[1].clear)

    def restart(self):
        """Restart the last worker and rank, unless the index has no method for that."""
        if self.can("remove_worker_dp_rank"):
            self.attempt(list(self.kv.workers.values())[-1].restart, announced=True)

    def remove_worker(self):
        """Remove worker 0, which comes back after some traffic on the others, unless the index has no method for it."""
        if self.can("remove_worker"):
            self.attempt(self.kv.remove_worker, 0)
            self.serve(3)
            for rank in range(self.kv.profile.dp_size):
                self.attempt(self.kv.worker, 0, dp_rank=rank)

    def can(self, method):
        return self.index is None or callable(getattr(self.index, method, None))

    def by_hand(self):
        """Publish what no engine does often: a hole in a chain, and a block on two tiers."""
        sink = self.kv.make_sink(prefix_closed=False)
        for event in (Stored(None, (1, 2, 3), (1, 2, 3)), Removed((2,)), Stored(1, (4,), (4,))):
            self.attempt(sink, event)
        self.attempt(sink, Stored(None, (1,), (1,)), StorageTier.HOST_PINNED)
        self.attempt(sink, Removed((1,)), StorageTier.HOST_PINNED)


# -------------------------------------------------------------------------------------------------------- cases


def counting(make):
    """Return a maker of an index of `buggy_indexes` that counts copies if the backend publishes them."""
    return lambda spec, recovery: make(counts=spec.residency == "counted")


def plain(make):
    """Return a maker of an index that takes no arguments."""
    return lambda spec, recovery: make()


def right_cases():
    """Yield indexes and engines without a bug: no error may be found."""
    yield Case("right/no_index")
    for name, make in RIGHT_INDEXES.items():
        yield Case(f"right/{name}", counting(make))


def listed_cases():
    """Yield the bugs of `buggy_indexes` and `buggy_engines`; engines also with right indexes."""
    for name, make in BUGGY_INDEXES.items():
        yield Case(f"index/{name}", counting(make))
    for name, make in BUGGY_ENGINES.items():
        yield Case(f"engine/{name}", engine=make, ranks=1)
        for index, right in RIGHT_INDEXES.items():
            yield Case(f"engine/{name}+{index}", counting(right), engine=make, ranks=1)


def cases_of_tests():
    """Yield the bugs that other tests define."""
    for make in (
        of_harness.ForgetsOneRemoved,
        of_harness.RemovesFromTheWrongWorker,
        of_harness.MatchesByContentAlone,
        partial(of_harness.RaisesOnce, at=9),
        of_harness.RaisesWhenAsked,
        partial(of_harness.Answers, "nonsense"),
        partial(of_harness.Answers, {(0, 0): 1}),
        of_reduce.ForgetsLongRemoved,
        of_reduce.RaisesOnRemoved,
        partial(of_reduce.ByTokens, 4),
    ):
        name, given = make, ""
        if isinstance(make, partial):
            name, given = make.func, f"({', '.join(map(str, (*make.args, *make.keywords.values())))})"
        yield Case(f"tests/{name.__name__}{given}", plain(make))
    for mutant, *_ in mutants_indexes.INDEXES.cases:
        if mutant is mutants_indexes.SharesItsTree:  # it shares with all indexes made before it
            continue
        if hasattr(mutant, "Subject") and not mutant.survives:  # the others fail only checks of the contract
            yield Case(f"indexes/{mutant.__name__}", plain(mutant.Subject))
    for mutant, *_ in mutants_managers.MANAGERS.cases:
        if hasattr(mutant, "Subject") and mutant is not mutants_managers.SharesItsBlocks:
            yield Case(f"managers/{mutant.__name__}", spec=manager(mutant.Subject), ranks=1)
    for name, alter in ((name, getattr(of_reduce, name)) for name in of_reduce.FAULTY):
        yield Case(f"tests/{name}", engine=partial(Alters, function=alter), ranks=1)
    some = {"lose": 0.05, "double": 0.05, "delay": 0.05}
    for survive in ((), tuple(some)):
        suffix = "+survive" if survive else "+faults"
        for make in (of_faults.TakesWhatComes, of_faults.WaitsForLateEvents):
            yield Case(f"tests/{make.__name__}{suffix}", plain(make), faults=some, survive=survive)
        yield Case(
            f"tests/AsksByCursor{suffix}",
            lambda spec, recovery: of_faults.AsksByCursor(recovery),
            faults=some,
            survive=survive,
            asks=True,
        )


def manager(subject):
    """Return a backend with a manager that a contract refuses."""

    def make(*, num_blocks, block_size, dp_rank, sink):
        return subject(num_blocks, block_size, sink)

    return BackendSpec("spoilt", "nobody", make)


def cases_of_the_catalogue():
    """Yield the index and engine bugs of examples/bug_catalogue, in the traffic of this table."""
    bugs = {path.stem[4:6]: load(path) for path in sorted(CATALOGUE.glob("bug_*.py"))}

    def case(number, make, **given):
        return Case(f"catalogue/{number}", plain(make), **given)

    yield case("02", bugs["02"].SignedRemoved, amid=lambda kv: kv.faults.signed(kind="removed"))
    yield case("03", bugs["03"].NoRefcount)
    yield case("04", bugs["04"].RemovesEverywhere)
    yield case("05", bugs["05"].IgnoresCleared)
    yield case("06", bugs["06"].HashIndex, survive=("restart",), amid=lambda kv: kv.faults.restart(0))
    yield case("07", bugs["07"].CountsCopies, survive=("double",), faults={"double": 0.1})
    yield case("08", bugs["08"].DropsOrphans, survive=("late_join",), early=lambda kv: kv.faults.late_join(worker=0))
    yield case("09", bugs["09"].CountsWhatItHas)
    yield case("13", partial(bugs["13"].TokenIndex, 8))
    yield case("15", bugs["15"].HashIndex)
    for number, bug in bugs.items():
        for name, test in vars(bug).items():
            if name.startswith("test_") and [*inspect.signature(test).parameters] == ["kv_sink"]:
                yield Case(f"catalogue/{number}", script=test)


def load(path):
    """Return a module of the catalogue, not registered: pytest imports files of the same names from elsewhere too."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def cases():
    """Return all cases in the order of the table."""
    return [*right_cases(), *listed_cases(), *cases_of_tests(), *cases_of_the_catalogue()]


# -------------------------------------------------------------------------------------------------------- table


def rows_of(case, backend, seed):
    """Return the rows of one run, each as the texts of its columns."""
    kv, raised = run(case, backend, seed)
    problems = kv.events.problems
    rows = [described(problem) for problem in problems[:SHOWN]]
    alike = Counter((problem.rule, kind_of(problem), *followed(problem)) for problem in problems[SHOWN:])
    rows += [
        (rule, kind, f"and {count} more", "-", "-", "-", under, fault)
        for (rule, kind, under, fault), count in alike.items()
    ]
    rows += [(error, "raised", f"{count} times") for error, count in Counter(raised).items()]
    return [[case.name, backend, str(seed), *row] for row in rows or [("none",)]]


def described(problem):
    """Return a problem without its messages."""
    under, fault = followed(problem)
    if problem.fault is not None:
        fault += f" {problem.fault.worker_id}.{problem.fault.dp_rank} {text(problem.fault.event_id)}"
    return (
        problem.rule,
        kind_of(problem),
        f"{problem.worker_id}.{problem.dp_rank}",
        text(problem.event_id),
        text(problem.position),
        hexadecimal(problem.block),
        under,
        fault,
    )


def followed(problem):
    """Return the rule of the problem that this problem is listed under, and the kind of fault that caused it."""
    under, fault = problem.cause, problem.fault
    return "-" if under is None else under.rule, "-" if fault is None else fault.kind


def kind_of(problem):
    return "error" if problem.is_error else "warning"


def text(value):
    return "-" if value is None else str(value)


def hexadecimal(block):
    return "-" if block is None else f"{block:#x}"


def backends_of_all():
    """Return the values of the second column: all backends that a case runs over."""
    return list(dict.fromkeys(backend for case in cases() for backend in case.backends()))


def lines(cases_from="", backend=None, most_seeds=SEEDS, only=None):
    """Return the lines of the table for cases whose names begin with `cases_from`, one or all backends, and the first
    `most_seeds` seeds.

    `only` limits the cases to these names.
    """
    return [
        "\t".join(row)
        for case in cases()
        if case.name.startswith(cases_from) and (only is None or case.name in only)
        for each in case.backends()
        if backend in (None, each)
        for seed in case.seeds()[:most_seeds]
        for row in rows_of(case, each, seed)
    ]


def main(arguments):
    if arguments == ["--write"]:
        TABLE.write_text("\n".join(["\t".join(COLUMNS), *lines()]) + "\n", encoding="utf-8")
    else:
        print("\t".join(COLUMNS), *lines(*arguments), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
