"""A sweep on a Dask cluster of two processes gives the same figures as in this process."""

import pytest

distributed = pytest.importorskip("distributed", reason="needs dask[distributed] (extra dask)")

from pytest_kvmock.contrib.lab import sweep  # noqa: E402 - after the check that Dask is installed
from pytest_kvmock.fleets import synthetic_trace  # noqa: E402

TRACES = {"chats": list(synthetic_trace(20, seed=1, input_tokens=(100, 900), output_tokens=(5, 20)))}


def test_a_sweep_on_a_dask_cluster_gives_the_same_result():
    backends, routers = ["lineage", "vllm"], ["round_robin", "most_cached"]
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        spread = sweep(TRACES, backends, routers, client.get_executor(), workers=2)
    assert not spread.errors
    assert spread == sweep(TRACES, backends, routers, workers=2)
