"""Work that two threads share."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from kvtier.cuda.host import copy, memory
from kvtier.cuda.host.copy import CopyHelper, usable_cores


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> CopyHelper:
    """A helper on a machine with two processors."""
    monkeypatch.setattr(copy, "usable_cores", lambda: 2)
    return CopyHelper()


def assert_helps(helper: CopyHelper) -> None:
    """Two threads take part."""
    both = threading.Barrier(2)
    assert helper.share(range(2), lambda _: both.wait(60))


def test_every_piece_is_done_once(helper: CopyHelper) -> None:
    """Each piece is done once, by either thread, before `share` returns."""
    for _ in range(200):
        done: list[int] = []
        assert helper.share(range(30), done.append)
        assert sorted(done) == list(range(30))


def test_both_threads_work(helper: CopyHelper) -> None:
    """Both threads work at the same time."""
    both = threading.Barrier(2)
    threads: set[str] = set()

    def work(_: int) -> None:
        threads.add(threading.current_thread().name)
        both.wait(60)

    assert helper.share(range(2), work)
    assert threads == {threading.current_thread().name, "kvtier-copy"}


def test_share_waits_for_the_helpers_piece(helper: CopyHelper) -> None:
    """`share` returns after the helper's last piece, so the caller may reuse the memory."""
    done: list[int] = []
    begun = threading.Event()

    def work(piece: int) -> None:
        if threading.current_thread().name == "kvtier-copy":
            begun.set()
            time.sleep(0.05)  # a slow copy
        else:
            assert begun.wait(60)
        done.append(piece)

    assert helper.share(range(3), work)
    assert sorted(done) == [0, 1, 2]


def test_one_processor_has_no_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started: the caller copies alone."""
    monkeypatch.setattr(copy, "usable_cores", lambda: 1)
    done: list[int] = []
    assert not CopyHelper().share(range(3), done.append)
    assert done == []


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/pods/one", {}, 4),
        ("0::/pods/one", {"pods/one/cpu.max": "max 100000"}, 4),
        ("0::/pods/one", {"pods/one/cpu.max": "100000 100000"}, 1),
        ("0::/pods/one", {"pods/one/cpu.max": "350000 100000", "pods/cpu.max": "290000 100000"}, 2),
        ("0::/", {"cpu.max": "1000 100000"}, 1),
        ("0::/", {"cpu.max": "900000 100000"}, 4),
        ("3:cpu,cpuacct:/one\n0::/", {"cpu/one/cpu.cfs_quota_us": "-1", "cpu/one/cpu.cfs_period_us": "100000"}, 4),
        ("3:cpu,cpuacct:/one\n0::/", {"cpu/one/cpu.cfs_quota_us": "150000", "cpu/one/cpu.cfs_period_us": "100000"}, 1),
        # A container may see only its own group, although /proc gives its path on the host.
        ("3:cpu:/docker/one", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ("3:cpuset:/one", {"cpuset/one/cpu.cfs_quota_us": "100000", "cpuset/one/cpu.cfs_period_us": "100000"}, 4),
        ("nonsense", {"cpu.max": "nonsense"}, 4),
        ("0::/", {"cpu.max": "100000 0"}, 4),
    ],
)
def test_quotas_of_cgroups_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str], cores: int
) -> None:
    """The lowest quota of the group and its ancestors counts, in whole processors.

    With one processor there is no helper.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(memory, "_OWN_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_CGROUP_ROOT", tmp_path)
    (tmp_path / "cgroup").write_text(f"{own}\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert usable_cores() == cores
    assert CopyHelper().share([], lambda _: None) == (cores > 1)


def test_the_helper_leaves_when_a_second_caller_comes(helper: CopyHelper) -> None:
    """When a second caller comes, both continue without the helper.

    The next caller is helped again.
    """
    helped, came, over = threading.Event(), threading.Event(), threading.Event()
    names: list[str] = []
    late: list[str] = []

    def work(piece: int) -> None:
        name = threading.current_thread().name
        names.append(name)
        if name == "kvtier-copy":
            helped.set()
            assert came.wait(60)
        elif piece < 100:
            assert over.wait(60)

    def other() -> None:
        assert helped.wait(60)
        assert helper.share(range(50), lambda _: (late.append(threading.current_thread().name), came.set()))
        over.set()

    thread = threading.Thread(target=other, name="other")
    thread.start()
    assert helper.share(range(200), work)
    thread.join()
    assert late == ["other"] * 50
    assert len(names) == 200
    assert names.count("kvtier-copy") == 1

    assert_helps(helper)


@pytest.mark.parametrize("name", ["kvtier-copy", "MainThread"])
def test_errors_are_raised_in_the_calling_thread(helper: CopyHelper, name: str) -> None:
    """`share` raises an error of either thread and skips the rest; the helper stays available."""
    both = threading.Barrier(2)
    done: list[int] = []

    def work(piece: int) -> None:
        if piece < 2:
            both.wait(60)
            if threading.current_thread().name == name:
                raise OSError("broken")
            time.sleep(0.05)
        done.append(piece)

    with pytest.raises(OSError, match="broken"):
        helper.share(range(1000), work)
    assert len(done) < 1000
    done.clear()
    assert helper.share(range(2, 50), done.append)
    assert len(done) == 48


class Interrupted(Exception):
    """Raised by the signal handler."""


@pytest.fixture
def _interrupts() -> Iterator[None]:
    """A signal whose handler raises, as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("_interrupts")
def test_an_interrupt_waits_for_the_helpers_piece(helper: CopyHelper) -> None:
    """An interrupted `share` raises only after the helper's piece, even if interrupted twice."""
    begun = threading.Event()
    done: list[int] = []

    def work(piece: int) -> None:
        if threading.current_thread().name != "kvtier-copy":
            assert begun.wait(60)
            return
        begun.set()
        for number in range(3):  # the second signal interrupts the wait
            time.sleep(0.05)
            if number < 2:
                os.kill(os.getpid(), signal.SIGUSR1)
        done.append(piece)

    with pytest.raises(Interrupted):
        helper.share(range(2), work)
    assert len(done) == 1
    assert_helps(helper)


@pytest.mark.usefixtures("_interrupts")
def test_an_interrupt_just_after_the_helper_started(helper: CopyHelper) -> None:
    """The helper takes no more pieces, and `share` waits for its current piece."""
    begun = threading.Event()
    done: list[int] = []

    class Jobs(SimpleQueue[Any]):
        def put(self, *job: Any) -> None:
            super().put(*job)
            if not begun.is_set():
                assert begun.wait(60)
                signal.raise_signal(signal.SIGUSR1)

    def work(piece: int) -> None:
        begun.set()
        time.sleep(0.1)
        done.append(piece)

    helper._jobs = Jobs()
    with pytest.raises(Interrupted):
        helper.share(range(1000), work)
    assert len(done) == 1
    assert_helps(helper)
    assert len(done) == 1


def test_no_thread_can_be_started(
    helper: CopyHelper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the limit of threads a process copies alone, and says so once."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(copy, "_helper", helper)
    assert copy.helper_refusal() == ""
    for _ in range(2):
        assert not helper.share(range(3), lambda _: None)
    cause = "copies are slower, because their second thread cannot start: can't start new thread"
    assert (copy.helper_refusal(), caplog.messages) == (cause, [f"kvtier: {cause}"])


def test_no_thread_is_started_at_interpreter_exit(helper: CopyHelper, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread started at interpreter exit would never run, so none is started."""
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    assert not helper.share(range(3), lambda _: None)


def test_a_forked_child_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child forked in mid-copy waits for no lock and no thread of its parent."""
    monkeypatch.setattr(copy, "usable_cores", lambda: 2)
    monkeypatch.setattr(copy, "_helper", CopyHelper())
    child = 0

    def fork(_: int) -> None:
        nonlocal child
        child = os.fork()
        if not child:
            signal.alarm(30)
            os._exit(0 if copy._helper.share(range(9), lambda _: None) else 3)

    assert copy._helper.share(range(1), fork)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
