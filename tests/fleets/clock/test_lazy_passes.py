"""Engines that run passes in one go give the same results as engines that run them one by one.

Each random world is run in three ways. "detailed", the oracle: a listener forces each pass to run separately. "heard":
a sink receives the events. "unheard": there is no sink or listener, so an engine may run ahead without limit.
"""

from random import Random

import pytest
from depth import seeds
from hybrid_sizes import EACH, block_size_of, blocks_a_block
from planned import planned

from pytest_kvmock import BACKENDS, Fleet, MockEngine, MockEngineArgs, Prompt, replay
from pytest_kvmock.fleets import DynamoRouter, FleetRequest, RoundRobin, TraceRequest
from pytest_kvmock.fleets.clock.engine_request import EngineRequest
from pytest_kvmock.servers.serve.text import Letters

BY_VLLM = [name for name in EACH if BACKENDS[name].scheduler in ("vllm", "trtllm")]
"""The backends with vLLM's scheduler, or TensorRT-LLM's, which is of the same kind."""

WAYS = ("detailed", "heard", "unheard")

OF_REQUEST = (
    "status",
    "generated_tokens",
    "computed_tokens",
    "reused_tokens",
    "first_reused_tokens",
    "lacking",
    "onboarded_tokens",
    "admitted_ms",
    "admissions",
    "token_ms",
    "ended_ms",
    "preemptions",
)


class World:
    """A random world over one backend: sizes, and requests that partly share prefixes.

    Args:
        backend: of all its engines.
        seed: of all that is random.
    """

    def __init__(self, backend, seed):
        self.backend, self.rng = backend, Random(f"{backend} {seed}")
        spec, rng = BACKENDS[backend], self.rng
        self.size = block_size_of(backend, rng.choice([4, 4, 8, 16]))
        self.takes_hashes = spec.traits.takes_hashes and rng.random() < 0.6
        self.blocks = rng.choice([18, 24, 60]) * (1 if spec.group is None else blocks_a_block(backend, self.size))
        self.fields = {
            "max_num_seqs": rng.choice([2, 6, None]),
            "max_num_batched_tokens": rng.choice([4 * self.size, 512, None]),
            "speedup_ratio": rng.choice([1.0, 3.0]),
        }
        if spec.scheduler == "trtllm":
            self.fields["engine_type"] = "trtllm"
        self.prefixes = [[rng.getrandbits(17) for _ in range(6 * self.size)] for _ in range(3)]

    def engine(self, way, heard, seed=0, **fields):
        """Return an engine of this world for one of the ways; `heard` collects its events, except when unheard."""
        args = MockEngineArgs(block_size=self.size, num_gpu_blocks=self.blocks, **self.fields | fields)
        sink = None if way == "unheard" else lambda event: heard.append((event.event_id, event.data))
        engine = MockEngine(args, backend=self.backend, seed=seed, sink=sink)
        if way == "detailed":
            engine.on_pass(lambda done: None)
        return engine

    def prompt(self):
        """Return a prompt of tokens, or of hashes with a partial last block, whose output then has random names."""
        rng, size = self.rng, self.size
        if self.takes_hashes and rng.random() < 0.7:
            blocks = self.prefixes[rng.randrange(3)][: rng.randint(1, 5)]
            return Prompt(hashes=blocks, num_tokens=len(blocks) * size + rng.choice([0, rng.randrange(size)]))
        head = rng.choice(self.prefixes)[: rng.randint(1, 5 * size)]
        return Prompt([*head, *(rng.getrandbits(17) for _ in range(rng.randint(0, 9)))])

    def output(self):
        """Return a number of output tokens: few, about one block, or many."""
        return self.rng.choice([1, 2, self.size, self.rng.randint(1, 5 * self.size)])

    def moment(self, before):
        """Return a random time that is not before `before`."""
        return before + self.rng.choice([0.0, 1.0, 30.0, self.rng.uniform(0, 300)])


def rows(requests):
    """Return the state of each request, including its block names."""
    return [(*(getattr(each, name) for name in OF_REQUEST), list(each.blocks)) for each in requests]


def state(engine):
    """Return an engine's cached blocks in eviction order, and its counters."""
    manager = engine.worker.manager
    return (
        sorted(manager.resident()),
        manager.inactive_blocks(),
        manager.active_blocks,
        getattr(manager, "free_queue", None),
        engine.metrics,
        engine.inside.row,
        engine.worker.removed_blocks,
    )


def agree(run):
    """Assert that a world gives the same results and state in every way, and the same events where a sink exists."""
    (seen, events), (seen_heard, events_heard), (seen_unheard, _) = map(run, WAYS)
    assert seen == seen_heard
    assert events == events_heard
    assert seen == seen_unheard


# ------------------------------------------------------------------------------------------------------ one engine


def program(world, steps=14):
    """Return the steps for one engine: requests, elapsed time, aborts, restarts of the worker, and a close."""
    rng, now, made = world.rng, 0.0, []
    for number in range(steps):
        now = world.moment(now)
        options = {}
        if rng.random() < 0.2:
            options["abort_after_tokens"] = rng.randint(0, 12)
        elif rng.random() < 0.2:
            options["abort_after_ms"] = rng.uniform(0, 400)
        made.append(("submit", world.prompt(), world.output(), now, options))
        what = rng.random()
        if what < 0.35:
            made.append(("run", now + rng.choice([0.0, rng.uniform(0, 500)])))
        elif what < 0.45:
            made.append(("step", rng.randint(1, 4)))
        elif what < 0.6:
            made.append(("abort", rng.randint(0, number)))
        elif what < 0.65:
            made.append(("restart",))
        elif what < 0.68:
            made.append(("close",))
    return made


def play(world, steps, way):
    """Play a program on an engine and record its visible state after each step."""
    heard, seen = [], []
    engine = world.engine(way, heard)
    for what, *rest in steps:
        if what == "submit":
            prompt, output, arrival_ms, options = rest
            engine.submit(prompt, output, max(arrival_ms, engine.now_ms), **options)
        elif what == "run":
            engine.run(*rest)
        elif what == "step":
            for _ in range(0 if engine.is_idle else rest[0]):
                engine.step()
                if engine.is_idle:
                    break
        elif what == "abort":
            request = engine.requests[rest[0]]
            if request.is_open:
                request.abort()
        elif what == "restart":
            engine.worker.restart()
        else:
            engine.close()
        seen.append((engine.now_ms, rows(engine.requests), state(engine)))
    engine.run()
    seen.append((engine.now_ms, rows(engine.requests), state(engine)))
    return seen, heard


@pytest.mark.parametrize("backend", BY_VLLM)
@pytest.mark.parametrize("seed", seeds(24))
def test_an_engine_that_skips_passes_equals_one_that_runs_each_pass(backend, seed):
    world = World(backend, seed)
    steps = program(world)
    agree(lambda way: play(world, steps, way))


# ------------------------------------------------------------------------------------------------- several engines


def trace(world, count=14):
    """Return the requests of a replay, with hash ids as in its traces."""
    rng, now, made = world.rng, 0.0, []
    for _ in range(count):
        now = world.moment(now)
        blocks = world.prefixes[rng.randrange(3)][: rng.randint(1, 5)]
        made.append(TraceRequest(now, len(blocks) * world.size - rng.choice([0, 0, 1]), world.output(), tuple(blocks)))
    return made


def replayed(world, requests, way, prefill, decode, **options):
    """Replay requests; prefill engines, if any, hand over to decode engines."""
    heard = []
    kinds = ["prefill"] * prefill + ["decode" if prefill else "aggregated"] * decode
    made = [
        world.engine(
            way,
            heard,
            at,
            worker_type=kind,
            **({"kv_bytes_per_token": 1000, "kv_transfer_bandwidth": 0.01} if prefill else {}),
        )
        for at, kind in enumerate(kinds)
    ]
    report = replay(requests, made[prefill:], made[:prefill], **options)
    return (report.to_json(), report.per_request(), rows(report.requests), [state(each) for each in made]), heard


@pytest.mark.parametrize("backend", BY_VLLM)
@pytest.mark.parametrize("seed", seeds(8))
def test_engines_on_one_clock_agree_pass_by_pass_and_in_one_go(backend, seed):
    world = World(backend, seed)
    options = {"concurrency": world.rng.choice([None, None, 5]), "stop_ms": world.rng.choice([None, None, 600.0])}
    engines, requests = world.rng.choice([1, 3]), trace(world)
    agree(lambda way: replayed(world, requests, way, 0, engines, **options))


@pytest.mark.parametrize("backend", ["lineage", "vllm", "vllm_0_19"])
@pytest.mark.parametrize("seed", seeds(8))
def test_engines_that_hand_over_agree_pass_by_pass_and_in_one_go(backend, seed):
    world = World(backend, seed)
    requests = trace(world)
    agree(lambda way: replayed(world, requests, way, 1, 2))


# ----------------------------------------------------------------------------------------------------- a whole fleet


def routed(world, requests, happens, router, *, plans):
    """Run a fleet with incidents; return its report and every event that its router received, with its time."""
    heard = []

    engines = [world.engine("unheard", None, at) for at in range(3)]
    router.apply = lambda event: heard.append((event.worker_id, event.event.event_id, event.event.data))
    fleet = planned(Fleet(engines, router), plans=plans)
    for moment, what, *rest in happens:
        getattr(fleet.at(moment), what)(*rest)
    report = fleet.run(requests)
    state_of = [state(each) for each in fleet.engines.values()]
    for lost in (each for each in report.requests if each.status != "finished"):
        lost.computed_tokens = None  # the pass lost in a crash was either computed or only planned
    return report.to_json(), report.per_request(), report.picks, rows(report.requests), state_of, heard


@pytest.mark.parametrize("backend", BY_VLLM)
@pytest.mark.parametrize("seed", seeds(8))
def test_a_fleet_with_crashes_restarts_and_joins_agrees_pass_by_pass_and_in_one_go(backend, seed):
    world = World(backend, seed)
    rng, now, requests = world.rng, 0.0, []
    restarts = rng.random() < 0.5
    # The pass lost in a restart may have drawn a name already, or was only planned; later names then differ.
    world.takes_hashes &= not restarts
    for _ in range(16):
        now = world.moment(now)
        gone = rng.choice([{}, {}, {"abort_after_tokens": rng.randint(0, 9)}, {"abort_after_ms": rng.uniform(0, 200)}])
        requests.append(FleetRequest(world.prompt(), world.output(), now, **gone))
    happens = [(rng.uniform(0, now), "abort", rng.randrange(16)) for _ in range(3)]
    happens += [(rng.uniform(0, now), "crash", 0)] if rng.random() < 0.5 else []
    happens += [(rng.uniform(0, now), "restart", 1)] if restarts else []
    happens += [(rng.uniform(0, now), "join")] if rng.random() < 0.3 else []
    router = rng.choice([RoundRobin, DynamoRouter])
    each_pass, in_one_go = (routed(world, requests, happens, router(), plans=plans) for plans in (False, True))
    assert each_pass == in_one_go


@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 1000])
@pytest.mark.parametrize("planned", [{}, {2: 7, 64: 9}], ids=["none", "planned"])
@pytest.mark.parametrize("source", [Random, Letters])
def test_tokens_drawn_at_once_equal_tokens_drawn_one_by_one(source, planned, count):
    at_once, one_by_one = (
        EngineRequest(None, None, Prompt((1,)), 1, 2000, rng=source(count), planned=planned) for _ in range(2)
    )
    tokens = []
    for _ in range(count):
        tokens.append(one_by_one.next_token())
        one_by_one.generated_tokens += 1
    assert tokens == list(at_once.next_tokens(count))
    at_once.generated_tokens += count
    assert one_by_one.next_token() == at_once.next_token()
