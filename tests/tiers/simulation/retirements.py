"""Invariants of retiring extents: few retire, nothing new is in them, and their pins end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import chain, pairwise

from . import inspect as inside
from .model import EXTENT, Invariant, Violation
from .world import TICKS, World

__all__ = ["check_retiring"]


def check_retiring(world: World) -> None:
    """Retiring extents get no blocks, keep only pinned ones, and lose those in time."""
    before, now = world.before.retiring, world.core_view.retiring
    _check_number(world, now)
    for number, slots in now.items():
        if not slots or not slots <= before.get(number, slots):
            raise Violation(Invariant.RETIRING, f"extent {number} has no slot in use, or gave one")
    leaving = inside.leaving(world.core)
    for block in world.core_view.blocks:
        if now.keys().isdisjoint(world.core_view.extents[block]) or block in leaving:
            continue
        if not block.pins or (block.ready and not block.invalidated):
            raise Violation(Invariant.RETIRING, f"{block!r} is found, or stays without a pin")
    classes, former = world.core_view.classes, world.before.classes
    for number in before.keys() - now.keys():
        world.saw("extents that stayed" if classes[number] == former[number] else "extents passed on")
    world.saw("extents retired", world.core_view.retirements.keys() > world.before.retirements.keys())
    if world.doing in TICKS:
        _check_ends(world)
    for number in world.core_view.retirements.keys() - world.before.retirements.keys():
        _check_losers(world, number)


def _check_number(world: World, retiring: Collection[int]) -> None:
    """A quarter of the extents of a memory pool may retire, and in any case one."""
    for start, end in pairwise((*world.settings_model.settings.pool_starts, world.region_bytes)):
        count = sum(start <= number * EXTENT < end for number in retiring)
        if count > max(1, (min(end, world.backed_bytes) - start) // EXTENT // 4):
            raise Violation(Invariant.RETIRING, f"{count} extents of a memory pool retire")


def _check_ends(world: World) -> None:
    """Pins of clients end in time, unless the core still searches for them."""
    latest, since = world.environment.latest, world.core_view.retirements
    ages = {number: latest - since[number] for number in world.core_view.retiring}
    if any(age >= 2 * inside.GRACE_SECONDS for age in ages.values()):
        raise Violation(Invariant.RETIRING, f"an extent retires since {min(since.values())}, it is {latest}")
    if world.before.is_ending_pins or world.core_view.is_ending_pins:
        return
    late = {number for number, age in ages.items() if age >= inside.GRACE_SECONDS}
    holders = [record.lease.items for record in world.ledger.leases.values()]
    holders += [record.hold.items for record in world.ledger.holds.open.values()]
    holders += [record.blocks for record in world.ledger.open_stores()]
    for block in chain.from_iterable(holders):
        if block is not None and not late.isdisjoint(world.core_view.extents[block]) and not block.pending:
            raise Violation(Invariant.RETIRING, f"{block!r} is pinned in an extent that retires for too long")


def _check_losers(world: World, number: int) -> None:
    """A share loses with an extent at most half an extent of its quota, except to itself."""
    lost = Counter[str]()
    for block, extents in world.before.extents.items():
        if number in extents:
            lost[block.queue.share.name] += inside.slot_count(block) * block.queue.size_class
    taker = inside.taker(world.core, number).name
    for share in world.before.stats.tiers[0].shares:
        nbytes = lost[share.tenant]
        if share.tenant != taker and share.used_bytes - share.quota_bytes < nbytes and nbytes > EXTENT // 2:
            raise Violation(Invariant.RETIRING, f"{share.tenant} loses {nbytes} bytes of its quota")
