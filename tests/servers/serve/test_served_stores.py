"""Served engines whose workers share a store."""

import pytest
from served import cached, complete

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.engines import Tiers
from pytest_kvmock.servers import KvServer
from pytest_kvmock.servers.serve.text import encode

STORES = {"disk": {"kind": "files", "workers": [0, 1]}}


def harness_of(stores=STORES, **tiers):
    below = Tiers.of({"host": 64, "files": True, "self_describing": True, **tiers})
    return RouterHarness(EngineProfile(16, 64, 3, tiers=below), "vllm", stores=stores, name="stores")


def test_served_workers_load_blocks_that_another_worker_of_their_store_has_written():
    with harness_of() as kv, KvServer(kv) as server:
        assert server.inside.ready_line()["stores"] == STORES
        prompts = [server.text(8) for _ in range(3)]
        for prompt in (*prompts, *(server.text(8) for _ in range(20))):
            complete(server.url(0), prompt)
        assert [kv.overlap(encode(prompt), owner="disk") for prompt in prompts] == [{0: 8, 1: 8}] * 3
        found = [cached(complete(server.url(worker), prompt)) for worker, prompt in enumerate(prompts)]
        assert found == [127, 127, 0]
        kv.worker(0).storage.lose(encode(prompts[2]))
        assert cached(complete(server.url(1), prompts[2])) == 0


def test_the_ready_line_without_stores_has_no_stores_key():
    with harness_of(stores=None) as kv, KvServer(kv) as server:
        assert "stores" not in server.inside.ready_line()


def test_stores_cannot_be_given_with_a_harness_or_with_roles():
    with harness_of() as kv, pytest.raises(ValueError, match=r"the given harness has its own$"):
        KvServer(kv, stores=STORES)
    with pytest.raises(ValueError, match=r"a store below engines of P/D pairs was not recorded; give roles or stores$"):
        KvServer(roles={"prefill": 1, "decode": 1}, stores=STORES)


@pytest.mark.parametrize(
    ("kind", "dialect"), [("files", "vllm-0.33"), ("mooncake", "vllm-0.33"), ("hicache", "sglang-0.5.23")]
)
def test_a_server_makes_the_workers_of_its_stores(kind, dialect):
    with KvServer(dialect=dialect, stores={"s": {"kind": kind, "workers": [0, 1]}}) as server:
        assert server.workers == [0, 1]
        assert complete(server.url(1), server.text(4))["usage"]["prompt_tokens"] == 64


def test_roles_with_different_numbers_of_ranks_are_refused():
    roles = {"prefill": {"dp_size": 2}, "decode": 1}
    with pytest.raises(ValueError, match="workers of all roles must have the same dp_size, got 1 for worker 1 and 2"):
        KvServer(roles=roles)
