"""Subjects of a `ProcessContract`: commands that do not run, unreadable answers, missing methods, a running process."""

import socket
import subprocess
import sys

import pytest
from depth import takes_long, worth_its_time
from process_runs import PLAIN, OfPlainRouter, outcome_of, patient, source_of

from pytest_kvmock.testing import ProcessContract
from pytest_kvmock.testing.process.router_process import ServedEngine

NAME = "test_it_hears_every_worker"
SAYS = "import sys; print('a first line', file=sys.stderr); print('no such worker', file=sys.stderr)"


def of_command(*command, **traits):
    return type("OfCommand", (ProcessContract,), {"command": lambda self, engines: command, "timeout_s": 0.5, **traits})


@pytest.mark.parametrize(
    ("contract", "text"),
    [
        (
            ProcessContract,
            "ProcessContract: define command(self, engines), which returns the command that starts your router, or ",
        ),
        (
            of_command("/no/such/router"),
            "OfCommand: the command '/no/such/router' cannot be started: [Errno 2] No such file",
        ),
        (
            of_command(sys.executable, "-c", f"{SAYS}; sys.exit(3)", timeout_s=20),
            (
                "OfCommand: it is not ready: the process has exited with 3; its standard error ends with: a first line "
                "| no such worker"
            ),
        ),
        (
            of_command(sys.executable, "-c", "import time; time.sleep(60)"),
            (
                "/health answers nothing (ConnectionRefusedError) after 0.5 s: the process is alive, with nothing on "
                "standard error"
            ),
        ),
        (
            of_command(
                sys.executable,
                "-c",
                "print()",
                timeout_s=20,
                ready=lambda self, process: process.line() + process.line(),
            ),
            "OfCommand: it has printed no line: the process has exited with 0, with nothing on standard error",
        ),
        (
            of_command(sys.executable, "-c", "import time; time.sleep(60)", ready=lambda self, process: process.line()),
            "OfCommand: it has printed no line after 0.5 s: the process is alive, with nothing on standard error",
        ),
    ],
)
def test_a_command_that_does_not_run_is_reported_in_one_line(contract, text):
    found = outcome_of(contract, NAME)
    assert text in found
    assert "\n" not in found


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, "blocks(prompt) must return {worker: blocks} or {(worker, rank): blocks}, got None"),
        ([1], "blocks(prompt) must return {worker: blocks} or {(worker, rank): blocks}, got [1]"),
        ({"0": 1}, "got {'0': 1}"),
        ({0: "4"}, "got {0: '4'}"),
        ({0: -1}, "got {0: -1}"),
        ({0: True}, "got {0: True}"),
        ({(0, 1, 2): 1}, "got {(0, 1, 2): 1}"),
        (ValueError("no JSON:\n<html>"), "blocks(prompt) raised ValueError: no JSON: <html>"),
        (KeyError("blocks"), "blocks(prompt) raised KeyError: 'blocks'"),
    ],
)
def test_an_unreadable_answer_is_reported_in_one_line(answer, text):
    def blocks(self, prompt):
        if isinstance(answer, Exception):
            raise answer
        return answer

    found = outcome_of(type("Of", (OfPlainRouter,), {"blocks": blocks}), NAME)
    assert text in found
    assert "\n" not in found


def test_a_missing_answer_counts_as_not_ready_yet():
    def blocks(self, prompt):
        raise ConnectionRefusedError("nobody listens")

    found = outcome_of(type("Of", (OfPlainRouter,), {"blocks": blocks, "timeout_s": 1.0, "ready": patient}), NAME)
    assert "the router gave no answer: blocks(prompt) raised ConnectionRefusedError: nobody listens" in found


def test_an_unreadable_count_of_open_requests_is_reported_in_one_line():
    def open_requests(self):
        return {}["open"]

    contract = type("Of", (OfPlainRouter,), {"open_requests": open_requests})
    assert "open_requests() raised KeyError: 'open'" in outcome_of(contract, NAME)


def test_a_process_that_dies_during_a_test_is_reported_with_its_last_lines():
    code = "import http.server, sys\nclass H(http.server.BaseHTTPRequestHandler):\n"
    code += " def log_message(self, *_): pass\n"
    code += " def do_GET(self): self.send_response(200); self.end_headers()\n"
    code += " def do_POST(self): print('panic: no such key', file=sys.stderr, flush=True); import os; os._exit(7)\n"
    code += "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()"
    contract = of_command(timeout_s=20, hears_events=False)
    contract.command = lambda self, engines: [sys.executable, "-c", code, str(engines.port)]
    found = outcome_of(contract, "test_an_answer_is_the_engines")
    assert "(the process has exited with 7; its standard error ends with: panic: no such key)" in found


@pytest.mark.parametrize(
    ("traits", "name", "text"),
    [
        (
            {"hears_events": False},
            NAME,
            "hears_events is False: what it knows by events was not judged; hears_events = True would let it",
        ),
        (
            {"packs": True},
            "test_an_idle_fleet_is_shared",
            "packs is True: whether an idle fleet is shared was not judged; packs = ",
        ),
        (
            {"first_of_equals": True},
            "test_an_idle_fleet_is_shared",
            "first_of_equals is True: whether an idle fleet is shared was",
        ),
        (
            {"counts_open": False},
            "test_open_requests_count",
            "counts_open is False: whether open requests count where it chooses was",
        ),
        (
            {"goes_by_prefix": False},
            "test_a_prompt_goes_where_it_is",
            "goes_by_prefix is False: whether a prompt goes where it is was",
        ),
        (
            {"moved": None},
            "test_it_uses_a_worker_at_its_new_address",
            "it has no moved(engines): whether it uses a worker that comes",
        ),
        (
            {"blocks": None},
            "test_a_block_is_held_until_its_last_copy_goes",
            "it has no blocks(prompt): copies of a block was not judged",
        ),
        (
            {"url": "http://127.0.0.1:1"},
            "test_it_ends_cleanly_while_requests_are_open",
            "url is set: how it ends was not judged",
        ),
    ],
)
def test_a_declaration_causes_a_skip_that_says_how_to_enable_the_test(traits, name, text):
    found = outcome_of(type("OfDeclared", (OfPlainRouter,), traits), name)
    assert found.startswith(f"skipped: OfDeclared: {text}")
    assert found.endswith("would let it")


@takes_long
def test_a_process_without_answers_is_judged_by_its_picks():
    traits = {"blocks": None, "open_requests": None, "moved": None}
    silent = type("OfSilent", (OfPlainRouter,), traits)
    for name in (NAME, "test_a_restart_empties_a_worker", "test_a_salt_and_an_adapter_make_other_prompts"):
        assert outcome_of(silent, name) == ""


def test_a_contract_runs_over_the_dialects_of_its_class(pytester):
    pytester.makepyfile(
        """
        from pytest_kvmock.testing import ProcessContract

        class TestOne(ProcessContract):
            dialects = ("vllm-0.24", "sglang-0.5.23")

        class TestTwo(TestOne):
            dialects = ("vllm-0.33",)

        class TestThree(ProcessContract):
            pass
        """
    )
    result = pytester.runpytest("--collect-only", "-q", "-p", "no:asyncio", "-k", "test_an_idle_fleet_is_shared")
    found = [line.rpartition("::")[2] for line in result.stdout.lines if "::" in line]
    assert [
        f"test_an_idle_fleet_is_shared[{each}]" for each in ("vllm-0.24", "sglang-0.5.23", "vllm-0.33", "vllm-0.33")
    ] == found


@worth_its_time
def test_a_run_ends_with_a_line_that_says_what_was_not_judged_and_what_would_let_it(pytester):
    pytester.makepyfile(
        f"""
        import sys
        sys.path.append({str(PLAIN.parent)!r})
        from test_process_contract import TestPlainRouter as OfPlainRouter

        class TestSilent(OfPlainRouter):
            blocks = open_requests = None
        """
    )
    result = pytester.runpytest("-p", "no:asyncio", "-v", "-k", "TestSilent and (test_an_answer or test_an_idle)")
    result.assert_outcomes(passed=3, skipped=0)
    text = "not judged: copies and a host below the device (blocks(prompt)), what it counts as open (open_requests())"
    text += ", stores that workers share (stores), P/D pairs (hand_over)"
    name = "kvmock: test_a_run_ends_with_a_line_that_says_what_was_not_judged_and_what_would_let_it.py::TestSilent: "
    assert [line for line in result.stdout.lines if line.startswith("kvmock: ") and "judged:" in line] == [name + text]


# ------------------------------------------------------------------------------------------ a process that runs already


def free_ports(count):
    """Return the first of `count` consecutive free ports."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            base = first.getsockname()[1]
        try:
            for port in range(base, base + count):
                socket.create_server(("127.0.0.1", port)).close()
        except (OSError, OverflowError):
            continue
        return base


@pytest.fixture
def running():
    """Return a contract of a process that is already running and has the addresses of its future engines."""
    ports = {name: free_ports(2) for name in ("http", "events", "replay")}

    def at(name, worker):
        return f"tcp://127.0.0.1:{ports[name] + worker}"

    engines = [
        ServedEngine(each, f"http://127.0.0.1:{ports['http'] + each}", (at("events", each),), (at("replay", each),))
        for each in range(2)
    ]
    command = [sys.executable, PLAIN, "16", *map(source_of, engines)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        yield type("OfRunning", (OfPlainRouter,), {"url": url, "ports": ports, "timeout_s": 20.0})
        process.terminate()


@worth_its_time
def test_a_running_process_is_judged_in_one_test_after_the_other(running):
    for name in (
        NAME,
        "test_it_asks_for_a_lost_batch",
        "test_a_cleared_cache_is_empty",
        "test_a_stream_passes_token_by_token",
    ):
        assert outcome_of(running, name) == ""
    assert outcome_of(running, "test_it_hears_every_rank").startswith("skipped: OfRunning: url is set: ")


def test_a_dialect_without_judged_events_is_named_with_a_way_to_judge_the_rest():
    text = "anything over trtllm-1.2, which is polled, and not heard (hears_events = False judges all but events)"
    assert text in OfPlainRouter().unjudged_text("trtllm-1.2")
    deaf = type("Deaf", (OfPlainRouter,), {"hears_events": False})
    assert "polled" not in deaf().unjudged_text("trtllm-1.2") + OfPlainRouter().unjudged_text("vllm-0.33")


def test_unjudged_pairs_and_stores_alone_cause_no_line():
    assert OfPlainRouter().unjudged_text() == ""
    rare = "stores that workers share (stores), P/D pairs (hand_over)"
    assert OfPlainRouter().unjudged_text(with_rare=True) == f"not judged: {rare}"
    silent = type("Silent", (OfPlainRouter,), {"open_requests": None})
    assert silent().unjudged_text().endswith(f"what it counts as open (open_requests()), {rare}")
    paired = type("Paired", (OfPlainRouter,), {"hand_over": "vllm"})
    assert paired().unjudged_text() == (
        "not judged: stores that workers share (stores), when there must be a prefill leg (threshold)"
    )
