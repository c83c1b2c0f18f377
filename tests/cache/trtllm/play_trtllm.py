"""Plays recorded programs of TensorRT-LLM's cache managers, and compares every answer, event, and the queues at the end.

    python tests/cache/trtllm/play_trtllm.py FILE...

It takes files of programs, of scenarios and of hashes, prints what differs by program and step, `N of M programs equal`
last, and exits with 1 if any differs. Programs of V2 are counted as skipped, on a line of their own.
"""

import gzip
import json
import sys
from pathlib import Path

from pytest_kvmock.cache.trtllm.hashes import V1Hasher
from pytest_kvmock.cache.trtllm.v1_manager import V1Manager
from pytest_kvmock.cache.trtllm.v1_request import Retention
from pytest_kvmock.events import Cleared, Removed, Stored
from pytest_kvmock.sinks import CapturingSink

SHOWN = 3
"""So many steps that differ are shown of a program."""


class Player:
    """Plays the calls of one program as TensorRT-LLM's engine does."""

    def __init__(self, config):
        least = config["offload_min_priority"]
        self.sink = CapturingSink()
        self.manager = V1Manager(
            num_blocks=config["windows"][-1][1],
            block_size=config["tokens_per_block"],
            sink=self.sink,
            windows=[tuple(window) for window in config["windows"]],
            max_seq_len=config["max_seq_len"],
            partial_reuse=config["enable_partial_reuse"],
            copy_on_partial_reuse=config["copy_on_partial_reuse"],
            onboard=config["onboard_blocks"],
            removed_order=["1.2", "2026-03"][config["removed_batching"]],
            event_buffer=config["event_buffer_max_size"],
            **({} if least is None else {"offload_min_priority": least}),
        )
        self.requests = {}

    def play(self, call, *arguments):
        return getattr(self, f"play_{call}")(*arguments)

    def play_add(self, name, prompt, adapter, salt, retention):
        kept = None
        if retention is not None:
            kept = Retention(tuple(map(tuple, retention["ranges"])), tuple(retention["decode"]))
        request = self.manager.new_request(prompt, retention=kept, adapter=adapter, cache_salt=salt)
        self.requests[name] = request
        hit = self.manager.lookup(request)
        found = self.manager.add(request)
        assert hit >= found  # what it evicts on its way may be what it would have hit
        return [found, {str(window): [block.id for block in table] for window, table in request.tables.items()}]

    def play_new_token(self, name, token):
        self.manager.new_token(self.requests[name], token)

    def play_store_context_blocks(self, name):
        self.manager.store_context_blocks(self.requests[name])

    def play_add_token(self, name):
        return {str(window): block.id for window, block in self.manager.add_token(self.requests[name]).items()}

    def play_remove(self, name, store):
        self.manager.remove(self.requests.pop(name), store=store)

    def play_time(self, now):
        self.manager.tick(now)

    def play_refresh(self):
        self.manager.refresh()

    def play_free(self):
        return {str(window.window): window.queues.free for window in self.manager.windows}

    def play_flush(self):
        before = len(self.sink.events)
        self.manager.flush()
        return [row_of(event) for event in self.sink.router_events[before:]]

    def final(self):
        windows = self.manager.windows
        queues = {
            str(each.window): [[block.id for block in each.queues.order(level)] for level in (0, 1)] for each in windows
        }
        return {"queues": queues, "free": self.play_free()}


def row_of(event):
    """An event in the form of the recordings."""
    data, extra = event.data, event.extra
    row = [event.event_id, extra["window_size"]]
    if isinstance(data, Cleared):
        return [*row, "C", list(extra["blocks_per_level"])]
    if isinstance(data, Removed):
        return [*row, "R", list(data.block_hashes)]
    if isinstance(data, Stored):
        rows = zip(data.block_hashes, event.token_ids, extra["cache_levels"], extra["priorities"], strict=True)
        return [*row, "S", data.parent_hash, [[name, list(tokens), *levels] for name, tokens, *levels in rows]]
    return [*row, "U", data.block_hash, *(each and list(each) for each in (data.levels, data.priorities))]


def differences(program):
    """Play a program; yield each step that differs: its number or "final", what was called, recorded and ours."""
    player = Player(program["config"])
    for number, (call, *arguments, recorded) in enumerate(program["log"]):
        try:
            ours = player.play(call, *arguments)
        except Exception as error:  # noqa: BLE001 - a program that cannot be played differs
            yield number, call, recorded, repr(error)
            return
        if ours != recorded:
            yield number, call, recorded, ours
    if player.final() != program["final"]:
        yield "final", "queues", program["final"], player.final()


def hash_difference(row):
    """Whether a recorded chain of hashes differs: nothing, or one difference as `differences` has them."""
    hasher = V1Hasher(row["lora_id"], row["salt"])
    ours = [hasher.name(each) for each in hasher.digests(row["tokens"], row["block_size"], 0, None)]
    recorded = row["v1_block_key"]
    return [] if ours == recorded else [("hash", "v1_block_key", recorded, ours)]


def programs_of(path):
    """What a file has: for each program what to call it, and its differences; and how many are of V2."""
    opened = gzip.open if str(path).endswith(".gz") else open
    with opened(path) as file:
        found = json.load(file)
    if isinstance(found, list):
        return [(f"chain {place}", hash_difference(row)) for place, row in enumerate(found)], 0
    rows = found.get("programs", []) + found.get("v1", [])
    of_v2 = [row for row in rows if "life_cycles" in row["config"]]
    rows = [row for row in rows if row not in of_v2]
    named = [(row.get("name", row.get("seed")), differences(row)) for row in rows]
    return named, len(of_v2) + len(found.get("v2", []))


def main(paths):
    equal = played = 0
    for path in paths:
        programs, of_v2 = programs_of(path)
        for name, found in programs:
            shown = [each for each, _ in zip(found, range(SHOWN), strict=False)]
            played += 1
            equal += not shown
            for number, call, recorded, ours in shown:
                print(f"{Path(path).name}: {name}, step {number}, {call}:\n  recorded {recorded}\n  ours     {ours}")
        if of_v2:
            print(f"{Path(path).name}: {of_v2} programs of V2 skipped")
    print(f"{equal} of {played} programs equal")
    return int(equal < played)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
