"""A browser for pages: the system's Chromium, run by playwright. Without it, these tests are skipped with a reason."""

import shutil

import pytest


@pytest.fixture(
    scope="module"
)  # while the fixture exists an event loop runs, and async tests of other modules could not run
def chromium():
    """Return Chromium, headless."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the dependency group 'browser' is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no Chromium here (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """Open a page of a file: `visit(path, **options)`. A console message or a request for anything fails the test."""
    contexts, said = [], []

    def visit(path, **options):
        context = chromium.new_context(viewport={"width": 1280, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if request.url != path.as_uri() else None)
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=30_000)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert said == []
