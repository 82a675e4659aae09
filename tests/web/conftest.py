"""One browser for all tests, because it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from web.browser import Browser, browse


@pytest.fixture(scope="session")
def started_browser() -> Iterator[Browser]:
    with browse() as browser:
        yield browser


@pytest.fixture
def browser(started_browser: Browser) -> Browser:
    """The browser with a desktop's window and light colours; its console must stay empty."""
    started_browser.open("about:blank")
    started_browser.look()
    started_browser.console_messages()
    return started_browser
