"""The harness of a test: workers, the ledger that judges their events, and the index under test with its reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_kvmock.harness.router_harness import RouterHarness
from pytest_kvmock.harness.user_sink import KvSink
from pytest_kvmock.values.checks import late_names

if TYPE_CHECKING:
    from pytest_kvmock.harness.faults import Faults as Faults
    from pytest_kvmock.harness.inside import Inside
    from pytest_kvmock.harness.recovery import Recovery as Recovery

    # A subscriber can deliver to either; mypy checks that both are receivers.
    from pytest_kvmock.wire.sockets.receiver import Receiver

    _receivers: tuple[type[Receiver], ...] = (Inside, KvSink)

__all__ = ["Faults", "KvSink", "Recovery", "RouterHarness"]

__getattr__ = late_names(__name__, {"Faults": "harness.faults", "Recovery": "harness.recovery"})
