"""The public names: all there, all documented, and none loaded before it is used."""

import inspect
import subprocess
import sys

import pytest

import pytest_kvmock


@pytest.mark.parametrize("name", sorted(set(pytest_kvmock.__all__) - {"__version__"}))
def test_a_public_name_is_there_and_says_what_it_is(name):
    value = getattr(pytest_kvmock, name)
    if inspect.isclass(value) or inspect.isroutine(value):
        assert inspect.getdoc(value)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        pytest_kvmock.Nothing  # noqa: B018 - to look it up is the test


def test_importing_the_package_loads_none_of_its_rooms():
    code = "import sys, pytest_kvmock; print(*sorted(m for m in sys.modules if m.startswith('pytest_kvmock')))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert ["pytest_kvmock"] == loaded


def test_everything_but_the_plugin_works_without_pytest():
    code = (
        "import sys; sys.modules['pytest'] = None\n"
        "import pytest_kvmock as k\n"
        "with k.RouterHarness() as kv:\n"
        "    prompt = kv.prompt()\n"
        "    kv.worker(0).serve(prompt)\n"
        "    print(kv.overlap(prompt))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "{0: 4}\n" == result.stdout


def test_the_readable_names_are_the_table_of_homes():
    assert sorted(pytest_kvmock.__all__) == dir(pytest_kvmock)
