"""The command `serve`: a server in its own process, and how it ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from depth import takes_long, worth_its_time
from served import call, complete

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.__main__ import main
from pytest_kvmock.servers import KvServer
from pytest_kvmock.servers.serve.listening import RANK_DESCRIPTORS, SPARE_DESCRIPTORS, WORKER_DESCRIPTORS

SERVE = [sys.executable, "-m", "pytest_kvmock", "serve"]


def with_descriptors(most, *args):
    """Return the command with a limit of open descriptors."""
    return ["sh", "-c", f'ulimit -n {most}; exec "$@"', "sh", *SERVE, *args]


def heed_signals():
    """Make these two signals end the new process, even if the tests run in the background and ignore them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Process:
    """The command as a test in another language would start it."""

    def __init__(self, *args, stdin=subprocess.PIPE, descriptors=None):
        command = [*SERVE, *args] if descriptors is None else with_descriptors(descriptors, *args)
        streams = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": heed_signals}
        self.popen = subprocess.Popen(command, text=True, **streams)
        self.ready = json.loads(self.popen.stdout.readline())

    def ended(self):
        """Return the exit code and the rest of the output."""
        out, errors = self.popen.communicate(timeout=20)
        return self.popen.returncode, out, errors


def test_serve_prints_where_it_listens_and_ends_with_its_standard_input(tmp_path):
    capture = tmp_path / "capture.jsonl"
    process = Process("--workers", "2", "--dialect", "sglang-0.5.23", "--capture", str(capture), "--num-blocks", "64")
    ready = process.ready
    assert {
        name: ready[name]
        for name in ("kvmock_serve", "dialect", "model", "backend", "block_size", "num_blocks", "tokenizer")
    } == {
        "kvmock_serve": 1,
        "dialect": "sglang-0.5.23",
        "model": "mock-model",
        "backend": "sglang",
        "block_size": 16,
        "num_blocks": 64,
        "tokenizer": "bytes",
    }
    assert [(each["id"], len(each["events"]), len(each["replay"])) for each in ready["workers"]] == [
        (0, 1, 1),
        (1, 1, 1),
    ]
    url = ready["workers"][1]["http"]
    complete(url, "x" * 64)
    assert call(ready["control"], "/verdict")[1]["right"]
    streams = [threading.Thread(target=_stream, args=(url,)) for _ in range(5)]
    call(ready["control"], "/hold", {})
    for each in streams:
        each.start()
    call(ready["control"], "/wait_requests", {"open": 5})
    process.popen.stdin.close()
    process.popen.stdin = None
    assert process.ended() == (0, "", "")
    for each in streams:
        each.join()
    assert main(["check", str(capture)]) == 0


@pytest.mark.parametrize("form", [[], ["--self-describing"]])
def test_serve_can_give_vllms_engines_a_host(form, tmp_path):
    capture = tmp_path / "capture.jsonl"
    process = Process("--host-blocks", "64", *form, "--capture", str(capture), "--num-blocks", "64")
    url = process.ready["workers"][0]["http"]
    for text in ("x" * 64, "y" * 640):
        complete(url, text)
    complete(url, "z" * 1000)  # its passes report the copies made before
    assert call(process.ready["control"], "/verdict")[1]["right"]
    process.popen.stdin.close()
    process.popen.stdin = None
    assert process.ended() == (0, "", "")
    host = [line for line in capture.read_text().splitlines() if "host_pinned" in line and "event_id" in line]
    assert len(host) >= 44
    assert all(("located" in line) is (not form) for line in host)


def _stream(url):
    with suppress(OSError, HTTPException):  # the stream is cut
        call(url, "/v1/completions", {"prompt": "abc", "max_tokens": 50, "stream": True})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_serve_ends_with_a_signal_and_ignores_an_empty_standard_input(number):
    process = Process(stdin=subprocess.DEVNULL)
    assert call(process.ready["workers"][0]["http"], "/health")[0] == 200
    process.popen.send_signal(number)
    assert process.ended() == (0, "", "")


FULL = "/dev/full: cannot be written: No space left on device"
needs_full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="only where there is a full disk at hand")


@needs_full_disk
def test_a_capture_on_a_full_disk_breaks_the_engine():
    process = Process("--capture", "/dev/full", "--num-blocks", "64", "--workers", "2")
    (url, other), control = (each["http"] for each in process.ready["workers"]), process.ready["control"]
    for number in range(200):  # writes are buffered, so it takes several
        status, answer = call(url, "/v1/completions", {"prompt": f"{number:x<100}", "max_tokens": 1})
        if status != 200:
            break
    broken = f"worker 0 rank 0 is broken: CaptureError: {FULL}"
    assert (status, answer["error"]["message"]) == (500, f"CaptureError: {FULL}")
    assert [call(each, "/health")[0] for each in (url, other)] == [503, 200]
    verdict = call(control, "/verdict")[1]
    assert (verdict["right"], verdict["broken"]) == (False, [broken])
    assert call(control, "/restart", {"worker": 0})[0] == 400
    process.popen.send_signal(signal.SIGTERM)
    assert process.ended() == (2, "", f"KvServer: {broken}\nserve: {FULL}\n")


@needs_full_disk
def test_a_capture_that_cannot_be_written_at_the_end_is_an_error():
    process = Process("--capture", "/dev/full")
    complete(process.ready["workers"][0]["http"], "x" * 64)
    process.popen.send_signal(signal.SIGHUP)
    assert process.ended() == (2, "", f"serve: {FULL}\n")


@worth_its_time
def test_an_existing_capture_is_not_overwritten_without_the_option(tmp_path):
    file = tmp_path / "capture.jsonl"
    file.write_text("mine")
    there = f"serve: {file}: the file is there already; --overwrite (overwrite=True) replaces it\n"
    assert ended([*SERVE, "--capture", str(file)]) == (2, "", there)
    assert file.read_text() == "mine"
    process = Process("--capture", str(file), "--overwrite")
    process.popen.send_signal(signal.SIGTERM)
    assert process.ended() == (0, "", "")
    assert main(["check", str(file)]) == 0


def test_a_refused_serve_command_leaves_no_capture(tmp_path):
    file = tmp_path / "capture.jsonl"
    assert ended([*SERVE, "--capture", str(file), "--adapter", ""])[0] == 2
    assert not file.exists()


def test_a_hybrid_model_is_served_with_its_cache_groups():
    process = Process("--model", "qwen3-next", "--real-sizes", "--num-blocks", "64")
    (worker,), control = process.ready["workers"], process.ready["control"]
    assert (process.ready["model"], process.ready["backend"]) == ("qwen3-next", "vllm_qwen3_next")
    assert process.ready["block_size"] == 544
    for tail in ("x", "y"):
        complete(worker["http"], "abcd" * 272 + tail * 600)  # two shared blocks, and more than one other
    _, known = call(control, "/expect", {"prompt": "abcd" * 272 + "z"})
    assert known["blocks"] == [{"worker": 0, "rank": 0, "blocks": 2, "reusable": 1088}]
    assert process.ended() == (0, "", "")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--adapter", ""], "serve: KvServer: each of adapters must be a name, got ''"),
        (["--adapter", "a", "--adapter", "a"], "serve: KvServer: adapter 'a' is named twice"),
        (["--max-model-len", "32769"], "serve: KvServer: max_model_len must be at most 32768, what 2048 blocks of 16 "),
        (
            ["--topic", "{port:>1000000000}"],
            "serve: KvServer: topic must be a text in which {host}, {port} and {model} ",
        ),
        (
            ["--host", "engine.test"],
            (
                "serve: KvServer: host must be an address of this machine (127.0.0.1 or 'localhost', the loopback; "
                "0.0.0.0 for all), got "
            ),
        ),
        (
            ["--dialect", "dynamo-router-event"],
            "serve: KvServer: dialect 'dynamo-router-event' has no engine that serves HTTP",
        ),
        (["--dialect", "vllm-9"], "serve: unknown dialect 'vllm-9'"),
        (["--workers", "0"], "serve: --workers must be at least 1, got 0"),
        (
            ["--topic", "kv@{name}"],
            "serve: KvServer: topic must be a text in which {host}, {port} and {model} are filled in",
        ),
        (["--block-size", "0"], "serve: block_size must be"),
        (["--control-port", "70000"], "serve: KvServer: ports['control'] must be at most 65535, got 70000"),
        (["--http-port", "65536"], "serve: KvServer: ports['http'] must be at most 65535, got 65536"),
        (
            ["--http-port", "65535", "--workers", "2"],
            "serve: KvServer: ports['http'] must leave room for 2 ports, at most 65534",
        ),
        (
            ["--ranks", "2", "--http", "rank", "--dialect", "sglang-0.5.23"],
            "serve: KvServer: http must be 'worker' for SGLang's engines, one port for all ranks; got 'rank'",
        ),
        (["--host-blocks", "0"], "serve: tiers: host must be an integer of at least 1 (blocks), got 0"),
        (["--self-describing"], "serve: --self-describing is about a host; give --host-blocks, too"),
        (["--tier", "storage=true"], "serve: --tier is about a host; give --host-blocks, too"),
        (["--host-blocks", "8", "--tier", "storage"], "serve: --tier must be KEY=VALUE, got 'storage'"),
        (["--store", "disk=files"], "serve: --store must be NAME=KIND:ID,... for each name once, got 'disk=files'"),
        (["--store", "disk=file:0"], "serve: stores['disk']: unknown kind 'file'; did you mean 'files'"),
        (
            ["--store", "disk=files:0"],
            "serve: stores['disk']: files are below a host: give the workers",
        ),
        (
            ["--dialect", "sglang-0.5.23", "--host-blocks", "8", "--tier", "write_policy=write_thru"],
            "serve: unknown tiers: write_policy 'write_thru'; did you mean 'write_through'?",
        ),
        (
            ["--dialect", "sglang-0.5.23", "--publish-every", "40"],
            "serve: publish_every=40 is for engines over sglang with tiers",
        ),
        (
            ["--dialect", "vllm-0.28", "--host-blocks", "8"],
            "serve: tiers are those of vLLM 0.33.0; got version '0.28.0'",
        ),
        (
            ["--dialect", "sglang-0.5.23", "--host-blocks", "8", "--self-describing"],
            (
                "serve: tiers: 'self_describing' is not for this backend; SGLang's HiCache has host, gbps, "
                "bytes_per_token, write_policy, storage, prefetch_policy, prefetch_threshold, prefetch_timeout_base, "
                "prefetch_timeout_per_ki_token, retry_interval, retry_attempts, storage_batch"
            ),
        ),
        (
            ["--model", "gpt-oss", "--dialect", "vllm-0.19"],
            (
                "serve: cache groups of vLLM's hybrid models are mocked in vllm-0.23, vllm-0.24, vllm-0.28, vllm-0.33; "
                "got dialect 'vllm-0.19'"
            ),
        ),
        (
            ["--model", "deepseek-v4", "--block-size", "16"],
            "serve: block_size: the blocks of deepseek_v4 have multiples of 64 tokens in its attention group",
        ),
    ],
)
def test_impossible_options_of_serve_are_refused_in_one_line(args, text, capsys, monkeypatch):
    # Otherwise it would serve until the end is requested.
    monkeypatch.setattr("pytest_kvmock.servers.serve.command._wait", lambda end: pytest.fail("it is served"))
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(each) for each in signals]
    try:
        assert main(["serve", *args]) == 2
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.startswith(text)
    assert errors.count("\n") == 1


def ended(command, **options):
    """Run the command to its end; return exit code, standard output and standard error."""
    given = {"stdout": subprocess.PIPE, "preexec_fn": heed_signals, **options}
    done = subprocess.run(
        command, check=False, text=True, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=60, **given
    )
    return done.returncode, done.stdout, done.stderr


@takes_long
def test_serve_can_give_each_rank_a_port():
    process = Process("--ranks", "2", "--http", "rank")
    (row,) = process.ready["workers"]
    assert [each["ranks"] for each in row["ports"]] == [[0], [1]]
    complete(row["ports"][1]["http"], "x" * 64)
    (asked,) = call(process.ready["control"], "/requests")[1]
    assert (asked["worker"], asked["rank"]) == (0, 1)
    assert process.ended() == (0, "", "")


@takes_long
def test_too_many_workers_for_the_descriptor_limit_are_refused_in_one_line():
    code, out, errors = ended(with_descriptors(256, "--workers", "400"))
    assert (code, out) == (2, "")
    assert re.fullmatch(
        r"serve: KvServer: 4832 descriptors are needed, 2\d\d can be opened \(too many open files\): "
        r"fewer workers or ranks, or a higher limit \(ulimit -n\)\n",
        errors,
    )


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only where a process can count its descriptors")
@pytest.mark.parametrize(("workers", "ranks"), [(1, 1), (6, 1), (3, 4)])
def test_a_server_opens_no_more_descriptors_than_it_calculates(workers, ranks):
    def count():
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    with (
        RouterHarness(EngineProfile(workers=workers, dp_size=ranks, num_blocks=64), "vllm") as kv,
        KvServer(kv, ports={"control": 0}),
    ):
        opened = count() - before
    assert 0 <= opened - workers * (WORKER_DESCRIPTORS + ranks * RANK_DESCRIPTORS) <= SPARE_DESCRIPTORS // 2


CANNOT = "serve: the ready line cannot be written to standard output: "


@takes_long
def test_a_closed_standard_output_is_reported_in_one_line():
    assert ended(["sh", "-c", 'exec "$@" >&-', "sh", *SERVE]) == (2, "", f"{CANNOT}it is closed\n")
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as broken:  # noqa: PTH123 - a descriptor
        assert ended(SERVE, stdout=broken) == (2, None, f"{CANNOT}Broken pipe\n")


@needs_full_disk
def test_a_full_standard_output_is_reported_in_one_line():
    with Path("/dev/full").open("w") as full:
        assert ended(SERVE, stdout=full) == (2, None, f"{CANNOT}No space left on device\n")


def test_a_closed_standard_error_causes_no_traceback_and_keeps_the_exit_code():
    assert ended(["sh", "-c", 'exec "$@" 2>&-', "sh", *SERVE, "--workers", "0"]) == (2, "", "")


@pytest.mark.parametrize("module", ["argparse", "msgspec", "aiohttp"])
def test_ctrl_c_during_imports_ends_the_command_by_the_signal(module, tmp_path):
    (tmp_path / f"{module}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert ended(SERVE, env=environment) == (-signal.SIGINT, "", "")


def test_exhausted_descriptors_are_reported_in_one_line_and_serving_continues():
    process = Process(descriptors=64)
    (worker,), control = process.ready["workers"], process.ready["control"]
    address = urlsplit(worker["http"])
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection((address.hostname, address.port)))
        line = process.popen.stderr.readline()
    assert line == "KvServer: all descriptors are in use; a connection waits until one is free (ulimit -n)\n"
    complete(worker["http"], "x" * 64)
    assert call(control, "/verdict")[1]["right"]
    process.popen.send_signal(signal.SIGTERM)
    assert process.ended() == (0, "", "")


def test_the_tokenizer_command_writes_a_tokenizer(tmp_path, capsys):
    assert main(["tokenizer", str(tmp_path / "made")]) == 0
    assert "tokenizer.json, tokenizer_config.json, config.json" in capsys.readouterr().out
    assert [each.name for each in Path(tmp_path).iterdir()] == ["made"]
