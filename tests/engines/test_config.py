"""The options of users for the tiers below the device."""

import pytest

from pytest_kvmock import BACKENDS, BackendSpec, EngineProfile, RouterHarness, create_manager
from pytest_kvmock.engines import Tiers, backend_spec
from pytest_kvmock.engines.dynamo.eviction.lru import LruPolicy


@pytest.mark.parametrize(
    ("given", "tiers"),
    [
        ({"host": 64}, Tiers(64)),
        ({"g2": 64}, Tiers(64)),
        ({"host": 64, "gbps": 7, "bytes_per_token": 1000, "batch": 8}, Tiers(64, 7, 1000, 8)),
        (
            {"host": 64, "chunk": 2, "policy": "arc", "self_describing": True, "prompt_only": False},
            Tiers(64, chunk=2, policy="arc", self_describing=True, prompt_only=False),
        ),
        (
            {"host": 64, "store_threshold": 2, "max_load_tokens": 0, "max_offload_tokens": 8, "async_scheduling": True},
            Tiers(64, store_threshold=2, max_load_tokens=0, max_offload_tokens=8, async_scheduling=True),
        ),
        (Tiers(9), Tiers(9)),
    ],
)
def test_every_form_of_tiers_is_read(given, tiers):
    assert tiers == Tiers.of(given)
    assert tiers == Tiers.of(tiers.to_dict())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (64, "tiers must be a mapping such as {'host': 64, 'gbps': 14.0}, got 64"),
        ({}, "tiers: 'host' is missing, the number of blocks that fit host memory"),
        ({"host": 1, "g2": 1}, "tiers: 'host' and 'g2' are the same; give one of them"),
        (
            {"hots": 1},
            (
                "unknown key of tiers 'hots'; did you mean 'host'? known: host, g2, gbps, bytes_per_token, batch, "
                "chunk, policy, self_describing, prompt_only, store_threshold, max_load_tokens, max_offload_tokens, "
                "async_scheduling, files, file_events, file_locality, file_gbps, connector, lazy, disk, write_policy, "
                "storage, prefetch_policy, prefetch_threshold, prefetch_timeout_base, prefetch_timeout_per_ki_token, "
                "retry_interval, retry_attempts, storage_batch"
            ),
        ),
        ({"host": 0}, "tiers: host must be an integer of at least 1 (blocks), got 0"),
        ({"host": True}, "tiers: host must be an integer of at least 1 (blocks), got True"),
        (
            {"host": 4, "gbps": float("nan")},
            "tiers: gbps must be a finite number of at least 0 (GB/s; 0 is infinite), got nan",
        ),
        ({"host": 4, "gbps": -1}, "tiers: gbps must be a finite number of at least 0 (GB/s; 0 is infinite), got -1"),
        ({"host": 4, "bytes_per_token": -1}, "tiers: bytes_per_token must be an integer of at least 0, got -1"),
        (
            {"host": 8, "bytes_per_token": 10**400},
            f"tiers: bytes_per_token must be an integer of at least 0 and at most 2**63 - 1, got 1{'0' * 79}",
        ),
        ({"host": 4, "chunk": 0}, "tiers: chunk must be an integer of at least 1 (blocks), got 0"),
        ({"host": 65, "chunk": 2}, "tiers: host must be whole chunks of 2 blocks, got 65"),
        ({"host": -4}, "tiers: host must be an integer of at least 1 (blocks), got -4"),
        ({"host": 4, "policy": "fifo"}, "tiers: policy must be 'lru' or 'arc', got 'fifo'"),
        ({"host": 4, "policy": ["lru"]}, "tiers: policy must be 'lru' or 'arc', got ['lru']"),
        ({"host": 4, "self_describing": 1}, "tiers: self_describing must be True or False, got 1"),
        ({"host": 4, "prompt_only": None}, "tiers: prompt_only must be True or False, got None"),
        ({"host": 4, "async_scheduling": 1}, "tiers: async_scheduling must be True or False, got 1"),
        (
            {"host": 4, "store_threshold": -1},
            "tiers: store_threshold must be an integer of at least 0, got -1",
        ),
        (
            {"host": 4, "max_load_tokens": -1},
            "tiers: max_load_tokens must be an integer of at least 0, or None, got -1",
        ),
        (
            {"host": 4, "max_offload_tokens": 1.5},
            "tiers: max_offload_tokens must be an integer of at least 0, or None, got 1.5",
        ),
        ({"host": 4, "batch": 0}, "tiers: batch must be an integer of at least 1, or None, got 0"),
        (
            {"host": 8, "batch": 3},
            (
                "tiers: batch must be at most 2 for a host of 8 blocks, got 3: batch squared blocks may be on their "
                "way, and a batch that the host cannot hold whole is lost"
            ),
        ),
    ],
)
def test_an_invalid_tier_is_reported_in_one_line(given, message):
    with pytest.raises(ValueError) as error:
        Tiers.of(given)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"files": 1}, "tiers: files must be True or False, got 1"),
        (
            {"files": True, "store_threshold": 2},
            "tiers: store_threshold is not for a host with files, which takes all, got 2",
        ),
        ({"file_gbps": 1.0}, "tiers: 'file_gbps' is of files below the host; give 'files': True too"),
        (
            {"files": True, "file_locality": "far"},
            "tiers: file_locality must be 'LOCAL', 'REMOTE' or None, got 'far'",
        ),
    ],
)
def test_an_invalid_file_is_reported_in_one_line(more, message):
    with pytest.raises(ValueError) as error:
        Tiers.of({"host": 4, **more})
    assert str(error.value) == message


def test_files_are_accepted_only_below_the_host_of_plain_vllm():
    with pytest.raises(ValueError, match="'files' is not for this backend"):
        create_manager("lineage", num_blocks=4, tiers={"host": 4, "files": True})
    with pytest.raises(
        ValueError, match="'files' are below engines of one cache, as these alone were recorded with them"
    ):
        create_manager("vllm_gpt_oss", num_blocks=40, tiers={"host": 40, "files": True})


@pytest.mark.parametrize("tier", ["g3", "disk", "g4", "external"])
def test_an_unsupported_tier_is_refused_with_the_supported_tiers(tier):
    with pytest.raises(ValueError) as error:
        Tiers.of({"host": 4, tier: 8})
    assert str(error.value) == (
        f"tiers: {tier!r} is not a key: 'files': True puts a folder below the host of vllm, and no other engine is "
        "mocked with a disk. Events of disk and external tiers are understood if you publish them yourself"
    )


@pytest.mark.parametrize("backend", ["lineage", "lru", "multi_lru"])
def test_each_dynamo_manager_with_tiers_has_its_own_offload_engine(backend):
    first, second = (create_manager(backend, num_blocks=4, block_size=4, tiers={"host": 10}) for _ in range(2))
    assert first.offload.num_blocks == 10
    assert first.offload is not second.offload
    assert None is create_manager(backend, num_blocks=4).offload


def test_each_vllm_manager_with_tiers_has_its_own_host():
    first, second = (create_manager("vllm", num_blocks=4, block_size=4, tiers={"host": 10}) for _ in range(2))
    assert first.offload.num_blocks == 10
    assert first.offload is not second.offload
    assert None is create_manager("vllm", num_blocks=4).offload


@pytest.mark.parametrize(
    "value",
    [
        {"chunk": 2},
        {"policy": "arc"},
        {"self_describing": True},
        {"prompt_only": False},
        {"store_threshold": 2},
        {"max_load_tokens": 8},
        {"max_offload_tokens": 8},
        {"async_scheduling": True},
    ],
)
def test_dynamo_hosts_refuse_the_tier_options_of_vllm_by_name(value):
    (name,) = value
    with pytest.raises(ValueError) as error:
        create_manager("lineage", num_blocks=4, tiers={"host": 10, **value})
    assert str(error.value) == (
        f"tiers: {name!r} is not for this backend; a host that evicted blocks travel to has host, gbps, "
        "bytes_per_token, batch"
    )


def test_the_vllm_host_refuses_the_tier_options_of_dynamo_by_name():
    with pytest.raises(ValueError) as error:
        create_manager("vllm", num_blocks=4, tiers={"host": 10, "batch": 2})
    assert str(error.value) == (
        "tiers: 'batch' is not for this backend; vLLM's native offload has host, gbps, bytes_per_token, chunk, policy, "
        "self_describing, prompt_only, store_threshold, max_load_tokens, max_offload_tokens, async_scheduling, files, "
        "file_events, file_locality, file_gbps"
    )


def test_the_vllm_host_is_refused_for_releases_without_recordings():
    with pytest.raises(ValueError, match=r"^tiers are those of vLLM 0\.33\.0; got version '0\.19\.1'$"):
        create_manager("vllm", num_blocks=4, version="0.19.1", tiers={"host": 10})


@pytest.mark.parametrize("backend", ["hash_cache", "vllm_0_19", "mocker_sglang_1_6"])
def test_other_backends_refuse_tiers_in_one_line(backend):
    with pytest.raises(ValueError) as error:
        create_manager(backend, num_blocks=4, tiers={"host": 10})
    able = "lineage, lru, multi_lru, vllm, sglang and some hybrid models do"
    assert str(error.value) == f"backend {backend!r} takes no tiers; {able}"


@pytest.mark.parametrize("backend", ["vllm_qwen3_next", "vllm_gemma4", "vllm_llama4", "vllm_mtp"])
def test_hybrid_models_and_draft_models_of_vllm_accept_a_host(backend):
    assert create_manager(backend, num_blocks=64, tiers={"host": 100}).offload.num_blocks == 100


@pytest.mark.parametrize(
    "backend", [*BACKENDS, BackendSpec.of_policy("mine", lambda num_blocks: LruPolicy(), models="-")]
)
def test_tiers_none_means_no_tiers_over_every_backend(backend):
    assert None is getattr(create_manager(backend, num_blocks=4, tiers=None), "offload", None)
    variant = backend_spec(backend).variant("other", tiers=None)
    assert None is getattr(create_manager(variant, num_blocks=4, tiers=None), "offload", None)
    kv = RouterHarness(EngineProfile(tiers=None, workers=1), backend)
    assert None is kv.worker(0).tiers


def test_a_custom_policy_refuses_tiers():
    spec = BackendSpec.of_policy("mine", lambda num_blocks: LruPolicy(), models="none")
    with pytest.raises(ValueError, match="backend 'mine' takes no tiers"):
        create_manager(spec, num_blocks=4, tiers={"host": 10})


def test_the_default_batch_is_the_largest_whose_square_fits():
    tiers = Tiers(10)
    engine = tiers.make(4)
    assert repr(engine) == "<HostOffload at 0.0 ms: 0 blocks of 10, 0 transfers to the host, 0 to the device>"
    assert tiers.to_dict() == {"host": 10}
    assert engine.batch_size == 3


def test_bytes_per_token_is_limited_to_63_bits():
    assert Tiers(10, bytes_per_token=2**63 - 1).bytes_per_token == 2**63 - 1
    with pytest.raises(
        ValueError, match=r"^tiers: bytes_per_token must be an integer of at least 0 and at most 2\*\*63 - 1, got"
    ):
        Tiers(10, bytes_per_token=2**63)
