"""The promises of every engine that serves requests, as tests that a backend's test class inherits.

One subject, one class: a test for each promise.

PYTEST_DONT_REWRITE: each message is complete; pytest would add the condition below it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from pytest_kvmock.engines.worker import OutOfBlocks, Request, RequestError
from pytest_kvmock.testing.subject import OverBackend, room_for
from pytest_kvmock.testing.worker.world import World
from pytest_kvmock.values.events import Cleared, Removed, Stored, Updated, value_text
from pytest_kvmock.values.tokens import Prompt


class WorkerContract(OverBackend):
    """Tests that hold for every backend, through a `KvWorker`: they send requests, not moves.

    A subclass names the backend::

        class TestMine(WorkerContract):
            backend = "lru"

    After each call the events of the worker are checked, and compared with the blocks that the engine holds. Where
    engines differ, `KvWorker.traits` declares what this one does, and the tests check that, too.
    """

    def _start(self, num_blocks: int = 16, **fields: Any) -> World:
        """Return a world with room for a prompt of `num_blocks` blocks; for a hybrid model, in each of the caches that
        share the pool.
        """
        __tracebackhide__ = True
        return World(self.make_harness(self._room(num_blocks), **fields))

    def _room(self, blocks: int) -> int:
        return room_for(blocks, self.spec().traits_at(self.block_size), self.block_size)

    # ------------------------------------------------------------------------------------- what is cached

    def test_a_new_worker_has_nothing(self) -> None:
        """A new worker has no request and no block. It has published nothing except, on some engines, a Cleared for
        each group.
        """
        world = self._start()
        world.expect_cached(world.prompt(3), 0)
        world.expect_idle(resident=0)
        assert world.worker.requests == [], f"a new worker has the requests {world.worker.requests}"
        traits = world.worker.traits
        expected = [Cleared] * traits.cleared_first * max(1, len(traits.groups) * traits.publishes_groups)
        assert expected == world.kinds(), (
            f"a new worker has published {list(world.harness.events)}; "
            f"its traits.cleared_first is {world.worker.traits.cleared_first}"
        )

    def test_what_was_served_is_cached(self) -> None:
        """The whole blocks of a prompt are cached; a part of a block is not."""
        world = self._start()
        prompt = world.prompt(3, tail=1)
        world.do(world.worker.serve, prompt)
        world.expect_cached(prompt, 3)
        world.expect_idle(resident=3)

    def test_a_prompt_is_cached_as_far_as_it_agrees(self) -> None:
        """A prompt is cached up to the first block that differs, even if later blocks are equal."""
        world = self._start()
        prompt = world.prompt(4)
        world.do(world.worker.serve, prompt)
        end = 2 * self.block_size + world.worker.traits.looks_ahead
        world.expect_cached(_other_from(prompt, end), 2)
        world.expect_cached(_other_from(prompt, end + 1), 2)
        world.expect_cached(_other_from(prompt, 0), 0)

    def test_a_prompt_that_is_cached_whole_is_reused(self) -> None:
        """A cached prompt is reused whole, or without the block of its last token if the engine recomputes that
        token.
        """
        world = self._start()
        prompt = world.harness.prompt(3)
        world.do(world.worker.serve, prompt)
        recomputes = world.worker.traits.recomputes_last_token
        expected = (3 - recomputes) * self.block_size
        found = world.do(world.worker.cached_tokens, prompt)
        if world.worker.traits.partial_blocks:  # all but its last token
            expected = 3 * self.block_size - 1
        if world.worker.traits.promises_more:  # the window or the state at the end may be gone
            expected = min(expected, found)
        assert expected == found, (
            f"of a prompt of 3 blocks that was served, {found} tokens are cached; expected {expected}, "
            f"as its traits.recomputes_last_token is {recomputes}"
        )
        served = world.do(world.worker.serve, prompt)
        assert expected == served.cached_tokens, f"served again, it found {served.cached_tokens} tokens, not {expected}"

    def test_a_request_has_the_tokens_that_were_cached_when_it_came(self) -> None:
        """`Request.cached_tokens` is the value that `KvWorker.cached_tokens` returned just before."""
        world = self._start()
        first = world.prompt(2)
        longer = world.prompt(2, after=first, tail=1)
        world.do(world.worker.serve, first)
        looked = world.do(world.worker.cached_tokens, longer)
        request = world.do(world.worker.prefill, longer)
        assert looked == request.cached_tokens and world.may_reuse(looked, 2), (
            f"of 4 blocks 2 were cached: a look found {looked} tokens, the request {request.cached_tokens}"
        )

    def test_what_was_decoded_is_a_prefix_of_the_next_turn(self) -> None:
        """The whole blocks of prompt and output are cached for the next turn, if the engine stores output."""
        world = self._start()
        prompt = world.prompt(2)
        output = world.prompt(2, tail=1).tokens or ()
        request = world.do(world.worker.prefill, prompt)
        world.do(request.decode, output)
        world.do(request.finish)
        stored = 2 if world.worker.traits.stores_when == "never" else 4
        world.expect_cached(Prompt((*(prompt.tokens or ()), *output)), stored)

    def test_a_prompt_of_hashes_is_served(self) -> None:
        """A prompt of hashes, as in traces, is served without tokens in its events, or refused, as the traits
        declare.
        """
        world = self._start()
        prompt = Prompt(hashes=[11, 12, 13], num_tokens=3 * self.block_size + 1)
        if not world.worker.traits.takes_hashes:
            world.expect_refused(ValueError, world.worker.serve, prompt)
            return
        world.do(world.worker.serve, prompt)
        found = world.do(world.worker.cached_tokens, prompt)
        assert world.may_reuse(found, 3), f"of a served prompt of 3 block hashes {found} tokens are cached"
        assert world.harness.overlap(prompt) == {0: 3}, (
            f"the router found {world.harness.overlap(prompt)}; expected {{0: 3}}"
        )

    def test_serve_answers_what_was_cached_and_what_became_so(self) -> None:
        """`Served` reports the cached tokens and the stored blocks."""
        world = self._start()
        first = world.prompt(2)
        world.do(world.worker.serve, first)
        served = world.do(world.worker.serve, world.prompt(2, after=first, tail=1))
        assert world.may_reuse(served.cached_tokens, 2), f"2 of 4 blocks were cached; serve answered {served}"
        resident = set(world.worker.manager.resident())
        new = 4 - served.cached_tokens // self.block_size
        new += world.worker.traits.partial_blocks  # the token after the blocks is a partial block
        assert new == len(served.stored_blocks) and resident.issuperset(served.stored_blocks), (
            f"{new} blocks became cached; serve answered {served}, and resident are {value_text(sorted(resident))}"
        )

    def test_a_look_touches_nothing(self) -> None:
        """`cached_tokens` changes neither blocks nor the order of eviction."""
        world = self._start()
        first, second = world.prompt(3), world.prompt(3)
        for prompt in (first, second):
            world.do(world.worker.serve, prompt)
        before = world.state(), world.worker.manager.inactive_blocks()
        for prompt in (second, first, world.prompt(5)):  # in the order of serving the fault would not show
            world.do(world.worker.cached_tokens, prompt)
        after = world.state(), world.worker.manager.inactive_blocks()
        assert before == after, f"cached_tokens changed {before} to {after}"

    def test_chunks_make_no_difference_to_what_is_cached(self) -> None:
        """A prompt prefilled in chunks is cached like one prefilled at once."""
        for chunk in (1, self.block_size - 1, 2 * self.block_size):
            world = self._start(chunk=chunk)
            prompt = world.prompt(3, tail=1)
            world.do(world.worker.serve, prompt)
            world.expect_cached(prompt, 3)
            world.expect_idle(resident=3)

    # ------------------------------------------------------------------------------- where engines differ

    def test_a_block_that_output_fills_is_published_when_the_traits_say(self) -> None:
        """A block that fills up is published with its last token, with the next token or tokens, when the request
        finishes, or never.
        """
        for further in (
            False,
            True,
        ):  # whether the request generates more tokens after the one that fills the block
            world = self._start()
            when = world.worker.traits.stores_when
            ahead = world.worker.traits.looks_ahead
            prompt = world.harness.prompt(1, tail=self.block_size - 1)
            output = world.prompt(2).tokens or ()
            filled = Prompt((*(prompt.tokens or ()), *output[: 1 + ahead]))
            request = world.do(world.worker.prefill, prompt)
            steps = [output[:1], output[1 : 1 + max(ahead, 1)]] if further else [output[:1]]
            found = {}
            for number, tokens in enumerate(steps):
                world.do(request.decode, tokens)
                found["the next token" if number else "its last token"] = world.finds(filled)
            world.do(request.finish)
            found["the request's end"] = world.finds(filled)
            expected = {
                "full": dict.fromkeys(found, True),
                "next_token": {**dict.fromkeys(found, further), "its last token": False},
                "lookahead": {**dict.fromkeys(found, further), "its last token": False},
                "finish": {**dict.fromkeys(found, False), "the request's end": further or not ahead},
                "never": dict.fromkeys(found, False),
            }.get(when)
            if (
                expected is not None and when != "never" and world.worker.traits.partial_blocks
            ):  # the last token of output is not computed
                expected["the request's end"] = further
            if expected is not None and world.worker.traits.promises_more:  # output without a state is not cached
                expected["the request's end"] = found["the request's end"]
            assert expected == found, (
                f"output filled a block; whether the router found it after each step: {found}; "
                f"expected {expected}, as its traits.stores_when is {when!r}"
            )

    def test_what_is_evicted_is_published_before_what_is_stored_or_after_it_as_the_traits_say(self) -> None:
        """When a request needs room, Removed comes before or after Stored."""
        world = self._start(4)
        kinds: list[Any] = []
        for _ in range(8):  # a pool with states has room for more than one prompt
            world.harness.events.clear()
            world.do(world.worker.serve, world.prompt(3))
            kinds = [kind for kind in world.kinds() if kind is not Updated]
            if Removed in kinds:
                break
        assert Stored in kinds and Removed in kinds, (
            f"a prompt of 3 blocks was served in a full cache; it published {list(world.harness.events)}"
        )
        expected = world.worker.traits.removed_first
        assert expected == (kinds[0] is Removed), (
            f"it published {list(world.harness.events)}; its traits.removed_first is {expected}"
        )

    def test_a_block_is_cached_several_times_where_the_traits_say_so(self) -> None:
        """Two open requests with the same tokens are cached once, or once for each request."""
        world = self._start()
        prompt = world.prompt(2)
        output = world.prompt(1, tail=1).tokens or ()
        requests = [world.do(world.worker.prefill, prompt) for _ in range(2)]
        for request in requests:
            world.do(request.decode, output)
        for request in requests:
            world.do(request.finish)
        resident = sorted(world.worker.manager.resident())
        expected = world.worker.traits.copies
        assert expected == (len(resident) > len(set(resident))), (
            f"two requests were the same; resident are {value_text(resident)}, and its traits.copies is {expected}"
        )

    def test_a_prompt_is_taken_chunk_by_chunk_where_the_traits_say_so(self) -> None:
        """The whole blocks of each chunk are published by themselves, or all at the end."""
        world = self._start(chunk=self.block_size)
        world.do(world.worker.serve, world.prompt(3))
        stored = world.stored()
        chunks = world.worker.traits.chunks
        expected = [1, 1, 1] if chunks else [3]
        assert expected == stored, (
            f"a prompt of 3 blocks in 3 chunks was published by events of {stored} blocks; "
            f"expected {expected}, as its traits.chunks is {chunks}"
        )

    # ---------------------------------------------------------------------------------------- what is held

    def test_requests_that_agree_share_their_blocks(self) -> None:
        """Requests hold a shared prefix once."""
        world = self._start()
        shared = world.prompt(4)
        first, second = (world.do(world.worker.prefill, world.prompt(0, after=shared, tail=1)) for _ in range(2))
        active, reused = world.worker.manager.num_active_blocks, second.cached_tokens // self.block_size
        assert world.may_reuse(second.cached_tokens, 4), f"4 blocks of {first} were in use; {second} reused {reused}"
        most = 2 * self._room(5) - reused
        assert active <= most, f"two requests share {reused} blocks of 5; {active} blocks are in use, more than {most}"

    def test_a_finished_request_frees_its_blocks(self) -> None:
        """The blocks of a finished request stay cached, and no event is published."""
        world = self._start()
        request = world.do(world.worker.prefill, world.prompt(3, tail=1))
        assert world.worker.manager.num_active_blocks >= 4, (
            f"a request of 3 blocks and a token has {world.worker.manager.num_active_blocks} blocks in use"
        )
        world.do(request.finish)
        assert request.status == "finished", f"after finish() a request is {request.status}"
        world.expect_idle(resident=3)

    def test_open_requests_are_listed(self) -> None:
        """Open requests are listed, the oldest first, preempted ones too."""
        world = self._start()
        first, second, third = (world.do(world.worker.prefill, world.prompt(1)) for _ in range(3))
        world.do(second.preempt)
        world.do(first.finish)
        assert [second, third] == world.worker.requests, f"open are {world.worker.requests}; not {[second, third]}"

    def test_a_request_finishes_when_its_with_block_is_left(self) -> None:
        """A request finishes with its `with` block, also when an exception leaves it."""
        world = self._start()
        with suppress(KeyError), world.do(world.worker.prefill, world.prompt(2)) as request:
            raise KeyError
        assert request.status == "finished", f"its with block was left, and the request is {request.status}"
        world.expect_idle(resident=2)

    def test_what_a_requests_state_does_not_allow_is_refused(self) -> None:
        """A call that the state does not allow raises RequestError and changes nothing."""
        world = self._start()
        running, preempted, finished = (world.do(world.worker.prefill, world.prompt(1)) for _ in range(3))
        world.do(preempted.preempt)
        world.do(finished.finish)
        before = world.state()
        wrong = (running.resume, preempted.preempt, preempted.decode)
        for call in (*wrong, finished.finish, finished.decode, finished.preempt, finished.resume):
            world.expect_refused(RequestError, call)
            world.expect_state(before, f"{call.__name__}() of a request whose state does not allow it")

    def test_a_worker_in_use_is_not_cleared(self) -> None:
        """`clear()` is False, without an event, while a request is open."""
        world = self._start()
        prompt = world.prompt(2)
        world.do(world.worker.serve, prompt)
        world.do(world.worker.prefill, world.prompt(1))
        before = world.state()
        assert not world.do(world.worker.clear), "clear() answered True while a request was open"
        world.expect_state(before, "a clear() that was refused")

    def test_clear_drops_all_that_is_cached(self) -> None:
        """After a clear nothing is cached, and the router finds nothing."""
        world = self._start()
        prompt = world.prompt(3)
        world.do(world.worker.serve, prompt)
        assert world.do(world.worker.clear), "clear() of an idle worker was refused"
        world.expect_cached(prompt, 0)
        world.expect_idle(resident=0)
        world.do(world.worker.serve, prompt)
        world.expect_cached(prompt, 3)

    # -------------------------------------------------------------------------------------- what does not fit

    def test_a_full_worker_makes_room(self) -> None:
        """A full worker evicts: the last prompt is cached, and the blocks never exceed the capacity."""
        world = self._start(8)
        for _ in range(8):
            prompt = world.prompt(3)
            world.do(world.worker.serve, prompt)
            world.expect_cached(prompt, 3)
            resident, most = len(world.worker.manager.resident()), world.harness.profile.num_blocks
            assert resident <= most, f"{resident} blocks are resident in a worker of {most}"

    def test_what_is_in_use_is_not_evicted(self) -> None:
        """The blocks of an open request stay cached while others are served."""
        world = self._start()
        prompt = world.prompt(6)
        request = world.do(world.worker.prefill, prompt)
        for _ in range(8):
            world.do(world.worker.serve, world.prompt(4))
        world.expect_cached(prompt, 6)
        world.do(request.finish)

    def test_a_prompt_that_does_not_fit_is_refused_and_changes_nothing(self) -> None:
        """A prompt that does not fit now, or never can, raises OutOfBlocks."""
        world = self._start()
        world.do(world.worker.serve, world.prompt(2))
        world.do(world.worker.prefill, world.prompt(8))
        most = world.harness.profile.num_blocks
        for blocks in (most + 1, max(12, most - 7)):  # some hybrid models have a separate pool for each cache
            before = world.state()
            world.expect_refused(OutOfBlocks, world.worker.prefill, world.prompt(blocks))
            world.expect_state(before, f"a prefill of {blocks} blocks, which did not fit,")

    def test_a_decode_that_does_not_fit_generates_nothing(self) -> None:
        """A decode that does not fit generates no token at all."""
        world = self._start(8)
        request = world.do(world.worker.prefill, world.prompt(4))
        before = world.state()
        world.expect_refused(OutOfBlocks, request.decode, world.harness.profile.num_blocks * self.block_size)
        world.expect_state(before, "a decode that did not fit")
        world.do(request.decode, self.block_size)
        world.do(request.finish)

    def test_output_that_does_not_fit_frees_the_prompt(self) -> None:
        """A `serve` whose output does not fit leaves no request behind."""
        world = self._start(8)
        output = world.harness.profile.num_blocks * self.block_size
        world.expect_refused(OutOfBlocks, world.worker.serve, world.prompt(4), output)
        world.expect_idle()
        assert world.worker.requests == [], f"serve was refused, and left {world.worker.requests}"

    # ------------------------------------------------------------------------------------------- preempted

    def test_a_preempted_request_gives_its_room_back(self) -> None:
        """The blocks of a preempted request are free for another one."""
        world = self._start(8)
        request = world.do(world.worker.prefill, world.prompt(5))
        world.do(request.preempt)
        assert request.status == "preempted", f"after preempt() a request is {request.status}"
        world.expect_idle()
        other = world.do(world.worker.prefill, world.prompt(5))
        assert other.status == "running", f"a request that was just admitted is {other.status}"

    def test_a_resumed_request_continues_with_its_tokens(self) -> None:
        """A resumed request has the tokens that it had generated."""
        world = self._start()
        prompt = world.prompt(2)
        output = world.prompt(2, tail=1).tokens or ()
        request = world.do(world.worker.prefill, prompt)
        world.do(request.decode, output[:3])
        for _ in range(2):
            world.do(request.preempt)
            world.do(request.resume)
        length = prompt.length(self.block_size) + 3
        assert length == len(request), f"a prompt and 3 tokens, {length}, were kept as {len(request)} tokens"
        world.do(request.decode, output[3:])
        world.do(request.finish)
        stored = 2 if world.worker.traits.stores_when == "never" else 4
        world.expect_cached(Prompt((*(prompt.tokens or ()), *output)), stored)

    def test_a_resume_that_does_not_fit_leaves_it_preempted(self) -> None:
        """A resume that does not fit raises OutOfBlocks, and may be retried."""
        world = self._start(8)
        request = world.do(world.worker.prefill, world.prompt(5))
        world.do(request.preempt)
        others: list[Request] = []
        with suppress(OutOfBlocks):
            more = range(world.harness.profile.num_blocks + 1)
            others.extend(world.do(world.worker.prefill, world.prompt(1)) for _ in more)
        before = world.state()
        world.expect_refused(OutOfBlocks, request.resume)
        world.expect_state(before, "a resume that did not fit")
        for other in others:
            world.do(other.finish)
        world.do(request.resume)
        assert request.status == "running", f"a request that was resumed is {request.status}"

    # -------------------------------------------------------------------------------- what the router finds

    def test_the_router_learns_what_is_cached(self) -> None:
        """The router finds as many blocks as the worker itself, also after evictions."""
        world = self._start(8)
        prompt = world.prompt(4)
        world.do(world.worker.serve, prompt)
        found = world.harness.overlap(prompt)
        assert found == {0: 4}, f"4 blocks were served by worker 0; the router found {found}"
        for _ in range(4):
            world.do(world.worker.serve, world.prompt(2))
            cached = world.do(world.worker.cached_tokens, world.prompt(0, after=prompt, tail=1))
            found = world.harness.overlap(prompt)
            assert world.may_reuse(cached, found.get(0, 0)), (
                f"the worker finds {cached} tokens of a prompt; the router found {found}"
            )

    def test_workers_share_nothing(self) -> None:
        """Two workers share no block, and the router keeps them apart."""
        world = self._start(workers=2)
        prompt = world.prompt(3)
        world.do(world.worker.serve, prompt)
        other = world.harness.worker(1)
        assert other.cached_tokens(prompt) == 0, f"worker 0 served; worker 1 finds {other.cached_tokens(prompt)} tokens"
        world.do(other.serve, _other_from(prompt, self.block_size + world.worker.traits.looks_ahead))
        found = world.harness.overlap(prompt)
        assert found == {0: 3, 1: 1}, f"worker 0 has 3 blocks of a prompt and worker 1 one; the router found {found}"

    def test_a_restart_begins_anew(self) -> None:
        """A restarted worker has lost its requests and its cache, and its event ids count from 0."""
        world = self._start()
        prompt = world.prompt(3)
        request = world.do(world.worker.prefill, prompt)
        world.harness.events.clear()
        world.do(world.worker.restart, announced=True)
        assert request.status == "lost", f"its worker restarted, and a request is {request.status}"
        world.expect_cached(prompt, 0)
        world.expect_idle(resident=0)
        world.do(world.worker.serve, prompt)
        ids = [entry.event.event.event_id for entry in world.harness.events]
        assert list(range(len(ids))) == ids and ids, f"after a restart the event ids are {ids}"

    def test_without_prefix_caching_nothing_is_published_or_found(self) -> None:
        """Without prefix caching nothing is published, and nothing is reused."""
        world = self._start(prefix_caching=False)
        prompt = world.prompt(3)
        for _ in range(2):
            world.do(world.worker.serve, prompt, self.block_size + 1)
            found = world.do(world.worker.cached_tokens, prompt)
            assert found == 0, f"without prefix caching {found} tokens are cached"
        assert world.harness.events.total == 0, f"without prefix caching it published {list(world.harness.events)}"

    def test_the_same_requests_give_the_same_events(self) -> None:
        """Events depend only on the requests and the seed."""
        streams = []
        for _ in range(2):
            world = self._start(8)
            world.do(world.worker.serve, world.prompt(1), 9)
            world.play(seed=1)
            streams.append([entry.event for entry in world.harness.events])
        assert streams[0] == streams[1], "the same requests on two workers of one seed gave different events"

    def test_any_traffic_stays_in_sync_at_every_step(self) -> None:
        """Requests of all kinds on two workers; when all have finished, no block is in use."""
        for seed in range(4):
            world = self._start(8, workers=2, chunk=3 if seed % 2 else None)
            world.play(seed, workers=2)
            for worker in world.harness.workers.values():
                for request in list(worker.requests):
                    assert isinstance(request, Request)  # no engine uses the worker
                    world.do(request.finish)
                active = worker.manager.num_active_blocks
                assert active == 0, f"all requests have finished, and {active} blocks of {worker} are in use"


def _other_from(prompt: Prompt, position: int) -> Prompt:
    """Return the same prompt with another token at one position."""
    assert prompt.tokens is not None
    tokens = list(prompt.tokens)
    tokens[position] += 1
    return Prompt(tokens)
