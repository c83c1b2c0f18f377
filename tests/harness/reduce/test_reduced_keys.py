"""A failing stream is cut to single keys: of the extras of its events, and of its prompts."""

import pytest

from pytest_kvmock import EngineProfile, Prompt, RadixIndex, RouterHarness, Stored
from pytest_kvmock.harness.reduce import reproduce
from pytest_kvmock.values.prompt_keys import PromptKeys


class DropsWhatIsSalted(RadixIndex):
    """A router that ignores events with a tenant's salt or an image."""

    def apply(self, event):
        extra = event.extra or {}
        if "cache_salt" not in extra and not any(extra.get("extra_keys") or ()):
            super().apply(event)


@pytest.mark.parametrize("salted", ["cache_salt", "extra_keys"])
def test_a_reproduction_keeps_only_the_extra_key_that_matters(failure_of, salted):
    kv = RouterHarness(backend=None, index=DropsWhatIsSalted())
    sink = kv.make_sink()
    beside = {"lora_name": "sql", "session_id": "x", "kv_cache_spec_kind": "full_attention"}
    value = "t" if salted == "cache_salt" else [("t",), None]
    sink.publish(Stored(None, (5,), (15,)), extra={**beside})
    sink.publish(Stored(None, (1, 2), (11, 12)), extra={**beside, salted: value})
    kv.judge()

    cut = reproduce(kv, level="events")

    assert [{salted}] == [{*(event.extra or {})} for event in cut.events]
    assert "index_drift" in failure_of(cut, DropsWhatIsSalted())


KEYS = {"lora_name": "sql", "session_id": "x"}
IMAGES = [("one", 0, 2), ("two", 4, 3)]


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({**KEYS, "cache_salt": "t", "multimodal": IMAGES}, 1),
        ({"session_id": "x", "multimodal": IMAGES}, 1),
        ({**KEYS, "cache_salt": "t"}, 1),
    ],
    ids=["all", "images", "salt"],
)
def test_a_reproduction_keeps_only_one_key_of_a_prompt(failure_of, given, left):
    kv = RouterHarness(EngineProfile(block_size=4), "lineage", DropsWhatIsSalted())
    kv.worker(0).serve(Prompt(range(12), **given))
    kv.judge()

    cut = reproduce(kv, level="requests")

    (prefill,) = (step for step in cut.operations if getattr(step, "keys", None) is not None)
    assert isinstance(prefill.keys, PromptKeys)
    assert left == len(prefill.keys.given)
    assert len(prefill.keys.multimodal) <= 1
    assert "index_drift" in failure_of(cut, DropsWhatIsSalted())
