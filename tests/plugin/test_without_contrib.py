"""The plugin after folders of `contrib` were deleted."""

import pytest
from depth import takes_long

import pytest_kvmock.plugin
from pytest_kvmock.plugin.misspelt import OF_CONTRIB


@pytest.fixture
def alone(monkeypatch):
    """Use the plugin without any folder of `contrib`."""
    core = [name for name in pytest_kvmock.plugin.pytest_plugins if ".contrib." not in name]
    monkeypatch.setattr(pytest_kvmock.plugin, "pytest_plugins", core)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("fixture", OF_CONTRIB)
def test_a_fixture_of_a_deleted_folder_is_refused_in_one_line(nested, fixture):
    result = nested(f"def test({fixture}): pass")

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [f"fixture '{fixture}' not found: pytest_kvmock/contrib/{OF_CONTRIB[fixture]} is not here"]
    )


@takes_long
def test_the_plugin_can_be_disabled_completely(pytester):
    pytester.makepyfile(
        """
        def test(pytestconfig):
            loaded = [name for name, plugin in pytestconfig.pluginmanager.list_name_plugin() if plugin is not None]
            assert [] == [name for name in loaded if "kvmock" in name]
        """
    )
    without = [part for name in ("kvmock", "randomly", "cacheprovider") for part in ("-p", f"no:{name}")]
    pytester.runpytest_subprocess(*without).assert_outcomes(passed=1)
