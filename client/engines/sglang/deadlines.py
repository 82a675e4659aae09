"""Deadline of a call by SGLang, for all calls to the server that it makes together.

SGLang stops its storage threads for `/flush_cache`, and ends itself if one still runs after 10 s. A
thread can make two calls before it looks whether it should stop: one for the pool of the KV, and
one for the other pools.

A request that completes or aborts a store, or releases a lease, has END_SECONDS also after the
deadline. Otherwise the client would end its session with all its leases, or pages would stay
pinned.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ... import Client, DeadlineExceeded
from ...effects import Call, Connect, Copy, Effect, Transport
from ...session.session import ClientSession

__all__ = [
    "CALL_SECONDS",
    "COPY_SECONDS",
    "END_SECONDS",
    "Deadline",
    "DeadlineClient",
    "DeadlineTransport",
    "ends_in_time",
]

CALL_SECONDS = 4.0
"""Longest time of one call by SGLang, except for a copy that has begun (64 MiB or one page) and for
END_SECONDS per pool."""
COPY_SECONDS = 1.0
"""Part of this time that is kept for copies, so that not all of it is spent on waiting."""
END_SECONDS = 0.5
"""Shortest time to end what was begun. Without this time no copy begins."""

_ENDING = frozenset(f"CacheService/{name}" for name in ("CompleteStore", "ReleaseLease", "WithdrawGrants"))


class Deadline(threading.local):
    """Deadline of the call that the current thread serves; infinite outside of such a call."""

    def __init__(self) -> None:
        self._until = math.inf

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Ends the block's calls to the server within `seconds`, or at an earlier deadline."""
        before, self._until = self._until, min(self._until, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._until = before

    def left(self, *, least: float | None = None) -> float:
        """Returns the seconds that are left, or `least` if it is more.

        Without `least`, raises DeadlineExceeded after the deadline.
        """
        left = self._until - time.monotonic()
        if least is not None:
            return max(least, left)
        if left <= 0:
            raise DeadlineExceeded("the time of one call by SGLang is over")
        return left

    def check_copy(self) -> None:
        """Raises DeadlineExceeded if too little time is left to begin a copy."""
        if self.left() < END_SECONDS:
            raise DeadlineExceeded("the time of one call by SGLang is nearly over")


class DeadlineTransport:
    """Transport whose effects end by the deadline of the calling thread, except for copies.

    Calls that end a store or a lease have at least END_SECONDS.
    """

    def __init__(self, transport: Transport, deadline: Deadline) -> None:
        self._transport, self._deadline = transport, deadline

    @property
    def session(self) -> ClientSession | None:
        return self._transport.session

    def perform(self, effect: Effect) -> Any:
        least: float | None = None
        match effect:
            case Copy():
                return self._transport.perform(effect)
            case Connect():  # the current session, if there is one, needs no time
                least = 0.0
            case Call(method=method) if method in _ENDING:
                least = END_SECONDS
        timeout = min(effect.timeout, self._deadline.left(least=least))
        return self._transport.perform(replace(effect, timeout=timeout))

    def invalidate(self, session: ClientSession) -> None:
        self._transport.invalidate(session)

    def withdraw(self, session: ClientSession, grant_id: int) -> None:
        self._transport.withdraw(session, grant_id)

    def close(self) -> None:
        self._transport.close()


class DeadlineClient(Client):
    """Client whose calls end by the deadline of the calling thread."""

    def __init__(self, endpoint: str | None, deadline: Deadline, **arguments: Any) -> None:
        super().__init__(endpoint, **arguments)
        self._transport = DeadlineTransport(self._transport, deadline)
        self.deadline = deadline


class HasDeadline(Protocol):
    call_seconds: float
    deadline: Deadline


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=HasDeadline)


def ends_in_time(hook: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorator: the calls to the server of one call of `hook` take `call_seconds` together."""

    @functools.wraps(hook)
    def timed_hook(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.deadline.within(self.call_seconds):
            return hook(self, *args, **kwargs)

    return timed_hook
