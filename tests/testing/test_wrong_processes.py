"""Each wrong router process fails the contract of processes in the test of its bug, with one line that describes it."""

import pytest
from contract_runs import names_of_tests
from depth import each_parameter, few, takes_long, worth_its_time
from process_runs import DECLARED, of_bug, outcome_of, with_ids
from test_process_stores import LOWERED, OUTLIVES, OWN
from wrong_router import BUGS

from pytest_kvmock.testing import ProcessContract

OF_EVENTS = {
    "hears_one_worker": ("it_hears_every_worker", "has served a prompt: worker "),
    "subscribes_to_one_worker": (
        "it_hears_every_worker",
        "it does not subscribe to the events of its engines: rank 0 at ",
    ),
    "joins_without_a_replay": (
        "it_asks_for_what_was_before_it_came",
        "before the process came, and can replay it: worker ",
    ),
    "ignores_gaps": (
        "batches_out_of_order_are_put_in_order",
        "came in reverse order: worker 1 rank 0: the router knows ",
    ),
    "drops_what_is_late": ("it_asks_for_a_lost_batch", "was lost on its way, and it can replay it: worker 1 "),
    "takes_a_double_for_a_restart": (
        "a_batch_that_comes_twice_changes_nothing",
        "of what was stored before it: worker 1 ",
    ),
    "applies_doubles": (
        "a_batch_that_comes_twice_changes_nothing",
        "and then the blocks of it were evicted: worker 1 ",
    ),
    "dies_of_a_corrupt_batch": ("a_corrupt_batch_does_not_stop_it", "was corrupt, and it can replay it as it was"),
    "skips_a_corrupt_batch": (
        "a_corrupt_batch_does_not_stop_it",
        "was corrupt, and it can replay it as it was: worker 1 ",
    ),
    "refuses_unknown_fields": (
        "a_field_of_a_later_release_does_not_stop_it",
        "a field that their dialect does not have",
    ),
    "keeps_what_a_restart_has_lost": (
        "a_restart_empties_a_worker",
        "worker 1 has restarted, of what it held before: worker 1",
    ),
    "drops_what_comes_after_a_restart": (
        "a_restart_empties_a_worker",
        "has restarted, of what it has served since: worker 1",
    ),
    "ignores_cleared": (
        "a_cleared_cache_is_empty",
        "the cache of worker 1 was cleared, of what it held before: worker 1",
    ),
    "hashes_by_the_page": (
        "it_finds_out_how_large_a_block_is",
        "all look-ups missed; the engine's page is 16 tokens, its events have 64",
    ),
    "clears_last": (
        "a_reset_is_said_with_the_next_step",
        "worker 1 was reset, and its next step has said so, of what it has served since: worker 1",
    ),
    "ignores_removed": (
        "what_is_evicted_is_forgotten",
        "the blocks of worker 1 were evicted, of what it held before: worker 1",
    ),
    "counts_no_copies": (
        "a_block_is_held_until_its_last_copy_goes",
        "has evicted one copy: worker 0 rank 0: the router knows 3",
    ),
    "keeps_what_left_the_host": (
        "what_leaves_the_host_does_not_leave_the_device",
        "and before that from its host: worker 0 rank",
    ),
    "hears_removed_of_the_host": (
        "what_leaves_the_host_does_not_leave_the_device",
        "which its host had and evicted: worker 0",
    ),
    "takes_every_group_for_attention": ("it_reads_a_hybrid_model", "worker 0 serves gpt-oss"),
    "removes_of_any_group": (
        "it_reads_a_hybrid_model",
        "worker 0 serves gpt-oss, and has evicted some of its windows: worker 0",
    ),
    "dies_of_a_stored_without_hashes": ("it_reads_a_hybrid_model", "worker 0 serves gpt-oss"),
    "hears_one_rank": (
        "it_hears_every_rank",
        "rank 1 of worker 0 has served a prompt: worker 0 rank 1: the router knows 0",
    ),
    "mixes_ranks": (
        "it_hears_every_rank",
        "has served a prompt: worker 0 rank 0: the router knows 6 blocks, 0 are held",
    ),
    "shares_blocks_between_salts": (
        "a_salt_and_an_adapter_make_other_prompts",
        "with a cache_salt of their own: worker ",
    ),
    "shares_blocks_between_adapters": (
        "a_salt_and_an_adapter_make_other_prompts",
        "with a lora_name of their own: worker ",
    ),
}
"""For each bug in reading events: its test, and the text of the failure."""

FOUND = OF_EVENTS | {
    "gives_up_where_a_worker_is_down": (
        "it_lives_without_a_worker",
        "is down, and refuses connections: the client got 502",
    ),
    "waits_for_a_worker_that_is_down": (
        "it_lives_without_a_worker",
        "is down, and refuses connections: the client got no answer",
    ),
    "never_uses_a_worker_again": (
        "it_uses_a_worker_that_is_back",
        "worker 1 refused connections, and takes them again: of ",
    ),
    "does_not_use_who_is_new": (
        "it_uses_a_worker_at_its_new_address",
        "worker 2 has come in its place: it does not subscribe",
    ),
    "does_not_hear_who_is_new": (
        "it_uses_a_worker_at_its_new_address",
        "worker 2 has come in its place: it does not subscribe",
    ),
    "buffers_streams": (
        "a_stream_passes_token_by_token",
        "of which 2 are made and the others held back: 0 chunks came",
    ),
    "changes_what_was_generated": ("an_answer_is_the_engines", "a completion: it answers "),
    "answers_200_for_a_refusal": ("a_refusal_of_a_request_passes_through", "answered 400, and the client got 200 "),
    "answers_200_for_a_limit": ("a_limit_of_requests_passes_through", "answered 429, and the client got 200 "),
    "answers_200_for_an_error": ("an_error_of_an_engine_passes_through", "answered 500, and the client got 200 "),
    "answers_502_for_a_refusal": ("a_refusal_of_a_request_passes_through", "answered 400, and the client got 502 "),
    "drops_the_headers_of_an_answer": (
        "a_limit_of_requests_passes_through",
        "with Retry-After: 7, and the client got None",
    ),
    "says_errors_in_its_own_words": (
        "an_error_of_an_engine_passes_through",
        'engines answer 500, and the client got b\'{"error": ',
    ),
    "ends_a_stream_that_was_cut": ("a_stream_that_is_cut_is_not_finished", "got the end of an answer, and no error"),
    "finishes_a_stream_that_was_cut": ("a_stream_that_is_cut_is_not_finished", "was told that it is finished ([DONE])"),
    "begins_a_stream_again": (
        "a_stream_that_is_cut_is_not_finished",
        "3 engines were asked and 10 chunks came; expected 1 and 2",
    ),
    "answers_200_where_nobody_answered": (
        "an_answer_that_never_came_is_no_success",
        "no engine answered, and the client got 200",
    ),
    "goes_on_without_its_client": (
        "a_client_that_goes_away_is_noticed",
        "went away, and its request goes on in the engine: 1 ",
    ),
    "asks_another_one_where_its_client_went": (
        "a_client_that_goes_away_is_noticed",
        "went away, and it was sent on again",
    ),
    "counts_those_whose_client_went": (
        "a_client_that_goes_away_is_noticed",
        "at the end it counts 2 requests as open",
    ),
    "counts_those_that_were_refused": (
        "a_limit_of_requests_passes_through",
        "at the end it counts 2 requests as open",
    ),
    "counts_those_that_were_cut": (
        "a_stream_that_is_cut_is_not_finished",
        "at the end it counts 1 requests as open",
    ),
    "counts_those_that_ended_well": (
        "what_ended_well_is_no_load",
        "30 requests of worker 0 ended well, and nothing is open: of 16 prompts that no worker holds it got none",
    ),
    "frees_no_blocks": (
        "what_ended_well_is_no_load",
        "30 requests of worker 0 ended well, and nothing is open: of 16 prompts that no worker holds it got none",
    ),
    "frees_no_prefill": (
        "what_ended_well_is_no_load",
        "30 requests of worker 0 ended well, and nothing is open: of 16 prompts that no worker holds it got none",
    ),
    "weighs_what_it_never_frees": (
        "what_ended_well_is_no_load",
        (
            "prompts went to worker 1, where worker 0 alone held their first 8 blocks: finished requests still count "
            "as load"
        ),
    ),
    "drops_the_salt": (
        "what_a_client_sends_reaches_the_engine",
        "cache_salt reached an engine as None; 'tenant-a' was sent",
    ),
    "drops_the_adapter": (
        "what_a_client_sends_reaches_the_engine",
        "model reached an engine as 'mock-model'; 'tenant-lora' was",
    ),
    "drops_images": ("what_a_client_sends_reaches_the_engine", "/v1/chat/completions: messages reached an engine as "),
    "drops_what_it_does_not_know": (
        "what_a_client_sends_reaches_the_engine",
        "user reached an engine as None; 'kvmock' was sent",
    ),
    "drops_headers": (
        "what_a_client_sends_reaches_the_engine",
        "header X-Request-Id reached an engine as None; 'kvmock-1' was",
    ),
    "takes_the_first_of_equals": ("an_idle_fleet_is_shared", "worker 1 got none of 16 (worker 0: 16, worker 1: 0)"),
    "reads_no_token_ids": ("a_prompt_goes_where_it_is", "asked for as token ids (takes_token_ids = False says"),
    "goes_in_turn": ("a_prompt_goes_where_it_is", "held 8 blocks was sent to worker "),
    "goes_where_least_is": ("a_prompt_goes_where_it_is", "held 8 blocks was sent to worker "),
    "counts_no_open_requests": ("open_requests_count", "got 3; expected more than half"),
    "an_unknown_kind_ends_the_batch": (
        "a_field_of_a_later_release_does_not_stop_it",
        "began with an event of a kind that its dialect does not have",
    ),
    "an_unknown_medium_ends_the_batch": (
        "a_field_of_a_later_release_does_not_stop_it",
        "blocks of worker 1 left a medium that its dialect does not have: worker 1",
    ),
    "takes_any_medium_for_the_device": (
        "a_field_of_a_later_release_does_not_stop_it",
        "blocks of worker 1 left a medium that its dialect does not have: worker 1",
    ),
    "asks_once_for_what_is_missing": (
        "it_asks_for_a_lost_batch",
        "the replay of it had none, and said that it was over: worker 1",
    ),
    "waits_for_the_end_of_a_replay": (
        "it_asks_for_a_lost_batch",
        "the replay of it had none, and did not say that it was over: worker 1",
    ),
    "applies_what_a_replay_had": (
        "it_asks_for_a_lost_batch",
        "and then the blocks of that were evicted: worker 1",
    ),
    "reads_numbers_low_byte_first": ("it_asks_for_a_lost_batch", "numbers jump by 2^56: byte order?"),
    "knows_an_id_at_its_first_address": (
        "it_uses_a_worker_at_its_new_address",
        "under its id at another address: it does not subscribe there",
    ),
    "keeps_what_an_id_held": (
        "it_uses_a_worker_at_its_new_address",
        "of what the one that is gone held; expected none",
    ),
    "gives_hosts_no_weight": ("a_prompt_goes_to_the_host_that_has_it", "of 8 such prompts went there; expected 7"),
    "takes_every_name_for_plain": (
        "it_reads_a_draft_model",
        "has served a prompt: worker 0 rank 0: the router knows 8 blocks, 7 are held",
    ),
    "sends_no_rank": ("it_hears_every_rank", "holds was served by rank "),
    "sends_rank_0": ("it_hears_every_rank", "holds was served by rank 0, "),
    "keeps_what_a_reloaded_adapter_had": (
        "an_adapter_of_another_path_promises_nothing_of_before",
        "of blocks of worker 0 from before: it says 8 blocks of what that held; expected 0 to 0",
    ),
    "names_ranks_as_events_do": (
        "it_hears_every_rank",
        "names a rank by its place behind the port, from 0 on; is it the number that events have?",
    ),
    "is_ready_always": ("it_is_ready_while_an_engine_is", "no engine is up, and /health is answered with 200"),
    "is_ready_once_and_for_all": (
        "it_is_ready_while_an_engine_is",
        "all engines are down, and /health is answered with 200 2 s later",
    ),
    "takes_bodies_of_a_mebibyte": ("any_body_reaches_an_engine", "a body of 1,572,864 bytes was answered with "),
    "reads_bytes_as_characters": ("any_body_reaches_an_engine", "a prompt that is not ASCII was served: worker "),
    "refuses_what_is_not_ascii": ("any_body_reaches_an_engine", "a text that is not ASCII was answered with 400 "),
    "takes_posts_alone": ("any_body_reaches_an_engine", "GET /v1/models is answered with 405"),
    "does_not_know_queries": ("any_body_reaches_an_engine", "a query was answered with 404 "),
    "has_a_limit_of_a_second": ("many_slow_requests_are_served", "is there a limit of time, or of connections?"),
    "has_a_hundred_connections": ("many_slow_requests_are_served", "and engines do not have them all: "),
    "is_not_ready_under_load": (
        "many_slow_requests_are_served",
        "while 120 requests are open /health is answered with 503",
    ),
    "goes_on_sending_to_who_fails": (
        "an_engine_that_fails_for_good_loses_its_prompts",
        "after 3 requests (gives_up_after) one for what it holds was answered with 500 ",
    ),
    "ignores_sigterm": ("it_ends_cleanly_while_requests_are_open", "and runs still 2 s later"),
    "ends_with_an_error": ("it_ends_cleanly_while_requests_are_open", "exit code 1; expected 0, or that of SIGTERM"),
    "never_ends_while_requests_are_open": ("it_ends_cleanly_while_requests_are_open", "and runs still 2 s later"),
}
"""For each bug: its test, and the text of the failure."""

BY_ID = ("knows_an_id_at_its_first_address", "keeps_what_an_id_held")
"""Routers that get the ids of workers."""

LEAKS = ("counts_those_whose_client_went", "counts_those_that_were_refused", "counts_those_that_were_cut")

TOO_MUCH = ("counts_no_copies", "hears_removed_of_the_host", "removes_of_any_group")
"""Routers that forget held blocks: they know them before they have applied later events."""


def test_every_bug_has_a_test_and_every_test_has_a_bug():
    assert FOUND.keys() == BUGS.keys()
    assert {f"test_{name}" for name, _ in FOUND.values()} | {
        "test_what_ended_badly_is_no_load",
        LOWERED,
        OUTLIVES,
        OWN,
    } == {*names_of_tests(ProcessContract)}


@worth_its_time
@each_parameter
@pytest.mark.parametrize("bug", few(FOUND, 5))
def test_a_wrong_process_fails_the_test_of_its_bug(bug):
    name, text = FOUND[bug]
    wrong = of_bug(bug, **DECLARED.get(bug, {}))
    assert text in outcome_of(with_ids(wrong) if bug in BY_ID else wrong, f"test_{name}")


def test_a_salt_can_be_sent_in_a_header():
    test = "test_a_salt_and_an_adapter_make_other_prompts"
    assert outcome_of(of_bug("reads_salts_of_headers", salt_header="X-Cache-Salt"), test) == ""
    ignored = outcome_of(of_bug("applies_late", salt_header="X-Cache-Salt"), test)
    assert "cache_salt" in ignored


@pytest.mark.parametrize("bug", LEAKS)
def test_leaked_load_shows_in_the_distribution_of_requests(bug):
    silent = of_bug(bug, tells_open=False)
    text = "ended badly, and nothing is open: of 16 prompts that no worker holds it got none"
    assert text in outcome_of(silent, "test_what_ended_badly_is_no_load")


@takes_long
@pytest.mark.parametrize("bug", TOO_MUCH)
def test_blocks_that_must_not_change_are_checked_after_events_were_applied(bug):
    name, text = FOUND[bug]
    assert text in outcome_of(of_bug(f"{bug}+applies_late"), f"test_{name}")


@pytest.mark.parametrize("name", dict.fromkeys(name for bug, (name, _) in OF_EVENTS.items() if bug not in DECLARED))
def test_a_process_that_applies_events_late_is_not_wrong(name):
    assert outcome_of(of_bug("applies_late"), f"test_{name}") == ""


def test_a_process_that_counts_an_answer_a_moment_late_is_not_wrong():
    assert outcome_of(of_bug("counts_two_late"), "test_what_ended_well_is_no_load") == ""


def test_a_process_that_rests_a_refusing_worker_for_a_while_is_not_wrong():
    right = of_bug("rests_who_refused", first_of_equals=True, counts_open=False)
    assert outcome_of(right, "test_it_lives_without_a_worker") == ""
