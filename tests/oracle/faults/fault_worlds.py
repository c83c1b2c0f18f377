"""Harnesses under random traffic, for injected faults."""

from random import Random

from hybrid_sizes import sized

from pytest_kvmock import EngineProfile, RouterHarness

PROFILE = EngineProfile(block_size=4, num_blocks=24, workers=2)


class Traffic:
    """Random requests on all workers of a harness, with shared prefixes, evictions and clears."""

    def __init__(self, backend, seed, index=None, profile=PROFILE, **given):
        self.rng = Random(f"{backend} {seed}")
        self.kv = RouterHarness(sized(profile, backend), backend, index, name=str(seed), **given)
        self.prompts = [self.kv.prompt(self.rng.randrange(1, 5)) for _ in range(3)]

    def step(self):
        worker = self.rng.choice(list(self.kv.workers.values()))
        kind = self.rng.random()
        if kind < 0.04:
            worker.clear()
            return
        prompt = self.kv.prompt(
            self.rng.randrange(1, 4), after=self.rng.choice(self.prompts), tail=self.rng.randrange(4)
        )
        if kind < 0.3:
            self.prompts[self.rng.randrange(3)] = prompt if len(prompt.tokens) < 40 else self.kv.prompt(2)
        worker.serve(prompt, output_tokens=self.rng.randrange(10))

    def run(self, steps):
        for _ in range(steps):
            self.step()
        return self.kv
