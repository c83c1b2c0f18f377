"""Requests that skip passes that only decode, and the end times of such passes."""

from itertools import accumulate, pairwise
from random import Random

import pytest
from depth import seeds

from pytest_kvmock import MockEngine
from pytest_kvmock.engines import MockEngineArgs, PolynomialModel
from pytest_kvmock.engines.schedulers.calendar import DecodeTimes
from pytest_kvmock.engines.schedulers.performance import rounded_ms


def served(seed, sink):
    """Return an engine of 1.6.1 after random requests with partly shared prefixes; few blocks cause preemptions."""
    rng = Random(seed)
    size = rng.choice([4, 8, 16])
    fields = {"max_num_seqs": rng.choice([2, 6, None]), "speedup_ratio": rng.choice([1.0, 3.0])}
    args = MockEngineArgs(block_size=size, num_gpu_blocks=rng.choice([18, 24, 60]), semantics="1.6.1", **fields)
    engine = MockEngine(args, backend="vllm", seed=seed, sink=sink)
    prefixes = [[rng.getrandbits(17) for _ in range(5 * size)] for _ in range(3)]
    now = 0.0
    for _ in range(12):
        now += rng.choice([0.0, 1.0, 30.0, 400.0])
        prompt = rng.choice(prefixes)[: rng.randint(1, 5 * size)] + [
            rng.getrandbits(17) for _ in range(rng.randint(0, 9))
        ]
        engine.submit(prompt, rng.choice([1, 2, size, rng.randint(1, 9 * size)]), now)
    engine.run(now / 2)
    engine.run()
    return engine


@pytest.mark.parametrize("seed", seeds(200))
def test_an_engine_without_listeners_gives_the_same_run_as_one_with_listeners(seed):
    quiet, heard = served(seed, None), served(seed, lambda event: None)
    for name in (
        "token_ms",
        "admissions",
        "preemptions",
        "computed_tokens",
        "ended_ms",
        "status",
        "first_reused_tokens",
    ):
        assert [getattr(each, name) for each in heard.requests] == [getattr(each, name) for each in quiet.requests], (
            name
        )
    assert heard.passes == quiet.passes
    assert heard.metrics == quiet.metrics
    assert heard.worker.removed_blocks == quiet.worker.removed_blocks
    pools = heard.worker.manager, quiet.worker.manager
    assert pools[0].free_queue == pools[1].free_queue
    assert pools[0].resident() == pools[1].resident()
    assert pools[0].inactive_blocks() == pools[1].inactive_blocks()


@pytest.mark.parametrize("speedup", [1.0, 2.5, 0.0])
@pytest.mark.parametrize("lengths", [range(5, 900, 1), range(90, 5000, 7), range(2**18 - 400, 2**18 + 400, 3)])
def test_decode_pass_ends_equal_the_sums_of_the_original(speedup, lengths):
    total, model = 4096, PolynomialModel("1.6.1")
    times = DecodeTimes(model, total, speedup)
    steps = [rounded_ms(model.decode_ms(each, total, each // lengths.step), speedup) for each in lengths]
    ends = list(accumulate(steps, initial=0.1))
    for until in (1e9, ends[40], ends[9] + 0.01, 0.2):
        for _ in range(2):  # once computed, once cached
            started = [end for begin, end in pairwise(ends) if begin < until]
            assert started == times.ends(0.1, until, lengths)
