"""Play recorded programs of prefill and decode engines on ours, and print the differences by program and step.

    python tests/engines/pairs/play_pairs.py FILE...

It prints "N of M programs equal" last; the exit status is 1 if any differs. Each engine has its
own module next to this one, which is loaded only for files of that engine.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import players


def played(value):
    """Yield each program's name with its difference, or None; programs of SGLang have one engine, with steps."""
    programs = value if isinstance(value, list) else value["programs"]
    engine = "sglang" if "steps" in programs[0] else "vllm"
    return players.player(f"engines/pairs/play_pairs_{engine}.py").played(programs)


def main(paths):
    return players.main(paths, played)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
