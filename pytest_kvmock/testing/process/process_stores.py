"""Promises of every router process for stores that workers share: a block of a store belongs to no single worker.

A worker's stream announces the blocks that it has put into a store, and each worker of the store can load them. No
stream announces deletions; the answer of an engine shows them (`cached_tokens`). A process may ignore stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pytest_kvmock.engines.backends import speaker_of
from pytest_kvmock.engines.shared import SHARED
from pytest_kvmock.engines.tiers import Tiers
from pytest_kvmock.oracle.index.owners import first_wrong_promise
from pytest_kvmock.testing.process.process_judge import ProcessJudge
from pytest_kvmock.testing.router.router_stores import JUDGED_KINDS, MAY_BE_SILENT, blocks_of, units_of
from pytest_kvmock.testing.subject import SaysUnjudged
from pytest_kvmock.values.checks import is_integer, unknown_text
from pytest_kvmock.values.shared_stores import StoreSpec, read_stores
from pytest_kvmock.wire.codec.table import find_dialect
from pytest_kvmock.wire.sockets.waiting import Deadline

if TYPE_CHECKING:
    from pytest_kvmock.testing.process.process_world import ProcessWorld

_BLOCKS: Final = 4
"""The fewest blocks of a prompt, which has whole chunks of a store. A device holds four prompts, and a host two."""

_FILLERS: Final = 8
"""Number of prompts that push all earlier blocks out of device and host."""

_PROMPTS: Final = 16
"""Number of prompts. By chance a correct process sends all of them to one of two workers in 1 case of 32,768."""

_FEW: Final = 4
_MOST_WORKERS: Final = 7
_NOT_JUDGED: Final = "what it makes of stores that workers share"
_ASKED: Final = "blocks_by_owner(prompt) -> {store: {worker: blocks}}"


class ProcessStores(SaysUnjudged, ProcessJudge):
    """The part of `ProcessContract` about stores that workers share."""

    stores: ClassVar[Mapping[str, Any] | None] = None

    @classmethod
    def wrong_declaration(cls) -> str:
        """Return the first invalid or contradictory declaration of the class; "" if there is none."""
        if cls.stores is not None:
            try:
                stores = read_stores(cls.stores)
            except ValueError as error:
                return str(error)
            most = max((each for spec in stores.values() for each in spec.workers), default=0)
            if most >= _MOST_WORKERS:
                return f"stores: worker ids must be below {_MOST_WORKERS}, got {most}"
            if not cls.hears_events:
                return "stores is for a process that hears events, and hears_events is False"
        return super().wrong_declaration()

    def test_a_block_of_a_store_is_no_worker_s_own(self, kv_dialect: str) -> None:
        """With `stores`: prompts that are only in a store do not all go to the worker that announced them, and count on
        no device.
        """
        for spec in self._shared_by_several(kv_dialect):
            with self._over_stores(kv_dialect, spec) as world:
                for writer in dict.fromkeys((spec.workers[0], spec.workers[-1])):
                    prompts = [self._text(world, spec) for _ in range(_PROMPTS)]
                    where = f"worker {writer} has written prompts to the store {spec.name!r}, and no device has them"
                    self._write(world, spec, writer, prompts, where)
                    for prompt in prompts[:_FEW]:
                        if self.tells_blocks():
                            world.judge_blocks(where, prompt)
                        self._judge_owners(world, where, prompt)
                    if self.packs or (self.first_of_equals and writer == min(world.workers)):
                        continue  # such picks are declared
                    picks = [world.picked(where, prompt) for prompt in prompts]
                    if picks.count(writer) == len(picks):
                        world.fail(
                            f"{where}: all {len(picks)} went to worker {writer}; expected some at the others: "
                            f"workers {', '.join(map(str, spec.workers))} can load them alike"
                        )

    def test_a_store_outlives_what_happens_to_its_workers(self, kv_dialect: str) -> None:
        """With `stores`: a worker that has written prompts is cleared, restarts, or stops. Promises of these prompts to
        the other workers stay.
        """
        for spec in self._shared_by_several(kv_dialect):
            self._needs_owners()
            with self._over_stores(kv_dialect, spec) as world:
                writer, *others = spec.workers
                prompts = [self._text(world, spec) for _ in range(_FEW)]
                where = f"worker {writer} has written a prompt to the store {spec.name!r}"
                self._write(world, spec, writer, prompts, where)
                server = world.server
                for what, happens in (
                    ("was cleared", server.reset),
                    ("restarts", server.restart),
                    ("is down", server.stop),
                ):
                    before = [self._judge_owners(world, where, each).get(spec.name, {}) for each in prompts]
                    happens(writer)
                    if happens != server.stop:
                        world.push(where, writer, self._text(world, spec))
                    for prompt, promised in zip(prompts, before, strict=True):
                        now = self._judge_owners(world, f"{where}, and {what}", prompt).get(spec.name, {})
                        for worker in others:
                            if now.get(worker, 0) < promised.get(worker, 0):
                                world.fail(
                                    f"{where}, and {what}: it promises worker {worker} {now.get(worker, 0)} blocks; "
                                    f"expected {promised[worker]}, as before: a store keeps what it has"
                                )

    def test_a_promise_that_was_broken_is_lowered(self, kv_dialect: str) -> None:
        """With `stores`: the blocks of a store are deleted, twice. A repeated promise is reported at the end of the
        run, and is no failure: no stream announces the deletion, only the answers of engines show it.
        """
        for spec in self._shared_by_several(kv_dialect, MAY_BE_SILENT):
            self._needs_owners()
            with self._over_stores(kv_dialect, spec) as world:
                prompts = [self._text(world, spec) for _ in range(_FEW)]
                where = f"prompts in the store {spec.name!r} were deleted"
                self._write(world, spec, spec.workers[0], prompts, where)
                for worker in spec.workers:  # otherwise they announce recomputed blocks
                    folder: Any = world.server.harness.worker(worker).storage
                    folder.announces = False
                paid = []
                for _ in range(2):
                    for prompt in prompts:
                        world.server.harness.worker(spec.workers[0]).storage.lose(world.tokens_of(prompt))
                    paid.append({each for each in prompts if self._is_broken(world, where, each, spec)})
                    for worker in world.workers:
                        self._write(world, spec, worker, [], where)
                if twice := paid[0] & paid[1]:
                    self._note_unjudged(
                        f"{len(twice)} of {_FEW} promises of deleted blocks were paid for twice (an engine's answer, "
                        "cached_tokens, shows a miss)",
                        about=f"the store {spec.name!r}",
                    )

    # ------------------------------------------------------------------------------------------------ the means

    def _shared_by_several(self, kv_dialect: str, kinds: Sequence[str] = JUDGED_KINDS) -> list[StoreSpec]:
        """Return the stores of these kinds that engines of a dialect have and several workers share; skip the test if
        there is none.
        """
        __tracebackhide__ = True
        if self.stores is None:
            self.skip("stores is None", _NOT_JUDGED, "stores, and which worker can load from each,")
        self._needs_events()
        self._needs_a_start(_NOT_JUDGED)
        dialect, problem = find_dialect(kv_dialect), ""
        stores = read_stores(self.stores)
        found = [each for each in stores.values() if each.kind in kinds and len(each.workers) > 1]
        try:
            dialect.check_host(self_describing=True)
            spec = speaker_of(dialect)
            for each in found:
                units_of(each, spec.default_block_size)
                sizes = {"num_blocks": 8, "block_size": spec.default_block_size, "dp_rank": 0}
                given = self._tiers_for(each)
                spec.make(**sizes, sink=None, **({} if given is None else {"tiers": given}))
                if each.tier not in dialect.media:
                    problem = f"{kv_dialect} has no medium of a store of kind {each.kind!r}"
        except ValueError as error:
            problem = str(error)
        if not found:
            problem = f"stores has none of {', '.join(kinds)} with two workers"
        if problem:
            self.skip(problem, _NOT_JUDGED, "a dialect that says it" if found else "one that engines have")
        return found

    @staticmethod
    def _text(world: ProcessWorld, spec: StoreSpec) -> str:
        """Return a new prompt of whole chunks of a store."""
        return world.text(blocks_of(spec, world.server.harness.profile.block_size, _BLOCKS))

    def _tiers_for(self, spec: StoreSpec) -> Tiers | None:
        below = SHARED[spec.kind].tiers
        return None if below is None else Tiers.of({"host": 2 * _BLOCKS, "self_describing": True, **below})

    @contextmanager
    def _over_stores(self, kv_dialect: str, spec: StoreSpec) -> Iterator[ProcessWorld]:
        """Yield a world of at least three engines, one of which is in no store."""
        __tracebackhide__ = True
        stores = read_stores(self.stores)
        workers = max(3, 2 + max(each for store in stores.values() for each in store.workers))
        own = {spec.name: spec}
        size = speaker_of(find_dialect(kv_dialect)).default_block_size
        device = 4 * blocks_of(spec, size, _BLOCKS)
        with self._special(
            kv_dialect, num_blocks=device, workers=workers, stores=own, tiers=self._tiers_for(spec)
        ) as world:
            yield world

    def _write(self, world: ProcessWorld, spec: StoreSpec, writer: int, prompts: Sequence[str], where: str) -> None:
        """Let an engine serve prompts, then others until the first ones are only in the store and the process knows
        it.
        """
        __tracebackhide__ = True
        for prompt in prompts:
            world.direct(writer, prompt)
        for _ in range(_FILLERS):
            world.direct(writer, self._text(world, spec))
        assert not any(set(self._found(world, prompt)) - {spec.tier} for prompt in prompts)
        if self.tells_blocks({}):
            world.push(where, writer, self._text(world, spec))
        elif self.goes_by_prefix:
            world.wait_applied(where)

    @staticmethod
    def _found(world: ProcessWorld, prompt: str) -> dict[Any, dict[int, int]]:
        """Return the blocks of a prompt that the reference index finds, by tier and worker."""
        harness = world.server.harness
        hashes = world.hashes_of(prompt)
        with harness.publisher.lock:
            found = harness.inside.reference.find_tiered(hashes)
        return {tier: {key[0]: blocks for key, blocks in scores.items()} for tier, scores in found.items()}

    def _needs_owners(self) -> None:
        __tracebackhide__ = True
        if getattr(self, "blocks_by_owner", None) is None:
            self.skip("it has no blocks_by_owner(prompt)", "what it promises of a store", _ASKED)

    def _promises(self, world: ProcessWorld, prompt: str) -> Mapping[str, Mapping[int, int]]:
        """Return the promises of the process for stores."""
        __tracebackhide__ = True
        method, problem = getattr(self, "blocks_by_owner", None), ""
        if method is None:
            return {}
        try:
            answer = method(prompt)
        except Exception as error:  # noqa: BLE001 - the user's method may raise anything
            problem = f"blocks_by_owner(prompt) raised {type(error).__name__}: {' '.join(str(error).split())}"
            answer = {}
        stores = world.server.harness.inside.reference.stores
        if not isinstance(answer, Mapping) or not all(map(_is_blocks, answer.values())):
            problem = f"blocks_by_owner(prompt) must return {{store: {{worker: blocks}}}}, got {answer!r:.200}"
        elif unknown := next((each for each in answer if each not in stores), None):
            problem = f"blocks_by_owner(prompt): {unknown_text('store', unknown, stores)}"
        if problem:
            world.fail(problem)
        known: Mapping[str, Mapping[int, int]] = answer
        return known

    def _judge_owners(self, world: ProcessWorld, where: str, prompt: str) -> Mapping[str, Mapping[int, int]]:
        """Fail unless the promises of the process for stores become right in time; return them."""
        __tracebackhide__ = True
        deadline = Deadline(self.timeout_s)
        while True:
            promised = self._promises(world, prompt)
            stores = world.server.harness.inside.reference.stores
            wrong = first_wrong_promise(stores, self._found(world, prompt), promised, lambda spec: spec.workers)
            if wrong is None:
                return promised
            if not deadline.left:
                world.fail(
                    f"{where}: it promises worker {wrong.worker} {wrong.blocks} blocks of one from the store "
                    f"{wrong.store!r}; expected {wrong.expected}"
                )
            world.pause()

    def _is_broken(self, world: ProcessWorld, where: str, prompt: str, spec: StoreSpec) -> bool:
        """Send a prompt, and return whether its worker reused fewer blocks than the store's promise."""
        __tracebackhide__ = True
        promised = self._promises(world, prompt).get(spec.name, {})
        worker = world.picked(where, prompt)
        row = world.server.requests[-1]
        return (row.cached_tokens or 0) // world.page < promised.get(worker, 0)


def _is_blocks(answer: object) -> bool:
    return isinstance(answer, Mapping) and all(is_integer(each, 0) for each in (*answer, *answer.values()))
