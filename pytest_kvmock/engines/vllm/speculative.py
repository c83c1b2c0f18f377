"""What a draft model changes in vLLM 0.33.0: slots, names that look ahead, hits that drop a block."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from pytest_kvmock.values.acceptance import USUAL_RATES, checked_acceptance
from pytest_kvmock.values.checks import check_integer, unknown_text

# Theory of operation
#
# The KV of a draft layer at one position depends on the next token. The last position of a block is therefore valid
# only if the token after the block is the same. vLLM either includes that token in the block's name (names look ahead,
# its default) or computes the last block of a hit again (drop, its older mode). With several modules in sequence, each
# module needs one more token.


class _Method(NamedTuple):
    """The properties of a method, as in vLLM.

    Attributes:
        reads_ahead: it has draft layers in the target's groups, whose KV depends on the next tokens.
        slots: a step has a slot for each draft.
        more_slots: number of additional slots of a step.
        chunk_lookahead: tokens that must follow a chunk of a prefill.
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
    """The speculative config of one engine of vLLM 0.33.0, as far as it affects the cache.

    Attributes:
        method: "eagle", "eagle3", "mtp", "dflash", "draft_model" or "ngram".
        tokens: drafts per step (`num_speculative_tokens`), at least 1.
        modules: only for "mtp": the modules that predict in sequence (`num_nextn_predict_layers`), at least 1; more
            than `tokens` count as `tokens`.
        plain_hashes: blocks are named as without a draft model, and hits drop a block
            (`disable_lookahead_block_hashes`).
        no_drop: names do not look ahead and hits drop nothing (`disable_eagle_block_drop`).
        connector: there is a KV connector that is not mocked; the effect is that of `plain_hashes`. A host (`tiers`) is
            a connector itself, and so is the handover of prompts in an engine of a pair.
        acceptance: accepted drafts: a rate for each draft, at most `tokens` rates, with 0 for missing ones; or a list
            with the number for each step, used in turn.

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
        """Whether the KV of draft layers depends on later tokens, so that names look ahead or hits drop a block."""
        return METHODS[self.method].reads_ahead

    @property
    def chunk_lookahead(self) -> int:
        """Tokens that must follow a chunk of a prefill; 0 if drafts do not read them.

        With several modules, the number of drafts per step.
        """
        deep = min(self.modules, self.tokens)
        return self.tokens if deep > 1 else METHODS[self.method].chunk_lookahead

    @property
    def lookahead(self) -> int:
        """Number of following tokens that the name of a block also covers (L)."""
        plain = not self.reads_ahead or self.plain_hashes or self.no_drop or self.connector
        return 0 if plain else self.chunk_lookahead

    @property
    def drops(self) -> bool:
        """Whether the last block of a hit is computed again."""
        return self.reads_ahead and not self.lookahead and not self.no_drop

    @property
    def slots(self) -> int:
        """Slots of a step in addition to its tokens."""
        method = METHODS[self.method]
        return (self.tokens if method.slots else 0) + method.more_slots

    @property
    def input_slots(self) -> int:
        """Additional tokens of a step's budget that each request takes."""
        return int(self.method == "draft_model")
