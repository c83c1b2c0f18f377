"""Tests of an index under full reports (vLLM's `kv_cache_report_mode`).

A report repeats the blocks that a look-up hit, and looks the same as a copy. An index that counts copies may therefore
find too many blocks, and an index that keeps a set too few; both are right here. An index is wrong if it ignores
Removed, finds fewer blocks than a set would, or does not learn from a report the blocks of lost events.
"""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import ClassVar, Final

import pytest

from pytest_kvmock.engines.backends import BACKENDS, create_manager
from pytest_kvmock.engines.worker import KvWorker, OutOfBlocks
from pytest_kvmock.oracle.index.index import RadixIndex, RadixIndexError
from pytest_kvmock.testing.index.index_driver import prompt_of
from pytest_kvmock.testing.index.index_subject import OverIndex
from pytest_kvmock.values.events import RouterEvent
from pytest_kvmock.values.prompt_keys import FULL_REPORT
from pytest_kvmock.values.sinks import CapturingSink

_SEEDS: Final = 5
_REQUESTS: Final = 40
_BLOCKS: Final = 9
_NOT_ASKED: Final = "full_reports is False: streams of requests that carry full reports were not checked"


class FullReports(OverIndex):
    """The part of `IndexContract` about full reports.

    Attributes:
        full_reports: whether the requests of its engines carry `kv_cache_report_mode="full"`.
    """

    full_reports: ClassVar[bool] = False

    def _skip_unless_asked(self) -> None:
        self._start()
        if not self.full_reports:
            pytest.skip(_NOT_ASKED)

    def test_a_report_is_no_more_than_a_copy(self) -> None:
        """After a report, the first or the second Removed of a block removes it: not earlier, and not later."""
        self._skip_unless_asked()
        index = self._start()
        index.store("abc")
        index.store("abc")  # a report or copies
        index.expect("abc", {0: 3})
        index.remove("abc", may_be_refused=True)
        index.expect("abc", {0: 3}, least={0: 2})
        index.remove("abc", may_be_refused=True)
        index.expect("abc", {0: 2})

    def test_a_report_teaches_what_lost_events_had_said(self) -> None:
        """Blocks whose Stored was lost are found from the report that names them until their Removed."""
        self._skip_unless_asked()
        index = self._start()
        index.store("ab")
        index.lose()
        index.store("abcd")
        index.expect("abcd", {0: 4})
        index.remove("abcd", may_be_refused=True)
        index.expect("abcd", {0: 3})

    def test_reports_of_live_traffic_are_answered_between_set_and_count(self) -> None:
        """Whatever requests report, the answer lies between those of a set and of a count."""
        self._skip_unless_asked()
        exact = dict.fromkeys(("a set", "a count"), True)
        for seed in range(_SEEDS):
            self._follow_reports(seed, exact)
        bounds = " and ".join(name for name, holds in exact.items() if holds)
        print(f"full reports: answered as {bounds or 'none of set and count alone'}")  # noqa: T201 - says which bound

    def _follow_reports(self, seed: int, exact: dict[str, bool]) -> None:
        """Apply an engine's events under random traffic; compare the index with both bounds after each request."""
        rng, sink, spec = Random(seed), CapturingSink(), BACKENDS["vllm"]  # noqa: S311 - mock data
        worker = KvWorker(
            lambda given: create_manager(spec, num_blocks=_BLOCKS, block_size=self.block_size, sink=given),
            sink=sink,
            rng=rng,
            driver=spec.driver,
        )
        index = self._start()
        least, most = RadixIndex(), RadixIndex(count_copies=True)
        asked: dict[str, None] = {}
        for _ in range(_REQUESTS):
            letters = "".join(rng.choice("ab") for _ in range(rng.randint(1, 4)))
            mode = FULL_REPORT if rng.random() < 0.7 else None
            with suppress(OutOfBlocks):
                worker.serve(prompt_of(letters, self.block_size, rng.randrange(2), report_mode=mode))
            events = sink.router_events
            sink.take()
            for event in events:
                named = RouterEvent(0, event.event, token_ids=event.token_ids)  # as a wire has it
                index.give(named)
                for bound in (least, most):
                    with suppress(RadixIndexError):
                        bound.apply(named)
            asked[letters] = None
            for each in asked:
                local = prompt_of(each, self.block_size).block_hashes(self.block_size)
                low, high = (bound.find_matches(local).scores.get((0, 0), 0) for bound in (least, most))
                index.expect(each, {0: high} if high else {}, least={0: low} if low < high else None)
                found = max(index.ask(each).values(), default=0)
                exact["a set"] &= found == low
                exact["a count"] &= found == high
