"""The command `serve`: a server in a process of its own, which ends when it must."""

import json
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

import pytest
from served import call, complete

from pytest_kvmock.__main__ import main

SERVE = [sys.executable, "-m", "pytest_kvmock", "serve"]


class Process:
    """The command, as a test in another language starts it."""

    def __init__(self, *args, stdin=subprocess.PIPE):
        self.popen = subprocess.Popen(
            [*SERVE, *args], stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.ready = json.loads(self.popen.stdout.readline())

    def ended(self):
        """Return the exit code and what else was written."""
        out, errors = self.popen.communicate(timeout=20)
        return self.popen.returncode, out, errors


def test_it_says_where_it_listens_and_ends_with_its_standard_input(tmp_path):
    capture = tmp_path / "capture.jsonl"
    process = Process("--workers", "2", "--dialect", "sglang-0.5.23", "--capture", str(capture), "--num-blocks", "64")
    ready = process.ready
    assert {
        name: ready[name] for name in ("kvmock_serve", "dialect", "model", "block_size", "num_blocks", "tokenizer")
    } == {
        "kvmock_serve": 1,
        "dialect": "sglang-0.5.23",
        "model": "mock-model",
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


def _stream(url):
    with suppress(OSError, HTTPException):  # it is cut in the middle
        call(url, "/v1/completions", {"prompt": "abc", "max_tokens": 50, "stream": True})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_ends_with_a_signal_and_does_not_look_at_dev_null(number):
    process = Process(stdin=subprocess.DEVNULL)
    assert call(process.ready["workers"][0]["http"], "/health")[0] == 200
    process.popen.send_signal(number)
    assert process.ended() == (0, "", "")


FULL = "/dev/full: cannot be written: No space left on device"
needs_full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="only where there is a full disk at hand")


@needs_full_disk
def test_a_capture_whose_disk_fills_breaks_the_engine_for_all_to_see():
    process = Process("--capture", "/dev/full", "--num-blocks", "64", "--workers", "2")
    (url, other), control = (each["http"] for each in process.ready["workers"]), process.ready["control"]
    for number in range(200):  # what is written is buffered, so it takes some
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


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (
            ["--host", "10.0.0.1"],
            "serve: KvServer: host must be 127.0.0.1 or 'localhost', the loopback, got '10.0.0.1'",
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
    ],
)
def test_what_cannot_be_served_is_one_line(args, text, capsys):
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


def test_the_tokenizer_is_a_command(tmp_path, capsys):
    assert main(["tokenizer", str(tmp_path / "made")]) == 0
    assert "tokenizer.json, tokenizer_config.json, config.json" in capsys.readouterr().out
    assert [each.name for each in Path(tmp_path).iterdir()] == ["made"]
