"""One browser for all tests: it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from web.browser import Browser, browse


@pytest.fixture(scope="session")
def started_browser() -> Iterator[Browser]:
    """A browser, for as long as the tests run."""
    with browse() as browser:
        yield browser


@pytest.fixture
def browser(started_browser: Browser) -> Browser:
    """The browser, as a desktop's with light colours, and nothing on its console."""
    started_browser.open("about:blank")
    started_browser.look()
    started_browser.complaints()
    return started_browser
