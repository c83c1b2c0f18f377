"""The registry of schedulers: one row each, of all in which they and their releases differ outside of their passes.

Nobody else compares engine types, or releases of a scheduler: who needs a difference reads it off a row. So a scheduler
is added by a module of its own, which has its passes, and a row here. Each is imported when its first one is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from pytest_kvmock.cache.manager import protocol_mismatch
from pytest_kvmock.drivers.driver import (
    CapacityDriver,
    PagedSchedulerDriver,
    PoolSchedulerDriver,
    RadixSchedulerDriver,
    SchedulerDriver,
    SuspendingDriver,
)
from pytest_kvmock.schedulers.scheduler import Release

if TYPE_CHECKING:
    from pytest_kvmock.schedulers.host_time import HostTime
    from pytest_kvmock.schedulers.scheduler import EngineSemantics, Scheduler, SchedulerArgs

EngineType: TypeAlias = Literal["vllm", "sglang", "trtllm"]


@dataclass(frozen=True, slots=True)
class SchedulerSpec:
    """One scheduler: how it is made, its defaults, and what its releases do.

    Arguments are named as `MockEngineArgs` has them, those of a group with a dot: "sglang.page_size".

    Attributes:
        name: the `engine_type`.
        make: makes one, from a driver, the arguments of its engine, and the time of the tiers below the device, if any.
        driver: what its drivers must be.
        releases: the releases of Dynamo that it can follow; "mixed" is that over SGLang's own cache, which is of none.
        default_release: the one that it follows where neither arguments nor backend name one.
        default_block_size: tokens a block where none is given.
        budget: the argument that has the most tokens of prompts that one pass computes; a profile's `chunk` sets it.
        budget_is_blocks: whether that must be a multiple of the block size.
        interval: the argument that has how many passes compute no prompts; of no effect on another scheduler. None: none has.
        block_size_alias: another name of the argument `block_size`; None: it has none.
        hands_over: whether its engines can be those of handoffs: prefill and decode apart.
        over: what it schedules over, for the error of a backend that it cannot; None: the error names who can.
    """

    name: EngineType
    make: Callable[[Any, SchedulerArgs, HostTime | None], Scheduler]
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


def _vllm(driver: Any, args: SchedulerArgs, tiers: HostTime | None) -> Scheduler:
    from pytest_kvmock.schedulers.vllm_scheduler import VllmScheduler

    return VllmScheduler(driver, args, tiers)


def _sglang(driver: Any, args: SchedulerArgs, tiers: HostTime | None) -> Scheduler:
    if args.release.prefills_first:
        from pytest_kvmock.schedulers.prefill_first_scheduler import PrefillFirstScheduler

        return PrefillFirstScheduler(driver, args)
    from pytest_kvmock.schedulers.sglang_scheduler import SglangScheduler

    if protocol_mismatch(driver, PagedSchedulerDriver) is None:
        raise ValueError(f"the backend {driver.manager.backend!r} is of 1.6.1, and its engine semantics='mixed'")
    return SglangScheduler(driver, args, tiers)


def _trtllm(driver: Any, args: SchedulerArgs, tiers: HostTime | None) -> Scheduler:
    from pytest_kvmock.schedulers.trtllm_scheduler import CapacityScheduler, SuspendingScheduler, TrtllmScheduler

    if args.release.pauses is None:
        return TrtllmScheduler(driver, args, tiers)
    if protocol_mismatch(driver, SuspendingDriver) is None:  # V2 has one policy, which stands in for any other
        return SuspendingScheduler(driver, args, tiers)
    return CapacityScheduler(driver, args, tiers)


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
)

_TRTLLM_OWN: Final = replace(
    _VLLM_1_6_1,
    backend="trtllm",
    length_fits_blocks=True,
    pauses=False,
    driver=CapacityDriver,
    reserves_destination=False,
)

SCHEDULERS: Final[Mapping[str, SchedulerSpec]] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            SchedulerSpec(
                "vllm",
                _vllm,
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
                _sglang,
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
                _trtllm,
                SchedulerDriver,
                {
                    "1.6.1": replace(_VLLM_1_6_1, length_fits_blocks=True),
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
