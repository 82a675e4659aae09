"""Processes that serve the server: messages both ways, and an end that is noticed, whoever comes first."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvtier.server.process import child as child_module
from kvtier.server.process.child import Child, RestartBackoff
from kvtier.server.process.child_main import MAX_MESSAGE_BYTES, SIZES_BYTES, pack, read_sizes, unpack

_ECHO = """
import os, sys, time
from kvtier.server.process.child_main import connect
channel = connect(int(sys.argv[1]))
for header, payload in channel:
    if header.get("die"):
        print("about to die", file=sys.stderr, flush=True)
        channel.send({"last": "word"})
        os._exit(7)
    if header.get("nonsense"):
        channel._connection.sendall(bytes([255]) * 64)
    if header.get("hang"):
        time.sleep(600)
    channel.send({"echo": header, "arguments": sys.argv[2:]}, payload)
"""


@pytest.fixture(autouse=True)
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `echo` that children can run."""
    (tmp_path / "echo.py").write_text(_ECHO)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


def test_messages_go_both_ways() -> None:
    """Headers and bytes arrive whole and in order, large ones too, and descriptors are open under the same numbers."""

    async def talk(fd: int) -> None:
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
        child.send({"to": "nobody"})

    with Path(__file__).open("rb") as file:
        asyncio.run(talk(file.fileno()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_mean_the_server(number: signal.Signals) -> None:
    """Whoever ends the server may well tell its children, too: they go on until it hangs up."""

    async def talk() -> None:
        child = await Child.start("echo")
        messages = child.messages()
        for _ in range(2):
            child.send({})
            assert (await anext(messages))[0]["echo"] == {}
            os.kill(child.pid, number)
        await child.close(10)
        assert await child.ended() == 0

    asyncio.run(talk())


def test_messages_that_are_taken_as_they_come() -> None:
    """Who does not iterate is given each message, in order, whole, and hears of the end; nonsense ends the child."""

    async def talk() -> None:
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
        await asyncio.wait_for(child.hung_up(), 60)
        assert await child.ended() == -signal.SIGKILL
        await child.close(0)
        assert len(taken) == len(sizes)

    asyncio.run(talk())


def test_the_end_of_a_child_is_noticed(capfd: pytest.CaptureFixture[str]) -> None:
    """Its last word is heard, its exit code known; what it wrote to its standard error is in our log."""

    async def die() -> None:
        child = await Child.start("echo")
        child.send({"die": True})
        assert [header async for header, _ in child.messages()] == [{"last": "word"}]
        assert await child.ended() == 7
        assert not child.running
        await child.close(0)

    asyncio.run(die())
    captured = capfd.readouterr()
    assert "about to die" in captured.out + captured.err


def test_a_child_that_hangs_is_killed() -> None:
    """When its time to end is over."""

    async def hang() -> None:
        child = await Child.start("echo")
        child.send({"hang": True})
        await asyncio.sleep(0.1)
        await child.close(0.1)
        assert await child.ended() == -signal.SIGKILL

    asyncio.run(hang())


def test_a_child_dies_with_its_parent() -> None:
    """However the parent dies, and whatever the child is doing."""
    program = (
        "import asyncio\nfrom kvtier.server.process.child import Child\n"
        "async def main():\n    child = await Child.start('echo')\n    child.send({'number': 1})\n"
        "    await anext(child.messages())\n    child.send({'hang': True})\n    await asyncio.sleep(0.1)\n"
        "    print(child.pid, flush=True)\n    await asyncio.sleep(600)\nasyncio.run(main())"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/fd").exists() and _state(pid) not in "ZX":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


@pytest.mark.parametrize("nonsense", [b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", b"\x01\0\0\0\0\0\0\0{"])
def test_nonsense_is_no_message(nonsense: bytes) -> None:
    """Sizes beyond everything, and headers that are none, are refused."""
    with pytest.raises(ValueError, match=r"\w"):
        unpack(nonsense[SIZES_BYTES:], read_sizes(nonsense[:SIZES_BYTES])[0])


def test_messages_survive_their_packing() -> None:
    """What is packed is unpacked."""
    message = pack({"op": "copy"}, b"bytes")
    header_bytes, payload_bytes = read_sizes(message[:SIZES_BYTES])
    assert len(message) == SIZES_BYTES + header_bytes + payload_bytes < MAX_MESSAGE_BYTES
    assert unpack(message[SIZES_BYTES:], header_bytes) == ({"op": "copy"}, b"bytes")


def test_starts_are_spaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, then after longer and longer, up to a limit; one that has lived well begins it anew."""
    now = [100.0]
    monkeypatch.setattr(child_module.time, "monotonic", lambda: now[0])
    backoff = RestartBackoff(first=1, most=5, good=60)
    assert backoff.remaining() == 0
    pauses = []
    for lived in (0, 0, 0, 0, 61, 0):
        backoff.ended(lived)
        pauses.append(backoff.remaining())
        now[0] += 100
        assert backoff.remaining() == 0
    assert pauses == [1, 2, 4, 5, 1, 2]
