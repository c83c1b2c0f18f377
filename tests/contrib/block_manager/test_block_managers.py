"""The fixtures `kv_block_manager`, `make_kv_block_manager` and `kv_fabric`: sizes, verdicts, and their cost
for other tests.
"""

import json
import subprocess
import sys

import pytest

import pytest_kvmock.contrib.block_manager.managers  # noqa: F401 - stays loaded, so that all runs have the same class

CACHE = """
    from pytest_kvmock.contrib.block_manager import token_blocks

    def cache(pool, tokens):
        blocks = pool.allocate_blocks_blocking(len(tokens) // 4)
        for block, content in zip(blocks, token_blocks(tokens, 4)):
            block.apply_token_block(content)
        pool.register_blocks_blocking(blocks).close()
        pool.flush()
"""


def test_two_managers_of_one_fabric_can_exchange_blocks(nested):
    nested(
        """
        from pytest_kvmock.contrib.block_manager import TransferRequestPut

        def test(make_kv_block_manager, kv_fabric):
            mine, theirs = make_kv_block_manager(), make_kv_block_manager()
            kv_fabric.exchange_blocksets()
            sources, targets = mine.host().allocate_blocks_blocking(1), theirs.host().allocate_blocks_blocking(1)
            sources[0].payload = b"kv"
            TransferRequestPut(sources, mine.get_remote_blocks_mutable(targets.as_block_descriptor_set())).execute()
            assert b"kv" == targets[0].payload
            assert [("put", 1337, 1338, 1, 2)] == kv_fabric.transfers
        """
    ).assert_outcomes(passed=1)


def test_block_managers_take_their_sizes_from_the_profile_and_their_arguments(nested):
    nested(
        """
        from pytest_kvmock.contrib.block_manager import *

        def sizes(manager):
            pools = [pool and pool.total_blocks for pool in (manager.device(), manager.host())]
            return *pools, manager.config.model.page_size, manager.config.model.block_bytes

        def test_default(kv_block_manager):
            assert (256, 512, 16, 3 * 16 * 16 * 2) == sizes(kv_block_manager)

        @pytest.mark.kvmock(block_size=4, num_blocks=8)
        def test_marked(kv_block_manager, make_kv_block_manager):
            assert (8, 16, 4, 384) == sizes(kv_block_manager) == sizes(make_kv_block_manager())

        def test_arguments(make_kv_block_manager):
            token = CancellationToken()
            manager = make_kv_block_manager(worker_id=7, device_blocks=3, host_blocks=None, page_size=2, num_layers=1,
                inner_dim=1, dtype="fp8", nixl="disabled", cancellation_token=token)
            assert (3, None, 2, 2) == sizes(manager)
            assert (7, token, "disabled") == (manager.worker_id(), manager.config.runtime.cancellation_token,
                manager.config.runtime.nixl)

        def test_config(make_kv_block_manager, kv_fabric):
            config = KvBlockManagerConfig(KvManagerRuntimeConfig(9), KvManagerModelConfig(1, 1, 1))
            assert config is make_kv_block_manager(config=config).config
            assert [9] == kv_fabric.workers

        def test_ids(kv_block_manager, make_kv_block_manager):
            ids = [make_kv_block_manager(worker_id=1339).worker_id(), *[make_kv_block_manager().worker_id() for _ in "ab"]]
            assert [1337, 1339, 1338, 1340] == [kv_block_manager.worker_id(), *ids]
        """  # noqa: E501
    ).assert_outcomes(passed=5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("make(device_blok=3)", "unknown argument 'device_blok'; did you mean 'device_blocks'?"),
        ("make(device_blocks=0)", "KvManagerLayoutConfig.num_blocks must be an integer of at least 1, got 0"),
        ("make(config=8)", "make_kv_block_manager: config must be a KvBlockManagerConfig, got 8"),
        (
            "make(config=config, host_blocks=4, worker_id=5)",
            (
                "make_kv_block_manager: config describes a manager completely, so worker_id and host_blocks cannot be "
                "given with it"
            ),
        ),
        ("make(config=config, nixl='disabled')", "so nixl cannot be given with it"),
        (
            "make(sink=8)",
            (
                "KvBlockManager: sink must have a method publish(event), publish(event, token_ids) or "
                "publish(event, storage_tier, token_ids), or be such a function; got 8"
            ),
        ),
        (
            "make(worker_id=5), make(worker_id=5)",
            "worker 5 is in the fabric already; close its manager, or take another",
        ),
        (
            "token = CancellationToken(); token.cancel(); make(worker_id=8, sink=True, cancellation_token=token)",
            "is cancelled already, so the manager would be closed; take a configuration with a new CancellationToken()",
        ),
        (
            "make(sink=True, page_size=4)",
            "page_size is 4, and events are judged with the block size 16 of the test: set",
        ),
    ],
)
def test_invalid_arguments_of_a_block_manager_are_refused(nested, call, message):
    nested(
        f"""
        from pytest_kvmock.contrib.block_manager import CancellationToken
        from pytest_kvmock.contrib.block_manager import KvBlockManagerConfig, KvManagerModelConfig, KvManagerRuntimeConfig

        def test(make_kv_block_manager, kv_fabric, request):
            make = make_kv_block_manager
            config = KvBlockManagerConfig(KvManagerRuntimeConfig(9), KvManagerModelConfig(1, 1, 1))
            with pytest.raises((TypeError, ValueError)) as raised:
                {call}
            assert {message!r} in str(raised.value)
            assert len(kv_fabric.workers) <= 1
            make_sink = request.getfixturevalue("make_kv_sink")
            for worker_id in (5, 8, 9, 65536):
                make_sink(worker_id=worker_id)  # none is taken
        """  # noqa: E501
    ).assert_outcomes(passed=1)


def test_a_sink_that_is_an_empty_list_still_counts_as_a_sink(nested):
    nested(
        CACHE
        + """
    class ListSink(list):
        def publish(self, event, storage_tier=None, token_ids=None):
            self.append(event.data)

    def test(make_kv_block_manager):
        sink = ListSink()
        cache(make_kv_block_manager(page_size=4, sink=sink).device(), range(8))
        assert 1 == len(sink)
        """
    ).assert_outcomes(passed=1)


def test_block_managers_are_closed_when_the_test_ends(nested):
    nested(
        """
        made = []

        def test_one(kv_block_manager, make_kv_block_manager):
            made.extend([kv_block_manager, make_kv_block_manager()])
            assert not made[0].is_closed

        def test_two(kv_block_manager):
            assert all(manager.is_closed for manager in made)
            assert 1337 == kv_block_manager.worker_id()
        """
    ).assert_outcomes(passed=2)


def test_all_block_manager_fixtures_share_one_fabric_without_the_backend_matrix(nested):
    result = nested(
        """
        def test(kv_block_manager, make_kv_block_manager, kv_fabric, request):
            assert [kv_block_manager.worker_id(), make_kv_block_manager().worker_id()] == kv_fabric.workers
            print("has", sorted(n for n in request.fixturenames if "kv" in n))
        """,
        "-s",
    )
    result.assert_outcomes(passed=1)
    has = "'_kvmock_block_managers', 'kv_base_profile', 'kv_block_manager', 'kv_fabric', 'make_kv_block_manager'"
    result.stdout.fnmatch_lines([f"*has [[]{has}]*"])


# ------------------------------------------------------------------------------------------------------- judged


def test_a_block_manager_publishes_to_the_harness_if_the_test_uses_one(nested):
    nested(
        CACHE
        + """
    @pytest.mark.kvmock(block_size=4, num_blocks=8)
    def test_judged(kv_block_manager, make_kv_block_manager, kv_events):
        cache(kv_block_manager.device(), range(8))
        cache(make_kv_block_manager().host(), range(4))
        assert [2, 1] == [len(event.data.block_hashes) for event in kv_events.stored]
        assert 2 == len(kv_events.for_worker(kv_block_manager.worker_id())) + 1
        cache(make_kv_block_manager(sink=False).host(), range(4))
        assert 2 == len(kv_events)

    @pytest.mark.kvmock(block_size=4, num_blocks=8)
    def test_asked_for(make_kv_block_manager, request):
        manager = make_kv_block_manager(sink=True)
        cache(manager.device(), range(8))
        assert 65536 == manager.worker_id()
        assert 1 == len(request.getfixturevalue("kv_events"))

    @pytest.mark.kvmock(block_size=4)
    def test_with_the_reference_index(kv_harness, make_kv_block_manager):
        cache(make_kv_block_manager().device(), range(8))
        assert {65536: 2} == kv_harness.overlap(range(8))

    @pytest.mark.kvmock(block_size=4)
    def test_a_custom_sink(make_kv_block_manager):
        from pytest_kvmock import CapturingSink
        sink = CapturingSink()
        manager = make_kv_block_manager(sink=sink)
        cache(manager.device(), range(8))
        assert (1337, 1) == (manager.worker_id(), len(sink.events))

    @pytest.mark.kvmock(block_size=4)
    def test_events_of_a_manager_with_its_own_sink_are_not_judged(kv_block_manager, request):
        cache(kv_block_manager.device(), range(8))
        assert 0 == len(request.getfixturevalue("kv_events"))
    """,
        "--kv-backend=lru",
    ).assert_outcomes(passed=5)


def test_events_of_a_block_manager_are_checked_under_its_worker_id(nested):
    nested(
        CACHE
        + """
    from pytest_kvmock.contrib.block_manager import KvBlockManagerConfig, KvManagerRuntimeConfig

    @pytest.mark.kvmock(block_size=4)
    def test_by_argument(kv_harness, make_kv_block_manager):
        cache(make_kv_block_manager(worker_id=7).device(), range(8))
        cache(make_kv_block_manager().device(), range(4))
        assert {7: 2, 65536: 1} == kv_harness.overlap(range(8))

    @pytest.mark.kvmock(block_size=4)
    def test_by_config(kv_harness, make_kv_block_manager):
        model = make_kv_block_manager(sink=False)
        config = KvBlockManagerConfig(KvManagerRuntimeConfig(2**64 - 1), model.config.model, model.config.device_layout)
        cache(make_kv_block_manager(config=config).device(), range(8))
        assert {2**64 - 1: 2} == kv_harness.overlap(range(8))

    @pytest.mark.kvmock(block_size=4, workers=2)
    def test_a_manager_does_not_take_the_sink_of_an_engine(kv_harness, make_kv_block_manager, kv_fabric):
        kv_harness.worker(5)
        for worker_id in (1, 5):
            with pytest.raises(ValueError, match=f"worker {worker_id} is an engine of this test; take another worker_id"):
                make_kv_block_manager(worker_id=worker_id)
        assert ([], set()) == (kv_fabric.workers, kv_harness.recording.sinks)
    """,  # noqa: E501
        "--kv-backend=lru",
    ).assert_outcomes(passed=3)


def test_a_restarted_block_manager_starts_as_a_new_worker_for_the_router(nested):
    nested(
        CACHE
        + """
    @pytest.mark.kvmock(block_size=4, num_blocks=4)
    @pytest.mark.parametrize("is_announced", [False, True])
    def test(kv_harness, make_kv_block_manager, is_announced):
        former = make_kv_block_manager(worker_id=7)
        cache(former.device(), range(16))
        former.close()
        if is_announced:
            kv_harness.remove_worker(7)
        cache(make_kv_block_manager(worker_id=7).device(), range(8))
        assert {7: 2} == kv_harness.overlap(range(16))
        kv_harness.flush()
    """,
        "--kv-backend=lru",
    ).assert_outcomes(passed=2)


def test_a_block_manager_cannot_restart_if_the_index_cannot_remove_workers(nested):
    nested(
        """
        class Index:
            def apply(self, event): pass
            def find_matches(self, local_hashes): return {}

        @pytest.fixture
        def kv_index():
            return Index()

        def test(kv_events, make_kv_block_manager, kv_fabric):
            make_kv_block_manager(worker_id=7).close()
            with pytest.raises(ValueError, match="remove_worker"):
                make_kv_block_manager(worker_id=7)
            assert [] == kv_fabric.workers
        """
    ).assert_outcomes(passed=1)


def test_a_refused_block_manager_leaves_no_worker_behind(nested):
    nested(
        """
        import pytest

        def test(make_kv_block_manager, kv_events):
            make_kv_block_manager(worker_id=5)
            for _ in range(3):
                with pytest.raises(ValueError, match="worker 5 is in the fabric already"):
                    make_kv_block_manager(worker_id=5)
            assert 65536 == make_kv_block_manager().worker_id()
        """
    ).assert_outcomes(passed=1)


def test_a_block_manager_may_evict_parents_before_children(nested):
    nested(
        CACHE
        + """
    @pytest.mark.kvmock(block_size=4, num_blocks=4, event_warnings="fail")
    def test(kv_block_manager, kv_events):
        for start in range(0, 400, 12):
            for pool in kv_block_manager.pools:
                cache(pool, range(start, start + 12))
                kv_events.assert_no_event_errors()
        assert kv_events.removed_blocks
    """
    ).assert_outcomes(passed=1)


@pytest.mark.parametrize("salt", [1337, 1338])
@pytest.mark.parametrize("tokens", [4, 12])
def test_blocks_with_a_salt_unknown_to_routers_are_a_wrong_hash(nested, salt, tokens):
    result = nested(
        CACHE.replace("4)):", f"4, {salt})):")
        + f"""
    @pytest.mark.kvmock(block_size=4, num_blocks=4, event_warnings="fail")
    def test(kv_block_manager, kv_events):
        cache(kv_block_manager.device(), range({tokens}))
    """
    )
    if salt == 1337:
        result.assert_outcomes(passed=1)
    else:
        result.assert_outcomes(failed=1)
        assert " wrong_hash " in result.stdout.str()


@pytest.mark.parametrize(
    ("device_blocks", "host_blocks", "pool", "blocks"),
    [(2, 3, "host", 3), (3, 2, "device", 3), (None, 3, "host", 3)],
)
def test_a_pool_that_publishes_more_blocks_than_its_capacity_is_reported(
    nested, device_blocks, host_blocks, pool, blocks
):
    result = nested(
        CACHE
        + f"""
    from pytest_kvmock import Stored

    @pytest.mark.kvmock(block_size=4)
    def test(make_kv_block_manager, kv_events):
        pool = make_kv_block_manager(device_blocks={device_blocks}, host_blocks={host_blocks}).{pool}()
        cache(pool, range({4 * blocks}))
        kv_events.assert_no_event_errors()
        content = token_blocks(range(100, 104), 4)[0]
        stored = Stored(None, (content.sequence_hash,), (content.block_hash,))
        pool._registered[content.sequence_hash] = pool.block(0)  # a fault: one block under two names
        pool._publisher.publish(stored, None, pool.block_set.tier)
    """
    )
    result.assert_outcomes(failed=1)
    assert "1 KV event error: over_capacity " in result.stdout.str()


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("del pool._registered[pool.registered_hashes()[0]]", "engine_drift"),
        ("pool._publisher.publish(Removed((1,)), None, pool.block_set.tier)", "block_not_found"),
        ("pool._publisher.publish(Removed((pool.registered_hashes()[0],)), None, pool.block_set.tier)", "engine_drift"),
    ],
)
def test_a_faulty_block_manager_fails_the_test(nested, fault, rule):
    result = nested(
        CACHE
        + f"""
    @pytest.mark.kvmock(block_size=4, num_blocks=4)
    def test(kv_block_manager, kv_events):
        pool = kv_block_manager.host()
        cache(pool, range(12))
        {fault}
    """
    )
    result.assert_outcomes(failed=1)
    assert f" KV event error: {rule} " in result.stdout.str()


# --------------------------------------------------------------------------------------------------------- cost


def test_tests_without_block_managers_do_not_import_their_modules(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile("def test(kv_harness, kv_sink, make_kv_sink): pass")
    code = """
import json, sys
import pytest
pytest.main(["-q", "-p", "kvmock", "-p", "no:cacheprovider", "--kv-backend=lru"])
print()
print(json.dumps([m for m in sys.modules if m.startswith("pytest_kvmock.contrib.block_manager")]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "1 passed" in done.stdout
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert loaded == ["pytest_kvmock.contrib.block_manager", "pytest_kvmock.contrib.block_manager.plugin"]
