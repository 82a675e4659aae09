"""Unpacks Debian packages: `python -m bench.peers.debian DIRECTORY [PACKAGE…]`.

Installs nothing on the system. Without names it unpacks the packages that the peers need. If a
package is not available (another distribution, no network), its peer is not measured, and the table
of results says so.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["unpack"]

NEEDED = (
    # Libraries that Mooncake is linked to, for every transport.
    *("libibverbs1", "librdmacm1", "libnl-3-200", "libnl-route-3-200", "libnuma1", "libcurl4"),
    # The server of Valkey or of Redis: `redis-server` is a link to a program of the tools.
    *("valkey-server", "valkey-tools", "redis-server", "redis-tools", "libjemalloc2", "liblzf1"),
)


def unpack(directory: Path, packages: Iterable[str] = NEEDED) -> list[str]:
    """Unpacks packages without their dependencies; returns the packages that are not available."""
    directory.mkdir(parents=True, exist_ok=True)
    missing = [name for name in packages if not _download(name, directory)]
    for file in sorted(directory.glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", str(file), str(directory)], check=True)
    return missing


def _download(name: str, directory: Path) -> bool:
    try:
        done = subprocess.run(["apt-get", "download", name], cwd=directory, capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


if __name__ == "__main__":
    for name in unpack(Path(sys.argv[1]), sys.argv[2:] or NEEDED):
        print(f"not available: {name}")
