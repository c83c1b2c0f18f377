"""Reasons why a router's blocks differ from the held ones: the batch, its subscribers, its fault, its replays."""

import pytest
from served import complete

from pytest_kvmock import EngineProfile, Prompt, RouterHarness
from pytest_kvmock.engines.backends import served_by
from pytest_kvmock.servers import KvServer
from pytest_kvmock.servers.serve.text import encode
from pytest_kvmock.wire import find_dialect
from pytest_kvmock.wire.sockets import KvSubscriber


@pytest.fixture
def profile():
    return {}


@pytest.fixture
def server(profile):
    sizes = {"block_size": 16, "num_blocks": 64, "workers": 1, **profile}
    with (
        RouterHarness(EngineProfile(**sizes), served_by(find_dialect("vllm-0.33"), "mock-model")) as kv,
        KvServer(kv, adapters=["lora"]) as server,
    ):
        yield server


@pytest.fixture
def subscriber(server):
    publisher = server.publisher(0)
    with KvSubscriber(
        publisher.endpoints, lambda _: None, dialect=server.dialect, replay=publisher.replay_endpoints
    ) as made:
        publisher.wait_subscribed()
        yield made


def why(server, prompt, blocks, rank=0):
    """Return the reason in the message for a router that knows `blocks` blocks."""
    text = server.check(prompt, [{"worker": 0, "rank": rank, "blocks": blocks}])
    return text[text.index("(") :]


def test_a_batch_before_any_subscription_is_reported_as_sent_to_no_subscription(server):
    complete(server.url(0), server.text(1))
    text = server.text(4)
    complete(server.url(0), text)
    assert (
        why(server, text, 0)
        == "(batch 1 stored them: it went to no subscription, no subscriber asked for a replay of it)"
    )


def test_a_batch_that_arrived_is_reported_with_its_subscriptions(server, subscriber):
    text = server.text(4)
    complete(server.url(0), text)
    assert (
        why(server, text, 0)
        == "(batch 0 stored them: it went to 1 subscription, no subscriber asked for a replay of it)"
    )


def test_a_lost_batch_is_reported_with_its_fault_and_its_replay(server, subscriber):
    texts = [server.text(4) for _ in range(3)]
    complete(server.url(0), texts[0])
    server.fault(0, "lose")
    complete(server.url(0), texts[1])
    struck = "(batch 1 stored them: lose changed it on its way, "
    assert why(server, texts[1], 0) == struck + "no subscriber asked for a replay of it)"
    complete(server.url(0), texts[2])
    subscriber.receive(3)  # it detects the gap and asks for a replay
    assert why(server, texts[1], 2) == struck + "a replay from 1 on was asked for, and had it)"


def test_a_corrupt_batch_is_reported_with_its_fault(server, subscriber):
    text = server.text(4)
    server.fault(0, "corrupt")
    complete(server.url(0), text)
    assert (
        why(server, text, 0)
        == "(batch 0 stored them: corrupt changed it on its way, no subscriber asked for a replay of it)"
    )


def test_a_batch_that_left_the_replay_buffer_is_reported(server, subscriber):
    text = server.text(4)
    server.fault(0, "gap_beyond_buffer")
    complete(server.url(0), text)
    assert why(server, text, 0) == "(no batch that a replay still has stored them)"


def test_blocks_stored_later_are_reported_with_their_own_batch(server, subscriber):
    text = server.text(2)
    complete(server.url(0), text)
    longer = server.text(2, after=text)
    complete(server.url(0), longer)
    assert why(server, longer, 2).startswith("(batch 1 stored them: ")
    assert why(server, longer, 1).startswith("(batch 0 stored them: ")


def test_removed_and_cleared_blocks_are_reported_with_the_batch_that_removed_them(server, subscriber):
    text = server.text(4)
    complete(server.url(0), text)
    assert server.reset(0)
    assert (
        why(server, text, 4)
        == "(batch 1 removed them: it went to 1 subscription, no subscriber asked for a replay of it)"
    )
    complete(server.url(0), text)
    while server.held(text):
        complete(server.url(0), server.text(16))
    assert why(server, text, 4).startswith("(batch ")
    assert " removed them: it went to 1 subscription" in why(server, text, 4)


def test_blocks_lost_in_a_restart_are_reported_so(server, subscriber):
    text = server.text(4)
    complete(server.url(0), text)
    server.restart(0)
    assert why(server, text, 4) == "(it began again, and is empty since)"
    complete(server.url(0), server.text(2))
    assert why(server, text, 4) == (
        "(it began again, and is empty since; batch 0, the last one since: it went to 1 subscription, no subscriber "
        "asked for a replay of it)"
    )


def test_blocks_that_no_batch_stored_are_reported_so(server):
    assert why(server, server.text(2), 1) == "(no batch stored them)"
    assert why(server, server.text(2), 3) == "(no batch stored them)"
    text = server.text(2)
    complete(server.url(0), text)
    assert why(server, text, 3) == "(the prompt has 2 full blocks)"


def test_equal_tokens_with_another_adapter_are_reported_with_their_own_batch(server):
    text = server.text(3)
    complete(server.url(0), text)
    complete(server.url(0), text, model="lora")
    complete(server.url(0), text, cache_salt="s")
    for number, keys in enumerate(({}, {"lora_name": "lora"}, {"cache_salt": "s"})):
        assert why(server, Prompt(encode(text), **keys), 0).startswith(f"(batch {number} stored them: ")


def test_a_prompt_of_hashes_has_a_reason(server):
    text = server.text(3)
    complete(server.url(0), text)
    hashes = Prompt(hashes=Prompt(encode(text)).block_hashes(16))
    assert why(server, hashes, 1).startswith("(batch 0 stored them: ")


@pytest.mark.parametrize("profile", [{"dp_size": 2}])
def test_each_rank_has_its_own_batches_in_a_reason(server):
    complete(server.url(0), server.text(1), data_parallel_rank=0)
    text = server.text(3)
    complete(server.url(0), text, data_parallel_rank=1)
    assert why(server, text, 1, rank=1).startswith("(batch 0 stored them: ")


def test_assert_knows_gives_the_reason(server, subscriber):
    text = server.text(3)
    server.fault(0, "lose")
    complete(server.url(0), text)
    complete(server.url(0), server.text(1))
    with pytest.raises(AssertionError) as failed:
        server.assert_knows(text, list, timeout=0.02)
    assert str(failed.value) == (
        "worker 0 rank 0: the router knows 0 blocks, 3 are held (batch 0 stored them: lose changed it on its way, "
        "no subscriber asked for a replay of it) (0.02 s after the first question)"
    )
    assert server.truth.differences == [
        f"a prompt of 48 tokens: {str(failed.value).removesuffix(' (0.02 s after the first question)')}"
    ]
