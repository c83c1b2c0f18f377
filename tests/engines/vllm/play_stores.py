"""Play recordings of shared stores on our stores, and print the differences by program and step.

    python tests/engines/vllm/play_stores.py FILE...

They are vLLM's tier of files, `MooncakeStoreConnector`, LMCache's server and the objects of SGLang's HiCache. The last
line is "N of M programs equal", over all files; the exit status is 1 if any differs. Layouts count as programs. The
stores are those of the package. This program models what the recordings made up: vLLM's scheduler, sampled tokens,
copies, and the threads that look up, read and write files.
"""

import json
import sys
from collections import Counter, deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import players

from pytest_kvmock import Prompt
from pytest_kvmock.engines.sglang.hashes import SglangHasher, page_root
from pytest_kvmock.engines.sglang.host.mooncake_keys import MooncakeLayout
from pytest_kvmock.engines.vllm.host.file_tier import FileStore, FileThreads, FileTier
from pytest_kvmock.engines.vllm.host.lmcache_server import LmcacheHasher, LmcacheServer
from pytest_kvmock.engines.vllm.host.mooncake_ranks import MooncakeObjects, MooncakeRequest
from pytest_kvmock.engines.vllm.host.mooncake_store import MooncakeOffload, ScheduledTokensOf
from pytest_kvmock.engines.vllm.pairs.legs import EngineDied

plain = players.player("engines/vllm/plain_scheduler.py")
native = players.player("engines/vllm/play_vllm_offload.py")

PLAYED = ("file tier",)
"""The kinds of scenarios that are played."""

# ------------------------------------------------------------------------------------------------------- files below


class StepThreads(FileThreads):
    """The threads of the recording: the duration of each job and of each batch of lookups, in steps of the engine."""

    def __init__(self, store, latency):
        super().__init__(store)
        self.latency = latency
        self.jobs, self.batches, self.found = [], [], []
        self.entered, self.taken = [], []
        self.num_batches = 0

    def enter(self, job):
        latency = self.latency["file_load" if job.is_load else "file_store"]
        self.jobs.append((self.now + latency[job.number % len(latency)], job.number, job))
        kind = "load" if job.is_load else "store"
        names = [key[0] for key in job.keys]
        self.entered.append([job.number, kind, names if job.is_load else sorted(names)])

    def finished(self, *, drain=False):
        due = sorted(each for each in self.jobs if drain or each[0] <= self.now)
        self.jobs = [each for each in self.jobs if each not in due]
        done = [job for _, _, job in due]
        for job in done:
            job.run(self.store)
            self.taken.append(job)
        return done

    def ask(self, keys):
        latency = self.latency["lookup"]
        self.batches.append((self.now + latency[self.num_batches % len(latency)], keys))
        self.num_batches += 1

    def answers(self):
        found, self.found = self.found, []
        return found

    def end_step(self):
        due = [keys for at, keys in self.batches if at <= self.now]
        self.batches = [each for each in self.batches if each[0] > self.now]
        self.found += [(key, key in self.store) for keys in due for key in keys]
        self.now += 1


class FileEngine(native.Engine):
    """A scheduler over a device, its host, and the files below them."""

    def __init__(self, config, store, fields):
        self.threads = StepThreads(store, config["latency"])
        self.lost_slots = False  # a read failed: its slots are freed in the order of a set
        files = FileTier(self.threads, locality=config.get("locality"), publishes=config.get("file_events", True))
        super().__init__(config, fields, files=files)

    def records(self, recorded):
        recorded = {**recorded, "events": self.wired(recorded["events"])}
        got = self.step(recorded)
        for record in (recorded, got):
            record["events"] = sorted_transfers(record["events"], self.transfers)
            if self.lost_slots:
                for name in ("loads", "stores"):
                    record[name] = [job[:-1] for job in record[name]]
        return recorded, got

    def step(self, recorded):
        record = super().step(recorded)
        record["file_jobs"], self.threads.entered = self.threads.entered, []
        taken, self.threads.taken = self.threads.taken, []
        record["file_done"] = [[job.number, job.done == len(job.keys)] for job in taken]
        self.transfers = [("CPU" if job.is_load else "STORAGE", job.done, not job.is_load) for job in taken]
        stores = [job for job in self.batch.done if not job.is_load and not job.is_dropped]
        self.transfers += [("CPU", len(job.chunks), True) for job in stores]
        self.lost_slots = self.lost_slots or not all(success for _, success in record["file_done"])
        self.threads.end_step()
        return record


def sorted_transfers(events, transfers):
    """Return events; those of each transfer with the order of a set are sorted.

    Args:
        events: the events of a batch.
        transfers: for each transfer, in order: its medium, its number of chunks, whether it has the order of a set.
    """
    out = [*events]
    for medium in ("CPU", "STORAGE"):
        places = [
            place
            for place, event in enumerate(events)
            if event["type"] == "BlockStored" and event.get("medium") == medium
        ]
        for size, is_set in ((size, is_set) for each, size, is_set in transfers if each == medium):
            here, places = places[:size], places[size:]
            if is_set:
                for place, event in zip(here, sorted((events[each] for each in here), key=json.dumps), strict=True):
                    out[place] = event
    return out


def file_tier_difference(program, fields):
    """Return the first difference of a program over files as text, or None."""
    config = {"extra": {}, "blocks_per_chunk": 1, "engines": 1, **program["config"]}
    store = FileStore()
    engines = [FileEngine(config, store, fields) for _ in range(config["engines"])]
    for number, (op, *args) in enumerate(program["log"]):
        engine, found = engines[args[0]] if op != "delete" else None, None
        if op == "add":
            engine.add(*args[1:])
        elif op == "abort":
            engine.abort(*args[1:])
        elif op == "delete":
            store.delete({*args[0]})
        elif op == "reset":
            found = plain.reset_difference(number, args[3], engine.reset(*args[1:3]))
        elif op == "step":
            found = plain.step_difference(number, *engine.records(args[1]))
        if found is not None:
            return found
    final = [engine.final() for engine in engines]
    files = sorted(key[0] for key in store.files)
    if (final, files) != (program["final"], program["files"]):
        return f"final: recorded {program['final']} and {program['files']}, got {final} and {files}"
    return None


# --------------------------------------------------------------------------------------------- Mooncake below vLLM


class RankThreads:
    """The threads of one rank in the recording: the duration of each job in steps; puts and loads have a queue each."""

    def __init__(self, rank, number, latency):
        self.rank, self.number, self.latency = rank, number, latency
        self.queues = {"load": deque(), "save": deque()}
        self.counts = {"load": 0, "save": 0}

    def enter(self, kind, job, step):
        latency = self.latency[kind]
        due = step + latency[(self.counts[kind] + self.number) % len(latency)]
        self.counts[kind] += 1
        self.queues[kind].append((step, due, job))

    def due(self, step):
        """Return the jobs that are due, each with its kind, in the order in which they were entered."""
        out = []
        for kind, queue in self.queues.items():
            while queue and queue[0][1] <= step:
                out.append((queue[0][0], kind, queue.popleft()[2]))
        return [each[1:] for each in sorted(out, key=lambda each: each[0])]


class MooncakeEngine(plain.PlainScheduler):
    """A scheduler over a device, and Mooncake's store below it."""

    def __init__(self, config, objects):
        device = plain.device_of(config, self)
        manager = device.manager
        host = MooncakeOffload(
            objects,
            manager.block_size,
            ranks=config["tp"],
            heads=config["heads"],
            dcp=config.get("dcp", 1),
            save_decode=config.get("save_decode", False),
            hold=manager.pin_blocks,
            free=manager.give_back,
        )
        super().__init__(config, device, host)
        self.threads = [RankThreads(rank, number, config["latency"]) for number, rank in enumerate(host.ranks)]
        self.answers, self.num_lookups = {}, 0
        self.now = 0
        self.resumed = set()  # preempted, and not scheduled since

    def add(self, name, prompt, output, salt):
        state = self.manager.new_request(Prompt(prompt, cache_salt=salt))
        request = plain.Request(name, state, MooncakeRequest(state.tokens), output)
        request.ranks_left = 0
        self.arrive(request)

    def preempt(self, request):
        super().preempt(request)
        self.resumed.add(request)

    def look_up(self, request):
        """Return the tokens of a request that the store reports; None: still unknown."""
        tokens = request.offload.tokens
        if tokens.num_tokens < tokens.block_size:
            return 0
        if request not in self.answers:
            found = self.host.lookup(tokens)
            self.record["asked"].append([request.name, tokens.num_tokens, found])
            latency = self.config["latency"]["lookup"]
            due = self.now + latency[self.num_lookups % len(latency)] * self.config.get("lookup_async", False)
            self.num_lookups += 1
            self.answers[request] = due, found
        due, found = self.answers[request]
        if due > self.now:
            return None
        del self.answers[request]
        return found

    def match(self, request, local):
        found = self.look_up(request)
        external = None if found is None else self.host.match(request.offload, local, found)
        return None if external is None else (external, bool(external))

    def placed(self, request, local, external):
        if external:
            request.ranks_left = len(self.threads)
            self.host.allocated(request.offload, [*request.state.block_ids])
        else:
            self.host.allocated(request.offload)

    def admit_loaded(self, request):
        if request.status == "named" or request.state.num_computed_tokens:
            return super().admit_loaded(request)
        self.manager.free(request.state)  # its whole load failed
        request.status = "waiting"
        return self.admit_new(request)

    def admit_new(self, request):
        admitted = super().admit_new(request)
        if admitted is False and request in self.loading:
            self.passed.append(request)
        return admitted

    def admit(self):
        self.passed = []  # their whole load failed: they wait again, before the others
        super().admit()
        for request in self.passed:
            self.loading.remove(request)
        self.waiting.extendleft(reversed(self.passed))

    def started(self, request, tokens):
        self.admitted.add(request)
        return super().started(request, tokens)

    def begin(self):
        super().begin()
        self.admitted = set()
        self.record["asked"] = []

    def plan(self, preempted, over):
        # New requests first, then preempted ones, then those that continue: the order for vLLM's connector.
        order = sorted(self.batch.scheduled, key=lambda each: (each[0] not in self.admitted, each[0] in self.resumed))
        self.resumed -= self.admitted
        scheduled = [
            ScheduledTokensOf(
                each.offload,
                each.state.num_computed_tokens - tokens,
                tokens,
                each.state.block_ids,
                each in self.admitted,
            )
            for each, tokens, _ in order
        ]
        for each in over:
            self.answers.pop(each, None)
        gone = [each.offload for each in preempted], [each.offload for each in over]
        saves, loads = self.host.plan(scheduled, *gone)
        names = self.names_below()
        for threads in self.threads:
            for job in loads:
                threads.enter("load", job, self.now)
            for job in saves:
                threads.enter("save", job, self.now)
        runs, missed = [], set()
        self.batch.reported, self.batch.landed = Counter(), []
        for threads in self.threads:
            for kind, job in threads.due(self.now):
                name = names[job.request]
                if kind == "save":
                    put = threads.rank.save(job)
                    runs.append(["save", threads.number, job.number, [[*key, code] for key, code in put]])
                    self.batch.reported[job.number] += 1
                else:
                    missing = threads.rank.load(job)
                    missed.update(missing)
                    runs.append(["load", threads.number, name, bool(missing)])
                    request = self.requests[name]
                    request.ranks_left -= 1
                    if not request.ranks_left:
                        self.batch.landed.append(request)
        self.host.end_step(*gone)
        self.now += 1
        self.take_missed(missed)
        self.record.update(
            saves=[[job.number, names[job.request], job.upto, job.start, len(job.token_ids)] for job in saves],
            loads=[[names[job.request], job.start, job.end] for job in loads],
            runs=runs,
        )

    def take_missed(self, missed):
        """Cut the reported tokens of loads at the first block of the device that was not filled."""
        for request in self.loading:
            if request.status == "loading":
                blocks = request.state.block_ids
                place = next((place for place, block in enumerate(blocks) if block in missed), None)
                if place is not None:
                    size = self.manager.block_size
                    request.state.num_computed_tokens = min(request.state.num_computed_tokens, place * size)

    def complete(self, batch):
        for job, ranks in batch.reported.items():
            self.host.reported(job, ranks)
        return batch.landed

    def final(self):
        counts = Counter(name for _, name in self.device.resident())
        return [[name, counts[name]] for name in sorted(counts)]


def mooncake_difference(program, fields):
    """Return the first difference of a program over Mooncake's store as text, or None."""
    config = program["config"]
    objects = MooncakeObjects(config["capacity"], config["fails"])
    engines = [MooncakeEngine(config, objects) for _ in range(config["engines"])]
    for number, (op, *args) in enumerate(program["log"]):
        engine, found = engines[args[0]] if op not in {"drop", "full"} else None, None
        if op == "drop":
            objects.drop(args[0])
        elif op == "full":
            objects.is_full = args[0]
        elif engine is None:
            continue  # an operation on a dead engine
        elif op == "add":
            engine.add(*args[1:])
        elif op == "abort":
            engine.abort(*args[1:])
        elif op == "reset":
            found = plain.reset_difference(number, args[3:], [engine.reset(*args[1:3]), len(objects.objects)])
        elif op == "died":
            try:
                engine.step({})
            except EngineDied:
                engines[args[0]] = None
            else:
                return f"entry {number}: recorded a dead engine, got one that lives"
        else:
            recorded = {**args[1], "events": plain.wire_events(args[1]["events"], fields)}
            found = plain.step_difference(number, recorded, engine.step(recorded))
        if found is not None:
            return found
    final = [engine and engine.final() for engine in engines]
    there = list(map(list, objects.objects))
    if (final, there) != (program["final"], program["objects"]):
        return f"final: recorded {program['final']} and {program['objects']}, got {final} and {there}"
    return None


# ------------------------------------------------------------------------------------------------ LMCache's server


def lmcache_difference(program, fields):
    """Return the first difference of a program over a server as text, or None."""
    config = program["config"]
    server = LmcacheServer(chunk_tokens=config["chunk"], log_records=config["log"])
    engines = [server.attach(model, page=config["page"]) for model in config["models"]]
    names = {}
    for number, (op, *args) in enumerate(program["log"]):
        if op == "store":
            engine, tokens, first, salt, are_known = args
            stored = server.store(engines[engine].model, tokens, first=first, salt=salt, are_known=are_known)
            names |= {(each.model, server.hasher.name(each.digest), each.salt): each for each in stored}
        elif op == "evict":
            server.evict(names[model, name, salt] for model, name, salt in args[0])
        elif op == "lost":
            server.lose_events()
        elif op == "restart":
            server.restart()
        elif op == "closed":
            engines[args[0]].close()
        else:
            recorded = plain.wire_events(args[1], fields)
            got = plain.written((), engines[args[0]].read())
            if got != recorded:
                return f"entry {number}: read: recorded {recorded}, got {got}"
    name = server.hasher.name
    held = sorted([each.model, name(each.digest), each.salt] for each in server.held)
    final = [sorted(map(name, each.announced)) for each in engines]
    if (held, final) != (program["held"], program["final"]):
        return f"final: recorded {program['held']} and {program['final']}, got {held} and {final}"
    return None


def chain_difference(none_hash, chain):
    """Return the difference from the recorded vectors of the chain as text, or None."""
    hasher = LmcacheHasher()
    if hasher.digests((), 1, 0, None) or hasher._root.hex() != none_hash:
        return f"the root is {hasher._root.hex()}, recorded {none_hash}"
    for size, count, digests in chain:
        got = [each.hex() for each in hasher.digests(range(count), size, 0, None)]
        if got != digests:
            return f"chunks of {size} in {count} tokens: recorded {digests}, got {got}"
    return None


# ------------------------------------------------------------------------------------------------ SGLang's objects


def keys_difference(layout):
    """Return the difference in the keys of a layout as text, or None."""
    ours = MooncakeLayout(
        tp=layout["tp"],
        pp=layout["pp"],
        dcp=layout["dcp"],
        is_mla=layout["mla"],
        shares=layout["tp_lcm"],
        page_size=64 if layout["dcp"] == 1 else 128,
        tag=layout["tag"],
        model=layout["model"],
    )
    got = {place: ours.keys_of_rank("H", *map(int, reversed(place.split(".")))) for place in layout["asked"]}
    if (ours.prefix, got) != (layout["prefix"], layout["asked"]):
        return f"recorded {layout['prefix']!r} and {layout['asked']}, got {ours.prefix!r} and {got}"
    return None


def names_difference(value):
    """Return the difference from the recorded digests of pages and their names in events as text, or None."""
    for extra_key, salt, seed in value["namespace_seeds"]:
        got = page_root(extra_key, salt)
        if (None if got is None else got.hex()) != seed:
            return f"the seed of {extra_key!r} and {salt!r}: recorded {seed}, got {got!r}"
    for tokens, page, is_eagle, seed, hashes in value["page_hashes"]:
        parent = None if seed is None else bytes.fromhex(seed)
        got = [each.hex() for each in SglangHasher(is_eagle=is_eagle).digests(tokens, page, 0, parent)]
        if got != hashes:
            return f"pages of {page} of {tokens}: recorded {hashes}, got {got}"
    for page_hash, name in value["event_names"]:
        got = SglangHasher().name(bytes.fromhex(page_hash))
        if got != name:
            return f"the name of {page_hash}: recorded {name}, got {got}"
    return None


def played(value):
    """Yield the name of each program of a recording with its difference."""
    fields = value.get("fields")
    for number, layout in enumerate(value.get("layouts", ())):
        yield f"layout {number}", keys_difference(layout)
    if "layouts" in value:
        found = names_difference(value)
        if found is not None:
            yield "names", found
        return
    if "chain" in value:
        found = chain_difference(value["none_hash"], value["chain"])
        if found is not None:
            yield "chain", found
    programs = [*value.get("programs", ()), *(each for each in value.get("scenarios", ()) if each["kind"] in PLAYED)]
    for program in programs:
        config = program["config"]
        play = (
            lmcache_difference if "log" in config else mooncake_difference if "tp" in config else file_tier_difference
        )
        yield f"program {players.name_of(program)}", play(program, fields)


def main(paths):
    return players.main(paths, played)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
