"""What `--kv-capture` writes: the events of each test that has any of our fixtures, a file a test."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import pytest
from xxhash import xxh3_64_hexdigest

from pytest_kvmock.capture.capture_file import CaptureFile
from pytest_kvmock.capture.capturing_journal import CapturingJournal
from pytest_kvmock.capture.lines import CaptureError, header
from pytest_kvmock.plugin.settings import SETTINGS

if TYPE_CHECKING:
    from pytest_kvmock.backends import EngineProfile
    from pytest_kvmock.events import StreamKey
    from pytest_kvmock.harness import RouterHarness

_MOST_NAME: Final = 120


def capture_name(nodeid: str) -> str:
    """The name of a test's file: its id in what every file system takes, and 8 digits of its hash, as two ids may look alike so."""
    plain = re.sub(r"[^\w.-]+", "-", nodeid, flags=re.ASCII).strip("-")[-_MOST_NAME:]
    return f"{plain}-{xxh3_64_hexdigest(nodeid.encode(errors='replace'))[:8]}.jsonl"


class TestCapture:
    """The capture of one test.

    A test has one file, whoever runs it: the workers of pytest-xdist do not meet, and a rerun replaces what was there.

    Attributes:
        journal: the journal that writes it.
    """

    __test__ = False

    def __init__(self, item: pytest.Item, profile: EngineProfile) -> None:
        directory = item.config.stash[SETTINGS].get("capture")
        path = Path(item.config.invocation_params.dir, directory, capture_name(item.nodeid))
        self._item, self._profile = item, profile
        self._harness: RouterHarness | None = None
        try:
            self._file = CaptureFile(path, self._header)
        except CaptureError as error:
            pytest.fail(f"kvmock: --kv-capture: {error}", pytrace=False)
        self.journal = CapturingJournal(self._file, self._backend_of)

    def of(self, harness: RouterHarness) -> Self:
        """Name the harness whose journal it is; nothing was published in it."""
        self._harness = harness
        return self

    def close(self) -> None:
        """Write the rest; a test whose capture could not be written fails."""
        try:
            self._file.close()
        except CaptureError as error:
            pytest.fail(f"kvmock: --kv-capture: {error}", pytrace=False)

    def _header(self) -> Mapping[str, Any]:
        harness = self._harness
        backend = None if harness is None else harness.backend
        engine = None
        if harness is not None and backend is not None:
            engine = {"backend": backend, "models": harness.recording.backends[backend].models}
        profile = self._profile if harness is None else harness.profile
        return header(engine, profile.seed, profile=asdict(profile), test=self._item.nodeid)

    def _backend_of(self, key: StreamKey) -> str | None:
        workers = {} if self._harness is None else self._harness.workers
        worker = workers.get(key) or workers.get(key[0])
        return None if worker is None else worker.backend
