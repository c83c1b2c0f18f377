"""Promised and reused blocks in a fleet with a draft model, behind a router that reads its events and naive ones."""

import pytest
from depth import takes_long
from draft_fleets import READERS, SIZE, served, shares

AHEAD, DROPS = "names look ahead", "hits drop a block"


@pytest.mark.parametrize("num_blocks", [400, 4000])
def test_a_router_that_hashes_windows_promises_exactly_the_reused_blocks(num_blocks):
    rows = served(AHEAD, "windows", num_blocks)
    assert [row for row in rows if row[1] != row[2]] == []
    assert shares(rows)[1] > 0.5


@takes_long
@pytest.mark.parametrize("num_blocks", [400, 4000])
def test_a_router_that_hashes_plain_blocks_promises_nothing_and_reuse_falls(num_blocks):
    right, plain = shares(served(AHEAD, "windows", num_blocks)), shares(served(AHEAD, "plain", num_blocks))
    assert plain[0] == 0
    assert plain[1] < 0.6 * right[1]  # all workers promise the same, so they are picked in turn


@takes_long
def test_a_router_that_ignores_next_tokens_promises_one_block_too_many():
    promised, used, more, less = shares(served(AHEAD, "tokens"))
    assert promised > used
    assert (more > 0.9, less) == (True, 0)  # the prompts of this trace diverge at block ends
    assert {row[1] - row[2] for row in served(AHEAD, "tokens", 4000) if row[1] != row[2]} == {SIZE}


@pytest.mark.parametrize("mode", [AHEAD, DROPS])
def test_a_router_with_one_entry_for_twins_and_copies_loses_cached_blocks(mode):
    promised, used, more, less = shares(served(mode, "entry"))
    assert promised < used
    assert more > 0.5
    assert less > 0.1


@pytest.mark.parametrize("reader", [name for name in READERS if name != "entry"])
def test_when_hits_drop_a_block_every_reader_promises_one_block_more(reader):
    rows = served(DROPS, reader, 4000)
    assert {promised - used for _, promised, used in rows} == {0, SIZE}
    assert all(promised == used + SIZE for _, promised, used in rows if promised)
