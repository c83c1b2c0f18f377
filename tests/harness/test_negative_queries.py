"""Lookups of chains that no worker stored: an index that finds one gets a report of what was looked up."""

import pytest

from pytest_kvmock import Cleared, EngineProfile, EventRulesBroken, RadixIndex, RouterHarness, Stored, block_hashes

PROMPT = tuple(range(1, 14))


class ByContent:
    """Finds blocks by their tokens at any position."""

    def __init__(self):
        self.held = {}

    def apply(self, event):
        data = event.event.data
        if isinstance(data, Stored):
            self.held.update(zip(data.block_hashes, self.of_event(event), strict=True))
        for block in () if isinstance(data, (Stored, Cleared)) else data.block_hashes:
            self.held.pop(block, None)

    def of_event(self, event):
        return event.event.data.tokens_hashes

    def find_matches(self, local_hashes):
        known = set(self.held.values())
        return {0: next((at for at, each in enumerate(local_hashes) if each not in known), len(local_hashes))}


class LastBlockAlone(ByContent):
    def find_matches(self, local_hashes):
        return {0: len(local_hashes) if local_hashes[-1] in self.held.values() else 0}


class FirstTokens(RadixIndex):
    """Keys a block by its first token."""

    find_matches = None

    def apply(self, event):
        data = event.event.data
        if isinstance(data, Stored):
            data = Stored(data.parent_hash, data.block_hashes, self.keyed([t for ids in event.token_ids for t in ids]))
            event = type(event)(event.worker_id, type(event.event)(event.event.event_id, data))
        super().apply(event)

    def keyed(self, tokens):
        return tuple(block_hashes([t for at, t in enumerate(tokens) if at % 4 == 0], 1))

    def match_tokens(self, tokens):
        return RadixIndex.find_matches(self, self.keyed(tokens[: len(tokens) // 4 * 4]))


class NextTokenLeftOut(FirstTokens):
    """Reads the block names of a draft model as plain ones."""

    def keyed(self, tokens):
        return tuple(block_hashes(tokens, 4))


def test_a_drift_over_a_draft_model_mentions_the_next_token_that_names_cover():
    profile = EngineProfile(block_size=4, num_blocks=8)
    with pytest.raises(EventRulesBroken) as failed, RouterHarness(profile, "vllm_mtp", NextTokenLeftOut()) as kv:
        kv.worker(0).prefill([0, 1, 2, 3, *range(8)])
    assert (
        "without the blocks before it: no stored prefix begins so and has the same next token, which this worker's "
        "names cover"
    ) in str(failed.value)


@pytest.mark.parametrize(
    ("index", "pattern"),
    [
        (
            ByContent,
            (
                "find_matches() of your index (ByContent) returned 1 for worker 0 for block {1} alone, without the "
                "blocks before it: "
                "no stored prefix begins so"
            ),
        ),
        (
            LastBlockAlone,
            (
                "find_matches() of your index (LastBlockAlone) returned 2 for worker 0 for {1} behind a block that "
                "no worker stored: "
                "another in place of {0}; what stands before a block is part of it"
            ),
        ),
        (
            FirstTokens,
            (
                "match_tokens() of your index (FirstTokens) returned 1 for worker 0 for a block that no worker stored: "
                "{0} with one token "
                "changed; your key of it is also that of {0}"
            ),
        ),
    ],
)
def test_a_drift_describes_the_chain_that_was_looked_up(index, pattern):
    kv = RouterHarness(EngineProfile(block_size=4, num_blocks=16), index=index())
    kv.worker(0).serve(PROMPT)
    blocks = [f"0x{block:016x}" for block in kv.events.stored[0].data.block_hashes]
    observed = [problem.observed for problem in kv.judge().errors]
    assert pattern.format(*blocks) in observed
    assert not [text for text in observed if "never removed" in text and "alone" in text]
