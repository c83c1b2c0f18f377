"""Third-party router processes under the contract of router processes: the tests they pass and those they fail.

Both are in Rust. Their circuit breakers and health checks have periods of a second here instead of minutes.
"""

import json
import re
import shutil
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

sys.path.append(str(Path(__file__).parents[1] / "testing"))

from contract_runs import names_of_tests
from depth import each_parameter, few
from process_runs import outcome_of

from pytest_kvmock.testing import ProcessContract
from pytest_kvmock.testing.process.router_process import ProcessEnded, free_port
from pytest_kvmock.wire.sockets.waiting import Deadline

QUICK = [
    *("--cb-timeout-duration-secs", "1", "--cb-success-threshold", "1"),
    *("--health-check-interval-secs", "1", "--health-success-threshold", "1"),
]


def binary(name):
    return shutil.which(name, path=str(Path(sys.executable).parent))


class OfVllmRouter(ProcessContract):
    """vllm-router 0.1.17, `--policy kv_aware`."""

    timeout_s = 15.0  # until it tries a worker again that refused a connection
    first_of_equals = True  # a prompt that no worker holds goes to one worker

    def command(self, engines):
        command = [binary("vllm-router"), "--host", "127.0.0.1", "--port", str(engines.port)]
        command += ["--prometheus-port", str(free_port()), *QUICK]
        command += ["--policy", "kv_aware", "--worker-urls", *engines.urls]
        command += ["--kv-event-block-size", str(engines.block_size), "--kv-event-model", engines.model]
        for each in engines:
            command += ["--kv-event-source", f"{each.url}={','.join(each.events)}"]
            command += ["--kv-event-replay-source", f"{each.url}={','.join(each.replays)}"]
        return command


class OfVllmRouterWithRanks(OfVllmRouter):
    """The same with the number of ranks behind each port, so that it names a rank in each request."""

    def command(self, engines):
        more = ["--intra-node-data-parallel-size", str(len(engines[0].ranks))] if len(engines[0].ranks) > 1 else []
        return [*super().command(engines), *more]


class OfSglangRouter(ProcessContract):
    """sglang-router 0.3.2, `--policy cache_aware`."""

    timeout_s = 6.0
    hears_events = False
    first_of_equals = True  # a prompt that it has not sent yet goes to one worker
    retries = False  # a worker that refuses connections, and was healthy a moment ago, gives a 500
    takes_token_ids = False  # its completions accept only text

    def command(self, engines):
        command = [binary("sglang-router"), "launch", "--host", "127.0.0.1", "--port", str(engines.port)]
        command += ["--prometheus-port", str(free_port()), *QUICK]
        command += ["--policy", "cache_aware", "--worker-urls", *engines.urls]
        return command

    def ready(self, process):
        url = f"http://127.0.0.1:{self.engines.port}"
        # It is ready with its first worker; with all workers, another one may be the first of equals.
        process.until_healthy(f"{url}/readiness")
        deadline = Deadline(self.timeout_s)
        while deadline.left and process.wait(0.02) is None:
            with urlopen(f"{url}/readiness", timeout=self.timeout_s) as answer:
                if json.load(answer)["healthy_workers"] == len(self.engines):
                    return url
        raise ProcessEnded(f"it has not found all of {self.engines.urls}: {process.state_text}")


VLLM_MISSES = {
    "test_it_hears_every_rank": "has served a prompt: a prompt ",  # any worker or rank gets it
    # A prompt that seems to be held by no worker goes to one worker, which differs from process to process.
    "test_a_salt_and_an_adapter_make_other_prompts": "a cache_salt of their own, asked with that: a prompt of which "
    "worker ",
    "test_it_asks_for_a_lost_batch": "was lost, the replay of it had none, and said that it was over: a prompt of "
    "which worker ",
    "test_a_field_of_a_later_release_does_not_stop_it": "had a field that their dialect does not have: a prompt of "
    "which worker ",
}
SGLANG_MISSES = {
    "test_a_client_that_goes_away_is_noticed": "the client of a stream went away, and its request goes on in the "
    "engine: 1 requests are open",
    "test_what_ended_badly_is_no_load": "its client went away, and a request goes on in the engine: 1 requests are "
    "open",
    "test_what_a_client_sends_reaches_the_engine": "/v1/chat/completions: max_tokens reached an engine as None; 1 was "
    "sent; user reached an engine "
    "as None; 'kvmock' was sent; kvmock_field reached an engine as None",
}


def chosen(misses):
    """Return the tests that a router fails, and some of the others; all of them in a deep run."""
    return [*misses, *few([each for each in names_of_tests(ProcessContract) if each not in misses], 5)]


@pytest.mark.skipif(binary("vllm-router") is None, reason="needs vllm-router (dependency group vllm-router)")
@pytest.mark.parametrize("name", chosen(VLLM_MISSES))
def test_vllm_router_passes_or_fails_each_contract_test_as_recorded(name):
    judge(outcome_of(OfVllmRouter, name), VLLM_MISSES.get(name))


RANKS = {
    "worker": set(),
    # It confuses the rank in events with the rank in a header, so it never finds prompts behind later ports. They go to
    # one rank, which differs from process to process, so the prompts of the others fail.
    "rank": {1},
    "node": {2, 3},
}
"""The ranks whose prompts vllm-router does not find, for each value of `http`."""


@pytest.mark.skipif(binary("vllm-router") is None, reason="needs vllm-router (dependency group vllm-router)")
@pytest.mark.parametrize("http", RANKS)
@each_parameter
def test_vllm_router_hears_every_rank_only_if_the_ranks_of_a_worker_share_a_port(http):
    contract = type("OfVllmRouterWithRanks", (OfVllmRouterWithRanks,), {"http": http})
    found = outcome_of(contract, "test_it_hears_every_rank")
    if not RANKS[http]:
        judge(found, None)
    else:
        assert int(re.search(r"failed: OfVllmRouterWithRanks: rank (\d) of worker", found)[1]) in RANKS[http]


@pytest.mark.skipif(binary("sglang-router") is None, reason="needs sglang-router (dependency group sglang-router)")
@pytest.mark.parametrize("name", chosen(SGLANG_MISSES))
def test_sglang_router_passes_or_fails_each_contract_test_as_recorded(name):
    judge(outcome_of(OfSglangRouter, name, "sglang-0.5.23"), SGLANG_MISSES.get(name))


def judge(found, missed):
    """Check that a test passes or skips; or, if the router misses a promise, that the test fails with that message."""
    if missed is None:
        assert found == "" or found.startswith("skipped: ")
    else:
        assert missed in found
