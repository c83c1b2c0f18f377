"""The command as users type it: `replay` with its default sizes, compared with the original's replay of the same trace,
each in a separate process.

A run is that of a shell, from the start of Python to its end. It measures CPU time and peak memory of the process. The
peak is far above the memory of the measuring process, which `ru_maxrss` of a child is at least.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import Figure, dynamo
from benchmarks.verdict import traces

WORKERS, BLOCK_SIZE, NUM_BLOCKS = 8, 64, 16_384  # the defaults of `replay`
PEER = f"""
import sys
from dynamo import _core
given = {{"engine": {{"backend": "vllm", "block_size": {BLOCK_SIZE}, "num_gpu_blocks": {NUM_BLOCKS}}}}}
_core.run_mocker_trace_replay(
    [sys.argv[1]], extra_engine_args=given, router_mode=sys.argv[2], num_workers={WORKERS}, trace_block_size=512
)
"""
EVENTS = "each event is made and applied in Python"
TYPED = (
    # arguments, router of the peer, bar of CPU time, why it is missed
    ((), "kv_router", 1 / 4, EVENTS),
    (("--router", "round_robin"), "round_robin", 1 / 4, EVENTS),
    (("--backend", "lineage"), "kv_router", 1 / 3, EVENTS),
)


class Process(NamedTuple):
    """The costs of a process.

    Attributes:
        seconds: CPU time.
        megabytes: peak memory.
    """

    seconds: float
    megabytes: float


def taken(*arguments: str) -> Process:
    """Run Python with these arguments, drop its output, and return its costs.

    Raises:
        RuntimeError: it failed.
    """
    with Path(os.devnull).open("w") as nowhere:
        to = [(os.POSIX_SPAWN_DUP2, nowhere.fileno(), each) for each in (1, 2)]
        env = os.environ | {"DYN_LOG": "error"}  # otherwise the original writes a line per pick
        process = os.posix_spawn(sys.executable, [sys.executable, *arguments], env, file_actions=to)
    _, status, usage = os.wait4(process, 0)
    if status:
        raise RuntimeError(f"python {' '.join(arguments)} failed")
    return Process(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def replays():
    """Measure the command on the conversation trace against the original, one run each: CPU times of half a minute
    differ by one percent.
    """
    _, version = dynamo("1.6")
    path = str(traces())
    for given, mode, bar, why in TYPED:
        ours = taken("-m", "pytest_kvmock", "replay", path, *given)
        theirs = taken("-c", PEER, path, mode)
        seconds, megabytes = theirs.seconds / ours.seconds, ours.megabytes / theirs.megabytes
        variant = " ".join(("replay", "conversation_trace", *given))
        beside = f"run_mocker_trace_replay(router_mode={mode!r}), 8 workers, {version}"
        yield Figure(
            "as typed: CPU time of the process", seconds, bar, beside, variant, why=why if seconds < bar else ""
        )
        yield Figure("as typed: memory of the process, beside the peer's", megabytes, 1, beside, variant, most=True)
