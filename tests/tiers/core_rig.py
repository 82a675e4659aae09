"""Rig for tests of the decision core: a core, a session, and shorthands for keys and statuses."""

from harness.operations import run_to_end
from simulation import EXTENT, ModelTier

from kvtier.tiers.core.block import Block
from kvtier.tiers.core.call_specs import LookupSpec, StoreSpec
from kvtier.tiers.core.commands import LoadFromTier, StoreInTier
from kvtier.tiers.core.manager import TierManager
from kvtier.tiers.core.settings import TierSettings
from kvtier.tiers.secondary_tier import NamespaceId, Outcome
from kvtier.tiers.types import EngineSession, KeyStatus, NamespaceSpec, StoreStatus

SPEC = NamespaceSpec(NamespaceId(b"n" * 32), world_size=1, part_bytes=(4096, 16384))


HIT, MISS, PENDING = bytes([KeyStatus.HIT]), bytes([KeyStatus.MISS]), bytes([KeyStatus.HIT_PENDING])


GRANTED, PRESENT, NO_ROOM = (bytes([s]) for s in (StoreStatus.GRANTED, StoreStatus.PRESENT, StoreStatus.NO_ROOM))


def keys(*numbers: int, group: int = 0) -> list[bytes]:
    """Returns keys that sort like their numbers."""
    return [b"%03d" % number + group.to_bytes(4, "big") for number in numbers]


def ready_blocks(core: TierManager) -> list[Block]:
    """Returns the ready blocks of the CPU tier, most recently used first."""
    return sorted((block for block in core._cpu_tier._index if block.ready), key=lambda block: -block.last_use)


class Rig:
    """A core, one session with the region mapped, and shorthands."""

    def __init__(
        self,
        *tiers: ModelTier,
        extents: int = 1,
        queue: int | None = None,
        eviction: dict[str, str] | None = None,
        extent_bytes: int = EXTENT,
        settings: TierSettings | None = None,
    ) -> None:
        settings = settings or TierSettings(eviction=eviction or {})
        region = extents * extent_bytes
        self.core = TierManager(region, extent_bytes, tiers, max_queued_bytes=queue, settings=settings)
        self.core.add_memory(0, region)
        self.session = self.open("engine")

    def open(self, engine: str, spec: NamespaceSpec = SPEC, rank: int | None = None) -> EngineSession:
        session = self.core.open_session(engine.encode(), engine, rank, spec)
        self.core.writer_attached(session.id, hash(engine) & 0xFFFF)
        return session

    def store(self, names: list[bytes]) -> bytes:
        answer = run_to_end(self.core.prepare_store(self.session, names, StoreSpec(lease_seconds=60), now=0))
        if answer.store_id is not None:
            run_to_end(self.core.complete_store(self.session, answer.store_id))
        return answer.statuses

    def look_up(self, names: list[bytes], *, prefix: bool = True) -> bytes:
        """Returns the statuses; the lease is released at once."""
        lease = run_to_end(
            self.core.lookup(self.session, names, LookupSpec(prefix=prefix, lease_seconds=60), now=0)
        ).lease
        if lease is None:
            return MISS * len(names)
        statuses = lease.statuses()
        self.core.release(self.session, lease.id)
        return statuses

    def store_in_all_tiers(self, names: list[bytes]) -> None:
        self.store(names)
        self.finish_jobs()

    def finish_jobs(self, outcome: Outcome = Outcome.DONE) -> list[object]:
        commands = self.core.take_commands()
        for command in commands:
            if isinstance(command, StoreInTier | LoadFromTier):
                self.core.job_finished(command.job_id, [outcome] * len(command.blocks))
        return list(commands)
