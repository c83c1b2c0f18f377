"""The writer of a capture: a file of lines that begins with a header and ends with an end line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from pytest_kvmock.servers.capture.lines import HEADER, VERSION, CaptureError, to_text

NOT_ALLOWED: Final = "cannot be written"


def check_replaceable(path: str | Path, *, overwrite: bool) -> None:
    """Check that a file does not exist, or may be replaced.

    Raises:
        CaptureError: the file exists and may not be replaced.
    """
    if not overwrite and Path(path).is_file():
        raise CaptureError(f"{path}: the file is there already; --overwrite (overwrite=True) replaces it")


class CaptureFile:
    """A file that a capture is written to. An existing file is replaced. It is a context manager.

    Args:
        path: the file; missing folders are made.
        header: the content of the first line, in addition to the version, or a function that returns it, called when
            the first line is written.

    Raises:
        CaptureError: the file cannot be written, here and in all methods. After the first error nothing more is
            written.

    Attributes:
        path: the file.
        events: number of written events.
        error: why the file could not be written; None if there was no error.
    """

    def __init__(self, path: str | Path, header: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> None:
        self.path = Path(path)
        self.events = 0
        self.error: CaptureError | None = None
        self._header: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = header
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", encoding="utf-8", newline="\n")
        except OSError as error:
            raise self._failure(error) from None

    def __repr__(self) -> str:
        return f"<CaptureFile {self.path}: {self.events} events>"

    def write(self, line: Mapping[str, Any]) -> None:
        """Write a line."""
        text = to_text(line) + "\n"
        if self._header is not None:
            header, self._header = self._header, None
            about = header() if callable(header) else header
            text = to_text({HEADER: VERSION, **about}) + "\n" + text
        if self._file.closed:
            return
        try:
            self._file.write(text)
        except OSError as error:
            raise self._give_up(error) from None
        self.events += "event" in line

    def close(self) -> None:
        """Write the last line and close the file. A second call does nothing."""
        if self._file.closed:
            return
        self.write({"end": {"events": self.events}})
        try:
            self._file.close()
        except OSError as error:
            raise self._give_up(error) from None

    def _give_up(self, error: OSError) -> CaptureError:
        with suppress(OSError):  # the buffered lines cannot be written either
            self._file.close()
        self.error = self._failure(error)
        return self.error

    def _failure(self, error: OSError) -> CaptureError:
        return CaptureError(f"{self.path}: {NOT_ALLOWED}: {error.strerror or error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
