"""A Chromium for all tests of the page, and a page opened in it from the disk."""

from pathlib import Path

import pytest

from regard.inspect.page import write_page
from tests.inspect.reports import report

CHROMIUM = Path("/usr/bin/chromium")


def pytest_collection_modifyitems(items):
    """What opens a page in a browser: marked, and skipped where there is no Chromium."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.skipif(not CHROMIUM.exists(), reason="no Chromium at /usr/bin/chromium"))


@pytest.fixture(scope="session")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def first_tab(browser):
    """One tab for all tests: a new one takes 0.7 s of a processor, twice what a page in it does."""
    return browser.new_page()


@pytest.fixture
def opened(browser, first_tab, tmp_path):
    """Open the page of a report; when the test is over, say whether it complained or asked for anything."""
    tabs, expected, asked = [], [], []
    listeners = {
        "console": lambda message: expected.append(message.text),
        "pageerror": lambda error: expected.append(str(error)),
        "request": lambda request: asked.append(request.url),
    }

    def open_(of=None, state="", *, size=(1280, 800), dark=False, budget=15e6):
        path = tmp_path / "page.html"
        write_page(of or report(), path, budget)
        tab = browser.new_page() if tabs else first_tab
        tabs.append(tab)
        tab.set_viewport_size({"width": size[0], "height": size[1]})
        tab.emulate_media(color_scheme="dark" if dark else "light")
        for event, listener in listeners.items():
            tab.on(event, listener)
        tab.goto(f"{path.as_uri()}#{state}")
        tab.wait_for_selector("html[data-ready]")
        return tab

    yield open_
    for tab in tabs:
        for event, listener in listeners.items():
            tab.remove_listener(event, listener)
        if tab is first_tab:
            tab.mouse.move(0, 0)
            tab.goto("about:blank")
        else:
            tab.close()
    assert expected == []
    assert all(url.startswith("file://") and "/page.html" in url for url in asked)
    assert len(asked) == len(tabs)
