"""Common parts of the programs next to tests that play whole recordings: `play_X.py FILE...`.

They are loaded by path, as two of them have the same name in different folders. Each has `played`, which plays the
contents of a file, and `main`, its command.
"""

import gzip
import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from pathlib import Path

SHOWN = 3
"""The most differing steps that are shown for a program."""


def player(path):
    """Return the module at a path below `tests`."""
    name = path.removesuffix(".py").replace("/", "_")
    if name not in sys.modules:
        spec = spec_from_file_location(name, Path(__file__).parent / path)
        sys.modules[name] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def read(path):
    """Return the value of a recording, which is JSON, compressed or not."""
    with (gzip.open if str(path).endswith(".gz") else open)(path) as file:
        return json.load(file)


def unrolled(runs):
    """Return the tokens of runs, each given by its first token and its length."""
    return [token for first, count in runs for token in range(first, first + count)]


def name_of(program):
    """Return the name of a program, or the seed of a random one."""
    return program.get("name", program.get("seed"))


def unlike(recorded, got, *, or_empty=False):
    """Return the fields of two records that differ, in order, each with both values.

    Args:
        recorded: the recorded values by field.
        got: our values by field.
        or_empty: whether an empty field equals a missing one.
    """
    if recorded == got:
        return []
    rows = [(name, recorded.get(name), got.get(name)) for name in {**recorded, **got}]
    if or_empty:
        return [row for row in rows if (row[1] or []) != (row[2] or [])]
    return [row for row in rows if row[1] != row[2] or (row[0] in recorded) != (row[0] in got)]


def in_lines(head, rows):
    """Return differing fields, in two lines each, below a first line; None if there are none."""
    lines = [f"  {name}: recorded {was!r}\n  {' ' * len(name)}  ours     {ours!r}" for name, was, ours in rows]
    return "\n".join([head, *lines]) if lines else None


def first_of(found):
    """Return the first of some texts; None if there are none."""
    return "\n".join(islice(found, SHOWN)) or None


def main(paths, played):
    """Play files and print the differences; for several files one line each, and at the end "N of M programs equal".

    Args:
        paths: of the files.
        played: yields the name of each program of a file's contents, and the differences as text or None.

    Returns:
        The exit status: 1 if any program differs.
    """
    total = total_equal = 0
    for path in map(Path, paths):
        number = equal = 0
        for name, found in played(read(path)):
            number += 1
            equal += found is None
            if found is not None:
                print(f"{path.name}: {name}: {found}")
        if len(paths) > 1:
            print(f"{path.name}: {equal} of {number}")
        total, total_equal = total + number, total_equal + equal
    print(f"{total_equal} of {total} programs equal")
    return int(total_equal < total)
