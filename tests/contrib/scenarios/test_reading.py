"""Invalid scenario files: one error each, which names the place and the allowed values."""

from __future__ import annotations

import tracemalloc
from itertools import chain

import pytest

from pytest_kvmock.contrib.scenarios import load_scenarios
from pytest_kvmock.values.strict_yaml import YamlError

STEPS = "steps: [{use: [1]}]"

BAD = [
    ("", "1:1: the file is empty"),
    ("# nothing\n", "1:1: the file is empty"),
    ("steps: [", "1:9: not YAML: while parsing a flow node, expected the node content, but found '<stream end>'"),
    ("- a\n", ("1:1: got a list; allowed: a mapping of keys description, profile, engine, stores, backends, allow, "
    "needs_index, scenarios, steps")),
    (
        "step: []\n",
        ("1:1: unknown key 'step'; did you mean 'steps'? known: description, profile, engine, stores, backends, allow, "
        "needs_index, scenarios, steps"),
    ),
    ("profile: {}\n", "1:1: either 'scenarios' (a mapping of names to scenarios) or 'steps' is needed"),
    (f"scenarios: {{a: {{{STEPS}}}}}\n{STEPS}\n", ("1:1: either 'scenarios' (a mapping of names to scenarios) or "
    "'steps' is needed")),
    ("scenarios: {}\n", "1:12: scenarios: no scenario is in it"),
    ("scenarios: {a: {allow: []}}\n", "1:16: a: the key 'steps' is missing"),
    ("steps: []\n", "1:8: steps: no step is in it"),
    ("steps: {use: [1]}\n", "1:8: steps: got a mapping; allowed: a list"),
    (f"profile: {{blocks: 3}}\n{STEPS}\n", ("1:11: profile: unknown key 'blocks'; did you mean 'num_blocks' or "
    "'block_size'? known: base, block_size, num_blocks, workers, dp_size, prefix_caching, chunk, seed")),
    (f"profile: {{num_blocks: 0}}\n{STEPS}\n", "1:23: num_blocks must be an integer of at least 1, got 0"),
    (f"profile: {{num_blocks: many}}\n{STEPS}\n", "1:23: num_blocks: got 'many'; allowed: an integer"),
    (f"backends: []\n{STEPS}\n", ("1:11: backends: at least one backend is needed; without the key, the default "
        "matrix is used")),
    (f"backends: lru\n{STEPS}\n", "1:11: backends: got 'lru'; allowed: a list"),
    ("allow: [nope]\n" + STEPS, "1:9: allow: unknown rule 'nope'; known: "),
    ("steps:\n- use: [1]\n  deref: [1]\n", "2:3: steps: one step does one thing, not use and deref"),
    ("steps:\n- jump: 1\n", "2:3: steps: unknown key 'jump'; known: use, deref, promote, "),
    ("steps:\n- use: 1\n", "2:8: use: got 1; allowed: a list"),
    ("steps:\n- use: [-1]\n", "2:9: use: got -1; allowed: an integer from 0 to 2**64 - 1"),
    ("steps:\n- use: [1.5]\n", "2:9: use: got 1.5; allowed: a block hash, or a name for a partial block"),
    ("steps:\n- use: {parent: 1}\n", "2:8: use: the key 'blocks' is missing"),
    (("steps:\n- use: {blocks: [1], plhs: [[1, "
    "2]]}\n"), "2:29: plhs: got a list; allowed: [sequence hash, parent sequence hash or null, position]"),
    ("steps:\n- prefill: {request: a}\n", "2:12: prefill: exactly one of tokens, hashes is needed"),
    ("steps:\n- prefill: {request: a, tokens: 1..0}\n", "2:33: tokens: the range 1..0 goes backwards"),
    (("steps:\n- prefill: {request: a, tokens: 0..99999999999}\n"),
    "2:33: tokens: the range 0..99999999999 has 100000000000 numbers; at most 1000000 are allowed"),
    (("steps:\n- prefill: {request: a, tokens: "
    "x}\n"), "2:33: tokens: got 'x'; allowed: a number, a range such as 0..15, or a list of these"),
    (("steps:\n- event: {stored: [1], removed: "
    "[1]}\n"), "2:10: event: exactly one of stored, removed, located, updated, cleared is needed"),
    ("steps:\n- event: {removed: [1], parent: 1}\n", "2:25: event: 'parent' belongs to 'stored'"),
    ("steps:\n- event: {located: [1], span: 8}\n", "2:25: event: 'span' belongs to 'stored'"),
    ("steps:\n- event: {cleared: true, extra: {group_idx: 1}}\n", "2:26: event: 'extra' does not belong to 'cleared'"),
    ("steps:\n- event: {stored: [1], span: 8}\n", "2:24: event: 'span' and 'block_size' belong together"),
    ("steps:\n- event: {stored: [1], block_size: 8}\n", "2:24: event: 'block_size' and 'span' belong together"),
    (("steps:\n- event: {stored: [1], span: 8, block_size: 4, local_hashes: "
    "[1]}\n"), "2:48: event: 'local_hashes' does not belong to 'span'"),
    (("steps:\n- event: {stored: [1], span: 9, block_size: "
    "4}\n"), "2:24: event: SparseStored: a span has whole blocks of 4 tokens, got 9"),
    (("steps:\n- event: {stored: [1], span: 8, block_size: 4, token_ids: "
    "[1]}\n"), "2:48: event: 'token_ids' has one entry a block"),
    ("steps:\n- event: {stored: [1], local_hashes: [1, 2]}\n", "2:24: event: 'local_hashes' has one entry a block"),
    ("steps:\n- fault: loose\n", "2:10: fault: unknown fault 'loose'; did you mean 'lose'? known: lose, double, "),
    ("steps:\n- fault: {loose: 1}\n", "2:11: fault: unknown fault 'loose'; did you mean 'lose'? known: lose, double, "),
    ("steps:\n- event: {stored: [1], tier: [device]}\n", "2:30: tier: got a list; allowed: device, host_pinned, "),
    ("steps:\n- event: {cleared: false}\n", "2:20: cleared: got False; allowed: true"),
    ("steps:\n- event: {stored: [1], token_ids: [[1], [2]]}\n", "2:24: event: 'token_ids' has one entry a block"),
    ("steps: [{}]\n", "1:9: steps: a step does something, or expects something; known: use, "),
    (("steps:\n- serve: {tokens: "
    "18446744073709551615..18446744073709551616}\n"), ("2:19: tokens: the range "
    "18446744073709551615..18446744073709551616 goes beyond 2**64 - 1")),
    (f"steps:\n- serve: {{tokens: {'9' * 5000}..{'9' * 5000}}}\n", "2:19: tokens: got '999"),
    (("steps:\n- event: {stored: [1], tier: "
    "hots}\n"), "2:30: tier: got 'hots'; did you mean 'host'? allowed: device, host_"),
    (("steps:\n- event: {stored: [1], tier_blocks: {host: 1, g2: "
    "2}}\n"), "2:37: tier_blocks: a tier is given twice: host, g2"),
    ("steps:\n- event: {stored: [1], tier: hbm}\n", "2:30: tier: got 'hbm'; allowed: device, host_pinned, "),
    (("steps:\n- event: {stored: [1], worker: [1, 2, "
    "3]}\n"), "2:32: worker: got a list; allowed: the id of a worker (0 to 65791; sinks from 65536 on), or [id, rank]"),
    (("steps:\n- event: {removed: [1], worker: "
    "10000000}\n"), "2:33: worker: got 10000000; allowed: the id of a worker (0 to 65791; "),
    ("steps:\n- serve: {tokens: 1, worker: -1}\n", "2:30: worker: got -1; allowed: the id of a worker (0 to 65791; "),
    (("steps:\n- serve: {tokens: 1, output_tokens: "
    "1000001}\n"), "2:37: output_tokens: got 1000001; allowed: an integer from 0 to 1000000"),
    ("steps:\n- decode: {request: a, count: 1, tokens: 1}\n", "2:11: decode: exactly one of tokens, count is needed"),
    ("steps:\n- serve: {tokens: 1, num_tokens: 4}\n", "2:22: serve: 'num_tokens' belongs to 'hashes'"),
    ("steps:\n- fault: [lose]\n", ("2:10: fault: got a list; allowed: one fault, such as {lose: 1} or {lose: {n: 1, "
    "kind: stored}}")),
    ("steps:\n- use: [1]\n  expect: {}\n", "3:11: expect: nothing is expected; known: "),
    (("steps:\n- use: [1]\n  expect: {alocated: "
    "1}\n"), "3:12: expect: unknown key 'alocated'; did you mean 'allocated'? known: "),
    ("steps:\n- deref: [1]\n  expect: {allocated: 1}\n", "3:12: expect: only a use returns 'allocated'"),
    ("steps:\n- expect: {refused: x}\n", "2:12: expect: 'refused' is expected of a step that does something"),
    (("steps:\n- use: [1]\n  expect: {events: [{added: "
    "[1]}]}\n"), "3:22: events: unknown key 'added'; known: stored, parent, removed, worker"),
    (("steps:\n- expect: {overlap: {tokens: 1, workers: {a: "
    "1}}}\n"), "2:43: workers: worker 'a'; allowed: an id, or id/rank"),
    ("steps:\n- expect: {problems: [nope]}\n", "2:23: problems: unknown rule 'nope'; known: "),
    ("a: &x [1]\nsteps: *x\n", "1:4: the anchor &x: anchors are not allowed"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BAD)
def test_an_invalid_scenario_file_is_one_error_with_its_place(tmp_path, text, message):
    path = tmp_path / "bad.kv.yaml"
    path.write_text(text)
    with pytest.raises(YamlError) as raised:
        load_scenarios(path, "bad.kv.yaml")
    expected_message = str(raised.value)
    assert expected_message.startswith(f"bad.kv.yaml:{message}")
    assert "\n" not in expected_message


def test_a_file_with_only_steps_is_one_scenario_named_after_the_file(tmp_path):
    path = tmp_path / "one.two.kv.yaml"
    path.write_text(STEPS)
    assert [scenario.name for scenario in load_scenarios(path)] == ["one.two"]


def test_fields_of_a_scenario_override_those_of_the_file(tmp_path):
    path = tmp_path / "x.kv.yaml"
    path.write_text(
        "profile: {base: big, num_blocks: 4, block_size: 8}\nbackends: [lru]\nallow: [wrong_hash]\nscenarios:\n"
        f"  a: {{{STEPS}}}\n"
        f"  b: {{{STEPS}, profile: {{num_blocks: 5}}, backends: [lineage], allow: [sink_failure]}}\n"
        f"  c: {{{STEPS}, profile: small}}\n"
    )
    a, b, c = load_scenarios(path)
    assert (
        a.base,
        a.profile,
        a.backends,
        a.allow,
    ) == ("big", {"num_blocks": 4, "block_size": 8}, ("lru",), ("wrong_hash",))
    assert (
        b.base,
        b.profile,
        b.backends,
        b.allow,
    ) == ("big", {"num_blocks": 5, "block_size": 8}, ("lineage",), ("wrong_hash", "sink_failure"))
    assert (c.base, c.profile) == ("small", {})  # another base, so that the overrides of the file do not apply


def test_numbers_can_be_single_values_ranges_or_nested_lists(tmp_path):
    path = tmp_path / "x.kv.yaml"
    path.write_text("steps: [{serve: {tokens: [0..2, 7, [9..9, 1]]}}]")
    (scenario,) = load_scenarios(path)
    assert tuple(chain.from_iterable(scenario.steps[0].given["tokens"])) == (0, 1, 2, 7, 9, 1)


def test_ranges_are_counted_before_they_are_expanded(tmp_path):
    path = tmp_path / "x.kv.yaml"
    path.write_text(f"steps: [{{serve: {{tokens: [{', '.join(['0..999999'] * 60)}]}}}}]")
    tracemalloc.start()
    with pytest.raises(YamlError, match=r"tokens: 60000000 numbers; at most 1000000 are allowed$"):
        load_scenarios(path)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("numbers", ["0..999999", "[0..499999, 0..499999]", "[0..999998, 5]"])
def test_at_most_a_million_numbers_are_accepted(tmp_path, numbers):
    path = tmp_path / "x.kv.yaml"
    path.write_text(f"steps: [{{serve: {{tokens: {numbers}}}}}]")
    (scenario,) = load_scenarios(path)
    assert sum(map(len, scenario.steps[0].given["tokens"])) == 1_000_000
    path.write_text(f"steps: [{{serve: {{tokens: [{numbers}, 7]}}}}]")
    with pytest.raises(YamlError, match=r"tokens: 1000001 numbers; at most 1000000 are allowed$"):
        load_scenarios(path)


@pytest.mark.parametrize(
    ("step", "given"),
    [
        ("event: {cleared: true}", {"cleared": True}),
        ("serve: {tokens: 18446744073709551615}", {"tokens": (range(2**64 - 1, 2**64),)}),
        ("serve: {tokens: 5..5, output_tokens: 1000000}", {"tokens": (range(5, 6),), "output_tokens": 1_000_000}),
        ("event: {stored: [-9223372036854775808]}", {"stored": [-(2**63)]}),
        ("event: {removed: [1], worker: [65791, 3]}", {"removed": [1], "worker": (65791, 3)}),
        ("use: [0, 18446744073709551615, p]", {"blocks": [0, 2**64 - 1, "p"]}),
        (
            "use: {blocks: [1, 2], plhs: [[1, null, 0], [4, 5, 6]]}",
            {"blocks": [1, 2], "plhs": [(1, None, 0), (4, 5, 6)]},
        ),
        ("submit: {tokens: 1, arrival_ms: 0}", {"tokens": (range(1, 2),), "arrival_ms": 0}),
    ],
)
def test_values_at_the_allowed_limits_are_read(tmp_path, step, given):
    path = tmp_path / "x.kv.yaml"
    path.write_text(f"steps: [{{{step}}}]")
    (scenario,) = load_scenarios(path)
    assert given == scenario.steps[0].given


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("event: {stored: [-9223372036854775809]}", "got -9223372036854775809; allowed: an integer from -2**63 to"),
        ("event: {stored: [18446744073709551616]}", "got 18446744073709551616; allowed: an integer from -2**63 to"),
        ("use: [18446744073709551616]", "got 18446744073709551616; allowed: an integer from 0 to 2**64 - 1"),
        ("use: ['']", "got ''; allowed: a block hash, or a name for a partial block"),
        ("event: {removed: [1], worker: 65792}", "got 65792; allowed: the id of a worker (0 to 65791; "),
        ("event: {removed: [1], worker: [0, -1]}", "got a list; allowed: the id of a worker (0 to 65791; "),
        ("event: {stored: [1], worker: 65536, tier_blocks: {host: 0}}", "got 0; allowed: an integer of at least 1"),
        ("event: {stored: [1], worker: 65536, num_blocks: 0}", "got 0; allowed: an integer of at least 1"),
        ("event: {stored: [1], worker: 65536, residency: many}", "got 'many'; allowed: unique, "),
        (
            "use: {blocks: [1], plhs: [[null, 2, 3]]}",
            "allowed: [sequence hash, parent sequence hash or null, position]",
        ),
        (
            "use: {blocks: [1], plhs: [[1, 2, null]]}",
            "allowed: [sequence hash, parent sequence hash or null, position]",
        ),
        ("serve: {hashes: [1], cache_salt: x}", "'cache_salt' belongs to 'tokens': hashes include it already"),
    ],
)
def test_values_beyond_the_edge_are_refused(tmp_path, step, message):
    path = tmp_path / "x.kv.yaml"
    path.write_text(f"steps: [{{{step}}}]")
    with pytest.raises(YamlError) as raised:
        load_scenarios(path)
    assert message in str(raised.value)
