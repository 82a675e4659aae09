"""Admission filters: decide which blocks a tier stores.

A filter avoids SSD writes for blocks that are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Protocol

__all__ = ["ADMISSION", "DEFAULT_ADMISSION", "Admission", "SecondUse"]

MAX_REMEMBERED = 1 << 17


class Admission(Protocol):
    """Admission filter of a tier. Called once per use of a block that the tier does not have."""

    def admits(self, name: Hashable, user: Hashable) -> bool:
        """Returns whether to store a block that request `user` has used (None: unknown request)."""
        ...


class SecondUse:
    """Admits a block when a second request uses it (CacheLib: reject first).

    Remembers about 131,000 names in two generations; a full young generation replaces the old one.
    """

    def __init__(self, most: int = MAX_REMEMBERED) -> None:
        self._most = most
        self._young: dict[Hashable, Hashable] = {}
        self._old: dict[Hashable, Hashable] = {}

    def admits(self, name: Hashable, user: Hashable) -> bool:
        for generation in (self._young, self._old):
            if name in generation:
                return user is None or generation[name] != user
        self._young[name] = user
        if len(self._young) >= self._most // 2:
            self._old, self._young = self._young, {}
        return False


ADMISSION: Mapping[str, Callable[[], Admission] | None] = MappingProxyType({"all": None, "second_use": SecondUse})
"""Filters by their names in the configuration; None admits all blocks."""

DEFAULT_ADMISSION = "all"
