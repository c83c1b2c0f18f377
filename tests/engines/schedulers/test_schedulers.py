"""The registry of schedulers: engines follow its rows."""

from dataclasses import fields

import pytest

from pytest_kvmock import BackendSpec, MockEngine, MockEngineArgs, create_manager
from pytest_kvmock.engines import backend_spec
from pytest_kvmock.engines.schedulers.scheduler_specs import SCHEDULERS, Release

ROWS = pytest.mark.parametrize("spec", SCHEDULERS.values(), ids=SCHEDULERS)


def args_of(spec, **fields):
    return MockEngineArgs(engine_type=spec.name, num_gpu_blocks=64, **fields)


@ROWS
def test_an_engine_of_each_release_serves_requests_over_its_default_backend(spec):
    for semantics in spec.releases:
        with MockEngine(args_of(spec, semantics=semantics, block_size=4)) as engine:
            assert spec.releases[semantics].backend == engine.worker.backend
            request = engine.submit(range(1, 20), 5)
            engine.run()
            assert (request.status, request.generated_tokens) == ("finished", 5)


class RaisesOnce:
    """A custom performance model that raises at its first call of each kind."""

    def __init__(self, kind):
        self._left = {kind}

    def _ms(self, kind):
        if kind in self._left:
            self._left.clear()
            raise RuntimeError("no such measurement")
        return 5.0

    def prefill_ms(self, batch, isl, prefix):
        return self._ms("prefill")

    def decode_ms(self, active_kv_tokens, total_kv_tokens, context_length):
        return self._ms("decode")


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@ROWS
def test_a_performance_model_that_raises_loses_no_request(spec, kind):
    for semantics in spec.releases:
        args = args_of(spec, semantics=semantics, block_size=4, performance_model=RaisesOnce(kind))
        with MockEngine(args) as engine:
            requests = [engine.submit(range(9), 3), engine.submit(range(20, 26), 2)]
            with pytest.raises(RuntimeError, match="no such measurement"):
                engine.run()
            engine.run()
            assert [(each.status, each.generated_tokens) for each in requests] == [("finished", 3), ("finished", 2)]


@ROWS
def test_missing_arguments_take_the_defaults_of_the_scheduler(spec):
    args = args_of(spec)
    release = spec.releases[spec.default_release]
    assert (spec.default_release, release.events_visible, spec.default_block_size) == (
        args.scheduler_semantics,
        args.events_visible_at,
        args.block_size,
    )
    assert release is args.release


@pytest.mark.parametrize(
    ("expected", "fields"),
    [
        (8192, {}),
        (96, {"max_num_batched_tokens": 96}),
        (None, {"max_num_batched_tokens": None}),
        (8192, {"engine_type": "sglang", "max_num_batched_tokens": 96}),
        (96, {"engine_type": "sglang", "sglang": {"chunked_prefill_size": 96}}),
    ],
)
def test_the_token_budget_of_a_pass_depends_on_the_scheduler(expected, fields):
    assert MockEngineArgs(**fields).budget == expected


@ROWS
def test_the_default_backend_names_its_scheduler(spec):
    for semantics, release in spec.releases.items():
        is_mock = (spec.name, semantics) == ("trtllm", "1.6.1")  # of TensorRT-LLM; it has vLLM's scheduler
        assert ("vllm" if is_mock else spec.name) == backend_spec(release.backend).scheduler


def test_a_backend_with_an_unknown_scheduler_is_refused():
    with pytest.raises(
        ValueError, match=r"^backend 'mine': scheduler must be 'vllm' or 'sglang' or 'trtllm', got 'trt'$"
    ):
        BackendSpec("mine", "mine", create_manager, scheduler="trt")


def flag_values(name):
    """Return the values of a field of `Release` in all rows."""
    return {getattr(release, name) for spec in SCHEDULERS.values() for release in spec.releases.values()}


@pytest.mark.parametrize("name", [each.name for each in fields(Release)])
def test_every_release_field_has_different_values_across_releases(name):
    assert len(flag_values(name)) > 1
