"""What a `ProcessContract` is given of a router process: how it is started, what it is made for, how it is asked what it knows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import pytest

from pytest_kvmock.testing.process_client import openai_completion
from pytest_kvmock.testing.subject import UNJUDGED, refuse, unjudged_text

if TYPE_CHECKING:
    from pytest_kvmock.testing.router_process import RouterProcess, ServedEngines


class ProcessSubject:
    """A router process, as the tests of a `ProcessContract` have it; that has the attributes."""

    dialects: ClassVar[Sequence[str]] = ("vllm-0.33",)
    url: str | None = None
    ports: ClassVar[Mapping[str, int]] = {}
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
    engines: ServedEngines

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Run each test over the dialects of the class: they are the values of its fixture `kv_dialect`."""
        super().__init_subclass__(**kwargs)

        def kv_dialect(self: ProcessSubject, request: pytest.FixtureRequest) -> Any:
            if text := self.unjudged_text():
                name = request.node.nodeid.rpartition("::")[0]
                request.node.user_properties.append((UNJUDGED, f"{name}: {text}"))
            return request.param

        setattr(cls, kv_dialect.__name__, pytest.fixture(params=list(cls.dialects))(kv_dialect))

    # ----------------------------------------------------------------------------------------------- what it is given

    def command(self, engines: ServedEngines) -> Sequence[str | Path]:  # noqa: ARG002 - for those who define it
        """Return the command that starts the process before these engines; to be defined by a subclass that has no `url`."""
        __tracebackhide__ = True
        refuse(
            self,
            "define command(self, engines), which returns the command that starts your router, or set url and ports",
        )

    def ready(self, process: RouterProcess) -> str:
        """Wait until the process is ready, and return its URL; may be defined by a subclass.

        As it stands, it waits until `/health` at `engines.port` is answered with 200. `process.line()` is the next line that it prints.

        Raises:
            ProcessEnded: it has ended, or is not ready in time.
        """
        url = f"http://127.0.0.1:{self.engines.port}"
        process.until_healthy(f"{url}/health")
        return url

    def completion(self, prompt: str, **options: Any) -> tuple[str, dict[str, Any]]:
        """Return the path and the body of a completion; may be defined by a subclass.

        Args:
            prompt: a text.
            options: `max_tokens`, `stream`, `cache_salt` and `lora_name`, those that are asked for.
        """
        return "/v1/completions", openai_completion(self.engines.model, prompt, **options)

    @property
    def is_started(self) -> bool:
        """Whether each test starts the process; else it is there."""
        return type(self).url is None

    def tells_blocks(self, keys: Mapping[str, Any] = {}) -> bool:
        """Whether it answers what it knows of a prompt, with these keys beside."""
        method = getattr(self, "blocks", None)
        return method is not None and len(self.keys_of(method, keys)) == len(keys)

    @property
    def tells_open(self) -> bool:
        """Whether it answers how many requests it counts as open."""
        return getattr(self, "open_requests", None) is not None

    @staticmethod
    def keys_of(method: Callable[..., Any], keys: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of a prompt's keys that a method takes."""
        takes = inspect.signature(method).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in takes.values())
        return {name: value for name, value in keys.items() if takes_any or name in takes}

    def known_blocks(self, prompt: str, keys: Mapping[str, Any]) -> Any:
        """Return what it answers of a prompt, with those of its keys that `blocks` takes; whatever that raises, this raises."""
        method: Callable[..., Any] = getattr(self, "blocks")  # noqa: B009 - a subclass may have it
        return method(prompt, **self.keys_of(method, keys))

    def counted_open(self) -> Any:
        """Return how many requests it counts as open; whatever `open_requests` raises, this raises."""
        method: Callable[[], Any] = getattr(self, "open_requests")  # noqa: B009 - a subclass may have it
        return method()

    def unjudged_text(self) -> str:
        """Return what no test can judge of it, and what would let one; "" where there is none of that."""
        lets = {
            "what it knows by events (hears_events = True)": self.hears_events,
            "copies and a host below the device (blocks(prompt))": self.tells_blocks() or not self.hears_events,
            "what it counts as open (open_requests())": self.tells_open,
            "a worker under a new address (moved(engines))": getattr(self, "moved", None) is not None,
            "how it starts and ends (command(engines))": self.is_started,
        }
        return unjudged_text(lets)

    def skip(self, why: str, what: str, lets: str) -> NoReturn:
        """Skip the rest of a test, in one line: the same for each test that is skipped for the same, which the summary counts."""
        pytest.skip(f"{type(self).__name__}: {why}: {what} was not judged; {lets} would let it")
