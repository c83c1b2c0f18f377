"""Fixtures of the block managers' tests."""

import os
from pathlib import Path

import pytest
from cache_helpers import POLICIES, new_manager

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=sorted(POLICIES))
def backend(request):
    return request.param


@pytest.fixture
def make_manager(backend):
    def make(num_blocks=10, block_size=16, **options):
        return new_manager(backend, num_blocks, block_size, **options)

    return make


@pytest.fixture(scope="session")
def traces():
    """The folder of request traces, which is not in the repository."""
    folder = Path(os.environ.get("KVMOCK_TRACES") or ROOT.parent / "shared" / "traces")
    if not folder.is_dir():
        pytest.skip("no request traces: set KVMOCK_TRACES to their folder")
    return folder
