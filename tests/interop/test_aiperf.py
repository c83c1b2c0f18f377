"""NVIDIA's load tool, aiperf, against a served engine: all requests are answered, and both count the same tokens."""

import json
import shutil
import subprocess

import pytest

from pytest_kvmock import EngineProfile, RouterHarness
from pytest_kvmock.engines.backends import speaker_of
from pytest_kvmock.servers import KvServer
from pytest_kvmock.servers.serve.text import write_tokenizer
from pytest_kvmock.wire import find_dialect

BINARY = shutil.which("aiperf")
if BINARY is None:
    pytest.skip(
        "needs aiperf on the PATH: 100 packages, one of them a plugin of pytest, so in an environment of its own",
        allow_module_level=True,
    )


def test_aiperf_measures_a_served_engine(tmp_path):
    write_tokenizer(tmp_path / "tokenizer")
    shape = ["--synthetic-input-tokens-mean", "200", "--output-tokens-mean", "20", "--concurrency", "4"]
    with (
        RouterHarness(EngineProfile(num_blocks=2048), speaker_of(find_dialect("vllm-0.33"))) as kv,
        KvServer(kv, time_scale=0.1) as server,
    ):
        command = [BINARY, "profile", "--model", server.model, "--url", server.url(), "--endpoint-type", "chat"]
        command += ["--streaming", "--tokenizer", tmp_path / "tokenizer", "--request-count", "40", *shape]
        command += ["--ui", "none", "--artifact-dir", tmp_path / "out"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        figures = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
        assert len(server.requests) == 40
        assert figures["request_count"]["avg"] == 40
        assert {each.output_tokens for each in server.requests} == {20}
        assert figures["output_sequence_length"]["avg"] == 20
