"""What speculative decoding changes in SGLang 0.5.23: keys of pairs, and room that is taken ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pytest_kvmock.acceptance import USUAL_RATES, checked_acceptance
from pytest_kvmock.checks import check_integer, unknown_text

# Theory of operation
#
# The KV of a draft layer at one position hangs on the token after it, so that the tree is keyed by pairs of neighbours: the last
# token of a request is in no page of it. A tree with states keeps tokens as keys, whatever the algorithm is.
#
# What a step commits lags one step behind, so that a request has room for the drafts of two.

PAIRS: Final = ("EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP")
"""The algorithms under which keys are pairs; NEXTN is EAGLE by another name."""

ALGORITHMS: Final = (*PAIRS, "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO")
"""The algorithms that SGLang's servers take (`--speculative-algorithm`)."""


@dataclass(frozen=True, slots=True)
class SglangSpeculative:
    """The speculative decoding of one engine of SGLang 0.5.23, by its server arguments, and what of it its cache shows.

    Attributes:
        algorithm: one of `ALGORITHMS`.
        steps: of the draft model (`--speculative-num-steps`), at least 1.
        topk: branches of a step (`--speculative-eagle-topk`), at least 1.
        draft_tokens: that are verified at once, the last sampled token among them (`--speculative-num-draft-tokens`), at least 2.
        acceptance: what drafts are accepted: the rate of each, at most as many as `drafts`, those that are not given 0; or, as
            a list of integers, how many of each step, used in turn.

    Raises:
        ValueError: a field is not what it must be.
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
        """Whether keys are pairs, in a tree without states."""
        return self.algorithm in PAIRS

    @property
    def drafts(self) -> int:
        """The most drafts that a step may accept."""
        return min(self.steps, self.draft_tokens - 1)

    def ahead(self, page: int) -> int:
        """Tokens that a request has room for beyond those that are committed, before each step; `page` is in tokens."""
        reach = self.steps * self.topk
        if page > 1 and self.topk > 1 and self.algorithm != "NGRAM":
            reach = (2 * (page - 1) + self.steps) // page * page * self.topk
        return 2 * max(reach, self.draft_tokens)
