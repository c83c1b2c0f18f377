"""llm-d's scorers: prefix 3, queue 2, KV cache usage 2, each from 0 to 1; the best sum wins.

Queue and usage are polled metrics of the engines: run it with `Fleet(..., loads="engine", loads_every_ms=50)`.
"""

from random import Random


class Scorers:
    """The weighted sum of three scorers; ties are broken at random.

    Args:
        seed: seed of the choice among equals.
        weights: weights of prefix, queue and usage.
    """

    needs_candidates = True

    def __init__(self, seed=0, weights=(3, 2, 2)):
        self.rng = Random(seed)
        self.weights = weights

    def scores(self, request, candidates):
        prefix, queue, usage = self.weights
        blocks = max(1, len(request.local_hashes))
        waiting = [each.waiting for each in candidates]
        least, most = min(waiting), max(waiting)
        return [
            prefix * each.overlap / blocks
            + queue * ((most - each.waiting) / (most - least) if most > least else 1.0)
            + usage * (1 - each.usage)
            for each in candidates
        ]

    def pick(self, request, candidates):
        scores = self.scores(request, candidates)
        best = max(scores)
        return self.rng.choice([each.worker for each, score in zip(candidates, scores, strict=True) if score == best])
