"""llm-d's client of KV events, a Go program built from `tests/interop/llmd/`: its subscriber, event pool and index.

Run as a program, this module builds the client, which takes minutes the first time, and runs the tests with it:
`python tests/interop/llmd_client.py 0.9 [ARGUMENT OF PYTEST...]`.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

PATIENCE = 20.0
"""Seconds until an answer must be right."""

MODEL = "model"
PROGRAM = "KVMOCK_LLMD"
"""The environment variable that names the program."""


def llmd_program():
    """Return the program, or skip the module if none is named.

    Raises:
        pytest.skip.Exception: with the reason.
    """
    program = os.environ.get(PROGRAM)
    if not program:
        pytest.skip(f"needs llm-d's client: {PROGRAM} names no program, see CONTRIBUTING.md", allow_module_level=True)
    return Path(program).resolve()


def version(program):
    """Return the release of llm-d's module that a program was built with: "0.9"."""
    message = subprocess.run([program, "-version"], check=True, capture_output=True, text=True, timeout=PATIENCE).stdout
    return ".".join(message.strip().removeprefix("v").split(".")[:2])


def topic(worker):
    """Return the topic of a worker, from which the client takes the pod and the model."""
    return f"kv@10.0.0.{worker}:8000@{MODEL}"


class LlmdClient:
    """A process of the client. A context manager.

    Args:
        program: its path.
        block_size: tokens of a block.
        engine: the engine whose decoder it uses: "vllm", or "sglang"; 0.5 has one for both.
    """

    def __init__(self, program, block_size, engine="vllm"):
        command = [program, "-block-size", str(block_size), "-engine", engine]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._logged = []
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        self._process.stdout.close()
        self._process.stderr.close()

    @property
    def has_ended(self):
        """Whether the process has ended by itself."""
        return self._process.poll() is not None

    def _read_log(self):
        for line in self._process.stderr:
            self._logged.append(line)

    def log_text(self):
        return "".join(self._logged)

    def _ask(self, **request):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, f"{request!r:.200}: {answer['error']}"
        return answer

    def subscribe(self, name, publisher):
        """Make the client subscribe to each rank of a publisher, and return when it has."""
        for rank, endpoint in enumerate(publisher.endpoints):
            self._ask(do="subscribe", pod=f"{name} {rank}", endpoint=endpoint)
        publisher.wait_subscribed(timeout=PATIENCE)

    def answer(self, prompt, *, model=MODEL, tiers=None):
        """Return the leading blocks of a prompt that each pod holds, by its number; on any tier, or on these tiers."""
        blocks = self._ask(do="lookup", model=model, tokens=list(prompt.tokens)).get("blocks", [])
        found, active = {}, None
        for depth, entries in enumerate(blocks, 1):
            holders = {pod for pod, tier in entries if tiers is None or tier.lower() in tiers}
            active = holders if active is None else active & holders
            found.update(dict.fromkeys(active, depth))
        return {int(pod.split(":")[0].rpartition(".")[2]): depth for pod, depth in found.items()}


def main():
    sources = Path(__file__).with_name("llmd")
    releases = sorted(path.stem.removeprefix("v") for path in sources.glob("v*.mod"))
    if len(sys.argv) < 2 or sys.argv[1] not in releases:
        sys.exit(
            f"expected a release of llm-d's client, one of {', '.join(releases)}; got "
            f"{' '.join(sys.argv[1:2]) or 'none'}"
        )
    release, *arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made, "llmd")
        shutil.copytree(sources, directory)
        shutil.copy(directory / f"v{release}.mod", directory / "go.mod")
        build = ["go", "build", "-mod=mod", "-tags", f"v{release.replace('.', '_')}", "-o", "client", "."]
        subprocess.run(build, cwd=directory, check=True)
        tests = [sys.executable, "-m", "pytest", str(Path(__file__).with_name("test_llmd.py")), *arguments]
        sys.exit(subprocess.run(tests, env={**os.environ, PROGRAM: str(directory / "client")}, check=False).returncode)


if __name__ == "__main__":
    main()
