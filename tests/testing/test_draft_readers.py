"""Routers' readers of engines with a draft model: right ones pass the contract of an index, naive ones do not.

Naive ones have the errors of the catalogue: names without the next tokens, blocks by their own tokens, one entry for
twins, and windows where the stream has none.
"""

import pytest
from contract_runs import names_of_tests
from depth import examples
from draft_readers import SIZE, ByTokens, ByWindows, Flagged, PlainHashes, PlainNames

from pytest_kvmock import BACKENDS, EngineProfile, EventRulesBroken, RadixIndex, RouterHarness
from pytest_kvmock.engines import Speculative
from pytest_kvmock.testing import IndexContract, play
from pytest_kvmock.testing.drafts import random_traffic
from pytest_kvmock.testing.index.draft_streams import DraftStreams

DROP = BACKENDS["vllm_mtp"].variant("vllm_drop", speculative=Speculative(plain_hashes=True))
DEEP = BACKENDS["vllm_mtp"].variant("vllm_mtp_3", speculative=Speculative(modules=3))

RIGHT = {
    "windows": lambda: ByWindows(True),
    "hashes": lambda: RadixIndex(count_copies=True),
}
NAIVE = [
    ("plain", PlainNames, "vllm_mtp"),
    ("plain", PlainHashes, "sglang_eagle"),
    ("tokens", ByTokens, "vllm_mtp"),
    ("tokens", ByTokens, "sglang_eagle"),
    ("entry", lambda: ByTokens(counts=False), "vllm_mtp"),
    ("entry", lambda: ByTokens(counts=False), DROP),
    ("flag", Flagged, "sglang"),
    ("flag", Flagged, "vllm"),
]


def contract(make, backend):
    class Reads(IndexContract):
        backends = (backend,)

        def make_index(self):
            return make()

    return Reads()


@pytest.mark.parametrize("backend", ["vllm_mtp", "sglang_eagle", DROP, DEEP], ids=["mtp", "eagle", "drop", "deep"])
@pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT)
def test_a_right_reader_follows_engines_with_a_draft_model(make, backend):
    contract(make, backend).test_it_follows_live_traffic()


@pytest.mark.parametrize(
    ("make", "backend"), [row[1:] for row in NAIVE], ids=[f"{name}-{n}" for n, (name, *_) in enumerate(NAIVE)]
)
def test_the_contract_finds_a_naive_reader(make, backend):
    with pytest.raises((EventRulesBroken, AssertionError)):
        contract(make, backend).test_it_follows_live_traffic()


@pytest.mark.parametrize(
    ("make", "backend"), [row[1:] for row in NAIVE], ids=[f"{name}-{n}" for n, (name, *_) in enumerate(NAIVE)]
)
def test_traffic_finds_a_naive_reader_within_200_examples(make, backend):
    def is_found(seed):
        try:
            with RouterHarness(EngineProfile(SIZE, 16, 2), backend, make(), sync="every") as kv:
                play(kv, random_traffic(seed, 40, workers=2))
        except EventRulesBroken:
            return True
        return False

    assert any(is_found(seed) for seed in range(200))


@pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT)
def test_a_right_reader_follows_workers_with_and_without_draft_models(make):
    index = make()
    with RouterHarness(EngineProfile(SIZE, 32, workers=0), None, index, sync="every") as kv:
        workers = [
            kv.worker(number, backend=name) for number, name in enumerate(("vllm_mtp", "vllm", "sglang_eagle", DEEP))
        ]
        for seed in range(examples(10)):
            for worker in workers:
                worker.serve([seed % 3] * 8 + [seed % 5] * 9 + [seed], seed % 4)
            prompt = [seed % 3] * 8 + [seed % 5] * 9 + [seed, 1]
            reused = kv.reusable(prompt)
            assert {number: count * SIZE for number, count in kv.overlap(prompt).items()} == reused


@pytest.mark.parametrize("name", names_of_tests(DraftStreams))
@pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT)
def test_a_right_reader_passes_with_reads_drafts(make, name):
    class Reads(IndexContract):
        reads_drafts = True

        def make_index(self):
            return make()

    getattr(Reads(), name)()


def test_without_reads_drafts_its_tests_are_skipped_with_the_reason():
    class Plain(IndexContract):
        def make_index(self):
            return RadixIndex()

    with pytest.raises(pytest.skip.Exception, match="reads_drafts is not set: they were not checked"):
        Plain().test_a_twin_is_another_block()
