"""The world of one test of a `ProcessContract`: engines behind sockets, the process in front of them, and the requests
to both.

One subject: the actions of a test, on engines, through the process and past it.

PYTEST_DONT_REWRITE: each message is complete; pytest would add the condition below it.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Mapping, Sequence
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import urlsplit

from pytest_kvmock.engines.base.pair_options import IN_ROOMS
from pytest_kvmock.servers.serve.api import release_of
from pytest_kvmock.servers.serve.text import chat_text, encode
from pytest_kvmock.testing.process.process_client import PendingReply, Reply, openai_chat, openai_completion
from pytest_kvmock.testing.process.router_process import ProcessEnded, RouterProcess, ServedEngine, ServedEngines
from pytest_kvmock.testing.subject import refuse
from pytest_kvmock.values.checks import is_integer
from pytest_kvmock.values.tokens import Prompt
from pytest_kvmock.wire.sockets.waiting import Deadline, WireTimeout

if TYPE_CHECKING:
    from pytest_kvmock.servers.serve.kv_server import KvServer
    from pytest_kvmock.servers.serve.request_log import ServedRequest
    from pytest_kvmock.testing.process.process_subject import ProcessSubject

_FOUND: Final = 6
"""Number of prompts in a row that must be found where they were served before earlier events count as applied; by
chance 1 case of 64."""

_AHEAD: Final = 2
"""Number of prompts that are served between a prompt and the question about it: a worker holds a prompt once it was
sent there.
"""

_SWAPPED: Final = 2**48
"""No batch number is this large, unless its bytes are read in reverse order."""

_MOMENT_S: Final = 0.01
"""Seconds between two questions."""

_OF_EVENTS: Final = (
    ": X-data-parallel-rank names a rank by its place behind the port, from 0 on; is it the number that events have?"
)

_DYING_S: Final = 0.2
"""Seconds that a process may take to end after its connections are closed."""


class ProcessWorld:
    """Engines, and a router process in front of them.

    Args:
        contract: the contract of the test.
        server: the engines.
        spare: number of engines, the last ones, that the process is not given.

    With P/D pairs the workers under test are the prefill engines: their events, their blocks, and which of them was
    picked. The decode engines answer clients.

    Attributes:
        server: as above.
        decode: the decode engines.
        engines: the engines that the process is given.
        process: the process; None if it ran before the test, or is not started yet.
    """

    def __init__(self, contract: ProcessSubject, server: KvServer, spare: int = 0) -> None:
        self._contract = contract
        self._seconds = contract.timeout_s
        self.server = server
        roles = {} if server.pairs is None else server.pairs.roles
        self.decode = [worker for worker, role in roles.items() if role == "decode"]
        self._rooms = count(2**40)
        self._called: dict[int, int] = {}  # the id that the process is given, by worker
        self.engines = contract.engines = self.engines_of(server.workers[: len(server.workers) - spare])
        self.process: RouterProcess | None = None
        self._pending: list[PendingReply] = []
        self._random = Random(0)  # noqa: S311 - picks the worker that serves a prompt

    def engines_of(self, workers: Sequence[int]) -> ServedEngines:
        """Return these workers as engines for the process."""
        served = [(each, self.server.inside.port(each)) for each in workers]
        return ServedEngines.at_a_port(
            [
                ServedEngine(
                    self._called.get(each, each) * len(worker.ports) + place,
                    port.url,
                    tuple(port.endpoints),
                    tuple(port.replay_endpoints),
                    worker.publisher.topic,
                    worker.role,
                    worker.bootstrap_port,
                    tuple(port.ranks),
                )
                for each, worker in served
                for place, port in enumerate(worker.ports)
            ],
            self.server.model,
            self.page,
        )

    @property
    def page(self) -> int:
        """Tokens per page, which the process is given: the block size, except for engines with context parallelism."""
        manager, size = self.server.harness.worker(0).manager, self.server.harness.profile.block_size
        return size // getattr(manager, "dcp", 1)

    @property
    def workers(self) -> list[int]:
        """The workers that the process is given; of P/D pairs, the prefill engines."""
        told = (self._worker_of(each.worker) for each in self.engines if each.role != "decode")
        return list(dict.fromkeys(told))

    @property
    def answering(self) -> list[int]:
        """The workers that answer clients."""
        return self.decode or self.workers

    @property
    def requests(self) -> list[ServedRequest]:
        """The requests that came to the workers."""
        return [row for row in self.server.requests if row.role != "decode"]

    @property
    def answered(self) -> list[ServedRequest]:
        """The requests that came to the workers that answer clients."""
        return [row for row in self.server.requests if row.role != "prefill"]

    def _worker_of(self, told: int) -> int:
        """Return the worker of an engine with this number for the process; for an unknown engine, the id that follows
        from the number.
        """
        called, _ = divmod(told, len(self._behind))
        return next((worker for worker, each in self._called.items() if each == called), called)

    @property
    def _behind(self) -> list[range]:
        """The ranks behind each port of a worker."""
        return [port.ranks for port in self.server.inside.port(self.server.workers[0]).ports]

    def rename(self, called: Mapping[int, int], workers: Sequence[int]) -> None:
        """Give the process these workers, some under another id than their own."""
        self._called = dict(called)
        self.engines = self._contract.engines = self.engines_of(workers)

    def known(self, prompt: str, worker: int) -> int:
        """Return the number of blocks of a prompt that the process reports for a worker."""
        __tracebackhide__ = True
        return max((n for (each, _), n in self._answer(prompt, {}).items() if each == worker), default=0)

    # ------------------------------------------------------------------------------------------------- the process

    def start(self) -> None:
        """Start the process, and wait until it is ready and receives the events of all engines; a process that already
        runs is not started.
        """
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
        """Wait until the process subscribes to all engines that it is given."""
        __tracebackhide__ = True
        try:
            for worker in self.workers:  # a decode engine may publish nothing
                self.server.publisher(worker).wait_subscribed(timeout=self._seconds)
        except WireTimeout as error:
            problem += f": {str(error).splitlines()[0]}"
        else:
            return
        self.fail(problem)

    def close(self) -> None:
        """End the process, and restore the engines."""
        for each in self._pending:
            each.close()
        if self.process is not None:
            self.process.close()
        for worker in self.server.workers:
            self.server.release(worker)
            self.server.start(worker)

    def fail(self, text: str) -> NoReturn:
        """Fail the test with one line; if the process has ended, add its state and its last output."""
        __tracebackhide__ = True
        if self.process is not None:
            self.process.wait(_DYING_S)  # a closed connection shows before its process has ended
        ended = f" ({self.process.state_text})" if self.process is not None and not self.process.is_alive else ""
        refuse(self._contract, f"{text}{self._swapped()}{ended}")

    def _swapped(self) -> str:
        """Return the evidence that the process reads batch numbers in reverse byte order; "" if there is none."""
        for worker in self.workers:
            for replay in self.server.publisher(worker).replays if self.server.dialect.replay else ():
                if replay.start is not None and replay.start >= _SWAPPED:
                    asked = f"it asked worker {worker} for batches from {replay.start} on"
                    return f"; {asked}: numbers jump by 2^56: byte order?"
        return ""

    # ------------------------------------------------------------------------------------------------ what is sent

    def text(self, blocks: int = 4) -> str:
        """Return a prompt with a new beginning."""
        return self.server.text(blocks)

    def tokens_of(self, prompt: str) -> tuple[int, ...]:
        """Return the tokens that an engine makes of a prompt as it is sent; a chat goes through its template."""
        _, body = self._contract.completion(prompt)
        return encode(chat_text(body["messages"]) if "messages" in body else prompt)

    def hashes_of(self, prompt: str) -> list[int]:
        """Return the local hashes of the whole blocks of a prompt as it is sent."""
        return Prompt(self.tokens_of(prompt)).block_hashes(self.server.harness.profile.block_size)

    def begin(
        self, prompt: str, *, headers: Mapping[str, str] = {}, as_ids: bool = False, **options: Any
    ) -> PendingReply:
        """Send a completion to the process, and read nothing of its answer yet.

        Args:
            prompt: a text.
            headers: headers of the request.
            as_ids: whether the prompt of a completion is sent as token ids.
            options: `max_tokens`, `stream`, `cache_salt`, `lora_name`, as `ProcessSubject.completion` takes them.
        """
        salt = options.pop("cache_salt", None) if self._contract.salt_header else None
        path, body = self._contract.completion(prompt, **options)
        if as_ids:
            body["prompt"] = [*encode(prompt)]
        return self.post(path, body, headers if salt is None else {**headers, self._contract.salt_header: salt})

    def post(self, path: str, body: Any, headers: Mapping[str, str] = {}) -> PendingReply:
        """Send a request to the process."""
        pending = PendingReply(str(self._contract.url), path, body, headers, self._seconds)
        self._pending.append(pending)
        return pending

    def generated(self, prompt: str, count: int) -> str:
        """Return the text that engines generate for a prompt."""
        loop = self.server.inside.port(self.workers[0]).loops[0]
        return loop.generated(self.tokens_of(prompt), count)

    def send(self, prompt: str, **options: Any) -> tuple[Reply, list[ServedRequest]]:
        """Send a completion to the process; return the answer, and the workers' records of the request."""
        before = len(self.requests)
        reply = self.begin(prompt, **options).finish()
        return reply, self.requests[before:]

    def picked(self, where: str, prompt: str, **options: Any) -> int:
        """Send a completion that must be served, and return the worker that served it."""
        __tracebackhide__ = True
        reply, asked = self.send(prompt, **options)
        if self.decode and reply.status == 200 and not asked and self._contract.threshold != 0:
            self._contract.skip("a prompt had no prefill leg", where, "threshold = 0, by which each has one,")
        if reply.status != 200 or not reply.is_whole or not asked:
            asks = _OF_EVENTS if reply.status == 400 and b"data_parallel_rank" in reply.body else ""
            self.fail(
                f"{where}: a completion was answered with {reply.text}, asked of {asked_text(asked)}; expected "
                f"200{asks}"
            )
        return asked[-1].worker

    def direct(self, worker: int, prompt: str, *, rank: int = 0, **options: Any) -> Reply:
        """Let an engine serve a completion, past the process."""
        __tracebackhide__ = True
        pending = self.begin_direct(worker, prompt, rank=rank, **options)
        if pending.body.get("bootstrap_room") is not None:  # the answer comes with that of the other leg
            legs = pending, self._post_to(self.server.url(self.decode[0]), pending.path, pending.body)
            reply = [each.finish() for each in legs][-1]
        else:
            reply = pending.finish()
        assert reply.status == 200, reply.text
        return reply

    def fill(self, worker: int, blocks: int) -> None:
        """Let each rank of a worker serve a new prompt, past the process."""
        __tracebackhide__ = True
        for rank in range(self.server.harness.profile.dp_size):
            self.direct(worker, self.text(blocks), rank=rank)

    def push(self, where: str, worker: int, prompt: str) -> None:
        """Let an engine serve a new prompt, past the process, and wait until the process reports its blocks.

        Earlier events are applied by then.
        """
        __tracebackhide__ = True
        self.direct(worker, prompt)
        if self._contract.tells_blocks({}):
            self.judge_blocks(f"{where}, of what it has served since", prompt)

    def begin_direct(self, worker: int, prompt: str, *, rank: int = 0, **options: Any) -> PendingReply:
        """Send a completion to an engine, past the process; with P/D pairs in rooms, the prefill leg."""
        _, sent = self._contract.completion(prompt, **options)
        path, body = "/v1/completions", openai_completion(self.server.model, prompt, **options)
        if "messages" in sent:
            path, body = "/v1/chat/completions", openai_chat(self.server.model, sent["messages"], **options)
        port = self.server.inside.port(worker).port_of(rank)
        pairs = self.server.pairs
        if pairs is not None and pairs.way == IN_ROOMS:
            place = urlsplit(pairs.bootstraps[worker].url)
            body |= {"bootstrap_host": place.hostname, "bootstrap_port": place.port}
            body |= {"bootstrap_room": next(self._rooms), "disagg_prefill_dp_rank": rank}
        return self._post_to(port.url, path, body, {"X-data-parallel-rank": str(port.ranks.index(rank))})

    def _post_to(self, url: str, path: str, body: Any, headers: Mapping[str, str] = {}) -> PendingReply:
        pending = PendingReply(url, path, body, headers, self._seconds)
        self._pending.append(pending)
        return pending

    def wait_open(self, count: int, problem: str) -> None:
        """Wait until `count` requests are open in the workers; for 0, until none is open in any engine."""
        __tracebackhide__ = True
        if count and self.decode:
            self.wait_legs(self.workers, count, problem)
            return
        try:
            self.server.wait_requests(open=count, timeout=self._seconds)
        except TimeoutError as error:
            problem += f": {error}"
        else:
            return
        self.fail(problem)

    def wait_legs(self, workers: Sequence[int], count: int, problem: str) -> None:
        """Wait until `count` legs are open in these engines of P/D pairs."""
        __tracebackhide__ = True
        deadline, ports = Deadline(self._seconds), self.server.inside.ports
        while (legs := sum(loop.num_open for each in workers for loop in ports[each].loops)) != count:
            if not deadline.left:
                self.fail(f"{problem}: {legs} legs are open after {self._seconds:g} s, not {count}")
            self.pause()

    def step(self, chunks: int) -> None:
        """Let engines generate `chunks` chunks of the one open stream while they are held."""
        __tracebackhide__ = True
        if not self.decode:
            self.server.step(chunks)
            return
        for worker in self.workers:
            self.server.release(worker)
        self.wait_legs(self.decode, 1, "the prefill leg of a stream has ended, and no decode engine has the other one")
        loops = [loop for each in self.decode for loop in self.server.inside.port(each).loops]
        before = sum(loop.state.generation_tokens for loop in loops)
        # In rooms the first token comes with the KV cache, and shares a chunk with the next one.
        tokens = chunks + (self._contract.hand_over == IN_ROOMS)
        deadline = Deadline(self._seconds)
        while sum(loop.state.generation_tokens for loop in loops) < before + tokens and deadline.left:
            self.server.step(1)
            self.pause()

    def wait_back(self, worker: int) -> None:
        """Send completions until a restarted worker gets one: for prompts that only it holds if the process knows that,
        otherwise for prompts that no worker holds.
        """
        __tracebackhide__ = True
        contract, deadline, sent = self._contract, Deadline(self._seconds + self._contract.cools_down_s), 0
        by_events = contract.hears_events and contract.goes_by_prefix
        if not by_events and (contract.packs or contract.first_of_equals):
            return  # the process may have no reason to pick it
        held: list[str] = []  # each is sent once: a worker that gets it instead holds it, too
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
        what = "for what it alone holds" if by_events else "that no worker holds"
        self.fail(
            f"worker {worker} refused connections, and takes them again: of {sent} completions {what} it got none "
            f"within {self._seconds:g} s"
        )

    # ---------------------------------------------------------------------------------------------- what it knows

    def judge_blocks(self, where: str, prompt: str, **keys: Any) -> None:
        """Fail unless the process reports the right blocks of a prompt."""
        __tracebackhide__ = True
        asked = Prompt(self.tokens_of(prompt), **keys)
        text = self.server.check(asked, lambda: self._rows(asked, prompt, keys), timeout=self._seconds)
        if text:
            state = f"; {self.process.state_text}" if self.process is not None and self.process.is_alive else ""
            self.fail(f"{where}: {text} ({self._seconds:g} s after the first question{state})")

    def resets(self) -> bool:
        """Whether a route resets its engines, whose Cleared waits for a step."""
        return self.server.harness.worker(0).clears_with_a_step

    def reset(self, worker: int) -> None:
        """Reset the cache of a worker as a client does, by vLLM's route, at each of its ports."""
        for _, body in self._ask_engine(worker, "/reset_prefix_cache", None):
            assert b"true" in body, body  # no request is open there

    def load_adapter(self, worker: int, name: str, path: str) -> None:
        """Reload an adapter as a client does, at each port of a worker."""
        spoken = self.server.dialect
        release = release_of(spoken.models, spoken.backend)
        prefix = "" if release is not None and release.is_sglang else "/v1"
        for what, body in (("unload", {"lora_name": name}), ("load", {"lora_name": name, "lora_path": path})):
            for status, answer in self._ask_engine(worker, f"{prefix}/{what}_lora_adapter", body):
                assert status == 200, answer

    def _ask_engine(self, worker: int, path: str, body: Any) -> list[tuple[int, bytes]]:
        """Post to each port of a worker, past the process; return status and body of each answer."""
        found = []
        for port in self.server.inside.port(worker).ports:
            connection = http.client.HTTPConnection(port.url.removeprefix("http://"), timeout=self._seconds)
            try:
                sent = None if body is None else json.dumps(body)
                connection.request("POST", path, sent, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                found.append((answer.status, answer.read()))
            finally:
                connection.close()
        return found

    def judge_known_at_most(self, where: str, worker: int, prompt: str, most: int, **keys: Any) -> None:
        """Fail if the process reports more than `most` blocks of a prompt for a worker."""
        __tracebackhide__ = True
        if not self._contract.tells_blocks(keys):
            return
        for row in self._rows(Prompt(self.tokens_of(prompt), **keys), prompt, keys):
            if row["worker"] == worker and row["blocks"] > most:
                self.fail(f"{where}: it says {row['blocks']} blocks of what that held; expected 0 to {most}")

    def count_found(self, served: Sequence[tuple[int, str]]) -> int:
        """Return for how many prompts the process knows the worker that holds a part: by its report, or by its picks.

        Args:
            served: pairs of a worker and a prompt that it has served.
        """
        __tracebackhide__ = True
        if not self._contract.tells_blocks({}):
            return sum(self.picked("a prompt that a worker holds", prompt) == worker for worker, prompt in served)
        deadline, left = Deadline(self._seconds), list(served)
        while left:
            left = [
                (worker, prompt)
                for worker, prompt in left
                if not any(
                    row["worker"] == worker and row["blocks"]
                    for row in self._rows(Prompt(self.tokens_of(prompt)), prompt, {})
                )
            ]
            if not deadline.left:
                break
            self.pause()
        return len(served) - len(left)

    def judge(self, where: str, prompt: str, **keys: Any) -> None:
        """Fail unless the process knows the right blocks of a prompt: by its report, and by its pick.

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

    def judge_pick(self, where: str, prompt: str, *, as_ids: bool = False, **keys: Any) -> None:
        """Fail unless a completion in an idle fleet goes to a worker that holds most of its prompt."""
        __tracebackhide__ = True
        held = self.held(prompt, **keys)
        if not held:
            return
        worker = self.picked(where, prompt, as_ids=as_ids, **keys)
        if held.get(worker, 0) < max(held.values()):
            shown = ", ".join(f"worker {each} held {blocks} blocks" for each, blocks in sorted(held.items()))
            self.fail(f"{where}: a prompt of which {shown} was sent to worker {worker}, asked of an idle fleet")

    def wait_applied(self, where: str) -> None:
        """Wait until the process has applied the events so far: it repeatedly finds prompts that were served after
        them.
        """
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
                held = {str(each): blocks for each, blocks in self.held(text).items()}
                self.fail(
                    f"{where}: it does not find by events what engines serve ({self._seconds:g} s; the last prompt is "
                    f"held by {held}, and was served by worker {worker} before it was asked about)"
                )

    def _rows(self, asked: Prompt, prompt: str, keys: Mapping[str, Any]) -> list[dict[str, int]]:
        """Return the blocks that the process reports, as rows."""
        __tracebackhide__ = True
        rows = self._by_rank(asked, self._answer(prompt, keys))
        if not self.decode:
            return rows
        true = [row for row in self.server.expect(asked)["blocks"] if row["worker"] in self.decode and row["blocks"]]
        return [row for row in rows if row["worker"] not in self.decode] + true

    def _answer(self, prompt: str, keys: Mapping[str, Any]) -> Mapping[tuple[int, range], int]:
        """Return the blocks that the process reports, by worker and ranks."""
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
        return {self._ranks_of(key): blocks for key, blocks in answer.items()}

    def _ranks_of(self, key: Any) -> tuple[int, range]:
        """Return the worker that a key of an answer names, and the ranks that it may mean.

        An engine has the number that the process was given. A rank has its place behind the port, or, if the port has
        no such place, the number in its events.
        """
        told, *rank = key if isinstance(key, tuple) else (key,)
        behind = self._behind[told % len(self._behind)]
        if rank:
            (named,) = rank
            behind = behind[named : named + 1] or range(named, named + 1)
        return self._worker_of(told), behind

    def _by_rank(self, asked: Prompt, answer: Mapping[tuple[int, range], int]) -> list[dict[str, int]]:
        """Return rows for each rank. A number for a whole engine counts for its best rank; its other ranks are not
        checked.
        """
        rows: dict[tuple[int, int], int] = {}
        true = {(row["worker"], row["rank"]): row["blocks"] for row in self.server.expect(asked)["blocks"]}
        for (worker, behind), blocks in answer.items():
            ranks = [(worker, rank) for rank in behind]
            rows |= {each: true[each] for each in ranks if len(ranks) > 1 and each in true}
            rows[max(ranks, key=lambda each: true.get(each, 0))] = blocks
        return [{"worker": worker, "rank": rank, "blocks": blocks} for (worker, rank), blocks in rows.items() if blocks]

    # ------------------------------------------------------------------------------------------------- at the end

    def judge_nothing_open(self) -> None:
        """Fail unless no request is open in the engines, and the process, if it reports them, counts none."""
        __tracebackhide__ = True
        contract = self._contract
        self.wait_open(0, "at the end requests are still open in the engines")
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
            problem or f"at the end it counts {count} requests as open, and there are none ({self._seconds:g} s later)"
        )

    def held(self, prompt: str, **keys: Any) -> Mapping[int, int]:
        """Return the blocks of a prompt by worker, for the workers that hold any."""
        held = self.server.held(Prompt(self.tokens_of(prompt), **keys))
        return {worker: blocks for worker, blocks in held.items() if worker not in self.decode}

    def cool(self) -> None:
        """Wait for the declared time in which the process sends nothing to a failed worker."""
        deadline = Deadline(self._contract.cools_down_s)
        while deadline.left:
            self.pause()

    def pause(self) -> None:
        """Wait a moment between two questions; stop if the process ends."""
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
    """Return the workers that were asked, in words."""
    return ", ".join(f"worker {each.worker}" for each in asked) or "no worker"
