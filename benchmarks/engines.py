"""Engines in virtual time: the shared workload and a trace through a scheduler, compared with Dynamo's."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import manager, workload
from benchmarks.measure import Figure, alternating, cpu_seconds, dynamo, written
from benchmarks.verdict import traces
from pytest_kvmock.fleets import MOONCAKE_BLOCK_SIZE, read_mooncake

ROUNDS = 3
BLOCKS = 4_000  # of an engine
BY_STEPS = "each running request of a pass that computes prompts, too, is a step of Python"
BY_REPORT = "half of the time the report counts the gaps between tokens, one by one"
ONE_AT_A_TIME = """\
engine = MockEngine(MockEngineArgs(block_size={size}, num_gpu_blocks={blocks}))
replay(requests, [engine], concurrency=1, trace_block_size={size}).to_json()"""
AS_IT_ARRIVES = f"""\
args = MockEngineArgs(block_size={MOONCAKE_BLOCK_SIZE}, num_gpu_blocks={BLOCKS}, semantics="1.6.1")
replay(read_mooncake(path), [MockEngine(args) for _ in range(engines)]).to_json()"""


def shared_workload():
    """Measure one request at a time, with one output token each, including hashing and statistics."""
    directory, peer, version = manager.replay()
    size = workload.BLOCK_SIZE
    with directory:
        requests = list(read_mooncake(Path(directory.name, "trace.jsonl"), trace_block_size=size))
        lines = ONE_AT_A_TIME.format(size=size, blocks=workload.CAPACITY)
        seconds, other = alternating(ROUNDS, written(lines, requests=requests), peer, clock=cpu_seconds)
    name = "requests through a scheduler, one at a time, one output token"
    yield Figure(name, other / seconds, 0.33, f"run_mocker_trace_replay, {version}", lines=lines)


def mooncake():
    """Measure the conversation trace, one request at a time, with all its output tokens."""
    core, version = dynamo("1.2")
    path = traces()
    size, blocks = MOONCAKE_BLOCK_SIZE, 2_000
    requests = list(read_mooncake(path))
    args = core.MockEngineArgs(block_size=size, num_gpu_blocks=blocks)

    def peer():
        core.run_mocker_trace_replay(str(path), args, replay_concurrency=1, trace_block_size=size)

    lines = ONE_AT_A_TIME.format(size=size, blocks=blocks)
    seconds, other = alternating(ROUNDS, written(lines, requests=requests), peer, clock=cpu_seconds)
    name = "the conversation trace through a scheduler, one request at a time"
    yield Figure(name, other / seconds, 0.3, f"run_mocker_trace_replay, {version}", lines=lines)


def newest():
    """Measure the conversation trace as its requests arrive, over one engine and over eight, by the rules of 1.6.1,
    against that release.
    """
    core, version = dynamo("1.6")
    path, size = traces(), MOONCAKE_BLOCK_SIZE
    given = {"engine": {"backend": "vllm", "block_size": size, "num_gpu_blocks": BLOCKS}}
    with TemporaryDirectory() as directory:
        head = Path(directory, "trace.jsonl")
        head.write_text("".join(path.read_text().splitlines(keepends=True)[:8_000]))
        worlds = (("all requests", path, 1, 0.25, BY_STEPS), ("8,000 requests", head, 8, 0.83, BY_REPORT))
        for requests, file, count, bar, why in worlds:

            def peer(file=file, count=count):
                core.run_mocker_trace_replay(
                    [str(file)], extra_engine_args=given, num_workers=count, trace_block_size=size
                )

            ours = written(AS_IT_ARRIVES, path=file, engines=count)
            seconds, other = alternating(ROUNDS, ours, peer, clock=cpu_seconds)
            engines = f"{count} engine{'s' * (count > 1)}"
            name = "the conversation trace through schedulers, as it arrives"
            beside, variant = f"run_mocker_trace_replay, {version}", f"{requests}, {engines}"
            yield Figure(name, other / seconds, bar, beside, variant, why=why, lines=AS_IT_ARRIVES)
