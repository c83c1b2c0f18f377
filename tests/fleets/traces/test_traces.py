"""Reading Mooncake traces, and generating synthetic traces of the same form."""

import json
import pickle
from collections import Counter
from contextlib import suppress
from itertools import islice, pairwise
from statistics import mean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvmock import block_hashes, sequence_hashes
from pytest_kvmock.fleets import TraceError, TraceRequest, read_mooncake, synthetic_trace

GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}'


def row(**fields):
    """Return a valid line of a trace with some fields changed; a field given as ... is left out."""
    both = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]} | fields
    return json.dumps({name: value for name, value in both.items() if value is not ...})


# ------------------------------------------------------------------------------------------------------ prompts


def test_a_prompt_has_hashes_of_its_complete_blocks_and_its_length():
    prompt = TraceRequest(0.0, 1300, 5, (7, 8, 9)).prompt()
    assert prompt.block_hashes(512) == [7, 8]
    assert sequence_hashes([7, 8]) == prompt.sequence_hashes(512)
    assert prompt.length(512) == 1300


def test_an_exactly_full_last_block_counts_as_a_block():
    prompt = TraceRequest(0.0, 1024, 5, (7, 8)).prompt()
    assert prompt.block_hashes(512) == [7, 8]
    assert prompt.length(512) == 1024


def test_a_prompt_of_whole_blocks_has_all_ids_at_any_block_size():
    prompt = TraceRequest(0.0, 1300, 5, (7, 8, 9)).prompt(whole_blocks=True)
    assert [7, 8, 9] == prompt.block_hashes(512) == prompt.block_hashes(16)
    assert (prompt.length(512), prompt.length(16)) == (1536, 48)


def test_a_prompt_uses_the_block_size_of_the_trace():
    prompt = TraceRequest(0.0, 33, 5, (7, 8, 9)).prompt(16)
    assert prompt.block_hashes(16) == [7, 8]
    assert prompt.length(16) == 33


def test_a_prompt_needs_one_id_for_each_block():
    with pytest.raises(ValueError) as caught:
        TraceRequest(0.0, 1300, 5, (7, 8)).prompt()
    assert str(caught.value) == (
        "a request of 1300 tokens has 2 hash ids: 3 are expected, one for each 512 tokens (trace_block_size), "
        "of which the last may be partial"
    )


def test_a_trace_block_size_of_0_is_refused():
    with pytest.raises(ValueError, match="block_size must be an integer of at least 1"):
        TraceRequest(0.0, 1300, 5, (7, 8, 9)).prompt(0)


def test_a_prompt_of_tokens_repeats_each_id_and_ends_with_the_input():
    prompt = TraceRequest(0.0, 10, 5, (7, 8, 9)).prompt(4, tokens=True)
    assert prompt.tokens == (7, 7, 7, 7, 8, 8, 8, 8, 9, 9)


def test_a_prompt_of_tokens_has_the_hashes_of_its_tokens_at_any_block_size():
    prompt = TraceRequest(0.0, 1300, 5, (7, 8, 9)).prompt(tokens=True)
    tokens = [7] * 512 + [8] * 512 + [9] * 276
    assert block_hashes(tokens, 512) == prompt.block_hashes(512)
    assert block_hashes(tokens, 16) == prompt.block_hashes(16)
    assert prompt.length(16) == 1300


def test_a_token_is_the_low_32_bits_of_its_hash_id():
    assert TraceRequest(0.0, 2, 5, (2**32 + 1, 2**64 - 1)).prompt(1, tokens=True).tokens == (1, 2**32 - 1)


def test_with_whole_blocks_the_last_block_of_tokens_is_not_cut():
    prompt = TraceRequest(0.0, 5, 5, (7, 8)).prompt(4, tokens=True, whole_blocks=True)
    assert prompt.tokens == (7, 7, 7, 7, 8, 8, 8, 8)


def test_a_prompt_of_tokens_needs_one_id_for_each_block():
    with pytest.raises(ValueError, match="3 are expected"):
        TraceRequest(0.0, 1300, 5, (7, 8)).prompt(tokens=True)


def test_a_request_with_tokens_makes_a_prompt_of_tokens_unless_tokens_is_false():
    request = TraceRequest(0.0, 4, 5, (7,), with_tokens=True)
    assert request.prompt(4).tokens == (7, 7, 7, 7)
    assert request.prompt(4, tokens=False).tokens is None
    assert TraceRequest(0.0, 4, 5, (7,)) == request


# ------------------------------------------------------------------------------------------------------ reading


def test_every_field_is_read():
    lines = [
        row(session_id="a"),
        row(timestamp=1.5, session_id="a", delay=20, hash_ids=[0, 2**64 - 1]),
        row(priority=-3),
    ]
    assert [
        TraceRequest(0.0, 600, 5, (0, 1), "a", None),
        TraceRequest(1.5, 600, 5, (0, 2**64 - 1), "a", 20.0),
        TraceRequest(0.0, 600, 5, (0, 1), priority=-3),
    ] == list(read_mooncake(lines))


def test_optional_fields_can_be_absent_or_null_and_unknown_fields_are_ignored():
    bare = TraceRequest(None, 600, 5, (0, 1))
    lines = [
        row(timestamp=...),
        row(timestamp=None, session_id=None, delay=None, priority=None),
        row(timestamp=..., turn=3),
    ]
    assert [bare] * 3 == list(read_mooncake(lines))


def test_an_empty_prompt_without_output_is_a_valid_request():
    assert [TraceRequest(0.0, 0, 0, ())] == list(read_mooncake([row(input_length=0, output_length=0, hash_ids=[])]))


def test_a_first_turn_may_have_a_delay_of_0():
    lines = [row(delay=0), row(delay=0.0, session_id="a")]
    assert [request.delay for request in read_mooncake(lines)] == [0.0, 0.0]


def test_lines_can_be_text_or_bytes_with_any_line_ending_and_a_byte_order_mark():
    lines = ["\ufeff" + GOOD, GOOD + "\n", GOOD.encode() + b"\r\n", GOOD.encode()]
    assert len(list(read_mooncake(lines))) == 4


def test_a_file_is_read_with_or_without_a_final_newline(tmp_path):
    path = tmp_path / "trace.jsonl"
    for text in (f"{GOOD}\n{GOOD}", f"{GOOD}\n{GOOD}\n", f"\n{GOOD}\r\n  \n\t\n{GOOD}\n\n"):
        path.write_text(text, encoding="utf-8", newline="")
        assert 2 == len(list(read_mooncake(path))) == len(list(read_mooncake(str(path))))


def test_a_missing_trace_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        next(read_mooncake(tmp_path / "nowhere.jsonl"))


def test_a_file_is_closed_when_the_reading_ends_early(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{GOOD}\n{GOOD}\n", encoding="utf-8")
    requests = read_mooncake(path)
    next(requests)
    file = requests.gi_frame.f_locals["lines"]
    requests.close()
    assert file.closed


def test_lines_are_read_lazily():
    read = []

    def lines():
        for number in range(10):
            read.append(number)
            yield GOOD

    requests = read_mooncake(lines())
    assert read == []
    next(requests)
    assert read == [0]
    next(requests)
    assert read == [0, 1]


def test_lines_after_the_limit_are_not_read():
    def lines():
        yield GOOD
        yield "\n"
        yield GOOD
        pytest.fail("read past the limit")

    assert len(list(read_mooncake(lines(), limit=2))) == 2


def test_requests_before_a_bad_line_are_returned():
    requests = read_mooncake([GOOD, GOOD, "{"])
    assert len(list(islice(requests, 2))) == 2
    with pytest.raises(TraceError, match="line 3"):
        next(requests)


def test_a_limit_beyond_the_end_reads_the_complete_trace():
    assert len(list(read_mooncake([GOOD, GOOD], limit=5))) == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"limit": 0}, ValueError, "limit must be an integer of at least 1 (requests; None reads all), got 0"),
        ({"limit": True}, TypeError, "limit must be an integer of at least 1 (requests; None reads all), got True"),
        ({"limit": 2.0}, TypeError, "limit must be an integer of at least 1 (requests; None reads all), got 2.0"),
        ({"trace_block_size": 0}, ValueError, "block_size must be an integer of at least 1 (tokens a block), got 0"),
    ],
)
def test_an_invalid_argument_is_refused_at_the_call(arguments, error, message):
    with pytest.raises(error) as caught:
        read_mooncake([GOOD], **arguments)
    assert str(caught.value) == message


LENGTH = "an integer of at least 0 (tokens) is expected, got "
TIME = "a finite number of at least 0 (milliseconds) is expected, got "
REQUIRED = "missing; a request has input_length, output_length and hash_ids"
ID = "an integer from 0 to 2**64 - 1 is expected, got "
PRIORITY = "an integer is expected (larger is served first), got "
FIRST = "a first turn has no turn before it to wait for "


BAD_LINES = [
    ("{}", "input_length", REQUIRED),
    (row(output_length=...), "output_length", REQUIRED),
    (row(hash_ids=...), "hash_ids", REQUIRED),
    ("[1, 2]", None, "a JSON object is expected, got [1, 2]"),
    ("null", None, "a JSON object is expected, got null"),
    ("hello", None, "not JSON: Expecting value at column 1, got 'hello'"),
    (GOOD + GOOD, None, f"not JSON: Extra data at column {len(GOOD) + 1}, got {GOOD[:57]!r}..."),
    ('{"input_length": 6', None, "not JSON: Expecting ',' delimiter at column 19, got '{\"input_length\": 6'"),
    (b"{\xff}", None, "not UTF-8 at byte 1; a trace is a JSON object a line, in UTF-8"),
    (row(input_length=-1), "input_length", LENGTH + "-1"),
    (row(input_length=None), "input_length", LENGTH + "null"),
    (row(input_length="600"), "input_length", LENGTH + '"600"'),
    (row(input_length=600.0), "input_length", LENGTH + "600.0"),
    (row(input_length=True), "input_length", LENGTH + "true"),
    (row(output_length=-5), "output_length", LENGTH + "-5"),
    (row(output_length=False), "output_length", LENGTH + "false"),
    (row(output_length=[5]), "output_length", LENGTH + "[5]"),
    (row(timestamp="0"), "timestamp", TIME + '"0"'),
    (row(timestamp=True), "timestamp", TIME + "true"),
    (row(timestamp=-1), "timestamp", TIME + "-1"),
    (row(timestamp=float("inf")), "timestamp", TIME + "Infinity"),
    (row(timestamp=10**400), "timestamp", f"{TIME}1{'0' * 56}..."),
    (row(hash_ids="01"), "hash_ids", 'a list of ids, one a block, is expected, got "01"'),
    (row(hash_ids=None), "hash_ids", "a list of ids, one a block, is expected, got null"),
    (row(hash_ids=[0, -1]), "hash_ids", f"id 1: {ID}-1"),
    (row(hash_ids=[0, 2**64]), "hash_ids", f"id 1: {ID}18446744073709551616"),
    (row(hash_ids=[False, 1]), "hash_ids", f"id 0: {ID}false"),
    (row(hash_ids=[0, 1.0]), "hash_ids", f"id 1: {ID}1.0"),
    (row(hash_ids=[0, "x" * 80]), "hash_ids", f'id 1: {ID}"{"x" * 56}...'),
    (row(hash_ids=[0, "x" * 58]), "hash_ids", f'id 1: {ID}"{"x" * 58}"'),
    (
        row(hash_ids=[0]),
        "hash_ids",
        (
            "2 ids are expected, one for each 512 of 600 tokens (the last block may be partial), got 1; a trace has "
            "one block size, and line 1 (600 tokens, number of ids 2: blocks of 300 to 599) and line 3 (600 tokens, "
            "number of ids 1: blocks of at least 600) disagree about it"
        ),
    ),
    (
        row(input_length=1024, hash_ids=[0, 1, 2]),
        "hash_ids",
        (
            "2 ids are expected, one for each 512 of 1024 tokens (the last block may be partial), got 3; "
            "trace_block_size=342 fits this line"
        ),
    ),
    (row(session_id=7), "session_id", "a string is expected, got 7"),
    (row(session_id="a", delay=-1), "delay", TIME + "-1"),
    (row(session_id="a", delay=float("nan")), "delay", TIME + "NaN"),
    (row(session_id="a", delay="soon"), "delay", TIME + '"soon"'),
    (
        row(session_id="a", delay=2.5),
        "delay",
        FIRST + "(session 'a' begins), got 2.5; 0 or no delay is expected",
    ),
    (row(priority=True), "priority", PRIORITY + "true"),
    (row(priority="high"), "priority", PRIORITY + '"high"'),
    (row(priority=1.0), "priority", PRIORITY + "1.0"),
    (row(delay=3), "delay", FIRST + "(this request is a session of its own), got 3; 0 or no delay is expected"),
]


@pytest.mark.parametrize(
    ("line", "field", "problem"),
    BAD_LINES,
    ids=[f"{number}-{field or 'line'}" for number, (_, field, _) in enumerate(BAD_LINES)],
)
def test_a_bad_line_is_one_error_with_its_place_and_the_expected_value(line, field, problem, tmp_path):
    path = tmp_path / "trace.jsonl"
    raw = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(GOOD.encode() + b"\n\n" + raw + b"\n" + GOOD.encode() + b"\n")
    place = "line 3" if field is None else f"line 3, field {field!r}"
    for given_as, source in ((path, str(path)), ([GOOD, "", line, GOOD], "<lines>")):
        requests = read_mooncake(given_as)
        next(requests)
        with pytest.raises(TraceError) as caught:
            next(requests)
        assert str(caught.value) == f"{source}, {place}: {problem}"
        assert (source, 3, field) == (caught.value.source, caught.value.line, caught.value.field)


def test_a_truncated_file_is_reported(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{GOOD}\n{GOOD[:33]}", encoding="utf-8")
    with pytest.raises(TraceError) as caught:
        list(read_mooncake(path))
    assert str(caught.value) == (
        f"{path}, line 2: not JSON: Expecting value at column 33, "
        """got '{"timestamp": 0, "input_length":'; the file ends in this line, it may be cut off"""
    )


@pytest.mark.parametrize("line", ["[" * 100_000, f'{{"input_length": {"9" * 5_000}}}'], ids=["brackets", "digits"])
def test_json_that_python_cannot_parse_is_an_error_of_its_line(line):
    with pytest.raises(TraceError, match=r"^<lines>, line 1: .*JSON.*, got '"):
        list(read_mooncake([line]))


@pytest.mark.parametrize("lines", [[], ["", "\n", "  \t\n"]], ids=["no lines", "blank lines"])
def test_an_empty_trace_is_an_error(lines, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    for given_as, source in ((path, path), (lines, "<lines>")):
        with pytest.raises(TraceError) as caught:
            list(read_mooncake(given_as))
        assert str(caught.value) == f"{source}: no request in it; at least one line with a JSON object is expected"


def test_a_line_that_is_not_text_is_an_error():
    with pytest.raises(TraceError, match=r"^<lines>, line 1: a line of text is expected, got \{\}$"):
        list(read_mooncake([{}]))


def test_a_trace_error_can_be_pickled():
    with pytest.raises(TraceError) as caught:
        list(read_mooncake(["{}"]))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(caught.value), 1, "input_length") == (str(copy), copy.line, copy.field)


@given(st.text() | st.binary())
def test_any_line_is_read_or_refused(line):
    with suppress(TraceError):
        assert len(list(read_mooncake([line]))) == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(st.sampled_from(["timestamp", "input_length", "output_length", "hash_ids", "session_id", "delay"]), json_values)
def test_any_field_value_is_read_unchanged_or_refused(name, value):
    with suppress(TraceError):
        (request,) = read_mooncake([row(**{name: value})])
        found = getattr(request, name)
        assert value == (list(found) if isinstance(found, tuple) else found)


@pytest.mark.parametrize(
    ("name", "requests", "references", "unique"),
    [
        ("mooncake_conversation_trace.jsonl", 12_031, 288_500, 182_790),
        ("mooncake_synthetic_trace.jsonl", 3_993, 121_877, 43_924),
    ],
)
def test_the_published_traces_are_read_completely(traces_dir, name, requests, references, unique):
    trace = list(read_mooncake(traces_dir / name))
    assert requests == len(trace)
    assert references == sum(len(request.prompt(whole_blocks=True).block_hashes(512)) for request in trace)
    assert unique == len({block for request in trace for block in request.hash_ids})
    assert all(request.input_length == request.prompt().length(512) for request in trace)
    assert_prefix_ids(trace)
    assert_partial_ids_are_never_full(trace, 512)


# --------------------------------------------------------------------------------------------------- generating


def assert_prefix_ids(trace):
    """Assert that ids are dense and that each block has one parent, as in every published trace."""
    parents = {}
    for request in trace:
        assert len(request.hash_ids) == len(set(request.hash_ids))
        for parent, block in pairwise((None, *request.hash_ids)):
            if block not in parents:
                assert len(parents) == block, "ids are dense, in the order of their first appearance"
                parents[block] = parent
            assert parents[block] == parent
    assert all(before.timestamp <= after.timestamp for before, after in pairwise(trace))


def assert_partial_ids_are_never_full(trace, block_size):
    partial = {request.hash_ids[-1] for request in trace if request.input_length % block_size}
    full = {block for request in trace for block in request.hash_ids[: request.input_length // block_size]}
    assert not partial & full


def ranges(low, high):
    return st.tuples(st.integers(low, high), st.integers(low, high)).map(sorted).map(tuple)


workloads = st.fixed_dictionaries(
    {
        "requests": st.integers(1, 60),
        "seed": st.integers(0, 2**70),
        "block_size": st.integers(1, 600),
        "groups": st.integers(1, 5),
        "prefix_blocks": ranges(0, 4),
        "turns": ranges(1, 5),
        "input_tokens": ranges(1, 900),
        "output_tokens": ranges(0, 700),
        "interval_ms": st.integers(0, 3_000),
        "delay_ms": ranges(0, 9_000),
    }
)


@given(workloads)
def test_a_synthetic_trace_has_the_form_of_the_published_ones(workload):
    trace = list(synthetic_trace(**workload))
    assert workload["requests"] == len(trace)
    assert_prefix_ids(trace)
    assert_partial_ids_are_never_full(trace, workload["block_size"])
    assert all(
        request.input_length == request.prompt(workload["block_size"]).length(workload["block_size"])
        for request in trace
    )


@given(workloads)
def test_a_later_turn_extends_the_previous_turn_and_its_output(workload):
    size = workload["block_size"]
    last, turns = {}, {}
    for request in synthetic_trace(**workload):
        before = last.get(request.session_id)
        if before is None:
            assert request.delay is None
        else:
            new = request.input_length - before.input_length - before.output_length
            assert workload["input_tokens"][0] <= new <= workload["input_tokens"][1]
            complete = before.input_length // size
            assert before.hash_ids[:complete] == request.hash_ids[:complete]
            assert before.timestamp + request.delay == request.timestamp
            assert workload["delay_ms"][0] <= request.delay <= workload["delay_ms"][1]
        last[request.session_id] = request
        turns[request.session_id] = turns.get(request.session_id, 0) + 1
        assert workload["output_tokens"][0] <= request.output_length <= workload["output_tokens"][1]
    assert max(turns.values()) <= workload["turns"][1]


@given(workloads)
def test_sessions_share_the_prefix_of_their_group_and_nothing_else(workload):
    firsts = {}
    for request in synthetic_trace(**workload):
        firsts.setdefault(request.session_id, request)
    prefixes = {}
    for request in firsts.values():
        prefixes.setdefault(request.hash_ids[0], []).append(request.hash_ids)
    for sharing in prefixes.values():
        for one, other in pairwise(sharing):
            shared = set(one) & set(other)
            assert list(one[: len(shared)]) == list(other[: len(shared)])
            assert workload["prefix_blocks"][0] <= len(shared) <= workload["prefix_blocks"][1]


@given(workloads)
def test_a_written_synthetic_trace_is_read_back_unchanged(workload):
    trace = list(synthetic_trace(**workload))
    names = ("timestamp", "input_length", "output_length", "hash_ids", "session_id", "delay")
    lines = [json.dumps({name: getattr(request, name) for name in names}) for request in trace]
    assert trace == list(read_mooncake(lines, trace_block_size=workload["block_size"]))


@given(workloads, st.integers(1, 60))
def test_a_longer_synthetic_trace_starts_with_the_shorter_one(workload, more):
    longer = workload | {"requests": workload["requests"] + more}
    assert list(synthetic_trace(**workload)) == list(islice(synthetic_trace(**longer), workload["requests"]))


def test_the_same_seed_gives_the_same_trace_on_every_python_version():
    recorded = [
        (0.0, 2583, 64, "session_0", None),
        (3935.0, 2495, 374, "session_1", None),
        (13744.0, 2963, 135, "session_2", None),
        (26311.0, 4942, 382, "session_3", None),
        (28051.0, 5432, 258, "session_4", None),
        (28409.0, 6204, 390, "session_1", 24474.0),
    ]
    assert recorded == [
        (request.timestamp, request.input_length, request.output_length, request.session_id, request.delay)
        for request in synthetic_trace(6, seed=42, interval_ms=9_000)
    ]


def test_another_seed_gives_another_trace():
    assert list(synthetic_trace(5, seed=1)) != list(synthetic_trace(5, seed=2))


def test_without_prefixes_and_later_turns_no_block_is_shared():
    trace = list(synthetic_trace(50, prefix_blocks=(0, 0), turns=(1, 1)))
    blocks = [block for request in trace for block in request.hash_ids]
    assert len(blocks) == len(set(blocks))


def test_by_default_about_half_of_the_blocks_are_repeated():
    for seed in range(5):
        trace = list(synthetic_trace(1_000, seed=seed))
        blocks = [block for request in trace for block in request.hash_ids]
        assert 0.4 < 1 - len(set(blocks)) / len(blocks) < 0.6
        assert 4_000 < sum(request.input_length for request in trace) / len(trace) < 5_500


def test_with_sessions_n_sessions_start_and_have_all_their_turns():
    trace = list(synthetic_trace(sessions=40, turns=(3, 3), seed=3))
    turns = Counter(request.session_id for request in trace)
    assert len(turns) == 40
    assert {*turns.values()} == {3}
    assert [request.timestamp for request in trace] == sorted(request.timestamp for request in trace)
    assert list(synthetic_trace(5, sessions=1, turns=(3, 3), seed=3)) == list(
        synthetic_trace(sessions=1, turns=(3, 3), seed=3)
    )


def test_session_starts_of_a_poisson_process_have_its_mean_and_spread():
    starts = [r.timestamp for r in synthetic_trace(sessions=4_000, arrival="poisson", interval_ms=200, turns=(1, 1))]
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    assert 190 < mean(gaps) < 210
    assert 185 < pstdev(gaps) < 215  # of an exponential distribution it is the mean; of a uniform one 115


def test_the_trace_generator_is_lazy():
    assert len(list(islice(synthetic_trace(10**12), 3))) == 3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"requests": 0}, ValueError, "requests must be an integer of at least 1 (requests), got 0"),
        ({"requests": "5"}, TypeError, "requests must be an integer of at least 1 (requests), got '5'"),
        ({"seed": -1}, ValueError, "seed must be an integer of at least 0 (of the generator), got -1"),
        ({"seed": 1.5}, TypeError, "seed must be an integer of at least 0 (of the generator), got 1.5"),
        ({"block_size": 0}, ValueError, "block_size must be an integer of at least 1 (tokens a block), got 0"),
        ({"groups": 0}, ValueError, "groups must be an integer of at least 1 (shared prefixes), got 0"),
        ({"interval_ms": -1}, ValueError, "interval_ms must be an integer of at least 0 (milliseconds), got -1"),
        ({"turns": 3}, TypeError, "turns must be a pair of integers (lowest, highest; turns a session), got 3"),
        ({"turns": (0, 3)}, ValueError, ("the lowest of turns must be an integer of at least 1 (turns a session), got "
        "0")),
        ({"turns": (3, 2)}, ValueError, ("the highest of turns must be an integer of at least 3 (turns a session), got "
        "2")),
        ({"input_tokens": (0, 9)}, ValueError, ("the lowest of input_tokens must be an integer of at least 1 (tokens), "
        "got 0")),
        ({"output_tokens": (-1, 9)}, ValueError, ("the lowest of output_tokens must be an integer of at least 0 "
        "(tokens), got -1")),
        ({"sessions": 0}, ValueError, "sessions must be an integer of at least 1 (sessions), got 0"),
        ({"arrival": "often"}, ValueError, "unknown arrival 'often'; known: uniform, poisson"),
        ({"requests": None}, ValueError, "synthetic_trace takes requests, sessions=, or both, got neither"),
        ({"prefix_blocks": (1, 2, 3)}, TypeError, ("prefix_blocks must be a pair of integers (lowest, highest; "
        "blocks), got (1, 2, 3)")),
        ({"delay_ms": (0, 1.5)}, TypeError, ("the highest of delay_ms must be an integer of at least 0 (milliseconds), "
        "got 1.5")),
    ],
)  # fmt: skip
def test_an_invalid_workload_is_refused_at_the_call(arguments, error, message):
    with pytest.raises(error) as caught:
        synthetic_trace(**{"requests": 5, **arguments})
    assert str(caught.value) == message
