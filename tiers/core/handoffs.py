"""Hand-off handler: blocks that are held for another engine, and their limits (B2.17, B2.19).

Only blocks of the CPU tier are held; a publication promotes blocks from secondary tiers. For a
missing block the handler inserts a pinned, empty block. So an engine may publish a hold before it
stores the blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from ..errors import HoldExpired, HoldNotFound, InvalidItem
from ..eviction.quotas import budgets_of
from ..secondary_tier import NamespaceId
from ..stats.request_log import ClaimOutcome
from ..stats.snapshots import HandoffStats
from ..stats.tenant_records import RecordsByTenant
from ..types import (
    EngineKey,
    EngineSession,
    HandoffDirection,
    HoldEnd,
    HoldName,
    Owner,
    PublishStatus,
    tenant_of,
)
from .block import Block
from .claims import ClaimHandler
from .commands import Command, HoldChanged
from .cpu_tier import CpuTier
from .handoff_log import HandoffLog
from .holds import Hold, HoldClaim, HoldPins, HoldTable, SlicedPublication
from .in_flight_stores import STORE_SLICE
from .leases import PENDING_COST
from .lookups import LookupHandler
from .operations import Operation
from .settings import TierSettings
from .sliced_work import UnpinQueue
from .waiters import settle_in_slices

__all__ = ["EXPIRY_MARGIN_SECONDS", "HandoffHandler"]

EXPIRY_MARGIN_SECONDS = 5.0
"""A hold cannot be claimed during this time before its expiry (B2.19)."""

EXTENSION_PART = 2 / 3
"""A heartbeat of the publishing engine extends a hold to this fraction of its duration, counted
from now. It never shortens a hold (B2.1)."""

MAX_HELD_ITEMS = 4 << 20
"""Limit for the items of all holds of one tenant; a publication beyond it is refused. A shared
block counts once per hold."""

_SLICE = 128
"""Number of expired holds that a slice ends: 1 to 3 ms."""
_ITEMS = 1024
"""Items of a hold that take as long as a hold."""

_REMEMBERED = 4096
"""The core remembers this many ended and refused holds. A claim of one of them fails at once, and
does not wait for a publication."""


class HandoffHandler:
    """Open holds. `find` and `claim` get the time, to detect an expiry before the next tick."""

    def __init__(
        self,
        *,
        cpu_tier: CpuTier,
        lookups: LookupHandler,
        settings: TierSettings,
        region_bytes: int,
        commands: list[Command],
        log: HandoffLog,
        unpins: UnpinQueue,
        perform: Callable[[Operation[None], bytes], None],
    ) -> None:
        """`perform`: see `IncrementalWork.perform`."""
        self._cpu_tier = cpu_tier
        self._lookups = lookups
        self._max_holds = settings.max_holds
        self._commands = commands
        self._log = log
        self._unpins = unpins
        self._perform = perform
        self._publications: set[SlicedPublication] = set()
        """Publications that have not pinned all of their blocks."""
        self._pins = HoldPins(
            cpu_tier=cpu_tier,
            pin_budget=lookups.pin_budget,
            unpins=unpins,
            budgets=budgets_of(list(cpu_tier.queues.shares), region_bytes, settings.held_part),
        )
        self._table = HoldTable(unpin=self._pins.unpin_later)
        self._ended = RecordsByTenant[HoldName, HoldEnd | PublishStatus](_REMEMBERED)
        """Why holds have ended or were refused."""
        self._stats = {direction: HandoffStats() for direction in HandoffDirection}
        self.claims = ClaimHandler(cpu_tier=cpu_tier, lookups=lookups, log=log, stats=self._stats)

    def __len__(self) -> int:
        return len(self._table)

    def all(self) -> list[Hold]:
        return [hold for hold in self._table if not hold.is_over]

    @property
    def held_bytes(self) -> int:
        return self._pins.held_bytes

    def stats(self) -> dict[HandoffDirection, HandoffStats]:
        opened = Counter(hold.direction for hold in self._table)
        return {direction: replace(stats, open=opened[direction]) for direction, stats in self._stats.items()}

    def publish(
        self,
        session: EngineSession,
        request_id: str,
        keys: Sequence[bytes],
        positions: Sequence[int],
        *,
        num_tokens: int,
        direction: HandoffDirection,
        duration: float,
        now: float,
        slice_keys: int = STORE_SLICE,
    ) -> Operation[Hold | PublishStatus]:
        """Holds blocks for `duration` seconds; returns the hold, or the reason of a refusal.

        An earlier hold of the same name ends, even if the new one is refused. If the operation ends
        early, no hold remains. Raises InvalidKey if a key names an unknown group, InvalidItem if
        the numbers of keys and positions differ.
        """
        if len(keys) != len(positions):
            raise InvalidItem(f"{len(keys)} keys and {len(positions)} positions")
        name: HoldName = (*session.engine, request_id)
        return self._publish(
            SlicedPublication(session, name, keys, positions, num_tokens, direction, duration, slice_keys), now
        )

    def _publish(self, publication: SlicedPublication, now: float) -> Operation[Hold | PublishStatus]:
        try:
            if len(publication.keys) > publication.slice_keys:
                now = yield None
            while self._publish_slice(publication, now):
                now = yield None
        except BaseException:
            self._abandon(publication, now)
            raise
        assert publication.result is not None
        return publication.result

    def _publish_slice(self, publication: SlicedPublication, now: float) -> bool:
        """Pins or prepares the next blocks; returns whether a slice is left."""
        most = publication.slice_keys
        if publication.result is None:
            start, session = len(publication.blocks), publication.session
            blocks = self._pin(session, publication.keys[start : start + most])
            publication.blocks += blocks
            publication.budgets.update(map(self._pins.budget, blocks))
            self._publications.add(publication)
            # A publication without room stops early, so that it pins few empty blocks.
            has_room = not self._is_over(publication)
            may_go_on = has_room and len(publication.blocks) < len(publication.keys)
            if may_go_on or not self._open(publication, now):
                return True
            self._publications.discard(publication)
            if most < len(publication.keys):
                return isinstance(publication.result, Hold)
        hold = publication.result
        return isinstance(hold, Hold) and self._prepare_slice(publication, hold)

    def _abandon(self, publication: SlicedPublication, now: float) -> None:
        """Ends a publication whose engine gets no answer, and its hold."""
        self._publications.discard(publication)
        hold = publication.result
        if isinstance(hold, Hold):
            if self._table.get(hold.name) is hold:
                self.release(hold.name, now)
        elif hold is None and publication.blocks:
            self._pins.unpin(publication.name[0], publication.blocks)
            self._unpins.start()
        self._cpu_tier.finish(publication)

    def _open(self, publication: SlicedPublication, now: float) -> bool:
        """Opens the hold of a publication whose blocks are pinned, or refuses it.

        Returns False if blocks are missing, or if ended holds must be unpinned first, because they
        still fill the budget.
        """
        name, direction, blocks = publication.name, publication.direction, publication.blocks
        known = self._table.get(name)
        if known is not None:  # the new hold's blocks are already pinned, so common blocks stay
            self._end(known, HoldEnd.REPLACED, now)
            self._unpins.start()
        tenant, tokens, count = publication.session.tenant, publication.num_tokens, len(publication.keys)
        if (refused := self._refusal(publication)) is PublishStatus.NO_ROOM and self._unpins.unpin_first(
            tenant_of(name[0])
        ):
            return False
        if refused is None and len(blocks) < count:
            return False
        status = refused or PublishStatus.PUBLISHED
        record = self._log.published(name, direction, num_tokens=tokens, blocks=count, status=status, now=now)
        if refused is not None:
            self._commands.append(HoldChanged(name))
            publication.result = refused
            self._stats[direction].declined += 1
            self._pins.unpin(name[0], blocks)
            self._unpins.start()
            self._remember_end(name, refused)
            return True
        # Use the key objects of the blocks, so that memory has each key once.
        keys = [block.key for block in blocks]
        hold = publication.result = Hold(
            name,
            tenant,
            direction,
            keys,
            publication.positions,
            list[Block | None](blocks),
            tokens,
            publication.duration,
            now,
            now + publication.duration,
            record,
            unprepared=count,
        )
        self._table.add(hold)
        self._ended.pop(tenant_of(name[0]), name)
        self._stats[direction].published += 1
        if publication.slice_keys < count:
            self._commands.append(HoldChanged(name))  # a claim may need the first blocks only
        return True

    def _prepare_slice(self, publication: SlicedPublication, hold: Hold) -> bool:
        """Promotes, protects and records the use of the next blocks, unless the hold has ended."""
        start, end = publication.prepared, min(publication.prepared + publication.slice_keys, len(hold.items))
        is_open = self._table.get(hold.name) is hold and not hold.is_over
        if is_open:
            self._table.wait_for(hold, range(start, end))
            blocks = [block for block in hold.items[start:end] if block is not None and not block.invalidated]
            self._lookups.fetch(hold.name[0], blocks)
            self._cpu_tier.queues.protect(blocks)
            self._cpu_tier.use(list(dict.fromkeys(blocks)), publication)
            publication.prepared, hold.unprepared = end, len(hold.items) - end
            if hold.unprepared:
                if hold.take_notice():
                    self._commands.append(HoldChanged(hold.name))
                return True
            hold.record.pending = hold.pending
            self._commands.append(HoldChanged(hold.name))
        self._cpu_tier.finish(publication)
        return False

    def find(self, name: HoldName, now: float) -> Hold | None:
        """Returns the open hold of this name, or None.

        Raises HoldExpired if the hold has expired or will expire within `EXPIRY_MARGIN_SECONDS`.
        """
        hold = self._table.get(name)
        if self._end_of(name) is HoldEnd.EXPIRED or (
            hold is not None and (hold.is_over or hold.expires_at - EXPIRY_MARGIN_SECONDS <= now)
        ):
            raise HoldExpired(
                f"the hold of request {name[2]!r} of engine {name[1]!r} has expired or is about to expire"
            )
        return hold

    def is_settled(self, hold: Hold, blocks: int) -> bool:
        """Whether a claim that waits for this number of a hold's blocks (0: all) can be answered.

        A block counts if it is ready or was given up. If the result is False, the hold's next
        `HoldChanged` comes no later than the time at which the result would be True.
        """
        allowed = max(0, len(hold.items) - blocks) if blocks else 0
        if hold.unsettled <= allowed:
            return True
        hold.notify_at = max(hold.notify_at, allowed)
        return False

    def may_come(self, name: HoldName) -> bool:
        """Returns False if a hold was refused or ended, or another namespace holds the request."""
        return self._end_of(name) is None and not self._table.is_in_other_namespace(name)

    def claim(
        self,
        session: EngineSession,
        name: HoldName,
        *,
        first_positions: Sequence[int],
        request_id: str,
        lease_seconds: float,
        now: float,
        grant_id: int = 0,
        slice_keys: int = STORE_SLICE,
    ) -> Operation[HoldClaim]:
        """Leases the ready blocks of a hold. If the operation ends early, no lease remains.

        `first_positions`: per group, the first position to lease; empty for all blocks. Raises
        HoldNotFound, HoldExpired, or LimitExceeded if the session has too many leased items. Raises
        HoldNotFound too if the hold or the lease of the earlier slices ends meanwhile.
        """
        owner = Owner(session.engine, session.id, request_id, grant_id)
        try:
            hold = self.find(name, now)
        except HoldExpired:
            self.claims.not_claimed(owner, name, ClaimOutcome.EXPIRED, now)
            raise
        if hold is None:
            outcome = ClaimOutcome.OTHER_NAMESPACE if self._table.is_in_other_namespace(name) else ClaimOutcome.NOT_HELD
            self.claims.not_claimed(owner, name, outcome, now)
            raise HoldNotFound(
                f"no hold of request {name[2]!r} of engine {name[1]!r} exists; it may have been released"
            )
        claim = self.claims.begin(session, owner, hold, first_positions, lease_seconds, slice_keys)
        return self.claims.run(claim, now)

    def renew(self, name: HoldName, now: float, extension: float | None = None) -> bool:
        """Extends a hold to `extension` seconds from now; returns whether the hold is open.

        `extension` is None for a heartbeat (`EXTENSION_PART`).
        """
        hold = self._table.get(name)
        if hold is None or hold.is_over or hold.expires_at <= now:
            return False
        seconds = hold.duration * EXTENSION_PART if extension is None else extension
        hold.expires_at = max(hold.expires_at, now + seconds)
        return True

    def release(self, name: HoldName, now: float) -> bool:
        hold = self._table.get(name)
        if hold is None or hold.is_over:
            return False
        self._end(hold, HoldEnd.RELEASED, now)
        self._unpins.start()
        return True

    def tick(self, now: float) -> None:
        """Ends expired holds, in slices. Checks all, as they are not sorted by expiry (B2.19)."""
        expired = [hold for hold in self._table if hold.expires_at <= now and not hold.is_over]
        for hold in expired:
            hold.is_over = True
        if expired:
            self._perform(self._expire(expired, now), b"")

    def _expire(self, holds: Sequence[Hold], now: float) -> Operation[None]:
        room = _SLICE
        for hold in holds:
            if room <= 0:
                self._unpins.start()
                yield None
                room = _SLICE
            room -= 1 + (len(hold.keys) + PENDING_COST * hold.pending) // _ITEMS
            if self._table.get(hold.name) is hold:
                self._end(hold, HoldEnd.EXPIRED, now)
        self._unpins.start()

    def release_blocks(self, hold: Hold, blocks: Collection[Block]) -> None:
        """Ends the pins of those of these blocks that are ready, if the hold is open.

        Not of those that a later slice will settle: without its pin, such a block may be evicted
        first, and then the hold would wait for it until it ends.
        """
        if self._table.get(hold.name) is hold:
            given_up = {block for block in blocks if block.ready and block not in hold.awaited}
            self._table.release_blocks(hold, [item for item, block in enumerate(hold.items) if block in given_up])

    def reset(self, namespace: NamespaceId, now: float) -> None:
        """Ends all holds of a namespace. Called before the CPU tier drops the blocks.

        Publications pin their blocks again from the first one.
        """
        for publication in self._publications:
            if publication.name[0] == namespace:
                blocks, publication.blocks = publication.blocks, []
                self._pins.unpin(namespace, blocks)
        for hold in [hold for hold in self._table if hold.name[0] == namespace]:
            self._end(hold, HoldEnd.RESET, now)
        self._unpins.start()

    def engine_gone(self, engine: EngineKey) -> None:
        """Called when an engine's last session has ended. Orphans its holds with pending blocks."""
        orphaned = [hold for hold in self._table if hold.engine == engine and hold.unsettled]
        for hold in orphaned:
            hold.orphaned = True
        if orphaned:
            self._perform(self._give_up(orphaned), tenant_of(engine[0]))

    def _give_up(self, holds: Sequence[Hold]) -> Operation[None]:
        """Gives up blocks of orphaned holds (see `Hold.orphaned`)."""
        return settle_in_slices(
            (partial(self.settle, hold, block), block) for hold in holds for block in list(hold.awaited)
        )

    def awaited_among(self, blocks: Sequence[Block]) -> set[Block]:
        return self._table.awaited_among(blocks)

    def awaiting(self, block: Block) -> list[Hold]:
        return self._table.awaiting(block)

    def settle(self, hold: Hold, block: Block, most: int) -> int:
        """Called when a block's writes have ended; returns how many items no longer wait for it."""
        items = self._table.settle(hold, block, most)
        if items and hold.take_notice():
            self._commands.append(HoldChanged(hold.name))
        return items

    def _pin(self, session: EngineSession, keys: Sequence[bytes]) -> list[Block]:
        blocks = self._cpu_tier.find_or_add(session.namespace, keys)
        self._pins.pin(blocks)
        return blocks

    def _is_over(self, publication: SlicedPublication) -> bool:
        pins, budgets = self._lookups.pin_budget, publication.budgets
        return pins.is_over(publication.name[0]) or any(budget.is_over for budget in budgets)

    def _refusal(self, publication: SlicedPublication) -> PublishStatus | None:
        tenant, most = publication.session.tenant, MAX_HELD_ITEMS - len(publication.keys)
        if self._table.count(tenant) >= self._max_holds or self._table.items_of(tenant) > most:
            return PublishStatus.TOO_MANY
        return PublishStatus.NO_ROOM if self._is_over(publication) else None

    def _end(self, hold: Hold, how: HoldEnd, now: float) -> None:
        self._table.remove(hold)
        how = HoldEnd.EXPIRED if hold.is_over else how
        if how is not HoldEnd.REPLACED:
            self._remember_end(hold.name, how)
        stats = self._stats[hold.direction]
        stats.expired += how is HoldEnd.EXPIRED
        stats.released += how is HoldEnd.RELEASED
        stats.dropped += how in (HoldEnd.REPLACED, HoldEnd.RESET)
        hold.record.end, hold.record.ended_at = how, now
        stats.held_seconds += max(0.0, now - hold.published_at)
        self._pins.unpin(hold.name[0], hold.items)
        self._commands.append(HoldChanged(hold.name))

    def _remember_end(self, name: HoldName, why: HoldEnd | PublishStatus) -> None:
        # An expired hold stays expired, even if a publication of its name is refused.
        if self._end_of(name) is None:
            self._ended.put(tenant_of(name[0]), {name: why})

    def _end_of(self, name: HoldName) -> HoldEnd | PublishStatus | None:
        """Returns how a hold has ended, or why it was refused; None if the core does not know."""
        return self._ended.of(tenant_of(name[0])).get(name)
