"""Request traces: a reader of the Mooncake format, and a generator of the same form."""

from pytest_kvmock.traces.mooncake import MOONCAKE_BLOCK_SIZE, TraceError, TraceRequest, read_mooncake
from pytest_kvmock.traces.synthetic import synthetic_trace

__all__ = ["MOONCAKE_BLOCK_SIZE", "TraceError", "TraceRequest", "read_mooncake", "synthetic_trace"]
