"""The harness of a test: workers, the ledger that judges their events, and the index that is compared with the reference."""

from pytest_kvmock.harness.router_harness import RouterHarness as RouterHarness
from pytest_kvmock.harness.user_sink import KvSink as KvSink
from pytest_kvmock.harness.verdict import Verdict as Verdict
