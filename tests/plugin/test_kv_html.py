"""`--kv-html`: one page per failing test."""

import json
import sys

import pytest

from pytest_kvmock import EngineProfile, Removed, RouterHarness, Stored
from pytest_kvmock.harness.reduce import states
from pytest_kvmock.oracle import RadixIndex
from pytest_kvmock.plugin.failure_page import failure_data

TESTS = """
import pytest
from pytest_kvmock.oracle import RadixIndex
from pytest_kvmock import Removed
from pytest_kvmock.fleets import synthetic_trace

class Forgets(RadixIndex):
    def apply(self, event):
        if not isinstance(event.event.data, Removed):
            super().apply(event)

@pytest.fixture
def kv_index(request):
    return Forgets() if request.node.name == "test_drifts" else None

def test_drifts(kv_sink):
    kv_sink(STORED)
    kv_sink(STORED_2)
    kv_sink(REMOVED)

def test_passes(kv_sink):
    kv_sink(STORED)

def test_fails_by_itself(kv_sink):
    kv_sink(STORED)
    assert 0, "<script>own</script>"

def test_uses_nothing():
    assert 0

@pytest.mark.xfail
def test_is_expected(kv_sink):
    kv_sink(STORED)
    assert 0

@pytest.fixture
def late(kv_sink):
    yield
    kv_sink(BAD)

def test_is_wrong_late(late):
    pass

@pytest.mark.kvmock(num_blocks=96, block_size=4, workers=2)
@pytest.mark.kv_backends("lru")
def test_fleet(kv_fleet):
    kv_fleet.run(synthetic_trace(6, block_size=4, input_tokens=(4, 24), output_tokens=(1, 4), interval_ms=10, prefix_blocks=(1, 1)))
    assert 0
""".replace("STORED_2", "Stored(1, (2,), (12,))").replace("STORED", "Stored(None, (1,), (11,))")  # noqa: E501
TESTS = TESTS.replace("REMOVED", "Removed((2,))").replace("BAD", "Removed((7,))")
FAILING = {"test_drifts", "test_fails_by_itself", "test_is_wrong_late", "test_fleet"}


class Deaf(RadixIndex):
    """Ignores each Removed."""

    def apply(self, event):
        if not isinstance(event.event.data, Removed):
            super().apply(event)


def data_of(path):
    return json.loads(path.read_text(encoding="utf-8").partition('id="data">')[2].partition("</script>")[0])


@pytest.fixture
def run(nested):
    return lambda *args, tests=TESTS: nested(tests, *args)


@pytest.fixture
def pages(run, pytester):
    """Return the data of the pages of all failing tests, by test name."""
    result = run("--kv-html=deep/pages")
    result.assert_outcomes(passed=2, failed=4, errors=1, xfailed=1)
    result.stdout.fnmatch_lines(["*Captured kvmock page call*", "*deep*pages*test_drifts*.html"])
    found = [data_of(path) for path in pytester.path.joinpath("deep", "pages").iterdir()]
    return {data["title"].partition("::")[2].partition("[")[0]: data for data in found}


def test_each_failing_test_that_uses_the_plugin_has_a_page(pages):
    assert set(pages) == FAILING
    assert pages["test_fails_by_itself"]["failure"].startswith("AssertionError: <script>own</script>")
    assert pages["test_fails_by_itself"]["problem"] is None
    assert pages["test_is_wrong_late"]["problem"]["rule"] == "block_not_found"
    assert len(pages["test_fleet"]["fleet"]["requests"]["number"]) == 6
    assert pages["test_drifts"]["fleet"] is None


def held(states, book, steps):
    """Return the blocks of a book after `steps` steps."""
    now = set(states["base"][book])
    for step in states["steps"][:steps]:
        now = now - set(step[book]["-"]) | set(step[book]["+"])
    return [states["held"][each][1:] for each in sorted(now)]


def test_a_page_shows_the_state_after_each_event(pages):
    data = pages["test_drifts"]
    states = data["states"]
    assert (data["opens"], data["problem"]["rule"]) == (2, "index_drift")
    assert [event["kind"] for event in data["events"]] == ["stored", "stored", "removed"]
    assert states["books"] == ["ledger", "reference", "index"]
    one, two = ["device", "1"], ["device", "2"]
    for book, last in (("ledger", [one]), ("reference", [one]), ("index", [one, two])):
        assert [[], [one], [one, two], last] == [held(states, book, steps) for steps in range(4)]
    assert states["parents"] == {"1": None, "2": "1"}
    worker = data["events"][0]["worker"]
    answers = states["steps"][2]["answers"]
    assert ({worker: 1}, {worker: 2}, "2") == (answers["reference"], answers["index"], answers["block"])
    assert [step["answers"]["differ"] for step in states["steps"]] == [False, False, True]


class Hides:
    """Its dump does not show the blocks by which it answers."""

    def __init__(self):
        self.answering, self.dumped = Deaf(), RadixIndex()

    def apply(self, event):
        self.answering.apply(event)
        self.dumped.apply(event)

    def find_matches(self, local_hashes):
        return self.answering.find_matches(local_hashes)

    def dump_events(self):
        return self.dumped.dump_events()


class Mute(Deaf):
    dump_events = None


@pytest.mark.parametrize(
    ("index", "before", "after"),
    [
        (Deaf, "on which all agree", "which the books hold alike, though the answers above differ"),
        (Hides, "on which all agree", "which the books hold alike, though the answers above differ"),
        (Mute, "which ledger and reference hold alike", "which the books hold alike, though the answers above differ"),
        (None, "which ledger and reference hold alike", "which ledger and reference hold alike"),
    ],
)
def test_chains_left_out_of_a_page_do_not_hide_different_answers(index, before, after):
    """The index ignores a Removed: its wrong answer is no agreement, whether the chain is shown or not."""
    kv = RouterHarness(backend="lru", index=None if index is None else index())
    kv.apply([Stored(None, (1,), (11,)), Stored(None, (2,), (12,)), Removed((2,))])
    found = failure_data(kv, "")["states"]
    assert [before, before, after] == [step["left_out"] for step in found["steps"]]
    assert before == found["left_out"]


def test_a_page_has_the_smallest_reproduction_even_of_a_short_test(pages):
    assert "def test_reproduction(" in pages["test_drifts"]["reproduction"]


def test_without_a_failure_nothing_is_loaded_or_written(run, pytester, monkeypatch):
    for name in [
        name for name in sys.modules if name.startswith(("pytest_kvmock.values.pages", "pytest_kvmock.harness.reduce"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "pytest_kvmock.plugin.failure_page", raising=False)
    result = run("--kv-html=pages", "-k", "test_passes")
    result.assert_outcomes(passed=1, deselected=6)
    assert not pytester.path.joinpath("pages").exists()
    assert {"pytest_kvmock.values.pages", "pytest_kvmock.plugin.failure_page"}.isdisjoint(sys.modules)


def test_an_unwritable_directory_is_reported_in_one_line_after_the_failure(run, monkeypatch):
    from pytest_kvmock.plugin import failure_page

    def refuse(*_):
        raise PermissionError(13, "Permission denied", "pages")

    monkeypatch.setattr(failure_page, "write_page", refuse)
    result = run("--kv-html=pages", "-k", "test_fails_by_itself")
    result.assert_outcomes(failed=1, deselected=6)
    result.stdout.fnmatch_lines(
        [
            "E * AssertionError: <script>own</script>",
            "*Captured kvmock page call*",
            "none: --kv-html=pages: PermissionError: * Permission denied: 'pages'",
        ]
    )
    assert str(result.stdout).count("--kv-html") == 1


def test_a_value_that_is_not_a_directory_is_refused(run, pytester):
    pytester.path.joinpath("file").write_text("", encoding="utf-8")
    result = run("--kv-html=file")
    result.stderr.fnmatch_lines(["ERROR: --kv-html: got 'file'; allowed: a directory, which need not exist yet"])


@pytest.mark.parametrize(
    ("index", "note"),
    [
        ("class Index:\n    def __init__(self, other): self.other = other\n", "could not rebuild your index"),
        ("class Index:\n    def __init__(self, other=None): self.other = RadixIndex()\n", "has no dump_events"),
    ],
)
def test_an_index_that_cannot_be_rebuilt_or_dumped_is_named(run, pytester, index, note):
    run(
        "--kv-html=pages",
        tests=f"""
import pytest
from pytest_kvmock import Stored
from pytest_kvmock.oracle import RadixIndex

{index}
    def apply(self, event): pass
    def find_matches(self, hashes): return {{}}

@pytest.fixture
def kv_index():
    return Index(3)

def test(kv_sink):
    kv_sink(Stored(None, (1,), (11,)))
""",
    )
    (page,) = pytester.path.joinpath("pages").iterdir()
    data = data_of(page)
    assert data["states"]["books"] == ["ledger", "reference"]
    assert any(note in each for each in data["notes"])
    asked = data["states"]["steps"][0]["answers"]
    assert asked.get("index") == ({} if "dump" in note else None)


def test_an_async_index_is_awaited_for_its_page(run, pytester):
    run(
        "--kv-html=pages",
        tests="""
import pytest
from pytest_kvmock import Stored
from pytest_kvmock.oracle import RadixIndex

class Index:
    def __init__(self): self.index = RadixIndex()
    async def apply(self, event): self.index.apply(event)
    async def find_matches(self, hashes): return self.index.find_matches(hashes).scores
    async def dump_events(self): return self.index.dump_events()

@pytest.fixture
def kv_index():
    return Index()

def test(kv_sink):
    kv_sink(Stored(None, (1,), (11,)))
""",
    )
    (page,) = pytester.path.joinpath("pages").iterdir()
    states = data_of(page)["states"]
    assert held(states, "index", 1) == [["device", "1"]]


def test_a_problem_found_at_the_end_opens_at_the_last_event_of_its_block():
    kv = RouterHarness(backend="lru", index=Deaf(), sync="end")
    for block in range(1, 40):
        kv.apply([Stored(None, (block,), (block,)), Removed((block,))])
    kv.judge()
    problem = kv.events.errors[0]
    data = failure_data(kv, "", problem)
    event = data["events"][data["opens"]]
    assert ("removed", [data["problem"]["block"]]) == (event["kind"], event["blocks"])
    assert problem.position > data["opens"]


def test_with_many_held_blocks_a_page_has_fewer_steps(monkeypatch):
    monkeypatch.setattr(states, "MOST_LOOKED", 3_000)
    monkeypatch.setattr(states, "MOST_HELD", 50)
    kv = RouterHarness(backend="lru", index=RadixIndex())
    for block in range(1, 450):
        kv.apply([Stored(None, (block,), (block,))], block % 2)
    found = states.states(kv, 400, 1)
    assert 390 < found["first"] < 400
    assert 400 < found["first"] + len(found["steps"]) < 410
    assert {worker for worker, *_ in found["held"]} == {"1"}
    assert found["notes"] == ["More than 50 blocks are held: those of worker 1 are shown."]
    assert [at for at, step in enumerate(found["steps"], found["first"]) if step["answers"]["block"] == "401"] == [400]


def test_steps_that_take_too_long_end_after_the_problem(monkeypatch):
    monkeypatch.setattr(states, "BEFORE", 10)
    kv = RouterHarness(backend="lru", index=RadixIndex())
    for block in range(1, 100):
        kv.apply([Stored(None, (block,), (block,))])
    found = states.states(kv, 60, 0, expired=lambda: True)
    assert (found["steps"], "took too long" in found["notes"][0]) == ([], True)
    asked = iter(range(1_000))
    found = states.states(kv, 60, 0, expired=lambda: next(asked) > 52)
    assert (found["first"], len(found["steps"])) == (50, 14)


def test_a_dropped_history_is_noted_on_the_page():
    kv = RouterHarness(backend="lru")
    kv.apply([Stored(None, (1,), (1,))])
    kv.recording.cut()
    assert failure_data(kv, "")["notes"] == [
        "The history of this harness was dropped: what was held cannot be rebuilt."
    ]


def test_unpublished_blocks_are_only_in_the_ledger():
    kv = RouterHarness(EngineProfile(prefix_caching=False), backend="lru", judge_unpublished=True)
    kv.worker(0).serve(kv.prompt(blocks=2), 1)
    found = failure_data(kv, "")["states"]
    assert [len(held(found, book, len(found["steps"]))) for book in ("ledger", "reference")] == [2, 0]
