"""Private systemd for a test: pid 1 of a namespace, with the units of one directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from harness import namespace
from harness.namespace import OwnNamespace

from .polling import polls, wait_until

__all__ = ["Systemd", "unavailable_reason"]

MANAGER = Path("/lib/systemd/systemd")
CGROUPS = Path("/sys/fs/cgroup")

_BOOT = """
mkdir -p /run/systemd/system
exec env -i container=other PATH="$PATH" SYSTEMD_UNIT_PATH={units} SYSTEMD_LOG_TARGET=console \\
  {manager} --system --unit=nothing.target --show-status=no
"""


def unavailable_reason() -> str | None:
    """Why systemd cannot run here, or None."""
    return namespace.unavailable_reason() if MANAGER.exists() else "no systemd"


class Systemd(OwnNamespace):
    """Runs from `__enter__` to `__exit__`; `units` is the directory with all its units."""

    def __init__(self, units: Path, log: Path) -> None:
        super().__init__(log, _BOOT.format(units=units, manager=MANAGER))
        self._units = units
        self._cgroups: set[Path] = set()
        self._folders: set[Path] = set()
        self._lock = -1

    def __enter__(self) -> Self:
        # One at a time, also across checkouts: two would share the cgroup folders of their units.
        self._lock = os.open(CGROUPS, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self._units / "nothing.target").write_text("[Unit]\nDefaultDependencies=no\n")
        self._cgroups, self._folders = _cgroups(), self._private()
        try:
            return super().__enter__()
        except BaseException:
            os.close(self._lock)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        # cgroup folders of its units remain; the kernel removes a folder only if it is empty
        for _ in polls(60, 0.05):
            if not (left := _cgroups() - self._cgroups):
                break
            for folder in sorted(left, reverse=True):
                with contextlib.suppress(OSError):
                    folder.rmdir()
        for folder in (
            self._private() - self._folders
        ):  # of PrivateTmp; units that were killed with their namespace leave them behind
            shutil.rmtree(folder, ignore_errors=True)
        os.close(self._lock)

    def _private(self) -> set[Path]:
        """The folders of units' private /tmp."""
        names = [path.name for path in self._units.iterdir()]
        return {
            path
            for base in ("/tmp", "/var/tmp")
            for name in names
            for path in Path(base).glob(f"systemd-private-*-{name}-*")
        }

    def booted(self) -> bool:
        return self.run("systemctl", "is-active", "nothing.target").stdout.strip() == "active"

    def show(self, unit: str, name: str) -> str:
        """A property of a unit, as `systemctl show` prints it."""
        return self.run("systemctl", "show", "--value", "--property", name, unit).stdout.strip()

    def wait_for(self, unit: str, name: str, value: str, seconds: float = 60.0) -> None:
        """Waits until a property of a unit has this value."""
        wait_until(
            lambda: self.show(unit, name) == value,
            seconds,
            otherwise=lambda: f"{name} of {unit} is {self.show(unit, name)}, not {value}:\n{self.log[-3000:]}",
            interval=0.1,
        )


def _cgroups() -> set[Path]:
    """The cgroup folders of a systemd's units, in every hierarchy."""
    found: set[Path] = set()
    for base in (CGROUPS, *CGROUPS.glob("*")):
        for name in ("init.scope", "system.slice"):
            found.update(base.glob(name))
            found.update(path for path in base.glob(f"{name}/**/") if path.is_dir())
    return found
