"""The two examples of docs/how-to/hybrid-models.md; its tables show these numbers."""

from pytest_kvmock import EngineProfile, RouterHarness, Stored
from pytest_kvmock.engines import CacheGroup, backend_spec

FIRST, SECOND, THIRD = ([*range(14), *range(start, start + 8)] for start in (14, 100, 200))


def served(*groups):
    """Return per prompt: tokens held, tokens reused, and of each Stored its group, span and ends of named blocks."""
    rows, ends = [], {None: 0}
    engine = backend_spec("vllm").variant("vllm_small", groups=groups)
    with RouterHarness(EngineProfile(engine.default_block_size, num_blocks=100), engine) as kv:
        for prompt in (FIRST, SECOND, THIRD):
            size, before = kv.profile.block_size, len(kv.events)
            found = kv.overlap(prompt).get(0, 0) * size, kv.reusable(prompt).get(0, 0)
            kv.worker(0).serve(prompt)
            stored = [each.event for each in kv.events if isinstance(each.event.event.data, Stored)][before:]
            for event in stored:  # the attention group names each block of a span
                if (event.extra or {}).get("group_idx") == 1:
                    start = ends[event.event.data.parent_hash] + size
                    ends |= {name: start + n * size for n, name in enumerate(event.event.data.block_hashes)}
            rows.append((*found, [_spans(event, ends) for event in stored]))
    return rows


def _spans(event, ends):
    data, start = event.event.data, ends[event.event.data.parent_hash]
    end = start + sum(map(len, event.token_ids))
    return (event.extra or {}).get("group_idx", 0), start, end, [ends[name] for name in data.block_hashes]


def test_the_example_with_a_sliding_window_holds_and_reuses_these_tokens():
    assert served(CacheGroup("sliding_window", 4, window=6), CacheGroup("full_attention", 4)) == [
        (0, 0, [(0, 0, 20, [16, 20]), (1, 0, 20, [4, 8, 12, 16, 20])]),
        (12, 0, [(0, 0, 20, [8, 12, 16, 20]), (1, 0, 20, [4, 8, 12, 16, 20])]),
        (12, 12, [(0, 12, 20, [16, 20]), (1, 12, 20, [16, 20])]),
    ]


def test_the_example_with_a_state_holds_and_reuses_these_tokens():
    assert served(CacheGroup("mamba", 8), CacheGroup("full_attention", 8)) == [
        (0, 0, [(0, 0, 16, [16]), (1, 0, 16, [8, 16])]),
        (8, 0, [(0, 0, 8, [8]), (1, 0, 8, [8]), (0, 8, 16, [16]), (1, 8, 16, [16])]),
        (8, 8, [(0, 8, 16, [16]), (1, 8, 16, [16])]),
    ]
