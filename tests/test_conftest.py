"""The shared fixtures can fail."""

from __future__ import annotations

import os

import pytest

pytest_plugins = ["pytester"]

PLANTED = """
import os, threading
import conftest

conftest.SETTLE_SECONDS = 0.1
done = threading.Event()

def test_clean(no_leaks):
    with open(os.devnull):
        pass

def test_descriptor(no_leaks):
    os.open(os.devnull, os.O_RDONLY)

def test_thread(no_leaks):
    threading.Thread(target=done.wait, daemon=True).start()
"""


def test_leaks_are_found(
    pytester: pytest.Pytester, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that leaves a thread or a descriptor behind fails; one that cleans up passes."""
    tests = request.config.rootpath / "tests"
    monkeypatch.setenv("PYTHONPATH", str(tests), prepend=os.pathsep)
    pytester.makeconftest((tests / "conftest.py").read_text())
    pytester.makepyfile(PLANTED)
    pytester.runpytest_subprocess("-p", "no:asyncio").assert_outcomes(passed=3, errors=2)
