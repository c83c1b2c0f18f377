"""What a request of vLLM has hashed beside its tokens."""

from pytest_kvmock.cache.vllm.hashes import ExtraKeys
from pytest_kvmock.prompt_keys import MultimodalItem

__all__ = [
    "ExtraKeys",
    "MultimodalItem",
]
