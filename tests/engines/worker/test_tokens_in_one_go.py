"""Tokens that a request generates in one go are as many that it generates one by one, whatever other requests do in
between.
"""

from random import Random

import pytest
from depth import seeds
from hybrid_sizes import EACH, block_size_of, blocks_a_block

from pytest_kvmock import BACKENDS, KvWorker, OutOfBlocks, Prompt, Removed
from pytest_kvmock.engines import RequestError


class Twin:
    """A worker whose requests generate in one go, or one by one.

    Args:
        backend: its backend.
        seed: of its sizes; two of one seed are alike.
        at_once: whether they do it in one go.
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
        """Note an event; Removed block by block, as TensorRT-LLM's are as many as there are iterations, of which
        each operation is one.
        """
        data = event.data
        self.events += [Removed((each,)) for each in data.block_hashes] if isinstance(data, Removed) else [data]

    def do(self, what, *rest):
        """Do a step of a program; returns what came of it."""
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
        """What is cached, in the order of eviction, and what requests have."""
        manager = self.worker.manager
        held = [(each.status, len(each), each.blocks) for each in self.requests]
        return sorted(manager.resident()), manager.inactive_blocks(), manager.active_blocks, held


def program(backend, seed, size):
    """Steps of several requests in turn, of which each generates up to some blocks at once."""
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
            continue  # in one go none of them is generated, one by one those that fit
        assert outcome == one_by_one.do(*step)
        assert at_once.state == one_by_one.state
        assert at_once.events == one_by_one.events
