"""`--kv-capture`: one file per test, with everything that its router received."""

import json

import pytest
from depth import takes_long
from scenario_files import need_scenario_files

from pytest_kvmock.plugin.captures import file_name
from pytest_kvmock.servers import check_file

TESTS = """
def test_serves(kv_worker, kv_prompt):
    for _ in range(3):
        kv_worker.serve(kv_prompt(blocks=2))

def test_is_wrong(kv_sink):
    kv_sink(GOOD)
    kv_sink(BAD)

def test_uses_nothing():
    pass

@pytest.fixture
def late(kv_sink):
    yield
    kv_sink(BAD)

def test_is_wrong_late(late):
    pass

def test_fails_by_itself(kv_worker, kv_prompt):
    kv_worker.serve(kv_prompt(blocks=2))
    assert 0

@pytest.mark.kvmock(faults={"lose": 0.3})
@pytest.mark.kv_backends("vllm")
def test_loses(kv_harness, kv_prompt):
    for _ in range(10):
        kv_harness.worker(0).serve(kv_prompt(blocks=2))
"""
NAMES = {
    "test_serves[lru]",
    "test_is_wrong",
    "test_is_wrong_late",
    "test_fails_by_itself[lru]",
}


@pytest.fixture
def captures(nested, pytester):
    def run(*args, code=TESTS, plugins=(), **given):
        result = nested(code, "--kv-backend=lru", "--kv-capture=out/captures", *args, plugins=[*plugins], **given)
        out = {}
        for path in (pytester.path / "out" / "captures").iterdir():
            header = json.loads(path.read_text().partition("\n")[0])
            out[header["test"].partition("::")[2]] = path
        return result, out

    return run


@pytest.mark.parametrize(
    ("args", "plugins"), [([], []), pytest.param(["-n", "2"], ["xdist"], marks=takes_long)], ids=["alone", "xdist"]
)
def test_each_test_has_its_own_capture_file(captures, args, plugins):
    result, files = captures(*args, plugins=plugins)

    assert files.keys() == NAMES
    assert [path for path in files.values() if not check_file(path).complete] == []
    found = {name: [problem.rule for problem in check_file(path).errors] for name, path in files.items()}
    assert {name: ["block_not_found"] * ("wrong" in name) for name in NAMES} == found
    assert result.parseoutcomes()["errors"] == 1


def test_the_header_of_a_capture_names_backend_profile_and_test(captures):
    _, files = captures("--kv-seed=7", "-k", "serves")

    header = json.loads(files["test_serves[lru]"].read_text().partition("\n")[0])

    assert header["kvmock_capture"] == 1
    assert header["engine"]["backend"] == "lru"
    assert "kvbm-logical" in header["engine"]["models"]
    assert 7 == header["seed"] == header["profile"]["seed"]
    assert header["profile"]["block_size"] == 16
    assert header["test"].endswith("::test_serves[lru]")


def test_a_capture_contains_the_results_of_injected_faults(nested, pytester):
    nested(TESTS, "-o", "kvmock_backends=vllm", "--kv-capture=out", "-k", "test_loses")

    (path,) = (pytester.path / "out").iterdir()
    checked = check_file(path)
    assert {problem.rule for problem in checked.injected} == {"event_id_gap"}
    assert checked.is_clean


ON_A_WIRE = """
import pytest
from pytest_kvmock.wire.sockets import KvSubscriber

@pytest.mark.kv_dialects("vllm-0.33")
def test_loses_on_the_wire(kv_publisher, kv_harness, kv_sink, kv_worker, kv_prompt, kv_events):
    with KvSubscriber(kv_publisher.endpoint, kv_sink, dialect=kv_publisher.dialect, worker_id=kv_sink.worker_id) as router:
        kv_publisher.wait_subscribed()
        for step in range(3):
            if step == 1:
                kv_publisher.faults.lose()
            with kv_publisher.step():
                kv_worker.serve(kv_prompt(blocks=2))
        kv_events.expect_error("event_id_gap")
        router.receive(3)
"""  # noqa: E501


def test_a_capture_contains_the_results_of_wire_faults(nested, pytester):
    nested(ON_A_WIRE, "--kv-capture=out").assert_outcomes(passed=1)

    (path,) = (pytester.path / "out").iterdir()
    checked = check_file(path)
    assert [problem.rule for problem in checked.injected] == ["event_id_gap"]
    assert [*map(str, checked.faults)] == ["lose of batch 1 of worker 0"]
    assert checked.is_clean


@pytest.mark.parametrize("fault", ["corrupt", "unknown_tag"])
def test_an_unreadable_batch_is_attributed_to_the_fault_that_changed_it(nested, pytester, fault):
    nested(ON_A_WIRE.replace("lose()", f"{fault}()"), "--kv-capture=out").assert_outcomes(passed=1)

    checked = check_file(*(pytester.path / "out").iterdir())
    assert [problem.rule for problem in checked.injected] == ["event_id_gap"]
    assert checked.is_clean


TWICE = """
import pytest
from pytest_kvmock.wire.sockets import KvSubscriber

pytestmark = [pytest.mark.kv_dialects("vllm-0.33"), pytest.mark.kvmock(allow=["event_id_gap"])]

@pytest.fixture
def publish(kv_harness):
    def publish(batches, publisher, worker=0):
        for _ in range(batches):
            with publisher.step():
                kv_harness.worker(worker).serve(kv_harness.prompt(2))
    return publish

@pytest.fixture
def subscribed(make_kv_sink):
    def subscribed(publisher):
        router = KvSubscriber(publisher.endpoint, make_kv_sink(), dialect="vllm-0.33")
        publisher.wait_subscribed()
        return router
    return subscribed

def test_on_purpose(kv_publisher, publish, subscribed):
    with subscribed(kv_publisher) as router:
        publish(1, kv_publisher)
        kv_publisher.faults.lose()
        publish(2, kv_publisher)
        kv_publisher.faults.restart()
        publish(1, kv_publisher)
        kv_publisher.faults.lose()
        publish(2, kv_publisher)
        router.receive(6)

def test_late_after_a_restart(kv_publisher, publish, subscribed):
    with subscribed(kv_publisher) as router:
        kv_publisher.faults.lose()
        publish(3, kv_publisher)
        router.receive(3)
    kv_publisher.settle(lambda: not kv_publisher.subscriptions())  # else the next wait may count the one that ends
    kv_publisher.restart()
    publish(1, kv_publisher)
    with subscribed(kv_publisher) as router:
        publish(2, kv_publisher)
        router.receive(3)

def test_late_at_another(kv_publisher, make_kv_publisher, publish, subscribed):
    with subscribed(kv_publisher) as router:
        kv_publisher.faults.lose()
        publish(3, kv_publisher)
        router.receive(3)
    other = make_kv_publisher(1)
    publish(1, other, 1)
    with subscribed(other) as router:
        publish(2, other, 1)
        router.receive(3)
"""


def test_a_wire_fault_excuses_no_loss_after_a_restart_or_at_another_publisher(nested, pytester):
    nested(TWICE, "--kv-capture=out", "-o", "kvmock_workers=2").assert_outcomes(passed=3)

    found = {}
    for path in (pytester.path / "out").iterdir():
        checked = check_file(path)
        found[checked.header["test"].partition("::")[2].partition("[")[0]] = (
            [problem.observed for problem in checked.injected],
            [problem.observed for problem in checked.errors],
        )
    lost, other = "batch 0 did not arrive", "batch 1 did not arrive"
    assert {
        "test_on_purpose": ([other], []),
        **dict.fromkeys(["test_late_after_a_restart", "test_late_at_another"], ([lost], [lost])),
    } == found


def test_a_stream_in_another_dialect_fails_its_test_and_its_capture_is_not_clean(nested, pytester):
    code = ON_A_WIRE.replace("dialect=kv_publisher.dialect", "dialect='vllm-0.23'").replace(
        "kv_publisher.faults.lose()", "pass"
    )
    result = nested(code.replace('kv_events.expect_error("event_id_gap")', "pass"), "--kv-capture=out")
    result.stdout.fnmatch_lines(["*batch 0 cannot be read (wrong_form: *it reads as vllm-0.24, *"])

    checked = check_file(*(pytester.path / "out").iterdir())
    assert "it reads as vllm-0.24" in checked.problems[0].observed
    assert not checked.is_clean


def test_a_scenario_file_has_a_capture_too(nested, pytester):
    need_scenario_files()
    scenario = """
scenarios:
  serves:
    backends: [vllm]
    steps:
      - serve: {tokens: 0..47}
"""
    files = {"a.kv.yaml": scenario}
    result = nested("", "-o", "kvmock_scenarios=*", "--kv-capture=out", files=files)

    assert result.parseoutcomes()["passed"] == 1
    (path,) = (pytester.path / "out").iterdir()
    checked = check_file(path)
    assert checked.header["engine"]["backend"] == "vllm"
    assert checked.log.total
    assert checked.is_clean


def test_without_the_option_no_capture_is_written(nested, pytester):
    before = {*pytester.path.iterdir()}
    nested("def test(kv_worker, kv_prompt): kv_worker.serve(kv_prompt(blocks=2))", "--kv-backend=lru")
    assert [path for path in {*pytester.path.iterdir()} - before if path.suffix == ".jsonl"] == []


def test_a_file_where_the_directory_should_be_is_refused(nested, pytester):
    (pytester.path / "taken").write_text("")
    for given in ("taken", "taken/below", ""):
        result = nested("def test(): pass", f"--kv-capture={given}")
        assert result.ret == 4
        result.stderr.fnmatch_lines([f"*--kv-capture: got '{given}'; allowed: a directory, which need not exist yet"])


def test_an_unwritable_capture_fails_the_test_in_one_line(nested, pytester):
    name = file_name("test_it.py::test")
    (pytester.path / "out" / name).mkdir(parents=True)
    result = nested("", "--kv-capture=out", "test_it.py", files={"test_it.py": "def test(kv_events): pass"})
    result.assert_outcomes(errors=1)
    assert "kvmock: --kv-capture: " in result.stdout.str()
    assert "cannot be written: Is a directory" in result.stdout.str()


def test_different_test_ids_give_different_file_names():
    ids = ["t.py::test[a/b]", "t.py::test[a-b]", "t.py::test[a b]", "t.py::test[" + "x" * 500 + "]", "t.py::test[ä]"]
    names = [file_name(nodeid) for nodeid in ids]
    assert len(ids) == len({*names})
    assert all(len(name) < 150 and name.isascii() and "/" not in name for name in names)


def test_a_refused_harness_leaves_a_complete_capture(nested, pytester):
    code = """
@pytest.fixture
def kv_index():
    return object()

def test(kv_events):
    pass
"""
    result = nested(code, "--kv-capture=out", "-W", "error")
    result.assert_outcomes(errors=1)
    (path,) = (pytester.path / "out").iterdir()
    assert check_file(path).complete
