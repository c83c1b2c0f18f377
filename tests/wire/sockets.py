"""Helpers for socket tests: events of one or two blocks, and the plain SUB and DEALER of a router in any language."""

import asyncio
import contextlib

import zmq

from pytest_kvmock import Removed, Stored

BIG = 2**63 + 5


def stored(block, parent=None):
    return Stored(parent, (block,), (block + 1000,))


def tokens_of(block):
    return [[block, block + 1, block + 2, block + 3]]


def publish_chain(publisher, count, first=BIG):
    """Publish `count` batches: a chain of blocks, one per batch."""
    for block in range(first, first + count):
        parent = None if block == first else block - 1
        publisher.publish(stored(block, parent), token_ids=tokens_of(block % 1000))


def removed(*blocks):
    return Removed(blocks)


async def tasks_wait():
    """Wait until all ready tasks have run to their next wait."""
    turned = asyncio.Event()
    asyncio.get_running_loop().call_soon(turned.set)
    await turned.wait()


def number(frames):
    return int.from_bytes(frames[1], "big")


@contextlib.contextmanager
def plain_sub(*endpoints, topic=b"", context=None):
    """Open a SUB socket like that of any router."""
    own = zmq.Context() if context is None else context
    sub = own.socket(zmq.SUB)
    sub.subscribe(topic)
    for endpoint in endpoints:
        sub.connect(endpoint)
    sub.rcvtimeo = 5000
    try:
        yield sub
    finally:
        sub.close(linger=0)
        if context is None:
            own.term()


def replayed(endpoint, start, frames=None, messages=None, context=None):
    """Request a replay like a router, and return its messages up to the end marker, or the given number of them."""
    own = zmq.Context() if context is None else context
    dealer = own.socket(zmq.DEALER)
    dealer.rcvtimeo = 5000
    dealer.linger = 0
    try:
        dealer.connect(endpoint)
        dealer.send_multipart(frames or [b"", start.to_bytes(8, "big")])
        found = []
        while messages is None or len(found) < messages:
            found.append(dealer.recv_multipart())
            if found[-1][-2] == b"\xff" * 8:
                break
        return found
    finally:
        dealer.close()
        if context is None:
            own.term()
