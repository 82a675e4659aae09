"""Private mount and pid namespace for a test: its processes cannot reach this machine's files.

The tests' interpreter is at /opt/kvtier/bin/python and the command at /opt/kvtier/bin/kvtier,
because some users cannot read home directories. The kernel kills all processes of the namespace
with its first one. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import TracebackType
from typing import Self

from .polling import polls

__all__ = ["OwnNamespace", "unavailable_reason"]

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60.0
_FLAGS = ("--mount", "--pid", "--cgroup", "--ipc", "--uts")

# Mounts are visible in this namespace only.
_BOOT = """
set -e
mount --make-rprivate /
for folder in run opt var/lib; do mount -t tmpfs tmpfs /$folder; done
mkdir /run/upper && mount -t tmpfs tmpfs /run/upper && mkdir /run/upper/etc /run/upper/work
mount -t overlay overlay -o lowerdir=/etc,upperdir=/run/upper/etc,workdir=/run/upper/work /etc
mkdir -p /opt/python /opt/packages /opt/source /opt/kvtier/bin
mount --bind {python} /opt/python
mount --bind {packages} /opt/packages
mount --bind {source} /opt/source
cat > /opt/kvtier/bin/python <<'END'
#!/bin/sh
export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/opt/source/src:/opt/packages LD_LIBRARY_PATH=/opt/python/lib
exec /opt/python/bin/python{version} "$@"
END
printf '#!/bin/sh\\nexec /opt/kvtier/bin/python -m kvtier.server "$@"\\n' > /opt/kvtier/bin/kvtier
chmod 755 /opt/kvtier/bin/python /opt/kvtier/bin/kvtier
"""


def unavailable_reason() -> str | None:
    """Why no namespace can be made here, or None."""
    if os.getuid() != 0:
        return "not root"
    if not shutil.which("nsenter"):
        return "no nsenter"
    probe = ["unshare", *_FLAGS, "--fork", "mount", "-t", "tmpfs", "tmpfs", "/opt"]
    return None if subprocess.run(probe, capture_output=True, check=False).returncode == 0 else "no namespaces"


class OwnNamespace:
    """A namespace from `__enter__` to `__exit__`.

    Its first process mounts, then runs `boot` in bash.
    """

    def __init__(self, log: Path, boot: str) -> None:
        self._log = log
        self._boot = boot
        self._unshare: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """Output of the first process."""
        return self._log.read_text(errors="replace")

    def __enter__(self) -> Self:
        boot = _BOOT.format(
            python=sys.base_prefix,
            packages=sysconfig.get_path("purelib"),
            source=ROOT,
            version=f"{sys.version_info.major}.{sys.version_info.minor}",
        )
        with self._log.open("wb") as log:
            self._unshare = subprocess.Popen(
                ["unshare", *_FLAGS, "--fork", "--kill-child", "--mount-proc", "bash", "-c", boot + self._boot],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            self._wait_booted()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def command(self, *command: str) -> list[str]:
        """The command line that runs a command in the namespace, as root."""
        flags = ["nsenter", "--target", f"{self._init()}", *_FLAGS, "--"]
        return [*flags, *command]

    def run(self, *command: str, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Runs a command in the namespace, as root, and waits for it."""
        return subprocess.run(
            self.command(*command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def booted(self) -> bool:
        """Whether the first process is ready."""
        return self.run("test", "-e", "/run/booted").returncode == 0

    def _init(self) -> int:
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text().split()
        return int(children[0])

    def _wait_booted(self) -> None:
        for _ in polls(START_SECONDS, 0.1):
            assert self._unshare.poll() is None, f"it does not start:\n{self.log[-3000:]}"
            with contextlib.suppress(OSError, IndexError, ValueError):
                if self.booted():
                    return
        raise AssertionError(f"it is not there:\n{self.log[-3000:]}")

    def _end(self) -> None:
        if self._unshare.poll() is None:
            with contextlib.suppress(OSError, IndexError, ValueError):
                os.kill(self._init(), signal.SIGKILL)  # which ends the namespace
            try:
                self._unshare.wait(60)
            except subprocess.TimeoutExpired:
                self._unshare.kill()
                self._unshare.wait()
