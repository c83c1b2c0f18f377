"""The arguments of a mock engine: they are read, checked and written as in Dynamo's mocker 1.2.1.

One subject: one class of many fields, their ranges, and their three input forms.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from dataclasses import replace as replace_fields
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from pytest_kvmock.engines.schedulers.json_forms import (
    INERT,
    JSON_ONLY,
    is_launch_config,
    load_json,
    read_launch_config,
    without_json_only,
    write_launch_config,
)
from pytest_kvmock.engines.schedulers.nested_args import (
    MOST_COUNT,
    ReasoningConfig,
    SglangArgs,
    check_choice,
    check_integer_range,
    check_optional_integer,
    read_group,
)
from pytest_kvmock.engines.schedulers.performance import InterpolatedModel, PerformanceModel, make_performance_model
from pytest_kvmock.engines.schedulers.scheduler_specs import (
    SCHEDULERS,
    SGLANG_OWN,
    SGLANG_PAIRS,
    EngineSemantics,
    EngineType,
    EventsVisible,
    Release,
    SchedulerSpec,
)
from pytest_kvmock.values.acceptance import USUAL_RATES, USUAL_SEED, AcceptedDrafts, checked_acceptance
from pytest_kvmock.values.checks import check_number, unknown_text

WorkerType: TypeAlias = Literal["aggregated", "prefill", "decode", "both"]
PreemptionMode: TypeAlias = Literal["lifo", "fifo"]

_IN_ROOMS: Final = "sglang"  # the same as in `pairs`, which only engines of pairs load

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "engine_type": tuple(SCHEDULERS),
    "worker_type": ("aggregated", "prefill", "decode", "both"),
    "preemption_mode": ("lifo", "fifo"),
    "kv_transfer_timing_mode": ("full_prompt", "destination_missing"),
    "context_chunking_policy": ("first_come_first_served", "equal_progress"),
}
_OPTIONAL_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "router_queue_policy": ("fcfs", "lcfs", "wspt"),
    "events_visible": ("pass_start", "pass_end"),
}
_INTEGERS: Final[Mapping[str, tuple[int, int]]] = {
    "num_gpu_blocks": (1, MOST_COUNT),
    "block_size": (0, MOST_COUNT),
    "dp_size": (1, 2**32 - 1),
    "prefill_decode_interval": (0, MOST_COUNT),
    "prefill_schedule_interval": (1, MOST_COUNT),
    "aic_mtp_seed": (0, 2**64 - 1),
}
_OPTIONAL_INTEGERS: Final[Mapping[str, tuple[int, int]]] = {
    "max_num_seqs": (1, MOST_COUNT),
    "max_num_batched_tokens": (1, MOST_COUNT),
    "aic_nextn": (1, 5),
    "aic_tp_size": (0, MOST_COUNT),
    "aic_moe_tp_size": (0, MOST_COUNT),
    "aic_moe_ep_size": (0, MOST_COUNT),
    "aic_attention_dp_size": (0, MOST_COUNT),
    "bootstrap_port": (0, 65535),
    "kv_bytes_per_token": (0, MOST_COUNT),
    "num_g2_blocks": (1, MOST_COUNT),
    "max_model_len": (1, MOST_COUNT),
    "offload_batch_size": (1, MOST_COUNT),
    "zmq_kv_events_port": (0, 65535),
    "zmq_replay_port": (0, 65535),
    "publish_every": (1, MOST_COUNT),
}
_NUMBERS: Final = ("speedup_ratio", "decode_speedup_ratio")
_OPTIONAL_NUMBERS: Final[Mapping[str, str]] = {
    "startup_time": " seconds",
    "kv_transfer_bandwidth": " GB/s",
    "bandwidth_g1_to_g2_gbps": " GB/s",
    "bandwidth_g2_to_g1_gbps": " GB/s",
}
_BOOLEANS: Final = ("enable_prefix_caching", "enable_chunked_prefill", "enable_local_indexer")
_STRINGS: Final = ("aic_backend", "aic_system", "aic_backend_version", "aic_model_path")

_OURS: Final = (
    "semantics",
    "performance_model",
    "events_visible",
    "context_chunking_policy",
    "publish_every",
    "hand_over",
    "pair",
)
"""The fields that are not part of Dynamo's JSON."""

_HOST: Final = ("num_g2_blocks", "offload_batch_size", "bandwidth_g1_to_g2_gbps", "bandwidth_g2_to_g1_gbps")
"""Arguments of the host tier: Dynamo's dump omits them, but its JSON may have them."""

_SINCE_1_6: Final[Mapping[str, Any]] = {
    "max_model_len": None,
    "prefill_decode_interval": 0,
    "prefill_schedule_interval": 1,
    "aic_nextn": None,
    "aic_nextn_accept_rates": None,
    "aic_mtp_seed": USUAL_SEED,
    "kv_transfer_timing_mode": "full_prompt",
    "inert": None,
}
"""Arguments that are new in 1.6.1, with their defaults; the flat form has none of them."""

BEYOND_HOST: Final = (
    "num_g3_blocks",
    "enable_g4_storage",
    "bandwidth_g2_to_g3_gbps",
    "bandwidth_g3_to_g2_gbps",
    "bandwidth_g2_to_g4_gbps",
    "bandwidth_g4_to_g2_gbps",
)
"""Arguments of tiers beyond the host, from releases after 1.2.1; they are refused."""


if TYPE_CHECKING:
    from pytest_kvmock.engines.base.pair_options import PairOptions, PairRole
    from pytest_kvmock.engines.dynamo.host.host_offload import HostOffload
    from pytest_kvmock.engines.sglang.pairs.sglang_options import SglangPairOptions, SglangRole


_FROM_PROFILE: Final = {
    "num_gpu_blocks": "num_blocks",
    "block_size": "block_size",
    "enable_prefix_caching": "prefix_caching",
    "dp_size": "dp_size",
}


@dataclass(frozen=True, slots=True)
class MockEngineArgs:
    """The arguments of a mock engine.

    The fields, their defaults and ranges are those of Dynamo's mocker 1.2.1, and so is their JSON.

    Attributes:
        engine_type: "vllm", "sglang" or "trtllm": the scheduler.
        num_gpu_blocks: capacity of a rank in blocks, at least 1.
        block_size: tokens a block. 0, the default, becomes 64 for vllm, 32 for trtllm; for sglang the page size, or 1.
        max_num_seqs: maximum number of requests that run at once, at least 1; None: unlimited.
        max_num_batched_tokens: maximum number of tokens in one pass, at least 1; None: unlimited. Not sglang.
        enable_prefix_caching: False: nothing is published, and nothing is reused.
        enable_chunked_prefill: False: a prompt is computed in one pass or not at all. Not sglang.
        speedup_ratio: divisor of times, finite and at least 0; 0 means 1.
        decode_speedup_ratio: finite and at least 0. Times of decode are divided by the product of both, if it is not 0.
        dp_size: data-parallel ranks, at least 1. A `MockEngine` is always one rank; a harness makes an engine for each
            rank.
        startup_time: seconds, at least 0, or None. Inert.
        worker_type: "aggregated", "prefill" (charges no decode) or "decode" (charges no prefill,
            publishes nothing); see `hand_over`.
        planner_profile_data: path of an `.npz` profile (`InterpolatedModel.from_npz`); None: the polynomial model.
        aic_backend: an argument of an external performance model. This one, `aic_system`, `aic_backend_version` and
            `aic_model_path` are strings or None; `aic_tp_size`, `aic_moe_tp_size`, `aic_moe_ep_size` and
            `aic_attention_dp_size` are integers of at least 0, or None. Inert.
        aic_system: see `aic_backend`.
        aic_backend_version: see `aic_backend`.
        aic_tp_size: see `aic_backend`.
        aic_model_path: see `aic_backend`.
        aic_moe_tp_size: see `aic_backend`.
        aic_moe_ep_size: see `aic_backend`.
        aic_attention_dp_size: see `aic_backend`.
        enable_local_indexer: True or False. Inert.
        bootstrap_port: a port, 0 to 65535, or None. Inert.
        kv_bytes_per_token: bytes of KV cache a token, at least 0, or None; see `handoff_ms` and `num_g2_blocks`.
        kv_transfer_bandwidth: GB/s (1e9 bytes) from prefill to decode engine, at least 0, or None; see `handoff_ms`.
        reasoning: a `ReasoningConfig`, a mapping of its fields, or None.
        zmq_kv_events_port: a port, or None. Inert.
        zmq_replay_port: a port, or None. Inert.
        preemption_mode: "lifo": the newest running request is preempted; "fifo": the oldest. vllm only.
        router_queue_policy: "fcfs", "lcfs", "wspt" or None. Inert.
        sglang: `SglangArgs`, a mapping of their fields, or None. No effect for vllm.
        num_g2_blocks: blocks of host memory for evicted blocks, at least 1, or None. There is a host only if
            `kv_bytes_per_token` is also set (0: a transfer takes no time). vllm in the semantics of 1.2.1, on
            `lineage`, `lru` or `multi_lru`.
        offload_batch_size: blocks of one transfer to the host, and transfers at once, at least 1; None: 32. As in the
            original, a batch that does not fit into the host is lost, with its slots on the device: the square of this
            number should be at most `num_g2_blocks`.
        bandwidth_g1_to_g2_gbps: GB/s to the host, at least 0 (0: infinite); None: 14.
        bandwidth_g2_to_g1_gbps: GB/s back to the device, at least 0 (0: infinite); None: 14.
        max_model_len: maximum tokens of a request, prompt and output together, at least 1; None: unlimited. 1.6.1 only.
        prefill_decode_interval: number of passes without admission after a pass that computed a part of a prompt, at
            least 0. sglang in 1.6.1 only.
        prefill_schedule_interval: with several ranks, while requests decode, only one in this many passes computes
            prompts; at least 1. vllm in 1.6.1 only.
        kv_transfer_timing_mode: what a prefill engine sends: "full_prompt", or "destination_missing" for the part that
            the decode engine has not cached. 1.6.1 only.
        aic_nextn: drafts a step of a draft model, 1 to 5, or None. A decode pass gives a request the accepted drafts
            and one more token. It changes no event. 1.6.1 only, without `decode_speedup_ratio`, and for a backend
            without its own `speculative`.
        aic_nextn_accept_rates: the acceptance rate of each draft, from 0 to 1, as a text "0.85,0.3"; omitted rates are
            0. None: "0.85,0.3".
        aic_mtp_seed: seed of the acceptance; the worker's number is added to it.
        inert: arguments of the nested form that have no effect on a mock engine, by their path (`json_forms.INERT`):
            accepted, and written to JSON. `tensor_parallel_size` counts in reports.
        semantics: the scheduler to model. A release of Dynamo: "1.2.1" or "1.6.1" for vllm, "1.6.1" for sglang and
            trtllm. For sglang also "mixed": the scheduler on SGLang's own cache, whose passes compute prompts and
            output. For trtllm also "guaranteed_no_evict" or "max_utilization": policies of TensorRT-LLM's own
            scheduler, on its own caches. None: the default of the backend (`BackendSpec.semantics`), or else "1.2.1"
            for vllm, "mixed" for sglang, "1.6.1" for trtllm. Our addition, not in the JSON.
        performance_model: a `PerformanceModel`, or a pair of callables or milliseconds for `CallableModel`; None: see
            `planner_profile_data`. Our addition.
        events_visible: when the events of a pass are published: "pass_start" or "pass_end"; None: at the start for vllm
            in the semantics of 1.2.1, else at the end. Our addition.
        context_chunking_policy: how prompts that exceed one pass share it: "first_come_first_served", or
            "equal_progress", a block each in turn. TensorRT-LLM's own scheduler on V1 only. Our addition.
        hand_over: how a prefill and a decode engine hand over. "dynamo": as in its replay (a decode engine publishes
            nothing). "vllm" or "vllm-mooncake": by vLLM's connectors, for engine_type "vllm" in the semantics of
            1.6.1; `worker_type` may then also be "both" ("vllm", two turns). "sglang": as in SGLang's pairs, for
            engine_type "sglang" on its own cache. Our addition.
        pair: options of such engines (`PairOptions`, `SglangPairOptions`), or a mapping of them; None: the defaults.
            Our addition.
        publish_every: for `sglang` with tiers: events wait, and are published as by a server: after a pass that
            computes a part of a prompt, after this many decode passes (a server's default is 40,
            `--decode-log-interval`), and when no request runs or waits. None: after each pass. Our addition.

    Inert fields are accepted, checked, and written to JSON; they have no effect on a mock engine without a network.

    These checks are stricter than the original's:

    - A value of a wrong type is an error; Dynamo's JSON takes the default instead. An unknown field in `sglang` or
      `reasoning`, a duplicate key, and a port above 65535 are also errors.
    - Numbers must be finite.
    - `sglang.schedule_policy` must exist (the original reads any other value as "fifo").
      `sglang.schedule_conservativeness` must be at least 0, the other numbers of `sglang`, except
      `clip_max_new_tokens`, at least 1. `reasoning.thinking_ratio` must be from 0 to 1.
    - An unreadable profile is an error in JSON, too; Dynamo's JSON takes the polynomial model instead.

    Raises:
        ValueError: a field is out of range. The message names the field, the given value and the allowed values.
    """

    engine_type: EngineType = "vllm"
    num_gpu_blocks: int = 16384
    block_size: int = 0
    max_num_seqs: int | None = 256
    max_num_batched_tokens: int | None = 8192
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    speedup_ratio: float = 1.0
    decode_speedup_ratio: float = 1.0
    dp_size: int = 1
    startup_time: float | None = None
    worker_type: WorkerType = "aggregated"
    planner_profile_data: str | PathLike[str] | None = None
    aic_backend: str | None = None
    aic_system: str | None = None
    aic_backend_version: str | None = None
    aic_tp_size: int | None = None
    aic_model_path: str | None = None
    aic_moe_tp_size: int | None = None
    aic_moe_ep_size: int | None = None
    aic_attention_dp_size: int | None = None
    enable_local_indexer: bool = False
    bootstrap_port: int | None = None
    kv_bytes_per_token: int | None = None
    kv_transfer_bandwidth: float | None = None
    reasoning: ReasoningConfig | None = None
    zmq_kv_events_port: int | None = None
    zmq_replay_port: int | None = None
    preemption_mode: PreemptionMode = "lifo"
    router_queue_policy: Literal["fcfs", "lcfs", "wspt"] | None = None
    sglang: SglangArgs | None = None
    num_g2_blocks: int | None = None
    offload_batch_size: int | None = None
    bandwidth_g1_to_g2_gbps: float | None = None
    bandwidth_g2_to_g1_gbps: float | None = None
    max_model_len: int | None = None
    prefill_decode_interval: int = 0
    prefill_schedule_interval: int = 1
    kv_transfer_timing_mode: Literal["full_prompt", "destination_missing"] = "full_prompt"
    aic_nextn: int | None = None
    aic_nextn_accept_rates: str | None = None
    aic_mtp_seed: int = USUAL_SEED
    inert: Mapping[str, Any] | None = None
    semantics: EngineSemantics | None = None
    performance_model: PerformanceModel | tuple[Any, Any] | None = None
    events_visible: EventsVisible | None = None
    context_chunking_policy: Literal["first_come_first_served", "equal_progress"] = "first_come_first_served"
    publish_every: int | None = None
    hand_over: str = "dynamo"
    pair: PairOptions | SglangPairOptions | Mapping[str, Any] | None = None
    _model: PerformanceModel = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check()
        put = object.__setattr__
        for name in _NUMBERS:
            put(self, name, check_number(name, getattr(self, name)))
        for name, unit in _OPTIONAL_NUMBERS.items():
            value = getattr(self, name)
            if value is not None:
                put(self, name, check_number(name, value, unit=f"{unit}, or None"))
        put(self, "reasoning", read_group(ReasoningConfig, "reasoning", self.reasoning))
        put(self, "sglang", read_group(SglangArgs, "sglang", self.sglang))
        put(self, "block_size", self._normalised_block_size())
        put(self, "_model", self._make_model())

    def _check(self) -> None:
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        for name, choices in (*_OPTIONAL_CHOICES.items(), ("semantics", tuple(self.scheduler.releases))):
            if getattr(self, name) is not None:
                check_choice(name, getattr(self, name), choices)
        for name, (least, most) in _INTEGERS.items():
            check_integer_range(name, getattr(self, name), least, most)
        for name, (least, most) in _OPTIONAL_INTEGERS.items():
            check_optional_integer(name, getattr(self, name), least, most)
        for name in _BOOLEANS:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r:.80}")  # noqa: TRY004 - one error
        if self.worker_type != "aggregated" and not self.scheduler.hands_over:
            raise ValueError(
                f"worker_type must be 'aggregated' for engine_type {self.engine_type!r}, got {self.worker_type!r}"
            )
        self._check_pair()
        own = self.scheduler.interval
        for spec in SCHEDULERS.values():
            other = spec.interval
            if other is not None and other != own and getattr(self, other) != _SINCE_1_6[other]:
                raise ValueError(
                    f"{other} is for engine_type {spec.name!r}, got {getattr(self, other)} with {self.engine_type!r}"
                    + ("" if own is None else f"; {own} is for that")
                )
        if self.context_chunking_policy != "first_come_first_served" and self.release.pauses is None:
            raise ValueError(
                "context_chunking_policy is for TensorRT-LLM's own scheduler, semantics 'guaranteed_no_evict' or "
                f"'max_utilization' of engine_type 'trtllm'; got {self.context_chunking_policy!r} with "
                f"{self.engine_type!r} of {self.scheduler_semantics!r}"
            )
        if self.inert is not None and not (isinstance(self.inert, Mapping) and self.inert.keys() <= INERT.keys()):
            raise ValueError(f"inert must be a mapping of {', '.join(INERT)}, or None, got {self.inert!r:.80}")
        if self.aic_nextn is None and self.aic_nextn_accept_rates is not None:
            raise ValueError("aic_nextn_accept_rates is set without aic_nextn")
        if self.aic_nextn is not None:
            self._accept_rates(self.aic_nextn)
            if self.decode_speedup_ratio != 1:
                raise ValueError(f"aic_nextn is for a decode_speedup_ratio of 1, got {self.decode_speedup_ratio!r:.80}")
        for name in _STRINGS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{name} must be a string, or None, got {value!r:.80}")

    def _check_pair(self) -> None:
        if self.hand_over == "dynamo" and self.pair is None and self.worker_type != "both":
            return
        from pytest_kvmock.engines.base.hand_over import check_way  # imported on first use
        from pytest_kvmock.engines.base.pair_options import PAIRED, PairOptions

        if self.hands_over_in_rooms:
            self._check_sglang_pair()
            return
        if self.pair is not None and not isinstance(self.pair, PairOptions):
            if not isinstance(self.pair, Mapping):
                raise ValueError(f"pair must be PairOptions, a mapping of them, or None, got {self.pair!r:.80}")
            object.__setattr__(self, "pair", PairOptions.of(dict(self.pair), "pair: "))
        if check_way(self.hand_over) not in PAIRED:
            if self.worker_type == "both":
                raise ValueError(f"worker_type='both' is for hand_over='vllm', got hand_over={self.hand_over!r}")
            if self.pair is not None:
                raise ValueError(f"pair is for hand_over={' or '.join(map(repr, PAIRED))}, got {self.hand_over!r}")
        if not self.release.takes_pairs:
            raise ValueError(
                f"hand_over={self.hand_over!r} is for engine_type='vllm' in the semantics of '1.6.1', got "
                f"{self.engine_type!r} of {self.scheduler_semantics!r}"
            )
        if self.worker_type == "aggregated":
            raise ValueError(
                f"hand_over={self.hand_over!r} is for worker_type 'prefill', 'decode' or 'both', got 'aggregated'"
            )
        assert self.pair_role is not None  # it raises for a wrong combination

    def _check_sglang_pair(self) -> None:
        from pytest_kvmock.engines.sglang.pairs.sglang_options import SglangPairOptions

        if self.scheduler.releases[self.scheduler_semantics] is not SGLANG_OWN:
            raise ValueError(
                "hand_over='sglang' is for engine_type='sglang' in the semantics of 'mixed' (backend sglang), got "
                f"{self.engine_type!r} of {self.scheduler_semantics!r}"
            )
        if self.worker_type not in ("prefill", "decode"):
            raise ValueError(f"hand_over='sglang' is for worker_type 'prefill' or 'decode', got {self.worker_type!r}")
        if self.pair is None or isinstance(self.pair, SglangPairOptions):
            return
        if not isinstance(self.pair, Mapping):
            what = f"pair must be SglangPairOptions, a mapping of them, or None, got {self.pair!r:.80}"
            raise ValueError(what)  # noqa: TRY004 - one error
        object.__setattr__(self, "pair", SglangPairOptions.of(dict(self.pair), "pair: "))

    @property
    def hands_over_in_rooms(self) -> bool:
        """Whether it hands over like SGLang's pairs."""
        return self.hand_over == _IN_ROOMS

    @property
    def pair_role(self) -> PairRole | SglangRole | None:
        """Its role in a P/D pair of vLLM's or SGLang's engines; None outside of pairs."""
        if self.hand_over == "dynamo" or self.worker_type == "aggregated":
            return None
        if self.hands_over_in_rooms:
            from pytest_kvmock.engines.sglang.pairs.sglang_options import SglangPairOptions, SglangRole

            of_sglang = self.pair
            assert of_sglang is None or isinstance(of_sglang, SglangPairOptions)  # it was read
            assert self.worker_type != "both"  # as above
            return SglangRole(self.worker_type, of_sglang or SglangPairOptions())
        from pytest_kvmock.engines.base.pair_options import PairOptions, PairRole

        options = self.pair
        assert options is None or isinstance(options, PairOptions)  # it was read
        return PairRole(self.worker_type, self.hand_over, options or PairOptions())

    def _accept_rates(self, drafts: int) -> tuple[float, ...] | list[int]:
        """Return the acceptance rate of each draft of a step; further rates are cut off."""
        text = self.aic_nextn_accept_rates
        if text is None:
            return checked_acceptance(USUAL_RATES, drafts, "aic_nextn_accept_rates")
        try:
            rates = tuple(map(float, text.split(",")))
        except (AttributeError, ValueError):
            raise ValueError(
                f"aic_nextn_accept_rates must be rates from 0 to 1 with commas between them, or None, got {text!r:.80}"
            ) from None
        checked_acceptance(rates, len(rates), "aic_nextn_accept_rates")
        return rates[:drafts]

    def accepted_drafts(self, number: int) -> AcceptedDrafts | None:
        """Return the number of accepted drafts of each step of a worker with this number; None without drafts."""
        if self.aic_nextn is None:
            return None
        return AcceptedDrafts(self._accept_rates(self.aic_nextn), self.aic_nextn, self.aic_mtp_seed + number)

    def _normalised_block_size(self) -> int:
        spec = self.scheduler
        alias = None if spec.block_size_alias is None else _value(self, spec.block_size_alias)
        if self.block_size and alias and self.block_size != alias:
            raise ValueError(
                f"block_size and {spec.block_size_alias} must be equal where both are set, got {self.block_size} and "
                f"{alias}"
            )
        block_size: int = self.block_size or alias or spec.default_block_size
        if spec.budget_is_blocks and (budget := _value(self, spec.budget) or 0) % block_size:
            raise ValueError(f"{spec.budget} must be a multiple of the block size, {block_size}, got {budget}")
        return block_size

    def _make_model(self) -> PerformanceModel:
        path = self.planner_profile_data
        if path is None:
            return make_performance_model(self.performance_model, self.release.dynamo)
        if self.performance_model is not None:
            raise ValueError("planner_profile_data and performance_model cannot both be set")
        if not isinstance(path, str | PathLike):
            raise ValueError(f"planner_profile_data must be the path of an .npz file, or None, got {path!r:.80}")  # noqa: TRY004 - one error
        object.__setattr__(self, "planner_profile_data", fspath(path))
        try:
            return InterpolatedModel.from_npz(path, semantics=self.release.dynamo)
        except ValueError as error:
            raise ValueError(f"planner_profile_data: {error}") from None

    # -------------------------------------------------------------------------------------------- what follows from
    # them

    @property
    def scheduler(self) -> SchedulerSpec:
        """The scheduler that `engine_type` names."""
        return SCHEDULERS[self.engine_type]

    @property
    def scheduler_semantics(self) -> EngineSemantics:
        """The release of Dynamo whose scheduler is modelled: `semantics`, or the default of the engine type."""
        return self.semantics or self.scheduler.default_release

    @property
    def release(self) -> Release:
        """The differences of this release from others."""
        return SGLANG_PAIRS if self.hands_over_in_rooms else self.scheduler.releases[self.scheduler_semantics]

    @property
    def default_backend(self) -> str:
        """The backend of an engine that does not name one."""
        return self.release.backend

    @property
    def events_visible_at(self) -> EventsVisible:
        """When the events of a pass are published: `events_visible`, or the default of the release."""
        return self.events_visible or self.release.events_visible

    @property
    def budget(self) -> int | None:
        """Maximum number of prompt tokens in one pass, whichever argument of the scheduler sets it; None: unlimited."""
        group, _, name = self.scheduler.budget.rpartition(".")
        budget: int | None = getattr(self.sglang_options if group else self, name)
        return budget

    @property
    def most_tokens(self) -> int | None:
        """Maximum length of a request, prompt and output together: `max_model_len`, or the tokens of all blocks.

        None: unlimited.
        """
        if not self.release.length_fits_blocks:
            return self.max_model_len
        blocks = self.num_gpu_blocks * self.block_size
        return blocks if self.max_model_len is None else min(self.max_model_len, blocks)

    @property
    def performance(self) -> PerformanceModel:
        """The model that predicts times: `performance_model`, the profile, or the polynomial model."""
        return self._model

    @property
    def sglang_options(self) -> SglangArgs:
        """The arguments of SGLang's scheduler, with its defaults filled in, and the block size as page size."""
        return (self.sglang or SglangArgs()).filled(self.block_size)

    @property
    def gpus(self) -> int:
        """Number of GPUs of a worker in reports: each rank has `tensor_parallel_size` GPUs."""
        of_rank: int = (self.inert or {}).get("tensor_parallel_size", 1)
        return of_rank * self.dp_size

    @property
    def has_host(self) -> bool:
        """Whether there is host memory below the device: `num_g2_blocks` and `kv_bytes_per_token` are set."""
        return self.num_g2_blocks is not None and self.kv_bytes_per_token is not None

    def make_host(self) -> HostOffload | None:
        """Return a new host tier for one manager; None without a host."""
        if self.num_g2_blocks is None or self.kv_bytes_per_token is None:
            return None
        from pytest_kvmock.engines.base.bandwidth import DEFAULT_GBPS
        from pytest_kvmock.engines.dynamo.host.host_offload import DEFAULT_BATCH, HostOffload

        to_host, to_device = self.bandwidth_g1_to_g2_gbps, self.bandwidth_g2_to_g1_gbps
        return HostOffload(
            self.num_g2_blocks,
            block_bytes=self.kv_bytes_per_token * self.block_size,
            batch_size=self.offload_batch_size or DEFAULT_BATCH,
            to_host_gbps=DEFAULT_GBPS if to_host is None else to_host,
            to_device_gbps=DEFAULT_GBPS if to_device is None else to_device,
        )

    @property
    def needs_kv_publisher(self) -> bool:
        """Whether the engine publishes events: with prefix caching, and not as a decode worker (except in pairs)."""
        return self.enable_prefix_caching and (self.worker_type != "decode" or self.pair_role is not None)

    def handoff_ms(self, prompt_tokens: int, fresh_tokens: int | None = None) -> float:
        """Return the time to send the KV cache of a prompt from the prefill to the decode engine, in ms, unrounded.

        Dynamo does not round it either. No speedup applies. 0 if `kv_bytes_per_token` or `kv_transfer_bandwidth` is not
        set, or 0.

        Args:
            prompt_tokens: length of the prompt.
            fresh_tokens: tokens of the blocks that the decode engine has not cached: only these are sent if
                `kv_transfer_timing_mode` is "destination_missing".
        """
        if self.kv_transfer_timing_mode == "destination_missing" and fresh_tokens is not None:
            prompt_tokens = fresh_tokens
        if not self.kv_bytes_per_token or not self.kv_transfer_bandwidth:
            return 0.0
        size = float(prompt_tokens * self.kv_bytes_per_token)
        return size / (self.kv_transfer_bandwidth * 1e9) * 1000.0

    def following(self, semantics: EngineSemantics | None) -> MockEngineArgs:
        """Return the arguments with this release of Dynamo, if they name none and their scheduler supports it.

        Raises:
            ValueError: an argument is set that their release does not have.
        """
        known = self.semantics is not None or semantics not in self.scheduler.releases
        args = self if known else self.replace(semantics=semantics)
        if not args.release.takes_nested_arguments:
            for name, default in _SINCE_1_6.items():
                if getattr(args, name) != default:
                    raise ValueError(
                        f"{name}={getattr(args, name)!r:.80} is an argument of 1.6.1; this engine follows "
                        f"{args.scheduler_semantics} (semantics='1.6.1' has it)"
                    )
        return args

    # -------------------------------------------------------------------------------------------- reading and writing

    def replace(self, **changes: Any) -> MockEngineArgs:
        """Return the arguments with some changed. The block size stays; `block_size=0` chooses it again.

        Raises:
            ValueError: a field is unknown, or a value is out of range.
        """
        return replace_fields(self, **_arguments(changes))

    def to_dict(self) -> dict[str, Any]:
        """Return Dynamo's JSON form, as Python objects.

        With `semantics="1.6.1"` this is the nested form, every key with its value. Else it is the flat form: all fields
        except our additions and those of 1.6.1, with the host's fields only if they are set.
        """
        if self.semantics is not None and self.release.takes_nested_arguments:
            return write_launch_config(self)
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name in _JSON_FIELDS}
        for name in _HOST:  # `dump_json` leaves them out
            if values[name] is None:
                del values[name]
        for group in ("reasoning", "sglang"):
            if values[group] is not None:
                values[group] = asdict(values[group])
        return values

    def to_json(self) -> str:
        """Return Dynamo's JSON form (`to_dict`), in the layout of its `dump_json`."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, source: str | bytes | Mapping[str, Any], **additions: Any) -> MockEngineArgs:
        """Read Dynamo's JSON form. Absent fields have their defaults.

        The nested form has `engine` or `dynamo`. It means `semantics="1.6.1"`, and refuses what 1.6.1 refuses. The flat
        form is that of earlier releases, with the backend's release unless `semantics` names one. It reads the older
        keys `is_prefill` and `is_decode` if there is no `worker_type`; `has_perf_model` has no effect.

        Args:
            source: the text, or a mapping such as `json.loads` returns.
            **additions: fields outside the JSON: `semantics`, `performance_model`, `events_visible`,
                `context_chunking_policy`, `publish_every`.

        Raises:
            ValueError: invalid JSON, an unknown field, or a value out of range.
        """
        values = load_json(source) if isinstance(source, str | bytes) else source
        if not isinstance(values, Mapping):
            raise ValueError(f"the arguments of an engine must be a JSON object, got {values!r:.80}")  # noqa: TRY004 - one error
        for name in values:
            if name in _OURS:
                raise ValueError(f"{name} is not part of Dynamo's JSON: pass it by keyword")
        for name in additions:
            if name not in _OURS:
                raise ValueError(unknown_text("addition", name, _OURS))
        if is_launch_config(values):
            args = cls(**(read_launch_config(values) | {"semantics": "1.6.1"} | additions))
            if args.semantics is None or not args.release.takes_nested_arguments:
                raise ValueError(f"the nested form is that of semantics='1.6.1', got {args.semantics!r}")
            return args
        for name in values:
            if name in _SINCE_1_6:
                raise ValueError(unknown_text("field of the engine's arguments", name, (*_JSON_FIELDS, *JSON_ONLY)))
        return cls(**_arguments(without_json_only({**values, **additions}), JSON_ONLY))

    @classmethod
    def from_profile(cls, profile: Any, *, explicit: Collection[str] | None = None, **engine: Any) -> MockEngineArgs:
        """Return the arguments of an engine of a profile's size.

        `num_gpu_blocks` (`num_blocks` in the profile), `block_size`, `enable_prefix_caching` (`prefix_caching` in the
        profile) and `dp_size` come from the profile. Its `chunk`, if set, is the budget of a pass:
        `max_num_batched_tokens` for vllm, `sglang.chunked_prefill_size` for sglang.

        Args:
            profile: an `EngineProfile`, or an object with its fields; engines do not import the class.
            explicit: names of fields that the profile sets explicitly; by default the fields that differ from their
                default. If `engine` sets such a field too, both must be equal; `engine` overrides all other fields.
            **engine: fields of the arguments. A `block_size` of 0 counts as not given.

        Raises:
            ValueError: a field contradicts an explicit field of the profile, is unknown, or is out of range.
        """
        given = _arguments(engine)
        asked = {**given, "sglang": read_group(SglangArgs, "sglang", given.get("sglang")) or SglangArgs()}
        engine_type = given.get("engine_type", "vllm")  # an unknown one is refused below, like all other faults
        spec = SCHEDULERS.get(engine_type if isinstance(engine_type, str) else "", SCHEDULERS["vllm"])
        # By our name: the user's name for it, and the given value.
        theirs = {name: (name, given[name]) for name in _FROM_PROFILE if name in given}
        alias = spec.block_size_alias
        if alias is not None and _value(asked, alias) and not given.get("block_size"):
            theirs["block_size"] = (alias, _value(asked, alias))
        elif given.get("block_size") == 0:
            del theirs["block_size"]
        own = dict(_FROM_PROFILE)
        group, _, budget = spec.budget.rpartition(".")
        if profile.chunk is not None:
            own["chunk"] = "chunk"
            if _value(asked, spec.budget) is not None or budget in given:
                theirs["chunk"] = (spec.budget, _value(asked, spec.budget))
        fixed = set_fields(profile) if explicit is None else explicit
        for name, field_name in own.items():
            value = getattr(profile, field_name)
            if name not in theirs:
                if name != "chunk":
                    given[name] = value
                elif group:
                    given[group] = replace_fields(asked[group], **{budget: value})
                else:
                    given[budget] = value
            elif field_name in fixed and theirs[name][1] != value:
                shown, theirs_is = theirs[name]
                raise ValueError(
                    f"{shown}={theirs_is!r:.80} contradicts {field_name}={value!r} of the profile; "
                    "set one of them, or both to the same value"
                )
        return cls(**given)


_JSON_FIELDS: Final = tuple(
    each.name
    for each in fields(MockEngineArgs)
    if each.name not in (*_OURS, *_SINCE_1_6) and not each.name.startswith("_")
)


def _value(arguments: object, path: str) -> Any:
    """Return an argument by its name, or by group, dot and name; None if the group is None."""
    for name in path.split("."):
        arguments = arguments.get(name) if isinstance(arguments, dict) else getattr(arguments, name, None)
    return arguments


def set_fields(profile: object) -> set[str]:
    """Return the names of the fields that differ from their default; all names for an object without defaults."""
    if not is_dataclass(profile):
        return {*_FROM_PROFILE.values(), "chunk"}
    return {
        each.name for each in fields(profile) if each.default is MISSING or getattr(profile, each.name) != each.default
    }


def check_beyond_host(name: str, value: object) -> None:
    """Raise a ValueError if an argument of `BEYOND_HOST` requests such a tier: it is not None, and not False."""
    if value is not None and value is not False:
        raise ValueError(f"{name}={value!r:.80}: there are no tiers beyond the host; leave it out")


def _arguments(values: Mapping[str, Any], more: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return arguments by the names of their fields.

    Args:
        values: the given values, by name.
        more: names that the user may write in addition to those of the fields.

    Raises:
        ValueError: a name is unknown, or an argument requests a tier beyond the host.
    """
    known = (*_JSON_FIELDS, *_SINCE_1_6, *_OURS)
    arguments = dict(values)
    for name, value in values.items():
        if name in BEYOND_HOST:
            check_beyond_host(name, value)
            del arguments[name]
        elif name not in known:
            raise ValueError(unknown_text("field of the engine's arguments", name, (*known, *more)))
    return arguments
