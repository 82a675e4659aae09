"""Invariants of holds: pinned blocks, durations, limits, and blocks that only holds name."""

from __future__ import annotations

from collections import Counter

from . import inspect as inside
from .holds import HoldRecord
from .model import Invariant, Violation, is_hold_only
from .tier_settings import tenant_of
from .world import World

__all__ = ["check_held", "check_private"]


def check_held(world: World) -> None:
    """Exactly the published holds that have not ended are open; their blocks stay in place."""
    known = {hold.name: hold for hold in world.core.holds()}
    book = world.ledger.holds
    if known.keys() != book.open.keys():
        odd = sorted(known.keys() ^ book.open.keys())
        raise Violation(Invariant.HELD, f"holds {odd} are open and should have ended, or the other way round")
    for name, record in book.open.items():
        if known[name] is not record.hold or abs(record.hold.expires_at - record.expires_at) > 1e-3:
            raise Violation(Invariant.HELD, f"{name} ends at {record.hold.expires_at}, not {record.expires_at}")
        _check_items(world, record)
    book.late = [record for record in book.late if record.hold.name not in world.changed]
    for record in book.ended:
        if record.hold.name not in world.changed:
            if not record.hold.is_over:
                raise Violation(Invariant.HELD, f"{record.hold.name} has ended, and no claim was told")
            book.late.append(record)
    if book.late and not world.work_left:
        raise Violation(Invariant.HELD, f"{book.late[0].hold.name} has expired, and no claim was told")
    world.saw("holds that expire in slices", bool(book.late))
    _check_bytes(world)


def _check_items(world: World, record: HoldRecord) -> None:
    hold = record.hold
    _forget_given_up(world, record)
    for item, block in enumerate(hold.items):
        before = record.at.get(item)
        if before is not None and (block is not before[0] or not block.ready or tuple(block.slots) != before[1]):
            raise Violation(Invariant.HELD, f"{hold.keys[item]!r} was evicted under a hold")
        if block is not None and block.ready:
            record.at[item] = (block, tuple(block.slots))
        is_prepared = item < record.prepared
        if (
            is_prepared
            and block is not None
            and not block.ready
            and not block.pending
            and not world.work_left
            and (record.orphaned or block.invalidated)
        ):
            raise Violation(Invariant.HELD, f"{hold.keys[item]!r} is awaited, and no store is running")
    late = sum(len(hold.awaited.get(block, ())) for block in world.core_view.unsettled if block.ready)
    awaited = late + sum(block is not None and not block.ready for block in hold.items[: record.prepared])
    if hold.pending != awaited:
        raise Violation(Invariant.HELD, f"{hold.name} waits for {hold.pending} blocks, not {awaited}")
    _check_told(world, record, awaited, late)


def _check_told(world: World, record: HoldRecord, awaited: int, late: int) -> None:
    hold = record.hold
    is_told = hold.name in world.changed
    if not (record.is_known or is_told):
        raise Violation(Invariant.HELD, f"{hold.name} is open, and no claim was told")
    record.is_known = True
    if not record.is_preparing:
        if record.was_awaited and not awaited and not is_told:
            raise Violation(Invariant.HELD, f"all of {hold.name} is ready, and no claim was told")
        record.was_awaited = bool(awaited)
    if record.told_at is not None and record.settled - late >= record.told_at and not is_told:
        raise Violation(Invariant.HELD, f"{record.told_at} blocks of {hold.name} are settled, and no claim was told")
    if is_told:
        record.told_at = None


def _forget_given_up(world: World, record: HoldRecord) -> None:
    """Forgets blocks that the hold has given up, because they pinned an extent for too long."""
    items = record.hold.items
    given_up = [item for item, at in record.at.items() if items[item] is None and at[0] in world.overdue]
    world.saw("holds that gave up pinned blocks", bool(given_up))
    for item in given_up:
        del record.at[item]


def _check_bytes(world: World) -> None:
    """Held bytes count once. Those of open holds are within the limit of each tenant."""
    held = dict.fromkeys(block for record in world.ledger.holds.open.values() for block in record.hold.items)
    held.pop(None, None)
    others = {*world.publishing(), *inside.ended_hold_pins(world.core)} - held.keys()
    shares = {share.tenant: share.quota_bytes for share in world.core_view.stats.tiers[0].shares}
    by_share = Counter[str]()
    for block in held:
        tenant = tenant_of(block.namespace)
        by_share[tenant if shares.get(tenant) else ""] += block.allocated_bytes
    part = world.settings_model.settings.held_part
    bounds = {"": (world.region_bytes - sum(shares.values())) * part}
    bounds |= {tenant: quota * part for tenant, quota in shares.items() if quota}
    beyond = [tenant for tenant, nbytes in by_share.items() if nbytes > bounds[tenant]]
    counted = by_share.total() + sum(block.allocated_bytes for block in others)
    if beyond or world.core_view.stats.held_bytes != counted:
        raise Violation(
            Invariant.HELD, f"{by_share} are held of {bounds}, {world.core_view.stats.held_bytes} are counted"
        )


def check_private(world: World) -> None:
    """Blocks that only a hold names are in no secondary tier and end with their hold."""
    for tier in world.tiers:
        if strays := [key for _, key in tier.blocks if is_hold_only(key)]:
            raise Violation(Invariant.PRIVATE, f"{tier.name} has {strays}")
    held = {block for record in world.ledger.holds.open.values() for block in record.hold.items}
    held.update(world.publishing())
    for record in world.ledger.holds.ended:
        for held_block in [block for block in record.hold.items if block is not None and block.hold_only]:
            block = inside.block(world.core, *held_block.name)
            if block is held_block and not block.pins and block not in held:
                raise Violation(Invariant.PRIVATE, f"{block.key!r} stays behind")
    for block in world.core_view.blocks:
        if block.evict_on_unpin and (not block.pins or block in held):
            raise Violation(Invariant.PRIVATE, f"{block.key!r} should be dropped, or should stay")
