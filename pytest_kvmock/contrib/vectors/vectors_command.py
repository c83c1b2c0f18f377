"""The command `vectors`: events in every dialect, with the answers of an index, for tests in other languages."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def _directory(text: str) -> str:
    """Return the given directory; refuse an empty one, which `Path` would take for the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("a path is expected, got ''")
    return text


def add_parser(commands: Any, plugins: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    vectors = commands.add_parser(
        "vectors",
        parents=[plugins],
        help="write events in every dialect, with the answers of an index, for tests in other languages",
        description="Write what two engines publish in every dialect, and the overlap that a router must return "
        "after each batch.",
    )
    vectors.add_argument("directory", metavar="DIR", type=_directory)
    vectors.add_argument(
        "--dialect", metavar="NAME", action="append", help="only this dialect; repeatable (default: all)"
    )
    vectors.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the traffic (default: 0)")
    vectors.set_defaults(run=_vectors)


def _vectors(given: argparse.Namespace) -> int:
    from pytest_kvmock.contrib.vectors.vectors import write_vectors  # imported on first use

    names = write_vectors(given.directory, dialects=given.dialect, seed=given.seed)
    sys.stdout.write(f"{given.directory}: {len(names)} dialects\n")
    return 0
