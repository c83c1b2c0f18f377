"""What an engine does with its next requests instead of serving them, as a test requests: answer with an error, cut the
connection, or fail polls of its load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from pytest_kvmock.servers.serve.request_checks import BadRequest
from pytest_kvmock.values.checks import check_integer, is_integer

LEAST_STATUS: Final = 400
MOST_STATUS: Final = 599
"""The range of planned statuses: only errors; an engine makes other answers itself."""

_OF_THE_SERVER: Final = frozenset({"content-length", "transfer-encoding", "connection"})
"""Headers that describe how an answer is sent."""

_NAME: Final = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz")
"""Valid characters of a header's name (RFC 9110, section 5.6.2)."""


class PlannedAnswer(NamedTuple):
    """A planned answer.

    Attributes:
        status: its status.
        headers: headers in addition to those of an error.
    """

    status: int
    headers: Mapping[str, str]

    @property
    def error(self) -> BadRequest:
        """The error of its body, with the phrase of HTTP."""
        try:
            phrase = HTTPStatus(self.status).phrase
        except ValueError:  # a status without a standard phrase
            phrase = f"Status {self.status}"
        return BadRequest(phrase, kind=phrase.replace(" ", ""), status=self.status)


class PlannedAnswers:
    """The planned answers and cuts of one worker. Each applies to the next request, in the order of planning."""

    def __init__(self) -> None:
        self._answers: deque[list[Any]] = deque()  # each answer, and how often it remains to be given; None: always
        self._cuts: deque[int] = deque()
        self._polls: int | None = 0

    def plan_answer(self, status: int, headers: Mapping[str, str], times: int | None) -> None:
        """Plan an answer.

        Raises:
            ValueError: a status that is no error, a header that cannot be sent, or a number out of range.
            TypeError: headers that do not map names to texts.
        """
        if not is_integer(status) or not LEAST_STATUS <= status <= MOST_STATUS:
            raise ValueError(
                f"answer: status must be one of an error, an integer from {LEAST_STATUS} to {MOST_STATUS}, got "
                f"{status!r:.80}"
            )
        _check_headers(headers)
        if times is not None:
            check_integer("answer: times", times, 1)
        self._answers.append([PlannedAnswer(status, dict(headers)), times])

    def plan_cut(self, after_chunks: int) -> None:
        """Plan a cut.

        Raises:
            ValueError: `after_chunks` is no integer of at least 0.
        """
        self._cuts.append(check_integer("cut: after_chunks", after_chunks, 0))

    def plan_polls(self, times: int | None = 1) -> None:
        """Plan that polls of the load fail.

        Args:
            times: number of polls; None: each poll until `clear`.

        Raises:
            ValueError: `times` is no integer of at least 1.
        """
        if times is not None:
            check_integer("fail_polls: times", times, 1)
        self._polls = times

    def take_poll(self) -> BadRequest | None:
        """Return the error of the current poll; None if it is answered normally."""
        if self._polls == 0:
            return None
        if self._polls is not None:
            self._polls -= 1
        return PlannedAnswer(503, {}).error

    def take_answer(self) -> PlannedAnswer | None:
        """Return the planned answer to the current request; None if it is served."""
        if not self._answers:
            return None
        first = self._answers[0]
        if first[1] is not None:
            first[1] -= 1
            if not first[1]:
                self._answers.popleft()
        answer: PlannedAnswer = first[0]
        return answer

    def take_cut(self, *, streams: bool) -> int | None:
        """Return after how many chunks the current request is cut; None if it is not cut. A request that does not
        stream has no chunk before its end.
        """
        if not self._cuts or (self._cuts[0] and not streams):
            return None
        return self._cuts.popleft()

    def clear(self) -> None:
        """Cancel all planned answers, cuts and failing polls."""
        self._answers.clear()
        self._cuts.clear()
        self._polls = 0

    @property
    def unused(self) -> list[str]:
        """The planned answers, cuts and polls that were not used up, as text; those for all requests do not count."""
        return [
            *(f"answer {answer.status} ({left} left)" for answer, left in self._answers if left is not None),
            *(f"cut after {chunks} {'chunk' if chunks == 1 else 'chunks'}" for chunks in self._cuts),
            *([f"fail_polls ({self._polls} left)"] if self._polls else []),
        ]


def _check_headers(headers: object) -> None:
    """Check that an answer can have these headers in addition to its own."""
    shape = '{"Retry-After": "1"}'
    if not isinstance(headers, Mapping):
        raise TypeError(f"answer: headers must be names with texts, as in {shape}, got {headers!r:.80}")
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"answer: headers must be names with texts, as in {shape}, got {name!r:.80}: {value!r:.80}")
        if not name or not _NAME.issuperset(name.lower()):
            raise ValueError(f"answer: {name!r:.80} is not the name of a header")
        if name.lower() in _OF_THE_SERVER:
            raise ValueError(f"answer: header {name!r} says how an answer is sent; only the server sets it")
        if not value.isascii() or not value.isprintable():
            raise ValueError(f"answer: header {name!r:.80} must be printable ASCII, got {value!r:.80}")
