"""A seeded world around the core: clients that crash, tiers that fail, clocks that tick; and what must hold meanwhile.

Bytes are modelled as labels: a slot holds the label of whoever wrote to it last. A client that fell but keeps the region
mapped goes on scribbling over the slots that it was once granted, as a real one could.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import ClassVar

from kvtier.tiers.answers import Session, StoreStatus
from kvtier.tiers.base import (
    BlockBytes,
    Entry,
    NamespaceId,
    Outcome,
    RequestInfo,
    SecondaryTier,
    Vote,
)
from kvtier.tiers.blocks import Block, NamespaceSpec
from kvtier.tiers.commands import LeaseSettled, LoadFromTier, RemoveFromTier, StoreInTier
from kvtier.tiers.errors import CoreError
from kvtier.tiers.keeping import Keeping
from kvtier.tiers.leases import KeyStatus
from kvtier.tiers.manager import CPU_TIER, TierManager
from kvtier.tiers.policies import POLICIES
from kvtier.tiers.rules import vote

EXTENT = 64 << 10
REQUESTS = ("", "r1", "r2", "r3")
SPECS = (
    NamespaceSpec(NamespaceId(b"A" * 16), world_size=1, part_bytes=(4096, 12288)),
    NamespaceSpec(NamespaceId(b"B" * 16), world_size=2, part_bytes=(8192,)),
)


class ModelTier(SecondaryTier):
    """Keeps labels; which of its jobs fail is the world's business."""

    type: ClassVar[str] = "model"
    durable: ClassVar[bool] = True

    def __init__(self, name: str, capacity_bytes: int) -> None:
        super().__init__(name, capacity_bytes)
        self.blocks: dict[tuple[NamespaceId, bytes], tuple[int, tuple[str, ...]]] = {}
        self.begun: list[str] = []
        self.finished: list[str] = []

    def on_new_request(self, request: RequestInfo) -> Vote:
        self.begun.append(request.request_id)
        return vote(self.rules, request)

    def on_request_finished(self, request_id: str) -> None:
        self.finished.append(request_id)

    def entries(self) -> Iterator[Entry]:
        for (namespace, key), (nbytes, _) in self.blocks.items():
            yield Entry(namespace, key, nbytes)

    def store(self, blocks: Sequence[BlockBytes]) -> list[Outcome]:
        raise AssertionError("the world moves labels itself")

    load = store

    def remove(self, keys: Sequence[tuple[NamespaceId, bytes]]) -> None:
        for name in keys:
            self.blocks.pop(name, None)

    def close(self) -> None:
        pass


def label(namespace: NamespaceId, key: bytes, rank: int) -> str:
    """Returns what a slot with this part holds."""
    return f"{namespace[:1].decode()}:{key.hex()}:{rank}"


class World:
    """Clients, tiers and time around one core; every choice comes from the seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.slots: dict[int, str] = {}
        self.tiers = [ModelTier("near", 40 * 4096), ModelTier("far", 80 * 4096)][: self.rng.randint(0, 2)]
        self.start_core()

    def start_core(self) -> None:
        """Starts a server's life: memory is gone, what the tiers hold stays."""
        region = 8 * EXTENT
        for tier in self.tiers:
            tier.begun.clear()
            tier.finished.clear()
        names = [CPU_TIER, *(tier.name for tier in self.tiers)]
        eviction = {name: self.rng.choice(list(POLICIES)) for name in names if self.rng.random() < 0.8}
        self.core = TierManager(
            region, EXTENT, self.tiers, max_queued_bytes=region // 4, keeping=Keeping(eviction=eviction)
        )
        self.core.add_memory(0, region)
        self.slots.clear()
        self.sessions: list[Session] = []
        self.ghosts: dict[int, set[int]] = {}
        """Slots that each live connection was granted and has not completed."""
        self.leases: list[tuple[Session, int]] = []
        self.stores: list[tuple[Session, int, list[tuple[bytes, int]]]] = []
        self.jobs: list[StoreInTier | LoadFromTier | RemoveFromTier] = []
        self.connections = 0
        self.take_commands()

    def step(self) -> None:
        """Does one random thing."""
        actions = {
            self.open_session: 2,
            self.close_session: 1,
            self.hang_up: 1,
            self.prepare_store: 8,
            self.complete_store: 8,
            self.look_up: 10,
            self.read_and_release: 8,
            self.run_job: 10,
            self.scribble: 3,
            self.tick: 1,
            self.flush: 1,
            self.begin_request: 4,
            self.finish_request: 3,
            self.crash: 0.05,
        }
        self.rng.choices(list(actions), list(actions.values()))[0]()
        self.take_commands()

    def open_session(self) -> None:
        spec = self.rng.choice(SPECS)
        rank = self.rng.randrange(spec.world_size) if self.rng.random() < 0.8 else None
        session = self.core.open_session(self.rng.randbytes(16), self.rng.choice("xyz"), rank, spec)
        self.sessions.append(session)
        if self.rng.random() < 0.7:
            self.connections += 1
            self.core.writer_attached(session.id, self.connections)
            self.ghosts[self.connections] = set()

    def close_session(self) -> None:
        if not self.sessions:
            return
        session = self.sessions.pop(self.rng.randrange(len(self.sessions)))
        self.core.close_session(session.id)
        self.leases = [entry for entry in self.leases if entry[0] is not session]

    def hang_up(self) -> None:
        """A connection ends: its process is gone, or has stopped copying."""
        if not self.ghosts:
            return
        connection = self.rng.choice(list(self.ghosts))
        owner = next((s for s in self.sessions if connection in s.writers), None)
        del self.ghosts[connection]
        self.core.writer_gone(owner.id if owner else b"", connection)

    def prepare_store(self) -> None:
        session = self.pick_session()
        if session is None:
            return
        keys = self.some_keys(session)
        try:
            answer = self.core.prepare_store(
                session, keys, request_id=self.rng.choice(REQUESTS), expires_at=self.now + self.rng.choice((3, 30))
            )
        except CoreError:
            assert session.rank is None
            return
        granted = [key for key, status in zip(keys, answer.statuses, strict=True) if status == StoreStatus.GRANTED]
        assert len(granted) == len(answer.slots) == len(set(answer.slots))
        assert (answer.store_id is None) == (not granted)
        if answer.store_id is None:
            return
        for slots in self.ghosts.values():
            assert not slots & set(answer.slots), "granted a slot that somebody may still write to"
        for connection in session.writers & self.ghosts.keys():
            self.ghosts[connection] |= set(answer.slots)
        self.stores.append((session, answer.store_id, list(zip(granted, answer.slots, strict=True))))

    def complete_store(self) -> None:
        if not self.stores:
            return
        session, store_id, items = self.stores.pop(self.rng.randrange(len(self.stores)))
        alive = session in self.sessions
        failed = {n for n in range(len(items)) if self.rng.random() < 0.1}
        try:
            store = self.core.store(session, store_id) if alive else None
        except CoreError:
            store = None
        if store is not None:
            for number, (key, slot) in enumerate(items):
                self.slots[slot] = "torn" if number in failed else label(session.namespace.id, key, session.own_rank())
            self.forget_ghosts(session, items)
            self.core.complete_store(session, store_id, failed)
        elif alive:
            self.forget_ghosts(session, items)
            self.core.writer_done(session, store_id)

    def forget_ghosts(self, session: Session, items: list[tuple[bytes, int]]) -> None:
        for connection in session.writers & self.ghosts.keys():
            self.ghosts[connection] -= {slot for _, slot in items}

    def look_up(self) -> None:
        session = self.pick_session()
        if session is None:
            return
        keys = self.some_keys(session)
        lease = self.core.lookup(
            session,
            keys,
            prefix=self.rng.random() < 0.5,
            request_id=self.rng.choice(REQUESTS),
            expires_at=self.now + self.rng.choice((3, 30)),
        ).lease
        if lease is not None:
            assert len(lease.statuses()) == len(keys)
            self.leases.append((session, lease.id))

    def read_and_release(self) -> None:
        """A reader copies what its lease says is a hit; it must be what was stored under that key."""
        if not self.leases:
            return
        session, lease_id = self.leases.pop(self.rng.randrange(len(self.leases)))
        try:
            lease = self.core.lease(session, lease_id)
        except CoreError:
            return
        for item, status in enumerate(lease.statuses()):
            block = lease.items[item] if item < len(lease.items) else None
            if status == KeyStatus.HIT:
                assert block is not None
                for rank in range(session.namespace.world_size):
                    (slot,) = lease.slots([item], rank)
                    assert self.slots[slot] == label(session.namespace.id, block.key, rank), "served wrong bytes"
        if self.rng.random() < 0.8:
            self.core.release(session, lease.id)
        else:
            self.core.finish_request(session, lease.owner.request_id)

    def run_job(self) -> None:
        """A worker finishes something. Stores and removals of a tier end in order, loads in any."""
        if not self.jobs:
            return
        heads: dict[object, int] = {}
        for number, job in enumerate(self.jobs):
            lane = ("load", number) if isinstance(job, LoadFromTier) else ("write", job.tier)
            heads.setdefault(lane, number)
        job = self.jobs.pop(self.rng.choice(list(heads.values())))
        tier = self.tiers[job.tier - 1]
        if isinstance(job, RemoveFromTier):
            tier.remove(job.keys)
            return
        outcomes = [self.move(tier, job, block) for block in job.blocks]
        if self.rng.random() < 0.05:
            outcomes = outcomes[: len(outcomes) // 2]
        self.core.job_finished(job.job_id, outcomes)

    def move(self, tier: ModelTier, job: StoreInTier | LoadFromTier, block: Block) -> Outcome:
        name = (block.namespace, block.key)
        slots = [slot for slot in block.slots if slot is not None]
        assert len(slots) == len(block.slots), "a job on a block without all its slots"
        if self.rng.random() < 0.1:
            return self.rng.choice((Outcome.FAILED, Outcome.NO_SPACE))
        if isinstance(job, StoreInTier):
            tier.blocks[name] = (block.nbytes, tuple(self.slots[slot] for slot in slots))
            return Outcome.DONE
        if name not in tier.blocks:
            return Outcome.MISSING
        if self.rng.random() < 0.1:
            del tier.blocks[name]
            return Outcome.CORRUPT
        for slot, text in zip(slots, tier.blocks[name][1], strict=True):
            self.slots[slot] = text
        return Outcome.DONE

    def scribble(self) -> None:
        """Somebody who was granted slots and has not completed writes to them."""
        for slots in self.ghosts.values():
            for slot in slots:
                if self.rng.random() < 0.3:
                    self.slots[slot] = "scribble"

    def begin_request(self) -> None:
        session = self.pick_session()
        if session is not None:
            params = {"do_remote_decode": self.rng.random() < 0.5}
            request_id = self.rng.choice(REQUESTS)
            self.core.begin_request(session, RequestInfo(request_id, session.namespace.id, kv_transfer_params=params))

    def finish_request(self) -> None:
        session = self.pick_session()
        if session is not None:
            self.core.finish_request(session, self.rng.choice(REQUESTS))

    def tick(self) -> None:
        self.now += self.rng.choice((0.5, 2, 40))
        self.core.tick(self.now)

    def flush(self) -> None:
        session = self.pick_session()
        if session is not None:
            self.core.durability(session, self.some_keys(session))

    def crash(self) -> None:
        """The server is killed; writes that were queued are lost, those that were done are not."""
        self.start_core()

    def pick_session(self) -> Session | None:
        return self.rng.choice(self.sessions) if self.sessions else None

    def some_keys(self, session: Session) -> list[bytes]:
        """A run of a chain, as a prompt's blocks are; sometimes with a repetition."""
        group = self.rng.randrange(len(session.namespace.part_bytes))
        chain, start = self.rng.randrange(3), self.rng.choice((0, 0, self.rng.randrange(20)))
        keys = [b"%d.%d" % (chain, n) + group.to_bytes(4, "big") for n in range(start, start + self.rng.randint(0, 12))]
        return keys + keys[:1] if self.rng.random() < 0.05 else keys

    def take_commands(self) -> None:
        for command in self.core.take_commands():
            if not isinstance(command, LeaseSettled):
                self.jobs.append(command)

    def settle(self) -> None:
        """Everybody leaves and all work ends."""
        while self.sessions:
            self.close_session()
        while self.ghosts:
            self.hang_up()
        self.take_commands()
        while self.jobs:
            self.run_job()
            self.take_commands()

    def check(self) -> None:
        """What must hold after every step."""
        core = self.core
        blocks = [block for held in core._primary._blocks.values() for block in held.values()]
        slots = [slot for block in blocks for slot in block.slots if slot is not None]
        quarantined = [slot for entry in core._stores.table._quarantine.values() for slot in entry.offsets]
        assert len(slots) + len(quarantined) == len(set(slots + quarantined)), "a slot with two owners"
        in_use = {slot for extent in core._primary.memory._extents.values() for slot in extent.in_use}
        assert in_use == set(slots + quarantined), "a slot that leaked, or is used though free"
        pins = Counter[Block]()
        for lease in core._lookups.leases._leases.values():
            pins.update(block for block in lease.items if block is not None)
        for store in core._stores.table._stores.values():
            pins.update(store.blocks)
        for job in core._flow._jobs.values():
            pins.update(job.blocks)
        for lane in core._flow.lanes:
            pins.update(lane.queue)
        for line in core._primary.lines.all():
            mine = Counter(b for b in blocks if b.line is line and not b.retained)
            assert Counter(line.policy.victims()) == mine, "a block out of line"
        for block in blocks:
            assert block.pins == pins.pop(block, 0), f"{block!r}: pins do not add up"
            assert block.pins or any(slot is not None for slot in block.slots), f"{block!r}: an empty block stays"
            if block.ready:
                for rank, slot in enumerate(block.slots):
                    assert slot is not None
                    assert self.slots[slot] == label(block.namespace, block.key, rank), f"{block!r}: wrong bytes"
        assert not pins, f"evicted though pinned: {pins}"
        for lane in core._flow.lanes:
            entries = Counter(entry for held in lane.catalog._entries.values() for entry in held.values())
            lines = (line.policy.victims() for line in lane.catalog.lines.all())
            queued = Counter(chain.from_iterable(lines))
            assert queued == Counter(entry for entry in entries if not entry.retained), "an entry out of line"
            assert 0 <= lane.catalog.used_bytes <= lane.catalog.capacity_bytes, "a tier beyond its capacity"
            assert lane.queued_bytes >= 0
        stats = core.stats()
        assert sum(tier.hits for tier in stats.tiers) + stats.lookup_misses == stats.lookup_keys

    def check_settled(self) -> None:
        """What must hold once everybody has left."""
        self.check()
        stats = self.core.stats()
        assert (stats.leases, stats.stores, stats.quarantined_bytes) == (0, 0, 0), stats
        assert not self.core._flow._jobs
        assert not self.core._lookups.leases._waiting
        assert (len(self.core._requests), self.core._requests._waiting) == (0, {})
        for lane, tier in zip(self.core._flow.lanes, self.tiers, strict=True):
            assert (lane.queued_bytes, len(lane.queue), lane.storing, lane.doomed) == (0, 0, False, [])
            held = {(e.namespace, e.key) for d in lane.catalog._entries.values() for e in d.values()}
            assert lane.owed == {}
            assert Counter(tier.begun) == Counter(tier.finished), "a tier was not told once of each request's end"
            assert tier.blocks.keys() <= held, "a tier holds what nobody accounts for"


def run(seed: int, steps: int) -> None:
    """Lives one life from a seed; raises AssertionError where something did not hold."""
    world = World(seed)
    for _ in range(steps):
        world.step()
        world.check()
    world.settle()
    world.check_settled()
