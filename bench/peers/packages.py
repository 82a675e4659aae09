"""Counts the packages that a requirement installs: `python -m bench.peers.packages REQUIREMENT`.

Prints the number, which includes the requirement itself, and the version. A dependency that is not
installed here counts as one package, so the number is a lower bound.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata

from packaging.requirements import Requirement

__all__ = ["closure"]


def closure(requirement: str) -> set[str]:
    """Returns the names of a requirement and its dependencies, with the requested extras.

    Raises `PackageNotFoundError`.
    """
    metadata.distribution(Requirement(requirement).name)
    found: set[tuple[str, frozenset[str]]] = set()
    left = [Requirement(requirement)]
    while left:
        wanted = left.pop()
        one = (_plain(wanted.name), frozenset(wanted.extras))
        if one not in found:
            found.add(one)
            left += _required(*one)
    return {name for name, _ in found}


def _required(name: str, extras: frozenset[str]) -> list[Requirement]:
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []
    return [needed for needed in map(Requirement, lines) if _applies(needed, extras)]


def _applies(needed: Requirement, extras: frozenset[str]) -> bool:
    marker = needed.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    print(len(closure(sys.argv[1])), metadata.version(Requirement(sys.argv[1]).name))
