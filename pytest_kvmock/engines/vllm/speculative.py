"""What a draft model changes in vLLM 0.33.0: slots, names that look ahead, hits that drop a block."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from pytest_kvmock.values.acceptance import USUAL_RATES, checked_acceptance
from pytest_kvmock.values.checks import check_integer, unknown_text

# Theory of operation
#
# The KV of a draft layer at one position hangs on the token after it. So the last position of a block is only right if
# the token after the block is the same: vLLM has it in the block's name (names look ahead, its default), or computes
# the last block of a hit again (drop, its older mode). With several modules, one behind the other, it is as many
# tokens.


class _Method(NamedTuple):
    """What follows from a method alone, by vLLM's own properties.

    Attributes:
        reads_ahead: it has draft layers in the target's groups, whose KV hangs on the tokens after it.
        slots: a step has a slot for each draft.
        more_slots: how many slots it has in addition.
        chunk_lookahead: tokens that a prefill's chunk must have behind it.
    """

    reads_ahead: bool
    slots: bool
    more_slots: int
    chunk_lookahead: int


_EAGLE: Final = _Method(reads_ahead=True, slots=True, more_slots=0, chunk_lookahead=1)
METHODS: Final = MappingProxyType(
    {
        "eagle": _EAGLE,
        "eagle3": _EAGLE,
        "mtp": _EAGLE,
        "dflash": _Method(reads_ahead=False, slots=True, more_slots=1, chunk_lookahead=1),
        "draft_model": _Method(reads_ahead=False, slots=True, more_slots=0, chunk_lookahead=0),
        "ngram": _Method(reads_ahead=False, slots=False, more_slots=0, chunk_lookahead=0),
    }
)
"""The methods that were recorded, by vLLM's names."""

_NOT_RECORDED: Final = ("dspark", "medusa", "mlp_speculator", "suffix", "ngram_gpu")


@dataclass(frozen=True, slots=True)
class Speculative:
    """The speculative config of one engine of vLLM 0.33.0, and what of it its cache shows.

    Attributes:
        method: "eagle", "eagle3", "mtp", "dflash", "draft_model" or "ngram".
        tokens: drafts a step (`num_speculative_tokens`), at least 1.
        modules: of "mtp", those that predict one behind the other (`num_nextn_predict_layers`), at least 1; more than
            `tokens` count as `tokens`.
        plain_hashes: blocks are named as without a draft model, and hits drop a block
            (`disable_lookahead_block_hashes`).
        no_drop: neither (`disable_eagle_block_drop`).
        connector: there is a KV connector that is not mocked: see `plain_hashes`. A host (`tiers`) is one itself, and
            so is what an engine has that hands prompts over, or is handed them.
        acceptance: what drafts are accepted: the rate of each, at most as many as `tokens`, those that are not given 0;
            or, as a list, how many of each step, used in turn.

    Raises:
        ValueError: a field is invalid.
    """

    method: str = "mtp"
    tokens: int = 3
    modules: int = 1
    plain_hashes: bool = False
    no_drop: bool = False
    connector: bool = False
    acceptance: tuple[float, ...] | list[int] = USUAL_RATES

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            if self.method in _NOT_RECORDED:
                raise ValueError(
                    f"speculative: method {self.method!r} is not mocked, as it was not recorded; those that are: "
                    f"{', '.join(METHODS)}"
                )
            raise ValueError(f"speculative: {unknown_text('method', self.method, METHODS)}")
        check_integer("speculative: tokens", self.tokens, 1, " (drafts a step)")
        check_integer("speculative: modules", self.modules, 1)
        if self.modules > 1 and self.method != "mtp":
            raise ValueError(
                f"speculative: modules are those of method 'mtp'; {self.method!r} has one, got {self.modules}"
            )
        for name in ("plain_hashes", "no_drop", "connector"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"speculative: {name} must be True or False, got {getattr(self, name)!r:.80}")  # noqa: TRY004 - one error
        if self.plain_hashes and self.no_drop:
            raise ValueError("speculative: plain_hashes and no_drop were not recorded together; give one of them")
        object.__setattr__(self, "acceptance", checked_acceptance(self.acceptance, self.tokens))

    @property
    def drafts(self) -> int:
        """The most drafts that a step accepts."""
        return self.tokens

    @property
    def reads_ahead(self) -> bool:
        """Whether the KV of draft layers hangs on later tokens, so that names look ahead or hits drop a block."""
        return METHODS[self.method].reads_ahead

    @property
    def chunk_lookahead(self) -> int:
        """Tokens that a prefill's chunk must have behind it: one, or as many as modules; 0 where drafts do not read
        them.
        """
        deep = min(self.modules, self.tokens)
        return self.tokens if deep > 1 else METHODS[self.method].chunk_lookahead

    @property
    def lookahead(self) -> int:
        """How many of the next tokens the name of a block covers too (L)."""
        plain = not self.reads_ahead or self.plain_hashes or self.no_drop or self.connector
        return 0 if plain else self.chunk_lookahead

    @property
    def drops(self) -> bool:
        """Whether the last block of a hit is computed again."""
        return self.reads_ahead and not self.lookahead and not self.no_drop

    @property
    def slots(self) -> int:
        """Slots of a step beyond its tokens."""
        method = METHODS[self.method]
        return (self.tokens if method.slots else 0) + method.more_slots

    @property
    def input_slots(self) -> int:
        """Tokens more of a step's budget that each request takes."""
        return int(self.method == "draft_model")
