"""What llm-d's client does with each dialect: whether it decodes it, and finds a LoRA adapter's blocks by its name.

Columns: 0.5.0; 0.9.0 with its decoder for vLLM; 0.9.0 with its decoder for SGLang; LoRA in 0.9.0 with that for vLLM.
"""

DECODERS = (("0.5", "vllm"), ("0.9", "vllm"), ("0.9", "sglang"))

TABLE = {
    "vllm-0.9": (False, True, True, False),
    "vllm-0.10.2": (False, True, True, False),
    "vllm-0.14": (True, True, True, True),
    "vllm-0.19": (False, True, True, False),
    "vllm-0.23": (False, True, False, False),
    "vllm-0.24": (False, True, False, False),
    "vllm-0.28": (False, True, False, False),
    "vllm-0.33": (False, True, False, False),
    "sglang-0.5.9": (False, True, True, False),
    "sglang-0.5.18": (False, True, True, False),
    "sglang-0.5.20": (False, True, False, False),
    "sglang-0.5.22": (False, True, False, True),
    "sglang-0.5.23": (False, True, False, True),
    "vllm-0.10.2-bytes": (False, True, True, False),
    "vllm-0.14-bytes": (True, True, True, True),
    "vllm-0.19-bytes": (False, True, True, False),
    "vllm-0.23-bytes": (False, True, False, False),
    "vllm-0.24-bytes": (False, True, False, False),
    "vllm-0.28-bytes": (False, True, False, False),
    "vllm-0.33-bytes": (False, True, False, False),
}


def decodes(dialect, release, engine):
    """Return whether a release ("0.9"), with its decoder for an engine, decodes a dialect."""
    return TABLE[dialect][DECODERS.index((release, engine))]


def finds_lora(dialect, release):
    """Return whether a release, with its decoder for vLLM, finds the blocks of an adapter by its name."""
    return decodes(dialect, release, "vllm") and TABLE[dialect][-1]


def markdown():
    """Return the table of docs/fidelity.md."""
    lines = [
        "| dialect | 0.5.0 decodes | 0.9.0 decodes as vLLM's | 0.9.0 decodes as SGLang's | 0.9.0 finds LoRA |",
        "|---|---|---|---|---|",
    ]
    for dialect, row in TABLE.items():
        lines.append(f"| `{dialect}` | {' | '.join('yes' if does else 'no' for does in row)} |")
    return "\n".join(lines) + "\n"
