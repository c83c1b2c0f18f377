"""The fixtures of dynamo-llm's block managers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from pytest_kvmock.plugin.matrix import CASE_FIXTURE

if TYPE_CHECKING:
    from pytest_kvmock.contrib.block_manager.fabric import Fabric
    from pytest_kvmock.contrib.block_manager.kv_block_manager import KvBlockManager
    from pytest_kvmock.contrib.block_manager.managers import BlockManagers
    from pytest_kvmock.engines.backends import EngineProfile
    from pytest_kvmock.harness import RouterHarness
    from pytest_kvmock.plugin.case import Case


@pytest.fixture
def _kvmock_block_managers(request: pytest.FixtureRequest, kv_base_profile: EngineProfile) -> Iterator[BlockManagers]:
    """Make the block managers of the test in one fabric; their events are checked if the test has a harness."""
    from pytest_kvmock.contrib.block_manager.managers import BlockManagers
    from pytest_kvmock.plugin.case import effective_profile

    def harness() -> RouterHarness:
        case: Case = request.getfixturevalue(CASE_FIXTURE)
        return case.harness

    profile = effective_profile(request.node, kv_base_profile)
    managers = BlockManagers(profile, harness, is_judged=CASE_FIXTURE in request.fixturenames)
    yield managers
    managers.close()


@pytest.fixture
def kv_block_manager(_kvmock_block_managers: BlockManagers) -> KvBlockManager:
    """dynamo-llm's `KvBlockManager` with pools on device and host; it is in `kv_fabric`, and closed when the test
    ends.
    """
    return _kvmock_block_managers.make()


@pytest.fixture
def make_kv_block_manager(_kvmock_block_managers: BlockManagers) -> Callable[..., KvBlockManager]:
    """Make more block managers, `make_kv_block_manager(device_blocks=8, host_blocks=None, worker_id=7, sink=True)`, all
    in `kv_fabric`.
    """
    from pytest_kvmock.plugin.misspelt import checked

    return checked("make_kv_block_manager", _kvmock_block_managers.make)


@pytest.fixture
def kv_fabric(_kvmock_block_managers: BlockManagers) -> Fabric:
    """The `Fabric` that the test's block managers are in: `exchange_blocksets`, `cut_link`, `transfers`."""
    return _kvmock_block_managers.fabric
