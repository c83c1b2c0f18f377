"""A capture that is being written: a file of lines, with a header first and an end last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from pytest_kvmock.servers.capture.lines import HEADER, VERSION, CaptureError, to_text

NOT_ALLOWED: Final = "cannot be written"


def check_replaceable(path: str | Path, *, overwrite: bool) -> None:
    """Raise where a file is there already, and is not to be replaced.

    Raises:
        CaptureError: it is.
    """
    if not overwrite and Path(path).is_file():
        raise CaptureError(f"{path}: the file is there already; --overwrite (overwrite=True) replaces it")


class CaptureFile:
    """A file that a capture is written to; what stood there before is replaced. A context manager.

    Args:
        path: where; folders that there are not are made.
        header: what the first line says in addition to the version, or returns it. It is asked for when the first line
            comes.

    Raises:
        CaptureError: the file cannot be written, here and in all methods. After the first time nothing more is written.

    Attributes:
        path: the file.
        events: how many events were written.
        error: why it could not be written; None: it could.
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
        """Write the last line and close the file. Calling it twice is not an error."""
        if self._file.closed:
            return
        self.write({"end": {"events": self.events}})
        try:
            self._file.close()
        except OSError as error:
            raise self._give_up(error) from None

    def _give_up(self, error: OSError) -> CaptureError:
        with suppress(OSError):  # what is buffered cannot be written either
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
