"""Dynamo's cost, written out: the blocks yet to prefill, less those that are there, and the blocks of open requests.

`pytest_kvmock.fleets.routing.selection.DynamoRouter` has all of it, queue, temperature and releases too. This is what
one pick comes to.
"""

from random import Random


class DynamoCost:
    """The least cost; equals are drawn.

    Args:
        seed: of the choice among equals.
        overlap_weight: what a block that is there is worth, in blocks of prefill.
    """

    needs_candidates = True

    def __init__(self, seed=0, overlap_weight=1.0):
        self.rng = Random(seed)
        self.overlap_weight = overlap_weight

    def cost(self, request, candidate):
        size = request.block_size
        prefill = (candidate.prefill_tokens + max(request.prompt_tokens, candidate.overlap * size)) / size
        decode = candidate.decode_blocks + candidate.new_blocks
        return max(0.0, prefill - self.overlap_weight * candidate.overlap) + decode

    def pick(self, request, candidates):
        costs = [self.cost(request, each) for each in candidates]
        least = min(costs)
        return self.rng.choice([each.worker for each, cost in zip(candidates, costs, strict=True) if cost == least])
