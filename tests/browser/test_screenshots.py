"""The screenshots of the documentation: KVMOCK_WRITE_DOCS=1 writes them again."""

import os
from pathlib import Path

import pytest
from depth import each_parameter

from pytest_kvmock import Fleet, MockEngine, MockEngineArgs, Removed, RouterHarness
from pytest_kvmock.fleets import DynamoRouter, MostCached, synthetic_trace
from pytest_kvmock.harness.reduce import reproduce
from pytest_kvmock.oracle import RadixIndex
from pytest_kvmock.plugin.failure_page import failure_data
from pytest_kvmock.values.pages.page import render, write_page

ASSETS = Path(__file__).parents[2] / "docs" / "assets"
MOST_BYTES = 150_000


class ForgetsOne(RadixIndex):
    """Loses its third Removed."""

    removed = 0

    def new(self):
        return ForgetsOne()

    def apply(self, event):
        self.removed += isinstance(event.event.data, Removed)
        if self.removed != 3 or not isinstance(event.event.data, Removed):
            super().apply(event)


def fleet(path):
    args = MockEngineArgs(num_gpu_blocks=512, block_size=16)
    sizes = {"block_size": 16, "input_tokens": (64, 512), "output_tokens": (8, 64), "prefix_blocks": (8, 24)}
    trace = [*synthetic_trace(600, seed=4, groups=4, interval_ms=12, **sizes)]

    def run(router):
        return Fleet([MockEngine(args, seed=at) for at in range(4)], router, record=True).run(trace, name="four groups")

    run(MostCached()).to_html(path, compare=run(DynamoRouter()))


def failing_test(path):
    kv = RouterHarness(backend="lru", index=ForgetsOne(), name="a test")
    kv.inside.use_backend("lru")
    shared = kv.prompt(blocks=6)
    for at in range(40):
        kv.worker(at % 2).serve(kv.prompt(blocks=20, after=shared if at % 3 else None), 4)
    kv.judge()
    (problem, *_) = kv.events.errors
    data = failure_data(kv, str(problem), problem, reproduce(kv, problem).as_test())
    write_page(path, render("test", "test_router.py::test_shared_prefix[lru]", data))


@each_parameter
@pytest.mark.parametrize(("name", "make", "look"), [
    ("page-of-a-fleet", fleet, "scrollTo(0, 0)"),
    ("requests-of-a-fleet", fleet, ("document.querySelector('#worst button').click(); "
    "document.querySelector('.controls select#by-worker').scrollIntoView()")),
    ("page-of-a-test", failing_test, "scrollTo(0, 0)"),
])  # fmt: skip
def test_a_screenshot_of_a_page_stays_within_its_size(visit, tmp_path, name, make, look):
    make(tmp_path / "page.html")
    page = visit(tmp_path / "page.html", device_scale_factor=1)
    page.set_viewport_size({"width": 1100, "height": 900})
    page.evaluate(look)
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    picture = page.screenshot()
    if os.environ.get("KVMOCK_WRITE_DOCS"):
        (ASSETS / f"{name}.png").write_bytes(picture)
    assert len((ASSETS / f"{name}.png").read_bytes()) <= MOST_BYTES
    assert len(picture) <= MOST_BYTES
