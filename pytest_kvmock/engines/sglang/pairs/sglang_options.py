"""Options of a pair of SGLang that affect its hand-over (SGLang 0.5.23)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Literal

from pytest_kvmock.values.checks import check_integer, check_number

_SECONDS: Final = ("bootstrap_timeout", "waiting_timeout", "heartbeat_interval", "release_timeout")

ALLOCATION_POLICIES: Final = ("early", "prefill_complete")
"""When D gives pages: before P computes, or after it."""


@dataclass(frozen=True, slots=True)
class SglangPairOptions:
    """Options of an SGLang engine in a pair, by their names in SGLang.

    Attributes:
        disaggregation_bootstrap_port: port of P's bootstrap server.
        disaggregation_decode_enable_radix_cache: whether D has a radix cache and publishes.
        num_reserved_decode_tokens: tokens of room that D keeps for each generating request.
        optimistic_prefill_attempts: number of times that P computes a prompt before D has pages for it.
        disaggregation_decode_allocation_policy: "early", or "prefill_complete": P computes once before D gives pages,
            and the computed prompt keeps its place.
        disable_overlap_schedule: whether P processes a batch in the turn that launched it.
        metadata_slots: prompts of P whose first token may be on its way at the same time.
        bootstrap_timeout: seconds that P waits for D's pages (like the next options, a variable
            `SGLANG_DISAGGREGATION_…`).
        waiting_timeout: seconds that D waits for P's data.
        heartbeat_interval: seconds between two heartbeats from D to P's bootstrap server.
        heartbeat_max_failure: missed heartbeats in a row after which all rooms of that P fail.
        release_timeout: seconds that D keeps the pages of an aborted request while P may still write
            into them.
    """

    disaggregation_bootstrap_port: int = 8998
    disaggregation_decode_enable_radix_cache: bool = False
    num_reserved_decode_tokens: int = 512
    optimistic_prefill_attempts: int = 0
    disaggregation_decode_allocation_policy: str = "early"
    disable_overlap_schedule: bool = False
    metadata_slots: int = 512
    bootstrap_timeout: float = 300
    waiting_timeout: float = 300
    heartbeat_interval: float = 5
    heartbeat_max_failure: int = 2
    release_timeout: float = 30

    def __post_init__(self) -> None:
        for name in _SECONDS:
            check_number(name, getattr(self, name), unit=" (seconds)")
        check_integer("disaggregation_bootstrap_port", self.disaggregation_bootstrap_port, 0)
        check_integer("num_reserved_decode_tokens", self.num_reserved_decode_tokens, 0, " (tokens)")
        check_integer("optimistic_prefill_attempts", self.optimistic_prefill_attempts, 0)
        check_integer("metadata_slots", self.metadata_slots, 1)
        check_integer("heartbeat_max_failure", self.heartbeat_max_failure, 1)
        for name in ("disaggregation_decode_enable_radix_cache", "disable_overlap_schedule"):
            if not isinstance(getattr(self, name), bool):
                value = getattr(self, name)
                raise ValueError(f"{name} must be True or False, got {value!r:.80}")  # noqa: TRY004
        if self.disaggregation_decode_allocation_policy not in ALLOCATION_POLICIES:
            raise ValueError(
                f"disaggregation_decode_allocation_policy must be {' or '.join(map(repr, ALLOCATION_POLICIES))}, got "
                f"{self.disaggregation_decode_allocation_policy!r:.80}"
            )
        if self.gives_late and self.disaggregation_decode_enable_radix_cache:
            raise ValueError(
                "disaggregation_decode_allocation_policy 'prefill_complete' is refused with "
                "disaggregation_decode_enable_radix_cache, as SGLang refuses it"
            )

    @property
    def gives_late(self) -> bool:
        """Whether D gives pages only after P has computed."""
        return self.disaggregation_decode_allocation_policy == "prefill_complete"

    @property
    def attempts(self) -> int:
        """Number of times that P computes a prompt before D has pages for it."""
        return max(self.optimistic_prefill_attempts, int(self.gives_late))

    @classmethod
    def of(cls, given: dict[str, Any], where: str = "") -> SglangPairOptions:
        """Make options from a mapping.

        Raises:
            ValueError: an unknown name, or a value out of range.
        """
        known = [each.name for each in fields(cls)]
        for name in given:
            if name not in known:
                allowed = ", ".join(known)
                raise ValueError(f"{where}{name!r:.80} is not an option of a pair; options are {allowed}")
        return cls(**given)


@dataclass(frozen=True, slots=True)
class SglangRole:
    """The role of an engine in an SGLang pair.

    Attributes:
        worker_type: "prefill" or "decode".
        options: options of the pair.
        hand_over: "sglang".

    Raises:
        ValueError: a field has another value.
    """

    worker_type: Literal["prefill", "decode"]
    options: SglangPairOptions = SglangPairOptions()
    hand_over: Literal["sglang"] = "sglang"

    def __post_init__(self) -> None:
        if self.worker_type not in ("prefill", "decode"):
            raise ValueError(
                "worker_type of a pair with hand_over='sglang' must be 'prefill' or 'decode', "
                f"got {self.worker_type!r:.80}"
            )

    requests_in: ClassVar[str] = "sglang_pair_requests"
    """The module of `engines` with its requests by hand."""

    @property
    def publishes(self) -> bool:
        """Whether the engine publishes: a decode engine without a radix cache does not."""
        return self.worker_type == "prefill" or self.caches

    @property
    def caches(self) -> bool:
        """Whether it has a radix cache."""
        options = self.options
        return self.worker_type == "prefill" or options.disaggregation_decode_enable_radix_cache

    @property
    def names_received(self) -> Literal["joins the batch", "never"]:
        """When a decode engine names the received blocks."""
        receives = self.worker_type == "decode" and self.caches
        return "joins the batch" if receives else "never"

    def check_manager(self, manager: Any) -> None:
        """Check that recordings cover pairs over a manager.

        Raises:
            ValueError: it is not SGLang's, or has a host, windows or states.
        """
        backend = manager.backend
        geometry = getattr(manager, "geometry", None)
        if getattr(manager, "offload", None) is not None:
            raise ValueError(
                f"a role with tiers was not recorded; leave out tiers, got backend {backend!r} with a host"
            )
        if geometry is None or not hasattr(manager, "preallocate"):
            raise ValueError(
                "hand_over='sglang' is for SGLang's unified cache (backend sglang or sglang_eagle; "
                f"sglang made with unified=True), got {backend!r}"
            )
        if geometry.window is not None or geometry.states is not None:
            part = "states" if geometry.window is None else "a window"
            raise ValueError(f"a role over {part} was not recorded; got backend {backend!r}")
