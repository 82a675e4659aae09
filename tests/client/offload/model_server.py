"""Server and workers of the model engine: late, partial, failing or silent; bytes are right."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from model_engine import GARBAGE, ModelRequest, Pool, Script

from kvtier.client.offload import (
    BlockPosition,
    CacheGeometry,
    EngineRequest,
    LoadJob,
    LookupId,
    PrefixHit,
    SaveJob,
    search_hit,
)


@dataclass
class Faults:
    """Probability of each fault."""

    lookup_hangs: float = 0.03
    disconnected: float = 0.03
    load_fails: float = 0.15
    save_fails: float = 0.05
    report_lost: float = 0.01


CALM = Faults(0, 0, 0, 0, 0)


@dataclass
class Lease:
    keys: list[bytes]


@dataclass
class PendingLookup:
    request: ModelRequest
    start: int
    limit: int
    leases: list[int] = field(default_factory=list)
    answered: bool = False


class ModelServer:
    """Stored blocks by key and rank, and an `OffloadServer`. Unpinned blocks may be evicted."""

    def __init__(self, rng: random.Random, geometry: CacheGeometry, script: Script, ranks: int, capacity: int) -> None:
        self.rng, self.geometry, self.script, self.ranks, self.capacity = rng, geometry, script, ranks, capacity
        self.faults = Faults()
        self.blocks: OrderedDict[bytes, dict[int, list[int]]] = OrderedDict()
        self.leases: dict[int, Lease] = {}
        self.asked: dict[LookupId, PendingLookup] = {}
        self.ended: list[str] = []
        self.empties = 0
        self.gone: set[bytes] = set()
        """Keys evicted since the restart: a client that stored them still considers them stored."""
        self.life = 1
        self._lease_ids = 0

    # ---- OffloadServer

    def start_lookup(self, lookup: LookupId, request: EngineRequest, start: int, limit: int) -> bool:
        assert isinstance(request, ModelRequest)
        assert request.may_load
        assert not self.empties, "looked up while the server is emptied"
        assert 0 <= start < limit < request.known
        if self.rng.random() < self.faults.disconnected:
            return False
        assert lookup not in self.asked
        self.asked[lookup] = PendingLookup(request, start, limit)
        return True

    def drop_lookup(self, lookup: LookupId) -> None:
        for lease in self.asked.pop(lookup).leases:
            self.leases.pop(lease, None)

    def abandon_lookup(self, lookup: LookupId) -> None:
        assert not self.asked[lookup].answered
        self.drop_lookup(lookup)

    def end_request(self, request: EngineRequest) -> None:
        self.ended.append(request.request_id)

    def empty(self) -> None:
        assert not self.leases, "emptied while something is pinned"
        self.empties += 1

    # ---- server side

    def answer(self, lookup: LookupId) -> PrefixHit:
        """Searches the hit as a client does, with one lease per query."""
        asked = self.asked[lookup]
        asked.answered = True
        found = PrefixHit(asked.start)
        queries = search_hit(self.geometry, asked.start, asked.limit)
        answer: set[BlockPosition] | None = None
        try:
            while True:
                query = queries.send(answer)  # type: ignore[arg-type]  # None the first time
                answer = set()
                self._lease_ids += 1
                lease = self.leases[self._lease_ids] = Lease([])
                asked.leases.append(self._lease_ids)
                for place in query.blocks:
                    key = asked.request.key(place.group, place.position)
                    hit = len(self.blocks.get(key, ())) == self.ranks
                    if not hit and query.prefix:
                        break
                    if hit:
                        answer.add(place)
                        at = (self._lease_ids, len(lease.keys))
                        found.items.setdefault(place.group.index, {})[place.position] = at
                        lease.keys.append(key)
        except StopIteration as stop:
            found.hit_tokens = stop.value
        return found

    def read(self, lease_id: int, index: int, rank: int) -> list[int] | None:
        lease = self.leases.get(lease_id)
        part = self.blocks.get(lease.keys[index], {}).get(rank) if lease is not None else None
        return None if part is None else list(part)

    def store(self, key: bytes, rank: int, labels: list[int]) -> bool:
        assert labels[: len(self.script.meaning[key])] == self.script.meaning[key], "stored wrong bytes"
        parts = self.blocks.get(key)
        if parts is None:
            if len(self.blocks) >= self.capacity and not self.evict():
                return False
            parts = self.blocks[key] = {}
        parts[rank] = labels
        return True

    def evict(self) -> bool:
        pinned = {key for lease in self.leases.values() for key in lease.keys}
        victim = next((key for key in self.blocks if key not in pinned), None)
        if victim is not None:
            del self.blocks[victim]
            self.gone.add(victim)
        return victim is not None

    def forget_all(self) -> None:
        self.blocks.clear()

    def crash(self) -> None:
        """Restarts at once, without any block."""
        self.blocks.clear()
        self.leases.clear()
        self.gone.clear()
        self.life += 1

    def may_have(self, key: bytes) -> bool:
        """Whether a client may consider a block stored since the restart."""
        return key in self.gone or len(self.blocks.get(key, ())) == self.ranks


@dataclass
class Task:
    job: LoadJob | SaveJob
    at: float


class ModelWorker:
    """Worker of one rank: runs jobs late, and reports each once unless the report is lost."""

    def __init__(self, rng: random.Random, rank: int, pool: Pool, server: ModelServer, abandon_s: float) -> None:
        self.rng, self.rank, self.pool, self.server, self.abandon_s = rng, rank, pool, server, abandon_s
        self.tasks: list[Task] = []
        self.loaded: list[tuple[str, bool]] = []
        self.saved: list[tuple[int, set[int]]] = []
        self.lost: set[int] = set()

    def take(self, jobs: Iterable[LoadJob | SaveJob], now: float) -> None:
        self.tasks += [Task(job, now) for job in jobs]

    def run(self, now: float) -> None:
        if not self.tasks:
            return
        task = self.tasks.pop(self.rng.randrange(len(self.tasks)))
        if isinstance(task.job, LoadJob):
            self.loaded.append((task.job.request_id, not self._load(task.job)))
        elif task.job.job_id not in self.lost:
            late = now - task.at >= self.abandon_s
            not_stored = set(range(len(task.job.keys))) if late else self._save(task.job)
            self.saved.append((task.job.job_id, not_stored))

    def _load(self, job: LoadJob) -> bool:
        fails = not job.reads or self.rng.random() < self.server.faults.load_fails
        for read in job.reads:
            for index, block in zip(read.indices, read.block_ids, strict=True):
                assert self.pool.refs[block] > 0, "loaded into a block that is free"
                part = self.server.read(read.lease_id, index, self.rank)
                content = self.pool.content[self.rank][block]
                if part is None or (fails and self.rng.random() < 0.5):
                    content[:] = [GARBAGE] * len(content)
                    fails = True
                else:
                    content[:] = part
        return not fails

    def _save(self, job: SaveJob) -> set[int]:
        faults = self.server.faults
        if self.rng.random() < faults.save_fails:
            return set(range(len(job.keys)))
        not_stored = set()
        for index, (key, block) in enumerate(zip(job.keys, job.block_ids, strict=True)):
            assert self.pool.refs[block] > 0, "saved from a block that is free"
            labels = list(self.pool.content[self.rank][block])
            if self.rng.random() < faults.save_fails or not self.server.store(key, self.rank, labels):
                not_stored.add(index)
        return not_stored
