"""Open requests of an eviction policy: which uses belong to the same request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from .policy import T

__all__ = ["LastRequest", "OpenRequests"]

V = TypeVar("V")

MAX_OPEN = 1024
"""Limit of open requests. Beyond this limit, the oldest request counts as finished."""


class OpenRequests(Generic[V]):
    def __init__(self, new: Callable[[], V], over: Callable[[V], object] = lambda _: None) -> None:
        """`new` creates the state of a request; `over` is called with it when the request ends."""
        self._new = new
        self._over = over
        self._open: OrderedDict[Hashable, V] = OrderedDict()

    def of(self, request: Hashable) -> V:
        """Returns the state of a request. For an unknown request and for None, creates a state."""
        kept = self._open.get(request)
        if kept is None:
            kept = self._new()
            if request is not None:
                self._open[request] = kept
                if len(self._open) > MAX_OPEN:
                    self._over(self._open.popitem(last=False)[1])
        return kept

    def finish(self, request: Hashable) -> None:
        if request in self._open:
            self._over(self._open.pop(request))


class LastRequest(Generic[T]):
    """The last request per item: several calls of one request count as one use."""

    def __init__(self) -> None:
        self._count = 0
        self._open = OpenRequests(self._next)
        self._last: dict[T, int] = {}

    def fresh(self, items: Sequence[T], request: Hashable) -> list[T]:
        """Returns the items whose last use was by another request, and records this use."""
        number = self._open.of(request)
        fresh = [item for item in items if self._last.get(item) != number]
        self._last.update(dict.fromkeys(fresh, number))
        return fresh

    def finish(self, request: Hashable) -> None:
        self._open.finish(request)

    def forget(self, item: T) -> None:
        self._last.pop(item, None)

    def _next(self) -> int:
        self._count += 1
        return self._count
