"""Room queue: lookups that wait until the CPU tier has room for the blocks that they need.

Each tenant share has a line. In a line the tenants take turns, then the sessions of a tenant, then
the first call comes first. Only the first waiter of a line, its head, is told of room, and no other
lookup of the share that may wait takes room. The head keeps what it gets, so that other lookups
cannot delay it for ever. The other waiters of a line pin nothing, unless they ran out of room in
the middle. A lookup that does not wait, or whose wait is over, takes room unless another one of its
tenant waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..eviction.quotas import TenantShare
from ..secondary_tier import NamespaceId
from ..stats.snapshots import RoomStats
from ..types import EngineSession, tenant_of
from .commands import Command, RoomOffered, Waiter
from .cpu_tier import CpuTier
from .operations import Operation
from .running_lookup import RunningLookup

__all__ = ["RoomQueue"]

MAX_WAITERS = 256
"""Limit of the waiting lookups of a tenant. Further lookups do not wait for room."""


@dataclass(slots=True)
class _Line:
    tenants: dict[bytes, dict[bytes, dict[Waiter, None]]] = field(default_factory=dict)
    """Waiters by the tag of their tenant and by session. The next tenant and session come first."""
    head: Waiter | None = None
    last: tuple[bytes, bytes] = (b"", b"")
    """Tenant and session of the last head. Others that wait come before them."""
    in_vain: set[Waiter] = field(default_factory=set)
    """Heads that have given up their turn since the last change of the room."""


class RoomQueue:
    def __init__(self, cpu_tier: CpuTier, commands: list[Command]) -> None:
        self._stats = RoomStats()
        self._cpu_tier = cpu_tier
        self._share_of = cpu_tier.queues.shares.of
        self._commands = commands
        self._lines: dict[TenantShare, _Line] = {}
        self._per_tenant: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return self._per_tenant.total()

    def stats(self) -> RoomStats:
        return replace(self._stats, waiting=len(self))

    def wait(self, lookup: RunningLookup, now: float) -> Operation[float]:
        """Waits until a lookup may try again; returns the time. Call `leave` at the end.

        After its deadline, or if its tenant has too many waiting lookups, it may not wait again.
        """
        if lookup.waiter is None:
            lookup.waiter = self.enter(lookup.session, now, lookup.spec.deadline)
        waiter = lookup.waiter
        if waiter is not None and lookup.is_over_budget:
            self.yield_turn(waiter)
        while waiter is not None and now < waiter.until:
            now = yield waiter
            if waiter.is_offered:
                waiter.is_offered = False
                return now
        lookup.may_wait = False
        return now

    def enter(self, session: EngineSession, now: float, until: float) -> Waiter | None:
        """Adds a lookup that waits until a time; returns None if its tenant has too many."""
        tenant = tenant_of(session.namespace.id)
        if self._per_tenant[tenant] >= MAX_WAITERS:
            return None
        self._per_tenant[tenant] += 1
        self._stats.waits += 1
        waiter = Waiter(session.id, session.namespace.id, now, until)
        line = self._lines.setdefault(self._share_of(session.namespace.id), _Line())
        line.tenants.setdefault(tenant, {}).setdefault(session.id, {})[waiter] = None
        if line.head is None:
            # It may have kept itself out: it has unpinned its later blocks.
            self._give_turn(line)
        return waiter

    def leave(self, waiter: Waiter, now: float) -> None:
        share, tenant = self._share_of(waiter.namespace), tenant_of(waiter.namespace)
        line = self._lines[share]
        sessions = line.tenants[tenant]
        del sessions[waiter.session_id][waiter]
        if not sessions[waiter.session_id]:
            del sessions[waiter.session_id]
        if not sessions:
            del line.tenants[tenant]
        self._stats.waited_seconds += max(0.0, now - waiter.since)
        self._per_tenant[tenant] -= 1
        if not self._per_tenant[tenant]:
            del self._per_tenant[tenant]
        line.in_vain.discard(waiter)
        if not line.tenants:
            del self._lines[share]
        elif line.head is waiter:
            self._give_turn(line)

    def yield_turn(self, waiter: Waiter) -> None:
        """Gives the turn of a head, whose tenant has pinned as much as it may, to the next tenant.

        Each tenant has one such turn per change of the room. The head stays the first one of its
        tenant. Else two lookups of the tenant could each hold a part of what they need.
        """
        line = self._lines[self._share_of(waiter.namespace)]
        if line.head is not waiter or len(line.tenants) == 1:
            return
        line.in_vain.add(waiter)
        tenant = tenant_of(waiter.namespace)
        sessions = line.tenants[tenant]
        line.tenants[tenant] = {waiter.session_id: sessions.pop(waiter.session_id), **sessions}
        if self._following(line)[2] not in line.in_vain:
            self._give_turn(line)

    def may_take(self, namespace: NamespaceId, waiter: Waiter | None, *, may_wait: bool) -> bool:
        """Returns whether a lookup, with its place in the queue if it has one, may take room."""
        if not may_wait:
            return self._per_tenant[tenant_of(namespace)] == (waiter is not None)
        line = self._lines.get(self._share_of(namespace)) if self._lines else None
        return line is None or line.head is waiter

    def offer(self) -> None:
        """Tells the heads of the lines that blocks were unpinned or slots were freed."""
        self._cpu_tier.has_more_room = False
        for line in self._lines.values():
            line.in_vain.clear()
            if line.head is not None:
                self._offer(line.head)

    def _give_turn(self, line: _Line) -> None:
        """Gives the turn to the next waiter, and moves its session and tenant behind the others."""
        tenant, session_id, line.head = self._following(line)
        sessions = line.tenants.pop(tenant)
        line.tenants[tenant] = sessions
        sessions[session_id] = sessions.pop(session_id)
        line.last = (tenant, session_id)
        self._offer(line.head)

    def _offer(self, waiter: Waiter) -> None:
        if not waiter.is_offered:
            waiter.is_offered = True
            self._commands.append(RoomOffered(waiter))

    @staticmethod
    def _following(line: _Line) -> tuple[bytes, bytes, Waiter]:
        """Returns the tenant, the session and the waiter that come next."""
        tenant = _first_but(line.last[0], line.tenants)
        session_id = _first_but(line.last[1], line.tenants[tenant])
        return tenant, session_id, next(iter(line.tenants[tenant][session_id]))


def _first_but(last: bytes, waiting: Iterable[bytes]) -> bytes:
    """Returns the first one, but not the last one again unless it is the only one."""
    return next((each for each in waiting if each != last), last)
