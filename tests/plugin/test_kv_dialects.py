"""The matrix of dialects, and the wire fixtures."""

import re
import sys

import pytest

SPOKEN = [
    *(f"vllm-{release}" for release in ("0.9", "0.10.2", "0.14", "0.19", "0.23", "0.24", "0.28", "0.33")),
    *(f"sglang-{release}" for release in ("0.5.9", "0.5.18", "0.5.20", "0.5.22")),
]


def ran(result):
    return re.findall(r"ran on (\S+)", result.stdout.str())


@pytest.mark.parametrize("fixture", ["kv_dialect", "kv_wire", "kv_publisher", "make_kv_publisher"])
def test_a_test_that_needs_a_dialect_runs_once_for_each_dialect(ids, fixture):
    assert [f"test[{name}]" for name in SPOKEN] == ids(f"def test({fixture}): pass")


def test_the_dialect_selects_an_engine_that_speaks_it(nested):
    result = nested("def test(kv_dialect, kv_harness): print('ran on', f'{kv_dialect}={kv_harness.backend}')", "-s")
    engines = ["vllm_0_19"] * 5 + ["vllm"] * 3 + ["sglang"] * 4
    assert [f"{name}={engine}" for name, engine in zip(SPOKEN, engines, strict=True)] == ran(result)


def test_the_engine_has_the_release_of_the_dialect(nested):
    """Names of blocks with salts, adapters and multimodal items differ between releases."""
    result = nested(
        "def test(kv_dialect, kv_manager): print('ran on', f'{kv_dialect}={kv_manager.version.name}')",
        "-s",
        *(f"--kv-dialect={name}" for name in SPOKEN[:8]),
    )
    releases = ["0.9.2", "0.10.2", "0.14.1", "0.19.1", "0.19.1", "0.24.0", "0.28.0", "0.33.0"]
    assert [f"{name}={release}" for name, release in zip(SPOKEN, releases, strict=False)] == ran(result)


def test_a_backend_that_the_test_requests_keeps_its_release(nested):
    result = nested(
        """
        import pytest

        @pytest.mark.kv_backends("vllm")
        def test(kv_wire, kv_manager): print("ran on", kv_manager.version.name)
        """,
        "-s",
        "--kv-dialect=vllm-0.14",
    )
    assert ran(result) == ["0.33.0"]


def test_publishers_fill_in_the_rank_as_in_their_releases(nested):
    result = nested(
        """
        import msgspec

        def test(kv_dialect, kv_wire, kv_worker, kv_prompt):
            kv_worker.serve(kv_prompt())
            print("ran on", msgspec.msgpack.decode(kv_wire.payloads[-1])[2])
        """,
        "-s",
    )
    assert ["0"] * len(SPOKEN) == ran(result)


OF_ANOTHER_ENGINE = """
from pytest_kvmock.wire import DIALECTS

def pytest_kvmock_dialects():
    return {{"mine": DIALECTS["vllm-0.24"].variant("mine", {})}}
"""


def test_a_custom_dialect_is_spoken_by_the_backend_that_it_names(nested):
    source = "def test(kv_wire, kv_harness): print('ran on', kv_harness.backend)"
    result = nested(
        source,
        "-s",
        "--kv-dialect=mine",
        files={"conftest.py": OF_ANOTHER_ENGINE.format("backend='lineage'")},
    )
    assert ran(result) == ["lineage"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("backend='lineag'", ("kv_dialect 'mine' is spoken by backend 'lineag': unknown backend 'lineag'; did you mean "
        "'lineage'*")),
        ("version='0.24.9'", ("kv_dialect 'mine' is spoken by backend 'vllm', version '0.24.9': unknown vLLM version "
        "'0.24.9'; known: 0.33.0, *")),
        ("backend='lineage', version='1'", ("kv_dialect 'mine' is spoken by backend 'lineage', version '1': backend "
        "'lineage' has no option 'version'*")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("fixture", ["kv_harness", "kv_worker", "kv_traits"])
def test_a_dialect_whose_engine_does_not_exist_is_refused_in_one_line(nested, changes, message, fixture):
    source = f"def test(kv_wire, {fixture}): pass"
    result = nested(source, "--kv-dialect=mine", files={"conftest.py": OF_ANOTHER_ENGINE.format(changes)})
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"kvmock: {message}"])


ASKED = {
    "an argument": "def test(kv_dialect, kv_backend): pass",
    "a marker": "@pytest.mark.kv_backends('lineage', 'lru', 'multi_lru')\ndef test(kv_wire): pass",
    "usefixtures": "@pytest.mark.usefixtures('kv_backend')\ndef test(kv_wire): pass",
}


@pytest.mark.parametrize("case", ASKED)
def test_a_test_that_requests_dialects_and_backends_runs_over_all_pairs(ids, case):
    found = ids("pytestmark = pytest.mark.kv_dialects('vllm-0.33', 'sglang-0.5.22')\n" + ASKED[case])
    assert {"test[vllm-0.33-lineage]", "test[sglang-0.5.22-multi_lru]"} < {*found}
    assert len(found) == 6


NARROWED = {
    "marker": (("@pytest.mark.kv_dialects('vllm-0.24', 'sglang-0.5.20')\ndef test(kv_dialect): "
    "pass"), (), ["vllm-0.24", "sglang-0.5.20"]),
    "exclude": ("@pytest.mark.kv_dialects(exclude='vllm-0.9')\ndef test(kv_dialect): pass", (), SPOKEN[1:]),
    "the closest": (
        ("pytestmark = pytest.mark.kv_dialects('vllm-0.9')\n@pytest.mark.kv_dialects('vllm-0.14')\ndef "
        "test(kv_dialect): pass"),
        (),
        ["vllm-0.14"],
    ),
    "command line": (("def test(kv_dialect): "
    "pass"), ("--kv-dialect=vllm-0.28", "--kv-dialect=sglang-0.5.9"), ["vllm-0.28", "sglang-0.5.9"]),
    "parametrize": (
        ("@pytest.mark.parametrize('kv_dialect', ['vllm-0.19'])\ndef test(kv_dialect, kv_wire): assert "
        "kv_wire.dialect.name == 'vllm-0.19'"),
        (),
        ["vllm-0.19"],
    ),
    "one that is not in the matrix": (
        "@pytest.mark.kv_dialects('sglang-0.5.23')\ndef test(kv_dialect): pass",
        (),
        ["sglang-0.5.23"],
    ),
    "all releases": ("@pytest.mark.kv_dialects('vllm')\ndef test(kv_dialect): pass", (), SPOKEN[:8]),
    "all releases but one": (
        "@pytest.mark.kv_dialects('sglang', exclude='sglang-0.5.18')\ndef test(kv_dialect): pass",
        (),
        [name for name in SPOKEN if name.startswith("sglang") and name != "sglang-0.5.18"],
    ),
    "no release": ("@pytest.mark.kv_dialects(exclude='vllm')\ndef test(kv_dialect): pass", (), SPOKEN[8:]),
    "all releases on the command line": ("def test(kv_dialect): pass", ("--kv-dialect=sglang",), SPOKEN[8:]),
    "all releases in ini": (("def test(kv_dialect): "
    "pass"), ("-o", "kvmock_dialects=sglang vllm-0.9"), [SPOKEN[0], *SPOKEN[8:]]),
    "ini": ("def test(kv_dialect): pass", ("-o", "kvmock_dialects=vllm-0.10.2"), ["vllm-0.10.2"]),
    "nothing left": (("@pytest.mark.kv_dialects('vllm-0.9')\ndef test(kv_dialect): "
    "pass"), ("--kv-dialect=vllm-0.14",), []),
}  # fmt: skip


@pytest.mark.parametrize("case", NARROWED)
def test_the_matrix_of_dialects_is_narrowed_like_the_one_of_backends(nested, case):
    source, args, expected = NARROWED[case]
    result = nested(source, "-v", *args)
    assert re.findall(r"::test\[(\S+)\] PASSED", result.stdout.str()) == expected


def test_a_marker_added_after_collection_deselects_dialects(nested):
    conftest = """
        import pytest
        def pytest_collection_modifyitems(items):
            for item in items:
                item.add_marker(pytest.mark.kv_dialects(exclude=("vllm-0.9",)))
    """
    nested("def test(kv_dialect): pass", files={"conftest.py": conftest}).assert_outcomes(passed=11, deselected=1)


WRONG = {
    "name": ("@pytest.mark.kv_dialects('vllm-0.34')\n", ("kv_dialects('vllm-0.34'): unknown dialect 'vllm-0.34'; did "
    "you mean 'vllm-0.33'")),
    "key": ("@pytest.mark.kv_dialects(exclud='x')\n", ("kv_dialects(exclud='x'): unknown key 'exclud'; did you mean "
    "'exclude'")),
    "of no socket": ("@pytest.mark.kv_dialects('dynamo-router-event')\n", ("kv_dialects('dynamo-router-event'): "
    "dialect 'dynamo-router-event' is not spoken over ZMQ; these are: vllm-0.9, ")),
    "of no socket, left out": ("@pytest.mark.kv_dialects(exclude='dynamo-kv-cache-event')\n", "dialect 'dynamo-kv-cache-event' is not spoken over ZMQ; these are: vllm-0.9, "),  # noqa: E501
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_dialect_marker_is_a_collection_error(nested, case):
    marker, message = WRONG[case]
    result = nested(f"{marker}def test(kv_dialect): pass")
    result.assert_outcomes(errors=1)
    assert message in result.stdout.str()


def test_an_unknown_dialect_on_the_command_line_is_a_usage_error(nested):
    result = nested("def test(): pass", "--kv-dialect=vlm-0.33")
    assert "--kv-dialect: unknown dialect 'vlm-0.33'; did you mean 'vllm-0.33'" in result.stderr.str()


@pytest.mark.parametrize("what", ["dialect", "backend"])
def test_names_separated_by_commas_are_refused_with_the_right_form(nested, what):
    ini = f"[pytest]\nkvmock_{what}s = vllm-0.33,vllm-0.24"
    result = nested("def test(): pass", files={"pytest.ini": ini})
    expected = "'vllm-0.33,vllm-0.24' has a comma: give names one by one, in ini with blanks or new lines between them"
    assert f"ERROR: pytest.ini: kvmock_{what}s: {expected}" in result.stderr.lines


def test_without_msgspec_a_wire_is_refused_at_setup(nested, monkeypatch):
    monkeypatch.setitem(sys.modules, "msgspec", None)
    result = nested("@pytest.mark.kv_dialects('vllm-0.33')\ndef test(kv_wire): pass")
    result.assert_outcomes(errors=1)
    expected = "kvmock: kv_wire: dialects of vLLM and SGLang need msgspec: pip install '/path/to/pytest-kvmock[wire]', with the path of your checkout"  # noqa: E501
    assert expected in result.stdout.lines


def test_without_extras_a_publisher_names_the_one_that_suffices(nested, monkeypatch):
    monkeypatch.setitem(sys.modules, "msgspec", None)
    monkeypatch.setitem(sys.modules, "zmq", None)
    result = nested("@pytest.mark.kv_dialects('vllm-0.33')\ndef test(kv_publisher): pass")
    result.assert_outcomes(errors=1)
    expected = "kvmock: kv_publisher: sockets of KV events need pyzmq: pip install '/path/to/pytest-kvmock[zmq]', with the path of your checkout"  # noqa: E501
    assert expected in result.stdout.lines


def test_a_dialect_without_sockets_on_the_command_line_is_a_usage_error(nested):
    result = nested("def test(): pass", "--kv-dialect=dynamo-router-event")
    assert "--kv-dialect: dialect 'dynamo-router-event' is not spoken over ZMQ; these are: " in result.stderr.str()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dynamo-router-event", "dialect 'dynamo-router-event' is not spoken over ZMQ; these are: vllm-0.9, *"),
        ("dynamo-kv-cache-event", "dialect 'dynamo-kv-cache-event' is not spoken over ZMQ; these are: vllm-0.9, *"),
    ],
)
def test_a_parameter_that_is_no_zmq_dialect_is_refused_in_one_line(nested, name, message):
    result = nested(f"@pytest.mark.parametrize('kv_dialect', [{name!r}])\ndef test(kv_wire): pass")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"kvmock: kv_dialect: {message}"])


def test_a_testcase_must_name_its_dialect(nested):
    result = nested(
        """
        class T(unittest.TestCase):
            @pytest.fixture(autouse=True)
            def use(self, kv_wire): self.wire = kv_wire
            @pytest.mark.kv_dialects("vllm-0.24")
            def test_named(self): assert self.wire.dialect.name == "vllm-0.24"
            def test_open(self): pass
        """
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(
        ["*the dialect of this test is open (vllm-0.9, *: pytest does not parametrise methods*"]
    )


def test_a_marker_with_a_prefix_added_after_collection_deselects_the_other_dialects(nested):
    conftest = """
        import pytest

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection_modifyitems(items):
            for item in items:
                item.add_marker(pytest.mark.kv_dialects("sglang"))
    """
    result = nested("def test(kv_dialect): pass", files={"conftest.py": conftest})
    result.assert_outcomes(passed=len(SPOKEN) - 8, deselected=8)


def test_a_custom_dialect_of_a_hook_can_be_used(nested):
    conftest = """
        import pytest
        from pytest_kvmock.wire import DIALECTS

        @pytest.hookimpl(optionalhook=True)
        def pytest_kvmock_dialects(config):
            return {"ours-1": DIALECTS["vllm-0.33"].variant("ours-1", backend="vllm")}
    """
    source = "@pytest.mark.kv_dialects('ours-1')\ndef test(kv_dialect, kv_harness): print('ran on', kv_dialect, kv_harness.backend)"  # noqa: E501
    result = nested(source, "-s", files={"conftest.py": conftest})
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*ran on ours-1 vllm*"])


def test_a_decoder_can_be_tested_in_three_lines(nested):
    nested(
        """
        from pytest_kvmock.wire import decode

        def test(kv_dialect, kv_wire, kv_worker, kv_prompt):
            with kv_wire.step():
                kv_worker.serve(kv_prompt(blocks=4))
            events = decode(kv_wire.payloads[-1], kv_dialect).events
            assert 4 == sum(len(event.event.data.block_hashes) for event in events)
        """
    ).assert_outcomes(passed=12)


def test_publishers_can_be_made_for_worker_0_and_for_others(nested):
    nested(
        """
        from pytest_kvmock.wire.sockets import KvSubscriber

        @pytest.mark.kvmock(workers=2)
        def test(kv_dialect, kv_publisher, make_kv_publisher, kv_harness, kv_prompt):
            prompts = [kv_prompt(blocks=1), kv_prompt(blocks=2)]
            received = [[], []]
            publishers = [kv_publisher, make_kv_publisher(1, topic="t")]
            subscribers = [
                KvSubscriber(p.endpoint, each.append, dialect=kv_dialect) for p, each in zip(publishers, received)
            ]
            for worker in (0, 1):
                publishers[worker].wait_subscribed()
                kv_harness.worker(worker).serve(prompts[worker])
                subscribers[worker].receive()
                subscribers[worker].close()
            assert [1, 2] == [sum(len(e.event.data.block_hashes) for e in each) for each in received]
        """,
        "-o", "kvmock_dialects=vllm-0.33 sglang-0.5.22",
    ).assert_outcomes(passed=2)  # fmt: skip


def test_events_of_a_teardown_after_the_publisher_is_closed_are_no_failure(nested):
    nested(
        """
        @pytest.fixture
        def warm(kv_worker):
            with kv_worker.prefill([1] * 16) as request:
                yield
                request.decode(32)

        @pytest.mark.kv_dialects("vllm-0.33")
        def test(warm, kv_publisher): pass
        """
    ).assert_outcomes(passed=1)


@pytest.mark.parametrize("args", [[], ["--kv-capture=captures"]])
def test_a_worker_publishes_to_a_publisher_that_replaces_a_closed_one(nested, args):
    nested(
        """
        from pytest_kvmock.wire.sockets import KvSubscriber

        @pytest.mark.kv_dialects("vllm-0.33")
        @pytest.mark.parametrize("endpoint", ["tcp", "ipc"])
        def test(make_kv_publisher, kv_harness, kv_prompt, endpoint):
            worker, prompt, received = kv_harness.worker(0), kv_prompt(), []
            publisher = make_kv_publisher(endpoint=endpoint)
            places = dict(endpoint=publisher.endpoint, replay=publisher.replay_endpoint)
            with KvSubscriber(publisher.endpoint, received.append, dialect="vllm-0.33") as subscriber:
                for life in range(3):
                    publisher.settle(lambda: subscriber.poll() or publisher.subscriptions())
                    worker.serve(prompt)
                    subscriber.receive()
                    assert (life + 1, 1) == (len(received), publisher.batches())
                    publisher.close()
                    worker.restart(announced=True)
                    publisher = make_kv_publisher(**places)
                assert 2 == len(subscriber.lost)
        """,
        *args,
    ).assert_outcomes(passed=2)


def test_a_worker_whose_publisher_is_closed_gets_one_error(nested):
    result = nested(
        """
        @pytest.mark.kv_dialects("vllm-0.33")
        def test(kv_publisher, kv_worker, kv_prompt):
            kv_publisher.close()
            for _ in range(3):
                kv_worker.serve(kv_prompt())
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "1 KV event error: sink_failure (worker 0, event 0)",
            "*this KvPublisher is closed; another one may be bound at tcp://127.0.0.1:*; it gets no further events",
        ]
    )


UNUSED = {
    "injected": ("kv_publisher.faults.lose(); kv_worker.serve([1] * 16)", {"passed": 1}),
    "not injected": ("kv_publisher.faults.lose()", {"passed": 1, "errors": 1}),
    "in a test that failed anyway": ("kv_publisher.faults.lose(); assert False", {"failed": 1}),
}


@pytest.mark.parametrize("case", UNUSED)
def test_an_unused_wire_fault_fails_the_test(nested, case):
    body, outcomes = UNUSED[case]
    result = nested(f"@pytest.mark.kv_dialects('vllm-0.33')\ndef test(kv_publisher, kv_worker): {body}")
    result.assert_outcomes(**outcomes)
    if "errors" in outcomes:
        result.stdout.fnmatch_lines(["*faults of the wire were asked for and not injected: lose (1 batch left)"])


def test_an_engine_without_digests_is_refused_for_a_dialect_with_bytes(nested):
    result = nested(
        "@pytest.mark.kv_dialects('vllm-0.33-bytes')\n@pytest.mark.kv_backends('lru')\ndef test(kv_wire): pass"
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*kvmock: kv_wire: backend 'lru' has no digests to write as bytes*"])
    nested("@pytest.mark.kv_dialects('vllm-0.33-bytes')\ndef test(kv_wire): pass").assert_outcomes(passed=1)


WRONG_OPTIONS = {
    "endpoint='tpc'": "'tpc': unknown transport 'tpc'; known: tcp, ipc, inproc",
    "dialect='vllm-9'": "unknown dialect 'vllm-9'; did you mean 'vllm-0.9' or *",
    "worker='x'": "make_kv_publisher: worker must be an integer of at least 0, got 'x'",
    "worker=-1": "make_kv_publisher: worker must be an integer of at least 0, got -1",
}


@pytest.mark.parametrize("options", WRONG_OPTIONS)
def test_wrong_options_of_a_publisher_are_refused_in_one_line(nested, options):
    result = nested(f"@pytest.mark.kv_dialects('vllm-0.33')\ndef test(make_kv_publisher): make_kv_publisher({options})")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*kvmock: kv_publisher: {WRONG_OPTIONS[options]}"])


def test_a_timeout_shows_the_test_and_no_frames_of_the_plugin(nested):
    source = """
        @pytest.mark.kv_dialects('vllm-0.33')
        @pytest.mark.parametrize('wait', ['settle(lambda: 0, 1, timeout=0)', 'wait_subscribed(timeout=0)'])
        def test(kv_publisher, wait): eval('kv_publisher.' + wait)
    """
    result = nested(source)
    result.assert_outcomes(failed=2)
    shown = result.stdout.str()
    assert ["pytest_kvmock" not in line for line in shown.splitlines() if line.endswith(": WireTimeout")] == [True] * 2
    assert "def rest" not in shown


# ------------------------------------------------------------------------------------------------- overridden

OVERRIDES = {
    "for a session": ("@pytest.fixture(scope='session')\ndef kv_dialect(): return 'sglang-0.5.20'", ["sglang"]),
    "for a test": ("@pytest.fixture\ndef kv_dialect(): return 'vllm-0.19'", ["vllm_0_19"]),
    "with params": (
        "@pytest.fixture(params=['0.5.22', '0.5.9'])\ndef kv_dialect(request): return f'sglang-{request.param}'",
        ["sglang", "sglang"],
    ),
    "by the original": (
        "@pytest.fixture\ndef kv_dialect(kv_dialect): return kv_dialect.replace('sglang-0.5.20', 'vllm-0.33')",
        ["vllm", "sglang"],
    ),
}


@pytest.mark.parametrize("fixtures", ["kv_harness", "kv_worker, kv_publisher, kv_harness", "kv_wire, kv_harness"])
@pytest.mark.parametrize("case", OVERRIDES)
def test_a_dialect_of_a_conftest_selects_the_engine_too(nested, case, fixtures):
    override, engines = OVERRIDES[case]
    source = f"def test(kv_dialect, {fixtures}): print('ran on', kv_harness.backend)"
    options = ("-o", "kvmock_dialects=sglang-0.5.20 sglang-0.5.22")
    result = nested(source, "-s", *options, files={"conftest.py": f"import pytest\n{override}"})
    if case == "by the original" and pytest.version_tuple < (9, 0):  # pytest 8 does not see what an override calls
        result.assert_outcomes(errors=1)
        result.stdout.fnmatch_lines(
            ["kvmock: kv_dialect: unknown dialect '<kv_dialect has no value here: this test is *"]
        )
    else:
        assert engines == ran(result)


def test_an_index_gets_the_traits_of_the_overridden_dialects_engine(nested):
    source = """
        @pytest.fixture
        def kv_dialect(): return "vllm-0.33"
        @pytest.fixture
        def kv_index(kv_traits): print("ran on", kv_traits.copies)
        def test(kv_wire): pass
    """
    assert ran(nested(source, "-s")) == ["True"]


def test_an_overridden_dialect_runs_over_the_requested_backends(ids):
    override = "@pytest.fixture\ndef kv_dialect(): return 'vllm-0.33'\n"
    assert ids(f"{override}@pytest.mark.kv_backends('vllm', 'lru')\ndef test(kv_wire): pass") == [
        "test[lru]",
        "test[vllm]",
    ]


@pytest.mark.parametrize("value", ["'vllm-0.34'", "None", "7"])
def test_an_invalid_overridden_dialect_is_one_clear_error(nested, value):
    source = f"@pytest.fixture\ndef kv_dialect(): return {value}\ndef test(kv_worker, kv_wire): pass"
    result = nested(source)
    result.assert_outcomes(errors=1)
    message = (
        ": unknown dialect 'vllm-0.34'; did you mean 'vllm-0.33'"
        if "34" in value
        else f" is {value}; known: vllm-0.9, "
    )
    assert f"kvmock: kv_dialect{message}" in result.stdout.str()
