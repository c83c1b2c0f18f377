"""What runs elsewhere is what `.ci/run` and CONTRIBUTING.md say."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from pytest_kvmock.serve.listening import MOST_BODY

ROOT = Path(__file__).parents[1]
RUN = (ROOT / ".ci/run").read_text(encoding="utf-8")
LANES = re.search(r"^LANES=\((.*)\)$", RUN, re.MULTILINE)[1].split()
JOB = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]["lane"]
TEMPLATES = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


def body_of(function):
    return re.search(rf"^{function}\(\) {{\n(.*?)^}}$", RUN, re.MULTILINE | re.DOTALL)[1]


def steps_of(function):
    """The steps of a function of `.ci/run`, and of those that it calls."""
    body = body_of(function)
    called = [
        name
        for name in re.findall(r"^ +([a-z_]+)$", body, re.MULTILINE)
        if re.search(rf"^{name}\(\)", RUN, re.MULTILINE)
    ]
    return [*re.findall(r"\bstep (['\"].*?['\"]) ", body), *(step for name in called for step in steps_of(name))]


def test_the_workflow_runs_each_lane():
    matrix = JOB["strategy"]["matrix"]
    assert LANES == matrix["lane"]
    assert {"newest_python"} == {each["lane"] for each in matrix["include"]}
    assert [".ci/run ${{ matrix.lane }}"] == [step["run"] for step in JOB["steps"] if "run" in step]


def test_lanes_have_all_steps_once():
    steps = [step for lane in LANES for step in steps_of(lane)]
    assert sorted(re.findall(r"\bstep (['\"].*?['\"]) ", RUN)) == sorted([*steps, "'wheel'"])


def test_all_of_ci_is_all_lanes():
    bodies = body_of("everything") + body_of("others") + body_of("interop_newer")
    assert [] == [lane for lane in LANES if not re.search(rf"\b{lane}\b", bodies)]


def test_the_workflow_tries_each_python_that_is_named():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    matrix = JOB["strategy"]["matrix"]
    versions = {*matrix["python"], *(each["python"] for each in matrix["include"])}
    assert {*re.findall(r"Python :: (3\.\d+)", project)} <= versions


def test_a_lane_that_is_not_there_is_one_line():
    done = subprocess.run(["bash", str(ROOT / ".ci/run"), "lint"], check=False, capture_output=True, text=True)
    assert (2, f".ci/run: there is no lane lint; there are: {' '.join(LANES)}\n") == (done.returncode, done.stderr)


def test_pre_commit_has_the_checks_of_contributing():
    line = re.search(r"^\.venv/bin/ruff check.*", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)[
        0
    ]
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert line.replace(".venv/bin/", "").split(" && ") == [hook["entry"] for hook in repo["hooks"]]
    assert {"system"} == {hook["language"] for hook in repo["hooks"]}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_report_asks_for_what_can_be_pasted_and_for_versions(path):
    asked = {each["id"]: each for each in yaml.safe_load(path.read_text(encoding="utf-8"))["body"]}
    assert {"reproduction", "versions"} <= {*asked}
    assert "python" == asked["reproduction"]["attributes"]["render"]
    assert all(each["validations"]["required"] for each in asked.values())


def test_there_is_a_report_for_each_of_three():
    assert ["engine_differs", "right_implementation_fails", "wrong_implementation_passes"] == [
        path.stem for path in TEMPLATES
    ]


def test_the_limits_of_the_page_on_security_are_those_of_the_code():
    assert f"bodies above {MOST_BODY // 2**20} MiB" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")
