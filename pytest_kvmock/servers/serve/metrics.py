"""The metrics page of an engine, in Prometheus text format, with the metric names of its release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pytest_kvmock.servers.serve.api import Histogram, Model, RankState

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LOAD_SECTIONS: Final = frozenset({"core", "memory", "spec", "lora", "disagg", "queues", "all"})
"""The sections that SGLang's `/v1/loads` accepts; without drafts and adapters two of them are empty."""


def metrics_text(model: Model, states: Sequence[RankState], adapters: Sequence[str] = ()) -> str:
    """Return the page; `adapters` are the loaded adapters.

    Sources of the names: `docs/usage/metrics` and `v1/metrics/loggers.py` of vLLM, without names that a release no
    longer shows; `metrics_collector.py` of SGLang.
    """
    page = _Page()
    if model.release.is_sglang:
        _sglang(page, model, states)
    else:
        _vllm(page, model, states, adapters)
    return "".join(page.lines)


class _Page:
    """Lines of a page, with a heading for each name."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, kind: str, name: str, rows: Sequence[tuple[str, float]], text: str) -> None:
        """Add one metric; each row has labels and a value."""
        family = name.removesuffix("_total") if kind == "counter" and name.endswith("_total") else name
        self.lines.append(f"# HELP {family if kind != 'counter' else name} {text}\n# TYPE {name} {kind}\n")
        self.lines += [f"{name}{{{labels}}} {float(value)}\n" for labels, value in rows]

    def histogram(self, name: str, rows: Sequence[tuple[str, Histogram]], text: str) -> None:
        """Add a histogram."""
        self.lines.append(f"# HELP {name} {text}\n# TYPE {name} histogram\n")
        for labels, each in rows:
            upto = 0
            for bound, count in zip(each.bounds, each.counts, strict=True):
                upto += count
                self.lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {float(upto)}\n')
            self.lines.append(f'{name}_bucket{{{labels},le="+Inf"}} {float(each.count)}\n')
            self.lines.append(f"{name}_sum{{{labels}}} {each.total}\n{name}_count{{{labels}}} {float(each.count)}\n")


def _vllm(page: _Page, model: Model, states: Sequence[RankState], adapters: Sequence[str]) -> None:
    engines = range(model.first_rank, model.first_rank + len(states))  # numbered in the deployment
    labels = [f'engine="{rank}",model_name="{_escaped(model.name)}"' for rank in engines]

    def add(kind: str, names: Sequence[str], values: Sequence[float], text: str) -> None:
        for name in names:
            page.add(kind, f"vllm:{name}", list(zip(labels, values, strict=True)), text)

    old = model.release.gpu_metrics
    add("gauge", ["num_requests_running"], [each.running for each in states], "Requests in execution batches.")
    add("gauge", ["num_requests_waiting"], [each.waiting for each in states], "Requests that wait.")
    usage = ["kv_cache_usage_perc", *(["gpu_cache_usage_perc"] if old else [])]
    add("gauge", usage, [each.usage for each in states], "Share of the KV cache in use, from 0 to 1.")
    for name, values, text in (
        ("prefix_cache_queries", [each.queried for each in states], "Tokens looked up in the prefix cache."),
        ("prefix_cache_hits", [each.hits for each in states], "Tokens found in the prefix cache."),
    ):
        add("counter", [f"{name}_total", *([f"gpu_{name}_total"] if old else [])], values, text)
    add("counter", ["num_preemptions_total"], [each.preemptions for each in states], "Preemptions.")
    add("counter", ["prompt_tokens_total"], [each.prompt_tokens for each in states], "Tokens of prompts.")
    add("counter", ["generation_tokens_total"], [each.generation_tokens for each in states], "Tokens generated.")
    ended = [
        (f'{label},finished_reason="{reason}"', count)
        for label, each in zip(labels, states, strict=True)
        for reason, count in each.finished.items()
    ]
    page.add("counter", "vllm:request_success_total", ended, "Requests that ended.")
    page.histogram(
        "vllm:time_to_first_token_seconds",
        [(label, each.ttft) for label, each in zip(labels, states, strict=True)],
        "Time to the first token.",
    )
    page.histogram(
        f"vllm:{model.release.itl_metric}",
        [(label, each.itl) for label, each in zip(labels, states, strict=True)],
        "Time between two tokens.",
    )
    page.histogram(
        "vllm:e2e_request_latency_seconds",
        [(label, each.e2e) for label, each in zip(labels, states, strict=True)],
        "Time to the last token.",
    )
    size = f'block_size="{model.block_size}"'
    if model.page_size is not None:  # vLLM shows the page size and the block size of events
        size = f'block_size="{model.page_size}",effective_attention_block_size="{model.block_size}"'
    asleep = [
        (f'{label},sleep_state="{name}"', float((0 if each.sleeps is None else each.sleeps) == level))
        for label, each in zip(labels, states, strict=True)
        for level, name in enumerate(("awake", "weights_offloaded", "discard_all"))
    ]
    page.add("gauge", "vllm:engine_sleep_state", asleep, "Whether the engine is in a state of sleep.")
    blocks = zip(engines, states, strict=True)
    info = [(f'{size},engine="{rank}",num_gpu_blocks="{each.num_blocks}"', 1) for rank, each in blocks]
    page.add("gauge", "vllm:cache_config_info", info, "The configuration of the cache.")
    if adapters:
        names = ",".join(map(_escaped, adapters))
        lora = [(f'max_lora="{len(adapters)}",running_lora_adapters="{names}",waiting_lora_adapters=""', 1)]
        page.add("gauge", "vllm:lora_requests_info", lora, "Running and waiting adapters.")


def _sglang(page: _Page, model: Model, states: Sequence[RankState]) -> None:
    labels = [f'model_name="{_escaped(model.name)}",dp_rank="{rank}"' for rank in range(len(states))]

    def add(kind: str, name: str, values: Sequence[float], text: str) -> None:
        page.add(kind, f"sglang:{name}", list(zip(labels, values, strict=True)), text)

    add("gauge", "num_running_reqs", [each.running for each in states], "Requests that run.")
    add("gauge", "num_queue_reqs", [each.waiting for each in states], "Requests in the queue.")
    add("gauge", "token_usage", [each.usage for each in states], "Share of the tokens in use.")
    sizes = [each.num_blocks * model.block_size for each in states]
    used = [round(each.usage * size) for each, size in zip(states, sizes, strict=True)]
    add("gauge", "num_used_tokens", used, "Tokens in use.")
    add("gauge", "max_total_num_tokens", sizes, "Tokens that fit.")
    rates = [each.hits / each.queried if each.queried else 0.0 for each in states]
    add("gauge", "cache_hit_rate", rates, "Share of the tokens looked up that were cached.")
    add("gauge", "gen_throughput", [0.0 for _ in states], "Tokens a second; time is virtual here, so 0.")
    add("counter", "cached_tokens_total", [each.hits for each in states], "Tokens of prompts that were cached.")
    add("counter", "prompt_tokens_total", [each.prompt_tokens for each in states], "Tokens of prompts.")
    add("counter", "generation_tokens_total", [each.generation_tokens for each in states], "Tokens generated.")
    config = [
        (f'page_size="{model.block_size}",num_pages="{each.num_blocks}",dp_rank="{rank}"', 1)
        for rank, each in enumerate(states)
    ]
    page.add("gauge", "sglang:cache_config_info", config, "The configuration of the cache.")
    for name, rows in (
        ("time_to_first_token_seconds", [each.ttft for each in states]),
        ("inter_token_latency_seconds", [each.itl for each in states]),
        ("e2e_request_latency_seconds", [each.e2e for each in states]),
    ):
        page.histogram(f"sglang:{name}", list(zip(labels, rows, strict=True)), "Time, in seconds.")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def loads_of(model: Model, states: Sequence[RankState], sections: set[str]) -> list[dict[str, Any]]:
    """Return the rows of SGLang's `/v1/loads`, one per rank. The throughput is 0, because time is virtual."""
    rows: list[dict[str, Any]] = []
    for rank, each in enumerate(states):
        size = each.num_blocks * model.block_size
        used = round(each.usage * size)
        row: dict[str, Any] = {
            "dp_rank": rank,
            "num_running_reqs": each.running,
            "num_waiting_reqs": each.waiting,
            "num_total_reqs": each.running + each.waiting,
            "num_used_tokens": used,
            "max_total_num_tokens": size,
            "token_usage": round(each.usage, 4),
            "gen_throughput": 0.0,
            "cache_hit_rate": round(each.hits / each.queried, 4) if each.queried else 0.0,
        }
        if sections & {"memory", "all"}:
            row["memory"] = {"weight_gb": 0.0, "kv_cache_gb": 0.0, "graph_gb": 0.0, "token_capacity": size}
        if sections & {"disagg", "all"}:
            row["disaggregation"] = {"mode": "null"}
        if sections & {"queues", "all"}:
            row["queues"] = {"waiting": each.waiting, "grammar": 0, "paused": 0, "retracted": 0}
        rows.append(row)
    return rows


def loads_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the answer to SGLang's `/v1/loads?format=prometheus`."""
    samples: dict[str, list[str]] = {}
    for row in rows:
        for key, value in row.items():
            inner = value.items() if isinstance(value, dict) else ((None, value),)
            for name, number in inner:
                if key != "dp_rank" and not isinstance(number, str):
                    prefix = {"disaggregation": "disagg"}.get(key, key)
                    full = f"sglang_{prefix}" if name is None else f"sglang_{prefix}_{name}"
                    samples.setdefault(full, []).append(f'{full}{{dp_rank="{row["dp_rank"]}"}} {number}\n')
    return "".join(f"# TYPE {name} gauge\n{''.join(lines)}" for name, lines in samples.items())
