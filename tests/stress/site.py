"""The server under stress: its lives, one after the other on the same data, and what each of them has shown."""

from __future__ import annotations

import json
import re
import signal
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from harness.server_process import ServerProcess

from kvtier.protos.v1 import admin_pb2
from stress.client_pool import tethered
from stress.shape import MIB
from stress.watch import Watch

__all__ = ["LEASE_SECONDS", "Life", "Site"]

REGION = 32 * MIB
SMALL_TIER = 64 * MIB
LEASE_SECONDS = 3.0
_SLACK = 3
"""A block of 4 KiB takes 8 KiB of LMDB's file."""
_NO_ROOM = "MDB_MAP_FULL"
_METRIC = re.compile(r"^(kvtier_checksum_mismatches_total|kvtier_rpc_duration_seconds_count)\{([^}]*)\} ([0-9.e+]+)$")


@dataclass
class Life:
    """One server process, as far as it was seen."""

    epoch: str
    began: float
    seconds: float = 0.0
    """For how long it had clients."""
    exit_code: int | None = None
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)
    """Per tier its evictions, hits and blocks."""
    quarantined: int = 0
    """Most bytes in quarantine at a time."""
    leases: int = 0
    mismatches: float = 0.0
    internal: float = 0.0
    """Calls that were answered INTERNAL."""


class Site:
    """Starts, kills and watches the server. One of its two tiers on disk is too small for the load, the other holds all of it."""

    def __init__(self, directory: Path, large: str, everything: int, watch: Watch) -> None:
        """`large` is the type of the tier that holds everything, "lmdb" or "disk"; that has so many bytes."""
        room = _SLACK * (everything + REGION)
        sizes = {name: room if name == large else SMALL_TIER for name in ("lmdb", "disk")}
        config = (
            f'metrics = "127.0.0.1:0"\n[leases]\ndefault = {LEASE_SECONDS}\n[sessions]\nheartbeat_interval = 0.5\n'
            f'[[tiers]]\ntype = "lmdb"\nsize = {sizes["lmdb"]}'
        )
        self.server = ServerProcess(
            directory, region=REGION, lmdb=sizes["disk"], tier="disk", config=config, prefix=tethered()
        )
        self.large = large
        self.lives: list[Life] = []
        self._watch = watch
        self._metrics = ""
        self._wakes_at: float | None = None

    @property
    def stopped(self) -> bool:
        """Whether the server is there and does not run."""
        return self._wakes_at is not None

    def start(self) -> None:
        """Begins a life, and waits until it serves."""
        self.server.start()
        ready = [line for line in self._log() if line["event"] == "ready"][-1]
        self._metrics = f"http://127.0.0.1:{ready['metrics_port']}/metrics"
        self.lives.append(Life(ready["epoch"], time.monotonic()))

    def end(self, number: signal.Signals) -> None:
        """Ends a life by this signal."""
        self.look()
        self.wake(at_once=True)
        life = self.lives[-1]
        life.seconds = life.seconds or time.monotonic() - life.began
        if number == signal.SIGTERM:
            life.exit_code = self.server.terminate()
        else:
            self.server.kill()

    def clients_leave(self) -> None:
        """Takes note that this life has no more clients: what comes of it now is no time for them to come back in."""
        self.lives[-1].seconds = time.monotonic() - self.lives[-1].began

    def stop(self, seconds: float) -> None:
        """SIGSTOPs the server for so many seconds."""
        self.server.suspend()
        self._wakes_at = time.monotonic() + seconds

    def wake(self, *, at_once: bool = False) -> None:
        """SIGCONTs the server, if its time has come."""
        if self._wakes_at is not None and (at_once or time.monotonic() >= self._wakes_at):
            self.server.resume()
            self._wakes_at = None

    def look(self) -> admin_pb2.GetStatusResponse | None:
        """Takes note of what the server holds and takes; returns its status, if it answers."""
        self._watch.sample(self.server.pid, "server")
        if self.stopped:
            return None
        try:
            status = self.server.status(2.0)
            self._note_metrics()
        except (grpc.RpcError, OSError):
            return None
        life = self.lives[-1]
        life.quarantined = max(life.quarantined, status.quarantined_bytes)
        life.leases = max(life.leases, status.leases)
        for tier in status.tiers:
            life.tiers[tier.name] = {"evictions": tier.evictions, "hits": tier.hits, "blocks": tier.blocks}
        return status

    def complaints(self) -> Counter[str]:
        """Returns the errors that the server has logged, in all its lives, by what they are.

        Less those of the small tier when it is full of pieces: they cost a store, and the next one makes room.
        """
        lines = (line for line in self._log() if line["level"] in ("error", "critical"))
        found = Counter(f"{line['event']}: {line.get('exception', '')[-500:]}" for line in lines)
        return Counter({text: count for text, count in found.items() if self.large == "lmdb" or _NO_ROOM not in text})

    def _note_metrics(self) -> None:
        with urllib.request.urlopen(self._metrics, timeout=2.0) as answer:  # noqa: S310 - our own
            text = answer.read().decode()
        found = [match.groups() for match in map(_METRIC.match, text.splitlines()) if match]
        life = self.lives[-1]
        life.mismatches = sum(float(value) for name, _, value in found if "mismatches" in name)
        life.internal = sum(float(value) for _, labels, value in found if 'code="INTERNAL"' in labels)

    def _log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.server.log.splitlines() if line.startswith("{")]
