"""KV events over real ZMQ sockets: `KvPublisher` is an engine, `KvSubscriber` feeds a harness. They need the extra `zmq`."""

from __future__ import annotations

from pytest_kvmock.wire.batch import block_of, wire_hash
from pytest_kvmock.wire.endpoints import EndpointError
from pytest_kvmock.wire.kv_publisher import KvPublisher
from pytest_kvmock.wire.kv_subscriber import KvSubscriber
from pytest_kvmock.wire.receiver import BatchLoss, BatchProblem
from pytest_kvmock.wire.replay_server import Replay
from pytest_kvmock.wire.waiting import WireTimeout
from pytest_kvmock.wire.wire_faults import WireFaults, WireInjection

__all__ = [
    "BatchLoss",
    "BatchProblem",
    "EndpointError",
    "KvPublisher",
    "KvSubscriber",
    "Replay",
    "WireFaults",
    "WireInjection",
    "WireTimeout",
    "block_of",
    "wire_hash",
]
