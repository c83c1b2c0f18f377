"""llm-d's router: first a decode pod, then a prefill pod if the decode pod has too little of the prompt.

Its `disagg-profile-handler` runs the decode profile, asks the `prefix-based-pd-decider` whether there is a prefill leg,
and then runs the prefill profile. Each profile has its own scorers. If the prefill profile finds no pod, the decode pod
silently does all.
"""

from random import Random

from pytest_kvmock.fleets import DECODE_ALONE


class LlmDisagg:
    """Scorers for each role, and a decider between them; run it with `order="decode_first"`.

    Args:
        non_cached_tokens: there is a prefill leg from this number of tokens that the decode worker lacks; 0: never.
        prompt_tokens: shorter prompts are decoded alone.
        weights: weights of prefix, queue and usage, by role.
        seed: seed of the choice among equals.
    """

    def __init__(self, non_cached_tokens=64, prompt_tokens=0, weights=None, seed=0):
        self.non_cached_tokens = non_cached_tokens
        self.prompt_tokens = prompt_tokens
        self.weights = weights or {"prefill": (3, 2, 0), "decode": (2, 1, 2)}
        self.rng = Random(seed)
        self.held = {}

    def scored(self, request, candidates):
        """Return the best worker of a profile."""
        prefix, queue, usage = self.weights[request.phase]
        blocks = max(1, len(request.local_hashes))
        waiting = [each.waiting + each.active_requests for each in candidates]
        least, most = min(waiting), max(waiting)
        scores = [
            prefix * each.overlap / blocks
            + queue * ((most - busy) / (most - least) if most > least else 1.0)
            + usage * (1 - each.usage)
            for each, busy in zip(candidates, waiting, strict=True)
        ]
        best = [each for each, score in zip(candidates, scores, strict=True) if score == max(scores)]
        return self.rng.choice(best)

    def pick(self, request, candidates):
        if request.phase == "decode":
            if not candidates:
                return None
            chosen = self.scored(request, candidates)
            self.held[request] = chosen.overlap * request.block_size
            return chosen.worker
        uncached = request.prompt_tokens - self.held.pop(request, 0)
        is_alone = not self.non_cached_tokens or uncached < self.non_cached_tokens
        if is_alone or request.prompt_tokens < self.prompt_tokens or not candidates:
            return DECODE_ALONE
        return self.scored(request, candidates).worker
