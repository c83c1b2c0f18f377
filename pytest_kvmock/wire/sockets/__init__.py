"""KV events over real ZMQ sockets: `KvPublisher` publishes as an engine, `KvSubscriber` feeds a harness. They need the
extra `zmq`.
"""

from typing import TYPE_CHECKING

from pytest_kvmock.values.checks import late_names

if TYPE_CHECKING:
    from pytest_kvmock.wire.sockets.kv_publisher import KvPublisher as KvPublisher
    from pytest_kvmock.wire.sockets.kv_subscriber import KvSubscriber as KvSubscriber
    from pytest_kvmock.wire.sockets.load_sockets import LoadSubscriber as LoadSubscriber
    from pytest_kvmock.wire.sockets.master_sockets import MasterPublisher as MasterPublisher
    from pytest_kvmock.wire.sockets.master_sockets import MasterSubscriber as MasterSubscriber
    from pytest_kvmock.wire.sockets.waiting import WireTimeout as WireTimeout

_HOME = {
    "KvPublisher": "wire.sockets.kv_publisher",
    "KvSubscriber": "wire.sockets.kv_subscriber",
    "LoadSubscriber": "wire.sockets.load_sockets",
    "MasterPublisher": "wire.sockets.master_sockets",
    "MasterSubscriber": "wire.sockets.master_sockets",
    "WireTimeout": "wire.sockets.waiting",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the table is the one list

# Loaded on first use, because a test of a router needs none of these.
__getattr__ = late_names(__name__, _HOME)
