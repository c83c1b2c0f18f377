"""The harness of a test: workers, the ledger that judges their events, and the index that is compared with the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_kvmock.harness.recovery import Recovery
from pytest_kvmock.harness.router_harness import RouterHarness
from pytest_kvmock.harness.user_sink import KvSink
from pytest_kvmock.harness.verdict import Verdict

if TYPE_CHECKING:  # what a subscriber feeds: mypy holds that both are receivers
    from pytest_kvmock.wire.receiver import Receiver

    _receivers: tuple[type[Receiver], ...] = (RouterHarness, KvSink)

__all__ = ["KvSink", "Recovery", "RouterHarness", "Verdict"]
