"""Third-party router processes in front of P/D pairs, under the contract of router processes: the tests they pass and
those they fail.
"""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "testing"))

from depth import few
from process_runs import outcome_of
from test_router_processes import QUICK, binary

from pytest_kvmock.testing import ProcessContract
from pytest_kvmock.testing.process.router_process import ProcessEnded, free_port

AT_ONCE = ("--worker-startup-check-interval", "1")
STARTS = 6  # how many times its timeout the start may take


class OfOthers(ProcessContract):
    """A router of pairs whose start may take longer."""

    threshold = 0
    timeout_s = 5.0
    retries = False  # a prefill engine that refuses connections is a 5xx
    health = "/health"

    def started(self, name, *options):
        command = [binary(name), *(["launch"] if name == "sglang-router" else []), "--host", "127.0.0.1"]
        return [*command, "--port", str(self.engines.port), "--prometheus-port", str(free_port()), *options]

    def ready(self, process):
        url = f"http://127.0.0.1:{self.engines.port}"
        for _ in range(STARTS):
            try:
                process.until_healthy(f"{url}{self.health}")
            except ProcessEnded:
                if not process.is_alive:
                    raise
            else:
                return url
        raise ProcessEnded(process.state_text)


class OfVllmPairs(OfOthers):
    """vllm-router 0.1.17, `--vllm-pd-disaggregation` with NixlConnector; it picks prefill engines by their events."""

    hand_over = "vllm"
    first_of_equals = True  # a prompt that no worker holds goes to one worker

    def command(self, engines):
        connector = "nixl" if self.hand_over == "vllm" else "mooncake"
        options = ["--vllm-pd-disaggregation", "--kv-connector", connector, *AT_ONCE, *QUICK, *self.policies(engines)]
        for each in engines.of("prefill"):
            options += ["--prefill", each.url, str(each.bootstrap_port or "none")]
        for each in engines.of("decode"):
            options += ["--decode", each.url]
        return self.started("vllm-router", *options)

    def policies(self, engines):
        options = ["--prefill-policy", "kv_aware", "--decode-policy", "round_robin"]
        options += ["--kv-event-block-size", str(engines.block_size), "--kv-event-model", engines.model]
        for each in engines.of("prefill"):
            options += ["--pd-kv-events", f"{each.url}={','.join(each.events)}"]
        return options


class OfMooncakePairs(OfVllmPairs):
    """The same with MooncakeConnector, round robin."""

    hand_over = "vllm-mooncake"
    hears_events = goes_by_prefix = counts_open = first_of_equals = False

    def policies(self, engines):
        return ["--policy", "round_robin"]


class OfSglangPairs(OfOthers):
    """sglang-router 0.3.2, `--pd-disaggregation`, round robin."""

    hand_over = "sglang"
    dialects = ("sglang-0.5.23",)
    hears_events = goes_by_prefix = counts_open = False
    takes_token_ids = False  # its completions accept only text
    health = "/readiness"

    def command(self, engines):
        options = ["--pd-disaggregation", "--policy", "round_robin", "--disable-retries", *AT_ONCE, *QUICK]
        for each in engines.of("prefill"):
            options += ["--prefill", each.url, str(each.bootstrap_port)]
        for each in engines.of("decode"):
            options += ["--decode", each.url]
        return self.started("sglang-router", *options)


OF_PAIRS = (
    "test_a_prompt_has_two_legs_that_meet",
    "test_bodies_of_both_legs_are_made_of_the_clients",
    "test_no_prefill_engine_is_not_passed_over_in_silence",
    "test_clients_that_leave_hold_nothing",
    "test_the_load_of_prefill_ends_with_its_leg",
    "test_requests_at_once_are_not_mixed_up",
    "test_legs_meet_at_one_rank",
    "test_several_children_leave_nothing",
    "test_a_leg_that_fails_ends_the_other_one",
)
OF_EVENTS = (
    "test_it_hears_every_worker",
    "test_a_prompt_goes_where_it_is",
    "test_what_is_evicted_is_forgotten",
    "test_a_cleared_cache_is_empty",
    "test_an_answer_is_the_engines",
    "test_a_stream_passes_token_by_token",
)
BOTH_PASS_N_ON = "test_several_children_leave_nothing"  # n > 1 of a client's body reaches prefill engines unchanged

CASES = {
    OfVllmPairs: (
        (*OF_PAIRS, *OF_EVENTS),
        {BOTH_PASS_N_ON: "a completion with n = 2, and blocks are held that no leg asks for: prefill engine "},
    ),
    OfMooncakePairs: (
        OF_PAIRS,
        {BOTH_PASS_N_ON: "a completion with n = 2, and blocks are held that no leg asks for: prefill engine "},
    ),
    OfSglangPairs: (
        OF_PAIRS,
        {
            BOTH_PASS_N_ON: "a completion with n = 2 was answered with ",
            # It waits for the decode leg, and that waits for its prefill leg.
            "test_no_prefill_engine_is_not_passed_over_in_silence": "no prefill engine takes connections: the client "
            "got no answer",
            "test_a_leg_that_fails_ends_the_other_one": "prefill engines answer 500: the client got no answer",
        },
    ),
}
NEEDS = {OfVllmPairs: "vllm-router", OfMooncakePairs: "vllm-router", OfSglangPairs: "sglang-router"}


def cases():
    """Yield the tests that each router fails, and the first of the others; all of them in a deep run."""
    for contract, (names, misses) in CASES.items():
        package = NEEDS[contract]
        needs = pytest.mark.skipif(binary(package) is None, reason=f"needs {package} (dependency group {package})")
        for name in [*misses, *few([each for each in names if each not in misses])]:
            marks = [needs]
            yield pytest.param(contract, name, misses.get(name), marks=marks, id=f"{contract.__name__}-{name}")


@pytest.mark.parametrize(("contract", "name", "missed"), [*cases()])
def test_a_third_party_pair_router_passes_or_fails_each_contract_test_as_recorded(contract, name, missed):
    found = outcome_of(contract, name, contract.dialects[0])
    if missed is None:
        assert found == "" or found.startswith("skipped: ")
    else:
        assert missed in found
