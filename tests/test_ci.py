"""The workflows of CI agree with `.ci/run` and CONTRIBUTING.md."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from pytest_kvmock.servers.serve.listening import MOST_BODY

ROOT = Path(__file__).parents[1]
RUN = (ROOT / ".ci/run").read_text(encoding="utf-8")
LANES = re.search(r"^LANES=\((.*)\)$", RUN, re.MULTILINE)[1].split()
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / ".github/workflows").glob("*.yml"))
}
JOB = WORKFLOWS["ci"]["jobs"]["lane"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TEMPLATES = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


def body_of(function):
    return re.search(rf"^{function}\(\) {{\n(.*?)^}}$", RUN, re.MULTILINE | re.DOTALL)[1]


def steps_of(function):
    """Return the steps of a function of `.ci/run`, and those of the functions that it calls."""
    body = body_of(function)
    called = [
        name
        for name in re.findall(r"^ +([a-z_]+)$", body, re.MULTILINE)
        if re.search(rf"^{name}\(\)", RUN, re.MULTILINE)
    ]
    return [*re.findall(r"\bstep (['\"].*?['\"]) ", body), *(step for name in called for step in steps_of(name))]


def test_the_workflow_runs_each_lane_with_deep_tests_on_one_python_and_quick_tests_on_the_others():
    matrix = JOB["strategy"]["matrix"]
    assert sorted([*matrix["lane"], "quick"]) == sorted(LANES)
    assert {each["lane"] for each in matrix["include"]} == {"quick"}
    assert "deep" in matrix["lane"]
    assert [step["run"] for step in JOB["steps"] if "run" in step] == [".ci/run ${{ matrix.lane }}"]


def test_each_step_is_in_one_lane():
    steps = [step for lane in LANES for step in steps_of(lane)]
    assert sorted(re.findall(r"\bstep (['\"].*?['\"]) ", RUN)) == sorted([*steps, "'sdist and wheel'"])


def test_all_of_ci_runs_every_lane_except_quick():
    bodies = "".join(map(body_of, ("everything", "all_deep", "others", "interop_newer")))
    assert [lane for lane in LANES if not re.search(rf"\b{lane}\b", bodies)] == ["quick"]


def test_the_tests_run_deep_once_and_quick_elsewhere():
    deep = [name for name in re.findall(r"^(\w+)\(\) {", RUN, re.MULTILINE) if "KVMOCK_DEEP=1" in body_of(name)]
    assert deep == ["newest_tests", "newest_examples", "interop", "served", "browser"]
    assert "readme 'tests'" in body_of("newest_tests")
    assert "pytest -n 2 examples" in body_of("newest_examples")
    assert "readme 'tests'" in body_of("quick_tests")


@pytest.mark.parametrize("function", ["quick_tests", "oldest", "sdist_without_contrib"])
def test_a_quick_lane_fails_slow_tests(function):
    assert "--most-cpu" in body_of(function)


def test_the_sdist_is_tested():
    assert "-m build" in body_of("distributions")
    assert "pytest_kvmock-*.tar.gz" in body_of("sdist_without_contrib")


def test_steps_are_summed_up_with_their_seconds(tmp_path):
    (tmp_path / "steps").write_text("0 12 0 3 lint, types\n1 5 2 40 tests of a room\n", encoding="utf-8")
    script = f"source '{ROOT}/.ci/run'; rm -r \"$work\"; work='{tmp_path}'; summary || echo bad; work=; trap - EXIT"
    done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == (
        "\n     s  passed  step\n    40       5  tests of a room\n     3      12  lint, types\nFAILED: tests of a "
        "room\n17 passed, 2 failed\nbad\n"
    )


def test_the_workflow_tests_each_declared_python():
    matrix = JOB["strategy"]["matrix"]
    versions = {*matrix["python"], *(each["python"] for each in matrix["include"])}
    named = (
        re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", each) for each in PROJECT["project"]["classifiers"]
    )
    assert {found[1] for found in named if found} == versions


JOBS = [
    (name, job, work) for name, each in WORKFLOWS.items() for job, work in each["jobs"].items() if "uses" not in work
]
each_job = pytest.mark.parametrize(("name", "job", "work"), JOBS, ids=[f"{name}-{job}" for name, job, _ in JOBS])


@each_job
def test_each_job_has_a_time_limit_and_tagged_actions(name, job, work):
    assert work["timeout-minutes"] <= 30
    used = [step["uses"] for step in work["steps"] if "uses" in step]
    assert [each for each in used if not re.search(r"@(v\d+|release/v\d+)$", each)] == []


@pytest.mark.parametrize(("name", "job"), [("ci", "lane"), ("docs", "site")])
def test_pip_packages_are_cached(name, job):
    set_ups = [step["with"] for step in WORKFLOWS[name]["jobs"][job]["steps"] if "setup-python" in step.get("uses", "")]
    assert [(each["cache"], each["cache-dependency-path"]) for each in set_ups] == [("pip", "pyproject.toml")]


def test_a_release_needs_a_tag_and_all_lanes_and_uses_no_secret():
    release = WORKFLOWS["release"]
    assert release[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    jobs = release["jobs"]
    assert jobs["lanes"]["uses"] == "./.github/workflows/ci.yml"
    assert "workflow_call" in WORKFLOWS["ci"][True]
    assert (jobs["build"]["needs"], jobs["publish"]["needs"]) == ("lanes", "build")
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets" not in str(release)


def test_the_site_is_published_from_main():
    docs = WORKFLOWS["docs"]
    assert docs[True] == {"push": {"branches": ["main"]}}
    assert any("mkdocs build --strict" in step.get("run", "") for step in docs["jobs"]["site"]["steps"])
    assert docs["jobs"]["publish"]["needs"] == "site"


def test_dependabot_updates_actions_and_a_linter_checks_workflows():
    updates = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text(encoding="utf-8"))["updates"]
    assert [each["package-ecosystem"] for each in updates] == ["github-actions"]
    assert "zizmor" in body_of("workflows")
    assert "step 'workflows' workflows" in body_of("static_checks")


def test_extras_are_for_users_and_groups_for_checks():
    assert set(PROJECT["project"]["optional-dependencies"]) == {
        "wire",
        "zmq",
        "serve",
        "hypothesis",
        "dask",
        "lmcache",
        "test",
    }
    groups = PROJECT["dependency-groups"]
    assert set(re.findall(r'--group "\$groups:([\w-]+)"', RUN.replace('"$groups:NAME"', ""))) <= set(groups)
    assert "pip>=25.1" in body_of("distributions")


def test_the_project_has_a_repository_url():
    assert PROJECT["project"]["urls"] == {"Repository": "https://github.com/pytest-kvmock/pytest-kvmock"}


def test_an_unknown_lane_is_refused_in_one_line():
    done = subprocess.run(["bash", str(ROOT / ".ci/run"), "lint"], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f".ci/run: there is no lane lint; there are: {' '.join(LANES)}\n")


def test_pre_commit_runs_the_checks_of_contributing():
    line = re.search(r"^\.venv/bin/ruff check.*", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)[
        0
    ]
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert line.replace(".venv/bin/", "").split(" && ") == [hook["entry"] for hook in repo["hooks"]]
    assert {hook["language"] for hook in repo["hooks"]} == {"system"}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_report_template_requires_a_reproduction_and_versions(path):
    asked = {each["id"]: each for each in yaml.safe_load(path.read_text(encoding="utf-8"))["body"]}
    assert {"reproduction", "versions"} <= {*asked}
    assert asked["reproduction"]["attributes"]["render"] == "python"
    assert all(each["validations"]["required"] for each in asked.values())


def test_there_are_three_report_templates():
    assert [path.stem for path in TEMPLATES] == [
        "engine_differs",
        "right_implementation_fails",
        "wrong_implementation_passes",
    ]


def test_the_security_page_states_the_limit_of_the_code():
    assert f"bodies above {MOST_BODY // 2**20} MiB" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")
