"""The engine of the documentation and the test that its page teaches: a bug in one line is found and reported first."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/how-to/own-engine.md").read_text(encoding="utf-8")
(EXAMPLE,) = (
    text for text in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) if "class MyEngine:" in text
)
DEFAULT = EXAMPLE.replace("chained=True, ", "")
SEEDS = range(4)

REMOVED = "self.send(Removed((oldest,)))"
STORED = "self.send(Stored(parent, tuple(blocks[hits:]), tuple(local[hits:])), token_ids)"
PARENT = "blocks[hits - 1] if hits else None"
HASHES = "blocks = sequence_hashes(local)"

BUGS = {
    "a missing Removed": (REMOVED, f"oldest % 5 and {REMOVED}", {"engine_drift"}),
    "a missing Removed now and then": (REMOVED, f"self.next_id % 9 and {REMOVED}", {"engine_drift"}),
    "a parent before its child": ("reversed(blocks)", "blocks", {"orphaned_child"}),
    "a wrong parent that is held": (PARENT, "blocks[hits // 2] if hits > 1 else None", {"wrong_hash"}),
    "no parent": (PARENT, "None", {"wrong_hash"}),
    "a wrong parent that is not held": (PARENT, "blocks[hits - 1] ^ 1 if hits else None", {"parent_block_not_found"}),
    "itself as the parent": (PARENT, "blocks[hits]", {"invalid_block"}),
    "a doubled Stored": (STORED, f"{STORED}; len(blocks) == 4 and {STORED}", {"duplicate_store"}),
    "a wrong hash in an event": ("tuple(blocks[hits:])", "(*blocks[hits:-1], blocks[-1] ^ 1)", {"wrong_hash"}),
    "a wrong hash in engine and event": (
        HASHES,
        f"{HASHES}; blocks[3:4] = [b ^ 1 for b in blocks[3:4]]",
        {"wrong_hash"},
    ),
    "an id left out after a Stored": (STORED, f"{STORED}; self.next_id += len(blocks) == 5", {"event_id_gap"}),
    "an id left out now and then": ("self.next_id += 1", "self.next_id += 1 + (self.next_id == 50)", {"event_id_gap"}),
}
ONLY_WHERE_IT_IS_SAID = {
    "a chain of another kind": (HASHES, f"{HASHES}; blocks = [b ^ 1 for b in blocks]", {"wrong_hash"}),
    "tokens of another block": ("block_hashes(tokens, 16)", "block_hashes([*tokens[1:], 0], 16)", {"wrong_hash"}),
}


def first_rules(nested, source, old, new):
    """Return the rule that each test reports first, with one test per seed; all of them fail."""
    assert source.count(old) == 1
    broken = source.replace(old, new)
    files = {f"test_{seed}.py": broken.replace("Random(0)", f"Random({seed})") for seed in SEEDS}
    result = nested("", "--kv-reduce=off", "--tb=line", files=files)
    result.assert_outcomes(failed=len(SEEDS))
    return set(re.findall(r"EventRulesBroken: \d+ KV event \w+: (\w+) ", result.stdout.str()))


@pytest.mark.parametrize("bug", [*BUGS, *ONLY_WHERE_IT_IS_SAID])
def test_each_bug_is_reported_first(nested, bug):
    old, new, rules = (BUGS | ONLY_WHERE_IT_IS_SAID)[bug]
    assert rules == first_rules(nested, EXAMPLE, old, new)


@pytest.mark.parametrize("bug", BUGS)
def test_each_bug_is_reported_first_if_the_sink_detects_the_hash_chain(nested, bug):
    old, new, rules = BUGS[bug]
    assert rules == first_rules(nested, DEFAULT, old, new)


@pytest.mark.parametrize("source", [EXAMPLE, DEFAULT], ids=["said", "found out"])
def test_the_engine_of_the_page_is_right(nested, source):
    files = {f"test_{seed}.py": source.replace("Random(0)", f"Random({seed})") for seed in range(10)}
    nested("", files=files).assert_outcomes(passed=10)


def test_the_engine_of_the_page_is_the_one_of_the_example():
    example = (Path(__file__).parents[2] / "examples/own_manager/test_own_manager.py").read_text(encoding="utf-8")
    engine = re.search(r"class MyEngine.*?\n\n\n", EXAMPLE, re.DOTALL)
    assert engine is not None
    assert engine[0] in example
