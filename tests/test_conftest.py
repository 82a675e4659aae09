"""Shared fixtures and helpers find what they look for, and nothing else."""

from __future__ import annotations

import gc
import os
import threading

import pytest
from harness.signals import interrupted_at

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


class Finalized:
    """A cycle that the garbage collector ends, as a stream of gRPC that a test left behind."""

    def __init__(self) -> None:
        self.cycle = self
        self.lock = threading.Condition()

    def __del__(self) -> None:
        with self.lock:
            self.lock.notify_all()


def test_an_interrupt_does_not_reach_finalizers_of_garbage() -> None:
    """The traced lines are those of the block, whichever allocation would start the collector."""
    thresholds = gc.get_threshold()
    try:
        with interrupted_at(1000, threading) as lines:
            Finalized()
            gc.set_threshold(1)
            own = len(lines)
            assert [Finalized() for _ in range(3)]
            assert len(lines) == 4 * own
    finally:
        gc.set_threshold(*thresholds)
    assert own > 0


def test_collected_tests_are_excluded_from_garbage_collections(request: pytest.FixtureRequest) -> None:
    """Objects that a test makes are not."""
    made = [request]
    visited = {id(found) for found in gc.get_objects()}
    assert gc.isenabled()
    assert id(made) in visited
    assert id(request.node) not in visited
