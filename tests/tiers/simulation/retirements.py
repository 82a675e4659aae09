"""Invariants of retiring extents: few retire, nothing new is in them, and their pins end."""

from __future__ import annotations

from collections import Counter

from kvtier.tiers.core.block import Block
from kvtier.tiers.eviction.quotas import TenantShare

from . import inspect as inside
from .model import EXTENT, Invariant, Violation
from .world import World

__all__ = ["check_retiring"]

TICKS = ("tick", "stop_clock", "jump_forward", "jump_back")


def check_retiring(world: World) -> None:
    """Retiring extents get no blocks, keep only pinned ones, and lose those in time."""
    before, now = world.before.retiring, world.core_view.retiring
    if len(now) > max(1, world.backed_bytes // EXTENT // 4):
        raise Violation(Invariant.RETIRING, f"{len(now)} extents retire")
    for number, slots in now.items():
        if not slots or not slots <= before.get(number, slots):
            raise Violation(Invariant.RETIRING, f"extent {number} has no slot in use, or gave one")
    for block in world.core_view.blocks:
        if now.keys().isdisjoint(world.core_view.extents[block]):
            continue
        if not block.pins or (block.ready and not block.invalidated):
            raise Violation(Invariant.RETIRING, f"{block!r} is found, or stays without a pin")
    ended = before.keys() - now.keys()
    world.saw("extents passed on", any(not inside.is_of_former_class(world.core, number) for number in ended))
    world.saw("extents that stayed", any(inside.is_of_former_class(world.core, number) for number in ended))
    if fresh := now.keys() - before.keys():
        world.saw("extents retired", times=len(fresh))
    if world.doing in TICKS:
        _check_age(world)
    if gone := world.retired_with(world.gone):
        _check_losers(world, gone)


def _check_age(world: World) -> None:
    latest = world.environment.latest
    late = [at for at in inside.retired_since(world.core).values() if latest - at >= 2 * inside.GRACE_SECONDS]
    if late:
        raise Violation(Invariant.RETIRING, f"an extent retires since {late[0]}, it is {latest}")


def _check_losers(world: World, gone: list[Block]) -> None:
    """A share loses of its quota at most half an extent."""
    lost = Counter[TenantShare]()
    for block in gone:
        lost[block.queue.share] += block.allocated_bytes
    for share, nbytes in lost.items():
        if share.quota and share.excess < 0 and nbytes > EXTENT // 2:
            raise Violation(Invariant.RETIRING, f"{share.name} loses {nbytes} bytes of its quota")
