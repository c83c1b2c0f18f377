"""The depth of a test run: quick as README runs it, deep if the environment variable KVMOCK_DEEP is 1.

CI makes one deep run. It differs in six things, and this module has the rule of each: the number of examples of a
property, the number of seeds of a random test, the number of values of a parameter with many similar values, whether a
recording of a whole trace is played to its end, whether a long test runs (a long search, or processes of xdist), and
with how many of its parameters a test runs. In a quick run a test of a folder other than `plugin` has only its first
parameters, unless it is marked `@each_parameter`.
"""

import os
import time

import pytest

DEEP = os.environ.get("KVMOCK_DEEP") == "1"

QUICK_SHARE = 10  # a quick run tries one in this many of the deep examples
FEWEST_EXAMPLES = 10
QUICK_SEEDS = 5


def examples(deep):
    """Return how many examples of a property to try, if a deep run tries `deep` of them."""
    return deep if DEEP else max(min(deep, FEWEST_EXAMPLES), deep // QUICK_SHARE)


def seeds(deep):
    """Return the seeds of a random test, always the first ones. As parameters they are in the id of a failed test."""
    return range(deep if DEEP else min(deep, QUICK_SEEDS))


def few(values, quick=1):
    """Return the values of a parameter with many similar ones; in a quick run `quick` of them, spread evenly."""
    values = list(values)
    return values if DEEP or quick >= len(values) else [values[n * len(values) // quick] for n in range(quick)]


MOST_CPU_S = 1.5
"""CPU seconds that a test of a quick run may take unless marked `@worth_its_time`; CI checks it with `--most-cpu`.
The seconds are of a machine on which `_fixed_work` takes `FIXED_WORK_S`: a shared one may need twice the CPU time."""
FIXED_WORK_S = 0.04


def most_cpu_now():
    """Return `MOST_CPU_S` at the present speed of this machine."""
    return MOST_CPU_S * max(1.0, *(_fixed_work() / FIXED_WORK_S for _ in range(3)))


def _fixed_work():
    """Return the CPU seconds of a loop that is always the same."""
    began = time.process_time()
    table = {}
    for at in range(200_000):
        table[at % 977] = hash((at, table.get(at % 31)))
    return time.process_time() - began


MARKERS = {
    "each_parameter": "each value of its parameters is a case of its own: a quick run has them all",
    "worth_its_time": f"it may take more than {MOST_CPU_S:g} s of CPU time in a quick run, where nothing less shows "
    "the same",
}

each_parameter = pytest.mark.each_parameter
worth_its_time = pytest.mark.worth_its_time


def only_deep(test_class):
    """Collect a class of tests only in a deep run: contracts have 99 tests, and a quick run would list 99 skips."""
    test_class.__test__ = DEEP
    return test_class


whole_trace = pytest.mark.skipif(not DEEP, reason="a whole trace is played where KVMOCK_DEEP=1")
takes_long = pytest.mark.skipif(not DEEP, reason="what takes long is run where KVMOCK_DEEP=1")
