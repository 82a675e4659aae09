"""Invariants of the room queue: order, turns, and that each offer of room is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from kvtier.tiers.core.commands import Waiter

from . import inspect as inside
from .lookup_calls import Lookup
from .model import Invariant, Violation
from .world import World

__all__ = ["check_room"]

LOOKUPS = ("look_up", "prefetch")
"""Events in which a lookup may drop blocks that make no room for others."""
MOST_PASSED = 9
"""There are at most nine clients. Each session waits at most for a turn of each other one."""


def check_room(world: World) -> None:
    """Exactly the waiting lookups are queued; the first one is offered room at once."""
    calls = {call.place: call for call in world.calls.open if isinstance(call, Lookup)}
    calls.pop(None, None)
    lines = inside.lines(world.core)
    queued = [waiter for line in lines.values() for waiter in inside.queued(line)]
    if len(queued) != len(calls) or set(queued) != calls.keys():
        raise Violation(Invariant.ROOM, f"{len(queued)} lookups are queued, {len(calls)} wait")
    if world.core_view.stats.room.waiting != len(calls):
        raise Violation(Invariant.ROOM, f"{world.core_view.stats.room.waiting} lookups are counted, {len(calls)} wait")
    for waiter in queued:
        if waiter.is_offered != (waiter in world.rooms.told):
            raise Violation(Invariant.ROOM, "a lookup has an offer, and was not told, or the other way round")
    unpinned = world.before.pinned - world.core_view.pinned
    for tenant, line in lines.items():
        head = line.head
        if head is None or head not in queued:
            raise Violation(Invariant.ROOM, "no lookup has the turn")
        earlier = [each for each in queued if each.session_id == head.session_id and _is_before(calls, each, head)]
        if earlier:
            raise Violation(Invariant.ROOM, "a later lookup of a session has the turn")
        is_new = world.rooms.heads.get(tenant) is not head
        if not head.is_offered and (is_new or (unpinned and world.doing not in LOOKUPS)):
            raise Violation(Invariant.ROOM, "there may be room, and the next lookup was not told")
        if is_new:
            _count_turn(world, tenant, head, line.sessions)
    world.saw("lookups of several tenants waited", len(lines) > 1)
    world.rooms.heads = {tenant: line.head for tenant, line in lines.items()}


def _is_before(calls: dict[Waiter | None, Lookup], one: Waiter, other: Waiter) -> bool:
    return calls[one].ticket < calls[other].ticket


def _count_turn(world: World, tenant: bytes, head: Waiter, sessions: Collection[bytes]) -> None:
    """Counts the turns of others since the last turn of each waiting session."""
    passed = world.rooms.passed.setdefault(tenant, Counter())
    for session in [each for each in passed if each not in sessions]:
        del passed[session]
    for session in sessions:
        passed[session] += 1
    passed[head.session_id] = 0
    world.saw("turns of several sessions", len(sessions) > 1)
    if max(passed.values()) > MOST_PASSED:
        raise Violation(Invariant.ROOM, "a session waits while others have several turns")
