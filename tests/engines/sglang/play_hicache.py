"""Play recorded programs of SGLang's HiCache, and compare every field of every step.

    python tests/engines/sglang/play_hicache.py FILE...

It prints the differences by program and step, `N of M programs equal` last, and exits with 1 if any program differs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import players

from pytest_kvmock import CapturingSink, StorageTier
from pytest_kvmock.engines.sglang.host.hicache_cache import HiCacheManager
from pytest_kvmock.engines.sglang.host.hicache_storage import HostStorage, PageStore

CachePlayer = players.player("engines/sglang/cache_player.py").CachePlayer

MEDIA = {StorageTier.DEVICE: "GPU", StorageTier.HOST_PINNED: "CPU_PINNED"}

STORAGE_OPTIONS = {
    "prefetch_policy": "prefetch_policy",
    "prefetch_threshold": "prefetch_threshold",
    "storage_batch": "batch",
    "retry_interval": "retry_interval",
    "retry_attempts": "retry_attempts",
    "timeout_base": "timeout_base",
    "timeout_per_ki": "timeout_per_ki_token",
}


class Player(CachePlayer):
    """Plays the operations of one program as SGLang's scheduler calls the cache.

    Attributes:
        hold: the number of steps after which events are taken.
        stash: whether the checkpoint of a chunk waits for the next step of the scheduler.
        stashed: the requests whose checkpoints wait.
    """

    def __init__(self, program):
        self.hold = program.get("hold", 1)
        self.stash = program.get("stash", False)
        self.as_rows = isinstance(program["steps"][0]["tree"], list)
        self.stashed = []
        super().__init__(program)

    def make_manager(self, program, **more):
        """Return the cache of a program.

        Args:
            program: the recorded program.
            more: the options of a cache with windows, states or pairs.
        """
        options = {ours: program[theirs] for theirs, ours in STORAGE_OPTIONS.items() if theirs in program}
        self.storage = HostStorage(PageStore(), **options) if program.get("storage") else None
        return HiCacheManager(
            host_blocks=program["host_pages"],
            write_policy=program["write_policy"],
            storage=self.storage,
            num_blocks=program["full_pages"],
            block_size=self.size,
            sink=CapturingSink(),
            policy=program.get("policy", "lru"),
            hold_events=True,
            **more,
        )

    def answer(self, number, step):
        try:
            got = self.play(step["op"])
        except ValueError as error:
            if "pages are needed" not in str(error):
                raise
            return {"oom": True, "events": self.events()}
        if number % self.hold == 0:
            got["events"] = self.events()
        got["tree"] = self.tree()
        if number:
            got |= {"sizes": self.sizes(), "pending": self.pending()}
        if self.storage is not None:
            got["stored"] = len(self.storage.store)
        return got

    def hits(self, found):
        size, manager = self.size, self.manager
        row = {"hit": found.usable * size, "host_hit": found.host_pages * size, "full_hit": found.depth * size}
        if manager.window is not None:
            row["window_host"] = found.window_pages * size
        if manager.states is not None:
            row["state_host"] = int(found.state_on_host)
        return row

    def looked_up(self, found):
        branch, state_branch = self.manager.branches(found)
        row = self.hits(found) | ({} if self.manager.window is None else {"branch": branch})
        return row if self.manager.states is None else row | {"mbranch": state_branch}

    # ---------------------------------------------------------------------------------------------- operations

    def play_probe(self, tokens):
        key, _ = self.manager._key(tokens, None, None)
        return self.hits(self.manager._tree.find(key.names, len(key.names)))

    def play_evict(self, pages):
        return {"evicted": self.manager.evict(pages)[0]}

    def play_evict_host(self, pages):
        return {"evicted": self.manager.evict_host(pages)[0]}

    def add(self, request, limit, held):
        manager, answer = self.manager, {}
        if not manager.may_start(held[2]):
            return {"ok": False, "why": "slots"}, 0, None
        if self.storage is not None:
            if self.storage.blocks(request):
                return {"ok": False, "why": "prefetch"}, 0, None
            answer["loaded"] = [*self.storage.take_loaded(request)]
        manager.find(request)
        found = request.match
        if self.storage is not None:
            again = self.storage.shrank(request, found.promised)
            if again is not None:
                again = {**self.looked_up(again[0]), "prefetching": again[1]}
                return {"ok": False, "why": "shrank", **answer, "again": again}, 0, None
        answer |= self.looked_up(found)
        manager.admit(request)
        upto = self.cut(found.promised * self.size, len(request), limit)
        if manager.lacks_for_load(request, upto, held):
            manager.withdraw(request)
            return {"ok": False, "why": "room", **answer}, 0, None
        slots = manager.slots_needed(request) + found.state_on_host
        if found.to_load:
            loaded = answer["load"] = manager.load(request)
            more = max(0, loaded - found.host_pages * self.size)
            # SGLang's scheduler keeps the length that it approved (`schedule_policy.py`, add_one_req). The
            # recording did not where the load reached beyond the cut: one program shows this.
            upto = len(request) if more and request.computed > upto else min(len(request), upto + more)
            if loaded < found.host_pages * self.size:
                upto = self.cut(request.computed, len(request), limit)
                if manager.lacks_for_load(request, upto, held, loads=False):
                    manager.withdraw(request)
                    return {"ok": False, "why": "room", **answer}, 0, None
        if self.storage is not None:
            self.storage.leave(request)
        pages = manager.pages_of(upto) - request.allocated
        return {"ok": True, **answer}, upto, (pages, pages, slots)

    def end_pass(self):
        self.manager.submit_writes()

    def checkpoint(self, request):
        if self.stash and request.computed < len(request):
            self.stashed.append(request)
        else:
            self.manager.checkpoint(request)

    def unstash(self, request):
        if request in self.stashed:
            self.stashed.remove(request)
            self.manager.checkpoint(request)

    def play_chunk(self, name, limit):
        self.unstash(self.requests[name])
        return super().play_chunk(name, limit)

    def play_retract(self, name):
        if self.requests[name] in self.stashed:
            self.stashed.remove(self.requests[name])
        return super().play_retract(name)

    def play_tick(self, writes, loads):
        self.manager.step(writes, loads)
        answer = {}
        if self.storage is not None:
            names = {request: name for name, request in self.waiting.items()}
            retried = [
                [names[request], {**self.looked_up(found), "prefetching": asked}]
                for request, found, asked in self.storage.step()
            ]
            if retried:
                answer["retried"] = retried
        for request in [each for each in self.requests.values() if each in self.stashed]:
            self.manager.checkpoint(request)
        self.stashed.clear()
        return answer

    # ------------------------------------------------------------------------------------------------ storage

    def play_queue(self, name, tokens):
        self.waiting[name] = request = self.request(tokens)
        found, asked = self.storage.arrive(request)
        return {**self.looked_up(found), "prefetching": asked}

    def play_abort(self, name):
        self.storage.leave(self.waiting.pop(name))
        return {}

    def play_io(self, *counts):
        return {"ran": self.storage.run(*counts)}

    def play_other(self, tokens):
        names = self.request(tokens).tokens.names
        self.storage.store.add(names, *self.storage.parts_of(names))
        return {}

    def play_lose(self, lost):
        tokens, start, part = (*lost, "all")[:3]
        names = self.request(tokens).tokens.names[start:]
        kinds = ("kv", "swa", "mamba")
        self.storage.store.lose(*(names if part in ("all", kind) else () for kind in kinds))
        return {}

    def play_clock(self, seconds):
        self.storage.now += seconds
        return {}

    # -------------------------------------------------------------------------------------------------- answers

    def row_of(self, event):
        row = super().row_of(event)
        return row if row[0] == "C" else [*row, MEDIA[event.tier]]

    def sizes(self):
        manager, tree = self.manager, self.manager._tree
        rows = [manager.available_size(), manager.evictable_size(), manager.protected_size(), manager.host_free]
        for pool, unit in ((tree.windows_below, self.size), (tree.states_below, 1)):
            if pool is not None:
                part = pool.part
                rows += [each * unit for each in (part.free, part.evictable, part.protected, pool.free)]
        return rows

    def pending(self):
        rows = [len(self.manager.writes), len(self.manager.loads)]
        if self.storage is not None:
            storage = self.storage
            rows += [storage.prefetching, storage.backing_up]
            rows += map(len, (storage.queries, storage.transfers, storage.reports, storage.backups))
        return rows

    def tokens(self, node):
        return [token for page in node.host.token_ids for token in page]

    def row(self, node):
        part = node.host
        row = [part.token_ids[0][0], len(node.names) * self.size, node.hit_count, int(node.on_device)]
        row += [int(part.on_host), node.lock_ref, len(part.locks), int(part.copy is not None)]
        return [*row, self.shape(node)]


def main(paths):
    return players.main(paths, Player.played)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
