"""Rate limit of calls over gRPC that need no session: health checks, capabilities, reflection.

A call over gRPC takes 0.3 to 0.8 ms of the event loop outside of its handler, which no account of
the scheduler measures. A flood of 1,840 health checks per second left 529 of 906 calls per second.
"""

from __future__ import annotations

import asyncio
import random

from ..refused import Refused
from .in_flight_limits import GrpcCaller

__all__ = ["CallPace"]

_CALLS_PER_SECOND = 200.0
_BURST = 100
"""Calls that need not wait after a pause."""
_MAX_WAITING = 4096
"""Maximum number of calls that wait, of about 2 KiB each. Beyond it, calls of the group with most
are refused."""

_Calls = dict[asyncio.Future[None], None]


class _Group:
    """Waiting calls of one group of callers. Its connections take turns."""

    def __init__(self) -> None:
        self.connections: dict[str, _Calls] = {}
        """Waiting calls by connection, the connection that has waited longest first."""
        self.fresh: dict[str, None] = {}
        """Connections that had no waiting call when their first one came, the latest last."""
        self.count = 0
        self._takes_fresh = False

    def add(self, connection: str, call: asyncio.Future[None]) -> None:
        calls = self.connections.get(connection)
        if calls is None:
            calls = self.connections[connection] = {}
            self.fresh[connection] = None
        calls[call] = None
        self.count += 1

    def remove(self, connection: str, call: asyncio.Future[None]) -> None:
        calls = self.connections.get(connection, {})
        if call in calls:
            del calls[call]
            self.count -= 1
            if not calls:
                del self.connections[connection]
                self.fresh.pop(connection, None)

    def take(self) -> asyncio.Future[None]:
        """Removes the next call: of the latest fresh connection, or of the next one, in turns.

        So a single call does not wait for many connections of the same address.
        """
        self._takes_fresh = not self._takes_fresh
        fresh = self._takes_fresh and self.fresh
        connection = self.fresh.popitem()[0] if fresh else next(iter(self.connections))
        self.fresh.pop(connection, None)
        calls = self.connections.pop(connection)
        call = next(iter(calls))
        del calls[call]
        self.count -= 1
        if calls:
            self.connections[connection] = calls
        return call

    def drop(self) -> asyncio.Future[None]:
        """Removes a call, at random: a flood must not be able to choose the call."""
        connection = random.choice([*self.connections])  # noqa: S311 - fairness, not a secret
        call = random.choice([*self.connections[connection]])  # noqa: S311
        self.remove(connection, call)
        return call


class CallPace:
    """Starts calls at a rate. Groups of callers take turns. Runs on the event loop."""

    def __init__(self) -> None:
        self._next = 0.0
        """Time of the next call, on the clock of the event loop."""
        self._groups: dict[str, _Group] = {}
        """Groups with waiting calls, the next one first."""
        self._waiting = 0
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, caller: GrpcCaller) -> None:
        """Waits for the turn of a call. Raises `Refused` if too many calls wait."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._next = max(self._next, now - _BURST / _CALLS_PER_SECOND)
        if not self._groups and self._next <= now:
            self._next += 1 / _CALLS_PER_SECOND
            return
        call: asyncio.Future[None] = loop.create_future()
        self._groups.setdefault(caller.group, _Group()).add(caller.connection, call)
        self._waiting += 1
        if self._waiting > _MAX_WAITING:
            self._refuse_one()
        if self._timer is None:
            self._timer = loop.call_at(self._next, self._grant)
        try:
            await call
        except asyncio.CancelledError:
            group = self._groups.get(caller.group)
            if group is not None:
                before = group.count
                group.remove(caller.connection, call)
                self._waiting -= before - group.count
                self._drop_empty(caller.group)
            raise

    def _refuse_one(self) -> None:
        name = max(self._groups, key=lambda each: self._groups[each].count)
        call = self._groups[name].drop()
        self._waiting -= 1
        self._drop_empty(name)
        if not call.done():
            call.set_exception(Refused("LIMIT_EXCEEDED", "too many calls wait for their turn"))

    def _grant(self) -> None:
        """Starts the calls whose time has come."""
        loop = asyncio.get_running_loop()
        self._timer, now = None, loop.time()
        while self._groups and self._next <= now:
            name = next(iter(self._groups))
            group = self._groups.pop(name)
            call = group.take()
            self._waiting -= 1
            if group.count:
                self._groups[name] = group
            if not call.done():
                call.set_result(None)
                self._next += 1 / _CALLS_PER_SECOND
        if self._groups:
            self._timer = loop.call_at(self._next, self._grant)

    def _drop_empty(self, name: str) -> None:
        if not self._groups[name].count:
            del self._groups[name]
