"""Child processes of the server: messages both ways, signals and ends."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from harness.polling import wait_until

from kvtier.server.config.schema import LogConfig
from kvtier.server.process import child as child_module
from kvtier.server.process.child import Child
from kvtier.server.process.child_main import MAX_MESSAGE_BYTES, SIZES_BYTES, pack, read_sizes, unpack
from kvtier.server.telemetry import logs
from kvtier.tiers.storage.service_signals import SERVICE_SIGNALS, start_module

_ECHO = """
import logging, os, signal, sys, threading
from kvtier.server.process.child_main import connect
channel = connect(int(sys.argv[1]))
for header, payload in channel:
    if header.get("die"):
        print("about to die", file=sys.stderr, flush=True)
        channel.send({"last": "word"})
        os._exit(7)
    if header.get("nonsense"):
        channel._connection.sendall(bytes([255]) * 64)
    if lines := header.get("log"):
        for level, text in lines:
            logging.getLogger("echo").log(level, text)
        print("<no level> of another library", file=sys.stderr, flush=True)
        threading.Thread(target=lambda: 1 // 0).start()
    if header.get("hang"):
        signal.pause()
    channel.send({"echo": header, "arguments": sys.argv[2:]}, payload)
"""


@pytest.fixture(autouse=True)
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a module `echo` that children can run."""
    (tmp_path / "echo.py").write_text(_ECHO)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


async def test_no_process_remains_if_no_thread_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers handle `OSError`, as if the process could not be started."""
    started: list[subprocess.Popen[bytes]] = []

    def recorded(*arguments: Any) -> subprocess.Popen[bytes]:
        started.append(start_module(*arguments))
        return started[-1]

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(child_module, "start_module", recorded)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(OSError, match="can't start new thread"):
        await Child.start("echo")
    assert [process.poll() for process in started] == [-signal.SIGKILL]


async def test_messages_pass_in_both_directions() -> None:
    """Headers and bytes arrive whole and in order; descriptors are open under the same numbers."""
    with Path(__file__).open("rb") as file:  # noqa: ASYNC230
        fd = file.fileno()
        child = await Child.start("echo", ["a", "b"], [fd])
        messages = child.messages()
        for number in (1, 5 << 20, 0):
            child.send({"number": number}, bytes(number))
            header, payload = await anext(messages)
            assert header == {"echo": {"number": number}, "arguments": ["a", "b"]}
            assert payload == bytes(number)
        assert os.fstat(fd).st_ino == os.stat(f"/proc/{child.pid}/fd/{fd}").st_ino  # noqa: PTH116
        assert child.running
        await child.close(10)
        assert await child.ended() == 0
        child.send({"to": "none"})


@pytest.mark.parametrize("number", sorted(SERVICE_SIGNALS))
async def test_children_ignore_signals_to_the_service(number: signal.Signals) -> None:
    """A signal to all processes lets the children run until the server closes their connection.

    This includes a signal that arrives before the child has run its first statement.
    """
    child = await Child.start("echo")
    os.kill(child.pid, number)
    messages = child.messages()
    for _ in range(2):
        child.send({})
        assert (await anext(messages))[0]["echo"] == {}
        os.kill(child.pid, number)
    await child.close(10)
    assert await child.ended() == 0


async def test_messages_are_given_to_a_callback() -> None:
    """Without iteration, each whole message arrives in order, then the end.

    Nonsense ends the child.
    """
    taken: list[tuple[int, int]] = []
    sizes = [1, 5 << 20, 0, 3]
    all_there = asyncio.Event()

    def take(header: dict[str, Any], payload: bytes) -> None:
        taken.append((header["echo"]["n"], len(payload)))
        if len(taken) == len(sizes):
            all_there.set()

    child = await Child.start("echo", take=take)
    for number, size in enumerate(sizes):
        child.send({"n": number}, bytes(size))
    await asyncio.wait_for(all_there.wait(), 60)
    assert taken == list(enumerate(sizes))
    child.send({"nonsense": True})
    await asyncio.wait_for(child.disconnected(), 60)
    assert await child.ended() == -signal.SIGKILL
    await child.close(0)
    assert len(taken) == len(sizes)


async def test_the_end_of_a_child_is_noticed(capfd: pytest.CaptureFixture[str]) -> None:
    """The parent gets its last message and exit code, and logs its standard error."""
    child = await Child.start("echo")
    child.send({"die": True})
    assert [header async for header, _ in child.messages()] == [{"last": "word"}]
    assert await child.ended() == 7
    assert not child.running
    await child.close(0)
    captured = capfd.readouterr()
    assert "about to die" in captured.out + captured.err


@pytest.mark.usefixtures("restored_logs")
async def test_lines_of_a_child_keep_their_level() -> None:
    """Also each line of a text with several lines, which cannot pretend to be another line.

    Lines that are not of the child's log are warnings. An exception that ends a thread is critical.
    """
    stream = io.StringIO()
    logs.configure(LogConfig(format="json"), stream)
    child = await Child.start("echo")
    sent = [(30, "a warning"), (20, "a line"), (40, "an error\n<50>forged"), (20, "<50>forged"), (10, "hidden")]
    child.send({"log": sent})
    await anext(child.messages())
    await child.close(10)
    logs.flush()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    found = [(line["level"], line["text"]) for line in lines if line["event"] == "output of a child process"]
    assert found[:6] == [
        ("warning", "a warning"),
        ("info", "a line"),
        ("error", "an error"),
        ("error", "<50>forged"),
        ("info", "<50>forged"),
        ("warning", "<no level> of another library"),
    ]
    assert found[6] == ("critical", "uncaught exception in a thread")
    assert found[-1] == ("critical", "ZeroDivisionError: integer division or modulo by zero")


async def test_a_child_that_hangs_is_killed() -> None:
    """After its time to end has passed."""
    child = await Child.start("echo")
    child.send({"hang": True})
    await child.close(0.1)
    assert await child.ended() == -signal.SIGKILL


def test_a_child_dies_with_its_parent() -> None:
    """Also if the parent is killed while the child is busy."""
    program = (
        "import asyncio\nfrom kvtier.server.process.child import Child\n"
        "async def main():\n    child = await Child.start('echo')\n    child.send({'number': 1})\n"
        "    await anext(child.messages())\n    child.send({'hang': True})\n    print(child.pid, flush=True)\n"
        "    await asyncio.Event().wait()\nasyncio.run(main())"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_until(lambda: not Path(f"/proc/{pid}/fd").exists() or _state(pid) in "ZX")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


@pytest.mark.parametrize("nonsense", [b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", b"\x01\0\0\0\0\0\0\0{"])
def test_invalid_messages_are_refused(nonsense: bytes) -> None:
    """Sizes beyond the limit, and headers that are not valid."""
    with pytest.raises(ValueError, match=r"\w"):
        unpack(nonsense[SIZES_BYTES:], read_sizes(nonsense[:SIZES_BYTES])[0])


def test_packed_messages_unpack_to_the_same() -> None:
    message = pack({"op": "copy"}, b"bytes")
    header_bytes, payload_bytes = read_sizes(message[:SIZES_BYTES])
    assert len(message) == SIZES_BYTES + header_bytes + payload_bytes < MAX_MESSAGE_BYTES
    assert unpack(message[SIZES_BYTES:], header_bytes) == ({"op": "copy"}, b"bytes")
