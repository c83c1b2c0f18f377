"""SGLang's workers over a storage at Mooncake's master: only the master publishes what the storage holds."""

import re
import time

import pytest

from pytest_kvmock import EngineProfile, Prompt, RouterHarness, StorageTier
from pytest_kvmock.engines.sglang.hashes import SglangHasher, page_root
from pytest_kvmock.oracle import MasterPages
from pytest_kvmock.oracle.index import master_pages
from pytest_kvmock.servers import KvServer
from pytest_kvmock.values.shared_stores import MasterEvent, MasterMessage
from pytest_kvmock.wire.sockets import MasterPublisher, MasterSubscriber
from pytest_kvmock.wire.sockets.master_sockets import master_frames, read_master

PROMPTS = [list(range(first, first + 35)) for first in (0, 100, 200)]
PAGES = 8


def harness_of(backend="sglang", tiers=None, **options):
    below = {"host": 64, "storage": True, "prefetch_threshold": 4, **(tiers or {})}
    profile = EngineProfile(block_size=4, num_blocks=64, workers=3, tiers=below)
    stores = {"l3": {"kind": "hicache", "workers": [0, 1], "model": "org/model", **options}}
    return RouterHarness(profile, backend, stores=stores, name="master")


def served(worker, prompts=PROMPTS):
    """Serve prompts one after the other, with time to write what they compute."""
    for prompt in prompts:
        worker.serve(prompt)
        worker.tick(worker.now + 2000)


def hashes_of(tokens, extra_key=None, salt=None):
    """Return the page hashes of a prompt, as a router computes them."""
    return [each.hex() for each in SglangHasher().digests(tokens, 4, 0, page_root(extra_key, salt))]


def read_of(master, messages=None):
    """Return the pages known to a router that has read a master's messages."""
    pages = MasterPages(master.layout.keys)
    for message in master.messages if messages is None else messages:
        pages.take(message)
    return pages


def test_the_master_publishes_stored_and_removed_objects_that_no_worker_publishes():
    with harness_of() as kv:
        master = kv.store("l3")
        before = kv.events.total
        served(kv.worker(0))
        assert {str(entry.event.storage_tier) for entry in kv.events} == {"device", "host_pinned"}
        assert len(master.objects) == 3 * PAGES * 2
        assert [message.number for message in master.messages] == [0, 1, 2]
        assert kv.overlap(PROMPTS[0], owner="l3") == {}
        total = kv.events.total
        kv.worker(0).storage.lose(PROMPTS[0])
        assert kv.events.total == total > before
        assert {event.event_type for event in master.messages[-1].events} == {"removed"}


def test_pages_of_a_prompt_are_found_by_its_hashes_in_the_masters_stream():
    with harness_of() as kv:
        master = kv.store("l3")
        served(kv.worker(0))
        read = read_of(master)
        assert read.hits(hashes_of(PROMPTS[0])) == [*range(PAGES)]
        assert read.hits(hashes_of([7] * 32)) == []
        event = master.messages[0].events[0]
        assert event == MasterEvent("stored", f"org-model_{hashes_of(PROMPTS[0])[0]}_0_k", "default", "")


def test_only_a_worker_that_shares_the_store_fetches_what_another_wrote():
    with harness_of() as kv:
        served(kv.worker(0))
        assert kv.worker(1).serve(PROMPTS[0]).cached_tokens == 32
        fetched = [entry.event for entry in kv.events if entry.event.worker_id == 1]
        tiers = [event.storage_tier for event in fetched[1:]]  # without the Cleared at its start
        assert tiers == [StorageTier.HOST_PINNED, StorageTier.DEVICE]  # the prefetch is published, and nothing else
        assert kv.worker(2).serve(PROMPTS[0]).cached_tokens == 0


@pytest.mark.parametrize("backend", ["sglang", "sglang_eagle"])
def test_an_adapter_or_a_salt_seeds_the_hash_chain_of_pages(backend):
    keyed = [Prompt(PROMPTS[0], lora_name="a"), Prompt(PROMPTS[0], cache_salt="s"), Prompt(PROMPTS[0])]
    with harness_of(backend) as kv:
        master = kv.store("l3")
        served(kv.worker(0), keyed)
        written = {*master.objects}
        master.restart()
        for prompt in keyed:
            kv.worker(1).storage.fill(prompt)
        assert {*master.objects} == written
    if backend == "sglang":
        read = read_of(master, master.messages[:3])
        assert read.hits(hashes_of(PROMPTS[0], "a")) == [*range(PAGES)]
        assert read.hits(hashes_of(PROMPTS[0], None, "s")) == [*range(PAGES)]


def test_a_page_needs_all_its_objects_and_pages_behind_a_hole_cannot_be_loaded():
    with harness_of(tp=2) as kv:
        master, pages = kv.store("l3"), hashes_of(PROMPTS[0])
        served(kv.worker(0), PROMPTS[:1])
        assert len(master.objects) == 4 * PAGES
        master.drop(1)  # one half of one rank's part of the first page
        read = read_of(master)
        assert len(read.objects) == 4 * PAGES - 1
        assert read.hits(pages) == [*range(1, PAGES)]
        assert read.loadable(pages) == 0
        assert kv.worker(1).serve(PROMPTS[0]).cached_tokens == 0


def test_a_full_master_evicts_the_oldest_objects_and_publishes_it():
    with harness_of(capacity=2 * PAGES) as kv:
        master = kv.store("l3")
        served(kv.worker(0))
        read = read_of(master)
        assert read.objects == {*master.objects}
        assert len(read.objects) == 2 * PAGES
        assert read.hits(hashes_of(PROMPTS[0])) == []


def test_a_gap_in_the_numbers_clears_all_pages_and_a_repeated_number_is_ignored():
    with harness_of() as kv:
        master = kv.store("l3")
        served(kv.worker(0), PROMPTS[:2])
        master.skip()
        read = read_of(master, [*master.messages, master.messages[-1]])
        assert len(read.objects) == 4 * PAGES
        served(kv.worker(0), PROMPTS[2:])
        read.take(master.messages[-1])
        assert read.gaps == 1
        assert read.hits(hashes_of(PROMPTS[0])) == []  # the master has it, and no message repeats it
        assert read.hits(hashes_of(PROMPTS[2])) == [*range(PAGES)]


def test_a_restarted_master_is_empty_and_its_numbers_start_again():
    with harness_of() as kv:
        master = kv.store("l3")
        served(kv.worker(0), PROMPTS[:2])
        read = read_of(master)
        master.restart()
        assert len(read.objects) == 4 * PAGES  # no message reports the restart
        assert kv.worker(1).serve(PROMPTS[0]).cached_tokens == 0
        kv.worker(0).storage.fill(PROMPTS[2])
        assert master.messages[-1].number == 0
        read.take(master.messages[-1])
        assert read.objects == {*master.objects}


def test_a_page_with_one_missing_object_is_completed_without_the_others():
    with harness_of() as kv:
        master = kv.store("l3")
        kv.worker(0).storage.fill(PROMPTS[0])
        master.drop(1)
        kv.worker(0).storage.fill(PROMPTS[0])
        assert len(master.messages[-1].events) == 1
        assert read_of(master).hits(hashes_of(PROMPTS[0])) == [*range(PAGES)]


def test_workers_with_different_layouts_have_no_hits():
    with harness_of() as kv:
        master = kv.store("l3")
        served(kv.worker(0))
        read, pages = read_of(master), hashes_of(PROMPTS[0])
        read.advertise(0, master.layout)
        read.advertise(1, master.layout)
        assert read.hits(pages) == [*range(PAGES)]
        read.advertise(2, "another")
        assert read.hits(pages) == []
        read.advertise(0, "another")
        assert read.objects == set()


def test_another_tenant_is_ignored_and_too_many_objects_clear_all_pages(monkeypatch):
    read = MasterPages(lambda page: [page])
    read.take(MasterMessage(0, 0, (MasterEvent("stored", "a", "other"), MasterEvent("stored", "b"))))
    assert read.objects == {"b"}
    monkeypatch.setattr(master_pages, "MOST_OBJECTS", 2)
    read.take(MasterMessage(1, 0, (MasterEvent("stored", "c"), MasterEvent("stored", "d"))))
    assert read.objects == set()


def test_the_masters_stream_has_its_own_socket():
    with harness_of() as kv, MasterPublisher("tcp") as publisher, MasterSubscriber(publisher.endpoint) as reader:
        master = kv.store("l3")
        master.listeners.append(publisher.publish)
        until = time.monotonic() + 5
        got = []
        while not got and time.monotonic() < until:  # until the subscription is active
            master.skip(0)
            kv.worker(0).storage.fill(PROMPTS[0])
            got = [*reader.read(0.02)]
            kv.worker(0).storage.lose(PROMPTS[0])
        assert got[0] in master.messages
        publisher.close()


def test_a_server_publishes_the_masters_messages():
    with harness_of() as kv, KvServer(kv, "sglang-0.5.23", ports={"master": 0}) as server:
        with MasterSubscriber(server.inside.ready_line()["master"]) as reader:
            until = time.monotonic() + 5
            got = []
            while not got and time.monotonic() < until:  # until the subscription is active
                kv.worker(0).storage.fill(PROMPTS[0])
                got = [*reader.read(0.02)]
                kv.worker(0).storage.lose(PROMPTS[0])
        assert got[0] in kv.store("l3").messages


def test_a_server_without_a_master_store_refuses_a_master_port():
    text = "KvServer: ports['master'] is for one store of kind 'hicache'; the harness has no stores"
    with RouterHarness(backend="sglang") as kv, pytest.raises(ValueError, match=re.escape(text)):
        KvServer(kv, "sglang-0.5.23", ports={"master": 0})


def test_a_master_message_is_three_frames():
    message = MasterMessage(258, 1500, (MasterEvent("removed", "key", "default", "g"),))
    frames = master_frames(message)
    assert frames[:2] == [b"", bytes(6) + b"\1\2"]
    assert read_master(frames) == message
    with pytest.raises(
        ValueError, match=r"a message of Mooncake's master is 3 frames, the second of 8 bytes; got \[0\]"
    ):
        read_master([b""])
    with pytest.raises(ValueError, match=r"is \[milliseconds, events, rank\]: "):
        read_master([b"", bytes(8), b"\x90"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 0}, r"stores\['l3'\]: tp must be an integer of at least 1, got 0"),
        ({"tag": 1}, r"stores\['l3'\]: tag must be a text, got 1"),
        ({"dcp": 2}, "MooncakeLayout: dcp=2 goes with is_mla=True"),
        ({"tiers": {"storage": False}}, r"HiCache's third level is behind a host: .* 'storage': True"),
    ],
)
def test_a_wrong_master_store_is_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message):
        harness_of(**options)
