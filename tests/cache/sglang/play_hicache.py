"""Plays recorded programs of SGLang's HiCache, and compares every field of every step.

    python tests/cache/sglang/play_hicache.py FILE...

It prints what differs by program and step, `N of M programs equal` last, and exits with 1 if any differs.
"""

import gzip
import json
import sys
import zlib
from pathlib import Path
from random import Random

from pytest_kvmock.cache.sglang.hicache_cache import HiCacheManager
from pytest_kvmock.cache.sglang.hicache_storage import HostStorage, PageStore
from pytest_kvmock.events import Removed, StorageTier, Stored
from pytest_kvmock.sinks import CapturingSink
from pytest_kvmock.tokens import Prompt

SHOWN = 3
"""So many steps that differ are shown of a program."""

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


class Player:
    """Plays the operations of one program as SGLang's scheduler calls the cache."""

    def __init__(self, program):
        self.size = program["page_size"]
        self.hold = program.get("hold", 1)
        self.stash = program.get("stash", False)
        self.as_rows = isinstance(program["steps"][0]["tree"], list)
        self.names = {name: number for number, name in enumerate(program["names"])}
        self.requests = {}
        self.waiting = {}
        self.stashed = []
        self.rng = Random(0)
        self.storage = None
        if program.get("storage"):
            options = {ours: program[theirs] for theirs, ours in STORAGE_OPTIONS.items()}
            self.storage = HostStorage(PageStore(), **options)
        self.manager = HiCacheManager(
            host_blocks=program["host_pages"],
            write_policy=program["write_policy"],
            storage=self.storage,
            num_blocks=program["full_pages"],
            block_size=self.size,
            sink=CapturingSink(),
            policy=program.get("policy", "lru"),
            hold_events=True,
        )

    def play(self, operation):
        kind, *arguments = operation
        return getattr(self, f"play_{kind}")(*arguments)

    def request(self, tokens):
        return self.manager.request(Prompt(tokens), self.rng)

    def hits(self, found):
        hit, full_hit = found.usable * self.size, found.depth * self.size
        return {"hit": hit, "host_hit": full_hit - hit, "full_hit": full_hit}

    # ---------------------------------------------------------------------------------------------- operations

    def play_new(self):
        return {}

    def play_reset(self):
        return {"ok": not self.waiting and self.manager.clear()}

    def play_probe(self, tokens):
        key, _ = self.manager._key(tokens, None, None)
        return self.hits(self.manager._tree.find(key.names, len(key.names)))

    def play_evict(self, tokens):
        return {"evicted": self.manager.evict(tokens)[0]}

    def play_evict_host(self, tokens):
        return {"evicted": self.manager.evict_host(tokens)}

    def play_add(self, batch):
        answers, admitted, held = [], [], 0
        for name, tokens, limit in batch:
            request = self.waiting.get(name) or self.request(tokens)
            answer, upto = self.add(request, limit, held)
            answers.append(answer)
            if answer["ok"]:
                held += self.manager.pages_of(upto) - request.allocated
                self.waiting.pop(name, None)
                self.requests[name] = request
                admitted.append((request, upto))
        if admitted:
            self.manager.prefill(admitted)
            for request, _ in admitted:
                self.checkpoint(request)
            self.manager.submit_writes()
        return {"reqs": answers}

    def add(self, request, limit, held):
        manager, answer = self.manager, {}
        if self.storage is not None:
            if self.storage.blocks(request):
                return {"ok": False, "why": "prefetch"}, 0
            answer["loaded"] = [*self.storage.take_loaded(request)]
        manager.find(request)
        found = request.match
        if self.storage is not None:
            again = self.storage.shrank(request, found.depth)
            if again is not None:
                again = {**self.hits(again[0]), "prefetching": again[1]}
                return {"ok": False, "why": "shrank", **answer, "again": again}, 0
        answer |= self.hits(found)
        manager.admit(request)
        upto = self.cut(found.depth * self.size, len(request), limit)
        if manager.lacking(request, upto, held):
            manager.withdraw(request)
            return {"ok": False, "why": "room", **answer}, 0
        if found.depth > found.usable:
            answer["load"] = manager.load(request)
            if not answer["load"]:
                upto = self.cut(request.computed, len(request), limit)
                if manager.lacking(request, upto, held):
                    manager.withdraw(request)
                    return {"ok": False, "why": "room", **answer}, 0
        if self.storage is not None:
            self.storage.leave(request)
        return {"ok": True, **answer}, upto

    def cut(self, start, end, limit):
        return start + limit // self.size * self.size if limit and end - start > limit else end

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
        request = self.requests[name]
        self.unstash(request)
        upto = self.cut(request.computed, len(request), limit)
        ok = not self.manager.lacking(request, upto)
        if ok:
            self.manager.prefill([(request, upto)])
            self.checkpoint(request)
            self.manager.submit_writes()
        return {"ok": ok}

    def play_decode(self, names, rows):
        requests = [self.requests[name] for name in names]
        done = 0
        for row in rows:
            if not self.manager.begin_step(requests):
                break
            for request, token in zip(requests, row, strict=True):
                self.manager.end_step(request, token)
            done += 1
        self.manager.submit_writes()
        return {"done": done}

    def play_finish(self, name):
        self.manager.finish(self.requests.pop(name))
        self.manager.submit_writes()
        return {}

    def play_retract(self, name):
        request = self.requests.pop(name)
        if request in self.stashed:
            self.stashed.remove(request)
        self.manager.retract(request)
        return {}

    def play_tick(self, writes, loads):
        self.manager.step(writes, loads)
        answer = {}
        if self.storage is not None:
            names = {request: name for name, request in self.waiting.items()}
            retried = [
                [names[request], {**self.hits(found), "prefetching": asked}]
                for request, found, asked in self.storage.step()
            ]
            if retried:
                answer["retried"] = retried
        for request in self.stashed:
            self.manager.checkpoint(request)
        self.stashed.clear()
        return answer

    # ------------------------------------------------------------------------------------------------ storage

    def play_queue(self, name, tokens):
        self.waiting[name] = request = self.request(tokens)
        found, asked = self.storage.arrive(request)
        return {**self.hits(found), "prefetching": asked}

    def play_abort(self, name):
        self.storage.leave(self.waiting.pop(name))
        return {}

    def play_io(self, *counts):
        return {"ran": self.storage.run(*counts)}

    def play_other(self, tokens):
        self.storage.store.add(self.request(tokens).tokens.names)
        return {}

    def play_lose(self, lost):
        tokens, start = lost
        self.storage.store.lose(self.request(tokens).tokens.names[start:])
        return {}

    def play_clock(self, seconds):
        self.storage.now += seconds
        return {}

    # -------------------------------------------------------------------------------------------------- answers

    def events(self):
        return [self.row_of(event) for event in self.manager.take_events()]

    def row_of(self, event):
        data, medium = event.data, MEDIA[event.tier]
        if isinstance(data, Stored):
            parent = None if data.parent_hash is None else self.names.get(data.parent_hash)
            tokens = sum(map(len, event.token_ids))
            return ["S", parent, self.numbers(data.block_hashes), tokens, self.size, medium]
        return ["R", self.numbers(data.block_hashes), medium] if isinstance(data, Removed) else ["C"]

    def numbers(self, names):
        return [self.names.get(name, name) for name in names]

    def sizes(self):
        manager = self.manager
        return [manager.available_size(), manager.evictable_size(), manager.protected_size(), manager.host_free]

    def pending(self):
        rows = [len(self.manager.writes), len(self.manager.loads)]
        if self.storage is not None:
            storage = self.storage
            rows += [storage.prefetching, storage.backing_up]
            rows += map(len, (storage.queries, storage.transfers, storage.reports, storage.backups))
        return rows

    def tree(self):
        rows = self.shape(self.manager._tree.root)
        return rows if self.as_rows else zlib.crc32(json.dumps(rows, separators=(",", ":")).encode())

    def shape(self, node):
        return [self.row(child) for child in sorted(node.children.values(), key=self.tokens)]

    def tokens(self, node):
        return [token for page in node.host.token_ids for token in page]

    def row(self, node):
        part = node.host
        row = [part.token_ids[0][0], len(node.names) * self.size, node.hit_count, int(node.on_device)]
        row += [int(part.on_host), node.lock_ref, len(part.locks), int(part.copy is not None)]
        return [*row, self.shape(node)]


def differences(program):
    """Play a program; yield the number of each step that differs, with what differs: field, recorded, ours."""
    player = Player(program)
    for number, step in enumerate(program["steps"]):
        try:
            try:
                got = {"op": step["op"], **player.play(step["op"])}
            except ValueError as error:
                if "pages are needed" not in str(error):
                    raise
                got = {"op": step["op"], "oom": True}
            if number % player.hold == 0 or "oom" in got:
                got["events"] = player.events()
            if "oom" not in got:
                got["tree"] = player.tree()
                if number:
                    got |= {"sizes": player.sizes(), "pending": player.pending()}
                if player.storage is not None:
                    got["stored"] = len(player.storage.store.pages)
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


def main(paths):
    equal = played = 0
    for path in paths:
        for program in read(path):
            found = []
            for number, wrong in differences(program):
                found.append((number, wrong))
                if len(found) == SHOWN:
                    break
            played += 1
            equal += not found
            which = program.get("name", program.get("seed"))
            for number, wrong in found:
                print(f"{program['kind']} {which} step {number} {program['steps'][number]['op'][0]}:")
                for field, recorded, ours in sorted(wrong, key=lambda each: each[0]):
                    print(f"  {field}: recorded {recorded}\n  {' ' * len(field)}  ours     {ours}")
    print(f"{equal} of {played} programs equal")
    return int(equal < played)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
