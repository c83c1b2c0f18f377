"""Play recordings of small contracts on our cache, and print the differences by program and step.

    python tests/engines/vllm/play_contracts.py FILE...

They are full reports, context parallelism, resets, pauses, adapters and `SimpleCPUOffloadConnector` of vLLM, and
SGLang's load stream. The last line is "N of M programs equal", over all files; the exit status is 1 if any differs.
Scenarios and streams count as programs; the endpoints of a file count together, as do its ranges of ports. The caches
are those of the package. This program models what the recordings made up: vLLM's scheduler, sampled tokens, the copies,
and the clock and socket of a load stream.
"""

import json
import sys
from collections import Counter, deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import players

from pytest_kvmock import Prompt
from pytest_kvmock.engines.vllm.host.simple_offload import ComputingRequest, SimpleOffload
from pytest_kvmock.engines.vllm.vllm_manager import FullReportError
from pytest_kvmock.values.load_stat import LoadPublisher, LoadStat
from pytest_kvmock.values.prompt_keys import PromptKeys
from pytest_kvmock.wire.codec.load_stream import load_frames, load_ports, load_rank
from pytest_kvmock.wire.sockets.endpoints import rank_endpoint

plain = players.player("engines/vllm/plain_scheduler.py")
hybrid = players.player("engines/vllm/play_hybrid.py")


class Copies:
    """The copies of a recording: one queue per direction, and the duration of each transfer in steps."""

    def __init__(self, latency):
        self.latency = latency
        self.queues = {"load": deque(), "store": deque()}
        self.now = -1

    def step(self, plan):
        """Make one step; returns the completed loads and stores."""
        self.now += 1
        if plan.flush:
            for queue in self.queues.values():
                for each in queue:
                    each[1] = self.now
        for direction, queue in self.queues.items():
            copies = getattr(plan, direction)
            if copies is not None:
                latency = self.latency[direction]
                queue.append([copies, self.now + latency[copies.number % len(latency)]])
        return tuple(self.due(queue) for queue in self.queues.values())

    def due(self, queue):
        done = []
        while queue and queue[0][1] <= self.now:
            done.append(queue.popleft()[0])
        return done


class Engine(plain.PlainScheduler):
    """A scheduler over a device, with or without a pool below it, and the records of its steps."""

    def __init__(self, config):
        has_pool, host = "cpu_blocks" in config, None
        device = plain.device_of(config, self, grouped=has_pool)
        if has_pool:
            lazy, disk = config.get("lazy", False), config.get("disk", False)
            host = SimpleOffload(config["cpu_blocks"] - 1, device.manager, lazy=lazy, disk=disk)
            self.copies = Copies(config["latency"])
        super().__init__(config, device, host, defers=config.get("async", False) and has_pool)
        self.paused = "UNPAUSED"

    # -------------------------------------------------------------------------------------------------- inputs

    def add(self, name, prompt, output, *others):
        if others and isinstance(others[0], dict):
            more = others[0]
            mode = more.get("extra", {}).get("kv_cache_report_mode")
            salt, session, lora = more.get("cache_salt"), more.get("session_id"), more.get("lora")
        else:
            mode, salt, session = others
            lora = None
        adapter, number, path = lora or (None, None, "")
        ids = self.manager.lora_ids
        while adapter is not None and ids.of(adapter) != number:
            ids.unload(adapter)
        keys = PromptKeys(lora_name=adapter, cache_salt=salt, session_id=session, lora_path=path)
        state = self.manager.new_request(Prompt(prompt).with_keys(keys) if keys.given else prompt)
        request = plain.Request(name, state, self.host and self.host.request(state), output)
        request.was_preempted, request.reports = False, mode == "full"
        self.arrive(request)

    def ended(self, request, *, aborted):
        if self.host is not None:
            self.host.ended(request.offload, request.state.num_computed_tokens - request.unknown)

    def reset_below(self):
        return self.host.reset()

    def preempt(self, request):
        super().preempt(request)
        if self.host is not None:
            self.host.preempted(request.offload)
        request.was_preempted = True

    # -------------------------------------------------------------------------------------------------- a step

    def begin(self):
        super().begin()
        if self.paused == "PAUSED_ALL":
            self.budget = 0

    def schedule(self, record):
        super().schedule(record)
        if self.host is None:
            del record["lookups"], record["finished"]

    def plan(self, preempted, over):
        if self.host is None:
            return
        record, recorded = self.record, self.recorded
        computing = sorted(self.computing, key=lambda each: each[2])  # as in the output of vLLM's scheduler
        requests = [ComputingRequest(each.offload, before) for each, before, _ in computing]
        plan = self.host.plan(requests, flush=bool(preempted))
        loads, stores = self.copies.step(plan)
        for direction in ("load", "store"):
            copies = getattr(plan, direction)
            record[direction] = copies and [copies.number, list(copies.device), list(copies.slots)]
        record["flush"] = plan.flush
        names = self.names_below()
        done = [each.number for each in stores]
        received = [names[each] for copies in loads for each in copies.requests]
        record["done"] = self.batch.done = in_order_of(recorded.get("done", []), done)
        record["received"] = in_order_of(recorded.get("received", []), received)
        self.batch.received = [self.requests[name] for name in record["received"]]

    def take(self, request, tokens):
        known = request.state.num_computed_tokens - tokens - request.unknown
        super().take(request, tokens)
        self.computing[-1] = (request, known, self.place)

    def run_running(self):
        self.place = 2
        super().run_running()

    def admit(self):
        if self.paused == "UNPAUSED":
            super().admit()

    def started(self, request, tokens):
        self.place = int(request.was_preempted)
        return super().started(request, tokens)

    def match(self, request, local):
        if request.reports:
            self.manager.report_hits(request.state)
        external = 0 if self.host is None else self.host.match(request.offload, local)
        return external, bool(external)

    def placed(self, request, local, external):
        if self.host is not None:
            self.host.allocated(request.offload, local + external, external)

    def complete(self, batch):
        if self.host is None:
            return ()
        self.host.complete([each.offload for each in batch.received], batch.done)
        return batch.received

    def process(self, record):
        super().process(record)
        if self.host is not None:
            record["cpu_free"] = self.host.num_free_blocks

    def final(self):
        several = len(self.config.get("groups", ("full",))) > 1
        found = {"gpu": counted(self.device.resident(), several)}
        if self.host is not None:
            found["cpu"] = counted(self.host.resident(), several)
        return found


def counted(names, several):
    """Return the number of copies of each hash, with its group if there are several."""
    rows = Counter((name, group) if several else (name,) for group, name in names)
    return [[*row, count] for row, count in sorted(rows.items())]


def in_order_of(recorded, got):
    """Return the result in the order of the recording, which is that of a set."""
    return recorded if sorted(recorded) == sorted(got) else got


def difference(program, fields):
    """Return the first difference of a program of one engine as text, or None."""
    engine = Engine(program["config"])
    is_scenario = "kind" in program
    for number, (op, *given) in enumerate(program["log"]):
        args = given[is_scenario:]
        if op in ("add", "abort"):
            getattr(engine, op)(*args)
        elif op == "pause":
            (engine.paused,) = args
        elif op == "queued":
            events, got = plain.wire_events(args[0], fields), plain.written(engine.device_events)
            if got != events:
                return f"entry {number}: queued: recorded {events}, got {got}"
        elif op == "reset":
            *asked, answer = args
            got = engine.reset(asked[0], asked[1] if len(asked) > 1 else False)
            found = plain.reset_difference(number, answer, got)
            if found is not None:
                return found
        elif op in ("endless", "goes on"):
            continue  # the steps before it show it
        elif op == "died":
            try:
                engine.step({})
            except FullReportError:
                continue
            return f"entry {number}: the engine lives on"
        else:
            recorded = dict(args[0])
            try:
                got = engine.step(recorded)
            except FullReportError as error:
                return f"entry {number}: {error}"
            if "events" in recorded:
                recorded["events"] = plain.wire_events(recorded["events"], fields)
            found = plain.step_difference(number, recorded, got)
            if found is not None:
                return found
    final = [engine.final()] if is_scenario else engine.final()
    expected = program["final"]
    if isinstance(expected, list) and not is_scenario:
        final = final["gpu"]
    return None if final == expected else f"final: recorded {expected}, got {final}"


class GroupPlayer(hybrid.Player):
    """The player of several groups, with requests in full mode."""

    def do_new(self, name, runs, salt, mode=None):
        super().do_new(name, runs, salt)
        self.modes = {**getattr(self, "modes", {}), name: mode}

    def do_ask(self, name):
        request = self.requests[name]
        self.manager.report_hits(request)
        return {"computed_tokens": self.manager.get_computed_blocks(request).num_tokens}

    def do_died(self, error):
        found = []
        for name, request in self.requests.items():
            if self.modes[name] == "full" and not request.holds_blocks:
                try:
                    self.manager.report_hits(request)
                except FullReportError:
                    found.append(name)
        assert found, f"the engine lives on; recorded {error}"
        self.taken()

    def play(self, step):
        got = super().play(step)
        if step["op"][0] == "died":
            return {"op": step["op"]}
        if step["op"][0] == "ask":
            tables = [table.blocks for table in self.requests[step["op"][1]].tables]
            got["held"] = [[len(blocks), sum(map(bool, blocks))] for blocks in tables]
            got["crc"] = hybrid.crc32(json.dumps([self.manager.free_queue, tables]).encode())
        return got


def stream_difference(stream):
    """Return the first difference of a load stream as text, or None."""
    parallel = stream["parallel"]
    publishes = not (parallel["pp_rank"] or parallel["attn_tp_rank"] or parallel["attn_cp_rank"])
    rank = load_rank(**{name: parallel[name] for name in ("attn_dp_size", "attn_dp_rank", "dp_rank")})
    ports = load_ports(
        stream["load_publish_endpoint"],
        kv_endpoint="tcp://*:5557",
        replay_endpoint=stream["replay_endpoint"],
        ranks=parallel["num_dp_ranks"],
    )
    enabled = publishes and ports is not None
    bound = [f"tcp://{ports[0]}:{ports[1] + rank}"] if enabled else []
    if (bound, enabled) != (stream["bound"], stream["enabled"]):
        return f"bound: recorded {stream['bound']}, got {bound}"
    publisher = LoadPublisher(stream["interval"])
    for number, (now, force, values, fails, was_read, messages) in enumerate(stream["log"]):
        is_due = enabled and publisher.is_due(force=force)
        got = []
        if is_due:
            stat = LoadStat(*values[:4], rank, *values[4:])
            sent = publisher.next_number(stat, now)
            if sent is not None and not fails:
                publisher.sent(stat, now)
                got = [[frame.hex() for frame in load_frames(sent, stat)]]
        if (is_due, got) != (was_read, messages):
            return f"call {number}: recorded {was_read}, {messages}; got {is_due}, {got}"
    return None


def ranges_difference(ranges):
    """Return the first different row of ports as text, or None."""
    for kv_endpoint, replay_endpoint, ranks, option, ports, complains in ranges:
        try:
            got = load_ports(option, kv_endpoint=kv_endpoint, replay_endpoint=replay_endpoint, ranks=ranks)
            raised = False
        except ValueError:
            got, raised = None, True
        if (got and list(got), raised) != (ports, complains):
            asked = (kv_endpoint, replay_endpoint, ranks, option)
            return f"{asked}: recorded {ports}, {complains}; got {got}, {raised}"
    return None


def endpoints_difference(endpoints):
    """Return the first different endpoint of a rank as text, or None."""
    for endpoint, rank, bound in endpoints:
        try:
            got = rank_endpoint(endpoint, rank)
        except ValueError:
            got = "ValueError"
        if got != bound:
            return f"{endpoint!r}, rank {rank}: recorded {bound!r}, got {got!r}"
    return None


def played(value):
    """Yield the name of each program of a recording with its first difference."""
    if isinstance(value, list):
        yield from hybrid.played(value, lambda program: hybrid.difference(program, GroupPlayer))
        return
    for program in (*value.get("programs", ()), *value.get("scenarios", ())):
        if program.get("kind") != "file tier":
            yield players.name_of(program), difference(program, value["fields"])
    for stream in value.get("streams", ()):
        yield stream["seed"], stream_difference(stream)
    if "ranges" in value:
        yield "ranges", ranges_difference(value["ranges"])
    if "endpoints" in value:
        yield "endpoints", endpoints_difference(value["endpoints"])


def main(paths):
    return players.main(paths, played)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
