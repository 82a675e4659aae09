"""Invariants of the room queue: order, turns, and that each offer of room is made."""

from __future__ import annotations

from collections import Counter

from kvtier.tiers.core.commands import Waiter
from kvtier.tiers.types import tenant_of

from . import inspect as inside
from .lookup_calls import Lookup
from .model import Invariant, Violation
from .world import World

__all__ = ["check_room"]

LOOKUPS = ("look_up", "prefetch")
"""Events in which a lookup may drop blocks that make no room for others."""
MOST_PASSED = 2
"""There are three tenants. Each waits at most for a turn of each other one."""


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
    for share, line in lines.items():
        head = line.head
        if head is None or head not in queued:
            raise Violation(Invariant.ROOM, "no lookup has the turn")
        earlier = [each for each in queued if each.session_id == head.session_id and _is_before(calls, each, head)]
        if earlier:
            raise Violation(Invariant.ROOM, "a later lookup of a session has the turn")
        is_new = world.rooms.heads.get(share) is not head
        if not head.is_offered and (is_new or (unpinned and world.doing not in LOOKUPS)):
            raise Violation(Invariant.ROOM, "there may be room, and the next lookup was not told")
        _count_turns(
            world, share, head if is_new else None, {tenant_of(each.namespace) for each in inside.queued(line)}
        )
    world.rooms.heads = {share: line.head for share, line in lines.items()}


def _is_before(calls: dict[Waiter | None, Lookup], one: Waiter, other: Waiter) -> bool:
    return calls[one].ticket < calls[other].ticket


def _count_turns(world: World, share: object, head: Waiter | None, tenants: set[bytes]) -> None:
    """Counts, per tenant, the turns of others while it waits. `head`: the head of a new turn."""
    passed = world.rooms.passed.setdefault(share, Counter())
    for tenant in [each for each in passed if each not in tenants]:
        del passed[tenant]
    if head is None:
        return
    for tenant in tenants:
        passed[tenant] += 1
    passed[tenant_of(head.namespace)] = 0
    world.saw("turns of several tenants", len(tenants) > 1)
    if passed and max(passed.values()) > MOST_PASSED:
        raise Violation(Invariant.ROOM, "a tenant waits while others have several turns")
