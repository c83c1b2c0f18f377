"""Named hybrid models: their groups, also at other sizes."""

import pytest

from pytest_kvmock import BACKENDS, create_manager
from pytest_kvmock.engines.backends import HYBRID
from pytest_kvmock.engines.vllm.groups import GroupGeometry
from pytest_kvmock.engines.vllm.hybrid_models import HYBRID_MODELS

NAMES = list(HYBRID_MODELS)

SIZES = {  # scheduler block, hash unit, alignment of hits; the group of a router's blocks
    "gpt_oss": (16, 16, 16, 1),
    "gemma3": (16, 16, 16, 6),
    "gemma4": (32, 16, 32, 5),
    "qwen3_next": (544, 544, 544, 3),
    "kimi_linear": (1920, 1920, 1920, 3),
    "kimi_k3": (1536, 1536, 1536, 3),
    "deepseek_v4": (256, 4, 256, 2),
    "llama4": (16, 16, 16, 3),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_hybrid_model_has_the_expected_sizes_and_attention_group(name):
    model = HYBRID_MODELS[name]
    geometry = GroupGeometry.of(model.groups)
    sizes = (geometry.scheduler_block_size, geometry.hash_unit, geometry.alignment)
    kinds = [group.kind for group in model.groups]
    attention = next(number for number, kind in enumerate(kinds) if kind in ("full_attention", "mla_attention"))
    assert SIZES[name] == (*sizes, attention)
    assert model.sized(model.real_block_size) == model.groups
    assert model.source


@pytest.mark.parametrize("name", NAMES)
def test_every_hybrid_model_is_a_registered_backend_with_its_sizes(name):
    model, spec = HYBRID_MODELS[name], BACKENDS[f"vllm_{name}"]
    assert (spec.default_block_size, spec.real_block_size) == (model.default_block_size, model.real_block_size)
    assert spec.models == f"vLLM 0.33.0 with {model.model}"
    assert not spec.in_matrix
    assert spec.traits.copies
    manager = create_manager(f"vllm_{name}", num_blocks=8)
    assert (manager.backend, manager.block_size) == (f"vllm_{name}", model.default_block_size)


def test_the_registry_has_no_other_hybrid_vllm_backend():
    assert [f"vllm_{name}" for name in NAMES] == [
        name for name, spec in BACKENDS.items() if spec.group == HYBRID and spec.scheduler == "vllm"
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("factor", [1, 2, 3])
def test_all_sizes_of_a_model_scale_with_the_block_size(name, factor):
    model = HYBRID_MODELS[name]
    size = factor * model.base_block_size
    for scaled, real in zip(model.sized(size), model.groups, strict=True):
        for field in ("block_size", "window", "chunk"):
            value = getattr(real, field)
            assert (value is None) == (getattr(scaled, field) is None)
            assert value is None or getattr(scaled, field) * model.real_block_size == value * size
    geometry, whole = GroupGeometry.of(model.sized(size)), GroupGeometry.of(model.groups)
    assert geometry.scheduler_block_size * model.real_block_size == whole.scheduler_block_size * size
    assert geometry.hash_unit * model.real_block_size == whole.hash_unit * size


def test_an_unsupported_block_size_of_a_model_is_refused_with_the_supported_ones():
    with pytest.raises(ValueError) as caught:
        create_manager("vllm_deepseek_v4", num_blocks=8, block_size=16)
    assert str(caught.value) == (
        "block_size: the blocks of deepseek_v4 have multiples of 64 tokens in its attention group, as all groups are "
        "scaled with it (256 at the model's own sizes); got 16"
    )


def test_a_match_unit_sets_the_alignment_of_hits_of_kimi_k3():
    manager = create_manager("vllm_kimi_k3", num_blocks=8, block_size=1536, match_unit=128)
    geometry = manager.geometry
    assert (geometry.scheduler_block_size, geometry.hash_unit, geometry.alignment) == (1536, 128, 128)


def test_an_unknown_model_is_refused_with_the_nearest_one():
    with pytest.raises(ValueError, match="vllm_gemma3"):
        create_manager("vllm_gema3", num_blocks=8)
