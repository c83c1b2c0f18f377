"""Tests of a router that subscribes to three workers: over every dialect, and with faults of the wire.

No test sleeps: `await_subscribed` returns when no later event can be lost, and `asettle` queries the router until its
answers are right.
"""

import pytest
from zmq_router import ZmqRouter

pytestmark = [pytest.mark.asyncio, pytest.mark.kvmock(workers=3, num_blocks=8)]
TWO = pytest.mark.kv_dialects("vllm-0.23", "sglang-0.5.22")


class Fleet:
    """Three workers, their publishers, and the served prompts."""

    def __init__(self, harness, make_prompt, publishers):
        self.harness, self.make_prompt, self.publishers = harness, make_prompt, publishers
        self.system = make_prompt(blocks=2)
        self.prompts = [self.system]
        self.of_worker = [[], [], []]

    def router(self, patience=2.0):
        endpoints = [(publisher.endpoint, publisher.replay_endpoint) for publisher in self.publishers]
        return ZmqRouter(self.harness.profile.block_size, endpoints, patience)

    async def subscribed(self):
        for publisher in self.publishers:
            await publisher.await_subscribed()

    def serve(self, rounds, worker=None):
        """Serve prompts; the events of a prompt are one batch.

        Of four prompts on a worker, the first begins with the system prompt; the second and the fourth continue the
        previous one. The worker is cleared before the seventh of eight.
        """
        for _ in range(rounds):
            for number in range(3) if worker is None else [worker]:
                own = self.of_worker[number]
                before = own[-1] if len(own) % 2 else None if len(own) % 4 else self.system
                prompt = self.make_prompt(blocks=1 + len(self.prompts) % 3, after=before)
                self.serve_one(number, prompt, clear=len(own) % 8 == 6)
                own.append(self.prompts[-1])

    def serve_one(self, number, prompt, *, clear=False):
        with self.publishers[number].step():
            if clear:
                self.harness.worker(number).clear()
            self.harness.worker(number).serve(prompt)
        self.prompts.append(prompt)

    async def settled(self, router):
        """Wait until the router's answers are right."""

        async def answers():
            return [router.overlap(prompt.tokens) for prompt in self.prompts]

        right = [self.harness.overlap(prompt) for prompt in self.prompts]
        await self.publishers[0].asettle(answers, right)


def last_applied(worker, publisher):
    """Return a function that checks whether a router has applied all published batches."""

    async def probe():
        return worker.next == publisher.batches()

    return probe


@pytest.fixture
def fleet(kv_harness, kv_prompt, make_kv_publisher):
    return Fleet(kv_harness, kv_prompt, [make_kv_publisher(worker) for worker in range(3)])


async def test_it_reads_every_dialect(fleet, kv_events):
    async with fleet.router() as router:
        await fleet.subscribed()
        fleet.serve(12)
        await fleet.settled(router)
        assert [worker for worker in router.workers if len(worker.names) > 8 or len(worker.copies) > 8] == []
        warm = fleet.make_prompt(blocks=1, after=fleet.prompts[-2])
        assert {1: len(fleet.prompts[-2].tokens) // 16} == router.overlap(warm.tokens)
        assert router.route(warm.tokens) == 1
    assert kv_events.removed != []


@pytest.mark.kv_dialects("vllm-0.24")
async def test_workers_of_three_versions(kv_harness, kv_prompt, make_kv_publisher):
    dialects = ["vllm-0.9", "vllm-0.24", "vllm-0.33"]
    publishers = [make_kv_publisher(worker, dialect=dialect) for worker, dialect in enumerate(dialects)]
    fleet = Fleet(kv_harness, kv_prompt, publishers)
    async with fleet.router() as router:
        await fleet.subscribed()
        fleet.serve(4)
        await fleet.settled(router)


@pytest.mark.kv_dialects("vllm-0.24")
async def test_a_block_is_there_until_its_last_copy_is_removed(fleet, kv_prompt, kv_events):
    worker, prompt = fleet.harness.worker(0), kv_prompt(blocks=2)
    fleet.prompts.append(prompt)
    async with fleet.router() as router:
        await fleet.subscribed()
        first, second = worker.prefill(prompt), worker.prefill(prompt)  # the last block is computed twice
        first.finish()
        worker.serve(kv_prompt(blocks=6))  # evicts one of its copies
        assert len(kv_events.removed_blocks) == 1
        await fleet.publishers[0].asettle(last_applied(router.workers[0], fleet.publishers[0]))
        assert router.overlap(prompt.tokens) == {0: 2}
        second.finish()
        worker.serve(kv_prompt(blocks=8))
        await fleet.settled(router)


FAULTS = {
    "lost": lambda faults: faults.lose(2),
    "twice": lambda faults: faults.double(),
    "in reverse order": lambda faults: faults.reorder(),
    "too late": lambda faults: faults.slow_subscriber(2, 1),
    "no msgpack": lambda faults: faults.corrupt(),
    "of a kind that it does not know": lambda faults: faults.unknown_tag(2),
    "with a field that it does not know": lambda faults: faults.extra_field(2),
    "lost, and the replay breaks off": lambda faults: (faults.lose(2), faults.truncate_replay(1)),
}


@TWO
@pytest.mark.parametrize("fault", FAULTS)
async def test_it_is_right_again_after_batches_that_come(fault, fleet):
    async with fleet.router() as router:
        await fleet.subscribed()
        fleet.serve(1)
        FAULTS[fault](fleet.publishers[1].faults)
        fleet.serve(5)
        await fleet.settled(router)


@TWO
async def test_it_does_not_wait_for_ever_for_the_end_of_a_replay(fleet):
    async with fleet.router(patience=0.2) as router:
        await fleet.subscribed()
        fleet.serve(1)
        fleet.publishers[1].faults.lose(2)
        fleet.publishers[1].faults.truncate_replay(1, end_marker=False)
        fleet.serve(3)
        await fleet.settled(router)


@TWO
async def test_one_that_comes_late_asks_for_all(fleet):
    fleet.serve(3)
    async with fleet.router() as router:
        await fleet.subscribed()
        fleet.serve(1)  # the router does not know that it missed any
        await fleet.settled(router)
    assert [replay.start for replay in fleet.publishers[2].replays] == [0]


@TWO
async def test_a_restart_is_noticed(fleet):
    async with fleet.router() as router:
        await fleet.subscribed()
        fleet.serve(3)
        await fleet.settled(router)
        fleet.harness.worker(1).restart(announced=True)  # to our index; the router sees that numbers begin with 0
        fleet.serve(1)
        await fleet.settled(router)


GONE = {
    "no buffer has it": (lambda wire: wire.faults.gap_beyond_buffer(), [4]),
    "no replay has it": (
        lambda wire: (wire.faults.lose(), *(wire.faults.truncate_replay() for _ in range(3))),
        [4, 4, 4],
    ),
    "nobody can read it, in a replay either": (lambda wire: wire.publish_payload(b"\xc1"), [4]),
}


@TWO
@pytest.mark.parametrize("gone", GONE)
async def test_what_is_gone_is_not_claimed(gone, fleet):
    fault, asked = GONE[gone]
    async with fleet.router() as router:
        await fleet.subscribed()
        fleet.serve(4)
        await fleet.settled(router)
        fault(fleet.publishers[1])
        fleet.serve(1, worker=1)
        fleet.serve_one(1, fleet.make_prompt(blocks=1))

        async def known():
            return 1 in router.overlap(fleet.prompts[-1].tokens)

        await fleet.publishers[1].asettle(known)
        for prompt in fleet.prompts:
            assert router.overlap(prompt.tokens).items() <= fleet.harness.overlap(prompt).items()
    assert asked == [replay.start for replay in fleet.publishers[1].replays]
