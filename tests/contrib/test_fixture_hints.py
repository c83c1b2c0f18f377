"""The hints at fixtures of `contrib`."""

from pathlib import Path

from pytest_kvmock import contrib
from pytest_kvmock.plugin.misspelt import OF_CONTRIB


def test_each_folder_in_the_hints_is_one_of_contrib():
    folders = {path.name for path in Path(contrib.__file__).parent.iterdir() if path.is_dir()}
    assert {*OF_CONTRIB.values()} - folders == set()
