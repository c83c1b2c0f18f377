"""What Dynamo's standalone indexer does with each dialect: it "recovers" missed events, only "decodes", or neither
("-").
"""

RELEASES = ("1.3.1", "1.6.1")

_BOTH, _LATER, _NEITHER = ("recovers", "recovers"), ("decodes", "recovers"), ("-", "-")
TABLE = {
    "vllm-0.9": _BOTH,
    "vllm-0.10.2": _BOTH,
    "vllm-0.14": _BOTH,
    "vllm-0.19": _BOTH,
    "vllm-0.23": _BOTH,
    "vllm-0.24": _BOTH,
    "vllm-0.28": _LATER,
    "vllm-0.33": _LATER,
    "sglang-0.5.9": _BOTH,
    "sglang-0.5.18": _BOTH,
    "sglang-0.5.20": _BOTH,
    "sglang-0.5.22": _LATER,
    "sglang-0.5.23": _LATER,
    "vllm-0.10.2-bytes": _NEITHER,
    "vllm-0.14-bytes": _NEITHER,
    "vllm-0.19-bytes": _NEITHER,
    "vllm-0.23-bytes": _NEITHER,
    "vllm-0.24-bytes": _NEITHER,
    "vllm-0.28-bytes": _NEITHER,
    "vllm-0.33-bytes": _NEITHER,
}


def does(dialect, release):
    """Return what a release ("1.6") does with a dialect."""
    return dict(zip((each.rpartition(".")[0] for each in RELEASES), TABLE[dialect], strict=True))[release]


def markdown():
    """Return the table of docs/fidelity.md."""
    heads = " | ".join(f"{release} decodes | {release} recovers" for release in RELEASES)
    lines = [f"| dialect | {heads} |", "|---|" + "---|" * 2 * len(RELEASES)]
    for dialect, row in TABLE.items():
        cells = " | ".join(
            f"{'yes' if what != '-' else 'no'} | {'yes' if what == 'recovers' else 'no'}" for what in row
        )
        lines.append(f"| `{dialect}` | {cells} |")
    return "\n".join(lines) + "\n"
