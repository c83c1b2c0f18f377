"""Play recorded programs of vLLM with several cache groups on our manager, and print the differences by step.

    python tests/engines/vllm/play_hybrid.py FILE...

The last line is "N of M programs equal"; the exit status is 1 if any differs.
"""

import json
import sys
from pathlib import Path
from zlib import crc32

sys.path.insert(0, str(Path(__file__).parents[2]))

import players

from pytest_kvmock import Cleared, Prompt, Removed
from pytest_kvmock.engines import CacheGroup, Speculative
from pytest_kvmock.engines.vllm.hashes import ExtraKeys
from pytest_kvmock.engines.vllm.hybrid import VllmHybridManager
from pytest_kvmock.values import SparseStored
from pytest_kvmock.values.prompt_keys import group_of


def draft_model(program):
    """Return the draft model of a program; older recordings name it `use_eagle`, which is the drop mode."""
    if "spec" in program:
        given = dict(program["spec"])
        return Speculative(modules=given.pop("mtp_layers", 1), **given)
    return Speculative("eagle", program["lookahead"], plain_hashes=True) if program.get("use_eagle") else None


def groups_of(program):
    """Return the fields of its groups; a draft model determines the scratch blocks."""
    if draft_model(program) is None:
        return program["groups"]
    return [
        {name: field for name, field in group.items() if name != "speculative_blocks"} for group in program["groups"]
    ]


class Player:
    """A manager under replay, and its scheduler's state of the requests."""

    def __init__(self, program):
        self.groups = program["groups"]
        self.is_async = program["async"]
        self.max_model_len = program["max_model_len"]
        self.lookahead = program.get("lookahead", 0)
        self.manager = VllmHybridManager(
            groups=[CacheGroup(**each) for each in groups_of(program)],
            num_blocks=program["num_blocks"] - 1,
            sink=self,
            retention=program["retention"],
            match_unit=program.get("unit"),
            speculative=draft_model(program),
            enable_caching=program.get("caching", True),
            max_num_batched_tokens=program["max_batch"],
            max_model_len=program["max_model_len"],
            async_scheduling=program["async"],
        )
        self.events = []
        self.kinds = program["facts"]["kinds"]
        self.requests = {}
        self.placeholders = {}

    def facts(self):
        geometry = self.manager.geometry
        return {
            "scheduler_block_size": geometry.scheduler_block_size,
            "hash_block_size": geometry.hash_unit,
            "partial_hits": geometry.fine_hits,
            "hit_alignment": geometry.alignment,
            "admission_caps": self.manager.admission_caps,
        }

    def make(self, runs, salt):
        return self.manager.new_request(
            Prompt(players.unrolled(runs)), keys=None if salt is None else ExtraKeys(cache_salt=salt)
        )

    def do_step(self):
        self.manager.new_step_starts()

    def do_new(self, name, runs, salt):
        self.requests[name] = self.make(runs, salt)
        self.placeholders[name] = 0

    def do_look(self, runs, salt):
        hits = self.manager.get_computed_blocks(self.make(runs, salt))
        return {"computed_tokens": hits.num_tokens, "junction": hits.junction}

    def do_admit(self, name, budget):
        manager, request = self.manager, self.requests[name]
        hits = manager.get_computed_blocks(request)
        tokens = manager.chunk_tokens(request, min(len(request) - hits.num_tokens, budget), hits)
        before = [[len(blocks), sum(map(bool, blocks))] for blocks in hits.blocks]
        ok = bool(tokens) and None is not manager.allocate_slots(
            request, tokens, hits, num_lookahead_tokens=self.lookahead, full_sequence_must_fit=True
        )
        if ok:
            request.num_in_flight_tokens += tokens
        return {
            "computed_tokens": hits.num_tokens,
            "junction": hits.junction,
            "found": before,
            "tokens": tokens,
            "ok": ok,
        }

    def do_run(self, name, budget):
        manager, request = self.manager, self.requests[name]
        asked = min(len(request) + self.placeholders[name] - request.num_computed_tokens, budget)
        tokens = manager.chunk_tokens(request, asked)
        ok = not tokens or manager.allocate_slots(request, tokens, num_lookahead_tokens=self.lookahead) is not None
        if ok:
            request.num_in_flight_tokens += tokens
        return {"tokens": tokens, "ok": ok}

    def do_end(self):
        return {"copies": [list(pair) for pair in self.manager.end_step()]}

    def do_promise(self, names):
        for name in names:
            self.placeholders[name] += 1

    def do_out(self, name, tokens, token, stale):
        request = self.requests[name]
        request.num_in_flight_tokens -= tokens
        if token is not None:
            request.tokens.append(token)
            if self.placeholders[name] and not stale:
                self.placeholders[name] -= 1
                self.manager.cache_blocks(request, request.num_computed_tokens - request.num_in_flight_tokens)

    def do_free(self, name):
        self.manager.free(self.requests.pop(name))

    def do_preempt(self, name):
        self.manager.free(self.requests[name])
        self.placeholders[name] = 0

    def do_reset(self):
        return {"ok": self.manager.reset_prefix_cache()}

    def publish(self, event, storage_tier, token_ids=None, extra=None):
        """Record an event of the manager in the form of the recordings."""
        data, group, extra = event.data, group_of(extra), extra or {}
        if isinstance(data, Cleared):
            self.events.append(["C"])
        elif isinstance(data, Removed):
            self.events.append(["R", group, list(data.block_hashes)])
        else:
            kind = [extra.get("kv_cache_spec_kind", "full_attention"), extra.get("kv_cache_spec_sliding_window")]
            assert kind == self.kinds[group], kind
            sizes = {len(tokens) for tokens in token_ids}
            assert len(sizes) == 1
            assert type(data) is SparseStored or len(token_ids) == len(data.block_hashes)
            one = ["S", group, data.parent_hash, list(data.block_hashes), *sizes]
            one += [sum(map(len, token_ids)), token_ids[0][0]]
            self.events.append(one + self.beside(extra))

    def beside(self, extra):
        """Return the fields of a Stored other than its blocks."""
        keys = extra.get("extra_keys", ())
        return [[each and list(each) for each in keys]] if any(keys) else []

    def taken(self):
        """Return the events since the last step."""
        events, self.events = self.events, []
        return events

    def play(self, step):
        op, *args = step["op"]
        got = getattr(self, f"do_{op}")(*args) or {}
        request = self.requests.get(args[0]) if op in {"admit", "run", "out"} else None
        tables = [table.blocks for table in request.tables] if request else []
        queue = self.manager.free_queue
        if "held" in step:
            got["held"] = [[len(blocks), sum(map(bool, blocks))] for blocks in tables]
        return {
            "op": step["op"],
            **got,
            "events": self.taken(),
            "free": len(queue),
            "crc": crc32(json.dumps([queue, tables]).encode()),
        }


def difference(program, of=Player):
    """Return the first difference of a program as text, or None.

    Args:
        program: the recorded program.
        of: the class of its player.
    """
    player = of(program)
    facts = {name: value for name, value in program["facts"].items() if name != "kinds"}
    if player.facts() != facts:
        return f"facts: recorded {facts}, got {player.facts()}"
    for number, step in enumerate(program["steps"]):
        got = player.play(step)
        wrong = players.unlike(step, got)
        if wrong:
            return players.in_lines(f"step {number}: {step['op']}", wrong)
    return None


def played(programs, difference=difference):
    """Yield each program's name with its differences, or None."""
    for program in programs:
        yield f"{program.get('geometry', program.get('kind'))}, seed {program['seed']}", difference(program)


def main(paths):
    return players.main(paths, played)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
