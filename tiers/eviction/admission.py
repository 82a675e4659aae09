"""Which blocks a tier takes in: writing what nobody reads again wears an SSD out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Protocol

__all__ = ["ADMISSION", "DEFAULT_ADMISSION", "Admission", "SecondUse"]

MAX_REMEMBERED = 1 << 17


class Admission(Protocol):
    """Decides block by block. Asked once per use of a block that the tier lacks."""

    def admits(self, name: Hashable, user: Hashable) -> bool:
        """Returns whether the tier takes a block in that this request has used; None is a request of its own."""
        ...


class SecondUse:
    """Takes in what a second request uses, as far as the first one is remembered (CacheLib calls it reject first).

    Remembers about the last 131,000 names, in two generations: when the young one is full it becomes the old one.
    """

    def __init__(self, most: int = MAX_REMEMBERED) -> None:
        self._most = most
        self._young: dict[Hashable, Hashable] = {}
        self._old: dict[Hashable, Hashable] = {}

    def admits(self, name: Hashable, user: Hashable) -> bool:
        """Returns whether another request has used it before."""
        for generation in (self._young, self._old):
            if name in generation:
                return user is None or generation[name] != user
        self._young[name] = user
        if len(self._young) >= self._most // 2:
            self._old, self._young = self._young, {}
        return False


ADMISSION: Mapping[str, Callable[[], Admission] | None] = MappingProxyType({"all": None, "second_use": SecondUse})
"""What a tier can be configured with; None takes in everything."""

DEFAULT_ADMISSION = "all"
