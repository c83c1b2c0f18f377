"""The capture of one harness: a file that its journal writes; the first line describes its engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from pytest_kvmock.servers.capture.capture_file import CaptureFile
from pytest_kvmock.servers.capture.capturing_journal import CapturingJournal
from pytest_kvmock.servers.capture.lines import CaptureError, header

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_kvmock.engines.backends import EngineProfile
    from pytest_kvmock.harness import RouterHarness
    from pytest_kvmock.values.events import StreamKey


class HarnessCapture:
    """A capture of the events of a harness.

    The capture is made first, because the harness is made with its journal.

    Args:
        path: the file; an existing file is replaced.
        profile: the profile of the harness.
        test: the name of the test, for the first line.

    Raises:
        CaptureError: the file cannot be written.

    Attributes:
        journal: the journal that writes it.
    """

    def __init__(self, path: Path, profile: EngineProfile, test: str) -> None:
        self._profile = profile
        self._test = test
        self._harness: RouterHarness | None = None
        self._file = CaptureFile(path, self._header)
        self.journal = CapturingJournal(self._file, self._backend_of)

    def of(self, harness: RouterHarness) -> Self:
        """Set the harness that has the journal. It must not have published anything yet."""
        self._harness = harness
        return self

    @property
    def error(self) -> CaptureError | None:
        """Why the file could not be written; None if there was no error so far."""
        return self._file.error

    def close(self) -> None:
        """Write the rest.

        Raises:
            CaptureError: the file could not be written.
        """
        self._file.close()

    def _header(self) -> Mapping[str, Any]:
        harness = self._harness
        backend = None if harness is None else harness.backend
        engine = None
        if harness is not None and backend is not None:
            engine = {"backend": backend, "models": harness.recording.backends[backend].models}
        profile = self._profile if harness is None else harness.profile
        return header(engine, profile.seed, profile=asdict(profile), test=self._test)

    def _backend_of(self, key: StreamKey) -> str | None:
        workers: Mapping[Any, Any] = {} if self._harness is None else self._harness.workers
        worker = workers.get(key) or workers.get(key[0])
        return None if worker is None else str(worker.backend)
