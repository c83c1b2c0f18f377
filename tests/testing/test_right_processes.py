"""The right router of the examples passes the contract of processes over every dialect, and so do other designs."""

import pytest
from contract_runs import names_of_tests
from depth import each_parameter, takes_long
from process_runs import RIGHT_DESIGNS, OfPlainRouter, of_bug, outcome_of, right_for

from pytest_kvmock.testing import ProcessContract
from pytest_kvmock.wire.codec.table import spoken_dialects

OF_AN_ENGINE = ("vllm-0.28", "sglang-0.5.23", "trtllm-1.3-zmq")
OF_THE_DIALECT = (
    "test_a_reset_is_said_with_the_next_step",
    "test_what_leaves_the_host_does_not_leave_the_device",
    "test_a_salt_and_an_adapter_make_other_prompts",
)


def wrong(dialect, name):
    found = outcome_of(right_for(dialect), name, dialect)
    return "" if found.startswith("skipped: ") else found


@pytest.mark.parametrize("dialect", OF_AN_ENGINE)
@pytest.mark.parametrize("name", OF_THE_DIALECT)
def test_a_right_process_passes_the_tests_that_depend_on_the_dialect(name, dialect):
    assert wrong(dialect, name) == ""


@takes_long
@pytest.mark.parametrize("dialect", sorted(spoken_dialects()))
@pytest.mark.parametrize("name", names_of_tests(ProcessContract))
def test_a_right_process_passes_every_test_over_every_dialect(name, dialect):
    assert wrong(dialect, name) == ""


FORMS = ("rank", "node")


def behind(http):
    """Return the contract of the plain router over engines whose ranks share HTTP ports in this form."""
    return type("Of_plain", (OfPlainRouter,), {"http": http})


@pytest.mark.parametrize("http", FORMS)
@each_parameter
def test_the_plain_router_receives_events_of_every_rank_in_every_http_form(http):
    assert outcome_of(behind(http), "test_it_hears_every_rank") == ""


@takes_long
@pytest.mark.parametrize("http", FORMS)
@pytest.mark.parametrize("name", names_of_tests(ProcessContract))
def test_the_plain_router_passes_every_test_in_every_http_form(name, http):
    found = outcome_of(behind(http), name)
    assert found == "" or found.startswith("skipped: ")


def test_rank_numbers_of_events_are_right_if_one_port_has_all_ranks():
    assert outcome_of(of_bug("names_ranks_as_events_do"), "test_it_hears_every_rank") == ""


def design(name, **traits):
    return of_bug(name, **RIGHT_DESIGNS[name] | {"timeout_s": 10.0} | traits)


@pytest.mark.parametrize(
    ("name", "test"),
    [
        ("reads_chats", "test_a_prompt_goes_where_it_is"),
        ("reads_chats", "test_an_answer_is_the_engines"),
        ("rests_who_failed", "test_what_ended_badly_is_no_load"),
        ("weighs_what_is_computed", "test_open_requests_count"),
        ("weighs_prompts_and_what_is_computed", "test_open_requests_count"),
        ("reads_no_token_ids", "test_a_prompt_goes_where_it_is"),
        ("forgets_reloaded_adapters", "test_an_adapter_of_another_path_promises_nothing_of_before"),
        ("learns_the_block", "test_it_finds_out_how_large_a_block_is"),
        ("reads_look_ahead", "test_it_reads_a_draft_model"),
        ("weighs_hosts", "test_a_prompt_goes_to_the_host_that_has_it"),
    ],
)
def test_another_right_design_passes_tests_that_once_failed_it(name, test):
    assert outcome_of(design(name), test) == ""


@takes_long
@pytest.mark.parametrize("test", names_of_tests(ProcessContract))
@pytest.mark.parametrize("name", RIGHT_DESIGNS)
def test_another_right_design_passes_every_test(name, test):
    found = outcome_of(design(name), test)
    assert found == "" or found.startswith("skipped: ")


def test_a_design_that_reads_look_ahead_reads_sglangs_pairs_of_a_draft_model():
    assert outcome_of(design("reads_look_ahead"), "test_it_reads_a_draft_model", "sglang-0.5.23") == ""


@takes_long
def test_a_process_that_does_not_read_chats_is_found():
    blind = of_bug("reads_chats", sends="chat", tells_blocks=lambda self, keys=None: False)
    blind.command = OfPlainRouter.command
    assert "it does not find by events what engines serve" in outcome_of(blind, "test_a_prompt_goes_where_it_is")


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        ({"cools_down_s": -1}, "cools_down_s must be seconds from 0 to 60, got -1"),
        ({"tiers": {"host": 64}}, "tiers: host must have 128 blocks at least here, got 64"),
        ({"http": "ranks"}, "http: got 'ranks'; did you mean 'rank'? allowed: worker, rank, node"),
        ({"sends": "chats"}, "sends: got 'chats'; did you mean 'chat'? allowed: completion, chat"),
    ],
)
def test_a_wrong_declaration_of_a_process_is_reported_at_collection(declared, text):
    mine = type("Mine", (OfPlainRouter,), declared)
    assert mine.wrong_declaration() == text
