"""The control groups that this process is in: they may allow it less memory, and less time on processors, than the machine has."""

from __future__ import annotations

from pathlib import Path

__all__ = ["own_groups"]

_OWN = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def own_groups(controller: str) -> list[tuple[int, Path]]:
    """Returns the directories of the groups that have a say with a controller ("memory", "cpu"), each with its version: 1 or 2.

    These are the own group and all its ancestors: each has limits of its own. Not all need be there to be read: what a container
    sees may begin at its own group.
    """
    try:
        lines = _OWN.read_text(errors="surrogateescape").splitlines()  # names of groups may be any bytes
    except OSError:
        return []
    groups: list[tuple[int, Path]] = []
    for line in lines:
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if not controllers:
            groups += [(2, group) for group in _upwards(_ROOT, path)]
        elif controller in controllers.split(","):
            groups += [(1, group) for group in _upwards(_ROOT / controller, path)]
    return groups


def _upwards(root: Path, path: str) -> list[Path]:
    group = root / path.lstrip("/")
    return [group, *(parent for parent in group.parents if parent.is_relative_to(root))]
