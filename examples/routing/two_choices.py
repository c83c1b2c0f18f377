"""Power of two choices: of two workers drawn at random, the one with fewer open requests."""

from random import Random


class TwoChoices:
    """It ignores caches, and needs only a seed."""

    needs_candidates = True

    def __init__(self, seed=0):
        self.rng = Random(seed)

    def pick(self, request, candidates):
        two = self.rng.sample(candidates, min(2, len(candidates)))
        return min(two, key=lambda each: each.active_requests).worker
