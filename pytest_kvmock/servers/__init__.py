"""Mock engines behind HTTP and ZMQ, and streams of KV events to and from files.

Only `serve` (extra `serve`) uses a wall clock, threads and HTTP sockets. `python -m pytest_kvmock` is the command for
both.
"""

from typing import TYPE_CHECKING

from pytest_kvmock.values.checks import late_names

if TYPE_CHECKING:
    from pytest_kvmock.servers.capture.capture_file import CaptureFile as CaptureFile
    from pytest_kvmock.servers.capture.capturing_journal import CapturingJournal as CapturingJournal
    from pytest_kvmock.servers.capture.check import check_file as check_file
    from pytest_kvmock.servers.capture.lines import CaptureError as CaptureError
    from pytest_kvmock.servers.capture.recorder import record as record
    from pytest_kvmock.servers.serve.kv_server import KvServer as KvServer

_HOME = {
    "CaptureError": "servers.capture.lines",
    "CaptureFile": "servers.capture.capture_file",
    "CapturingJournal": "servers.capture.capturing_journal",
    "KvServer": "servers.serve.kv_server",
    "check_file": "servers.capture.check",
    "record": "servers.capture.recorder",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the table is the one list

# Loaded on first use: a test of a router may need none of these.
__getattr__ = late_names(__name__, _HOME)
