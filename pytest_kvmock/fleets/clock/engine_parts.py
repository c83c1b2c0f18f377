"""The parts of a mock engine: a worker and a scheduler made from its arguments."""

from __future__ import annotations

from importlib import import_module
from random import Random
from typing import TYPE_CHECKING, Any

from pytest_kvmock.engines.backends import BACKENDS, BackendSpec
from pytest_kvmock.engines.base.manager import protocol_mismatch
from pytest_kvmock.engines.schedulers.args import MockEngineArgs
from pytest_kvmock.engines.schedulers.scheduler_specs import SCHEDULERS
from pytest_kvmock.engines.worker import KvWorker
from pytest_kvmock.values.acceptance import AcceptedDrafts

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.host_time import HostTime
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.engines.schedulers.scheduler import Scheduler
    from pytest_kvmock.fleets.clock.publish_times import PublishTimes
    from pytest_kvmock.values.sinks import GivenSink, Sink


def make_worker(args: MockEngineArgs, spec: BackendSpec, sink: GivenSink | None, rng: Random) -> KvWorker:
    """Make a worker with the sizes of `args` over a backend; an engine of a handoff gets a KV connector.

    Raises:
        ValueError: `args` have a host, which the backend does not take.
    """
    if args.has_host:
        spec.check_options({"tiers": args.num_g2_blocks})

    def make_manager(sink: Sink | None) -> KvManager:
        options = {"unified": True} if args.hands_over_in_rooms and "unified" in spec.options else {}
        sizes = {"num_blocks": args.num_gpu_blocks, "block_size": args.block_size, "dp_rank": 0}
        manager = spec.make(**sizes, sink=sink, **options)
        host = args.make_host()
        if host is not None:
            from pytest_kvmock.engines.dynamo.logical import LogicalManager

            if not isinstance(manager, LogicalManager):
                raise ValueError(
                    f"num_g2_blocks={args.num_g2_blocks} is the host of Dynamo's block managers, and backend "
                    f"{spec.name!r} has another; make the worker with tiers={{'host': {args.num_g2_blocks}}}"
                )
            manager.attach_offload(host)
        if args.worker_type != "aggregated" and hasattr(manager, "attach_connector"):  # of vLLM
            manager.attach_connector()
        return manager

    return KvWorker(
        make_manager,
        sink=sink,
        prefix_caching=args.enable_prefix_caching,
        publishes=args.needs_kv_publisher,
        rng=rng,
        driver=spec.driver,
        pair=args.pair_role,
    )


def make_scheduler(args: MockEngineArgs, driver: Any, tiers: HostTime | None) -> Scheduler:
    """Make the scheduler that `args` name, over the driver of a manager.

    Raises:
        ValueError: the scheduler cannot use this driver.
    """
    spec = args.scheduler
    if protocol_mismatch(driver, spec.driver) is not None:
        backend = driver.manager.backend
        if spec.over is not None:
            raise ValueError(f"engine_type {spec.name!r} schedules over {spec.over}; got {backend!r}")
        able = [f"{each.name!r}" for each in SCHEDULERS.values() if protocol_mismatch(driver, each.driver) is None]
        does = "does" if len(able) == 1 else "do"
        raise ValueError(
            f"engine_type {spec.name!r} cannot schedule over backend {backend!r}; "
            f"engine_type {' and '.join(able)} {does}"
        )
    wanted = args.release.driver
    if wanted is not None and protocol_mismatch(driver, wanted) is not None:
        able = [
            name
            for name, each in BACKENDS.items()
            if each.semantics == args.scheduler_semantics and each.scheduler == spec.name
        ] or [name for name, each in BACKENDS.items() if each.scheduler == spec.name]
        raise ValueError(
            f"semantics={args.scheduler_semantics!r} of engine_type {spec.name!r} schedules over {' or '.join(able)}; "
            f"got {driver.manager.backend!r} (of a test: @pytest.mark.kv_backends({able[0]!r}))"
        )
    if args.hands_over_in_rooms:
        from pytest_kvmock.fleets.clock.sglang_pair_scheduler import make_pair_scheduler

        return make_pair_scheduler(driver, args)
    module = import_module(f"pytest_kvmock.engines.schedulers.{spec.module}")
    scheduler: Scheduler = module.make_scheduler(driver, args, tiers)
    return scheduler


def accepted_drafts(args: MockEngineArgs, worker: KvWorker, number: int) -> AcceptedDrafts | None:
    """Return the number of accepted drafts per step of an engine, from its arguments or its backend's draft model;
    None: there are no drafts.

    Raises:
        ValueError: both have a draft model.
    """
    draft = getattr(worker.manager, "speculative", None)
    if draft is None:
        return args.accepted_drafts(number)
    if args.aic_nextn is not None:
        raise ValueError(
            f"aic_nextn={args.aic_nextn} is for a backend without a draft model, and {worker.backend!r} has "
            f"{draft!r}; leave it out"
        )
    return AcceptedDrafts(draft.acceptance, draft.drafts, args.aic_mtp_seed + number)


def publish_times(args: MockEngineArgs, worker: KvWorker) -> PublishTimes | None:
    """Return the times at which held events of an engine's cache are published; None: events are not held.

    Raises:
        ValueError: the manager cannot hold events.
    """
    if args.publish_every is None:
        return None
    from pytest_kvmock.fleets.clock.publish_times import PublishTimes

    return PublishTimes(args.publish_every, worker.manager)


def check_worker(args: MockEngineArgs, worker: KvWorker) -> None:
    """Check that the worker's sizes equal the arguments.

    Raises:
        ValueError: they differ.
    """
    manager = worker.manager
    of_worker = (manager.num_blocks, manager.block_size, worker.prefix_caching)
    wanted = (args.num_gpu_blocks, args.block_size, args.enable_prefix_caching)
    names = ("num_gpu_blocks", "block_size", "enable_prefix_caching")
    for name, has, asked in zip(names, of_worker, wanted, strict=True):
        if has != asked:
            raise ValueError(f"{name}={asked!r}, and {worker!r} was made with {has!r}; they must be equal")
    draft: Any = getattr(manager, "speculative", None)
    if args.worker_type != "aggregated" and getattr(draft, "reads_ahead", False) and not draft.connector:
        raise ValueError(
            f"worker_type={args.worker_type!r} hands prompts over, which needs a KV connector, and {worker!r} was made "
            "without one: make its backend with speculative=Speculative(..., connector=True)"
        )
    tiers = worker.tiers
    host = None if tiers is None else tiers.num_blocks
    # `num_g2_blocks` alone makes no host, as in the original; for a worker with a host it is the host's size.
    is_asked = args.has_host or (args.num_g2_blocks is not None and host is not None)
    if is_asked and args.num_g2_blocks != host:
        if host is None:
            made, else_ = "without tiers", f"make the worker with tiers={{'host': {args.num_g2_blocks}}}"
        else:
            made, else_ = f"with a host of {host} blocks", "give it the same"
        raise ValueError(
            f"num_g2_blocks={args.num_g2_blocks}, and {worker!r} was made {made}; leave it out, or {else_}"
        )
    _check_links(args, worker, getattr(manager, "offload", None))
    if tiers is not None and worker.traits.clears_below and not args.release.takes_tiers:
        raise ValueError(
            "tiers are for engines that follow the scheduler of 1.2.1, as no later one was recorded with them; got "
            f"semantics={args.scheduler_semantics!r} over {worker!r}"
        )


def _check_links(args: MockEngineArgs, worker: KvWorker, host: object) -> None:
    """Check that the links to the worker's host equal those in `args`.

    Raises:
        ValueError: they differ.
    """
    if host is None:
        return
    from pytest_kvmock.engines.dynamo.host.host_offload import HostOffload

    if not isinstance(host, HostOffload):  # a custom host
        return
    to_host, to_device = host.gbps
    made = {
        "offload_batch_size": host.batch_size,
        "bandwidth_g1_to_g2_gbps": to_host,
        "bandwidth_g2_to_g1_gbps": to_device,
    }
    if args.has_host:  # without a host in `args`, their bytes of a token are for handoffs
        size = worker.manager.block_size
        made["kv_bytes_per_token"] = (
            host.block_bytes // size if host.block_bytes % size == 0 else host.block_bytes / size
        )
    for name, has in made.items():
        asked = getattr(args, name)
        if asked is not None and asked != has:
            raise ValueError(
                f"{name}={asked!r}, but the host of {worker!r} was made with {has!r}; leave it out, or give it the same"
            )
