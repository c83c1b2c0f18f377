"""Reads `Scenario` values from a scenario file.

One subject: any mistake in it is one error with file, line and column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from pytest_kvmock.contrib.scenarios.fields import (
    ARGUMENTS,
    IN_FILES,
    OF_A_SINK,
    PROMPT_KEYS,
    check_event,
    check_keys,
    check_one_of,
    read_block,
    read_cached_block,
    read_capacity,
    read_change,
    read_count,
    read_engine,
    read_extra,
    read_lineage,
    read_milliseconds,
    read_natural,
    read_numbers,
    read_published,
    read_tier,
    read_true,
    read_worker,
)
from pytest_kvmock.contrib.scenarios.values import (
    METRICS,
    REQUEST_COUNTS,
    STATUSES,
    Expected,
    Scenario,
    Step,
    WorkerName,
)
from pytest_kvmock.engines.profiles import FIELDS
from pytest_kvmock.oracle.faults.kinds import check_fault
from pytest_kvmock.oracle.hygiene.rules import check_rule
from pytest_kvmock.values.checks import not_allowed_text
from pytest_kvmock.values.programs.forms import Operation
from pytest_kvmock.values.strict_yaml import YamlNode, boolean, integer, list_of, nullable, plain, read_yaml, string

Reader = Callable[[YamlNode], Any]


def load_scenarios(path: Path | str, name: str | None = None) -> list[Scenario]:
    """Read a scenario file.

    Args:
        path: path of the file.
        name: its name in messages; None: `path`.

    Returns:
        Its scenarios, in the order of the file.

    Raises:
        YamlError: the file cannot be read, or is not a valid scenario file. The message has file, line and column.
    """
    path = Path(path)
    document = read_yaml(path, name)
    common = document.fields({**_COMMON, "scenarios": _scenarios, "steps": _steps})
    base, fields = common.get("profile", (None, {}))
    given = common.get("scenarios")
    if (given is None) == ("steps" not in common):
        raise document.error("either 'scenarios' (a mapping of names to scenarios) or 'steps' is needed")
    if given is None:
        only = path.name.removesuffix(".kv.yaml")
        given = {only: (document, {"steps": common["steps"]})}
    scenarios = []
    for title, (node, own) in given.items():
        own_base, own_fields = own.get("profile", (None, {}))
        scenarios.append(
            Scenario(
                title,
                node.place,
                tuple(own["steps"]),
                own_base or base,
                own_fields if own_base else {**fields, **own_fields},
                own.get("backends", common.get("backends")),
                (*common.get("allow", ()), *own.get("allow", ())),
                own.get("needs_index", common.get("needs_index", False)),
                node.keys.get("backends", document.keys.get("backends")),
                {**common.get("engine", {}), **own.get("engine", {})},
                node.keys.get("engine", document.keys.get("engine")),
                own.get("stores", common.get("stores", {})),
            )
        )
    return scenarios


# ---------------------------------------------------------------------------------------------------- scenarios


def _scenarios(node: YamlNode) -> dict[str, tuple[YamlNode, dict[str, Any]]]:
    found = node.entries(lambda one: (one, one.fields({**_COMMON, "steps": _steps}, required=("steps",))))
    if not found:
        raise node.error("no scenario is in it")
    return found


def _profile(node: YamlNode) -> tuple[str | None, Mapping[str, Any]]:
    """Read the name of an engine profile, or fields of one, optionally with the name of another as `base`."""
    if isinstance(node.value, str):
        return node.value, {}
    fields = node.fields({"base": string, **FIELDS})
    return fields.pop("base", None), fields


def _stores(node: YamlNode) -> Mapping[str, Any]:
    """Read the stores that workers share, as `kvmock(stores=...)` takes them."""
    from pytest_kvmock.values.shared_stores import read_stores  # imported on first use

    given: dict[str, Any] = plain(node)
    node.read(lambda _: read_stores(given))
    return given


def _rule(node: YamlNode) -> str:
    return check_rule(string(node))


def _backends(node: YamlNode) -> tuple[str, ...]:
    names = tuple(node.elements(string))
    if not names:
        raise node.error("at least one backend is needed; without the key, the default matrix is used")
    return names


_COMMON: Final[Mapping[str, Reader]] = {
    "description": string,
    "profile": _profile,
    "engine": read_engine,
    "stores": _stores,
    "backends": _backends,
    "allow": list_of(_rule),
    "needs_index": boolean,
}


def _mapping(readers: Mapping[str, Reader], required: tuple[str, ...] = (), short: str = "") -> Reader:
    """Make a reader of an action's arguments; `short` is the argument that may be given alone."""

    def read(node: YamlNode) -> dict[str, Any]:
        if short and not isinstance(node.value, dict):
            return {short: readers[short](node)}
        return node.fields(readers, required)

    return read


def _prompt(readers: Mapping[str, Reader], required: tuple[str, ...] = ()) -> Reader:
    """Make a reader of arguments that include a prompt, by tokens or by hashes."""
    own = {"tokens": read_numbers, "hashes": read_numbers, "num_tokens": read_count, **PROMPT_KEYS}
    both = _mapping({**own, **readers}, required)

    def read(node: YamlNode) -> dict[str, Any]:
        given: dict[str, Any] = both(node)
        check_one_of(node, "tokens", "hashes")
        if "num_tokens" in given and "hashes" not in given:
            raise node.key_error("num_tokens", "'num_tokens' belongs to 'hashes'")
        check_keys(node, given)
        return given

    return read


def _event(node: YamlNode) -> dict[str, Any]:
    readers = {
        "stored": list_of(read_published),
        "local_hashes": list_of(read_natural),
        "parent": nullable(read_published),
        "span": read_capacity,
        "block_size": read_capacity,
        "removed": list_of(read_published),
        "located": list_of(read_published),
        "updated": read_published,
        "levels": nullable(read_change),
        "priorities": nullable(read_change),
        "cleared": read_true,
        "worker": read_worker,
        "id": read_natural,
        "tier": read_tier,
        "token_ids": list_of(read_numbers),
        "extra": read_extra,
        "chained": boolean,
        **OF_A_SINK,
    }
    given = node.fields(readers)
    check_event(node, given)
    return given


def _engine(node: YamlNode) -> dict[str, Any]:
    """Read a worker, and fields of its engine."""
    given = read_engine(node, worker=read_worker)
    worker = {"worker": given.pop("worker")} if "worker" in given else {}
    return {**worker, "fields": given}


def _fault(node: YamlNode) -> dict[str, Any]:
    """Read one fault, given by its name and arguments: `lose`, `{lose: 1}` or `{lose: {n: 1, kind: stored}}`."""
    if isinstance(node.value, str):
        return {"fault": node.read(lambda one: check_fault(one.value)), "arguments": ()}
    if not isinstance(node.value, dict) or len(node.value) != 1:
        raise node.wrong_type("one fault, such as {lose: 1} or {lose: {n: 1, kind: stored}}")
    ((name, value),) = node.value.items()
    try:
        check_fault(name)
    except ValueError as error:
        raise node.key_error(name, str(error)) from None
    if isinstance(value.value, dict):
        return {"fault": name, "arguments": {key: _argument(one) for key, one in value.value.items()}}
    return {"fault": name, "arguments": (_argument(value),)}


def _argument(node: YamlNode) -> Any:
    """Read an argument of a fault; a worker and rank is a list."""
    value = plain(node)
    return tuple(value) if isinstance(value, list) else value


def _operation(kind: type[Operation]) -> Reader:
    """Make a reader of the step of an operation."""
    takes = kind.takes or {}
    readers = {name: ARGUMENTS[argument] for name, argument in takes.items() if argument != "prompt"}
    if "prompt" in takes:
        return _prompt(readers, kind.needs)
    plain_step = _mapping(readers, kind.needs, kind.short)

    def read(node: YamlNode) -> dict[str, Any]:
        given: dict[str, Any] = plain_step(node)
        if kind.one_of:
            check_one_of(node, *kind.one_of)
        return given

    return read


def _operations(first: str | None = None, until: str | None = None) -> dict[str, Reader]:
    """Return readers of a range of operations, by the names of their steps."""
    names = [*IN_FILES]
    start = 0 if first is None else names.index(first)
    end = len(names) if until is None else names.index(until)
    return {name: _operation(IN_FILES[name]) for name in names[start:end]}


_ACTIONS: Final[Mapping[str, Reader]] = {
    "use": _mapping(
        {
            "blocks": list_of(read_block),
            "parent": nullable(read_natural),
            "local_hashes": list_of(read_natural),
            "plhs": list_of(read_lineage),
            "token_ids": list_of(list_of(read_natural)),
            "worker": read_worker,
        },
        ("blocks",),
        "blocks",
    ),
    "deref": _mapping({"blocks": list_of(read_block), "worker": read_worker}, ("blocks",), "blocks"),
    "promote": _mapping(
        {
            "partial": string,
            "block": read_natural,
            "parent": nullable(read_natural),
            "local_hash": read_natural,
            "plh": read_lineage,
            "worker": read_worker,
        },
        ("partial", "block"),
    ),
    **_operations(until="submit"),
    "engine": _engine,
    **_operations("submit", "remove_worker"),
    "worker": _mapping({"id": read_worker, "backend": string}, ("id",), "id"),
    **_operations("remove_worker"),
    "event": _event,
    "lost_batches": _mapping(
        {"first": read_natural, "count": read_natural, "observed": string, "worker": read_worker, **OF_A_SINK},
        ("first", "count"),
    ),
    "fault": _fault,
}
"""The actions of a step, with the readers of their arguments."""


# ---------------------------------------------------------------------------------------------------- expectations


def _how_many(reader: Reader) -> Reader:
    """Make a reader that also takes the number of blocks in place of the blocks."""

    def read(node: YamlNode) -> Any:
        return integer(node) if isinstance(node.value, int) else reader(node)

    return read


def _expected_event(node: YamlNode) -> dict[str, Any]:
    if node.value == "cleared":
        return {"cleared": True}
    blocks = _how_many(list_of(read_published))
    given = node.fields(
        {
            "stored": blocks,
            "parent": nullable(read_published),
            "removed": blocks,
            "worker": read_worker,
            "tier": read_tier,
        }
    )
    if "parent" in given and "stored" not in given:
        raise node.key_error("parent", "'parent' belongs to 'stored'")
    check_one_of(node, "stored", "removed")
    return given


def _number_or_name(key: str) -> int | str:
    return int(key) if key.removeprefix("-").isdecimal() else key


def _active(node: YamlNode) -> Any:
    if isinstance(node.value, dict):
        return {_number_or_name(key): count for key, count in node.entries(integer).items()}
    return _how_many(list_of(read_cached_block))(node)


def _overlap(node: YamlNode) -> dict[str, Any]:
    given: dict[str, Any] = _prompt({"workers": lambda one: one.entries(integer), "tier": read_tier}, ("workers",))(
        node
    )
    workers = {}
    for key, blocks in given["workers"].items():
        if (found := re.fullmatch(r"([0-9]+)(?:/([0-9]+))?", key)) is None:
            raise node.value["workers"].key_error(key, f"worker {key!r}; allowed: an id, or id/rank")
        workers[int(found[1]) if found[2] is None else (int(found[1]), int(found[2]))] = blocks
    given["workers"] = workers
    return given


def _request(node: YamlNode) -> dict[str, Any]:
    """Read the expected state of a request: its status, or several fields."""
    if not isinstance(node.value, dict):
        return {"status": _status(node)}
    given = node.fields({"status": _status, **dict.fromkeys(REQUEST_COUNTS, integer)})
    if not given:
        raise node.error(f"nothing is expected; known: status, {', '.join(REQUEST_COUNTS)}")
    return given


def _status(node: YamlNode) -> str:
    if node.value not in STATUSES:
        raise node.error(not_allowed_text(node.value, STATUSES))
    return string(node)


def _metrics(node: YamlNode) -> dict[str, Any]:
    given = node.fields({**dict.fromkeys(METRICS, integer), "now_ms": read_milliseconds})
    if not given:
        raise node.error(f"nothing is expected; known: {', '.join(METRICS)}, now_ms")
    return given


_EXPECTATIONS: Final[Mapping[str, Reader]] = {
    "allocated": integer,
    "refused": string,
    "cached_tokens": integer,
    "events": list_of(_expected_event),
    "active": _active,
    "inactive": _how_many(list_of(read_cached_block)),
    "eviction_order": list_of(read_cached_block),
    "overlap": _overlap,
    "requests": lambda node: node.entries(_request),
    "metrics": _metrics,
    "problems": list_of(_rule),
}
"""The expectations of a step, with their readers. They are checked in the order of the file."""


def _expectations(node: YamlNode) -> tuple[WorkerName | None, dict[str, Expected]]:
    fields = node.fields({**_EXPECTATIONS, "worker": read_worker})
    worker = fields.pop("worker", None)
    if not fields:
        raise node.error(f"nothing is expected; known: {', '.join(_EXPECTATIONS)}")
    return worker, {key: Expected(node.keys[key], value) for key, value in fields.items()}


def _step(node: YamlNode) -> Step:
    fields = node.fields({**_ACTIONS, "expect": _expectations})
    worker, expected = fields.pop("expect", (None, {}))
    if len(fields) > 1:
        raise node.error(f"one step does one thing, not {' and '.join(fields)}")
    if not fields:
        if not expected:
            raise node.error(f"a step does something, or expects something; known: {', '.join(_ACTIONS)}, expect")
        for key in ("allocated", "refused", "cached_tokens"):
            if key in expected:
                raise node.value["expect"].key_error(key, f"{key!r} is expected of a step that does something")
        return Step(node.place, expected=expected, worker=worker)
    ((action, given),) = fields.items()
    if "allocated" in expected and action != "use":
        raise node.value["expect"].key_error("allocated", "only a use returns 'allocated'")
    if "cached_tokens" in expected and action not in ("prefill", "resume", "serve"):
        why = "only prefill, resume and serve return 'cached_tokens'"
        if action in ("submit", "step", "run"):
            why += "; that of an engine's request is expected as {requests: {name: {cached_tokens: 0}}}"
        raise node.value["expect"].key_error("cached_tokens", why)
    return Step(node.keys[action], action, given, expected, worker)


def _steps(node: YamlNode) -> list[Step]:
    steps = node.elements(_step)
    if not steps:
        raise node.error("no step is in it")
    return steps
