"""The registry of schedulers: one row each, of all in which they and their releases differ outside of their passes.

No other module compares engine types, or releases of a scheduler: code that needs a difference reads it off a row. So a
scheduler is added by a module of its own, which has its passes, and a row here. Each is imported when its first
one is made.
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
"""The release of Dynamo whose scheduler is followed; "mixed" is the one over SGLang's own cache, which is of none, and
the last two are policies of TensorRT-LLM's own."""


@dataclass(frozen=True, slots=True)
class Release:
    """What one release of a scheduler does that another does otherwise.

    Attributes:
        backend: the backend of an engine that names none.
        dynamo: the release of Dynamo whose performance model and router go with it.
        rejects_prompts: it rejects a prompt that is larger than all its blocks, when its turn comes.
        takes_tiers: it was recorded with tiers below the device.
        reserves_destination: the decode engine of a handoff reserves blocks for a prompt before that is on its way;
            what is handed over waits in the order in which its blocks were asked for, and a prompt that can never fit
            ends its session.
        destination_first: the blocks are reserved before the prompt is computed, and however many requests run.
        sessions_keep_place: in a closed loop a session counts as open until its last request is done.
        arrivals_between_passes: a closed loop over one engine looks at the clock when a pass has ended, not before.
        events_visible: when the events of a pass are published, by default.
        prefill_generates: the first token of a request comes out of its prefill, and takes no time of decode; that is
            charged for the others, by their lengths instead of the blocks in use (vllm).
        last_token_free: the last token of a request needs no block, as a block is allocated when the token before it is
            computed. Only a driver whose engine does so will do (`PoolSchedulerDriver`).
        counts_all_hits: what an admission reports as cached may be output of a request that was preempted.
        least_output: the fewest tokens of output that a request may ask for; of 0, its prompt is computed, and it is
            done.
        takes_nested_arguments: its arguments have the nested form, and those that came with it, such as
            `max_model_len`.
        prefills_first: a pass computes prompts or generates, never both, and a cached prefix counts for nothing
            (sglang).
        reports_workers: its report is the long form: workers, GPU hours, goodput, and the percentiles of gaps by a
            sketch.
        ranks_in_lock_step: the ranks of a worker start and end their passes together.
        instant_passes_first: passes that take no time are repeated on an engine before the next engine starts one.
        length_fits_blocks: a request has no more tokens than all blocks: a longer prompt is rejected, output ends
            there.
        stalls_at_once: an aggregated engine with requests that can do nothing is stalled, whatever else may happen yet.
        driver: what its drivers must be, in addition to what the scheduler asks for; None: no more.
        takes_pairs: its engines can hand over as vLLM's connectors do.
        pauses: TensorRT-LLM's own scheduler: whether its policy starts what the next step has room for and pauses the
            last started where room runs short, or what has room to its end; None: it is Dynamo's mock of one.
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
    """One scheduler: how it is made, its defaults, and what its releases do.

    Arguments are named as `MockEngineArgs` has them, those of a group with a dot: "sglang.page_size".

    Attributes:
        name: the `engine_type`.
        module: of `schedulers`, which has its passes; its `make_scheduler` makes one, from a driver, the arguments of
            its engine, and the time of the tiers below the device, if any.
        driver: what its drivers must be.
        releases: the releases of Dynamo that it can follow; "mixed" is that over SGLang's own cache, which is of none.
        default_release: the one that it follows where neither arguments nor backend name one.
        default_block_size: tokens a block if none is given.
        budget: the argument that has the most tokens of prompts that one pass computes; a profile's `chunk` sets it.
        budget_is_blocks: whether that must be a multiple of the block size.
        interval: the argument that has how many passes compute no prompts; of no effect on another scheduler. None:
            none has.
        block_size_alias: another name of the argument `block_size`; None if it has none.
        hands_over: whether its engines can be those of handoffs: prefill and decode apart.
        over: what it schedules over, for the error of a backend that it cannot; None: the error names those that can.
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
                hands_over=False,  # Dynamo's can; its handoffs were not recorded, and differ from those of vLLM's type
            ),
        )
    }
)
"""The schedulers by `engine_type`."""

SGLANG_OWN: Final = SCHEDULERS["sglang"].releases["mixed"]
"""That over SGLang's own cache."""

SGLANG_PAIRS: Final = replace(
    SGLANG_OWN,
    takes_tiers=False,
    events_visible="pass_start",
    instant_passes_first=True,
    arrivals_between_passes=False,
)
"""That of engines which hand over as SGLang's pairs do: their passes publish what those before them computed."""
