"""The two legs of a request that a pair of SGLang serves, and the engines' answers to them.

A room is a number that a router gives both legs. Each engine keeps its leg. `SglangRooms`, or a test that drives only
one engine, records in the leg what the other side did.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal, TypeAlias

from pytest_kvmock.engines.sglang.hybrid_request import HybridRequest

Polled: TypeAlias = Literal["handshake", "ready", "arrived", "failed"]
"""State of a leg's sender or receiver (`KVPoll`).

In order: the handshake is under way; it is done; the transfer is done; handshake or transfer failed.
"""


@dataclass(frozen=True, slots=True)
class LegAnswer:
    """An engine's answer to a leg.

    Attributes:
        name: name of the leg.
        finish: "length": it has its tokens; "error": with an HTTP status; "abort": the client left.
        status: the HTTP status; None if the client left.
        message: the error message; "" if there is none.
    """

    name: str
    finish: Literal["length", "error", "abort"]
    status: int | None = HTTPStatus.OK
    message: str = ""

    @classmethod
    def failed(cls, leg: SglangLeg, what: str) -> LegAnswer:
        """Answer a leg with the failure of `what`: "Prefill bootstrap failed for request …"."""
        message = f"{what} failed for request {leg.name} (bootstrap_room={leg.room})"
        return cls(leg.name, "error", HTTPStatus.INTERNAL_SERVER_ERROR, message)

    @classmethod
    def too_long(cls, leg: SglangLeg, most: int) -> LegAnswer:
        """Answer a leg whose prompt is longer than the pool."""
        what = f"Request {leg.name} exceeds the maximum number of tokens"
        message = f"{what}: {leg.prompt_tokens} > {most}"
        return cls(leg.name, "error", HTTPStatus.BAD_REQUEST, message)

    @classmethod
    def called_off(cls, leg: SglangLeg) -> LegAnswer:
        """Answer a leg whose client left."""
        return cls(leg.name, "abort", None)


@dataclass(frozen=True, slots=True)
class SentPages:
    """Pages that P sends to D.

    Attributes:
        leg: the leg.
        pages: number of pages.
        tokens: number of prompt tokens in them.
        is_last: whether they complete the prompt and bring P's first token.
    """

    leg: PrefillLeg
    pages: int
    tokens: int
    is_last: bool


class SglangLeg:
    """Base of the legs at P and at D.

    Args:
        name: name of the leg; an abort matches all names that begin with its own.
        room: the number that the router chose.
        request: the request in the cache.
        asked_s: its arrival, in seconds of its engine's clock.

    Attributes:
        name, room, request, asked_s: as given.
        polled: state of its sender or receiver.
    """

    __slots__ = ("asked_s", "name", "polled", "request", "room")

    def __init__(self, name: str, room: int, request: HybridRequest, asked_s: float = 0.0) -> None:
        self.name = name
        self.room = room
        self.request = request
        self.asked_s = asked_s
        self.polled: Polled = "handshake"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} in room {self.room}, {self.polled}>"

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.request.tokens.num_prompt_tokens

    def fail(self) -> None:
        """Make the next poll fail, as the other side or the client is gone."""
        self.polled = "failed"


class PrefillLeg(SglangLeg):
    """A prompt that P computes and sends.

    Attributes:
        is_pending: whether P has not yet noticed the end of the handshake.
        prefix: leading tokens that D has, which are not sent.
        sent: leading tokens that were sent or need not be sent.
        hit_tokens: tokens that were cached when it was last computed.
        attempts: number of times that it was computed before the handshake was done.
        has_slot: whether it has a slot for the data that travels with the KV: the first token and counts.
        has_row: whether it has a row in the table of requests with pages.
        is_called_off: whether its client left while it was between chunks or in a batch.
        gives_way: whether it gives up its place once the current piece is computed.
        is_computed: whether its whole prompt was computed; then it has its token.
        token: the first token, which P samples; None before it is known.
    """

    __slots__ = (
        "attempts",
        "gives_way",
        "has_row",
        "has_slot",
        "hit_tokens",
        "is_called_off",
        "is_computed",
        "is_pending",
        "prefix",
        "sent",
        "token",
    )

    def __init__(self, name: str, room: int, request: HybridRequest, asked_s: float = 0.0) -> None:
        super().__init__(name, room, request, asked_s)
        self.is_pending = True
        self.prefix = self.sent = self.attempts = self.hit_tokens = 0
        self.has_slot = self.has_row = self.is_computed = False
        self.is_called_off = self.gives_way = False
        self.token: int | None = None

    def shake(self, prefix: int) -> None:
        """Note that D has pages for the leg, and the first `prefix` tokens of the prompt cached."""
        if self.polled == "handshake":
            self.polled, self.prefix = "ready", prefix

    def arrive(self) -> None:
        """Note that D has received all of it."""
        if self.polled == "ready":
            self.polled = "arrived"


class DecodeLeg(SglangLeg):
    """A prompt that D receives, and from which it generates.

    Args:
        max_new_tokens: maximum number of output tokens, including P's first one.

    Attributes:
        max_new_tokens: as given.
        hit_tokens: tokens of its prompt that were cached when it got pages.
        asked_pages: number of pages that P was asked for.
        got_room: the room named in the data that came with the pages; None before.
        token: P's first token; None before.
        is_called_off: whether its client left.
        may_be_written: whether P may still write into its pages.
    """

    __slots__ = (
        "asked_pages",
        "got_room",
        "hit_tokens",
        "is_called_off",
        "max_new_tokens",
        "may_be_written",
        "token",
    )

    def __init__(
        self,
        name: str,
        room: int,
        request: HybridRequest,
        max_new_tokens: int,
        asked_s: float = 0.0,
    ) -> None:
        super().__init__(name, room, request, asked_s)
        self.max_new_tokens = max_new_tokens
        self.hit_tokens = self.asked_pages = 0
        self.got_room: int | None = None
        self.token: int | None = None
        self.is_called_off = self.may_be_written = False

    def shake(self) -> None:
        """Note that the handshake is done."""
        if self.polled == "handshake":
            self.polled = "ready"

    def arrive(self, token: int, room: int) -> None:
        """Note that P's last part has arrived, with its token and room."""
        self.may_be_written = False
        if self.polled == "ready":
            self.polled = "arrived"
            self.token, self.got_room = token, room

    def fail(self) -> None:
        """Make the next poll fail, as P no longer writes."""
        super().fail()
        self.may_be_written = False
