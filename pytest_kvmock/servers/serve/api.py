"""The HTTP face of an engine as plain values: requests, answers, and the visible state of the engine.

This module opens no socket: a face turns a `Call` into an `Answer`, or into a `Generate` that the server gives to an
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
"""Maximum nesting of JSON: each level needs a frame of Python's stack."""
MOST_CONTAINERS: Final = 2**18
"""Maximum number of lists and objects in a body."""
MOST_TOKENS: Final = 2**22
"""Maximum number of tokens of a prompt or a text of the control API."""

to_json = msgspec.json.encode


def from_json(body: bytes) -> Any:
    """Return the value of a JSON body. A lone surrogate of UTF-16, which is no text, becomes "?".

    Raises:
        ValueError: not JSON, nested deeper than `MOST_DEPTH`, or possibly more than `MOST_CONTAINERS` lists and
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
    """The properties of the HTTP face of one release of an engine.

    Attributes:
        engine: "vllm", "sglang" or "trtllm".
        version: the version that `/version` returns.
        nested_errors: whether an error is under the key "error"; False: its fields are the body (SGLang, vLLM before
            0.10.1).
        gpu_metrics: whether it has the metrics that begin with `gpu_` (deprecated in vLLM 0.9.2, hidden from 0.11).
        itl_metric: the name of the histogram of times between two tokens.
        event_sources: whether it has `/kv_event_sources` (vLLM 0.33).
        sources: the source of this data: "recorded" from an engine, or "read" from code.
        sends: for TensorRT-LLM, whether events are sent over ZMQ; then polls are answered empty.
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
        """Whether it is a face of SGLang."""
        return self.engine in _SGLANG

    @property
    def has_http_forms(self) -> bool:
        """Whether its ranks, or its nodes, may have separate ports; False: all ranks of a worker share one."""
        return self.engine in _VLLM

    @property
    def is_trtllm(self) -> bool:
        """Whether it is a face of TensorRT-LLM."""
        return self.engine == "trtllm"

    @property
    def is_polled(self) -> bool:
        """Whether its events are polled over HTTP, not sent (TensorRT-LLM)."""
        return self.is_trtllm and not self.sends


_VLLM: Final = ("vllm", "vllm_0_19")
_SGLANG: Final = ("sglang",)


def release_of(models: str, backend: str, *, sends: bool = False) -> FaceRelease | None:
    """Return the face of the engine of a dialect; None if it is not mocked.

    Args:
        models: program and version, as in `Dialect.models`: "vLLM 0.33.0".
        backend: the backend of the dialect.
        sends: whether the dialect is sent over ZMQ.
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
    """The model that a port of an engine serves.

    Attributes:
        name: the name of the model.
        release: the release of the face.
        block_size: tokens per block.
        max_model_len: maximum number of tokens of prompt and output together.
        adapters: names of LoRA adapters, which clients use as models.
        ranks: number of data-parallel ranks behind the port.
        created: the time of creation that `/v1/models` returns, in seconds of an epoch.
        api_key: the key that clients must send; None: no key.
        page_size: tokens per page, if a block has several pages (context parallelism); None: a block is a page.
        role: its role in P/D pairs: "prefill", "decode" or "both"; None: it is in no pair.
        hand_over: how the engines of the pair hand over, one of `HAND_OVERS`; None: it is in no pair.
        first_rank: the number of its first rank in the deployment.
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
        """Whether its answers have `kv_transfer_params`, as those of vLLM with a connector."""
        return self.hand_over in PAIRED


class Call(NamedTuple):
    """An incoming HTTP request; the names of its headers are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str] = {}
    body: bytes = b""
    query: Mapping[str, str] = {}


class Answer(NamedTuple):
    """A complete answer."""

    status: int
    body: bytes = b""
    content_type: str = JSON


@dataclass(slots=True, eq=False)
class Generate:
    """A request for an engine.

    Attributes:
        api: the API of the request.
        id: its id in the answer.
        model: the requested model name, which the answer repeats; None: no name.
        prompts: the tokens of each prompt; a list of prompts has several.
        max_tokens: tokens of output for each choice.
        n: number of choices for each prompt.
        is_list: whether prompts came as a list, so that SGLang's `/generate` answers with a list.
        stream: whether the answer comes in parts.
        include_usage: whether a last part has the usage.
        lora_name: the adapter, or None.
        cache_salt: the tenant's salt, or None.
        report_mode: vLLM's `kv_cache_report_mode`, "full" or None.
        rank: the requested rank; None: any.
        priority: its priority.
        echo: whether a completion begins with its prompt.
        continuous_usage: whether each part of the answer has the usage so far.
        return_token_ids: whether the answer has the tokens next to the text (vLLM).
        hand_overs: at an engine of a P/D pair, the hand-over parameters of each prompt's leg, or None.
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
    """The usage of an answer, in tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the usage in the form of OpenAI's API."""
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
    """The visible state of one rank of an engine; times are in seconds of the engine's clock.

    Attributes:
        running: number of running requests.
        waiting: number of waiting requests.
        usage: share of its blocks that are in use.
        num_blocks: number of its blocks.
        preemptions: number of preemptions.
        queried: number of prompt tokens that were looked up in the prefix cache.
        hits: number of these tokens that were cached.
        prompt_tokens: number of served prompt tokens.
        generation_tokens: number of generated tokens.
        finished: number of ended requests, by reason.
        ttft: times to the first token.
        itl: times between two tokens.
        e2e: times to the last token.
        sleeps: its sleep level; None if it is awake.
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
    """Counts values in the buckets of vLLM.

    Args:
        bounds: the upper bounds, in rising order.
    """

    __slots__ = ("bounds", "count", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * len(bounds)
        self.count = 0
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self.count += times
        self.total += value * times
        for position, bound in enumerate(self.bounds):
            if value <= bound:
                self.counts[position] += times
                break


class EngineView(Protocol):
    """The interface of an engine that a face uses."""

    @property
    def error(self) -> str | None:
        """Why the engine is broken; None if it is not."""

    @property
    def is_draining(self) -> bool:
        """Whether it finishes open requests and takes no new ones."""

    @property
    def bootstrap_port(self) -> int | None:
        """The port of the bootstrap server of a prefill engine in a P/D pair; None if it has none."""

    @property
    def pauses(self) -> Any:
        """Its `ServedPauses`."""

    def states(self) -> list[RankState]:
        """Return the state of each rank."""

    def number_adapter(self, name: str) -> None:
        """Give a loaded adapter its next number, in all ranks."""

    def take_events(self) -> list[dict[str, Any]]:
        """Return the events that wait to be polled, and drop them."""

    def hash_algo(self) -> str:
        """Return the hash algorithm that names the blocks of TensorRT-LLM's events."""

    def event_sources(self) -> list[dict[str, Any]]:
        """Return where the events of each rank are published: endpoint, replay_endpoint, topic, buffer_steps,
        host, port, replay_port, load_port.
        """
