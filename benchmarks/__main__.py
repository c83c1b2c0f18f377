"""Measure the figures, each beside its peer where this environment has it, and write them to RESULTS.md.

    python -m benchmarks                 all that can be measured here
    python -m benchmarks index verdict   some of the groups
    python -m benchmarks --quick         a minute, which writes nothing: 1 where a ratio of the group "quick" has more than halved

Dynamo 1.2.1 and 1.6.1 cannot be in one process: run it once in an environment of each. A run replaces the rows that it
measured and leaves the others. `results.json` has the same as data.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import (
    block_manager,
    collector,
    engines,
    fleet,
    index,
    manager,
    mooncake,
    plugin_cost,
    quick,
    reduce,
    serve,
    tiers,
    tokens,
    verdict,
    wire,
    wire_clients,
    workers,
)
from benchmarks.measure import NotHere, TableRow

GROUPS = {
    "import": (plugin_cost.import_cost,),
    "unused": (plugin_cost.unused_cost,),
    "used": (plugin_cost.used_cost,),
    "manager": (manager.speed, manager.beside_rust, manager.memory),
    "block_manager": (block_manager.speed, block_manager.memory),
    "workers": (workers.speed, workers.beside_real_engines, workers.memory),
    "verdict": (verdict.with_ledger_and_index, verdict.with_an_index_asked_after_every_event),
    "tokens": (tokens.hashes,),
    "index": (index.speed, index.memory),
    "trace": (verdict.mooncake,),
    "mooncake": (mooncake.whole_blocks, mooncake.as_long_as_they_were),
    "tiers": (tiers.host,),
    "engines": (engines.shared_workload, engines.mooncake, engines.scheduler_matrix),
    "fleet": (fleet.speed, fleet.memory, fleet.one_test),
    "reduce": (reduce.events, reduce.requests),
    "serve": (serve.ready, serve.traffic),
    "wire": (wire.codec,),
    "clients": (wire_clients.publish_to_applied,),
    "collector": (collector.gained,),
    "quick": (quick.ratios,),
}
HOME = Path(__file__).parent
HEAD = """# Figures

Measured by `python -m benchmarks`, which rewrites this file; by hand nothing here changes. Ratios are of medians from
alternating runs in one process: CPU time where one thread does the work, the wall clock beside RadixTree, which has its
own. "load" is that of the machine before the run: above 1 the figures are worse than they would be. The workload, where none is named: 10,000
requests of 32 blocks of 16 tokens, half of each shared by one of 64 groups, one at a time, capacity 8,192 blocks.

| figure | bar "first" | measured | | peer | command | when and where |
|---|---|---|---|---|---|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("groups", nargs="*", metavar="group", help=f"one of {', '.join(GROUPS)}; all by default")
    parser.add_argument(
        "--quick", action="store_true", help="compare the group quick with what is recorded, and write nothing"
    )
    given = parser.parse_args()
    chosen = given.groups or list(GROUPS)
    if unknown := set(chosen) - set(GROUPS):
        parser.error(f"unknown group {', '.join(sorted(unknown))}; known: {', '.join(GROUPS)}")
    path = HOME / "results.json"
    rows = json.loads(path.read_text()) if path.is_file() else {}
    if given.quick:
        if given.groups:
            parser.error("--quick takes no groups")
        fallen = quick.falls(rows)
        for line in fallen:
            print(f"FALLEN: {line}", file=sys.stderr)
        return 1 if fallen else 0
    place = f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    for group in chosen:
        for measure in GROUPS[group]:
            start = time.monotonic()
            try:
                for figure in measure():
                    if isinstance(figure, TableRow):
                        print(" | ".join(figure.cells.values()), flush=True)
                    else:
                        print(f"{figure.name}: {figure.measured}{_mark(figure.met)}  {figure.peer}", flush=True)
                    command = f"python -m benchmarks {group}"
                    rows[figure.name] = dataclasses.asdict(figure) | {"command": command, "place": place}
            except NotHere as reason:
                print(f"{group}: not measured here: {reason}", file=sys.stderr)
            print(f"  ({group}, {measure.__name__}: {time.monotonic() - start:.0f} s)", flush=True)
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    (HOME / "RESULTS.md").write_text(_document(rows))
    return 0


def _mark(met: bool | None) -> str:
    return "" if met is None else " (reached)" if met else " (MISSED)"


def _document(rows: dict[str, dict]) -> str:
    lines = [HEAD.rstrip("\n")]
    figures = [row for row in rows.values() if "table" not in row]
    for row in figures:
        met = {True: "reached", False: "**missed**", None: ""}[row["met"]]
        cells = (row["name"], row["bar"], row["measured"], met, row["peer"], f"`{row['command']}`", row["place"])
        lines.append("| " + " | ".join(cells) + " |")
    tables: dict[str, list[dict]] = {}
    for row in rows.values():
        if "table" in row:
            tables.setdefault(row["table"], []).append(row)
    for title, of_table in tables.items():
        lines += ["", f"## {title}", "", f"`{of_table[-1]['command']}`, {of_table[-1]['place']}.", ""]
        heads = list(of_table[-1]["cells"])
        lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        lines += ["| " + " | ".join(row["cells"].values()) + " |" for row in of_table]
    missed = [row for row in figures if row["met"] is False and row["profile"]]
    if missed:
        lines += [
            "",
            "## Where the time goes",
            "",
            "Of each figure that misses its bar, by `cProfile`: the functions' own time.",
        ]
    for row in missed:
        lines += ["", f"{row['name']}:", "", "```", row["profile"], "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
