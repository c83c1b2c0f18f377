"""Mock engines behind HTTP and ZMQ (extra `serve`): `KvServer`, and what it noted of the requests that it served.

This room alone has a wall clock, threads and sockets of HTTP. Its values (`api`, `face`, `answers`, `text`, `request_log`) have none of
them, and are tested without.
"""

from typing import TYPE_CHECKING, Any

from pytest_kvmock.serve.request_log import Routing, ServedRequest
from pytest_kvmock.serve.text import write_tokenizer

if TYPE_CHECKING:
    from pytest_kvmock.serve.kv_server import KvServer

__all__ = ["KvServer", "Routing", "ServedRequest", "write_tokenizer"]


def __getattr__(name: str) -> Any:
    """Import the server when it is asked for: it needs the extra."""
    if name == "KvServer":
        from pytest_kvmock.serve.kv_server import KvServer

        return KvServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
