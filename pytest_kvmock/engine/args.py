from __future__ import annotations
from dataclasses import dataclass
from typing import Any
@dataclass(frozen=True)
class MockEngineArgs:
    engine_type: str = "vllm"
    num_gpu_blocks: int = 16384
    block_size: int = 64
    max_num_seqs: int | None = 256
    max_num_batched_tokens: int | None = 8192
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    speedup_ratio: float = 1.0
    decode_speedup_ratio: float = 1.0
    worker_type: str = "aggregated"
    preemption_mode: str = "lifo"
    kv_bytes_per_token: int | None = None
    kv_transfer_bandwidth: float | None = None
    reasoning: Any = None
    sglang: Any = None
    semantics: Any = None
    performance_model: Any = None
    visible_at_end: bool = False
    @property
    def needs_kv_publisher(self): return self.enable_prefix_caching and self.worker_type != "decode"
