"""Promises of every router process for unusual streams and hosts: an unknown medium, replays that overlap or end early,
a worker's id at another address, and prompts on a host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pytest_kvmock.engines.backends import BACKENDS, speaker_of
from pytest_kvmock.engines.tiers import Tiers
from pytest_kvmock.testing.process.process_adapters import ProcessAdapters
from pytest_kvmock.values.prompt_keys import LOOKAHEAD
from pytest_kvmock.wire.codec.table import find_dialect
from pytest_kvmock.wire.sockets.waiting import Deadline

if TYPE_CHECKING:
    from pytest_kvmock.testing.process.process_world import ProcessWorld
    from pytest_kvmock.testing.process.router_process import ServedEngines

_DEVICE: Final = 64
_LEAST_HOST: Final = 2 * _DEVICE
"""Blocks of a device, and of the smallest host that keeps the earlier blocks while the device is refilled."""

_HOLDERS: Final = (0, 1, 1, 0, 1, 0, 0, 1)
"""The worker whose host has each prompt, in an order that round robin never makes."""


class ProcessStreams(ProcessAdapters):
    """The part of `ProcessContract` about unusual streams and hosts."""

    tiers: ClassVar[Mapping[str, Any] | None] = None
    reads_drafts: ClassVar[bool] = False

    @classmethod
    def wrong_declaration(cls) -> str:
        """Return the first invalid or contradictory declaration of the class; "" if there is none."""
        if cls.tiers is not None:
            try:
                blocks = Tiers.of(cls.tiers).host
            except (TypeError, ValueError) as error:
                return str(error)
            if blocks is None or blocks < _LEAST_HOST:
                return f"tiers: host must have {_LEAST_HOST} blocks at least here, got {blocks!r:.80}"
            if not (cls.hears_events and cls.goes_by_prefix):
                return "tiers is for a process that hears events and goes by prefixes, and says that it does not"
        if not isinstance(cls.reads_drafts, bool):
            return f"reads_drafts must be True or False, got {cls.reads_drafts!r:.80}"
        return super().wrong_declaration()

    def _judge_medium(self, world: ProcessWorld) -> None:
        """Inject events by which blocks leave an unknown medium, before and after they are stored."""
        __tracebackhide__ = True
        if world.server.dialect.media:
            self._strike(world, "unknown_medium", "blocks of worker {} left a medium that its dialect does not have")

    def _judge_replays(self, world: ProcessWorld) -> None:
        """Let one replay repeat batches that had arrived, and others end early, with or without their end marker. The
        process must then ask for the missing batches again.
        """
        __tracebackhide__ = True
        for worker in self._faulted(world):
            lost, after, _ = self._lost(world, worker)
            where = f"a batch of worker {worker} was lost, and its replay has what came after it, too"
            world.judge(where, lost)
            for says_its_end in (True, False):
                world.server.fault(worker, "truncate_replay", after=0, end_marker=says_its_end)
                early, _, _ = self._lost(world, worker)
                how = "and said that it was over" if says_its_end else "and did not say that it was over"
                world.judge(f"a batch of worker {worker} was lost, the replay of it had none, {how}", early)
        if not self.tells_blocks():
            return
        while world.held(after):
            world.fill(1, 64)
        world.judge(f"{where}, and then the blocks of that were evicted", after)

    def _lost(self, world: ProcessWorld, worker: int) -> tuple[str, str, str]:
        """Lose a batch of a worker, and return its prompt and those of the two batches after it."""
        __tracebackhide__ = True
        self._heard_from(world, worker)
        prompts = (world.text(8), world.text(8), world.text(8))
        world.server.fault(worker, "lose")
        for prompt in prompts:
            world.direct(worker, prompt)
        return prompts

    def _judge_same_id(self, world: ProcessWorld, moved: Callable[[ServedEngines], object]) -> None:
        """Stop worker 2, and start another under its id at another address: it is empty, and its events are received
        there.
        """
        __tracebackhide__ = True
        where = "worker 2 is gone, and comes up under its id at another address"
        before, prompt = world.text(8), world.text(8)
        world.direct(2, before)
        world.judge(f"before {where}", before)
        world.server.stop(2)
        world.rename({3: 2}, [0, 3])
        moved(world.engines)
        world.wait_subscribed(f"{where}: it does not subscribe there")
        world.direct(3, prompt)
        world.judge(where, prompt)
        if not self.tells_blocks():
            return
        deadline = Deadline(self.timeout_s)
        while (known := world.known(before, 3)) and deadline.left:
            world.pause()
        if known:
            world.fail(f"{where}: it knows {known} blocks there of what the one that is gone held; expected none")

    def test_a_prompt_goes_to_the_host_that_has_it(self, kv_dialect: str) -> None:
        """With `tiers`: of two idle workers the process picks the one whose host has the prompt, if no device has
        it.
        """
        what = "whether it weighs what a host has"
        if self.tiers is None:
            self.skip("tiers is None", what, "tiers, the host below each engine,")
        self._needs_a_start(what)
        dialect = find_dialect(kv_dialect)
        given, problem = Tiers.of(self.tiers), ""
        spec = speaker_of(dialect)
        try:
            dialect.check_host(self_describing=given.self_describing)
            spec.make(num_blocks=8, block_size=spec.default_block_size, dp_rank=0, sink=None, tiers=given)
        except ValueError as error:
            problem = str(error)
        if problem or not dialect.media:
            self.skip(problem or f"{kv_dialect} has no events of a host", what, "a dialect that says it")
        with self._special(kv_dialect, num_blocks=_DEVICE, tiers=given) as world:
            where = "the host of one worker has a prompt, no device has it, and all is idle"
            prompts = [world.text(8) for _ in _HOLDERS]
            for worker, prompt in zip(_HOLDERS, prompts, strict=True):
                world.direct(worker, prompt)
            for worker in world.workers:
                while any(world.held(prompt).get(worker) for prompt in prompts):
                    world.direct(worker, world.text(8))
                for _ in range(2):
                    world.push(where, worker, world.text(8))
            picks = [world.picked(where, prompt) for prompt in prompts]
            right = sum(pick == holder for pick, holder in zip(picks, _HOLDERS, strict=True))
            if right < len(_HOLDERS) - 1:
                world.fail(
                    f"{where}: {right} of {len(_HOLDERS)} such prompts went there; expected {len(_HOLDERS) - 1} at "
                    "least. tiers = None: it goes by devices alone"
                )

    def test_it_reads_a_draft_model(self, kv_dialect: str) -> None:
        """With `reads_drafts`: engines have a draft model, and a block with another next token is another block."""
        what = "what it makes of engines with a draft model"
        if not self.reads_drafts:
            self.skip("reads_drafts is False", what, "reads_drafts = True")
        self._needs_events()
        self._needs_blocks(what)
        self._needs_a_start(what)
        dialect = find_dialect(kv_dialect)
        looks = any(field.name == LOOKAHEAD for field in dialect.stored)
        spec = BACKENDS["sglang_eagle"] if dialect.pairs else BACKENDS["vllm_mtp"]
        if not (looks or dialect.pairs):
            self.skip(f"{kv_dialect} says no tokens ahead", what, "the dialect of a later release")
        with self._special(kv_dialect, num_blocks=300, spec=spec) as world:
            where = "worker 0 has a draft model"
            prompt = world.text(8)
            world.direct(0, prompt)
            world.judge(f"{where}, and has served a prompt", prompt)
            for size in (len(prompt) // 2, len(prompt) // 4):
                other = prompt[:size] + world.text(2)
                world.judge_blocks(f"{where}, and has served a prompt; another one parts from it after a block", other)
            world.server.reset(0)
            world.push(where, 0, world.text(2))
            world.judge_blocks(f"{where}, and its cache was cleared", prompt)
