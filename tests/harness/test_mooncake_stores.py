"""Workers of a harness over Mooncake's store: what they put, announce and load, and what ends their engine."""

import msgspec
import pytest
from depth import each_parameter

from pytest_kvmock import EngineProfile, Prompt, RadixIndex, RouterHarness, StorageTier, Stored
from pytest_kvmock.engines import WaitsForEverError, backend_spec
from pytest_kvmock.engines.vllm.pairs.legs import EngineDied
from pytest_kvmock.servers import check_file
from pytest_kvmock.wire import Batch, decode, encode

EXTERNAL = StorageTier.EXTERNAL
PROMPTS = [list(range(first, first + 27)) for first in (0, 100, 200)]


def harness_of(index=None, backend="vllm", num_blocks=8, **options):
    profile = EngineProfile(block_size=4, num_blocks=num_blocks, workers=3)
    stores = {"pool": {"kind": "mooncake", "workers": [0, 1], **options}}
    return RouterHarness(profile, backend, index, stores=stores, name="mooncake")


def served(worker, prompts=PROMPTS):
    """Serve prompts one after the other, with time to put what they compute. Return what each had cached."""
    cached = []
    for prompt in prompts:
        cached.append(worker.serve(prompt).cached_tokens)
        worker.tick(worker.now + 20)
    return cached


def announced(kv, worker_id):
    """Return the names that a worker has announced for the store."""
    events = [entry.event for entry in kv.events if entry.event.worker_id == worker_id]
    return [event.event.data.block_hashes[0] for event in events if event.storage_tier is EXTERNAL]


def test_a_worker_loads_what_another_has_put_and_does_not_announce_it():
    with harness_of() as kv:
        assert served(kv.worker(0)) == [0, 0, 0]
        assert kv.overlap(PROMPTS[0], owner="pool") == {0: 6, 1: 6}
        assert served(kv.worker(1)) == [24, 24, 24]
        assert kv.worker(2).serve(PROMPTS[0]).cached_tokens == 0
        assert len(announced(kv, 0)) == 18
        assert announced(kv, 1) == []


def test_a_store_event_has_tokens_parent_and_medium_and_no_other_extras():
    with harness_of() as kv:
        served(kv.worker(0), [Prompt(PROMPTS[0], lora_name="a", cache_salt="s")])
        events = [entry.event for entry in kv.events]
        assert [event.storage_tier for event in events] == [StorageTier.DEVICE, *[EXTERNAL] * 6]
        assert {type(event.event.data) for event in events} == {Stored}
        assert [event.token_ids for event in events[1:]] == [
            (tuple(PROMPTS[0][start : start + 4]),) for start in range(0, 24, 4)
        ]
        written = msgspec.msgpack.decode(encode(Batch([events[1]], 1.5, 0), "vllm-0.33"))[1][0]
        said = {key: value for key, value in written.items() if value is not None}
        assert {**said, "block_hashes": 1} == {
            "type": "BlockStored",
            "block_hashes": 1,
            "token_ids": PROMPTS[0][:4],
            "block_size": 4,
            "medium": "cpu",
            "group_idx": 0,
        }


def test_blocks_with_a_salt_are_not_promised_to_a_prompt_without_one():
    with harness_of(num_blocks=16) as kv:
        served(kv.worker(0), [Prompt(PROMPTS[0], cache_salt="s")])
        assert kv.overlap(PROMPTS[0], owner="pool") == {}
        assert kv.overlap(Prompt(PROMPTS[0], cache_salt="s"), owner="pool") == {1: 6}
        assert kv.worker(1).serve(PROMPTS[0]).cached_tokens == 0


def test_a_device_event_of_a_salted_block_corrects_what_its_store_event_implied():
    index = RadixIndex(stores={"pool": {"kind": "mooncake", "workers": [0, 1]}})
    with harness_of() as kv:
        served(kv.worker(0), [Prompt(PROMPTS[0], cache_salt="s")])
        events = [entry.event for entry in kv.events]
    plain = Prompt(PROMPTS[0]).block_hashes(4)
    for event in events[1:]:
        index.apply(event)
    assert index.find_tiered(plain)[EXTERNAL] == {(0, 0): 6, (1, 0): 6}
    index.apply(events[0])
    assert EXTERNAL not in index.find_tiered(plain)


def test_an_eviction_leaves_a_stale_promise_and_the_worker_computes_again():
    with harness_of() as kv:
        served(kv.worker(0))
        kv.store("pool").drop(16)
        assert kv.overlap(PROMPTS[0], owner="pool") == {0: 6, 1: 6}
        assert kv.reusable(PROMPTS[2], "external") == {}
        assert kv.worker(1).serve(PROMPTS[0]).cached_tokens == 0
        kv.worker(1).tick(40)
        assert announced(kv, 1) == announced(kv, 0)[:6]  # put again and announced again


def test_a_block_that_vanishes_while_it_is_loaded_is_computed_and_put_again():
    with harness_of() as kv:
        served(kv.worker(0))
        store, gone = kv.store("pool"), announced(kv, 0)[3]
        worker, load = kv.worker(1), kv.worker(1)._driver.offload.connector.ranks[0].load

        def lose(job):
            store.objects.pop((gone, 0), None)
            return load(job)

        worker._driver.offload.connector.ranks[0].load = lose
        assert worker.serve(PROMPTS[0]).cached_tokens == 12
        worker.tick(40)
        assert announced(kv, 1) == [gone]


def test_two_workers_that_put_the_same_prefix_at_once_may_both_announce_nothing():
    """Each rank's put is a transfer of its own; a worker announces a block only if it has put all its objects."""
    with harness_of(ranks=2, gbps=1.0, bytes_per_token=250_000) as kv:  # a block of a rank takes half a millisecond
        first, second = kv.worker(0), kv.worker(1)
        first.prefill(PROMPTS[0])
        second.prefill(PROMPTS[0])
        first.tick(3.0)  # its first rank has put the six objects of its share
        second.tick(10.0)  # finds these, and puts the objects of its second rank
        first.tick(10.0)
        assert len(kv.store("pool").objects) == 12
        assert announced(kv, 0) + announced(kv, 1) == []
        assert kv.worker(0).requests[0].finish() is None
        kv.worker(1).requests[0].finish()
        assert kv.overlap(PROMPTS[0], owner="pool") == {}
        served(kv.worker(1), PROMPTS[1:])
        assert kv.worker(1).serve(PROMPTS[0]).cached_tokens == 24


def test_ranks_with_the_same_heads_each_put_a_share_of_the_blocks():
    with harness_of(ranks=4, heads=2) as kv:
        served(kv.worker(0), PROMPTS[:1])
        assert len(kv.store("pool").objects) == 12
        assert len(announced(kv, 0)) == 6


def test_blocks_of_decode_are_put_only_with_save_decode():
    for save_decode, count in ((False, 2), (True, 4)):
        with harness_of(save_decode=save_decode) as kv:
            with kv.worker(0).prefill(PROMPTS[0][:10]) as request:
                request.decode(8)
            kv.worker(0).tick(20)
            assert len(announced(kv, 0)) == count


def test_a_store_block_has_the_length_of_a_context_parallel_block():
    backend = backend_spec("vllm").variant("vllm_dcp", dcp=2)
    with harness_of(backend=backend, ranks=2, heads=1) as kv:
        served(kv.worker(0), PROMPTS[:1])
        assert len(kv.store("pool").objects) == 12  # no two ranks hold the same tokens
        assert {len(entry.event.token_ids[0]) for entry in kv.events} == {4}


def test_blocks_in_the_store_survive_a_restart_and_a_removal_of_their_worker():
    with harness_of() as kv:
        served(kv.worker(0))
        kv.worker(0).restart(announced=True)
        assert kv.worker(0).serve(PROMPTS[0]).cached_tokens == 24
        kv.remove_worker(0)
        assert kv.overlap(PROMPTS[0], owner="pool") == {1: 6}


def test_a_reset_keeps_the_store_and_external_true_empties_it_for_all_workers():
    with harness_of() as kv:
        served(kv.worker(0))
        assert kv.worker(0).reset()
        assert served(kv.worker(0), PROMPTS[:1]) == [24]
        before = kv.events.total
        assert kv.worker(0).reset(external=True)
        assert kv.events.total == before
        assert kv.worker(1).serve(PROMPTS[1]).cached_tokens == 0


def test_an_external_reset_is_refused_for_a_worker_without_a_store():
    with harness_of() as kv, pytest.raises(ValueError, match=r"reset: external=True .* has nothing there"):
        kv.worker(2).reset(external=True)


def test_a_reset_with_running_requests_ends_the_engine():
    with harness_of(num_blocks=16) as kv:
        kv.store("pool").is_full = True  # so that the request finds nothing when it is admitted again
        request = kv.worker(0).prefill(PROMPTS[0])
        kv.worker(0).tick(20)  # until then its blocks are held for the put
        assert kv.worker(0).reset(running=True)
        with pytest.raises(EngineDied) as error:
            request.resume()
        assert str(error.value) == (
            "the engine died, as the original does (AssertionError in mooncake/store/scheduler.py: "
            "build_connector_meta): a reset preempted a request, the same step admits it again, and the connector "
            "forgot it between"
        )
        assert request.status == "lost"
        assert not kv.worker(0).publishes


def test_a_request_preempted_by_a_reset_waits_for_ever_if_the_store_has_its_blocks():
    with harness_of(num_blocks=16) as kv:
        request = kv.worker(0).prefill(PROMPTS[0])
        kv.worker(0).tick(20)
        assert kv.worker(0).reset(running=True)
        with pytest.raises(WaitsForEverError, match="it waits for ever, with its blocks"):
            request.resume()
        assert not kv.worker(0).reset()
        request.finish()


def test_a_request_preempted_without_a_reset_resumes():
    with harness_of(num_blocks=16) as kv:
        with kv.worker(0).prefill(PROMPTS[0]) as request:
            request.preempt()
            request.resume()
        kv.worker(0).tick(20)
        assert len(kv.store("pool").objects) == 6


def test_blocks_are_held_until_they_are_put_and_the_next_request_waits_for_them():
    with harness_of(gbps=1.0, bytes_per_token=250_000) as kv:
        kv.worker(0).serve(PROMPTS[0])
        assert kv.worker(0).manager.num_free_blocks == 1
        kv.worker(0).serve(PROMPTS[1])
        assert kv.worker(0).now == 6.0


def test_an_async_store_lookup_may_be_stale_when_it_is_answered():
    with harness_of(lookup_async=True) as kv:
        served(kv.worker(0))
        assert kv.worker(1).serve(PROMPTS[0]).cached_tokens == 24
        host = kv.worker(1)._driver.offload
        plan = host.plan

        def plan_late(step):
            if host.has_questions:
                kv.store("pool").drop(18)  # between query and answer
            return plan(step)

        host.plan = plan_late
        kv.worker(1).tick(20)
        assert kv.worker(1).serve(PROMPTS[1]).cached_tokens == 0  # none of the promised blocks is loaded


@pytest.mark.parametrize("lookup_async", [False, True])
def test_an_engine_in_virtual_time_puts_and_loads_blocks(lookup_async):
    with harness_of(lookup_async=lookup_async) as kv:
        cached = []
        for worker_id in (0, 1):
            engine = kv.engine(worker_id)
            for prompt in PROMPTS:
                cached.append(engine.submit(prompt, max_output_tokens=3))
                engine.run()
        assert [request.cached_tokens for request in cached] == [0, 0, 0, 24, 24, 24]
        assert [len(announced(kv, worker_id)) for worker_id in (0, 1)] == [18, 0]


@pytest.mark.parametrize(
    ("backend", "described", "message"),
    [
        ("vllm", {"capacity": 0}, r"stores\['pool'\]: capacity must be an integer of at least 1, or None, got 0"),
        ("vllm", {"ranks": "2"}, r"stores\['pool'\]: ranks must be an integer of at least 1, got '2'"),
        ("vllm", {"save_decode": 1}, r"stores\['pool'\]: save_decode must be True or False, got 1"),
        ("vllm", {"chunk": 4}, r"stores\['pool'\]: unknown key 'chunk'; known: kind, workers, capacity, ranks"),
        ("vllm_gemma3", {}, "stores: 'vllm_gemma3' has several cache groups or a draft model"),
        ("lineage", {}, "stores: mooncake is only below engines of vllm"),
    ],
)
def test_a_wrong_mooncake_store_is_refused_in_one_line(backend, described, message):
    with pytest.raises(ValueError, match=message):
        harness_of(backend=backend, **described)


@each_parameter
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("kind", "tiers"), [("mooncake", None), ("files", {"host": 8, "files": True})])
def test_engines_with_two_block_sizes_share_nothing_in_a_store_and_are_warned_once(kind, tiers):
    stores = {"pool": {"kind": kind, "workers": [0, 1, 2]}}
    profile = EngineProfile(block_size=4, num_blocks=8, tiers=tiers)
    with RouterHarness(profile, "vllm", stores=stores, allow=["sparse_tokens"]) as kv:
        served(kv.worker(0))
        with pytest.warns(UserWarning, match="engines with blocks of 4 and of 8 tokens share a store"):
            other = kv.faults.block_size(8, worker=1)
        other.restart()  # a second warning would fail this test
        assert kv.worker(1).serve(PROMPTS[0]).cached_tokens == 0


def test_a_host_tier_and_a_mooncake_store_exclude_each_other():
    profile = EngineProfile(workers=1, tiers={"host": 4})
    with pytest.raises(ValueError, match=r"stores\['pool'\]: mooncake takes the place of a host, .* leave tiers out"):
        RouterHarness(profile, "vllm", stores={"pool": {"kind": "mooncake", "workers": [0]}})


def test_a_mooncake_stream_breaks_no_rule_and_keeps_its_medium(tmp_path):
    """A block that was dropped and put again is announced again; only the medium distinguishes it from the host's."""
    with harness_of() as kv:
        served(kv.worker(0))
        kv.store("pool").drop(18)
        served(kv.worker(0))
        events = [entry.event for entry in kv.events if entry.event.worker_id == 0]
    again = [event for event in events if event.storage_tier is EXTERNAL]
    assert len(again) > len({event.event.data.block_hashes for event in again})
    file = tmp_path / "events.bin"
    file.write_bytes(b"".join(encode(Batch([event], 1.5, 0), "vllm-0.33") for event in events))
    checked = check_file(file, dialect="vllm-0.33")
    assert checked.is_clean, checked.text(warnings=True)
    read = decode(encode(Batch(again, 1.5, 0), "vllm-0.33"), "vllm-0.33").events
    assert {event.storage_tier for event in read} == {EXTERNAL}
