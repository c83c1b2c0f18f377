"""Play recorded programs of TensorRT-LLM's cache managers, and compare each answer, each event and the final queues.

    python tests/engines/trtllm/play_trtllm.py FILE...

It takes files of programs, scenarios and hashes, prints the differences by program and step, `N of M programs equal`
last, and exits with 1 if any program differs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import players

from pytest_kvmock import CapturingSink, Cleared, Removed, Stored
from pytest_kvmock.engines import V1Hasher, V2Hasher
from pytest_kvmock.engines.trtllm.v1_manager import V1Manager
from pytest_kvmock.engines.trtllm.v1_request import Retention
from pytest_kvmock.engines.trtllm.v2_manager import V2Manager
from pytest_kvmock.values import Updated


class AnyPlayer:
    """Play the calls of one program as TensorRT-LLM's engine makes them."""

    def __init__(self, config):
        self.sink = CapturingSink()
        self.manager = self.made(config)
        self.requests = {}

    def play(self, call, *arguments):
        return getattr(self, f"play_{call}")(*arguments)

    def play_flush(self):
        before = len(self.sink.events)
        self.manager.flush()
        return [row_of(event) for event in self.sink.router_events[before:]]


class Player(AnyPlayer):
    """Play a program of V1."""

    def made(self, config):
        least = config["offload_min_priority"]
        return V1Manager(
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

    def play_add(self, name, prompt, adapter, salt, retention):
        kept = None
        if retention is not None:
            kept = Retention(tuple(map(tuple, retention["ranges"])), tuple(retention["decode"]))
        request = self.manager.new_request(prompt, retention=kept, adapter=adapter, cache_salt=salt)
        self.requests[name] = request
        hit = self.manager.lookup(request)
        found = self.manager.add(request)
        assert hit >= found  # it may evict blocks that it would have hit
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

    def final(self):
        windows = self.manager.windows
        queues = {
            str(each.window): [[block.id for block in each.queues.order(level)] for level in (0, 1)] for each in windows
        }
        return {"queues": queues, "free": self.play_free()}


class V2Player(AnyPlayer):
    """Play a program of V2."""

    def made(self, config):
        device, *lower = config["slots"]
        return V2Manager(
            num_blocks=device,
            block_size=config["tokens_per_block"],
            sink=self.sink,
            levels=lower,
            groups=[tuple(group) for group in config["life_cycles"]],
            pool_groups=config["pool_group_of_life_cycle"],
            max_seq_len=config["max_seq_len"],
            partial_reuse=config["enable_partial_reuse"],
            max_util_for_resume=config["max_util_for_resume"],
            hash_algo=config["hash_algo"],
            event_buffer=config["event_buffer_max_size"],
        )

    def play_prepare_context(self, name, prompt, adapter, salt):
        request = self.requests[name] = self.manager.new_request(prompt, adapter=adapter, cache_salt=salt)
        hit = self.manager.lookup(request)
        found, is_resumed = self.manager.prepare_context(request)
        assert hit == found
        return [found, is_resumed]

    def play_resume(self, name):
        return self.manager.resume(self.requests[name])

    def play_suspend(self, name):
        self.manager.suspend(self.requests[name])

    def play_resize_context(self, name, tokens, is_first):
        return self.manager.resize_context(self.requests[name], tokens, first_chunk=is_first)

    def play_update_context(self, name, prompt, upto):
        assert prompt == self.requests[name].tokens
        self.manager.update_context(self.requests[name], upto)

    def play_try_allocate_generation(self, name):
        return self.manager.try_allocate_generation(self.requests[name])

    def play_update_generation(self, name, history):
        return self.manager.update_generation(self.requests[name], history)

    def play_close(self, name):
        self.manager.close(self.requests.pop(name))

    def play_probe(self, tokens, adapter, salt):
        return self.manager.probe(tokens, type(self.manager.hasher)(adapter, salt))

    def play_clear(self):
        self.manager.tree.clear()

    def play_free(self):
        return self.manager.free_slots()

    def final(self):
        found = {
            "queues": [[[self.page(page) for page in pool] for pool in level] for level in self.manager.pools.queues]
        }
        for name in list(self.requests):
            self.play_close(name)
        self.play_clear()
        return {**found, "last_events": self.play_flush()}

    def page(self, page):
        """Return a page in the form of the recordings: its layer group, and the name of its block."""
        block = page.found_block
        is_whole = self.manager.hash_algo == "v2_sha256"
        return [page.group, None if block is None else block.digest.hex() if is_whole else block.name]


def row_of(event):
    """Return an event in the form of the recordings."""
    data, extra = event.data, event.extra
    row = [event.event_id, *([extra["layer_group_id"]] if "layer_group_id" in extra else []), extra["window_size"]]
    if "digests" in extra:
        parent, digests = extra["digests"]
        whole = [digest.hex() for digest in digests]
        if isinstance(data, Stored):
            data = Stored(parent and parent.hex(), whole, data.tokens_hashes)
        else:
            data = Removed(whole) if isinstance(data, Removed) else Updated(*whole, data.levels, data.priorities)
    if isinstance(data, Cleared):
        return [*row, "C", list(extra["blocks_per_level"])]
    if isinstance(data, Removed):
        return [*row, "R", list(data.block_hashes)]
    if isinstance(data, Stored):
        rows = zip(data.block_hashes, event.token_ids, extra["cache_levels"], extra["priorities"], strict=True)
        return [*row, "S", data.parent_hash, [[name, list(tokens), *levels] for name, tokens, *levels in rows]]
    return [*row, "U", data.block_hash, *(each and list(each) for each in (data.levels, data.priorities))]


def differences(program):
    """Play a program; yield each different step: its number or "final", the call, the recorded result and ours."""
    player = (V2Player if "life_cycles" in program["config"] else Player)(program["config"])
    for number, (call, *arguments, recorded) in enumerate(program["log"]):
        try:
            ours = player.play(call, *arguments)
        except Exception as error:  # noqa: BLE001 - a program that cannot be played counts as different
            yield number, call, recorded, repr(error)
            return
        if ours != recorded:
            yield number, call, recorded, ours
    final = player.final()
    if final != program["final"]:
        yield "final", "queues", program["final"], final


def hash_differences(row):
    """Yield the differences of the names of a recorded chain of hashes, in the form of `differences`."""
    one, other = (kind(row["lora_id"], row["salt"]) for kind in (V1Hasher, V2Hasher))
    digests = other.digests(row["tokens"], row["block_size"], 0, None)
    ours = {
        "v1_block_key": [one.name(each) for each in one.digests(row["tokens"], row["block_size"], 0, None)],
        "v2_sha256": [each.hex() for each in digests],
        "v2_sha256_64": [other.name(each) for each in digests],
    }
    return [("hash", name, row[name], found) for name, found in ours.items() if found != row[name]]


def played(value):
    """Yield the name of each program or chain of hashes with its first differences as text, or None."""
    if isinstance(value, list):
        found = ((f"chain {place}", hash_differences(row)) for place, row in enumerate(value))
    else:
        rows = (row for kind in ("programs", "v1", "v2") for row in value.get(kind, []))
        found = ((players.name_of(row), differences(row)) for row in rows)
    for name, wrong in found:
        texts = (
            f"step {number}, {call}:\n  recorded {recorded}\n  ours     {ours}"
            for number, call, recorded, ours in wrong
        )
        yield name, players.first_of(texts)


def main(paths):
    return players.main(paths, played)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
