"""What a configuration needs, compared with what the kernel permits."""

from __future__ import annotations

import dataclasses
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtier.server.config.loader import load
from kvtier.server.process import limits
from kvtier.server.process.limits import Room, limit_findings, needs_of, room

NEEDS = needs_of(load({"region_size": "64MiB", "tiers": []}, environ={}).config)
ENOUGH = Room(NEEDS.all_descriptors, NEEDS.all_threads, None, None, None)


def test_enough() -> None:
    assert limit_findings(NEEDS, ENOUGH) == ([], [])


def test_unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """RLIM_INFINITY is -1. Linux has no infinite limit of descriptors, but gVisor may have one."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found = room(NEEDS.all_threads, fork=True)
    assert limit_findings(NEEDS, dataclasses.replace(found, threads=NEEDS.all_threads)) == ([], [])


@pytest.mark.parametrize(
    ("name", "least", "text"),
    [
        ("descriptors", NEEDS.descriptors, "LimitNOFILE"),
        ("threads", NEEDS.threads, "pids.max"),
        ("address_bytes", NEEDS.address_bytes, "RLIMIT_AS"),
        ("data_bytes", NEEDS.data_bytes, "RLIMIT_DATA"),
        ("stack_bytes", 512 << 10, "RLIMIT_STACK"),
    ],
)
def test_less_than_the_minimum_is_a_problem(name: str, least: int, text: str) -> None:
    """One line, which names the limit."""
    [problem] = limit_findings(NEEDS, dataclasses.replace(ENOUGH, **{name: least - 1}))[0]
    assert text in problem
    assert "\n" not in problem
    assert limit_findings(NEEDS, dataclasses.replace(ENOUGH, **{name: least}))[0] == []


@pytest.mark.parametrize("name", ["descriptors", "threads"])
def test_less_than_all_clients_need_is_a_warning(name: str) -> None:
    most = getattr(ENOUGH, name)
    problems, warnings = limit_findings(NEEDS, dataclasses.replace(ENOUGH, **{name: most - 1}))
    assert (problems, len(warnings)) == ([], 1)


def test_needs_grow_with_tiers_and_sessions(tmp_path: Path) -> None:
    tiers = [{"type": "lmdb", "size": "1GiB"}, {"type": "disk", "size": "1GiB"}]
    flags = {"region_size": "64MiB", "data_dir": str(tmp_path), "limits.max_sessions": 5000}
    more = needs_of(load({**flags, "tiers": tiers}, environ={}).config)
    assert more.descriptors > NEEDS.descriptors
    assert more.all_descriptors >= more.descriptors + 5000
    assert more.threads > NEEDS.threads
    assert more.address_bytes >= NEEDS.address_bytes + (1 << 30)


@pytest.mark.parametrize("fork", [False, True])
def test_threads_are_counted_by_starting_them(fork: bool) -> None:  # noqa: FBT001
    """None remains, and the size of stacks is as before."""
    before = threading.active_count(), threading.stack_size()
    found = room(20, fork=fork)
    assert found.threads == 20
    assert found.descriptors == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert (threading.active_count(), threading.stack_size()) == before


def test_a_limit_of_threads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if threading.active_count() > count + 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    count = threading.active_count()
    monkeypatch.setattr(threading.Thread, "start", limited)
    assert room(20, fork=False).threads == 3


def test_no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_process)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert limits.room(20, fork=True).threads == 0
    assert len(list(Path("/proc/self/fd").iterdir())) == before


WITHOUT_MEMORY = """
from kvtier.server.process import limits
def fail(_end):
    raise MemoryError
limits._wait = fail
print(limits.room(3, fork=True).threads)
"""


def test_a_probed_thread_without_memory_prints_nothing() -> None:
    """The interpreter prints a traceback, which stood before the error of the server."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEMORY], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("3\n", "")
