"""Options of a pair's hand-over: the connector, the time for which blocks are kept, and the reaction to a failure."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, TypeAlias

from pytest_kvmock.values.checks import check_integer, check_number

HAND_OVERS: Final = ("dynamo", "vllm", "vllm-mooncake", "sglang")
"""The ways to hand over a prompt, by the engine whose rules apply."""

IN_ROOMS: Final = "sglang"
"""The way whose legs share rooms; its roles are `SglangRole`s."""

PAIRED: Final = {"vllm": True, "vllm-mooncake": False}
"""The ways of vLLM, for `PairRole`, with whether the decode engine reads.

If it does not read, the prefill engine writes.
"""

RECORDED_KINDS: Final = ("full_attention", "mla_attention", "sliding_window", "sliding_window_mla")

WORKER_TYPES: Final = ("aggregated", "prefill", "decode", "both")
"""Roles of an engine; "both" is vLLM's role with two turns."""

PairType: TypeAlias = Literal["prefill", "decode", "both"]

FAILURE_POLICIES: Final = ("fail", "recompute")


@dataclass(frozen=True, slots=True)
class PairOptions:
    """Options of a vLLM engine with a connector, by vLLM's names.

    Attributes:
        kv_lease_duration: seconds that a prefill engine keeps blocks; a heartbeat extends the lease to two thirds of
            this from its arrival.
        kv_load_failure_policy: "fail": a request whose load fails ends with an error; "recompute": it is computed here.
        bidirectional_kv_xfer: whether decode engines keep blocks too, for the next turn.
        kv_recompute_threshold: minimum tokens of a load from a decode engine.
        decoder_kv_blocks_ttl: seconds that a decode engine keeps blocks.
        abort_request_timeout: with Mooncake (`VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`), seconds that either side waits for
            the other.
    """

    kv_lease_duration: float = 30
    kv_load_failure_policy: str = "fail"
    bidirectional_kv_xfer: bool = False
    kv_recompute_threshold: int = 64
    decoder_kv_blocks_ttl: float = 480
    abort_request_timeout: float = 480

    def __post_init__(self) -> None:
        for name in ("kv_lease_duration", "decoder_kv_blocks_ttl", "abort_request_timeout"):
            check_number(name, getattr(self, name), unit=" (seconds)")
        check_integer("kv_recompute_threshold", self.kv_recompute_threshold, 0, " (tokens)")
        if self.kv_load_failure_policy not in FAILURE_POLICIES:
            raise ValueError(
                f"kv_load_failure_policy must be {' or '.join(map(repr, FAILURE_POLICIES))}, "
                f"got {self.kv_load_failure_policy!r:.80}"
            )
        if not isinstance(self.bidirectional_kv_xfer, bool):
            raise ValueError(  # noqa: TRY004 - one error
                f"bidirectional_kv_xfer must be True or False, got {self.bidirectional_kv_xfer!r:.80}"
            )

    @classmethod
    def of(cls, given: dict[str, Any], where: str = "") -> PairOptions:
        """Return options from a mapping.

        Raises:
            ValueError: a name is unknown, or a value is out of range.
        """
        known = [each.name for each in fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(f"{where}{name!r:.80} is not an option of a pair; options are {', '.join(known)}")
        return cls(**given)


@dataclass(frozen=True, slots=True)
class PairRole:
    """The role of an engine in a pair, and its way to hand over.

    Attributes:
        worker_type: "prefill", "decode", or "both" for vLLM's two turns.
        hand_over: "vllm" or "vllm-mooncake".
        options: options of its connector; "both" has `bidirectional_kv_xfer`.

    Raises:
        ValueError: a field has an invalid value, or the fields do not fit each other.
    """

    worker_type: PairType
    hand_over: str = "vllm"
    options: PairOptions = PairOptions()

    def __post_init__(self) -> None:
        if self.hand_over not in PAIRED:
            raise ValueError(
                f"hand_over of a pair must be {' or '.join(map(repr, PAIRED))}, got {self.hand_over!r:.80}"
            )
        if self.worker_type not in WORKER_TYPES[1:]:
            allowed = ", ".join(map(repr, WORKER_TYPES[1:]))
            raise ValueError(f"worker_type of a pair must be {allowed}, got {self.worker_type!r:.80}")
        if self.worker_type == "both" and not self.reads:
            raise ValueError(f"worker_type='both' is for hand_over='vllm', which has two turns; got {self.hand_over!r}")
        if self.worker_type == "both" and not self.options.bidirectional_kv_xfer:
            object.__setattr__(self, "options", replace(self.options, bidirectional_kv_xfer=True))

    @property
    def reads(self) -> bool:
        """Whether the decode engine reads (NixlConnector), or the prefill engine writes (MooncakeConnector)."""
        return PAIRED[self.hand_over]

    def check_manager(self, manager: Any) -> None:
        """Check that recordings cover pairs on a manager.

        Raises:
            ValueError: the manager is not vLLM's, has a host, keeps states, or has a draft model of several modules.
        """
        backend = manager.backend
        if not hasattr(manager, "nameless_blocks"):
            raise ValueError(
                f"hand_over={self.hand_over!r} is for vLLM's backends, got {backend!r}; "
                "TensorRT-LLM's pairs were not recorded"
                if backend.startswith("trtllm")
                else f"hand_over={self.hand_over!r} is for vLLM's backends, got {backend!r}"
            )
        if not manager.version.has_groups:
            raise ValueError(
                f"pairs are those of vLLM 0.33.0; got backend {backend!r} of version {manager.version.name}"
            )
        if getattr(manager, "offload", None) is not None:
            raise ValueError(
                f"a role with tiers was not recorded; leave out tiers, got backend {backend!r} with a host"
            )
        geometry = getattr(manager, "geometry", None)
        kinds = () if geometry is None else [group.kind for group in geometry.groups]
        odd = next((kind for kind in kinds if kind not in RECORDED_KINDS), None)
        if odd is not None:
            raise ValueError(f"a role over groups of kind {odd!r} was not recorded; got backend {backend!r}")
        draft = getattr(manager, "speculative", None)
        if draft is not None and draft.chunk_lookahead > 1:
            raise ValueError(f"a role with a draft model of several modules was not recorded; got {draft!r:.80}")
