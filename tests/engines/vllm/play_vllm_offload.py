"""Play recorded programs of vLLM with native offloading on our cache, and print the differences by program and step.

    python tests/engines/vllm/play_vllm_offload.py FILE...

The last line is "N of M programs equal"; the exit status is 1 if any differs. The device's block manager and
`NativeOffload` are those of the package; this program models vLLM's scheduler, and the copies of the recording.
"""

import json
import sys
from collections import Counter, deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import players

from pytest_kvmock import Prompt
from pytest_kvmock.engines.vllm.host.native_offload import NativeOffload
from pytest_kvmock.engines.vllm.host.offload_steps import Computing, OffloadStep

plain = players.player("engines/vllm/plain_scheduler.py")

BLOCK_BYTES = 1000
PROMPT_KEYS = ("cache_salt", "session_id")


class Copies:
    """The copies of the recording: three queues, and the duration of each transfer in steps."""

    def __init__(self, latency):
        self.latency = latency
        self.queues = deque(), deque(), deque()
        self.not_begun = []
        self.now = -1

    def enter(self, job):
        latency = self.latency["load" if job.is_load else "store"]
        self.queues[job.is_load + job.within_step].append([job, self.now + latency[job.number % len(latency)]])

    def wait(self, numbers):
        for queue in self.queues:
            last = max((place for place, (job, _) in enumerate(queue) if job.number in numbers), default=-1)
            for place in range(last + 1):
                queue[place][1] = self.now

    def step(self, plan):
        """Make one step; returns the completed transfers."""
        self.now += 1
        begins = self.not_begun + [job for job in plan.stores if job.number in plan.flush]
        self.not_begun = [job for job in plan.stores if job.number not in plan.flush]
        for job in begins:
            self.enter(job)
        self.wait(plan.flush)
        for job in plan.loads:
            self.enter(job)
        self.wait({job.number for job in plan.loads if job.within_step})
        done = []
        for queue in self.queues:
            while queue and queue[0][1] <= self.now:
                done.append(queue.popleft()[0])
        return done


def offload_options(config, bytes_per_token):
    """Return the options of native offload in a config."""
    extra = config["extra"]
    return {
        "blocks_per_chunk": config["blocks_per_chunk"],
        "policy": extra.get("eviction_policy", "lru"),
        "prompt_only": extra.get("offload_prompt_only", True),
        "store_threshold": extra.get("store_threshold", 0),
        "within_step_tokens": extra.get("sync_load_budget_bytes", 0) // bytes_per_token,
        "self_describing": extra.get("self_describing_kv_events", False),
    }


class OffloadScheduler(plain.PlainScheduler):
    """A scheduler over a device and native offload."""

    def __init__(self, config, device, host):
        super().__init__(config, device, host, defers=config.get("async", False))
        self.copies = Copies(config["latency"])

    def offloaded(self, state, params):
        """Return the host's view of a request."""
        limits = {key: params[key] for key in ("max_load_tokens", "max_offload_tokens") if key in params}
        return self.host.request(state.tokens, **limits)

    def ended(self, request, *, aborted):
        self.host.ended(request.offload, computed=request.state.num_computed_tokens if aborted else None)

    def states(self):
        """Return the states that are stored in this step."""
        return ()

    def plan(self, preempted, over):
        record, device = self.record, self.device
        states = self.states()
        computing = [
            Computing(
                each.offload,
                device.blocks(each.state),
                each.state.num_computed_tokens,
                getattr(each.state, "junction", 0),
            )
            for each in self.computing
        ]
        gone = [each.offload for each in preempted], [each.offload for each in over]
        plan = self.host.plan(OffloadStep(computing, *gone, self.got - {0}, states))
        done = self.batch.done = self.copies.step(plan)
        names = self.names_below()
        record["loads"] = [self.shown(job, names[job.request]) for job in plan.loads]
        record["stores"] = [self.shown(job, names[job.request]) for job in plan.stores]
        record["flush"] = sorted(plan.flush)
        record["done"] = [job.number for job in done]
        record["received"] = sorted(names[job.request] for job in done if job.is_load and not job.within_step)

    def shown(self, job, name):
        """Return a transfer in the form of the recordings."""
        return [job.number, name, sorted(map(self.chunk, job.chunks)), list(job.blocks), list(job.slots)]

    def chunk(self, key):
        """Return the key of a chunk in the form of the recordings: its name and its group."""
        return list(key)

    def match(self, request, local):
        hit = request.hit = self.host.match(request.offload, local)
        return None if hit is None else (hit.tokens, bool(hit.tokens) and not hit.within_step)

    def placed(self, request, local, external):
        if request.status != "named":
            self.place(request, request.hit)

    def place(self, request, hit):
        blocks = self.device.blocks(request.state)
        for each in blocks:
            self.got.update(each)
        self.host.allocated(request.offload, blocks, hit)

    def complete(self, batch):
        received = self.host.complete(job.number for job in batch.done)
        return [request for request in self.requests.values() if request.offload in received]

    def process(self, record):
        super().process(record)
        record["cpu_used"] = len(self.host.store.chunks)

    def wired(self, events):
        """Return recorded events in the form of the taken ones."""
        return events

    def is_copy(self, event):
        """Return whether an event stores a chunk on the host."""
        raise NotImplementedError

    def unordered(self, events, sizes):
        """Return events; those of each transfer to the host, which have the order of a set, are sorted.

        Args:
            events: events in the form of the taken ones.
            sizes: the number of chunks of each transfer.
        """
        out, stored = [], []
        for event in events:
            (stored if self.is_copy(event) else out).append(event)
        for size in sizes:
            out += sorted(stored[:size], key=json.dumps)
            del stored[:size]
        return out + stored

    def difference(self, program):
        """The first difference of a program, as text; None if there is none."""
        for number, (op, *args) in enumerate(program["log"]):
            found = None
            if op == "stuck":
                return None
            if op in {"add", "abort"}:
                getattr(self, op)(*args)
            elif op == "reset":
                found = plain.reset_difference(number, args[2], self.reset(*args[:2]))
            else:
                found = plain.step_difference(number, *self.records(args[0]))
            if found is not None:
                return found
        final = self.final()
        return None if final == program["final"] else f"final: recorded {program['final']}, got {final}"

    def records(self, recorded):
        """Make a step; returns the recorded and our record, with events in one form and order."""
        recorded = dict(recorded)
        batch = self.batches[0] if self.batches else None
        got = self.step(recorded)
        batch = batch or self.batch
        sizes = [len(job.chunks) for job in batch.done if not job.is_load and not job.is_dropped]
        if "events" in recorded:
            recorded["events"] = self.unordered(self.wired(recorded["events"]), sizes)
        if "events" in got:
            got["events"] = self.unordered(got["events"], sizes)
        return recorded, got


class Engine(OffloadScheduler):
    """An engine without a draft model; `fields` are those of recorded events that are rows."""

    def __init__(self, config, fields=None, **more):
        self.fields, groups = fields, plain.groups_of(config)
        self.is_alone = len(groups) == 1
        options = offload_options(config, BLOCK_BYTES // config["block_size"])
        host = NativeOffload(config["cpu_chunks"], groups, **options, **more)
        super().__init__(config, plain.device_of(config, self), host)

    def add(self, name, prompt, output, params=None):
        params = params or {}
        keys = {key: params[key] for key in PROMPT_KEYS if key in params}
        state = self.manager.new_request(Prompt(prompt, **keys))
        self.arrive(plain.Request(name, state, self.offloaded(state, params), output))

    def chunk(self, key):
        return key[0] if self.is_alone else list(key)

    def wired(self, events):
        return plain.wire_events(events, self.fields)

    def is_copy(self, event):
        return event["type"] == "BlockStored" and event["medium"] == "CPU"

    def final(self):
        counts = {name: count for (_, name), count in Counter(self.device.resident()).items()}
        ready = [key[0] for key in self.host.resident()]
        return {"gpu": [[name, counts[name]] for name in sorted(counts)], "cpu": sorted(ready)}


def difference(program, fields):
    """The first difference of a program, as text; None if there is none."""
    return Engine(program["config"], fields).difference(program)


def played(value):
    """Yield each program's name with its differences, or None."""
    programs, fields = (value, None) if isinstance(value, list) else (value["programs"], value["fields"])
    for program in programs:
        yield f"program {players.name_of(program)}", difference(program, fields)


def main(paths):
    return players.main(paths, played)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
