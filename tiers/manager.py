"""The decision core: events in, answers and commands out.

An event is a method call. It returns its answer at once and leaves in `take_commands()` what the shell is to do. The core
does no I/O, reads no clock (`now` comes with the event, in seconds of any monotonic clock) and knows no threads:
one caller at a time. An event that is refused raises a `CoreError` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import islice

from .answers import DurableStatus, Negotiation, Session, StoreAnswer, StoreStatus
from .base import NamespaceId, OffloadPolicy, Outcome, RequestInfo, SecondaryTier
from .blocks import Block, NamespaceSpec
from .commands import Command, JobId, LeaseId, LeaseSettled, StoreId
from .errors import InvalidItem, InvalidNamespace, LimitExceeded, UnknownSession
from .flow import JobKind, Lane, TierFlow
from .leases import Lease, LeaseTable, Owner, Store, StoreTable
from .policies import DEFAULT_POLICY, POLICIES
from .primary import PrimaryTier
from .requests import Request, RequestTable
from .stats import ManagerStats, TierStats

__all__ = ["TierManager"]

CPU_TIER = "cpu"
MAX_LEASED_ITEMS = 4 << 20
"""Most items that the leases of one session may add up to."""


class TierManager:
    """Decides where blocks are, who pins them and what goes next."""

    def __init__(
        self,
        region_bytes: int,
        extent_bytes: int,
        tiers: Sequence[SecondaryTier],
        *,
        max_queued_bytes: int | None = None,
        first_id: int = 1,
        eviction: Mapping[str, str] | None = None,
    ) -> None:
        """Recovers what the tiers kept from an earlier life.

        Args:
            region_bytes: what the region will have at last; memory arrives with `add_memory`.
            extent_bytes: what a size class claims at a time, and the largest part of a block.
            tiers: the tiers below the CPU tier, in lookup order.
            max_queued_bytes: bounds what waits to be stored in one of them; a quarter of the region by default.
            first_id: where ids of leases and stores start. The shell picks it at random, so that an id from an earlier
                life is never taken for one of this life.
            eviction: how tiers evict: per name of a tier (the CPU tier is "cpu") one of `POLICIES`; the default for
                those that are not named.

        Raises:
            ValueError: `eviction` names a tier or a policy that does not exist.
        """
        eviction = eviction or {}
        _check_eviction(eviction, {CPU_TIER, *(tier.name for tier in tiers)})
        self._commands: list[Command] = []
        self._region_bytes = region_bytes
        self._primary = PrimaryTier(extent_bytes, POLICIES[eviction.get(CPU_TIER, DEFAULT_POLICY)])
        self._leases = LeaseTable(self._primary.unpin, first_id)
        self._stores = StoreTable(self._primary.release, first_id)
        self._flow = TierFlow(
            tiers, max_queued_bytes or region_bytes // 4, self._primary.unpin, self._commands.append, eviction
        )
        self._sessions: dict[bytes, Session] = {}
        self._requests = RequestTable(self._tell_tiers)
        self._namespaces: set[NamespaceId] = set()
        self._asked = 0
        self._primary_hits = 0
        self._misses = 0
        self._flow.recover()

    def take_commands(self) -> list[Command]:
        """Returns the commands since the last call, in order."""
        commands = self._commands.copy()
        self._commands.clear()
        return commands

    def add_memory(self, offset: int, nbytes: int) -> None:
        """Takes note that a piece of the region is backed by pages and may be used."""
        self._primary.memory.add_memory(offset, nbytes)

    def open_session(
        self, session_id: bytes, engine_id: str, rank: int | None, namespace: NamespaceSpec, *, tenant: str = ""
    ) -> Session:
        """Registers a client process.

        Raises:
            InvalidNamespace: its rank lies outside of the world, or its parts do not fit an extent.
        """
        largest = max(namespace.part_bytes)
        if largest > self._primary.memory.extent_bytes:
            limit = self._primary.memory.extent_bytes
            raise InvalidNamespace(f"a part of {largest} bytes is larger than this server takes ({limit} bytes)")
        if rank is not None and rank >= namespace.world_size:
            raise InvalidNamespace(f"rank {rank} is not within a world of {namespace.world_size}")
        session = Session(session_id, engine_id, rank, namespace, tenant)
        self._sessions[session_id] = session
        self._namespaces.add(namespace.id)
        return session

    def session(self, session_id: bytes) -> Session:
        """Returns an open session.

        Raises:
            UnknownSession: there is none with this id.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSession("there is no such session: it fell, or was never opened")
        return session

    def close_session(self, session_id: bytes) -> None:
        """Lets everything fall that the session holds. Slots that it may still write to are quarantined."""
        session = self.session(session_id)
        for lease in self._leases.of_session(session_id):
            self._leases.release(lease)
        for store in self._stores.owned_by(session_id):
            self._abandon(store, session.writers)
        for request_id in list(session.requests):
            request = self._requests.get(session.engine_id, request_id)
            if request is not None:
                self._requests.finish(request, give_up=True)
        del self._sessions[session_id]

    def writer_attached(self, session_id: bytes, writer: int) -> None:
        """Takes note of a connection that maps the region on behalf of a session."""
        self.session(session_id).writers.add(writer)

    def writer_gone(self, session_id: bytes, writer: int) -> None:
        """Takes note that such a connection has ended: through it nobody writes any more."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.writers.discard(writer)
        self._stores.writer_gone(writer)

    def begin_request(self, session: Session, request: RequestInfo) -> Negotiation:
        """Asks every tier how it wants this request offloaded; REQUEST_LEVEL if any asks for it (B3.3).

        A request that was begun already keeps what was negotiated then.

        Raises:
            LimitExceeded: the session has begun too many that it never finished.
        """
        known = self._requests.get(session.engine_id, request.request_id)
        if known is not None and not known.finished:
            return known.negotiation
        votes = tuple((lane.tier.name, lane.tier.on_new_request(request)) for lane in self._flow.lanes)
        policy = max((vote.policy for _, vote in votes), default=OffloadPolicy.BLOCK_LEVEL)
        negotiation = Negotiation(policy, votes)
        self._requests.add(session, request.request_id, negotiation)
        return negotiation

    def finish_request(self, session: Session, request_id: str) -> Request:
        """Takes note that an engine has finished a request: its leases fall, and its tiers are told once it has settled.

        One that was never announced is announced first, so that tiers see both calls, in order (B3.13).

        Raises:
            LimitExceeded: the session has begun too many that it never finished.
        """
        for lease in self._leases.of_request(session.engine_id, request_id):
            self._leases.release(lease)
        request = self._requests.get(session.engine_id, request_id)
        if request is None:
            self.begin_request(session, RequestInfo(request_id, session.namespace.id))
            request = self._requests.get(session.engine_id, request_id)
            assert request is not None
        user = _user(session.engine_id, request_id)
        self._primary.finish(user)
        self._flow.user_finished(user)
        self._requests.finish(request)
        return request

    def lookup(
        self, session: Session, keys: Sequence[bytes], *, prefix: bool, request_id: str, expires_at: float
    ) -> Lease | None:
        """Finds blocks, pins what it finds, and starts promotions; returns None where nothing was found.

        With `prefix` whatever follows the first miss is a miss.

        Raises:
            LimitExceeded: the session holds leases on too many blocks.
        """
        if self._leases.items_of(session.id) + len(keys) > MAX_LEASED_ITEMS:
            raise LimitExceeded(f"the session holds leases on {MAX_LEASED_ITEMS} blocks; release some")
        items, sources, promotions = self._match(session.namespace, keys, prefix=prefix)
        user = _user(session.engine_id, request_id)
        self._start_promotions(items, promotions, user)
        self._count(len(keys), items, sources)
        hits = [block for block in items if block is not None]
        if not hits:
            return None
        self._primary.use(hits, user)
        owner = Owner(session.engine_id, session.id, request_id)
        sources += bytes(len(keys) - len(sources))
        return self._leases.grant(owner, expires_at, items, bytes(sources), keys=len(keys))

    def lease(self, session: Session, lease_id: LeaseId) -> Lease:
        """Returns a lease of this session's engine.

        Raises:
            LeaseNotFound: it ended, or never was.
            NotOwner: it belongs to another engine.
        """
        return self._leases.get(lease_id, session.engine_id)

    def renew(self, session: Session, lease_id: LeaseId, expires_at: float) -> None:
        """Extends a lease; never shortens it. Raises like `lease`."""
        lease = self._leases.get(lease_id, session.engine_id)
        lease.expires_at = max(lease.expires_at, expires_at)

    def release(self, session: Session, lease_id: LeaseId) -> None:
        """Ends a lease. Raises like `lease`."""
        self._leases.release(self._leases.get(lease_id, session.engine_id))

    def prepare_store(
        self, session: Session, keys: Sequence[bytes], *, request_id: str, expires_at: float
    ) -> StoreAnswer:
        """Grants slots for the parts of this session's rank that are not there and that nobody is writing.

        Raises:
            InvalidKey: a key names a group that the namespace lacks; nothing was granted.
            InvalidItem: the session has no rank.
        """
        rank = session.own_rank()
        for key in keys:
            session.namespace.part_bytes_of(key)
        statuses, found, wanted = self._claim(session, keys, rank)
        self._primary.reserve([(block, rank) for block in wanted])
        granted, slots, refused = [], [], set()
        for block in wanted:
            offset = block.slots[rank]
            if offset is None:
                statuses[found[block]] = StoreStatus.NO_ROOM
                refused.add(block)
                continue
            statuses[found[block]] = StoreStatus.GRANTED
            block.pins += 1
            block.writers += 1
            granted.append(block)
            slots.append(offset)
        user = _user(session.engine_id, request_id)
        self._primary.use((block for block in found if block not in refused), user)
        request = self._requests.get(session.engine_id, request_id)
        if request is not None and request.insisting:
            self._cascade_present(request, list(found), set(granted))
        for block in found:
            self._primary.unpin(block)
        if not granted:
            return StoreAnswer(None, bytes(statuses), [])
        if request is not None:
            request.stores += 1
        owner = Owner(session.engine_id, session.id, request_id)
        store = self._stores.begin(owner, rank, expires_at, granted, request)
        return StoreAnswer(store.id, bytes(statuses), slots)

    def store(self, session: Session, store_id: StoreId) -> Store:
        """Returns a store in flight of this session's engine.

        Raises:
            StoreNotFound: it ended, or never was.
            NotOwner: it belongs to another engine.
        """
        return self._stores.get(store_id, session.engine_id)

    def renew_store(self, session: Session, store_id: StoreId, expires_at: float) -> Store:
        """Extends a store that is being written to, and returns it; never shortens it. Raises like `store`."""
        store = self._stores.get(store_id, session.engine_id)
        store.expires_at = max(store.expires_at, expires_at)
        return store

    def complete_store(self, session: Session, store_id: StoreId, failed: Collection[int] = ()) -> None:
        """Ends a store; `failed` numbers the granted blocks that were not written. Raises like `store`.

        Raises:
            InvalidItem: `failed` names a block that was not granted; the store goes on.
        """
        store = self._stores.get(store_id, session.engine_id)
        if any(number >= len(store.blocks) for number in failed):
            raise InvalidItem(f"store {store_id} has {len(store.blocks)} blocks")
        self._stores.end(store)
        missing = set(failed)
        complete = []
        for number, block in enumerate(store.blocks):
            block.writers -= 1
            if number in missing:
                self._primary.release([self._primary.detach_slot(block, store.rank)])
            else:
                block.part_written(store.rank)
                if block.ready:
                    complete.append(block)
        request = store.request
        if request is not None:
            self._flow.cascade_for(request, complete)
        self._flow.cascade(complete, _user(store.owner.engine_id, store.owner.request_id))
        self._settle(store.blocks)
        for block in store.blocks:
            self._primary.unpin(block)
        self._store_ended(request)

    def writer_done(self, session: Session, store_id: StoreId) -> None:
        """Takes note of a completion that came after its store had ended: at least, nobody writes any more."""
        self._stores.writer_done(store_id, session.engine_id)

    def durability(self, session: Session, keys: Sequence[bytes]) -> bytes:
        """Returns a `DurableStatus` per key, and sends on their way ready blocks that no durable tier has."""
        namespace = session.namespace.id
        blocks = self._primary.blocks_of(namespace)
        waiting = [
            block
            for key in keys
            if (block := blocks.get(key)) and block.ready and not self._flow.is_becoming_durable(namespace, key)
        ]
        self._flow.cascade(list(dict.fromkeys(waiting)), None, even_if_busy=True)
        return bytes(self.durability_of(namespace, key) for key in keys)

    def make_durable(self) -> None:
        """Sends on their way, last used first, the blocks that backpressure had left out. Called when the server ends.

        Those only: what a tier has had and evicted since must not drive out what it has now.
        """
        self._flow.cascade([block for block in self._primary.ready_blocks() if block.left_out], None, even_if_busy=True)

    def durability_of(self, namespace: NamespaceId, key: bytes) -> DurableStatus:
        """Returns whether a block survives a restart."""
        if self._flow.is_durable(namespace, key):
            return DurableStatus.DURABLE
        block = self._primary.blocks_of(namespace).get(key)
        being_written = block is not None and block.pending
        on_its_way = being_written or self._flow.is_becoming_durable(namespace, key)
        return DurableStatus.PENDING if on_its_way else DurableStatus.VOLATILE

    def tick(self, now: float) -> None:
        """Ends what has expired. Called every second or so."""
        for lease in self._leases.expired(now):
            self._leases.release(lease)
            self._commands.append(LeaseSettled(lease.id))
        for store in self._stores.expired(now):
            session = self._sessions.get(store.owner.session_id)
            self._abandon(store, session.writers if session else set())

    def job_finished(self, job_id: JobId, outcomes: Sequence[Outcome]) -> None:
        """Takes in the result of a job, an outcome per block. A job that is not known is ignored."""
        finished = self._flow.finish(job_id, outcomes)
        if finished is None:
            return
        for request in finished.paid:
            self._requests.end_if_settled(request)
        if finished.kind is JobKind.STORE:
            return
        for block, done in finished.results:
            if done:
                block.promoted()
            else:
                self._drop_promotion(block)
        self._settle([block for block, _ in finished.results])
        for block, _ in finished.results:
            self._primary.unpin(block)

    def entries_lost(self, tier: int, names: Iterable[tuple[NamespaceId, bytes]]) -> None:
        """Takes note that a tier, by its position in the lookup order, found blocks damaged and has none of them any more."""
        self._flow.lost(tier, names)

    def stats(self) -> ManagerStats:
        """Returns the figures of this moment."""
        memory = self._primary.memory
        cpu = TierStats(
            name=CPU_TIER,
            type=CPU_TIER,
            capacity_bytes=self._region_bytes,
            available_bytes=memory.available_bytes,
            used_bytes=memory.used_bytes(),
            blocks=len(self._primary),
            hits=self._primary_hits,
            misses=self._asked - self._primary_hits,
            evictions=self._primary.evictions,
            dropped=self._primary.no_room,
        )
        return ManagerStats(
            tiers=(cpu, *(lane.stats() for lane in self._flow.lanes)),
            leases=len(self._leases),
            stores=len(self._stores),
            quarantined_bytes=self._stores.quarantined_bytes,
            sessions=len(self._sessions),
            namespaces=len(self._namespaces),
            lookup_keys=self._asked,
            lookup_misses=self._misses,
        )

    def _match(
        self, namespace: NamespaceSpec, keys: Sequence[bytes], *, prefix: bool
    ) -> tuple[list[Block | None], bytearray, list[tuple[int, Lane, Block]]]:
        """Finds and pins blocks: per key the block or None, the tier it is in, and what is to be promoted."""
        blocks = self._primary.blocks_of(namespace.id)
        items: list[Block | None] = []
        promotions: list[tuple[int, Lane, Block]] = []
        for block in map(blocks.get, keys):  # in the common case that is all: a run of ready blocks
            if block is None or not block.ready:
                break
            block.pins += 1
            items.append(block)
        sources = bytearray(len(items))
        for key in islice(keys, len(items), None):
            block, source = blocks.get(key), 0
            if block is None or not (block.ready or block.pending):
                block = None
                lane = self._flow.find(namespace.id, key)
                if lane is not None:
                    block, source = self._primary.find_or_add(namespace, key), lane.index
                    block.promoting = True
                    promotions.append((len(items), lane, block))
                elif prefix:
                    break
            if block is not None:
                block.pins += 1
            items.append(block)
            sources.append(source)
        return items, sources, promotions

    def _claim(
        self, session: Session, keys: Sequence[bytes], rank: int
    ) -> tuple[bytearray, dict[Block, int], list[Block]]:
        """Pins the blocks of a store; returns what is known of each key, where each block stands, and which want a slot."""
        statuses = bytearray(len(keys))
        found: dict[Block, int] = {}
        wanted: list[Block] = []
        for number, key in enumerate(keys):
            block = self._primary.find_or_add(session.namespace, key)
            if block.ready or block.written >> rank & 1:
                statuses[number] = StoreStatus.PRESENT
            elif block.promoting or block.slots[rank] is not None or block in found:
                statuses[number] = StoreStatus.IN_PROGRESS
            else:
                wanted.append(block)
            if block not in found:
                block.pins += 1  # room for the tail must not be made at the cost of the head
                found[block] = number
        return statuses, found, wanted

    def _start_promotions(
        self, items: list[Block | None], promotions: list[tuple[int, Lane, Block]], user: Hashable
    ) -> None:
        """Reserves slots for blocks that are to be promoted; those that get none become misses (B3.16)."""
        self._primary.reserve(
            [(block, rank) for _, _, block in promotions for rank, slot in enumerate(block.slots) if slot is None]
        )
        started = []
        for number, lane, block in promotions:
            if None in block.slots:
                # The same key may stand in the list again and have been pinned there as well.
                self._drop_promotion(block)
                for position in range(number, len(items)):
                    if items[position] is block:
                        items[position] = None
                        self._primary.unpin(block)
            else:
                started.append((lane, block))
        self._flow.promote(started, user)

    def _drop_promotion(self, block: Block) -> None:
        """Takes all slots from a block that could not be filled. Only jobs write to them, so they are free at once."""
        block.promoting = False
        ranks = [rank for rank, slot in enumerate(block.slots) if slot is not None]
        block.written = 0
        self._primary.release([self._primary.detach_slot(block, rank) for rank in ranks])

    def _abandon(self, store: Store, writers: set[int]) -> None:
        """Ends a store whose owner is gone or silent; its slots wait until nobody can write to them."""
        self._stores.end(store)
        offsets = []
        for block in store.blocks:
            block.writers -= 1
            offsets.append(self._primary.detach_slot(block, store.rank))
        self._stores.quarantine(store, offsets, sum(block.part_bytes for block in store.blocks), writers)
        self._settle(store.blocks)
        for block in store.blocks:
            self._primary.unpin(block)
        self._store_ended(store.request)

    def _settle(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.pending:
                continue
            self._commands.extend(map(LeaseSettled, self._leases.settle(block)))
            for request in self._requests.settled(block):
                if block.ready:
                    self._flow.cascade_for(request, [block])
                else:
                    request.incomplete += 1
                self._requests.end_if_settled(request)

    def _cascade_present(self, request: Request, blocks: Sequence[Block], own: Collection[Block]) -> None:
        """Gives the tiers that insist on a request what the CPU tier has of it already; waits for what is coming (B3.6, B3.9)."""
        self._flow.cascade_for(request, [block for block in blocks if block.ready])
        for block in blocks:
            if block.pending and block not in own:
                self._requests.wait_for(request, block)

    def _store_ended(self, request: Request | None) -> None:
        if request is not None:
            request.stores -= 1
            self._requests.end_if_settled(request)

    def _tell_tiers(self, request: Request) -> None:
        for lane in self._flow.lanes:
            lane.tier.on_request_finished(request.id)

    def _count(self, asked: int, items: Sequence[Block | None], sources: bytes | bytearray) -> None:
        """Counts every key once: as a hit of the tier that answered for it, or as a miss."""
        hits = len(items) - items.count(None)
        self._asked += asked
        self._misses += asked - hits
        self._primary_hits += hits
        if not any(sources):
            return
        for block, source in zip(items, sources, strict=True):
            if block is not None and source:
                self._primary_hits -= 1
                self._flow.lanes[source - 1].hits += 1


def _user(engine_id: str, request_id: str) -> Hashable:
    """Returns what eviction policies know a request by: None where the client did not say."""
    return (engine_id, request_id) if request_id else None


def _check_eviction(eviction: Mapping[str, str], tiers: Collection[str]) -> None:
    for tier, policy in eviction.items():
        if tier not in tiers:
            raise ValueError(f"there is no tier {tier!r} to evict by {policy!r}; there are {', '.join(sorted(tiers))}")
        if policy not in POLICIES:
            raise ValueError(f"tier {tier!r}: there is no policy {policy!r}; there are {', '.join(POLICIES)}")
