"""Promises of a router process in front of P/D pairs: two legs per request that meet and leave nothing behind.

One subject: the scenes of pairs, and the checks of each.

PYTEST_DONT_REWRITE: each message is complete; pytest would add the condition below it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from time import time
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pytest_kvmock.engines.backends import EngineProfile, speaker_of
from pytest_kvmock.engines.base.pair_options import IN_ROOMS
from pytest_kvmock.harness.router_harness import RouterHarness
from pytest_kvmock.servers.serve.kv_server import KvServer
from pytest_kvmock.testing.process.process_judge import FRESH, ProcessJudge, next_seed
from pytest_kvmock.testing.process.process_subject import WAYS
from pytest_kvmock.testing.subject import refuse
from pytest_kvmock.values.checks import is_integer, unknown_text
from pytest_kvmock.wire.codec.table import find_dialect
from pytest_kvmock.wire.sockets.waiting import Deadline

if TYPE_CHECKING:
    from pytest_kvmock.servers.serve.request_log import ServedRequest
    from pytest_kvmock.testing.process.process_client import PendingReply, Reply
    from pytest_kvmock.testing.process.process_world import ProcessWorld

_SIZE: Final = 16
_BURST: Final = 12
_IN_TURN: Final = 24
"""Prompts that come one by one. One of two prefill engines computes 12 of them or more: by chance it gets none of as
many later ones in 1 case of 4,096.
"""

_MOST_FRESH: Final = 6
"""The most prompts that follow when one engine has open legs and the other one has none."""

_MOMENT_S: Final = 0.3
"""Seconds to wait for a router that may leave the leg of a gone client open."""

_OTHERWISE: Final = ("test_a_client_that_goes_away_is_noticed", "test_it_uses_a_worker_at_its_new_address")
"""Tests that scenes of pairs replace: of clients that leave, and of engines that join."""

_LIMITS: Final = ("max_tokens", "max_completion_tokens", "min_tokens", "stream_options")
"""Fields of a body that a router changes for the prefill leg, and must leave unchanged in the decode leg."""


class ProcessPairs(ProcessJudge):
    """Scenes of P/D pairs; a part of `ProcessContract`."""

    holds_prefill: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Collect the scenes of pairs if `hand_over` is set, without the tests that they replace."""
        super().__init_subclass__(**options)
        for name in [name for name in vars(ProcessPairs) if name.startswith("test_")]:
            if cls.hand_over is None:
                setattr(cls, name, None)
            elif getattr(cls, name) is None:  # a base class has removed it
                setattr(cls, name, getattr(ProcessPairs, name))
        if cls.hand_over is not None:
            for name in _OTHERWISE:
                if name not in cls.__dict__:
                    setattr(cls, name, None)

    @classmethod
    def wrong_declaration(cls) -> str:
        """Return the first invalid or contradictory declaration of the class; "" if there is none."""
        if cls.hand_over is not None and cls.hand_over not in WAYS:
            return unknown_text("hand_over", cls.hand_over, WAYS)
        for name in ("falls_back", "holds_prefill"):
            if not isinstance(flag := getattr(cls, name), bool):
                return f"{name} must be True or False, got {flag!r:.80}"
        if not (cls.threshold is None or is_integer(cls.threshold, 0)):
            return f"threshold must be an integer of at least 0 (tokens), or None, got {cls.threshold!r:.80}"
        return super().wrong_declaration()

    @contextmanager
    def _pairs(
        self, kv_dialect: str, each: int = 2, *, dp_size: int = 1, starts: bool = True
    ) -> Iterator[ProcessWorld]:
        """Yield engines of each role with the process in front of them."""
        __tracebackhide__ = True
        dialect = find_dialect(kv_dialect)
        spec = speaker_of(dialect)
        if (self.hand_over == IN_ROOMS) is not (spec.scheduler == IN_ROOMS):
            refuse(self, f"hand_over {self.hand_over!r} is not that of engines of {kv_dialect}; see dialects")
        with ExitStack() as stack:
            sizes = EngineProfile(block_size=_SIZE, num_blocks=4096, dp_size=dp_size)
            problem = ""
            try:
                harness = stack.enter_context(RouterHarness(sizes, spec, roles=self.roles(each, each)))
            except ValueError as error:
                problem = str(error)
            if problem:
                refuse(self, f"hand_over {self.hand_over!r} over {kv_dialect}: {problem}; see dialects")
            options: dict[str, Any] = {"ports": self.ports, "timestamp": time, "keep_bodies": True}
            server = stack.enter_context(KvServer(harness, dialect, seed=next_seed(), **options))
            yield stack.enter_context(self._before(server, starts=starts))

    # ------------------------------------------------------------------------------------------------- the scenes

    def test_a_prompt_has_two_legs_that_meet(self, kv_dialect: str) -> None:
        """A prefill engine computes each prompt, also one below a block, and a decode engine reads it."""
        with self._pairs(kv_dialect) as world:
            text = world.text(6)
            for place, length in enumerate((5, _SIZE, 40, 90, 90)):  # the last prompt is cached by then
                options: dict[str, Any] = {"max_tokens": 5, "stream": place == 2}
                where = f"a prompt of {length} tokens"
                reply, rows = self._sent(world, text[:length], **options)
                self._judge_served(world, where, reply, rows, length)
                if not options["stream"]:
                    self._judge_usage(world, where, reply, rows, 5)
            self._judge_nothing_held(world, "prompts of many lengths were served")

    def test_bodies_of_both_legs_are_made_of_the_clients(self, kv_dialect: str) -> None:
        """With any limits of the client, the prefill leg has one token, and the decode leg has the client's limits."""
        with self._pairs(kv_dialect) as world:
            for more in (
                {},
                {"max_tokens": 3, "min_tokens": 2},
                {"max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}},
            ):
                sent = {"model": world.server.model, "prompt": world.text(2), **more}
                reply, rows = self._post(world, "/v1/completions", sent)
                self._judge_bodies(world, f"a completion with {more or 'no limits'}", sent, reply, rows)
            messages = [{"role": "user", "content": world.text(2)}]
            sent = {"model": world.server.model, "messages": messages, "max_completion_tokens": 3}
            reply, rows = self._post(world, "/v1/chat/completions", sent)
            self._judge_bodies(world, "a chat with max_completion_tokens", sent, reply, rows)
            self._judge_nothing_held(world, "bodies with limits of their own were served")

    def test_no_prefill_engine_is_not_passed_over_in_silence(self, kv_dialect: str) -> None:
        """All prefill engines refuse connections: the client gets an error, or is served if `falls_back` declares
        it.
        """
        with self._pairs(kv_dialect) as world:
            prefill = [each.worker for each in world.engines.of("prefill")]
            for worker in prefill:
                world.server.stop(worker)
            where = "no prefill engine takes connections"
            reply, rows = self._sent(world, world.text(3), max_tokens=2)
            if reply.status == 200 and not self.falls_back:
                world.fail(
                    f"{where}: the decode engine computed the prompt, and the client got 200; expected an error, "
                    "or falls_back = True, which declares it"
                )
            if reply.status != 200 and (reply.status is None or reply.status < 500):
                world.fail(
                    f"{where}: the client got {reply.text}, and {_legs_text(rows)}; expected a status from 500 on"
                )
            for worker in prefill:
                world.server.start(worker)
            world.cool()
            deadline = Deadline(self.timeout_s + self.cools_down_s)
            while True:
                _, rows = self._sent(world, world.text(3), max_tokens=2)
                if any(row.role == "prefill" for row in rows):
                    return
                if not deadline.left:
                    world.fail("prefill engines take connections again, and got no request")
                world.pause()

    def test_clients_that_leave_hold_nothing(self, kv_dialect: str) -> None:
        """Clients leave during prefill or decode: engines hold nothing afterwards."""
        with self._pairs(kv_dialect) as world:
            for phase in ("prefill", "decode"):
                held = [each.worker for each in world.engines.of(phase)]
                for worker in held:
                    world.server.hold(worker)
                came = sum(row.role == phase for row in world.server.requests)
                pending = world.begin(world.text(3), max_tokens=8, stream=phase == "decode")
                self._wait_rows(world, phase, 1 if phase == "prefill" else came + 1)
                pending.close()
                where = f"a client left while its {phase} leg was held"
                # With serial legs a router may let the first leg end, and still send the second one.
                self._wait_closed(world, where, held, may_stay=phase == "prefill" and self.hand_over != IN_ROOMS)
                for worker in held:
                    world.server.release(worker)
                world.wait_open(0, f"{where}, and a leg goes on in an engine")
                self._judge_nothing_held(world, where)

    def test_the_load_of_prefill_ends_with_its_leg(self, kv_dialect: str) -> None:
        """One prefill engine has computed prompts whose decode legs are open: it is idle, and gets new prompts."""
        if self.hand_over == IN_ROOMS or self.holds_prefill:
            self.skip(
                "both legs end together, or holds_prefill is True",
                "whether the load of a prefill engine ends with its leg",
                "a hand-over of one leg after the other",
            )
        if self.packs or self.first_of_equals:
            self.skip("packs or first_of_equals is True", "whether idle prefill engines are shared", "both False")
        with self._pairs(kv_dialect) as world:
            for engine in world.engines.of("decode"):
                world.server.hold(engine.worker)
            pending = self._decoded_later(world, _IN_TURN)
            picks = self._prefilled(world)
            if len(picks) < 2:
                world.fail(f"{_IN_TURN} prompts came one by one: prefill engines got {dict(picks)}; expected some each")
            (first, _), (second, _) = picks.most_common()
            rows = [row for row in world.server.requests if row.role == "prefill"]
            for row, each in zip(rows, pending, strict=True):
                if row.worker == second:
                    each.close()
            world.wait_legs(world.decode, picks[first], "clients left, and their decode legs go on")
            pending += self._decoded_later(world, picks[first])
            later = self._prefilled(world) - picks
            for each in pending:
                each.close()
            for engine in world.engines.of("decode"):
                world.server.release(engine.worker)
            if not later[first]:
                world.fail(
                    f"prefill engine {first} has computed {picks[first]} prompts that are still being decoded, "
                    f"and {second} none: of {picks[first]} more {first} got none; expected some, as both are idle: its "
                    "load is held to the end of the request (holds_prefill = True declares it)"
                )

    def _decoded_later(self, world: ProcessWorld, count: int) -> list[PendingReply]:
        """Send prompts one by one, each after the one before has its decode leg."""
        __tracebackhide__ = True
        return self._open_legs(world, "decode", count, len(world.server.requests))

    def _prefilled(self, world: ProcessWorld) -> Counter[int]:
        return Counter(row.worker for row in world.server.requests if row.role == "prefill")

    def test_requests_at_once_are_not_mixed_up(self, kv_dialect: str) -> None:
        """Many requests are open at once: the legs of each meet, and no two requests share a room or a transfer."""
        with self._pairs(kv_dialect) as world:
            for engine in world.engines.of("prefill"):
                world.server.hold(engine.worker)
            prompts = [world.text(2) for _ in range(6)]
            pending = [world.begin(prompt, max_tokens=3) for prompt in prompts]
            self._wait_rows(world, "prefill", len(prompts))
            self._judge_rooms(world)
            for engine in world.engines.of("prefill"):
                world.server.release(engine.worker)
            for prompt, each in zip(prompts, pending, strict=True):
                reply = each.finish()
                if reply.status != 200:
                    world.fail(f"6 requests were open at once: one was answered with {reply.text}; expected 200")
                if reply.generated != (expected := world.generated(prompt, 3)):
                    world.fail(f"6 requests were open at once: one got {reply.generated!r}; expected {expected!r}")
            self._judge_nothing_held(world, "6 requests were open at once")

    def test_legs_meet_at_one_rank(self, kv_dialect: str) -> None:
        """Engines have two ranks that hold prompts: each decode leg reads from the rank of its prefill leg."""
        self._needs_a_start("whether legs meet at one rank")
        with self._pairs(kv_dialect, dp_size=2) as world:
            where, prompts = "engines have two ranks", [world.text(4) for _ in range(_BURST)]
            if self.hears_events:
                for at, prompt in enumerate(prompts):
                    world.direct(world.workers[at % 2], prompt, rank=at // 2 % 2)
                if self.tells_blocks():  # without this check most events are applied by now: a wrong pick would hang
                    world.judge_blocks(where, prompts[-1])
            count = len(world.server.requests)
            for worker in world.workers:
                world.server.hold(worker)
            pending = []
            for number, prompt in enumerate(prompts):
                pending.append(world.begin(prompt, max_tokens=2))
                self._wait_rows(world, "prefill", number + 1, count)
            if self.hand_over != IN_ROOMS:
                for worker in world.workers:
                    world.server.release(worker)
            self._wait_rows(world, "decode", len(prompts), count)
            rows = world.server.requests[count:]
            self._judge_ranks(world, where, rows)
            for worker in world.workers:
                world.server.release(worker)
            for each in pending:
                if (reply := each.finish()).status != 200:
                    world.fail(f"{where}: a completion was answered with {reply.text}; expected 200")
            self._judge_nothing_held(world, where)
            if not any(row.rank for row in rows if row.role == "prefill"):
                self.skip(
                    "all prefill legs came to rank 0", "whether legs meet at another one", "a router that uses each"
                )

    def test_engines_that_join_change_no_load(self, kv_dialect: str) -> None:
        """Engines of one role join while the other role has open legs: these still count, and new engines are used."""
        moved, what = getattr(self, "moved", None), "engines of a role that join"
        if moved is None:
            self.skip("it has no moved(engines)", what, "moved(engines), which makes it use other engines,")
        self._needs_a_start(what)
        with self._pairs(kv_dialect, 3, starts=False) as world:
            roles = world.server.pairs.roles if world.server.pairs is not None else {}
            of_role = {role: [each for each, its in roles.items() if its == role] for role in ("prefill", "decode")}
            first = [*of_role["prefill"][:2], *of_role["decode"][:2]]
            world.engines = world.engines_of(first)
            world.start()
            for role, other in (("prefill", "decode"), ("decode", "prefill")):
                joined = of_role[other][-1]

                def join(joined: int = joined) -> None:
                    world.engines = self.engines = world.engines_of(sorted([*first, joined]))
                    moved(world.engines)

                if not self.counts_open or self.packs or self.first_of_equals:
                    join()
                else:
                    self._judge_load(world, role, of_role[role][:2], join, f"a {other} engine joined")
                if not (self.packs or self.first_of_equals):
                    count = len(world.server.requests)
                    for _ in range(FRESH):
                        self._sent(world, world.text(2), max_tokens=2)
                    got = Counter(row.worker for row in world.server.requests[count:] if row.role == other)
                    if not got[joined]:
                        world.fail(
                            f"{other} engine {joined} joined, and of {FRESH} completions it got none ({dict(got)}); "
                            "expected some"
                        )
                world.engines = self.engines = world.engines_of(first)
                moved(world.engines)
            self._judge_nothing_held(world, "engines joined")

    def _judge_load(
        self, world: ProcessWorld, role: str, workers: Sequence[int], happens: Callable[[], None], what: str
    ) -> None:
        """Fail unless open legs of one engine of a role still count after `happens`: new legs go to the other
        engine.
        """
        __tracebackhide__ = True
        before = len(world.server.requests)
        for worker in workers:
            world.server.hold(worker)
        pending = self._open_legs(world, role, _BURST, before)
        rows = [row for row in world.server.requests[before:] if row.role == role]
        open_at = Counter(row.worker for row in rows)
        busy = max(workers, key=lambda each: open_at[each])
        idle = next(each for each in workers if each != busy)
        world.server.release(idle)
        for row, each in zip(rows, pending, strict=True):
            if row.worker == idle:
                each.finish()
        world.server.hold(idle)
        happens()
        came = len(world.server.requests)
        fresh = min(open_at[busy] - 1, _MOST_FRESH) // 2 * 2  # even: each gets half if no load counts
        pending += self._open_legs(world, role, fresh, came)
        got = Counter(row.worker for row in world.server.requests[came:] if row.role == role)
        for worker in workers:
            world.server.release(worker)
        for each in pending:
            each.finish()
        if fresh and got[idle] * 2 <= fresh:
            world.fail(
                f"{role} engine {busy} has {open_at[busy]} open legs and {idle} none, and {what}: of {fresh} more "
                f"{idle} got {got[idle]}; expected more than half: the load of {role} engines was dropped"
            )

    def _open_legs(self, world: ProcessWorld, role: str, count: int, since: int) -> list[PendingReply]:
        """Send prompts one by one, each after the one before has its leg at a role, counted from request `since` on."""
        __tracebackhide__ = True
        pending = []
        for number in range(count):
            pending.append(world.begin(world.text(2), max_tokens=2))
            self._wait_rows(world, role, number + 1, since)
        return pending

    def test_several_children_leave_nothing(self, kv_dialect: str) -> None:
        """A client asks for n = 2: it is refused, or each child has a prefill leg, and nothing is left behind."""
        with self._pairs(kv_dialect) as world:
            sent = {"model": world.server.model, "prompt": world.text(2), "max_tokens": 2, "n": 2}
            reply, rows = self._post(world, "/v1/completions", sent)
            where = "a completion with n = 2"
            if reply.status is None or (reply.status != 200 and reply.status >= 500):
                world.fail(
                    f"{where} was answered with {reply.text}, and {_legs_text(rows)}; expected a refusal (400), or 2 "
                    "choices"
                )
            self._judge_nothing_held(world, where)

    def test_a_leg_that_fails_ends_the_other_one(self, kv_dialect: str) -> None:
        """Engines of one role answer 500, or prefill engines refuse a prompt: the client gets an error in time, and no
        leg continues.
        """
        with self._pairs(kv_dialect) as world:
            for role, status in (("prefill", 500), ("prefill", 400), ("decode", 500)):
                where = f"{role} engines answer {status}"
                workers = [each.worker for each in world.engines.of(role)]
                for worker in workers:
                    world.server.answer(worker, status, times=None)
                reply, rows = self._sent(world, world.text(2), max_tokens=2)
                told = reply.status is not None and (reply.status == status if status == 400 else reply.status >= 500)
                alone = self.falls_back and role == "prefill" and reply.status == 200
                if not told and not alone:
                    expected = "400, as the engine says" if status == 400 else "an error from 500 on"
                    world.fail(
                        f"{where}: the client got {reply.text} within {self.timeout_s:g} s, and {_legs_text(rows)}; "
                        f"expected {expected}"
                    )
                world.wait_open(0, f"{where}, and the other leg goes on in its engine")
                for worker in workers:
                    world.server.start(worker)
                if role == "prefill":
                    self._judge_nothing_held(world, where)
                world.cool()

    # --------------------------------------------------------------------------------------------- what is judged

    def _post(self, world: ProcessWorld, path: str, body: Mapping[str, Any]) -> tuple[Reply, list[ServedRequest]]:
        count = len(world.server.requests)
        reply = world.post(path, body).finish()
        return reply, world.server.requests[count:]

    def _sent(self, world: ProcessWorld, prompt: str, **options: Any) -> tuple[Reply, list[ServedRequest]]:
        """Send a completion to the process; return the answer, and all legs of it that engines saw."""
        count = len(world.server.requests)
        reply = world.begin(prompt, **options).finish()
        return reply, world.server.requests[count:]

    def _judge_served(
        self, world: ProcessWorld, where: str, reply: Reply, rows: Sequence[ServedRequest], length: int
    ) -> None:
        """Fail unless a prefill engine computed the prompt, and the decode leg read it there."""
        __tracebackhide__ = True
        prefill = [row for row in rows if row.role == "prefill"]
        decode = [row for row in rows if row.role == "decode"]
        if prefill and decode:
            self._judge_parameters(world, where, prefill[-1], decode[-1])
        if reply.status != 200 or not reply.is_whole:
            world.fail(f"{where}: the client got {reply.text}, and {_legs_text(rows)}; expected 200")
        if not decode:
            world.fail(f"{where}: no decode engine was asked, and the client got 200 ({_legs_text(rows)})")
        if not prefill:
            if self.threshold is not None and length >= self.threshold:
                world.fail(
                    f"{where}: it has no prefill leg, and the decode engine computed all of it; threshold = "
                    f"{self.threshold}"
                )
            return
        last = decode[-1]
        computed = last.prompt_tokens - (last.cached_tokens or 0)
        if self.hand_over != IN_ROOMS and computed > 1:
            world.fail(
                f"{where}: the decode engine computed {computed} tokens of it, and read nothing: its leg came with "
                f"kv_transfer_params {last.hand_over}"
            )

    def _judge_parameters(self, world: ProcessWorld, where: str, prefill: ServedRequest, decode: ServedRequest) -> None:
        """Fail unless the prefill leg asked for a hand-over, and the decode leg carries the parameters of its
        answer.
        """
        __tracebackhide__ = True
        if self.hand_over == IN_ROOMS:
            return
        if not (prefill.hand_over or {}).get("do_remote_decode"):
            world.fail(
                f"{where}: its prefill leg came with kv_transfer_params {prefill.hand_over}; expected a true "
                "do_remote_decode, without which nothing is kept"
            )
        came = decode.hand_over or {}
        if self.hand_over == "vllm-mooncake" and world.server.pairs is not None:
            name = world.server.pairs.engine_id(prefill.worker, prefill.rank)
            if came.get("remote_engine_id") != name:
                world.fail(
                    f"{where}: its decode leg names remote_engine_id {came.get('remote_engine_id')!r:.80}, but its "
                    f"prefill leg ran on {name!r}: the decode leg waits for its timeout"
                )
        for name, value in (prefill.handed or {"do_remote_prefill": True}).items():
            if came.get(name) != value:
                world.fail(
                    f"{where}: its decode leg came with {name} {came.get(name)!r:.80}; expected {value!r:.80}, as its "
                    "prefill engine said"
                )

    def _judge_usage(
        self, world: ProcessWorld, where: str, reply: Reply, rows: Sequence[ServedRequest], tokens: int
    ) -> None:
        """Fail unless the usage is that of one request: each token once, and the cached tokens of the prefill
        engine.
        """
        __tracebackhide__ = True
        usage = json.loads(reply.body).get("usage") or {}
        prefill = [row for row in rows if row.role == "prefill"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if usage.get("completion_tokens") not in (None, tokens):
            world.fail(f"{where}: usage has completion_tokens {usage['completion_tokens']}; expected {tokens}")
        says = self.hand_over != "vllm-mooncake"  # its prefill engines do not report this
        if says and prefill and cached is not None and cached != prefill[-1].cached_tokens:
            world.fail(
                f"{where}: usage has cached_tokens {cached}; expected {prefill[-1].cached_tokens}, what the prefill "
                "engine had of it"
            )

    def _judge_bodies(
        self, world: ProcessWorld, where: str, sent: Mapping[str, Any], reply: Reply, rows: Sequence[ServedRequest]
    ) -> None:
        """Fail unless the decode leg has the client's body, and the prefill leg asks for one token without a stream."""
        __tracebackhide__ = True
        if reply.status != 200:
            world.fail(f"{where}: the client got {reply.text}, and {_legs_text(rows)}; expected 200")
        for row in rows:
            body = json.loads(row.body)
            if row.role == "decode" or self.hand_over == IN_ROOMS:
                wrong = [name for name, value in sent.items() if body.get(name) != value]
                wrong += [name for name in (*_LIMITS, "stream") if name not in sent and body.get(name)]
                expected = {name: sent.get(name) for name in wrong}
            else:
                most = (None, 1) if body.get("max_completion_tokens") == 1 else (1,)
                allowed = {"max_tokens": most, "max_completion_tokens": (None, 1), "stream": (None, False)}
                expected = {name: each[-1] for name, each in allowed.items() if body.get(name) not in each}
                if (body.get("min_tokens") or 0) > 1:
                    expected["min_tokens"] = 1
            for name, value in expected.items():
                world.fail(f"{where}: its {row.role} leg has {name} {body.get(name)!r:.80}; expected {value!r:.80}")

    def _judge_rooms(self, world: ProcessWorld) -> None:
        """Fail unless each open room has one leg on each side."""
        __tracebackhide__ = True
        if self.hand_over != IN_ROOMS:
            return
        self._wait_rows(world, "decode", sum(row.role == "prefill" for row in world.server.requests))
        seen = [(room, leg) for _, _, room, leg in world.server.pairs.rooms] if world.server.pairs else []
        for (room, leg), count in Counter(seen).items():
            if count > 1:
                world.fail(f"room {room} was given to {count} {leg} legs that are open at once; expected one")
            if (room, "decode" if leg == "prefill" else "prefill") not in seen:
                world.fail(f"room {room} has a {leg} leg, and no other one: legs of a request must share it")

    def _judge_ranks(self, world: ProcessWorld, where: str, rows: Sequence[ServedRequest]) -> None:
        """Fail unless each decode leg reads from the rank of its prefill leg."""
        __tracebackhide__ = True
        assert world.server.pairs is not None
        at: dict[tuple[int, str], tuple[int, int]] = {}
        for worker, rank, room, leg in world.server.pairs.rooms:
            at[room, leg] = worker, rank
        for (room, leg), (worker, rank) in at.items():
            there = at.get((room, "prefill"))
            if leg == "decode" and there is not None and there != (worker, rank):
                world.fail(
                    f"{where}: the prefill leg of room {room} is at rank {there[1]} of engine {there[0]}, and its "
                    f"decode leg waits at rank {rank} of {worker}: disagg_prefill_dp_rank says where, or else the room "
                    "by its remainder"
                )
        by_number = {row.number: row for row in rows}
        for row in rows:
            legs = [by_number[each] for each in row.legs if each in by_number]
            prefill = [each for each in legs if each.role == "prefill"]
            if row.role == "decode" and self.hand_over != IN_ROOMS and prefill:
                self._judge_parameters(world, f"{where}: a leg at rank {prefill[-1].rank}", prefill[-1], row)

    def _judge_nothing_held(self, world: ProcessWorld, where: str) -> None:
        """Fail if engines still hold blocks for legs that never come."""
        __tracebackhide__ = True
        assert world.server.pairs is not None
        deadline = Deadline(min(1.0, self.timeout_s))
        while leases := world.server.pairs.leased:
            if not deadline.left:
                shown = "; ".join(
                    f"{world.server.pairs.roles[worker]} engine {worker} holds {lease.num_blocks} of request "
                    f"{lease.request} ({lease.phase})"
                    for worker, each in leases.items()
                    for lease in each
                )
                world.fail(f"{where}, and blocks are held that no leg asks for: {shown}")
            world.pause()

    def _wait_rows(self, world: ProcessWorld, role: str, count: int, since: int = 0) -> None:
        """Wait until `count` legs have come to the engines of a role, counted from request `since` on."""
        __tracebackhide__ = True
        deadline = Deadline(self.timeout_s)
        while (came := sum(row.role == role for row in world.server.requests[since:])) < count:
            if not deadline.left:
                world.fail(f"{count} {role} legs were waited for, and {came} came within {self.timeout_s:g} s")
            world.pause()

    def _wait_closed(self, world: ProcessWorld, where: str, workers: Sequence[int], *, may_stay: bool) -> None:
        """Wait until no leg is open in these engines; with `may_stay`, wait only a moment."""
        __tracebackhide__ = True
        deadline = Deadline(_MOMENT_S if may_stay else self.timeout_s)
        ports = world.server.inside.ports
        while left := sum(loop.num_open for worker in workers for loop in ports[worker].loops):
            if not deadline.left and may_stay:
                return
            if not deadline.left:
                world.fail(f"{where}, and {left} of its legs is open in an engine still {self.timeout_s:g} s later")
            world.pause()


def _legs_text(rows: Sequence[ServedRequest]) -> str:
    """Describe which legs reached an engine, and how each was answered."""
    legs = [f"its {row.role} leg was answered with {row.status or 'nothing'}" for row in rows]
    return ", ".join(legs) or "no leg reached an engine"
