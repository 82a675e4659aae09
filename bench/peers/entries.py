"""Who is compared: a line per column, and where its environment is."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ENTRIES", "Entry", "isolation"]

ROOT = Path(__file__).resolve().parent.parent.parent
PEERS = ROOT / "build" / "peers"
DEBIAN = PEERS / "debian"


@dataclass(frozen=True, slots=True)
class Entry:
    """One column of the table."""

    name: str
    peer: str
    """MODULE:CLASS of its driver."""
    python: Path
    requirement: str
    """What is installed for it; its requirements are counted."""
    imports: str
    """What its client imports."""
    isolated: bool = False
    """Whether its servers listen everywhere, so that it gets a network of its own, which has loopback only."""

    def environment(self) -> dict[str, str]:
        """Returns the variables of its processes: what there is, where the drivers are, and Debian's libraries."""
        libraries = [str(path) for path in sorted(DEBIAN.glob("**/lib/*-linux-gnu"))]
        known = os.environ.get("LD_LIBRARY_PATH", "")
        paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [*libraries, known])),
            "KVTIER_BENCH_DEBIAN": str(DEBIAN),
            # LMCache reports to its makers otherwise.
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_DISABLE_BANNER": "1",
            "LMCACHE_LOG_LEVEL": "ERROR",
            # In a network that has nothing but loopback it does not start without.
            "MC_TCP_BIND_ADDRESS": "127.0.0.1",
        }


def isolation() -> list[str] | None:
    """Returns what runs a command in a network of its own; None where that is not allowed."""
    for command in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        try:
            subprocess.run([*command, "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return command
    return None


OWN = Path(sys.executable)
ENTRIES = (
    Entry("kvtier shm", "bench.peers.kvtier_peer:Shm", OWN, "kvtier[server]", "kvtier.client"),
    Entry("kvtier tcp", "bench.peers.kvtier_peer:Tcp", OWN, "kvtier[server]", "kvtier.client"),
    Entry("kvtier grpc", "bench.peers.kvtier_peer:Grpc", OWN, "kvtier[server]", "kvtier.client"),
    Entry(
        "LMCache",
        "bench.peers.lmcache_peer:LMCache",
        ROOT / "build" / "lmcache" / "bin" / "python",
        "lmcache",
        "lmcache.v1.multiprocess.transfer_context, lmcache.v1.multiprocess.transport.factory",
    ),
    Entry(
        "Mooncake",
        "bench.peers.mooncake_peer:Mooncake",
        PEERS / "bin" / "python",
        "mooncake-transfer-engine-non-cuda",
        "mooncake.store",
        isolated=True,
    ),
    Entry("Valkey", "bench.peers.valkey_peer:Valkey", PEERS / "bin" / "python", "redis", "redis"),
)
"""kvtier's come first: each of the others is measured beside them."""
