"""Ray Serve's prefix-aware rule: a tree of the texts sent to each worker, without events; the shortest queue among
equal matches.

With Ray installed, use its own tree: `RayRule(PrefixTree())`, of
`ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree` (`pip install "ray[serve]"`). `SentTexts` gives the
same answers.
"""

from random import Random


class SentTexts:
    """The part of Ray's PrefixTree that the rule uses: by worker, every prefix of a text that was sent there."""

    def __init__(self):
        self.sent = {}

    def add_tenants(self, tenants, time_s):
        for tenant in tenants:
            self.sent.setdefault(tenant, set())

    def remove_tenants(self, tenants):
        for tenant in tenants:
            self.sent.pop(tenant, None)

    def insert(self, text, tenant, time_s):
        self.sent[tenant].update(text[:end] for end in range(1, len(text) + 1))

    def prefix_match(self, text, available_tenants):
        known = {
            tenant: next((end for end in range(len(text), 0, -1) if text[:end] in self.sent[tenant]), 0)
            for tenant in available_tenants
        }
        longest = max(known.values())
        return text[:longest], [tenant for tenant in known if known[tenant] == longest]

    def get_smallest_tenants(self):
        smallest = min(map(len, self.sent.values()))
        return [tenant for tenant in self.sent if len(self.sent[tenant]) == smallest]


class RayRule:
    """The longest match if it is at least a tenth of the prompt; otherwise the workers with the smallest trees.

    Args:
        tree: Ray's tree, or `SentTexts`.
        seed: seed of the choice of two workers when loads are uneven.
        imbalanced: difference of open requests above which prefixes do not count; by default they always count.
        match_rate: the share of a prompt that must match.
    """

    needs_candidates = True

    def __init__(self, tree=None, seed=0, imbalanced=float("inf"), match_rate=0.1):
        self.tree = SentTexts() if tree is None else tree
        self.rng = Random(seed)
        self.imbalanced = imbalanced
        self.match_rate = match_rate
        self.letters = {}  # Ray compares texts; here each block is a letter
        self.known = set()

    def text(self, request):
        return "".join(self.letters.setdefault(block, chr(0x100 + len(self.letters))) for block in request.local_hashes)

    def pick(self, request, candidates):
        open_ = {str(each.worker): each.active_requests for each in candidates}
        workers = {str(each.worker): each.worker for each in candidates}
        self.tree.add_tenants([name for name in workers if name not in self.known], request.now_ms / 1000)
        self.known |= workers.keys()
        if max(open_.values()) - min(open_.values()) > self.imbalanced:
            chosen = self.rng.sample(list(workers), min(2, len(workers)))
        else:
            text = self.text(request)
            matched, chosen = self.tree.prefix_match(text, list(workers))
            if not text or len(matched) / len(text) < self.match_rate:
                chosen = [name for name in self.tree.get_smallest_tenants() if name in workers]
        return workers[min(chosen or workers, key=open_.get)]

    def dispatched(self, request, worker):
        self.tree.insert(self.text(request), str(worker), request.now_ms / 1000)

    def worker_removed(self, worker):
        self.tree.remove_tenants([str(worker)])
        self.known.discard(str(worker))
