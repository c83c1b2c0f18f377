"""The whole world of a test: workers, the ledger that judges what they say, and the index that routes by it."""

from pytest_kvmock.harness.judge import Verdict as Verdict
from pytest_kvmock.harness.router_harness import RouterHarness as RouterHarness
from pytest_kvmock.harness.user_sink import KvSink as KvSink
