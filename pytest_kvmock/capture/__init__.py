"""Streams of KV events to and from files: captures of tests and of real engines, and checks of them.

`python -m pytest_kvmock` is the command over it.
"""

from pytest_kvmock.capture.capture_file import CaptureFile
from pytest_kvmock.capture.capturing_journal import CapturingJournal
from pytest_kvmock.capture.check import Checked, check_file
from pytest_kvmock.capture.lines import VERSION, CaptureError
from pytest_kvmock.capture.recorder import Recorded, record

__all__ = [
    "VERSION",
    "CaptureError",
    "CaptureFile",
    "CapturingJournal",
    "Checked",
    "Recorded",
    "check_file",
    "record",
]
