"""Indexes that misread full reports."""

from contract_runs import Mutants
from forgetful_indexes import over

from pytest_kvmock import RadixIndex, Removed, Stored
from pytest_kvmock.testing import IndexContract

REPORTED = Mutants(IndexContract)


class NoRemovedAfterAReport(RadixIndex):
    """Ignores each Removed."""

    def apply(self, event):
        if not isinstance(event.event.data, Removed):
            super().apply(event)


class BelievesReports(RadixIndex):
    """Never removes a block that was stored from the root twice."""

    def __init__(self):
        super().__init__(count_copies=True)
        self.seen, self.kept = set(), set()

    def apply(self, event):
        data = event.event.data
        if isinstance(data, Stored) and data.parent_hash is None:
            self.kept |= self.seen & {*data.block_hashes}
            self.seen |= {*data.block_hashes}
        if not (isinstance(data, Removed) and self.kept & {*data.block_hashes}):
            super().apply(event)


class EndsAtAReport(RadixIndex):
    """Takes a Stored of a held block for its removal."""

    def apply(self, event):
        data = event.event.data
        if isinstance(data, Stored) and data.parent_hash is None:
            held = self.find_matches(data.tokens_hashes).scores
            if held.get((event.worker_id, 0), 0) == len(data.block_hashes):
                self.remove(event.worker_id, 0, data.block_hashes)
                return
        super().apply(event)


class LearnsNothingFromReports(RadixIndex):
    """Ignores a Stored from the root if its first block is held."""

    def apply(self, event):
        data = event.event.data
        if isinstance(data, Stored) and data.parent_hash is None and self.find_matches(data.tokens_hashes[:1]).scores:
            return
        super().apply(event)


COPY = "test_a_report_is_no_more_than_a_copy"
for subject, test in {
    NoRemovedAfterAReport: COPY,
    BelievesReports: COPY,
    EndsAtAReport: "test_reports_of_live_traffic_are_answered_between_set_and_count",
    LearnsNothingFromReports: "test_a_report_teaches_what_lost_events_had_said",
}.items():
    REPORTED.breaks(test)(over(subject, full_reports=True))
