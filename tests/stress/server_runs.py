"""The server under stress: its successive processes on the same data, and their observed state."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
from harness.server_process import ServerProcess
from harness.store_server import RunningKeeper

from kvtier.protos.v1 import admin_pb2
from stress.client_pool import die_with_parent_prefix
from stress.plan import Plan
from stress.shape import MIB
from stress.watch import Watch

__all__ = ["LEASE_SECONDS", "SMALL", "ServerRun", "StressServer"]

REGION = 32 * MIB
SMALL_TIER = 64 * MIB
SMALL = MappingProxyType({"lmdb": "disk", "disk": "lmdb"})
"""The type of the small tier, by that of the large tier."""
LEASE_SECONDS = 3.0
_SLACK = 3
"""A block of 4 KiB needs 8 KiB of LMDB's file."""
_NO_ROOM = MappingProxyType({"lmdb": "MDB_MAP_FULL", "disk": "the index is full"})
"""Errors of a small tier that is fragmented, or whose index has no room for more small blocks."""
_METRIC = re.compile(r"^(kvtier_checksum_mismatches_total|kvtier_rpc_duration_seconds_count)\{([^}]*)\} ([0-9.e+]+)$")


@dataclass
class ServerRun:
    """Observations of one server process."""

    epoch: str
    began: float
    seconds: float = 0.0
    """Time with clients."""
    exit_code: int | None = None
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)
    """Per tier its evictions, hits and blocks."""
    quarantined: int = 0
    """Largest number of bytes in quarantine."""
    leases: int = 0
    mismatches: float = 0.0
    internal: float = 0.0
    """Calls answered with INTERNAL."""


class StressServer:
    """Starts, kills and watches the server.

    One disk tier is too small for the load, and comes first in lookups. The other one holds all.
    """

    def __init__(self, directory: Path, plan: Plan, everything: int, watch: Watch) -> None:
        """In a torture run, a start forks a process that has imported the server already."""
        large = plan.large
        self._opened = contextlib.ExitStack()
        room = _SLACK * (everything + REGION)
        keeper = ""
        if plan.warm:
            path = self._opened.enter_context(RunningKeeper(directory, prefix=die_with_parent_prefix())).path
            keeper = f'keeper = "{path}"\n'
        config = (
            f'{keeper}metrics = "127.0.0.1:0"\n[leases]\ndefault = {LEASE_SECONDS}\npart = 1.0\n'
            "[sessions]\nheartbeat_interval = 0.5\n"
            f'[[tiers]]\ntype = "{SMALL[large]}"\nsize = {SMALL_TIER}'
        )
        self.server = ServerProcess(
            directory,
            region=REGION,
            lmdb=room,
            tier=large,
            config=config,
            prefix=() if plan.kills else die_with_parent_prefix(),
            tcp=True,
        )
        self.large = large
        self.start_seconds = 0.0
        """Time of the last whole start."""
        self.server_runs: list[ServerRun] = []
        self._watch = watch
        self._metrics = ""
        self._wakes_at: float | None = None

    @property
    def stopped(self) -> bool:
        return self._wakes_at is not None

    def close(self) -> None:
        self.server.close()
        self._opened.close()

    @property
    def warm_starts(self) -> int:
        """Number of starts that found blocks in the memory of the server before."""
        return sum(line["event"].startswith("warm start") and line["blocks"] > 0 for line in self._log())

    def start(self) -> None:
        """Starts a process and waits until it serves."""
        began = time.monotonic()
        self.server.start()
        self.start_seconds = time.monotonic() - began
        ready = next(line for line in self._log(newest_first=True) if line["event"] == "ready")
        self._metrics = f"http://127.0.0.1:{ready['metrics_port']}/metrics"
        self.server_runs.append(ServerRun(ready["epoch"], time.monotonic()))

    def kill_start(self, seconds: float) -> None:
        """Starts a process and kills it after this time, whether or not it serves then."""
        self.server.launch()
        time.sleep(seconds)
        self.server.kill()

    def end(self, number: signal.Signals) -> None:
        self.look()
        self.wake(at_once=True)
        run = self.server_runs[-1]
        run.seconds = run.seconds or time.monotonic() - run.began
        if number == signal.SIGTERM:
            run.exit_code = self.server.terminate()
        else:
            self.server.kill()

    def end_client_time(self) -> None:
        """Ends the time with clients of this run."""
        self.server_runs[-1].seconds = time.monotonic() - self.server_runs[-1].began

    def stop(self, seconds: float) -> None:
        """SIGSTOPs the server for this many seconds."""
        self.server.suspend()
        self._wakes_at = time.monotonic() + seconds

    def wake(self, *, at_once: bool = False) -> None:
        """SIGCONTs the server if its time has come."""
        if self._wakes_at is not None and (at_once or time.monotonic() >= self._wakes_at):
            self.server.resume()
            self._wakes_at = None

    def look(self) -> admin_pb2.GetStatusResponse | None:
        """Records the server's status and resources; returns the status if it answers."""
        self._watch.sample(self.server.pid, "server")
        if self.stopped:
            return None
        try:
            status = self.server.status(2.0)
            self._note_metrics()
        except (grpc.RpcError, OSError):
            return None
        run = self.server_runs[-1]
        run.quarantined = max(run.quarantined, status.quarantined_bytes)
        run.leases = max(run.leases, status.leases)
        for tier in status.tiers:
            run.tiers[tier.name] = {"evictions": tier.evictions, "hits": tier.hits, "blocks": tier.blocks}
        return status

    def logged_errors(self) -> Counter[str]:
        """The errors in all logs of the server, counted by message.

        Without those of the small tier when it has no room: they fail a store, and the next one
        makes room.
        """
        lines = (line for line in self._log() if line["level"] in ("error", "critical"))
        found = Counter(f"{line['event']}: {line.get('exception', '')[-500:]}" for line in lines)
        small = SMALL[self.large]
        return Counter(
            {
                text: count
                for text, count in found.items()
                if not (text.startswith(f"tier {small}: ") and _NO_ROOM[small] in text)
            }
        )

    def _note_metrics(self) -> None:
        with urllib.request.urlopen(self._metrics, timeout=2.0) as answer:  # noqa: S310 - our own
            text = answer.read().decode()
        found = [match.groups() for match in map(_METRIC.match, text.splitlines()) if match]
        run = self.server_runs[-1]
        run.mismatches = sum(float(value) for name, _, value in found if "mismatches" in name)
        run.internal = sum(float(value) for _, labels, value in found if 'code="INTERNAL"' in labels)

    def _log(self, *, newest_first: bool = False) -> Iterator[dict[str, Any]]:
        """The lines of all logs; a line that a kill has cut off is left out."""
        lines = self.server.log.splitlines()
        for line in reversed(lines) if newest_first else lines:
            if line.startswith("{") and line.endswith("}"):
                yield json.loads(line)
