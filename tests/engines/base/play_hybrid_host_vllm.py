"""Play recorded programs of vLLM's native offload below several cache groups or a draft model on ours.

The device's block manager and `NativeOffload` are those of the package. This program models vLLM's
scheduler with its budgets, and what the recording made up: the durations of copies, the sampled
tokens, and the numbers of accepted drafts.
"""

import json
from collections import Counter
from zlib import crc32

from players import player, unrolled

from pytest_kvmock import Prompt
from pytest_kvmock.engines import CacheGroup
from pytest_kvmock.engines.vllm.host.native_offload import offload_of
from pytest_kvmock.engines.vllm.host.offload_steps import Hit
from pytest_kvmock.engines.vllm.hybrid import VllmHybridManager

plain = player("engines/vllm/plain_scheduler.py")
NATIVE = player("engines/vllm/play_vllm_offload.py")
HYBRID = player("engines/vllm/play_hybrid.py")

BEYOND_OUTPUT = 1_000_000
"""The recorded tokens beyond those given for a request."""
MEDIA = {"BlockStored": "S", "BlockRemoved": "R", "AllBlocksCleared": "C"}


class Request:
    """A request as the scheduler knows it."""

    def __init__(self, name, state, offload, output):
        self.name, self.state, self.offload = name, state, offload
        self.first, self.most = output
        self.sampled = 0
        self.stale = 0  # tokens in flight whose results are dropped
        self.last_step = 0
        self.status = "waiting"  # loading, loaded, named, running, over
        self.is_prefill = True

    def answer(self, count):
        """Return the next `count` sampled tokens; dropped ones count, so the output may run out."""
        numbers = range(self.sampled, self.sampled + count)
        self.sampled += count
        return [(self.first if number < self.most else BEYOND_OUTPUT) + number for number in numbers]

    @property
    def in_flight(self):
        """Tokens that are scheduled but not processed."""
        return self.state.num_in_flight_tokens

    @property
    def generated(self):
        return len(self.state) - self.state.tokens.num_prompt_tokens

    @property
    def is_certain(self):
        """Whether the results in flight include its last token, however many drafts are accepted."""
        drafts, state = self.state.drafts, self.state
        reached = state.num_computed_tokens + 2 - drafts.placeholders
        return drafts.placeholders > 0 and reached >= state.tokens.num_prompt_tokens + self.most


class Engine(NATIVE.OffloadScheduler):
    """A scheduler over a device and its host, and the records of its steps."""

    def __init__(self, program):
        config, self.facts = program["config"], program["facts"]
        manager = VllmHybridManager(
            groups=[CacheGroup(**each) for each in HYBRID.groups_of(config)],
            num_blocks=config["gpu_blocks"],
            sink=self,
            retention=config["retention"],
            match_unit=config.get("unit"),
            speculative=HYBRID.draft_model(config),
            max_num_batched_tokens=config["max_num_batched_tokens"],
            max_model_len=config["max_model_len"],
            async_scheduling=config.get("async", False),
        )
        groups = manager.geometry.groups
        bytes_per_token = sum(NATIVE.BLOCK_BYTES // group.block_size for group in groups if group.cacheable)
        host = offload_of(manager, config["cpu_chunks"], **NATIVE.offload_options(config, bytes_per_token))
        manager.attach_offload(host, None)
        super().__init__(config, plain.GroupedPool(manager), host)
        draft = manager.speculative
        self.drafts = 0 if draft is None else draft.tokens
        slots = 0 if draft is None else draft.slots
        self.input_slots = 0 if draft is None else draft.input_slots
        # Slots of a step with drafts beyond a request's tokens, and their blocks.
        self.ahead = 1 + self.drafts + slots if self.drafts else 0
        self.step_blocks = sum(-(-self.ahead // each.block_size) for each in groups if each.kind != "mamba")

    # -------------------------------------------------------------------------------------------------- inputs

    def add(self, name, prompt, output, params=None):
        state = self.manager.new_request(Prompt(unrolled(prompt)))
        self.arrive(Request(name, state, self.offloaded(state, params or {}), output))

    def preempt(self, request):
        request.stale = request.in_flight
        super().preempt(request)

    # -------------------------------------------------------------------------------------------------- a step

    def begin(self):
        super().begin()
        self.input_budget = self.budget
        self.manager.new_step_starts()

    def schedule(self, record):
        super().schedule(record)
        counts = {name: count for name, _, count in self.recorded.get("sampled", ())}
        sampled = []
        for entry in self.batch.scheduled:
            request, state = entry[0], entry[0].state
            sent = state.drafts._sent[-1]
            promised = len(state) + state.drafts.placeholders
            request.is_prefill = state.num_computed_tokens < promised
            if not request.is_prefill:
                self.prefills.discard(request)
                entry[2] = counts.get(request.name, 1)
                sampled.append([request.name, sent, entry[2]])
                if self.is_async:
                    state.drafts.assume(self.drafts)
        if self.drafts:
            record["sampled"] = sampled

    def states(self):
        by_state = {each.state: each.offload for each in self.requests.values()}
        states = [(by_state[state], entries) for state, entries in self.manager.take_states().items()]
        pairs = self.manager.take_copies()
        self.frees.copied(pairs)
        self.got.update(copy for _, copy in pairs)
        return states

    def shown(self, job, name):
        return [*super().shown(job, name), list(job.sizes), list(job.firsts)]

    def take(self, request, tokens):
        """Count tokens of a request as scheduled."""
        request.state.drafts.scheduled(request.state, tokens)
        self.budget -= tokens
        self.input_budget -= tokens + self.input_slots
        self.batch.scheduled.append([request, tokens, None])
        self.computing.append(request)

    def has_budget(self):
        return self.budget > 0 and self.input_budget > self.input_slots

    def run_running(self):
        super().run_running()
        self.ran = bool(self.computing)
        self.is_prefill_step = any(each.is_prefill for each in self.computing)

    def next_tokens(self, request):
        state = request.state
        if request.is_certain:
            return 0
        most = min(state.drafts.wanted(state), self.budget, self.input_budget - self.input_slots)
        return self.manager.chunk_tokens(state, min(most, self.config["max_model_len"] - state.num_computed_tokens - 1))

    def go_on(self, request):
        return self.compute(request, None, 0)

    def admit_new(self, request):
        """Try to admit a request without computed tokens: True: admitted; False: skipped; None: admission ends."""
        manager, state = self.manager, request.state
        hits = manager.get_computed_blocks(state)
        tail = hits.num_tokens % manager.geometry.scheduler_block_size
        local = hits.num_tokens - tail
        hit = self.host.match(request.offload, local)
        waits = hit is not None and bool(hit.tokens) and not hit.within_step
        self.record["lookups"].append([request.name, local, None if hit is None else hit.tokens, waits])
        if hit is None:
            return False
        if tail and hit.tokens > tail:
            hits = manager.cut_hits(hits, local)
        elif tail:
            hit, waits = Hit(local, 0), False
        if not waits:
            return self.compute(request, hits, hit.tokens, hit)
        free = manager.num_free_blocks
        if manager.missing_blocks(state, len(state), hits, for_admission=True, num_external_tokens=hit.tokens) > free:
            return None
        reserved = self.step_blocks + sum(
            manager.missing_blocks(each.state, len(each.state), for_admission=True, num_lookahead_tokens=self.ahead)
            for each in self.prefills
        )
        end = local + hit.tokens
        if manager.missing_blocks(state, end, hits, num_external_tokens=hit.tokens) > free - reserved:
            return None
        manager.allocate_slots(
            state, 0, hits, num_lookahead_tokens=0, num_external_tokens=hit.tokens, delay_cache_blocks=True
        )
        self.waits(request)
        self.place(request, hit)
        return True

    def place(self, request, hit):
        tables = self.device.blocks(request.state)
        for blocks in tables:
            self.got.update(blocks)
        if hit is not None:
            self.host.allocated(request.offload, tables, hit, self.manager.pool.names)

    def compute(self, request, hits, external, hit=None):
        """Start a request from its computed tokens and the tokens that arrive within the step."""
        manager, state, drafts = self.manager, request.state, self.drafts
        room = min(self.budget, self.input_budget - self.input_slots)
        start = state.num_computed_tokens + (0 if hits is None else hits.num_tokens) + external
        tokens, padded = len(state) - start, 0
        fits = start + 2 + drafts <= self.config["max_model_len"]
        if drafts and tokens == 1 and not self.is_prefill_step and (self.ran or start) and fits:
            if 1 + drafts > room:
                return None
            tokens, padded = 1 + drafts, drafts
        tokens = manager.chunk_tokens(state, min(tokens, room), hits, external)
        if not tokens:
            return None if manager.geometry.aligned_states else False
        if padded and tokens != 1 + padded:
            tokens, padded = 1, 0
        state.drafts.proposed = padded
        if (
            manager.allocate_slots(state, tokens, hits, full_sequence_must_fit=True, num_external_tokens=external)
            is None
        ):
            state.drafts.forget()
            return None
        self.place(request, hit)
        return self.started(request, tokens)

    def process(self, record):
        super().process(record)
        tables = [
            [name, [table.blocks for table in each.state.tables]]
            for name, each in sorted(self.requests.items())
            if each.status != "over" or each.state.holds_blocks
        ]
        record["crc"] = crc32(json.dumps([self.manager.free_queue, tables]).encode())

    def answer(self, request, tokens, count):
        manager, state = self.manager, request.state
        came = request.answer(count or 0)
        if request.status == "over" or request.stale:
            state.num_in_flight_tokens -= tokens
            state.drafts.answered()
            request.stale = max(0, request.stale - tokens)
            return
        if count is None:
            manager.take_output(state, tokens, None)
            return
        left = request.most - request.generated
        if self.is_async or self.drafts:
            manager.take_output(state, tokens, came, room=left)
        else:
            manager.take_output(state, tokens, None)
            state.tokens.extend(came[:left])
        if request.generated == request.most:
            self.running.remove(request)
            self.end(request)
        elif not self.is_async:
            state.drafts.proposed = self.drafts

    def taken(self):
        """Return the events since the last step in the recorded form."""
        return list(map(self.row, super().taken()))

    def row(self, event):
        kind = MEDIA[event["type"]]
        if kind == "C":
            return ["C"]
        group = event["group_idx"]
        if kind == "R":
            return ["R", event["medium"], group, event["block_hashes"]]
        tokens, spec = event["token_ids"], [event.get("kv_cache_spec_kind"), event.get("kv_cache_spec_sliding_window")]
        row = ["S", event["medium"], group, event.get("parent_block_hash"), event["block_hashes"], event["block_size"]]
        row += [len(tokens), tokens[0] if tokens else None]
        if event["medium"] == "CPU":
            return row + spec
        assert spec == self.facts["kinds"][group], spec
        return row

    def is_copy(self, event):
        return event[:2] == ["S", "CPU"]

    def final(self):
        counts = Counter(self.manager.resident_names())
        return {
            "gpu": [[name, group, count] for (group, name), count in sorted(counts.items(), key=by_name)],
            "cpu": sorted(map(list, self.host.resident())),
        }


def by_name(entry):
    (group, name), _ = entry
    return name, group


def difference(program):
    """Return the first difference of a program as text, or None."""
    return Engine(program).difference(program)


def played(programs):
    """Yield each program's name with its difference, or None."""
    for program in programs:
        yield f"{program['geometry']}, seed {program['seed']}", difference(program)
