"""Store handler: grants slots to writers, publishes blocks, quarantines slots of lost writers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ..errors import InvalidItem, LimitExceeded, NotOwner, StoreNotFound
from ..stats.eviction_history import EvictionHistory
from ..stats.miss_ratio_curve import MissRatioCurves
from ..types import EngineKey, EngineSession, MissReason, Owner, StoreAnswer, StoreId, StoreStatus, tenant_of
from .block import Block
from .byte_ranges import MAX_GAPS, ByteRanges
from .completions import CompletionHandler
from .conversations import ConversationTable
from .cpu_tier import CpuTier
from .requests import Request, RequestTable
from .transfers import TransferScheduler

__all__ = ["InFlightStores", "Store", "StoreHandler"]


MAX_STORES = 16_384
"""Limit of the stores of a tenant in flight or in quarantine. Each tick examines all of them."""

_UNPIN_SLICE = 512
"""Blocks per slice: 0.2 µs per block, or 3 µs if the block is dropped."""


@dataclass(slots=True, eq=False)
class Store:
    """A store in flight: pinned blocks, each with a granted slot of one rank."""

    id: StoreId
    owner: Owner
    rank: int
    expires_at: float
    blocks: list[Block]
    request: Request | None = None
    """None if the client has not begun the request."""
    begun_at: float = 0.0
    """In seconds of the core's clock."""
    number: int = 0
    """Number of stores that had begun before this one."""
    others: list[Block] = field(default_factory=list)
    """Pinned blocks of earlier slices of PrepareStore that need no slot."""
    failed: Collection[int] | None = None
    """Positions of the blocks not written; None until the client completes the store."""
    completed: int = 0
    """Number of blocks that the completion has already removed from `blocks`."""
    user: Hashable = None
    """The request, for eviction policies. A store in slices counts as one use of its blocks."""
    received: ByteRanges = field(default_factory=ByteRanges)
    """Positions, in the sequence of parts, of the bytes that the server itself has written."""
    is_streamed: bool = False
    """Whether a stream may have written to the slots. Then the server must have received all bytes,
    even if the client maps the region."""
    unreceived: list[int] | None = None
    """Positions of the blocks that the completion has failed, because the server lacks bytes of
    them; None if the bytes may come through a mapping of the region."""
    _completed_bytes: int = 0

    def receive(self, start: int, end: int) -> bool:
        """Records bytes that the server has written. Returns False if there are too many gaps."""
        self.received.most = len(self.blocks) + MAX_GAPS
        return self.received.add(start, end)

    def missing_of(self, blocks: Sequence[Block]) -> Collection[int]:
        """Returns the positions of the not written ones of the next blocks of the completion."""
        failed = self.failed or frozenset()
        if self.unreceived is None:
            return failed
        missing, end = set(), self._completed_bytes
        for number, block in enumerate(blocks, start=self.completed):
            start, end = end, end + block.part_bytes
            if number in failed:
                missing.add(number)
            elif not self.received.covers(start, end):
                missing.add(number)
                self.unreceived.append(number)
        self._completed_bytes = end
        return missing

    def slots(self, blocks: Sequence[Block] | None = None) -> list[int]:
        """Returns the slots of these blocks of the store; None: of all."""
        blocks = self.blocks if blocks is None else blocks
        return [offset for block in blocks if (offset := block.slots[self.rank]) is not None]


@dataclass(slots=True)
class _Quarantine:
    """Slots of an ended store, to which the client may still write."""

    offsets: list[int]
    nbytes: int
    engine: EngineKey
    writers: set[int]


@dataclass(slots=True)
class InFlightStores:
    """The stores in flight, and the quarantined slots of ended stores.

    A writer is a connection that keeps the region mapped (`Region` in the wire contract). A slot is
    reused only when no client can write to it any more: after the store's completion, or when every
    writer connection of the session has ended.
    """

    cpu_tier: CpuTier
    new_ids: Iterator[int]
    begun: int = 0
    """Number of stores that have begun so far."""
    _stores: dict[StoreId, Store] = field(default_factory=dict)
    _quarantine: dict[StoreId, _Quarantine] = field(default_factory=dict)
    _per_tenant: Counter[bytes] = field(default_factory=Counter)
    """Number of stores in flight and in quarantine, by the tag of the tenant."""

    def __len__(self) -> int:
        return len(self._stores)

    @property
    def quarantined_bytes(self) -> int:
        return sum(entry.nbytes for entry in self._quarantine.values())

    def begin(
        self,
        owner: Owner,
        rank: int,
        expires_at: float,
        blocks: list[Block],
        request: Request | None = None,
        *,
        now: float = 0.0,
    ) -> Store:
        """Registers a store of pinned blocks that have a slot for the rank."""
        store_id = next(new_id for new_id in map(StoreId, self.new_ids) if new_id not in self._stores)
        store = Store(store_id, owner, rank, expires_at, blocks, request, now, number=self.begun)
        self.begun += 1
        self._stores[store.id] = store
        self._count(owner.engine, 1)
        return store

    def extended(self, store_id: StoreId | None, engine: EngineKey) -> Store | None:
        """Returns the store that a call extends; None for a new store. Raises like `get`.

        Raises LimitExceeded for a new store if the tenant of the engine has too many.
        """
        if store_id is not None:
            return self.get(store_id, engine)
        if self._per_tenant.get(tenant_of(engine[0]), 0) >= MAX_STORES:
            raise LimitExceeded(f"the tenant has {MAX_STORES} stores that are not completed")
        return None

    def _count(self, engine: EngineKey, change: int) -> None:
        tenant = tenant_of(engine[0])
        self._per_tenant[tenant] += change
        if not self._per_tenant[tenant]:
            del self._per_tenant[tenant]

    def get(self, store_id: StoreId, engine: EngineKey) -> Store:
        store = self._stores.get(store_id)
        if store is None or store.failed is not None or tenant_of(store.owner.engine[0]) != tenant_of(engine[0]):
            raise StoreNotFound(f"there is no store {store_id}: it was completed, expired or ended with its session")
        if store.owner.engine != engine:
            raise NotOwner(f"store {store_id} belongs to another engine")
        return store

    def is_open(self, store: Store) -> bool:
        return self._stores.get(store.id) is store

    def end(self, store: Store) -> None:
        """Removes a store; the caller must then release the store's pins and slots."""
        del self._stores[store.id]
        self._count(store.owner.engine, -1)

    def quarantine(self, store: Store, writers: set[int]) -> None:
        """Begins a quarantine, which lasts until all of these writer connections have ended."""
        self._quarantine[store.id] = _Quarantine([], 0, store.owner.engine, set(writers))
        self._count(store.owner.engine, 1)
        self._lift_if_free(store.id)

    def add_to_quarantine(self, store: Store, offsets: list[int], nbytes: int) -> None:
        """Keeps detached slots out of use until the store's quarantine ends."""
        entry = self._quarantine.get(store.id)
        if entry is None:
            self.cpu_tier.release(offsets)
        else:
            entry.offsets += offsets
            entry.nbytes += nbytes

    def writer_gone(self, writer: int) -> None:
        for store_id, entry in list(self._quarantine.items()):
            entry.writers.discard(writer)
            self._lift_if_free(store_id)

    def is_quarantined(self, store_id: StoreId, engine: EngineKey) -> bool:
        """Returns whether an ended store of this engine still has slots out of use."""
        entry = self._quarantine.get(store_id)
        return entry is not None and entry.engine == engine

    def writer_done(self, store_id: StoreId, engine: EngineKey) -> None:
        if self.is_quarantined(store_id, engine):
            self._quarantine[store_id].writers.clear()
            self._lift_if_free(store_id)

    def __iter__(self) -> Iterator[Store]:
        return iter(self._stores.values())

    def owned_by(self, session_id: bytes) -> list[Store]:
        return [store for store in self._stores.values() if store.owner.session_id == session_id]

    def expired(self, now: float) -> list[Store]:
        """Returns the expired stores. A store whose completion has begun does not expire."""
        return [store for store in self._stores.values() if store.failed is None and store.expires_at <= now]

    def _lift_if_free(self, store_id: StoreId) -> None:
        if not self._quarantine[store_id].writers:
            ended = self._quarantine.pop(store_id)
            self._count(ended.engine, -1)
            self.cpu_tier.release(ended.offsets)


class StoreHandler:
    def __init__(
        self,
        *,
        cpu_tier: CpuTier,
        transfers: TransferScheduler,
        requests: RequestTable,
        conversations: ConversationTable,
        completions: CompletionHandler,
        history: EvictionHistory,
        miss_ratio_curves: MissRatioCurves | None,
        new_ids: Iterator[int],
        continue_if: Callable[[bool], None],
    ) -> None:
        """`continue_if`: if its argument is True, `unpin_slice` is called later."""
        self.table = InFlightStores(cpu_tier, new_ids)
        self._cpu_tier = cpu_tier
        self._transfers = transfers
        self._requests = requests
        self._conversations = conversations
        self._history = history
        self._completions = completions
        self._miss_ratio_curves = miss_ratio_curves
        self._continue_if = continue_if
        self._pending_unpins: list[Block] = []
        """Pinned blocks that no store needs any more."""
        self._abandoned: deque[Store] = deque()
        """Stores of lost clients whose blocks are not released yet."""

    def prepare(
        self,
        session: EngineSession,
        keys: Sequence[bytes],
        *,
        request_id: str,
        expires_at: float,
        now: float,
        retain_until: float = 0.0,
        extends: StoreId | None = None,
        more: bool = False,
    ) -> StoreAnswer:
        """Grants slots. `more`: the next slice of the keys follows, which `extends` the store.

        Until the last slice the store pins all blocks of its keys, also those that need no slot.
        Raises LimitExceeded if the tenant has too many stores.
        """
        rank = session.own_rank()
        store = self.table.extended(extends, session.engine)
        blocks = self._cpu_tier.find_or_add(session.namespace, keys)
        found = list(dict.fromkeys(blocks))
        for block in found:
            block.pins += 1  # no block of this store may be evicted to make room for another
        statuses, wanted = self._claim(blocks, rank)
        owner = Owner(session.engine, session.id, request_id)
        request = self._requests.get(session.engine, request_id)
        if request is not None and request.conversation is not None:
            self._conversations.add(request.conversation, keys)
            retain_until = max(retain_until, request.conversation.retain_until)
        if store is None and more:
            store = self._begin(owner, rank, expires_at, request, now)
            store.user = owner.user or store
        user = owner.user if store is None else store.user
        declined = self._declined(found, wanted, owner) if not retain_until else None
        self._cpu_tier.reserve([block for block in wanted if block not in declined] if declined else list(wanted), rank)
        granted, slots = self._grant(wanted, rank)
        refused = dict.fromkeys(block for block in wanted if block.slots[rank] is None)
        for block in refused:
            statuses[wanted[block]] = StoreStatus.NO_ROOM
            reason = MissReason.POLICY if declined and block in declined else MissReason.STORE_FAILED
            self._history.record(block.namespace, block.key, reason)
            self._cpu_tier.not_stored(block)
        used = [block for block in found if block not in refused] if refused else found
        not_retained = 0 if declined is not None else self._cpu_tier.use(used, user, retain_until)
        if retain_until:
            self._transfers.retain(used)
        if request is not None and request.request_level_tiers:
            self._cascade_present(request, found, set(granted))
        if self._miss_ratio_curves is not None:
            self._miss_ratio_curves.stored(granted)
        if store is None and granted:
            store = self._begin(owner, rank, expires_at, request, now)
        # The store keeps the pins of the granted blocks.
        own = set(granted) if len(granted) < len(found) else ()
        others = [block for block in found if block not in own] if own or not granted else []
        if store is None:
            self._unpin(others)
            return StoreAnswer(None, bytes(statuses), [], not_retained)
        store.expires_at = max(store.expires_at, expires_at)
        store.blocks += granted
        store.others += others
        store_id = store.id if more else self._end_prepare(store)
        return StoreAnswer(store_id, bytes(statuses), slots, not_retained)

    def _begin(self, owner: Owner, rank: int, expires_at: float, request: Request | None, now: float) -> Store:
        if request is not None:
            request.stores += 1
        store = self.table.begin(owner, rank, expires_at, [], request, now=now)
        store.user = owner.user
        return store

    def _end_prepare(self, store: Store) -> StoreId | None:
        """Unpins the blocks that need no slot. Ends a store without blocks, and returns None."""
        others, store.others = store.others, []
        self._unpin(others)
        if store.blocks:
            return store.id
        self.table.end(store)
        self._ended(store)
        return None

    def _unpin(self, blocks: Sequence[Block]) -> None:
        """Removes pins, in slices."""
        self._pending_unpins += blocks
        self._continue_if(self.unpin_slice())

    def unpin_slice(self) -> bool:
        """Removes a slice of the pins that no store needs any more; returns whether pins are left.

        Tail first: a policy needs this order to know which positions leave ghosts.
        """
        if self._abandoned:
            self._abandon_slice(self._abandoned[0])
        else:
            blocks = self._pending_unpins[-_UNPIN_SLICE:]
            del self._pending_unpins[-_UNPIN_SLICE:]
            self._cpu_tier.unpin(reversed(blocks))
        return bool(self._abandoned or self._pending_unpins)

    def begin_completion(self, session: EngineSession, store_id: StoreId, failed: Collection[int] = ()) -> Store:
        """Begins to complete a store. From now on no call of a client finds the store.

        Blocks whose bytes the server has not received fail, unless the session maps the region.
        """
        store = self.table.get(store_id, session.engine)
        if max(failed, default=-1) >= len(store.blocks):
            raise InvalidItem(f"store {store_id} has {len(store.blocks)} blocks")
        store.failed = failed if isinstance(failed, range) else frozenset(failed)
        if store.is_streamed or store.number >= session.unmapped_from:
            store.unreceived = []
        return store

    def complete_slice(self, store: Store, most: int | None = None) -> bool:
        """Completes up to `most` blocks of a store; returns whether blocks are left.

        Does nothing if the store has been abandoned meanwhile.
        """
        if not self.table.is_open(store):
            return False
        self._complete(store, store.blocks[:most])
        return bool(store.blocks)

    def _complete(self, store: Store, blocks: Sequence[Block]) -> None:
        missing, first = store.missing_of(blocks), store.completed
        store.blocks = store.blocks[len(blocks) :]
        store.completed += len(blocks)
        if not store.blocks:
            self.table.end(store)
            others, store.others = store.others, []
            self._unpin(others)
        complete = []
        for number, block in enumerate(blocks, start=first):
            block.writers -= 1
            if number in missing or block.namespace_index.invalidated:
                self._record_failure(block)
                self._cpu_tier.release([self._cpu_tier.detach_slot(block, store.rank)])
                continue
            self._cpu_tier.stored_bytes += block.part_bytes
            if block.part_written(store.rank):
                complete.append(block)
        self._cpu_tier.became_ready(complete)
        request = store.request
        if request is not None:
            self._transfers.cascade_for(request, complete)
        self._transfers.cascade(complete, store.user)
        self._completions.settle(blocks)
        self._cpu_tier.unpin(blocks)
        if not store.blocks:
            self._ended(store)

    def abandon(self, store: Store, writers: set[int]) -> None:
        """Ends a store of a lost client; quarantines slots until no client can write to them."""
        self.table.end(store)
        self.table.quarantine(store, writers)
        self._abandoned.append(store)
        if len(self._abandoned) == 1:
            self._continue_if(self.unpin_slice())

    def _abandon_slice(self, store: Store) -> None:
        # Tail first: unpinning removes empty blocks from policies, which remove a tail faster.
        blocks, store.blocks = store.blocks[-_UNPIN_SLICE:], store.blocks[:-_UNPIN_SLICE]
        offsets = []
        for block in blocks:
            block.writers -= 1
            self._record_failure(block)
            offsets.append(self._cpu_tier.detach_slot(block, store.rank))
        self.table.add_to_quarantine(store, offsets, sum(block.part_bytes for block in blocks))
        self._completions.settle(blocks)
        self._cpu_tier.unpin(reversed(blocks))
        if not store.blocks:
            self._abandoned.popleft()
            self._pending_unpins += store.others
            self._ended(store)

    def _declined(self, found: Sequence[Block], wanted: Iterable[Block], owner: Owner) -> set[Block] | None:
        """Returns the wanted blocks that are worth less than the blocks that they would replace.

        Returns None, and records no use, if the tier must not decline a block: if there is enough
        room, or if there is another tier, because only the CPU tier passes blocks to it. A block
        that has a part of another rank is never declined.
        """
        new = [block for block in wanted if not any(slot is not None for slot in block.slots)]
        if self._transfers.storing or owner.user is None or not self._cpu_tier.may_decline(new):
            return None
        self._cpu_tier.use(found, owner.user)  # the policy orders the new blocks among the others
        return set(self._cpu_tier.declined(new))

    @staticmethod
    def _claim(blocks: Sequence[Block], rank: int) -> tuple[bytearray, dict[Block, int]]:
        """Returns a status per block, and the position of each block that needs a slot."""
        granted, present, in_progress = map(int, (StoreStatus.GRANTED, StoreStatus.PRESENT, StoreStatus.IN_PROGRESS))
        statuses = bytearray([granted]) * len(blocks)
        wanted: dict[Block, int] = {}
        for number, block in enumerate(blocks):
            if block.ready or block.written >> rank & 1:
                statuses[number] = present
            elif block.promoting or block.slots[rank] is not None or wanted.setdefault(block, number) != number:
                statuses[number] = in_progress
        return statuses, wanted

    @staticmethod
    def _grant(wanted: Iterable[Block], rank: int) -> tuple[list[Block], list[int]]:
        """Marks blocks with a slot as being written; returns these blocks and their slots."""
        granted, slots = [], []
        for block in wanted:
            offset = block.slots[rank]
            if offset is not None:
                block.writers += 1
                granted.append(block)
                slots.append(offset)
        return granted, slots

    def _record_failure(self, block: Block) -> None:
        reason = MissReason.RESET if block.invalidated else MissReason.STORE_FAILED
        self._history.record(block.namespace, block.key, reason)
        self._cpu_tier.not_stored(block)

    def _cascade_present(self, request: Request, blocks: Sequence[Block], own: Collection[Block]) -> None:
        """Stores ready blocks in the REQUEST_LEVEL tiers, pending ones when ready (B3.6, B3.9)."""
        self._transfers.cascade_for(request, [block for block in blocks if block.ready])
        for block in blocks:
            if block.pending and block not in own and not block.hold_only:
                self._requests.wait_for(request, block)

    def _ended(self, store: Store) -> None:
        if store.user is store:
            self._cpu_tier.finish(store)
            self._transfers.request_finished(store)
        if store.request is not None:
            store.request.stores -= 1
            self._requests.end_if_settled(store.request)
