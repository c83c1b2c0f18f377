"""One-line mutants of the package: does a test fail for each? Each is tried in a copy of the tree.

    pip install -e '.[test]' --group mutation
    python tests/mutation/mutate.py --seed 1 --count 100

The seed draws the mutants from all that `operators.py` makes of the package. The first run notes which tests run which
lines. That takes minutes, and later runs use the notes as long as the package does not change. Then the tests that run
a mutant's line run, quick ones first, until one fails. They run in a fork of a process that has collected all tests,
and the functions get the mutant's code; if the changed code runs at import, they run in a process of their own. A
survivor needs a test; if no test can distinguish it from the code, it needs a reason in `equivalent.toml`.

To find out what some of the tests kill, put their ids in a file as pytest prints them:

    pytest tests --collect-only -q > IDS
    python tests/mutation/mutate.py --seed 1 --count 60 --tests IDS

Exit status: 0 without a survivor, 1 with one, 2 if the tests cannot be run.
"""

import argparse
import hashlib
import json
import os
import py_compile
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from bisect import bisect
from collections import Counter, defaultdict
from contextlib import suppress
from difflib import SequenceMatcher
from itertools import accumulate, count
from math import inf
from pathlib import Path
from random import Random
from typing import IO

from operators import mutants
from watch import TIMEOUT, UNFIT

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

PACKAGE = "pytest_kvmock"
TESTS = ("tests", "examples")
LEFT_OUT = ("tests/interop", "tests/mutation", "tests/wire/test_soak.py", "tests/test_structure.py")
"""These tests need other programs or minutes, or read the code without running it."""
COMMAND = ("-q", "-p", "watch", "-p", "no:cacheprovider", "--tb=line", "--no-header")
COMMAND += tuple(f"--ignore={path}" for path in LEFT_OUT)
ENVIRONMENT = {"CI": "1", "PYTHONHASHSEED": "0"}  # with CI set, Hypothesis tries the same examples each time

QUICK = 3.0
"""Computing seconds, without a mutant, of the tests that run first: the quickest ones."""
LONG = 30.0
"""Computing seconds of all tests that run, without `--seconds` and `--whole`; the other tests are long ones."""
TIMES_SLOWER = 20
LEAST_LIMIT = 10.0
"""A test has timed out if it computes longer than both limits: a multiple of its time without a mutant, and seconds."""
PASSED = {0, 5}
"""Exit statuses of runs without a failure; 5: none of the tests exists any more."""
WALL = 1800
"""Seconds after which a run that waits for something is ended."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="draws the mutants (default: 1)")
    parser.add_argument("--count", type=int, default=100, help="how many to draw (default: 100)")
    parser.add_argument("--pick", default="", help="try only these of them, by their numbers: 3,17")
    parser.add_argument(
        "--only", default="", help="draw from those whose room is this, or whose file, or file:line, ends like this"
    )
    parser.add_argument("--whole", action="store_true", help="run the long tests too before a mutant has survived")
    parser.add_argument("--near", action="store_true", help="after a change of the package: go by the last note of it")
    parser.add_argument("--seconds", type=float, default=LONG, help="of tests for each mutant (default: %(default)g)")
    parser.add_argument("--tests", type=Path, help="try only the tests whose ids are lines of this file")
    parser.add_argument("--list", action="store_true", help="print the mutants, try none")
    options = parser.parse_args()

    every = [m for path in modules() for m in mutants(path.relative_to(ROOT).as_posix(), path.read_text())]
    known = {(e["file"], e["operator"], e["old"], e["new"]): e["reason"] for e in equivalents()}
    pool = [m for m in every if f"{m.file}:{m.line}".endswith(options.only) or m.file.endswith(options.only)]
    pool = pool or [m for m in every if f"/{options.only}/" in m.file]
    drawn = Random(options.seed).sample(pool, min(options.count, len(pool)))
    picked = {int(number) for number in options.pick.split(",") if number} or set(range(1, len(drawn) + 1))
    for file, operator, _, new in known.keys() - {(m.file, m.operator, m.old, m.new) for m in every}:
        print(f"equivalent.toml: no {operator} in {file} makes this any more: {new}")
    print(f"{len(every)} mutants, {len(drawn)} drawn by seed {options.seed}", flush=True)

    counts, begun = Counter(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvmock-mutants-") as directory:
        tree = (
            None
            if options.list
            else Tree(
                Path(directory) / "tree",
                seconds=inf if options.whole else options.seconds,
                near=options.near,
                only=None if options.tests is None else ids_in(options.tests.read_text()),
            )
        )
        for number, mutant in enumerate(drawn, 1):
            if number not in picked:
                continue
            since = time.monotonic()
            key = mutant.file, mutant.operator, mutant.old, mutant.new
            if key in known:
                became, why = "equivalent", known[key]
            else:
                became, why = ("", "") if tree is None else tree.attempt(mutant)
            counts[became] += 1
            print(f"{number:>4}  {became:<10} {mutant.file}:{mutant.line}  {mutant.operator}  {why}")
            print(f"        - {mutant.old}\n        + {mutant.new}")
            if tree is not None:
                print(f"        {time.monotonic() - since:.0f} s", flush=True)
        if tree is not None:
            tree.close()
    message = ", ".join(f"{number} {became}" for became, number in sorted(counts.items()))
    print(f"seed {options.seed}: {message}; {time.monotonic() - begun:.0f} s")
    return 1 if counts["survived"] else 0


def modules() -> list[Path]:
    return sorted((ROOT / PACKAGE).rglob("*.py"))


def equivalents() -> list[dict[str, str]]:
    """Return the mutants that no test can distinguish from the code: file, operator, line before and after, and
    reason.
    """
    return tomllib.loads((HERE / "equivalent.toml").read_text()).get("equivalent", [])


class Tree:
    """A copy of the checkout in which mutants are tried.

    Attributes:
        seconds: computing seconds of each test without a mutant.
        names: names of the tests.
        sets: sets of tests, each a list of places in `names`.
        lines: by file and line, the number of the set of tests that runs it.
        imported: by file, the lines that run before any test does.
        changed: files with tests that changed since the notes; their new tests run for each mutant.
        only: the tests that may run, without new tests of changed files; None for all.
    """

    def __init__(self, root: Path, *, seconds: float, near: bool, only: set[str] | None = None) -> None:
        self.root, self.most, self.only = root, seconds, only
        self.server: subprocess.Popen[bytes] | None = None
        self.plans = count()
        files = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        ).stdout.decode()
        for name in filter(None, files.split("\0")):
            if (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        paths = sorted((root / PACKAGE).rglob("*.py"))
        package = {path.relative_to(root).as_posix(): path.read_text() for path in paths}
        digest = hashlib.sha256("".join(package.values()).encode()).hexdigest()
        noted = Path(tempfile.gettempdir()) / f"kvmock-mutants-{digest[:16]}.json"
        if not noted.exists() and near:
            noted = max(noted.parent.glob("kvmock-mutants-*.json"), key=lambda path: path.stat().st_mtime)
        if not noted.exists():
            noted.write_text(json.dumps(self.note() | {"package": package}))
        table = json.loads(noted.read_text())
        self.seconds: dict[str, float] = table["seconds"]
        self.names, self.sets = list(self.seconds), [*table["sets"], []]
        self.lines: dict[str, dict[int, int]] = {}
        self.imported: dict[str, set[int]] = {}
        for file, text in package.items():
            lines = {int(line): which for line, which in table["lines"].get(file, {}).items()}
            imported = set(table["imported"].get(file, ()))
            places = same_lines(table["package"].get(file, ""), text)
            if places is not None:  # new lines are assumed to be run by all tests that run anything of the file
                self.sets.append(sorted({test for which in set(lines.values()) for test in self.sets[which]}))
                new, none = len(self.sets) - 1, len(table["sets"])
                every = range(1, len(text.splitlines()) + 1)
                lines = {n: lines.get(places[n], none) if n in places else new for n in every}
                imported = {n for n in every if places.get(n) in imported}
            self.lines[file], self.imported[file] = lines, imported
        self.changed = [name for name, digest in self.digests().items() if table["files"].get(name) != digest]
        if only is not None:
            self.changed = []
        subprocess.run([sys.executable, "-m", "compileall", "-q", PACKAGE], cwd=root, check=True)

    def digests(self) -> dict[str, str]:
        """Return the digest of each file with tests."""
        paths = sorted(path for tests in TESTS for path in (self.root / tests).rglob("test_*.py"))
        found = {
            path.relative_to(self.root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths
        }
        return {name: digest for name, digest in found.items() if not name.startswith(LEFT_OUT)}

    def note(self) -> dict[str, object]:
        """Run all tests, and return which of them run which lines."""
        print("noting which test runs which lines; this takes minutes", flush=True)
        seconds, data = self.root / "seconds.json", self.root / "lines.coverage"
        command = ["-m", "coverage", "run", f"--data-file={data}", f"--include=*/{PACKAGE}/*", "-m", "pytest", *COMMAND]
        status, output = self.run([*command, *TESTS], {"note": str(seconds)}, wall=4 * WALL)
        if status not in (0, 1):
            print(output)
            raise SystemExit(2)
        for line in re.findall(r"^(?:FAILED|ERROR) .*", output, re.MULTILINE):
            print(f"without a mutant, and left out: {line}")
        return {"files": self.digests()} | table_of(self.root, seconds, data)

    def attempt(self, mutant) -> tuple[str, str]:
        """Try a mutant; return its outcome and the test that decided it."""
        path = self.root / mutant.file
        source, times = path.read_text(), path.stat()
        changed = mutant.apply(source)
        cached = Path(py_compile.compile(str(path), doraise=True) or "")
        try:
            path.write_text(changed)
            cached.unlink()  # Python recognizes it by seconds and size, which may be equal
            return self.judge(mutant, source, changed)
        finally:
            path.write_text(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            py_compile.compile(str(path), doraise=True)

    def judge(self, mutant, old: str, new: str) -> tuple[str, str]:
        ordered = sorted(self.running(mutant), key=lambda nodeid: (self.seconds[nodeid], nodeid))
        upto = list(accumulate(self.seconds[nodeid] for nodeid in ordered))
        quick = bisect(upto, QUICK)
        last = max(quick, bisect(upto, self.most))
        survived = "survived", f"{last} of {len(ordered)} tests that run it" if ordered else "no test runs it"
        in_function = bool(mutant.lines) and mutant.operator != "default"
        module = {
            "path": str(self.root / mutant.file),
            "old": old,
            "new": new,
            "wall": WALL,
            "in_function": in_function,
        }
        if self.is_derived_from(mutant):
            status, failed = UNFIT, ""
        else:
            status, failed = self.ask(self.plan(ordered[:last], self.changed) | module)
        # Objects made at import are still the old ones: a failure counts, but without one the mutant is tried again.
        if status != UNFIT and (status not in PASSED or not self.imported[mutant.file] & {*mutant.lines}):
            found = outcome(status, failed)
            if found is None or in_function:
                return found or survived
            # A test may fail because some users of the constant kept the old value: that test runs first.
            ordered.sort(key=lambda nodeid: nodeid != failed)
        for part, files in ((ordered[:quick], self.changed), (ordered[quick:last], [])):
            if part or files:
                paths = dict.fromkeys([*files, *(nodeid.partition("::")[0] for nodeid in part)])
                status, output = self.run(["-m", "pytest", "-x", *COMMAND, *paths], self.plan(part, files), wall=WALL)
                failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, re.MULTILINE)
                if found := outcome(status, failed.group(1) if failed else ""):
                    return found
        return survived

    def is_derived_from(self, mutant) -> bool:
        """Return whether the import of the module uses a constant, for example for another constant."""
        name = re.match(r"\w+", mutant.old)
        if mutant.lines or name is None:
            return False
        word, lines = re.compile(rf"\b{name.group()}\b"), (self.root / mutant.file).read_text().splitlines()
        return any(word.search(lines[n - 1]) for n in self.imported[mutant.file] - {mutant.line} if n <= len(lines))

    def plan(self, tests: list[str], files: list[str]) -> dict[str, object]:
        limits = {nodeid: max(LEAST_LIMIT, TIMES_SLOWER * self.seconds[nodeid]) for nodeid in tests}
        known = [nodeid for nodeid in self.seconds if nodeid.partition("::")[0] in files]
        return {"tests": tests, "limits": limits, "files": files, "known": known}

    def running(self, mutant) -> set[str]:
        """Return the tests that run what a mutant changes; for a constant of a module, the tests that run its users.

        Code that runs at import has its effect elsewhere, so these are the tests that run any line of the module.
        """
        places = {mutant.file: mutant.lines}
        if self.imported[mutant.file] & {*mutant.lines} or self.is_derived_from(mutant):
            places = {mutant.file: self.lines[mutant.file]}
        elif not mutant.lines:
            name = re.match(r"(\w+)(: \S+)? = ", mutant.old)
            word = re.compile(rf"\b{name.group(1)}\b") if name else re.compile("")
            places = {
                file: [n for n, text in enumerate((self.root / file).read_text().splitlines(), 1) if word.search(text)]
                for file in ([mutant.file] if mutant.old.startswith("_") else self.lines)
            }
        which = {self.lines[file][n] for file, lines in places.items() for n in lines if n in self.lines[file]}
        if not which and mutant.lines:  # Python 3.11 omits a line now and then: its neighbours stand in for it
            noted = sorted(self.lines[mutant.file])
            at = bisect(noted, mutant.line)
            which = {self.lines[mutant.file][n] for n in noted[max(0, at - 1) : at + 1]}
        found = {self.names[test] for each in which for test in self.sets[each]}
        return found if self.only is None else found & self.only

    def ask(self, plan: dict[str, object]) -> tuple[int, str]:
        """Run tests in a fork of the process that has collected all; return its exit status and the failed test."""
        if self.server is None:
            connection, theirs = socket.socketpair()
            options = ["-x", f"--basetemp={self.root.parent / 'basetemp'}"]
            self.output = (self.root.parent / "output").open("wb")
            command = ["-m", "pytest", *options, *COMMAND, *TESTS]
            with theirs:
                self.server = self.start(command, {"serve": theirs.fileno()}, self.output, theirs.fileno())
            with connection:
                self.stream = connection.makefile("rw")
        line = ""
        with suppress(ConnectionError):
            self.stream.write(json.dumps(plan | {"failed": str(self.root.parent / "failed")}) + "\n")
            self.stream.flush()
            line = self.stream.readline()
        if not line:  # the process has ended, as it could not collect the tests
            print(Path(self.output.name).read_text())
            raise SystemExit(2)
        answer = json.loads(line)
        return answer["status"], answer["failed"]

    def close(self) -> None:
        """End the process that has collected all tests."""
        if self.server is not None:
            self.server.kill()
            self.server.wait()
            self.output.close()

    def run(self, command: list[str], plan: dict[str, object], *, wall: float) -> tuple[int, str]:
        """Run Python in the copy; return exit status and output."""
        # Not a pipe: a process started by a test may live longer, and would keep the pipe open.
        with tempfile.NamedTemporaryFile() as output, self.start(command, plan, output) as process:
            try:
                process.wait(wall)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return TIMEOUT, ""
            return process.returncode, Path(output.name).read_text(errors="replace")

    def start(
        self, command: list[str], plan: dict[str, object], output: IO[bytes], *inherited: int
    ) -> subprocess.Popen[bytes]:
        """Start Python in the copy; it inherits these files."""
        file = self.root.parent / f"plan-{next(self.plans)}.json"
        file.write_text(json.dumps(plan))
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV"))}
        environment |= ENVIRONMENT
        environment["PYTHONPATH"] = os.pathsep.join([str(self.root), str(self.root / "tests" / "mutation")])
        environment["KVMOCK_MUTATION"] = str(file)
        if "note" not in plan:
            environment["PYTHONDONTWRITEBYTECODE"] = "1"
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=self.root,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=inherited,
        )


def ids_in(text: str) -> set[str]:
    """Return the ids of tests among the lines of a text."""
    return {line.strip() for line in text.splitlines() if re.match(r"[\w/.-]+\.\w+::", line)}


def outcome(status: int, failed: str) -> tuple[str, str] | None:
    """Return the outcome of a mutant after a run of tests; None if all have passed."""
    if status in {TIMEOUT, -signal.SIGKILL, -signal.SIGALRM}:
        return "timeout", ""
    return None if status in PASSED else ("killed", failed or "before any test")


def table_of(root: Path, seconds: Path, data: Path) -> dict[str, object]:
    """Return the notes: seconds of tests, and by file and line the number of the set of tests that run it."""
    from coverage import CoverageData

    tests: dict[str, float] = json.loads(seconds.read_text())
    places = {nodeid: place for place, nodeid in enumerate(tests)}
    found, sets = CoverageData(str(data)), dict[tuple[int, ...], int]()
    found.read()
    lines: dict[str, dict[int, int]] = defaultdict(dict)
    imported: dict[str, list[int]] = defaultdict(list)
    for name in found.measured_files():
        file = Path(name).relative_to(root).as_posix()
        for line, contexts in found.contexts_by_lineno(name).items():
            running = tuple(sorted(places[each] for each in contexts if each in places))
            lines[file][line] = sets.setdefault(running, len(sets))
            if "" in contexts:
                imported[file].append(line)
    return {"seconds": tests, "lines": lines, "sets": list(sets), "imported": imported}


def same_lines(old: str, new: str) -> dict[int, int] | None:
    """Return, by line number of a text, the number of the same line in the old one; None if the texts are equal."""
    if old == new:
        return None
    blocks = SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False).get_matching_blocks()
    return {b + i + 1: a + i + 1 for a, b, size in blocks for i in range(size)}


if __name__ == "__main__":
    raise SystemExit(main())
