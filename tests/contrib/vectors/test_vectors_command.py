"""The command `vectors`, and the reports of the command `check` about its files."""

import gc
import re

import pytest

from pytest_kvmock.__main__ import main
from pytest_kvmock.contrib.vectors import write_vectors
from pytest_kvmock.values.long_runs import RAISED


def test_a_directory_of_payloads_is_checked_with_its_dialect(tmp_path, capsys):
    assert main(["vectors", str(tmp_path), "--dialect", "sglang-0.5.22"]) == 0
    assert main(["check", str(tmp_path / "sglang-0.5.22"), "--dialect", "sglang-0.5.22"]) == 0
    assert re.search(r"\n2 files, \d+ events: 2 without\n$", capsys.readouterr().out)


def test_vectors_can_be_written_for_a_dialect_from_a_plugin_module(acme, tmp_path, capsys):
    home = tmp_path / "v"
    assert main(["vectors", str(home), "-p", acme, "--dialect", "acme-1"]) == 0
    assert b"\xa4acme\xa1x" in (home / "acme-1" / "worker-0.msgpack").read_bytes()
    assert main(["check", str(home / "acme-1"), "--dialect", "acme-1", "--plugin", acme]) == 0
    capsys.readouterr()
    assert main(["dialects", "-p", acme]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("acme-1 ")
    assert main(["check", str(home / "acme-1"), "--dialect", "acme-1"]) == 2  # no files are left
    assert "unknown dialect 'acme-1'" in capsys.readouterr().err


def test_the_vectors_command_writes_the_files_of_a_dialect(tmp_path, capsys):
    assert main(["vectors", str(tmp_path), "--dialect", "vllm-0.9", "--dialect", "sglang-0.5.20", "--seed", "3"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: 2 dialects\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["README.md", "index.json", "sglang-0.5.20", "vllm-0.9"]


def test_an_unknown_dialect_is_a_one_line_error(tmp_path, capsys):
    assert main(["vectors", str(tmp_path / "v"), "--dialect", "x"]) == 2
    assert capsys.readouterr().err.startswith("vectors: unknown dialect 'x'")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_path_is_refused(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["vectors", ""])
    assert exit_.value.code == 2
    assert "usage: python -m pytest_kvmock" in capsys.readouterr().err


def test_the_garbage_collector_runs_less_often_while_vectors_are_written(tmp_path):
    seen, before = set(), gc.get_threshold()
    write_vectors(tmp_path, dialects=["vllm-0.33"], progress=lambda _: seen.add(gc.get_threshold()[0]))
    assert seen == {RAISED}
    assert before == gc.get_threshold()
