"""A plain model of vLLM's scheduler over our device, as in the recordings, and events in the form of the recordings."""

from collections import deque

import msgspec
from players import in_lines, unlike

from pytest_kvmock import KvCacheEvent, RouterEvent
from pytest_kvmock.engines import CacheGroup
from pytest_kvmock.engines.vllm.block_pool import BlockPoolManager
from pytest_kvmock.engines.vllm.deferred_frees import DeferredFrees
from pytest_kvmock.engines.vllm.host.chunk_events import OffloadGroup
from pytest_kvmock.engines.vllm.hybrid import VllmHybridManager
from pytest_kvmock.wire import Batch, encode


class Pool:
    """The device of an engine with one group, and one batch at a time."""

    def __init__(self, manager):
        self.manager = manager

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

    def before_end(self, state):
        pass


class GroupedPool(Pool):
    """The device of an engine with several groups, or with tokens that are still unknown."""

    def blocks(self, state):
        return tuple(table.blocks for table in state.tables)

    def lookup(self, state):
        hits = self.manager.get_computed_blocks(state)
        return hits, hits.num_tokens

    def missing(self, state, upto, hits=None):
        return self.manager.missing_blocks(state, upto, hits, for_admission=True)

    def allocate(self, state, tokens, hits=None, *, external=0, delay=False):
        return self.manager.allocate_slots(state, tokens, hits, num_external_tokens=external, delay_cache_blocks=delay)

    def before_end(self, state):
        self.manager.free_behind_windows(state)

    def cache(self, state, upto):
        self.manager.cache_blocks(state, upto)

    def resident(self):
        return self.manager.resident_names()


def groups_of(config):
    """Return the groups of an engine's cache; their blocks span all ranks of context parallelism."""
    size = config["block_size"] * config.get("dcp", 1)
    return [
        OffloadGroup(size) if each == "full" else OffloadGroup(size, "sliding_window", each[1])
        for each in config.get("groups", ["full"])
    ]


def device_of(config, sink, *, grouped=False):
    """Return the device of an engine; `grouped`: with tables of groups despite one group and one batch at a time."""
    groups, ranks = groups_of(config), {"dcp": config.get("dcp", 1), "pcp": config.get("pcp", 1)}
    if not (grouped or config.get("async") or len(groups) > 1):
        size = groups[0].block_size
        return Pool(BlockPoolManager(num_blocks=config["gpu_blocks"], block_size=size, sink=sink, **ranks))
    return GroupedPool(
        VllmHybridManager(
            groups=[CacheGroup(each.kind, each.block_size, window=each.window) for each in groups],
            num_blocks=config["gpu_blocks"],
            sink=sink,
            max_num_batched_tokens=config["max_num_batched_tokens"],
            async_scheduling=config.get("async", False),
            **ranks,
        )
    )


class Request:
    """The scheduler's state of a request."""

    def __init__(self, name, state, offload, output):
        self.name, self.state, self.offload, self.output = name, state, offload, output
        self.generated = 0
        self.unknown = 0  # sampled tokens that are not processed
        self.in_flight = 0  # scheduled tokens that are not processed
        self.last_step = 0
        self.status = "waiting"  # loading, loaded, named, running, finished
        self.last_length = len(state) + len(output)


class Batched:
    """The work that was scheduled in one step."""

    def __init__(self):
        self.scheduled = []  # (request, tokens, whether it samples a token)
        self.done = []


class PlainScheduler:
    """A scheduler over a device, and the records of its steps.

    Args:
        config: the recorded configuration of the engine.
        device: the device's cache.
        host: the tier below the device, which has events; None: no tier.
        defers: whether the blocks of finished requests wait for the steps in flight.
    """

    def __init__(self, config, device, host=None, *, defers=False):
        self.config, self.device, self.manager, self.host = config, device, device.manager, host
        self.is_async = config.get("async", False)
        self.requests = {}
        self.running, self.waiting, self.loading = [], deque(), []
        self.prefills = set()
        self.over, self.preempted = [], []  # not planned yet
        self.batches = deque()
        self.frees = DeferredFrees(self.manager, defers=defers)
        self.device_events = []

    def publish(self, event, storage_tier, token_ids=None, extra=None):
        self.device_events.append(RouterEvent(0, event, storage_tier, token_ids, extra))

    # --------------------------------------------------------------------------------------- what is below the device

    def match(self, request, local):
        """Return the tokens to load from below after `local` ones, and whether to wait for them; None: unknown."""
        return 0, False

    def placed(self, request, local, external):
        """Record that a request has blocks for its hits: tokens on the device, and below it.

        It runs next, or waits for its load from below; after the load, this is called again without tokens.
        """

    def ended(self, request, *, aborted):
        """Record that a request has ended."""

    def plan(self, preempted, over):
        """Run the step of the tier below, and record it."""

    def complete(self, batch):
        """Record the copies of a batch; returns the requests whose loads are complete."""
        return ()

    def reset_below(self):
        """Reset the tier below; returns whether this was possible."""
        self.host.reset()
        return True

    def is_idle_below(self):
        return self.host is None or self.host.is_idle

    # -------------------------------------------------------------------------------------------------- inputs

    def arrive(self, request):
        self.requests[request.name] = request
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
        self.ended(request, aborted=aborted)
        if was != "loading":
            self.frees.free(request.state, request.last_step)

    def reset(self, reset_running, reset_connector):
        if reset_running:
            while self.running:
                self.preempt(self.running.pop())
        answer = self.manager.reset_prefix_cache()
        if reset_running and not answer:
            return "RuntimeError"
        if reset_connector and self.host is not None:
            answer = self.reset_below() and answer
        return answer

    def preempt(self, request):
        self.frees.free(request.state, request.last_step)
        self.prefills.discard(request)
        request.status = "waiting"
        self.waiting.appendleft(request)
        self.preempted.append(request)

    # -------------------------------------------------------------------------------------------------- a step

    def is_left(self):
        return bool(self.running or self.waiting or self.loading or self.over) or not self.is_idle_below()

    def step(self, recorded):
        """Make one step; returns its record.

        Args:
            recorded: the record of the recording, for the values that it made up and for the order of unordered values.
        """
        record, self.recorded = {}, recorded
        if not self.is_async:
            self.schedule(record)
        else:
            if self.is_left():
                self.schedule(record)
                if len(self.batches) < 2 and (self.batches[-1].scheduled or self.is_left()):
                    return record
            if not self.batches:
                return record
        self.process(record)
        return record

    def begin(self):
        self.budget = self.config["max_num_batched_tokens"]

    def schedule(self, record):
        self.batch, self.got, self.record = Batched(), set(), record
        self.computing = []
        record["lookups"] = []
        self.begin()
        before = len(self.preempted)
        self.run_running()
        if len(self.preempted) == before:
            self.admit()
        names = self.recorded.get("finished", [])
        over = sorted(self.over, key=lambda each: names.index(each.name) if each.name in names else -1)
        preempted, self.preempted, self.over = self.preempted, [], []
        self.plan(preempted, over)
        number = self.frees.step_scheduled() if self.batch.scheduled else 0
        for request, *_ in self.batch.scheduled:
            request.last_step = number
        record["scheduled"] = [[request.name, tokens] for request, tokens, _ in self.batch.scheduled]
        record["preempted"] = sorted({each.name for each in preempted})
        record["finished"] = [each.name for each in over]
        self.batches.append(self.batch)

    def names_below(self):
        """Return the names of requests by their identities below the device."""
        return {request.offload: name for name, request in self.requests.items()}

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

    def has_budget(self):
        return self.budget > 0

    def next_tokens(self, request):
        """Return the number of tokens of a running request to compute next."""
        state, unknown = request.state, request.unknown
        if unknown and state.num_computed_tokens + 2 - unknown >= request.last_length:
            return 0
        return min(len(state) + unknown - state.num_computed_tokens, self.budget)

    def run_running(self):
        """Schedule the running requests."""
        place = 0
        while place < len(self.running) and self.has_budget():
            request = self.running[place]
            place += 1
            tokens = self.next_tokens(request)
            if not tokens:
                continue
            if not self.allocate(request, tokens):
                return
            self.take(request, tokens)

    def allocate(self, request, tokens):
        """Allocate for a running request and preempt the last ones; returns whether it was not preempted itself."""
        state = request.state
        held = [len(blocks) for blocks in self.device.blocks(state)]
        while self.device.allocate(state, tokens) is None:
            victim = self.running[-1]
            if victim.in_flight:
                return False
            self.running.pop()
            self.preempt(victim)
            if victim is request:
                return False
        for blocks, before in zip(self.device.blocks(state), held, strict=True):
            self.got.update(blocks[before:])
        return True

    def has_place(self):
        return self.has_budget() and len(self.running) < self.config["max_num_seqs"]

    def admit(self):
        for queue in (self.loading, self.waiting):
            for request in tuple(queue):
                if not self.has_place():
                    return
                if request.status == "loading":
                    continue
                admitted = self.admit_new(request) if request.status == "waiting" else self.admit_loaded(request)
                if admitted is None:
                    return
                if admitted and (queue is self.waiting or request.status != "loading"):
                    queue.remove(request)

    def admit_loaded(self, request):
        """Name the loaded tokens once, and admit their request."""
        if request.status == "loaded":
            request.status = "named"
            self.name_loaded(request)
        return self.go_on(request)

    def name_loaded(self, request):
        state = request.state
        self.device.cache(state, state.num_computed_tokens)
        state.num_computed_tokens = min(state.num_computed_tokens, len(state) - 1)

    def go_on(self, request):
        """Admit a request whose load is complete."""
        state = request.state
        if self.device.missing(state, len(state)) > self.manager.num_free_blocks:
            return None
        tokens = min(len(state) - state.num_computed_tokens, self.budget)
        assert self.device.allocate(state, tokens) is not None
        self.placed(request, 0, 0)
        return self.started(request, tokens)

    def admit_new(self, request):
        """Try to admit a request without computed tokens: True: admitted; False: skipped; None: admission ends."""
        device, state = self.device, request.state
        hits, local = device.lookup(state)
        external, waits = self.match(request, local) or (None, False)
        self.record["lookups"].append([request.name, local, external, waits])
        if external is None:
            return False
        hits = hits if local else None
        free = self.manager.num_free_blocks
        if device.missing(state, len(state), hits) > free:
            return None
        if waits:
            reserved = sum(max(0, device.missing(each.state, len(each.state))) for each in self.prefills)
            if device.missing(state, local + external, hits) > free - reserved:
                return None
            assert device.allocate(state, 0, hits, external=external, delay=True) is not None
            self.waits(request)
            self.placed(request, local, external)
            return True
        tokens = min(len(state) - local - external, self.budget)
        assert device.allocate(state, tokens, hits, external=external) is not None
        self.placed(request, local, external)
        return self.started(request, tokens)

    def waits(self, request):
        """Let a request wait for its load from below."""
        request.status = "loading"
        if request not in self.loading:
            self.loading.append(request)
        self.prefills.add(request)

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
        if batch.scheduled:
            self.frees.step_processed()
        for entry in batch.scheduled:
            self.answer(*entry)
        for request in self.complete(batch):
            if request.status == "over":
                self.manager.free(request.state)
            else:
                request.status = "loaded"
        record["events"] = self.taken()
        record["free"] = self.manager.num_free_blocks

    def answer(self, request, tokens, samples):
        """Record the computed and the sampled tokens of a request."""
        state = request.state
        request.in_flight -= tokens
        if isinstance(self.manager, VllmHybridManager):
            state.num_in_flight_tokens = request.in_flight
        if request.status == "over":
            return
        if state.num_computed_tokens >= len(state):
            self.prefills.discard(request)
        if not samples:
            return
        state.tokens.append(request.output[request.generated])
        request.generated += 1
        request.unknown -= 1
        if self.is_async:
            self.device.cache(state, state.num_computed_tokens - request.in_flight)
        if request.generated == len(request.output):
            self.running.remove(request)
            self.end(request)

    def taken(self):
        """Return the events since the last step in wire form."""
        events, self.device_events = self.device_events, []
        return written(events, () if self.host is None else self.host.take_events())


def written(events, below=()):
    """Return events in wire form without None fields: a device's events, then unchanged ones of the tier below."""
    events = [*events, *(RouterEvent(0, KvCacheEvent(0, *one[:1]), *one[1:]) for one in below)]
    rows = msgspec.msgpack.decode(encode(Batch(events, 1.5, 0), "vllm-0.33"))[1]
    return [without_none(row) for row in rows]


def without_none(event):
    return {key: value for key, value in event.items() if value is not None}


def wire_events(events, fields):
    """Return recorded events in wire form without None fields; events that are rows have these fields."""
    tags = {"S": "BlockStored", "R": "BlockRemoved", "C": "AllBlocksCleared"}
    named = (
        {"type": tags[event[0]], **dict(zip(fields[tags[event[0]]], event[1:], strict=True))}
        if isinstance(event, list)
        else event
        for event in events
    )
    return list(map(without_none, named))


def step_difference(number, recorded, got):
    """Return the different fields of a step as text, or None."""
    return in_lines(f"entry {number}:", unlike(recorded, got, or_empty=True))


def reset_difference(number, recorded, got):
    """Return the difference in the answer to a reset as text, or None."""
    return None if got == recorded else f"entry {number}: reset: recorded {recorded!r}, got {got!r}"
