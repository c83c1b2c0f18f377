"""vLLM's block pool compared with the real `KVCacheManager` of vLLM 0.33.0 and 0.19.1, step by step."""

from copy import deepcopy

import pytest

from pytest_kvmock import CapturingSink, Prompt, Removed, Stored, create_manager
from pytest_kvmock.engines.vllm.hashes import ExtraKeys

BACKENDS = {"vllm": "0.33.0", "vllm_0_19": "0.19.1"}


class Pool:
    """A manager under replay, and its open requests."""

    def __init__(self, backend, program):
        self.size = program["block_size"]
        self.sink = CapturingSink()
        self.manager = create_manager(
            backend,
            num_blocks=program["usable_blocks"],
            block_size=self.size,
            sink=self.sink,
            enable_caching=program.get("enable_caching", True),
        )
        self.requests = {}
        self.preempted = set()

    def events(self):
        out = []
        for event in self.sink.take():
            data = event.data
            if isinstance(data, Stored):
                hashes = list(data.block_hashes)
                out.append(["S", data.parent_hash, hashes, len(hashes) * self.size])
            else:
                out.append(["R", list(data.block_hashes)] if isinstance(data, Removed) else ["C"])
        return out

    def start(self, request, chunk=None):
        """Look up and allocate, at once or in chunks; returns (whether it fit, computed tokens, hits, new blocks)."""
        hits = self.manager.get_computed_blocks(request)
        computed, length, chunk = len(hits) * self.size, len(request), chunk or len(request)
        new, first = [], hits
        at = computed
        while at < length:
            upto = min(length, (at // chunk + 1) * chunk)
            got = self.manager.allocate_slots(request, upto - at, first)
            if got is None:
                self.manager.free(request)
                return False, computed, hits, new
            new += got
            at, first = upto, ()
        return True, computed, hits, new

    def add(self, name, tokens, salt=None, chunk=None, skip=False):
        keys = None if salt is None else ExtraKeys(cache_salt=salt)
        request = self.manager.new_request(Prompt(tokens), keys=keys, skip_reading_prefix_cache=skip)
        answer = self.start(request, chunk)
        if answer[0]:
            self.requests[name] = request
        return answer

    def decode_at_once(self, name, tokens):
        """Decode all tokens in one allocation, which is rolled back if they do not fit."""
        request = deepcopy(self.requests[name])
        request.tokens.extend(tokens)
        new = self.manager.allocate_slots(request, len(tokens))
        if new is not None:
            self.requests[name] = request
        return new

    def decode(self, name, tokens):
        """Decode token by token."""
        request, new = self.requests[name], []
        if self.manager.missing_blocks(request, len(request) + len(tokens)) > self.manager.num_free_blocks:
            return ["full"]
        for token in tokens:
            request.tokens.append(token)
            new += self.manager.allocate_slots(request, 1)
        return new

    def free(self, name):
        self.preempted.discard(name)
        self.manager.free(self.requests.pop(name))


@pytest.mark.parametrize("backend", BACKENDS)
def test_scenarios_give_the_recorded_blocks_events_and_free_queue(recording, backend):
    for program in recording(f"vllm_{BACKENDS[backend]}_scenarios.json.gz"):
        pool = Pool(backend, program)
        for number, step in enumerate(program["steps"]):
            where = (program["name"], number)
            kind, *arguments = step["op"]
            if kind == "add":
                fits, computed, hits, new = pool.add(*arguments)
                assert step["computed_tokens"] == computed, where
                assert step["hit_block_ids"] == hits, where
                assert step["new_block_ids"] == (new if fits else None), where
            elif kind == "decode":
                assert step["new_block_ids"] == pool.decode_at_once(*arguments), where
            elif kind == "reset":
                assert step["ok"] == pool.manager.reset_prefix_cache(), where
            else:
                pool.free(*arguments)
            assert step["events"] == pool.events(), where
            assert step["free_queue"] == pool.manager.free_queue, where


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_workloads_give_the_recorded_answers_and_events(recording, backend):
    for program in recording(f"vllm_{BACKENDS[backend]}_random.json.gz"):
        pool = Pool(backend, program)
        for number, step in enumerate(program["steps"]):
            where = (program["seed"], number, step["op"][0])
            kind, *arguments = step["op"]
            if kind == "add":
                fits, computed, *_ = pool.add(*arguments)
                assert (step["ok"], step["computed_tokens"]) == (fits, computed), where
            elif kind == "decode":
                assert step["ok"] == (pool.decode_at_once(*arguments) is not None), where
            elif kind == "reset":
                assert step["ok"] == pool.manager.reset_prefix_cache(), where
            else:
                pool.free(*arguments)
            assert step["events"] == pool.events(), where
            assert step["free"] == pool.manager.num_free_blocks, where


# Recorded with the same releases. An operation is ["add", name, tokens, salt, chunk, prompt logprobs], ["decode", name,
# tokens] (token by token, if there is room for all), ["free", name], ["preempt", name], ["resume", name, chunk] or
# ["reset"]; its answer, for a prompt, (did it fit, computed tokens, hits, new blocks), for decode the new blocks. What
# does not apply (a name that is gone) has answer ["none"] or null. A prompt that fails after its first chunk is freed.
@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_with_chunks_salts_and_preemptions_give_the_recorded_answers(recording, backend):
    for program in recording(f"vllm_{BACKENDS[backend]}_requests.json.gz"):
        pool = Pool(backend, program)
        for number, step in enumerate(program["steps"]):
            answer = play(pool, *step["op"])
            where = (program["seed"], number, step["op"])
            assert step["answer"] == (list(answer) if isinstance(answer, tuple) else answer), where
            assert step["events"] == pool.events(), where
            assert step["free_queue"] == pool.manager.free_queue, where


def play(pool, kind, name=None, *arguments):
    if kind == "add":
        return pool.add(name, *arguments)
    if kind == "reset":
        return [pool.manager.reset_prefix_cache()]
    if name not in pool.requests:
        return ["none"]
    if kind == "free":
        pool.free(name)
        return ["freed"]
    if (kind == "resume") != (name in pool.preempted):
        return None
    if kind == "decode":
        return pool.decode(name, *arguments)
    if kind == "preempt":
        pool.manager.free(pool.requests[name])
        pool.preempted.add(name)
        return ["pre"]
    answer = pool.start(pool.requests[name], *arguments)
    if answer[0]:
        pool.preempted.discard(name)
    return answer


def test_the_two_releases_differ_in_every_random_workload(recording):
    newer, older = (recording(f"vllm_{version}_random.json.gz") for version in BACKENDS.values())
    assert 8 == len(newer) == len(older)
    for one, other in zip(newer, older, strict=True):
        assert [step["op"] for step in one["steps"]] == [step["op"] for step in other["steps"]]
        assert [step["events"] for step in one["steps"]] != [step["events"] for step in other["steps"]]
