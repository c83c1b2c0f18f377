"""The HTTP face of an engine as plain values: what came in, what goes out, and what the engine shows of itself.

No socket is opened here: a face turns a `Call` into an `Answer`, or into a `Generate` that the server gives to an
engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from pytest_kvmock.engines.base.pair_options import PAIRED

Api: TypeAlias = Literal["completions", "chat", "generate"]
JSON: Final = "application/json"
SSE: Final = "text/event-stream; charset=utf-8"
PLAIN: Final = "text/plain; charset=utf-8"

MOST_DEPTH: Final = 500
"""How deep JSON may be nested: what is done with it takes a step of Python's stack each."""
MOST_CONTAINERS: Final = 2**18
"""Lists and objects of one body, at most."""
MOST_TOKENS: Final = 2**22
"""Tokens of a prompt or a text that the control API takes or makes, at most."""

to_json = msgspec.json.encode


def from_json(body: bytes) -> Any:
    """Return what JSON says; half a pair of UTF-16, which is no text, is a "?".

    Raises:
        ValueError: it is none, nested deeper than `MOST_DEPTH`, or may have more than `MOST_CONTAINERS` lists and
            objects.
    """
    containers = body.count(b"[") + body.count(b"{")
    if containers > MOST_CONTAINERS:
        raise ValueError(f"it has more than {MOST_CONTAINERS} lists and objects")
    try:
        found = json.loads(body)
        is_deep = containers > MOST_DEPTH and _depth_is_above(MOST_DEPTH, found)
    except RecursionError:
        is_deep = True
    if is_deep:
        raise ValueError(f"it is nested deeper than {MOST_DEPTH}")
    if rb"\ud" in body.lower():
        found = json.loads(json.dumps(found, ensure_ascii=False).encode("utf-8", "replace"))
    return found


def _depth_is_above(most: int, value: object) -> bool:
    level = [value]
    for _ in range(most):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


@dataclass(frozen=True, slots=True)
class FaceRelease:
    """What the HTTP face of one release of an engine has.

    Attributes:
        engine: "vllm", "sglang" or "trtllm".
        version: as `/version` says it.
        nested_errors: whether an error stands under the key "error"; else its fields are the body (SGLang, vLLM before
            0.10.1).
        gpu_metrics: whether the metrics that begin with `gpu_` are there (deprecated in vLLM 0.9.2, hidden from 0.11
            on).
        itl_metric: what the histogram of the time between two tokens is called.
        event_sources: whether `/kv_event_sources` is there (vLLM 0.33).
        sources: where this was read: "recorded" or "read".
        sends: of TensorRT-LLM: its events are sent over ZMQ, and what is polled is empty.
    """

    engine: Literal["vllm", "sglang", "trtllm"]
    version: str
    nested_errors: bool = True
    gpu_metrics: bool = False
    itl_metric: str = "inter_token_latency_seconds"
    event_sources: bool = False
    sources: str = "read"
    sends: bool = False

    @property
    def is_sglang(self) -> bool:
        """Whether it is a face of SGLang, else of vLLM."""
        return self.engine in _SGLANG

    @property
    def has_http_forms(self) -> bool:
        """Whether ranks of it may have ports of their own, or those of nodes; else all of a worker share one."""
        return self.engine in _VLLM

    @property
    def is_trtllm(self) -> bool:
        """Whether it is a face of TensorRT-LLM."""
        return self.engine == "trtllm"

    @property
    def is_polled(self) -> bool:
        """Whether its events are asked for by HTTP, and not sent (TensorRT-LLM)."""
        return self.is_trtllm and not self.sends


_VLLM: Final = ("vllm", "vllm_0_19")
_SGLANG: Final = ("sglang",)


def release_of(models: str, backend: str, *, sends: bool = False) -> FaceRelease | None:
    """Return the face of the engine that writes a dialect; None: it has none here.

    Args:
        models: program and version, as `Dialect.models` has it: "vLLM 0.33.0".
        backend: the backend of the dialect.
        sends: whether the dialect is spoken over ZMQ.
    """
    words = models.replace(",", " ").split()
    version = next((word for word in words if word[0].isdigit()), "")
    if backend in _SGLANG:
        return FaceRelease("sglang", version, nested_errors=False)
    if backend in ("trtllm", "trtllm_v2"):
        return FaceRelease("trtllm", version, nested_errors=False, sends=sends)
    if backend not in _VLLM:
        return None
    number = tuple(int(part) for part in version.split(".")[:2])
    return FaceRelease(
        "vllm",
        version,
        nested_errors=number >= (0, 10),
        gpu_metrics=number < (0, 11),
        itl_metric="time_per_output_token_seconds" if number < (0, 11) else "inter_token_latency_seconds",
        event_sources=number >= (0, 33),
        sources="recorded" if number == (0, 29) else "read",
    )


@dataclass(frozen=True, slots=True)
class Model:
    """What an engine serves.

    Attributes:
        name: of the model.
        release: whose face it has.
        block_size: tokens a block.
        max_model_len: the most tokens that prompt and output have together.
        adapters: names of LoRA adapters, which are models to a client.
        ranks: data-parallel ranks behind the port.
        created: when it was made, as seconds of an epoch; said by `/v1/models`.
        api_key: what clients must show; None: nothing.
        page_size: tokens a page, where a block has several (context parallelism); None: a block is a page.
        role: what it is for in P/D pairs: "prefill", "decode" or "both"; None: it is in none.
        hand_over: how such engines hand over, one of `HAND_OVERS`; None: it is in none.
        first_rank: the number of the first of its ranks in the whole deployment.
    """

    name: str
    release: FaceRelease
    block_size: int
    max_model_len: int
    adapters: tuple[str, ...] = ()
    ranks: int = 1
    created: int = 0
    api_key: str | None = field(default=None, repr=False)
    page_size: int | None = None
    role: str | None = None
    hand_over: str | None = None
    first_rank: int = 0

    @property
    def hands_over(self) -> bool:
        """Whether its answers have `kv_transfer_params`: vLLM's with a connector."""
        return self.hand_over in PAIRED


class Call(NamedTuple):
    """A request as it came in; the names of its headers are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str] = {}
    body: bytes = b""
    query: Mapping[str, str] = {}


class Answer(NamedTuple):
    """An answer that is ready."""

    status: int
    body: bytes = b""
    content_type: str = JSON


@dataclass(slots=True, eq=False)
class Generate:
    """A request that an engine is to serve.

    Attributes:
        api: by which it came.
        id: its name in the answer.
        model: the name that it asked for, and that the answer repeats; None: none.
        prompts: the tokens of each prompt; a list of prompts has several.
        max_tokens: tokens of output, of each choice.
        n: choices of each prompt.
        is_list: whether prompts came as a list, so that SGLang's `/generate` answers one.
        stream: whether the answer comes in parts.
        include_usage: whether a last part says what was used.
        lora_name: the adapter; None: none.
        cache_salt: the tenant's salt; None: none.
        report_mode: vLLM's `kv_cache_report_mode`, "full" or None.
        rank: the rank that is asked for; None: any.
        priority: its priority.
        echo: whether a completion begins with its prompt.
        continuous_usage: whether each part of the answer says what was used so far.
        return_token_ids: whether the answer has the tokens next to the text (vLLM).
        hand_overs: at an engine of a P/D pair, of each prompt what its leg came with, or None.
    """

    api: Api
    id: str
    model: str | None
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    n: int = 1
    is_list: bool = False
    stream: bool = False
    include_usage: bool = False
    lora_name: str | None = None
    cache_salt: str | None = None
    report_mode: str | None = None
    rank: int | None = None
    priority: int = 0
    echo: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    hand_overs: tuple[Mapping[str, Any] | None, ...] = ()


@dataclass(slots=True)
class Usage:
    """What an answer used, in tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return it as the API of OpenAI has it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


# The bounds are vLLM's (v1/metrics/loggers.py).
_TTFT: Final[tuple[float, ...]] = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
_ITL: Final[tuple[float, ...]] = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_E2E: Final[tuple[float, ...]] = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)


@dataclass(slots=True)
class RankState:
    """What one rank of an engine shows of itself; times in seconds of its own clock.

    Attributes:
        running: requests that run.
        waiting: requests that wait.
        usage: share of its blocks that are in use.
        num_blocks: its blocks.
        preemptions: how often a request was preempted.
        queried: tokens of prompts that were looked up in the prefix cache.
        hits: of these, those that were cached.
        prompt_tokens: tokens of prompts that were served.
        generation_tokens: tokens that were generated.
        finished: how many requests ended, by reason.
        ttft: times to the first token.
        itl: times between two tokens.
        e2e: times to the last token.
        sleeps: how deep it sleeps; None: it is awake.
    """

    running: int = 0
    waiting: int = 0
    usage: float = 0.0
    num_blocks: int = 0
    preemptions: int = 0
    queried: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})
    ttft: Histogram = field(default_factory=lambda: Histogram(_TTFT))
    itl: Histogram = field(default_factory=lambda: Histogram(_ITL))
    e2e: Histogram = field(default_factory=lambda: Histogram(_E2E))
    sleeps: int | None = None


class Histogram:
    """Counts values by the buckets of vLLM.

    Args:
        bounds: the upper bounds, which rise.
    """

    __slots__ = ("bounds", "count", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * len(bounds)
        self.count = 0
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.count += times
        self.total += value * times
        for position, bound in enumerate(self.bounds):
            if value <= bound:
                self.counts[position] += times
                break


class EngineView(Protocol):
    """What a face asks of its engine."""

    @property
    def error(self) -> str | None:
        """Why it is broken; None: it is not."""

    @property
    def is_draining(self) -> bool:
        """Whether it serves what it has, and takes nothing new."""

    @property
    def bootstrap_port(self) -> int | None:
        """Of a prefill engine of a P/D pair, where its bootstrap server listens; None: it has none."""

    @property
    def pauses(self) -> Any:
        """Its `ServedPauses`."""

    def states(self) -> list[RankState]:
        """Return the state of each rank."""

    def number_adapter(self, name: str) -> None:
        """Give an adapter that is loaded its next number, in all ranks."""

    def take_events(self) -> list[dict[str, Any]]:
        """Return the events that wait to be polled, and forget them."""

    def hash_algo(self) -> str:
        """Return what names the blocks of TensorRT-LLM's events."""

    def event_sources(self) -> list[dict[str, Any]]:
        """Return of each rank where its events are published: endpoint, replay_endpoint, topic, buffer_steps,
        host, port, replay_port, load_port.
        """
