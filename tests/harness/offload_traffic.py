"""Traffic of workers with a host tier below vLLM's device, and the reference answers for it."""

from random import Random

from pytest_kvmock import EngineProfile, Prompt, RouterHarness, StorageTier

HOST = StorageTier.HOST_PINNED
PROMPTS = [[*range(start, start + length)] for start, length in ((0, 33), (0, 20), (100, 16), (200, 30), (300, 9))]


def harness(tiers, backend="vllm", num_blocks=12, **fields):
    """Return a harness of `vllm` over hosts of 16 blocks; `tiers` overrides tier keys, `fields` profile fields."""
    tiers = {"host": 16, "gbps": 1.0, "bytes_per_token": 250_000, **tiers}
    return RouterHarness(EngineProfile(block_size=4, num_blocks=num_blocks, tiers=tiers, **fields), backend)


def traffic(worker, seed=5, keys=None):
    """Serve 25 prompts, each with these keys, and let some time pass."""
    rng = Random(seed)
    for _ in range(25):
        worker.serve(Prompt(PROMPTS[rng.randrange(len(PROMPTS))], **(keys or {})), rng.randrange(4))
        if rng.random() < 0.7:
            worker.tick(worker.now + rng.randrange(12))


def overlaps(kv, worker):
    """Yield what the reference returns for each prompt, and what its worker would reuse: tokens by tier."""
    for prompt in PROMPTS:
        if not len(prompt) % 4:
            continue  # the last of whole blocks is computed, or loaded, again
        found = {tier: scores[0] * 4 for tier, scores in kv.overlap(prompt, tier=None).items()}
        device, host = worker.cached_tokens(prompt), worker.cached_tokens(prompt, HOST)
        yield found, {tier: tokens for tier, tokens in (("device", device), (HOST, host)) if tokens}
