"""Many passes that only decode in one go, blocks included, for an engine that nobody watches.

Theory of operation. While all requests run and none is to end, a pass gives each of them a token. Most tokens lie inside a
block and change nothing but numbers; the others open a block or fill one, and these have to meet the block manager in the
order in which the passes would do it: pass by pass, in a pass in the order of the running requests. So the tokens of all passes
are generated first, request by request (each has a source of its own), then the blocks are opened and filled in that order, and
the numbers are moved on at the end. What it costs is by request and by block, and not by token.

Nobody may be preempted or admitted meanwhile. As nothing is freed, blocks run short exactly when more of them are to be opened
than there are, which is counted before; and a request that could not be admitted before cannot be as room shrinks. How long the
passes take is known before, too, by the lengths of the requests (`decode_times`).

It needs an engine that allocates a block when the first of its tokens is computed, so that a token by itself needs none; and
nobody who receives events, as who does could tell that other engines on the same clock have not come so far yet.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import repeat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_kvmock.engine.driver import PoolSchedulerDriver
    from pytest_kvmock.engine.scheduler import ScheduledRequest


def passes_that_fit(driver: PoolSchedulerDriver, running: Sequence[ScheduledRequest], most: int) -> int:
    """Return how many passes find a block for each token that they compute.

    Args:
        driver: brings the requests to the block manager.
        running: all requests; of each the last token is to be computed.
        most: so many passes are asked for.
    """
    room, need = driver.room(), driver.need

    def opened(passes: int) -> int:
        return sum(need(request.state, len(request) + passes - 1) for request in running)

    if opened(most) <= room:
        return most
    return bisect_right(range(1, most), room, key=opened)


def decode_ahead(driver: PoolSchedulerDriver, running: Sequence[ScheduledRequest], ends: list[float]) -> None:
    """Run so many passes, which fit.

    Args:
        driver: as above.
        running: all requests, in their order.
        ends: when the passes end.
    """
    count, size = len(ends), driver.manager.block_size
    steps: list[tuple[int, int]] = []
    for place, request in enumerate(running):
        length = len(request)
        driver.generate_ahead(request.state, request.next_tokens(count))
        for first in {-length % size, (1 - length) % size}:  # a pass that fills a block, and one that opens the next
            steps += zip(range(first, count, size), repeat(place))
    steps.sort()
    allocate = driver.allocate
    for done, place in steps:
        request = running[place]
        allocate(request.state, len(request) + done)
    for request in running:
        driver.step_inside(request.state, len(request) + count - 1)
        request.generated_tokens += count
        request.computed_tokens += count
        request.token_ms += ends
