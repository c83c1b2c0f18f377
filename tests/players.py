"""What the programs next to tests have in common that play whole recordings: `play_X.py FILE...`.

They are loaded as modules, as two of them have one name, each in a folder of its own. Each has
`played`, which plays what a file has, and `main`, its command.
"""

import gzip
import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from pathlib import Path

SHOWN = 3
"""At most this many steps that differ are shown of a program."""


def player(path):
    """The module of a path below `tests`."""
    name = path.removesuffix(".py").replace("/", "_")
    if name not in sys.modules:
        spec = spec_from_file_location(name, Path(__file__).parent / path)
        sys.modules[name] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def read(path):
    """The value of a recording, JSON that is packed or not."""
    with (gzip.open if str(path).endswith(".gz") else open)(path) as file:
        return json.load(file)


def unrolled(runs):
    """The tokens of runs: the first one of each, and how many."""
    return [token for first, count in runs for token in range(first, first + count)]


def name_of(program):
    """What to call a program: those by hand have a name, random ones a seed."""
    return program.get("name", program.get("seed"))


def unlike(recorded, got, *, or_empty=False):
    """The fields of two records that differ, in order, each with both values.

    Args:
        recorded: by field.
        got: the same, of ours.
        or_empty: whether a field that is empty equals one that is not there.
    """
    if recorded == got:
        return []
    rows = [(name, recorded.get(name), got.get(name)) for name in {**recorded, **got}]
    if or_empty:
        return [row for row in rows if (row[1] or []) != (row[2] or [])]
    return [row for row in rows if row[1] != row[2] or (row[0] in recorded) != (row[0] in got)]


def in_lines(head, rows):
    """Fields that differ below a first line, two lines each; None if there are none."""
    lines = [f"  {name}: recorded {was!r}\n  {' ' * len(name)}  ours     {ours!r}" for name, was, ours in rows]
    return "\n".join([head, *lines]) if lines else None


def first_of(found):
    """The first texts of some that come one by one; None if there are none."""
    return "\n".join(islice(found, SHOWN)) or None


def main(paths, played):
    """Play files: print what differs, with several files a line for each, last "N of M programs equal".

    Args:
        paths: of the files.
        played: takes what a file has; gives each program's name, and as text what differs, or None.

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
