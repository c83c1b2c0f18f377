"""The commands `serve` and `tokenizer`: a `KvServer` in a process of its own, for tests in any language."""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_kvmock.backends import EngineProfile, speaker_of
from pytest_kvmock.capture.harness_capture import HarnessCapture
from pytest_kvmock.harness import RouterHarness
from pytest_kvmock.wire import find_dialect

if TYPE_CHECKING:
    import argparse
    from types import FrameType

    from pytest_kvmock.tiers.config import Tiers


def add_parsers(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], plugins: argparse.ArgumentParser
) -> None:
    """Add the arguments of both commands."""
    serve = commands.add_parser(
        "serve",
        parents=[plugins],
        help="serve mock engines over HTTP, with their KV events over ZMQ",
        description="Serve mock engines. Prints one line of JSON with all addresses when it is ready, and ends with its standard "
        "input (where that is a pipe or a socket), with SIGTERM, or with Ctrl-C.",
    )
    serve.add_argument(
        "--dialect", metavar="NAME", default="vllm-0.33", help="engine, API and metrics (default: vllm-0.33)"
    )
    serve.add_argument("--workers", metavar="N", type=int, default=1, help="how many engines (default: 1)")
    serve.add_argument("--ranks", metavar="N", type=int, default=1, help="data-parallel ranks of each (default: 1)")
    serve.add_argument("--block-size", metavar="N", type=int, default=16, help="tokens a block (default: 16)")
    serve.add_argument("--num-blocks", metavar="N", type=int, default=2048, help="blocks of each rank (default: 2048)")
    serve.add_argument(
        "--host-blocks", metavar="N", type=int, help="blocks of each rank's host, for vLLM's native offload"
    )
    serve.add_argument(
        "--self-describing", action="store_true", help="with a host: its events have tokens, and name no places alone"
    )
    serve.add_argument("--model", metavar="NAME", default="mock-model", help="name of the model (default: mock-model)")
    serve.add_argument("--adapter", metavar="NAME", action="append", default=[], help="a LoRA adapter; repeatable")
    serve.add_argument("--max-model-len", metavar="N", type=int, help="default: what the blocks hold")
    serve.add_argument("--max-queued", metavar="N", type=int, help="answer 503 while so many requests of a worker wait")
    serve.add_argument(
        "--time-scale",
        metavar="X",
        type=float,
        default=0.0,
        help="seconds by the wall for one of virtual time (default: 0)",
    )
    serve.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help="an address of the loopback")
    serve.add_argument(
        "--http-port", metavar="N", type=int, default=0, help="of the first worker; the next ones follow"
    )
    serve.add_argument("--event-port", metavar="N", type=int, default=0, help="of the first rank; the next ones follow")
    serve.add_argument("--replay-port", metavar="N", type=int, default=0, help="likewise, for replays")
    serve.add_argument("--control-port", metavar="N", type=int, default=0, help="of the control API")
    serve.add_argument("--topic", metavar="TEXT", default="", help="of events: 'kv@{host}:{port}@{model}' for llm-d")
    serve.add_argument("--log", metavar="N", type=int, help="remember so many requests; default: all")
    serve.add_argument("--capture", metavar="FILE", type=Path, help="write all events there, as --kv-capture does")
    serve.add_argument("--seed", metavar="N", type=int, default=0, help="of what is generated (default: 0)")
    serve.set_defaults(run=serve_engines)

    tokenizer = commands.add_parser(
        "tokenizer",
        help="write the tokenizer of served engines as files of Hugging Face",
        description="Write tokenizer.json, tokenizer_config.json and config.json: one token a byte of UTF-8.",
    )
    tokenizer.add_argument("directory", metavar="DIR", type=Path)
    tokenizer.set_defaults(run=_write_tokenizer, plugin=[])


def _write_tokenizer(given: argparse.Namespace) -> int:
    from pytest_kvmock.serve.text import write_tokenizer

    names = write_tokenizer(given.directory)
    sys.stdout.write(f"{given.directory}: {', '.join(names)}\n")
    return 0


def _tiers_of(given: argparse.Namespace) -> Tiers | None:
    if given.host_blocks is None:
        if given.self_describing:
            raise ValueError("--self-describing is about the events of a host; give --host-blocks, too")
        return None
    from pytest_kvmock.tiers.config import Tiers

    return Tiers(given.host_blocks, self_describing=given.self_describing)


def serve_engines(given: argparse.Namespace) -> int:
    """Serve until the end is asked for; return the exit code."""
    from pytest_kvmock.serve.api import to_json
    from pytest_kvmock.serve.kv_server import KvServer

    if given.workers < 1:
        raise ValueError(f"--workers must be at least 1, got {given.workers}")
    dialect = find_dialect(given.dialect)
    profile = EngineProfile(
        block_size=given.block_size,
        num_blocks=given.num_blocks,
        workers=given.workers,
        dp_size=given.ranks,
        seed=given.seed,
        tiers=_tiers_of(given),
    )
    end, woken = os.pipe()

    def stop(_signal: int, _frame: FrameType | None) -> None:
        os.write(woken, b"x")

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, stop)
    capture = None if given.capture is None else HarnessCapture(given.capture, profile, "serve")
    journal = None if capture is None else capture.journal
    harness = RouterHarness(profile, None, name="serve", journal=journal)
    if capture is not None:
        capture.of(harness)
    harness.use_backend(speaker_of(dialect))
    server = KvServer(
        harness,
        dialect,
        model=given.model,
        adapters=given.adapter,
        max_model_len=given.max_model_len,
        max_queued=given.max_queued,
        time_scale=given.time_scale,
        host=given.host,
        http_port=given.http_port,
        event_port=given.event_port,
        replay_port=given.replay_port,
        control_port=given.control_port,
        topic=given.topic,
        log=given.log,
        seed=given.seed,
    )
    sys.stdout.write(to_json(server.ready_line()).decode() + "\n")
    sys.stdout.flush()
    _wait(end)
    # Sockets are closed for all to see. To take a large harness apart would cost seconds that nobody needs.
    server.close_sockets()
    if capture is not None:
        capture.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _wait(end: int) -> None:
    """Wait for a signal, or for the end of standard input where that is a pipe or a socket."""
    watched = [end]
    try:
        mode = os.fstat(0).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            watched.append(0)
    except OSError:  # it is closed
        pass
    while True:
        ready = select.select(watched, [], [])[0]
        if end in ready or not os.read(0, 65_536):
            return
