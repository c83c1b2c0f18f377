"""Pages in a browser: a reader's actions, and the reports of an accessibility checker."""

import json
from random import Random

import pytest

from pytest_kvmock import Fleet, MockEngine, MockEngineArgs, Removed, RouterHarness, Stored
from pytest_kvmock.fleets import FleetRequest, RoundRobin, synthetic_trace
from pytest_kvmock.oracle import RadixIndex
from pytest_kvmock.plugin.failure_page import failure_data
from pytest_kvmock.values.pages.page import render, write_page

ARGS = MockEngineArgs(num_gpu_blocks=96, block_size=4, max_num_batched_tokens=32)
EVIL = "<img src=x onerror=alert(1)>"
LONG = 12_000


def report(router=None, count=60, **options):
    sizes = {"block_size": 4, "input_tokens": (4, 24), "output_tokens": (1, 12)}
    trace = synthetic_trace(count, seed=3, groups=3, prefix_blocks=(3, 3), interval_ms=10, **sizes)
    return Fleet([MockEngine(ARGS, seed=at) for at in range(3)], router, **options).run(trace)


class Forgets(RadixIndex):
    """Forgets every third Removed."""

    removed = 0

    def apply(self, event):
        self.removed += isinstance(event.event.data, Removed)
        if not isinstance(event.event.data, Removed) or self.removed % 3:
            super().apply(event)


@pytest.fixture(scope="module")
def fleet_page(tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "fleet.html"
    first = report(RoundRobin(), record=True)
    second = report(record=True)
    first.to_html(path, compare=[second, report().to_json()], title=f"a fleet {EVIL}")
    return path


@pytest.fixture(scope="module")
def failing_page(tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "test.html"
    kv = RouterHarness(backend="lru", index=Forgets(), name="a test")
    for number in range(1, 9):
        kv.apply([Stored(None, (10 * number, 10 * number + 1), (10 * number, 10 * number + 1))], number % 2)
        kv.apply([Removed((10 * number + 1,))], number % 2)
    kv.judge()
    (problem, *_) = kv.events.errors
    kv.fleets.append(Fleet([MockEngine(ARGS, seed=at) for at in range(2)]))
    kv.fleets[0].run([FleetRequest([*range(64)], 3, timestamp=0.0, session_id=EVIL)])
    write_page(
        path, render("test", f"a test {EVIL}", failure_data(kv, f"failed {EVIL}", problem, "def test_it(): ...\n"))
    )
    return path


@pytest.fixture(scope="module")
def long_page(tmp_path_factory, fleet_page):
    """Write a page of 12,000 requests over 8 workers, made from the data of a short one without running a fleet."""
    path = tmp_path_factory.mktemp("pages") / "long.html"
    data = json.loads(fleet_page.read_text(encoding="utf-8").partition('id="data">')[2].partition("</script>")[0])
    rng, requests = Random(1), data["requests"]
    for name, column in requests.items():
        requests[name] = [rng.choice(column) for _ in range(LONG)]
    requests |= {
        "number": [*range(LONG)],
        "arrival_ms": [at * 10 for at in range(LONG)],
        "session": [str(at % 50) for at in range(LONG)],
    }
    requests["worker"] = [rng.randrange(8) for _ in range(LONG)]
    of_all, of_one, *_ = data["figures"]
    figures = [of_all, *({**of_one, "worker": str(at)} for at in range(8))]
    data |= {"workers": [str(at) for at in range(8)], "samples": None, "figures": figures}
    write_page(path, render("fleet", data.pop("title"), data))
    return path


def drawn(page):
    """Return how many requests the timeline shows after it has drawn them."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return int(page.locator("#timeline").get_attribute("data-shown"))


def violations(page):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="the dependency group 'browser' is not installed"
    ).Axe
    found = axe().run(page).response["violations"]
    return [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in found]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["fleet_page", "failing_page"])
def test_the_accessibility_checker_finds_no_violations(visit, request, name, scheme):
    page = visit(request.getfixturevalue(name), color_scheme=scheme)
    if name == "fleet_page":
        page.locator("#worst button").first.click()
    assert violations(page) == []


@pytest.mark.parametrize("name", ["fleet_page", "failing_page"])
def test_markup_in_names_is_shown_as_text(visit, request, name):
    page = visit(request.getfixturevalue(name))
    assert EVIL in page.locator("h1").inner_text()
    assert page.locator("img").count() == 0


@pytest.mark.parametrize("name", ["fleet_page", "failing_page"])
def test_text_scales_and_fits_a_narrow_window(visit, request, name):
    page = visit(request.getfixturevalue(name))
    page.set_viewport_size({"width": 480, "height": 900})
    page.evaluate("document.documentElement.style.fontSize = '24px'")
    page.evaluate("dispatchEvent(new Event('resize'))")
    assert page.evaluate("document.documentElement.scrollWidth") <= 480


def test_fleet_tables_fit_a_usual_window(visit, fleet_page):
    page = visit(fleet_page)
    page.set_viewport_size({"width": 1400, "height": 900})
    tables = page.evaluate(
        "[...document.querySelectorAll('.scroll')].map((each) => [each.scrollWidth, each.clientWidth])"
    )
    assert tables
    assert all(wide <= room for wide, room in tables)


def test_the_theme_can_be_switched(visit, fleet_page):
    page = visit(fleet_page, color_scheme="dark")
    back = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(back)
    page.get_by_role("button", name="Light / dark").click()
    assert dark != page.evaluate(back)


def test_filters_show_the_number_of_requests_left(visit, fleet_page):
    page = visit(fleet_page)
    shown = page.locator("#shown")
    assert shown.inner_text() == "60 of 60 requests"
    page.select_option("#by-worker", "1")
    assert shown.inner_text() == "20 of 60 requests"
    page.select_option("#by-outcome", "rejected") if page.locator(
        "#by-outcome option[value=rejected]"
    ).count() else None
    page.select_option("#by-worker", "")
    page.fill("#by-session", "no such session")
    assert shown.inner_text() == "0 of 60 requests"


def test_a_request_shows_its_pick_with_all_candidates(visit, fleet_page):
    page = visit(fleet_page)
    page.locator("#worst button").first.click()
    panel = page.locator("#request")
    assert panel.locator("tbody tr").count() == 3
    assert "(chosen)" in panel.inner_text()
    assert "(least cost)" in panel.inner_text()


def test_the_timeline_can_be_used_by_keyboard(visit, fleet_page):
    page = visit(fleet_page)
    timeline = page.locator("#timeline")
    timeline.focus()
    for _ in range(4):
        page.keyboard.press("+")
    assert drawn(page) < 40
    page.keyboard.press("n")
    assert "Request 0" in page.locator("#request h3").first.inner_text()
    page.keyboard.press("n")
    assert "Request 1" in page.locator("#request h3").first.inner_text()
    page.keyboard.press("Home")
    assert drawn(page) == 60


def test_a_click_on_a_bar_opens_its_request(visit, fleet_page):
    page = visit(fleet_page)
    page.locator("#timeline").scroll_into_view_if_needed()
    page.locator("#timeline").click(position={"x": 80, "y": 6})
    assert "Request" in page.locator("#request h3").first.inner_text()


def test_twelve_thousand_requests_can_be_zoomed_and_filtered(visit, long_page):
    page = visit(long_page)
    assert long_page.stat().st_size < 3_000_000
    frames = page.evaluate(
        """() => new Promise((resolve) => {
            let frames = 0;
            const turn = () => { zoomRequests(frames % 2 ? 0.5 : 2, 60000); if (++frames === 20) resolve(frames); else requestAnimationFrame(turn); };
            requestAnimationFrame(turn);
        })"""  # noqa: E501
    )
    assert frames == 20
    page.fill("#by-session", "49")
    assert page.locator("#shown").inner_text() == "240 of 12,000 requests"


def test_a_failing_test_opens_at_its_problem_and_can_be_stepped_through(visit, failing_page):
    page = visit(failing_page)
    title = page.locator("#event h3")
    assert title.inner_text().startswith("Entry 5: Removed")
    assert "only in index" in page.locator("#state .apart").first.inner_text() + page.locator("#state").inner_text()
    page.get_by_role("button", name="previous event").click()
    assert title.inner_text().startswith("Entry 4: Stored")
    page.locator("#log").focus()
    page.keyboard.press("End")
    assert title.inner_text().startswith("Entry 15:")
    page.keyboard.press("p")
    assert title.inner_text().startswith("Entry 5:")


def test_the_reproduction_can_be_copied(visit, failing_page):
    page = visit(failing_page)
    page.get_by_role("button", name="Copy reproduction").click()
    page.get_by_text("copied", exact=False).wait_for()


def test_a_page_is_printed_in_light_colours(visit, failing_page):
    page = visit(failing_page, color_scheme="dark")
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert not page.locator(".controls").first.is_visible()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
