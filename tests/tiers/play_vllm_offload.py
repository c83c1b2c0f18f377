"""Play recorded programs of vLLM with native offloading on ours, and print what differs by program and step.

    python tests/tiers/play_vllm_offload.py FILE...

The last line of each file is "N of M programs equal"; the exit status is 1 if any differs. What is played on is the device's block
manager and `NativeOffload`; vLLM's scheduler, and the copies of the recording, are a plain model here.
"""

import gzip
import json
import sys
from collections import Counter, deque
from functools import partial
from pathlib import Path

import msgspec

from pytest_kvmock.cache.vllm.block_pool import BlockPoolManager
from pytest_kvmock.cache.vllm.groups import CacheGroup
from pytest_kvmock.cache.vllm.hybrid import VllmHybridManager
from pytest_kvmock.events import KvCacheEvent, RouterEvent
from pytest_kvmock.tiers.chunk_events import OffloadGroup
from pytest_kvmock.tiers.native_offload import NativeOffload
from pytest_kvmock.tiers.offload_steps import Computing, OffloadStep
from pytest_kvmock.tokens import Prompt
from pytest_kvmock.wire import Batch, encode

BLOCK_BYTES = 1000
PROMPT_KEYS = ("cache_salt", "session_id")


class Pool:
    """The device of an engine with one group, and one batch at a time."""

    def __init__(self, config, groups, sink):
        self.manager = BlockPoolManager(num_blocks=config["gpu_blocks"], block_size=config["block_size"], sink=sink)

    def blocks(self, state):
        return (state.block_ids,)

    def lookup(self, state):
        hits = self.manager.get_computed_blocks(state)
        return hits, len(hits) * self.manager.block_size

    def missing(self, state, upto, hits=None):
        return self.manager.missing_blocks(state, upto, hits or ())

    def allocate(self, state, tokens, hits=None, *, external=0, delay=False):
        return self.manager.allocate_slots(state, external + tokens, hits or (), delay_cache_blocks=delay)

    def cache(self, state, upto):
        self.manager.cache_blocks(state)

    def resident(self):
        return [(0, name) for name in self.manager.resident()]

    def keeps(self, state):
        return None

    def before_end(self, state):
        pass


class GroupedPool(Pool):
    """The device of an engine with several groups, or with tokens that are not known yet."""

    def __init__(self, config, groups, sink):
        self.manager = VllmHybridManager(
            groups=[CacheGroup(each.kind, each.block_size, window=each.window) for each in groups],
            num_blocks=config["gpu_blocks"],
            sink=sink,
            max_num_batched_tokens=config["max_num_batched_tokens"],
            async_scheduling=config.get("async", False),
        )

    def blocks(self, state):
        return tuple(table.blocks for table in state.tables)

    def lookup(self, state):
        hits = self.manager.get_computed_blocks(state)
        return hits, hits.num_tokens

    def missing(self, state, upto, hits=None):
        return self.manager.missing_blocks(state, upto, hits, for_admission=True)

    def allocate(self, state, tokens, hits=None, *, external=0, delay=False):
        return self.manager.allocate_slots(state, tokens, hits, num_external_tokens=external, delay_cache_blocks=delay)

    def keeps(self, state):
        return partial(self.manager.kept, state)

    def before_end(self, state):
        self.manager.free_behind_windows(state)

    def cache(self, state, upto):
        self.manager.cache_blocks(state, upto)

    def resident(self):
        return self.manager.resident_names()


class Request:
    """A request as the scheduler knows it."""

    def __init__(self, name, state, offload, output):
        self.name, self.state, self.offload, self.output = name, state, offload, output
        self.generated = 0
        self.unknown = 0  # tokens that are sampled, and not processed
        self.in_flight = 0  # tokens that are scheduled, and not processed
        self.status = "waiting"  # loading, loaded, running, over
        self.last_length = len(state) + len(output)

    def __len__(self):
        return len(self.state)


class Copies:
    """The copies of the recording: three queues, and how many steps each transfer takes."""

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
        """One step; returns the transfers that are done."""
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


class Batched:
    """What was scheduled in one step."""

    def __init__(self):
        self.scheduled = []  # (request, tokens, whether it samples one)
        self.done = []


class Engine:
    """A scheduler over a device and its host, and the records of its steps."""

    def __init__(self, config):
        self.config = config
        size, extra = config["block_size"], config["extra"]
        groups = [
            OffloadGroup(size) if each == "full" else OffloadGroup(size, "sliding_window", each[1])
            for each in config.get("groups", ["full"])
        ]
        self.is_async = config.get("async", False)
        kind = GroupedPool if self.is_async or len(groups) > 1 else Pool
        self.device = kind(config, groups, self)
        self.manager = self.device.manager
        self.host = NativeOffload(
            config["cpu_chunks"],
            groups,
            blocks_per_chunk=config["blocks_per_chunk"],
            policy=extra.get("eviction_policy", "lru"),
            prompt_only=extra.get("offload_prompt_only", True),
            store_threshold=extra.get("store_threshold", 0),
            within_step_tokens=extra.get("sync_load_budget_bytes", 0) // (BLOCK_BYTES // size),
            self_describing=extra.get("self_describing_kv_events", False),
        )
        self.copies = Copies(config["latency"])
        self.requests = {}
        self.running, self.waiting, self.loading = [], deque(), []
        self.prefills = set()
        self.over = []  # not yet planned for
        self.reset_preempted = []
        self.batches = deque()
        self.to_free = []  # (the batch that frees them, request)
        self.device_events = []

    def publish(self, event, storage_tier, token_ids=None, extra=None):
        self.device_events.append(RouterEvent(0, event, storage_tier, token_ids, extra))

    # -------------------------------------------------------------------------------------------------- inputs

    def add(self, name, prompt, output, params=None):
        params = params or {}
        keys = {key: params[key] for key in PROMPT_KEYS if key in params}
        limits = {key: params[key] for key in ("max_load_tokens", "max_offload_tokens") if key in params}
        state = self.manager.new_request(Prompt(prompt, **keys))
        request = Request(
            name, state, self.host.request(state.tokens, keeps=self.device.keeps(state), **limits), output
        )
        self.requests[name] = request
        self.waiting.append(request)

    def abort(self, name):
        request = self.requests[name]
        if request.status == "over":
            return
        for queue in (self.running, self.waiting, self.loading):
            if request in queue:
                queue.remove(request)
        self.end(request, aborted=True)

    def end(self, request, *, aborted=False):
        was, request.status = request.status, "over"
        self.over.append(request)
        self.prefills.discard(request)
        self.device.before_end(request.state)
        self.host.ended(request.offload, computed=request.state.num_computed_tokens if aborted else None)
        if was == "loading":
            return
        newest = next((batch for batch in reversed(self.batches) if batch.scheduled), None)
        if request.in_flight and newest is not None:
            self.to_free.append((newest, request))
        else:
            self.manager.free(request.state)

    def reset(self, reset_running, reset_connector):
        if reset_running:
            while self.running:
                request = self.running.pop()
                self.preempt(request)
                self.reset_preempted.append(request)
        answer = self.manager.reset_prefix_cache()
        if reset_running and not answer:
            return "RuntimeError"
        if reset_connector:
            self.host.reset()
        return answer

    def preempt(self, request):
        self.manager.free(request.state)
        self.prefills.discard(request)
        request.status = "waiting"
        self.waiting.appendleft(request)

    # -------------------------------------------------------------------------------------------------- a step

    def is_left(self):
        return bool(self.running or self.waiting or self.loading or self.over) or not self.host.is_idle

    def step(self, finished):
        """One call; returns its record.

        Args:
            finished: those that are over, in the order of the recording.
        """
        record = {}
        if not self.is_async:
            self.schedule(record, finished)
        else:
            if self.is_left():
                self.schedule(record, finished)
                if len(self.batches) < 2 and (self.batches[-1].scheduled or self.is_left()):
                    return record
            if not self.batches:
                return record
        self.process(record)
        return record

    def schedule(self, record, finished):
        config, device, host = self.config, self.device, self.host
        self.budget = config["max_num_batched_tokens"]
        self.batch, self.got, self.record = Batched(), set(), record
        self.computing = []
        record["lookups"] = []
        preempted = self.run_running()
        if not preempted:
            self.admit()
        over = sorted(self.over, key=lambda each: finished.index(each.name) if each.name in finished else -1)
        self.over = []
        preempted = preempted + self.reset_preempted
        self.reset_preempted = []
        plan = host.plan(
            OffloadStep(
                [
                    Computing(each.offload, device.blocks(each.state), each.state.num_computed_tokens)
                    for each in self.computing
                ],
                [each.offload for each in preempted],
                [each.offload for each in over],
                self.got,
            )
        )
        self.batch.done = self.copies.step(plan)
        record["scheduled"] = [[each.name, tokens] for each, tokens, _ in self.batch.scheduled]
        record["preempted"] = sorted(each.name for each in preempted)
        record["finished"] = [each.name for each in over]
        record["loads"] = list(map(self.shown, plan.loads))
        record["stores"] = list(map(self.shown, plan.stores))
        record["flush"] = sorted(plan.flush)
        record["done"] = [job.number for job in self.batch.done]
        names = {request.offload: name for name, request in self.requests.items()}
        record["received"] = sorted(
            names[job.request] for job in self.batch.done if job.is_load and not job.within_step
        )
        self.batches.append(self.batch)

    def shown(self, job):
        name = next(name for name, request in self.requests.items() if request.offload is job.request)
        chunks = [key[0] if len(self.config.get("groups", "1")) == 1 else list(key) for key in job.chunks]
        return [job.number, name, sorted(chunks), list(job.blocks), list(job.slots)]

    def take(self, request, tokens):
        """Count tokens of a request as scheduled."""
        state = request.state
        request.in_flight += tokens
        samples = state.num_computed_tokens == len(state) + request.unknown
        request.unknown += samples
        if isinstance(self.manager, VllmHybridManager):
            state.num_in_flight_tokens = request.in_flight
        self.budget -= tokens
        self.batch.scheduled.append((request, tokens, samples))
        self.computing.append(request)

    def run_running(self):
        """Schedule what runs; returns what was preempted."""
        preempted = []
        place = 0
        while place < len(self.running) and self.budget:
            request = self.running[place]
            state, unknown = request.state, request.unknown
            place += 1
            tokens = min(len(state) + unknown - state.num_computed_tokens, self.budget)
            if not tokens or (unknown and state.num_computed_tokens + 2 - unknown >= request.last_length):
                continue
            held = [len(blocks) for blocks in self.device.blocks(state)]
            while self.device.allocate(state, tokens) is None:
                victim = self.running[-1]
                if victim.in_flight:
                    return preempted
                self.running.pop()
                self.preempt(victim)
                preempted.append(victim)
                if victim is request:
                    return preempted
            for blocks, before in zip(self.device.blocks(state), held, strict=True):
                self.got.update(blocks[before:])
            self.take(request, tokens)
        return preempted

    def admit(self):
        for queue in (self.loading, self.waiting):
            for request in tuple(queue):
                if not self.budget or len(self.running) >= self.config["max_num_seqs"]:
                    return
                if request.status == "loading":
                    continue
                admitted = self.admit_loaded(request) if request.status == "loaded" else self.admit_new(request)
                if admitted is None:
                    return
                if admitted:
                    queue.remove(request)

    def admit_loaded(self, request):
        state = request.state
        self.device.cache(state, state.num_computed_tokens)
        state.num_computed_tokens = min(state.num_computed_tokens, len(state) - 1)
        if self.device.missing(state, len(state)) > self.manager.num_free_blocks:
            return None
        tokens = min(len(state) - state.num_computed_tokens, self.budget)
        assert self.device.allocate(state, tokens) is not None
        return self.started(request, tokens)

    def admit_new(self, request):
        """Admit a request that has computed nothing: True; False: it is passed over; None: nobody is admitted any more."""
        device, state = self.device, request.state
        hits, local = device.lookup(state)
        hit = self.host.match(request.offload, local)
        waits = hit is not None and bool(hit.tokens) and not hit.within_step
        self.record["lookups"].append([request.name, local, None if hit is None else hit.tokens, waits])
        if hit is None:
            return False
        hits = hits if local else None
        free = self.manager.num_free_blocks
        if device.missing(state, len(state), hits) > free:
            return None
        if waits:
            reserved = sum(max(0, device.missing(each.state, len(each.state))) for each in self.prefills)
            if device.missing(state, local + hit.tokens, hits) > free - reserved:
                return None
            assert device.allocate(state, 0, hits, external=hit.tokens, delay=True) is not None
            request.status = "loading"
            self.loading.append(request)
            self.prefills.add(request)
            self.load(request, hit)
            return True
        tokens = min(len(state) - local - hit.tokens, self.budget)
        assert device.allocate(state, tokens, hits, external=hit.tokens) is not None
        self.load(request, hit)
        return self.started(request, tokens)

    def load(self, request, hit):
        blocks = self.device.blocks(request.state)
        for each in blocks:
            self.got.update(each)
        self.host.allocated(request.offload, blocks, hit)

    def started(self, request, tokens):
        state = request.state
        for each in self.device.blocks(state):
            self.got.update(each)
        if state.num_computed_tokens < len(state):
            self.prefills.add(request)
        request.status = "running"
        self.running.append(request)
        self.take(request, tokens)
        return True

    def process(self, record):
        batch = self.batches.popleft()
        for freed_by, request in self.to_free:
            if freed_by is batch:
                self.manager.free(request.state)
        self.to_free = [pair for pair in self.to_free if pair[0] is not batch]
        for request, tokens, samples in batch.scheduled:
            request.in_flight -= tokens
            if isinstance(self.manager, VllmHybridManager):
                request.state.num_in_flight_tokens = request.in_flight
            if request.status == "over":
                continue
            state = request.state
            if state.num_computed_tokens >= len(state):
                self.prefills.discard(request)
            if not samples:
                continue
            state.tokens.append(request.output[request.generated])
            request.generated += 1
            request.unknown -= 1
            if self.is_async:
                self.device.cache(state, state.num_computed_tokens - request.in_flight)
            if request.generated == len(request.output):
                self.running.remove(request)
                self.end(request)
        received = self.host.complete(job.number for job in batch.done)
        for request in self.requests.values():
            if request.offload in received:
                if request.status == "over":
                    self.manager.free(request.state)
                else:
                    request.status = "loaded"
        record["events"] = self.taken()
        record["free"] = self.manager.num_free_blocks
        record["cpu_used"] = len(self.host.store.chunks)

    def taken(self):
        """The events of a batch as the wire has them, without what is None."""
        events, self.device_events = self.device_events, []
        events += [RouterEvent(0, KvCacheEvent(0, *one[:1]), *one[1:]) for one in self.host.take_events()]
        written = msgspec.msgpack.decode(encode(Batch(events, 1.5, 0), "vllm-0.33"))[1]
        return [{key: value for key, value in event.items() if value is not None} for event in written]

    def final(self):
        counts = {name: count for (_, name), count in Counter(self.device.resident()).items()}
        ready = [key[0] for key in self.host.resident()]
        return {"gpu": [[name, counts[name]] for name in sorted(counts)], "cpu": sorted(ready)}


def wire_event(event, fields):
    """A recorded event as the wire has it, without what is None."""
    if isinstance(event, list):
        tag = {"S": "BlockStored", "R": "BlockRemoved", "C": "AllBlocksCleared"}[event[0]]
        event = {"type": tag, **dict(zip(fields[tag], event[1:], strict=True))}
    return {key: value for key, value in event.items() if value is not None}


def unordered(events, sizes):
    """Events with those of each transfer to the host, which have the order of a set, sorted: transfers of so many chunks."""
    out, stored = [], []
    for event in events:
        is_report = event["type"] == "BlockStored" and event["medium"] == "CPU"
        (stored if is_report else out).append(event)
    for size in sizes:
        out += sorted(stored[:size], key=json.dumps)
        del stored[:size]
    return out + stored


def difference(program, fields):
    """The first difference of a program, as text; None if there is none."""
    engine = Engine(program["config"])
    for number, (op, *args) in enumerate(program["log"]):
        if op == "add":
            engine.add(*args)
        elif op == "abort":
            engine.abort(*args)
        elif op == "reset":
            answer = engine.reset(*args[:2])
            if answer != args[2]:
                return f"entry {number}: reset: recorded {args[2]!r}, got {answer!r}"
        else:
            recorded = dict(args[0])
            batch = engine.batches[0] if engine.batches else None
            got = engine.step(recorded.get("finished", []))
            if "events" in recorded:
                recorded["events"] = [wire_event(event, fields) for event in recorded["events"]]
            batch = batch or engine.batch
            sizes = [len(job.chunks) for job in batch.done if not job.is_load and not job.is_dropped]
            for record in (recorded, got):
                if "events" in record:
                    record["events"] = unordered(record["events"], sizes)
            wrong = [name for name in {**recorded, **got} if (recorded.get(name) or []) != (got.get(name) or [])]
            if wrong:
                lines = [f"entry {number}:"]
                for name in wrong:
                    lines += [
                        f"  {name}: recorded {recorded.get(name)!r}",
                        f"  {' ' * len(name)}  got      {got.get(name)!r}",
                    ]
                return "\n".join(lines)
    final = engine.final()
    return None if final == program["final"] else f"final: recorded {program['final']}, got {final}"


def read(path):
    """The programs of a recording, and the fields of its events."""
    value = json.loads(gzip.decompress(Path(path).read_bytes()))
    return (value, None) if isinstance(value, list) else (value["programs"], value["fields"])


def main(paths):
    wrong = 0
    for path in paths:
        programs, fields = read(path)
        equal = 0
        for program in programs:
            found = difference(program, fields)
            if found is None:
                equal += 1
            else:
                print(f"{Path(path).name}: program {program.get('name', program.get('seed'))}: {found}")  # noqa: T201 - a command
        print(f"{equal} of {len(programs)} programs equal")  # noqa: T201 - a command
        wrong += len(programs) - equal
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
