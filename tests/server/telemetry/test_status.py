"""`kvtier status` of a real server."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.command_line import kvtier
from harness.launch import launch
from harness.payloads import filled, key_of, namespace_of, payload
from harness.server_process import ServerProcess

from kvtier import __version__
from kvtier.client import Client
from kvtier.client.session.reconnect import TransportName
from kvtier.protos.v1.admin_pb2 import GetStatusResponse, HitRatioEstimate, TierStatus
from kvtier.server.commands.rates import rates
from kvtier.server.telemetry.status import values

PART = 64 << 10


def status(endpoint: str, *flags: str) -> str:
    """Returns the output of `kvtier status`; KVTIER_ENDPOINT names the server."""
    return kvtier("status", *flags, environment={"KVTIER_ENDPOINT": endpoint}).stdout


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


def test_the_json_of_each_command_says_hit_rate() -> None:
    """`status --json` and `top --json` have one name for the fraction of keys that a tier had."""
    tier = TierStatus(name="cpu", hits=3, misses=1, estimates=[HitRatioEstimate(scale=2, hit_ratio=0.75)])
    shown = values(GetStatusResponse(tiers=[tier]))
    assert shown["tiers"][0]["hit_rate"] == 0.75
    assert shown["tiers"][0]["estimates"] == [{"scale": 2, "hit_rate": 0.75}]
    sample = rates(shown, shown, 1)
    assert sample["hit_rate"] is None
    assert sample["tiers"][0]["hit_rate"] is None


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Yields a server with a tier on disk."""
    with ServerProcess(tmp_path_factory.mktemp("s")).start() as server:
        yield server


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_stored_and_loaded_bytes(shared: ServerProcess, transport: TransportName) -> None:
    """Each tier counts the bytes of stores and loads, once each, with every transport."""
    keys = [key_of(number, salt=transport) for number in range(4)]

    def moved() -> list[int]:
        return [count for tier in shared.status().tiers for count in (tier.stored_bytes, tier.loaded_bytes)]

    def parts_since(before: list[int]) -> list[float]:
        return [(now - then) / PART for now, then in zip(moved(), before, strict=True)]

    with Client(shared.endpoint, namespace=namespace_of(PART), transport=transport) as client:
        client.wait_until_connected(60)
        before = moved()
        client.store(keys, [payload(key, PART) for key in keys])
        client.flush(keys)
        assert parts_since(before) == [4, 0, 4, 0]
        before = moved()
        assert client.load(keys[:2], filled(2, PART)) == 2
        assert parts_since(before) == [0, 2, 0, 0]
        with client.lookup(keys) as found, client.read(found, [1]):
            pass
        assert parts_since(before) == [0, 3, 0, 0]
        client.reset()
        assert client.load(keys, filled(4, PART), wait=60) == 4
        assert parts_since(before) == [0, 7, 0, 4]


@pytest.mark.parametrize("tier", ["lmdb", "disk"])
def test_free_disk_bytes(tmp_path: Path, tier: str) -> None:
    """A tier on disk reports the free bytes of its disk; the CPU tier has no disk."""
    with ServerProcess(tmp_path, tier=tier).start() as server:
        cpu, below = server.wait_for(lambda status: status.tiers[1].HasField("free_disk_bytes")).tiers
        assert 0 < below.free_disk_bytes <= shutil.disk_usage(tmp_path).total
        assert not cpu.HasField("free_disk_bytes")
        free = [each["free_disk_bytes"] for each in json.loads(status(server.endpoint, "--json"))["tiers"]]
        assert (free[0], free[1] > 0) == (None, True)
