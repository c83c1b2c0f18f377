"""Plays recorded programs of SGLang's hybrid cache, and compares every field of every step.

    python tests/cache/sglang/play_hybrid.py FILE...

It prints what differs by program and step, `N of M programs equal` last, and exits with 1 if any differs.
"""

import gzip
import json
import sys
import zlib
from fractions import Fraction
from pathlib import Path
from random import Random

from pytest_kvmock.cache.sglang.geometry import Geometry
from pytest_kvmock.cache.sglang.hybrid_cache import HybridCacheManager
from pytest_kvmock.cache.sglang.speculative import SglangSpeculative
from pytest_kvmock.events import Removed, Stored
from pytest_kvmock.sinks import CapturingSink
from pytest_kvmock.tokens import Prompt

SHOWN = 3
"""So many steps that differ are shown of a program."""

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
    """The speculative decoding of a program; those of older recordings say `eagle`, and decode token by token."""
    if "algorithm" in program:
        steps = program["steps_of_draft"]
        return SglangSpeculative(program["algorithm"], steps, program["topk"], program["draft_tokens"])
    return SglangSpeculative() if program.get("eagle") else None


class Player:
    """Plays the operations of one program as SGLang's scheduler calls the cache."""

    def __init__(self, program):
        self.size = program["page_size"]
        self.names = {name: number for number, name in enumerate(program["names"])}
        self.pages = {}
        self.requests = {}
        self.rng = Random(0)
        self.manager = HybridCacheManager(
            geometry=geometry_of(program),
            num_blocks=program["full_pages"],
            block_size=self.size,
            sink=CapturingSink(),
            policy=program.get("policy", "lru"),
            speculative=speculative_of(program),
            hold_events=True,
        )

    def play(self, operation):
        kind, *arguments = operation
        return getattr(self, f"play_{kind}")(*arguments)

    # ---------------------------------------------------------------------------------------------- operations

    def play_new(self):
        return {}

    def play_reset(self):
        return {"ok": self.manager.clear()}

    def play_probe(self, tokens):
        hit, _ = self.manager.match_prefix(tokens)
        key, _ = self.manager._key(tokens, None, None)
        return {"hit": hit, "full_hit": self.manager._tree.depth(key.names, len(key.names)) * self.size}

    def play_evict(self, full, window, states):
        return {"evicted": [*self.manager.evict(full, window, states)]}

    def play_add(self, batch):
        answers, admitted, pages, slots = [], [], 0, 0
        for name, tokens, limit in batch:
            answer, request, upto = self.add(tokens, limit, pages, slots)
            answers.append(answer)
            if request is not None:
                pages += -(-upto // self.size) - request.allocated
                slots += self.manager.slots_needed(request)
                self.requests[name] = request
                admitted.append((request, upto))
        self.manager.prefill(admitted)
        for request, _ in admitted:
            self.manager.checkpoint(request)
        return {"reqs": answers}

    def add(self, tokens, limit, pages, slots):
        manager = self.manager
        request = manager.request(Prompt(tokens), self.rng)
        if not manager.may_start(slots):
            return {"ok": False, "why": "slots"}, None, 0
        full_hit = manager.find(request)
        hit = request.found * self.size
        manager.admit(request)
        answer = {"hit": hit, "full_hit": full_hit, "branch": request.branch, "mbranch": request.state_branch}
        upto = self.cut(hit, len(tokens), limit)
        if manager.lacking(request, upto, pages, slots):
            manager.withdraw(request)
            return {"ok": False, "why": "room", **answer}, None, 0
        return {"ok": True, **answer}, request, upto

    def cut(self, start, end, limit):
        return start + limit // self.size * self.size if limit and end - start > limit else end

    def play_chunk(self, name, limit):
        request = self.requests[name]
        upto = self.cut(request.computed, len(request), limit)
        if self.manager.lacking(request, upto):
            return {"ok": False}
        self.manager.prefill([(request, upto)])
        self.manager.checkpoint(request)
        return {"ok": True}

    def play_decode(self, names, rows):
        requests = [self.requests[name] for name in names]
        done = 0
        for row in rows:
            if not self.manager.begin_step(requests):
                break
            for request, token in zip(requests, row, strict=True):
                self.manager.end_step(request, token)
            done += 1
        return {"done": done}

    def play_finish(self, name):
        self.manager.finish(self.requests.pop(name))
        return {}

    def play_retract(self, name):
        self.manager.retract(self.requests.pop(name))
        return {}

    # -------------------------------------------------------------------------------------------------- answers

    def events(self):
        return [self.row_of(data, token_ids) for data, token_ids, _ in self.manager.take_events()]

    def row_of(self, data, token_ids):
        if isinstance(data, Stored):
            self.pages |= zip(data.block_hashes, token_ids, strict=True)
            parent = None if data.parent_hash is None else self.names.get(data.parent_hash)
            return ["S", parent, self.numbers(data.block_hashes), sum(map(len, token_ids)), self.size]
        return ["R", self.numbers(data.block_hashes)] if isinstance(data, Removed) else ["C"]

    def numbers(self, names):
        return [self.names.get(name, name) for name in names]

    def sizes(self):
        manager, size = self.manager, self.size
        rows = [manager.available_size(), manager.evictable_size(), manager.protected_size()]
        for part, unit in ((manager.window, size), (manager.states, 1)):
            if part is not None:
                rows += [part.free * unit, part.evictable * unit, part.protected * unit]
        return rows

    def tree(self):
        rows = json.dumps(self.shape(self.manager._tree.root), separators=(",", ":"))
        return zlib.crc32(rows.encode())

    def shape(self, node):
        return [self.row(child) for child in sorted(node.children.values(), key=self.tokens)]

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
    """Whether free, evictable and protected, with what requests have, are all that there is: of pages, windows, slots."""
    requests, tree = manager.requests, manager._tree
    own = sum(request.allocated - request.protected for request in requests)
    sums = [(manager.max_capacity, manager._free, tree.evictable, tree.protected, own)]
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


def differences(program, of=Player):
    """Play a program by a player; yield the number of each step that differs, with what differs: field, recorded, ours."""
    player = of(program)
    for number, step in enumerate(program["steps"]):
        try:
            got = {"op": step["op"], **player.play(step["op"]), "events": player.events()}
            got |= {"tree": player.tree()} | ({"sizes": player.sizes()} if "sizes" in step else {})
            assert is_complete(player.manager)
        except Exception as error:  # noqa: BLE001 - a program that cannot be played differs
            yield number, [("error", None, repr(error))]
            return
        wrong = [
            (each, step.get(each), got.get(each))
            for each in step.keys() | got.keys()
            if step.get(each) != got.get(each)
        ]
        if wrong or step.keys() != got.keys():
            yield number, wrong


def read(path):
    return json.loads(gzip.decompress(Path(path).read_bytes()))


def play_all(programs, of=Player):
    """Play programs, and print what differs; returns how many are equal."""
    equal = 0
    for program in programs:
        found = []
        for number, wrong in differences(program, of):
            found.append((number, wrong))
            if len(found) == SHOWN:
                break
        equal += not found
        for number, wrong in found:
            print(f"{program['kind']} {program['seed']} step {number} {program['steps'][number]['op'][0]}:")
            for field, recorded, ours in sorted(wrong):
                print(f"  {field}: recorded {recorded}\n  {' ' * len(field)}  ours     {ours}")
    return equal


def main(paths):
    equal = played = 0
    for path in paths:
        programs = read(path)
        equal += play_all(programs)
        played += len(programs)
    print(f"{equal} of {played} programs equal")
    return int(equal < played)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
