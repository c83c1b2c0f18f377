"""Gaps between tokens in a report: after a handoff the second token may come before the first."""

import pytest

from pytest_kvmock.fleets.report.figures import Rows
from pytest_kvmock.fleets.report.rows import RunFacts


class Served:
    def __init__(self, *token_ms):
        self.token_ms = [*token_ms]


@pytest.mark.parametrize(("by_1_6", "gaps"), [(True, [0.0, 3.0, 1.0]), (False, [-2.0, 3.0, 1.0])])
def test_a_negative_gap_of_a_handoff_counts_as_zero_in_1_6(by_1_6, gaps):
    done = [Served(5.0, 3.0, 6.0), Served(7.0), Served(8.0, 9.0)]
    rows = Rows(RunFacts(16, sketches=by_1_6), arrived=3, done=done)
    assert gaps == [*rows.gaps]
    assert gaps == [*rows.values("itl")]
