"""The commands `serve` and `tokenizer`: a `KvServer` in a separate process, for tests in any language.

One subject: the options of a command line, and what they start.
"""

from __future__ import annotations

import errno
import json
import os
import re
import select
import signal
import stat
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_kvmock.engines.backends import EngineProfile, served_by
from pytest_kvmock.harness import RouterHarness
from pytest_kvmock.servers.capture.capture_file import check_replaceable
from pytest_kvmock.servers.capture.harness_capture import HarnessCapture
from pytest_kvmock.servers.capture.lines import CaptureError
from pytest_kvmock.servers.serve.loop_thread import print_error
from pytest_kvmock.servers.serve.network import HTTP_FORMS, LOOPBACK, check_secret
from pytest_kvmock.wire.codec.table import find_dialect

if TYPE_CHECKING:
    import argparse
    from types import FrameType

    from pytest_kvmock.engines.backends import BackendSpec
    from pytest_kvmock.engines.tiers import Tiers


def add_parsers(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], plugins: argparse.ArgumentParser
) -> None:
    """Add the parsers of both commands."""
    serve = commands.add_parser(
        "serve",
        parents=[plugins],
        help="serve mock engines over HTTP, with their KV events over ZMQ",
        description="Serve mock engines. Prints one line of JSON with all addresses when it is ready, and ends with "
        "its standard "
        "input (where that is a pipe or a socket), with SIGTERM, or with Ctrl-C.",
    )
    serve.add_argument(
        "--dialect", metavar="NAME", default="vllm-0.33", help="engine, API and metrics (default: vllm-0.33)"
    )
    serve.add_argument(
        "--events", choices=("poll", "zmq"), help="for trtllm-1.3: how to publish events (default: poll, by HTTP)"
    )
    serve.add_argument("--workers", metavar="N", type=int, help="how many engines (default: 1)")
    serve.add_argument(
        "--role", metavar="KIND=N,...", help="engines of P/D pairs, in place of --workers: prefill=2,decode=2"
    )
    serve.add_argument(
        "--pair",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="with --role: a key of both roles, such as hand_over=vllm-mooncake or kv_lease_duration=2; repeatable",
    )
    serve.add_argument("--ranks", metavar="N", type=int, default=1, help="data-parallel ranks of each (default: 1)")
    serve.add_argument("--block-size", metavar="N", type=int, help="tokens a block (default: 16, or the model's least)")
    serve.add_argument("--real-sizes", action="store_true", help="of a hybrid model: blocks of the model's own size")
    serve.add_argument("--num-blocks", metavar="N", type=int, default=2048, help="blocks of each rank (default: 2048)")
    serve.add_argument(
        "--host-blocks", metavar="N", type=int, help="blocks of each rank's host, for vLLM's native offload"
    )
    serve.add_argument(
        "--self-describing", action="store_true", help="with a host: its events have tokens, not only locations"
    )
    serve.add_argument(
        "--tier",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="with a host: a further key of `tiers`, such as write_policy=write_back or storage=true; repeatable",
    )
    store_help = "a store that workers share, such as disk=files:0,1 with --tier files=true; repeatable"
    serve.add_argument("--store", metavar="NAME=KIND:ID,...", action="append", default=[], help=store_help)
    serve.add_argument(
        "--model",
        metavar="NAME",
        default="mock-model",
        help="name of the model; a hybrid model is served with its cache groups: gpt-oss, qwen3-next ... "
        "(default: mock-model)",
    )
    serve.add_argument(
        "--speculative",
        metavar="METHOD[:N[:M]]",
        help="a draft model: of vLLM the method, drafts a step and modules, as mtp:3; of SGLang the algorithm and "
        "steps, as EAGLE:3",
    )
    serve.add_argument("--adapter", metavar="NAME", action="append", default=[], help="a LoRA adapter; repeatable")
    serve.add_argument("--max-model-len", metavar="N", type=int, help="default: what the blocks hold")
    serve.add_argument("--max-queued", metavar="N", type=int, help="answer 503 while N requests of a worker wait")
    serve.add_argument(
        "--publish-every", metavar="N", type=int, help="for SGLang with a host: send events after N decode steps"
    )
    serve.add_argument(
        "--time-scale",
        metavar="X",
        type=float,
        default=0.0,
        help="wall-clock seconds for one second of virtual time (default: 0)",
    )
    serve.add_argument(
        "--host",
        metavar="ADDRESS",
        default=LOOPBACK,
        help=f"address that all ports are bound to; 0.0.0.0: every one of this machine (default: {LOOPBACK})",
    )
    serve.add_argument(
        "--advertise-host",
        metavar="NAME",
        help="name or address of this machine in URLs, topics and endpoints (default: that of --host)",
    )
    serve.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        help="the token that the control API requires; without it, one is made if --host is not the loopback",
    )
    serve.add_argument(
        "--allowed-host",
        metavar="NAME",
        action="append",
        default=[],
        help="a further Host that clients of the control API may send; repeatable",
    )
    serve.add_argument("--api-key", metavar="KEY", help="engines require it, as with their own option of that name")
    serve.add_argument(
        "--http-port", metavar="N", type=int, default=0, help="port of the first worker; the next ones follow"
    )
    serve.add_argument(
        "--http",
        choices=HTTP_FORMS,
        default="worker",
        help="of vLLM with ranks: one HTTP port a worker, a rank, or each of its two nodes, behind which ranks are "
        "numbered from 0 (default: worker)",
    )
    serve.add_argument("--event-port", metavar="N", type=int, default=0, help="first rank's port; the next ones follow")
    serve.add_argument("--replay-port", metavar="N", type=int, default=0, help="the same for replays")
    serve.add_argument("--load-port", metavar="N", type=int, help="first rank's load stream port (SGLang); 0: any")
    serve.add_argument("--master-port", metavar="N", type=int, help="port of the stream of HiCache's master; 0: any")
    serve.add_argument("--control-port", metavar="N", type=int, default=0, help="port of the control API")
    serve.add_argument("--topic", metavar="TEXT", default="", help="events' topic: 'kv@{host}:{port}@{model}' (llm-d)")
    serve.add_argument("--log", metavar="N", type=int, help="remember N requests; default: all")
    serve.add_argument("--capture", metavar="FILE", type=Path, help="write all events there, as --kv-capture does")
    serve.add_argument("--overwrite", action="store_true", help="replace a capture that is there")
    serve.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the generated output (default: 0)")
    serve.set_defaults(run=serve_engines)

    tokenizer = commands.add_parser(
        "tokenizer",
        help="write the tokenizer of served engines as files of Hugging Face",
        description="Write tokenizer.json, tokenizer_config.json and config.json: one token a byte of UTF-8.",
    )
    tokenizer.add_argument("directory", metavar="DIR", type=Path)
    tokenizer.set_defaults(run=_write_tokenizer, plugin=[])


def _write_tokenizer(given: argparse.Namespace) -> int:
    from pytest_kvmock.servers.serve.text import write_tokenizer

    names = write_tokenizer(given.directory)
    sys.stdout.write(f"{given.directory}: {', '.join(names)}\n")
    return 0


def _tiers_of(given: argparse.Namespace) -> Tiers | None:
    for option, value in (("--self-describing", given.self_describing), ("--tier", given.tier)):
        if value and given.host_blocks is None:
            raise ValueError(f"{option} is about a host; give --host-blocks, too")
    if given.host_blocks is None:
        return None
    from pytest_kvmock.engines.tiers import Tiers

    keys = {"self_describing": given.self_describing, **_keys("--tier", given.tier)}
    return Tiers.of({**keys, "host": given.host_blocks})


def _keys(option: str, texts: list[str]) -> dict[str, Any]:
    """Return the keys and values of an option."""
    keys: dict[str, Any] = {}
    for text in texts:
        name, is_one, value = text.partition("=")
        if not is_one:
            raise ValueError(f"{option} must be KEY=VALUE, got {text!r:.80}")
        keys[name] = value
        with suppress(ValueError):  # otherwise the value is a text
            keys[name] = json.loads(value)
    return keys


def _stores_of(given: argparse.Namespace) -> dict[str, Any] | None:
    """Return the stores of `--store`; None if it is not given."""
    stores: dict[str, Any] = {}
    for text in given.store:
        found = re.fullmatch(r"([^=]+)=([^:]+):(\d+(?:,\d+)*)", text, re.ASCII)
        if found is None or found[1] in stores:
            raise ValueError(f"--store must be NAME=KIND:ID,... for each name once, got {text!r:.80}")
        stores[found[1]] = {"kind": found[2], "workers": [*map(int, found[3].split(","))]}
    return stores or None


def _roles_of(given: argparse.Namespace) -> dict[str, Any] | None:
    """Return the roles of `--role`; None if it is not given."""
    if given.role is None:
        if given.pair:
            raise ValueError("--pair is about P/D pairs; give --role, too")
        return None
    if given.workers is not None:
        raise ValueError("--role says how many engines there are; leave out --workers")
    options = _keys("--pair", given.pair)
    roles: dict[str, Any] = {}
    for text in given.role.split(","):
        kind, _, count = text.partition("=")
        if not count.isdecimal() or kind in roles:
            raise ValueError(f"--role must be KIND=N for each kind once, as prefill=2,decode=2, got {given.role!r:.80}")
        roles[kind] = {**options, "workers": int(count)}
    return roles


def _with_draft_model(spec: BackendSpec, text: str | None) -> BackendSpec:
    """Return the backend with the draft model of `--speculative`.

    Raises:
        ValueError: an unknown draft model, or an engine that takes none.
    """
    if text is None:
        return spec
    from pytest_kvmock.engines.sglang.speculative import ALGORITHMS, SglangSpeculative
    from pytest_kvmock.engines.vllm.speculative import Speculative

    method, *numbers = text.split(":")
    is_sglang = method in ALGORITHMS
    if len(numbers) > (1 if is_sglang else 2) or not all(each.isdecimal() for each in numbers):
        form = "ALGORITHM[:STEPS]" if is_sglang else "METHOD[:TOKENS[:MODULES]]"
        raise ValueError(f"--speculative must be {form} with integers, got {text!r:.80}")
    counts = dict(zip(("steps",) if is_sglang else ("tokens", "modules"), map(int, numbers), strict=False))
    draft: Any
    if is_sglang:
        steps = counts.get("steps", 3)
        draft = SglangSpeculative(method, steps, draft_tokens=steps + 1)
    else:
        draft = Speculative(method, tokens=counts.get("tokens", 3), modules=counts.get("modules", 1))
    return spec.variant(spec.name, in_matrix=spec.in_matrix, speculative=draft)


def _dialect_of(given: argparse.Namespace) -> str:
    """Return the requested dialect, in the variant of `--events`.

    Raises:
        ValueError: `--events` is given for a dialect with only one variant.
    """
    dialect: str = given.dialect
    if given.events is None:
        return dialect
    if dialect != "trtllm-1.3":
        raise ValueError(f"--events is for --dialect trtllm-1.3, got {dialect!r:.80}")
    return f"{dialect}-zmq" if given.events == "zmq" else dialect


def serve_engines(given: argparse.Namespace) -> int:
    """Serve until the process is asked to end; then exit with the exit code."""
    from pytest_kvmock.servers.serve.api import to_json
    from pytest_kvmock.servers.serve.kv_server import KvServer, roles_by_dialect

    if given.workers is not None and given.workers < 1:
        raise ValueError(f"--workers must be at least 1, got {given.workers}")
    token = None if given.token_file is None else _read_token(given.token_file)
    dialect = find_dialect(_dialect_of(given))
    spec = _with_draft_model(served_by(dialect, given.model), given.speculative)
    size = {} if given.block_size is None else {"block_size": given.block_size}
    profile = EngineProfile(
        **size,
        real_sizes=given.real_sizes,
        num_blocks=given.num_blocks,
        workers=given.workers or 1,
        dp_size=given.ranks,
        seed=given.seed,
        tiers=_tiers_of(given),
    ).sized_for(spec)
    end = _asked_to_end()
    capture = None
    with ExitStack() as undo:
        if given.capture is not None:
            check_replaceable(given.capture, overwrite=given.overwrite)
            if not given.capture.exists():  # if serving fails, no capture is left
                undo.callback(given.capture.unlink, missing_ok=True)
            capture = HarnessCapture(given.capture, profile, "serve")
        journal = None if capture is None else capture.journal
        engine = {} if given.publish_every is None else {"publish_every": given.publish_every}
        roles = roles_by_dialect(dialect, _roles_of(given))
        own = {"engine": engine, "roles": roles, "stores": _stores_of(given)}
        harness = RouterHarness(profile, None, name="serve", journal=journal, **own)
        if capture is not None:
            capture.of(harness)
        harness.inside.use_backend(spec)
        server = KvServer(
            harness,
            dialect,
            model=given.model,
            adapters=given.adapter,
            max_model_len=given.max_model_len,
            max_queued=given.max_queued,
            time_scale=given.time_scale,
            network={
                "host": given.host,
                "advertise_host": given.advertise_host,
                "token": token,
                "allowed_hosts": given.allowed_host,
            },
            api_key=given.api_key,
            ports={
                "http": given.http_port,
                "events": given.event_port,
                "replay": given.replay_port,
                **({} if given.control_port is None else {"control": given.control_port}),
                **({} if given.load_port is None else {"loads": given.load_port}),
                **({} if given.master_port is None else {"master": given.master_port}),
            },
            http=given.http,
            topic=given.topic,
            log=given.log,
            seed=given.seed,
        )
        undo.pop_all()
    unable = ""
    try:
        _print_ready(to_json(server.inside.ready_line()).decode())
        _wait(end)
    except OSError as error:
        unable = str(error)
    # The process ends without a teardown, as freeing a large harness would take seconds; the system closes sockets.
    server.inside.halt()
    if capture is not None:
        with harness.publisher.lock, suppress(CaptureError):
            capture.close()
        unable = str(capture.error or unable)  # an engine may have met the error much earlier; it is printed last
    if unable:
        print_error(unable, "serve")
    os._exit(2 if unable or server.inside.broken else 0)


def _read_token(path: Path) -> str:
    """Return the token in a file, without its newline.

    Raises:
        ValueError: the file cannot be read, or has no token; the message does not show its content.
    """
    try:
        return check_secret("token", path.read_text(encoding="ascii").strip())
    except OSError as error:
        raise ValueError(f"--token-file {path}: it cannot be read: {error.strerror}") from None
    except ValueError:  # includes characters that are not ASCII
        raise ValueError(f"--token-file {path}: it must have one line, of ASCII characters without spaces") from None


def _asked_to_end() -> int:
    """Return a file descriptor that becomes readable when a signal asks the process to end."""
    end, woken = os.pipe()
    os.set_blocking(woken, False)

    def stop(_signal: int, _frame: FrameType | None) -> None:
        with suppress(BlockingIOError):  # the pipe is full after thousands of signals
            os.write(woken, b"x")

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, stop)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
        signal.signal(signal.SIGHUP, stop)
    return end


def _print_ready(line: str) -> None:
    """Print the line with all addresses.

    Raises:
        OSError: the line cannot be written; the message says so.
    """
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, "it is closed")  # noqa: TRY301 - as one that is closed later
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except OSError as error:
        raise OSError(f"the ready line cannot be written to standard output: {error.strerror}") from None


def _wait(end: int) -> None:
    """Wait for a signal, or for the end of standard input if it is a pipe or a socket."""
    watched = [end]
    try:
        mode = os.fstat(0).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            watched.append(0)
    except OSError:  # standard input is closed
        pass
    while True:
        ready = select.select(watched, [], [])[0]
        if end in ready or not os.read(0, 65_536):
            return
