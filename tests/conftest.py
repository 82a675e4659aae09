"""Fixtures for every test."""

from __future__ import annotations

import faulthandler
import gc
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from harness.long_timeouts import long_timeouts
from harness.polling import polls
from hypothesis import settings

from kvtier.cuda.host import copy

# No example has a deadline, because a busy machine is not a defect.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")

# Read by OpenMP when torch is loaded. Threads that spin slow the tests down on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Settings in the user's environment do not apply to the tests' servers.
for setting in [name for name in os.environ if name.startswith("KVTIER_")]:
    del os.environ[setting]

_STACKS = pytest.StashKey[IO[str]]()


def _stacks_of(worker: dict[str, Any]) -> Path:
    return Path(tempfile.gettempdir()) / f"kvtier-stacks-{worker['testrunuid']}-{worker['workerid']}"


@pytest.hookimpl(trylast=True)  # after pytest has redirected standard error
def pytest_configure(config: pytest.Config) -> None:
    """A crashing worker of pytest-xdist writes the stacks of its threads to a file."""
    if worker := getattr(config, "workerinput", None):
        config.stash[_STACKS] = file = _stacks_of(worker).open("w")
        faulthandler.enable(file)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes the file if the worker ends normally."""
    if file := config.stash.get(_STACKS, None):
        file.close()
        Path(file.name).unlink()


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: Any) -> None:
    """Adds the stacks to the report of the test that crashed the worker."""
    file = _stacks_of(report.node.workerinput)
    if file.exists():
        report.longrepr += f"\n\n{file.read_text() or 'It was killed, or has ended itself.'}"
        file.unlink()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Excludes the collected tests and the imported modules from garbage collections.

    They stay until the end. A collection would visit these millions of objects each time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def use_long_timeouts() -> Iterator[None]:
    """Gives clients long default time-outs; a test of a deadline sets its own."""
    with long_timeouts():
        yield


SETTLE_SECONDS = 60.0
"""How long threads and descriptors may remain after a test has closed its objects."""


def _threads() -> Counter[str]:
    """Living threads by name, without dummies: CPython keeps them when their threads have ended."""
    found = (thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread))
    return Counter(thread.name for thread in found if thread.is_alive())


def _descriptors() -> Counter[str]:
    """Open descriptors by target, without event descriptors, which gRPC keeps."""
    targets: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:  # the descriptor of this listing
            continue
        if not target.startswith("anon_inode:"):
            targets[target] += 1
    return targets


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves a thread or descriptor behind.

    Request it before the fixtures that it watches.
    """
    # This thread stays from the process's first large copy on.
    copy._helper.share((), print)
    watched: dict[str, Callable[[], Counter[str]]] = {"threads": _threads, "file descriptors": _descriptors}
    before = {what: count() for what, count in watched.items()}
    yield
    for _ in polls(SETTLE_SECONDS):
        left = {what: sorted((count() - before[what]).elements()) for what, count in watched.items()}
        if not any(left.values()):
            return
        gc.collect()
    pytest.fail(f"left behind: {left}")
