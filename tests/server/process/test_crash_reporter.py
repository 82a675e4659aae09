from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from harness.polling import wait_until
from harness.server_process import MIB, ServerProcess
from harness.traffic import assert_stored, store

from kvtier.server.cli import main

pytestmark = pytest.mark.usefixtures("no_leaks")

BLOCKS = 40


def lines(server: ServerProcess, event: str) -> list[dict[str, Any]]:
    """Returns the complete log lines of an event."""
    text = server.log.rpartition("\n")[0]
    return [line for line in map(json.loads, text.splitlines()) if line["event"] == event]


@pytest.mark.parametrize("tier", ["lmdb", "disk"])
def test_a_file_truncated_under_a_running_server(tmp_path: Path, tier: str) -> None:
    """The log names the cause and the directory; the next start says how many blocks are lost."""
    with ServerProcess(tmp_path, tier=tier) as server:
        server.start()
        keys = store(server.endpoint, BLOCKS)
        server.restart()
        (path,) = server.data_dir.glob("*/data.mdb")
        os.truncate(path, 0 if tier == "disk" else 8192)
        main(["fsck", "--online", "--endpoint", server.endpoint])
        # `faulthandler` reads the stacks of running threads. This can fail with a second signal.
        ended_by = -server.wait()
        assert ended_by in (signal.SIGBUS, signal.SIGSEGV)
        wait_until(lambda: lines(server, "stacks of the crash"), 60)
        [crash] = lines(server, "crashed")
        assert crash["signal"] == "SIGBUS", server.log
        assert "data.mdb of a tier was truncated while the server ran" in crash["reason"]
        assert crash["directories"] == [str(path.parent)]
        [stacks] = lines(server, "stacks of the crash")
        assert "Fatal Python error: Bus error" in stacks["stacks"]
        if ended_by == signal.SIGBUS:
            assert "/tiers/" in stacks["stacks"]

        server.start()
        assert f"its {BLOCKS} blocks are lost" in server.tier(tier).trouble
        assert f"its {BLOCKS} blocks are lost" in server.log
        assert keys == store(server.endpoint, BLOCKS)
        assert_stored(server.endpoint, keys)


def reporters(pid: int) -> list[int]:
    """Returns the children of a process that were forked from it."""
    own = Path(f"/proc/{pid}/cmdline").read_bytes()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if Path(f"/proc/{child}/cmdline").read_bytes() == own]


def is_gone(pid: int) -> bool:
    """Returns whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_reporter_ends_silently_with_its_server(tmp_path: Path, number: int) -> None:
    """It survives the signals of a terminal, because the server needs time to stop after them."""
    with ServerProcess(tmp_path, lmdb=16 * MIB) as server:
        server.start()
        [reporter] = reporters(server.pid)
        for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(reporter, ignored)
        assert not is_gone(reporter)
        if number == signal.SIGTERM:
            assert server.terminate() == 0
        else:
            server.kill()
        wait_until(lambda: is_gone(reporter), 60)
        assert not lines(server, "crashed")
