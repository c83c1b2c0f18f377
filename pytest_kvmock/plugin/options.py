"""The table of options on the command line and in the ini file, with the check of each.

One subject: the settings of a user. `settings.py` reads their values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import pytest

REACTIONS: Final = ("fail", "warn", "ignore")
LOGS: Final = ("failed", "all", "none")
SYNCS: Final = ("every", "auto", "burst", "end")
CLEARS: Final = ("rank", "worker")
FIXTURE_PREFIXES: Final = ("kv_", "make_kv_")
"""The prefixes of public fixtures' names."""

SYNTHETIC_REQUESTS: Final = 200
"""Number of synthetic requests of `kv_trace` if neither a trace nor a limit is given."""

REDUCE_SECONDS: Final = 2.0
"""The default time limit for reducing a failure."""

ALL: Final = "all"

PROFILE_KEYS: Final = (
    "block_size",
    "num_blocks",
    "workers",
    "dp_size",
    "prefix_caching",
    "chunk",
    "seed",
    "tiers",
    "real_sizes",
)
"""The fields of `EngineProfile`, copied here because that class is imported on first use; a test compares the two."""

MARKERS: Final = (
    (
        "kv_backends(*names, exclude=()): run the test over these eviction backends instead of the default ones, "
        "without those of exclude; the marker closest to the test counts."
    ),
    (
        "kv_dialects(*names, exclude=()): run the test over these dialects of the wire; without kv_backends "
        "it runs on the engines that speak them."
    ),
    (
        "kvmock(*, block_size=, num_blocks=, workers=, dp_size=, prefix_caching=, chunk=, seed=, tiers={'host': "
        "blocks}, real_sizes=, profile=, "
        "sync='every|auto|burst|end', clears='rank|worker', trace_tokens=False, event_errors='fail|warn|ignore', "
        "event_warnings='ignore|warn|fail', allow=(rules,), "
        "faults={fault: rate}, survive=(faults,), engine={field: value}, roles={worker type: workers}, "
        "stores={name: {'kind': kind, 'workers': [ids]}}): "
        "size the mock engines of the test, say what a "
        "broken event rule does, which faults strike, what kv_engine is, and whether kv_trace has tokens; keys of "
        "module, class and function "
        "are merged, the inner wins, and so are the fields of engine."
    ),
)


class KvEventWarning(pytest.PytestWarning):
    """A test whose policy is to warn broke an event rule."""


# ---------------------------------------------------------------------------------------------------- one value
#
# Each function returns the value, or raises a ValueError that names what is allowed; the caller adds the place.


def one_of(*allowed: str) -> Callable[[object], str]:
    """Make a check that accepts only these strings."""

    def check(value: object) -> str:
        if value not in allowed:
            from pytest_kvmock.values.checks import not_allowed_text  # imported on first use

            raise ValueError(not_allowed_text(value, allowed))
        return str(value)

    return check


def boolean(value: object) -> bool:
    """Read True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"got {value!r:.80}; allowed: True, False")  # noqa: TRY004 - one family of errors
    return value


def integer(value: object) -> int:
    """Read an integer, given as a number or as text."""
    if isinstance(value, int | str) and not isinstance(value, bool):
        with suppress(ValueError):
            return int(value)
    raise ValueError(f"got {value!r}; allowed: an integer")


def positive(value: object) -> int:
    """Read an integer of at least 1."""
    number = integer(value)
    if number < 1:
        from pytest_kvmock.values.checks import integer_text

        raise ValueError(f"got {value!r}; allowed: {integer_text(1)}")
    return number


def seconds(value: object) -> float:
    """Read a number of seconds above 0, or `off`, which is 0."""
    if value == "off":
        return 0.0
    with suppress(TypeError, ValueError):
        number = float(str(value))
        if 0 < number < float("inf"):
            return number
    raise ValueError(f"got {value!r}; allowed: a number of seconds above 0, or off")


def names(value: object) -> tuple[str, ...]:
    """Read one name or several."""
    given: tuple[object, ...]
    if isinstance(value, str):
        given = (value,)
    elif isinstance(value, Iterable):
        given = tuple(value)
    else:
        raise ValueError(f"got {value!r}; allowed: a name, or a list of names")  # noqa: TRY004 - one family of errors
    for name in given:
        if not isinstance(name, str):
            raise ValueError(f"got {name!r}; allowed: names, as strings")  # noqa: TRY004 - one family of errors
    return tuple(str(name) for name in given)


def known_names(value: object, what: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Read names of existing backends or dialects."""
    given = all_named(value, what)
    for name in given:
        if name not in known:
            raise ValueError(unknown_name(what, name, known))
    return given


def all_named(value: object, what: str) -> tuple[str, ...]:
    """Read names of backends or dialects, and expand group names.

    `hybrid` stands for the backends of that group, `vllm` for the default dialects `vllm-...`.
    """
    given = names(value)
    if what == "backend":
        return tuple(each for name in given for each in backends_of(name) or [name])
    if what != "dialect":
        return given
    known, default = known_dialects(), default_dialects()
    releases = {name: [each for each in default if each.startswith(f"{name}-")] for name in given if name not in known}
    return tuple(each for name in given for each in releases.get(name) or [name])


def unknown_name(what: str, name: object, known: tuple[str, ...]) -> str:
    """Return the message for an unknown backend or dialect."""
    if isinstance(name, str) and "," in name:
        return f"{name!r:.80} has a comma: give names one by one, in ini with blanks or new lines between them"
    if what == "dialect":
        from pytest_kvmock.wire.codec.table import not_spoken_text

        return not_spoken_text(name)
    from pytest_kvmock.engines.backends import unknown_backend_text

    return unknown_backend_text(name, known)


def backend_choice(value: object) -> tuple[str, ...]:
    """Read names of backends; `all` means every one."""
    known = known_backends()
    return known if ALL in names(value) else known_names(value, "backend", known)


def dialect_choice(value: object) -> tuple[str, ...]:
    """Read names of dialects; `all` means every one."""
    known = known_dialects()
    return known if ALL in names(value) else known_names(value, "dialect", known)


def rule_names(value: object) -> tuple[str, ...]:
    """Read names of hygiene rules."""
    from pytest_kvmock.oracle.hygiene.rules import check_rule

    return tuple(map(check_rule, names(value)))


def fault_rates(value: object) -> dict[str, float]:
    """Read the rates of random faults, by their names."""
    from pytest_kvmock.oracle.faults.kinds import check_rates

    return check_rates(value)


def fault_names(value: object) -> tuple[str, ...]:
    """Read names of faults that a router can survive."""
    from pytest_kvmock.oracle.faults.kinds import check_survived

    return check_survived(value)


def known_backends() -> tuple[str, ...]:
    """Return the names of all backends in the order of registration, which is the order of the matrix."""
    from pytest_kvmock.engines import backends

    return tuple(backends.known_backends())


def backends_of(group: str) -> list[str]:
    """Return the names of the backends of a group; none for an unknown group."""
    from pytest_kvmock.engines import backends

    return [name for name, spec in backends.known_backends().items() if spec.group == group]


def default_backends(chosen: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names of the backends that tests run over by default, and of each group that the command line chose
    completely.
    """
    from pytest_kvmock.engines import backends

    known = backends.known_backends()
    groups = {spec.group for name, spec in known.items() if name in chosen}
    groups -= {None, *(spec.group for name, spec in known.items() if name not in chosen)}
    if known.keys() <= {*chosen}:  # `all` neither restricts nor chooses
        groups.clear()
    return tuple(name for name, spec in known.items() if spec.in_matrix or spec.group in groups)


def known_dialects(*, default: bool = False) -> tuple[str, ...]:
    """Return the names of all dialects, over ZMQ or polled, in the order of registration; or of the default ones."""
    from pytest_kvmock.wire.codec import table

    dialects = {
        **table.spoken_dialects(),
        **{name: each for name, each in table.known_dialects().items() if not each.clears},
    }
    return tuple(name for name, dialect in dialects.items() if dialect.in_matrix or not default)


def default_dialects(_chosen: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names of the default dialects, whatever the command line chose."""
    return known_dialects(default=True)


# ---------------------------------------------------------------------------------------------------- axes


class Axis(NamedTuple):
    """One matrix.

    Attributes:
        fixture: the fixture that has its value.
        detector: the private fixture on which our fixture depends.
        marker: the marker that names values.
        what: the word for a value in messages; the setting is its plural.
        known: returns the names of all values, in order.
        default: returns the names that tests run over by default; it takes the names that the command line chose.
    """

    fixture: str
    detector: str
    marker: str
    what: str
    known: Callable[[], tuple[str, ...]]
    default: Callable[[Collection[str]], tuple[str, ...]]

    @property
    def nothing(self) -> str:
        """Id of a test whose matrix is empty. It is not shown: the test is deselected."""
        return f"no-{self.what}"


BACKENDS: Final = Axis("kv_backend", "_kvmock_matrix", "kv_backends", "backend", known_backends, default_backends)
DIALECTS: Final = Axis("kv_dialect", "_kvmock_dialects", "kv_dialects", "dialect", known_dialects, default_dialects)
AXES: Final = (BACKENDS, DIALECTS)

# ---------------------------------------------------------------------------------------------------- all options


class Option(NamedTuple):  # a dataclass takes 0.7 ms longer to create, in every run
    """One setting: its key in `Settings`, its flag on the command line and its name in the ini file.

    `check` receives the value from the command line or ini file. A flag without a metavar takes no value, and gives
    True.
    """

    key: str
    check: Callable[[Any], Any]
    help: str
    flag: str = ""
    metavar: str = ""
    ini: str = ""
    ini_type: str = "string"


# pytest 8.3 does not have this type; `check` then reads the text.
_INT: Final = "int" if pytest.version_tuple >= (8, 4) else "string"

OPTIONS: Final = (
    Option(
        "backends",
        backend_choice,
        "run only this backend of a test's matrix; repeatable; `hybrid` for those of hybrid models, `all` for no "
        "restriction",
        flag="--kv-backend",
        metavar="NAME",
    ),
    Option(
        "backends",
        backend_choice,
        "backends that tests run over by default, or `all`; by default the eviction backends",
        ini="kvmock_backends",
        ini_type="args",
    ),
    Option(
        "dialects",
        dialect_choice,
        "run only this dialect of a test's matrix of dialects; repeatable; `vllm` for its releases, `all` for no "
        "restriction",
        flag="--kv-dialect",
        metavar="NAME",
    ),
    Option(
        "dialects",
        dialect_choice,
        "dialects that tests of kv_dialect run over by default, or `all`; by default those of released engines",
        ini="kvmock_dialects",
        ini_type="args",
    ),
    Option(
        "event_errors",
        one_of(*REACTIONS),
        "what an event error does to the test: fail (default), warn, ignore",
        flag="--kv-event-errors",
        metavar="fail|warn|ignore",
        ini="kvmock_event_errors",
    ),
    Option(
        "event_warnings",
        one_of(*REACTIONS),
        "what an event warning does to the test: ignore (default; it is shown in the log), warn, fail",
        flag="--kv-event-warnings",
        metavar="ignore|warn|fail",
        ini="kvmock_event_warnings",
    ),
    Option(
        "log",
        one_of(*LOGS),
        "which tests show their event log: failed (default), all, none",
        flag="--kv-show-log",
        metavar="failed|all|none",
        ini="kvmock_show_log",
    ),
    Option(
        "reduce",
        seconds,
        f"how long to look for the smallest reproduction of a failure, or `off` (default: {REDUCE_SECONDS:g} seconds)",
        flag="--kv-reduce",
        metavar="SECONDS|off",
        ini="kvmock_reduce",
    ),
    Option(
        "capture",
        str,
        "write the events of each test into this directory, a file a test, to be checked again or elsewhere; files of "
        "earlier runs stay",
        flag="--kv-capture",
        metavar="DIR",
    ),
    Option(
        "html",
        str,
        "write a page of each failing test into this directory, to be opened in a browser: its events, what ledger and "
        "index held after each, its fleet, and the smallest reproduction",
        flag="--kv-html",
        metavar="DIR",
    ),
    Option(
        "seed",
        integer,
        "seed of everything random in the mock engines, together with the test's id (default: 0)",
        flag="--kv-seed",
        metavar="N",
        ini="kvmock_seed",
        ini_type=_INT,
    ),
    Option(
        "trace",
        str,
        "the trace that kv_trace reads, in the Mooncake format (default: a synthetic one)",
        flag="--kv-trace",
        metavar="FILE",
        ini="kvmock_trace",
    ),
    Option(
        "trace_limit",
        positive,
        f"how many requests kv_trace gives at most (default: the whole trace; {SYNTHETIC_REQUESTS} synthetic ones)",
        flag="--kv-trace-limit",
        metavar="N",
        ini="kvmock_trace_limit",
        ini_type=_INT,
    ),
    Option(
        "trace_tokens",
        bool,  # pytest has read the text
        "prompts of kv_trace have tokens, for an index that hashes them itself (default: hashes alone)",
        flag="--kv-trace-tokens",
        ini="kvmock_trace_tokens",
        ini_type="bool",
    ),
    Option(
        "profiles",
        names,
        "YAML files of named engine profiles, paths or globs, relative to the ini file",
        ini="kvmock_profiles",
        ini_type="args",
    ),
    Option(
        "profile",
        str,
        "name of the profile that tests have by default; single fields in ini override it",
        ini="kvmock_profile",
    ),
    Option(
        "allow",
        rule_names,
        "event rules that may be broken without any consequence",
        ini="kvmock_allow",
        ini_type="args",
    ),
    *(
        Option(key, integer, what, ini=f"kvmock_{key}", ini_type=_INT)
        for key, what in (
            ("block_size", "tokens a block in the mock engines (default: 16)"),
            ("num_blocks", "capacity of each mock engine in blocks (default: 256)"),
            ("workers", "how many mock engines there are from the start (default: 1)"),
            ("dp_size", "data-parallel ranks of each mock engine (default: 1)"),
            ("chunk", "tokens that a mock engine prefills at once (default: the whole prompt)"),
        )
    ),
    Option(
        "prefix_caching",
        bool,  # pytest has read the text
        "whether the mock engines cache prefixes (default: true)",
        ini="kvmock_prefix_caching",
        ini_type="bool",
    ),
)


LISTS: Final = {
    "--kv-list-backends": "list the backends, with what each models, and exit",
    "--kv-list-profiles": "list the named engine profiles, with their files, and exit",
}
"""The options that print a list, each with its help."""


def add_options(parser: pytest.Parser, options: Iterable[Option]) -> None:
    """Register options."""
    group = parser.getgroup("kvmock", "KV-cache mocks (pytest-kvmock)")
    for option in options:
        if option.flag and not option.metavar:
            group.addoption(option.flag, action="store_true", dest=dest_of(option), default=None, help=option.help)
        elif option.flag:
            group.addoption(
                option.flag,
                action="append" if option.key in ("backends", "dialects") else "store",
                dest=dest_of(option),
                metavar=option.metavar,
                default=None,
                help=option.help,
            )
        if option.ini:
            # Users cannot give None, so None means that the setting is absent.
            parser.addini(option.ini, option.help, type=option.ini_type, default=None)  # type: ignore[arg-type]  # a type by a name that pytest knows


def check_flags(args: list[str], parser: pytest.Parser) -> None:
    """Check the options on the command line that begin like ours.

    Raises:
        pytest.UsageError: an unknown option resembles one of ours.
    """
    from pytest_kvmock.values.checks import nearest, unknown_text

    flags = [name for option in parser.getgroup("kvmock").options for name in option.names()]
    for arg in parser.parse_known_and_unknown_args(args)[1]:
        flag = arg.partition("=")[0]
        if flag.startswith("--kv") and nearest(flag, flags):
            raise pytest.UsageError(unknown_text("option", flag, flags))


def dest_of(option: Option) -> str:
    """Return the attribute that holds an option's value from the command line."""
    return option.flag.lstrip("-").replace("-", "_")
