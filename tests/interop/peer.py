"""The originals: `dynamo._core` of ai-dynamo-runtime (dependency group `interop`), vLLM, SGLang and Ray, if they are
installed.
"""

import json
import logging
import os
import re
import subprocess
import sys
import warnings
from importlib import import_module, metadata
from pathlib import Path

import pytest


def dynamo_core(*releases):
    """Return `dynamo._core`, or skip the module if it is missing or not of one of these releases ("1.2").

    Raises:
        pytest.skip.Exception: with the reason.
    """
    try:
        from dynamo import _core
    except ImportError as error:
        pytest.skip(
            f"needs dynamo._core of ai-dynamo-runtime (dependency group interop): {error}", allow_module_level=True
        )
    installed = metadata.version("ai-dynamo-runtime")
    if releases and ".".join(installed.split(".")[:2]) not in releases:
        wanted = " or ".join(releases)
        pytest.skip(f"needs ai-dynamo-runtime {wanted}, {installed} is installed", allow_module_level=True)
    return _core


def engine(name, *modules, group=None):
    """Return modules of an engine or of another program, or skip the module if they cannot be imported.

    Engines are in no dependency group: they are gigabytes. Only their block managers are used, which need no GPU.

    Raises:
        pytest.skip.Exception: with the reason.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engine's, and its imports'
        try:
            found = [import_module(f"{name}.{module}") for module in modules]
        except ImportError as error:
            needed = name if group is None else f"{name} (dependency group {group})"
            pytest.skip(f"needs {needed}: {error}", allow_module_level=True)
    logging.getLogger(name).setLevel(logging.ERROR)
    return found


def release():
    """Return the installed release of ai-dynamo-runtime: "1.6"."""
    return ".".join(metadata.version("ai-dynamo-runtime").split(".")[:2])


def play_in_wheel(cases):
    """Return the installed release's answer to each case: see `replay_wheel`."""
    return _answers(cases)[0]


def play_routed(cases):
    """Return the answers, and the router's log of each pick: the chosen worker, and the overlap, prefill, decode and
    cost of each candidate.
    """
    answers, log = _answers(cases, DYN_LOG="error,dynamo_kv_router::scheduling::selector=debug")
    logs = _COLOURS.sub("", log).split("\nreplay\n")[1:]
    return [(answer, _picks(log)) for answer, log in zip(answers, logs, strict=True)]


def play_chosen(cases):
    """Return the answers and the picks of 1.6, whose router logs only worker, overlap and cost of the chosen one."""
    answers, log = _answers(cases, DYN_LOG="error,dynamo_kv_router::scheduling::selector=debug")
    logs = _COLOURS.sub("", log).split("\nreplay\n")[1:]
    found = [[(int(each[1]), float(each[3]), float(each[2])) for each in _CHOSEN.finditer(log)] for log in logs]
    return list(zip(answers, found, strict=True))


def _answers(cases, **environment):
    program = Path(__file__).with_name("replay_wheel.py")
    lines = "".join(f"{json.dumps(case)}\n" for case in cases)
    environment = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, program], input=lines, capture_output=True, text=True, check=True, env=environment
    )
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_FORMULA = re.compile(
    r"Formula for worker_id=(\d+) dp_rank=\d+ with ([\d.]+) effective cached blocks: ([\d.]+) = .* \+ ([\d.]+) "
    r"\(raw_prefill_blocks: ([\d.]+),"
)
_CHOSEN = re.compile(r"Selected worker .* worker_id=(\d+) .* logit=(\S+) effective_cached_blocks=(\S+) ")
_SELECTED = re.compile(r"Selected worker.* worker_id=(\d+) ")


def _picks(log):
    picks, candidates = [], {}
    for line in log.splitlines():
        formula, selected = _FORMULA.search(line), _SELECTED.search(line)
        if formula is not None:
            worker, overlap, cost, decode, raw = formula.groups()
            candidates[int(worker)] = [float(overlap), float(raw), float(decode), float(cost)]
        elif selected is not None:
            picks.append([int(selected[1]), [candidates[worker] for worker in sorted(candidates)]])
            candidates = {}
    return picks
