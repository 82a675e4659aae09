"""Hold table: named leases on a finished request's blocks, for another engine (B2.17, B2.19).

A hold pins its blocks, including pending blocks, from the publication until the release or expiry,
even if the session that published the hold ends earlier.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..eviction.quotas import RetentionBudget, TenantShare
from ..secondary_tier import NamespaceId
from ..stats.request_log import HoldRecord, LookupRecord
from ..types import EngineKey, EngineSession, HandoffDirection, HoldName, Owner, PublishStatus, tenant_of
from .block import Block
from .cpu_tier import CpuTier
from .leases import PENDING_COST, BlockLease
from .pin_budget import PinBudget
from .sliced_work import UnpinQueue
from .waiters import Waiters, take_items

__all__ = ["Hold", "HoldClaim", "HoldPins", "HoldTable", "SlicedPublication"]

_UNPIN_COST = 8
"""Cost of a pin of an ended hold: 0.5 µs, or 3 µs if its removal drops the block."""


@dataclass(slots=True, eq=False)
class Hold:
    """A request whose blocks are held.

    Attributes:
        keys: keys of the blocks, as published.
        positions: per key the position of the block within its group.
        items: per key the pinned block; None if the block was given up.
        num_tokens: number of tokens that the blocks cover.
        duration: as published, in seconds.
        record: the publication in the request log.
        pending: number of prepared items whose block is not ready.
        awaited: these items, by block.
        unprepared: number of items that the publication has not prepared yet.
        notify_at: claims are told of the hold as soon as `unsettled` is at most this number.
        orphaned: whether the engine has no session any more. Such a hold gives up each block that
            is not ready and that neither a client nor a job is writing. It keeps its ready blocks.
        is_over: whether it has expired. It still has its pins and counts for limits, until a slice
            ends it.
    """

    name: HoldName
    tenant: str
    direction: HandoffDirection
    keys: Sequence[bytes]
    positions: Sequence[int]
    items: list[Block | None]
    num_tokens: int
    duration: float
    published_at: float
    expires_at: float
    record: HoldRecord
    pending: int = 0
    awaited: dict[Block, list[int]] = field(default_factory=dict)
    unprepared: int = 0
    notify_at: int = 0
    claims: int = 0
    orphaned: bool = False
    is_over: bool = False

    @property
    def engine(self) -> EngineKey:
        return self.name[:2]

    @property
    def unsettled(self) -> int:
        """Largest number of items whose block is neither ready nor given up."""
        return self.pending + self.unprepared

    def take_notice(self) -> bool:
        """Returns whether to tell claims of the hold now. They then set `notify_at` again."""
        if self.unsettled > self.notify_at:
            return False
        self.notify_at = 0
        return True

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.items if block is not None)


@dataclass(slots=True, eq=False)
class SlicedPublication:
    """A publication: it pins all blocks, opens the hold, and prepares it.

    Attributes:
        blocks: the blocks pinned so far, until the hold owns their pins.
        budgets: the hold budgets of these blocks.
        result: the open hold, or the reason of a refusal; None until all blocks are pinned.
        prepared: number of items of the hold that are promoted, protected and recorded as used.
    """

    session: EngineSession
    name: HoldName
    keys: Sequence[bytes]
    positions: Sequence[int]
    num_tokens: int
    direction: HandoffDirection
    duration: float
    slice_keys: int
    blocks: list[Block] = field(default_factory=list)
    budgets: set[RetentionBudget] = field(default_factory=set)
    result: Hold | PublishStatus | None = None
    prepared: int = 0


@dataclass(slots=True, eq=False)
class HoldClaim:
    """A claim. Between two slices its lease owns the pins of the hits.

    Attributes:
        statuses: a status per key that the slices so far have claimed; 0 for a key not requested.
        settled: number of these keys, requested or not, whose block is ready or was given up.
        lease: the lease on the hits so far; None if there are none.
        record: the claim in the request log.
    """

    session: EngineSession
    owner: Owner
    hold: Hold
    first_positions: Sequence[int]
    lease_seconds: float
    slice_keys: int
    statuses: bytearray = field(default_factory=bytearray)
    settled: int = 0
    lease: BlockLease | None = None
    record: LookupRecord | None = None
    user: Hashable = None
    """The request, for eviction policies. A claim in slices counts as one use of its blocks."""


class HoldTable:
    """The open holds by name, and the pending blocks that holds wait for."""

    def __init__(self, unpin: Callable[[NamespaceId, Sequence[Block]], None]) -> None:
        """`unpin` removes the pins of blocks that an open hold gives up."""
        self._unpin = unpin
        self._holds: dict[HoldName, Hold] = {}
        self._waiters = Waiters[Hold]()
        self._per_name: dict[tuple[bytes, str, str], int] = defaultdict(int)
        """Number of holds per tenant, engine id and request id, over the tenant's namespaces."""
        self._per_tenant: dict[str, int] = defaultdict(int)
        self._items: dict[str, int] = defaultdict(int)

    def __len__(self) -> int:
        return len(self._holds)

    def __iter__(self) -> Iterator[Hold]:
        return iter(self._holds.values())

    def get(self, name: HoldName) -> Hold | None:
        return self._holds.get(name)

    def is_in_other_namespace(self, name: HoldName) -> bool:
        """Returns whether only another namespace of the same tenant has such a hold."""
        return name not in self._holds and _in_tenant(name) in self._per_name

    def count(self, tenant: str) -> int:
        return self._per_tenant.get(tenant, 0)

    def items_of(self, tenant: str) -> int:
        """Returns the number of items, plus `PENDING_COST` for each that is not ready."""
        return self._items.get(tenant, 0)

    def add(self, hold: Hold) -> None:
        """Adds a hold, which owns the pins of its blocks. `wait_for` must follow for all items."""
        self._holds[hold.name] = hold
        self._per_name[_in_tenant(hold.name)] += 1
        self._per_tenant[hold.tenant] += 1
        self._items[hold.tenant] += len(hold.keys) + PENDING_COST * hold.pending

    def wait_for(self, hold: Hold, items: range) -> None:
        """Registers the blocks of these items that are not ready.

        Gives up a block that a stall removed from the index, or any block if the hold is orphaned,
        unless a client or a job is writing the block.
        """
        for item in items:
            block = hold.items[item]
            if block is None or block.ready:
                continue
            if (block.invalidated or hold.orphaned) and not block.pending:
                self.release_blocks(hold, [item])
            else:
                hold.pending += 1
                self._items[hold.tenant] += PENDING_COST
                hold.awaited.setdefault(block, []).append(item)
                self._waiters.add(hold, block)

    def remove(self, hold: Hold) -> None:
        """Removes a hold; the caller must remove the pins of the hold."""
        del self._holds[hold.name]
        name = _in_tenant(hold.name)
        self._per_name[name] -= 1
        if not self._per_name[name]:
            del self._per_name[name]
        self._per_tenant[hold.tenant] -= 1
        self._items[hold.tenant] -= len(hold.keys) + PENDING_COST * hold.pending
        if not self._per_tenant[hold.tenant]:
            del self._per_tenant[hold.tenant], self._items[hold.tenant]
        for block in hold.awaited:
            self._waiters.remove(hold, block)
        hold.awaited = {}

    def awaited_among(self, blocks: Sequence[Block]) -> set[Block]:
        return self._waiters.among(blocks)

    def awaiting(self, block: Block) -> list[Hold]:
        return self._waiters.of(block)

    def settle(self, hold: Hold, block: Block, most: int) -> int:
        """Ends the wait of a hold for items of a block whose writes have ended.

        Returns the number of items. If the block is not ready, the hold normally keeps it, and
        waits, because another client may write it later. But it gives the block up if a reset or a
        stall removed the block from the index, or if the hold is orphaned.
        """
        if block not in hold.awaited or not (block.ready or block.invalidated or hold.orphaned):
            return 0
        items = take_items(hold.awaited, block, most)
        if block not in hold.awaited:
            self._waiters.remove(hold, block)
        hold.pending -= len(items)
        self._items[hold.tenant] -= PENDING_COST * len(items)
        if not block.ready:
            self.release_blocks(hold, items)
        return len(items)

    def release_blocks(self, hold: Hold, items: Sequence[int]) -> None:
        """Ends the pins of these items, which the hold does not await."""
        lost = [block for item in items if (block := hold.items[item]) is not None]
        for item in items:
            hold.items[item] = None
        self._unpin(hold.name[0], lost)


class HoldPins:
    """Pins of holds. A block counts once for its budget, however many holds pin it."""

    def __init__(
        self,
        *,
        cpu_tier: CpuTier,
        pin_budget: PinBudget,
        unpins: UnpinQueue,
        budgets: Mapping[TenantShare, RetentionBudget],
    ) -> None:
        self._cpu_tier = cpu_tier
        self._pin_budget = pin_budget
        self._unpins = unpins
        self._budgets = budgets
        self._counts: dict[Block, int] = {}
        """Number of pins per block."""

    @property
    def held_bytes(self) -> int:
        return sum(budget.used for budget in set(self._budgets.values()))

    def budget(self, block: Block) -> RetentionBudget:
        return self._budgets[block.queue.share]

    def pin(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.pins += 1
            if block not in self._counts:
                self.budget(block).used += block.allocated_bytes
                self._pin_budget.begin_hold(block)
                block.evict_on_unpin = False
            self._counts[block] = self._counts.get(block, 0) + 1

    def unpin(self, namespace: NamespaceId, blocks: Sequence[Block | None]) -> None:
        """Adds pins to the unpin queue. A hold-only block is dropped with its last pin."""
        self._unpins.add(namespace, self._unpin, blocks, _UNPIN_COST)

    def unpin_later(self, namespace: NamespaceId, blocks: Sequence[Block]) -> None:
        """As `unpin`, and requests a slice of the queue."""
        self.unpin(namespace, blocks)
        self._unpins.continue_if(bool(blocks))

    def _unpin(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._counts[block] -= 1
            if not self._counts[block]:
                del self._counts[block]
                self.budget(block).used -= block.allocated_bytes
                self._pin_budget.end_hold(block)
                block.evict_on_unpin = block.hold_only
        if not self._counts:
            self._counts = {}  # a dict keeps the memory of its largest size
        self._cpu_tier.queues.unprotect(block for block in blocks if block not in self._counts)
        self._cpu_tier.unpin(blocks)


def _in_tenant(name: HoldName) -> tuple[bytes, str, str]:
    namespace, engine_id, request_id = name
    return tenant_of(namespace), engine_id, request_id
