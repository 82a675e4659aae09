"""Room queue: lookups that wait until the CPU tier has room for the blocks that they need.

Each tenant has a line, so that a tenant never waits for lookups of another one. In a line the
sessions take turns, then the first call comes first. Only the first waiter of a line, its head, is
told of room, and only the head may take room for promotions. The head keeps what it gets, so that
other lookups of the tenant cannot delay it for ever. The other waiters of a line pin nothing,
unless they ran out of room in the middle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..base import NamespaceId
from ..stats.snapshots import RoomStats
from ..types import EngineSession, tenant_of
from .commands import Command, RoomOffered, Waiter
from .cpu_tier import CpuTier
from .leases import RunningLookup
from .operations import Operation

__all__ = ["RoomQueue"]

MAX_WAITERS = 256
"""Limit of the waiting lookups of a tenant. Further lookups do not wait for room."""


@dataclass(slots=True)
class _Line:
    sessions: dict[bytes, dict[Waiter, None]] = field(default_factory=dict)
    """Waiters by session. The next session comes first."""
    head: Waiter | None = None
    last: bytes = b""
    """Session of the last head. Others that wait come before it."""

    def __len__(self) -> int:
        return sum(map(len, self.sessions.values()))


class RoomQueue:
    def __init__(self, cpu_tier: CpuTier, commands: list[Command]) -> None:
        self._stats = RoomStats()
        self._cpu_tier = cpu_tier
        self._commands = commands
        self._lines: dict[bytes, _Line] = {}
        """By the tag of the tenant."""

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def stats(self) -> RoomStats:
        return replace(self._stats, waiting=len(self))

    def wait(self, lookup: RunningLookup, now: float) -> Operation[float]:
        """Waits until a lookup may try again; returns the time. Call `leave` at the end.

        After its deadline, or if its tenant has too many waiting lookups, it may not wait again.
        """
        if lookup.waiter is None:
            lookup.waiter = self.enter(lookup.session, now, lookup.spec.deadline)
        waiter = lookup.waiter
        while waiter is not None and now < waiter.until:
            now = yield waiter
            if waiter.is_offered:
                waiter.is_offered = False
                return now
        lookup.may_wait = False
        return now

    def enter(self, session: EngineSession, now: float, until: float) -> Waiter | None:
        """Adds a lookup that waits until a time; returns None if its tenant has too many."""
        line = self._lines.setdefault(tenant_of(session.namespace.id), _Line())
        if len(line) >= MAX_WAITERS:
            return None
        self._stats.waits += 1
        waiter = Waiter(session.id, session.namespace.id, now, until)
        line.sessions.setdefault(session.id, {})[waiter] = None
        if line.head is None:
            line.head = self._next(line)
            self._offer(line.head)  # it may have kept itself out: it has unpinned its later blocks
        return waiter

    def leave(self, waiter: Waiter, now: float) -> None:
        tenant = tenant_of(waiter.namespace)
        line = self._lines[tenant]
        waiters = line.sessions[waiter.session_id]
        del waiters[waiter]
        if not waiters:
            del line.sessions[waiter.session_id]
        self._stats.waited_seconds += max(0.0, now - waiter.since)
        if not line.sessions:
            del self._lines[tenant]
        elif line.head is waiter:
            line.head = self._next(line)
            self._offer(line.head)

    def may_take(self, namespace: NamespaceId, waiter: Waiter | None) -> bool:
        """Returns whether a lookup may take room: it is the head, or none of its tenant waits."""
        line = self._lines.get(tenant_of(namespace)) if self._lines else None
        return line is None or line.head is waiter

    def offer_if_changed(self) -> None:
        """Tells the heads of the lines if blocks were unpinned or slots were freed."""
        if not self._cpu_tier.has_more_room:
            return
        self._cpu_tier.has_more_room = False
        for line in self._lines.values():
            if line.head is not None:
                self._offer(line.head)

    def _offer(self, waiter: Waiter) -> None:
        if not waiter.is_offered:
            waiter.is_offered = True
            self._commands.append(RoomOffered(waiter))

    @staticmethod
    def _next(line: _Line) -> Waiter:
        """Returns the next waiter, and moves its session behind the others."""
        session_id = _first_but(line.last, line.sessions)
        waiters = line.sessions[session_id] = line.sessions.pop(session_id)
        line.last = session_id
        return next(iter(waiters))


def _first_but(last: bytes, waiting: Iterable[bytes]) -> bytes:
    """Returns the first one, but not the last one again unless it is the only one."""
    return next((each for each in waiting if each != last), last)
