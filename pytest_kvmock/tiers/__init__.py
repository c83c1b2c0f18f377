"""What is below the device: links whose bandwidth is shared, the host memory that evicted blocks travel to, and vLLM's."""

from pytest_kvmock.tiers.bandwidth import Link
from pytest_kvmock.tiers.config import Tiers
from pytest_kvmock.tiers.offload import HostOffload

__all__ = ["HostOffload", "Link", "Tiers"]
