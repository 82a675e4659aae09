"""Retiring extents: few pinned blocks do not keep all extents from the blocks of another size."""

from __future__ import annotations

import pytest
from core_rig import HIT, MISS, NO_ROOM, keys
from harness.operations import Steps, run_to_end
from simulation import EXTENT, ModelTier

from kvtier.tiers.base import NamespaceId, Outcome
from kvtier.tiers.core import overdue_pins
from kvtier.tiers.core.block import Block
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import ContinueWork, LeaseSettled, LoadFromTier, StoreInTier
from kvtier.tiers.core.holds import Hold
from kvtier.tiers.core.leases import BlockLease
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.retiring import GRACE_SECONDS
from kvtier.tiers.core.settings import TierSettings
from kvtier.tiers.errors import LeaseNotFound, StoreNotFound
from kvtier.tiers.eviction.quotas import Tenant
from kvtier.tiers.types import EngineSession, HandoffDirection, KeyStatus, MissReason, NamespaceSpec

EXTENTS = 8
SMALL, LARGE = 4096, 16384
SLOTS = EXTENT // SMALL
ALICE, BOB = b"A" * 16, b"B" * 16
NO_TIME = 10_000.0


class Server:
    """A core of eight extents. Alice stores blocks of 4 KiB, Bob those of 16 KiB or other sizes."""

    def __init__(self, *tenants: Tenant, tiers: tuple[ModelTier, ...] = (), extents: int = EXTENTS) -> None:
        self.now = 0.0
        size = extents * EXTENT
        self.core = TierManager(size, EXTENT, tiers, settings=TierSettings(tenants=tenants, estimates=False))
        self.core.add_memory(0, size)
        self.alice, self.bob = self.open(ALICE, SMALL), self.open(BOB, LARGE)

    def open(self, tenant: bytes, part_bytes: int, name: str = "e") -> EngineSession:
        namespace = NamespaceId(tenant + part_bytes.to_bytes(16, "big"))
        spec = NamespaceSpec(namespace, world_size=1, part_bytes=(part_bytes,))
        return self.core.open_session(tenant + name.encode() + namespace, name, None, spec)

    def store(self, session: EngineSession, *numbers: int, retain: float = 0.0) -> bytes:
        spec = StoreSpec(lease_seconds=NO_TIME, retain_seconds=retain)
        answer = run_to_end(self.core.prepare_store(session, keys(*numbers), spec, now=self.now))
        if answer.store_id is not None:
            run_to_end(self.core.complete_store(session, answer.store_id))
        self.work()
        return answer.statuses

    def fill(self) -> list[list[int]]:
        """Stores a block of Alice in each slot; returns the numbers in each extent."""
        for start in range(0, EXTENTS * SLOTS, SLOTS):
            assert NO_ROOM not in self.store(self.alice, *range(start, start + SLOTS))
        extents: dict[int, list[int]] = {}
        for number, block in enumerate(map(self.block, range(EXTENTS * SLOTS))):
            assert block is not None
            assert block.slots[0] is not None
            extents.setdefault(block.slots[0] // EXTENT, []).append(number)
        return list(extents.values())

    def block(self, number: int) -> Block | None:
        return self.core._cpu_tier.blocks_of(self.alice.namespace.id).get(keys(number)[0])

    def lease(self, session: EngineSession, *numbers: int) -> BlockLease | None:
        spec = LookupSpec(lease_seconds=NO_TIME, prefix=False)
        return run_to_end(self.core.lookup(session, keys(*numbers), spec, now=self.now)).lease

    def publish(self, session: EngineSession, *numbers: int) -> Hold:
        direction = HandoffDirection.PREFILL_TO_DECODE
        hold = run_to_end(
            self.core.publish(
                session,
                "r",
                keys(*numbers),
                range(len(numbers)),
                num_tokens=16,
                direction=direction,
                duration=NO_TIME,
                now=self.now,
            )
        )
        assert isinstance(hold, Hold)
        return hold

    def work(self) -> list[object]:
        """Runs all slices of work; returns the commands."""
        commands: list[object] = []
        while new := self.core.take_commands():
            commands += new
            for command in new:
                if isinstance(command, ContinueWork):
                    self.core.work()
        return commands

    def wait(self, seconds: float) -> list[object]:
        """Advances the time by seconds, and runs what is due."""
        commands = []
        for _ in range(int(seconds)):
            self.now += 1
            self.core.tick(self.now)
            commands += self.work()
        return commands

    def retiring(self) -> list[int]:
        memory = self.core._cpu_tier.memory
        return [extent.offset for extent in memory.extents_after(None) if extent.next_class]

    def insist(self, *numbers: int, seconds: int = 0) -> bytes:
        """Bob stores blocks, and tries again each second. Returns the last statuses."""
        statuses = self.store(self.bob, *numbers)
        for _ in range(seconds):
            if NO_ROOM in statuses:
                self.wait(1)
                statuses = self.store(self.bob, *numbers)
        return statuses


def pinned(extents: list[list[int]]) -> list[int]:
    """Returns a number of each extent."""
    return [numbers[-1] for numbers in extents]


@pytest.mark.parametrize("quota", [0, EXTENT], ids=["without quotas", "with quotas"])
@pytest.mark.parametrize("how", ["leases", "renewed leases", "new leases", "holds", "open stores"])
def test_a_pinned_block_per_extent_keeps_no_tenant_out(how: str, quota: int) -> None:
    """After the time for pins, another size finds room, however the pins are made."""
    server = Server(*([Tenant("bob", BOB, {"cpu": quota})] if quota else []))
    numbers = pinned(server.fill())
    session, core = server.alice, server.core
    if how == "open stores":
        core.act_on_keys  # noqa: B018 - see `_open_stores`
        stores = _open_stores(server, numbers)
    lease = server.lease(session, *numbers) if "lease" in how else None
    hold = server.publish(session, numbers[0], *numbers[1:2]) if how == "holds" else None
    if hold is not None:
        server.lease(session, *numbers[2:])
    assert server.store(server.bob, 1) == NO_ROOM
    for _ in range(int(GRACE_SECONDS) + 2):
        server.wait(1)
        if how == "renewed leases" and lease is not None and core._lookups.leases.is_open(lease):
            core.renew(session, lease.id, server.now + NO_TIME)
        if how == "new leases":
            server.lease(session, *numbers)
        if hold is not None:
            core.renew_hold(hold.name, server.now)
        if how == "open stores":
            for store_id in stores:
                _renew(server, store_id)
        statuses = server.store(server.bob, 1)
    assert NO_ROOM not in statuses
    assert server.lease(server.bob, 1) is not None


def _open_stores(server: Server, numbers: list[int]) -> list[int]:
    """Replaces a block of each extent by one of an open store."""
    opened = []
    for number in numbers:
        block = server.block(number)
        assert block is not None
        server.core._cpu_tier.evict([block])
        spec = StoreSpec(lease_seconds=NO_TIME)
        answer = run_to_end(server.core.prepare_store(server.alice, keys(500 + number), spec, now=0))
        assert answer.store_id is not None
        opened.append(answer.store_id)
    return opened


def _renew(server: Server, store_id: int) -> None:
    try:
        server.core.renew_store(server.alice, store_id, server.now + NO_TIME)  # type: ignore[arg-type]
    except StoreNotFound:
        pass
