"""Measure the figures, against peers that this environment has, and write them to RESULTS.md and its plot.

    python -m benchmarks                 all figures that can be measured here
    python -m benchmarks index verdict   some of the groups
    python -m benchmarks scaling --blocks 65536 --workers 64 --requests 4096    cost per block up to these sizes, plotted
    python -m benchmarks --quick         takes a minute, writes nothing: exits with 1 if a ratio of the group "quick" has more than halved

Dynamo 1.2.1 and 1.6.1 cannot be in one process: run it once in an environment of each. A run replaces the rows that it
measured and keeps the others. `results.json` has the same data.
"""  # noqa: E501, W505

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
    as_typed,
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
    scaling,
    serve,
    tiers,
    tokens,
    verdict,
    wire,
    wire_clients,
    workers,
)
from benchmarks.measure import NotHere
from benchmarks.page import AXES, document, plot

GROUPS = {
    "import": (plugin_cost.import_cost,),
    "unused": (plugin_cost.unused_cost,),
    "used": (plugin_cost.used_cost,),
    "manager": (manager.beside_rust, manager.beside_replay, manager.memory),
    "block_manager": (block_manager.memory,),
    "workers": (workers.beside_real_engines, workers.memory),
    "verdict": (verdict.with_an_index,),
    "tokens": (tokens.hashes,),
    "index": (index.speed, index.memory),
    "mooncake": (mooncake.whole_blocks, mooncake.as_long_as_they_were),
    "tiers": (tiers.host,),
    "engines": (engines.shared_workload, engines.mooncake, engines.newest),
    "as_typed": (as_typed.replays,),
    "fleet": (fleet.speed, fleet.memory, fleet.one_test),
    "reduce": (reduce.events, reduce.requests),
    "serve": (serve.ready, serve.traffic),
    "wire": (wire.codec,),
    "clients": (wire_clients.publish_to_applied,),
    "collector": (collector.gained,),
    "quick": (quick.ratios,),
    "scaling": (scaling.blocks, scaling.workers, scaling.requests),
}
HOME = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("groups", nargs="*", metavar="group", help=f"one of {', '.join(GROUPS)}; all by default")
    parser.add_argument(
        "--quick", action="store_true", help="compare the group quick with what is recorded, and write nothing"
    )
    for axis, (what, _, largest) in AXES.items():
        parser.add_argument(f"--{axis}", type=int, default=largest, metavar="N", help=f"scaling: up to so many {what}")
    given = parser.parse_args()
    chosen = given.groups or list(GROUPS)
    if unknown := set(chosen) - set(GROUPS):
        parser.error(f"unknown group {', '.join(sorted(unknown))}; known: {', '.join(GROUPS)}")
    path = HOME / "results.json"
    rows = json.loads(path.read_text()) if path.is_file() else {}
    for axis, (_, smallest, _) in AXES.items():
        if getattr(given, axis) < smallest:
            parser.error(f"--{axis} is {getattr(given, axis)}, and the smallest that is measured is {smallest}")
    if given.quick:
        if given.groups:
            parser.error("--quick takes no groups")
        fallen = quick.falls(rows)
        for line in fallen:
            print(f"FALLEN: {line}", file=sys.stderr)
        return 1 if fallen else 0
    place = f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"  # noqa: E501
    for group in chosen:
        if group == "scaling":  # sizes that this run leaves out would refer to another run's smallest size
            rows = {key: row for key, row in rows.items() if not row["command"].endswith(" scaling")}
        for measure in GROUPS[group]:
            start = time.monotonic()
            try:
                for figure in measure(getattr(given, measure.__name__)) if group == "scaling" else measure():
                    beside = f" beside {figure.peer}" if figure.peer else ""
                    print(f"{figure.key}: {figure.shown}{' (MISSED)' * figure.missed}{beside}", flush=True)
                    rows[figure.key] = dataclasses.asdict(figure) | {
                        "command": f"python -m benchmarks {group}",
                        "place": place,
                    }
            except NotHere as reason:
                print(f"{group}: not measured here: {reason}", file=sys.stderr)
            print(f"  ({group}, {measure.__name__}: {time.monotonic() - start:.0f} s)", flush=True)
    order = list(GROUPS)
    rows = dict(sorted(rows.items(), key=lambda row: order.index(row[1]["command"].rpartition(" ")[2])))
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    (HOME / "RESULTS.md").write_text(document(rows.values()))
    (HOME / "scaling.svg").write_text(plot(rows.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
