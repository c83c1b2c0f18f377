"""Common base of vLLM's block managers: the options of an engine, and the hashes of its requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, ClassVar

from pytest_kvmock.engines.base.hashed import HashedTokens
from pytest_kvmock.engines.base.lookahead_tokens import LookaheadTokens
from pytest_kvmock.engines.base.manager_base import RequestLevel
from pytest_kvmock.engines.vllm.groups import check_context_parallel
from pytest_kvmock.engines.vllm.hashes import ExtraKeys, VllmHasher, vllm_version
from pytest_kvmock.values.checks import KvMockError
from pytest_kvmock.values.prompt_keys import LoraIds
from pytest_kvmock.values.tokens import Prompt, TokenIds

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.offload import WriteThrough
    from pytest_kvmock.values.events import StorageTier
    from pytest_kvmock.values.sinks import Sink


class FullReportError(KvMockError, RuntimeError):
    """A full report has ended the engine, as it ends vLLM's; all requests of the engine are lost."""


class VllmManager(RequestLevel):
    """A block manager of one vLLM engine. A subclass has the blocks.

    Args:
        num_blocks: capacity in usable blocks, at least 1.
        block_size: tokens per block, at least 1.
        dp_rank: data-parallel rank that events name.
        sink: where events are published; None to publish nothing and consume no event id.
        backend: the name of the backend.
        version: release of vLLM (`hashes.VERSIONS`).
        hash_algorithm: how blocks are named (`hashes.ALGORITHMS`).
        hash_seed: seed of the hashes, as PYTHONHASHSEED; None if that is not set.
        enable_caching: False: no block is hashed, so no block is reused.
        lora_paths: paths of adapters, by name; 0.33.0 hashes them. A missing adapter has an empty path.
        dcp: number of ranks that share the tokens of a block (`--decode-context-parallel-size`): each rank has a page
            of the `block_size` tokens. `--block-size` is the size of a page.
        pcp: number of ranks of prefill context parallelism, which changes no block; `dcp` is 1 or a multiple of it.

    Raises:
        ValueError: an argument is invalid.

    Attributes:
        page_size: tokens per page: `block_size` divided by `dcp`.
        dcp: as given.
        version: the properties of its release.
        hasher: names the blocks of its requests.
        enable_caching: as given.
        offload: the host tier below it; None if there is none.
        copies: the time of transfers to the host tier and back.
    """

    takes: ClassVar[str] = "new_request, get_computed_blocks, allocate_slots, free, reset_prefix_cache"

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 16,
        dp_rank: int = 0,
        sink: Sink | None = None,
        backend: str = "vllm",
        version: str = "0.33.0",
        hash_algorithm: str = "sha256_cbor",
        hash_seed: str | None = "0",
        enable_caching: bool = True,
        lora_paths: Mapping[str, str] | None = None,
        dcp: int = 1,
        pcp: int = 1,
    ) -> None:
        super().__init__(backend=backend, num_blocks=num_blocks, block_size=block_size, dp_rank=dp_rank, sink=sink)
        check_context_parallel(dcp, pcp, block_size)
        self.page_size, self.dcp = block_size // dcp, dcp  # vLLM: resolve_kv_cache_block_sizes
        self.version = vllm_version(version)
        self.hasher = VllmHasher(version, hash_algorithm, hash_seed)
        if not isinstance(enable_caching, bool):
            raise ValueError(f"enable_caching must be True or False, got {enable_caching!r}")  # noqa: TRY004 - one error
        self.enable_caching = enable_caching
        self._lora_ids = LoraIds()
        self._lora_paths = {} if lora_paths is None else _checked_paths(lora_paths)
        self._rng = Random(0)  # noqa: S311 - mock data
        self.offload: WriteThrough | None = None
        self.copies: object = None

    @property
    def lora_ids(self) -> LoraIds:
        """The numbers of adapters in its engine."""
        return self._lora_ids

    def check_reported(self, num_tokens: int) -> None:
        """Check that a full report of a hit of `num_tokens` tokens is possible.

        Raises:
            FullReportError: there is a hit, and the engine has decode context parallelism.
        """
        if num_tokens and self.dcp > 1:
            raise FullReportError(
                f"a full report ends this engine: it resolves the hashes of a hit by the page, {self.page_size} "
                f"tokens, and a block has {self.block_size} (vLLM 0.33.0: an AssertionError; all requests are lost)"
            )

    def turn_caching_off(self) -> None:
        """Turn caching off; call it before the first request."""
        self.enable_caching = False

    def attach_offload(self, offload: WriteThrough, copies: object) -> None:
        """Put a host tier below the manager, before its first request; a driver makes the stores and loads."""
        offload.number_adapters(self._lora_ids)
        self.offload, self.copies = offload, copies
        self.attach_connector()

    def attach_connector(self) -> None:
        """Attach a KV connector (a host or a handover), before the first request. Only a draft model is affected."""

    def publish_below(self) -> None:
        """Publish the changes of the tier below since the last call."""
        if self.offload is None:
            return
        for data, tier, token_ids, extra in self.offload.take_events():
            self._publisher.publish(data, token_ids, tier, extra)
        self._publisher.surface()

    def _resident_below(self, tier: StorageTier, group: int = 0) -> list[int]:
        return self.offload.resident_names(group) if self.offload is not None and self.offload.tier == tier else []

    def _hashed(
        self, prompt: Prompt | TokenIds, hash_unit: int, rng: Random | None, keys: ExtraKeys | None
    ) -> HashedTokens:
        """Return the tokens of a request with a name per `hash_unit` tokens; see `new_request` of the managers."""
        prompt = Prompt.of(prompt)
        if keys is not None:
            if not prompt.has_tokens:
                raise ValueError("a prompt of hashes has no tokens to hash extra keys (LoRA, multimodal, salt) with")
            prompt = prompt.with_keys(keys.of_prompt)
        elif self._lora_paths and prompt.keys is not None:
            path = self._lora_paths.get(prompt.keys.lora_name or "", "")
            prompt = prompt.with_keys(replace(prompt.keys, lora_path=path))
        hasher: VllmHasher | None = self.hasher
        if not self.enable_caching:
            hasher = None
        elif prompt.keys is not None and prompt.keys.naming:
            carried = prompt.keys
            hasher = self.hasher.keyed(
                ExtraKeys(carried.lora_name, carried.lora_path, carried.multimodal, carried.cache_salt)
            )
        if hasher is not None and hasher.lookahead:
            return LookaheadTokens(prompt, hash_unit, hasher, rng or self._rng, hasher.lookahead)
        return HashedTokens(prompt, hash_unit, hasher, rng or self._rng)


def _checked_paths(paths: object) -> dict[str, str]:
    if isinstance(paths, Mapping) and all(isinstance(text, str) for pair in paths.items() for text in pair):
        return dict(paths)
    raise ValueError(f"lora_paths must be a mapping of adapter names to paths, got {paths!r:.80}")
