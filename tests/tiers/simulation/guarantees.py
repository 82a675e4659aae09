"""Invariants of tenants and requests: quotas, limits, retention, and TTL."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from kvtier.tiers.core.block import Block
from kvtier.tiers.core.settings import CPU_TIER
from kvtier.tiers.negotiation import NamespaceId
from kvtier.tiers.stats.snapshots import TierStats
from kvtier.tiers.types import SLOT_ALIGNMENT, ShareStats

from . import inspect as inside
from .model import EXTENT, Invariant, Name, Violation
from .tier_settings import tenant_of
from .world import TICKS, World

__all__ = ["check_conversations", "check_quotas", "check_retained", "check_ttl"]

MAKE_ROOM = ("prepare_store", "look_up", "prefetch", "publish", "evict")
"""Events in which the CPU tier may evict blocks, to make room or on demand."""


def check_quotas(world: World) -> None:
    """No tenant loses blocks within its quota to another or exceeds its limit; counts add up."""
    for tier in world.core_view.stats.tiers:
        if sum(share.used_bytes for share in tier.shares) != tier.used_bytes:
            raise Violation(Invariant.QUOTAS, f"{tier.name}: shares do not add up")
        for share in tier.shares:
            if share.limit_bytes is not None and share.used_bytes > share.limit_bytes:
                raise Violation(Invariant.QUOTAS, f"{tier.name}: {share} is beyond its limit")
    _check_figures(world)
    book = world.settings_model
    if len(book.takers) == 1:
        cpu, *below = world.core_view.stats.tiers
        _check_victims(world, cpu, {block.name for block in world.gone})
        for tier, names in zip(below, world.gone_below, strict=True):
            _check_victims(world, tier, names)


def _check_figures(world: World) -> None:
    """Each share's used bytes are those of its blocks and of slots that wait for its writers."""
    cpu, *below = world.core_view.stats.tiers
    if len(cpu.shares) > 1:
        used = defaultdict[NamespaceId, int](int)
        for block in world.core_view.blocks:
            used[block.namespace] += inside.slot_count(block) * -(-block.part_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        for record in world.ledger.stores.values():
            blocks = record.blocks if record.quarantine is not None else []
            for block in inside.released_blocks(world.core, record.id, blocks):
                used[block.namespace] += -(-block.part_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        for namespace, _, nbytes in inside.lifting(world.core):
            used[namespace] += nbytes
        _compare(cpu, used)
    for tier, entries in zip(below, world.core_view.entries, strict=True):
        if len(tier.shares) > 1:
            used = defaultdict(int)
            for entry in entries:
                used[entry.namespace] += entry.nbytes
            _compare(tier, used)


def _compare(tier: TierStats, used: Mapping[NamespaceId, int]) -> None:
    own = {share.tenant for share in tier.shares}
    by_share = Counter[str]()
    for namespace, nbytes in used.items():
        tenant = tenant_of(namespace)
        by_share[tenant if tenant in own else ""] += nbytes
    for share in tier.shares:
        if share.used_bytes != by_share[share.tenant]:
            raise Violation(Invariant.QUOTAS, f"{tier.name}: {share} has used {by_share[share.tenant]}")


def _share(tier: TierStats, tenant: str) -> ShareStats:
    return next((share for share in tier.shares if share.tenant == tenant), tier.shares[0])


def _check_victims(world: World, tier: TierStats, names: Iterable[Name]) -> None:
    taker = _share(tier, next(iter(world.settings_model.takers)))
    for tenant in sorted({tenant_of(namespace) for namespace, _ in names}):
        victim = _share(tier, tenant)
        if victim is not taker:
            world.saw("room made by another tenant")
            if tier.name == CPU_TIER and {victim.tenant, taker.tenant} & world.settings_model.with_pools:
                raise Violation(Invariant.QUOTAS, f"{victim} made room for {taker} in another memory pool")
            if victim.used_bytes < victim.quota_bytes:
                raise Violation(Invariant.QUOTAS, f"{tier.name}: {victim} made room for {taker}")


def check_retained(world: World) -> None:
    """Retained blocks stay until their time or a reset; no visible block leaves without a cause."""
    book, now = world.settings_model, world.environment.latest
    retired = world.retired_with(world.gone)
    gone = [block for block in world.gone if block not in retired]
    promised = [block for block in world.gone if book.retained.get(block, 0.0) > now]
    by_quota = retired if len(world.core_view.stats.tiers[0].shares) > 1 else ()
    world.saw("retained blocks evicted with their extent", not set(promised).isdisjoint(by_quota))
    for block in [block for block in promised if block not in by_quota]:
        if world.doing != "reset" and block.name not in world.deleted:
            raise Violation(Invariant.RETAINED, f"{block.key!r} should stay until {book.retained[block]}, it is {now}")
    if gone and world.doing == "next_slice":
        _check_spare_room(world, gone)
    elif world.doing not in (*MAKE_ROOM, *TICKS, "reset") and not {block.name for block in gone} <= world.deleted:
        raise Violation(Invariant.RETAINED, f"{gone[0].key!r} went for no reason")
    for number, names in enumerate(world.gone_below):
        broken = [name for name in names - world.deleted if world.before.promises[number].get(name, 0.0) > now]
        # A load may have found the block damaged, or a shared tier may have lost it.
        if broken and world.doing not in ("run_work", "answer"):
            raise Violation(Invariant.RETAINED, f"{world.tiers[number].name}: {broken} should stay")
    for tier in world.core_view.stats.tiers:
        for share in tier.shares:
            if not 0 <= share.retained_bytes <= tier.capacity_bytes:
                raise Violation(Invariant.RETAINED, f"{tier.name}: {share} retains too much")


def _check_spare_room(world: World, gone: list[Block]) -> None:
    """Evictions ahead of a store free few slots or one extent, and none with quotas."""
    cpu = world.core_view.stats.tiers[0]
    sizes = [block.allocated_bytes for block in gone]
    spare = world.settings_model.settings.spare_part * cpu.capacity_bytes
    world.saw("room made ahead")
    shares = world.core._cpu_tier.queues.shares
    if not spare or any(shares.only_share_of(block.queue.share.pool) is None for block in gone):
        raise Violation(Invariant.RETAINED, f"{gone[0].key!r} went for no reason")
    if sum(sizes) - max(sizes) >= max(spare, EXTENT * max(len(block.slots) for block in world.gone)):
        raise Violation(Invariant.RETAINED, f"{sum(sizes)} bytes were evicted ahead, of {spare} at most")


def check_ttl(world: World) -> None:
    """Unused blocks expire in time, and no used block expires."""
    book, now = world.settings_model, world.environment.latest
    stayed = [block for block in book.overdue if inside.block(world.core, *block.name) is block]
    if stayed:
        raise Violation(Invariant.TTL, f"{stayed[0].key!r} was not used since {book.used_at[stayed[0]]}, it is {now}")
    if world.doing not in TICKS:
        return
    ttl, gone = book.ttl(), world.gone
    world.saw("blocks expired", bool(gone))
    if gone and (ttl is None or any(book.used_at[block] + ttl > now for block in gone)):
        raise Violation(Invariant.TTL, f"{gone[0].key!r} was used at {book.used_at[gone[0]]}, it is {now}")
    for tier, names in zip(world.tiers, world.gone_below, strict=True):
        lifetime = book.ttl(tier.name)
        world.saw("entries expired", bool(names))
        fresh = [b for name in names if (b := inside.block(world.core, *name)) and b.ready and b in book.used_at]
        if names and (lifetime is None or any(book.used_at[block] + lifetime > now + 1 for block in fresh)):
            raise Violation(Invariant.TTL, f"{tier.name} dropped what is in use")


def check_conversations(world: World) -> None:
    """The table has only keys that requests of a conversation have used, and its counts add up."""
    known, table = inside.conversations(world.core)
    users = Counter((each.namespace.id, key) for each in known for key in each.keys)
    if users != inside.recorded_users(table) or sum(users.values()) != table.keys or len(known) != len(table):
        raise Violation(Invariant.CONVERSATIONS, "the counts of the table do not add up")
    for each in known:
        if not each.latest.keys() <= each.keys.keys():
            raise Violation(Invariant.CONVERSATIONS, f"{each.id}: the latest request has other keys")
        if not each.keys.keys() <= world.ledger.conversations[each.name]:
            raise Violation(Invariant.CONVERSATIONS, f"{each.id}: has keys that it never used")
        if len(each.keys) > inside.CONVERSATION_LIMITS["KEYS"]:
            raise Violation(Invariant.CONVERSATIONS, f"{each.id}: has {len(each.keys)} keys")
    unpinned = [each for each in known if not each.pinned]
    if len(unpinned) == len(known):
        limits = inside.CONVERSATION_LIMITS
        if len(known) > limits["ALL_CONVERSATIONS"] or table.keys > limits["ALL_KEYS"]:
            raise Violation(Invariant.CONVERSATIONS, f"{len(known)} conversations with {table.keys} keys")
    world.saw("conversations forgotten", table.forgotten > 0)
