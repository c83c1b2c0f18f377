"""One-line mutants of the verdict: does a test fail for each? Each is tried in a copy of the tree.

    pip install -e '.[test,mutation]'
    python tests/mutation/mutate.py --seed 1 --count 100

The seed draws the mutants from all that `operators.py` makes of `PACKAGES`. First it is noted which test runs which
lines; that takes minutes, and is kept for later runs as long as the package stays as it is. Then each mutant gets the
tests that run its line, quick ones first, until one fails. A survivor wants a test; one that no test can tell from the
code as it is wants a reason in `equivalent.toml`.

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
import subprocess
import sys
import tempfile
import time
import tomllib
from bisect import bisect
from collections import Counter, defaultdict
from itertools import accumulate
from pathlib import Path
from random import Random

from operators import mutants
from watch import TIMEOUT

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

PACKAGES = ("pytest_kvmock/hygiene", "pytest_kvmock/harness", "pytest_kvmock/faults", "pytest_kvmock/programs")
TESTS = ("tests/hygiene", "tests/harness", "tests/faults", "tests/reduce", "tests/scenarios", "tests/plugin")
TESTS += ("tests/testing", "tests/programs", "tests/router", "tests/engine", "examples")
COMMAND = ("-q", "-p", "watch", "-p", "no:cacheprovider", "--tb=line", "--no-header")
ENVIRONMENT = {"CI": "1", "PYTHONHASHSEED": "0"}  # with CI set, Hypothesis tries the same examples each time

QUICK = 3.0
"""Seconds of computing, without a mutant, of the tests that are run first: those that need least."""
LONG = 30.0
"""Of all tests that are run, unless all that run the line are asked for (`--whole`); the rest are long ones."""
TIMES_SLOWER = 20
LEAST_LIMIT = 10.0
"""A test that computes that many times longer than without a mutant, and these seconds, has timed out."""
FIRST = ("tests/hygiene", "tests/harness", "tests/faults")
"""Their tests go before others that take as long: they are about nothing else."""
WALL = 1800
"""Seconds after which a run is ended that waits for something."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="draws the mutants (default: 1)")
    parser.add_argument("--count", type=int, default=100, help="how many to draw (default: 100)")
    parser.add_argument("--pick", default="", help="try only these of them, by their numbers: 3,17")
    parser.add_argument("--only", default="", help="draw from those whose file, or file:line, ends like this")
    parser.add_argument("--whole", action="store_true", help="run the long tests too before a mutant has survived")
    parser.add_argument("--list", action="store_true", help="print the mutants, try none")
    options = parser.parse_args()

    every = [m for path in modules() for m in mutants(path.relative_to(ROOT).as_posix(), path.read_text())]
    known = {(e["file"], e["operator"], e["old"], e["new"]): e["reason"] for e in equivalents()}
    pool = [m for m in every if f"{m.file}:{m.line}".endswith(options.only) or m.file.endswith(options.only)]
    drawn = Random(options.seed).sample(pool, min(options.count, len(pool)))
    picked = {int(number) for number in options.pick.split(",") if number} or set(range(1, len(drawn) + 1))
    for file, operator, _, new in known.keys() - {(m.file, m.operator, m.old, m.new) for m in every}:
        print(f"equivalent.toml: no {operator} in {file} makes this any more: {new}")
    print(f"{len(every)} mutants, {len(drawn)} drawn by seed {options.seed}", flush=True)

    counts, begun = Counter(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvmock-mutants-") as directory:
        tree = None if options.list else Tree(Path(directory) / "tree", whole=options.whole)
        for number, mutant in enumerate(drawn, 1):
            if number not in picked:
                continue
            since = time.monotonic()
            key = mutant.file, mutant.operator, mutant.old, mutant.new
            if key in known:
                outcome, why = "equivalent", known[key]
            else:
                outcome, why = ("", "") if tree is None else tree.attempt(mutant)
            counts[outcome] += 1
            print(f"{number:>4}  {outcome:<10} {mutant.file}:{mutant.line}  {mutant.operator}  {why}")
            print(f"        - {mutant.old}\n        + {mutant.new}")
            if tree is not None:
                print(f"        {time.monotonic() - since:.0f} s", flush=True)
    said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    print(f"seed {options.seed}: {said}; {time.monotonic() - begun:.0f} s")
    return 1 if counts["survived"] else 0


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).glob("*.py"))]


def equivalents() -> list[dict[str, str]]:
    """Mutants that no test can tell from the code, each by its file, operator and line, before and after, with the reason."""
    return tomllib.loads((HERE / "equivalent.toml").read_text()).get("equivalent", [])


class Tree:
    """A copy of the checkout in which mutants are tried.

    Attributes:
        seconds: of each test without a mutant.
        lines: by file and line, the tests that run it.
        changed: files with tests that were changed since that was noted; what is new in them is run for each mutant.
    """

    def __init__(self, root: Path, *, whole: bool) -> None:
        self.root, self.whole = root, whole
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
        package = hashlib.sha256()
        for path in sorted((root / "pytest_kvmock").rglob("*.py")):
            package.update(path.read_bytes())
        noted = Path(tempfile.gettempdir()) / f"kvmock-mutants-{package.hexdigest()[:16]}.json"
        if not noted.exists():
            noted.write_text(self.note())
        table = json.loads(noted.read_text())
        self.seconds: dict[str, float] = table["seconds"]
        names, sets = list(self.seconds), table["sets"]
        self.lines = {
            file: {int(line): {names[i] for i in sets[which]} for line, which in lines.items()}
            for file, lines in table["lines"].items()
        }
        self.changed = [name for name, digest in self.digests().items() if table["files"].get(name) != digest]
        subprocess.run([sys.executable, "-m", "compileall", "-q", "pytest_kvmock"], cwd=root, check=True)

    def digests(self) -> dict[str, str]:
        """Of each file with tests."""
        paths = sorted(path for tests in TESTS for path in (self.root / tests).rglob("test_*.py"))
        return {path.relative_to(self.root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}

    def note(self) -> str:
        """Run all tests; which runs which lines, as JSON."""
        from coverage import CoverageData

        print("noting which test runs which lines; this takes minutes", flush=True)
        seconds, data = self.root / "seconds.json", self.root / "lines.coverage"
        include = ",".join(f"*/{package}/*" for package in PACKAGES)
        command = ["-m", "coverage", "run", f"--data-file={data}", f"--include={include}", "-m", "pytest", *COMMAND]
        status, output = self.run([*command, *TESTS], {"note": str(seconds)}, wall=4 * WALL)
        if status not in (0, 1):
            print(output)
            raise SystemExit(2)
        tests: dict[str, float] = json.loads(seconds.read_text())
        for line in re.findall(r"^(?:FAILED|ERROR) .*", output, re.MULTILINE):
            print(f"without a mutant, and left out: {line}")
        places = {nodeid: place for place, nodeid in enumerate(tests)}
        found, sets = CoverageData(str(data)), dict[tuple[int, ...], int]()
        found.read()
        lines: dict[str, dict[int, int]] = defaultdict(dict)
        for name in found.measured_files():
            file = Path(name).relative_to(self.root).as_posix()
            for line, contexts in found.contexts_by_lineno(name).items():
                running = tuple(sorted(places[each] for each in contexts if each in places))
                lines[file][line] = sets.setdefault(running, len(sets))
        return json.dumps({"files": self.digests(), "seconds": tests, "lines": lines, "sets": list(sets)})

    def attempt(self, mutant) -> tuple[str, str]:
        """What becomes of a mutant, and by which test."""
        path = self.root / mutant.file
        source, times = path.read_text(), path.stat()
        cached = Path(py_compile.compile(str(path), doraise=True) or "")
        try:
            path.write_text(mutant.apply(source))
            cached.unlink()  # it is told by seconds and size, which may be the same
            return self.judge(mutant)
        finally:
            path.write_text(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            py_compile.compile(str(path), doraise=True)

    def judge(self, mutant) -> tuple[str, str]:
        tests = self.running(mutant)
        ordered = sorted(tests, key=lambda nodeid: (self.seconds[nodeid] * (3 - 2 * nodeid.startswith(FIRST)), nodeid))
        upto = list(accumulate(self.seconds[nodeid] for nodeid in ordered))
        quick = bisect(upto, QUICK)
        last = len(ordered) if self.whole else max(quick, bisect(upto, LONG))
        for part, files in ((ordered[:quick], self.changed), (ordered[quick:last], [])):
            if not part and not files:
                continue
            limits = {nodeid: max(LEAST_LIMIT, TIMES_SLOWER * self.seconds[nodeid]) for nodeid in part}
            known = [nodeid for nodeid in self.seconds if nodeid.partition("::")[0] in files]
            plan = {"tests": part, "limits": limits, "files": files, "known": known}
            paths = dict.fromkeys([*files, *(nodeid.partition("::")[0] for nodeid in part)])
            status, output = self.run(["-m", "pytest", "-x", *COMMAND, *paths], plan, wall=WALL)
            if status == TIMEOUT:
                return "timeout", ""
            if status not in (0, 5):  # 5: none of them is there any more
                failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, re.MULTILINE)
                return "killed", failed.group(1) if failed else "before any test"
        return "survived", f"{last} of {len(ordered)} tests that run it" if ordered else "no test runs it"

    def running(self, mutant) -> set[str]:
        """The tests that run what a mutant changes; of a constant of a module, what names it."""
        places = {mutant.file: mutant.lines}
        if not mutant.lines:
            name = re.match(r"(\w+)(: \S+)? = ", mutant.old)
            word = re.compile(rf"\b{name.group(1)}\b") if name else re.compile("")
            places = {
                file: [n for n, text in enumerate((self.root / file).read_text().splitlines(), 1) if word.search(text)]
                for file in self.lines
            }
        return {test for file, lines in places.items() for n in lines for test in self.lines.get(file, {}).get(n, ())}

    def run(self, command: list[str], plan: object, *, wall: float) -> tuple[int, str]:
        """Run Python in the copy; exit status and output."""
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(plan, file)
            file.flush()
            environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV"))}
            environment |= ENVIRONMENT
            environment["PYTHONPATH"] = os.pathsep.join([str(self.root), str(self.root / "tests" / "mutation")])
            environment["KVMOCK_MUTATION"] = file.name
            if "note" not in dict(plan):
                environment["PYTHONDONTWRITEBYTECODE"] = "1"
            with subprocess.Popen(
                [sys.executable, *command],
                cwd=self.root,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            ) as process:
                try:
                    output, _ = process.communicate(timeout=wall)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
                    return TIMEOUT, ""
        return process.returncode, output


if __name__ == "__main__":
    raise SystemExit(main())
