"""The output of `--kv-capture`: the events of each test that uses our fixtures, one file per test."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from xxhash import xxh3_64_hexdigest

from pytest_kvmock.plugin.settings import SETTINGS
from pytest_kvmock.servers.capture.harness_capture import HarnessCapture
from pytest_kvmock.servers.capture.lines import CaptureError

if TYPE_CHECKING:
    from pytest_kvmock.engines.backends import EngineProfile

_MOST_NAME: Final = 120


def file_name(nodeid: str, kind: str = "jsonl") -> str:
    """Return the file name of a test: its id in characters that every file system takes, and 8 digits of its hash,
    which keep similar ids apart.
    """
    plain = re.sub(r"[^\w.-]+", "-", nodeid, flags=re.ASCII).strip("-")[-_MOST_NAME:]
    return f"{plain}-{xxh3_64_hexdigest(nodeid.encode(errors='replace'))[:8]}.{kind}"


class TestCapture(HarnessCapture):
    """The capture of one test.

    A test has one file: workers of pytest-xdist do not share one, and a rerun replaces it.
    """

    __test__ = False

    def __init__(self, item: pytest.Item, profile: EngineProfile) -> None:
        directory = item.config.stash[SETTINGS].get("capture")
        path = Path(item.config.invocation_params.dir, directory, file_name(item.nodeid))
        try:
            super().__init__(path, profile, item.nodeid)
        except CaptureError as error:
            pytest.fail(f"kvmock: --kv-capture: {error}", pytrace=False)

    def close(self) -> None:
        """Write the rest; fail a test whose capture could not be written."""
        try:
            super().close()
        except CaptureError as error:
            pytest.fail(f"kvmock: --kv-capture: {error}", pytrace=False)
