"""The bugs planted in a right router, from `examples/bug_catalogue/`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples" / "bug_catalogue"))

from router_bugs import (
    ROUTER_BUGS,
    CountedTwice,
    DeadWorkerKept,
    LoraBlind,
    NeverFreed,
    NeverMatches,
    NewWorkerNotLearnt,
    RanksSummed,
    StaleIndex,
)

__all__ = [
    "ROUTER_BUGS",
    "CountedTwice",
    "DeadWorkerKept",
    "LoraBlind",
    "NeverFreed",
    "NeverMatches",
    "NewWorkerNotLearnt",
    "RanksSummed",
    "StaleIndex",
]
