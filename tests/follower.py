"""Dynamo's router with its earlier picks: those of a recording, or of a run of the original just now."""

import math

from pytest_kvmock.fleets import DynamoRouter


class Follower(DynamoRouter):
    """Picks as recorded, and compares the cost of each candidate."""

    def __init__(self, picks, semantics, **options):
        super().__init__(semantics, **options)
        self.left = list(picks)

    def _choose(self, request, candidates, costs):
        number, expected = self.left.pop(0)
        tracks = self._tracks_prefill
        found = []
        for each, cost in zip(candidates, costs, strict=True):
            overlap, size = self.known_overlap(request, each), request.block_size
            uncached = max(0, request.prompt_tokens - overlap * size)
            raw = (each.prefill_tokens + uncached + overlap * size) / size if tracks else 0.0
            found.append([overlap, raw, self._decode(request, each), cost])
        assert all(
            math.isclose(theirs, ours, abs_tol=tolerance)
            for row, own in zip(expected, found, strict=True)
            for theirs, ours, tolerance in zip(row, own, (0.0051, 0.00051, 0.00051, 0.00051), strict=True)
        ), (request, expected, found)
        if not self._temperature:
            cheapest = [each.worker for each in self._cheapest(request, candidates, costs)]
            assert number in cheapest, (request, costs, number)
        return candidates[number].worker
