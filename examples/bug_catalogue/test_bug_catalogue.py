"""Bugs of real routers and engines, each as a small failing test with its output.

`pytest examples/bug_catalogue/bug_05_cleared_is_ignored.py` shows one. This test runs all of them and compares the
output with the text file of each; KVMOCK_WRITE_DOCS=1 writes the files.
"""

import os
from pathlib import Path

import pytest

# A nested run unloads the modules that it has loaded; modules loaded here stay.

HERE = Path(__file__).parent
BUGS = sorted(HERE.glob("bug_*.py"))
BACKENDS = {
    "bug_01_arrays_then_maps": "vllm",
    "bug_09_match_over_a_hole": "lru",
    "bug_23_least_of_all_groups": "vllm_kimi_k3",
    "bug_24_span_divided_by_hashes": "vllm_deepseek_v4",
    "bug_27_names_without_the_next_token": "vllm_mtp",
    "bug_30_pairs_by_a_flag": "sglang",
    "bug_31_partial_blocks_count": "trtllm",
    "bug_33_stored_twice_counts_twice": "trtllm",
    "bug_36_the_host_keeps_all": "sglang",
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda path: path.stem)
def test_the_bug_is_caught_and_explained(bug, pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_PLUGINS", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    for file in (HERE / "sound_index.py", HERE / "own_tokens.py", bug):
        (pytester.path / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    backend = BACKENDS.get(bug.stem, "lineage")

    result = pytester.runpytest_inprocess("-p", "kvmock", "-p", "no:cacheprovider", f"--kv-backend={backend}", bug.name)

    result.assert_outcomes(failed=1)
    printed = result.stdout.str().split(" FAILURES ")[1].partition("\n")[2].partition("\n=====")[0]
    text = bug.with_suffix(".txt")
    if os.environ.get("KVMOCK_WRITE_DOCS"):
        text.write_text(printed + "\n", encoding="utf-8")
    assert text.read_text(encoding="utf-8") == printed + "\n"


def test_every_bug_is_listed():
    listed = (HERE / "README.md").read_text(encoding="utf-8")
    assert [bug.name for bug in BUGS if f"`{bug.name}`" not in listed] == []
