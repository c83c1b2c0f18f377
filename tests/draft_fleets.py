"""Fleets of engines with a draft model, behind routers that read them rightly or wrongly: the prompt tokens that the
router promises, and the tokens that are reused.

Four engines of vLLM with MTP (three drafts a step, blocks of 16) serve 240 requests of conversations that share
beginnings, in two modes: names look ahead, or hits drop a block.
"""

from collections import Counter

from draft_readers import ByTokens, ByWindows, PlainNames

from pytest_kvmock import BACKENDS, Fleet, MockEngine
from pytest_kvmock.engines import MockEngineArgs, Speculative
from pytest_kvmock.fleets import synthetic_trace

SIZE = 16
ENGINES = 4
MODES = {
    "names look ahead": BACKENDS["vllm_mtp"],
    "hits drop a block": BACKENDS["vllm_mtp"].variant("vllm_drop", speculative=Speculative(plain_hashes=True)),
}
READERS = {
    "windows": lambda: ByWindows(True, SIZE),
    "tokens": lambda: ByTokens(size=SIZE),
    "entry": lambda: ByTokens(counts=False, size=SIZE),
    "plain": lambda: PlainNames(SIZE),
}


class MostPromised:
    """Picks the worker with the most tokens promised by its reader; of equal workers, the one picked least often."""

    def __init__(self, reader):
        self.reader, self.promised, self.picked = reader, {}, Counter()

    def apply(self, event):
        self.reader.apply(event)

    def pick(self, request, candidates):
        found = self.reader.match_tokens(request.tokens)
        best = max(candidates, key=lambda each: (found.get((each.worker, 0), 0), -self.picked[each.worker]))
        self.picked[best.worker] += 1
        self.promised[request.number] = found.get((best.worker, 0), 0) * SIZE
        return best.worker


def served(mode, reader, num_blocks=400):
    """Return for each request the tokens of its prompt, those promised at the pick, and those reused.

    Args:
        mode: of `MODES`.
        reader: of `READERS`.
        num_blocks: of each engine; 400 are few enough that blocks are evicted.
    """
    args = MockEngineArgs(num_gpu_blocks=num_blocks, block_size=SIZE)
    engines = [MockEngine(args, backend=MODES[mode], seed=number) for number in range(ENGINES)]
    router = MostPromised(READERS[reader]())
    trace = synthetic_trace(
        240,
        block_size=SIZE,
        groups=6,
        prefix_blocks=(4, 12),
        turns=(1, 5),
        input_tokens=(30, 300),
        output_tokens=(8, 60),
    )
    report = Fleet(engines, router, trace_block_size=SIZE).run(trace)
    rows = sorted(report.per_request(), key=lambda row: row["number"])
    return [(row["input_length"], router.promised[row["number"]], row["reused_input_tokens"]) for row in rows]


def shares(rows):
    """Return shares of such rows: of prompt tokens promised and reused, and of prompts with too much and too little
    promised.
    """
    total = sum(tokens for tokens, *_ in rows)
    return (
        sum(promised for _, promised, _ in rows) / total,
        sum(used for *_, used in rows) / total,
        sum(promised > used for _, promised, used in rows) / len(rows),
        sum(promised < used for _, promised, used in rows) / len(rows),
    )
