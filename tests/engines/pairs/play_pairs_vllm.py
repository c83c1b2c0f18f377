"""Play recorded pairs of vLLM's engines: legs, leases, loads, names, frees and waiting orders are those of the package.

This program models what the recordings made up and what belongs to vLLM's scheduler: whether and when bytes arrive (a
link with a fate per leg), handshakes, sampled tokens, two batches in flight, and the tokens of running requests for
which a step has room.
"""

import json
from collections import Counter, deque
from random import Random
from zlib import crc32

from players import name_of, unrolled

from pytest_kvmock import Cleared, Prompt, Removed
from pytest_kvmock.engines.base.pair_options import PairOptions
from pytest_kvmock.engines.vllm.block_pool import BlockPoolManager
from pytest_kvmock.engines.vllm.block_pool_driver import BlockPoolDriver
from pytest_kvmock.engines.vllm.groups import CacheGroup
from pytest_kvmock.engines.vllm.hybrid import VllmHybridManager
from pytest_kvmock.engines.vllm.hybrid_pool_driver import HybridPoolDriver
from pytest_kvmock.engines.vllm.pairs.legs import EngineDied, Leg, WorkerReport
from pytest_kvmock.engines.vllm.pairs.mooncake_connector import MooncakeConnector
from pytest_kvmock.engines.vllm.pairs.nixl_connector import NixlConnector
from pytest_kvmock.engines.vllm.pairs.vllm_side import VllmSide
from pytest_kvmock.values.prompt_keys import group_of

STATUS = {
    "waiting": "WAITING",
    "taken up": "WAITING",
    "loading": "WAITING_FOR_REMOTE_KVS",
    "received": "WAITING_FOR_REMOTE_KVS",
    "running": "RUNNING",
    "preempted": "PREEMPTED",
}
FINISHED = {
    "length": "FINISHED_LENGTH_CAPPED",
    "stop": "FINISHED_STOPPED",
    "abort": "FINISHED_ABORTED",
    "error": "FINISHED_ERROR",
}
UNORDERED = ("sent", "received", "failed", "invalid", "over", "preempted", "leased", "in_batch", "dropped")


class Request(Leg):
    """A leg with the tokens that it will sample."""

    __slots__ = ("eos", "generated", "output", "unknown")

    def __init__(self, leg, output, eos):
        super().__init__(*leg)
        self.output, self.eos = output, eos
        self.generated = self.unknown = 0  # unknown: sampled but not processed


class Batch:
    """One step that was scheduled."""

    def __init__(self, scheduled, report):
        self.scheduled, self.report = scheduled, report


class Engine:
    """A model of vLLM's scheduler over the package's side of a pair."""

    def __init__(self, name, config, pair, kind):
        self.name, self.config, self.pair = name, config, pair
        self.is_async = config.get("async", False)
        size, groups = config["block_size"], config.get("groups", ["full"])
        if self.is_async or len(groups) > 1:
            self.manager = VllmHybridManager(
                groups=[
                    CacheGroup("full_attention", size)
                    if each == "full"
                    else CacheGroup("sliding_window", size, window=each[1])
                    for each in groups
                ],
                num_blocks=config["blocks"],
                retention=config.get("retention", 0),
                max_num_batched_tokens=config["max_num_batched_tokens"],
                async_scheduling=self.is_async,
                sink=self,
            )
            self.driver = HybridPoolDriver(self.manager, True, Random(0))
        else:
            self.manager = BlockPoolManager(num_blocks=config["blocks"], block_size=size, sink=self)
            self.driver = BlockPoolDriver(self.manager, True, Random(0))
        windows = [0 if each == "full" else -(-each[1] // size) + 1 for each in groups]
        options = PairOptions(
            kv_lease_duration=config["lease"],
            kv_load_failure_policy=config["policy"],
            abort_request_timeout=config["lease"],
            **config["extra"],
        )
        if kind.startswith("mooncake"):
            self.connector = MooncakeConnector(options, name, windows, role=config["role"])
        else:
            self.connector = NixlConnector(options, name, windows, is_producer=config["role"] != "kv_consumer")
        self.side = VllmSide(
            self.driver,
            self.connector,
            recomputes=config["policy"] == "recompute",
            defers=self.is_async and config["role"] != "kv_producer",
        )
        self.side.looked_up = self.note_lookup
        self.running, self.waiting = [], deque()
        self.batches = deque()
        self.events = []
        self.shown = {}

    def publish(self, event, storage_tier, token_ids=None, extra=None):
        data, group = event.data, group_of(extra)
        if isinstance(data, Cleared):
            self.events.append(["C"])
        elif isinstance(data, Removed):
            self.events.append(["R", group, list(data.block_hashes)])
        else:
            tokens = [token for row in token_ids for token in row]
            size = getattr(data, "block_size", None) or self.config["block_size"]
            self.events.append(["S", group, data.parent_hash, list(data.block_hashes), tokens, size])

    def note_lookup(self, leg):
        row = [leg.name, leg.local_tokens, leg.external_tokens, bool(leg.external_tokens)]
        self.record["lookups"].append(row)

    # -------------------------------------------------------------------------------------------------- inputs

    def add(self, name, prompt, output, *others):
        params, fate, eos = (*others, None, None, None)[:3]
        tokens = unrolled(prompt)
        state = self.manager.new_request(Prompt(tokens))
        request = Request((name, state, params, len(tokens)), unrolled(output), eos)
        self.pair.fates[self.name, name] = fate or ["ok", 0]
        self.waiting.append(request)
        self.side.arrive(request)

    def abort(self, name):
        request = self.side.legs.get(name)
        if request is None or request.status == "kept":
            return False
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self.side.end(request, "abort", self.pair.now)
        return True

    # -------------------------------------------------------------------------------------------------- a step

    def is_left(self):
        return bool(self.side.legs or self.side.over)

    def step(self):
        """Run one turn of the engine's loop and return its record."""
        record = {"lookups": []}
        if not self.is_async:
            self.schedule(record)
            self.process(record)
        else:
            done = True
            if self.is_left():
                self.schedule(record)
                done = len(self.batches) == 2 or not (self.batches[-1].scheduled or self.is_left())
            if done and self.batches:
                self.process(record)
        legs = self.side.legs.values()
        tables = {leg.name: [list(each) for each in self.driver.tables(leg.state)] for leg in legs}
        record["tables"] = {
            name: table for name, table in tables.items() if any(table) and table != self.shown.get(name)
        }
        self.shown = tables
        record["free"] = self.manager.num_free_blocks
        record["queue"] = crc32(json.dumps(self.manager.free_queue).encode())
        record["status"] = {leg.name: FINISHED[leg.finish] if leg.finish else STATUS[leg.status] for leg in legs}
        return record

    def schedule(self, record):
        self.budget = self.config["max_num_batched_tokens"]
        self.scheduled, self.record = [], record
        preempted = self.run_running()
        if not preempted:
            self.side.admit(self.waiting, self.has_place, self.start)
        self.side.step_scheduled(self.scheduled)
        scheduled = [(request, tokens, self.samples(request)) for request, tokens in self.scheduled]
        record["scheduled"] = [[request.name, tokens] for request, tokens in self.scheduled]
        record["preempted"] = [request.name for request in preempted]
        record["over"], self.side.over = self.side.over, []
        self.batches.append(Batch(scheduled, self.pair.worker(self, record)))

    def samples(self, request):
        samples = request.state.num_computed_tokens == len(request.state) + request.unknown
        request.unknown += samples
        return samples

    def has_place(self):
        return self.budget and len(self.running) < self.config["max_num_seqs"]

    def allocate(self, request, tokens):
        hits = None if self.driver.tables(request.state)[0] else self.manager.get_computed_blocks(request.state)
        if hits is None:
            return self.manager.allocate_slots(request.state, tokens)
        return self.manager.allocate_slots(request.state, tokens, hits)

    def start(self, request):
        state = request.state
        cached = state.num_computed_tokens or request.local_tokens
        tokens = min(len(state) - cached, self.budget)
        if self.allocate(request, tokens) is None:
            return False
        self.running.append(request)
        self.take(request, tokens)
        return True

    def take(self, request, tokens):
        self.budget -= tokens
        self.scheduled.append((request, tokens))
        if isinstance(self.manager, VllmHybridManager):
            request.state.num_in_flight_tokens = request.in_flight + tokens

    def run_running(self):
        """Schedule running requests; return the preempted ones."""
        preempted, place = [], 0
        while place < len(self.running) and self.budget:
            request = self.running[place]
            state, unknown = request.state, request.unknown
            place += 1
            last = request.prompt_tokens + len(request.output)
            tokens = min(len(state) + unknown - state.num_computed_tokens, self.budget)
            if not tokens or (unknown and state.num_computed_tokens + 2 - unknown >= last):
                continue
            while self.manager.allocate_slots(state, tokens) is None:
                victim = self.running[-1]
                if self.side.frees.defers and victim.in_flight:
                    return preempted
                self.running.pop()
                self.side.preempt(victim)
                victim.unknown = 0
                self.waiting.appendleft(victim)
                preempted.append(victim)
                if victim is request:
                    return preempted
            self.take(request, tokens)
        return preempted

    def process(self, record):
        batch, side = self.batches.popleft(), self.side
        answers = record["answers"] = []
        if batch.scheduled:
            side.frees.step_processed()
        errors = side.failures(batch.report)
        for request, tokens, samples in batch.scheduled:
            request.in_flight -= tokens
            if isinstance(self.manager, VllmHybridManager):
                request.state.num_in_flight_tokens = request.in_flight
            if request.stale:
                request.stale -= tokens
                continue
            if request.finish or not samples:
                continue
            self.sample(request, answers)
        for request in errors:
            side.end(request, "error", self.pair.now)
            answers.append([request.name, [], "error", None, None])
        side.take_report(batch.report)
        record["events"], self.events = self.events, []

    def sample(self, request, answers):
        state, token = request.state, request.output[request.generated]
        first = None if request.generated else [*request.found, request.cached_tokens]
        state.tokens.append(token)
        request.generated += 1
        request.unknown -= 1
        if self.is_async:
            self.manager.cache_blocks(state, state.num_computed_tokens - request.in_flight)
        finish = params = None
        if token == request.eos:
            finish = "stop"
        elif request.generated == len(request.output):
            finish = "length"
        if finish:
            self.running.remove(request)
            params = self.side.end(request, finish, self.pair.now, at_first_token=first is not None)
        answers.append([request.name, [token], finish, params, first])

    def final(self):
        if isinstance(self.manager, VllmHybridManager):
            counts = Counter(self.manager.resident_names())
        else:
            counts = Counter((0, name) for name in self.manager.resident())
        return [
            [name, group, count]
            for (group, name), count in sorted(counts.items(), key=lambda each: (each[0][1], each[0][0]))
        ]


class NixlPair:
    """Both engines, and the link between them."""

    def __init__(self, configs, kind):
        self.now, self.fates = 100.0, {}
        self.order = []  # sets of the original, in the recorded order
        self.engines = {name: Engine(name, config, self, kind) for name, config in configs.items()}
        self.reading = []  # [when, engine that reads, transfer, whether it arrives]
        self.unread = []  # [when, engine to tell, request there]

    def worker(self, engine, record):
        """Execute the worker's part of an engine step; return its report."""
        connector = engine.connector
        plan = connector.plan(self.now)
        begun = connector.begin(plan, self.now)
        for transfer in plan.reads:
            if transfer not in begun:
                continue
            fate, seconds = self.fates[engine.name, transfer.name]
            if transfer.is_empty:
                fate = "ok"
            record.setdefault("reads", []).append(
                [transfer.name, transfer.remote_name, list(transfer.local), transfer.remote, transfer.is_awaited, fate]
            )
            if transfer.is_empty:
                self.unread.append([self.now, transfer.engine, transfer.remote_name])
            elif fate in ("setup", "handshake"):
                connector.transfer_ended(transfer, ok=False)
            else:
                self.reading.append([self.now + seconds, engine, transfer, fate == "ok"])
                if fate == "ok":
                    self.unread.append([self.now + seconds, transfer.engine, transfer.remote_name])
        for name, requests in connector.to_renew(plan).items():
            self.engines[name].connector.renewed(requests)
        record["beats"] = {name: sorted(requests) for name, requests in plan.heartbeats.items()}
        record["leased"], record["in_batch"], record["dropped"] = list(plan.leases), plan.in_batch, plan.dropped
        self.arrive(engine)
        report = WorkerReport()
        connector.collect(self.now, report)
        for names in (report.sent, report.received):
            names.sort(key=lambda name: self.order.index(name) if name in self.order else -1)
        record.update(sent=report.sent, received=report.received, failed=report.failed, invalid=list(report.invalid))
        return report

    def arrive(self, engine):
        """Deliver everything that an engine sees by now."""
        for each in [each for each in self.reading if each[1] is engine and each[0] <= self.now]:
            self.reading.remove(each)
            engine.connector.transfer_ended(each[2], ok=each[3])
        for each in [each for each in self.unread if each[1] == engine.name and each[0] <= self.now]:
            self.unread.remove(each)
            engine.connector.notified(each[2])


class MooncakePair(NixlPair):
    """Both engines, and the loops of their workers, which run in each step of either engine."""

    def __init__(self, configs, kind):
        super().__init__(configs, kind)
        self.asking = []  # [when, engine that asks, transfer, offer]
        self.sending = []  # [when, engine that asks, transfer, offer, whether it arrives]

    def worker(self, engine, record):
        connector = engine.connector
        plan = connector.plan(self.now)
        plan.dropped.sort(key=self.dropped.index)
        pulls = connector.begin(plan, self.now)
        fates = [["ok", 0] if each.is_empty else self.fates[engine.name, each.name] for each in pulls]
        record["pulls"] = [
            [each.name, each.remote_name, list(each.local), fate] for each, (fate, _) in zip(pulls, fates, strict=True)
        ]
        if plan.lost:
            record["pulls"].append(["lost", plan.lost])
        record["offers"] = [[name, *offer] for name, offer in plan.offers.items()]
        record["dropped"] = plan.dropped
        for pull, (fate, _) in zip(pulls, fates, strict=True):
            if pull.engine not in self.engines or fate == "bootstrap":
                connector.transfer_ended(pull, ok=False)
            else:
                self.asking.append(
                    [self.now, engine, pull, self.engines[pull.engine].connector.asked(pull.remote_name)]
                )
        self.run_loops()
        report = WorkerReport()
        connector.collect(self.now, report)
        for names in (report.sent, report.received):
            names.sort(key=lambda name: self.order.index(name) if name in self.order else -1)
        record.update(sent=report.sent, received=report.received, failed=report.failed, invalid=list(report.invalid))
        return report

    def run_loops(self):
        for each in [*self.asking]:
            when, engine, pull, offer = each
            source = self.engines[pull.engine].connector
            if offer.is_ready:
                self.asking.remove(each)
                fate, seconds = self.fates[engine.name, pull.name]
                begun = source.begin_sending(offer, pull)
                if begun is False:
                    engine.connector.transfer_ended(pull, ok=False)
                elif begun:
                    self.sending.append(
                        [
                            self.now + (0 if pull.is_empty else seconds),
                            engine,
                            pull,
                            offer,
                            fate == "ok" or pull.is_empty,
                        ]
                    )
            elif when + engine.config["lease"] <= self.now:
                self.asking.remove(each)
                engine.connector.transfer_ended(pull, ok=False)
        for each in [each for each in self.sending if each[0] <= self.now]:
            self.sending.remove(each)
            _, engine, pull, offer, ok = each
            self.engines[pull.engine].connector.sent(offer, ok=ok)
            engine.connector.transfer_ended(pull, ok=ok)


def shown(event):
    """Return a recorded event with its tokens as single items."""
    return [*event[:4], unrolled(event[4]), event[5]] if event[0] == "S" else event


def canonical(record):
    """Return a record without empty fields and with unordered fields sorted."""
    out = {name: value for name, value in record.items() if value not in ([], {}, None)}
    for name in UNORDERED:
        if name in out:
            out[name] = sorted(out[name], key=json.dumps)
    if "answers" in out:
        errors = sorted((each for each in out["answers"] if each[2] == "error"), key=json.dumps)
        out["answers"] = [each for each in out["answers"] if each[2] != "error"] + errors
    return out


def play(program):
    """Return the differences of one program as text; it ends at the first one."""
    kind = program["kind"]
    pair = (MooncakePair if kind.startswith("mooncake") else NixlPair)(program["config"], kind)
    for number, (op, name, *args) in enumerate(each for each in program["log"] if each != ["stuck"]):
        engine = pair.engines[name]
        if op in ("add", "reject"):
            engine.add(*args)
            if op == "reject":
                engine.abort(args[0])
        elif op == "abort":
            did = engine.abort(args[0])
            if did != args[1]:
                return [f"entry {number}: abort of {args[0]}: recorded {args[1]}, got {did}"]
        elif op == "reset":
            answer = engine.manager.reset_prefix_cache()
            if answer != args[0]:
                return [f"entry {number}: reset: recorded {args[0]}, got {answer}"]
        elif op == "died":
            pair.now = args[0]
            try:
                engine.step()
                found = "no death"
            except EngineDied as death:
                found = [death.error, *death.where]
            return [] if found == args[1:] else [f"entry {number}: died: recorded {args[1:]}, got {found}"]
        elif op == "step":
            pair.now = args[0]
            pair.dropped = args[1].get("dropped", [])
            pair.order = [*args[1].get("sent", ()), *args[1].get("received", ())]
            recorded = canonical({**args[1], "events": list(map(shown, args[1].get("events", ())))})
            got = canonical(json.loads(json.dumps(engine.step())))
            wrong = [each for each in {**recorded, **got} if recorded.get(each) != got.get(each)]
            if wrong:
                lines = [f"\n    {each}: recorded {recorded.get(each)}, got {got.get(each)}" for each in wrong]
                return [f"entry {number} ({name} at {pair.now:g}):{''.join(lines)}"]
    final = {name: engine.final() for name, engine in pair.engines.items()}
    return [] if final == program["final"] else [f"final: recorded {program['final']}, got {final}"]


def played(programs):
    """Yield each program's name with its differences, or None."""
    for program in programs:
        yield name_of(program), "; ".join(play(program)) or None
