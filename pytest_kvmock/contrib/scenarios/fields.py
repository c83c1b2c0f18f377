"""Readers of the fields of a scenario file: numbers, tokens, blocks, workers. Each reads a node and checks it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any, Final

from pytest_kvmock.contrib.scenarios.values import Numbers, WorkerName
from pytest_kvmock.harness.user_sink import FIRST_SINK_WORKER
from pytest_kvmock.oracle.hygiene.stream_spec import RESIDENCIES, Residency
from pytest_kvmock.values.checks import is_integer, not_allowed_text
from pytest_kvmock.values.events import TIER_NAMES, SparseStored, StorageTier
from pytest_kvmock.values.programs.forms import Argument, Operation
from pytest_kvmock.values.programs.operations import OPERATIONS
from pytest_kvmock.values.prompt_keys import PromptKeys
from pytest_kvmock.values.strict_yaml import YamlNode, boolean, integer, list_of, nullable, number, plain, string

MOST_TOKENS: Final = 1_000_000
"""Most tokens of a range or a count: a few characters must not fill the memory."""

MOST_SINKS: Final = 256
"""Most sinks of a scenario; their ids start at 2**16."""

_GROUPS: Final = {
    "sglang": (
        "schedule_policy",
        "page_size",
        "max_prefill_tokens",
        "chunked_prefill_size",
        "clip_max_new_tokens",
        "schedule_conservativeness",
    ),
    "reasoning": ("start_thinking_token_id", "end_thinking_token_id", "thinking_ratio"),
}
"""The fields of an engine that are mappings, with their keys."""

_RANGE: Final = re.compile(r"(0|[1-9][0-9]{0,19})\.\.(0|[1-9][0-9]{0,19})")


def read_natural(node: YamlNode) -> int:
    """Read an unsigned number of 64 bits."""
    number = integer(node)
    if not 0 <= number < 2**64:
        raise node.wrong_type("an integer from 0 to 2**64 - 1")
    return number


def read_published(node: YamlNode) -> int:
    """Read a block's name in an event; SGLang's names are signed."""
    number = integer(node)
    if not -(2**63) <= number < 2**64:
        raise node.wrong_type("an integer from -2**63 to 2**64 - 1")
    return number


def read_change(node: YamlNode) -> tuple[int, int]:
    """Read a level or priority before and after, such as [0, 1]."""
    parts = node.elements(read_natural) if isinstance(node.value, list) else []
    if len(parts) != 2:
        raise node.wrong_type("[before, after]")
    return parts[0], parts[1]


def read_worker(node: YamlNode) -> WorkerName:
    """Read a worker, given by its id, or a rank of one as [id, rank]."""
    parts = node.elements(integer) if isinstance(node.value, list) else [integer(node), 0]
    most = FIRST_SINK_WORKER + MOST_SINKS - 1
    if len(parts) != 2 or not 0 <= parts[0] <= most or parts[1] < 0:
        raise node.wrong_type(f"the id of a worker (0 to {most}; sinks from {FIRST_SINK_WORKER} on), or [id, rank]")
    return parts[0], parts[1]


def read_worker_or_rank(node: YamlNode) -> int | WorkerName:
    """Read a worker, given by its id for all its ranks, or one rank as [id, rank]."""
    worker = read_worker(node)
    return worker if isinstance(node.value, list) else worker[0]


def read_count(node: YamlNode) -> int:
    """Read a number of tokens."""
    number = integer(node)
    if not 0 <= number <= MOST_TOKENS:
        raise node.wrong_type(f"an integer from 0 to {MOST_TOKENS}")
    return number


def read_capacity(node: YamlNode) -> int:
    """Read a number of blocks."""
    number = integer(node)
    if number < 1:
        raise node.wrong_type("an integer of at least 1")
    return number


def read_numbers(node: YamlNode) -> Numbers:
    """Read a number, a range such as `0..15` (both ends included), or a list of these."""
    if isinstance(node.value, list):
        numbers = tuple(chain.from_iterable(node.elements(read_numbers)))
        if (count := sum(map(len, numbers))) > MOST_TOKENS:
            raise node.error(f"{count} numbers; at most {MOST_TOKENS} are allowed")
        return numbers
    if isinstance(node.value, str) and (found := _RANGE.fullmatch(node.value)):
        first, last = int(found[1]), int(found[2])
        if last < first:
            raise node.error(f"the range {node.value} goes backwards")
        if last >= 2**64:
            raise node.error(f"the range {node.value} goes beyond 2**64 - 1")
        if last - first >= MOST_TOKENS:
            raise node.error(
                f"the range {node.value} has {last - first + 1} numbers; at most {MOST_TOKENS} are allowed"
            )
        return (range(first, last + 1),)
    if is_integer(node.value):
        number = read_natural(node)
        return (range(number, number + 1),)
    raise node.wrong_type("a number, a range such as 0..15, or a list of these")


def read_block(node: YamlNode) -> int | str:
    """Read a full block, given by its hash, or a partial one by its name."""
    if isinstance(node.value, str) and node.value:
        return node.value
    if is_integer(node.value):
        return read_natural(node)
    raise node.wrong_type("a block hash, or a name for a partial block")


def read_cached_block(node: YamlNode) -> int | str:
    """Read a block like `read_block`, but of any engine."""
    return read_published(node) if isinstance(node.value, int) else read_block(node)


def read_lineage(node: YamlNode) -> tuple[int, int | None, int]:
    """Read the parts of a lineage hash."""
    parts = node.elements(nullable(read_natural))
    if len(parts) != 3 or parts[0] is None or parts[2] is None:
        raise node.wrong_type("[sequence hash, parent sequence hash or null, position]")
    return parts[0], parts[1], parts[2]


def check_one_of(node: YamlNode, *keys: str) -> None:
    """Check that a mapping has exactly one of these keys."""
    given = [key for key in keys if key in node.value]
    if len(given) != 1:
        raise node.error(f"exactly one of {', '.join(keys)} is needed")


def read_tier(node: YamlNode) -> StorageTier:
    """Read a storage tier, given by its name."""
    if not isinstance(node.value, str):
        raise node.wrong_type(", ".join(TIER_NAMES))
    if node.value not in TIER_NAMES:
        raise node.error(not_allowed_text(node.value, TIER_NAMES))
    return TIER_NAMES[node.value]


def read_tier_blocks(node: YamlNode) -> dict[str, int]:
    """Read a sink's number of blocks in each tier below the device, by tier name."""
    below = {name: tier for name, tier in TIER_NAMES.items() if tier is not StorageTier.DEVICE}
    given = node.fields(dict.fromkeys(below, read_capacity))
    if len({below[name] for name in given}) < len(given):
        raise node.error(f"a tier is given twice: {', '.join(given)}")
    return {below[name].value: blocks for name, blocks in given.items()}


def read_residency(node: YamlNode) -> Residency:
    """Read how a sink counts copies."""
    for residency in RESIDENCIES:
        if node.value == residency:
            return residency
    raise node.wrong_type(", ".join(RESIDENCIES))


def read_milliseconds(node: YamlNode) -> float:
    """Read a point in time, or a duration, in milliseconds."""
    value = number(node)
    if not 0 <= value < math.inf:
        raise node.wrong_type("a number of at least 0 (milliseconds)")
    return value


def read_output(node: YamlNode) -> int:
    """Read the number of tokens that an engine's request generates."""
    count = read_count(node)
    if not count:
        raise node.wrong_type(f"an integer from 1 to {MOST_TOKENS}")
    return count


def read_engine(node: YamlNode, **more: Callable[[YamlNode], Any]) -> dict[str, Any]:
    """Read fields of `MockEngineArgs`, each checked by itself.

    Args:
        node: a mapping of the fields.
        more: readers of further keys that are allowed.
    """
    from pytest_kvmock.engines.schedulers.args import BEYOND_HOST, check_beyond_host  # imported on first use

    if isinstance(node.value, dict):
        for name in BEYOND_HOST:
            if name in node.value:
                try:
                    check_beyond_host(name, plain(node.value[name]))
                except ValueError as error:
                    raise node.key_error(name, str(error)) from None
        node = dataclasses.replace(
            node, value={name: value for name, value in node.value.items() if name not in BEYOND_HOST}
        )
    return node.fields({**more, **_engine_readers()})


def _engine_readers() -> dict[str, Callable[[YamlNode], Any]]:
    """Return a reader for each field of `MockEngineArgs`."""
    from pytest_kvmock.engines.schedulers.args import MockEngineArgs

    def read(name: str, one: YamlNode) -> Any:
        if name in _GROUPS:
            one.fields(dict.fromkeys(_GROUPS[name], plain))  # the error for an unknown key names its place
        value = plain(one)
        given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value}
        MockEngineArgs(**given)
        return given[name]

    return {each.name: partial(read, each.name) for each in dataclasses.fields(MockEngineArgs) if each.init}


def read_extra(node: YamlNode) -> dict[str, Any]:
    """Read the extra fields of an event, by their names on the wire."""
    return node.entries(plain)


OF_A_SINK: Final[dict[str, Callable[[YamlNode], Any]]] = {
    "num_blocks": read_capacity,
    "tier_blocks": read_tier_blocks,
    "residency": read_residency,
    "prefix_closed": boolean,
    "hash": string,
    "seed": string,
}
"""Readers of the arguments of `make_sink`, which the first step of a sink may have."""

PROMPT_KEYS: Final[dict[str, Callable[[YamlNode], Any]]] = {
    "lora_name": string,
    "cache_salt": string,
    "multimodal": list_of(plain),
    "session_id": string,
}
"""Readers of the keys that a prompt carries in addition to its tokens."""


ARGUMENTS: Final[Mapping[Argument, Callable[[YamlNode], Any]]] = {
    "text": string,
    "flag": boolean,
    "integer": integer,
    "worker": read_worker,
    "worker or rank": read_worker_or_rank,
    "tokens": read_numbers,
    "from 0": read_count,
    "tokens from 1": read_output,
    "from 1": read_capacity,
    "counts": list_of(read_count),
    "ms": read_milliseconds,
    "ms or null": nullable(read_milliseconds),
}
"""Readers of the arguments of an operation."""

IN_FILES: Final[Mapping[str, type[Operation]]] = {each.kind: each for each in OPERATIONS if each.takes is not None}
"""The operations that are steps of scenario files, by the names of the steps."""


def check_keys(node: YamlNode, given: dict[str, Any]) -> None:
    """Check a prompt's keys; hashes include them, so both may not be given."""
    keys = {name: given[name] for name in PROMPT_KEYS if name in given}
    try:
        naming = PromptKeys(**keys).naming
    except ValueError as error:
        raise node.error(str(error)) from None
    if naming and "hashes" in given:
        raise node.key_error(naming[0], f"{naming[0]!r} belongs to 'tokens': hashes include it already")


def read_true(node: YamlNode) -> bool:
    """Read `true`, the only allowed value."""
    if node.value is not True:
        raise node.wrong_type("true")
    return True


def check_event(node: YamlNode, given: dict[str, Any]) -> None:
    """Check that an event has the fields of its kind, and no others."""
    check_one_of(node, "stored", "removed", "located", "updated", "cleared")
    for key in ("parent", "local_hashes", "token_ids", "span", "block_size"):
        if key in given and "stored" not in given:
            raise node.key_error(key, f"{key!r} belongs to 'stored'")
    for key in ("levels", "priorities"):
        if key in given and "updated" not in given:
            raise node.key_error(key, f"{key!r} belongs to 'updated'")
    if "extra" in given and "cleared" in given:
        raise node.key_error("extra", "'extra' does not belong to 'cleared'")
    if "stored" not in given and not PROMPT_KEYS.keys().isdisjoint(given.get("extra", ())):
        raise node.key_error("extra", f"'extra' belongs to 'stored', where it has {', '.join(PROMPT_KEYS)}")
    blocks = len(given.get("stored", ()))
    if "span" in given or "block_size" in given:
        blocks = _span(node, given)
    for key in ("local_hashes", "token_ids"):
        if len(given.get(key, range(blocks))) != blocks:
            raise node.key_error(key, f"{key!r} has one entry a block")


def _span(node: YamlNode, given: dict[str, Any]) -> int:
    """Return the number of blocks in the span of a sparse Stored."""
    for key, other in (("span", "block_size"), ("block_size", "span")):
        if other not in given:
            raise node.key_error(key, f"{key!r} and {other!r} belong together")
    if "local_hashes" in given:
        raise node.key_error("local_hashes", "'local_hashes' does not belong to 'span'")
    try:
        SparseStored(None, tuple(given["stored"]), given["span"], given["block_size"])
    except ValueError as error:
        raise node.key_error("span", str(error)) from None
    return int(given["span"] // given["block_size"])
