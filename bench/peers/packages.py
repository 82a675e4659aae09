"""`python -m bench.peers.packages DISTRIBUTION`: how many distributions come with it, itself included, and its version.

What it requires and is not installed here counts as one, whatever it would bring along: the count is a lower bound.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata

from packaging.requirements import Requirement

__all__ = ["closure"]


def closure(distribution: str) -> set[str]:
    """Returns the names of all that is required, extras left out. Raises `PackageNotFoundError`."""
    metadata.distribution(distribution)
    found: set[str] = set()
    left = [distribution]
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in found:
            continue
        found.add(name)
        left += _required(name)
    return found


def _required(name: str) -> list[str]:
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []
    requirements = map(Requirement, lines)
    return [needed.name for needed in requirements if needed.marker is None or needed.marker.evaluate({"extra": ""})]


if __name__ == "__main__":
    print(len(closure(sys.argv[1])), metadata.version(sys.argv[1]))
