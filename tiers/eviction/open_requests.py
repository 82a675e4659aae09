"""Which uses belong to one request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from .policy import T

__all__ = ["LastRequest", "OpenRequests"]

V = TypeVar("V")

MAX_OPEN = 1024
"""Requests that may still go on; where there are more, the oldest is taken for finished."""


class OpenRequests(Generic[V]):
    """What a policy keeps for requests that may go on."""

    def __init__(self, new: Callable[[], V], over: Callable[[V], object] = lambda _: None) -> None:
        """`over` is told of what was kept for a request, once, when nothing is added to it any more."""
        self._new = new
        self._over = over
        self._open: OrderedDict[Hashable, V] = OrderedDict()

    def of(self, request: Hashable) -> V:
        """Returns what is kept for a request, or something new; None is always new."""
        kept = self._open.get(request)
        if kept is None:
            kept = self._new()
            if request is not None:
                self._open[request] = kept
                if len(self._open) > MAX_OPEN:
                    self._over(self._open.popitem(last=False)[1])
        return kept

    def finish(self, request: Hashable) -> None:
        """Takes note that a request is over."""
        if request in self._open:
            self._over(self._open.pop(request))

    def __len__(self) -> int:
        return len(self._open)


class LastRequest(Generic[T]):
    """Per item the request that used it last: one that looks up, stores and looks again has used it once."""

    def __init__(self) -> None:
        self._count = 0
        self._open = OpenRequests(self._next)
        self._last: dict[T, int] = {}

    def fresh(self, items: Sequence[T], request: Hashable) -> list[T]:
        """Returns the items that this request is not the last to have used, and takes note that now it is."""
        number = self._open.of(request)
        fresh = [item for item in items if self._last.get(item) != number]
        self._last.update(dict.fromkeys(fresh, number))
        return fresh

    def finish(self, request: Hashable) -> None:
        """Takes note that the request is over."""
        self._open.finish(request)

    def forget(self, item: T) -> None:
        """Forgets an item."""
        self._last.pop(item, None)

    def _next(self) -> int:
        self._count += 1
        return self._count
