"""List of the compared peers and their environments: one entry per column of the table."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["ENTRIES", "Entry", "isolation"]

ROOT = Path(__file__).resolve().parent.parent.parent
PEERS = ROOT / "build" / "peers"
DEBIAN = PEERS / "debian"


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    peer: str
    """MODULE:CLASS of the peer's driver."""
    python: Path
    requirement: str
    """Package that is installed for the client. The table has the number of its dependencies."""
    imports: str
    """Module of the client, to time its import."""
    isolated: bool = False
    """Whether the peer runs in a network with loopback only, because its servers listen on every
    address."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to those of all peers."""

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of the peer's processes."""
        libraries = [str(path) for path in sorted(DEBIAN.glob("**/lib/*-linux-gnu"))]
        known = os.environ.get("LD_LIBRARY_PATH", "")
        paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [*libraries, known])),
            "KVTIER_BENCH_DEBIAN": str(DEBIAN),
            # LMCache must not report its usage over the network.
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_DISABLE_BANNER": "1",
            "LMCACHE_LOG_LEVEL": "ERROR",
            # Without this Mooncake does not start in a network with loopback only.
            "MC_TCP_BIND_ADDRESS": "127.0.0.1",
            **self.variables,
        }


def isolation() -> list[str] | None:
    """Returns the command prefix for a separate network; None if the system does not allow it."""
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
"""Entries of kvtier are first, because each of the others runs in turns with them."""
