"""Signals to a server process and to its children."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.payloads import key_of, namespace_of, payload
from harness.polling import polls, wait_until
from harness.server_process import MIB, ServerProcess, bulk_pid
from harness.traffic import PART, wait_connected

from kvtier.client import Client, KVTierError
from kvtier.server.config.schema import TierConfig
from kvtier.server.tier_host.factory import open_on_thread

pytestmark = pytest.mark.usefixtures("no_leaks")

BLOCKS = 400
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
UNUSED = (signal.SIGUSR1, signal.SIGUSR2)


def events_of(server: ServerProcess) -> list[str]:
    return [json.loads(line)["event"] for line in server.log.splitlines()]


def children_of(pid: int) -> list[int]:
    """Returns all child processes, also those of other threads than the first."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def start_streams(client: Client) -> None:
    """Waits until the bulk process serves the client; the first stream starts this process."""
    key = key_of(BLOCKS)

    def uses_it() -> bool:
        with contextlib.suppress(KVTierError):
            client.store([key], [payload(key, PART)])
        return client.transport == "tcp"

    wait_until(uses_it, 60)


def store_without_flush(endpoint: str) -> list[bytes]:
    keys = [key_of(number) for number in range(BLOCKS)]
    with Client(endpoint, namespace=namespace_of(PART)) as client:
        wait_connected(client)
        client.store(keys, [payload(key, PART) for key in keys])
    return keys


def kill_all(server: ServerProcess, number: int) -> None:
    """Sends a signal to the server and its children, as a terminal and systemd do."""
    for pid in (*children_of(server.pid), server.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.mark.parametrize("number", ENDING)
@pytest.mark.parametrize("send", [kill_all, lambda server, number: os.kill(server.pid, number)])
def test_a_signal_that_ends_the_server_loses_no_block(
    tmp_path: Path, number: int, send: Callable[[ServerProcess, int], object]
) -> None:
    """All stored blocks are durable, also if the children get the signal too, or get it twice."""
    with ServerProcess(tmp_path, region=128 * MIB) as server:
        server.start()
        with Client(server.endpoint, namespace=namespace_of(PART), transport="tcp") as client:
            start_streams(client)
        store_without_flush(server.endpoint)
        send(server, number)
        with contextlib.suppress(ProcessLookupError):
            send(server, number)
        assert server.wait() == 0, server.log
        assert "a child process did not end" not in server.log
        assert "bulk process has ended" not in server.log
        assert events_of(server)[-1] == "stopped"
        server.start()
        assert server.tier("lmdb").blocks == BLOCKS + 1


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def suspended_check(server: ServerProcess) -> int | None:
    """Suspends the child that checks the LMDB file, if it runs; returns its pid."""
    for child in children_of(server.pid):
        with contextlib.suppress(OSError):
            if b"def check_meta" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(child, signal.SIGSTOP)
                return child
    return None


class ClosingLoop(asyncio.SelectorEventLoop):
    """A loop that closes after a thread has asked whether it is closed."""

    def is_closed(self) -> bool:
        return super().is_closed() and threading.current_thread() is threading.main_thread()


def test_tiers_that_open_after_the_loop_has_closed_log_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A signal ends the start while a thread opens the tiers, which ends after the loop."""
    monkeypatch.setattr("threading.excepthook", lambda arguments: logging.getLogger("thread").error("%r", arguments))
    opens, ends = threading.Event(), threading.Event()

    class Slow:
        def __init__(self, **_: object) -> None:
            opens.set()
            ends.wait(30)
            raise OSError("no disk")

    monkeypatch.setattr("kvtier.server.tier_host.factory.tier_class", lambda _: Slow)
    with contextlib.closing(ClosingLoop()) as loop:
        opening = loop.create_task(
            open_on_thread([TierConfig(type="x:Slow", name="slow", path=tmp_path, size=1 << 24)])
        )
        loop.run_until_complete(asyncio.sleep(0))
        assert opens.wait(30)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(opening)
    thread = next(thread for thread in threading.enumerate() if thread.name == "kvtier-open")
    ends.set()
    thread.join(30)
    assert not thread.is_alive()
    assert not caplog.records


def kill_opening_thread(server: ServerProcess, number: int) -> None:
    """Has the signal handled by the thread that opens the tiers.

    As if it arrived just before the event loop waits, the wait of the main thread goes on.
    """
    for task in Path(f"/proc/{server.pid}/task").iterdir():
        if (task / "children").read_text() and int(task.name) != server.pid:
            assert ctypes.CDLL(None).tgkill(server.pid, int(task.name), number) == 0


@pytest.mark.parametrize("number", ENDING)
@pytest.mark.parametrize("send", [kill_all, lambda server, number: os.kill(server.pid, number), kill_opening_thread])
def test_a_signal_during_the_check_of_a_store_ends_the_start(
    tmp_path: Path, number: int, send: Callable[[ServerProcess, int], object]
) -> None:
    """At once, with exit code 0, one line, no child left, and an unchanged store."""
    with ServerProcess(tmp_path, region=128 * MIB) as server:
        server.start()
        store_without_flush(server.endpoint)
        assert server.terminate() == 0
        before, logged = (server.data_dir / "lmdb" / "data.mdb").read_bytes(), len(events_of(server))
        server.launch()
        child = wait_until(lambda: suspended_check(server), interval=0.001)
        send(server, number)
        assert server.wait() == 0, server.log
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGCONT)  # it may not have asked yet to be killed with the server
        wait_until(lambda: not is_running(child))
        events = [event for event in events_of(server)[logged:] if event != "storage"]
        assert events == ["the server ends because of a signal"], server.log
        assert not server.path.exists()
        assert (server.data_dir / "lmdb" / "data.mdb").read_bytes() == before
        server.start()
        assert server.tier("lmdb").blocks == BLOCKS


@pytest.mark.parametrize("number", UNUSED)
def test_a_signal_without_a_meaning_is_logged(tmp_path: Path, number: int) -> None:
    """The server and its bulk process go on."""
    with ServerProcess(tmp_path) as server:
        server.start()
        with Client(server.endpoint, namespace=namespace_of(PART), transport="tcp") as client:
            start_streams(client)
            before = bulk_pid(server.pid)
            kill_all(server, number)
            wait_until(lambda: signal.Signals(number).name in server.log, 60)
            assert client.connected
            assert bulk_pid(server.pid) == before
        assert server.terminate() == 0


def test_nohup_lets_a_server_survive_its_terminal(tmp_path: Path) -> None:
    """SIGHUP that was ignored before the start stays ignored."""
    with ServerProcess(tmp_path, prefix=["nohup"]) as server:
        server.start()
        os.kill(server.pid, signal.SIGHUP)
        os.kill(server.pid, signal.SIGUSR1)
        wait_until(lambda: "SIGUSR1" in server.log, 60)
        assert server.status().pid == server.pid
        assert server.terminate() == 0


def test_further_signals_do_not_interrupt_the_end(tmp_path: Path) -> None:
    """Signals without end, until the process has ended with 0."""
    with ServerProcess(tmp_path) as server:
        server.start()
        for _ in polls(60, 0.001):
            if not server.alive:
                break
            for number in ENDING:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(server.pid, number)
        assert server.wait() == 0
        assert events_of(server)[-1] == "stopped"


def test_a_suspended_server_goes_on(tmp_path: Path) -> None:
    """SIGTSTP of the whole process group (Ctrl-Z), then SIGCONT (`fg`): the session stays."""
    with ServerProcess(tmp_path) as server:
        server.start()
        with Client(server.endpoint, namespace=namespace_of(PART)) as client:
            wait_connected(client)
            epoch = client.epoch
            kill_all(server, signal.SIGTSTP)
            kill_all(server, signal.SIGCONT)
            keys = [key_of(1)]
            client.store(keys, [payload(keys[0], PART)])
            assert client.epoch == epoch
        assert server.terminate() == 0


def test_children_end_with_a_killed_server(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        server.start()
        with Client(server.endpoint, namespace=namespace_of(PART), transport="tcp") as client:
            start_streams(client)
            children = children_of(server.pid)
            assert children
            server.kill()
            wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children), 60)
