"""The effects of speculative decoding on SGLang 0.5.23's cache: pairs as keys, and room that is taken in advance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pytest_kvmock.values.acceptance import USUAL_RATES, checked_acceptance
from pytest_kvmock.values.checks import check_integer, unknown_text

# Theory of operation
#
# A draft layer's KV at one position depends on the next token, so the tree's keys are pairs of neighbouring tokens, and
# the last token of a request is in no page. A tree with states has tokens as keys under every algorithm.
#
# The commit of a step comes one step late, so a request needs room for the drafts of two steps.

PAIRS: Final = ("EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP")
"""The algorithms with pairs as keys; NEXTN is another name of EAGLE."""

ALGORITHMS: Final = (*PAIRS, "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO")
"""The algorithms that SGLang's servers accept (`--speculative-algorithm`)."""


@dataclass(frozen=True, slots=True)
class SglangSpeculative:
    """The server arguments of one SGLang 0.5.23 engine's speculative decoding that affect its cache.

    Attributes:
        algorithm: one of `ALGORITHMS`.
        steps: steps of the draft model (`--speculative-num-steps`), at least 1.
        topk: branches per step (`--speculative-eagle-topk`), at least 1.
        draft_tokens: tokens that are verified at once, including the last sampled one
            (`--speculative-num-draft-tokens`), at least 2.
        acceptance: which drafts are accepted: the rate of each draft, for up to `drafts` drafts (missing ones are 0);
            or, as a list of integers, the number accepted in each step, repeated cyclically.

    Raises:
        ValueError: a field is invalid.
    """

    algorithm: str = "EAGLE"
    steps: int = 3
    topk: int = 1
    draft_tokens: int = 4
    acceptance: tuple[float, ...] | list[int] = USUAL_RATES

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"speculative: {unknown_text('algorithm', self.algorithm, ALGORITHMS)}")
        for name, least in (("steps", 1), ("topk", 1), ("draft_tokens", 2)):
            check_integer(f"speculative: {name}", getattr(self, name), least)
        object.__setattr__(self, "acceptance", checked_acceptance(self.acceptance, self.drafts))

    @property
    def has_pairs(self) -> bool:
        """Whether the keys of a tree without states are pairs."""
        return self.algorithm in PAIRS

    @property
    def drafts(self) -> int:
        """Maximum number of drafts that a step accepts."""
        return min(self.steps, self.draft_tokens - 1)

    def ahead(self, page: int) -> int:
        """Return the tokens of room beyond the committed ones that a request has before each step.

        `page` is the page size in tokens.
        """
        reach = self.steps * self.topk
        if page > 1 and self.topk > 1 and self.algorithm != "NGRAM":
            reach = (2 * (page - 1) + self.steps) // page * page * self.topk
        return 2 * max(reach, self.draft_tokens)
