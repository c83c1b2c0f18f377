"""The client of a router process under contract: the requests that it sends, and the answers, part by part."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

DONE: Final = "[DONE]"
"""The data of the event that ends a stream."""


@dataclass(slots=True)
class Reply:
    """The answer to a request.

    Attributes:
        status: the status of the answer; None: the connection was closed before an answer.
        headers: the headers, by names in lower case.
        body: the received part of the body.
        is_whole: whether the body is complete by the rules of HTTP.
        error: the error that ended it early; "": none.
    """

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_whole: bool = False
    error: str = ""

    @property
    def chunks(self) -> list[str]:
        """The data of each complete event of a stream, including its end."""
        *events, _ = self.body.decode(errors="replace").replace("\r\n", "\n").split("\n\n")
        return [each.removeprefix("data:").strip() for each in events if each.startswith("data:")]

    @property
    def is_finished(self) -> bool:
        """Whether a stream is finished: it has the final event, or a finish reason."""
        return any(each == DONE or finish_reason_of(each) is not None for each in self.chunks)

    @property
    def reports_error(self) -> bool:
        """Whether a stream has an event that is an error, as OpenAI's clients read it."""
        return any('"error"' in each for each in self.chunks)

    @property
    def has_an_end(self) -> bool:
        """Whether the answer's form marks its end; without a mark, only the closed connection shows it."""
        return "chunked" in self.headers.get("transfer-encoding", "") or "content-length" in self.headers

    @property
    def generated(self) -> str:
        """The generated text of an answer in OpenAI's form; "" if there is none."""
        parts = self.chunks or [self.body.decode(errors="replace")]
        return "".join(_text_of(each) for each in parts)

    @property
    def text(self) -> str:
        """The answer as text for a message."""
        if self.status is None:
            return f"no answer ({self.error})"
        return f"{self.status} {self.body[:200]!r}" + (f", and then {self.error}" if self.error else "")


def finish_reason_of(chunk: str) -> str | None:
    """Return the finish reason of a chunk's choice; None if it has none, or is not a chunk."""
    try:
        choices = json.loads(chunk)["choices"]
        return next((each["finish_reason"] for each in choices if each.get("finish_reason")), None)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _text_of(part: str) -> str:
    try:
        return "".join(_text_of_choice(each) for each in json.loads(part)["choices"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


def _text_of_choice(choice: Mapping[str, Any]) -> str:
    """Return the text of a choice of a completion or chat, whole or part of a stream."""
    said = choice.get("message") or choice.get("delta") or {}
    return str(choice.get("text") or said.get("content") or "")


class PendingReply:
    """A request that was sent; its answer is read on demand.

    Args:
        url: the server.
        path: path of the request.
        body: an object, sent as JSON.
        headers: headers of the request.
        timeout: seconds for each part of the answer.

    Attributes:
        path: as above.
        body: as above.
        reply: the received part of its answer.
    """

    def __init__(self, url: str, path: str, body: Any, headers: Mapping[str, str], timeout: float) -> None:
        self.path, self.body = path, body
        self.reply = Reply()
        self._answer: http.client.HTTPResponse | None = None
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout)
        try:
            self._connection.request(
                "POST", path, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
            )
        except OSError as error:
            self._ended(error)

    def _ended(self, error: Exception) -> None:
        self.reply.error = f"{type(error).__name__}: {' '.join(str(error).split())}"

    def _begun(self) -> http.client.HTTPResponse | None:
        """Return the answer once its headers are there; None if there is no answer."""
        reply = self.reply
        if self._answer is None and not reply.error:
            try:
                self._answer = self._connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                self._ended(error)
            else:
                reply.status = self._answer.status
                reply.headers = {name.lower(): value for name, value in self._answer.headers.items()}
        return self._answer

    def _read_on(self) -> bool:
        """Read what has arrived, or wait for more; return False at the end."""
        answer = self._begun()
        if answer is None or self.reply.error or self.reply.is_whole:
            return False
        try:
            data = answer.read1(2**16)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._ended(error)
            return False
        self.reply.body += data
        if data:
            return True
        # A body with a length is whole when all bytes came; one without ends with its connection.
        self.reply.is_whole = not answer.length
        if not self.reply.is_whole:
            self.reply.error = f"the connection was closed, and {answer.length} bytes were missing"
        return False

    def chunks(self, count: int) -> list[str]:
        """Return the first `count` events of a stream; fewer if it ended, or no more came in time."""
        while len(self.reply.chunks) < count and self._read_on():
            pass
        return self.reply.chunks[:count]

    def finish(self) -> Reply:
        """Read the answer to its end, and return it."""
        while self._read_on():
            pass
        self.close()
        return self.reply

    def close(self) -> None:
        """Close the connection, even if the answer is not complete."""
        if self._answer is not None:  # the answer holds the socket, too
            with suppress(OSError):
                self._answer.close()
        self._connection.close()


def openai_completion(
    model: str,
    prompt: str,
    *,
    max_tokens: int = 1,
    stream: bool = False,
    cache_salt: str | None = None,
    lora_name: str | None = None,
) -> dict[str, Any]:
    """Return the body of a completion as OpenAI's clients send it, with vLLM's salt."""
    salt = {} if cache_salt is None else {"cache_salt": cache_salt}
    return {"model": lora_name or model, "prompt": prompt, "max_tokens": max_tokens, "stream": stream, **salt}


def openai_chat(
    model: str, messages: Sequence[Mapping[str, Any]], *, lora_name: str | None = None, **options: Any
) -> dict[str, Any]:
    """Return the body of a chat as OpenAI's clients send it, with the options of `openai_completion`."""
    body = openai_completion(model, "", lora_name=lora_name, **options)
    return {"messages": list(messages)} | {name: value for name, value in body.items() if name != "prompt"}
