"""How deep the tests look: quick as README runs them, deep where the environment variable KVMOCK_DEEP is 1.

Deep is what CI runs once. It differs in six things, and each has its rule here: how many examples of a property are
tried, how many seeds of a random test, how many values of a parameter that has many alike, whether a recording of a
whole trace is played to its end, whether a test is run that takes long (a long search, or processes of xdist), and with
how many of its parameters a test runs. In a quick run a test of a room other than `plugin` has its first parameters
alone, unless it says `@each_parameter`.
"""

import os
import time

import pytest

DEEP = os.environ.get("KVMOCK_DEEP") == "1"

QUICK_SHARE = 10  # of the deep examples, one in so many
FEWEST_EXAMPLES = 10
QUICK_SEEDS = 5


def examples(deep):
    """How many examples of a property are tried, that has `deep` of them in a deep run."""
    return deep if DEEP else max(min(deep, FEWEST_EXAMPLES), deep // QUICK_SHARE)


def seeds(deep):
    """The seeds of a random test, the first ones in any run. They are parameters: the id of what fails has its seed."""
    return range(deep if DEEP else min(deep, QUICK_SEEDS))


def few(values, quick=1):
    """The values of a parameter that are many of one kind, in a quick run `quick` of them, spread evenly over all."""
    values = list(values)
    return values if DEEP or quick >= len(values) else [values[n * len(values) // quick] for n in range(quick)]


MOST_CPU_S = 1.5
"""What a test of a quick run may take, unless it says `@worth_its_time`; held by `--most-cpu`, as CI runs it. Seconds
of a machine on which `_fixed_work` takes `FIXED_WORK_S`: one that others share may need twice the CPU time."""
FIXED_WORK_S = 0.04


def most_cpu_now():
    """`MOST_CPU_S` at the speed that this machine has now."""
    return MOST_CPU_S * max(1.0, *(_fixed_work() / FIXED_WORK_S for _ in range(3)))


def _fixed_work():
    """The CPU seconds of a loop that is always the same."""
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
    """Collect a class of tests in a deep run alone: contracts have 99 tests, and each would be a skip to read."""
    test_class.__test__ = DEEP
    return test_class


whole_trace = pytest.mark.skipif(not DEEP, reason="a whole trace is played where KVMOCK_DEEP=1")
takes_long = pytest.mark.skipif(not DEEP, reason="what takes long is run where KVMOCK_DEEP=1")
