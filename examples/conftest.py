"""Registers the backend of `custom_backend/`.

pytest reads this conftest before it collects, whether it is started as `pytest`, `pytest examples` or
`pytest examples/custom_backend`. Backends are read before that, so the hook stands here and not beside the backend; in a
project of your own, the conftest of the root or of a directory in `testpaths` is the place.
"""

import pytest
from custom_backend.s3fifo import S3FIFO


@pytest.hookimpl(optionalhook=True)  # so that `pytest -p no:kvmock` still runs
def pytest_kvmock_backends():
    return {"s3fifo": S3FIFO}
