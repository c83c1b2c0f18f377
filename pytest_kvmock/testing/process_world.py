"""The world of one test of a `ProcessContract`: engines behind sockets, the process before them, and what is asked of both.

PYTEST_DONT_REWRITE: each message says all; below it pytest would put the condition.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pytest_kvmock.checks import is_integer
from pytest_kvmock.serve.text import encode
from pytest_kvmock.testing.process_client import PendingReply, Reply, openai_completion
from pytest_kvmock.testing.router_process import ProcessEnded, RouterProcess, ServedEngine, ServedEngines
from pytest_kvmock.testing.subject import refuse
from pytest_kvmock.tokens import Prompt
from pytest_kvmock.wire.waiting import Deadline, WireTimeout

if TYPE_CHECKING:
    from pytest_kvmock.serve.kv_server import KvServer
    from pytest_kvmock.serve.request_log import ServedRequest
    from pytest_kvmock.testing.process_subject import ProcessSubject

_FOUND: Final = 6
"""So many prompts in a row must be found where they were served, until events up to then count as applied: by chance 1 of 64."""

_AHEAD: Final = 2
"""So many prompts are served between one and the question about it: who is sent a prompt holds it from then on."""

_MOMENT_S: Final = 0.01
"""Between two questions, in seconds."""

_DYING_S: Final = 0.2
"""How long a process may take to end after its connections are closed, in seconds."""


class ProcessWorld:
    """Engines, and a router process before them.

    Args:
        contract: whose test it is.
        server: the engines.
        spare: how many of them, the last ones, the process is not told of.

    Attributes:
        server: as above.
        engines: those that the process is told of.
        process: the process; None: it was there before the test, or is not started yet.
    """

    def __init__(self, contract: ProcessSubject, server: KvServer, spare: int = 0) -> None:
        self._contract = contract
        self._seconds = contract.timeout_s
        self.server = server
        self.engines = self.engines_of(server.workers[: len(server.workers) - spare])
        self.process: RouterProcess | None = None
        self._random = Random(0)  # noqa: S311 - which worker serves what

    def engines_of(self, workers: Sequence[int]) -> ServedEngines:
        """Return these workers as a process is told of them."""
        rows = {row["id"]: row for row in self.server.ready_line()["workers"]}
        return ServedEngines.of(
            [
                ServedEngine(each, row["http"], tuple(row["events"]), tuple(row["replay"]), row["topic"])
                for each in workers
                for row in [rows[each]]
            ],
            self.server.model,
            self.server.harness.profile.block_size,
        )

    @property
    def workers(self) -> list[int]:
        """The workers that the process is told of."""
        return [each.worker for each in self.engines]

    # ------------------------------------------------------------------------------------------------- the process

    def start(self) -> None:
        """Start the process, and wait until it is ready and hears all engines; one that was there is waited for alone."""
        __tracebackhide__ = True
        contract, problem = self._contract, ""
        contract.engines = self.engines
        try:
            if contract.is_started:
                self.process = RouterProcess(contract.command(self.engines), self._seconds)
                contract.url = contract.ready(self.process)
        except ProcessEnded as error:
            problem = str(error)
        if problem:
            self.close()
            refuse(contract, problem)
        if contract.hears_events:
            self.wait_subscribed("it does not subscribe to the events of its engines")

    def wait_subscribed(self, problem: str) -> None:
        """Wait until the process hears all engines that it is told of."""
        __tracebackhide__ = True
        try:
            for worker in self.workers:
                self.server.publisher(worker).wait_subscribed(timeout=self._seconds)
        except WireTimeout as error:
            problem += f": {str(error).splitlines()[0]}"
        else:
            return
        self.fail(problem)

    def close(self) -> None:
        """End the process, and leave engines as they were."""
        if self.process is not None:
            self.process.close()
        for worker in self.server.workers:
            self.server.release(worker)
            self.server.start(worker)

    def fail(self, text: str) -> NoReturn:
        """Fail the test in one line; if the process has ended, it is said with what it has printed."""
        __tracebackhide__ = True
        if self.process is not None:
            self.process.wait(_DYING_S)  # a connection that is closed is seen before its process has ended
        ended = f" ({self.process.state_text})" if self.process is not None and not self.process.is_alive else ""
        refuse(self._contract, f"{text}{ended}")

    # ------------------------------------------------------------------------------------------------ what is sent

    def text(self, blocks: int = 4) -> str:
        """Return a prompt that no other begins with."""
        return self.server.text(blocks)

    def begin(self, prompt: str, *, headers: Mapping[str, str] = {}, **options: Any) -> PendingReply:
        """Send a completion to the process, and read nothing of its answer yet.

        Args:
            prompt: a text.
            headers: of the request.
            options: `max_tokens`, `stream`, `cache_salt`, `lora_name`, as `ProcessSubject.completion` takes them.
        """
        path, body = self._contract.completion(prompt, **options)
        return self.post(path, body, headers)

    def post(self, path: str, body: Any, headers: Mapping[str, str] = {}) -> PendingReply:
        """Send a request to the process."""
        return PendingReply(str(self._contract.url), path, body, headers, self._seconds)

    def send(self, prompt: str, **options: Any) -> tuple[Reply, list[ServedRequest]]:
        """Send a completion to the process, and return what came back, and what engines saw of it."""
        count = len(self.server.requests)
        reply = self.begin(prompt, **options).finish()
        return reply, self.server.requests[count:]

    def picked(self, where: str, prompt: str, **options: Any) -> int:
        """Send a completion that must be served, and return which worker served it."""
        __tracebackhide__ = True
        reply, asked = self.send(prompt, **options)
        if reply.status != 200 or not reply.is_whole or not asked:
            self.fail(
                f"{where}: a completion was answered with {reply.text}, asked of {asked_text(asked)}; expected 200"
            )
        return asked[-1].worker

    def direct(self, worker: int, prompt: str, *, rank: int = 0, **options: Any) -> Reply:
        """Have an engine serve a completion, past the process."""
        __tracebackhide__ = True
        reply = self.begin_direct(worker, prompt, rank=rank, **options).finish()
        assert reply.status == 200, reply.text
        return reply

    def push(self, where: str, worker: int, prompt: str) -> None:
        """Have an engine serve a new prompt, past the process, and wait until the process says that it knows it.

        What was published before is applied by then.
        """
        __tracebackhide__ = True
        self.direct(worker, prompt)
        if self._contract.tells_blocks({}):
            self.judge_blocks(f"{where}, of what it has served since", prompt)

    def begin_direct(self, worker: int, prompt: str, *, rank: int = 0, **options: Any) -> PendingReply:
        """Send a completion to an engine, past the process."""
        body = openai_completion(self.server.model, prompt, **options)
        rows = {"X-data-parallel-rank": str(rank)}
        return PendingReply(self.server.url(worker), "/v1/completions", body, rows, self._seconds)

    def wait_open(self, count: int, problem: str) -> None:
        """Wait until so many requests are open in the engines."""
        __tracebackhide__ = True
        try:
            self.server.wait_requests(open=count, timeout=self._seconds)
        except TimeoutError as error:
            problem += f": {error}"
        else:
            return
        self.fail(problem)

    def wait_back(self, worker: int) -> None:
        """Send completions until a worker that is up again gets one: of what it alone holds, where the process knows that, else of what nobody holds."""
        __tracebackhide__ = True
        contract, deadline, sent = self._contract, Deadline(self._seconds), 0
        by_events = contract.hears_events and contract.goes_by_prefix
        if not by_events and (contract.packs or contract.first_of_equals):
            return  # it may have no reason to
        held: list[str] = []  # each is asked for once: who is sent it in place of this worker holds it too
        while True:
            prompt = self.text(2)
            if by_events:
                self.direct(worker, prompt)
                held.append(prompt)
                if len(held) <= _AHEAD:
                    continue
                prompt = held.pop(0)
            _, asked = self.send(prompt)
            sent += 1
            if asked and asked[-1].worker == worker:
                return
            if not deadline.left:
                break
            self.pause()
        what = "for what it alone holds" if by_events else "that nobody holds"
        self.fail(
            f"worker {worker} refused connections, and takes them again: of {sent} completions {what} it got none within {self._seconds:g} s"
        )

    # ---------------------------------------------------------------------------------------------- what it knows

    def judge_blocks(self, where: str, prompt: str, **keys: Any) -> None:
        """Fail unless the process answers of a prompt what it should know."""
        __tracebackhide__ = True
        asked = Prompt(encode(prompt), **keys)
        text = self.server.check(asked, lambda: self._rows(asked, prompt, keys), timeout=self._seconds)
        if text:
            state = f"; {self.process.state_text}" if self.process is not None and self.process.is_alive else ""
            self.fail(f"{where}: {text} ({self._seconds:g} s after the first question{state})")

    def judge(self, where: str, prompt: str, **keys: Any) -> None:
        """Fail unless the process knows of a prompt what it should: by its own answer, and by where it sends it.

        Args:
            where: what has happened, for the message.
            prompt: a text.
            keys: `cache_salt` and `lora_name`.
        """
        __tracebackhide__ = True
        contract = self._contract
        if contract.tells_blocks(keys):
            self.judge_blocks(where, prompt, **keys)
        elif contract.goes_by_prefix:
            self.wait_applied(where)
        else:
            contract.skip(
                "goes_by_prefix is False, and it has no blocks(prompt)", f"what it knows: {where}", "blocks(prompt)"
            )
        if contract.goes_by_prefix:
            self.judge_pick(where, prompt, **keys)

    def judge_pick(self, where: str, prompt: str, **keys: Any) -> None:
        """Fail unless a completion, asked of an idle fleet, goes to a worker that holds most of its prompt."""
        __tracebackhide__ = True
        held = self.server.held(Prompt(encode(prompt), **keys))
        if not held:
            return
        worker = self.picked(where, prompt, **keys)
        if held.get(worker, 0) < max(held.values()):
            shown = ", ".join(f"worker {each} held {blocks} blocks" for each, blocks in sorted(held.items()))
            self.fail(f"{where}: a prompt of which {shown} was sent to worker {worker}, asked of an idle fleet")

    def wait_applied(self, where: str) -> None:
        """Wait until the process has applied the events so far: it finds what was served after them, again and again."""
        __tracebackhide__ = True
        deadline, served, found = Deadline(self._seconds), [], 0
        while found < _FOUND:
            worker, text = self._random.choice(self.workers), self.text() + "x"
            self.direct(worker, text)
            served.append((worker, text))
            if len(served) <= _AHEAD:
                continue
            worker, text = served.pop(0)
            found = found + 1 if self.picked(where, text) == worker else 0
            if not deadline.left:
                held = {str(each): blocks for each, blocks in self.server.held(text).items()}
                self.fail(
                    f"{where}: it does not find by events what engines serve ({self._seconds:g} s; the last prompt is held by {held}, "
                    f"and was served by worker {worker} before it was asked about)"
                )

    def _rows(self, asked: Prompt, prompt: str, keys: Mapping[str, Any]) -> list[dict[str, int]]:
        """Return what the process answers, as rows."""
        __tracebackhide__ = True
        contract, problem = self._contract, ""
        try:
            answer = contract.known_blocks(prompt, keys)
        except (OSError, http.client.HTTPException) as error:
            raise AssertionError(f"blocks(prompt) raised {type(error).__name__}: {error}") from None
        except Exception as error:  # noqa: BLE001 - whatever the user's raises
            problem = f"blocks(prompt) raised {type(error).__name__}: {' '.join(str(error).split())}"
        if not problem and not _is_blocks(answer):
            problem = (
                f"blocks(prompt) must return {{worker: blocks}} or {{(worker, rank): blocks}}, got {answer!r:.200}"
            )
        if problem:
            self.fail(problem)
        return self._by_rank(asked, answer)

    def _by_rank(self, asked: Prompt, answer: Mapping[Any, int]) -> list[dict[str, int]]:
        """Return rows of each rank; a number for a whole worker is that of its best rank, and other ranks are not asked about."""
        rows: dict[tuple[int, int], int] = {}
        true = {(row["worker"], row["rank"]): row["blocks"] for row in self.server.expect(asked)["blocks"]}
        for key, blocks in answer.items():
            if isinstance(key, tuple):
                rows[key] = blocks
                continue
            ranks = [each for each in true if each[0] == key]
            rows |= {each: true[each] for each in ranks}
            rows[max(ranks, key=true.__getitem__, default=(key, 0))] = blocks
        return [{"worker": worker, "rank": rank, "blocks": blocks} for (worker, rank), blocks in rows.items() if blocks]

    # ------------------------------------------------------------------------------------------------- at the end

    def judge_nothing_open(self) -> None:
        """Fail unless engines have nothing open, and the process counts nothing as open, where it says so."""
        __tracebackhide__ = True
        contract = self._contract
        self.wait_open(0, "after everything requests are open in the engines")
        if (self.process is not None and not self.process.is_alive) or not contract.tells_open:
            return
        deadline, problem = Deadline(self._seconds), ""
        while True:
            try:
                count = contract.counted_open()
            except Exception as error:  # noqa: BLE001 - whatever the user's raises
                problem = f"open_requests() raised {type(error).__name__}: {' '.join(str(error).split())}"
                break
            if count == 0:
                return
            if not deadline.left:
                break
            self.pause()
        self.fail(
            problem
            or f"after everything it counts {count} requests as open, and there are none ({self._seconds:g} s later)"
        )

    def pause(self) -> None:
        """Let a moment pass between two questions; none where the process ends in it."""
        if self.process is not None:
            self.process.wait(_MOMENT_S)
        else:
            threading.Event().wait(_MOMENT_S)


def _is_blocks(answer: object) -> bool:
    if not isinstance(answer, Mapping):
        return False
    for key, blocks in answer.items():
        parts = key if isinstance(key, tuple) else (key, 0)
        if len(parts) != 2 or not all(map(is_integer, parts)) or not is_integer(blocks, 0):
            return False
    return True


def asked_text(asked: Sequence[ServedRequest]) -> str:
    """Return which workers were asked, in words."""
    return ", ".join(f"worker {each.worker}" for each in asked) or "no worker"
