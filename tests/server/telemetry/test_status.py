"""`kvtier status` of a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from harness.launch import launch
from harness.payloads import key_of, namespace_of, payload

from kvtier import __version__
from kvtier.client import Client

PART = 64 << 10


def status(endpoint: str, *flags: str) -> str:
    """Returns the output of `kvtier status`; KVTIER_ENDPOINT names the server."""
    command = [sys.executable, "-m", "kvtier.server", "status", *flags]
    environment = os.environ | {"KVTIER_ENDPOINT": endpoint}
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment).stdout


def test_status(tmp_path: Path) -> None:
    """The output has tiers with fill and hit ratio, sessions, transports, uptime and epoch.

    Also as JSON.
    """
    with launch(tmp_path, listen=f"unix:{tmp_path}/s") as server:
        endpoint = f"unix:{tmp_path}/s"
        epoch = server.wait_ready()["epoch"]
        before = json.loads(status(endpoint, "--json"))
        assert (before["epoch"], before["server_version"], before["sessions"]) == (epoch, __version__, [])
        assert [tier["name"] for tier in before["tiers"]] == ["cpu", "lmdb"]
        assert [tier["hit_rate"] for tier in before["tiers"]] == [None, None]

        keys = [key_of(number) for number in range(4)]
        with Client(endpoint, namespace=namespace_of(PART, model="m/1"), name="unit", engine_id="e7") as client:
            client.wait_until_connected(60)
            client.store(keys, [payload(key, PART) for key in keys])
            client.flush(keys)
            with client.lookup([*keys, key_of(99)], prefix=False):
                now = json.loads(status(endpoint, "--json"))
                text = status(endpoint)
        cpu, lmdb = now["tiers"]
        assert (cpu["blocks"], cpu["hits"], cpu["misses"], cpu["hit_rate"]) == (4, 4, 1, 0.8)
        assert (lmdb["blocks"], lmdb["hits"], lmdb["misses"], lmdb["hit_rate"]) == (4, 0, 1, 0)
        assert cpu["fill"] == 4 * PART / (32 << 20)
        assert cpu["healthy"]
        assert cpu["available_bytes"] == cpu["capacity_bytes"]
        assert (now["leases"], now["namespaces"], now["stores"]) == (1, 1, 0)
        assert now["uptime_seconds"] > before["uptime_seconds"]
        [session] = now["sessions"]
        assert (session["client_name"], session["engine_id"], session["model"]) == ("unit", "e7", "m/1")
        assert (session["transport"], session["attached"], session["pid"]) == ("shm", True, os.getpid())
        for piece in (endpoint, epoch, "80.0%", "unit", "e7", "shm", "m/1", "1 leases"):
            assert piece in text
        deadline = time.monotonic() + 60
        while json.loads(status(endpoint, "--json"))["sessions"]:
            assert time.monotonic() < deadline, "the session does not end"
        assert server.end() == 0
