"""Fixtures for every test."""

from __future__ import annotations

import faulthandler
import gc
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from harness.long_timeouts import long_timeouts
from hypothesis import settings

from kvtier.cuda.host import copy

# A machine that is busy is no defect: no example has a deadline.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")

# Read by OpenMP when torch is loaded: threads that spin while they wait slow the tests down on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# What whoever runs the tests has set for servers of their own is not meant for those of the tests.
for setting in [name for name in os.environ if name.startswith("KVTIER_")]:
    del os.environ[setting]

_STACKS = pytest.StashKey[IO[str]]()


def _stacks_of(worker: dict[str, Any]) -> Path:
    return Path(tempfile.gettempdir()) / f"kvtier-stacks-{worker['testrunuid']}-{worker['workerid']}"


@pytest.hookimpl(trylast=True)  # after pytest has had them go to a standard error that nobody may keep
def pytest_configure(config: pytest.Config) -> None:
    """A worker of pytest-xdist that crashes leaves in a file what its threads were doing."""
    if worker := getattr(config, "workerinput", None):
        config.stash[_STACKS] = file = _stacks_of(worker).open("w")
        faulthandler.enable(file)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """One that does not leaves nothing."""
    if file := config.stash.get(_STACKS, None):
        file.close()
        Path(file.name).unlink()


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: Any) -> None:
    """The report of the test that a worker died of says it."""
    file = _stacks_of(report.node.workerinput)
    if file.exists():
        report.longrepr += f"\n\n{file.read_text() or 'It was killed, or has ended itself.'}"
        file.unlink()


@pytest.fixture(scope="session", autouse=True)
def use_long_timeouts() -> Iterator[None]:
    """Gives clients long default timeouts; a test of a deadline sets its own."""
    with long_timeouts():
        yield


SETTLE_SECONDS = 60.0
"""How long threads and descriptors may take to go after the test has closed what it opened."""


def _threads() -> Counter[str]:
    return Counter(thread.name for thread in threading.enumerate() if thread.is_alive())


def _descriptors() -> Counter[str]:
    """Counts open descriptors by their target, but for event descriptors: gRPC keeps those as long as it likes."""
    targets: Counter[str] = Counter()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:  # the descriptor of this very listing
            continue
        if not target.startswith("anon_inode:"):
            targets[target] += 1
    return targets


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves a thread or a file descriptor behind. Ask for it before the fixtures it is to watch."""
    # A thread that is there from the first large copy of the process on, whosever that is.
    copy._helper.share((), print)
    watched: dict[str, Callable[[], Counter[str]]] = {"threads": _threads, "file descriptors": _descriptors}
    before = {what: count() for what, count in watched.items()}
    yield
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        gc.collect()
        left = {what: sorted((count() - before[what]).elements()) for what, count in watched.items()}
        if not any(left.values()):
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {left}")
        time.sleep(0.02)
