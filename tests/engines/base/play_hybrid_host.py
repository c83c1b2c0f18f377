"""Play recorded programs of hosts below hybrid models and draft models, and compare every field of every step.

    python tests/engines/base/play_hybrid_host.py FILE...

It takes the files of SGLang's HiCache and of vLLM's native offload. It prints the differences by
program and step, `N of M programs equal` last, and exits with 1 if any program differs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import players


def played(value):
    """Yield each program's name with its differences, or None; files of vLLM name their recorder."""
    if isinstance(value, dict):
        return players.player("engines/base/play_hybrid_host_vllm.py").played(value["programs"])
    return players.player("engines/base/play_hybrid_host_sglang.py").Player.played(value)


def main(paths):
    return players.main(paths, played)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
