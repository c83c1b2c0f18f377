"""The JSON forms of an engine's arguments: flat before Dynamo 1.6, nested since.

One subject: the keys of the fields of `MockEngineArgs`, and what 1.6.1 refuses (`_normalize_mocker_config`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from os import fspath
from types import MappingProxyType
from typing import Any, Final

from pytest_kvmock.engines.schedulers.nested_args import SglangArgs
from pytest_kvmock.values.checks import check_integer, unknown_text

_ENGINE: Final = (
    "num_gpu_blocks",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "prefill_schedule_interval",
    "prefill_decode_interval",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "speedup_ratio",
    "decode_speedup_ratio",
    "worker_type",
    "preemption_mode",
    "kv_transfer_bandwidth",
    "kv_transfer_timing_mode",
    "aic_nextn",
    "aic_nextn_accept_rates",
    "aic_mtp_seed",
)
_TOP: Final = ("dp_size", "startup_time")
_DYNAMO: Final = (
    "enable_local_indexer",
    "bootstrap_port",
    "reasoning",
    "zmq_kv_events_port",
    "zmq_replay_port",
    "router_queue_policy",
)
_BYTES: Final = ("kv_transfer_bytes_per_token", "kv_bytes_per_token")  # the second is the older name of the first
_OPTIONS: Final = "sglang"
_SGLANG: Final = (
    "schedule_policy",
    "max_prefill_tokens",
    "chunked_prefill_size",
    "clip_max_new_tokens",
    "schedule_conservativeness",
)

INERT: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "tensor_parallel_size": 1,
        "num_gpu_blocks_is_explicit": False,
        "gpu_memory_utilization": None,
        "mem_fraction_static": None,
        "free_gpu_memory_fraction": None,
        "cuda_graph_reserved_bytes": None,
        "engine.emit_kv_events": False,
        "engine.emit_kv_token_ids": False,
        "engine.trtllm": {"capacity_scheduler_policy": "guaranteed_no_evict"},
        "dynamo.handoff_session_timeout_ms": 300_000,
        "dynamo.response_replay_trace_path": None,
    }
)
"""Arguments of this form that have no effect on a mock engine, by path, with their defaults."""

_LEAST_BLOCK: Final[Mapping[str, int]] = MappingProxyType({"vllm": 2, "sglang": 1, "trtllm": 2})
"""The modelled engines, each with the minimum number of tokens of a block."""

_ALWAYS_CHUNKS: Final = ("sglang",)

_NOT_MODELLED: Final = (
    "kv_cache_bytes_per_token",
    "kv_cache_groups",
    "kv_cache_capacity_bytes",
    "native_host_offload",
    "g3_offload",
    "state_cache",
    "prefix_match_unit",
)

_DROPPED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "engine_type": "it is backend now",
        "page_size": "it is block_size now",
        "is_prefill": "it is worker_type now",
        "is_decode": "it is worker_type now",
        "planner_profile_data": "it is a timing_model of provider dynamo_profile now",
        "num_g2_blocks": "host memory is native_host_offload now, which is not modelled",
    }
)
"""Arguments of the flat form that 1.6.1 refuses."""


def is_launch_config(values: Mapping[str, Any]) -> bool:
    """Return whether arguments have the nested form: only this has `engine` or `dynamo`."""
    return "engine" in values or "dynamo" in values


def read_launch_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `MockEngineArgs` that nested arguments set.

    Raises:
        ValueError: a key is unknown, 1.6.1 refuses its value, or it requests something that no mock engine has.
    """
    engine = _group(values, "engine", (*_ENGINE, *_BYTES, "backend", "sglang", "timing_model", *_NOT_MODELLED))
    dynamo = _group(values, "dynamo", _DYNAMO)
    _check_known("the engine's arguments", values, ("engine", "dynamo", *_TOP, *_inert("")))
    kind = engine.get("backend", "vllm")
    if kind not in _LEAST_BLOCK:
        raise ValueError(f"engine.backend must be {' or '.join(map(repr, _LEAST_BLOCK))}, got {kind!r:.80}")
    for name in _NOT_MODELLED:
        if engine.get(name) is not None:
            raise ValueError(f"engine.{name}={engine[name]!r:.80}: it is not modelled; leave it out")
    if engine.get("block_size", 0) is None:  # its default
        engine = {name: value for name, value in engine.items() if name != "block_size"}
    fields = {name: engine[name] for name in _ENGINE if name in engine}
    fields |= {name: values[name] for name in _TOP if name in values}
    fields |= {name: dynamo[name] for name in _DYNAMO if name in dynamo}
    fields["engine_type"] = kind
    given = [name for name in _BYTES if name in engine]
    if len(given) == 2:
        raise ValueError(f"engine: {given[0]} and {given[1]} are one argument; set one of them")
    if given:
        fields["kv_bytes_per_token"] = engine[given[0]]
    if _OPTIONS in engine:
        sglang = _group(engine, _OPTIONS, _SGLANG, "engine.")
        nulls = [name for name, value in sglang.items() if value is None]
        if nulls:
            raise ValueError(f"engine.sglang.{nulls[0]} must be set or left out in 1.6.1, got None")
        if sglang.get("schedule_policy", "fifo") not in ("fifo", "lpm"):
            raise ValueError(
                f"engine.sglang.schedule_policy must be 'fifo' or 'lpm' in 1.6.1, got {sglang['schedule_policy']!r:.80}"
            )
        defaults = asdict(SglangArgs().filled(1))
        fields["sglang"] = {name: value for name, value in sglang.items() if value != defaults[name]} or None
    fields |= _timing(engine.get("timing_model", {"type": "polynomial"}))
    inert = {path: _at(values, path) for path in INERT if _has(values, path)}
    fields["inert"] = {path: value for path, value in inert.items() if value != INERT[path]} or None
    _check_values(kind, engine, inert)
    return fields


def _check_values(kind: str, engine: Mapping[str, Any], inert: Mapping[str, Any]) -> None:
    """Raise a ValueError for values that 1.6.1 refuses and earlier releases accept."""
    least = _LEAST_BLOCK[kind]
    check_integer("engine.block_size", engine.get("block_size", least), least, f" (tokens) for {kind} in 1.6.1")
    size, chunk = engine.get("block_size", least), SglangArgs().filled(1).chunked_prefill_size or 0
    if (
        kind in _ALWAYS_CHUNKS
        and chunk % size
        and (engine.get(_OPTIONS) or {}).get("chunked_prefill_size", chunk) == chunk
    ):
        raise ValueError(
            f"engine.sglang.chunked_prefill_size must be a multiple of the block size, {size}, got {chunk}, its default"
        )
    if kind in _ALWAYS_CHUNKS and engine.get("enable_chunked_prefill") is False:
        raise ValueError(f"engine.enable_chunked_prefill must be True for {kind} in 1.6.1, got False")
    for name in _BYTES:
        if name in engine and engine[name] == 0:
            raise ValueError(f"engine.{name} must be at least 1, or None, in 1.6.1, got 0")
    if inert.get("engine.emit_kv_token_ids") and not inert.get("engine.emit_kv_events"):
        raise ValueError("engine.emit_kv_token_ids is True without engine.emit_kv_events")
    policy = inert.get("engine.trtllm", {})
    if policy not in ({}, INERT["engine.trtllm"]):
        raise ValueError(
            "engine.trtllm has a capacity_scheduler_policy, which must be 'guaranteed_no_evict' in 1.6.1, got "
            f"{policy!r:.80}"
        )


def _timing(model: object) -> dict[str, Any]:
    """Return the fields that a timing model sets."""
    if isinstance(model, Mapping):
        if model == {"type": "polynomial"}:
            return {}
        if model.get("type") == "fixed" and set(model) == {"type", "prefill_ms", "decode_ms"}:
            return {"performance_model": (model["prefill_ms"], model["decode_ms"])}
        config = model.get("config")
        is_profile = model.get("type") == "external" and model.get("provider") == "dynamo_profile"
        if is_profile and isinstance(config, Mapping) and set(config) == {"path"}:
            return {"planner_profile_data": config["path"]}
    raise ValueError(
        "engine.timing_model must be {'type': 'polynomial'}, {'type': 'fixed', 'prefill_ms': ..., 'decode_ms': ...}, "
        "or "
        "{'type': 'external', 'provider': 'dynamo_profile', 'config': {'path': ...}}; other providers are not "
        "modelled; "
        f"got {model!r:.120}"
    )


def write_launch_config(args: Any) -> dict[str, Any]:
    """Return `MockEngineArgs` in the nested form, every key with its value, as filled by `_normalize_mocker_config`.

    The form has no place for a performance model of the user's own: `timing_model` is then left out.
    """
    options = asdict(args.sglang_options)
    engine = {"backend": args.engine_type} | {name: getattr(args, name) for name in _ENGINE}
    engine[_BYTES[0]] = args.kv_bytes_per_token
    engine["sglang"] = {name: "fifo" if options[name] == "fcfs" else options[name] for name in _SGLANG}
    model, path = args.performance_model, args.planner_profile_data
    if path is not None:
        engine["timing_model"] = {"type": "external", "provider": "dynamo_profile", "config": {"path": fspath(path)}}
    elif model is None:
        engine["timing_model"] = {"type": "polynomial"}
    elif isinstance(model, tuple) and all(isinstance(ms, int | float) for ms in model):
        engine["timing_model"] = {"type": "fixed", "prefill_ms": model[0], "decode_ms": model[1]}
    dynamo = {name: getattr(args, name) for name in _DYNAMO}
    if args.reasoning is not None:
        dynamo["reasoning"] = asdict(args.reasoning)
    out: dict[str, Any] = {"engine": engine, **{name: getattr(args, name) for name in _TOP}, "dynamo": dynamo}
    policy = {} if args.release.pauses is None else {"engine.trtllm": {"capacity_scheduler_policy": args.semantics}}
    for key, value in {**INERT, **(args.inert or {}), **policy}.items():
        group, _, name = key.rpartition(".")
        (out[group] if group else out)[name] = value
    return out


def _inert(group: str) -> list[str]:
    """Return the names of the inert arguments of a group."""
    parts = [path.rpartition(".") for path in INERT]
    return [name for of, _, name in parts if of == group]


def _group(values: Mapping[str, Any], name: str, known: tuple[str, ...], within: str = "") -> Mapping[str, Any]:
    group = values.get(name, {})
    if not isinstance(group, Mapping):
        raise ValueError(f"{within}{name} must be a mapping, got {group!r:.80}")  # noqa: TRY004 - one error
    _check_known(f"{within}{name}", group, (*known, *_inert(f"{within}{name}")))
    return group


def _check_known(what: str, values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in values:
        if name in _DROPPED:
            raise ValueError(f"{what}: {name} is not an argument of 1.6.1: {_DROPPED[name]}")
        if name not in known:
            raise ValueError(unknown_text(f"field of {what}", name, known))


def _has(values: Mapping[str, Any], path: str) -> bool:
    group, _, name = path.rpartition(".")
    return name in (values.get(group, {}) if group else values)


def _at(values: Mapping[str, Any], path: str) -> Any:
    group, _, name = path.rpartition(".")
    return (values[group] if group else values)[name]


# ---------------------------------------------------------------------------------------------------------- the flat
# form

JSON_ONLY: Final = ("is_prefill", "is_decode", "has_perf_model")
"""Keys that Dynamo's JSON may have in addition to the fields: two older forms of `worker_type`, and one without an
effect."""


def without_json_only(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON values without the keys that are not fields; `is_prefill` or `is_decode` becomes `worker_type`.

    Raises:
        ValueError: such a key has a wrong type, or `is_prefill` and `is_decode` are both true.
    """
    arguments = dict(values)
    for name in JSON_ONLY:
        if not isinstance(arguments.get(name, False), bool):
            raise ValueError(f"{name} must be True or False, got {arguments[name]!r:.80}")  # noqa: TRY004 - one error
    older = [kind for kind in ("prefill", "decode") if arguments.pop(f"is_{kind}", False)]
    arguments.pop("has_perf_model", None)
    if older and "worker_type" not in arguments:
        if len(older) == 2:
            raise ValueError("is_prefill and is_decode cannot both be true")
        arguments["worker_type"] = older[0]
    return arguments


def load_json(text: str | bytes) -> object:
    """Read JSON text.

    Raises:
        ValueError: it is invalid, or has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_repetition)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the arguments of an engine must be JSON: {error}") from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is there twice")
        found[key] = value
    return found
