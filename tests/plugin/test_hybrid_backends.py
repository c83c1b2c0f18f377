"""Tests over the backends of hybrid models: their selection and their sizes."""

import pytest

from pytest_kvmock import BACKENDS, EngineProfile
from pytest_kvmock.engines.backends import HYBRID

MODELS = [name for name, spec in BACKENDS.items() if spec.group == HYBRID and spec.scheduler == "vllm"]

SHOWS = """
import pytest

@pytest.mark.kvmock({marks})
def test(kv_worker, kv_profile):
    print("sizes", kv_worker.backend, kv_profile.block_size, kv_worker.manager.block_size)
"""


def sizes(nested, *options, marks=""):
    lines = nested(SHOWS.format(marks=marks), "-s", *options).stdout.lines
    found = [line[line.index("sizes vllm") :].split()[1:] for line in lines if "sizes vllm" in line]
    assert all(profile == manager for _, profile, manager in found)
    return {name: int(size) for name, size, _ in found}


def test_one_word_selects_all_hybrid_backends(nested):
    assert sizes(nested, "-o", "kvmock_backends=hybrid") == {
        **dict.fromkeys(MODELS, 16),
        "vllm_deepseek_v4": 64,
    }


def test_the_word_hybrid_restricts_a_matrix(nested):
    found = sizes(nested, "-o", "kvmock_backends=all", "--kv-backend", "hybrid")
    assert list(found) == MODELS


def test_the_word_hybrid_may_be_used_in_a_marker(ids):
    source = (
        "import pytest\n@pytest.mark.kv_backends('hybrid', 'lru', exclude='vllm_llama4')\ndef test(kv_worker): pass"
    )
    hybrid = [name for name, spec in BACKENDS.items() if spec.group == "hybrid"]
    assert ids(source) == [f"test[{name}]" for name in ["lru", *hybrid] if name != "vllm_llama4"]


def test_hybrid_backends_are_not_in_the_default_matrix(ids):
    assert not any("vllm" in name for name in ids("def test(kv_worker): pass"))


def test_block_size_sets_the_block_size_of_the_attention_group(nested):
    assert sizes(nested, "-o", "kvmock_backends=hybrid", marks="block_size=128") == dict.fromkeys(MODELS, 128)


def test_real_sizes_gives_each_model_its_own_block_size(nested):
    assert sizes(nested, "-o", "kvmock_backends=hybrid", marks="real_sizes=True, block_size=128") == {
        name: BACKENDS[name].real_block_size for name in MODELS
    }


def test_a_block_size_that_a_model_does_not_support_is_refused_in_one_line(nested):
    result = nested(SHOWS.format(marks="block_size=16"), "-o", "kvmock_backends=vllm_deepseek_v4")
    result.stdout.fnmatch_lines(
        ["*backend vllm_deepseek_v4: block_size: the blocks of deepseek_v4 have multiples of 64*"]
    )
    result.assert_outcomes(errors=1)


def test_traits_and_the_log_of_a_failure_show_the_sizes_of_the_groups(nested):
    result = nested(
        """
        from pytest_kvmock.engines import CacheGroup

        @pytest.mark.kv_backends("vllm_gemma4", "sglang_gpt_oss", "lru")
        @pytest.mark.kvmock(block_size=32)
        def test(kv_backend, kv_traits, kv_worker):
            full = CacheGroup("full_attention", block_size=32)
            assert kv_traits.groups == {
                "vllm_gemma4": (*5 * [CacheGroup("sliding_window", block_size=16, window=1024)], full),
                "sglang_gpt_oss": (full, CacheGroup("sliding_window", block_size=32, window=255)),
                "lru": (),
            }[kv_backend]
            assert kv_traits == kv_worker.traits
            kv_worker.serve(range(40))
            assert False
        """
    )
    result.assert_outcomes(failed=3)
    shown = [line for line in result.outlines if "tokens a block:" in line]
    assert shown == [
        "vllm_gemma4, tokens a block: 5 x sliding_window 16 (window 1024); full_attention 32",
        "sglang_gpt_oss, tokens a block: full_attention 32; sliding_window 32 (window 255)",
    ]


def test_traits_at_an_unsupported_block_size_are_refused_in_one_line(nested):
    source = """
        @pytest.mark.kv_backends("vllm_deepseek_v4")
        @pytest.mark.kvmock(block_size=16)
        def test(kv_backend, kv_traits): pass
    """
    result = nested(source)
    result.stdout.fnmatch_lines(
        ["*backend vllm_deepseek_v4: block_size: the blocks of*got 16 (*kvmock(block_size=16)*"]
    )
    result.assert_outcomes(errors=1)


def test_a_profile_without_a_block_size_takes_the_backends_default():
    spec = BACKENDS["vllm_deepseek_v4"]
    assert EngineProfile().sized_for(spec).block_size == 64
    assert EngineProfile(workers=2).replace(dp_size=2).sized_for(spec).block_size == 64
    assert EngineProfile(block_size=16).sized_for(spec).block_size == 16
    assert EngineProfile(real_sizes=True).sized_for(BACKENDS["lineage"]).block_size == 16
    assert EngineProfile() == EngineProfile(block_size=16)


@pytest.mark.parametrize("dialect", ["vllm-0.19", "vllm-0.33-bytes"])
def test_a_dialect_without_cache_groups_is_refused_in_one_line(nested, dialect):
    result = nested(
        f"""
        @pytest.mark.kv_dialects("{dialect}")
        @pytest.mark.parametrize("kv_backend", ["vllm_gpt_oss"])
        class Test:
            def test_a_publisher(self, kv_publisher): pass
            def test_a_wire(self, kv_wire): pass
            def test_without_one(self, kv_worker, kv_prompt): kv_worker.serve(kv_prompt(4))
        """
    )
    result.assert_outcomes(passed=1, errors=2)
    why = (
        "cache groups of vLLM's hybrid models are mocked in vllm-0.23, vllm-0.24, vllm-0.28, vllm-0.33; "
        f"got dialect '{dialect}'"
    )
    assert {f"kvmock: kv_publisher: {why}", f"kvmock: kv_wire: {why}"} <= {*result.outlines}
