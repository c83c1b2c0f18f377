"""Workers of a harness over LMCache's server: chunks with their own hash chain, and a log that each worker reads."""

import sys

import pytest

from pytest_kvmock import EngineProfile, KvCacheEvent, Prompt, RadixIndex, Removed, RouterEvent, RouterHarness, Stored
from pytest_kvmock import StorageTier as Tier

pytest.importorskip("blake3")

HOST = Tier.HOST_PINNED
PROMPTS = [list(range(first, first + 83)) for first in (0, 1000, 2000)]
STORES = {"server": {"kind": "lmcache", "workers": [0, 1], "chunk": 16}}


def harness_of(index=None, num_blocks=24, workers=3, **options):
    profile = EngineProfile(block_size=4, num_blocks=num_blocks, workers=workers)
    return RouterHarness(profile, "vllm", index, stores={"server": {**STORES["server"], **options}}, name="lmcache")


def served(worker, prompts=PROMPTS):
    """Serve prompts one after the other, with time to store what they compute. Return what each had cached."""
    cached = []
    for prompt in prompts:
        cached.append(worker.serve(prompt).cached_tokens)
        worker.tick(worker.now + 20)
    return cached


def read(worker):
    """Let an idle worker read the server's log."""
    worker.tick(worker.now + 1)


def of_server(kv, worker_id):
    """Return the events that a worker has published about the server."""
    events = [entry.event for entry in kv.events if entry.event.worker_id == worker_id]
    return [event for event in events if event.storage_tier is HOST]


def announced(kv, worker_id):
    """Return the names that a worker has announced and not removed."""
    names = set()
    for event in of_server(kv, worker_id):
        data = event.event.data
        (names.update if isinstance(data, Stored) else names.difference_update)(data.block_hashes)
    return names


def test_each_worker_of_the_server_announces_what_any_of_them_stored():
    with harness_of() as kv:
        assert served(kv.worker(0)) == [0, 0, 0]
        assert of_server(kv, 1) == []  # it has not read the log
        assert kv.overlap(PROMPTS[0], owner="server") == {0: 20, 1: 20}
        read(kv.worker(1))
        assert announced(kv, 0) == announced(kv, 1)
        assert len(of_server(kv, 1)) == 15
        assert served(kv.worker(1)) == [80, 80, 80]
        assert kv.worker(2).serve(PROMPTS[0]).cached_tokens == 0


def test_chunks_differ_from_blocks_of_the_same_stream_in_size_and_hash_chain():
    with harness_of() as kv:
        served(kv.worker(0), PROMPTS[:1])
        events = of_server(kv, 0)
        assert {len(event.token_ids[0]) for event in events} == {16}
        assert [event.event.data.parent_hash for event in events[1:]] == [
            event.event.data.block_hashes[0] for event in events[:-1]
        ]
        on_device = {block for entry in kv.events if entry.event.storage_tier is Tier.DEVICE for block in names(entry)}
        assert on_device & announced(kv, 0) == set()


def names(entry):
    return entry.event.event.data.block_hashes


def test_a_promise_of_the_server_begins_where_the_device_ends_and_has_whole_chunks():
    with harness_of(num_blocks=32) as kv:
        served(kv.worker(0))  # the device has lost all but some blocks of the first prompt
        on_device = kv.overlap(PROMPTS[1])[0]
        assert 0 < on_device < 20
        assert kv.overlap(PROMPTS[1], owner="server") == {0: 20 - on_device, 1: 20}
        assert kv.overlap(PROMPTS[1][:31], owner="server")[1] == 4  # the second chunk is not whole


def test_each_worker_removes_dropped_chunks_when_it_reads_the_log():
    with harness_of() as kv:
        served(kv.worker(0))
        read(kv.worker(1))
        kv.store("server").drop(5)
        read(kv.worker(0))
        assert len(announced(kv, 0)) == 10
        assert len(announced(kv, 1)) == 15
        assert kv.overlap(PROMPTS[0], owner="server") == {0: 20, 1: 20}  # worker 1 still announces them
        read(kv.worker(1))
        assert kv.overlap(PROMPTS[0], owner="server") == {}
        assert kv.worker(1).serve(PROMPTS[0]).cached_tokens == 0


def test_a_full_server_drops_its_oldest_chunks():
    with harness_of(capacity=6) as kv:
        served(kv.worker(0))
        assert len(kv.store("server").held) == 6
        assert len(announced(kv, 0)) == 6


def test_a_server_restart_is_one_removed_of_all_chunks():
    with harness_of() as kv:
        served(kv.worker(0))
        read(kv.worker(1))
        kv.store("server").restart()
        for worker_id in (0, 1):
            read(kv.worker(worker_id))
            last = of_server(kv, worker_id)[-1].event.data
            assert isinstance(last, Removed)
            assert len(last.block_hashes) == 15
        assert kv.overlap(PROMPTS[0], owner="server") == {}
        assert served(kv.worker(0)) == [0, 0, 0]
        assert kv.overlap(PROMPTS[0], owner="server") == {0: 20, 1: 20}


def test_after_a_lost_log_a_worker_removes_all_its_chunks_although_the_server_holds_them():
    with harness_of() as kv:
        served(kv.worker(0))
        kv.store("server").lose_events()
        read(kv.worker(0))
        assert announced(kv, 0) == set()
        assert kv.overlap(PROMPTS[0], owner="server") == {}
        assert kv.reusable(PROMPTS[0], tier="host_pinned") == {0: 80, 1: 80}


def test_a_first_contact_with_a_trimmed_log_is_no_loss():
    with harness_of(log=10) as kv:
        served(kv.worker(0))
        read(kv.worker(1))
        assert [type(event.event.data) for event in of_server(kv, 1)] == [Stored] * 10
        assert len(announced(kv, 0)) == 15


def test_a_worker_that_reads_after_the_log_was_trimmed_removes_all_and_starts_again():
    with harness_of(log=10) as kv:
        served(kv.worker(0), PROMPTS[:1])
        read(kv.worker(1))
        served(kv.worker(0), PROMPTS[1:])
        served(kv.worker(0), [list(range(5000, 5083))])
        read(kv.worker(1))
        kinds = [type(event.event.data) for event in of_server(kv, 1)]
        assert kinds == [Stored] * 5 + [Removed] + [Stored] * 10


def test_without_a_log_no_worker_announces_chunks_and_all_can_load_them():
    with harness_of(log=0) as kv:
        served(kv.worker(0))
        read(kv.worker(1))
        assert of_server(kv, 0) + of_server(kv, 1) == []
        assert kv.worker(1).serve(PROMPTS[0]).cached_tokens == 80


def test_a_salt_separates_chunks_and_no_event_shows_it():
    salted = [Prompt(PROMPTS[0], cache_salt=salt) for salt in "ab"]
    with harness_of(num_blocks=64) as kv:
        server = kv.store("server")
        served(kv.worker(0), salted)
        assert len(server.held) == 10
        assert len(announced(kv, 0)) == 5
        assert kv.overlap(PROMPTS[0], owner="server") == {0: 20, 1: 20}  # although each chunk has a salt
        assert kv.worker(1).serve(PROMPTS[0]).cached_tokens == 0
        assert kv.worker(1).serve(salted[0]).cached_tokens == 80
        server.evict([chunk for chunk in server.held if chunk.salt == "a"])
        read(kv.worker(0))
        read(kv.worker(1))
        assert kv.overlap(PROMPTS[0], owner="server") == {}  # the chunks of salt b are held and not announced


def test_an_adapter_is_not_part_of_a_chunk_name():
    with harness_of() as kv:
        served(kv.worker(0), [Prompt(PROMPTS[0], lora_name="a")])
        assert kv.worker(1).serve(Prompt(PROMPTS[0], lora_name="b")).cached_tokens == 80


def test_generated_tokens_are_stored_when_they_complete_a_chunk():
    with harness_of(num_blocks=32) as kv:
        with kv.worker(0).prefill(PROMPTS[0]) as request:
            request.decode(14)
        kv.worker(0).tick(20)
        assert len(kv.store("server").held) == 6


def test_a_chunk_that_is_evicted_while_it_is_loaded_is_computed_with_all_later_ones():
    with harness_of() as kv:
        served(kv.worker(0))
        server, host = kv.store("server"), kv.worker(1)._driver.offload
        open_job = host._open

        def lose(job):
            if job.is_load:
                server.evict([chunk for chunk in server.held if chunk.digest == job.request.digests[2]])
            return open_job(job)

        host._open = lose
        assert kv.worker(1).serve(PROMPTS[0]).cached_tokens == 32


def test_a_restarted_worker_announces_what_is_in_the_log():
    with harness_of() as kv:
        served(kv.worker(0))
        kv.worker(0).restart(announced=True)
        before = len(of_server(kv, 0))
        assert kv.overlap(PROMPTS[0], owner="server") == {1: 20}  # worker 0 is missing until it publishes
        read(kv.worker(0))
        assert len(of_server(kv, 0)) == before + 15
        assert kv.overlap(PROMPTS[0], owner="server") == {0: 20, 1: 20}


def test_chunks_of_a_removed_worker_stay_until_another_worker_removes_them():
    with harness_of() as kv:
        served(kv.worker(0))
        read(kv.worker(1))
        kv.remove_worker(0)
        assert kv.overlap(PROMPTS[0], owner="server") == {1: 20}
        kv.store("server").drop(5)
        read(kv.worker(1))
        assert kv.overlap(PROMPTS[0], owner="server") == {}


def test_an_engine_in_virtual_time_stores_and_loads_chunks():
    with harness_of() as kv:
        cached = []
        for worker_id in (0, 1):
            engine = kv.engine(worker_id)
            for prompt in PROMPTS:
                cached.append(engine.submit(prompt, max_output_tokens=3))
                engine.run()
        assert [request.cached_tokens for request in cached] == [0, 0, 0, 80, 80, 80]


CHUNK, NEXT = range(100, 116), range(116, 132)


def event(worker_id, number, data, tokens=None, tier=HOST):
    return RouterEvent(worker_id, KvCacheEvent(number, data), tier, tokens)


def test_a_chunk_counts_once_the_block_size_is_known():
    index = RadixIndex(stores=STORES)
    index.apply(event(0, 0, Stored(None, (1,), (0,)), (tuple(CHUNK),)))
    query = Prompt([*CHUNK, *NEXT]).block_hashes(4)
    assert index.find_tiered(query) == {}
    index.apply(event(2, 0, Stored(None, (7,), (8,)), ((1, 2, 3, 4),), Tier.DEVICE))  # does not share the server
    assert HOST not in index.find_tiered(query)
    index.apply(event(0, 1, Stored(None, (7,), (8,)), ((1, 2, 3, 4),), Tier.DEVICE))
    assert index.find_tiered(query)[HOST] == {(0, 0): 4, (1, 0): 4}
    index.apply(event(1, 0, Stored(1, (2,), (0,)), (tuple(NEXT),)))
    assert index.find_tiered(query)[HOST] == {(0, 0): 8, (1, 0): 8}
    index.apply(event(0, 2, Removed((1,))))
    assert HOST not in index.find_tiered(query)  # a hole ends the promise
    index.clear_store("server")
    index.apply(event(0, 3, Stored(None, (1,), (0,)), (tuple(CHUNK),)))
    assert index.find_tiered(query)[HOST] == {(0, 0): 4, (1, 0): 4}


def test_an_odd_sized_event_counts_by_whole_blocks_and_one_without_tokens_does_not_count():
    index = RadixIndex(stores=STORES)
    index.apply(event(0, 0, Stored(None, (7,), (8,)), ((1, 2, 3, 4),), Tier.DEVICE))
    index.apply(event(0, 1, Stored(None, (1,), (0,)), (tuple(range(100, 111)),)))
    index.apply(event(0, 2, Stored(None, (2,), (0,))))
    assert index.find_tiered(Prompt(range(100, 116)).block_hashes(4))[HOST] == {(0, 0): 2, (1, 0): 2}


def test_a_chunk_size_that_is_no_multiple_of_the_block_size_is_refused():
    with pytest.raises(ValueError, match="stores: a chunk of 18 tokens is not a whole number of blocks of 4"):
        harness_of(chunk=18)


def test_a_missing_blake3_is_reported_with_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(ImportError, match=r"names of LMCache's chunks need blake3: pip install .*\[lmcache\]"):
        harness_of()
