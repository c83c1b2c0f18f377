"""The registry of schedulers: a row for each, with all differences of schedulers and releases outside of their passes.

No other module compares engine types, or releases of a scheduler: code that needs a difference reads it from a row. To
add a scheduler, add a module with its passes and a row here. The module is imported on first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from pytest_kvmock.engines.base.driver import (
    CapacityDriver,
    PagedSchedulerDriver,
    PoolSchedulerDriver,
    RadixSchedulerDriver,
    SchedulerDriver,
)

if TYPE_CHECKING:
    from pytest_kvmock.engines.schedulers.performance import Semantics

EngineType: TypeAlias = Literal["vllm", "sglang", "trtllm"]

EventsVisible: TypeAlias = Literal["pass_start", "pass_end"]
"""When the events of a pass are published."""

EngineSemantics: TypeAlias = Literal["1.2.1", "mixed", "1.6.1", "guaranteed_no_evict", "max_utilization"]
"""The release of Dynamo whose scheduler is modelled. "mixed", the scheduler on SGLang's own cache, belongs to no
release; the last two are policies of TensorRT-LLM's own scheduler."""


@dataclass(frozen=True, slots=True)
class Release:
    """The differences of one release of a scheduler from other releases.

    Attributes:
        backend: the backend of an engine that does not name one.
        dynamo: the release of Dynamo whose performance model and router belong to it.
        rejects_prompts: a prompt that is larger than all blocks is rejected when its turn comes.
        takes_tiers: it was recorded with tiers below the device.
        reserves_destination: the decode engine of a handoff reserves blocks for a prompt before the transfer. Requests
            wait there in the order in which their blocks were requested, and a prompt that can never fit ends its
            session.
        destination_first: the blocks are reserved before the prompt is computed, however many requests run.
        sessions_keep_place: in a closed loop a session counts as open until its last request is done.
        arrivals_between_passes: a closed loop on one engine checks the clock after each pass, not before.
        events_visible: when the events of a pass are published, by default.
        prefill_generates: the first token of a request comes from its prefill, and adds no time of decode. The other
            tokens are charged by the lengths of their requests, not by the blocks in use (vllm).
        last_token_free: the last token of a request needs no block, because a block is allocated when the token before
            it is computed. This needs a driver whose engine does so (`PoolSchedulerDriver`).
        counts_all_hits: the cached tokens of an admission may include output of a preempted request.
        least_output: minimum number of output tokens of a request; with 0, a request may end after its prompt.
        takes_nested_arguments: its arguments have the nested form, and the fields that came with it, such as
            `max_model_len`.
        prefills_first: a pass either computes prompts or generates, and a cached prefix costs nothing (sglang).
        reports_workers: its report has the long form: workers, GPU hours, goodput, and the percentiles of gaps by a
            sketch.
        ranks_in_lock_step: the ranks of a worker start and end their passes together.
        instant_passes_first: passes without duration are repeated on an engine before the next engine starts one.
        length_fits_blocks: the length of a request is limited to all blocks: a longer prompt is rejected, and output
            ends there.
        stalls_at_once: an aggregated engine whose requests can do nothing is stalled at once, even if other events are
            to come.
        driver: type of its drivers, in addition to that of the scheduler; None: no further type.
        takes_pairs: its engines can hand over like vLLM's connectors.
        pauses: policy of TensorRT-LLM's own scheduler. True: start a request that has room for the next step, and pause
            the last started one if room runs short. False: start a request that has room to its end. None: it is
            Dynamo's mock.
    """

    backend: str
    dynamo: Semantics
    rejects_prompts: bool = False
    takes_tiers: bool = False
    reserves_destination: bool = False
    destination_first: bool = False
    sessions_keep_place: bool = False
    arrivals_between_passes: bool = False
    events_visible: EventsVisible = "pass_start"
    prefill_generates: bool = False
    last_token_free: bool = False
    counts_all_hits: bool = False
    least_output: int = 1
    takes_nested_arguments: bool = False
    prefills_first: bool = False
    reports_workers: bool = False
    ranks_in_lock_step: bool = False
    instant_passes_first: bool = False
    length_fits_blocks: bool = False
    stalls_at_once: bool = False
    driver: type | None = None
    takes_pairs: bool = False
    pauses: bool | None = None


@dataclass(frozen=True, slots=True)
class SchedulerSpec:
    """One scheduler: its module, its defaults, and its releases.

    Arguments have their names in `MockEngineArgs`; those of a group have a dot: "sglang.page_size".

    Attributes:
        name: the `engine_type`.
        module: the module in `schedulers` that has its passes. `make_scheduler` there takes a driver, the arguments of
            the engine, and the time of the tiers below the device, if any.
        driver: type of its drivers.
        releases: the releases of Dynamo that it can model; "mixed", on SGLang's own cache, belongs to no release.
        default_release: the release if neither arguments nor backend name one.
        default_block_size: tokens a block if none is given.
        budget: the argument for the maximum number of prompt tokens in one pass; a profile's `chunk` sets it.
        budget_is_blocks: whether this budget must be a multiple of the block size.
        interval: the argument for the number of passes that compute no prompts; other schedulers refuse it. None: no
            such argument.
        block_size_alias: another name of the argument `block_size`; None if it has none.
        hands_over: whether its engines can take part in handoffs, with separate prefill and decode engines.
        over: the cache that it needs, for the error of an unsuitable backend; None: the error names the suitable ones.
    """

    name: EngineType
    module: str
    driver: type
    releases: Mapping[EngineSemantics, Release]
    default_release: EngineSemantics
    default_block_size: int
    budget: str
    interval: str | None
    budget_is_blocks: bool = False
    block_size_alias: str | None = None
    hands_over: bool = True
    over: str | None = None


_VLLM_1_6_1: Final = Release(
    "vllm",
    "1.6.1",
    rejects_prompts=True,
    sessions_keep_place=True,
    events_visible="pass_end",
    prefill_generates=True,
    last_token_free=True,
    counts_all_hits=True,
    least_output=0,
    takes_nested_arguments=True,
    instant_passes_first=True,
    ranks_in_lock_step=True,
    reports_workers=True,
    driver=PoolSchedulerDriver,
    reserves_destination=True,
    takes_pairs=True,
)

_TRTLLM_OWN: Final = replace(
    _VLLM_1_6_1,
    backend="trtllm",
    length_fits_blocks=True,
    pauses=False,
    driver=CapacityDriver,
    reserves_destination=False,
    takes_pairs=False,
)

SCHEDULERS: Final[Mapping[str, SchedulerSpec]] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            SchedulerSpec(
                "vllm",
                "vllm_scheduler",
                SchedulerDriver,
                {
                    "1.2.1": Release("lineage", "1.2.1", takes_tiers=True, arrivals_between_passes=True),
                    "1.6.1": _VLLM_1_6_1,
                },
                default_release="1.2.1",
                default_block_size=64,
                budget="max_num_batched_tokens",
                interval="prefill_schedule_interval",
            ),
            SchedulerSpec(
                "sglang",
                "prefill_first_scheduler",
                RadixSchedulerDriver,
                {
                    "mixed": Release(
                        "sglang",
                        "1.6.1",
                        takes_tiers=True,
                        events_visible="pass_end",
                        reserves_destination=True,
                        sessions_keep_place=True,
                        arrivals_between_passes=True,
                    ),
                    "1.6.1": Release(
                        "mocker_sglang_1_6",
                        "1.6.1",
                        events_visible="pass_end",
                        sessions_keep_place=True,
                        prefills_first=True,
                        least_output=0,
                        takes_nested_arguments=True,
                        instant_passes_first=True,
                        stalls_at_once=True,
                        ranks_in_lock_step=True,
                        reports_workers=True,
                        driver=PagedSchedulerDriver,
                        reserves_destination=True,
                        destination_first=True,
                    ),
                },
                default_release="mixed",
                default_block_size=1,
                budget="sglang.chunked_prefill_size",
                interval="prefill_decode_interval",
                budget_is_blocks=True,
                block_size_alias="sglang.page_size",
                over="a radix cache, backend sglang or mocker_sglang_1_6",
            ),
            SchedulerSpec(
                "trtllm",
                "trtllm_scheduler",
                SchedulerDriver,
                {
                    "1.6.1": replace(_VLLM_1_6_1, length_fits_blocks=True, takes_pairs=False),
                    "guaranteed_no_evict": _TRTLLM_OWN,
                    "max_utilization": replace(_TRTLLM_OWN, pauses=True),
                },
                default_release="1.6.1",
                default_block_size=32,
                budget="max_num_batched_tokens",
                interval=None,
                hands_over=False,  # Dynamo's can, but its handoffs were not recorded, and differ from those of "vllm"
            ),
        )
    }
)
"""The schedulers by `engine_type`."""

SGLANG_OWN: Final = SCHEDULERS["sglang"].releases["mixed"]
"""The release on SGLang's own cache."""

SGLANG_PAIRS: Final = replace(
    SGLANG_OWN,
    takes_tiers=False,
    events_visible="pass_start",
    instant_passes_first=True,
    arrivals_between_passes=False,
)
"""The release of engines in SGLang's pairs: a pass publishes what the passes before it computed."""
