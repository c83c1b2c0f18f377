"""Captured harnesses under random traffic, and the problems that a check of the capture must find again."""

from random import Random

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.servers import CaptureFile, CapturingJournal, check_file

PROFILE = EngineProfile(block_size=4, num_blocks=24, workers=2)
NOT_OF_THE_STREAM = {"engine_drift", "index_drift", "index_failure", "not_flushed", "leaked_requests"}


class Captured:
    """A harness whose events go into a file.

    `found()` returns the problems of its stream, `again()` the problems that a check of the file finds.
    """

    def __init__(self, path, backend=None, profile=PROFILE, **given):
        self.path = path
        self.file = CaptureFile(path, {"engine": None, "seed": 0})
        self.journal = CapturingJournal(self.file, self.backend_of)
        self.kv = RouterHarness(profile, None, journal=self.journal, **given)
        if backend is not None:
            self.kv.inside.use_backend(backend)

    def backend_of(self, key):
        worker = self.kv.workers.get(key) or self.kv.workers.get(key[0])
        return None if worker is None else worker.backend

    def serve(self, steps, seed=0):
        rng, kv = Random(seed), self.kv
        prompts = [kv.prompt(rng.randrange(1, 5)) for _ in range(3)]
        for _ in range(steps):
            worker = rng.choice(list(kv.workers.values()))
            if rng.random() < 0.04:
                worker.clear()
                continue
            prompt = kv.prompt(rng.randrange(1, 4), after=rng.choice(prompts), tail=rng.randrange(4))
            if rng.random() < 0.3:
                prompts[rng.randrange(3)] = prompt if len(prompt.tokens) < 40 else kv.prompt(2)
            worker.serve(prompt, output_tokens=rng.randrange(10))
        return kv

    def found(self):
        self.kv.judge()
        self.file.close()
        return [shown(problem) for problem in self.kv.events.problems if problem.rule not in NOT_OF_THE_STREAM]

    def again(self):
        checked = check_file(self.path)
        assert self.kv.events.total == checked.log.total
        assert checked.complete
        return [shown(problem) for problem in checked.log.problems]


def shown(problem):
    cause = problem.cause
    while cause is not None and cause.rule in NOT_OF_THE_STREAM:  # a drift confirms an orphan, which is listed under it
        cause = cause.cause
    return (
        problem.rule,
        problem.is_error,
        problem.worker_id,
        problem.dp_rank,
        problem.event_id,
        problem.position,
        problem.observed,
        problem.expected,
        problem.blocks,
        problem.restarts,
        None if cause is None else (cause.rule, cause.position),
        None if problem.fault is None else str(problem.fault),
    )
