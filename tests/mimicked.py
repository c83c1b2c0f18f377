"""What is mimicked: the answer of the code for each backend in each deployment, and the number of recordings that show
the same behaviour in the real program.

    python tests/mimicked.py FILE...

counts the recordings of whole files, which are not in the repository; `WHOLE` has the printed counts.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pytest_kvmock import BACKENDS, BackendSpec, EngineProfile, Prompt, RouterHarness
from pytest_kvmock.engines import CacheGroup, MockEngineArgs
from pytest_kvmock.engines.sglang.speculative import SglangSpeculative
from pytest_kvmock.engines.tiers import Tiers
from pytest_kvmock.engines.vllm.speculative import Speculative
from pytest_kvmock.fleets import MockEngine

DATA = Path(__file__).parent / "data"
GROUPS = "vllm, groups="
"""vLLM's engine with custom cache groups."""


# ------------------------------------------------------------------------------------------------- what is asked


@cache
def rows() -> dict[str, BackendSpec]:
    """Return the backends by their names on the page."""
    groups = (CacheGroup("sliding_window", block_size=16, window=64), CacheGroup("full_attention", block_size=16))
    own = BACKENDS["vllm"].variant("vllm", groups=groups)
    return {
        name: spec
        for key, spec_of in BACKENDS.items()
        for name, spec in [(key, spec_of), *([(GROUPS, own)] if key == "vllm" else [])]
    }


def _served(spec: BackendSpec, *, keys: dict[str, Any] | None = None, **sizes: Any) -> None:
    """Serve a prompt of two blocks on each rank of a worker."""
    profile = EngineProfile(num_blocks=4096, workers=1, **sizes)
    with RouterHarness(profile, spec) as kv:
        for worker in kv.workers.values():
            worker.serve(Prompt(range(2 * kv.profile.block_size), **(keys or {})))


def _host(spec: BackendSpec) -> None:
    """Use a host below the device: `tiers`, or for TensorRT-LLM's managers the option that sizes a second level."""
    for option, value in (("secondary_blocks", 64), ("levels", (64,))):
        if option in spec.options:
            _served(spec.variant(spec.name, **{option: value}))
            return
    _check_option(spec, "tiers")
    _served(spec, tiers={"host": 4096})


def _draft(spec: BackendSpec) -> None:
    draft = SglangSpeculative() if spec.scheduler == "sglang" else Speculative()
    _served(spec if spec.group == "speculative" else spec.variant(spec.name, speculative=draft))


def _pairs(spec: BackendSpec) -> None:
    """Use a prefill and a decode engine: by hand with the connector of its program, or in Dynamo's replay."""
    if spec.models.startswith("dynamo-mocker"):
        for kind in ("prefill", "decode"):
            MockEngine(MockEngineArgs(engine_type=spec.scheduler, worker_type=kind), backend=spec)
        return
    role = {"workers": 1, "hand_over": "sglang" if spec.scheduler == "sglang" else "vllm"}
    profile = EngineProfile(workers=2)
    with RouterHarness(profile, spec, roles={"prefill": role, "decode": role}) as kv:
        prefill, decode = kv.workers.values()
        prompt = Prompt(range(2 * kv.profile.block_size + 1))
        decode.load(prompt, prefill.serve(prompt, hand_over=True).hand_over)


def _stores(spec: BackendSpec) -> None:
    """Use a store below the host from which several workers load."""
    known = [name for name in ("storage", "files") if name in Tiers.__dataclass_fields__]
    _check_option(spec, "tiers")
    refusals = []
    for name in known:
        try:
            return _served(spec, tiers={"host": 4096, name: True})
        except ValueError as error:
            refusals.append(error)
    raise refusals[-1]


def _check_option(spec: BackendSpec, option: str) -> None:
    """Refuse an option that a profile would ignore."""
    spec.check_options({option: {}})


DEPLOYMENTS: dict[str, Callable[[BackendSpec], None]] = {
    "alone": _served,
    "host": _host,
    "draft model": _draft,
    "pairs": _pairs,
    "shared store": _stores,
    "ranks": lambda spec: _served(spec, dp_size=2),
    "context parallelism": lambda spec: _served(spec.variant(spec.name, dcp=2)),
    "adapters": lambda spec: _served(spec, keys={"lora_name": "a"}),
    "images": lambda spec: _served(spec, keys={"multimodal": [("cat", 0, 4)]}),
}


@cache
def refusal(row: str, deployment: str) -> str:
    """Return the error of the code for a deployment; empty if it accepts it."""
    try:
        DEPLOYMENTS[deployment](rows()[row])
    except ValueError as error:
        return str(error)
    return ""


def refusals() -> Iterator[tuple[str, list[str], str]]:
    """Yield each refusal: the deployment, the refused rows, and the error for the first of them."""
    for deployment in DEPLOYMENTS:
        found: dict[str, list[str]] = {}
        for row, spec in rows().items():
            if sentence := refusal(row, deployment):
                found.setdefault(sentence.replace(repr(spec.name), "{name}"), []).append(row)
        yield from ((deployment, refused, refusal(refused[0], deployment)) for refused in found.values())


def cell(row: str, deployment: str) -> str:
    """Return the text of a cell of the page."""
    if refusal(row, deployment):
        return "refused"
    recorded, replayed = (WHOLE.get(row, {}).get(deployment + how, 0) for how in ("", BY_ROW))
    if rows()[row].as_read:
        return f"as read ({recorded:,})" if recorded else "as read"
    if recorded:
        return f"**to the event** ({recorded:,})"
    return f"to the row ({replayed:,})" if replayed else "as read"


# ---------------------------------------------------------------------------------------------- what was recorded


WHOLE: dict[str, dict[str, int]] = {
    "hash_cache": {"alone": 33},
    "lineage": {"alone": 97, "host": 80, "pairs by row": 30},
    "lru": {"alone": 47, "host": 25},
    "mocker_sglang_1_6": {"alone by row": 60, "pairs by row": 12, "ranks by row": 20},
    "multi_lru": {"alone": 47, "host": 15},
    "sglang": {"adapters": 4, "alone": 42, "draft model": 81, "host": 206, "pairs": 180, "shared store": 208},
    "sglang_deepseek_v4": {"alone": 54, "draft model": 59, "host": 70, "shared store": 45},
    "sglang_eagle": {"alone": 42, "draft model": 81, "host": 26, "shared store": 13},
    "sglang_gemma4": {"alone": 54, "draft model": 59, "host": 70, "shared store": 45},
    "sglang_gpt_oss": {"alone": 54, "draft model": 59, "host": 70, "shared store": 45},
    "sglang_kimi_linear": {"alone": 52, "host": 60, "shared store": 27},
    "sglang_llama4": {"alone": 54, "draft model": 59, "host": 70, "shared store": 45},
    "sglang_qwen3_next": {"alone": 52, "host": 60, "shared store": 27},
    "trtllm": {"adapters": 243, "alone": 106, "host": 183},
    "trtllm_v2": {"adapters": 259, "alone": 85, "host": 233},
    "vllm": {
        "adapters": 5,
        "alone": 231,
        "context parallelism": 282,
        "draft model": 162,
        "host": 840,
        "images": 3,
        "pairs": 520,
        "pairs by row": 28,
        "ranks by row": 30,
        "shared store": 430,
    },
    "vllm, groups=": {"alone": 102, "draft model": 48, "host": 95, "pairs": 134},
    "vllm_0_19": {"adapters": 2, "alone": 33, "images": 3},
    "vllm_deepseek_v4": {"alone": 24, "draft model": 30, "host": 51},
    "vllm_gemma3": {"alone": 16, "host": 12, "pairs": 134},
    "vllm_gemma4": {"alone": 24, "draft model": 21, "host": 51, "pairs": 134},
    "vllm_gpt_oss": {"alone": 27, "draft model": 51, "host": 66, "pairs": 134},
    "vllm_kimi_k3": {"alone": 16, "host": 22},
    "vllm_kimi_linear": {"host": 11},
    "vllm_llama4": {"alone": 8, "host": 24},
    "vllm_mtp": {"alone": 57, "draft model": 162, "host": 105},
    "vllm_qwen3_next": {"alone": 48, "draft model": 41, "host": 87},
}
"""Programs by backend and by deployment in the whole recordings; `tests/data` has a part of them.

"alone": no other deployment except adapters and images. " by row": replays that are compared by figures and rows, not
by events.
"""

MODELS = ("gpt_oss", "gemma3", "gemma4", "qwen3_next", "kimi_linear", "kimi_k3", "deepseek_v4", "llama4")
ONE_GROUP = ("eagle", "draft_model", "mtp_modules", "ngram", "dflash", "deepseek_v3", "one_full", "not_cached")
"""How names of geometries with one group of full attention begin; others without a model count as custom groups."""

WINDOWS = ("sglang_gpt_oss", "sglang_gemma4", "sglang_llama4", "sglang_deepseek_v4")
STATES = ("sglang_qwen3_next", "sglang_kimi_linear")
"""Models of SGLang by what their cache has besides full attention: a recording is of a kind of cache."""

PLAYED = ("programs", "scenarios", "v1", "v2", "cases")
"""The keys of the recordings in files that are not a list of recordings."""


def recordings(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the recordings of a file, each with its key."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        data = json.load(file)
    for key, found in [("", data)] if isinstance(data, list) else data.items():
        if key in ("", *PLAYED):
            yield from ((key, each) for each in found)


def _of_vllm(name: str, each: dict[str, Any]) -> tuple[list[str], set[str]]:
    config = each.get("config", {})
    config = config.get("P", config) if isinstance(config, dict) else {}
    geometry = each.get("geometry", "")
    model = next((model for model in MODELS if geometry.startswith(model)), None)
    pairs = name.startswith(("pd_", "pairs"))
    if model is not None:
        backends = [f"vllm_{model}"]
    elif geometry:
        backends = ["vllm" if geometry.startswith(ONE_GROUP) and "windows" not in geometry else GROUPS]
    elif config.get("groups"):  # for pairs: full attention and windows, as in three of the models
        backends = [GROUPS, *(["vllm_gpt_oss", "vllm_gemma3", "vllm_gemma4"] if pairs else [])]
    else:
        backends = ["vllm"]
    store = each.get("kind") == "file tier" or name.startswith(("file_tier", "mooncake_store"))
    drafts = bool(each.get("spec") or config.get("spec") or each.get("use_eagle"))
    has = {
        "pairs": pairs,
        "shared store": store,
        "host": ("cpu_chunks" in config or "cpu_blocks" in config) and not store,
        "draft model": drafts,
        "context parallelism": max(config.get("dcp") or 1, config.get("pcp") or 1) > 1,
        "adapters": '"lora"' in json.dumps(each.get("log", "")),
    }
    if drafts and backends == ["vllm"]:
        backends.append("vllm_mtp")
    return backends, {deployment for deployment, found in has.items() if found}


def _of_sglang(name: str, each: dict[str, Any]) -> tuple[list[str], set[str]]:
    drafts = name.startswith("eagle") or bool(each.get("eagle"))
    window, states = "window" in each, "mamba_slots" in each
    if window or states:  # no model here has both
        backends = [] if window and states else [*(WINDOWS if window else STATES)]
    else:
        backends = ["sglang", *(["sglang_eagle"] if drafts else [])]
    has = {
        "pairs": name.startswith(("pd_", "pairs")),
        "shared store": bool(each.get("storage")),
        "host": "host_pages" in each and not each.get("storage"),
        "draft model": drafts,
    }
    return backends, {deployment for deployment, found in has.items() if found}


def _of_trtllm(each: dict[str, Any]) -> tuple[list[str], set[str]]:
    first = "windows" in each["config"]
    config, backend = each["config"], "trtllm" if first else "trtllm_v2"
    host = any(window[2] for window in config["windows"]) if first else len(config["slots"]) > 1
    adapter = any(step[0] in ("add", "prepare_context") and step[3] is not None for step in each["log"])
    return [backend], {what for what, found in (("host", host), ("adapters", adapter)) if found}


RELEASES = {"vLLM 0.33.0": "vllm", "vLLM 0.19.1": "vllm_0_19", "SGLang 0.5.23": "sglang"}
KEYS = {"lora": "adapters", "mm": "images"}


def _of_releases(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the published streams of releases for single requests with an adapter or images."""
    for release in json.loads(gzip.decompress(path.read_bytes())):
        for case in release["cases"]:
            if release["release"] in RELEASES and not case["dialect"].endswith("-bytes"):
                yield from ((RELEASES[release["release"]], KEYS[key]) for key in KEYS if key in (case["request"] or {}))


BY_ROW = " by row"
REPLAYS = {
    "replay_1.6.1_sglang": "alone",
    "replay_1.6.1_ranks": "ranks",
    "replay_1.6.1_disaggregated": "pairs",
    "replay_disaggregated": "pairs",
}
"""Replays of Dynamo's mocks, which are compared by the rows of their requests."""
REPLAYED_BY = {"vllm": "vllm", "sglang": "mocker_sglang_1_6", None: "lineage"}


def cells(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the backends and deployments that each recording of a file counts for."""
    stem = path.name.partition(".json")[0]
    if stem == "wire_releases":
        yield from _of_releases(path)
        return
    for key, each in recordings(path):
        deployments: set[str] = set()
        if stem.startswith("vllm_0.19.1_"):
            backends = ["vllm_0_19"]
        elif stem.startswith("vllm_0.33.0_"):
            backends, deployments = _of_vllm(stem.removeprefix("vllm_0.33.0_"), each)
        elif stem.startswith("sglang_0.5.23_"):
            backends, deployments = _of_sglang(stem.removeprefix("sglang_0.5.23_"), each)
        elif stem.startswith("trtllm_"):
            backends, deployments = _of_trtllm(each)
        elif stem.startswith("hash_cache_"):
            backends = ["hash_cache"]
        elif stem.startswith(("logical_", "offload")) and key == "programs":
            backends, deployments = [each.get("backend", "lineage")], {"host"} if "offload" in each else set()
        elif stem in REPLAYS:
            yield REPLAYED_BY[each.get("scheduler")], REPLAYS[stem] + BY_ROW
            continue
        else:
            continue
        for backend in backends:
            own = {"draft model"} if backend in ("vllm_mtp", "sglang_eagle") else set()
            alone = {"alone"} if deployments <= own | {"adapters", "images"} else set()
            yield from ((backend, deployment) for deployment in sorted(deployments | alone))


TOTALS = re.compile(r"(?:\d|logical)_mooncake$|_mooncake_keys|hashes|http_answers|_load$|trtllm_replay")
"""Files with other contents than streams: totals, names, answers, loads."""


def counted(paths: Iterable[Path]) -> dict[str, dict[str, int]]:
    """Return how many recordings of some files count for each backend in each deployment."""
    streams = [path for path in paths if not TOTALS.search(path.name.partition(".json")[0])]
    found = Counter(cell for path in streams for cell in cells(path))
    numbers: dict[str, dict[str, int]] = {}
    for (row, what), number in sorted(found.items()):
        numbers.setdefault(row, {})[what] = number
    return numbers


if __name__ == "__main__":
    sys.stdout.write(json.dumps(counted(map(Path, sys.argv[1:])), indent=4) + "\n")
