"""The declarations of a router process for its `ProcessContract`: how it is started, what it supports, and how its
state is queried.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NoReturn

import pytest

from pytest_kvmock.engines.base.pair_options import IN_ROOMS, PAIRED
from pytest_kvmock.servers.serve.api import release_of
from pytest_kvmock.servers.serve.network import HTTP_FORMS
from pytest_kvmock.testing.process.process_client import openai_chat, openai_completion
from pytest_kvmock.testing.subject import STORES, UNJUDGED, refuse, unjudged_text
from pytest_kvmock.values.checks import not_allowed_text
from pytest_kvmock.wire.codec.table import find_dialect

if TYPE_CHECKING:
    from pytest_kvmock.testing.process.router_process import RouterProcess, ServedEngines


_COOLS_AT_MOST_S: Final = 60
_RANKS: Final = {"rank": 2, "node": 4}
"""Ranks of each worker, by how they share HTTP ports; each worker has two ports."""

_BODIES: Final = ("completion", "chat")

_PAIRS: Final = "P/D pairs (hand_over)"
"""The point that is not judged of a router without pairs."""

WAYS: Final = (*PAIRED, IN_ROOMS)
"""The values of `hand_over`."""

_QUICK: Final = {IN_ROOMS: {"release_timeout": 0.2, "num_reserved_decode_tokens": 16}}
"""Options of engines that keep timeouts short, and give a decode engine room for many requests."""

_ROOMY: Final = 4096
"""Blocks of a decode engine: room for all that its prefill engines hold."""


def _has_http_forms(dialect: str) -> bool:
    """Whether ranks of engines with this dialect may have separate ports."""
    spoken = find_dialect(dialect)
    release = release_of(spoken.models, spoken.backend)
    return release is not None and release.has_http_forms


class ProcessSubject:
    """A router process as the tests of a `ProcessContract` see it; the attributes are documented there."""

    dialects: ClassVar[Sequence[str]] = ("vllm-0.33",)
    url: str | None = None
    ports: ClassVar[Mapping[str, int]] = {}
    http: ClassVar[str] = "worker"
    timeout_s: ClassVar[float] = 10.0
    headers: ClassVar[Mapping[str, str]] = {
        "X-Request-Id": "kvmock-1",
        "Authorization": "Bearer kvmock",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    packs: ClassVar[bool] = False
    first_of_equals: ClassVar[bool] = False
    follows_prefix: ClassVar[bool] = False
    goes_by_prefix: ClassVar[bool] = True
    retries: ClassVar[bool] = True
    hears_events: ClassVar[bool] = True
    counts_open: ClassVar[bool] = True
    cools_down_s: ClassVar[float] = 0.0
    sends: ClassVar[Literal["completion", "chat"]] = "completion"
    takes_token_ids: ClassVar[bool] = True
    learns_block_size: ClassVar[bool] = False
    salt_header: ClassVar[str] = ""
    hand_over: ClassVar[str | None] = None
    falls_back: ClassVar[bool] = False
    threshold: ClassVar[int | None] = None
    engines: ServedEngines
    pytestmark: ClassVar[list[pytest.MarkDecorator]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Run each test over the dialects of the class, the values of its fixture `kv_dialect`."""
        super().__init_subclass__(**kwargs)
        if cls.hand_over is not None and "hand_over" in cls.__dict__ and (roles := cls.roles()):
            marks = cls.__dict__.get("pytestmark", [])
            cls.pytestmark = [*(marks if isinstance(marks, list) else [marks]), pytest.mark.kvmock(roles=roles)]

        def kv_dialect(self: ProcessSubject, request: pytest.FixtureRequest) -> Any:
            if self.http != "worker" and not _has_http_forms(request.param):
                self.skip(f"engines of {request.param} have one port for all ranks", "it", "http = 'worker'")
            if text := self.unjudged_text(request.param, with_rare=request.config.get_verbosity() > 0):
                name = request.node.nodeid.rpartition("::")[0]
                request.node.user_properties.append((UNJUDGED, f"{name}: {text}"))
            return request.param

        setattr(cls, kv_dialect.__name__, pytest.fixture(params=list(cls.dialects))(kv_dialect))
        if (ranks := _RANKS.get(cls.http, 1)) > 1:  # so that engines of all tests have ranks
            marks = vars(cls).get("pytestmark", [])
            marks = marks if isinstance(marks, list) else [marks]
            setattr(cls, "pytestmark", [*marks, pytest.mark.kvmock(dp_size=ranks)])  # noqa: B010 - pytest's name

    @classmethod
    def wrong_declaration(cls) -> str:
        """Return the first invalid or contradictory declaration of the class; "" if there is none."""
        cools = cls.cools_down_s
        if isinstance(cools, bool) or not isinstance(cools, int | float) or not 0 <= cools <= _COOLS_AT_MOST_S:
            return f"cools_down_s must be seconds from 0 to {_COOLS_AT_MOST_S}, got {cools!r:.80}"
        if cls.sends not in _BODIES:
            return f"sends: {not_allowed_text(cls.sends, _BODIES)}"
        for name in ("takes_token_ids", "learns_block_size"):
            if not isinstance(flag := getattr(cls, name), bool):
                return f"{name} must be True or False, got {flag!r:.80}"
        if cls.http not in HTTP_FORMS:
            return f"http: {not_allowed_text(cls.http, HTTP_FORMS)}"
        if cls.http != "worker" and getattr(cls, "hand_over", None) is not None:
            return f"http is 'worker' for engines with roles; got {cls.http!r:.80}, and hand_over is set"
        if not isinstance(cls.salt_header, str):
            return f"salt_header must be the name of a header, or '', got {cls.salt_header!r:.80}"
        return ""

    @classmethod
    def roles(cls, prefill: int = 2, decode: int = 1) -> dict[str, dict[str, Any]] | None:
        """Return the engines of its worlds by role, as `RouterHarness` takes them: the prefill engines under test, and
        the decode engines behind them. None if the engines have no roles.
        """
        if cls.hand_over not in WAYS:
            return None
        role = {"hand_over": cls.hand_over, **_QUICK.get(cls.hand_over, {})}
        return {"prefill": {"workers": prefill, **role}, "decode": {"workers": decode, "num_blocks": _ROOMY, **role}}

    # ----------------------------------------------------------------------------------------------- what it is given

    def command(self, engines: ServedEngines) -> Sequence[str | Path]:  # noqa: ARG002 - for those who define it
        """Return the command that starts the process in front of these engines; a subclass without `url` defines it."""
        __tracebackhide__ = True
        refuse(
            self,
            "define command(self, engines), which returns the command that starts your router, or set url and ports",
        )

    def ready(self, process: RouterProcess) -> str:
        """Wait until the process is ready, and return its URL; a subclass may override it.

        By default it waits until `/health` at `engines.port` is answered with 200. `process.line()` returns the next
        line that the process prints.

        Raises:
            ProcessEnded: it has ended, or is not ready in time.
        """
        url = f"http://127.0.0.1:{self.engines.port}"
        process.until_healthy(f"{url}/health")
        return url

    def completion(self, prompt: str, **options: Any) -> tuple[str, dict[str, Any]]:
        """Return path and body of a completion, or of a chat with the prompt; a subclass may override it.

        Args:
            prompt: a text.
            options: any of `max_tokens`, `stream`, `cache_salt` and `lora_name`.
        """
        if self.sends == "chat":
            messages = [{"role": "user", "content": prompt}]
            return "/v1/chat/completions", openai_chat(self.engines.model, messages, **options)
        return "/v1/completions", openai_completion(self.engines.model, prompt, **options)

    @property
    def is_started(self) -> bool:
        """Whether each test starts the process; if not, it already runs."""
        return type(self).url is None

    def tells_blocks(self, keys: Mapping[str, Any] = {}) -> bool:
        """Whether the process reports its known blocks of a prompt with these keys."""
        method = getattr(self, "blocks", None)
        return method is not None and len(self.keys_of(method, keys)) == len(keys)

    @property
    def tells_open(self) -> bool:
        """Whether the process reports the number of requests that it counts as open."""
        return getattr(self, "open_requests", None) is not None

    @staticmethod
    def keys_of(method: Callable[..., Any], keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of a prompt that a method takes."""
        takes = inspect.signature(method).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in takes.values())
        return {name: value for name, value in keys.items() if takes_any or name in takes}

    def known_blocks(self, prompt: str, keys: Mapping[str, Any]) -> Any:
        """Return the result of `blocks` for a prompt, with the keys that `blocks` takes. Its exceptions propagate."""
        method: Callable[..., Any] = getattr(self, "blocks")  # noqa: B009 - a subclass may have it
        return method(prompt, **self.keys_of(method, keys))

    def counted_open(self) -> Any:
        """Return the number of requests that it counts as open. Exceptions of `open_requests` propagate."""
        method: Callable[[], Any] = getattr(self, "open_requests")  # noqa: B009 - a subclass may have it
        return method()

    def unjudged_text(self, dialect: str = "", *, with_rare: bool = False) -> str:
        """Return what no test can judge of it over a dialect, and what would allow it; "" if all can be judged.

        Args:
            dialect: the dialect; "": all.
            with_rare: whether to return a text also if only P/D pairs and stores are left, which few routers use.
        """
        lets = {
            f"anything over {dialect}, which is polled, and not heard (hears_events = False judges all but events)": (
                not dialect or not self.hears_events or find_dialect(dialect).replay is not None
            ),
            "what it knows by events (hears_events = True)": self.hears_events,
            "copies and a host below the device (blocks(prompt))": self.tells_blocks() or not self.hears_events,
            "what it counts as open (open_requests())": self.tells_open,
            "a worker under a new address (moved(engines))": getattr(self, "moved", None) is not None,
            "how it starts and ends (command(engines))": self.is_started,
            STORES: getattr(self, "stores", None) is not None,
        }
        lets[_PAIRS] = self.hand_over is not None
        lets["when there must be a prefill leg (threshold)"] = self.hand_over is None or self.threshold is not None
        return unjudged_text(lets, () if with_rare else (_PAIRS, STORES))

    def skip(self, why: str, what: str, lets: str) -> NoReturn:
        """Skip the rest of a test with one line. Tests that are skipped for the same reason get the same line, which
        the summary counts.
        """
        pytest.skip(f"{type(self).__name__}: {why}: {what} was not judged; {lets} would let it")
