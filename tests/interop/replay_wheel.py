"""Plays replays in the installed ai-dynamo-runtime: `python replay_wheel.py [SECONDS] < cases > results`.

Reads one case per line (`replay_cases.Case.to_json`) and writes one answer per line in the same order:
`{"summary": {...}}`, with `"per_request": [...]` if the release reports it, or `{"error": text}`. Every case runs in a
fork of a process that has loaded the release, with a timer of processor time: on some replays the original loops for
ever, in native code that no signal handler of Python can interrupt. The answer is then `{"error": "timeout"}`. If a
case kills its process (a panic that aborts), the answer is `{"error": "died with ..."}`.

Needs nothing of this project: the Python of any environment with the wheel can run it.
"""

import json
import os
import signal
import sys
import tempfile
from importlib import metadata
from pathlib import Path

SECONDS = 0.3  # of processor time: a case takes some milliseconds


def play(core, case, directory):
    """Return the answer of the release to one case."""
    reports = metadata.version("ai-dynamo-runtime") != "1.2.1"  # 1.2.1 reports no times per request
    trace = Path(directory, "trace.jsonl")
    trace.write_text("".join(f"{json.dumps(request)}\n" for request in case["requests"]))
    report = Path(directory, "report.jsonl")
    options = dict(case["replay"])
    if "router" in case:  # this line separates the router's log from others
        os.write(2, b"\nreplay\n")
        options |= {"router_mode": "kv_router", "router_config": core.KvRouterConfig(**case["router"])}
    if "engine" in case:
        options["extra_engine_args"] = engine_args(core, case["engine"], case.get("dp_size", 1))
    else:
        options["prefill_engine_args"] = engine_args(core, case["prefill_engine"])
        options["decode_engine_args"] = engine_args(core, case["decode_engine"])
    if reports:
        options["report_jsonl_path"] = str(report)
    try:
        answer = core.run_mocker_trace_replay([str(trace)] if reports else str(trace), **options)
    except BaseException as error:  # noqa: BLE001 - a panic of the release is one
        return {"error": f"{type(error).__name__}: {error}"}
    answer = {"summary": answer if isinstance(answer, dict) else answer.summary}
    if reports:
        rows = [json.loads(line) for line in report.read_text().splitlines()]
        for row in rows:
            del row["uuid"]  # random
        answer["per_request"] = sorted(
            rows, key=lambda row: [(value is not None, str(value)) for value in row.values()]
        )
    return answer


def engine_args(core, fields, dp_size=1):
    """Return `MockEngineArgs` of the fields of a case, or from 1.6 on the mapping that replaces it."""
    if not hasattr(core, "MockEngineArgs"):
        return {"engine": fields, "dp_size": dp_size}
    fields = dict(fields)
    if "sglang" in fields:
        fields["sglang"] = core.SglangArgs(**fields["sglang"])
    return core.MockEngineArgs(**fields)


def play_all(cases, seconds, write):
    """Play cases in forks and pass each answer to `write`. A fork plays on until a case ends it."""
    from dynamo import _core as core

    done = 0
    while done < len(cases):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _play_in_fork(core, cases[done:], seconds, writing)
        os.close(writing)
        with os.fdopen(reading, encoding="utf-8") as answers:
            for line in answers:
                if line.endswith("\n"):
                    write(line)
                    done += 1
        _, status = os.waitpid(child, 0)
        if done < len(cases):
            killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
            text = "timeout" if killed else f"died with wait status {status}"
            write(json.dumps({"error": text}) + "\n")
            done += 1


def _play_in_fork(core, cases, seconds, writing):
    """Play cases and end the process; never returns."""
    with os.fdopen(writing, "w", encoding="utf-8") as answers, tempfile.TemporaryDirectory() as directory:
        for case in cases:
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its default action ends the process
            answer = play(core, case, directory)
            signal.setitimer(signal.ITIMER_PROF, 0)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    os._exit(0)


def main():
    """Play the cases of standard input."""
    os.environ.setdefault("DYN_LOG", "error")
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS

    def write(line):
        sys.stdout.write(line)
        sys.stdout.flush()

    play_all([json.loads(line) for line in sys.stdin], seconds, write)


if __name__ == "__main__":
    main()
