"""The command `python -m pytest_kvmock`: through its main function, and once as a program."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from functools import partial
from importlib.metadata import EntryPoint
from random import Random
from types import SimpleNamespace

import pytest
from acme_dialect import HOOK
from captured import Captured
from depth import each_parameter, seeds

from pytest_kvmock import BACKENDS, Cleared, Prompt, Removed, Stored
from pytest_kvmock import __main__ as command
from pytest_kvmock.engines import KvWorker
from pytest_kvmock.servers import check_file
from pytest_kvmock.wire import DIALECTS, KvWire
from pytest_kvmock.wire.sockets import KvPublisher

main = command.main


@pytest.fixture
def clean(tmp_path):
    world = Captured(tmp_path / "clean.jsonl", "vllm")
    world.serve(10)
    assert world.found() == []
    return world.path


@pytest.fixture
def broken(tmp_path):
    world = Captured(tmp_path / "broken.jsonl")
    sink = world.kv.make_sink(residency="unique")
    sink(Stored(None, (1,), (11,)))
    sink(Stored(None, (1,), (11,)))
    sink(Removed((7,)))
    world.found()
    return world.path


def test_check_reports_a_clean_capture(clean, capsys):
    assert main(["check", str(clean)]) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"{clean}: \d+ events, 2 streams\nclean\n", out)
    assert err == ""


def test_check_counts_stored_events_without_chained_as_not_computed(clean, capsys):
    lines = [json.loads(line) for line in clean.read_text().splitlines()]
    stored = [line for line in lines if line.pop("chained", False)]
    clean.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert main(["check", str(clean)]) == 0
    note = f"note: {len(stored)} Stored without `chained`: their hashes were not checked"
    assert stored
    assert capsys.readouterr().out.endswith(f" 2 streams\n{note}\nclean\n")


def test_check_reports_problems_and_exits_with_1(broken, capsys):
    assert main(["check", str(broken)]) == 1
    assert (
        capsys.readouterr().out
        == f"""{broken}: 3 events, 1 stream
note: 2 Stored without `chained`: their hashes were not checked
1 KV event error: block_not_found (worker 65536, event 2)

  event 2  worker 65536  Removed block 7
    rule:      block_not_found: a Removed names a block that this worker and rank does not hold in that tier
    observed:  block 7 was never stored
    expected:  a Removed names blocks that are held
warnings: 1 duplicate_store
"""
    )


def test_allow_ignores_a_rule_and_event_warnings_fail_counts_warnings(broken, capsys):
    allowed = ["check", str(broken), "--allow", "block_not_found"]
    assert main(allowed) == 0
    assert "no errors" in capsys.readouterr().out
    assert main([*allowed, "--event-warnings", "fail"]) == 1
    assert "1 KV event warning: duplicate_store" in capsys.readouterr().out
    assert main([*allowed, "--allow", "duplicate_store", "--event-warnings", "fail"]) == 0


def test_injected_faults_are_counted_and_are_no_problem(tmp_path, capsys):
    world = Captured(tmp_path / "faults.jsonl", "lineage")
    world.kv.faults.lose(1)
    world.kv.worker(0).serve(world.kv.prompt(2))
    world.kv.worker(0).serve(world.kv.prompt(2))
    world.found()
    assert main(["check", str(world.path)]) == 0
    assert (
        capsys.readouterr().out
        == f"{world.path}: 1 event, 1 stream\ninjected by the test: 1 event_id_gap; faults: 1 lose\nno errors\n"
    )
    assert main(["check", str(world.path), "--injected", "fail"]) == 1
    out = capsys.readouterr().out
    assert "1 KV event error: event_id_gap" in out
    assert "fault:     injected: lose, event 0 of worker 0" in out


UNUSABLE = {
    "no such file": (["check", "no/such.jsonl"], "check: no/such.jsonl: cannot be read: No such file or directory"),
    "an empty directory": (["check", "."], "check: .: no *.jsonl in this directory"),
    "a directory without payloads": (
        ["check", ".", "--dialect", "vllm-0.33"],
        "check: .: no *.msgpack in this directory",
    ),
    "unknown rule": (["check", "a", "--allow", "x"], "check: unknown rule 'x'"),
    "unknown dialect to check": (
        ["check", "a", "--dialect", "vlm-0.33"],
        "check: unknown dialect 'vlm-0.33'; did you mean",
    ),
    "a dialect without its version": (
        ["check", "a", "--dialect", "vlm"],
        "check: unknown dialect 'vlm'; did you mean 'vllm-0.33'? known: ",
    ),
    "no module": (["dialects", "-p", "no.such"], "dialects: -p no.such: cannot be imported: ModuleNotFoundError: "),
    "a module without hooks": (
        ["backends", "--plugin", "json"],
        "backends: -p json: has neither pytest_kvmock_dialects nor pytest_kvmock_backends",
    ),
    "unknown dialect to record": (
        ["record", "tcp://127.0.0.1:1", "a", "--dialect", "vllm"],
        "record: unknown dialect 'vllm'",
    ),
    "no endpoint": (["record", "here", "a"], "record: "),
    "an endpoint within a process": (
        ["record", "inproc://x", "a"],
        "record: 'inproc://x' is within one process; an engine is",
    ),
    "no batches": (["record", "tcp://127.0.0.1:1", "a", "--batches", "0"], "record: batches must be an integer of at"),
    "a file to record where none can be": (["record", "tcp://127.0.0.1:1", "."], "record: .: cannot be written: "),
}


@pytest.mark.parametrize(("args", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_file_or_option_is_one_line_and_exit_code_2(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["chek"],
        ["check"],
        ["record", "tcp://127.0.0.1:1"],
        ["record", "a", "b", "--ranks", "x"],
        ["check", ""],
    ],
)
def test_wrong_arguments_exit_with_2(args, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(args)
    assert exit_.value.code == 2
    assert "usage: python -m pytest_kvmock" in capsys.readouterr().err


def test_record_writes_a_capture_of_an_engine(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    with KvPublisher("vllm-0.33") as publisher:
        publisher.publish(Stored(None, (5,), (15,)), token_ids=[[1, 2]])

        def run():
            publisher.wait_subscribed()
            publisher.publish(Cleared())

        thread = threading.Thread(target=run)
        thread.start()
        replay = publisher.replay_endpoints[0]
        assert main(["record", publisher.endpoints[0], str(path), "--replay", replay, "--batches", "2"]) == 0
        thread.join()

    assert capsys.readouterr().out == f"{path}: 2 batches, 2 events\n"
    assert main(["check", str(path)]) == 0


def test_a_recording_with_problems_exits_with_1(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    with KvPublisher("vllm-0.33") as publisher:

        def run():
            publisher.wait_subscribed()
            publisher.publish(Removed((5,)))

        thread = threading.Thread(target=run)
        thread.start()
        assert main(["record", publisher.endpoints[0], str(path), "--batches", "1"]) == 1
        thread.join()
    assert f"1 event error: python -m pytest_kvmock check {path}" in capsys.readouterr().out


@pytest.mark.skipif(os.name == "nt", reason="a signal of Unix")
def test_a_signal_ends_a_recording_and_keeps_its_events(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"

    def kill(*args, progress, **given):
        given["progress"] = lambda _: os.kill(os.getpid(), signal.SIGTERM)
        return record(*args, **given)

    from pytest_kvmock.servers import record

    monkeypatch.setattr("pytest_kvmock.servers.capture.recorder.record", kill)
    before = signal.getsignal(signal.SIGTERM)
    with KvPublisher("vllm-0.33") as publisher:
        assert main(["record", publisher.endpoints[0], str(path)]) == 1
    assert check_file(path).complete
    assert before is signal.getsignal(signal.SIGTERM)


@pytest.fixture
def nobody():
    """Return an endpoint at which no engine listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # without listening
        yield f"tcp://127.0.0.1:{taken.getsockname()[1]}"


def test_a_recording_that_received_nothing_exits_with_1(tmp_path, capsys, nobody):
    path = tmp_path / "a.jsonl"
    record = ["record", nobody, str(path), "--seconds", "0.01"]
    assert main(record) == 1
    expected = f"{path}: 0 batches, 0 events\n  nothing was received: no connection to {nobody} (Connection refused)\n"
    assert capsys.readouterr().out == expected
    assert main([*record, "--overwrite", "--allow-empty"]) == 0
    assert capsys.readouterr().out == expected
    assert main(["check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: 0 events, 0 streams, vLLM 0.33.0, {nobody}\nno events\n"


def test_an_engine_that_publishes_nothing_is_distinguished_from_no_engine(tmp_path, capsys):
    with KvPublisher("vllm-0.33") as publisher:
        endpoint = publisher.endpoints[0]
        assert main(["record", endpoint, str(tmp_path / "a.jsonl"), "--seconds", "0.01"]) == 1
    assert f"nothing was received: no batch from {endpoint}\n" in capsys.readouterr().out


def test_a_recording_waits_for_a_replay_no_longer_than_its_seconds(tmp_path, capsys, nobody):
    path = tmp_path / "a.jsonl"
    assert main(["record", nobody, str(path), "--replay", nobody, "--seconds", "0.02", "--ranks", "2"]) == 1
    out = capsys.readouterr().out
    assert "nothing more came in 0.01 s" in out
    assert f"nothing was received: no connection to {nobody} (Connection refused)" in out


def test_an_existing_file_is_overwritten_only_on_request(clean, capsys, nobody):
    before = clean.read_bytes()
    record = ["record", nobody, str(clean), "--seconds", "0.01"]
    assert main(record) == 2
    expected = f"record: {clean}: the file is there already; --overwrite (overwrite=True) replaces it\n"
    assert capsys.readouterr().err == expected
    assert before == clean.read_bytes()
    assert main([*record, "--overwrite"]) == 1
    assert before != clean.read_bytes()


def test_check_of_several_files_or_a_directory_prints_a_total(clean, broken, tmp_path, capsys):
    assert main(["check", str(clean), str(clean)]) == 0
    assert re.fullmatch(r"2 files, \d+ events: 2 without\n", capsys.readouterr().out)

    assert main(["check", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out.startswith(f"{broken}: 3 events")
    assert re.search(r"\n2 files, \d+ events: 1 with problems, 1 without\n$", out)
    assert err == ""

    missing = tmp_path / "missing.jsonl"
    assert main(["check", str(missing), str(broken)]) == 2
    out, err = capsys.readouterr()
    assert err == f"check: {missing}: cannot be read: No such file or directory\n"
    assert out.endswith("\n2 files, 3 events: 1 with problems, 1 cannot be read\n")


def test_a_dialect_is_refused_for_a_capture(clean, capsys):
    assert main(["check", str(clean), "--dialect", "vllm-0.33"]) == 2
    text = "this is a capture, which names its engine itself: leave the dialect out"
    assert capsys.readouterr().err == f"check: {clean}: {text}\n"


ENDS = {
    "it counts others": (lambda lines: [*lines[:-1], '{"end":{"events":99}}'], "the end counts 99 events, and "),
    "it counts none": (lambda lines: [*lines[:-1], '{"end":true}'], "the end counts True events, and "),
    "a line is gone": (lambda lines: [line for line in lines if '"event_id":5' not in line], "the end counts "),
    "a line is behind it": (lambda lines: [*lines, lines[-2]], "a line after the end: "),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_last_line_of_a_capture_is_checked(end, clean, capsys):
    change, message = ENDS[end]
    clean.write_text("\n".join([*change(clean.read_text().splitlines()), ""]))
    assert main(["check", str(clean)]) == 2
    assert re.fullmatch(rf"check: {clean}: line \d+: {message}.*\n", capsys.readouterr().err)


def test_a_dialect_of_a_module_is_known_only_while_the_command_runs(acme, tmp_path, capsys):
    assert main(["dialects", "-p", acme]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("acme-1 ")
    assert main(["check", str(tmp_path), "--dialect", "acme-1"]) == 2  # the dialect is gone again
    assert "unknown dialect 'acme-1'" in capsys.readouterr().err


def test_a_command_that_cannot_be_imported_is_reported_in_one_line(monkeypatch, capsys):
    gone = EntryPoint("weigh", "pytest_kvmock.contrib.scales:add_parser", command.COMMANDS)
    monkeypatch.setattr(command, "entry_points", lambda group: [gone])
    assert main(["weigh", "this", "--twice"]) == 2
    expected = "weigh: this command is pytest_kvmock.contrib.scales:add_parser, which cannot be imported: "
    assert capsys.readouterr().err.startswith(expected)
    assert main(["backends"]) == 0


def test_a_command_of_another_package_is_found(monkeypatch, capsys):
    def add_parser(commands, plugins):
        commands.add_parser("weigh", parents=[plugins]).set_defaults(run=lambda _: 7)

    monkeypatch.setattr(command, "entry_points", lambda group: [SimpleNamespace(name="weigh", load=lambda: add_parser)])
    assert main(["weigh"]) == 7


def test_the_dialects_that_a_hook_returns_are_checked(acme, tmp_path, capsys):
    path = tmp_path / "acme_kv.py"
    path.write_text(HOOK.replace('{"acme-1"', '{"acme-2"'))
    assert main(["dialects", "-p", acme]) == 2
    expected = "pytest_kvmock_dialects of acme_kv: the key 'acme-2' is not the name of its dialect, 'acme-1'"
    assert capsys.readouterr().err == f"dialects: {expected}\n"


def test_backends_and_dialects_commands_list_all_names(capsys):
    assert main(["backends"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed][: len(BACKENDS)] == [*BACKENDS]
    assert "vLLM 0.33.0" in next(line for line in listed if line.startswith("vllm "))

    assert main(["dialects"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()][: len(DIALECTS)] == [*DIALECTS]


class Terminal:
    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_progress_is_shown_for_long_files_on_a_terminal_only(clean, monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["check", str(clean)]) == 0
    assert terminal.text == ""

    monkeypatch.setattr(command, "LONG", 100)
    monkeypatch.setattr("pytest_kvmock.servers.capture.check._EVERY", 5)
    assert main(["check", str(clean)]) == 0
    assert re.search(r"\r *\d+ %, \d+ events", terminal.text)
    assert terminal.text.endswith("\r\x1b[K")  # the line is erased
    assert "%" not in capsys.readouterr().out


def test_python_m_pytest_kvmock_is_a_program(broken):
    done = subprocess.run(
        [sys.executable, "-m", "pytest_kvmock", "check", str(broken)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "block 7 was never stored" in done.stdout


def test_the_command_does_not_import_pytest(broken):
    code = f"import sys; from pytest_kvmock.__main__ import main; main(['check', {str(broken)!r}]); print('pytest' in sys.modules)"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_an_interrupted_command_exits_with_130(clean, monkeypatch, capsys):
    def interrupted(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_dialects", interrupted)
    assert main(["dialects"]) == 130
    assert capsys.readouterr().err == "dialects: interrupted\n"


def test_a_closed_output_pipe_is_not_an_error():
    program = "import sys; from pytest_kvmock.__main__ import main; sys.stdout.reconfigure(line_buffering=True); raise SystemExit(main(['dialects']))"  # noqa: E501
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        errors = process.stderr.read()
        assert (process.wait(60), errors) == (0, b"")


@pytest.mark.parametrize("seed", seeds(20))
@each_parameter
def test_payloads_of_requests_with_full_reports_are_clean(seed, tmp_path, capsys):
    rng, wire = Random(seed), KvWire("vllm-0.33")
    make = partial(BACKENDS["vllm"].make, num_blocks=9, block_size=2, dp_rank=0)
    worker = KvWorker(lambda sink: make(sink=sink), sink=wire, rng=rng, driver=BACKENDS["vllm"].driver)
    path = tmp_path / "reports.msgpack"
    for _ in range(40):
        tokens = [rng.randrange(2)] * 2 * rng.randint(1, 4)
        worker.serve(Prompt(tokens, report_mode=rng.choice([None, "full"])))
    path.write_bytes(b"".join(wire.payloads))
    assert main(["check", str(path), "--dialect", "vllm-0.33", "--full-reports"]) == 0
    out = capsys.readouterr().out
    assert (
        "note: full reports: a Stored without a parent whose blocks are all held may be one, or copies: neither" in out
    )
