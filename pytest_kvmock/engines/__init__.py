"""Mock engines: block managers and their drivers, with a folder for each engine, and workers, backends and profiles.

`base` is shared by all engines; `schedulers` has Dynamo's and TensorRT-LLM's schedulers. No engine's folder imports
another engine's, except Dynamo's mock of SGLang.
"""

from typing import TYPE_CHECKING

from pytest_kvmock.values.checks import late_names

if TYPE_CHECKING:
    from pytest_kvmock.engines.backends import backend_spec as backend_spec
    from pytest_kvmock.engines.base.cache_group import CacheGroup as CacheGroup
    from pytest_kvmock.engines.base.driver import Traits as Traits
    from pytest_kvmock.engines.base.driver import WouldWait as WouldWait
    from pytest_kvmock.engines.base.eviction_policy import EvictionPolicy as EvictionPolicy
    from pytest_kvmock.engines.base.manager import KvManager as KvManager
    from pytest_kvmock.engines.base.offload import BlockDetails as BlockDetails
    from pytest_kvmock.engines.base.offload import BlockedOnG1Offload as BlockedOnG1Offload
    from pytest_kvmock.engines.base.offload import NoHits as NoHits
    from pytest_kvmock.engines.base.offload import Scheduled as Scheduled
    from pytest_kvmock.engines.base.paged import PagedCacheManager as PagedCacheManager
    from pytest_kvmock.engines.base.paged import PagedRequest as PagedRequest
    from pytest_kvmock.engines.schedulers.args import MockEngineArgs as MockEngineArgs
    from pytest_kvmock.engines.schedulers.performance import CallableModel as CallableModel
    from pytest_kvmock.engines.schedulers.performance import InterpolatedModel as InterpolatedModel
    from pytest_kvmock.engines.schedulers.performance import PolynomialModel as PolynomialModel
    from pytest_kvmock.engines.sglang.speculative import SglangSpeculative as SglangSpeculative
    from pytest_kvmock.engines.tiers import Tiers as Tiers
    from pytest_kvmock.engines.trtllm.hashes import V1Hasher as V1Hasher
    from pytest_kvmock.engines.trtllm.hashes import V2Hasher as V2Hasher
    from pytest_kvmock.engines.trtllm.v1_request import Retention as Retention
    from pytest_kvmock.engines.vllm.hashes import VllmHasher as VllmHasher
    from pytest_kvmock.engines.vllm.host.simple_host import EndlessOffloadError as EndlessOffloadError
    from pytest_kvmock.engines.vllm.host.store_host import WaitsForEverError as WaitsForEverError
    from pytest_kvmock.engines.vllm.speculative import Speculative as Speculative
    from pytest_kvmock.engines.vllm.vllm_manager import FullReportError as FullReportError
    from pytest_kvmock.engines.worker import KvWorker as KvWorker
    from pytest_kvmock.engines.worker import OutOfBlocks as OutOfBlocks
    from pytest_kvmock.engines.worker import RequestError as RequestError

_HOME = {
    "BlockDetails": "engines.base.offload",
    "BlockedOnG1Offload": "engines.base.offload",
    "CacheGroup": "engines.base.cache_group",
    "CallableModel": "engines.schedulers.performance",
    "EndlessOffloadError": "engines.vllm.host.simple_host",
    "EvictionPolicy": "engines.base.eviction_policy",
    "FullReportError": "engines.vllm.vllm_manager",
    "InterpolatedModel": "engines.schedulers.performance",
    "KvManager": "engines.base.manager",
    "KvWorker": "engines.worker",
    "MockEngineArgs": "engines.schedulers.args",
    "NoHits": "engines.base.offload",
    "OutOfBlocks": "engines.worker",
    "PagedCacheManager": "engines.base.paged",
    "PagedRequest": "engines.base.paged",
    "PolynomialModel": "engines.schedulers.performance",
    "RequestError": "engines.worker",
    "Retention": "engines.trtllm.v1_request",
    "Scheduled": "engines.base.offload",
    "SglangSpeculative": "engines.sglang.speculative",
    "Speculative": "engines.vllm.speculative",
    "Tiers": "engines.tiers",
    "Traits": "engines.base.driver",
    "V1Hasher": "engines.trtllm.hashes",
    "V2Hasher": "engines.trtllm.hashes",
    "VllmHasher": "engines.vllm.hashes",
    "WaitsForEverError": "engines.vllm.host.store_host",
    "WouldWait": "engines.base.driver",
    "backend_spec": "engines.backends",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the table is the one list

# Loaded on first use, because a test of a router needs none of these.
__getattr__ = late_names(__name__, _HOME)
