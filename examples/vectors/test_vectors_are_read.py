"""The reader's answer to each query of the vectors lies between the reused and the held blocks."""

from reader import wrong_answers

from pytest_kvmock.contrib.vectors import write_vectors


def test_the_reader_is_right(tmp_path):
    write_vectors(tmp_path, dialects=["vllm-0.33"])
    for name in ("vllm_gpt_oss", "vllm_qwen3_next", "vllm_kimi_k3", "full_first"):
        assert wrong_answers(tmp_path / "vllm-0.33" / name, block_size=4) == []
