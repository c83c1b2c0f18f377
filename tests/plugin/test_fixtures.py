"""The values of the fixtures, and that the fixtures of one test are parts of one harness."""

from __future__ import annotations

import pytest


def test_all_fixtures_of_a_test_share_one_harness(nested):
    result = nested(
        """
        def test(kv_events, kv_sink, make_kv_sink, kv_harness, kv_worker, make_kv_manager, kv_prompt):
            assert kv_events is kv_harness.events
            kv_sink(GOOD)
            other = make_kv_sink(chained=True)
            other(Stored(None, (3,), (3,)))
            kv_worker.serve(kv_prompt(2))
            make_kv_manager().use([7])
            heard = [entry.event.worker_id for entry in kv_events]
            assert heard == [kv_sink.worker_id, other.worker_id, 0, 1]
            assert len(set(heard)) == 4
        """
    )

    result.assert_outcomes(passed=3)


def test_the_harness_of_each_test_is_new(nested):
    result = nested(
        """
        seen = []
        def test_1(kv_harness): seen.append(kv_harness)
        def test_2(kv_harness):
            assert kv_harness not in seen
            assert not len(kv_harness.events)
        """,
        "--kv-backend=lru",
    )

    result.assert_outcomes(passed=2)


def test_the_hashes_of_a_chained_sink_are_checked(nested):
    result = nested(
        """
        def test(make_kv_sink): make_kv_sink(chained=True)(Stored(None, (3,), (4,)))
        def test_free(make_kv_sink): make_kv_sink()(Stored(None, (3,), (4,)))
        """
    )

    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["1 KV event error: wrong_hash *"])


def test_worker_none_makes_the_next_worker(nested):
    result = nested(
        """
        @pytest.mark.kvmock(workers=2)
        def test(kv_harness, kv_worker, kv_prompt):
            prompt = kv_prompt()
            mine, other = kv_harness.worker(None), kv_harness.worker(None, backend="lru")
            assert [(2, kv_harness.backend), (3, "lru")] == [(each.worker_id, each.backend) for each in (mine, other)]
            mine.serve(prompt)
            assert {2: 4} == kv_harness.overlap(prompt)
            assert 0 == kv_worker.cached_tokens(prompt)
        """
    )

    result.assert_outcomes(passed=3)


def test_make_kv_manager_makes_the_manager_of_the_next_worker(nested):
    result = nested(
        """
        @pytest.mark.kvmock(workers=2)
        def test(make_kv_manager, kv_harness):
            managers = [make_kv_manager(), make_kv_manager(backend="lru")]
            assert managers == [kv_harness.worker(2).manager, kv_harness.worker(3).manager]
            assert [manager.backend for manager in managers] == [kv_harness.backend, "lru"]
        """
    )

    result.assert_outcomes(passed=3)


def test_prompts_are_new_and_begin_with_the_prompt_given_as_after(nested):
    result = nested(
        """
        @pytest.mark.kvmock(block_size=4)
        def test(kv_prompt):
            one, other = kv_prompt(), kv_prompt(blocks=1)
            assert (len(one.tokens), len(other.tokens)) == (16, 4)
            assert one.tokens[:4] != other.tokens
            assert kv_prompt(2, after=other).tokens[:4] == other.tokens
        """
    )

    result.assert_outcomes(passed=1)


def test_kv_index_is_none_by_default_and_the_reference_answers(nested):
    result = nested(
        """
        def test(kv_index, kv_harness, kv_worker, kv_prompt):
            assert kv_index is None
            prompt = kv_prompt()
            kv_worker.serve(prompt)
            assert kv_harness.overlap(prompt) == {0: 4}
        """
    )

    result.assert_outcomes(passed=3)


def test_sync_is_taken_from_the_innermost_marker(nested):
    result = nested(
        """
        class Index:
            asked = 0
            def apply(self, event): pass
            def find_matches(self, hashes):
                self.asked += 1
                return {65536: len(hashes)}

        @pytest.fixture
        def kv_index(): return Index()

        @pytest.mark.kvmock(sync="every")
        class TestC:
            def test_every(self, kv_index, kv_sink):
                kv_sink(GOOD)
                assert kv_index.asked

            @pytest.mark.kvmock(sync="end", allow=["index_drift"])
            def test_end(self, kv_index, kv_sink):
                kv_sink(GOOD)
                assert not kv_index.asked
        """,
        "-o",
        "kvmock_allow=index_drift",
    )

    result.assert_outcomes(passed=2)


def test_the_marker_can_set_clears_and_sync_burst(nested):
    result = nested(
        """
        from pytest_kvmock import RadixIndex

        class Index(RadixIndex):
            asked = 0
            def find_matches(self, hashes):
                self.asked += 1
                return super().find_matches(hashes)

        @pytest.fixture
        def kv_index(): return Index(clears="worker")

        @pytest.mark.kv_backends("lru")
        @pytest.mark.kvmock(clears="worker", sync="burst", dp_size=2, block_size=4)
        class TestC:
            def test_e1(self, kv_harness, kv_index):
                for rank in (0, 1):
                    kv_harness.worker(0, dp_rank=rank).serve([1] * 4)
                kv_harness.worker(0, dp_rank=0).clear()
                assert not kv_index.asked
                assert kv_harness.overlap([1] * 4) == {}
                assert kv_index.asked

            @pytest.mark.kvmock(clears="rank", allow=["index_drift"])
            def test_default(self, kv_harness, kv_events):
                for rank in (0, 1):
                    kv_harness.worker(0, dp_rank=rank).serve([1] * 4)
                kv_harness.worker(0, dp_rank=0).clear()
                kv_harness.flush()
                assert {p.rule for p in kv_events.problems} == {"index_drift"}
        """
    )

    result.assert_outcomes(passed=2)


READS_TRAITS = """
    from pytest_kvmock import BACKENDS
    from pytest_kvmock.engines import Traits

    @pytest.fixture
    def kv_index(kv_traits):
        from pytest_kvmock import RadixIndex
        return RadixIndex(count_copies=kv_traits.copies)
"""


def test_an_index_reads_the_traits_of_the_tests_backend(nested):
    result = nested(
        READS_TRAITS
        + """
    @pytest.mark.kv_backends("lineage", "vllm", "vllm_0_19", "sglang")
    @pytest.mark.kvmock(block_size=4, num_blocks=3)
    def test(kv_harness, kv_traits, kv_backend):
        assert kv_traits == BACKENDS[kv_backend].traits == kv_harness.worker(0).traits
        for number in (1, 1, 2, 3):
            kv_harness.worker(0).serve([number] * 4)

    @pytest.mark.parametrize("kv_backend", ["vllm"])
    def test_a_parameter(kv_traits, kv_backend): assert kv_traits.copies

    @pytest.mark.kv_backends("vllm")
    class TestCase(unittest.TestCase):
        @pytest.fixture(autouse=True)
        def ask(self, request):
            self.router = request.getfixturevalue("kv_harness")
            self.traits = request.getfixturevalue("kv_traits")
        def test(self): assert self.traits == self.router.worker(0).traits
    """
    )

    result.assert_outcomes(passed=6)


def test_without_a_backend_the_traits_are_the_defaults_of_a_sink(nested):
    result = nested(
        READS_TRAITS
        + """
    def test(kv_sink, kv_traits):
        assert kv_traits == Traits()
        kv_sink(GOOD)
    """
    )

    result.assert_outcomes(passed=1)


def test_traits_of_an_unknown_backend_are_refused(nested):
    result = nested(
        """
        @pytest.fixture
        def kv_backend(): return "vlm"
        def test(kv_backend, kv_traits): pass
        """
    )

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["kvmock: kv_backend is 'vlm'; did you mean 'vllm'? known: lineage, lru, *"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "make_kv_sink(chaned=True)",
            (
                "make_kv_sink: unknown argument 'chaned'; did you mean 'chained'? known: "
                "chained, num_blocks, tier_blocks, residency, prefix_closed, worker_id, hash, seed, restores"
            ),
        ),
        (
            "kv_prompt(block=3)",
            (
                "kv_prompt: unknown argument 'block'; did you mean 'blocks'? known: blocks, after, tail, lora_name, "
                "cache_salt, multimodal, session_id"
            ),
        ),
    ],
)
def test_a_misspelt_argument_of_a_fixture_gets_the_nearest_one(nested, call, message):
    result = nested(f"def test(make_kv_sink, kv_prompt):\n    {call}\n")
    result.assert_outcomes(failed=1)
    assert f"E       TypeError: {message}" in result.outlines


def test_a_custom_kv_router_fixture_works_like_any_other(nested):
    """Users give this name to the router under test; it was once the name of the harness fixture."""
    source = "@pytest.fixture\ndef kv_router(): return 1\ndef test(kv_router): assert 1 == kv_router"
    nested(source).assert_outcomes(passed=1)


def test_the_traits_of_a_backend_with_tiers_contain_what_no_event_shows(nested):
    result = nested(
        READS_TRAITS
        + """
    @pytest.mark.kv_backends("lineage", "vllm")
    @pytest.mark.kvmock(tiers={"host": 64})
    def test(kv_worker, kv_traits, kv_backend):
        assert kv_traits == kv_worker.traits
        expected = {"lineage": (None, True), "vllm": (1, False)}
        assert expected[kv_backend] == (kv_traits.chunk, kv_traits.clears_below)

    @pytest.mark.kv_backends("vllm")
    @pytest.mark.kvmock(tiers={"host": 64, "chunk": 2})
    def test_chunks(kv_traits, kv_backend): assert (2, False) == (kv_traits.chunk, kv_traits.clears_below)
    """
    )

    result.assert_outcomes(passed=3)
