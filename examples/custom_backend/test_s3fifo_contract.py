"""Your own backend keeps the promises of every backend: its tests inherit the contracts of policy, manager and
engine.
"""

from custom_backend.s3fifo import S3FIFO, S3FifoPolicy
from hypothesis import settings

from pytest_kvmock.testing import EvictionContract, KvStateMachine, ManagerContract, WorkerContract


class TestS3FifoPolicy(EvictionContract):
    def make_policy(self, capacity):
        return S3FifoPolicy(capacity)


class TestS3FifoManager(ManagerContract):
    backend = "s3fifo"  # registered by the hook


class TestS3FifoWorker(WorkerContract):
    backend = S3FIFO  # a spec works, too


TestS3FifoInAnyTraffic = KvStateMachine.for_backend("s3fifo", num_blocks=8).TestCase
TestS3FifoInAnyTraffic.settings = settings(max_examples=30, deadline=None)
