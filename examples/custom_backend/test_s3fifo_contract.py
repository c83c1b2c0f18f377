"""A backend of one's own keeps what every backend promises: it inherits the contracts of policy, manager and engine."""

from custom_backend.s3fifo import S3FIFO, S3FifoPolicy
from hypothesis import settings

from pytest_kvmock.testing import EvictionContract, KvStateMachine, ManagerContract, WorkerContract


class TestS3FifoPolicy(EvictionContract):
    def make_policy(self, capacity):
        return S3FifoPolicy(capacity)


class TestS3FifoManager(ManagerContract):
    backend = "s3fifo"  # as the hook has registered it


class TestS3FifoWorker(WorkerContract):
    backend = S3FIFO  # a spec does as well


TestS3FifoInAnyTraffic = KvStateMachine.for_backend("s3fifo", num_blocks=8).TestCase
TestS3FifoInAnyTraffic.settings = settings(max_examples=30, deadline=None)
