"""What a request of vLLM has hashed beside its tokens."""

from pytest_kvmock.cache.vllm.hashes import ExtraKeys, MultimodalItem

__all__ = [
    "ExtraKeys",
    "MultimodalItem",
]
