"""Dynamo's prefill router: prefill first, by KV and load; then decode, by load only.

If no prefill worker is known, decode workers silently do all; if one is known but not ready, the client gets a 503.
With conditional disaggregation (`order="decode_first"`) decode is picked first, and the prefill leg is skipped if the
decode worker has little to compute and is not busy.
"""

from random import Random

from pytest_kvmock.fleets import DECODE_ALONE, REFUSE


class DynamoPrefillRouter:
    """The least cost for each role; ties are broken at random.

    Args:
        conditional: whether the prefill leg may be skipped.
        most_tokens: skip it below this number of tokens that the decode worker lacks,
        most_share: and below this share of the prompt.
        busy: tokens to compute from which a decode worker is busy.
        seed: seed of the choice among equals.
    """

    def __init__(self, conditional=False, most_tokens=2048, most_share=0.7, busy=8192, seed=0):
        self.conditional = conditional
        self.most_tokens = most_tokens
        self.most_share = most_share
        self.busy = busy
        self.rng = Random(seed)
        self.known = set()
        self.bypass = {}

    def started(self, workers):
        self.known.update(workers["prefill"])

    def worker_added(self, worker, role):
        if role == "prefill":
            self.known.add(worker)

    def worker_removed(self, worker, role):
        self.known.discard(worker)

    def cost(self, request, candidate):
        size = request.block_size
        credit = candidate.overlap if request.phase == "prefill" or self.conditional else 0
        prefill = candidate.prefill_tokens / size
        if request.phase == "prefill":
            prefill += request.prompt_tokens / size
        return max(0.0, prefill - credit) + candidate.decode_blocks + candidate.new_blocks

    def least(self, request, candidates):
        costs = [self.cost(request, each) for each in candidates]
        return self.rng.choice([each for each, cost in zip(candidates, costs, strict=True) if cost == min(costs)])

    def pick(self, request, candidates):
        if request.phase == "decode":
            if not candidates:
                return None
            chosen = self.least(request, candidates)
            uncached = request.prompt_tokens - chosen.overlap * request.block_size
            is_little = uncached < self.most_tokens and uncached < self.most_share * request.prompt_tokens
            self.bypass[request] = is_little and chosen.prefill_tokens < self.busy
            return chosen.worker
        if (self.conditional and self.bypass.pop(request, False)) or not self.known:
            return DECODE_ALONE
        return self.least(request, candidates).worker if candidates else REFUSE

    def finished(self, request):
        self.bypass.pop(request, None)
