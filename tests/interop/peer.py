"""The real things: `dynamo._core` of ai-dynamo-runtime (extra `interop`), vLLM and SGLang, where they are installed."""

import json
import logging
import os
import subprocess
import sys
import warnings
from importlib import import_module, metadata
from pathlib import Path

import pytest


def dynamo_core(*releases):
    """Return `dynamo._core`, or skip the module: it is not there, or of none of these releases ("1.2").

    Raises:
        pytest.skip.Exception: with the reason.
    """
    try:
        from dynamo import _core
    except ImportError as error:
        pytest.skip(f"needs dynamo._core of ai-dynamo-runtime (extra interop): {error}", allow_module_level=True)
    installed = metadata.version("ai-dynamo-runtime")
    if releases and ".".join(installed.split(".")[:2]) not in releases:
        wanted = " or ".join(releases)
        pytest.skip(f"needs ai-dynamo-runtime {wanted}, {installed} is installed", allow_module_level=True)
    return _core


def engine(name, *modules):
    """Return modules of an engine, or skip the module: they cannot be imported here.

    Engines are no extra: they are gigabytes. Only their block managers are used, which need no GPU.

    Raises:
        pytest.skip.Exception: with the reason.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, and those of what they import
        try:
            found = [import_module(f"{name}.{module}") for module in modules]
        except ImportError as error:
            pytest.skip(f"needs {name}: {error}", allow_module_level=True)
    logging.getLogger(name).setLevel(logging.ERROR)
    return found


def release():
    """Return the release of ai-dynamo-runtime that is installed: "1.6"."""
    return ".".join(metadata.version("ai-dynamo-runtime").split(".")[:2])


def play_in_wheel(cases):
    """Return the installed release's answer to each case: see `replay_wheel`."""
    program = Path(__file__).with_name("replay_wheel.py")
    lines = "".join(f"{json.dumps(case)}\n" for case in cases)
    done = subprocess.run([sys.executable, program], input=lines, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]
