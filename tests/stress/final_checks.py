"""Checks after the last client: nothing is held, every slot is usable, the tiers are sound."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from harness.payloads import key_of, namespace_of, payload
from harness.polling import polls
from harness.server_process import ServerProcess

from kvtier.client import Client, KeyStatus, StoreStatus
from kvtier.protos.v1 import admin_pb2
from kvtier.tiers.core.retiring_extents import GRACE_SECONDS
from stress.shape import KIB

__all__ = ["FILL", "IDLE_SECONDS", "Leftovers", "fill", "fill_keys", "fsck", "wait_idle"]

IDLE_SECONDS = 15.0
"""Limit for the expiry of the last lease and the detection of the last process's end."""
FILL_SECONDS = 2 * GRACE_SECONDS + 10.0
"""An extent that retires for a class of an ended client is kept for this class for a time."""
_FILL_PART = 64 * KIB
_STEP = 32
FILL = namespace_of(_FILL_PART, model="fill")


@dataclass
class Leftovers:
    """What the server still has.

    Attributes:
        seconds: time until nothing was left, or until the limit.
        slots: slots of the region for blocks of one size, and how many could be filled at once.
    """

    seconds: float = 0.0
    leases: int = 0
    holds: int = 0
    stores: int = 0
    quarantined_bytes: int = 0
    sessions: int = 0
    slots: tuple[int, int] = (0, 0)
    used_bytes: tuple[int, int] = (0, 0)
    before: dict[str, float] = field(default_factory=dict)
    """Descriptors and threads of a server after one client."""
    after: dict[str, float] = field(default_factory=dict)


def wait_idle(server: ServerProcess, left: Leftovers) -> None:
    """Waits until the server has no leases, holds, stores, sessions or quarantined slots."""
    began = time.monotonic()
    for _ in polls(IDLE_SECONDS, 0.1):
        status = server.status()
        left.leases, left.holds, left.stores = status.leases, status.holds, status.stores
        left.quarantined_bytes, left.sessions = status.quarantined_bytes, len(status.sessions)
        left.seconds = time.monotonic() - began
        if _idle(status):
            return


def fill_keys(count: int) -> list[bytes]:
    """Keys of the blocks that fill the region."""
    return [key_of(number, salt="fill") for number in range(count)]


def fill(server: ServerProcess, left: Leftovers) -> None:
    """Fills the region with pinned blocks of one size: a lost slot cannot be filled."""
    available = server.status().tiers[0].available_bytes
    keys = fill_keys(available // _FILL_PART)
    with Client(server.endpoint, namespace=FILL) as client, ExitStack() as held:
        client.wait_until_connected(10)
        pinned = 0
        for _ in polls(FILL_SECONDS):
            pinned += _fill_some(client, keys[pinned : pinned + _STEP], held)
            if pinned == len(keys):
                break
        left.slots = (len(keys), pinned)
        left.used_bytes = (len(keys) * _FILL_PART, server.status().tiers[0].used_bytes)


def fsck(server: ServerProcess) -> tuple[int, Any]:
    """Checks the tiers on disk of the ended server; returns fsck's exit code and output."""
    command = [sys.executable, "-m", "kvtier.server", "fsck", "--json", "--config", f"{server.directory}/kvtier.toml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout or "null")


def _fill_some(client: Client, keys: list[bytes], held: ExitStack) -> int:
    """Stores and pins blocks; returns how many of the first succeeded.

    Write-backs may delay the others.
    """
    statuses = client.store(keys, [payload(key, _FILL_PART) for key in keys])
    wanted = [key for key, status in zip(keys, statuses, strict=True) if status != StoreStatus.NO_ROOM]
    lease = held.enter_context(client.lookup(wanted, lease=600, wait=5.0))
    first = next((i for i, status in enumerate(statuses) if status == StoreStatus.NO_ROOM), len(keys))
    return min(first, sum(status == KeyStatus.HIT for status in lease.statuses))


def _idle(status: admin_pb2.GetStatusResponse) -> bool:
    return not (status.leases or status.holds or status.stores or status.quarantined_bytes or status.sessions)
