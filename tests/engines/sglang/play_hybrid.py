"""Play recorded programs of SGLang's hybrid cache, and compare every field of every step.

    python tests/engines/sglang/play_hybrid.py FILE...

It prints the differences by program and step, `N of M programs equal` last, and exits with 1 if any program differs.
"""

import sys
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import players

from pytest_kvmock import CapturingSink, Stored
from pytest_kvmock.engines import SglangSpeculative
from pytest_kvmock.engines.sglang.geometry import Geometry
from pytest_kvmock.engines.sglang.hybrid_cache import HybridCacheManager

CachePlayer = players.player("engines/sglang/cache_player.py").CachePlayer

OPTIONS = {
    "window": "window",
    "swa_interval": "window_interval",
    "gates": "window_gates",
    "release_swa": "release_window",
    "mamba_slots": "states",
    "mamba_state_chunk": "state_grid",
    "mamba_interval": "state_interval",
}


def geometry_of(program):
    options = {ours: program[theirs] for theirs, ours in OPTIONS.items() if theirs in program}
    if "swa_pages" in program:
        options["window_ratio"] = Fraction(program["swa_pages"], program["full_pages"])
    if "mamba_slots" in program:
        options["state_strategy"] = "extra_buffer" if program["extra_buffer"] else "no_buffer"
        most = program.get("max_states_per_path", -1)
        options["states_per_path"] = None if most < 0 else most
    return Geometry.of(options) or Geometry()


def speculative_of(program):
    """Return the speculative decoding of a program; older recordings name it `eagle`, and decode token by token."""
    if "algorithm" in program:
        steps = program["steps_of_draft"]
        return SglangSpeculative(program["algorithm"], steps, program["topk"], program["draft_tokens"])
    return SglangSpeculative() if program.get("eagle") else None


class Player(CachePlayer):
    """Plays the operations of one program as SGLang's scheduler calls the cache."""

    def __init__(self, program):
        super().__init__(program)
        self.pages = {}

    def make_manager(self, program):
        return HybridCacheManager(
            geometry=geometry_of(program),
            num_blocks=program["full_pages"],
            block_size=self.size,
            sink=CapturingSink(),
            policy=program.get("policy", "lru"),
            speculative=speculative_of(program),
            hold_events=True,
        )

    def answer(self, number, step):
        got = {**self.play(step["op"]), "events": self.events(), "tree": self.tree()}
        if "sizes" in step:
            got["sizes"] = self.sizes()
        assert is_complete(self.manager)
        return got

    def play_probe(self, tokens):
        hit, _ = self.manager.match_prefix(tokens)
        key, _ = self.manager._key(tokens, None, None)
        return {"hit": hit, "full_hit": self.manager._tree.depth(key.names, len(key.names)) * self.size}

    def add(self, request, limit, held):
        manager, (pages, _, slots) = self.manager, held
        if not manager.may_start(slots):
            return {"ok": False, "why": "slots"}, 0, None
        full_hit = manager.find(request)
        hit = request.found * self.size
        manager.admit(request)
        answer = {"hit": hit, "full_hit": full_hit, "branch": request.branch, "mbranch": request.state_branch}
        upto = self.cut(hit, len(request), limit)
        if manager.lacking(request, upto, pages, slots):
            manager.withdraw(request)
            return {"ok": False, "why": "room", **answer}, 0, None
        pages = manager.pages_of(upto) - request.allocated
        return {"ok": True, **answer}, upto, (pages, pages, manager.slots_needed(request))

    # -------------------------------------------------------------------------------------------------- answers

    def row_of(self, event):
        if isinstance(event.data, Stored):
            self.pages |= zip(event.data.block_hashes, event.token_ids, strict=True)
        return super().row_of(event)

    def sizes(self):
        manager, size = self.manager, self.size
        rows = [manager.available_size(), manager.evictable_size(), manager.protected_size()]
        for part, unit in ((manager.window, size), (manager.states, 1)):
            if part is not None:
                rows += [part.free * unit, part.evictable * unit, part.protected * unit]
        return rows

    def tokens(self, node):
        return [token for name in node.names for token in self.pages[name]]

    def row(self, node):
        first = self.pages[node.names[0]][0]
        row = [first[0] if isinstance(first, tuple) else first, len(node.names) * self.size]
        row += [node.hit_count, node.lock_ref]
        for part, of_node in ((self.manager.window, "window"), (self.manager.states, "state")):
            if part is not None:
                row += [int(getattr(node, of_node).there), getattr(node, of_node).lock_ref]
        return [*row, self.shape(node)]


def is_complete(manager):
    """Return whether free, evictable, protected and request-owned units add up to all pages, windows and slots."""
    requests, tree = manager.requests, manager._tree
    own = sum(request.allocated - request.protected for request in requests)
    sums = [(manager.num_blocks, manager._free, tree.evictable, tree.protected, own)]
    if manager.window is not None:
        own = sum(each.allocated - max(each.dead, each.protected) for each in requests)
        sums.append(
            (manager.window.capacity, manager.window.free, manager.window.evictable, manager.window.protected, own)
        )
    if manager.states is not None:
        own = sum(each.slots for each in requests)
        sums.append(
            (manager.states.capacity, manager.states.free, manager.states.evictable, manager.states.protected, own)
        )
    return all(capacity == sum(parts) and min(parts) >= 0 for capacity, *parts in sums)


def main(paths):
    return players.main(paths, Player.played)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
