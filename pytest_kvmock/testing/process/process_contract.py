"""The promises of every router process, as tests that a process's test class inherits: its beliefs are right, and it
passes on what it receives.

One subject: the promises. `process_subject` has the declarations of a process, `process_judge` the common parts of
the tests, and `process_world` engines behind sockets, the process, and the requests to it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_kvmock.engines.backends import served_by, speaker_of
from pytest_kvmock.testing.process.process_client import DONE
from pytest_kvmock.testing.process.process_judge import FRESH, host_of
from pytest_kvmock.testing.process.process_pairs import ProcessPairs
from pytest_kvmock.testing.process.process_stores import ProcessStores
from pytest_kvmock.testing.process.process_streams import ProcessStreams
from pytest_kvmock.testing.process.process_world import asked_text
from pytest_kvmock.wire.codec.table import find_dialect

if TYPE_CHECKING:
    from pytest_kvmock.servers.serve.kv_server import KvServer

_ENDED: Final = 30
"""Requests that end well on one worker, each with two new blocks like the `FRESH` prompts. A router that never stops
counting them sends this worker none of the `FRESH` prompts.
"""

_MAY_BE_LATE: Final = 2
"""Number of them that may go elsewhere: a client may see the end of an answer before the process has counted it."""

_OR_TEXT_ALONE: Final = "takes_token_ids = False says that it takes text alone"

_HELD: Final = 8
_UNCACHED: Final = 4
_FRESH_BLOCKS: Final = 2
"""Cached and uncached blocks in the prompts of open requests, and blocks of a prompt that no worker holds."""

_PAGES: Final = 4
_LOOKUPS: Final = 8
"""Pages of a block, and prompts of a block and a half that are looked up: by chance all 8 go to the worker that holds
them in 1 case of 256."""

_PICTURE: Final = "data:image/png;base64,iVBORw0KGgo="


def _most_for_the_least(most: int, least: int, *, is_cached: bool) -> int:
    """Return how many fresh prompts the least loaded worker can take and still be the least loaded, in any unit of
    load.

    Load is measured as requests, blocks of their prompts, or blocks to compute.

    Args:
        most: open requests of the most loaded worker.
        least: open requests of the other worker.
        is_cached: whether the other worker holds the first blocks of the prompts, and does not compute them.
    """
    whole = _HELD + _UNCACHED
    computed = _UNCACHED * most - (_UNCACHED if is_cached else whole) * least
    return max(0, min(most - least, (most - least) * whole // _FRESH_BLOCKS, computed // _FRESH_BLOCKS))


_fleet = pytest.mark.kvmock(workers=2, num_blocks=4096)


class ProcessContract(ProcessPairs, ProcessStreams, ProcessStores):
    """Tests that hold for every router process.

    A subclass defines how the process is started, and how its known blocks are queried::

        class TestMyRouter(ProcessContract):
            def command(self, engines):
                return ["./router", "--port", str(engines.port), *engines.urls]

            def blocks(self, prompt):  # if it can be queried
                return {0: 4}

    Each test starts engines by `_kvmock_servers`, and the process in front of them. A test of something that the
    process does not support is skipped; the skip names what was not judged, and what would allow it.

    Four more methods are optional. `open_requests(self)` returns the number of requests that the process counts as
    open: it must be 0 after each test. `moved(self, engines)` makes the process use other engines from then on; it is
    needed to judge a worker that starts under a new address. `blocks_by_owner(self, prompt)` returns the blocks that
    each worker can load from each store, beyond its faster tiers: `{"disk": {0: 4, 1: 4}}`.
    `adapter_loaded(self, name, path)` notifies the process that engines loaded an adapter.

    Attributes:
        dialects: the dialects of the engines; each test runs over each.
        url: the URL of a process that already runs, in place of a `command`; its engines listen at `ports`. Within a
            test: the process under contract.
        ports: `http`, `events` and `replay` of the first of two engines, as `KvServer` takes them; the second engine
            has the next ports.
        http: how ranks of an engine share HTTP ports, as `KvServer` takes it: "worker"; with "rank" each worker has two
            ranks, each at a separate port; with "node" four, two behind each of two ports. Clients name these 0 and 1,
            and events name them by their numbers in the worker. Each port is one entry of `engines`.
        timeout_s: seconds that tests wait for the process; there is no other time limit.
        headers: headers of the client, which must reach the engine.
        packs: it fills one worker before it uses another, on purpose; sharing among workers is not judged.
        first_of_equals: it takes the first of equal workers, on purpose; sharing of an idle fleet is not judged.
        follows_prefix: it sends a prompt where its prefix is at any load; if not, only an idle fleet is queried.
        goes_by_prefix: it sends a prompt to the worker that holds most of it. False: its picks do not show what it
            knows.
        retries: it sends a request that an engine did not answer to another one, so that the client notices nothing.
        hears_events: it receives the events of engines. False: it knows only what it has sent.
        counts_open: it counts its own open requests when it picks.
        cools_down_s: seconds, at most 60, in which it sends nothing to a worker that answered with an error or cut a
            stream; tests wait for this time after such a failure.
        sends: what clients send: a "completion", or a "chat" of one message, whose tokens are those of the engine's
            template; your `completion()` makes a chat, too, if its body has messages.
        learns_block_size: it is given the page of an engine (`--block-size`), and notices or refuses events with blocks
            of several pages (context parallelism).
        takes_token_ids: the prompt of a completion may be token ids instead of text.
        health: the path that is answered with 200 while it is ready, also under load.
        ready_means_engines: it is not ready while no engine is up. False: `health` only reports that it runs.
        gives_up_after: number of requests in a row, answered by an engine with a status from 500 on, after which the
            engine's prompts go elsewhere; None: not judged.
        sends_rank: it tells an engine which rank must serve a prompt.
        tiers: the host below each engine, as `kvmock(tiers=...)` takes it; a prompt must go to the host that has it.
            None: no host.
        stores: the stores that workers share, as `kvmock(stores=...)` takes them; `command` passes them to the process,
            too. The process may ignore them; `blocks_by_owner(prompt)`, if it has it, is judged. None: no stores.
        reads_drafts: it reads events of engines with a draft model, whose block names cover later tokens.
        salt_header: the header in which clients send a tenant's salt, which the process passes on as `cache_salt`; "":
            in the body.
        hand_over: how the engines hand over if it is a router of P/D pairs: "vllm", "vllm-mooncake" or "sglang". Pairs
            have additional tests, and the other tests are about prefill engines: their events, their load, and which of
            them is picked. `engines.of("prefill")` and `engines.of("decode")` are the engines of each role; `blocks`
            may leave decode engines out. None: pairs are not judged.
        falls_back: the decode engine computes a prompt if there is no prefill engine, on purpose.
        holds_prefill: it counts a request on its prefill engine until the request ends, on purpose.
        threshold: tokens of a prompt from which there must be a prefill leg; None: not judged.
        engines: within a test, the engines that the process was given.
    """

    # --------------------------------------------------------------------------------------------- events, as they come

    @_fleet
    def test_it_hears_every_worker(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """The process knows the blocks that each worker stores."""
        with self._listening(_kvmock_servers) as world:
            prompts = [world.text(8) for _ in world.workers]
            for worker, prompt in zip(world.workers, prompts, strict=True):
                world.direct(worker, prompt)
            for worker, prompt in zip(world.workers, prompts, strict=True):
                world.judge(f"worker {worker} has served a prompt", prompt)

    @_fleet
    def test_it_asks_for_what_was_before_it_came(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """A replay gives the process the events that engines published before it started."""
        self._needs_events()
        self._needs_a_start("whether it asks for what was published before it came")
        with self._world(_kvmock_servers, starts=False) as world:
            prompts = [world.text(8) for _ in world.workers]
            for worker, prompt in zip(world.workers, prompts, strict=True):
                world.direct(worker, prompt)
            world.start()
            for worker, prompt in zip(world.workers, prompts, strict=True):
                world.judge(f"worker {worker} has served a prompt before the process came, and can replay it", prompt)

    @_fleet
    def test_it_asks_for_a_lost_batch(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """A batch is lost on the way; the next one shows the gap.

        A replay also contains batches that arrived, or ends early, with or without its end marker.
        """
        with self._listening(_kvmock_servers) as world:
            self._strike(world, "lose", "a batch of worker {} was lost on its way, and it can replay it")
            self._judge_replays(world)

    @_fleet
    def test_a_batch_that_comes_twice_changes_nothing(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """A batch is delivered twice: this is no restart, and its blocks are stored once."""
        with self._listening(_kvmock_servers) as world:
            for worker in self._faulted(world):
                where = f"a batch of worker {worker} came twice"
                before, prompt = world.text(8), world.text(8)
                world.direct(worker, before)
                world.server.fault(worker, "double")
                world.direct(worker, prompt)
                world.judge(where, prompt)
                world.judge(f"{where}, of what was stored before it", before)
            if not self.tells_blocks():
                return
            while world.held(prompt):
                world.fill(1, 64)
            world.judge(f"{where}, and then the blocks of it were evicted", prompt)

    @_fleet
    def test_batches_out_of_order_are_put_in_order(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """Two batches arrive in reverse order; the second continues the blocks of the first."""
        with self._listening(_kvmock_servers) as world:
            for worker in self._faulted(world):
                prompt = world.text(8)
                self._heard_from(world, worker)
                world.server.fault(worker, "reorder")
                world.direct(worker, prompt[: len(prompt) // 2])
                world.direct(worker, prompt)
                world.direct(worker, world.text())
                world.judge(f"two batches of worker {worker} came in reverse order", prompt)

    @_fleet
    def test_a_corrupt_batch_does_not_stop_it(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """A batch cannot be decoded; a replay has the original, and later batches count."""
        with self._listening(_kvmock_servers) as world:
            self._strike(world, "corrupt", "a batch of worker {} was corrupt, and it can replay it as it was")

    @_fleet
    def test_a_field_of_a_later_release_does_not_stop_it(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """Events have a field, kind or medium that is unknown in their dialect."""
        with self._listening(_kvmock_servers) as world:
            self._strike(world, "extra_field", "events of worker {} had a field that their dialect does not have")
            self._strike(
                world,
                "unknown_tag",
                "a batch of worker {} began with an event of a kind that its dialect does not have",
            )
            self._judge_medium(world)

    @_fleet
    def test_a_restart_empties_a_worker(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """A worker that restarts is empty, and numbers its batches from 0."""
        with self._listening(_kvmock_servers) as world:
            self._forget(world, "worker 1 has restarted", lambda: world.server.restart(1))

    @_fleet
    def test_a_cleared_cache_is_empty(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """A worker that publishes a Cleared is empty."""
        with self._listening(_kvmock_servers) as world:
            self._forget(world, "the cache of worker 1 was cleared", lambda: world.server.reset(1))

    @_fleet
    def test_a_reset_is_said_with_the_next_step(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """A vLLM worker is reset by its route; its Cleared leaves with the next request, before that request's Stored.

        Until then the process may report the worker's old blocks, or fewer; from then on, none.
        """
        with self._listening(_kvmock_servers) as world:
            if not world.resets():
                self.skip(
                    f"engines of {world.server.dialect.name} say at once that they are reset",
                    "what it knows between a reset and its Cleared",
                    "vLLM's dialect",
                )

            def reset() -> None:
                world.reset(1)
                most = len(world.tokens_of(prompt)) // self.engines.block_size
                world.judge_known_at_most("worker 1 was reset, and has not said so yet", 1, prompt, most)

            prompt = world.text(8)
            self._forget(world, "worker 1 was reset, and its next step has said so", reset, prompt)

    @pytest.mark.kvmock(workers=2, num_blocks=64)
    def test_what_is_evicted_is_forgotten(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """Blocks that a small cache evicts are no longer known."""
        with self._listening(_kvmock_servers) as world:

            def evict() -> None:
                while world.held(prompt).get(1):
                    world.fill(1, 16)

            prompt = world.text(8)
            self._forget(world, "the blocks of worker 1 were evicted", evict, prompt)

    @pytest.mark.kvmock(workers=2, num_blocks=16)
    def test_a_block_is_held_until_its_last_copy_goes(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """An engine holds a block twice, publishes both copies, and evicts one after the other."""
        self._needs_events()
        self._needs_blocks("copies of a block")
        with self._world(_kvmock_servers) as world:
            if not world.server.harness.worker(0).traits.copies:
                self.skip(
                    f"engines of {world.server.dialect.name} publish no copies", "copies of a block", "vLLM's dialect"
                )
            prompt = world.text(4)
            for _ in range(2):  # the last block is computed again, and held twice
                world.direct(0, prompt)
            where = "worker 0 held a block twice, and has evicted one copy"
            while world.held(prompt):
                world.judge_blocks(where, prompt)
                world.push(where, 0, world.text(1))
            world.judge_blocks("worker 0 held a block twice, and has evicted both copies", prompt)

    def test_what_leaves_the_host_does_not_leave_the_device(self, kv_dialect: str) -> None:
        """Blocks are copied to the host of a worker and leave it again: events of the host do not concern the
        device.
        """
        self._needs_events()
        self._needs_blocks("what it makes of a host below the device")
        self._needs_a_start("what it makes of a host below the device")
        host = host_of(find_dialect(kv_dialect))
        if host is None:
            self.skip(
                f"{kv_dialect} has no events of a host",
                "what it makes of a host below the device",
                "the dialect of the newest vLLM, or of SGLang,",
            )
        with self._special(kv_dialect, num_blocks=64, tiers=host) as world:
            prompt = world.text(4)
            world.direct(0, prompt)
            where = "worker 0 holds a prompt in its device, which its host had and evicted"
            for _ in range(4):  # the host holds two such prompts, and the device all
                world.push(where, 0, world.text(4))
            world.judge_blocks(where, prompt)
            while world.held(prompt):
                world.direct(0, world.text(4))
            world.judge_blocks("worker 0 has evicted a prompt from its device, and before that from its host", prompt)

    def test_it_reads_a_hybrid_model(self, kv_dialect: str) -> None:
        """Engines serve gpt-oss: blocks that only a window keeps are no promise, and blocks that it drops are still
        held.
        """
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
            world.push(where, 0, after + "x")  # the window's last token is needed for a promise
            world.judge(f"{where}, and has served a prompt of 30 blocks and half of it", prompt)
            world.judge(f"{where}, and has served another prompt after outputs of 40 tokens", after)
            if not self.tells_blocks():
                return
            while world.held(prompt):
                world.judge_blocks(f"{where}, and has evicted some of its windows", prompt)
                world.push(where, 0, world.text(10) + "x")
            world.judge_blocks(f"{where}, and has evicted a prompt", prompt)

    def test_it_finds_out_how_large_a_block_is(self, kv_dialect: str) -> None:
        """The process is given the page of engines whose events have blocks of four pages: it notices this, or
        refuses.
        """
        self._needs_events()
        if not self.learns_block_size:
            self.skip(
                "learns_block_size is False",
                "what it does where events have larger blocks than it was told",
                "learns_block_size = True",
            )
        if "dcp" not in served_by(find_dialect(kv_dialect), "mock-model").options:
            self.skip(
                f"engines of {kv_dialect} have no blocks of several pages", "the size of a block", "vLLM's dialect"
            )
        with self._special(kv_dialect, dcp=_PAGES, block_size=_PAGES * 16) as world:
            texts = [world.text(1) + world.text(1)[: 2 * world.page] for _ in range(_LOOKUPS)]
            served = [(at % 2, text) for at, text in enumerate(texts)]
            for worker, text in served:
                world.direct(worker, text)
            reply, _ = world.send(world.text(1))
            if reply.status is None or reply.status >= 500:
                return  # the process refuses
            found = world.count_found(served)
            if found < _LOOKUPS:
                missed = "all" if not found else f"{_LOOKUPS - found} of {_LOOKUPS}"
                world.fail(
                    f"{missed} look-ups missed; the engine's page is {world.page} tokens, its events have "
                    f"{_PAGES * world.page}"
                )

    def test_it_hears_every_rank(self, kv_dialect: str) -> None:
        """Each worker has ranks, which publish at separate endpoints, and share HTTP ports as `http` declares."""
        self._needs_events()
        self._needs_a_start("whether it hears every rank")
        ranks = 4 if self.http == "node" else 2
        with self._special(kv_dialect, dp_size=ranks) as world:
            places = [(worker, rank) for worker in world.workers for rank in reversed(range(ranks))]
            prompts = [world.text(6) for _ in places]
            for (worker, rank), prompt in zip(places, prompts, strict=True):
                world.direct(worker, prompt, rank=rank)
            for (worker, rank), prompt in zip(places, prompts, strict=True):
                where = f"rank {rank} of worker {worker} has served a prompt"
                world.judge(where, prompt)
                self._judge_rank(world, where, rank, prompt)

    @_fleet
    def test_a_salt_and_an_adapter_make_other_prompts(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """The same tokens with another salt or adapter are another prompt, held by another worker."""
        self._needs_events()
        with self._world(_kvmock_servers, adapters=["tenant-lora"]) as world:
            keys: dict[str, Any] = {"cache_salt": "tenant-a", "lora_name": "tenant-lora"}
            dialect = world.server.dialect
            told = [each for each in keys if each in speaker_of(dialect).prompt_keys and dialect.tells(each)]
            if not told:
                self.skip(
                    f"events of {dialect.name} have salts and adapters in names of blocks alone",
                    "whether a salt or an adapter makes another prompt",
                    "the dialect of a later release",
                )
            for name in told:
                key = {name: keys[name]}
                for half in self._faulted(world, key):
                    whole, prompt = 1 - half, world.text(8)
                    world.direct(whole, prompt)
                    world.direct(half, prompt[: len(prompt) // 2], **key)
                    where = (
                        f"worker {whole} holds 8 blocks of a prompt, and worker {half} 4 of them with a {name} of "
                        "their own"
                    )
                    world.judge(where, prompt)
                    world.judge(f"{where}, asked with that", prompt, **key)
                    if name == "cache_salt":
                        self._judge_salt(world, f"{where}, asked with that", prompt, **key)

    # ---------------------------------------------------------------------------------------- workers that come and go

    @_fleet
    def test_it_lives_without_a_worker(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """A worker refuses connections, then another drains: the remaining worker serves all requests."""
        with self._world(_kvmock_servers) as world:
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
    def test_it_uses_a_worker_that_is_back(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """A worker refuses connections for a while, and starts again under the same address."""
        with self._world(_kvmock_servers) as world:
            world.server.stop(1)
            for _ in range(4):
                world.send(world.text(2))
            world.server.start(1)
            world.wait_back(1)
            if self.hears_events:
                prompt = world.text(8)
                world.direct(1, prompt)
                world.judge("worker 1 was down, is up again under the same address, and has served a prompt", prompt)

    @pytest.mark.kvmock(workers=4, num_blocks=4096)
    def test_it_uses_a_worker_at_its_new_address(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """A worker is gone, and starts under another address, which the process is given.

        It does so once with a new id, and once with its old id.
        """
        moved = getattr(self, "moved", None)
        what = "whether it uses a worker that comes up under a new address"
        if moved is None:
            self.skip("it has no moved(engines)", what, "moved(engines), which makes it use other engines")
        self._needs_a_start(what)
        with self._world(_kvmock_servers, spare=2) as world:
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
                world.fail(f"{where}: of {FRESH} prompts that no worker holds worker 2 got none; expected some")
            if self.hears_events:
                self._judge_same_id(world, moved)

    # --------------------------------------------------------------------------------------------- what it passes on

    @_fleet
    def test_an_answer_is_the_engines(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """An answer, whole or as a stream, is the engine's."""
        with self._world(_kvmock_servers) as world:
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
            if self._sends_ids(world):
                reply, asked = world.send(prompt, as_ids=True, max_tokens=5)
                self._judge_status(world, "a completion whose prompt is token ids", reply, asked)
                if reply.status != 200:
                    world.fail(f"a completion whose prompt is token ids: {reply.text}; {_OR_TEXT_ALONE}")

    @_fleet
    def test_a_stream_passes_token_by_token(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """The second chunk arrives before the last one is generated."""
        with self._world(_kvmock_servers) as world:
            world.server.hold()
            pending = world.begin(world.text(), stream=True, max_tokens=4)
            world.wait_open(1, "a stream was asked for, and no engine has it")
            world.step(2)
            came = pending.chunks(2)
            if len(came) < 2:
                pending.close()
                world.fail(
                    f"a stream of 4 tokens, of which 2 are made and the others held back: {len(came)} chunks came "
                    f"within {self.timeout_s:g} s; expected 2: each is passed on as it comes"
                )
            world.server.release()
            reply = pending.finish()
            if not reply.is_finished or not reply.is_whole:
                world.fail(f"a stream of 4 tokens did not come to its end: {reply.text}")

    @_fleet
    def test_a_refusal_of_a_request_passes_through(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """Engines answer 400, 404 and 422: the client gets the same status and body."""
        with self._world(_kvmock_servers) as world:
            for status in (400, 404, 422):
                self._refused_by_all(world, status)

    @_fleet
    def test_a_limit_of_requests_passes_through(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """Engines answer 429 with Retry-After: the client gets both."""
        with self._world(_kvmock_servers) as world:
            self._refused_by_all(world, 429, {"Retry-After": "7"})

    @_fleet
    def test_an_error_of_an_engine_passes_through(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """Engines answer 500 and 503: the client gets the same; if only one engine fails, another may serve the
        request.
        """
        with self._world(_kvmock_servers) as world:
            for status in (500, 503):
                self._refused_by_all(world, status)
                world.cool()
            world.server.answer(0, 503, times=None)
            for _ in range(4):
                reply, asked = world.send(world.text(2))
                self._judge_status(world, "worker 0 answers 503", reply, asked, may_break=True)

    @_fleet
    def test_a_stream_that_is_cut_is_not_finished(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """Engines die after two chunks of a stream: the stream gets no regular end, and is not started again."""
        with self._world(_kvmock_servers) as world:
            for worker in world.answering:
                world.server.cut(worker, after_chunks=2)
            reply, asked = world.send(world.text(), stream=True, max_tokens=6)
            where = "an engine died after 2 of 6 chunks of a stream"
            chunks = [each for each in reply.chunks if '"error"' not in each and each != DONE]
            if len(asked) != 1 or len(chunks) > 2:
                world.fail(
                    f"{where}: {len(asked)} engines were asked and {len(chunks)} chunks came; expected 1 and 2: what "
                    "was sent cannot be taken back"
                )
            if reply.is_finished:
                world.fail(f"{where}: the client was told that it is finished ({reply.chunks[-1]})")
            if reply.status == 200 and reply.is_whole and reply.has_an_end and not reply.reports_error:
                world.fail(
                    f"{where}: the client got the end of an answer, and no error; expected a connection that is cut, "
                    "or an error"
                )

    @_fleet
    def test_an_answer_that_never_came_is_no_success(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """An engine dies before it answers: another one is asked, or the client gets an error."""
        with self._world(_kvmock_servers) as world:
            for stream in (False, True):
                for worker in world.workers:
                    world.server.cut(worker)
                reply, asked = world.send(world.text(), stream=stream)
                self._judge_status(world, "an engine died before it answered", reply, asked)
                for worker in world.workers:
                    world.server.start(worker)
                world.cool()

    @_fleet
    def test_a_client_that_goes_away_is_noticed(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """A client closes its connection: its request is aborted in the engine."""
        with self._world(_kvmock_servers) as world:
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
    def test_what_a_client_sends_reaches_the_engine(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """Salt, adapter, images, headers, and an unknown field reach the engine as they were sent."""
        with self._world(_kvmock_servers, adapters=["tenant-lora"], keep_bodies=True) as world:
            path, body = self.completion(world.text(), cache_salt="tenant-a", lora_name="tenant-lora")
            picture = {"type": "image_url", "image_url": {"url": _PICTURE}}
            parts = [{"type": "text", "text": world.text()}, picture]
            chat = {"model": world.server.model, "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
            for what, sent in ((path, body), ("/v1/chat/completions", chat)):
                sent |= {"user": "kvmock", "kvmock_field": {"a": [1]}}
                reply = world.post(what, sent, self.headers).finish()
                if reply.status != 200 or not world.answered:
                    world.fail(f"{what} was answered with {reply.text}; expected 200")
                row = world.answered[-1]
                if row.path != what:
                    world.fail(f"{what} reached an engine as {row.path}")
                came = json.loads(row.body)
                lost = [
                    f"{name} reached an engine as {came.get(name)!r:.200}; {value!r:.200} was sent"
                    for name, value in sent.items()
                    if came.get(name) != value
                ]
                lost += [
                    f"header {name} reached an engine as {row.headers.get(name.lower())!r:.200}; {header!r} was sent"
                    for name, header in self.headers.items()
                    if row.headers.get(name.lower()) != header
                ]
                if lost:
                    world.fail(f"{what}: {'; '.join(lost)}")

    # --------------------------------------------------------------------------------------------- where it sends

    @_fleet
    def test_an_idle_fleet_is_shared(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """Prompts that no worker holds come one by one: each worker gets some."""
        for name in ("packs", "first_of_equals"):
            if getattr(self, name):
                self.skip(f"{name} is True", "whether an idle fleet is shared", f"{name} = False")
        with self._world(_kvmock_servers) as world:
            where = "prompts that no worker holds come one by one"
            picks = Counter(world.picked(where, world.text(2)) for _ in range(FRESH))
            self._each_got_some(world, where, picks)

    @_fleet
    def test_a_prompt_goes_where_it_is(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """In an idle fleet, a prompt goes to the worker that holds most of it, by events or by what the process has
        sent.
        """
        if not self.goes_by_prefix:
            self.skip("goes_by_prefix is False", "whether a prompt goes where it is", "goes_by_prefix = True")
        with self._world(_kvmock_servers) as world:
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
                if self._sends_ids(world):
                    world.judge_pick(f"{where}, and asked for as token ids ({_OR_TEXT_ALONE})", prompt, as_ids=True)

    @_fleet
    def test_open_requests_count(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """One worker has all open requests: prompts that no worker holds go to the other one; with `follows_prefix`,
        prompts that the busy worker holds still go there.
        """
        self._needs_open("whether open requests count where it chooses")
        with self._world(_kvmock_servers) as world:
            prompt = world.text(_HELD)
            busy = self._known_at(world, prompt)
            world.server.hold()
            pending = []
            for number in range(6):  # each has blocks that no worker holds, so that it counts in any unit of load
                pending.append(world.begin(prompt + world.text(_UNCACHED), max_tokens=2))
                world.wait_open(number + 1, "completions were asked for, and engines do not have them")
            rows = world.requests[-6:]
            there = sum(each.worker == busy for each in rows)
            if self.follows_prefix and there < 6:
                world.fail(
                    f"follows_prefix is True, and of 6 requests for what worker {busy} holds {there} went there, as "
                    "it was loaded"
                )
            load = Counter(each.worker for each in rows)
            least = min(world.workers, key=lambda each: load[each])
            fresh = _most_for_the_least(6 - load[least], load[least], is_cached=least == busy)
            for number in range(fresh):
                pending.append(world.begin(world.text(_FRESH_BLOCKS), max_tokens=2))
                world.wait_open(7 + number, "completions were asked for, and engines do not have them")
            got = Counter(each.worker for each in world.requests[-fresh:]) if fresh else Counter()
            world.server.release()
            for each in pending:
                each.finish()
            if fresh and got[least] * 2 <= fresh:
                shown = ", ".join(f"worker {each} {load[each]}" for each in world.workers)
                world.fail(
                    f"of open requests {shown}: of {fresh} more, which no worker holds, worker {least} got "
                    f"{got[least]}; expected more than half"
                )

    @_fleet
    def test_what_ended_badly_is_no_load(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """Requests of one worker are left by their clients, cut and refused: afterwards it is as idle as before."""
        self._needs_open("whether what ended badly counts as load")
        with self._world(_kvmock_servers) as world:
            prompt = world.text(8)
            worker = self._known_at(world, prompt)
            for number in range(6):  # 6 clients go away, from streams and others
                world.server.hold()
                pending = world.begin(self._next_of(world, prompt), stream=number % 2 == 0, max_tokens=8)
                world.wait_open(1, "a completion was asked for, and no engine has it")
                if number % 4 == 0:  # some streams have begun: a stream without a head yet is closed in another way
                    world.step(1)
                    pending.chunks(1)
                pending.close()
                if world.decode:  # a prefill leg may run to its end
                    world.server.release()
                world.wait_open(0, "its client went away, and a request goes on in the engine")
                world.server.release()
            for status in (400, 429, 500):
                world.server.answer(worker, status)
                world.send(self._next_of(world, prompt))
                world.server.start(worker)
            for chunks in (1, 3):
                world.server.cut(worker, after_chunks=0 if world.decode else chunks)  # a prefill leg is no stream
                world.send(self._next_of(world, prompt), stream=True, max_tokens=6)
                world.server.start(worker)
            world.cool()
            self._still_used(world, f"11 requests of worker {worker} ended badly, and nothing is open", worker)

    @_fleet
    def test_what_ended_well_is_no_load(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """A worker serves many requests to their end, one by one; each goes to the worker that holds it.

        Afterwards the worker is as idle as before.
        """
        self._needs_open("whether what ended well counts as load")
        with self._world(_kvmock_servers) as world:
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
                        f"{where}: {elsewhere} of {number + 1} prompts went to worker {picked}, where worker {worker} "
                        "alone held their first 8 blocks: finished requests still count as load"
                    )
                if not (self.hears_events and self.tells_blocks()):
                    break  # the other worker holds this prompt now, and when a new one is known cannot be observed
                prompt = self._heard_from(world, worker)
            where = f"{ended} requests of worker {worker} ended well, and nothing is open"
            self._still_used(world, where, worker)

    # ------------------------------------------------------------------------------------------------------- its end

    @_fleet
    def test_it_ends_cleanly_while_requests_are_open(self, _kvmock_servers: Callable[..., KvServer]) -> None:
        """The process gets SIGTERM while requests are open, and these go on: it ends in time and without an error."""
        self._needs_a_start("how it ends")
        with self._world(_kvmock_servers) as world:
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
