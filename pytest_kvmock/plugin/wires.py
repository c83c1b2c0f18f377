"""The values of the fixtures `kv_wire`, `kv_publisher`, `make_kv_publisher` and `kv_server`: the events of workers on a
wire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pytest_kvmock.harness import RouterHarness
from pytest_kvmock.plugin.case import Case, backend_name, fail_in_one_line
from pytest_kvmock.plugin.options import DIALECTS
from pytest_kvmock.values.checks import check_integer
from pytest_kvmock.values.dialect import Dialect
from pytest_kvmock.wire.codec.batcher import KvWire
from pytest_kvmock.wire.codec.digests import StreamDigests
from pytest_kvmock.wire.codec.table import find_dialect
from pytest_kvmock.wire.sockets.kv_publisher import KvPublisher

if TYPE_CHECKING:
    from pytest_kvmock.servers.serve.kv_server import KvServer


def make_wire(case: Case, harness: RouterHarness, kv_dialect: str) -> KvWire:
    """Make the `KvWire` that keeps the bytes of worker 0, all ranks."""
    dialect = find_dialect(backend_name(case.item, kv_dialect, DIALECTS))
    try:
        _check_says(dialect, harness)
        wire = KvWire(dialect, ranks=harness.profile.dp_size, digests=_digests(harness, 0, dialect))
    except (ImportError, ValueError) as error:
        fail_in_one_line(case.item, f"kv_wire: {error}")
    harness.add_sink(wire, worker_id=0)
    return wire


@contextmanager
def publishers(case: Case, harness: RouterHarness, kv_dialect: str) -> Iterator[Callable[..., KvPublisher]]:
    """Yield a function that makes publishers of workers; they are closed when the context ends.

    A requested fault that was not injected fails a test that passed so far.
    """
    made: list[KvPublisher] = []
    of_worker: dict[int, KvPublisher] = {}
    with ExitStack() as stack:

        def make(worker: int = 0, **options: Any) -> KvPublisher:
            given = options.pop("dialect", None)
            try:
                check_integer("make_kv_publisher: worker", worker, 0)
                dialect = find_dialect(backend_name(case.item, kv_dialect, DIALECTS) if given is None else given)
                _check_says(dialect, harness)
                options.setdefault("ranks", harness.profile.dp_size)
                if "digests" not in options:
                    options["digests"] = _digests(harness, worker, dialect)
                publisher = stack.enter_context(KvPublisher(dialect, **options))
            except (ImportError, ValueError) as error:
                fail_in_one_line(case.item, f"kv_publisher: {error}")
            former = of_worker.get(worker)
            if former is not None and former.closed:  # the engine's process died, and starts again
                harness.publisher.remove_sink(former)
                publisher.take_over(former)
            of_worker[worker] = publisher
            harness.add_sink(publisher, worker_id=worker)
            stack.callback(harness.publisher.remove_sink, publisher)  # later events of teardowns have no wire
            made.append(publisher)
            if case.capture is not None:
                case.capture.journal.publishes(worker, publisher)
            return publisher

        yield make
    if case.capture is not None:
        case.capture.journal.injected_on_wire()
    unused = [fault for publisher in made for fault in publisher.faults.unused]
    if unused and case.passed:
        pytest.fail(f"kvmock: faults of the wire were asked for and not injected: {', '.join(unused)}", pytrace=False)


@contextmanager
def servers(
    case: Case, harness: RouterHarness, kv_dialect: str, make_publisher: Callable[..., KvPublisher]
) -> Iterator[Callable[..., KvServer]]:
    """Yield a function that makes the server of the harness; it is closed when the context ends.

    A test that passed so far fails if an engine behind the server broke, or if a requested answer or cut was not used.
    """
    made: list[KvServer] = []
    with ExitStack() as stack:

        def make(**options: Any) -> KvServer:
            options.setdefault("dialect", find_dialect(backend_name(case.item, kv_dialect, DIALECTS)))
            try:
                from pytest_kvmock.servers.serve.kv_server import KvServer  # imported on first use

                class ServerOfTest(KvServer):
                    """A server that uses the publishers of the test."""

                    def _publisher(self, worker: int, **options: Any) -> KvPublisher:
                        return make_publisher(worker, **options)

                made.append(stack.enter_context(ServerOfTest(harness, **options)))
            except (ImportError, ValueError, TypeError, OSError) as error:
                fail_in_one_line(case.item, f"kv_server: {error}")
            return made[-1]

        yield make
    broken = [text for server in made for text in server.inside.broken]
    if broken and case.passed:
        pytest.fail(f"kvmock: kv_server: {'; '.join(broken)}", pytrace=False)
    left = [text for server in made for text in server.inside.answers_left]
    if left and case.passed:
        pytest.fail(f"kvmock: kv_server: planned answers that no request got: {'; '.join(left)}", pytrace=False)


def _check_says(dialect: Dialect, harness: RouterHarness) -> None:
    """Check that a dialect can express the workers' events.

    Raises:
        ValueError: it cannot.
    """
    tiers = harness.profile.tiers
    if tiers is not None:
        dialect.check_host(self_describing=tiers.self_describing)
    if any(worker.traits.publishes_groups for worker in harness.workers.values()):
        from pytest_kvmock.wire.codec.table import check_groups  # imported on first use

        check_groups(dialect)


def _digests(harness: RouterHarness, worker_id: int, dialect: Dialect) -> dict[int, StreamDigests]:
    """Return the digests of each rank of a worker, if the dialect writes them.

    Raises:
        EncodeError: the backend has none.
    """
    if dialect.hashes != "bytes":
        return {}
    return {
        rank: StreamDigests.of_manager(harness.worker(worker_id, dp_rank=rank).manager)
        for rank in range(harness.profile.dp_size)
    }
