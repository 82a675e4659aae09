"""Headless Chromium, the system's or unpacked by `tools/chromium.py`, for page tests."""

from __future__ import annotations

import base64
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.polling import wait_until
from selenium.webdriver import ActionChains, Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.keys import Keys

__all__ = ["WEB", "Browser", "browse"]

WEB = Path(__file__).resolve().parents[2] / "build" / "web"
"""Folder of the browser that `make` unpacks, and of screenshots."""

_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in a container
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
)
_SECONDS = 15.0


class Browser:
    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def look(self, *, scheme: str = "light", width: int = 1280, height: int = 900) -> None:
        """Sets the preferred colour scheme and the size of the window."""
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def open(self, url: str) -> None:
        self.driver.get(url)

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """The visible text of an element; empty if it is hidden."""
        found: str = self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        return found

    def value(self, selector: str) -> str:
        """The exact value of an element."""
        found: str = self.run("return document.querySelector(arguments[0])?.dataset.value ?? ''", selector)
        return found

    def visible(self, selector: str) -> bool:
        return bool(self.run("return document.querySelector(arguments[0])?.checkVisibility() ?? false", selector))

    def wait(self, what: Callable[[], object], why: str, seconds: float = _SECONDS) -> None:
        wait_until(
            what, seconds, otherwise=lambda: f"{why}: {self.text('#state')!r}, {self.text('#notice')!r}", interval=0.05
        )

    def press(self, *keys: str) -> None:
        """Presses keys one after the other: "Tab", "Enter", or a letter."""
        names = {"Tab": Keys.TAB, "Enter": Keys.ENTER}
        for key in keys:
            ActionChains(self.driver).send_keys(names.get(key, key)).perform()

    def console_messages(self) -> list[str]:
        """The console's messages since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def screenshot(self, name: str) -> Path:
        height = self.run("return document.documentElement.scrollHeight")
        width = self.run("return document.documentElement.clientWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        taken = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        path = WEB / f"{name}.png"
        path.write_bytes(base64.b64decode(taken["data"]))
        return path


@contextmanager
def browse() -> Iterator[Browser]:
    options = ChromeOptions()
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(prefix="kvtier-web-") as profile:
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = Chrome(options=options, service=_service(options))
        try:
            yield Browser(driver)
        finally:
            driver.quit()


def _service(options: ChromeOptions) -> Service:
    """The driver, configured with the browser's path."""
    unpacked = WEB / "debian" / "usr"
    if not (unpacked / "bin" / "chromedriver").exists():
        options.binary_location = shutil.which("chromium") or "chromium"
        return Service(executable_path=shutil.which("chromedriver") or "chromedriver")
    options.binary_location = str(unpacked / "lib" / "chromium" / "chromium")
    libraries = sorted({str(file.parent) for file in (unpacked / "lib").glob("*-linux-gnu*/**/*.so*")})
    environment = os.environ | {"LD_LIBRARY_PATH": ":".join(libraries)}
    return Service(executable_path=str(unpacked / "bin" / "chromedriver"), env=environment)
