"""Play recorded programs of SGLang's HiCache below windows, states and pairs, as its scheduler calls the cache.

The cache, its host and its storage are those of the package. This program models what the recordings made up: when
copies end, when threads run, the clock, and the scheduler's order of calls and chunks in `add`.
"""

from players import player

HICACHE = player("engines/sglang/play_hicache.py")
HYBRID = player("engines/sglang/play_hybrid.py")


class Player(HICACHE.Player):
    """Plays the operations of one program."""

    def make_manager(self, program):
        self.has_eagle = bool(program.get("eagle"))
        return super().make_manager(
            program,
            geometry=HYBRID.geometry_of(program),
            host_windows=program.get("swa_host_pages"),
            host_states=program.get("host_states"),
            speculative=HYBRID.speculative_of({"algorithm": "EAGLE", **program} if self.has_eagle else program),
        )

    def play_evict(self, *units):
        return {"evicted": [*self.manager.evict(*units)]}

    def play_evict_host(self, *units):
        return {"evicted": [*self.manager.evict_host(*units)]}

    def row(self, node):
        first, part = node.host.token_ids[0][0], node.host
        row = [first[0] if isinstance(first, tuple) else first, len(node.names) * self.size, node.hit_count]
        row += [int(part.copy is not None)]
        row += [int(node.on_device), int(part.on_host), node.lock_ref, len(part.locks)]
        for pool in self.manager._tree.pools:
            own, copy = pool.part.of(node), pool.part.copy_of(node)
            row += [int(own.there), int(copy.there), own.lock_ref, len(copy.holds)]
        return [*row, self.shape(node)]
