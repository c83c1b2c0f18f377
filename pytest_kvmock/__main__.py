"""The command, `python -m pytest_kvmock`: check a capture, record an engine, serve engines, list backends, and the
commands that entry points add.

The exit code is 0 if all is well, 1 if a stream has problems or nothing was received, and 2 if the request cannot be
carried out; one line then says why.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C during the imports ends the process without a traceback. `main` restores Python's handler.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pytest_kvmock.servers.capture.check import Checked, Progress
    from pytest_kvmock.servers.capture.recorder import Recorded

CLEAN: Final = 0
PROBLEMS: Final = 1
UNUSABLE: Final = 2

COMMANDS: Final = "pytest_kvmock.commands"
"""The entry-point group of further commands. Each is a function that takes the subparsers and the parser of `-p`, and
adds one command."""

LONG: Final = 8_000_000
"""Size of a file, in bytes, from which progress is shown on a terminal."""


def parser(called: str | None = None) -> argparse.ArgumentParser:
    """Return the argument parser of the command. Commands of entry points are loaded only if `called` is none of the
    built-in ones: loading them takes a third of the start-up time.
    """
    from pytest_kvmock.servers.serve.command import add_parsers

    out = argparse.ArgumentParser(
        prog="python -m pytest_kvmock", description="KV events of LLM engines: captures, checks, mock engines."
    )
    commands = out.add_subparsers(dest="command", required=True, metavar="COMMAND")

    plugins = argparse.ArgumentParser(add_help=False)
    plugins.add_argument(
        "-p",
        "--plugin",
        metavar="MODULE",
        action="append",
        default=[],
        help="a module with hooks that bring dialects and backends (pytest_kvmock_dialects); repeatable",
    )

    check = commands.add_parser(
        "check",
        parents=[plugins],
        help="judge the events of files by the rules of event hygiene",
        description="Judge the events of captures, of Dynamo's JSON lines, or of payloads in a dialect. "
        "Exits with 0 if there is no error, 1 if there is one, 2 if a file cannot be read.",
    )
    check.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        type=_path,
        help="a file, or a directory: its *.jsonl, or with a dialect of msgpack its *.msgpack",
    )
    check.add_argument("--dialect", metavar="NAME", help="the files have payloads in this dialect, one after the other")
    check.add_argument(
        "--allow", metavar="RULE", action="append", default=[], help="a rule whose breaches do not count; repeatable"
    )
    check.add_argument(
        "--event-warnings",
        choices=("ignore", "fail"),
        default="ignore",
        help="what a warning does: ignore (default; it is counted), fail",
    )
    check.add_argument(
        "--residency",
        choices=("unique", "counted"),
        help="for a file that does not name it: a held block is published once, or every copy is published",
    )
    check.add_argument(
        "--hash",
        metavar="NAME",
        help="the hash by which vLLM named the blocks: sha256, sha256_cbor, xxhash, xxhash_cbor (default: the one "
        "that fits)",
    )
    check.add_argument("--seed", metavar="TEXT", help="seed of the hash, as PYTHONHASHSEED (default: 0, or none)")
    check.add_argument(
        "--injected",
        choices=("ignore", "fail"),
        default="ignore",
        help="what the result of a fault that the captured test injected does: ignore (default; it is counted), fail",
    )
    check.add_argument(
        "--full-reports",
        action="store_true",
        help="requests of vLLM carried full reports: a Stored without a parent whose blocks are all held may be one",
    )
    check.set_defaults(run=_check)

    record = commands.add_parser(
        "record",
        parents=[plugins],
        help="record the KV events of a live engine into a capture",
        description="Record what an engine publishes over ZMQ, until --batches or --seconds is reached, or Ctrl-C. "
        "Exits with 1 if the stream has errors, or nothing was received.",
    )
    record.add_argument("endpoint", metavar="ENDPOINT", help="where the engine is bound: tcp://host:5557")
    record.add_argument("file", metavar="FILE", type=_path)
    record.add_argument("--dialect", metavar="NAME", default="vllm-0.33", help="its dialect (default: vllm-0.33)")
    record.add_argument("--replay", metavar="ENDPOINT", help="the endpoint from which it sends earlier batches again")
    record.add_argument("--ranks", metavar="N", type=int, help="number of data-parallel ranks, on consecutive ports")
    record.add_argument("--topic", metavar="TEXT", default="", help="the beginning of a batch's topic")
    record.add_argument("--batches", metavar="N", type=int, help="end after N batches")
    record.add_argument("--seconds", metavar="S", type=float, help="end after S seconds")
    record.add_argument("--overwrite", action="store_true", help="replace an existing file")
    record.add_argument("--allow-empty", action="store_true", help="exit with 0 even if nothing was received")
    record.set_defaults(run=_record)

    add_parsers(commands, plugins)
    backends = commands.add_parser("backends", parents=[plugins], help="list the backends, with what each models")
    backends.set_defaults(run=_backends)
    dialects = commands.add_parser("dialects", parents=[plugins], help="list the dialects, with the engine of each")
    dialects.set_defaults(run=_dialects)
    if called not in commands.choices:
        for point in sorted(entry_points(group=COMMANDS), key=attrgetter("name")):
            _add(point, commands, plugins)
    return out


def _add(point: EntryPoint, commands: Any, plugins: argparse.ArgumentParser) -> None:
    """Add a command of another distribution, or of `contrib`. A command that cannot be imported is refused when it is
    called.
    """
    try:
        add_parser: Callable[[Any, argparse.ArgumentParser], None] = point.load()
    except ImportError as error:
        text = f"this command is {point.value}, which cannot be imported: {error}"

        def refuse(_: argparse.Namespace) -> int:
            raise ValueError(text)

        broken = commands.add_parser(point.name, add_help=False, prefix_chars="\0")  # later arguments are not read
        broken.add_argument("rest", nargs="*")
        broken.set_defaults(run=refuse, plugin=())
    else:
        add_parser(commands, plugins)


def _path(text: str) -> str:
    """Return the given path; refuse an empty one, which `Path` would take for the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("a path is expected, got ''")
    return text


def main(args: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    from pytest_kvmock.servers.serve.loop_thread import print_error

    args = sys.argv[1:] if args is None else args
    given = parser(*args[:1]).parse_args(args)
    run: Callable[[argparse.Namespace], int] = given.run
    try:
        if (
            given.command != "serve" and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        ):  # `serve` has its own way to end
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with _loaded(given.plugin):
            return run(given)
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLEAN
    except (ValueError, TypeError, ImportError, OSError) as error:
        print_error(" ".join(str(error).split()), given.command)
        return UNUSABLE
    except KeyboardInterrupt:
        print_error("interrupted", given.command)
        return 130


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@contextmanager
def _loaded(modules: Sequence[str]) -> Iterator[None]:
    """Register the dialects and backends of these modules while the context lasts; pytest is imported only if there are
    any.
    """
    with ExitStack() as stack:
        if modules:
            from pytest_kvmock.plugin.command_plugins import loaded

            stack.enter_context(loaded(modules))
        yield


def _check(given: argparse.Namespace) -> int:
    from pytest_kvmock.servers.capture.lines import CaptureError
    from pytest_kvmock.wire.codec.table import find_dialect

    row = None if given.dialect is None else find_dialect(given.dialect)
    pattern = "*.jsonl" if row is None or not row.is_msgpack else "*.msgpack"
    paths: list[Path] = []
    for path in map(Path, given.files):
        inside = sorted(each for each in path.glob(pattern) if each.is_file()) if path.is_dir() else [path]
        if not inside:
            raise CaptureError(f"{path}: no {pattern} in this directory")
        paths += inside
    exits, events = Counter[int](), 0
    for path in paths:
        try:
            checked = _checked(path, given)
        except CaptureError as error:
            sys.stderr.write(f"check: {error}\n")
            exits[UNUSABLE] += 1
            continue
        fail = given.event_warnings == "fail"
        is_good = checked.is_clean and not (fail and checked.warnings)
        exits[CLEAN if is_good else PROBLEMS] += 1
        events += checked.log.total
        text = checked.text(warnings=fail)
        if len(paths) == 1 or text.count("\n") > 1 or not is_good:  # for many clean files, the total is enough
            _say(text)
    if len(paths) > 1:
        counts = ((PROBLEMS, "with problems"), (UNUSABLE, "cannot be read"), (CLEAN, "without"))
        _say(
            f"{len(paths):,} files, {events:,} events: "
            f"{', '.join(f'{exits[of]:,} {what}' for of, what in counts if exits[of])}"
        )
    return max(code for code, count in exits.items() if count)


def _checked(path: Path, given: argparse.Namespace) -> Checked:
    """Check one file, and show the progress on a terminal."""
    from pytest_kvmock.servers.capture.check import check_file

    progress = _bytes_read(path)
    try:
        return check_file(
            path,
            dialect=given.dialect,
            allow=given.allow,
            residency=given.residency,
            hash=given.hash,
            seed=given.seed,
            counts_injected=given.injected == "fail",
            full_reports=given.full_reports,
            progress=progress,
        )
    finally:
        if progress is not None:
            _wipe()


def _bytes_read(path: Path) -> Progress | None:
    """Return the function that shows the progress of reading a file; None without a terminal, or for a small file."""
    try:
        size = path.stat().st_size
    except OSError:
        return None
    if size < LONG or not sys.stderr.isatty():
        return None

    def show(read: int, events: int) -> None:
        sys.stderr.write(f"\r{100 * read // size:>3} %, {events:,} events")
        sys.stderr.flush()

    return show


def _wipe() -> None:
    sys.stderr.write("\r\x1b[K")
    sys.stderr.flush()


def _record(given: argparse.Namespace) -> int:
    from pytest_kvmock.servers.capture.recorder import record

    def show(now: Recorded) -> None:
        sys.stderr.write(f"\r{now.batches:,} batches, {now.log.total:,} events (Ctrl-C ends it)")
        sys.stderr.flush()

    is_seen = sys.stderr.isatty()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: the recording so far is kept
    try:
        recorded = record(
            given.endpoint,
            given.file,
            dialect=given.dialect,
            replay=given.replay,
            ranks=given.ranks,
            topic=given.topic,
            batches=given.batches,
            seconds=given.seconds,
            overwrite=given.overwrite,
            progress=show if is_seen else None,
        )
    finally:
        signal.signal(signal.SIGTERM, before)
        if is_seen:
            _wipe()
    errors = len(recorded.errors)
    _say(f"{given.file}: {recorded.batches:,} batches, {recorded.log.total:,} events")
    for text in filter(None, (*recorded.lost, *recorded.unreadable, recorded.silence)):
        _say(f"  {text}")
    if errors:
        _say(f"{errors:,} event error{'s' * (errors != 1)}: python -m pytest_kvmock check {given.file}")
    is_bad = errors or recorded.unreadable or (recorded.silence and not given.allow_empty)
    return PROBLEMS if is_bad else CLEAN


def _backends(_: argparse.Namespace) -> int:
    from pytest_kvmock.engines.backends import known_backends

    return _list({name: spec.models for name, spec in known_backends().items()})


def _dialects(_: argparse.Namespace) -> int:
    from pytest_kvmock.wire.codec.table import known_dialects

    return _list({name: f"{row.models}; engine: {row.backend}" for name, row in known_dialects().items()})


def _list(texts: Mapping[str, str]) -> int:
    """Print names and their texts in two columns."""
    width = max(map(len, texts))
    for name, text in texts.items():
        _say(f"{name:<{width}}  {text}")
    return CLEAN


if __name__ == "__main__":
    sys.exit(main())
