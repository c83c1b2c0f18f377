"""Recording of an engine whose events are polled over HTTP, such as TensorRT-LLM's `POST /kv_cache_events`.

An answer empties the engine's buffer, so a recorder replaces the router and cannot run next to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from pytest_kvmock.oracle.hygiene.entries import Opened
from pytest_kvmock.oracle.hygiene.stream_spec import StreamSpec
from pytest_kvmock.wire.codec.trtllm_json import read_events

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_kvmock.oracle.hygiene.ledger import Ledger
    from pytest_kvmock.values.events import RouterEvent
    from pytest_kvmock.wire.codec.defects import WireProblem

PATH: Final = "/kv_cache_events"

_ANSWER: Final = 5.0
"""Time limit of an answer, in seconds."""


class Polled:
    """Polls an engine for its events.

    Args:
        url: the address of the engine: "http://HOST:PORT", with or without the path.
        ledger: opens the streams of its ranks.
        spec: the spec of these streams.
        judge: called with each event.

    Raises:
        ValueError: `url` is not an HTTP address.

    Attributes:
        problems: the errors in answers.
        answers: number of answers with events.
        silence: why the last poll was not answered; "" if it was.
    """

    def __init__(self, url: str, ledger: Ledger, spec: StreamSpec, judge: Callable[[RouterEvent], None]) -> None:
        found = urlsplit(url) if isinstance(url, str) else None
        if found is None or found.scheme != "http" or not found.hostname or found.path not in ("", "/", PATH):
            raise ValueError(f"an engine whose events are polled is at http://HOST:PORT, got {url!r:.80}")
        self._url = f"http://{found.netloc}{PATH}"
        self._ledger, self._spec, self._judge = ledger, spec, judge
        self._windows: set[int] = set()
        self.problems: list[WireProblem] = []
        self.answers = 0
        self.silence = ""

    def poll(self) -> None:
        """Poll once, and judge the events of the answer."""
        request = Request(self._url, b"{}", {"content-type": "application/json"})  # noqa: S310 - it is http
        try:
            with urlopen(request, timeout=_ANSWER) as answer:  # noqa: S310 - as above
                payload = answer.read()
        except (URLError, OSError) as error:
            self.silence = f"no answer from {self._url} ({getattr(error, 'reason', error)})"
            return
        self.silence = ""
        events, count = read_events(payload, 0, self.problems, self._windows)
        self.answers += bool(count)
        for event in events:
            if event.key not in self._ledger.streams:
                self._ledger.take(Opened(event.key, None, self._spec))
            self._judge(event)
