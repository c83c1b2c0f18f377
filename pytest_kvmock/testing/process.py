"""What every router process promises, as tests that the tests of one inherit: it believes what is true, and passes on what it is given.

One subject: the promises. `process_subject` has what is given of it, `process_judge` what tests have in common, `process_world` engines behind
sockets, the process, what is sent and what is asked.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_kvmock.backends import served_by, speaker_of
from pytest_kvmock.testing.process_client import DONE
from pytest_kvmock.testing.process_judge import FRESH, ProcessJudge
from pytest_kvmock.testing.process_world import asked_text
from pytest_kvmock.wire import find_dialect

if TYPE_CHECKING:
    from pytest_kvmock.serve.kv_server import KvServer

_ENDED: Final = 30
"""Requests that end well on one worker, each with two blocks of its own as `FRESH` have.

Who counts any of it for ever sends it none of those.
"""

_MAY_BE_LATE: Final = 2
"""So many of these may go elsewhere: a client may have the end of an answer before the process has counted it."""

_PICTURE: Final = "data:image/png;base64,iVBORw0KGgo="

_fleet = pytest.mark.kvmock(workers=2, num_blocks=4096)


class ProcessContract(ProcessJudge):
    """Tests that hold for every router that is a process.

    A subclass says how it is started, and how it is asked what it knows::

        class TestMyRouter(ProcessContract):
            def command(self, engines):
                return ["./router", "--port", str(engines.port), *engines.urls]

            def blocks(self, prompt):  # if it can be asked
                return {0: 4}

    Each test starts engines by `make_kv_server`, and the process before them. What it cannot answer, or is not made for, is a skip that says
    what was not judged and what would let it.

    Two more methods may be there. `open_requests(self)` returns how many requests it counts as open: after each test that must be none.
    `moved(self, engines)` has it use other engines from then on: a worker that comes up under a new address is judged by it.

    Attributes:
        dialects: what engines speak; each test runs over each.
        url: of a process that runs already, in place of a `command`; its engines listen at `ports`. Within a test the process that is
            judged.
        ports: `http`, `events` and `replay` of the first of two engines, as `KvServer` takes them; the second has the next ones.
        timeout_s: seconds within which it does what is waited for; there is no other limit.
        headers: what a client sends must reach the engine.
        packs: it fills one worker before it uses another, on purpose: that each gets some is not judged.
        first_of_equals: of workers that are alike it takes the first, on purpose: that an idle fleet is shared is not judged.
        follows_prefix: a prompt goes where its prefix is, however loaded that is; else an idle fleet alone is asked.
        goes_by_prefix: it sends a prompt to who holds most of it. False: where it sends prompts says nothing of what it knows.
        retries: what an engine did not answer is sent to another one, so that a client notices nothing.
        hears_events: it hears the events of engines. False: it knows what it has sent alone.
        counts_open: its own open requests count where it chooses.
        engines: those that it was told of, within a test.
    """

    # --------------------------------------------------------------------------------------------- events, as they come

    @_fleet
    def test_it_hears_every_worker(self, make_kv_server: Callable[..., KvServer]) -> None:
        """What each worker stores is known."""
        with self._listening(make_kv_server) as world:
            prompts = [world.text(8) for _ in world.workers]
            for worker, prompt in zip(world.workers, prompts, strict=True):
                world.direct(worker, prompt)
            for worker, prompt in zip(world.workers, prompts, strict=True):
                world.judge(f"worker {worker} has served a prompt", prompt)

    @_fleet
    def test_it_asks_for_what_was_before_it_came(self, make_kv_server: Callable[..., KvServer]) -> None:
        """What engines published before the process came is known, by a replay."""
        self._needs_events()
        self._needs_a_start("whether it asks for what was published before it came")
        with self._world(make_kv_server, starts=False) as world:
            prompts = [world.text(8) for _ in world.workers]
            for worker, prompt in zip(world.workers, prompts, strict=True):
                world.direct(worker, prompt)
            world.start()
            for worker, prompt in zip(world.workers, prompts, strict=True):
                world.judge(f"worker {worker} has served a prompt before the process came, and can replay it", prompt)

    @_fleet
    def test_it_asks_for_a_lost_batch(self, make_kv_server: Callable[..., KvServer]) -> None:
        """A batch is lost on its way; the next one shows the gap."""
        with self._listening(make_kv_server) as world:
            self._strike(world, "lose", "a batch of worker {} was lost on its way, and it can replay it")

    @_fleet
    def test_a_batch_that_comes_twice_changes_nothing(self, make_kv_server: Callable[..., KvServer]) -> None:
        """A batch is doubled on its way: it is no restart, and what is in it is stored once."""
        with self._listening(make_kv_server) as world:
            for worker in self._struck(world):
                where = f"a batch of worker {worker} came twice"
                before, prompt = world.text(8), world.text(8)
                world.direct(worker, before)
                world.server.fault(worker, "double")
                world.direct(worker, prompt)
                world.judge(where, prompt)
                world.judge(f"{where}, of what was stored before it", before)
            if not self.tells_blocks():
                return
            while world.server.held(prompt):
                world.direct(1, world.text(64))
            world.judge(f"{where}, and then the blocks of it were evicted", prompt)

    @_fleet
    def test_batches_out_of_order_are_put_in_order(self, make_kv_server: Callable[..., KvServer]) -> None:
        """Two batches change places, of which the second continues what the first has stored."""
        with self._listening(make_kv_server) as world:
            for worker in self._struck(world):
                prompt = world.text(8)
                self._heard_from(world, worker)
                world.server.fault(worker, "reorder")
                world.direct(worker, prompt[: len(prompt) // 2])
                world.direct(worker, prompt)
                world.direct(worker, world.text())
                world.judge(f"two batches of worker {worker} came in reverse order", prompt)

    @_fleet
    def test_a_corrupt_batch_does_not_stop_it(self, make_kv_server: Callable[..., KvServer]) -> None:
        """A batch cannot be decoded; a replay has it as it was, and those after it are as ever."""
        with self._listening(make_kv_server) as world:
            self._strike(world, "corrupt", "a batch of worker {} was corrupt, and it can replay it as it was")

    @_fleet
    def test_a_field_of_a_later_release_does_not_stop_it(self, make_kv_server: Callable[..., KvServer]) -> None:
        """Events have a field that their dialect does not have."""
        with self._listening(make_kv_server) as world:
            self._strike(world, "extra_field", "events of worker {} had a field that their dialect does not have")

    @_fleet
    def test_a_restart_empties_a_worker(self, make_kv_server: Callable[..., KvServer]) -> None:
        """A worker that restarts is empty, and numbers its batches from 0."""
        with self._listening(make_kv_server) as world:
            self._forget(world, "worker 1 has restarted", lambda: world.server.restart(1))

    @_fleet
    def test_a_cleared_cache_is_empty(self, make_kv_server: Callable[..., KvServer]) -> None:
        """A worker publishes Cleared."""
        with self._listening(make_kv_server) as world:
            self._forget(world, "the cache of worker 1 was cleared", lambda: world.server.reset(1))

    @pytest.mark.kvmock(workers=2, num_blocks=64)
    def test_what_is_evicted_is_forgotten(self, make_kv_server: Callable[..., KvServer]) -> None:
        """A cache is so small that blocks are evicted."""
        with self._listening(make_kv_server) as world:

            def evict() -> None:
                while world.server.held(prompt).get(1):
                    world.direct(1, world.text(16))

            prompt = world.text(8)
            self._forget(world, "the blocks of worker 1 were evicted", evict, prompt)

    @pytest.mark.kvmock(workers=2, num_blocks=16)
    def test_a_block_is_held_until_its_last_copy_goes(self, make_kv_server: Callable[..., KvServer]) -> None:
        """An engine holds a block twice, publishes both copies, and evicts one after the other."""
        self._needs_events()
        self._needs_blocks("copies of a block")
        with self._world(make_kv_server) as world:
            if not world.server.harness.worker(0).traits.copies:
                self.skip(
                    f"engines of {world.server.dialect.name} publish no copies", "copies of a block", "vLLM's dialect"
                )
            prompt = world.text(4)
            for _ in range(2):  # the last block is computed again, and held twice
                world.direct(0, prompt)
            where = "worker 0 held a block twice, and has evicted one copy"
            while world.server.held(prompt):
                world.judge_blocks(where, prompt)
                world.push(where, 0, world.text(1))
            world.judge_blocks("worker 0 held a block twice, and has evicted both copies", prompt)

    def test_what_leaves_the_host_does_not_leave_the_device(self, kv_dialect: str) -> None:
        """Blocks are copied to the host of a worker and leave it again: events of the host say nothing of the device."""
        self._needs_events()
        self._needs_blocks("what it makes of a host below the device")
        self._needs_a_start("what it makes of a host below the device")
        dialect = find_dialect(kv_dialect)
        if "tiers" not in speaker_of(dialect).options or not dialect.media:
            self.skip(
                f"{kv_dialect} has no events of a host", "what it makes of a host below the device", "vLLM's dialect"
            )
        with self._special(kv_dialect, num_blocks=64, tiers={"host": 8, "self_describing": True}) as world:
            prompt = world.text(4)
            world.direct(0, prompt)
            where = "worker 0 holds a prompt in its device, which its host had and evicted"
            for _ in range(4):  # the host holds two such prompts, and the device all
                world.push(where, 0, world.text(4))
            world.judge_blocks(where, prompt)
            while world.server.held(prompt):
                world.direct(0, world.text(4))
            world.judge_blocks("worker 0 has evicted a prompt from its device, and before that from its host", prompt)

    def test_it_reads_a_hybrid_model(self, kv_dialect: str) -> None:
        """Engines serve gpt-oss: a window names what it keeps, which is no promise, and what it drops is still held."""
        self._needs_events()
        self._needs_a_start("what it makes of gpt-oss")
        dialect = find_dialect(kv_dialect)
        if served_by(dialect, "gpt-oss").traits_at(16).publishes_groups and not dialect.mocks_groups:
            self.skip(f"{kv_dialect} has no cache groups", "what it makes of gpt-oss", "the dialect of a later release")
        with self._special(kv_dialect, model="gpt-oss", num_blocks=300) as world:
            where = "worker 0 serves gpt-oss"
            prompt, after = world.text(30), world.text(10)
            world.direct(0, prompt + "x", max_tokens=40)
            world.direct(0, prompt[: len(prompt) // 2] + "y")
            world.push(where, 0, after + "x")  # as it stands; without its last token it is no promise
            world.judge(f"{where}, and has served a prompt of 30 blocks and half of it", prompt)
            world.judge(f"{where}, and has served another prompt after outputs of 40 tokens", after)
            if not self.tells_blocks():
                return
            while world.server.held(prompt):
                world.judge_blocks(f"{where}, and has evicted some of its windows", prompt)
                world.push(where, 0, world.text(10) + "x")
            world.judge_blocks(f"{where}, and has evicted a prompt", prompt)

    def test_it_hears_every_rank(self, kv_dialect: str) -> None:
        """Each worker has two ranks, which publish at endpoints of their own."""
        self._needs_events()
        self._needs_a_start("whether it hears every rank")
        with self._special(kv_dialect, dp_size=2) as world:
            places = [(worker, rank) for worker in world.workers for rank in (1, 0)]
            prompts = [world.text(6) for _ in places]
            for (worker, rank), prompt in zip(places, prompts, strict=True):
                world.direct(worker, prompt, rank=rank)
            for (worker, rank), prompt in zip(places, prompts, strict=True):
                world.judge(f"rank {rank} of worker {worker} has served a prompt", prompt)

    @_fleet
    def test_a_salt_and_an_adapter_make_other_prompts(self, make_kv_server: Callable[..., KvServer]) -> None:
        """The same tokens with another salt, or another adapter, are held by somebody else."""
        self._needs_events()
        with self._world(make_kv_server, adapters=["tenant-lora"]) as world:
            keys: dict[str, Any] = {"cache_salt": "tenant-a", "lora_name": "tenant-lora"}
            for name in [each for each in speaker_of(world.server.dialect).prompt_keys if each in keys]:
                prompt, key = world.text(8), {name: keys[name]}
                world.direct(0, prompt)
                world.direct(1, prompt[: len(prompt) // 2], **key)
                where = f"worker 0 holds 8 blocks of a prompt, and worker 1 4 of them with a {name} of their own"
                world.judge(where, prompt)
                world.judge(f"{where}, asked with that", prompt, **key)

    # ---------------------------------------------------------------------------------------- workers that come and go

    @_fleet
    def test_it_lives_without_a_worker(self, make_kv_server: Callable[..., KvServer]) -> None:
        """A worker refuses connections, and then one drains: what is asked for is served by the other."""
        with self._world(make_kv_server) as world:
            for what, stop, gone in (("is down", world.server.stop, 0), ("drains", world.server.drain, 1)):
                where = f"worker {gone} {what}, and refuses connections"
                warm = world.text(8)
                world.direct(gone, warm)
                if self.hears_events:
                    world.judge(f"before {where}", warm)
                stop(gone)
                for prompt in (warm, *(world.text(2) for _ in range(4))):
                    reply, asked = world.send(prompt)
                    self._judge_refused(world, where, reply, asked)
                world.server.start(gone)
                world.wait_back(gone)

    @_fleet
    def test_it_uses_a_worker_that_is_back(self, make_kv_server: Callable[..., KvServer]) -> None:
        """A worker refuses connections for a while, and is up again under the same address."""
        with self._world(make_kv_server) as world:
            world.server.stop(1)
            for _ in range(4):
                world.send(world.text(2))
            world.server.start(1)
            world.wait_back(1)
            if self.hears_events:
                prompt = world.text(8)
                world.direct(1, prompt)
                world.judge("worker 1 was down, is up again under the same address, and has served a prompt", prompt)

    @pytest.mark.kvmock(workers=3, num_blocks=4096)
    def test_it_uses_a_worker_at_its_new_address(self, make_kv_server: Callable[..., KvServer]) -> None:
        """A worker is gone, and comes up under another address, which the process is told."""
        moved = getattr(self, "moved", None)
        what = "whether it uses a worker that comes up under a new address"
        if moved is None:
            self.skip("it has no moved(engines)", what, "moved(engines), which has it use other engines")
        self._needs_a_start(what)
        with self._world(make_kv_server, spare=1) as world:
            where = "worker 1 is gone, and worker 2 has come in its place"
            world.picked("before that", world.text())
            world.server.stop(1)
            world.engines = self.engines = world.engines_of([0, 2])
            moved(world.engines)
            if self.hears_events:
                world.wait_subscribed(f"{where}: it does not subscribe to the new one")
                prompt = world.text(8)
                world.direct(2, prompt)
                world.judge(where, prompt)
            picks = Counter(world.picked(where, world.text(2)) for _ in range(FRESH))
            if not self.packs and not self.first_of_equals and not picks[2]:
                world.fail(f"{where}: of {FRESH} prompts that nobody holds worker 2 got none; expected some")

    # --------------------------------------------------------------------------------------------- what it passes on

    @_fleet
    def test_an_answer_is_the_engines(self, make_kv_server: Callable[..., KvServer]) -> None:
        """An answer, whole and as a stream, is that of the engine."""
        with self._world(make_kv_server) as world:
            prompt = world.text()
            for stream in (False, True):
                expected = world.direct(0, prompt, max_tokens=5, stream=stream)
                reply, _ = world.send(prompt, max_tokens=5, stream=stream)
                where = "a completion as a stream" if stream else "a completion"
                if reply.status != 200 or not reply.is_whole:
                    world.fail(f"{where}: {reply.text}; expected 200")
                if (got := reply.generated) != expected.generated:
                    world.fail(f"{where}: it answers {got!r}; the engine answers {expected.generated!r}")
                if stream and len(reply.chunks) != len(expected.chunks):
                    world.fail(f"{where}: {len(reply.chunks)} chunks; the engine sends {len(expected.chunks)}")

    @_fleet
    def test_a_stream_passes_token_by_token(self, make_kv_server: Callable[..., KvServer]) -> None:
        """The second chunk is there before the last one is made."""
        with self._world(make_kv_server) as world:
            world.server.hold()
            pending = world.begin(world.text(), stream=True, max_tokens=4)
            world.wait_open(1, "a stream was asked for, and no engine has it")
            world.server.step(2)
            came = pending.chunks(2)
            if len(came) < 2:
                pending.close()
                world.fail(
                    f"a stream of 4 tokens, of which 2 are made and the others held back: {len(came)} chunks came within {self.timeout_s:g} s; "
                    "expected 2: each is passed on as it comes"
                )
            world.server.release()
            reply = pending.finish()
            if not reply.is_finished or not reply.is_whole:
                world.fail(f"a stream of 4 tokens did not come to its end: {reply.text}")

    @_fleet
    def test_a_refusal_of_a_request_passes_through(self, make_kv_server: Callable[..., KvServer]) -> None:
        """Engines answer 400, 404 and 422: the client is told so, in their words."""
        with self._world(make_kv_server) as world:
            for status in (400, 404, 422):
                self._refused_by_all(world, status)

    @_fleet
    def test_a_limit_of_requests_passes_through(self, make_kv_server: Callable[..., KvServer]) -> None:
        """Engines answer 429 with Retry-After: the client is told both."""
        with self._world(make_kv_server) as world:
            self._refused_by_all(world, 429, {"Retry-After": "7"})

    @_fleet
    def test_an_error_of_an_engine_passes_through(self, make_kv_server: Callable[..., KvServer]) -> None:
        """Engines answer 500 and 503: the client is told so; where one alone does, another one may have served it."""
        with self._world(make_kv_server) as world:
            for status in (500, 503):
                self._refused_by_all(world, status)
            world.server.answer(0, 503, times=None)
            for _ in range(4):
                reply, asked = world.send(world.text(2))
                self._judge_status(world, "worker 0 answers 503", reply, asked, may_break=True)

    @_fleet
    def test_a_stream_that_is_cut_is_not_finished(self, make_kv_server: Callable[..., KvServer]) -> None:
        """Engines die after two chunks of a stream: it has no end, and is not begun again."""
        with self._world(make_kv_server) as world:
            for worker in world.workers:
                world.server.cut(worker, after_chunks=2)
            reply, asked = world.send(world.text(), stream=True, max_tokens=6)
            where = "an engine died after 2 of 6 chunks of a stream"
            chunks = [each for each in reply.chunks if '"error"' not in each and each != DONE]
            if len(asked) != 1 or len(chunks) > 2:
                world.fail(
                    f"{where}: {len(asked)} engines were asked and {len(chunks)} chunks came; expected 1 and 2: what was sent cannot be taken back"
                )
            if reply.is_finished:
                world.fail(f"{where}: the client was told that it is finished ({reply.chunks[-1]})")
            if reply.status == 200 and reply.is_whole and reply.has_an_end and not reply.reports_error:
                world.fail(
                    f"{where}: the client got the end of an answer, and no error; expected a connection that is cut, or an error"
                )

    @_fleet
    def test_an_answer_that_never_came_is_no_success(self, make_kv_server: Callable[..., KvServer]) -> None:
        """An engine dies before it answers: another one is asked, or the client is told."""
        with self._world(make_kv_server) as world:
            for stream in (False, True):
                for worker in world.workers:
                    world.server.cut(worker)
                reply, asked = world.send(world.text(), stream=stream)
                self._judge_status(world, "an engine died before it answered", reply, asked)
                for worker in world.workers:
                    world.server.start(worker)

    @_fleet
    def test_a_client_that_goes_away_is_noticed(self, make_kv_server: Callable[..., KvServer]) -> None:
        """A client closes its connection: its request is aborted in the engine."""
        with self._world(make_kv_server) as world:
            for stream in (True, False):
                count = len(world.server.requests)
                world.server.hold()
                pending = world.begin(world.text(), stream=stream, max_tokens=8)
                world.wait_open(1, "a completion was asked for, and no engine has it")
                if stream:
                    world.server.step(1)
                    pending.chunks(1)
                pending.close()
                what = f"the client of {'a stream' if stream else 'an answer that is no stream'} went away"
                world.wait_open(0, f"{what}, and its request goes on in the engine")
                world.server.release()
                world.picked("after that", world.text())
                asked = world.server.requests[count:-1]
                if len(asked) > 1:
                    world.fail(f"{what}, and it was sent on again: {asked_text(asked)}; expected one worker")

    @_fleet
    def test_what_a_client_sends_reaches_the_engine(self, make_kv_server: Callable[..., KvServer]) -> None:
        """Salt, adapter, images and headers, and a field that nobody knows, come to the engine as they were sent."""
        with self._world(make_kv_server, adapters=["tenant-lora"], keep_bodies=True) as world:
            path, body = self.completion(world.text(), cache_salt="tenant-a", lora_name="tenant-lora")
            picture = {"type": "image_url", "image_url": {"url": _PICTURE}}
            parts = [{"type": "text", "text": world.text()}, picture]
            chat = {"model": world.server.model, "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
            for what, sent in ((path, body), ("/v1/chat/completions", chat)):
                sent |= {"user": "kvmock", "kvmock_field": {"a": [1]}}
                reply = world.post(what, sent, self.headers).finish()
                if reply.status != 200 or not world.server.requests:
                    world.fail(f"{what} was answered with {reply.text}; expected 200")
                row = world.server.requests[-1]
                if row.path != what:
                    world.fail(f"{what} came to an engine as {row.path}")
                came = json.loads(row.body)
                lost = [
                    f"{name} came to an engine as {came.get(name)!r:.200}; {value!r:.200} was sent"
                    for name, value in sent.items()
                    if came.get(name) != value
                ]
                lost += [
                    f"header {name} came to an engine as {row.headers.get(name.lower())!r:.200}; {header!r} was sent"
                    for name, header in self.headers.items()
                    if row.headers.get(name.lower()) != header
                ]
                if lost:
                    world.fail(f"{what}: {'; '.join(lost)}")

    # --------------------------------------------------------------------------------------------- where it sends

    @_fleet
    def test_an_idle_fleet_is_shared(self, make_kv_server: Callable[..., KvServer]) -> None:
        """Prompts of which nobody holds a block come one by one: each worker gets some."""
        for name in ("packs", "first_of_equals"):
            if getattr(self, name):
                self.skip(f"{name} is True", "whether an idle fleet is shared", f"{name} = False")
        with self._world(make_kv_server) as world:
            where = "prompts that nobody holds come one by one"
            picks = Counter(world.picked(where, world.text(2)) for _ in range(FRESH))
            self._each_got_some(world, where, picks)

    @_fleet
    def test_a_prompt_goes_where_it_is(self, make_kv_server: Callable[..., KvServer]) -> None:
        """Asked of an idle fleet, a prompt goes to who holds most of it: by events, or by what the process has sent."""
        if not self.goes_by_prefix:
            self.skip("goes_by_prefix is False", "whether a prompt goes where it is", "goes_by_prefix = True")
        with self._world(make_kv_server) as world:
            prompts = [world.text(8) for _ in range(8)]
            where = "eight prompts were served"
            for number, prompt in enumerate(prompts):
                if self.hears_events:
                    world.direct(number // 2 % 2, prompt)
                else:
                    world.picked(where, prompt)
            for prompt in prompts:
                if self.hears_events:
                    world.judge(where, prompt)
                else:
                    world.judge_pick(where, prompt)

    @_fleet
    def test_open_requests_count(self, make_kv_server: Callable[..., KvServer]) -> None:
        """One worker has all open requests: what nobody holds goes to the other one; with `follows_prefix` what it holds goes to it still."""
        self._needs_open("whether open requests count where it chooses")
        with self._world(make_kv_server) as world:
            prompt = world.text(8)
            busy = self._known_at(world, prompt)
            world.server.hold()
            pending = []
            for number in range(6):
                pending.append(world.begin(prompt, max_tokens=2))
                world.wait_open(number + 1, "completions were asked for, and engines do not have them")
            rows = world.server.requests[-6:]
            there = sum(each.worker == busy for each in rows)
            if self.follows_prefix and there < 6:
                world.fail(
                    f"follows_prefix is True, and of 6 requests for what worker {busy} holds {there} went there, as it was loaded"
                )
            load = Counter(each.worker for each in rows)
            least = min(world.workers, key=lambda each: load[each])
            fresh = abs(load[world.workers[0]] - load[world.workers[1]])
            for number in range(fresh):
                pending.append(world.begin(world.text(2), max_tokens=2))
                world.wait_open(7 + number, "completions were asked for, and engines do not have them")
            got = Counter(each.worker for each in world.server.requests[-fresh:]) if fresh else Counter()
            world.server.release()
            for each in pending:
                each.finish()
            if fresh and got[least] * 2 <= fresh:
                shown = ", ".join(f"worker {each} {load[each]}" for each in world.workers)
                world.fail(
                    f"of open requests {shown}: of {fresh} more, which nobody holds, worker {least} got {got[least]}; expected more than half"
                )

    @_fleet
    def test_what_ended_badly_is_no_load(self, make_kv_server: Callable[..., KvServer]) -> None:
        """Requests of one worker are left by their clients, cut and refused: then it is as idle as before."""
        self._needs_open("whether what ended badly counts as load")
        with self._world(make_kv_server) as world:
            prompt = world.text(8)
            worker = self._known_at(world, prompt)
            for number in range(6):  # of 6 that go away, streams and others
                world.server.hold()
                pending = world.begin(self._next_of(world, prompt), stream=number % 2 == 0, max_tokens=8)
                world.wait_open(1, "a completion was asked for, and no engine has it")
                if number % 4 == 0:  # of streams some have begun: one whose head has not come is left in another way
                    world.server.step(1)
                    pending.chunks(1)
                pending.close()
                world.wait_open(0, "its client went away, and a request goes on in the engine")
                world.server.release()
            for status in (400, 429, 500):
                world.server.answer(worker, status)
                world.send(self._next_of(world, prompt))
                world.server.start(worker)
            for chunks in (1, 3):
                world.server.cut(worker, after_chunks=chunks)
                world.send(self._next_of(world, prompt), stream=True, max_tokens=6)
                world.server.start(worker)
            self._still_used(world, f"11 requests of worker {worker} ended badly, and nothing is open", worker)

    @_fleet
    def test_what_ended_well_is_no_load(self, make_kv_server: Callable[..., KvServer]) -> None:
        """A worker serves many requests to their end, one by one: each goes where it is held.

        At last the worker is as idle as before.
        """
        self._needs_open("whether what ended well counts as load")
        with self._world(make_kv_server) as world:
            prompt = world.text(8)
            worker = self._known_at(world, prompt)
            ended = elsewhere = 0
            for number in range(_ENDED):
                where = f"{ended} requests of worker {worker} ended well, and nothing is open"
                picked = world.picked(where, self._next_of(world, prompt), stream=number % 2 == 0, max_tokens=2)
                if picked == worker:
                    ended += 1
                    continue
                elsewhere += 1
                if elsewhere > _MAY_BE_LATE:
                    world.fail(
                        f"{where}: {elsewhere} of {number + 1} prompts went to worker {picked}, where worker {worker} alone held their "
                        "first 8 blocks: what ended is counted as load still"
                    )
                if not (self.hears_events and self.tells_blocks()):
                    break  # the other one holds this prompt now, and when another one is known cannot be seen
                prompt = self._heard_from(world, worker)
            where = f"{ended} requests of worker {worker} ended well, and nothing is open"
            self._still_used(world, where, worker)

    # ------------------------------------------------------------------------------------------------------- its end

    @_fleet
    def test_it_ends_cleanly_while_requests_are_open(self, make_kv_server: Callable[..., KvServer]) -> None:
        """It gets SIGTERM while requests are open, which go on: it ends within the time, without an error."""
        self._needs_a_start("how it ends")
        with self._world(make_kv_server) as world:
            assert world.process is not None
            world.server.hold()
            pending = [world.begin(world.text(), stream=stream, max_tokens=4) for stream in (True, False)]
            world.wait_open(2, "completions were asked for, and engines do not have them")
            world.process.terminate()
            world.server.release()
            for each in pending:
                each.finish()
            code = world.process.wait()
            if code is None:
                world.fail(f"it was asked to end while requests were open, and runs still {self.timeout_s:g} s later")
            if code not in (0, -15, 143):
                world.fail(
                    f"it was asked to end while requests were open: exit code {code}; expected 0, or that of SIGTERM"
                )
