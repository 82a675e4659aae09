"""The compared peers: a line per column, with its environment."""

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
    name: str
    peer: str
    """MODULE:CLASS of its driver."""
    python: Path
    requirement: str
    """The package that is installed for it; its dependencies are counted."""
    imports: str
    """The module of its client."""
    isolated: bool = False
    """Whether its servers listen everywhere: then it runs in a network with loopback only."""

    def environment(self) -> dict[str, str]:
        """Returns the variables of its processes, with paths of drivers and of libraries."""
        libraries = [str(path) for path in sorted(DEBIAN.glob("**/lib/*-linux-gnu"))]
        known = os.environ.get("LD_LIBRARY_PATH", "")
        paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [*libraries, known])),
            "KVTIER_BENCH_DEBIAN": str(DEBIAN),
            # Otherwise LMCache reports its usage.
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_DISABLE_BANNER": "1",
            "LMCACHE_LOG_LEVEL": "ERROR",
            # In a network with loopback only it does not start otherwise.
            "MC_TCP_BIND_ADDRESS": "127.0.0.1",
        }


def isolation() -> list[str] | None:
    """Returns the command prefix for a network of its own; None if that is not allowed."""
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
"""kvtier's come first: each of the others runs beside them."""
