"""What a run leaves: rows, figures as one table, and the report that prints, writes, compares and requires them."""

from pytest_kvmock.report.comparison import Comparison
from pytest_kvmock.report.regret import Regret
from pytest_kvmock.report.report import Report
from pytest_kvmock.report.rows import Objectives, PassSample, Pick, PickRecord

__all__ = ["Comparison", "Objectives", "PassSample", "Pick", "PickRecord", "Regret", "Report"]
