"""Model of granted and released resources, from the events and answers only.

The invariants compare the core with this ledger.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain

from kvtier.tiers.core.block import Block
from kvtier.tiers.core.commands import LoadFromTier, LookupInTier, StoreInTier, Waiter
from kvtier.tiers.core.leases import BlockLease
from kvtier.tiers.negotiation import NamespaceId
from kvtier.tiers.types import EngineSession, KeyStatus

from .holds import HoldBook
from .model import Name
from .requests import RequestBook, RequestRecord

__all__ = ["Client", "JobRecord", "LeaseRecord", "Ledger", "RoomBook", "StoreRecord"]


@dataclass(eq=False, slots=True)
class Client:
    """A process with an open session, and the connections that map the region."""

    session: EngineSession
    connections: set[int] = field(default_factory=set)

    @property
    def engine(self) -> str:
        return self.session.engine


@dataclass(eq=False, slots=True)
class LeaseRecord:
    """A granted lease that has not ended."""

    lease: BlockLease
    client: Client
    request_id: str
    expires_at: float
    pending: list[int]
    """Items that were pending at the last check."""
    waiting: bool
    """Whether a settled lease must be reported."""


@dataclass(eq=False, slots=True)
class StoreRecord:
    """A granted store, until no process can write to its slots."""

    id: int
    client: Client
    request: RequestRecord | None
    blocks: list[Block]
    slots: list[int]
    expires_at: float
    is_completing: bool = False
    """Whether the client has completed it. `blocks` and `slots` are those not completed yet."""
    quarantine: set[int] | None = None
    """Connections that may still write after its end; None while it is running."""

    @property
    def names(self) -> list[Name]:
        return [block.name for block in self.blocks]

    @property
    def nbytes(self) -> int:
        return sum(block.part_bytes for block in self.blocks)

    @property
    def writers(self) -> set[int]:
        return self.client.connections if self.quarantine is None else self.quarantine


@dataclass(eq=False, slots=True)
class JobRecord:
    """A job that was requested and has not been reported."""

    command: StoreInTier | LoadFromTier
    slots: list[tuple[int | None, ...]]
    """Per block the slots of its parts when the job began."""
    names: list[Name]

    @property
    def is_load(self) -> bool:
        return isinstance(self.command, LoadFromTier)


class RoomBook:
    """What the lookups that wait for room were told."""

    def __init__(self) -> None:
        self.told: set[Waiter] = set()
        """Lookups with an offer of room."""
        self.heads: dict[object, Waiter | None] = {}
        """Per tenant share the lookup that had the turn after the last event."""
        self.passed: dict[object, Counter[bytes]] = {}
        """Per tenant share and waiting tenant the number of turns of others since its last turn."""
        self._tickets = 0

    def next_ticket(self) -> int:
        self._tickets += 1
        return self._tickets


class Ledger:
    """Open resources between the world and the core, in one run of a server."""

    def __init__(self, tiers: int) -> None:
        self.clients: list[Client] = []
        self.orphans: list[Client] = []
        """Processes without a session that still map the region."""
        self.leases: dict[int, LeaseRecord] = {}
        self.stores: dict[int, StoreRecord] = {}
        self.ended_stores: list[StoreRecord] = []
        self.ending: dict[int, RequestRecord] = {}
        """The requests of ended stores whose blocks the core may not have released yet."""
        """The last stores that ended, for clients that do not know it yet."""
        self.jobs: dict[int, JobRecord] = {}
        self.ended_jobs: list[JobRecord] = []
        self.requests = RequestBook()
        self.queries: dict[int, LookupInTier] = {}
        self.holds = HoldBook()
        self.hits = [0] * (tiers + 1)
        """Hits per tier; pending keys count when their outcome is known."""
        self.misses = 0
        self.waiting: list[LeaseRecord] = []
        """Leases, ended or not, with pending keys that are not counted yet."""
        self.stored: set[Name] = set()
        """Blocks that existed at some time in this run."""
        self.gone: dict[NamespaceId, set[Block]] = {}
        """Per namespace the blocks from before its last reset."""
        self.conversations = defaultdict[tuple[NamespaceId, str], set[bytes]](set)
        """Per conversation the keys that its requests have used."""
        self.pinned_at: dict[Block, tuple[int | None, ...]] = {}
        """Slots of the leased blocks when they were first seen."""

    def shown(self) -> list[Block]:
        """Returns the leased blocks, each once."""
        items = dict.fromkeys(chain.from_iterable(record.lease.items for record in self.leases.values()))
        items.pop(None, None)
        return list(items)  # type: ignore[arg-type]

    def in_flight(self) -> list[StoreRecord]:
        """Returns the stores that are running in the core."""
        return [record for record in self.stores.values() if record.quarantine is None]

    def open_stores(self) -> list[StoreRecord]:
        """Returns the stores in flight that no client has completed."""
        return [record for record in self.in_flight() if not record.is_completing]

    def abandon(self, record: StoreRecord) -> None:
        """Ends a store without its writer."""
        record.quarantine = set(record.client.connections)
        self._ended(record)

    def written(self, record: StoreRecord) -> None:
        """Records that the last writer of a store is done."""
        if record.quarantine is None:
            self._ended(record)
        self.stores.pop(record.id, None)

    def _ended(self, record: StoreRecord) -> None:
        if record.request is not None:
            self.ending[record.id] = record.request
        self.ended_stores = [*self.ended_stores[-5:], record]
        if not record.writers:
            self.stores.pop(record.id, None)

    def end_of_stores(self, abandoned: Collection[int]) -> None:
        """Ends stores for their requests, except those whose blocks the core has yet to release."""
        for store_id in self.ending.keys() - abandoned:
            self.ending.pop(store_id).stores -= 1

    def disconnected(self, connection: int) -> None:
        """A connection has ended, and no process writes through it."""
        for record in list(self.stores.values()):
            if record.quarantine is not None:
                record.quarantine.discard(connection)
                if not record.quarantine:
                    del self.stores[record.id]

    def client_closed(self, client: Client) -> None:
        """A session has ended, with all it held."""
        self.clients.remove(client)
        if client.connections:
            self.orphans.append(client)
        self.leases = {number: record for number, record in self.leases.items() if record.client is not client}
        for record in self.in_flight():
            if record.client is client:
                self.abandon(record)

    def request_finished(self, engine: str, request_id: str) -> None:
        """The leases of a request end with it."""
        ended = (engine, request_id)
        self.leases = {
            number: record
            for number, record in self.leases.items()
            if (record.client.engine, record.request_id) != ended
        }

    def expired(self, now: float) -> Counter[str]:
        """Ends expired leases and stores; returns their number."""
        late = [number for number, record in self.leases.items() if record.expires_at <= now]
        for number in late:
            del self.leases[number]
        silent = [record for record in self.open_stores() if record.expires_at <= now]
        for record in silent:
            self.abandon(record)
        over = self.holds.expire(now)
        return Counter({"leases expired": len(late), "stores expired": len(silent), "holds expired": over})

    def count(self, statuses: bytes, sources: bytes) -> None:
        """Counts the keys of a lookup."""
        self.misses += statuses.count(KeyStatus.MISS)
        for status, source in zip(statuses, sources, strict=False):
            self.hits[source] += status == KeyStatus.HIT

    def count_arrivals(self) -> None:
        """Counts pending keys that have arrived, failed, or are no longer awaited.

        The last count as hits.
        """
        for record in self.waiting:
            held = self.leases.get(record.lease.id) is record
            still = []
            for item in record.pending:
                block = record.lease.items[item]
                if held and block is None:
                    self.misses += 1
                elif held and block is not None and not block.ready:
                    still.append(item)
                else:
                    self.hits[record.lease.sources[item]] += 1
            record.pending = still
        self.waiting = [record for record in self.waiting if record.pending]

    def written_slots(self) -> list[int]:
        """Returns the slots that clients, also late ones, or loads may write to now."""
        slots = [slot for record in self.stores.values() for slot in record.slots]
        for job in self.jobs.values():
            if job.is_load:
                slots += [slot for parts in job.slots for slot in parts if slot is not None]
        return slots

    def job_ended(self, job: JobRecord) -> None:
        del self.jobs[job.command.job_id]
        self.ended_jobs = [*self.ended_jobs[-5:], job]

    def running(self, tier: int, *, loads: bool) -> Sequence[JobRecord]:
        return [job for job in self.jobs.values() if job.command.tier == tier and job.is_load == loads]
