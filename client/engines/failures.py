"""How adapters handle failures: warnings at a limited rate, and hooks that never raise."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from ..session.fork_guard import ForkGuarded

__all__ = ["RateLimitedWarnings", "Unsupported", "never_raises"]


class Unsupported(Exception):
    """The engine's configuration is not supported, so every request is a miss."""


class RateLimitedWarnings(ForkGuarded):
    """Logs each kind of warning at most once per `interval_s` seconds. Thread-safe.

    The next warning of the kind says how many were not logged.
    """

    def __init__(self, logger: logging.Logger, interval_s: float = 30.0) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def warn(self, kind: str, text: str, *, exc_info: bool = False, interval_s: float | None = None) -> None:
        now = time.monotonic()
        interval_s = self._interval_s if interval_s is None else interval_s
        with self._lock:
            last = self._last.get(kind)
            if last is not None and now - last < interval_s:
                self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
                return
            self._last[kind] = now
            suppressed = self._suppressed.pop(kind, 0)
        suffix = f" ({suppressed} more like this were not logged)" if suppressed else ""
        self._logger.warning("kvtier: %s%s", text, suffix, exc_info=exc_info)


class HasLog(Protocol):
    log: RateLimitedWarnings


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=HasLog)


def never_raises(
    fallback: Callable[[], Any] = lambda: None,
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Decorator: if the hook raises, logs the exception and returns `fallback()`.

    An exception that reached the engine could end it. In a forked child all hooks of an inherited
    object return `fallback()`, because the threads that do their work do not exist there.
    """

    def decorate(hook: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(hook)
        def guarded_hook(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                if self.log._is_forked:  # noqa: SLF001 - the log is as old as the object
                    self.log._check_process()  # noqa: SLF001
                return hook(self, *args, **kwargs)
            except Exception as error:
                text = f"{hook.__name__} failed: {error!r}"
                self.log.warn(hook.__name__, text, exc_info=True)  # noqa: G010 - not a logging.Logger
                return cast("R", fallback())

        return guarded_hook

    return decorate
