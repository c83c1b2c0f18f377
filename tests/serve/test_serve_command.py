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


@pytest.mark.parametrize("form", [[], ["--self-describing"]])
def test_engines_of_vllm_have_a_host(form, tmp_path):
    capture = tmp_path / "capture.jsonl"
    process = Process("--host-blocks", "64", *form, "--capture", str(capture), "--num-blocks", "64")
    url = process.ready["workers"][0]["http"]
    for text in ("x" * 64, "y" * 640):
        complete(url, text)
    complete(url, "z" * 1000)  # in its passes what was copied before is reported
    assert call(process.ready["control"], "/verdict")[1]["right"]
    process.popen.stdin.close()
    process.popen.stdin = None
    assert process.ended() == (0, "", "")
    host = [line for line in capture.read_text().splitlines() if "host_pinned" in line and "event_id" in line]
    assert len(host) >= 44
    assert all(("located" in line) is (not form) for line in host)


def _stream(url):
    with suppress(OSError, HTTPException):  # it is cut in the middle
        call(url, "/v1/completions", {"prompt": "abc", "max_tokens": 50, "stream": True})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_a_signal_and_does_not_look_at_dev_null(number):
    process = Process(stdin=subprocess.DEVNULL)
    assert call(process.ready["workers"][0]["http"], "/health")[0] == 200
    process.popen.send_signal(number)
    assert process.ended() == (0, "", "")


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
        (["--host-blocks", "0"], "serve: tiers: host must be an integer of at least 1 (blocks), got 0"),
        (["--self-describing"], "serve: --self-describing is about the events of a host; give --host-blocks, too"),
        (
            ["--dialect", "vllm-0.28", "--host-blocks", "8"],
            "serve: tiers are those of vLLM 0.33.0; got version '0.28.0'",
        ),
        (["--dialect", "sglang-0.5.23", "--host-blocks", "8"], "serve: backend 'sglang' takes no tiers; "),
    ],
)
def test_what_cannot_be_served_is_one_line(args, text, capsys):
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    try:
        assert main(["serve", *args]) == 2
    finally:
        for each, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(each, handler)
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.startswith(text)
    assert errors.count("\n") == 1


def test_the_tokenizer_is_a_command(tmp_path, capsys):
    assert main(["tokenizer", str(tmp_path / "made")]) == 0
    assert "tokenizer.json, tokenizer_config.json, config.json" in capsys.readouterr().out
    assert [each.name for each in Path(tmp_path).iterdir()] == ["made"]
