"""Many replays: all combinations of traces, backends and routers, in this and in other processes."""

import gc
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar

import pytest
from depth import takes_long

from pytest_kvmock.__main__ import main
from pytest_kvmock.contrib.lab import sweep
from pytest_kvmock.fleets import RoundRobin, synthetic_trace
from pytest_kvmock.values.long_runs import RAISED

SMALL = list(synthetic_trace(12, seed=1, input_tokens=(100, 900), output_tokens=(5, 20)))


class Wants:
    """A router that cannot be created without an argument."""

    def __init__(self, size):
        self.size = size


class Breaks(RoundRobin):
    """Raises at the fifth request."""

    def pick(self, request, candidates):
        if request.number == 4:
            raise ZeroDivisionError("no load")
        return super().pick(request, candidates)


class Forgets(RoundRobin):
    """A router that assumes no open requests at any worker."""

    def loads(self):
        return {}


class Interrupts(RoundRobin):
    """Interrupt the run like Ctrl-C at the fifth request."""

    def pick(self, request, candidates):
        if request.number == 4:
            signal.raise_signal(signal.SIGINT)
        return super().pick(request, candidates)


class InterruptsParent(RoundRobin):
    """Interrupt the parent from a process of a pool, which would not end otherwise."""

    def pick(self, request, candidates):
        os.kill(os.getppid(), signal.SIGINT)
        os.read(os.pipe()[0], 1)


@pytest.fixture
def trace(tmp_path):
    """Return the path of a trace file."""
    fields = ("timestamp", "input_length", "output_length", "hash_ids", "session_id", "delay")
    path = tmp_path / "small.jsonl"
    path.write_text("".join(json.dumps({name: getattr(each, name) for name in fields}) + "\n" for each in SMALL))
    return path


def test_a_sweep_runs_all_combinations_in_order():
    found = sweep({"a": SMALL, "b": SMALL[:5]}, ["lineage", "vllm"], ["round_robin", "most_cached"], workers=2)
    named = [(run.trace, run.backend, run.router) for run in found.runs]
    assert named == [(t, b, r) for t in "ab" for b in ("lineage", "vllm") for r in ("round_robin", "most_cached")]
    assert [run.figure("requests") for run in found.runs] == [12] * 4 + [5] * 4
    assert found.runs[1].figure("of_best") == 1.0
    table = str(found).splitlines()
    assert len(table) == 9
    assert table[0].split()[:5] == ["trace", "backend", "router", "hit", "of"]
    assert found.runs[0].text.startswith("Report: RoundRobin on a\n")


def test_a_sweep_on_an_executor_gives_the_same_result(trace):
    asked = {"backends": ["lineage"], "routers": {"turns": RoundRobin, "dynamo": "dynamo"}, "workers": 2, "limit": 9}
    with ThreadPoolExecutor(2) as pool:
        assert sweep([trace], executor=pool, **asked) == sweep([trace], **asked)


def test_a_router_that_fails_does_not_stop_the_other_runs():
    found = sweep({"a": SMALL}, ["lineage"], [Breaks, "round_robin"], workers=2)
    assert [run.router for run in found.errors] == ["Breaks"]
    text = "RouterError: Breaks.pick() raised ZeroDivisionError('no load') (test_sweep.py:"
    assert found.errors[0].error.startswith(text)
    assert "a, lineage, Breaks: RouterError" in str(found)
    assert found.runs[1].figure("completed") == 12


def test_sweeps_are_compared_run_by_run():
    one = sweep({"a": SMALL}, ["lineage"], ["round_robin", "most_cached"], workers=2)
    other = sweep({"a": SMALL}, ["lineage"], ["most_cached"], workers=3)
    ((run, compared),) = one.compare(json.loads(json.dumps(other.to_json())))
    assert (run.router, compared["requests"]) == ("most_cached", (12, 12))
    assert len(one.compare(other.runs[0].report)) == 2
    with pytest.raises(TypeError, match="other must be a Report"):
        one.compare({"runs": []})


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"traces": []}, ValueError, "sweep: traces must be at least one, got none"),
        ({"traces": "a.jsonl"}, TypeError, "sweep: traces must be several, in a list, got 'a.jsonl'"),
        ({"traces": ["/none.jsonl"]}, OSError, "/none.jsonl"),
        ({"traces": {"a": 7}}, TypeError, "sweep: trace 'a' must be a file or a sequence of requests, got 7"),
        ({"backends": ["nothing"]}, ValueError, "unknown backend 'nothing'"),
        ({"routers": ["roundrobin"]}, ValueError, "unknown router 'roundrobin'; did you mean 'round_robin'"),
        (
            {"routers": ["nowhere:Router"]},
            ValueError,
            "router 'nowhere:Router' cannot be imported: ModuleNotFoundError",
        ),
        ({"routers": [Wants]}, ValueError, "router 'Wants' cannot be made without arguments: TypeError: .*'size'"),
        ({"routers": {"mine": RoundRobin()}}, TypeError, "must be a class, or a function that makes a router"),
        ({"routers": [dict]}, TypeError, "pick"),
        ({"routers": [RoundRobin, RoundRobin]}, ValueError, "two are called 'RoundRobin'; a mapping names them"),
        ({"workers": 0}, ValueError, "sweep: workers must be an integer of at least 1"),
        ({"engine": {"num_blocks": 3}}, TypeError, "num_blocks"),
        ({"concurrency": 0}, ValueError, "Fleet: concurrency must be an integer of at least 1"),
    ],
)
def test_an_invalid_sweep_is_refused_before_any_run(arguments, error, text):
    with pytest.raises(error, match=text):
        sweep(**{"traces": {"a": SMALL}, "backends": ["lineage"], **arguments})


# ------------------------------------------------------------------------------------------------- the command


def replay(*args):
    return main(
        ["replay", *map(str, args), "--workers", "2", "--backend", "lineage", "--num-blocks", "200", "--jobs", "1"]
    )


def test_the_replay_command_prints_a_report_and_writes_its_figures(trace, tmp_path, capsys):
    assert replay(trace, "--router", "round_robin", "--json", tmp_path / "out.json", "--slo-ttft-ms", 1) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("Report: RoundRobin on small\n")
    assert "goodput" in shown.out
    assert shown.err == ""
    assert replay(trace, "--router", "round_robin,most_cached", "--compare", tmp_path / "out.json") == 0
    out = capsys.readouterr().out
    assert "small  lineage  most_cached" in out
    assert f"small, lineage, round_robin, compared with {tmp_path}/out.json:\n" in out
    assert "small, lineage, most_cached, compared" not in out


def test_with_json_to_standard_output_only_the_json_is_printed(trace, capsys):
    assert replay(trace, "--json", "-") == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["router"], run["report"]["fleet"]["all"]["requests"]) == ("dynamo", 12)


def test_a_synthetic_trace_with_a_given_shape_is_reproducible(capsys):
    shape = ("--sessions", 6, "--tenants", 2, "--arrival", "poisson:20", "--seed", 4)
    assert replay("synthetic", *shape, "--json", "-") == 0
    first = capsys.readouterr().out
    assert replay("synthetic", *shape, "--json", "-") == 0
    assert capsys.readouterr().out == first


def pages(directory):
    found = {}
    for path in sorted(directory.glob("*.html")):
        text = path.read_text().partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
        found[path.name] = json.loads(text)
    return found


def test_the_page_of_each_run_compares_it_with_all_other_runs(trace, tmp_path, capsys):
    assert (
        replay(trace, "--router", "round_robin", "--html", tmp_path / "one.html", "--json", tmp_path / "one.json") == 0
    )
    (page,) = pages(tmp_path).values()
    assert page["title"] == "small, lineage, round_robin"
    assert len(page["requests"]["number"]) == 12
    assert page["samples"] is not None
    (tmp_path / "one.html").unlink()
    routers, before = "round_robin,most_cached", tmp_path / "one.json"
    assert replay(trace, "--router", routers, "--html", tmp_path / "all.html", "--compare", before) == 0
    found = {name: [each["name"] for each in page["reports"]] for name, page in pages(tmp_path).items()}
    turns, cached = "round_robin", "most_cached"  # the different parts of the names
    assert found == {"all.html": [turns, "before", cached], "all-2.html": [cached, turns]}


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("none.jsonl",), "No such file or directory: 'none.jsonl'"),
        (("synthetic", "--arrival", "often"), "--arrival must be uniform:RATE or poisson:RATE, .* got 'often'"),
        (("synthetic", "--arrival", "poisson:0"), "--arrival must be"),
        (("synthetic", "--router", "nowhere:Router"), "router 'nowhere:Router' cannot be imported"),
        (("synthetic", "--json", "/nowhere/at/all.json"), "no directory /nowhere/at to write it in"),
        (("synthetic", "--compare", __file__), "no JSON of a replay"),
        (("synthetic", "synthetic"), "two traces are called 'synthetic'"),
        (("synthetic", "--semantics", "0.1"), "semantics"),
    ],
)
def test_an_invalid_replay_command_is_a_one_line_error(args, text, capsys):
    assert replay(*args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("replay: ")
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(line)


def test_an_invalid_line_of_a_trace_is_named(trace, capsys):
    with trace.open("a") as file:
        file.write("{}\n")
    assert replay(trace) == 1
    assert f"TraceError: {trace}, line 13, field 'input_length': missing" in capsys.readouterr().err


def test_a_failed_router_is_reported_in_one_line_and_the_other_runs_are_shown(trace, capsys):
    assert replay(trace, "--router", f"{__name__}:Breaks,round_robin") == 1
    shown = capsys.readouterr()
    assert "small  lineage  round_robin" in shown.out
    (line,) = shown.err.splitlines()
    assert line.startswith(f"replay: small, lineage, {__name__}:Breaks: RouterError: Breaks.pick")


@pytest.mark.parametrize("others", ["", ",round_robin"], ids=["alone", "beside-another"])
def test_a_router_that_drifts_is_shown_and_fails_the_sweep(trace, others, capsys):
    assert replay(trace, "--router", f"{__name__}:Forgets{others}") == 1
    shown = capsys.readouterr()
    assert shown.out.count("load_drift: Forgets.loads() says 0 prefill tokens, 0 blocks, 0 requests of worker") == 1
    assert shown.err == f"replay: small, lineage, {__name__}:Forgets: load_drift\n"
    if others:
        table = [line.split() for line in shown.out.splitlines()[:3]]
        assert [line[3] for line in table] == ["drift", "load_drift", "-"]


def test_the_table_has_no_drift_column_if_no_router_drifts(trace, capsys):
    assert replay(trace, "--router", "round_robin,least_loaded") == 0
    assert "drift" not in capsys.readouterr().out


def test_ctrl_c_prints_the_completed_runs(trace, capsys):
    assert replay(trace, "--router", f"round_robin,{__name__}:Interrupts,most_cached", "--json", "-") == 130
    shown = capsys.readouterr()
    first, second = json.loads(shown.out)["runs"]
    assert first["report"]["fleet"]["all"]["completed"] == 12
    assert second["report"]["fleet"]["all"]["requests"] == 5
    assert shown.err == "replay: interrupted; 2 of 3 runs were made\n"


@takes_long
def test_ctrl_c_ends_the_processes_of_a_pool(trace):
    routers = f"{__name__}:InterruptsParent,round_robin"
    command = [sys.executable, "-m", "pytest_kvmock", "replay", trace, "--backend", "lineage", "--router", routers]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    # Processes that are started in the background ignore Ctrl-C, and children inherit this.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    ended = subprocess.run(
        [*command, "--jobs", "2"],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | paths,
        timeout=60,
        preexec_fn=heeds,
    )
    assert ended.returncode == 130
    assert ended.stderr.splitlines()[-1].endswith("of 2 runs were made")
    assert "Traceback" not in ended.stderr


class Told(RoundRobin):
    """Record the workers of each notification, and the threshold of Python's garbage collector."""

    calls: ClassVar = []

    def started(self, workers):
        self.calls.append((list(workers), gc.get_threshold()[0]))


def test_routers_of_a_sweep_are_notified_of_their_workers_inside_the_long_run():
    before = gc.get_threshold()
    found = sweep({"small": SMALL[:3]}, ["lineage"], [Told], workers=3)
    assert [run.error for run in found.runs] == [""]
    assert Told.calls == [([0, 1, 2], RAISED)]
    assert before == gc.get_threshold()
