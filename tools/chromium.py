"""Unpacks Debian's Chromium, its driver and its libraries: `python tools/chromium.py DIRECTORY`.

Does not install anything on the system. If browser and driver are already installed, does nothing.
If the packages are not available (another distribution, no network), ends with an error.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["unpack"]

WANTED = ("chromium", "chromium-driver", "fonts-dejavu-core")


def unpack(directory: Path) -> list[str]:
    """Returns the unpacked packages. Raises `CalledProcessError` if they are not available."""
    if shutil.which("chromium") and shutil.which("chromedriver"):
        return []
    directory.mkdir(parents=True, exist_ok=True)
    plan = ["apt-get", "install", "--simulate", "--no-install-recommends", *WANTED]
    lines = subprocess.run(plan, capture_output=True, text=True, check=True).stdout.splitlines()
    names = [line.split()[1] for line in lines if line.startswith("Inst ")]
    subprocess.run(["apt-get", "--quiet", "--quiet", "download", *names], cwd=directory, check=True)
    for file in sorted(directory.glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", str(file), str(directory)], check=True)
        file.unlink()
    return names


if __name__ == "__main__":
    try:
        print(*unpack(Path(sys.argv[1])))
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"Chromium is not available: {error}")
