"""Dynamo's cost, written out: the blocks to prefill, minus the cached ones, plus the blocks of open requests.

`pytest_kvmock.fleets.routing.selection.DynamoRouter` has the complete rule, with queue, temperature and releases. This
is the cost of one pick.
"""

from random import Random


class DynamoCost:
    """The least cost; ties are broken at random.

    Args:
        seed: seed of the choice among equals.
        overlap_weight: the value of a cached block, in blocks of prefill.
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
