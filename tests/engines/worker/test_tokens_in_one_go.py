"""Tokens that a request generates at once have the effect of the same tokens one by one, whatever other requests do."""

from random import Random

import pytest
from depth import seeds
from hybrid_sizes import EACH, block_size_of, blocks_a_block

from pytest_kvmock import BACKENDS, KvWorker, OutOfBlocks, Prompt, Removed
from pytest_kvmock.engines import RequestError


class Twin:
    """A worker whose requests generate tokens at once, or one by one.

    Args:
        backend: the worker's backend.
        seed: the seed of its sizes; equal seeds give equal workers.
        at_once: whether its requests generate tokens at once.
    """

    def __init__(self, backend, seed, *, at_once):
        rng, spec, self.events, self.at_once = Random(f"{backend} {seed}"), BACKENDS[backend], [], at_once
        size = self.size = block_size_of(backend, rng.choice([2, 4, 8]))
        blocks = rng.choice([8, 20, 40]) * (1 if spec.group is None else blocks_a_block(backend, size))
        self.worker = KvWorker(
            lambda sink: spec.make(num_blocks=blocks, block_size=size, dp_rank=0, sink=sink),
            sink=self.hear,
            rng=Random(seed),
            driver=spec.driver,
        )
        self.requests = []

    def hear(self, event):
        """Record an event; a Removed block by block, because TensorRT-LLM sends one per iteration, and each
        operation is an iteration.
        """
        data = event.data
        self.events += [Removed((each,)) for each in data.block_hashes] if isinstance(data, Removed) else [data]

    def do(self, what, *rest):
        """Do a step of a program; returns its result."""
        try:
            if what == "prefill":
                self.requests.append(self.worker.prefill(*rest))
            elif what == "decode":
                request, tokens = self.requests[rest[0] % len(self.requests)], rest[1]
                for some in [tokens] if self.at_once else [[each] for each in tokens]:
                    request.decode(some)
            else:
                getattr(self.requests[rest[0] % len(self.requests)], what)()
        except (OutOfBlocks, RequestError) as error:
            return type(error)
        return None

    @property
    def state(self):
        """Return the cached blocks in eviction order, and the blocks of requests."""
        manager = self.worker.manager
        held = [(each.status, len(each), each.blocks) for each in self.requests]
        return sorted(manager.resident()), manager.inactive_blocks(), manager.active_blocks, held


def program(backend, seed, size):
    """Return alternating steps of several requests; each request generates up to several blocks at once."""
    rng, prefixes = Random(f"program {backend} {seed}"), [[token, *range(100, 100 + 4 * size)] for token in range(2)]
    yield "prefill", Prompt(prefixes[0][:size])
    for _ in range(30):
        what = rng.choice(["prefill", "decode", "decode", "decode", "preempt", "resume", "finish"])
        if what == "prefill":
            yield what, Prompt(rng.choice(prefixes)[: rng.randint(1, 4 * size)])
        elif what == "decode":
            yield what, rng.randrange(99), [rng.randrange(3) for _ in range(rng.randint(1, 3 * size))]
        else:
            yield what, rng.randrange(99)


@pytest.mark.parametrize("backend", EACH)
@pytest.mark.parametrize("seed", seeds(12))
def test_decoding_tokens_in_one_go_equals_decoding_them_one_by_one(backend, seed):
    at_once, one_by_one = (Twin(backend, seed, at_once=each) for each in (True, False))
    for step in program(backend, seed, at_once.size):
        outcome = at_once.do(*step)
        if step[0] == "decode" and outcome is OutOfBlocks:
            continue  # at once none of them is generated, one by one those that fit
        assert outcome == one_by_one.do(*step)
        assert at_once.state == one_by_one.state
        assert at_once.events == one_by_one.events
